"""`class_readability`: is the class of a position's final token linearly readable before the token is predicted?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import checked_arguments, chosen_indices, flag, place_of_layer, whole
from dlm_lens.attention import HookLike, attention_blocks, exclusive
from dlm_lens.probes.clock.fitting import split_by_prompt, warn_of_one_prompt
from dlm_lens.probes.clock.states import POSITIONS
from dlm_lens.probes.commitments import Commitment, commitment, settled_at
from dlm_lens.probes.linear_probes import ProbeReadings, by_place, fit, permuted, read_classes
from dlm_lens.probes.remasking import SHARE
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import at_places, on_canvases
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.run_rows import decided_answer
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses
from dlm_lens.statistics import Estimate

PROBES = ("class", "shuffled", "place")
"""The probe, and its nulls."""


@dataclass(frozen=True, eq=False)
class ClassReadability(ProbeReadings):
    """What linear probes of the residual stream read about the class of the final token, at open positions.

    A probe is a ridge regression of the indicators of the classes on the states of one layer at the open positions
    of all steps; it reads the class with the largest value. All numbers are of held-out prompts. Compared with the
    class are "class", the probe; "shuffled", a probe of shuffled classes; "place", the most frequent class at the
    place; and "token": the model's most likely token is the final one. The definition is ours: 2604.23235 asks
    whether classes of words are decided before words.

    Args:
        settled: the run's predictions of tokens.
        layers: whose outputs were read.
        held_out: the rows that were not fitted.
        wanted: the class of each final token, an index of `TOKEN_CLASSES`; -1 where no token was decided.
        read: the class that each layer's probe reads; -1 where a position is not open, or the row was fitted.
        shuffled: the same of probes that were fitted to the classes of other open positions of the same row.
        place: the most frequent class of the fitted rows at the same place of the answer, at the end; -1 for a
            place that they do not have.
        seed: of the split, the permutation and the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    compared: ClassVar[tuple[str, ...]] = (*PROBES, "token")

    settled: Commitment = field(repr=False)
    layers: tuple[int, ...]
    held_out: Bool[Tensor, "batch"]
    wanted: Int[Tensor, "batch position"]
    read: Int[Tensor, "layer step batch position"]
    shuffled: Int[Tensor, "layer step batch position"]
    place: Int[Tensor, "batch position"]
    seed: int = 0

    def __post_init__(self) -> None:
        steps, batch, positions = self.settled.run.unmasked.shape
        check_shapes(self, layer=len(self.layers), step=steps, batch=batch, position=positions)

    def __repr__(self) -> str:
        layer = self.layers[-1]
        known, by_place = self.accuracy(layer), self.accuracy(layer, "place")
        return f"ClassReadability(layer {layer}: class {known}, by place {by_place})"

    def class_at(self, layer: int, of: str = "class") -> Int[Tensor, "batch position"]:
        """The step from which on the right class is read until the token is decided; -1 where nothing is read.

        One after the decision where the last reading was wrong, as in `Commitment.committed_at`.

        Args:
            layer: whose probe.
            of: "class", or a null: "shuffled", "place".
        """
        places = self.settled.run.token_places[:-1]
        opened = at_places(self.read[0], places, -1) >= 0
        read = at_places(self._read(layer, of), places, -1)
        read = self.place.expand_as(read) if of == "place" else read  # also while another token has the same mask
        return settled_at(read.masked_fill(~opened, -1), self.wanted, self.settled.decided_at, self.settled.unknown)

    @checked_arguments(late=flag())
    def earlier(self, layer: int, of: str = "class", *, late: bool = True) -> Estimate:
        """By how many steps the class is settled before the token is (mean; positive: earlier), over prompts.

        Steps are those of the run, as in `Commitment.lead`: a part of a run may leave some out.

        Args:
            layer: whose probe.
            of: as for `class_at`.
            late: only positions whose token was not settled at the first step that predicts it. All others have
                nothing to come before.
        """
        committed, first = self.settled.committed_at, (self.settled.followed >= 0).float().argmax(0)
        settled = self.class_at(layer, of)
        where = (settled >= 0) & (committed >= 0) & self.held_out[:, None]
        where &= (committed > first) if late else True
        numbers, decided = torch.tensor(self.settled.run.step_numbers), self.settled.decided_at.clamp(min=0)
        token, own = (
            numbers[torch.minimum(at.clamp(min=0), decided)] + (at > decided) for at in (committed, settled)
        )
        return self._over_prompts((token - own)[where], where.nonzero()[:, 0])

    def table(self) -> pd.DataFrame:
        """One line per layer: the accuracy of everything, and `earlier` for late tokens."""
        lines = []
        for layer in self.layers:
            line: dict[str, Any] = {"layer": layer}
            for name in self.compared:
                line |= self.accuracy(layer, name).columns(name)
            for name in PROBES:
                line |= self.earlier(layer, name).columns(f"earlier_{name}")
            lines.append(line)
        return pd.DataFrame(lines)

    @property
    def _run(self) -> DenoisingRun:
        return self.settled.run

    @property
    def _counted(self) -> Bool[Tensor, "step batch position"]:
        """Where a held-out position is open, predicted, and its final token known."""
        return (self.read[0] >= 0) & (self._classes >= 0) & self.settled.predicted

    @property
    def _classes(self) -> Int[Tensor, "step batch position"]:
        return on_canvases(self._run, self.wanted, -1)

    def _right(self, layer: int, of: str) -> Float[Tensor, "step batch position"]:
        if of == "token":
            right = self.settled.token == on_canvases(self._run, self._run.tokens, -1)
        else:
            right = self._read(layer, of) == self._classes
        return right.double()

    def _read(self, layer: int, of: str) -> Int[Tensor, "step batch position"]:
        index = place_of_layer(layer, self.layers)
        if self._checked(of) == "place":
            return on_canvases(self._run, self.place, -1)
        return (self.read if of == "class" else self.shuffled)[index]


