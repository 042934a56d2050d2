"""`token_smearing`: likely tokens of a step beside the place where they end up."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import Rule, checked_arguments, flag, is_real, whole
from dlm_lens.attention import HookLike, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.probes.predictions import read_predictions, result_of
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import on_canvases
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.run_rows import decided_answer
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import POSITIVE_BOUNDS, SHARE_BOUNDS, Bounds, Estimate, estimate, mean_of, summed

PLACES = ("here", "near", "far", "nowhere")
PROBABILITY = Rule("a probability, above 0 and below 1", lambda value: is_real(value) and 0 < value < 1)


@dataclass(frozen=True, eq=False)
class TokenSmearing(ShowsItself):
    """Where the predictions of every step expect tokens, compared with where these are in the result.

    Token smearing (2606.20560, section 5.2.1): the model knows a token and not yet its position, so that several
    neighbouring positions predict it. For a position j that step t predicts, with the token v that the result has
    there, and p_t(i, v) the probability of v at position i ([MASK] has none):

        own_j = p_t(j, v),    near_j = sum of p_t(i, v) over 0 < |i - j| <= radius,

    over predicted positions i of the row whose own token in the result is not v. `near_by_chance` is what near_j
    would be on average if the same probabilities were at random ones of these positions: their number within the
    radius times the mean of p_t(i, v). The excess of one over the other is smearing.

    `places` counts the likely tokens of a step (2606.20560, Figure 3): every p_t(i, v) above `threshold` is "here"
    if the result has v at i, "near" if it has v within the radius, "far" if at another position of the answer, or
    "nowhere". `near_tokens_by_chance` is the expected number of "near" ones if the other tokens of the answer were
    in random order: with c occurrences of v among N of them, w of the N within the radius,
    1 - C(N - c, w) / C(N, w) for each likely token that is not "here". 2606.20560 counts semantically similar
    tokens too, which this does not.

    Args:
        run: the run.
        own: own_j, NaN where the step predicts nothing, or the result has a mask.
        near: near_j.
        near_by_chance: its expectation; NaN with no other position to compare with.
        places: the number of likely tokens in each of `PLACES`.
        near_tokens_by_chance: the expected number of "near" ones.
        threshold: of likely tokens.
        radius: in positions.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    own: Float[Tensor, "step batch position"]
    near: Float[Tensor, "step batch position"]
    near_by_chance: Float[Tensor, "step batch position"]
    places: Int[Tensor, "step batch place"]
    near_tokens_by_chance: Float[Tensor, "step batch"]
    threshold: float
    radius: int

    def __post_init__(self) -> None:
        step, batch, position = self.run.unmasked.shape
        check_shapes(self, step=step, batch=batch, position=position, place=len(PLACES))

    def __repr__(self) -> str:
        return (
            f"TokenSmearing(own {self.mean('own')}, near {self.mean('near')}, by chance "
            f"{self.mean('near_by_chance')}; excess {self.excess}; radius={self.radius})"
        )

    @property
    def excess(self) -> Estimate:
        """Near - near_by_chance, mean over predicted positions and steps; the interval is over prompts."""
        return self._mean(self.near - self.near_by_chance, None)

    def mean(self, name: str) -> Estimate:
        """The mean of "own", "near" or "near_by_chance" where all three are defined.

        Raises:
            ValueError: another name.
        """
        if name not in ("own", "near", "near_by_chance"):
            raise ValueError(f"name is {shown(name)}; it must be 'own', 'near' or 'near_by_chance'")
        # Near are sums over several positions, which may exceed 1.
        return self._mean(getattr(self, name), SHARE_BOUNDS if name == "own" else POSITIVE_BOUNDS)

    def share(self, place: str) -> Estimate:
        """The share of the likely tokens that are in a place; the interval is over prompts.

        Raises:
            ValueError: an unknown place.
        """
        if place not in PLACES:
            raise ValueError(f"place is {shown(place)}; it must be one of {', '.join(PLACES)}")
        counts = self.places.sum(0).double()
        pairs = torch.stack([counts[:, PLACES.index(place)], counts.sum(-1)], -1)
        return self._by_prompt(pairs, torch.arange(len(pairs)), SHARE_BOUNDS)

    def table(self) -> pd.DataFrame:
        """One line per step: predicted positions, the three means, and the numbers of likely tokens by place.

        `step` is the number in the whole run.
        """
        defined = self._defined
        count = defined.sum((1, 2))
        columns: dict[str, Any] = {"step": self.run.step_numbers, "predicted": count.tolist()}
        for name in ("own", "near", "near_by_chance"):
            sums = getattr(self, name).masked_fill(~defined, 0.0).sum((1, 2))
            columns[name] = (sums / count).tolist()
        for index, place in enumerate(PLACES):
            columns[f"tokens_{place}"] = self.places[..., index].sum(-1).tolist()
        columns["tokens_near_by_chance"] = self.near_tokens_by_chance.sum(-1).tolist()
        return pd.DataFrame(columns)

    @property
    def _defined(self) -> Bool[Tensor, "step batch position"]:
        return self.near_by_chance.isfinite() & self.own.isfinite()

    def _mean(self, values: Float[Tensor, "step batch position"], bounds: Bounds | None) -> Estimate:
        where = self._defined
        found = values[where].double()
        return self._by_prompt(torch.stack([found, torch.ones_like(found)], -1), where.nonzero()[:, 1], bounds)

    def _by_prompt(
        self, pairs: Float[Tensor, "entry two"], rows: Int[Tensor, "entry"], bounds: Bounds | None
    ) -> Estimate:
        """A mean of sums and counts; the interval is over prompts, each with all of its rows."""
        prompt = self.run.row_prompts
        sums = summed(pairs.numpy(), prompt[rows].numpy(), len(prompt))
        return estimate(sums, mean_of, bounds=bounds)


