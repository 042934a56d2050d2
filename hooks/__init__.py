"""Interventions on activations: small frozen values, callable as (tensor, hook=None) -> tensor."""

from dlm_lens.attention import PointContext, attached, sink
from dlm_lens.hooks.ablating import Ablate, ablate
from dlm_lens.hooks.capturing import Activations, capture
from dlm_lens.hooks.control import MaskRandom, mask_random
from dlm_lens.hooks.expressions import parse_hooks
from dlm_lens.hooks.freezing import FreezeSinks, freeze_sinks
from dlm_lens.hooks.keeping import KeepOnly, keep_only
from dlm_lens.hooks.limiting import Limited, LimitedColumns, at_heads, at_layers, at_steps, when
from dlm_lens.hooks.means import MeanActivations, mean_activations
from dlm_lens.hooks.patching import PatchFrom, patch_from
from dlm_lens.hooks.places import PositionClass
from dlm_lens.hooks.positions import MaskPositions, mask_positions
from dlm_lens.hooks.scaling import ScaleAttention, ZeroValue, scale_attention, zero_value
from dlm_lens.hooks.sinks import MaskSinks, mask_sinks, mask_top_sinks
from dlm_lens.hooks.steering import Splice, Steer, splice, steer
from dlm_lens.hooks.tokens import MaskTokens, mask_tokens

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
