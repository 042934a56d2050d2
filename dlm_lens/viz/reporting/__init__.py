"""The report: one HTML file that shows a recording step by step, without a network."""

from dlm_lens.viz.reporting.page import report

__all__ = ["report"]
