"""The data of a report: one row of a recording, with as many exact scores as fit."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.arguments import is_whole
from dlm_lens.attention import beside_sinks
from dlm_lens.printable import printable, shown
from dlm_lens.recording import QueryClass, Recording
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.algorithm_registry import sampler_class
from dlm_lens.sampling.emerging_text import came_by, changed_on_canvas
from dlm_lens.sampling.moved_tokens import NOWHERE
from dlm_lens.sampling.run_rows import first_prompt
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks import AboveMean, Detector, Level, Received, received_of
from dlm_lens.sinks.received import MERGED
from dlm_lens.viz.reporting.packing import Pack, narrow, packed
from dlm_lens.viz.reporting.rules import kinds_of, stored_rules
from dlm_lens.viz.reporting.score_precision import PRECISIONS, Scores
from dlm_lens.viz.selection import as_received, over_before, row_number

logger = logging.getLogger(__name__)

Source = Recording | tuple[Received, DenoisingRun]
"""A recording, or received attention and its run."""

BUDGET = 4_900_000
"""Characters of the data of one recording, so that a report of it stays below 5 MB."""

START = AboveMean(3.0)
"""The rule with which a page starts, unless another one is given."""

MOST_PROMPTS = 16
"""The largest number of rows in one file, which share the budget."""

LONGEST_LABEL = 90
"""Characters of a prompt in the menu."""

MOST = 2**28
"""The largest number of scores of one row that a browser can hold."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A recording and its row that a report is about.

    Args:
        source: what the sinks of stored rules are found in: the recording, or received attention, all rows.
        received: received attention of this row alone.
        run: the run, all rows.
        row: index of the row.
        rows: number of rows of the recording.
        model: name of the model; empty if unknown.
        steps: index of each step in the run.
        heads: index of each head.
        text_of: token id -> its text, with control characters escaped.
        versions: versions of the packages that computed the scores.
    """

    source: Recording | Received
    received: Received
    run: DenoisingRun
    row: int
    rows: int
    model: str
    steps: tuple[int, ...]
    heads: tuple[int, ...]
    text_of: Callable[[int], str]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, source: Any, row: int, queries: QueryClass = "all") -> "Subject":
        """The subject of a source of `report`; of a recording the received attention of these queries.

        Raises:
            TypeError: neither a `Recording` nor a `Received` with its `DenoisingRun`.
            ValueError: an unknown row, scores of another run or of other queries, or too many of them.
        """
        if isinstance(source, Recording):
            received, run = received_of(source, queries), source.run
            model, steps, heads, versions = source.model, source.steps, source.heads, source.versions
        elif isinstance(source, tuple) and [type(part) for part in source] == [Received, DenoisingRun]:
            received, run = as_received(source[0], queries), source[1]
            model, steps, heads, versions = "", run.step_numbers, None, {}
        else:
            raise TypeError(
                f"a report of a {type(source).__name__}; give a Recording, or a tuple (Received, DenoisingRun)"
            )
        _check(received, run, row)
        texts = TokenTexts(received.tokenizer)
        # A row that has ended has no scores at later steps.
        ran = int(run.row_steps[row])
        received, run = received.first_steps(ran), run.first_steps(ran)
        return cls(
            source=source if isinstance(source, Recording) else source[0],
            received=received.part(rows=slice(row, row + 1)),
            run=run,
            row=row,
            rows=len(run.tokens),
            # A report that is shared does not contain paths of its author's machine.
            model=Path(model).name if Path(model).is_absolute() else model,
            steps=tuple(steps[:ran]),
            heads=tuple(range(received.values.shape[3])) if heads is None else tuple(heads),
            text_of=lambda token: texts.label(token, None),
            versions=versions,
        )


def _check(received: Received, run: DenoisingRun, row: int) -> None:
    steps, batch, _, _, keys = received.values.shape
    wanted = (run.steps, len(run.tokens), run.tokens.shape[1] + received.sinks)
    if (steps, batch, keys) != wanted:
        raise ValueError(
            f"the scores have {steps} steps, {batch} rows and {keys} keys, the run {wanted[0]}, {wanted[1]} and "
            f"{wanted[2]}; give the run that they belong to"
        )
    if not is_whole(row) or not 0 <= row < batch:
        raise ValueError(f"row {shown(row)} of {batch}; rows go from 0 to {batch - 1}")
    if not int(run.row_steps[row]):
        raise ValueError(over_before(row))
    if received.values[:, row].numel() > MOST:
        raise ValueError(
            f"{received.values[:, row].numel():,} scores are more than a browser can hold ({MOST:,}); take a part, "
            "such as recording.select(step=slice(None, None, 4))"
        )


def content_of(subject: Subject, budget: int = BUDGET, *, rule: Detector = START) -> dict[str, Any]:
    """Everything that the page shows of a recording, ready for JSON; `rule` is the one with which it starts."""
    shown = shown_keys(subject)
    levels, values = patterns_of(subject.received, shown)
    steps = len(subject.steps)
    place: dict[str, Any] = {"row": subject.row, "steps": steps, "queries": subject.received.queries}
    stored = stored_rules(subject.source, rule, levels, shown, **place, budget=budget)
    size = sum(len(one[name]["data"]) for one in stored for name in ("count", "key", "score", "threshold"))
    return {
        **canvas_content(subject, rule=rule),
        "stored": stored,
        **fitting(Scores(values), budget - size),
    }


def canvas_content(subject: Subject, *, rule: Detector = START, pack: Pack = packed) -> dict[str, Any]:
    """What the page shows beside the scores: facts, the canvas of every step, levels, and which patterns move."""
    levels = levels_of(subject.received)
    return {
        **_facts(subject),
        **_canvas(subject, shown_keys(subject), pack),
        "levels": levels,
        "kinds": kinds_of(subject.received, [level["name"] for level in levels], rule),
        "moved_by": repr(rule),
    }


def shown_keys(subject: Subject) -> Int[Tensor, "shown"]:
    """The keys that the page shows: without padding, learned sink tokens last."""
    valid = subject.run.attention_mask[subject.row]
    return torch.cat([valid.nonzero().flatten(), len(valid) + torch.arange(subject.received.sinks)])


def _facts(subject: Subject) -> dict[str, Any]:
    run, received = subject.run, subject.received
    progress = run.progress[:, subject.row]
    return {
        "model": subject.model,
        "row": row_number(subject.source, subject.row),
        "rows": subject.rows,
        # A part of the rows does not know how many its recording has.
        "some_rows": any(row_number(subject.source, row) != row for row in range(subject.rows)),
        "prompt_text": _prompt_text(subject),
        "steps": list(subject.steps),
        "layers": list(received.layers),
        "heads": list(subject.heads),
        # The layers that a mean is over, and the heads where they are not all of the model's.
        "some_layers": list(received.layers),
        "some_heads": list(received.heads),
        "learned": received.sinks,
        "scale": received.scale,
        "queries": received.queries,
        "min_viewers": received.min_viewers,
        "progress": [round(p, 6) for p in progress.tolist()],
        "blocks": list(run.blocks),
        "settings": {name: _shown(value) for name, value in _settings(subject).items()},
        "versions": dict(subject.versions),
        "text": printable(run.texts[subject.row]) if run.tokenizer is not None else None,
        "causal": run.autoregressive,
        "open": "not decoded yet" if run.autoregressive else "open" if run.uniform_noise else "masked",
    }


def _settings(subject: Subject) -> dict[str, Any]:
    """The settings of the run, with the hooks under which the scores were computed where `rerun` had others."""
    source, settings = subject.source, dict(subject.run.settings)
    if isinstance(source, Recording) and source.hooks != source.run_hooks:
        settings["hooks"] = source.hooks
        settings["hooks of the run"] = source.run_hooks
    return settings


def _prompt_text(subject: Subject) -> str:
    """The beginning of the prompt, for the menu of prompts."""
    run, row = subject.run, subject.row
    places = run.attention_mask[row] & (torch.arange(run.tokens.shape[1], device="cpu") < run.prompt_length)
    ids = run.tokens[row, places].tolist()
    if sampler_class(run.settings).resizes:  # what fills a gap moves, and the rest of the prompt is after it
        ids = first_prompt(run, row).tolist()
    text = " ".join(subject.text_of(token) for token in ids)
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "\u2026"


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _canvas(subject: Subject, shown: Tensor, pack: Pack) -> dict[str, Any]:
    """The tokens and open positions of the canvas of every step and after the last one, without padding."""
    run, row, sinks = subject.run, subject.row, subject.received.sinks
    canvases = beside_sinks(run.canvases[:, row], sinks)[:, shown]
    ids, index = canvases.unique(return_inverse=True)
    moved = _moved(run, row, shown)
    flags = (run.masked[:, row], *changed_on_canvas(run, row))
    masked, unmasked, revised = (beside_sinks(each, sinks, value=False)[:, shown] for each in flags)
    positions, padding = run.tokens.shape[1], int(run.padding[row])
    before = [key < run.prompt_length for key in shown.tolist()]
    given = [key < positions and not bool(run.answer[row, key]) for key in shown.tolist()]
    return {
        "positions": [key - padding if key < positions else -1 - (key - positions) for key in shown.tolist()],
        "padding": padding,
        "prompt": run.prompt_length - padding,
        # Where these are not the positions before the answer, because the prompt has masks that are filled in.
        **({} if given == before else {"given": [int(one) for one in given]}),
        "texts": [subject.text_of(int(i)) for i in ids],
        "ids": ids.tolist(),
        "tokens": pack(narrow(index.numpy(), len(ids))),
        "masked": pack(masked.numpy().astype("u1")),
        "written": pack(unmasked.numpy().astype("u1")),
        **({"revised": pack(revised.numpy().astype("u1"))} if bool(revised.any()) else {}),
        **({} if moved is None else {"moved": pack(narrow(moved.numpy(), len(shown)))}),
    }


def _moved(run: DenoisingRun, row: int, shown: Int[Tensor, "shown"]) -> Int[Tensor, "step shown"] | None:
    """The places that the shown keys of each canvas have among those of the next one; None where nothing moves.

    What is on it nowhere, or in several, has the place after the last of them.
    """
    if run.origins is None:
        return None
    positions = run.tokens.shape[1]
    moved = torch.full((run.steps, positions), len(shown))
    canvas = shown[shown < positions]
    key_of = torch.zeros(positions, dtype=torch.long).scatter(0, canvas, torch.arange(len(canvas)))
    for step in range(run.steps):
        came = came_by(run, row, step, step)
        there = came != NOWHERE
        alone = there & (came[there].bincount(minlength=positions)[came] == 1)
        moved[step, came[alone]] = key_of[alone]
    sinks = torch.arange(len(canvas), len(shown)).expand(run.steps, -1)
    return torch.cat([moved[:, canvas], sinks], 1)


def levels_of(received: Received) -> list[dict[str, Any]]:
    """The levels that scores have: their names, sizes, and the index of their first pattern."""
    levels, first = [], 0
    possible: tuple[Level, ...] = get_args(Level)
    for level in possible[possible.index(received.level) :]:
        done = MERGED[received.level]
        if any(axis not in received.dims for axis in MERGED[level] if axis not in done):
            continue
        layers, heads = (
            1 if axis in MERGED[level] else size
            for axis, size in zip(("layer", "head"), received.values.shape[2:4], strict=True)
        )
        levels.append({"name": level, "first": first, "layers": layers, "heads": heads})
        first += layers * heads
    return levels


def patterns_of(
    received: Received, shown: Tensor
) -> tuple[list[dict[str, Any]], Float[Tensor, "pattern step key"]]:
    """The scores at every level that they have, pattern by pattern: all heads, all layers, the model."""
    levels, values = levels_of(received), []
    for level in levels:
        found = received.at_level(level["name"]).values[:, 0][..., shown]
        values.append(found.permute(1, 2, 0, 3).flatten(0, 1).float())
    return levels, torch.cat(values)


def fitting(scores: Scores, budget: int) -> dict[str, Any]:
    """The most exact version of the scores that fits the budget."""
    statistics = scores.statistics()
    bins: dict[int, Any] = {}
    for precision in PRECISIONS:
        last = precision is PRECISIONS[-1]
        kept = scores.kept(precision)
        size = sum(len(part["data"]) for part in statistics.values())
        # Scores hardly compress, so that their number tells what cannot fit.
        if not last and size + int(kept.sum()) * (2.0 if scores.halves else 3.8) > budget:
            continue
        if precision.colours not in bins:
            bins[precision.colours] = scores.bins(precision.colours)
        size += len(bins[precision.colours]["data"])
        if not last and size > budget:
            continue
        strongest = scores.strongest(kept)
        size += sum(len(part["data"]) for part in strongest.values())
        if size <= budget or last:
            break
    if size > budget:
        logger.warning(
            "the report has %.1f MB of scores instead of %.1f; take a part, such as recording.select(step=...)",
            size / 1e6,
            budget / 1e6,
        )
    return {
        **_exactness(scores, kept),
        "edges": scores.edges(precision.colours),
        "statistics": statistics,
        "strongest": strongest,
        "bins": bins[precision.colours],
    }


def _exactness(scores: Scores, kept: Tensor) -> dict[str, Any]:
    return {
        "highest": scores.highest,
        "undefined_keys": bool((scores.defined < scores.values.shape[-1]).any()),
        "exact": {
            "all": bool((kept == scores.defined).all()),
            "fewest": int(kept[scores.defined > 0].min()) if bool((scores.defined > 0).any()) else 0,
            "scores": int(kept.sum()),
            "of": int(scores.defined.sum()),
            "limits": scores.limits(kept),
        },
    }
