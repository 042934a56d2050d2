"""`retrieval_heads`: heads that attend to an occurrence of the token that is being decided."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import check_index, checked_arguments, place_of_layer, whole
from dlm_lens.attention import HookLike, exclusive, predicting_position
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.recording import LayerStep, PatternReducer, rerun
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.moved_tokens import answer_of, decisions_of
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import CORRELATION_BOUNDS, SHARE_BOUNDS, Estimate, difference_of, estimate, mean_of

MEASURES = ("decisions", "hits", "mass", "chance hits", "chance mass")


class Decision(NamedTuple):
    """A token that a step decides and that stands elsewhere on the canvas already.

    Args:
        row: of the batch.
        query: the position whose output predicts it.
        copies: where the token stands.
        chances: per region of keys (prompt, decided answer) with a copy: how many, and all its keys.
    """

    row: int
    query: int
    copies: Bool[Tensor, "position"]
    chances: tuple[tuple[int, Bool[Tensor, "position"]], ...]


def find_decisions(run: DenoisingRun, step: int, skip: frozenset[int], shifted: bool) -> tuple[list[Decision], int]:
    """The decisions of a step with a copy on its canvas, and how many tokens it decides.

    Args:
        run: a finished run.
        step: of the run.
        skip: token ids that are left out.
        shifted: whether the output at i - 1 predicts position i.
    """
    canvas, (decided, tokens) = run.canvases[step], (each[step] for each in decisions_of(run))
    predicting = predicting_position(run.attention_mask)
    visible, answer = run.attention_mask & ~run.open[step], answer_of(run, step)
    special = torch.isin(canvas, torch.tensor(sorted(skip), dtype=canvas.dtype))
    found, total = [], 0
    for row, position in decided.nonzero().tolist():
        token = int(tokens[row, position])  # the next canvas of a part may hold a later one
        if token in skip:
            continue
        total += 1
        there = visible[row] & ~special[row]
        there[position] = False
        same = there & (canvas[row] == token)
        copies, chances = torch.zeros_like(same), []
        for region in (~answer[row], answer[row]):
            here, others = same & region, there & ~same & region  # keys that are all copies tell nothing
            if bool(here.any()) and bool(others.any()):
                copies |= here
                chances.append((int(here.sum()), here | others))
        if chances:
            query = int(predicting[row, position]) if shifted else position
            found.append(Decision(row, query, copies, tuple(chances)))
    return found, total


@dataclass(frozen=True, eq=False)
class CopyAttention(PatternReducer):
    """Reducer: over the decisions of a step, attention of the deciding query to copies of the token.

    Sums over decisions of: 1; whether the key with the most attention is a copy; attention on all copies; and the
    expectations of both for as many keys drawn at random from all keys of the same regions: with c copies among the
    n keys of a region each of the n counts c / n.

    Args:
        decisions: step -> its decisions, for all rows of the run.
    """

    decisions: dict[int, list[Decision]] = field(repr=False)

    name = "copy_attention"
    dims = ("step", "batch", "layer", "head", "measure")
    unit = "decisions, or share of attention"
    formula = "sum over decisions of [argmax_j A_ij is a copy], sum of A_ij over copies j, and by chance"

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The names of the measures."""
        return {"measure": MEASURES}

    def start(self, layer: LayerStep) -> Tensor:
        """Zeros."""
        batch, heads = layer.inputs.q.shape[:2]
        return layer.inputs.q.new_zeros(batch, heads, len(MEASURES), dtype=torch.float32)

    def tile(
        self, state: Tensor, layer: LayerStep, rows: slice, pattern: Float[Tensor, "batch head tile key"]
    ) -> Tensor:
        """Add the decisions whose query is in the tile."""
        for one in self.decisions.get(layer.run.step, ()):
            if not rows.start <= one.query < rows.stop:
                continue
            attention = pattern[one.row, :, one.query - rows.start]
            keys = attention.shape[-1]
            state[one.row] += torch.stack(_measured(attention, one, keys), -1)
        return state

    def finish(self, state: Tensor, layer: LayerStep) -> Float[Tensor, "batch head measure"]:
        """The sums."""
        return state


def _measured(attention: Float[Tensor, "head key"], one: Decision, keys: int) -> list[Float[Tensor, "head"]]:
    """The five numbers of a decision, per head."""

    def fitted(where: Bool[Tensor, "position"]) -> Bool[Tensor, "key"]:
        # The pass may see a prefix of the canvas, and learned sink tokens after it.
        where = where[: min(keys, len(where))].to(attention.device)
        return torch.nn.functional.pad(where, (0, keys - len(where)))

    best, copies = attention.argmax(-1), fitted(one.copies)
    chance_hits = chance_mass = torch.zeros_like(attention[:, 0])
    for count, members in one.chances:
        member = fitted(members)
        share = count / int(member.sum())
        chance_hits = chance_hits + share * member[best]
        chance_mass = chance_mass + share * attention[:, member].sum(-1)
    ones = torch.ones_like(chance_mass)
    return [ones, copies[best].float(), attention[:, copies].sum(-1), chance_hits, chance_mass]


