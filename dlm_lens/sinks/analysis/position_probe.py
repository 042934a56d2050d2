"""`position_or_token`: whether a sink stays at its position or moves with its token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.arguments import INDICES, LEVEL, ONE_SEED, checked_arguments
from dlm_lens.attention import exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.sampling import DenoisingRun, RunPart
from dlm_lens.sampling.algorithm_registry import algorithms, sampler_class
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.settings import check_model
from dlm_lens.sampling.token_text import TokenTexts, tokenizer_of
from dlm_lens.sinks.detection import Sinks, find_sinks
from dlm_lens.sinks.detectors.above_mean import AboveMean
from dlm_lens.sinks.detectors.base import Detector, as_detector
from dlm_lens.sinks.from_recording import received_over_steps
from dlm_lens.sinks.received import MERGED, Level
from dlm_lens.statistics import SHARE_BOUNDS, prompts_with_cases, ratio_by_prompt

OUTCOMES = ("token", "position", "both", "neither")


@dataclass(frozen=True, eq=False)
class PositionOrToken(ShowsItself):
    """The main sinks before and after their tokens were moved, from `position_or_token`.

    Args:
        trials: one line per (step, batch, layer, head, change): `position` p of the main sink, `token`; `to`, the
            position q that the token went to; `change` "swap", "shift" or "control"; `at_token`, whether q is a
            sink now; `at_position`, whether p still is; `outcome`: "token" (q alone), "position" (p alone),
            "both", "neither". `step` is the number in the whole run. p and q count from the prompt's first token;
            `canvas_position` and `canvas_to` are those on the canvas.
        detector: the rule.
        level: the level of the patterns.
        row_prompts: the number of each row's prompt (`DenoisingRun.row_prompts`); None: each row is one of its own.
        row_places: the index of each trial's row among the rows of the run, of which `batch` is the number in the
            whole run; empty where the two are equal.
    """

    trials: pd.DataFrame
    detector: Detector
    level: Level
    row_prompts: Int[Tensor, "batch"] | None = field(default=None, repr=False)
    row_places: tuple[int, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return f"PositionOrToken({len(self.trials)} trials; {self.detector}; level: {self.level})"

    def table(self) -> pd.DataFrame:
        """Every trial."""
        return self.trials

    def summary(self, by: Sequence[str] = ()) -> pd.DataFrame:
        """Share of each outcome per change, with 95% intervals (bootstrap over prompts; NaN for one).

        In the control, which does not touch the sink's token, "position" and "both" are how often a sink survives a
        swap of other tokens, "token" and "both" how often an uninvolved position becomes a sink: the baselines.

        Args:
            by: further columns to group by, such as ("layer", "head") or ("token",).

        Raises:
            ValueError: there was no trial.
        """
        if self.trials.empty:
            raise ValueError("no trial: no pattern had a sink on the canvas at these steps; try another detector")
        place = pd.Series(self.row_places, self.trials.index) if self.row_places else self.trials["batch"]
        sequences = sorted(place.unique())
        prompt = None if self.row_prompts is None else self.row_prompts[sequences]
        lines, rows = [], len(sequences)
        for names, group in self.trials.groupby([*by, "change"], sort=True):
            n = np.array([(place[group.index] == row).sum() for row in sequences], dtype=float)
            line = dict(zip([*by, "change"], names if isinstance(names, tuple) else (names,), strict=True))
            for outcome in OUTCOMES:
                hits = group["outcome"] == outcome
                count = np.array([(hits & (place[group.index] == row)).sum() for row in sequences], dtype=float)
                share, low, high = ratio_by_prompt(count[:, None], n[:, None], prompt, bounds=SHARE_BOUNDS)
                line |= {
                    outcome: float(share[0]),
                    f"{outcome}_low": float(low[0]),
                    f"{outcome}_high": float(high[0]),
                }
            lines.append(
                {**line, "n": len(group), "sequences": rows, "prompts": int(prompts_with_cases(n, prompt))}
            )
        return pd.DataFrame(lines)


@checked_arguments(steps=INDICES, level=LEVEL, seed=ONE_SEED)
@exclusive
def position_or_token(
    model: Any,
    run: RunLike,
    detector: Detector | None = None,
    *,
    steps: Sequence[int] | None = None,
    level: Level = "head",
    seed: int = 0,
    min_viewers: int = 8,
) -> PositionOrToken:
    """Move the token of each main sink and test whether the sink moves with it (2510.15731, section 5.1).

    The question of the paper is whether the position or the token drives sinks. On the canvas of a step, for every
    position p that is some pattern's main sink, a position q is drawn whose token is another and which is no sink
    in any of these patterns. "swap" exchanges the tokens of p and q; "shift" removes p's token and inserts it at
    q, so that the tokens between move by one; "control" exchanges q's token with that of a second such position and
    does not touch p. One forward pass each; the detector finds the sinks before and after.

    A swap between a masked and a decoded position moves the mask. The changed canvas may be unlike those in the
    training data, so that "neither" is no evidence for either answer. In DiffusionGemma and DMax every pass, before
    a change and after it, is one without self-conditioning: the step before did not predict a changed canvas.

    Args:
        model: the model of the run.
        run: from `denoise`.
        detector: the rule; `AboveMean(3.0)` by default.
        steps: steps whose canvases are changed, negative from the end; by default the first, the last and two
            between. Of a row that has ended by then there are no trials.
        level: the level of the main sinks.
        seed: of the random positions.
        min_viewers: as in `received_over_steps`.

    Raises:
        ValueError: a step that is not there.
    """
    check_model(model)
    run = as_run(run)
    rule = AboveMean(3.0) if detector is None else as_detector(detector)
    chosen = [0, run.steps // 3, 2 * run.steps // 3, run.steps - 1] if steps is None else list(steps)
    if not chosen:
        raise ValueError("steps is empty; give at least one, or None")
    for step in chosen:
        if not -run.steps <= step < run.steps:
            raise ValueError(f"step {step} of {run.steps}; steps go from 0 to {run.steps - 1}")
    chosen = sorted({step % run.steps for step in chosen})
    generator = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for row, end in enumerate(run.row_steps.tolist()):
        own = [step for step in chosen if step < end]
        if not own:
            continue
        base = _sinks_of(model, _canvases_of(run, row, own), rule, level, min_viewers)
        plan = [change for number in range(len(own)) for change in _plan(base, number, generator)]
        if plan:
            lines += _trials(model, run, row, own, base, plan, rule, level, min_viewers)
    axes = [name for name in ("layer", "head") if name not in MERGED[level]]
    columns = ["step", "batch", *axes, "change", "position", "token", "to", "at_token", "at_position"]
    table = of_whole_run(pd.DataFrame(lines, columns=columns), run, ("position", "to"))
    at_token, at_position = table["at_token"].astype(bool), table["at_position"].astype(bool)
    outcome = np.select([at_token & at_position, at_token, at_position], ["both", "token", "position"], "neither")
    places = tuple(line["batch"] for line in lines)
    return PositionOrToken(table.assign(outcome=outcome), rule, level, run.row_prompts, places)


@dataclass(frozen=True)
class _Change:
    """One changed canvas: index of the step, name of the change, the new order of the tokens, p and q."""

    number: int
    name: str
    order: Int[Tensor, "position"]
    sink: int
    to: int


def _canvases_of(
    run: DenoisingRun, row: int, steps: Sequence[int], orders: Sequence[Tensor] | None = None
) -> DenoisingRun:
    """A run of one sequence with these steps' canvases, each with its positions in a new order."""
    index = torch.tensor(steps)
    room = sampler_class(run.settings).room_of(run, slice(None))
    unseen = torch.ones_like(run.unmasked) if room is None else room
    parts = [run.canvases[index, row], run.masked[index, row], unseen[index, row]]
    if orders is not None:
        parts = [part.gather(1, torch.stack(list(orders))) for part in parts]
    canvases, masked, unseen = parts
    # What a step is conditioned on (DiffusionGemma, DMax) is of its own canvas and the one before.
    algorithm = algorithms().get(str(run.settings.get("sampler")))
    conditioned = algorithm is not None and hasattr(algorithm.settings, "self_conditioning")
    found = DenoisingRun.of_canvases(
        canvases[:, None],
        masked[:, None],
        run.attention_mask[row : row + 1],
        prompt_length=run.prompt_length,
        settings={**run.settings, "self_conditioning": "none"} if conditioned else run.settings,
        computed=tuple(run.computed[step] for step in steps) if conditioned and run.computed else (),
        spans=[run.spans[step] for step in steps],
        blocks=[run.blocks[step] for step in steps],
        eos_token_ids=run.eos_token_ids,
        tokenizer=run.tokenizer,
        model=run.model,
        # The steps keep their numbers: some networks are given the noise level of theirs.
        part=RunPart(
            tuple(run.step_numbers[step] for step in steps),
            tuple(run.block_numbers[step] for step in steps),
            run.answer[row : row + 1],
            (int(run.steps_in_all[row]),),
        ),
    )
    # A mask without a confidence is room for masks (DreamOn), which no step sees.
    return replace(found, confidence=found.confidence.masked_fill(~unseen[:, None], 0.0))


