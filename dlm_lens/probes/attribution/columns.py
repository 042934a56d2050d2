"""`column_attribution`: what the attention to each key contributes, such as that to a sink."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import AT_MOST, checked_arguments
from dlm_lens.attention import exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.attribution.contract import Contract
from dlm_lens.probes.attribution.gradients import Backward
from dlm_lens.probes.attribution.node_effects import strongest
from dlm_lens.probes.attribution.patching import NodeSet
from dlm_lens.probes.attribution.setup import ALONE, BothSides, Setup, canvas_part
from dlm_lens.probes.attribution.softmax import SoftmaxEffects
from dlm_lens.probes.attribution.targets import LOGIT_DIFFERENCE, Target
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes


@dataclass(frozen=True, eq=False)
class ColumnEffects(ShowsItself):
    """Attribution to the columns of every head's pattern: the attention that all queries pay to one key.

    Args:
        contract: what this is an attribution of.
        run: the run.
        steps: steps of the run.
        layers: layers of the heads.
        log_scale: d target / d lambda_j, where lambda_j is added to every score of key j: the column's odds grow by
            the factor exp(lambda_j). Keys are those of the canvas, then the learned sink tokens; NaN where the step
            has no such key.
        hidden: the estimated change of the target when the column is hidden before the softmax, as
            `mask_positions(j)` in this head alone does; the softmax is exact, what follows it is linearised.
        base: the target.

    Raises:
        ValueError: the shapes contradict each other.
    """

    contract: Contract
    run: DenoisingRun = field(repr=False)
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    log_scale: Float[Tensor, "step batch layer head key"]
    hidden: Float[Tensor, "step batch layer head key"]
    base: Float[Tensor, "step batch"]

    def __post_init__(self) -> None:
        check_shapes(self, step=len(self.steps), layer=len(self.layers), batch=len(self.run.tokens))

    def __repr__(self) -> str:
        step, batch, layer, head, key = self.hidden.shape
        return (
            f"ColumnEffects({step} steps, {batch} rows, {layer} layers, {head} heads, {key} keys)\n{self.contract}"
        )

    @checked_arguments(top=AT_MOST)
    def table(self, top: int | None = 20) -> pd.DataFrame:
        """The columns whose hiding changes the target most: place, token, gradient of the log scale, estimate.

        `step` is the number in the whole run, `position` counts from the prompt's first token, `canvas_position` on
        the canvas.

        Raises:
            ValueError: `top` is negative, or no whole number.
        """
        order = strongest(self.hidden, top)
        step, batch, layer, head, key = torch.unravel_index(order, self.hidden.shape)
        text, canvas = TokenTexts(self.run.tokenizer), self.run.tokens.shape[1]
        names = {"step": [self.steps[i] for i in step.tolist()], "batch": batch.tolist()}
        names |= {
            "layer": [self.layers[i] for i in layer.tolist()],
            "head": head.tolist(),
            "position": key.tolist(),
        }
        columns: dict[str, Any] = dict(names)
        places = zip(names["step"], names["batch"], names["position"], strict=True)
        columns["token"] = [
            text(int(self.run.canvases[at])) if at[2] < canvas else text(canvas - at[2] - 1) for at in places
        ]
        for name in ("log_scale", "hidden"):
            columns[name] = getattr(self, name).flatten()[order].tolist()
        return of_whole_run(pd.DataFrame(columns), self.run)


REMEDY = "leave the layer out of layers=, or hide its columns with dlm_lens.compare(hooks=[mask_positions(...)])"
"""What to do about a layer whose attention is not a plain softmax."""


@checked_arguments(steps=None)
@exclusive
def column_attribution(
    model: Any,
    run: RunLike,
    *,
    target: Target = LOGIT_DIFFERENCE,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    explain: Sequence[int] | None = None,
    progress: bool = False,
) -> ColumnEffects:
    """Attribute a target to the columns of attention, one backward pass a step, without storing a pattern.

    With A the pattern, G_ij = d target / d A_ij and m_i = sum_j A_ij G_ij, the gradient of column j's log scale is
    sum_i A_ij (G_ij - m_i). Hiding the column multiplies every other weight of row i by 1 / (1 - A_ij), so that its
    effect to first order in the pattern is -sum_i A_ij / (1 - A_ij) (G_ij - m_i) (our definition, by the argument
    of AtP*'s QK fix, 2403.00745, section 3.1.1). Patterns are formed again from queries and keys, a few queries at
    a time.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        target: one number per entry.
        steps: of the run; None for all that decide something.
        layers: None for all.
        explain: canvas positions whose tokens the target reads; None for those that the step decides.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: an index that is not there, a step with nothing to explain, or attention that is not a plain
            softmax.
    """
    run = as_run(run)
    setup = Setup.of(model, run, ALONE, target, steps, explain, "noising", "column_attribution")
    nodes = NodeSet.of(setup, "z", layers, None, "column_attribution")
    setup.source = "zero"  # no other run: start makes one pass
    both = BothSides(setup)
    found: dict[str, list[Tensor]] = {"log_scale": [], "hidden": []}
    targets = []
    for step in tqdm(setup.steps, desc="columns", unit="step", disable=not progress):
        start = both.start(step, [])
        targets.append(start.base)
        backward = Backward(both.base, step, target, start, "z", nodes.layers)
        gradients = backward.gradients()
        layers_found: dict[str, list[Tensor]] = {name: [] for name in found}
        for layer in nodes.layers:
            softmax = SoftmaxEffects(backward.inputs[layer], gradients[layer], REMEDY)
            for name, values in (("log_scale", softmax.of_log_scale()), ("hidden", softmax.of_hiding())):
                layers_found[name].append(_on_canvas(both, step, values))
        for name, values_of_layers in layers_found.items():
            found[name].append(torch.stack(values_of_layers, 1))
    contract = setup.contract(
        f"the columns of every head of layers {', '.join(map(str, nodes.layers))}", "gradients through the pattern"
    )
    return ColumnEffects(
        contract=replace(contract, baseline="none: the column's log scale at 0, or the column hidden"),
        run=setup.run,
        steps=setup.steps,
        layers=nodes.layers,
        base=torch.stack(targets),
        **{name: torch.stack(values) for name, values in found.items()},
    )


def _on_canvas(
    both: BothSides, step: int, values: Float[Tensor, "row head key"]
) -> Float[Tensor, "batch head key"]:
    """Columns in the order of results: the whole canvas, then learned sink tokens; halves of guidance summed."""
    layout, canvas = both.base.layout, both.setup.run.tokens.shape[1]
    summed = layout.sinks_last(values.unflatten(0, (both.base.halves, -1)).sum(0).cpu())
    seen = both.base.stored.length(step)
    if summed.shape[-1] - layout.count != seen:  # keys of the canvas alone
        part = canvas_part(both.base, step, summed.shape[-1])
        whole = summed.new_full((*summed.shape[:-1], canvas + layout.count), torch.nan)
        whole[..., part] = summed[..., : part.stop - part.start]
        return whole
    missing = summed.new_full((*summed.shape[:-1], canvas - seen), torch.nan)
    return torch.cat([summed[..., :seen], missing, summed[..., seen:]], -1)
