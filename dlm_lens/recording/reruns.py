"""`rerun`: statistics of a finished run, from one forward pass over the canvas of each of its steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm

from dlm_lens.arguments import checked_arguments, chosen_indices
from dlm_lens.attention import Hook, HookLike, checked, exclusive, refuse_row_lists
from dlm_lens.recording.concatenation import fitted, joined
from dlm_lens.recording.recorder import Recorder, Storage
from dlm_lens.recording.recording import Recording
from dlm_lens.sampling import DenoisingRun, StoredCanvases, part_of_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.run_parts import on_own_canvas
from dlm_lens.sampling.run_rows import has_one_plan


@checked_arguments(steps=None, layers=None)  # arrays of numpy and torch are indices too
@torch.no_grad()
@exclusive
def rerun(
    model: Any,
    run: RunLike,
    reducers: Sequence[Any],
    *,
    hooks: Sequence[HookLike] = (),
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    rows_per_pass: int | None = None,
    dtype: Storage = "float32",
    progress: bool = False,
) -> Recording:
    """Record statistics of a finished run: the network sees the canvas of every step once more.

    The result is what `record` gives with the same reducers, without sampling. A reducer may depend on what the
    run showed, such as its sinks. Of a guided run the conditional half is computed. Hooks of `denoise(hooks=)` run
    only if they are given here too; torch's own hooks on the model run. Steps after the end of a row are undefined
    (NaN). Hooks that name canvas positions see the canvas that a row ran on, as when `record` ran prompts of other
    lengths apart, without what it padded them with when it joined them.

    Args:
        model: the model of the run; its attention implementation may be any, and does not change.
        run: from `denoise`, or `recording.run`.
        reducers: what to record, as for `record`.
        hooks: interventions (`dlm_lens.hooks`) under which the canvases are seen: those of the run for what it
            computed, others for what they would change at every step alone. If one of them depends on earlier steps
            (`Hook.remembers`), the steps before the chosen ones run too.
        steps: indices of the steps, negative from the end; None for all. Steps, layers and rows are computed in
            increasing order, each once, whatever the order here; `recording.select` keeps its own.
        layers: indices of the layers, negative from the end; None for all.
        rows: indices of the rows, negative from the end; None for all.
        rows_per_pass: rows in one forward pass; None for all of them. Hooks see the rows of one pass.
        dtype: how floating-point statistics are stored, "float32" or "float16".
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run with tokens that the model does not embed, a step, layer or row that does not exist, or
            what `Recorder` and the hooks refuse.
    """
    run = as_run(run)
    hooks = checked(hooks)
    one_plan = has_one_plan(run, hooks)
    first = run if one_plan else part_of_run(run, None, _alike(run, range(len(run.tokens)), False)[0])
    chosen = chosen_indices("step", steps, run.steps)
    stored = StoredCanvases(model, first, hooks=hooks, steps=chosen)
    run = replace(run, tokenizer=stored.run.tokenizer)
    recorder = Recorder(model, reducers, layers=layers, dtype=dtype)
    places = chosen_indices("row", rows, len(run.tokens))
    # A hook may have a value for every row (`mask_sinks(source=)`).
    seen = tuple(range(len(run.tokens))) if stored.hooks and rows_per_pass is None else places
    apart = run.joined_at is not None and any(hook.shifts_with_padding for hook in stored.hooks)
    parts = _passes(run, stored.hooks, seen, rows_per_pass or len(seen), apart, one_plan)
    found = []
    with tqdm(total=len(chosen) * len(parts), desc="rerun", unit="pass", disable=not progress) as bar:
        for part in parts:
            own = part_of_run(run, None, part)
            canvases = (
                stored
                if len(part) == len(run.tokens) and not apart and one_plan
                else StoredCanvases(
                    model, on_own_canvas(own) if apart else own, hooks=stored.hooks, steps=chosen, warn=False
                )
            )
            recorded = _record(recorder, canvases, chosen, bar)
            if apart and own.joined_at is not None:
                recorded = fitted(recorded, own.joined_at[0], run.tokens.shape[1], recorded)
            found.append(recorded)
    own = part_of_run(run, chosen, seen)
    order = [row for part in parts for row in part]
    recording = joined(found)
    if order != list(seen):
        recording = recording.select(batch=[order.index(row) for row in seen])
    recording = replace(
        recording,
        run=own,
        answer=own.answer,
        steps=own.step_numbers,
        rows=own.row_numbers,
        hooks=tuple(map(repr, stored.hooks)),
    )
    return recording if seen == places else recording.select(batch=places)


def _passes(
    run: DenoisingRun, hooks: Sequence[Hook], rows: Sequence[int], size: int, apart: bool, one_plan: bool
) -> list[Sequence[int]]:
    """The rows of every forward pass: at most `size`, of one plan, and if `apart` on one canvas of their own.

    Raises:
        ValueError: several passes under a hook with a value for each row.
    """
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(parts) > 1:
        refuse_row_lists(hooks, f"rows_per_pass makes {len(parts)} passes; leave it out")
    if apart or not one_plan:
        parts = [part for whole in parts for part in _alike(run, whole, apart)]
        if len(parts) > 1:
            refuse_row_lists(hooks, _why_apart(len(parts), one_plan))
    return parts


def _why_apart(passes: int, one_plan: bool) -> str:
    """Why the rows of a joined run go through so many passes, and what hooks with a value for each row can do."""
    if one_plan:
        return (
            f"another hook names canvas positions, which count on {passes} canvases of the joined rows; count "
            "these by by_row too"
        )
    return (
        f"the joined rows have plans of other numbers of steps, and run in {passes} passes; take rows "
        "of one plan (recording.select(batch=...))"
    )


def _alike(run: DenoisingRun, rows: Sequence[int], apart: bool) -> list[tuple[int, ...]]:
    """Rows of a joined run by their planned steps and, if `apart`, by where their own canvas begins."""
    same = (0,) * len(run.tokens)
    steps = run.settings.get("steps")
    plans = [run.rows_planned or same, steps if isinstance(steps, tuple) else same]
    kinds = list(zip((run.joined_at or same) if apart else same, *plans, strict=True))
    return [tuple(row for row in rows if kinds[row] == kind) for kind in dict.fromkeys(kinds[row] for row in rows)]


def _record(recorder: Recorder, stored: StoredCanvases, steps: Sequence[int], bar: Any) -> Recording:
    """The steps of a run through a recorder, one forward pass each."""
    run = stored.run
    from_first = list(steps) == list(range(len(steps)))  # of what is given, which may be a part of a run
    with stored.under_hooks():
        stored.start(recorder)
        try:
            for step in steps:
                recorder.now = None  # passes of steps that are not recorded
                stored.enter(step, recorder)
                stored.forward(step)
                stored.leave(step, recorder)
                bar.update()
                if recorder.reducers_remember and not from_first:
                    raise ValueError(
                        "a reducer keeps values from step to step (LayerStep.memory), and these steps leave out "
                        "earlier ones; rerun all steps from the first one on, and take a part with select(step=...)"
                    )
        finally:
            recorder.stop()
    return recorder.recording(part_of_run(run, steps, range(len(run.tokens))))