def _sinks_of(model: Any, run: DenoisingRun, rule: Detector, level: Level, min_viewers: int) -> Sinks:
    return find_sinks(received_over_steps(model, run, min_viewers=min_viewers), rule, level=level)


def _plan(base: Sinks, number: int, generator: np.random.Generator) -> list[_Change]:
    """The changes at one step: three for every canvas position that is some pattern's main sink."""
    canvas = base.is_sink.shape[-1] - base.sinks
    tokens = cast(Tensor, base.tokens)[number, 0, :canvas]
    main, found = base.main()[number], base.is_sink[number]
    scored = (~base.scores[number].isnan()).flatten(0, -2).any(0)[:canvas]
    changes = []
    for sink in sorted(set(main.flatten().tolist()) & set(range(canvas))):
        free = scored & ~found[main == sink].any(0)[:canvas]
        others = (free & (tokens != tokens[sink])).nonzero().flatten().numpy()
        if len(others) < 2:
            continue
        to, second = (int(place) for place in generator.choice(others, size=2, replace=False))
        for name, order in {
            "swap": _swapped(canvas, sink, to),
            "shift": _shifted(canvas, sink, to),
            "control": _swapped(canvas, to, second),
        }.items():
            changes.append(_Change(number, name, order, sink, to))
    return changes


