"""Attention sinks: received attention over steps, the rules that call a column a sink, and the result."""

from dlm_lens.sinks.detectors import AboveMean, AboveStd, Detector, Share, TopK
from dlm_lens.sinks.finding import find_sinks
from dlm_lens.sinks.patterns import received_from_pattern
from dlm_lens.sinks.received import Level, Received, Scale
from dlm_lens.sinks.replay import received_over_steps
from dlm_lens.sinks.result import Sinks

__all__ = [
    "AboveMean",
    "AboveStd",
    "Detector",
    "Level",
    "Received",
    "Scale",
    "Share",
    "Sinks",
    "TopK",
    "find_sinks",
    "received_from_pattern",
    "received_over_steps",
]
