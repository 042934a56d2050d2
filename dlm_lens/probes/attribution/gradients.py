"""`attribution_patching`: the effect of every node from gradients, two forward passes and one backward a step."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import ONE_SEED, checked_arguments, flag
from dlm_lens.attention import AttentionInputs, Site, attention_blocks, exclusive, hooked_attentions
from dlm_lens.probes.attribution.node_effects import OF_HEADS, SITES, NodeEffects, NodeSite
from dlm_lens.probes.attribution.passes import FirstInput, Keep, Passes
from dlm_lens.probes.attribution.patching import NodeSet, values_of
from dlm_lens.probes.attribution.setup import BothSides, Direction, Setup, Start
from dlm_lens.probes.attribution.softmax import SoftmaxEffects
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Target
from dlm_lens.sampling.run_like import RunLike, as_run


@checked_arguments(kept=flag(), qk_fix=flag(), grad_drop=flag(), steps=None, seed=ONE_SEED)
@exclusive
def attribution_patching(
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
    qk_fix: bool = True,
    grad_drop: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> NodeEffects:
    """Estimate what `activation_patching` measures, for all nodes at once, from the gradient of the target.

    effect = (value - base) . d target / d base (attribution patching, Nanda 2023), exact where the target is linear
    in the node. AtP* (2403.00745) mends two of its failures:

    - `qk_fix` (section 3.1.1): for "q" and "k" the softmax is computed with the other queries or keys, and only
      what follows it is linearised: sum_ij dL/dA_ij (A'_ij - A_ij). At single positions a key is replaced alone.
    - `grad_drop` (section 3.1.2): the mean of |effect| over passes in each of which the gradient through one
      layer's attention and MLP is dropped, sum_l |effect_l| / (L - 1), so that effects which cancel each other
      between layers show. In the pass of its own layer a node has none; the stream after a layer ("resid") is in
      none, so that its sum is divided by L. It has no sign, and costs one backward pass for each layer.

    AtP*'s bound on what the ranking missed is `missed_effects`.

    Args:
        model: as `activation_patching`; so are the arguments that are not listed.
        run: the clean run.
        corrupted: where other values come from.
        site: the kind of node.
        target: one number per entry.
        steps: of the run; each is linearised on its own stored canvas.
        layers: None for all.
        positions: canvas positions; None for the sum over all.
        explain: canvas positions whose tokens the target reads.
        direction: which run is patched.
        kept: gradients by the earlier pass, through the keys and values that the step reads from a cache. The
            QK fix is of one softmax and is left out.
        qk_fix: for queries and keys.
        grad_drop: absolute effects without cancellation.
        seed: of the intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: as `activation_patching`; `qk_fix` in a model whose attention is not a plain softmax.
    """
    run = as_run(run)
    setup = Setup.of(model, run, corrupted, target, steps, explain, direction, "attribution_patching", kept)
    nodes = NodeSet.of(setup, site, layers, positions, "attribution_patching")
    if kept and grad_drop:
        raise ValueError("attribution_patching: grad_drop is of one pass; leave kept or grad_drop out")
    fix = qk_fix and site in ("q", "k") and not kept
    both = BothSides(setup)
    effects: list[Tensor] = []
    starts: list[Start] = []
    for step in tqdm(setup.steps, desc="attribution", unit="step", disable=not progress):
        keep = Keep(SITES[site], nodes.layers)
        start = both.start(step, [keep])
        values = values_of(both, step, keep.found)
        backward = Backward(both.base, step, setup.target, start, SITES[site], nodes.layers, drops=grad_drop)
        estimate = partial(_estimate, backward, values, nodes, both.base, step, fix)
        effects.append(backward.dropped(estimate) if grad_drop else estimate())
        starts.append(start)
    method = "attribution patching" + " with the QK fix" * fix + " and GradDrop (absolute)" * grad_drop
    return NodeEffects(
        contract=setup.contract(nodes.described, method),
        run=setup.run,
        site=site,
        steps=setup.steps,
        layers=nodes.layers,
        positions=nodes.positions,
        effects=nodes.of_content(setup.run, torch.stack(effects)),
        base=torch.stack([one.base for one in starts]),
        source=torch.stack([one.source for one in starts]),
        seed=seed,
    )


class Backward:
    """A pass of the base with its graph, and gradients of the target.

    Args:
        passes: of the base.
        step: of the run.
        target: of every row.
        start: of the step.
        site: whose gradients are wanted.
        layers: in which.
        drops: `dropped` will be called.
    """

    def __init__(
        self,
        passes: Passes,
        step: int,
        target: Target,
        start: Start,
        site: Site,
        layers: tuple[int, ...],
        *,
        drops: bool = False,
    ) -> None:
        self.keep, self.z = Keep(site, layers), Keep("z", layers)
        self.written = [Keep("attn_out"), Keep("mlp_out")] if drops else []
        self.inputs: dict[int, AttentionInputs] = {}
        self.depth = len(attention_blocks(passes.model))
        modules = hooked_attentions(passes.model)
        with ExitStack() as stack:
            for module in modules:
                stack.callback(setattr, module.hook_z, "readers", module.hook_z.readers)
                module.hook_z.readers = (*module.hook_z.readers, self._read)
            hooks = [self.keep, self.z, *self.written]
            first = FirstInput(leaf=True)
            decisions = passes.decisions(step, hooks, first=first, others=start.others, grad=True)
        with torch.enable_grad():
            self.total = passes.per_row(decisions, target).sum()

    def gradients(self, of_z: bool = False) -> dict[int, Tensor]:
        """Layer -> d target / d activation; of z where `of_z`."""
        keep = self.z if of_z else self.keep
        tensors = list(keep.found.values())
        found = torch.autograd.grad(self.total, tensors, retain_graph=True, allow_unused=True)
        return {
            layer: torch.zeros_like(tensor) if one is None else one
            for (layer, tensor), one in zip(keep.found.items(), found, strict=True)
        }

    def dropped(self, estimate: Callable[[], Tensor]) -> Tensor:
        """The sum over l of |estimate with the gradient through layer l's attention and MLP dropped|, over L - 1.

        L - 1 passes have a value, all but that of the node's own layer. The residual stream is in no layer: over L.

        Raises:
            ValueError: a model of one layer.
        """
        if self.depth < 2:
            raise ValueError(
                "grad_drop needs two layers: with the gradient of the only one dropped nothing is left"
            )
        found: list[Tensor] = []
        for layer in range(self.depth):
            handles = [keep.found[layer].register_hook(torch.zeros_like) for keep in self.written]
            try:
                found.append(estimate().abs())
            finally:
                for handle in handles:
                    handle.remove()
        return torch.stack(found).sum(0) / (self.depth - (self.keep.site != "resid"))

    def _read(self, inputs: AttentionInputs) -> None:
        self.inputs[inputs.layer] = inputs


def _estimate(
    backward: Backward, values: dict[int, Tensor], nodes: NodeSet, passes: Passes, step: int, fix: bool
) -> Float[Tensor, "batch layer head place"]:
    """The effects of a step's nodes, as `activation_patching` orders them."""
    gradients = backward.gradients(of_z=fix)
    found = nodes.empty(passes.rows, values)
    places = nodes.places(passes, step, next(iter(values.values())).shape[1])
    for index, layer in enumerate(nodes.layers):
        if fix:
            softmax = SoftmaxEffects(backward.inputs[layer], gradients[layer], "take qk_fix=False, or other nodes")
            linear = _through_softmax(softmax, values[layer], nodes)
        else:
            change = values[layer] - backward.keep.found[layer].detach()
            linear = (change * gradients[layer]).sum(-1)
            linear = linear if nodes.site in OF_HEADS else linear[..., None]
        halves = linear.unflatten(0, (passes.halves, -1)).sum(0).cpu().to(found)  # [batch, position, head]
        for place, where in places:
            chosen = halves.sum(1) if where is None else halves[:, where]
            found[:, index, : chosen.shape[1], place] = chosen
    return found


def _through_softmax(softmax: SoftmaxEffects, values: Tensor, nodes: NodeSet) -> Float[Tensor, "row position head"]:
    """The effects of other queries or keys, with the softmax computed again; a size of 1 for all positions."""
    if nodes.site == "q":
        own = softmax.of_queries(values).transpose(1, 2)
        found = own.new_zeros(len(own), values.shape[1], own.shape[-1])
        where = softmax.inputs.own if own.shape[1] != values.shape[1] else slice(None)
        found[:, where] = own
        return found
    if nodes.positions is None:
        return softmax.of_keys(values)[:, None]
    return softmax.of_each_key(values).transpose(1, 2)
