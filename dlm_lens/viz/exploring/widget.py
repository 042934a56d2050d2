"""`Explorer`: the widget that `explore` returns; its page is the report's, its code `script_of`."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.arguments import is_whole
from dlm_lens.attention import HookLike, SinkToken
from dlm_lens.hooks.expressions import hook_names, hooks_of_run
from dlm_lens.printable import shown
from dlm_lens.probes import LogitLens
from dlm_lens.sampling import Comparison, DenoisingRun
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks import Received
from dlm_lens.sinks.detector_registry import DETECTORS
from dlm_lens.viz.exploring.exploration import Exploration, Selection
from dlm_lens.viz.exploring.page_requests import ANSWERS, Request, StaleError, module, problem_of, split
from dlm_lens.viz.exploring.sides import CanvasEdit, Change, HiddenHead, HiddenKey, coded, decoded, edits_of

try:
    import anywidget
    import traitlets
except ImportError:
    raise ImportError(
        "explore needs anywidget, which is not installed: pip install 'dlm-lens[notebook]'; without it, "
        "dl.viz.report(recording, path) writes the same views as one HTML file"
    ) from None

logger = logging.getLogger(__name__)

PAUSE = 0.1
"""Seconds between two messages about the progress of a run."""


class Explorer(anywidget.AnyWidget):
    """A run in a notebook: its steps, canvas, heads and sinks, and its twin with what was hidden or edited.

    Made by `dl.viz.explore`. What a click selects is at `selection`, and may be set; what a click changes can be
    changed by the methods too. Negative steps, positions, layers and heads count from the end of the plain run.

    Args:
        exploration: the run and what is known of it, an `Exploration`.
    """

    _esm = module()
    _selection = traitlets.Dict().tag(sync=True)
    _busy = traitlets.Dict().tag(sync=True)
    _problem = traitlets.Unicode("").tag(sync=True)
    _changes: Any = traitlets.List().tag(sync=True)
    _summary = traitlets.Unicode("").tag(sync=True)
    _code = traitlets.Unicode("").tag(sync=True)
    _rows: Any = traitlets.List().tag(sync=True)
    _row = traitlets.Int(0).tag(sync=True)
    _shown = traitlets.Dict().tag(sync=True)

    def __init__(self, exploration: Any) -> None:
        self._exploration: Exploration = exploration
        self._error: BaseException | None = None
        self._said = 0.0
        exploration.progress = self._progress
        layer, head = exploration.base.strongest
        layers = exploration.base.received.layers
        first = Selection(0, layers[layer] if layers else 0, exploration.base.subject.heads[head])
        self._selected = first
        super().__init__(_rows=exploration.labels() if exploration.rows > 1 else [""], **self._state())
        self.on_msg(self._received)

    # What is shown

    @property
    def run(self) -> DenoisingRun:
        """The plain run of the prompt that is shown, alone."""
        return self._exploration.run

    @property
    def twin(self) -> DenoisingRun | None:
        """The run with the changes, from the same seed; None without changes."""
        twin = self._exploration.twin
        return None if twin is None else twin.run

    @property
    def received(self) -> Received:
        """Received attention of the plain run."""
        return self._exploration.base.received

    @property
    def twin_received(self) -> Received | None:
        """Received attention of the twin; None without changes."""
        twin = self._exploration.twin
        return None if twin is None else twin.received

    @property
    def comparison(self) -> Comparison | None:
        """The run and its twin; None without changes."""
        return self._exploration.comparison

    @property
    def hooks(self) -> tuple[HookLike, ...]:
        """The hooks of the twin; without changes those of the run."""
        return (self._exploration.twin or self._exploration.base).hooks

    @property
    def changes(self) -> tuple[Change, ...]:
        """What is hidden and edited, in the order in which it was."""
        return self._exploration.changes

    @property
    def row(self) -> int:
        """Which of the prompts is shown; setting it runs that prompt, and takes back all changes."""
        return self._exploration.row

    @row.setter
    def row(self, row: int) -> None:
        """Run another prompt.

        Raises:
            ValueError: there is no such row.
        """
        exploration = self._exploration
        if not is_whole(row) or not 0 <= row < exploration.rows:
            raise ValueError(f"row is {row!r}; the prompts have rows 0 to {exploration.rows - 1}")
        row = int(row)

        def take() -> None:
            exploration.take_row(row)
            chosen = self._selected
            self._selected = replace(chosen, step=min(chosen.step, self.run.steps - 1), position=None)

        self._working("running the prompt", take)

    @property
    def selection(self) -> Selection:
        """Step, layer, head and position that are selected; set it to a `Selection` or a tuple of four."""
        return self._selected

    @selection.setter
    def selection(self, selection: Selection | tuple[int, int, int, int | SinkToken | None]) -> None:
        """Select.

        Raises:
            ValueError: no selection, or a step, layer, head or position that is not there.
        """
        if not isinstance(selection, Selection) and (not isinstance(selection, Sequence) or len(selection) != 4):
            raise ValueError(
                f"selection is {shown(selection)}; give a Selection, or step, layer, head and position (or None)"
            )
        given = selection if isinstance(selection, Selection) else Selection(*selection)
        self._selected = self._exploration.check_selection(given)
        self._update()

    def select(self, **parts: int | SinkToken | None) -> Selection:
        """Change parts of the selection: `explorer.select(step=3, position=12)`.

        Raises:
            ValueError: an unknown part, or a step, layer, head or position that is not there.
        """
        held = vars(self._selected)
        if unknown := set(parts) - set(held):
            raise ValueError(f"a selection has no {', '.join(sorted(unknown))}; it has {', '.join(held)}")
        self.selection = Selection(**{**held, **parts})
        return self._selected

    @property
    def code(self) -> str:
        """Python that computes what is shown: the run, its twin, and what is selected."""
        return script_of(self._exploration, self._selected)

    @property
    def error(self) -> BaseException | None:
        """The last error of a request of the page, with its traceback; None if the last one succeeded."""
        return self._error

    # What can be changed

    def hide(self, position: int | SinkToken) -> None:
        """Hide a key from every query, or show it again if it is hidden; the run is repeated.

        Raises:
            ValueError: a position that is not there.
        """
        self._change(HiddenKey(position))

    def hide_head(self, layer: int, head: int) -> None:
        """Set the output of a head to zero, or give it back; the run is repeated.

        Raises:
            ValueError: a layer or head that is not there.
        """
        self._change(HiddenHead(layer, head))

    def plant(self, step: int, position: int, token: int | str) -> None:
        """Put a token onto the canvas that a step starts from, and run on.

        An AR model decodes the token at the step that decodes the position, whatever `step` is.

        Raises:
            ValueError: a step, position or token that is not there, or a text of several tokens.
        """
        self._change(self._exploration.edit(step, position, self._exploration.token_id(token)))

    def open_again(self, step: int, position: int) -> None:
        """Put the mask token back at a position of the canvas that a step starts from, and run on.

        Raises:
            ValueError: a model without a mask token, or a step or position that is not there.
        """
        self._change(self._exploration.edit(step, position, self._exploration.mask_id()))

    def undo(self) -> None:
        """Go back to the changes before the last one."""
        self._working("going back", self._exploration.undo)

    def clear(self) -> None:
        """Take all changes back."""
        self._working("going back", lambda: self._exploration.take_changes(()))

    # Lenses and patterns

    def lens(self, *, top: int = 5, twin: bool = False) -> LogitLens:
        """The logit lens of the selected position at the selected step, in every layer.

        Raises:
            ValueError: no position is selected, there is no twin, or the step does not see the position.
        """
        if self._selected.position is None:
            raise ValueError("no position is selected; click a token, or set explorer.select(position=...)")
        name = "twin" if twin else "run"
        return self._exploration.lens(name, self._selected.step, self._selected.position, top=top)

    def pattern(self, *, twin: bool = False) -> Float[Tensor, "query key"]:
        """The attention pattern of the selected head at the selected step; learned sink tokens are the last keys.

        Raises:
            ValueError: there is no twin, or its run has no such step.
        """
        chosen = self._selected
        return self._exploration.pattern("twin" if twin else "run", chosen.step, chosen.layer, chosen.head)

    # Work, and messages to the page about it

    def _change(self, change: Change) -> None:
        changes = self._exploration.with_change(change)
        self._working("repeating the run", lambda: self._exploration.take_changes(changes))

    def _working(self, what: str, work: Callable[[], None]) -> None:
        """Do it, and tell the page; whatever fails, the former state is kept."""
        self._busy = {"what": what}
        try:
            work()
        finally:
            self._busy = {}
        self._problem = ""
        self._update()

    def _progress(self, done: int, steps: int) -> None:
        now = time.monotonic()
        if self._busy and (now - self._said > PAUSE or done == steps):
            self._said = now
            self._busy = {**self._busy, "done": done, "of": steps}

    def _state(self) -> dict[str, Any]:
        chosen, exploration = self._selected, self._exploration
        position = None if chosen.position is None else coded(chosen.position)
        return {
            "_selection": {
                "step": chosen.step, "layer": chosen.layer, "head": chosen.head, "position": position,
            },
            "_changes": [self._described(change) for change in exploration.changes],
            "_summary": exploration.summary(),
            "_code": self.code,
            "_row": exploration.row,
            "_shown": {name: side.version for name, side in exploration.sides.items()},
        }  # fmt: skip

    def _update(self) -> None:
        with self.hold_sync():
            for name, value in self._state().items():
                setattr(self, name, value)

    def _described(self, change: Change) -> dict[str, Any]:
        run = self.run
        text = TokenTexts(run.tokenizer)
        if isinstance(change, HiddenHead):
            return {"kind": "head", "layer": change.layer, "head": change.head, "text": ""}
        if isinstance(change, HiddenKey):
            token, place = "", coded(change.position)
            if 0 <= place < run.tokens.shape[1]:
                token = str(text.label(int(run.tokens[0, place])))
            return {"kind": "key", "position": place, "text": token}
        label = str(text.label(change.token))
        return {"kind": "edit", "step": change.step, "position": change.position, "text": label}

    # Requests of the page

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        """Answer a request; errors become a sentence on the page."""
        request = content if isinstance(content, Mapping) else {}
        self._error = None
        try:
            answer = self._answer(str(request.get("kind")), request)
        except StaleError:
            answer = {"stale": True}
        except (Exception, KeyboardInterrupt) as error:
            self._error = error
            logger.debug("a request of the explorer's page failed", exc_info=True)
            self._problem = problem_of(error)
            answer = {"problem": self._problem}
        content, buffers = split({**answer, "id": request.get("id"), "kind": request.get("kind")})
        self.send(content, buffers)

    def _answer(self, kind: str, request: Request) -> dict[str, Any]:
        if kind in ANSWERS:
            return ANSWERS[kind](self._exploration, request)
        if kind not in _CHANGES:
            raise ValueError(f"the page sent the request {kind!a:.40}, which is none")
        _CHANGES[kind](self, request)
        return {}

    def _select(self, request: Request) -> None:
        position = request.get("position")
        parts = (int(request["step"]), int(request["layer"]), int(request["head"]))
        self.selection = Selection(*parts, None if position is None else decoded(int(position)))

    def _remove(self, index: int) -> None:
        """Take one change back; the run is repeated with the others."""
        changes = list(self.changes)
        del changes[index]
        self._working("repeating the run", lambda: self._exploration.take_changes(tuple(changes)))


_CHANGES: dict[str, Callable[[Explorer, Request], None]] = {
    "select": Explorer._select,
    "key": lambda explorer, request: explorer.hide(decoded(int(request["position"]))),
    "head": lambda explorer, request: explorer.hide_head(int(request["layer"]), int(request["head"])),
    "plant": lambda explorer, request: explorer.plant(
        int(request["step"]), int(request["position"]), str(request["token"])
    ),
    "open": lambda explorer, request: explorer.open_again(int(request["step"]), int(request["position"])),
    "remove": lambda explorer, request: explorer._remove(int(request["index"])),
    "undo": lambda explorer, _: explorer.undo(),
    "clear": lambda explorer, _: explorer.clear(),
    "row": lambda explorer, request: setattr(explorer, "row", int(request["row"])),
}
"""Kinds of requests that change what is selected or shown."""


GIVEN = "given_hooks"
"""The name that the code has for hooks that only the caller of explore can make, such as `steer` of a tensor."""


def script_of(exploration: Exploration, selection: Selection) -> str:
    """Python that makes the run and its twin, and computes what is selected of the latter (else of the run)."""
    own = _given_hooks(exploration)
    side = exploration.base if exploration.twin is None else exploration.twin
    hooks = [*own, *map(repr, side.hooks[len(exploration.base.hooks) :])]
    called = set(re.findall(r"\b(\w+)\(", " ".join(hooks)))
    names = sorted(called & {*hook_names(), "sink"})
    detectors = sorted(called & {entry.kind for entry in DETECTORS.values()})
    lines = ["import dlm_lens as dl"]
    lines += [f"from dlm_lens.hooks import {', '.join(names)}"] if names else []
    lines += [f"from dlm_lens.sinks import {', '.join(detectors)}"] if detectors else []
    lines += ["", *_inputs(exploration)]
    lines += [f"# {GIVEN}: the list of hooks that explore was given"] if own == [f"*{GIVEN}"] else []
    lines += [*_runs(exploration, own, hooks), *_selected(exploration, selection)]
    return "\n".join(lines) + "\n"


def _given_hooks(exploration: Exploration) -> list[str]:
    """The hooks of the plain run as Python; the name of a list where their text does not make them again."""
    try:
        return [repr(hook) for hook in hooks_of_run(exploration.run)]
    except ValueError:
        return [f"*{GIVEN}"]


def _inputs(exploration: Exploration) -> list[str]:
    name = name_of(exploration.model) if getattr(exploration.model.config, "_name_or_path", "") else ""
    settings = ", ".join(f"{name}={value!r}" for name, value in exploration.prompt.settings.items())
    return [
        f"model = dl.load({name!r})" if name else "# model: the one that explore was given",
        f"prompt = {exploration.prompt.code}",
        f"settings = dict({', '.join(filter(None, [f'seed={exploration.prompt.seed}', settings]))})",
    ]


def _runs(exploration: Exploration, own: list[str], hooks: list[str]) -> list[str]:
    of_plain = f", hooks=[{', '.join(own)}]" if own else ""
    lines = [f"recording = dl.record(model, prompt{of_plain}, **settings)"]
    if exploration.twin is None:
        return lines + ([f"hooks = [{', '.join(own)}]"] if own else [])
    edits = edits_of(exploration.changes)
    lines.append(f"hooks = [{', '.join(hooks)}]")
    callback = ""
    if edits:
        forced = exploration.run.autoregressive
        lines += _callback(exploration, edits, forced)
        callback = ", on_logits=force" if forced else ", on_canvas=plant"
    lines += [
        f"twin = dl.record(model, prompt, hooks=hooks{callback}, **settings)",
        "comparison = dl.sampling.Comparison(recording.run, twin.run, tuple(map(repr, hooks)))",
    ]
    given = (~exploration.run.masked[0, 0]).nonzero().flatten().tolist()  # of DreamOn also after a gap
    if any(edit.position < exploration.run.prompt_length or edit.position in given for edit in edits):
        # A comparison is of two runs with one prompt.
        lines[-1] = "changed = recording.run.tokens != twin.run.tokens"
    return lines


def _callback(exploration: Exploration, edits: tuple[CanvasEdit, ...], forced: bool) -> list[str]:
    text = TokenTexts(getattr(exploration.model, "tokenizer", None))
    lines = ["", "def force(step, canvas, logits):" if forced else "def plant(step, canvas):"]
    for edit in edits:
        label = ascii(str(text.label(edit.token)))
        lines.append(f"    if step == {edit.step}:")
        if forced:
            lines.append("        logits = logits.new_full(logits.shape, -float('inf'))")
            lines.append(f"        logits[:, {edit.token}] = 0.0  # {label}, at position {edit.position}")
        else:
            lines.append(f"        canvas[:, {edit.position}] = {edit.token}  # {label}")
    return [*lines, f"    return {'logits' if forced else 'canvas'}", ""]


def _selected(exploration: Exploration, selection: Selection) -> list[str]:
    name = "recording" if exploration.twin is None else "twin"
    base = exploration.base.subject
    layers = base.received.layers
    layer = layers.index(selection.layer) if layers else 0
    head = base.heads.index(selection.head)
    step = min(selection.step, exploration.sides.get("twin", exploration.base).run.steps - 1)
    lines = [
        "",
        "# what is selected",
        f"received = dl.received_of({name}).values[{step}, 0, {layer}, {head}]  # of every key",
    ]
    side = exploration.base if exploration.twin is None else exploration.twin
    hooks = ", hooks=hooks" if side.hooks else ""
    where = f"step={step}, layer={selection.layer}, head={selection.head}"
    lines.append(f"pattern = dl.viz.attention_pattern({name}.run, model, {where}{hooks})")
    position: Any = selection.position
    if position is not None:
        place = side.run.tokens.shape[1] + position.index if isinstance(position, SinkToken) else position
        call = f"dl.logit_lens(model, {name}.run, [{place}], steps=[{step}], controls=False{hooks})"
        lines.append(f"lens = {call}{'.hooked' if side.hooks else ''}")
    return lines
