"""The Python that computes what an explorer shows."""

import re
from typing import Any

from dlm_lens.adapters.model_names import name_of
from dlm_lens.attention import SinkToken
from dlm_lens.hooks.expressions import hook_names, hooks_of_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks.detector_registry import DETECTORS
from dlm_lens.viz.exploring.changes import CanvasEdit, edits_of
from dlm_lens.viz.exploring.exploration import Exploration, Selection

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
