"""`received_over_steps`: run a model again over the canvases of a run and watch its patterns go by."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from dlm_lens.arguments import checked_arguments, chosen_indices
from dlm_lens.attention import (
    MIN_VIEWERS,
    SinkLayout,
    attends_causally,
    exclusive,
    expected_received,
    hooked_attentions,
    layer_windows,
    listening,
    position_ids,
    received_attention,
    viewers,
    visible_keys,
)
from dlm_lens.placement import input_device
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import tokenizer_of
from dlm_lens.sinks.received import COLUMN_SUM, RELATIVE, Received

QueryClass = Literal["all", "masked", "unmasked"]

ENTRIES_PER_PASS = 2**24
"""Entries of one layer's pattern in one forward pass: 64 MiB in float32."""


@checked_arguments()
@torch.no_grad()
@exclusive
def received_over_steps(
    model: Any,
    run: DenoisingRun,
    *,
    relative: bool = True,
    queries: QueryClass = "all",
    layers: Sequence[int] | None = None,
    min_viewers: int = MIN_VIEWERS,
    rows_per_pass: int | None = None,
    progress: bool = False,
) -> Received:
    """Received attention at every step of a run, from the patterns that the model forms on the run's canvases.

    r_j = sum_i A_ij over the counted queries (2510.15731, section 4.1), by default divided by e_j, what even
    attention would give. Step t is replayed on `run.canvases[t]`, which is what it saw; with guidance, on the
    conditional half. Every pattern is reduced as it appears, so that one layer's is in memory at a time.

    The keys of a sink model are the canvas's and, behind them, its learned sink tokens; the sinks' own rows do
    not count as queries. Padding is never counted nor seen. In a causal model what is not yet written is neither:
    step t has the written positions as queries and keys, all of them, also where decoding used a cache. In a layer
    with a sliding window a query sees the keys in it: `Received.expected` has an axis of layers then.

    Args:
        model: the model of the run; its attention implementation may be any, and stays as it is.
        run: from `denoise`.
        relative: scores relative to uniform, or raw column sums (in queries).
        queries: which queries count: all, or those whose position is "masked" or "unmasked" at the step; each
            class is divided by its own e_j, so that sinks do not seem to die when the masks run out.
        layers: indices of the layers to watch, negative from the end; None for all.
        min_viewers: a key seen by fewer counted queries is undefined (NaN).
        rows_per_pass: canvases in one forward pass; by default as many as fit 64 MiB of one layer's pattern.
        progress: show a progress bar.

    Returns:
        A `Received` on the CPU in float32, its layers in increasing order.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: a model without hook points, with attention that `layer_windows` refuses, a run of another
            model, an unknown class of queries, or a layer that is not there.
        RuntimeError: a pattern is not finite.
    """
    if not isinstance(run, DenoisingRun):
        raise TypeError(f"the run is a {type(run).__name__}; give the DenoisingRun that dlm_lens.denoise returned")
    points = points_of(model, layers)
    windows = [layer_windows(model)[layer] for layer in points]
    canvases = Canvases(model, run, queries)
    rows = rows_per_pass or max(1, ENTRIES_PER_PASS // (model.config.num_attention_heads * canvases.length**2))
    values: list[Tensor] = []
    expected: list[Tensor] = []
    seers: list[Tensor] = []
    for start in tqdm(range(0, len(canvases), rows), desc="replaying", unit="pass", disable=not progress):
        view = canvases.view(start, start + rows, windows)
        reduce = partial(view.reduce, relative=relative, min_viewers=min_viewers)
        with listening(model), _watching(points, windows, reduce) as seen:
            model.get_decoder()(**view.inputs)
        values.append(_stack(points, seen))
        # One for all layers where they agree.
        masks = [view.visible[window] for window in (windows if len(view.visible) > 1 else windows[:1])]
        expected.append(torch.cat([expected_received(visible, view.queries) for visible in masks], 1).cpu())
        seers.append(torch.cat([viewers(visible, view.queries) for visible in masks], 1).cpu())
    steps, batch = run.steps, len(run.tokens)
    return Received(
        values=torch.cat(values).unflatten(0, (steps, batch)),
        expected=torch.cat(expected).unflatten(0, (steps, batch)).unsqueeze(3),
        counted=canvases.counted.sum(-1).unflatten(0, (steps, batch)),
        tokens=canvases.beside_sinks(run.canvases[:-1], canvases.sink_ids),
        masked=canvases.beside_sinks(run.masked[:-1], 0),
        valid=canvases.beside_sinks(run.attention_mask, 1),
        final_tokens=canvases.beside_sinks(run.tokens, canvases.sink_ids),
        scale=RELATIVE if relative else COLUMN_SUM,
        layers=tuple(points),
        queries=queries,
        min_viewers=min_viewers,
        sinks=canvases.layout.count,
        tokenizer=tokenizer_of(run, model),
        viewers=torch.cat(seers).unflatten(0, (steps, batch)).unsqueeze(3),
    )


@dataclass(frozen=True)
class _View:
    """What one forward pass is given, and how its patterns are to be summed; who sees whom by sliding window."""

    inputs: Mapping[str, Any]
    visible: Mapping[int | None, Bool[Tensor, "row 1 query key"]]
    queries: Bool[Tensor, "row query"]
    layout: SinkLayout
    place: str

    def reduce(
        self,
        pattern: Float[Tensor, "row head position position"],
        window: int | None,
        *,
        relative: bool,
        min_viewers: int,
    ) -> Float[Tensor, "row head key"]:
        """Received attention of the canvas's keys and, behind them, the sinks'; sinks are no queries."""
        pattern = self.layout.sinks_last(pattern[..., self.layout.canvas(pattern.shape[-1]), :])
        visible, queries = self.visible[window].to(pattern.device), self.queries.to(pattern.device)
        if pattern.shape[-2:] != visible.shape[-2:]:
            raise ValueError(
                f"the pattern has {pattern.shape[-2]} queries and {pattern.shape[-1]} keys, the run "
                f"{visible.shape[-2]} and {visible.shape[-1]}; is it another model's?"
            )
        if not bool(pattern.isfinite().all()):
            raise RuntimeError(f"a pattern of {self.place} is not finite; check the model's weights and dtype")
        return received_attention(
            pattern, visible=visible, queries=queries, relative=relative, min_viewers=min_viewers
        ).cpu()


class Canvases:
    """All canvases of a run in one list, step by step, with the queries that count on each."""

    def __init__(self, model: Any, run: DenoisingRun, queries: QueryClass) -> None:
        if queries not in get_args(QueryClass):
            raise ValueError(f"queries is {queries!r}; it must be one of {', '.join(get_args(QueryClass))}")
        self.causal = attends_causally(model)
        if self.causal and queries == "masked":
            raise ValueError("an AR baseline has no masked queries; take queries='all'")
        self.device, self.batch, self.length = input_device(model), len(run.tokens), run.tokens.shape[1]
        self.layout = SinkLayout.of(model)
        self.sink_ids = -1 - torch.arange(self.layout.count)
        self.tokens = run.canvases[:-1].flatten(0, 1)
        rows, highest = model.get_input_embeddings().weight.shape[0], int(self.tokens.amax())
        if highest >= rows:
            raise ValueError(f"the run has token id {highest}, but the model embeds {rows}; is it another model's?")
        masked = run.masked[:-1].flatten(0, 1)
        self.content = run.attention_mask.repeat(run.steps, 1)
        self.seen = self.content & ~masked if self.causal else self.content
        if self.causal:
            # Behind the end of a row nothing is defined.
            running = torch.arange(run.steps)[:, None] < run.row_steps
            self.seen = self.seen & running.flatten()[:, None]
        chosen = {"all": self.seen, "masked": self.seen & masked, "unmasked": self.seen & ~masked}
        self.counted = chosen[queries]

    def __len__(self) -> int:
        return len(self.tokens)

    def view(self, start: int, stop: int, windows: Sequence[int | None] = (None,)) -> _View:
        """Canvases start, ..., stop - 1 as one forward pass, through layers with these sliding windows."""
        rows = slice(start, stop)
        inputs: dict[str, Any] = {"input_ids": self.tokens[rows].to(self.device), "use_cache": False}
        padding = self.content[rows]
        if not bool(self.content.all()):
            padding = padding.to(self.device)
            inputs |= {"attention_mask": padding.long(), "position_ids": position_ids(padding)}
        seen = self.seen[rows].to(self.device)
        visible = {
            window: torch.nn.functional.pad(
                visible_keys(seen, causal=self.causal, window=window), (0, self.layout.count), value=True
            )
            for window in dict.fromkeys(windows)
        }
        last = min(stop, len(self)) - 1
        place = f"steps {start // self.batch} to {last // self.batch}"
        return _View(inputs, visible, self.counted[rows].to(self.device), self.layout, place)

    def reordered(self, values: Tensor) -> Tensor:
        """Values [row, position, ...] of the network with the learned sinks behind the canvas."""
        return self.layout.sinks_last(values, 1)

    def beside_sinks(self, canvas: Tensor, value: Tensor | int) -> Tensor:
        """A tensor over canvas positions with `value` for every learned sink behind them."""
        if not self.layout.count:
            return canvas
        sinks = torch.as_tensor(value, dtype=canvas.dtype).expand(*canvas.shape[:-1], self.layout.count)
        return torch.cat([canvas, sinks], -1)


def points_of(model: Any, layers: Sequence[int] | None) -> dict[int, nn.Module]:
    """Layer index -> its `hook_pattern`, in increasing order."""
    if not callable(getattr(model, "modules", None)):
        raise ValueError(f"{type(model).__name__} has no hook points; load it with dlm_lens.load")
    modules = hooked_attentions(model)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no hook points; load it with dlm_lens.load, or pass it to "
            "dlm_lens.attention.add_hook_points"
        )
    chosen = chosen_indices("layer", layers, len(modules))
    return {layer: modules[layer].get_submodule("hook_pattern") for layer in chosen}


@contextmanager
def _watching(
    points: Mapping[int, nn.Module], windows: Sequence[int | None], reduce: Callable[[Tensor, int | None], Tensor]
) -> Iterator[dict[int, Float[Tensor, "row head key"]]]:
    """Reduce the pattern that passes each point; the hooks go when the block ends, however it ends."""
    seen: dict[int, Tensor] = {}

    def watch(layer: int, window: int | None) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, pattern: Tensor) -> None:
            seen[layer] = reduce(pattern, window)

        return hook

    handles = [
        point.register_forward_hook(watch(layer, window))
        for (layer, point), window in zip(points.items(), windows, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _stack(points: Mapping[int, nn.Module], seen: Mapping[int, Tensor]) -> Float[Tensor, "row layer head key"]:
    silent = [layer for layer in points if layer not in seen]
    if silent:
        raise ValueError(
            f"no pattern came by in layers {silent}: something replaced their attention (a host's bridge?); "
            "replay on the model as dlm_lens.load returned it"
        )
    return torch.stack([seen[layer] for layer in points], 1)
