"""What of the attention room users of hooks need: attaching a hook to a model, what a hook is told, `sink(i)`."""

from dlm_lens.attention import PointContext, attached, sink

__all__ = ["PointContext", "attached", "sink"]
