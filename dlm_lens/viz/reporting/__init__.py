"""The report: one HTML file that shows a recording step by step, without a network."""

from dlm_lens.viz.reporting.writing import report

__all__ = ["report"]
