"""One of the two runs that an explorer shows, and how it is made: a row alone, from its ids, seed and settings.

What an explorer changes in it: hidden keys, hidden heads, tokens of the canvas; and the hooks that do it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.arguments import meant
from dlm_lens.attention import MIN_VIEWERS, HookLike, SinkToken, attention_blocks
from dlm_lens.hooks import ablate, at_heads, at_layers, mask_positions, sink
from dlm_lens.recording import ReceivedAttention, Recorder, Recording
from dlm_lens.sampling import DenoisingRun, RunObserver, algorithms, denoise
from dlm_lens.sampling.run_rows import first_prompt
from dlm_lens.sinks import Detector, Level, Received
from dlm_lens.viz.reporting.data import Subject, canvas_content, fitting, levels_of, patterns_of, shown_keys
from dlm_lens.viz.reporting.packing import plain
from dlm_lens.viz.reporting.rules import stored_rules
from dlm_lens.viz.reporting.score_precision import Scores


@dataclass(frozen=True)
class HiddenKey:
    """A key that no query sees, in any layer, head or step: a canvas position, or a learned sink token."""

    position: int | SinkToken


@dataclass(frozen=True)
class HiddenHead:
    """A head whose output is zero at every position and step."""

    layer: int
    head: int


@dataclass(frozen=True)
class CanvasEdit:
    """A token that a step finds at a position, instead of the run's own; in AR decoding the one decoded there.

    Args:
        step: the step that sees it first; in AR decoding the one that decodes the position.
        position: canvas position.
        token: its id.
    """

    step: int
    position: int
    token: int


def place_of(position: int | SinkToken) -> tuple[bool, int]:
    """By which positions are ordered: those of the canvas, then learned sink tokens."""
    return (True, position.index) if isinstance(position, SinkToken) else (False, position)


def coded(position: int | SinkToken) -> int:
    """A position as pages have it: -1 - i for learned sink token i."""
    return -1 - position.index if isinstance(position, SinkToken) else position


def decoded(position: int) -> int | SinkToken:
    """The inverse of `coded`."""
    return sink(-1 - position) if position < 0 else position


Change = HiddenKey | HiddenHead | CanvasEdit


def hooks_of(changes: Sequence[Change]) -> tuple[HookLike, ...]:
    """The hooks that hide the keys and heads: one for all keys, one for each layer with hidden heads."""
    keys = [change.position for change in changes if isinstance(change, HiddenKey)]
    heads: dict[int, list[int]] = {}
    for change in changes:
        if isinstance(change, HiddenHead):
            heads.setdefault(change.layer, []).append(change.head)
    found: list[HookLike] = [mask_positions(*sorted(keys, key=place_of))] if keys else []
    found += [at_heads(at_layers(ablate("z"), [layer]), sorted(own)) for layer, own in sorted(heads.items())]
    return tuple(found)


def edits_of(changes: Sequence[Change]) -> tuple[CanvasEdit, ...]:
    """The edits of the canvas, in the order in which the run meets them; of a place the last edit counts."""
    edits = {(one.step, one.position): one for one in changes if isinstance(one, CanvasEdit)}
    return tuple(edits[place] for place in sorted(edits))


def callbacks_of(changes: Sequence[Change], *, autoregressive: bool) -> dict[str, Callable[..., Any]]:
    """The argument of `denoise` that makes the edits, if any: `on_canvas`, in AR decoding `on_logits`."""
    edits = edits_of(changes)
    if not edits:
        return {}

    def plant(step: int, canvas: Tensor) -> Tensor:
        for edit in edits:
            if edit.step == step:
                canvas[:, edit.position] = edit.token
        return canvas

    def force(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        for edit in edits:
            if edit.step == step:
                logits = torch.full_like(logits, -torch.inf)
                logits[:, edit.token] = 0.0
        return logits

    return {"on_logits": force} if autoregressive else {"on_canvas": plant}


Progress = Callable[[int, int], None]
"""Called as (finished steps, steps)."""

CHUNK = 400_000
"""Bytes of exact scores of one message, beside a byte for the colour of every score."""


class ShownSteps(RunObserver):
    """An observer that says how many steps have run."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def finish(self, plan: Any, canvas: Tensor, proposal: Any, unmasked: Tensor) -> None:
        """A step is over."""
        self.progress(plan.index + 1, plan.total)


