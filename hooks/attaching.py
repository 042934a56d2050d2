"""What of the attention room users of hooks need: attaching a hook to a model, what a hook is told, `sink(i)`."""

from dlm_lens.attention import PointContext, attach_hooks, sink

__all__ = ["PointContext", "attach_hooks", "sink"]
