"""Attention sinks: received attention, the rules that call a column a sink, and the paths of sinks over steps."""

from dlm_lens.sinks.classes import query_split
from dlm_lens.sinks.comparing import compare_detectors, eps_sweep, sink_rate
from dlm_lens.sinks.detectors import (
    AboveMean,
    AboveStd,
    MeanAttention,
    Share,
    SoftSigmoid,
    TopK,
)
from dlm_lens.sinks.finding import find_sinks
from dlm_lens.sinks.following import trajectories
from dlm_lens.sinks.frontiers import frontier_alignment
from dlm_lens.sinks.hidden import AboveMedian, KeyStatistic, LowKeyNorm
from dlm_lens.sinks.hidden_replay import key_statistic_over_steps
from dlm_lens.sinks.lifetimes import Lives
from dlm_lens.sinks.paths import Trajectories
from dlm_lens.sinks.patterns import received_from_pattern
from dlm_lens.sinks.position_probe import PositionOrToken, position_or_token
from dlm_lens.sinks.profile import SinkProfile, sink_profile
from dlm_lens.sinks.received import Level, Received, Scale
from dlm_lens.sinks.recorded import key_statistic_of, received_of
from dlm_lens.sinks.replay import received_over_steps
from dlm_lens.sinks.result import Sinks
from dlm_lens.sinks.rules import Detector, Hysteretic
from dlm_lens.sinks.sequences import consistency
from dlm_lens.sinks.token_classes import place_enrichment, token_enrichment

__all__ = [
    "AboveMean",
    "AboveMedian",
    "AboveStd",
    "Detector",
    "Hysteretic",
    "KeyStatistic",
    "Level",
    "Lives",
    "LowKeyNorm",
    "MeanAttention",
    "PositionOrToken",
    "Received",
    "Scale",
    "Share",
    "SinkProfile",
    "Sinks",
    "SoftSigmoid",
    "TopK",
    "Trajectories",
    "compare_detectors",
    "consistency",
    "eps_sweep",
    "find_sinks",
    "frontier_alignment",
    "key_statistic_of",
    "key_statistic_over_steps",
    "place_enrichment",
    "position_or_token",
    "query_split",
    "received_from_pattern",
    "received_of",
    "received_over_steps",
    "sink_profile",
    "sink_rate",
    "token_enrichment",
    "trajectories",
]
