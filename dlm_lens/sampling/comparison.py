"""`compare`: the same prompts with and without hooks, from the same seed; `Comparison.minus`: less a control."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.arguments import checked_arguments
from dlm_lens.attention import HookLike, checked, exclusive
from dlm_lens.display import Line, Preview, ShowsItself
from dlm_lens.printable import shown
from dlm_lens.sampling.algorithm_registry import sampler_class
from dlm_lens.sampling.denoising import denoise
from dlm_lens.sampling.denoising_run import DenoisingRun
from dlm_lens.sampling.emerging_text import answer_cells
from dlm_lens.sampling.moved_tokens import widened
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_rows import decided_answer
from dlm_lens.sampling.settings import check_model
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.statistics import CORRELATION_BOUNDS, Bounds, Estimate, estimate_mean

STATISTICS: dict[str, Bounds | None] = {
    "tokens_changed": None,
    "share_changed": CORRELATION_BOUNDS,
    "first_difference": None,
    "confidence_change": None,
}
"""The statistics of a `Comparison` that are subtracted, with the bounds of their differences.

Not `step_change`: where every step decides as many positions, its mean over a row is 0 under any hook.
"""


@dataclass(frozen=True, eq=False)
class ComparisonDifference(ShowsItself):
    """What the hooks of a comparison change minus what those of its control change, paired by row.

    Of a statistic s and row r, d_r = s_r(hooks) - s_r(control). Both are measured against the same run without
    hooks. s is `tokens_changed`, `share_changed` or `first_difference` (in steps, of rows in which both have one)
    of a `Comparison`, or its mean `confidence_change` over the positions of the row at which both have a number.

    Args:
        hooks: the `repr` of each hook.
        control: the `repr` of each hook of the control.
        values: of the hooks and of the control, in the order of `STATISTICS`; NaN in both where one has none.
        prompt: the number of each row's prompt (`DenoisingRun.row_prompts`).

    Raises:
        ValueError: the shapes contradict each other.
    """

    hooks: tuple[str, ...]
    control: tuple[str, ...]
    values: Float[Tensor, "2 statistic batch"]
    prompt: Int[Tensor, "batch"]

    def __post_init__(self) -> None:
        expected = (2, len(STATISTICS), len(self.prompt))
        if tuple(self.values.shape) != expected:
            raise ValueError(f"ComparisonDifference.values has shape {tuple(self.values.shape)}, not {expected}")

    def __repr__(self) -> str:
        return (
            f"ComparisonDifference(tokens_changed={self.mean('tokens_changed')}, "
            f"share_changed={self.mean('share_changed')}, hooks=[{', '.join(self.hooks)}], "
            f"control=[{', '.join(self.control)}])"
        )

    def rows(self, statistic: str) -> Float[Tensor, "batch"]:
        """The difference d_r of each row; NaN where one of the two has no number.

        Raises:
            ValueError: no such statistic.
        """
        if statistic not in STATISTICS:
            raise ValueError(f"statistic is {shown(statistic)}; it must be one of {', '.join(STATISTICS)}")
        one, control = self.values[:, list(STATISTICS).index(statistic)]
        return one - control

    def mean(self, statistic: str) -> Estimate:
        """The mean of d_r over the rows with a number, with its 95% interval.

        The interval resamples prompts with all their rows and both values of each, and is widened for few prompts
        (`dlm_lens.statistics.expanded`): of one prompt there is none. Where all prompts have the same d, that of
        "share_changed" is what was not seen (`dlm_lens.statistics.within`); those of the others, which have no
        bounds, have no width, which is no evidence of certainty.

        Args:
            statistic: its name, such as "share_changed".

        Raises:
            ValueError: no such statistic.
        """
        found = self.rows(statistic)
        known = found.isfinite()
        prompts = int(self.prompt.max()) + 1
        return estimate_mean(found[known], self.prompt[known], prompts, bounds=STATISTICS[statistic])

    def table(self) -> pd.DataFrame:
        """One line per statistic.

        Columns: `statistic`; its mean with the `hooks` and with the `control`, over the rows that have a number in
        both; `difference` with its 95% interval `low`, `high`; `prompts`, how many have such rows.
        """
        lines = []
        for (one, control), name in zip(self.values.nanmean(-1).T.tolist(), STATISTICS, strict=True):
            found = self.mean(name)
            interval = {"difference": found.value, "low": found.low, "high": found.high, "prompts": found.prompts}
            lines.append({"statistic": name, "hooks": one, "control": control, **interval})
        return pd.DataFrame(lines)


@dataclass(frozen=True, eq=False)
class Comparison(ShowsItself):
    """Two runs of the same prompts from the same seed, the second one under hooks.

    After the first difference the runs see different canvases, so that later differences are not direct effects of
    the hooks; `dlm_lens.replay` keeps the canvases fixed. An AR run that ended earlier is continued with its end
    token; one of a model that decodes blocks with the blocks that it did not decode, which stay open.

    Args:
        plain: the run without hooks.
        hooked: the run with them.
        hooks: the `repr` of each hook.

    Raises:
        ValueError: the runs have other prompts or other shapes.
    """

    plain: DenoisingRun
    hooked: DenoisingRun
    hooks: tuple[str, ...]

    def __post_init__(self) -> None:
        one, two = self.plain, self.hooked
        width = one.prompt_length
        if two.prompt_length != width or len(one.tokens) != len(two.tokens):
            raise ValueError(f"the runs do not pair: {one} and {two} differ in prompt length or rows")
        lengths = one.tokens.shape[1], two.tokens.shape[1]
        same_answer = one.settings.get("gen_length") == two.settings.get("gen_length")
        if not self.plain.autoregressive and lengths[0] != lengths[1] and not same_answer:
            raise ValueError(f"the runs do not pair: they have {lengths[0]} and {lengths[1]} positions")
        if not _same_prompts(one, two):
            raise ValueError("the runs do not pair: their prompts differ")

    def __repr__(self) -> str:
        changed, answer = int(self.tokens_changed.sum()), int(self.answer.sum())
        first = self.first_difference.tolist()
        return (
            f"Comparison(tokens_changed={changed} of {answer}, first_difference={first}, "
            f"hooks=[{', '.join(self.hooks)}])"
        )

    def _preview(self) -> Preview:
        """Both answers of the first row that changes; in the one under hooks the changed positions are marked."""
        one, two = self._pair
        row = int(self.changed.any(-1).long().argmax())  # the first row where nothing changes
        changed = self.changed[row]
        lines = [
            Line("plain ", answer_cells(one, torch.zeros_like(changed), row)),
            Line("hooked", answer_cells(two, changed, row)),
        ]
        return Preview(lines=lines, note=f"row {row} of {len(self.changed)}; per position: .table()")

    @cached_property
    def _pair(self) -> tuple[DenoisingRun, DenoisingRun]:
        """Both runs with as many steps and positions."""
        one, two = self.plain, self.hooked
        if not one.autoregressive:  # whose positions are its steps
            one, two = _as_wide_as(one, two), _as_wide_as(two, one)
        steps = max(one.steps, two.steps)
        return _longer(one, steps), _longer(two, steps)

    @property
    def answer(self) -> Bool[Tensor, "batch position"]:
        """Positions that were open when the runs began, and that either run decided before its row was over.

        What comes after the end of a row, where others of its batch go on, is none of it.
        """
        width = self._pair[0].tokens.shape[1]
        one, two = (_answer_of(run, width) for run in (self.plain, self.hooked))
        return one | two

    @cached_property
    def first_difference(self) -> Int[Tensor, "batch"]:
        """The first step that wrote other tokens or other positions, per row; -1 if none did."""
        one, two = (run.canvases[1:].masked_fill(run.masked[1:], -1) for run in self._pair)
        differs = (one != two).any(-1)
        return torch.where(differs.any(0), differs.int().argmax(0), -1)

    @property
    def changed(self) -> Bool[Tensor, "batch position"]:
        """Answer positions whose final tokens differ."""
        one, two = self._pair
        return (one.tokens != two.tokens) & self.answer

    @property
    def tokens_changed(self) -> Int[Tensor, "batch"]:
        """How many final tokens differ, per row."""
        return self.changed.sum(-1)

    @property
    def share_changed(self) -> Float[Tensor, "batch"]:
        """The share of the answer that differs, 0 to 1; of a row in a batch what it is of the row alone."""
        return self.tokens_changed / self.answer.sum(-1).clamp(min=1)

    @property
    def confidence_change(self) -> Float[Tensor, "batch position"]:
        """Confidence of the final token when it was written, with hooks minus without, aligned by position.

        In the unit of the sampler's ranking. NaN outside the answer, where a position stayed masked in either run
        or comes after the end of its row there, and where the algorithm does not rank (Dream's "origin").
        """
        one, two = (_confidence_of(run) for run in self._pair)
        return two - one

    @property
    def step_change(self) -> Float[Tensor, "batch position"]:
        """The step that wrote the final token, with hooks minus without; NaN as in `confidence_change`."""
        steps = (_written_at(run) for run in self._pair)
        one, two = (step.float().masked_fill(step < 0, torch.nan) for step in steps)
        return two - one

    def minus(self, control: "Comparison") -> ComparisonDifference:
        """What these hooks change minus what a control changes, paired by row, with intervals over prompts.

        Args:
            control: such as of `mask_random(like=hook)`, with the same model, prompts, seeds and settings.

        Raises:
            ValueError: the two were made with another model, other prompts, seeds or settings.
        """
        if not isinstance(control, Comparison):
            raise ValueError(f"minus: control is {shown(control)}; it must be a Comparison, which compare returns")
        if differs := _differs(self.plain, control.plain):
            raise ValueError(
                f"minus: the comparisons differ in {differs}; give both the same model, prompts, seeds and settings"
            )
        width = min(self.confidence_change.shape[1], control.confidence_change.shape[1])
        values = torch.stack([_of_rows(one, other, width) for one, other in ((self, control), (control, self))])
        return ComparisonDifference(self.hooks, control.hooks, values, self.plain.row_prompts)

    def table(self) -> pd.DataFrame:
        """One line per answer position: batch, position, tokens, texts, steps and confidences of both runs.

        `position` counts from the prompt's first token, `canvas_position` on the canvas.
        """
        rows, positions = self.answer.nonzero(as_tuple=True)
        columns: dict[str, Any] = {"batch": rows.tolist(), "position": positions.tolist()}
        pair = dict(zip(("plain", "hooked"), self._pair, strict=True))
        for name, run in pair.items():
            text = TokenTexts(run.tokenizer)
            columns[f"token_{name}"] = [text(int(token)) for token in run.tokens[rows, positions]]
        columns["changed"] = self.changed[rows, positions].tolist()
        for name, run in pair.items():
            columns[f"step_{name}"] = _written_at(run)[rows, positions].tolist()
        for name, run in pair.items():
            columns[f"confidence_{name}"] = _confidence_of(run)[rows, positions].tolist()
        return of_whole_run(pd.DataFrame(columns), self._pair[0])


@exclusive
@checked_arguments()
def compare(
    model: Any, prompts: Any, hooks: Sequence[HookLike], *, seed: int | list[int] | None = 0, **settings: Any
) -> Comparison:
    """Denoise prompts with and without hooks, from the same seed.

    Both runs draw the same random numbers, so that they are equal until the hooks change a token. An AR model
    decodes without a cache in both.

    Args:
        model: from `dlm_lens.load`.
        prompts: as for `dlm_lens.denoise`.
        hooks: interventions (`dlm_lens.hooks`).
        seed: one number, or one per row; None for a fresh one, the same for both.
        **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, ...

    Returns:
        A `Comparison`: `plain` and `hooked`, each a `DenoisingRun`, and what differs between them.

    Raises:
        ValueError: no hook, observers among the settings, or what `denoise` refuses.
    """
    check_model(model)
    hooks = checked(hooks)
    if not hooks:
        raise ValueError("compare: hooks is empty; give at least one hook, or run dlm_lens.denoise twice")
    if "observers" in settings:
        raise ValueError("compare makes two runs, which one observer cannot follow; call dlm_lens.denoise twice")
    if hasattr(model, "sampler_defaults") and family_of(model.config.model_type).causal:
        settings.setdefault("use_cache", False)
    plain = denoise(model, prompts, seed=seed, **settings)
    drawn = list(plain.settings["seeds"]) if seed is None else seed
    hooked = denoise(model, prompts, seed=drawn, hooks=hooks, **settings)
    return Comparison(plain, hooked, tuple(map(repr, hooks)))


def _same_prompts(one: DenoisingRun, two: DenoisingRun) -> bool:
    """Whether the rows of two runs have the same prompts, padded alike."""
    if one.prompt_length != two.prompt_length:
        return False
    # Where masks are inserted into gaps, the rest of the prompt is after their room, and parts of it move.
    moves = sampler_class(one.settings).resizes
    width = None if moves else one.prompt_length
    content = one.attention_mask[:, :width]
    if not content.equal(two.attention_mask[:, :width]):
        return False
    prompts = [
        (run.canvases[0] if moves else run.tokens)[:, :width].masked_fill(run.masked[0, :, :width] | ~content, -1)
        for run in (one, two)
    ]
    return torch.equal(*prompts)


NOISE = 0.01
"""Absolute and relative difference of the confidences of two runs of one network: devices round differently."""


def _differs(one: DenoisingRun, two: DenoisingRun) -> str:
    """What two runs without hooks were made with that is not the same; empty if nothing is known to differ."""
    named: dict[str, tuple[Any, Any]] = {"model": (one.model, two.model)}
    # Not `use_cache`: the cache of finished blocks is exact, runs under hooks have none, and the runs are compared.
    for name in dict.fromkeys(name for name in (*one.settings, *two.settings) if name != "use_cache"):
        named[name] = (one.settings.get(name), two.settings.get(name))
    found = [f"{name} ({shown(a)} and {shown(b)})" for name, (a, b) in named.items() if repr(a) != repr(b)]
    if not _same_prompts(one, two):
        found.append("their prompts")
    if not found and not (
        one.canvases.equal(two.canvases)
        and one.masked.equal(two.masked)
        and torch.allclose(one.confidence, two.confidence, rtol=NOISE, atol=NOISE, equal_nan=True)
    ):
        found.append("their runs without hooks")
    return ", ".join(found)


def _of_rows(one: Comparison, other: Comparison, width: int) -> Float[Tensor, "statistic batch"]:
    """The `STATISTICS` of the rows of one comparison; NaN where the other has none."""
    first, second = (each.first_difference.double() for each in (one, other))
    found = {
        "tokens_changed": one.tokens_changed.double(),
        "share_changed": one.tokens_changed.double() / one.answer.sum(-1).clamp(min=1),
        "first_difference": first.masked_fill((first < 0) | (second < 0), torch.nan),
    }
    here, there = (each.confidence_change[:, :width].double() for each in (one, other))
    found["confidence_change"] = here.masked_fill(there.isnan(), torch.nan).nanmean(-1)
    return torch.stack([found[name] for name in STATISTICS])


def _answer_of(run: DenoisingRun, width: int) -> Bool[Tensor, "batch width"]:
    """The positions of the answer that the run decided before the end of their row, on a canvas of this width."""
    decided = decided_answer(run)
    return torch.nn.functional.pad(decided.byte(), (0, width - decided.shape[1])).bool()


def _written_at(run: DenoisingRun) -> Int[Tensor, "batch position"]:
    """The step that wrote the final token; -1 where none did before the end of the row."""
    return run.last_written.masked_fill(run.last_written >= run.row_steps[:, None], -1)


def _confidence_of(run: DenoisingRun) -> Float[Tensor, "batch position"]:
    """The confidence of the final token when it was written; NaN where none was, or the sampler does not rank."""
    step = _written_at(run)
    found = run.by_token.confidence.gather(0, step.clamp(min=0)[None])[0]
    return found.masked_fill((step < 0) | ~found.isfinite(), torch.nan)


def _longer(run: DenoisingRun, steps: int) -> DenoisingRun:
    """The run with `steps` steps; those after its end unmask nothing, or the end token in an AR run."""
    more = steps - run.steps
    if not more:
        return run
    if run.autoregressive:
        end = run.eos_token_ids[0] if run.eos_token_ids else 0
        run = _wider(run, run.tokens.new_full((len(run.tokens), more), end))

    def held(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[-1:].expand(more, *tensor.shape[1:])])

    def nothing(tensor: Tensor, value: float) -> Tensor:
        return torch.cat([tensor, torch.full_like(tensor[:1], value).expand(more, *tensor.shape[1:])])

    canvases, masked = held(run.canvases), held(run.masked)
    if run.autoregressive:
        ends = run.tokens.shape[1] - more + torch.arange(1, more + 1)
        written = torch.arange(run.tokens.shape[1]) < ends[:, None]
        masked = torch.cat([run.masked, ~written[:, None].expand(-1, len(run.tokens), -1)])
    return replace(
        run,
        canvases=canvases,
        masked=masked,
        proposals=held(run.proposals),
        confidence=nothing(run.confidence, -torch.inf),
        unmasked=nothing(run.unmasked, False),
        revised=nothing(run.revised, False),
        origins=None if run.origins is None else widened(run.origins, steps=more),
        spans=(*run.spans, *[run.spans[-1]] * more),
        blocks=(*run.blocks, *[run.blocks[-1]] * more),
        computed=(*run.computed, *[run.computed[-1]] * more) if run.computed else (),
        rows_ran=run.rows_ran and tuple(ran + more * (ran == run.steps) for ran in run.rows_ran),
    )


def _as_wide_as(run: DenoisingRun, other: DenoisingRun) -> DenoisingRun:
    """The run with the positions that it did not reach, open, as they are on the first canvas of the other run."""
    width = run.tokens.shape[1]
    return run if width >= other.tokens.shape[1] else _wider(run, other.canvases[0, :, width:])


def _wider(run: DenoisingRun, tokens: Int[Tensor, "batch more"]) -> DenoisingRun:
    """The run with more positions, which hold these tokens and are open at every step."""

    def padded(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, tokens.shape[1]), value=value)

    def with_tokens(ids: Int[Tensor, "step batch position"]) -> Int[Tensor, "step batch wider"]:
        return torch.cat([ids, tokens.expand(len(ids), -1, -1)], -1)

    return replace(
        run,
        canvases=with_tokens(run.canvases),
        masked=padded(run.masked.byte(), 1).bool(),
        proposals=with_tokens(run.proposals),
        confidence=padded(run.confidence, -torch.inf),
        unmasked=padded(run.unmasked.byte(), 0).bool(),
        revised=padded(run.revised.byte(), 0).bool(),
        attention_mask=padded(run.attention_mask.byte(), 1).bool(),
        origins=None if run.origins is None else widened(run.origins, after=tokens.shape[1]),
    )
