from .ablation import Ablate as Ablate
from .ablation import ablate as ablate
from .activation_capture import Activations as Activations
from .activation_capture import capture as capture
from .activation_means import MeanActivations as MeanActivations
from .activation_means import mean_activations as mean_activations
from .base import ColumnHook as ColumnHook
from .base import ColumnMask as ColumnMask
from .base import Hook as Hook
from .base import HookWrapper as HookWrapper
from .base import PointContext as PointContext
from .base import attach_hooks as attach_hooks
from .base import sink as sink
from .commitment_limits import UntilCommitted as UntilCommitted
from .commitment_limits import until_committed as until_committed
from .curve_steering import SteerAlong as SteerAlong
from .curve_steering import steer_along as steer_along
from .expressions import hooks_of_run as hooks_of_run
from .expressions import parse_hooks as parse_hooks
from .feature_edits import EditFeatures as EditFeatures
from .feature_edits import ablate_features as ablate_features
from .feature_edits import reconstruct as reconstruct
from .feature_edits import scale_features as scale_features
from .feature_edits import steer_feature as steer_feature
from .frozen_sinks import FreezeSinks as FreezeSinks
from .frozen_sinks import freeze_sinks as freeze_sinks
from .limits import Limited as Limited
from .limits import LimitedColumns as LimitedColumns
from .limits import at_encoder as at_encoder
from .limits import at_heads as at_heads
from .limits import at_layers as at_layers
from .limits import at_progress as at_progress
from .limits import at_steps as at_steps
from .patching import PatchFrom as PatchFrom
from .patching import patch_from as patch_from
from .position_masking import MaskPositions as MaskPositions
from .position_masking import MaskTokens as MaskTokens
from .position_masking import mask_positions as mask_positions
from .position_masking import mask_tokens as mask_tokens
from .positions import PositionClass as PositionClass
from .positions import RowPositions as RowPositions
from .positions import by_row as by_row
from .random_columns import MaskRandom as MaskRandom
from .random_columns import mask_random as mask_random
from .scaling import ScaleAttention as ScaleAttention
from .scaling import ZeroValue as ZeroValue
from .scaling import scale_attention as scale_attention
from .scaling import zero_value as zero_value
from .sink_masking import MaskSinks as MaskSinks
from .sink_masking import mask_sinks as mask_sinks
from .sink_masking import mask_top_sinks as mask_top_sinks
from .steering import Splice as Splice
from .steering import Steer as Steer
from .steering import splice as splice
from .steering import steer as steer
from .window import KeepOnly as KeepOnly
from .window import keep_only as keep_only

__all__ = [
    "Ablate",
    "Activations",
    "ColumnHook",
    "ColumnMask",
    "EditFeatures",
    "FreezeSinks",
    "Hook",
    "HookWrapper",
    "KeepOnly",
    "Limited",
    "LimitedColumns",
    "MaskPositions",
    "MaskRandom",
    "MaskSinks",
    "MaskTokens",
    "MeanActivations",
    "PatchFrom",
    "PointContext",
    "PositionClass",
    "RowPositions",
    "ScaleAttention",
    "Splice",
    "Steer",
    "SteerAlong",
    "UntilCommitted",
    "ZeroValue",
    "ablate",
    "ablate_features",
    "at_encoder",
    "at_heads",
    "at_layers",
    "at_progress",
    "at_steps",
    "attach_hooks",
    "by_row",
    "capture",
    "freeze_sinks",
    "hooks_of_run",
    "keep_only",
    "mask_positions",
    "mask_random",
    "mask_sinks",
    "mask_tokens",
    "mask_top_sinks",
    "mean_activations",
    "parse_hooks",
    "patch_from",
    "reconstruct",
    "scale_attention",
    "scale_features",
    "sink",
    "splice",
    "steer",
    "steer_along",
    "steer_feature",
    "until_committed",
    "zero_value",
]
