"""`activation_patching`: the exact effect of every node, one forward pass for each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import ONE_SEED, checked_arguments, chosen_indices, flag, whole
from dlm_lens.attention import Hook, PointContext, Site, attention_blocks, exclusive
from dlm_lens.printable import shown
from dlm_lens.probes.attribution.node_effects import OF_HEADS, SITES, NodeEffects, NodeSite
from dlm_lens.probes.attribution.passes import Keep, Passes
from dlm_lens.probes.attribution.setup import BothSides, Direction, Setup, ablated, canvas_part
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Target
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.run_like import RunLike, as_run


class Node(NamedTuple):
    """One activation that is patched.

    Args:
        layer: index of the layer.
        head: of the head; None for what has no heads.
        place: index of the network's position; None for all positions.
    """

    layer: int
    head: int | None
    place: int | None


@dataclass(eq=False)
class Put(Hook):
    """Puts values into nodes, other nodes in every repetition of the rows.

    Args:
        site: of the nodes.
        layers: in which any is.
        halves: how often guidance repeats the batch.
        times: how often the rows are repeated.
        values: layer -> the activation that the values are taken from, of the rows once.
        nodes: pairs of a repetition and a node; a repetition may have several, or none and stays as it is.
    """

    site: Site
    layers: tuple[int, ...] = field()
    halves: int = 1
    times: int = 1
    values: dict[int, Tensor] = field(default_factory=dict)
    nodes: Sequence[tuple[int, Node]] = ()

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """The activation with the values in its nodes."""
        mine = [(slot, node) for slot, node in self.nodes if node.layer == hook.layer()]
        if not mine:
            return tensor
        edited = tensor.clone()
        rows = edited.unflatten(0, (self.halves, self.times, -1))
        source = self.values[hook.layer()].to(tensor).unflatten(0, (self.halves, -1))
        for slot, node in mine:
            place = slice(None) if node.place is None else node.place
            head: tuple[int, ...] = () if node.head is None else (node.head,)
            rows[(slice(None), slot, slice(None), place, *head)] = source[(slice(None), slice(None), place, *head)]
        return edited


@checked_arguments(kept=flag(), batch=whole(least=1), steps=None, seed=ONE_SEED)
@torch.no_grad()
@exclusive
def activation_patching(
    model: Any,
    run: RunLike,
    corrupted: Any,
    site: NodeSite = "z",
    *,
    target: Target = LOGIT_DIFFERENCE,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    explain: Sequence[int] | None = None,
    direction: Direction = "noising",
    kept: bool = False,
    batch: int = 32,
    seed: int = 0,
    progress: bool = False,
) -> NodeEffects:
    """The effect of every node on a target: run a step's canvas again with the node's value from another run.

    effect = target(patched) - target(base), of every row. It is exact for the step: nothing is linearised. A node
    is patched at one step, on that step's stored canvas, so that no other step changes; `NodeEffects.summed` adds
    the steps. One forward pass of the run's batch for each node, `batch` nodes of it at a time.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, the clean run.
        corrupted: where other values come from: a prompt with as many tokens in every row, which replaces the
            run's on every canvas; a `DenoisingRun` of the same shape, on its own canvases; a hook or hooks; "zero",
            or "mean", the mean over the row's open (decided) positions at the step.
        site: the kind of node: "z", "q", "k", "v" (of every head; q and k after rotation), "attn_out", "mlp_out" or
            "resid".
        target: one number per entry (`LogitDifference(...)`, `LogProbability()`, or a function of `Decisions`).
        steps: of the run, negative from the end; None for all that decide something.
        layers: None for all.
        positions: canvas positions, each a node of its own; None for the activation at all positions as one node.
        explain: the canvas positions whose tokens the target reads, where they are open; None for those that the
            step decides.
        direction: "noising" puts the corrupted run's values into the clean one, "denoising" the reverse.
        kept: patch the earlier whole pass whose keys and values the step reads from an approximate cache, and the
            step itself nowhere: the effect of a node of that step on a later one, through the cache alone.
        batch: nodes in one forward pass.
        seed: of the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run of another model or shape, a site, step, layer or position that is not there, or a step
            with nothing to explain.
    """
    run = as_run(run)
    setup = Setup.of(model, run, corrupted, target, steps, explain, direction, "activation_patching", kept)
    nodes = NodeSet.of(setup, site, layers, positions, "activation_patching")
    both = BothSides(setup)
    many = setup.passes(setup.base, batch)
    put = Put(SITES[site], nodes.layers, many.halves, batch)
    effects, targets = [], []
    for step in tqdm(setup.steps, desc="patching", unit="step", disable=not progress):
        keep = Keep(SITES[site], nodes.layers)
        start = both.start(step, [keep])
        put.values = values_of(both, step, keep.found)
        found = nodes.empty(len(start.base), put.values)
        listed = list(nodes.at(both.base, step, put.values))
        chunks = tqdm(range(0, len(listed), batch), desc=f"step {step}", leave=False, disable=not progress)
        for first in chunks:
            chunk = listed[first : first + batch]
            put.nodes = [(slot, node) for slot, (_, node) in enumerate(chunk)]
            decisions = many.decisions(step, [put], others=start.others)
            values = many.per_row(decisions, target).unflatten(0, (batch, -1)).cpu()
            for slot, (where, _) in enumerate(chunk):
                found[(slice(None), *where)] = (values[slot] - start.base).to(found)
        effects.append(found)
        targets.append(start)
    return NodeEffects(
        contract=setup.contract(nodes.described, "activation patching, exact at each step"),
        run=setup.run,
        site=site,
        steps=setup.steps,
        layers=nodes.layers,
        positions=nodes.positions,
        effects=nodes.of_content(setup.run, torch.stack(effects)),
        base=torch.stack([one.base for one in targets]),
        source=torch.stack([one.source for one in targets]),
        seed=seed,
    )


def values_of(both: BothSides, step: int, kept: dict[int, Tensor]) -> dict[int, Tensor]:
    """The values that are put in: the kept activations of the source, or an ablation's."""
    if both.ablation is None:
        return dict(kept)
    return {layer: ablated(both.ablation, tensor, both.base, step) for layer, tensor in kept.items()}


