"""The explorer: a notebook widget that shows a run step by step, and repeats it with keys or heads hidden."""

from dlm_lens.viz.exploring.explore import explore

__all__ = ["explore"]
