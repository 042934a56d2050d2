"""TransformerLens's patching helpers on models with sink tokens: their positions are the tokens'."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformer_lens import patching

from dlm_lens.attention import SinkLayout

_POSITIONS = {
    patching.layer_pos_patch_setter: (1,),
    patching.layer_pos_head_vector_patch_setter: (1,),
    patching.layer_head_pos_pattern_patch_setter: (2,),
    patching.layer_head_dest_src_pos_pattern_patch_setter: (2, 3),
}
"""Setters of the helpers -> which entries of their index are positions."""


def on_canvas(hooks: Sequence[tuple[Any, Any]], layout: SinkLayout) -> list[tuple[Any, Any]]:
    """Hooks with those of the patching helpers moved to the canvas's positions among the activations'.

    The helpers count positions of the tokens; an activation has the sinks' positions too, `layout` says where. A
    setter of the user's own keeps its index.
    """
    start = layout.canvas(layout.count + 1).start
    return [(name, _shifted(hook, start)) for name, hook in hooks]


def _shifted(hook: Any, start: int) -> Any:
    if not (start and isinstance(hook, partial) and hook.func.__module__ == patching.__name__):
        return hook
    setter = inspect.getclosurevars(hook.func).nonlocals.get("patch_setter")
    entries = _POSITIONS.get(setter, ())
    index = [value + start if entry in entries else value for entry, value in enumerate(hook.keywords["index"])]
    return partial(hook, index=index)
