"""`NodeEffects`: what patching a node changes, for every (step, layer, head) and perhaps position."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.arguments import AT_MOST, checked_arguments, instance
from dlm_lens.attention import Site
from dlm_lens.display import ShowsItself
from dlm_lens.probes.attribution.contract import Contract
from dlm_lens.probes.updates import spearman
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import CORRELATION_BOUNDS, Estimate, estimate_mean

NodeSite = Literal["z", "q", "k", "v", "attn_out", "mlp_out", "resid"]
"""A kind of node: a head's output before W_O, its queries, keys or values (after rotation), the output of attention
or of the MLP of a layer, the residual stream after a layer."""

SITES: dict[str, Site] = {
    "z": "z", "q": "rot_q", "k": "rot_k", "v": "v", "attn_out": "attn_out", "mlp_out": "mlp_out", "resid": "resid",
}  # fmt: skip
"""Kind of node -> the site of its hook point."""

OF_HEADS = ("z", "q", "k", "v")
"""The kinds with a node per head; of k and v per key/value head."""


def strongest(effects: Float[Tensor, "*axes"], top: int | None) -> Int[Tensor, "effect"]:
    """Indices of the flattened effects by their absolute value, the largest first: the `top`, or all but NaN."""
    flat = effects.abs().nan_to_num(-1.0).flatten()
    count = int((flat >= 0).sum())
    return flat.argsort(descending=True, stable=True)[: count if top is None else min(top, count)]


@dataclass(frozen=True, eq=False)
class NodeEffects(ShowsItself):
    """The change of a target when a node is given other values: target(patched) - target(base), of every row.

    Args:
        contract: what this is an attribution of.
        run: the clean run.
        site: the kind of node.
        steps: steps of the run.
        layers: layers of the nodes.
        positions: canvas positions of the nodes; None where a node is the activation at all positions.
        effects: exact or estimated; NaN where a step does not see the position, or it is a row's padding. `head`
            has size 1 for nodes that are no heads, `place` where `positions` is None.
        base: the target in the run that is patched.
        source: the target in the run that the values come from; NaN for zero and mean.
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    contract: Contract
    run: DenoisingRun = field(repr=False)
    site: str
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...] | None
    effects: Float[Tensor, "step batch layer head place"]
    base: Float[Tensor, "step batch"]
    source: Float[Tensor, "step batch"]
    seed: int = 0

    def __post_init__(self) -> None:
        place = 1 if self.positions is None else len(self.positions)
        sizes = {"step": len(self.steps), "layer": len(self.layers), "place": place}
        check_shapes(self, batch=len(self.run.tokens), **sizes)

    def __repr__(self) -> str:
        step, batch, layer, head, place = self.effects.shape
        found = self.table(1)
        strongest = "none defined"
        if len(found):
            where = ", ".join(f"{name} {found[name][0]}" for name in ("step", "layer", "head") if name in found)
            strongest = f"strongest {float(found['effect'].iloc[0]):+.4g} at {where}"
        return (
            f"NodeEffects({self.site}; {step} steps, {batch} rows, {layer} layers, {head} heads, {place} places; "
            f"{strongest})\n{self.contract}"
        )

    @property
    def summed(self) -> Float[Tensor, "batch layer head place"]:
        """The effects, summed over the steps; each is of patching one step alone."""
        return self.effects.nansum(0)

    @property
    def mean(self) -> Float[Tensor, "step layer head"]:
        """The effects per step, summed over places, mean over rows."""
        return self.effects.nansum(-1).mean(1)

    @checked_arguments(top=AT_MOST)
    def table(self, top: int | None = None) -> pd.DataFrame:
        """One line per node and row, or the `top` of them with the largest absolute effect.

        `step` is the number in the whole run, `position` counts from the prompt's first token, `canvas_position` on
        the canvas.

        Raises:
            ValueError: `top` is negative, or no whole number.
        """
        order = strongest(self.effects, top)
        where = torch.unravel_index(order, self.effects.shape)
        columns: dict[str, Any] = {"step": [self.steps[i] for i in where[0].tolist()], "batch": where[1].tolist()}
        columns["layer"] = [self.layers[i] for i in where[2].tolist()]
        if self.site in OF_HEADS:
            columns["head"] = where[3].tolist()
        if self.positions is not None:
            columns["position"] = [self.positions[i] for i in where[4].tolist()]
            text = TokenTexts(self.run.tokenizer)
            seen = zip(columns["step"], columns["batch"], columns["position"], strict=True)
            columns["token"] = [text(int(self.run.canvases[at])) for at in seen]
        columns["effect"] = self.effects.flatten()[order].tolist()
        return of_whole_run(pd.DataFrame(columns), self.run, () if self.positions is None else ("position",))

    def agreement(self, other: "NodeEffects") -> Estimate:
        """Spearman's rank correlation with other effects of the same nodes, over the nodes of a step and row.

        The mean over steps and rows, with an interval over prompts. It says how well an estimate ranks the nodes as
        exact patching does.

        Raises:
            ValueError: other nodes, or something else.
        """
        instance(NodeEffects, "the NodeEffects of another attribution").check("other", other)
        if self.effects.shape != other.effects.shape or (self.site, self.steps) != (other.site, other.steps):
            raise ValueError(
                f"effects of {self.site} {list(self.effects.shape)} at steps {self.steps} and of {other.site} "
                f"{list(other.effects.shape)} at steps {other.steps}; give effects of the same nodes"
            )
        one, two = (each.effects.double().flatten(2) for each in (self, other))
        known = one.isfinite() & two.isfinite()
        rho, defined = spearman(one.nan_to_num(), two.nan_to_num(), known)
        prompt = self.run.row_prompts[defined.nonzero()[:, 1]]
        return estimate_mean(rho[defined], prompt, one.shape[1], bounds=CORRELATION_BOUNDS, seed=self.seed)
