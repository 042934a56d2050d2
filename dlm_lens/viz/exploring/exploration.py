"""What an explorer computes: the run, its twin with the changes, and statistics of both; without a widget."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.arguments import check_index, is_whole, plain_number
from dlm_lens.attention import HookLike, SinkLayout, SinkToken, attention_blocks
from dlm_lens.printable import shown
from dlm_lens.probes import LogitLens, logit_lens
from dlm_lens.sampling import Comparison, DenoisingRun
from dlm_lens.sampling.algorithm_registry import sampler_class
from dlm_lens.sampling.prompts import Prompts, read_prompts
from dlm_lens.sampling.settings import SpecialIds, row_seeds
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks import Detector
from dlm_lens.viz.attention_snapshot import snapshot
from dlm_lens.viz.exploring.sides import (
    CanvasEdit,
    Change,
    HiddenHead,
    HiddenKey,
    Progress,
    Prompt,
    Side,
    check_hooks_given,
    edits_of,
    given_source,
    has_all_scores,
    made_side,
    row_prompt,
)

KEPT_TWINS = 3
"""How many twins are kept, so that undoing a change does not run the model again."""


@dataclass(frozen=True)
class Selection:
    """What is selected in an explorer.

    Args:
        step: index of the step.
        layer: index of the layer in the model.
        head: index of the head.
        position: canvas position or `sink(i)`; None for none.
    """

    step: int = 0
    layer: int = 0
    head: int = 0
    position: int | SinkToken | None = None


class Exploration:
    """A run of one prompt, its twin with the changes, and the statistics of both.

    Args:
        model: from `dlm_lens.load`.
        given: a prompt or several, a `DenoisingRun`, a `Recording`, or a `Received` and its run.
        row: which of the prompts.
        hooks: under which the plain run is made.
        rule: the detector with which the page starts.
        seed: one number, or one per prompt.
        settings: of `denoise`.
        progress: called after every step of a run.

    Raises:
        ValueError: what `explore` refuses.
    """

    def __init__(
        self,
        model: Any,
        given: Any,
        *,
        row: int,
        hooks: tuple[HookLike, ...],
        rule: Detector,
        seed: int | list[int] | None,
        settings: dict[str, Any],
        progress: Progress,
    ) -> None:
        self.model, self.hooks, self.rule, self.progress = model, hooks, rule, progress
        self.given, self.settings = given, settings
        source = given_source(given)
        self.source: tuple[DenoisingRun, Any] | None = source
        self.prompts: Prompts | None = None
        if source is None:
            self.prompts = read_prompts(model, given)
            self.seeds = row_seeds(seed, len(self.prompts.ids))
        else:
            if settings:
                raise ValueError(f"{', '.join(settings)}: settings go with a prompt; this run is finished")
            check_hooks_given(source[0], hooks)
        check_index("row", row, self.rows)
        self.take_row(row)

    @property
    def rows(self) -> int:
        """How many prompts there are."""
        return len(self.prompts.ids if self.prompts is not None else self.source[0].tokens)  # type: ignore[index]

    def labels(self) -> list[str]:
        """The beginning of every prompt."""
        text, found = TokenTexts(getattr(self.model, "tokenizer", None)), []
        for row in range(self.rows):
            words = [str(text.label(token)) for token in self._prompt(row).ids[:40]]
            found.append(" ".join(words)[:80])
        return found

    def take_row(self, row: int) -> None:
        """Show another prompt; its changes begin anew."""
        row = row % self.rows
        prompt = self._prompt(row)
        side = self._base(row, prompt)
        self.row, self.prompt, self.base = row, prompt, side
        self._as_given = self.source is not None and side.source is self.source[1]
        self.twin: Side | None = None
        self.changes: tuple[Change, ...] = ()
        self.past: list[tuple[Change, ...]] = []
        self._made: OrderedDict[tuple[Change, ...], Side] = OrderedDict()

    def _prompt(self, row: int) -> Prompt:
        if self.source is not None:
            return row_prompt(self.source[0], row, self.hooks)
        assert self.prompts is not None
        ids = tuple(self.prompts.ids[row][self.prompts.attention_mask[row]].tolist())
        given = self.given[row] if isinstance(self.given, list) and len(self.given) == self.rows > 1 else self.given
        texts = isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], str | dict))
        return Prompt(ids, self.seeds[row], self.settings, self.hooks, ascii(given) if texts else repr([list(ids)]))

    def _base(self, row: int, prompt: Prompt) -> Side:
        """The run of a row alone.

        Raises:
            ValueError: a given run that its prompt, seed and settings do not repeat.
        """
        if self.source is None:
            return made_side(self.model, prompt, (), self.rule, self.progress)
        run, source = self.source
        alone = len(run.tokens) == 1 and not int(run.padding[0])
        if source is not None and alone and has_all_scores(source, self.model):
            return Side(source, self.hooks, self.rule)
        return self._repeated(run, row, prompt)

    def _repeated(self, run: DenoisingRun, row: int, prompt: Prompt) -> Side:
        """A row of a given run, made again.

        Raises:
            ValueError: it comes out otherwise.
        """
        side = made_side(self.model, prompt, (), self.rule, self.progress)
        count, first = int(run.row_steps[row]), int(run.padding[row])
        was, now = run.first_steps(count).tokens[row, first:], side.run.tokens[0]
        if not was[: len(now)].equal(now[: len(was)]):
            raise ValueError(
                f"row {row} of this run, repeated from its prompt, seed and settings, has other tokens: it was "
                "made by another model or with callbacks, or rounding in its batch decided otherwise; give explore "
                "the prompt"
            )
        return side

    @property
    def run(self) -> DenoisingRun:
        """The plain run."""
        return self.base.run

    @property
    def sides(self) -> dict[str, Side]:
        """The run and, with changes, its twin."""
        return {"run": self.base} | ({} if self.twin is None else {"twin": self.twin})

    def side(self, name: str) -> Side:
        """One of the two.

        Raises:
            ValueError: there is no twin, or an unknown name.
        """
        if name not in self.sides:
            raise ValueError(f"there is no {name!r}: hide a key or a head, or edit the canvas, to get a twin")
        return self.sides[name]

    def with_change(self, change: Change) -> tuple[Change, ...]:
        """The changes with another one; one that is there is taken back, and an edit of the same place replaced.

        Raises:
            ValueError: a position, head, step or token that is not there.
        """
        change = self._counted_from_start(change)
        if change in self.changes:
            return tuple(one for one in self.changes if one != change)
        kept = self.changes
        if isinstance(change, CanvasEdit):
            kept = tuple(
                one
                for one in kept
                if not isinstance(one, CanvasEdit) or (one.step, one.position) != (change.step, change.position)
            )
        return (*kept, change)

    def take_changes(self, changes: tuple[Change, ...], *, undoing: bool = False) -> None:
        """Run the twin with these changes; if it fails, everything stays as it was.

        Raises:
            ValueError: a given recording that its prompt, seed and settings do not repeat, or what `denoise`
                refuses.
        """
        if changes == self.changes:
            return
        twin = self._made.get(changes)
        if twin is None and changes:
            if self._as_given:
                # What differs from a recording with callbacks or of another model is not due to the changes.
                self._repeated(self.run, self.row, self.prompt)
                self._as_given = False
            ar = self.run.autoregressive
            twin = made_side(self.model, self.prompt, changes, self.rule, self.progress, autoregressive=ar)
            self._made[changes] = twin
            while len(self._made) > KEPT_TWINS:
                self._made.popitem(last=False)
        if not undoing:
            self.past.append(self.changes)
        self.twin, self.changes = twin, changes

    def undo(self) -> None:
        """Go back to the changes before the last one."""
        if self.past:
            self.take_changes(self.past[-1], undoing=True)
            self.past.pop()

    @property
    def comparison(self) -> Comparison | None:
        """The run and its twin; None without changes. An edited prompt counts as the run's own."""
        if self.twin is None:
            return None
        plain, hooked = self.run, self.twin.run
        if edits_of(self.changes):
            moves = sampler_class(plain.settings).resizes  # then only the first canvas has it where it was
            steps, width = (slice(1), None) if moves else (slice(None), plain.prompt_length)
            canvases, masked = hooked.canvases.clone(), hooked.masked.clone()
            prompt = ~plain.masked[0, 0, :width]
            canvases[steps, 0, :width][:, prompt] = plain.canvases[0, 0, :width][prompt]
            masked[steps, 0, :width][:, prompt] = False
            hooked = replace(hooked, canvases=canvases, masked=masked)
        return Comparison(plain, hooked, tuple(map(repr, self.twin.hooks)))

    def summary(self) -> str:
        """What changed, in a sentence or two; empty without changes."""
        pair = self.comparison
        if pair is None or self.twin is None:
            return ""
        changed, answer, first = int(pair.tokens_changed[0]), int(pair.answer.sum()), int(pair.first_difference[0])
        when = f"; the first difference is written at step {first}" if first >= 0 else ""
        left = int(self.twin.run.masks_left[0])
        open_ = f" {left} positions of the twin stayed open." if left else ""
        return f"{changed} of {answer} tokens of the answer changed{when}.{open_}"

    def lens(self, name: str, step: int, position: int | SinkToken, *, top: int = 5) -> LogitLens:
        """The logit lens of a position in every layer at a step; the twin's under its hooks.

        Raises:
            ValueError: a step or position that is not there.
        """
        side = self.side(name)
        canvas = side.run.tokens.shape[1]
        place = canvas + position.index if isinstance(position, SinkToken) else position
        found = logit_lens(self.model, side.run, [place], steps=[step], top=top, controls=False, hooks=side.hooks)
        return found if found.hooked is None else found.hooked

    def pattern(self, name: str, step: int, layer: int, head: int) -> Float[Tensor, "query key"]:
        """The attention pattern of a head at a step, positions that are not there yet included as zeros.

        Raises:
            ValueError: a step, layer or head that is not there.
        """
        side = self.side(name)
        check_index("head", head, len(side.subject.heads))
        shot = snapshot(self.model, side.run, step=step, layer=layer, hooks=side.hooks)
        count = side.run.tokens.shape[1]
        keys = torch.tensor([*shot.positions, *(count + i for i in range(shot.sinks))])
        whole = torch.zeros(count, count + shot.sinks)
        rows = shot.pattern[head, : len(shot.positions)]
        whole[keys[: len(shot.positions), None], keys] = rows.float()
        return whole

    def token_id(self, token: int | str) -> int:
        """The id of a token.

        Raises:
            ValueError: no token, several, or an id without an embedding.
        """
        rows = self.model.get_input_embeddings().weight.shape[0]
        token = plain_number(token)
        if is_whole(token):
            found = int(token)
        elif not isinstance(token, str):
            raise ValueError(f"the token is {shown(token)}; give its text or its id")
        elif (tokenizer := getattr(self.model, "tokenizer", None)) is None:
            if not token.strip().isdigit():
                raise ValueError(f"the token is {token!a:.60}; the model has no tokenizer: give a token id")
            found = int(token)
        else:
            found = _single_token(tokenizer, token)
        if not 0 <= found < rows:
            raise ValueError(f"token id {found}: the model embeds ids from 0 to {rows - 1}")
        return found

    def mask_id(self) -> int:
        """The id of the mask token.

        Raises:
            ValueError: an AR model or one of uniform noise, which has none.
        """
        found = SpecialIds.of(self.model.config).mask
        if self.run.autoregressive or self.run.uniform_noise or found is None:
            raise ValueError(
                "this model has no mask token, so that a decided position cannot be opened again; plant a token "
                "there instead"
            )
        return found

    def key_at(self, position: int | SinkToken) -> int | SinkToken:
        """A position counted from the start.

        Raises:
            ValueError: it is not there.
        """
        if isinstance(position, SinkToken):
            check_index("sink token", position.index, SinkLayout.of(self.model).count)
            return position
        return self._canvas_position(position)

    def edit(self, step: int, position: int, token: int) -> CanvasEdit:
        """An edit of the canvas; in AR decoding at the step that decodes the position, whatever `step` is.

        Raises:
            ValueError: a step or a position that is not there; in AR decoding, a position in the prompt.
        """
        step, position = self._canvas_step(step), self._canvas_position(position)
        if self.run.autoregressive:
            step = position - self.run.prompt_length
            if step < 0:
                raise ValueError(
                    f"position {position} is in the prompt, which an AR model does not decode; explore another "
                    "prompt"
                )
        return CanvasEdit(step, position, token)

    def check_selection(self, selection: Selection) -> Selection:
        """The selection with indices that are not negative.

        Raises:
            ValueError: a step, layer, head or position that is not there.
        """
        steps, layers = self.run.steps, self.base.received.layers
        step = _index("step", selection.step, steps)
        layer, head = (_whole(name, getattr(selection, name)) for name in ("layer", "head"))
        if layers and layer not in layers:
            raise ValueError(f"layer {layer} was not recorded; there are {', '.join(map(str, layers))}")
        if head not in self.base.subject.heads:
            raise ValueError(
                f"head {head} is not there; heads are {self.base.subject.heads[0]} to {self.base.subject.heads[-1]}"
            )
        position = selection.position
        if position is not None:
            position = self.key_at(position)
        return replace(selection, step=step, layer=layer, head=head, position=position)

    def _canvas_step(self, step: int) -> int:
        """A step of the run or its twin counted from the first."""
        longest = max(side.run.steps for side in self.sides.values())
        return _index("step", step, self.run.steps, longest)

    def _canvas_position(self, position: int) -> int:
        """A position of the canvas counted from the start."""
        widest = max(side.run.tokens.shape[1] for side in self.sides.values())
        return _index("position", position, self.run.tokens.shape[1], widest)

    def _counted_from_start(self, change: Change) -> Change:
        """The change with indices that are not negative: one place has one name, and hooks and pages have it."""
        if isinstance(change, HiddenKey):
            return HiddenKey(self.key_at(change.position))
        if isinstance(change, HiddenHead):
            layers, heads = len(attention_blocks(self.model)), self.base.received.values.shape[3]
            check_index("layer", change.layer, layers)
            check_index("head", change.head, heads)
            return HiddenHead(int(change.layer) % layers, int(change.head) % heads)
        step, position = self._canvas_step(change.step), self._canvas_position(change.position)
        return replace(change, step=step, position=position)