@dataclass(frozen=True, eq=False)
class RetrievalHeads(ShowsItself):
    """How often each head attends to a copy of the token that is decided.

    The *score* of a head is the share of decisions at which the key with the most attention holds the same token
    (the retrieval score of 2404.15574, section 2, whose needle is here every visible key); `mass` is the attention
    on all copies. A decision is a token that a step decides while the same token is visible elsewhere, in the
    prompt or in what is decided, before or after it; special tokens are left out, and regions (prompt, decided
    answer) whose keys are all copies. Chance is the expectation for as many random keys of the same region: with c
    copies among its n keys, c / n of the decisions whose key with the most attention is in the region (of the
    attention on the region for `mass`), which is at most 1. For DLMs we know of no published definition with a
    formula; taking the query of the position that is decided, at its step, is ours.

    Args:
        sums: of `MEASURES`, over the steps; prompts by their numbers in `DenoisingRun.row_prompts`.
        layers: index of each layer in the model.
        decided: how many tokens the run decided, special ones left out.
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    sums: Float[Tensor, "prompt layer head measure"]
    layers: tuple[int, ...]
    decided: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers), measure=len(MEASURES))

    def __repr__(self) -> str:
        if not self.decisions:
            return f"RetrievalHeads(none of {self.decided} decided tokens has a copy)"
        best = self.table().iloc[0]
        return (
            f"RetrievalHeads({self.decisions} of {self.decided} decided tokens have a copy; highest: layer "
            f"{best['layer']:.0f}, head {best['head']:.0f}, score {best['score']:.3g}, "
            f"by chance {best['chance']:.3g})"
        )

    @property
    def decisions(self) -> int:
        """How many decided tokens had a copy on the canvas."""
        return int(self.sums[:, 0, 0, 0].sum())

    def score(self, layer: int, head: int, measure: str = "hits") -> Estimate:
        """Score ("hits") or "mass" of a head, with its interval over prompts.

        Raises:
            ValueError: a layer that was not measured, a head that does not exist, or another measure.
        """
        return estimate(self._pair(layer, head, measure).numpy(), mean_of, bounds=SHARE_BOUNDS, seed=self.seed)

    def excess(self, layer: int, head: int, measure: str = "hits") -> Estimate:
        """The score minus what it would be by chance.

        Raises:
            ValueError: a layer that was not measured, a head that does not exist, or another measure.
        """
        both = [self._pair(layer, head, one) for one in (measure, f"chance {measure}")]
        return estimate(torch.cat(both, -1).numpy(), difference_of, bounds=CORRELATION_BOUNDS, seed=self.seed)

    def table(self, measure: str = "hits") -> pd.DataFrame:
        """One line per head, highest score first: score, chance, and excess with their intervals.

        Raises:
            ValueError: another measure.
        """
        if measure not in MEASURES[1:3]:
            raise ValueError(f"measure is {shown(measure)}; it must be 'hits' or 'mass'")
        lines = []
        for layer in self.layers:
            for head in range(self.sums.shape[2]):
                chance = estimate(self._pair(layer, head, f"chance {measure}").numpy(), mean_of, seed=self.seed)
                line: dict[str, Any] = {"layer": layer, "head": head}
                line |= self.score(layer, head, measure).columns("score") | {"chance": chance.value}
                lines.append(line | self.excess(layer, head, measure).columns("excess"))
        return pd.DataFrame(lines).sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def _pair(self, layer: int, head: int, measure: str) -> Float[Tensor, "prompt 2"]:
        place = place_of_layer(layer, self.layers, "measured")
        if measure not in MEASURES[1:]:
            raise ValueError(f"measure is {shown(measure)}; it must be 'hits' or 'mass'")
        check_index("head", head, self.sums.shape[2], "RetrievalHeads: ")
        return self.sums[:, place, head][:, [MEASURES.index(measure), 0]].double()


@checked_arguments(seed=whole(least=0))
@torch.no_grad()
@exclusive
def retrieval_heads(
    model: Any,
    run: RunLike,
    *,
    hooks: Sequence[HookLike] = (),
    layers: Sequence[int] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> RetrievalHeads:
    """Score every head by its attention to copies of the token that is being decided.

    Replays the run, one forward pass a step. No pattern is kept.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        layers: which layers; None for all.
        seed: of the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, or a layer that does not exist.
    """
    run = as_run(run)
    config = model.config
    ids = [getattr(config, f"{name}_token_id", None) for name in ("mask", "pad", "bos", "eos")]
    named = [one for each in ids if each is not None for one in (each if isinstance(each, list) else [each])]
    skip = frozenset([*named, *run.eos_token_ids])
    found = {step: find_decisions(run, step, skip, run.predicts_next(step, config)) for step in range(run.steps)}
    reducer = CopyAttention({step: decisions for step, (decisions, _) in found.items()})
    rec = rerun(model, run, [reducer], hooks=hooks, layers=layers, progress=progress)
    sums = rec.copy_attention.nan_to_num().sum(0)
    of_prompts = torch.zeros_like(sums).index_add_(0, run.row_prompts, sums)
    return RetrievalHeads(of_prompts, rec.layers, sum(total for _, total in found.values()), seed)
