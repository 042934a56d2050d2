"""The states that the clock is read from: residual streams of every step of a run, by class of positions."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.attention import SinkLayout, attention_blocks
from dlm_lens.probes.residual_reader import ResidualReader, reading
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import answer_of
from dlm_lens.sampling.run_rows import open_and_planned

POSITIONS = ("open", "written", "prompt")
"""Open positions, positions of the answer that are decided, and the prompt."""

EMBEDDING = -1
"""The "layer" of the stream that enters layer 0: the token embeddings."""

TARGETS = ("time", "progress")
"""t / T of step t of T, in a part of a run those of the whole run; the share of the row's answer that is decided,
which is 1 - the mask ratio of the answer that was planned, also where the run ended before it was written."""

QUANTITIES = ("time", "step", "progress", "open positions", "written positions", "open share of the canvas")
"""Properties of a canvas that a reading of time may follow."""


class StepStates(NamedTuple):
    """Residual streams of a step.

    Args:
        step: of the run.
        row: the batch row of each state.
        position: its canvas position.
        kind: its class, an index of `POSITIONS`.
        streams: layer -> states; `EMBEDDING` for what enters layer 0, otherwise the output of the layer.
    """

    step: int
    row: Int[Tensor, "state"]
    position: Int[Tensor, "state"]
    kind: Int[Tensor, "state"]
    streams: Mapping[int, Float[Tensor, "state d_model"]]


def kinds_of(run: DenoisingRun, step: int) -> Int[Tensor, "batch position"]:
    """The class of every canvas position at a step; padding counts as the prompt."""
    opened, answer = run.open[step], answer_of(run, step)
    return torch.where(opened, 0, torch.where(answer, 1, 2))


def read_states(
    stored: StoredRun,
    layers: Sequence[int],
    rows: Bool[Tensor, "batch"],
    *,
    progress: str = "",
) -> Iterator[StepStates]:
    """The states of every step, one forward pass each; none is kept.

    A step of an AR run has the states of the written prefix, one with a cache those that it computes.

    Args:
        stored: the run; its hooks act before states are read.
        layers: which layers, `EMBEDDING` for the token embeddings.
        rows: of the batch.
        progress: what a progress bar calls it; empty for none.
    """
    for step in tqdm(range(stored.run.steps), desc=progress, unit="step", disable=not progress):
        yield _read(stored, step, layers, rows)


def _read(stored: StoredRun, step: int, layers: Sequence[int], rows: Bool[Tensor, "batch"]) -> StepStates:
    run = stored.run
    wanted = stored.computes(step) & run.attention_mask & rows[:, None]
    blocks = tuple(layer for layer in layers if layer != EMBEDDING)
    layout = SinkLayout.of(stored.model)
    reader = ResidualReader(layout, len(run.tokens), wanted, wanted, blocks or (0,), stored.first(step))

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        reader.keep(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    with stored.at(step), ExitStack() as stack:
        if EMBEDDING in layers:
            handle = attention_blocks(stored.model)[0].register_forward_pre_hook(enter, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(reading(stored.model, reader, attention=False))
        stored.states(step)
    row, position = wanted.nonzero().unbind(-1)
    return StepStates(step, row, position, kinds_of(run, step)[wanted], {i: reader.residual[i] for i in layers})


def labels_of(run: DenoisingRun, target: str) -> Float[Tensor, "step batch"]:
    """The label of every canvas, in float64; NaN after the end of a row."""
    labels = quantities_of(run)[QUANTITIES.index(target)]
    return labels.masked_fill(~run.running, torch.nan)


def quantities_of(run: DenoisingRun) -> Float[Tensor, "quantity step batch"]:
    """`QUANTITIES` of every canvas that a step saw, in float64; in a part of a run those of the whole run."""
    step = torch.tensor(run.step_numbers, dtype=torch.float64)[:, None].expand(run.steps, len(run.tokens))
    opened, answer = (count[:-1].double() for count in open_and_planned(run, run.answer))
    lacking = answer - run.answer.sum(-1)  # less than 0 where a part of the answer is room for masks
    share = 1 - opened / answer.clamp(min=1)
    content = (run.attention_mask & run.in_own_blocks).sum(-1).double() + lacking
    found = (
        step / run.steps_in_all.clamp(min=1),
        step,
        share,
        opened,
        answer - opened,
        opened / content.clamp(min=1),
    )
    return torch.stack(found)
