"""Models on the pretended GPUs: on one, split over two, or with weights offloaded."""

from pathlib import Path
from typing import Any, Literal, get_args

from accelerate import dispatch_model

Placement = Literal["one", "split", "cpu", "disk"]
"""All on cuda:0; or half of the layers, the norm and the head on cuda:1, or offloaded to the CPU or to the disk."""

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

EVERYWHERE = ("sink_llama", "causal", "llada2")
"""Families whose calls are all made in every placement; the others' on one device, and `denoise` in every one."""


def placed(model: Any, where: Placement, folder: Path) -> Any:
    """The model, moved; `folder` takes what is offloaded to the disk."""
    if where == "one":
        return model.to("cuda:0")
    other = {"split": 1, "cpu": "cpu", "disk": "disk"}[where]
    # accelerate knows tied weights by the addresses that they had before they were moved. Were that memory freed, a
    # weight read from the disk could come to lie there and be taken for them. `load` moves no weights.
    model.weights_before_dispatch = list(model.parameters())
    return dispatch_model(model, device_map(model, other), main_device=0, offload_dir=str(folder))


def device_map(model: Any, other: int | str) -> dict[str, int | str]:
    """The second half of the layers, the norm and the head (unless tied) on `other`, the rest on cuda:0."""
    decoder = model.get_decoder()
    stack = "layers" if hasattr(decoder, "layers") else "h"  # GPT-2's name
    half = len(getattr(decoder, stack)) / 2
    last = ["model.norm", "model.decoder.norm", "model.encoder.language_model.norm", "transformer.ln_f"]
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        last.append("lm_head")  # tied weights lie on one device
    found: dict[str, int | str] = {}
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        stem, _, rest = name.partition(f".{stack}.")
        if rest:
            number = rest.split(".")[0]
            found[f"{stem}.{stack}.{number}"] = other if int(number) >= half else 0
        else:
            module = name.rpartition(".")[0]
            # A parameter of the network itself, such as learned sink tokens, has no module of its own.
            own = name if module in ("", "model") else module
            found[own] = other if module in last else 0
    return found