@dataclass(frozen=True, eq=False)
class Prompt:
    """What a run is made from: one prompt, alone.

    Args:
        ids: its token ids.
        seed: of the run.
        settings: of `denoise`.
        hooks: under which the plain run is made too.
        code: the prompt as Python.
    """

    ids: tuple[int, ...]
    seed: int
    settings: Mapping[str, Any]
    hooks: tuple[HookLike, ...]
    code: str


@dataclass(frozen=True, eq=False)
class Side:
    """A run of one row, its scores, and what the page is sent of them.

    Args:
        source: what `Subject.of` takes.
        hooks: of the run, in order.
        rule: the detector with which the page starts.
        levels: received attention at the levels that were needed so far.
        version: a number that no other side of this process has.
    """

    source: Any
    hooks: tuple[HookLike, ...]
    rule: Detector
    levels: dict[Level, Received] = field(default_factory=dict)
    version: int = field(default_factory=count().__next__)

    @cached_property
    def subject(self) -> Subject:
        """The row, as the report has it."""
        return Subject.of(self.source, 0)

    @property
    def run(self) -> DenoisingRun:
        """The run."""
        return self.subject.run

    @property
    def received(self) -> Received:
        """Received attention of every step, layer and head."""
        return self.subject.received

    @cached_property
    def keys(self) -> Int[Tensor, "shown"]:
        """The keys that the page shows: all of them."""
        return shown_keys(self.subject)

    @property
    def strongest(self) -> tuple[int, int]:
        """Places on their axes of the layer and head with the highest score at any step."""
        values = self.received.values[:, 0].nan_to_num(nan=-1.0).amax((0, 3))
        return divmod(int(values.argmax()), values.shape[1])

    @cached_property
    def content(self) -> dict[str, Any]:
        """Everything but the scores."""
        values = self.received.values
        return {
            **canvas_content(self.subject, rule=self.rule, pack=plain),
            "highest": max(1.0, float(values.nan_to_num(nan=0.0).max())) if values.numel() else 1.0,
        }

    def at_step(self, step: int) -> dict[str, Any]:
        """The scores of all patterns at a step."""
        part = self.received.part(steps=slice(step, step + 1))
        levels, values = patterns_of(part, self.keys)
        return self._chunk(part, levels, values)

    def over_steps(self, level: Level, layer: int, head: int) -> dict[str, Any]:
        """The scores of one pattern at all steps; `layer` and `head` are places on the axes."""
        if level not in self.levels:
            self.levels[level] = self.received.at_level(level)
        part = self.levels[level].part(layers=slice(layer, layer + 1), heads=slice(head, head + 1))
        values = part.values[:, 0, 0, 0][..., self.keys][None].float()
        return self._chunk(part, levels_of(part)[:1], values)

    def _chunk(self, part: Received, levels: list[dict[str, Any]], values: Tensor) -> dict[str, Any]:
        size, steps = CHUNK + 2 * values.numel(), values.shape[1]
        given = (part, self.rule, levels, self.keys)
        rules = stored_rules(*given, row=0, steps=steps, budget=size, pack=plain)
        return {**fitting(Scores(values, plain), size), "stored": rules}


def made_side(
    model: Any,
    prompt: Prompt,
    changes: Sequence[Change],
    rule: Detector,
    progress: Progress,
    *,
    autoregressive: bool = False,
) -> Side:
    """Denoise the prompt with the changes, and record received attention.

    Raises:
        ValueError: what `denoise` refuses.
    """
    hooks = (*prompt.hooks, *hooks_of(changes))
    recorder = Recorder(model, [ReceivedAttention()])
    others: dict[str, Any] = {**callbacks_of(changes, autoregressive=autoregressive), **prompt.settings}
    run = denoise(
        model,
        [list(prompt.ids)],
        seed=[prompt.seed],
        hooks=hooks,
        observers=[recorder, ShownSteps(progress)],
        **others,
    )
    # A key after the end of an AR run that ended early never was there, and a rerun would not find it.
    length = run.tokens.shape[1]
    there = [one for one in changes if not (isinstance(one, HiddenKey) and _beyond(one.position, length))]
    return Side(recorder.recording(run), (*prompt.hooks, *hooks_of(there)), rule)