@checked_arguments(threshold=PROBABILITY, decided=flag(), radius=whole(least=1, most=2**20))
@torch.no_grad()
@exclusive
def token_smearing(
    model: Any,
    run: RunLike,
    *,
    threshold: float = 0.03,
    radius: int = 10,
    decided: bool = False,
    hooks: Sequence[HookLike] = (),
    progress: bool = False,
) -> TokenSmearing:
    """Run the model on every canvas of a run, and compare its predictions with the tokens of the result.

    One forward pass per step; logits are read a few positions at a time. The result is [step, batch, position].
    With an approximate cache a step has the positions that it computes and predicts, with the keys that it reads.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        threshold: a token is likely above this probability (0.03 in 2606.20560).
        radius: what counts as near, in positions (10 in 2606.20560).
        decided: also the decided positions that a step may rewrite, in models that revise (uniform noise,
            LLaDA2.1).
        hooks: interventions under which the model predicts.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model, or of an AR model, whose steps predict one position.
    """
    run = as_run(run)
    stored = StoredRun(model, run, decided=decided, hooks=hooks)
    if stored.autoregressive:
        raise ValueError(
            "token_smearing: a step of an AR run predicts one position, beside which there is no other"
        )
    steps, batch, positions = run.unmasked.shape
    names, shape = ("own", "near", "near_by_chance"), (steps, batch, positions)
    found = {name: torch.full(shape, torch.nan, dtype=torch.float32) for name in names}
    places = torch.zeros(steps, batch, len(PLACES), dtype=torch.long)
    chance = torch.zeros(steps, batch, dtype=torch.float32)
    ends = Results(stored.run, radius)
    bar = "smearing" if progress else ""
    for one in read_predictions(stored, result_of(stored.run), threshold=threshold, progress=bar):
        at = one.step, one.row
        places[at], chance[at] = ends.places_of(*at, one.where[one.likely_at], one.likely_token)
        for name, values in ends.masses_of(*at, one.where, one.final).items():
            found[name][(*at, one.where)] = values.float()
    return TokenSmearing(
        run, found["own"], found["near"], found["near_by_chance"], places, chance, threshold, radius
    )


class Results:
    """The tokens of a run's result, for comparison with what was predicted.

    Args:
        run: the run.
        radius: what counts as near.
    """

    def __init__(self, run: DenoisingRun, radius: int) -> None:
        self.radius = radius
        self.tokens = on_canvases(run, run.tokens.masked_fill(run.masked[-1], -1), -1)
        """At their places on the canvas of each step; -1 where the result has a mask."""
        self.answer = on_canvases(run, decided_answer(run), False)

    def masses_of(
        self, step: int, row: int, where: Int[Tensor, "predicted"], final: Float[Tensor, "predicted predicted"]
    ) -> dict[str, Float[Tensor, "predicted"]]:
        """own, near and near_by_chance of a row's predicted positions; NaN where the result has a mask."""
        token, mass = self.tokens[step, row, where], final.T
        other = token[None, :] != token[:, None]
        close = other & ((where[None, :] - where[:, None]).abs() <= self.radius)
        mean = (mass * other).sum(-1) / other.sum(-1)
        values = {
            "own": mass.diagonal(),
            "near": (mass * close).sum(-1),
            "near_by_chance": close.sum(-1) * mean,
        }
        return {name: value.masked_fill(token < 0, torch.nan) for name, value in values.items()}

    def places_of(
        self, step: int, row: int, at: Int[Tensor, "likely"], token: Int[Tensor, "likely"]
    ) -> tuple[Int[Tensor, "place"], Float[Tensor, ""]]:
        """How many of a row's likely tokens, at these positions, are in each place; how many near by chance."""
        from scipy.stats import hypergeom

        answer = self.answer[step, row].nonzero().flatten()
        same = self.tokens[step, row, answer][None, :] == token[:, None]
        distance = (answer[None, :] - at[:, None]).abs()
        elsewhere, close = distance > 0, (distance > 0) & (distance <= self.radius)
        here = (same & ~elsewhere).any(-1)
        near = ~here & (same & close).any(-1)
        far = ~here & ~near & same.any(-1)
        counts = torch.stack([here, near, far, ~(here | near | far)]).sum(-1)
        total, inside, number = elsewhere.sum(-1), close.sum(-1), (same & elsewhere).sum(-1)
        # None of the c occurrences among w positions, drawn from N.
        absent = torch.as_tensor(hypergeom.pmf(0, total.numpy(), number.numpy(), inside.numpy()))
        absent = absent.masked_fill(total == 0, 1.0)  # scipy has NaN for draws from an empty answer
        return counts, (1 - absent)[~here].sum()
