"""`KeyStatistic`: a number per position from hidden states, the largest activation or the norm of the key."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.arguments import checked_arguments
from dlm_lens.attention import attention_blocks, attention_of, exclusive, hook_point, listening, padding_before
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import tokenizer_of
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks.detectors.base import HiddenQuantity, Quantity
from dlm_lens.sinks.from_rerun import Canvases, points_of
from dlm_lens.sinks.received import AXES, Level, Scale


@dataclass(frozen=True, eq=False)
class KeyStatistic:
    """A number per position that is no attention, at every step, for detectors that read hidden states.

    All five axes are always there; `dims` names those that mean something, the others have size 1.

    Args:
        values: the statistic; NaN where a position is undefined (padding, not yet written in an AR baseline).
        quantity: what it is: "max activation" (no head axis) or "key norm" (every query head has its key's).
        median: median over positions and features of |h|, which "max activation" is compared with; None for the
            median of `values` over the positions.
        tokens, masked, valid, layers, tokenizer, sinks: as in `Received`.
        dims: names of the axes that mean something.

    Raises:
        ValueError: an unknown quantity, or shapes that contradict each other.
    """

    values: Float[Tensor, "step batch layer head key"]
    quantity: HiddenQuantity
    median: Float[Tensor, "step batch layer head 1"] | None = None
    tokens: Int[Tensor, "step batch key"] | None = None
    masked: Bool[Tensor, "step batch key"] | None = None
    valid: Bool[Tensor, "batch key"] | None = None
    layers: tuple[int, ...] = ()
    dims: tuple[str, ...] = AXES
    sinks: int = 0
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.quantity not in ("max activation", "key norm"):
            raise ValueError(f"KeyStatistic.quantity is {self.quantity!r}; 'max activation' or 'key norm'")
        check_shapes(self, **{"layer": len(self.layers)} if self.layers else {})

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={s}" for n, s in zip(AXES, self.values.shape, strict=True) if n in self.dims)
        return f"KeyStatistic({self.quantity}; {sizes})"

    @property
    def padding(self) -> Int[Tensor, "batch"] | None:
        """How many keys of each row are padding before its first token; None if there is no padding."""
        return None if self.valid is None else padding_before(self.valid)

    @property
    def level(self) -> Level:
        """Whose statistic it is: a head's, or a layer's where there is no head axis."""
        return "head" if "head" in self.dims else "layer"

    def read(self, quantity: Quantity) -> tuple[Float[Tensor, "step batch layer head key"], Scale]:
        """What a detector of this quantity judges, and its unit.

        Raises:
            ValueError: it is of another quantity.
        """
        if quantity != self.quantity:
            raise ValueError(f"this detector reads {quantity!r}, but the statistic is of {self.quantity!r}")
        return self.values, self.quantity


ROWS_PER_PASS = 32


@checked_arguments()
@torch.no_grad()
@exclusive
def key_statistic_over_steps(
    model: Any,
    run: DenoisingRun,
    quantity: HiddenQuantity,
    *,
    layers: Sequence[int] | None = None,
    rows_per_pass: int = ROWS_PER_PASS,
) -> KeyStatistic:
    """Replay a run and measure every position: its largest activation, or the norm of its key.

    "max activation": max_d |h_jd| of the residual stream that enters each layer (2402.17762), with the median of
    |h| over content positions and features (of an even number of values the lower middle one). "key norm":
    ||k_j||_2 before the rotation, which keeps it; every query head has the norm of the key that it uses. In a
    causal model what is not yet written has none. Learned sink tokens stand behind the canvas.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: an unknown quantity, a model without hook points, or a layer that is not there.
    """
    if quantity not in get_args(HiddenQuantity):
        raise ValueError(f"quantity is {quantity!r}; it must be one of {', '.join(get_args(HiddenQuantity))}")
    if not isinstance(run, DenoisingRun):
        raise TypeError(f"the run is a {type(run).__name__}; give the DenoisingRun that dlm_lens.denoise returned")
    chosen = tuple(points_of(model, layers))
    canvases = Canvases(model, run, "all")
    values, medians = [], []
    for start in range(0, len(canvases), rows_per_pass):
        rows = slice(start, start + rows_per_pass)
        seen = _watch(model, canvases, chosen, quantity, start, start + rows_per_pass)
        content = canvases.beside_sinks(canvases.seen[rows], 1)
        stacked = torch.stack([canvases.reordered(seen[layer]) for layer in chosen], 1)
        if quantity == "max activation":
            found, median = _activations(stacked, content, canvases.length)
            medians.append(median)
        else:
            found = stacked.norm(dim=-1).transpose(-1, -2).masked_fill(~content[:, None, None], torch.nan)
            found = found.repeat_interleave(model.config.num_attention_heads // found.shape[2], 2)
        values.append(found)
    shape = (run.steps, len(run.tokens))
    return KeyStatistic(
        values=torch.cat(values).unflatten(0, shape),
        quantity=quantity,
        median=torch.cat(medians).unflatten(0, shape) if medians else None,
        tokens=canvases.beside_sinks(run.canvases[:-1], canvases.sink_ids),
        masked=canvases.beside_sinks(run.masked[:-1], 0),
        valid=canvases.beside_sinks(run.attention_mask, 1),
        layers=chosen,
        dims=AXES if quantity == "key norm" else tuple(name for name in AXES if name != "head"),
        sinks=canvases.layout.count,
        tokenizer=tokenizer_of(run, model),
    )


def _activations(
    hidden: Float[Tensor, "row layer key d_model"], content: Tensor, canvas: int
) -> tuple[Float[Tensor, "row layer 1 key"], Float[Tensor, "row layer 1 1"]]:
    """Largest |h| of every position, and the median over the content of the canvas."""
    size = hidden.abs().masked_fill(~content[:, None, :, None], torch.nan)
    median = size[:, :, :canvas].flatten(2).nanmedian(-1, keepdim=True).values
    return size.amax(-1)[:, :, None], median[:, :, None]


def _watch(
    model: Any, canvases: Canvases, layers: Sequence[int], quantity: str, start: int, stop: int
) -> dict[int, Float[Tensor, "row position *features"]]:
    """The residual stream in front of each layer, or its keys, in one forward pass."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int, value: Tensor) -> None:
        seen[layer] = value.detach().float().cpu()

    def before(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(layer, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def behind(layer: int, module: nn.Module, args: Any, output: Tensor) -> None:
        keep(layer, output)

    blocks = attention_blocks(model)
    with ExitStack() as stack:
        stack.enter_context(listening(model))
        for layer in layers:
            if quantity == "max activation":
                hook: Callable[..., None] = partial(before, layer)
                handle = blocks[layer].register_forward_pre_hook(hook, with_kwargs=True)
            else:
                point = hook_point(attention_of(blocks[layer]), "k")
                handle = point.register_forward_hook(partial(behind, layer))
            stack.callback(handle.remove)
        model.get_decoder()(**canvases.view(start, stop).inputs)
    return seen