def _beyond(position: int | SinkToken, length: int) -> bool:
    return not isinstance(position, SinkToken) and position >= length


def settings_of(run: DenoisingRun) -> dict[str, Any]:
    """The arguments of `denoise` by which a run is repeated.

    An exact cache is left out, since a recorder needs the whole prefix.

    Raises:
        ValueError: the run is none of `denoise`.
    """
    name = str(run.settings.get("sampler"))
    if name not in algorithms():
        raise ValueError(f"a run of the sampler {name!r} cannot be repeated; give one of dlm_lens.denoise")
    known = {one.name for one in fields(algorithms()[name].settings)} - {"use_cache"}
    found = {name: value for name, value in run.settings.items() if name in known and value is not None}
    if run.settings.get("reference_quirks"):
        found["reference_quirks"] = True
    return found


def given_source(given: Any) -> tuple[DenoisingRun, Any] | None:
    """The run of a source, and the source itself if it has scores; None for a prompt.

    Raises:
        ValueError: a part of the steps of a run, or a recording without received attention of all queries.
    """
    given = meant(given)
    if isinstance(given, DenoisingRun):
        _check_whole(given)
        return given, None
    if isinstance(given, Recording):
        _check_whole(given.run)
        Subject.of(given, 0)
        return given.run, given
    if isinstance(given, tuple) and [type(part) for part in given] == [Received, DenoisingRun]:
        _check_whole(given[1])
        Subject.of(given, 0)
        return given[1], given
    return None


def _check_whole(run: DenoisingRun) -> None:
    """Raise unless a run has all its steps: a twin has them, and is compared with it step by step.

    Raises:
        ValueError: a part of the steps, which may be the first ones.
    """
    if run.part is not None:
        raise ValueError(
            "explore needs a run or a recording of every step; this one has a part of them "
            f"(steps {', '.join(map(str, run.step_numbers))}): give the whole run or recording, or the prompt"
        )


def has_all_scores(source: Any, model: Any) -> bool:
    """Whether a source has what a twin has: every head of every layer, of all queries, under the run's hooks."""
    subject = Subject.of(source, 0)
    received = subject.received
    layers, heads = len(attention_blocks(model)), model.config.num_attention_heads
    return (
        received.layers[:layers] == tuple(range(layers))
        and received.level == "head"
        and len(subject.heads) >= heads
        and subject.heads == tuple(range(len(subject.heads)))
        and (received.queries, received.scale) == ("all", "relative to uniform")
        and not _scores_rarely_seen(received)
        # A rerun may have been made under other hooks than the run, which a twin repeats.
        and (not isinstance(source, Recording) or source.hooks == source.run_hooks)
    )


def _scores_rarely_seen(received: Received) -> bool:
    """Whether a key has a score that fewer queries see than a recorder wants by default."""
    if received.min_viewers >= MIN_VIEWERS or received.viewers is None:
        return received.min_viewers > MIN_VIEWERS
    return bool(((received.viewers < MIN_VIEWERS) & ~received.values.isnan()).any())


def row_prompt(run: DenoisingRun, row: int, hooks: tuple[HookLike, ...]) -> Prompt:
    """What a row of a run was made from."""
    ids = tuple(first_prompt(run, row).tolist())
    seeds = run.settings.get("seeds") or (0,) * len(run.tokens)
    return Prompt(ids, int(seeds[row]), settings_of(run), hooks, repr([list(ids)]))


def check_hooks_given(run: DenoisingRun, hooks: Sequence[HookLike]) -> None:
    """Raise unless these are the hooks under which a run was made.

    Raises:
        ValueError: naming those of the run.
    """
    had, given = tuple(run.settings.get("hooks", ())), tuple(map(repr, hooks))
    if had != given:
        raise ValueError(
            f"the run had the hooks [{', '.join(had)}] and explore was given [{', '.join(given)}]; it repeats the "
            "run: give it the same hooks="
        )