@dataclass(frozen=True)
class NodeSet:
    """The nodes of a call.

    Args:
        site: their kind.
        layers: of the model.
        positions: of the canvas; None for activations at all positions.
    """

    site: str
    layers: tuple[int, ...]
    positions: tuple[int, ...] | None

    @classmethod
    def of(
        cls, setup: Setup, site: str, layers: Sequence[int] | None, positions: Sequence[int] | None, who: str
    ) -> "NodeSet":
        """Checked arguments.

        Raises:
            ValueError: an unknown kind, or a layer or a position that is not there.
        """
        if not isinstance(site, str) or site not in SITES:
            raise ValueError(f"{who}: site is {shown(site)}; it must be one of {', '.join(SITES)}")
        chosen = chosen_indices("layer", layers, len(attention_blocks(setup.model)), f"{who}: ")
        length = setup.run.tokens.shape[1]
        places = None if positions is None else chosen_indices("position", positions, length, f"{who}: ")
        return cls(site, chosen, places)

    @property
    def described(self) -> str:
        """The nodes, as a contract says it."""
        what = (
            f"{self.site} of {'every head of ' * (self.site in OF_HEADS)}layers {', '.join(map(str, self.layers))}"
        )
        if self.positions is None:
            return f"{what}, at all positions together"
        return f"{what}, at canvas positions {', '.join(map(str, self.positions))} each"

    def heads(self, values: dict[int, Tensor]) -> int:
        """How many heads the activations have at most; 1 for what has none."""
        return max(value.shape[2] for value in values.values()) if self.site in OF_HEADS else 1

    def empty(self, rows: int, values: dict[int, Tensor]) -> Tensor:
        """[batch, layer, head, place] of NaN."""
        places = 1 if self.positions is None else len(self.positions)
        return torch.full((rows, len(self.layers), self.heads(values), places), torch.nan, dtype=torch.float64)

    def of_content(self, run: DenoisingRun, effects: Float[Tensor, "step batch layer head place"]) -> Tensor:
        """Effects with NaN for nodes at the padding of a row, which are none of its network."""
        if self.positions is None:
            return effects
        return effects.masked_fill(~run.attention_mask[:, None, None, list(self.positions)], torch.nan)

    def at(
        self, passes: Passes, step: int, values: dict[int, Tensor]
    ) -> Iterator[tuple[tuple[int, int, int], Node]]:
        """The nodes that a step has, with their indices in `empty`."""
        places = self.places(passes, step, next(iter(values.values())).shape[1])
        heads: Sequence[int | None] = range(self.heads(values)) if self.site in OF_HEADS else [None]
        for (i, layer), (j, head), (k, place) in product(enumerate(self.layers), enumerate(heads), places):
            # Layers of one model may have unequal numbers of key/value heads.
            if head is None or head < values[layer].shape[2]:
                yield (i, j, k), Node(layer, head, place)

    def places(self, passes: Passes, step: int, positions: int) -> list[tuple[int, int | None]]:
        """The network's position of every canvas position that the activation has; None for all."""
        if self.positions is None:
            return [(0, None)]
        seen, canvas = canvas_part(passes, step, positions), passes.layout.canvas(positions)
        return [
            (index, canvas.start + position - seen.start)
            for index, position in enumerate(self.positions)
            if seen.start <= position < seen.stop
        ]
