"""Interventions on activations: small frozen values, callable as (tensor, hook=None) -> tensor."""

from dlm_lens.hooks.positions import MaskPositions, mask_positions

__all__ = ["MaskPositions", "mask_positions"]
