"""`missed_effects`: a bound on the effects of the nodes that an estimate does not rank among the strongest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import ONE_SEED, Rule, checked_arguments, instance, is_real, whole
from dlm_lens.attention import exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.attribution.contract import Contract
from dlm_lens.probes.attribution.node_effects import SITES, NodeEffects
from dlm_lens.probes.attribution.passes import Keep
from dlm_lens.probes.attribution.patching import Node, NodeSet, Put, values_of
from dlm_lens.probes.attribution.setup import BothSides, Direction, Setup
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Target
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes

BETWEEN = Rule("above 0 and below 1", lambda value: is_real(value) and 0 < value < 1)

Where = tuple[int, int, int]
"""Indices of a node in [layer, head, place]."""


@dataclass(frozen=True, eq=False)
class MissedEffects(ShowsItself):
    """Upper confidence bounds on the effects of the nodes outside the `top` of every step.

    Args:
        contract: of the bound.
        estimate: whose ranking is judged.
        top: how many nodes of a step the ranking keeps.
        subsets: drawn per step.
        share: chance of a node to be in a subset.
        confidence: of each bound.
        effects: mean target of the subsets with the node minus that of those without; NaN for the top nodes and for
            nodes that a step lacks.
        bounds: on the absolute effect; infinite where fewer than two subsets have, or lack, the node.

    Raises:
        ValueError: the shapes contradict each other.
    """

    contract: Contract
    estimate: NodeEffects = field(repr=False)
    top: int
    subsets: int
    share: float
    confidence: float
    effects: Float[Tensor, "step batch layer head place"]
    bounds: Float[Tensor, "step batch layer head place"]

    def __post_init__(self) -> None:
        names = ("step", "batch", "layer", "head", "place")
        check_shapes(self, **dict(zip(names, self.estimate.effects.shape, strict=True)))

    def __repr__(self) -> str:
        return (
            f"MissedEffects(outside the top {self.top} of a step no effect is above {float(self.bound.max()):.4g}, "
            f"at {self.confidence:.0%}; the weakest of the top is estimated at "
            f"{float(self.weakest.min()):.4g}; {self.subsets} subsets)\n{self.contract}"
        )

    @property
    def bound(self) -> Float[Tensor, "step batch"]:
        """The bound on all nodes outside the top together: the largest of theirs.

        That any of them is above it is rejected only if it is for each of them, so that it needs no correction
        for their number.
        """
        return self._ranked.amax(-1)

    @property
    def _ranked(self) -> Float[Tensor, "step batch node"]:
        """The bounds, with -inf where a node has none; infinite bounds stay so."""
        return self.bounds.masked_fill(self.bounds.isnan(), -torch.inf).flatten(2)

    @property
    def weakest(self) -> Float[Tensor, "step batch"]:
        """The smallest absolute estimate among the top nodes of a step."""
        top = self.bounds.isnan() & self.estimate.effects.isfinite()
        return self.estimate.effects.abs().masked_fill(~top, torch.inf).flatten(2).amin(-1)

    def table(self) -> pd.DataFrame:
        """One line per step (its number in the whole run) and row: its bound, and the node that has it."""
        flat = self._ranked
        chosen, weakest, lines = flat.argmax(-1), self.weakest, []
        for index, row in np.ndindex(*chosen.shape):
            layer, head, place = np.unravel_index(int(chosen[index, row]), self.bounds.shape[2:])
            at = (index, row, int(layer), int(head), int(place))
            line: dict[str, Any] = {"step": self.estimate.steps[index], "batch": row}
            line |= {"bound": float(flat[index, row].max()), "weakest_of_top": float(weakest[index, row])}
            line |= {"layer": self.estimate.layers[layer], "head": int(head)}
            if self.estimate.positions is not None:
                line["position"] = self.estimate.positions[place]
            lines.append(line | {"effect": float(self.effects[at]), "estimate": float(self.estimate.effects[at])})
        names = () if self.estimate.positions is None else ("position",)
        return of_whole_run(pd.DataFrame(lines), self.estimate.run, names)


@checked_arguments(
    estimate=instance(NodeEffects, "the NodeEffects of attribution_patching"),
    top=whole(least=0), subsets=whole(least=4), batch=whole(least=1), share=BETWEEN, confidence=BETWEEN,
    seed=ONE_SEED,
)  # fmt: skip
@torch.no_grad()
@exclusive
def missed_effects(
    model: Any,
    run: RunLike,
    corrupted: Any,
    estimate: NodeEffects,
    *,
    top: int,
    target: Target = LOGIT_DIFFERENCE,
    explain: Sequence[int] | None = None,
    direction: Direction = "noising",
    subsets: int = 256,
    share: float = 0.1,
    confidence: float = 0.95,
    batch: int = 32,
    seed: int = 0,
    progress: bool = False,
) -> MissedEffects:
    """Bound the effects that an estimate's ranking may have missed, by patching random subsets of nodes.

    The diagnostic of AtP* (2403.00745): each subset S has every node with chance `share` and is patched as a whole.
    With e_n the mean effect of the subsets with node n minus that of those without, and s_n its standard error,
    Welch's one-sided t-test rejects |effect| >= theta for every theta above |e_n| + t(confidence, nu) s_n, nu the
    degrees of freedom of Welch and Satterthwaite. The largest of these bounds holds for all nodes
    outside the top. Ours: subsets are drawn from these nodes alone, so that the strong ones neither add noise nor
    interact.

    What is bounded is a node's effect on average over random companions, E[target | n in S] - E[target | n not in
    S]. Where effects add up it is that of `activation_patching`; a node whose effect shows only alone, or only with
    certain others, can have a smaller one. A smaller share comes closer to the node alone, and needs more subsets.
    The test takes means for normal, which those of few subsets are not where one of the nodes is far stronger than
    all others: choose `top` so that no such node is left.

    Args:
        model: as `activation_patching`, which the arguments not listed here follow.
        run: the clean run.
        corrupted: as for the estimate.
        estimate: of `attribution_patching`; its steps, layers, site and positions are taken.
        top: how many nodes of each step, those with the largest mean absolute estimate over rows, are left out: the
            caller measures them exactly.
        target: as for the estimate.
        explain: as for the estimate.
        direction: as for the estimate.
        subsets: per step, one forward pass of the batch for each.
        share: chance of a node to be in a subset.
        confidence: of the bound.
        batch: subsets in one forward pass.
        seed: of the subsets.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: arguments that differ from the estimate's, or no node outside the top.
    """
    run = as_run(run)
    positions = estimate.positions
    setup = Setup.of(model, run, corrupted, target, estimate.steps, explain, direction, "missed_effects")
    nodes = NodeSet.of(setup, estimate.site, estimate.layers, positions, "missed_effects")
    contract = setup.contract(nodes.described, f"subset sampling, {subsets} subsets with {share:g} of the nodes")
    if other := [one for one in contract.differences(estimate.contract) if one != "method"]:
        ours, theirs = getattr(contract, other[0]), getattr(estimate.contract, other[0])
        raise ValueError(
            f"missed_effects: the estimate's {other[0]} is {theirs!r} and here {ours!r}; give the arguments "
            "that attribution_patching was given"
        )
    both, generator = BothSides(setup), torch.Generator().manual_seed(seed)
    many = setup.passes(setup.base, batch)
    put = Put(SITES[estimate.site], nodes.layers, many.halves, batch)
    effects, bounds = [torch.full_like(estimate.effects.double(), torch.nan) for _ in range(2)]
    steps = tqdm(setup.steps, desc="subsets", unit="step", disable=not progress)
    for index, step in enumerate(steps):
        keep = Keep(SITES[estimate.site], nodes.layers)
        start = both.start(step, [keep])
        put.values = values_of(both, step, keep.found)
        rest = _outside(list(nodes.at(both.base, step, put.values)), estimate.effects[index], top)
        groups = Groups(len(rest), len(start.base))
        for member in _drawn(subsets, len(rest), share, batch, generator):
            put.nodes = [(slot, rest[node][1]) for slot, node in member.nonzero().tolist()]
            decisions = many.decisions(step, [put], others=start.others)
            values = many.per_row(decisions, target).unflatten(0, (batch, -1)).cpu()
            groups.add(member, values[: len(member)].double() - start.base.double())
        for (where, _), change, most in zip(rest, groups.difference, groups.bound(confidence), strict=True):
            effects[(index, slice(None), *where)], bounds[(index, slice(None), *where)] = change, most
    effects, bounds = (nodes.of_content(setup.run, each) for each in (effects, bounds))
    return MissedEffects(contract, replace(estimate), top, subsets, share, confidence, effects, bounds)


def _outside(
    listed: list[tuple[Where, Node]], estimate: Float[Tensor, "batch layer head place"], top: int
) -> list[tuple[Where, Node]]:
    """The nodes of a step without its `top` strongest.

    Raises:
        ValueError: none is left.
    """
    if top >= len(listed):
        raise ValueError(f"missed_effects: top is {top} of a step's {len(listed)} nodes; leave some to bound")
    strength = [-float(estimate[(slice(None), *where)].abs().nanmean().nan_to_num()) for where, _ in listed]
    order = sorted(range(len(listed)), key=strength.__getitem__)
    return [listed[place] for place in sorted(order[top:])]


def _drawn(
    subsets: int, nodes: int, share: float, batch: int, generator: torch.Generator
) -> Iterator[Bool[Tensor, "subset node"]]:
    """Random subsets, at most `batch` at a time."""
    for first in range(0, subsets, batch):
        yield torch.rand(min(batch, subsets - first), nodes, generator=generator, dtype=torch.float32) < share


class Groups:
    """Sums over the subsets that have a node, and over those that lack it.

    Args:
        nodes: how many.
        rows: of the batch.
    """

    def __init__(self, nodes: int, rows: int) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64)
        self.count, self.sums, self.squares = zeros(2, nodes, 1), zeros(2, nodes, rows), zeros(2, nodes, rows)

    def add(self, member: Bool[Tensor, "subset node"], values: Float[Tensor, "subset row"]) -> None:
        """Count some subsets."""
        for group, inside in enumerate((~member, member)):
            weights = inside.T.double()
            self.count[group] += weights.sum(-1, keepdim=True)
            self.sums[group] += weights @ values
            self.squares[group] += weights @ values.square()

    @property
    def difference(self) -> Float[Tensor, "node row"]:
        """The mean with the node minus that without."""
        without, with_ = self.sums / self.count
        return with_ - without

    def bound(self, confidence: float) -> Float[Tensor, "node row"]:
        """|difference| + t(confidence, nu) s, infinite where a group has fewer than two subsets."""
        from scipy import stats

        spread = (self.squares - self.sums.square() / self.count).clamp(min=0) / (self.count - 1) / self.count
        error = spread.sum(0)
        degrees = error.square() / (spread.square() / (self.count - 1)).sum(0)
        # No spread at all: every subset had the same effect, and the bound is the difference.
        quantile = torch.as_tensor(stats.t.ppf(confidence, degrees.nan_to_num(1.0).numpy()))
        found = self.difference.abs() + quantile * error.sqrt()
        return torch.where((self.count >= 2).all(0), found, torch.inf)
