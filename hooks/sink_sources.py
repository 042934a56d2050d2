"""What sink hooks detect sinks from: the statistics of a pass, or a `Received` or `Sinks` measured before."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.adapters.model_names import WITH_ADAPTER, name_in
from dlm_lens.attention import MIN_VIEWERS, ColumnStats, PointContext, RunStep, run_of, top_columns
from dlm_lens.sinks import Detector, Level, Quantity, Received, Sinks
from dlm_lens.sinks.detection import check_all_heads
from dlm_lens.sinks.detectors.base import of_every_key
from dlm_lens.sinks.key_axes import with_all_axes
from dlm_lens.sinks.received import COLUMN_SUM, RELATIVE

logger = logging.getLogger(__name__)

MeasuredSinks = Received | Sinks


def scores_of(
    given: Sequence[ColumnStats], per: Level, quantity: Quantity, relative: bool
) -> Float[Tensor, "batch #head key"]:
    """Scores of the keys from the statistics of one layer, or of all layers for per="model".

    As in `Received`: r_j / e_j relative to uniform attention, raw r_j, the share r_j / n of n counted queries, or
    the mean attention r_j / n_j of n_j viewers. Above the level of heads, the mean of r_j divided by the mean of
    e_j. NaN where fewer than MIN_VIEWERS counted queries see the key in any of the patterns.
    """
    sums, expected, viewers = (
        _merged([getattr(columns, name) for columns in given], per) for name in ("sums", "expected", "viewers")
    )
    counted = given[0].counted[:, None, None].clamp(min=1)
    if quantity == "share":
        scores = sums / counted
    elif quantity == "mean attention":
        scores = sums / viewers.clamp(min=1)
    else:
        scores = sums / expected if relative else sums
    return scores.masked_fill(_undefined([columns.viewers for columns in given], per), torch.nan)


def warn_of_model(source: MeasuredSinks, run: RunStep, who: Any) -> None:
    """Warn where sinks were measured in another model than the run's, by the last part of its name."""
    measured, own = source.model.split(WITH_ADAPTER)[0], name_in(run.config)
    if measured and own and Path(measured).name != Path(own).name:
        logger.warning("%s: the source is of the model %s, and the run of %s", who, source.model, own)


def columns_of_pass(columns: Callable[[], ColumnStats], hook: PointContext, who: Any) -> ColumnStats:
    """The statistics of the present pass, for a hook that reads what its keys receive.

    Raises:
        ValueError: outside a run, the pass has queries of the last positions of a text alone, as in decoding with a
            cache, or of so few positions that no key has a score.
    """
    given = columns()
    keys = given.sums.shape[-1]
    own = len(range(*hook.sinks.canvas(keys).indices(keys)))
    if hook.run is not None or given.queries is None or given.queries >= own:
        return given
    # A network with an encoder has the canvas's queries alone in every pass.
    if hook.causal or given.queries < MIN_VIEWERS:
        raise ValueError(
            f"{who} reads the attention that keys receive, and this pass has the queries of {given.queries} of "
            f"{own} positions: decode without a cache, model.generate(..., use_cache=False), or with "
            "dlm_lens.denoise"
        )
    return given


def received_by(given: Sequence[ColumnStats], per: Level, keys: int) -> Float[Tensor, "batch #head keys"]:
    """Column sums r_j at a level, on a canvas of `keys` positions; 0 for keys that did not exist yet."""
    sums = _merged([columns.sums for columns in given], per)
    return torch.nn.functional.pad(sums, (0, keys - sums.shape[-1]))


def _merged(values: Sequence[Float[Tensor, "batch #head key"]], per: Level) -> Float[Tensor, "batch #head key"]:
    """The values of one layer at the level "head"; above it the mean over heads and layers."""
    if per == "head":
        return values[0].float()
    device = values[0].device
    return torch.stack([value.float().to(device).mean(1, keepdim=True) for value in values]).mean(0)


def _undefined(viewers: Sequence[Float[Tensor, "batch #head key"]], per: Level) -> Bool[Tensor, "batch #head key"]:
    few = [value < MIN_VIEWERS for value in viewers]
    if per == "head":
        return few[0]
    device = few[0].device
    return torch.stack([value.to(device).any(1, keepdim=True) for value in few]).any(0)


def grown(found: Bool[Tensor, "batch #head key"], keys: int) -> Bool[Tensor, "batch #head keys"]:
    """Flags of a shorter canvas, padded to `keys` positions: an AR canvas grows at its end."""
    return (
        found
        if found.shape[-1] == keys
        else torch.nn.functional.pad(found.byte(), (0, keys - found.shape[-1])).bool()
    )


