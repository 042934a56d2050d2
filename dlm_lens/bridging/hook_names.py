"""TransformerLens's names and positions for this library's hooks and sink tokens."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformer_lens import patching

from dlm_lens.arguments import check_index
from dlm_lens.attention import NAMES, Hook, SinkLayout
from dlm_lens.attention.hook_attachment import checked


def placed(bridge: Any, hooks: Sequence[Hook]) -> list[tuple[str, Hook]]:
    """(name of the hook point, hook) for every layer that each hook acts in.

    Behind a gate z is `hook_z_ungated`, where the native model has it.

    Raises:
        ValueError: a site or a layer that is not there.
    """
    count, found = len(bridge.blocks), []
    for hook in checked(hooks):
        layers = getattr(hook, "layers", None)
        for layer in range(count) if layers is None else layers:
            check_index("layer", layer, count, f"{hook}: ")
            gated = hook.site == "z" and "gate" in bridge.blocks[layer].attn._modules
            place = "attn.hook_z_ungated" if gated else NAMES[hook.site]
            found.append((f"blocks.{layer % count}.{place}", hook))
    return found


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
