"""`edge_attribution`: the effect of every edge between parts of a network, by EAP and EAP-IG."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import AT_MOST, checked_arguments, whole
from dlm_lens.attention import attention_blocks, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.attribution.circuits import Circuit
from dlm_lens.probes.attribution.contract import Contract
from dlm_lens.probes.attribution.edge_graph import EdgeGraph
from dlm_lens.probes.attribution.setup import BothSides, Direction, Setup
from dlm_lens.probes.attribution.streams import Differences, Streams, graph_of
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Target
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EdgeScores(ShowsItself):
    """The estimated change of a target when one edge carries what its source writes in the other run.

    Args:
        contract: what this is an attribution of.
        run: the clean run.
        graph: sources and destinations.
        steps: steps of the run.
        scores: 0 where there is no edge.
        base: the target in the run that is patched.
        source: the target in the run that the values come from.

    Raises:
        ValueError: the shapes contradict each other.
    """

    contract: Contract
    run: DenoisingRun = field(repr=False)
    graph: EdgeGraph
    steps: tuple[int, ...]
    scores: Float[Tensor, "step batch source destination"]
    base: Float[Tensor, "step batch"]
    source: Float[Tensor, "step batch"]

    def __post_init__(self) -> None:
        sizes = {"source": len(self.graph.sources), "destination": len(self.graph.destinations)}
        check_shapes(self, step=len(self.steps), batch=len(self.run.tokens), **sizes)

    def __repr__(self) -> str:
        source, destination, score = self.table(1).iloc[0]
        edges, (steps, rows) = int(self.graph.exists.sum()), self.scores.shape[:2]
        strongest = f"strongest {source} -> {destination} {score:+.4g}"
        return f"EdgeScores({edges} edges, {steps} steps, {rows} rows; {strongest})\n{self.contract}"

    @property
    def mean(self) -> Float[Tensor, "source destination"]:
        """Summed over the steps, mean over the rows, as EAP averages prompts."""
        return self.scores.sum(0).mean(0)

    @property
    def from_input(self) -> Float[Tensor, "step batch"]:
        """The sum over the edges that leave the embedding.

        With integrated gradients it approaches target(other run) - target(base): the gradients at those edges are
        together that at the embedding (completeness, 1703.01365, proposition 1). In a mixture of experts the
        chosen experts change at once on the way, and it does not approach it. Between a run and the same run under
        hooks, whose embeddings are equal, it is 0.
        """
        return self.scores[:, :, 0].sum(-1)

    def circuit(self, edges: int) -> Circuit:
        """The `edges` edges of largest absolute mean score, without those on no path from embedding to logits.

        Raises:
            ValueError: fewer than 1 or more than there are.
        """
        return Circuit.of_scores(self.graph, self.mean, edges)

    @checked_arguments(top=AT_MOST)
    def table(self, top: int | None = 20) -> pd.DataFrame:
        """The edges of largest absolute mean score.

        Raises:
            ValueError: `top` is negative, or no whole number.
        """
        mean = self.mean
        order = mean.abs().masked_fill(~self.graph.exists, -1.0).flatten().argsort(descending=True, stable=True)
        count = int(self.graph.exists.sum())
        order = order[: count if top is None else min(top, count)]
        one, two = torch.unravel_index(order, mean.shape)
        return pd.DataFrame(
            {
                "source": [self.graph.sources[i] for i in one.tolist()],
                "destination": [self.graph.destinations[i] for i in two.tolist()],
                "score": mean.flatten()[order].tolist(),
            }
        )


@checked_arguments(integration=whole(least=0), steps=None)
@exclusive
def edge_attribution(
    model: Any,
    run: RunLike,
    corrupted: Any,
    *,
    target: Target = LOGIT_DIFFERENCE,
    steps: Sequence[int] | None = None,
    explain: Sequence[int] | None = None,
    direction: Direction = "noising",
    integration: int = 5,
    progress: bool = False,
) -> EdgeScores:
    """Attribute a target to every edge of the network, at every step, with gradients.

    score(u -> v) = (u' - u) . d target / d (input of v), where u is what a part adds to the residual stream in the
    base, u' in the other run, and the gradient is that of the stream as v alone reads it, before v's norm: EAP
    (2310.10348), with the norms treated as in the code of EAP-IG. With `integration` m > 0 the gradient is the mean
    over m passes whose first input is base + a (other - base): EAP-IG (2403.17806, section 3). We take the
    midpoints a = (k + 1/2) / m, its code takes a = k / m. The paper uses m = 5. Hooks as `corrupted` leave the
    first input as it is, so that there is no path to integrate along: the scores are those of EAP.

    A pass costs one backward pass through the network, and one through the projections of each head. In a mixture
    of experts (LLaDA2, LLaDA-MoE) the gradient is that of the chosen experts and has no part for another choice:
    the scores do not add up, and a warning says so.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, the clean run.
        corrupted: as for `activation_patching`, but no ablation: a prompt, a run, or hooks.
        target: one number per entry.
        steps: of the run; None for all that decide something.
        explain: canvas positions whose tokens the target reads; None for those that the step decides.
        direction: "noising" or "denoising".
        integration: passes of the integral; 0 for plain EAP.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: as `activation_patching`; a model whose parts do not add up to its residual stream, or
            with gated attention; a run with an approximate cache.
    """
    run = as_run(run)
    setup = Setup.of(model, run, corrupted, target, steps, explain, direction, "edge_attribution")
    graph = check_edges(setup, "edge_attribution")
    _warn_of_experts(model)
    both = BothSides(setup)
    if torch.equal(setup.base.run.canvases, setup.values_from.run.canvases):
        integration = 0  # the integral would be the mean of equal passes
    scores: list[Tensor] = []
    starts = []
    for step in tqdm(setup.steps, desc="edges", unit="step", disable=not progress):
        start = both.start(step, [])
        one, two = Streams(both.base), Streams(both.source)
        with torch.no_grad():
            one.decisions(step)
            two.decisions(step)
        differences = Differences(graph, model, one, two, "edge_attribution")
        total = torch.zeros(())
        for part in range(max(integration, 1)):
            kept = Streams(both.base, reads=True)
            if integration:
                share = (part + 0.5) / integration
                kept.first.put = one.first.given + share * differences.embed
            decisions = kept.decisions(step, others=start.others, grad=True)
            with torch.enable_grad():
                value = both.base.per_row(decisions, target).sum()
            total = total + _scores(kept, value, differences) / max(integration, 1)
        halves = total.unflatten(0, (both.base.halves, -1)).sum(0)
        scores.append(halves.cpu())
        starts.append(start)
    method = f"EAP-IG, {integration} midpoints" if integration else "EAP"
    return EdgeScores(
        contract=setup.contract("edges from embedding, heads and MLPs to q, k, v, MLPs and logits", method),
        run=setup.run,
        graph=graph,
        steps=setup.steps,
        scores=torch.stack(scores),
        base=torch.stack([one.base for one in starts]),
        source=torch.stack([one.source for one in starts]),
    )


def _warn_of_experts(model: Any) -> None:
    blocks = attention_blocks(model)
    if any(name.rpartition(".")[-1] == "experts" for block in blocks for name, _ in block.named_modules()):
        logger.warning(
            "edge_attribution: %s routes tokens to some of its experts, and gradients do not follow a change of "
            "that choice: the scores need not add up to the change of the target. Compare from_input with source - "
            "base, and test a circuit with faithfulness, which patches exactly",
            type(model).__name__,
        )


def check_edges(setup: Setup, who: str) -> EdgeGraph:
    """The graph of a setup whose edges can be attributed.

    Raises:
        ValueError: an ablation, a run with a cache, or as `graph_of`.
    """
    if isinstance(setup.source, str):
        raise ValueError(f"{who}: corrupted is {setup.source!r}; give a prompt, a run or hooks")
    graph = graph_of(setup.model, who)
    if setup.run.computed:
        raise ValueError(
            f"{who}: a run with a cache reads keys of earlier steps, which are no edges of this one; denoise "
            "without cache=, or with use_cache=False"
        )
    return graph


def _scores(kept: Streams, value: Tensor, differences: Differences) -> Float[Tensor, "row source destination"]:
    """The scores of one pass with its graph, rows of guidance's halves one after the other."""
    graph, layers = differences.graph, range(differences.graph.layers)
    wanted = [*(kept.reads[name].found[i] for name in ("rot_q", "rot_k", "v") for i in layers)]
    wanted += [*(kept.mlp.found[i] for i in layers), kept.last.found[graph.layers - 1]]
    found = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
    grads = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
    rows = differences.embed.shape[0]
    # In half precision the sum over the passes of an integral would lose what each of them adds.
    wide = torch.promote_types(differences.embed.dtype, torch.float32)
    scores = differences.embed.new_zeros(rows, len(graph.sources), len(graph.destinations), dtype=wide)
    for layer in layers:
        before = graph.heads_at(layer).start
        reads = _read_gradients(kept, layer, [grads[i * graph.layers + layer] for i in range(3)])
        scores[:, :, graph.reads_at(layer)] = differences.along(reads, before)
        # Attention acts on the MLP of its layer by the stream alone: this is the gradient at the MLP's input.
        mlp = _local(kept.mlp.found[layer], kept.reads["attn_out"].found[layer], grads[3 * graph.layers + layer])
        scores[:, :, graph.mlp_input_at(layer), None] = differences.along(mlp[None], graph.mlp_at(layer))
    scores[:, :, -1, None] = differences.along(grads[-1][None], len(graph.sources))
    return scores * graph.exists.to(scores.device)


def _read_gradients(
    kept: Streams, layer: int, grads: Sequence[Tensor]
) -> Float[Tensor, "destination row position d_model"]:
    """The gradient of the stream before a layer as each head's queries, keys or values read it."""
    found = []
    for name, grad in zip(("rot_q", "rot_k", "v"), grads, strict=True):
        for head in range(grad.shape[2]):
            alone = torch.zeros_like(grad)
            alone[:, :, head] = grad[:, :, head]
            found.append(_local(kept.reads[name].found[layer], kept.inputs[layer], alone))
    return torch.stack(found)


def _local(output: Tensor, stream: Tensor, gradient: Tensor) -> Tensor:
    """The gradient at a stream through one part of a layer alone.

    Raises:
        ValueError: the part does not read the stream.
    """
    found = torch.autograd.grad(output, stream, gradient, retain_graph=True, allow_unused=True)[0]
    if found is None:
        raise ValueError(
            "edge_attribution: a part of a layer does not read the stream after the part before it, as where "
            "attention and MLP are parallel; take activation_patching"
        )
    return found
