"""Attention that can be watched: hook points, the attention functions, column statistics, protocols."""

from dlm_lens.attention.columns import (
    MIN_VIEWERS,
    column_sums,
    expected_received,
    received_attention,
    top_columns,
    viewers,
)
from dlm_lens.attention.functions import hooked_attention, register_attention_functions
from dlm_lens.attention.layout import Placement, SinkLayout, SinkToken, sink
from dlm_lens.attention.points import HOOK_POINTS, HookedAttention, HookPoint, add_hook_points
from dlm_lens.attention.protocols import ColumnEdit, Hook, HookContext, RunContext, Site
from dlm_lens.attention.reduce import AttentionInputs, Reducer, pattern_tiles, reduce_attention
from dlm_lens.attention.visibility import visible_keys

__all__ = [
    "HOOK_POINTS",
    "MIN_VIEWERS",
    "AttentionInputs",
    "ColumnEdit",
    "Hook",
    "HookContext",
    "HookPoint",
    "HookedAttention",
    "Placement",
    "Reducer",
    "RunContext",
    "SinkLayout",
    "SinkToken",
    "Site",
    "add_hook_points",
    "column_sums",
    "expected_received",
    "hooked_attention",
    "pattern_tiles",
    "received_attention",
    "reduce_attention",
    "register_attention_functions",
    "sink",
    "top_columns",
    "viewers",
    "visible_keys",
]
