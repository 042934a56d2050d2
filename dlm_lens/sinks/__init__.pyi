from .classes import query_split as query_split
from .comparing import compare_detectors as compare_detectors
from .comparing import eps_sweep as eps_sweep
from .comparing import sink_rate as sink_rate
from .detectors import AboveMean as AboveMean
from .detectors import AboveStd as AboveStd
from .detectors import MeanAttention as MeanAttention
from .detectors import Share as Share
from .detectors import SoftSigmoid as SoftSigmoid
from .detectors import TopK as TopK
from .finding import find_sinks as find_sinks
from .following import trajectories as trajectories
from .frontiers import frontier_alignment as frontier_alignment
from .hidden import AboveMedian as AboveMedian
from .hidden import KeyStatistic as KeyStatistic
from .hidden import LowKeyNorm as LowKeyNorm
from .hidden_replay import key_statistic_over_steps as key_statistic_over_steps
from .lifetimes import Lives as Lives
from .paths import Trajectories as Trajectories
from .patterns import received_from_pattern as received_from_pattern
from .position_probe import PositionOrToken as PositionOrToken
from .position_probe import position_or_token as position_or_token
from .profile import SinkProfile as SinkProfile
from .profile import sink_profile as sink_profile
from .received import Level as Level
from .received import Received as Received
from .received import Scale as Scale
from .recorded import key_statistic_of as key_statistic_of
from .recorded import received_of as received_of
from .replay import received_over_steps as received_over_steps
from .result import Sinks as Sinks
from .rules import Detector as Detector
from .rules import Hysteretic as Hysteretic
from .sequences import consistency as consistency
from .token_classes import place_enrichment as place_enrichment
from .token_classes import token_enrichment as token_enrichment

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