def _swapped(canvas: int, first: int, second: int) -> Int[Tensor, "position"]:
    order = torch.arange(canvas)
    order[first], order[second] = second, first
    return order


def _shifted(canvas: int, start: int, to: int) -> Int[Tensor, "position"]:
    order = torch.arange(canvas).tolist()
    order.insert(to, order.pop(start))
    return torch.tensor(order)


def _trials(
    model: Any,
    run: DenoisingRun,
    row: int,
    steps: Sequence[int],
    base: Sinks,
    plan: Sequence[_Change],
    rule: Detector,
    level: Level,
    min_viewers: int,
) -> list[dict[str, Any]]:
    changed = _canvases_of(run, row, [steps[change.number] for change in plan], [change.order for change in plan])
    after = _sinks_of(model, changed, rule, level, min_viewers)
    text = TokenTexts(tokenizer_of(run, model))
    names = [name for name in base.dims if name in ("layer", "head")]
    lines = []
    for trial, change in enumerate(plan):
        main, found = base.main()[change.number, 0], after.is_sink[trial, 0]
        token = int(run.canvases[steps[change.number], row, change.sink])
        for place in (main == change.sink).nonzero().tolist():
            at = dict(zip(names, place, strict=True))
            if "layer" in at:
                at["layer"] = base.layers[at["layer"]]
            sinks = found[tuple(place)]
            lines.append(
                {
                    "step": steps[change.number],
                    "batch": row,
                    **at,
                    "change": change.name,
                    "position": change.sink,
                    "token": text(token),
                    "to": change.to,
                    "at_token": bool(sinks[change.to]),
                    "at_position": bool(sinks[change.sink]),
                }
            )
    return lines
