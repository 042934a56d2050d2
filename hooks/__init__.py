"""Interventions on activations: small frozen values, callable as (tensor, hook=None) -> tensor."""

from dlm_lens.attention import sink
from dlm_lens.hooks.attaching import PointContext, attached
from dlm_lens.hooks.positions import MaskPositions, mask_positions

__all__ = ["MaskPositions", "PointContext", "attached", "mask_positions", "sink"]