def measured_columns(
    source: MeasuredSinks,
    detector: Detector | None,
    top: int | None,
    per: Level,
    relative: bool,
    keys: int,
    hook: PointContext,
    who: Any,
) -> Bool[Tensor, "batch #head key"]:
    """The sinks of `source` at the run's step in this layer, in the network's order of positions.

    A source without a step axis is used at every step. It has as many rows as the run has prompts, or one for all.

    Raises:
        ValueError: the source lacks the step, the layer, heads or the rows, or has more steps than the run, a
            canvas of another length or other prompts.
    """
    step = step_place(source, run_of(hook, who).step, who)
    layer = hook.layer() if "layer" in source.dims else 0
    if isinstance(source, Sinks):
        found, scores = (with_all_axes(tensor, source.dims) for tensor in (source.is_sink, source.scores))
        index = _layer_index(source, layer, who)
        found, scores = found[step, :, index], scores[step, :, index]
    else:
        assert detector is not None
        received = source.part(steps=slice(step, step + 1))
        if per != "model" and "layer" in source.dims:
            index = _layer_index(source, layer, who)
            received = received.part(layers=slice(index, index + 1))
        received = received.on_scale(RELATIVE if relative else COLUMN_SUM).at_level(per)
        scores = received.read(detector.quantity)[0][0, :, 0]
        found = of_every_key(detector, "detect", detector.detect(scores), scores)
    if top is not None:
        found = top_columns(scores.float().masked_fill(~found, torch.nan), top)
    if "head" in source.dims and (isinstance(source, Sinks) or per == "head"):
        heads = getattr(run_of(hook, who).config, "num_attention_heads", found.shape[1])
        check_all_heads(found.shape[1], heads, str(who))
    columns = _for_network(found, source.sinks, keys, hook, who)
    _check_total(source, hook, who)
    _check_prompts(source, run_of(hook, who), who)
    return columns


def _check_prompts(source: MeasuredSinks, run: RunStep, who: Any) -> None:
    """Raise if the source's rows are of other prompts than the run's; with guidance these occur twice.

    Raises:
        ValueError: naming the first row that differs.
    """
    if source.tokens is None:
        return
    tokens = source.shared_fields["tokens"][0]
    if len(tokens) == 1 < len(run.tokens):
        return

    def differing() -> list[int]:
        prompt = run.prompt[:, : tokens.shape[1]]
        own = run.tokens[:, : prompt.shape[1]]
        given = tokens[:, : prompt.shape[1]].repeat(len(own) // len(tokens), 1).to(own.device)
        return [int(row) for row in ((given != own) & prompt).any(-1).nonzero()]

    rows = run.once(("prompts of a source", id(source)), differing)
    if rows:
        raise ValueError(
            f"{who}: row {rows[0] % len(tokens)} of the source is of another prompt than row {rows[0]} of the run; "
            "give one of the same prompts"
        )


def _numbers(source: MeasuredSinks) -> tuple[int, ...]:
    """The number of each step of a source in its run; none for a source without steps."""
    return source.step_numbers if "step" in source.dims else ()


def step_place(source: MeasuredSinks, step: int, who: Any) -> int:
    """The place of a step of the run on the source's axis of steps; 0 for a source without one.

    Raises:
        ValueError: the source lacks the step.
    """
    numbers = _numbers(source)
    if not numbers:
        return 0
    if step not in numbers:
        whole = numbers == tuple(range(len(numbers)))
        held = f"{len(numbers)} steps" if whole else f"the steps {', '.join(map(str, numbers))}"
        remedy = "give one of a run of the same settings, or " if whole else ""
        raise ValueError(
            f"{who}: the source has {held} and the run comes to step {step}; {remedy}limit the hook with at_steps"
        )
    return numbers.index(step)


def _check_total(source: MeasuredSinks, hook: PointContext, who: Any) -> None:
    """Raise if the source has more steps than the run; fewer are of a run that ended early.

    An AR run may be a prefix of the source's.

    Raises:
        ValueError: with both numbers.
    """
    steps = max(_numbers(source), default=-1) + 1
    total = run_of(hook, who).total
    if steps > total and not hook.causal:
        raise ValueError(f"{who}: the source has {steps} steps and the run {total}; give one of the same settings")


def _layer_index(source: MeasuredSinks, layer: int, who: Any) -> int:
    if "layer" not in source.dims:
        return 0
    if layer not in source.layers:
        known = ", ".join(map(str, source.layers))
        raise ValueError(f"{who}: the source has layers {known}, not {layer}; limit the hook with at_layers")
    return source.layers.index(layer)


def _for_network(
    found: Bool[Tensor, "batch #head key"], sinks: int, keys: int, hook: PointContext, who: Any
) -> Bool[Tensor, "rows #head key"]:
    """The columns in this network's order of canvas and sink tokens, with rows repeated for guidance."""
    layout, run = hook.sinks, hook.run
    canvas, known = keys - layout.count, found.shape[-1] - sinks
    # An AR step sees what is written, in block diffusion it sees the canvas up to the end of its block.
    growing = run is not None and (hook.causal or run.whole == known)
    if sinks != layout.count or canvas > known or (canvas < known and not growing):
        raise ValueError(
            f"{who}: the source has {known} canvas positions and {sinks} sink tokens, the run {canvas} and "
            f"{layout.count}; give one of the same prompts, length and model"
        )
    rows = 1 if run is None else len(run.tokens)
    if rows % len(found) and len(found) > 1:
        raise ValueError(f"{who}: the source has {len(found)} rows and the run {rows}")
    found = found if run is None else found.repeat(rows // len(found), 1, 1)
    parts = [found[..., known:], found[..., :canvas]]
    return torch.cat(parts if layout.placement == "front" else parts[::-1], -1)
