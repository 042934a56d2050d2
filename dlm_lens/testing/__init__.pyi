from .models import tiny as tiny

__all__ = ["tiny"]