def _index(name: str, value: Any, count: int, most: int | None = None) -> int:
    """An index counted from the start.

    Args:
        name: what is counted.
        value: the index; a negative one counts from the end of the plain run.
        count: how many the plain run has.
        most: how many the run or its twin has, if they may differ.

    Raises:
        ValueError: it is not there.
    """
    most = count if most is None else most
    value = _whole(name, value, f" from 0 to {most - 1}")
    check_index(name, value, count if value < 0 else most)
    return value % count if value < 0 else value


def _whole(name: str, value: Any, bounds: str = "") -> int:
    """A whole number of Python, numpy or a tensor, as Python's own, which `explorer.code` can write.

    Raises:
        ValueError: it is none.
    """
    if not is_whole(value := plain_number(value)):
        raise ValueError(f"{name} is {shown(value)}; give a whole number{bounds}")
    return int(value)


def _single_token(tokenizer: Any, text: str) -> int:
    """The id of a text that is one token, perhaps with a space before it.

    Raises:
        ValueError: it is none, an unknown one, or several.
    """
    found: Sequence[int] = ()
    for one in (text, f" {text}"):
        ids = tokenizer(one, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] == tokenizer.unk_token_id and text.strip() != tokenizer.unk_token:
            raise ValueError(f"{text!a:.60} is not in the model's vocabulary; give a token that is, or an id")
        if len(ids) == 1:
            return int(ids[0])
        found = found or ids
    labels = [str(TokenTexts(tokenizer).label(int(i))) for i in found]
    raise ValueError(f"{text!a:.60} is {len(found)} tokens ({', '.join(labels)[:80]}); give one token, or its id")
