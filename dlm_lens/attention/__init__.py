"""Hook points in attention, the attention functions, visibility, column statistics, and the base class of hooks."""

from dlm_lens.attention.attention_order import (
    attends_observed_first,
    observed_first,
    observed_order,
    sees_observed_first,
    without_later_masks,
)
from dlm_lens.attention.block_layout import BlockLayout, Context, has_causal_context, own_blocks
from dlm_lens.attention.column_masking import ColumnMask, Stage, counted_queries
from dlm_lens.attention.column_stats import (
    MIN_VIEWERS,
    ColumnStats,
    column_sums,
    columns_of,
    expected_received,
    received_attention,
    top_columns,
    viewers,
)
from dlm_lens.attention.functions import attend, hooked_attention
from dlm_lens.attention.hook import (
    SITES,
    ColumnHook,
    Hook,
    HookLike,
    Site,
    as_hook,
    hide_columns,
    is_hook,
)
from dlm_lens.attention.hook_attachment import (
    NAMES,
    ColumnCall,
    attach_hooks,
    attached_hooks,
    checked,
    refuse_row_lists,
    step_in_stack,
)
from dlm_lens.attention.hook_context import HookContext, HookKey, PointContext, RunStep, run_of
from dlm_lens.attention.hook_delegation import (
    ColumnHookWrapper,
    DelegatingColumnHook,
    DelegatingHook,
    HidesNothing,
    HookWrapper,
)
from dlm_lens.attention.hook_points import (
    HOOK_POINTS,
    HookPoint,
    Reader,
    add_hook_points,
    attention_stack,
    attention_stacks,
    computed_span,
    decoder_of,
    has_hook_points,
    hook_point,
    hooked_attentions,
    is_hooked_attention,
    listening,
)
from dlm_lens.attention.inputs import AttentionInputs
from dlm_lens.attention.layers import (
    adding_module,
    attention_blocks,
    attention_of,
    head_width,
    output_weight,
    writing_module,
)
from dlm_lens.attention.left_padding import padding_before, position_ids, predicting_position
from dlm_lens.attention.mask_window import in_window, mask_window_of, sees_window, until_window, window_layout
from dlm_lens.attention.masking_stats import hidden_mass, hidden_per_map, hook_keys
from dlm_lens.attention.model_access import exclusive, in_use
from dlm_lens.attention.pattern_reductions import PatternStats, TileStats, pattern_stats
from dlm_lens.attention.received import attention_lse, received_sums
from dlm_lens.attention.running_blocks import BlockCounts, RunningBlocks
from dlm_lens.attention.self_check import check_hook_points, check_ids, find_sites
from dlm_lens.attention.shifted_positions import OUTSIDE, warn_of_shifts, warning_of_shifts
from dlm_lens.attention.sink_layout import Placement, SinkLayout, SinkToken, beside_sinks, sink
from dlm_lens.attention.sliding_windows import attending_layers, attends_causally, layer_windows
from dlm_lens.attention.softmax_variants import rows_of_one
from dlm_lens.attention.streaming import received_by_class, stream_columns
from dlm_lens.attention.tile_sums import QUERY_STATS, QueryStat
from dlm_lens.attention.tiled import pattern_tiles
from dlm_lens.attention.visibility import AttentionPass, additive_mask, visible_in, visible_keys

__all__ = [
    "HOOK_POINTS",
    "MIN_VIEWERS",
    "NAMES",
    "OUTSIDE",
    "QUERY_STATS",
    "SITES",
    "AttentionInputs",
    "AttentionPass",
    "BlockCounts",
    "BlockLayout",
    "ColumnCall",
    "ColumnHook",
    "ColumnHookWrapper",
    "ColumnMask",
    "ColumnStats",
    "Context",
    "DelegatingColumnHook",
    "DelegatingHook",
    "HidesNothing",
    "Hook",
    "HookContext",
    "HookKey",
    "HookLike",
    "HookPoint",
    "HookWrapper",
    "PatternStats",
    "Placement",
    "PointContext",
    "QueryStat",
    "Reader",
    "RunStep",
    "RunningBlocks",
    "SinkLayout",
    "SinkToken",
    "Site",
    "Stage",
    "TileStats",
    "add_hook_points",
    "adding_module",
    "additive_mask",
    "as_hook",
    "attach_hooks",
    "attached_hooks",
    "attend",
    "attending_layers",
    "attends_causally",
    "attends_observed_first",
    "attention_blocks",
    "attention_lse",
    "attention_of",
    "attention_stack",
    "attention_stacks",
    "beside_sinks",
    "check_hook_points",
    "check_ids",
    "checked",
    "column_sums",
    "columns_of",
    "computed_span",
    "counted_queries",
    "decoder_of",
    "exclusive",
    "expected_received",
    "find_sites",
    "has_causal_context",
    "has_hook_points",
    "head_width",
    "hidden_mass",
    "hidden_per_map",
    "hide_columns",
    "hook_keys",
    "hook_point",
    "hooked_attention",
    "hooked_attentions",
    "in_use",
    "in_window",
    "is_hook",
    "is_hooked_attention",
    "layer_windows",
    "listening",
    "mask_window_of",
    "observed_first",
    "observed_order",
    "output_weight",
    "own_blocks",
    "padding_before",
    "pattern_stats",
    "pattern_tiles",
    "position_ids",
    "predicting_position",
    "received_attention",
    "received_by_class",
    "received_sums",
    "refuse_row_lists",
    "rows_of_one",
    "run_of",
    "sees_observed_first",
    "sees_window",
    "sink",
    "step_in_stack",
    "stream_columns",
    "top_columns",
    "until_window",
    "viewers",
    "visible_in",
    "visible_keys",
    "warn_of_shifts",
    "warning_of_shifts",
    "window_layout",
    "without_later_masks",
    "writing_module",
]
