"""`compare`: the same prompts with and without hooks, from the same seed."""

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
from dlm_lens.sampling.denoising import denoise
from dlm_lens.sampling.denoising_run import DenoisingRun
from dlm_lens.sampling.emerging_text import answer_cells
from dlm_lens.sampling.prompt_positions import from_prompt
from dlm_lens.sampling.run_rows import decided_answer
from dlm_lens.sampling.settings import check_model
from dlm_lens.sampling.token_text import TokenTexts


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
        content = one.attention_mask[:, :width]
        if not content.equal(two.attention_mask[:, :width]) or not torch.equal(
            *(run.tokens[:, :width].masked_fill(run.masked[0, :, :width] | ~content, -1) for run in (one, two))
        ):
            raise ValueError("the runs do not pair: their prompts differ")

    def __repr__(self) -> str:
        changed, answer = int(self.tokens_changed.sum()), int(self.answer.sum())
        first = self.first_difference.tolist()
        return (
            f"Comparison(tokens_changed={changed} of {answer}, first_difference={first}, "
            f"hooks=[{', '.join(self.hooks)}])"
        )

    def _preview(self) -> Preview:
        """Both answers of the first row; in the one under hooks the changed positions are marked."""
        one, two = self._pair
        changed = self.changed[0]
        lines = [
            Line("plain ", answer_cells(one, torch.zeros_like(changed))), Line("hooked", answer_cells(two, changed))
        ]  # fmt: skip
        return Preview(lines=lines, note=f"row 0 of {len(self.changed)}; per position: .table()")

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
        one = self._pair[0]
        return from_prompt(pd.DataFrame(columns), one.padding, one.tokens.shape[1])


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
    found = run.confidence.gather(0, step.clamp(min=0)[None])[0]
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
    )
