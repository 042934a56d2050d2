"""Where the hooks of `dlm_lens.hooks` belong among a bridge's hook points."""

from collections.abc import Sequence
from typing import Any

from dlm_lens.attention import NAMES, Hook
from dlm_lens.attention.attaching import checked


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
            if not -count <= layer < count:
                raise ValueError(f"{hook}: layer {layer} of {count}; layers go from 0 to {count - 1}")
            gated = hook.site == "z" and "gate" in bridge.blocks[layer].attn._modules
            place = "attn.hook_z_ungated" if gated else NAMES[hook.site]
            found.append((f"blocks.{layer % count}.{place}", hook))
    return found
