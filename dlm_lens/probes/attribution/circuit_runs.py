"""`faithfulness`: a circuit measured exactly, with every other edge carrying the other run."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import ONE_SEED, checked_arguments
from dlm_lens.attention import Hook, PointContext, Site, attention_blocks, attention_of, exclusive, output_weight
from dlm_lens.attention.layers import output_projection
from dlm_lens.probes.attribution.circuits import CIRCUIT, Circuit
from dlm_lens.probes.attribution.contract import Contract
from dlm_lens.probes.attribution.edges import check_edges
from dlm_lens.probes.attribution.passes import Passes
from dlm_lens.probes.attribution.setup import BothSides, Direction, Setup
from dlm_lens.probes.attribution.streams import Differences, Streams
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Target
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import Estimate, estimate, prompts_or_rows, ratio_of, summed


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """A target with a circuit's edges in the base and all others in the other run.

    Args:
        contract: what this is a measurement of.
        circuit: the edges.
        steps: steps of the run.
        kept: the target of every step and row.
        base: with all edges in the base.
        source: with all edges in the other run.
        seed: of the interval.
        row_prompts: the number of each row's prompt (`DenoisingRun.row_prompts`); None: each row is one of its own.

    Raises:
        ValueError: the shapes contradict each other.
    """

    contract: Contract
    circuit: Circuit
    steps: tuple[int, ...]
    kept: Float[Tensor, "step batch"]
    base: Float[Tensor, "step batch"]
    source: Float[Tensor, "step batch"]
    seed: int = 0
    row_prompts: Int[Tensor, "batch"] | None = None

    def __post_init__(self) -> None:
        check_shapes(self, step=len(self.steps))

    def __repr__(self) -> str:
        return f"Faithfulness({self.normalised} by {self.circuit})\n{self.contract}"

    @property
    def normalised(self) -> Estimate:
        """Sum (kept - source) / sum (base - source): 1 for the whole network, 0 for none (2403.17806, section 4).

        The sums are over steps and rows; the interval is over prompts.
        """
        above, whole = ((one - self.source).sum(0).double().numpy() for one in (self.kept, self.base))
        ones = np.ones_like(above)
        rows, prompt = len(ones), prompts_or_rows(self.row_prompts, len(ones))
        sums = summed(np.stack([above, ones, whole, ones], -1), prompt, rows)
        return estimate(sums, ratio_of, seed=self.seed)


@checked_arguments(steps=None, circuit=CIRCUIT, seed=ONE_SEED)
@torch.no_grad()
@exclusive
def faithfulness(
    model: Any,
    run: RunLike,
    corrupted: Any,
    circuit: Circuit,
    *,
    target: Target = LOGIT_DIFFERENCE,
    steps: Sequence[int] | None = None,
    explain: Sequence[int] | None = None,
    direction: Direction = "noising",
    seed: int = 0,
    progress: bool = False,
) -> Faithfulness:
    """Run the base with every edge outside a circuit carrying what its source writes in the other run.

    The input of destination v is the stream minus sum over (u, v) outside the circuit of (u - u'), where u is what
    the source writes in this very pass and u' in the other run. Nothing is linearised. Each destination has an
    input of its own, so that a layer computes its queries, keys and values once for each head.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, the clean run.
        corrupted: as for `edge_attribution`.
        circuit: of a network with as many layers and heads, such as `EdgeScores.circuit(k)`.
        target: one number per entry.
        steps: of the run; None for all that decide something.
        explain: canvas positions whose tokens the target reads; None for those that the step decides.
        direction: "noising" or "denoising".
        seed: of the interval.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: as `edge_attribution`, or a circuit of another graph.
    """
    run = as_run(run)
    setup = Setup.of(model, run, corrupted, target, steps, explain, direction, "faithfulness")
    graph = check_edges(setup, "faithfulness")
    if circuit.graph != graph:
        raise ValueError(f"faithfulness: the circuit is of {circuit.graph} and the model is {graph}")
    both = BothSides(setup)
    kept, starts = [], []
    for step in tqdm(setup.steps, desc="circuit", unit="step", disable=not progress):
        start = both.start(step, [])
        one, other = Streams(both.base), Streams(both.source)
        one.decisions(step)
        other.decisions(step)
        Differences(graph, model, one, other, "faithfulness")  # refuses a network without such edges
        decisions = _CircuitPass(both.base, circuit, other).decisions(step, start.others)
        kept.append(both.base.per_row(decisions, target).cpu())
        starts.append(start)
    return Faithfulness(
        contract=setup.contract(f"{circuit}", "every other edge patched, exact at each step"),
        circuit=circuit,
        steps=setup.steps,
        kept=torch.stack(kept),
        base=torch.stack([one.base for one in starts]),
        source=torch.stack([one.source for one in starts]),
        seed=seed,
        row_prompts=run.row_prompts,
    )


@dataclass(eq=False)
class _At(Hook):
    """A site of a circuit's pass."""

    site: Site
    of: "_CircuitPass" = field(repr=False)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """What the pass puts there."""
        return self.of.at(self.site, hook.layer(), tensor)


class _CircuitPass:
    """One pass in which every destination reads a stream of its own.

    At the beginning of a layer the layer is run once more on the streams of all its queries, keys and values, one
    after the other in the batch; at its MLP on the MLP's stream. What these inner runs compute replaces what the
    layer computes itself.

    Args:
        passes: of the base.
        circuit: the edges that stay.
        other: the kept pass of the other run.
    """

    def __init__(self, passes: Passes, circuit: Circuit, other: Streams) -> None:
        self.passes, self.circuit, self.graph, self.other = passes, circuit, circuit.graph, other
        self.blocks: list[Any] = attention_blocks(passes.model)
        self.differences = _Current(other, circuit, passes.model)
        self.inner: str = ""
        self.read: dict[str, Tensor] = {}
        self.stream = self.attended = torch.empty(0)
        self.call: tuple[Any, Any] = ((), {})

    def decisions(self, step: int, others: Tensor) -> Any:
        """The decisions of the base with the circuit."""
        sites: tuple[Site, ...] = ("rot_q", "rot_k", "v", "attn_out", "mlp_out", "resid")
        with ExitStack() as stack:
            for layer, block in enumerate(self.blocks):
                stack.callback(block.register_forward_pre_hook(self._enter(layer), with_kwargs=True).remove)
                projection = output_projection(attention_of(block))
                stack.callback(projection.register_forward_pre_hook(self._heads(layer)).remove)
            return self.passes.decisions(step, [_At(site, self) for site in sites], others=others)

    def at(self, site: Site, layer: int, tensor: Tensor) -> Tensor:
        """What an activation becomes."""
        if site in ("rot_q", "rot_k", "v"):
            if self.inner:
                self.read[site] = tensor
                return tensor
            return self._assembled(site, tensor)
        if site == "attn_out":
            if self.inner == "mlp":
                return self.attended
            self.attended = tensor
            return tensor
        if site == "mlp_out":
            if self.inner:
                self.read[site] = tensor
                return tensor
            return self._mlp(layer)
        if self.inner or layer < self.graph.layers - 1:
            return tensor
        return tensor - self.differences.removed([len(self.graph.destinations) - 1])[0]

    def _enter(self, layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            """Keep the layer's input, and run the layer inside on what its heads read."""
            if self.inner:
                return
            self.stream = args[0] if args else kwargs["hidden_states"]
            self.call = (args, kwargs)
            if layer == 0:
                self.differences.embed(self.stream)
            reads = self.graph.reads_at(layer)
            streams = self.stream - self.differences.removed(range(reads.start, reads.stop))
            self._run_inner(layer, "reads", streams)

        return hook

    def _heads(self, layer: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            if not self.inner:
                self.differences.heads(layer, args[0])

        return hook

    def _assembled(self, site: str, tensor: Tensor) -> Tensor:
        """Every head as computed from its own stream."""
        start = {"rot_q": 0, "rot_k": self.graph.heads, "v": self.graph.heads + self.graph.kv_heads}[site]
        count = tensor.shape[2]
        found = self.read[site].unflatten(0, (-1, len(tensor)))[start : start + count]
        return torch.stack([found[head, :, :, head] for head in range(count)], 2)

    def _mlp(self, layer: int) -> Tensor:
        attended = self.attended
        removed = self.differences.removed([self.graph.mlp_input_at(layer)])[0]
        self.attended = attended - removed
        self._run_inner(layer, "mlp", self.stream[None])
        found = self.read["mlp_out"]
        self.differences.mlp(layer, found)
        return found

    def _run_inner(self, layer: int, what: str, streams: Float[Tensor, "copy row position d_model"]) -> None:
        args, kwargs = self.call
        copies, rows = streams.shape[:2]

        def copied(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == rows > 1:
                return value.repeat(copies, *[1] * (value.ndim - 1))
            return type(value)(map(copied, value)) if type(value) in (list, tuple) else value

        given = {name: copied(value) for name, value in kwargs.items() if name != "hidden_states"}
        with self._inside(what):
            self.blocks[layer](streams.flatten(0, 1), *map(copied, args[1:]), **given)

    @contextmanager
    def _inside(self, what: str) -> Iterator[None]:
        self.inner = what
        try:
            yield
        finally:
            self.inner = ""


class _Current:
    """What the sources write in the present pass more than in the other run.

    Args:
        other: the kept pass of the other run.
        circuit: the edges that stay.
        model: of both.
    """

    def __init__(self, other: Streams, circuit: Circuit, model: Any) -> None:
        self.other, self.graph = other, circuit.graph
        self.outside: Bool[Tensor, "source destination"] = circuit.graph.exists & ~circuit.edges
        self.weights = [output_weight(attention_of(block)).detach() for block in attention_blocks(model)]
        self._embed = torch.empty(0)
        self._heads: dict[int, Tensor] = {}
        self._mlp: dict[int, Tensor] = {}

    def embed(self, stream: Tensor) -> None:
        """The first layer's input."""
        self._embed = stream - self.other.first.given

    def heads(self, layer: int, given: Tensor) -> None:
        """The heads' outputs, before W_O."""
        self._heads[layer] = given - self.other.heads[layer]

    def mlp(self, layer: int, given: Tensor) -> None:
        """The MLP's output."""
        self._mlp[layer] = given - self.other.mlp.found[layer]

    def removed(self, destinations: Sequence[int] | range) -> Float[Tensor, "destination row position d_model"]:
        """For every destination the sum over its edges outside the circuit."""
        outside = self.outside[:, list(destinations)].to(self._embed)
        found = outside[0][:, None, None, None] * self._embed
        for layer, heads in self._heads.items():
            own = heads.unflatten(-1, (self.graph.heads, -1))
            chosen = outside[self.graph.heads_at(layer)]  # [head, destination]
            if bool(chosen.any()):
                kept = torch.einsum("hn,bphd->nbphd", chosen, own).flatten(-2)
                found = found + kept @ self.weights[layer]
        for layer, mlp in self._mlp.items():
            found = found + outside[self.graph.mlp_at(layer)][:, None, None, None] * mlp
        return found
