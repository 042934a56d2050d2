from .models import tiny as tiny
