from .ablating import Ablate as Ablate
from .ablating import ablate as ablate
from .attaching import PointContext as PointContext
from .attaching import attached as attached
from .attaching import sink as sink
from .capturing import Activations as Activations
from .capturing import capture as capture
from .control import MaskRandom as MaskRandom
from .control import mask_random as mask_random
from .expressions import parse_hooks as parse_hooks
from .freezing import FreezeSinks as FreezeSinks
from .freezing import freeze_sinks as freeze_sinks
from .keeping import KeepOnly as KeepOnly
from .keeping import keep_only as keep_only
from .limiting import Limited as Limited
from .limiting import LimitedColumns as LimitedColumns
from .limiting import at_heads as at_heads
from .limiting import at_layers as at_layers
from .limiting import at_steps as at_steps
from .limiting import when as when
from .means import MeanActivations as MeanActivations
from .means import mean_activations as mean_activations
from .patching import PatchFrom as PatchFrom
from .patching import patch_from as patch_from
from .places import PositionClass as PositionClass
from .positions import MaskPositions as MaskPositions
from .positions import mask_positions as mask_positions
from .scaling import ScaleAttention as ScaleAttention
from .scaling import ZeroValue as ZeroValue
from .scaling import scale_attention as scale_attention
from .scaling import zero_value as zero_value
from .sinks import MaskSinks as MaskSinks
from .sinks import mask_sinks as mask_sinks
from .sinks import mask_top_sinks as mask_top_sinks
from .steering import Splice as Splice
from .steering import Steer as Steer
from .steering import splice as splice
from .steering import steer as steer
from .tokens import MaskTokens as MaskTokens
from .tokens import mask_tokens as mask_tokens

__all__ = [
    "Ablate",
    "Activations",
    "FreezeSinks",
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
    "ScaleAttention",
    "Splice",
    "Steer",
    "ZeroValue",
    "ablate",
    "at_heads",
    "at_layers",
    "at_steps",
    "attached",
    "capture",
    "freeze_sinks",
    "keep_only",
    "mask_positions",
    "mask_random",
    "mask_sinks",
    "mask_tokens",
    "mask_top_sinks",
    "mean_activations",
    "parse_hooks",
    "patch_from",
    "scale_attention",
    "sink",
    "splice",
    "steer",
    "when",
    "zero_value",
]
