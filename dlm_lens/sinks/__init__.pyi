from .analysis.consistency import sink_consistency as sink_consistency
from .analysis.depth_profile import SinkProfile as SinkProfile
from .analysis.depth_profile import sink_profile as sink_profile
from .analysis.detector_comparison import compare_detectors as compare_detectors
from .analysis.detector_comparison import eps_sweep as eps_sweep
from .analysis.detector_comparison import sink_rate as sink_rate
from .analysis.enrichment import position_enrichment as position_enrichment
from .analysis.enrichment import token_enrichment as token_enrichment
from .analysis.frontiers import frontier_alignment as frontier_alignment
from .analysis.position_probe import PositionOrToken as PositionOrToken
from .analysis.position_probe import position_or_token as position_or_token
from .analysis.query_classes import compare_query_classes as compare_query_classes
from .analysis.query_splits import SplitAttention as SplitAttention
from .analysis.query_splits import received_of_split as received_of_split
from .detection import Sinks as Sinks
from .detection import find_sinks as find_sinks
from .detectors.above_mean import AboveMean as AboveMean
from .detectors.above_std import AboveStd as AboveStd
from .detectors.above_std import SoftSigmoid as SoftSigmoid
from .detectors.base import Detector as Detector
from .detectors.base import Quantity as Quantity
from .detectors.base import as_detector as as_detector
from .detectors.hidden_states import AboveMedian as AboveMedian
from .detectors.hidden_states import LowKeyNorm as LowKeyNorm
from .detectors.shares import AttentionShare as AttentionShare
from .detectors.shares import MeanReceived as MeanReceived
from .detectors.top_k import TopK as TopK
from .from_patterns import received_from_pattern as received_from_pattern
from .from_recording import key_statistic_of as key_statistic_of
from .from_recording import key_statistic_over_steps as key_statistic_over_steps
from .from_recording import received_of as received_of
from .from_recording import received_over_steps as received_over_steps
from .key_axes import KeyAxes as KeyAxes
from .key_statistics import KeyStatistic as KeyStatistic
from .lifetimes import SinkLifetimes as SinkLifetimes
from .received import Level as Level
from .received import Received as Received
from .received import Scale as Scale
from .sink_trajectories import Trajectories as Trajectories
from .sink_trajectories import trajectories as trajectories

__all__ = [
    "AboveMean",
    "AboveMedian",
    "AboveStd",
    "AttentionShare",
    "Detector",
    "KeyAxes",
    "KeyStatistic",
    "Level",
    "LowKeyNorm",
    "MeanReceived",
    "PositionOrToken",
    "Quantity",
    "Received",
    "Scale",
    "SinkLifetimes",
    "SinkProfile",
    "Sinks",
    "SoftSigmoid",
    "SplitAttention",
    "TopK",
    "Trajectories",
    "as_detector",
    "compare_detectors",
    "compare_query_classes",
    "eps_sweep",
    "find_sinks",
    "frontier_alignment",
    "key_statistic_of",
    "key_statistic_over_steps",
    "position_enrichment",
    "position_or_token",
    "received_from_pattern",
    "received_of",
    "received_of_split",
    "received_over_steps",
    "sink_consistency",
    "sink_profile",
    "sink_rate",
    "token_enrichment",
    "trajectories",
]