@checked_arguments(held_out=SHARE, seed=whole(least=0))
@torch.no_grad()
@exclusive
def class_readability(
    model: Any,
    run: RunLike,
    *,
    layers: Sequence[int] | None = None,
    held_out: float = 0.5,
    hooks: Sequence[HookLike] = (),
    seed: int = 0,
    progress: bool = False,
) -> ClassReadability:
    """Fit probes of the final token's class to some prompts of a run, and read it at the others' open positions.

    Three passes over the canvases: one to fit, one to read, one for the predictions of tokens; float64 sums of
    d_model^2 numbers per layer are kept, no state is. The penalty is chosen by predicting each half of the fitted
    prompts from the other; of a single one it is the largest of `clock.fitting.RIDGES`, with a warning.

    Args:
        model: from `dlm_lens.load`, the run's, with a tokenizer.
        run: from `denoise`; many prompts in one batch.
        layers: whose output to read, negative from the end; None for all.
        held_out: share of the prompts to read.
        hooks: interventions under which states and predictions are read.
        seed: of the split, the permutation and the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, without a tokenizer, or with fewer than two different prompts; an
            unknown layer.
    """
    run = as_run(run)
    stored = StoredRun(model, run, hooks=hooks)
    chosen = chosen_indices("layer", layers, len(attention_blocks(model)), "class_readability: ")
    if run.tokenizer is None:
        raise ValueError("class_readability: the run has no tokenizer, so that tokens have no classes")
    (train,), (test,), (half,) = split_by_prompt([run], held_out, seed, "class_readability")
    warn_of_one_prompt([run], [train], "class_readability")
    wanted = _classes(run)
    shuffled = permuted(wanted, torch.Generator().manual_seed(seed))
    labels = torch.stack([on_canvases(run, one, -1) for one in (wanted, shuffled)])
    where = POSITIONS.index("open")
    fits = fit(stored, chosen, train, half, labels, len(TOKEN_CLASSES), where, "fitting classes" * progress)
    read = torch.full((2, len(chosen), *run.unmasked.shape), -1)
    for step, row, position, found in read_classes(stored, chosen, test, fits, where, "reading classes" * progress):
        read[:, :, step, row, position] = found
    settled = commitment(model, run, hooks=hooks, progress=progress)
    place = by_place(wanted, train, len(TOKEN_CLASSES))
    return ClassReadability(settled, chosen, test, wanted, read[0], read[1], place, seed)


def _classes(run: DenoisingRun) -> Int[Tensor, "batch position"]:
    """The class of every token that the run decided; -1 elsewhere."""
    class_of = TokenClasses(run.tokenizer, None, run.eos_token_ids)
    names = list(TOKEN_CLASSES)
    found = torch.tensor([[names.index(class_of(token)) for token in row] for row in run.tokens.tolist()])
    return found.masked_fill(~decided_answer(run), -1)
