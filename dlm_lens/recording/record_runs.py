"""`record`: denoise prompts with the family's own sampler and keep statistics of every step."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dlm_lens.arguments import DIRECTORY, checked_arguments
from dlm_lens.attention import HookLike, checked, exclusive, refuse_row_lists
from dlm_lens.files.locks import held
from dlm_lens.files.paths import check_directory, user_path
from dlm_lens.recording.concatenation import joined
from dlm_lens.recording.directories import parts_of
from dlm_lens.recording.model_identity import check_named
from dlm_lens.recording.recorder import STORAGE, Recorder, Storage, StoringRecorder, request_of
from dlm_lens.recording.recording import Recording
from dlm_lens.recording.reducers.received import ReceivedAttention
from dlm_lens.recording.storage import load_part, part_name
from dlm_lens.sampling import denoise
from dlm_lens.sampling.denoising import check_recorded_run
from dlm_lens.sampling.prompts import read_prompts
from dlm_lens.sampling.settings import check_model, row_seeds

logger = logging.getLogger(__name__)

DEFAULT = (ReceivedAttention(),)


@exclusive
@checked_arguments(dtype=STORAGE, to=DIRECTORY)
def record(
    model: Any,
    prompts: Any,
    reducers: Sequence[Any] = DEFAULT,
    *,
    hooks: Sequence[HookLike] = (),
    to: str | Path | None = None,
    layers: Sequence[int] | None = None,
    batch_size: int | None = None,
    dtype: Storage = "float32",
    seed: int | list[int] | None = 0,
    progress: bool = False,
    **settings: Any,
) -> Recording:
    """Denoise prompts with the family's own sampler and record statistics of every step, without patterns.

    Prompts are padded on the left; a row does not depend on the others. Of a guided run the conditional half is
    recorded. An AR model is decoded without a cache, and step t has the written prefix. The attention output still
    comes from torch's fused kernel, so that the tokens are those of `denoise`.

    Args:
        model: from `dlm_lens.load`.
        prompts: text, chat messages, ids, or a list of any of them.
        reducers: what to record; also as text, such as "received:masked,value-norm". [] for the run alone.
        hooks: interventions (`dlm_lens.hooks`); those that hide columns need no pattern here either. With one that
            names canvas positions (`mask_positions(3)`) a batch ends where the length of the prompts changes, so
            that the position is the same token of a prompt in every batch.
        to: a directory, to which a shard is written after every step. After an interruption the same call continues
            the run. The arrays of the result are read from the directory on first use.
        layers: indices of the layers, negative from the end; None for all. They are recorded in increasing order,
            each once, whatever the order here; `recording.select(layer=)` keeps its own.
        batch_size: prompts in one run; None for all. Several batches become one Recording, under block diffusion
            only if their blocks take equal numbers of steps; otherwise `to` holds the recording of each batch.
        dtype: how floating-point statistics are stored, "float32" or "float16" (relative error up to 2^-11).
        seed: one number, one per prompt, or None for random seeds.
        progress: show progress bars.
        **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, ...

    Raises:
        ValueError: an unusable prompt, setting or reducer; a directory with a recording of other prompts, settings
            or reducers, with the difference; with `to`, a model on which `attach_hooks` has hooks; batches that do
            not become one Recording, with `to` after all are stored, without it after the first two that differ.
        FileExistsError: the directory holds other files.
    """
    check_model(model)
    hooks = checked(hooks)
    batches = Batches.of(model, prompts, batch_size, seed)
    made = record_batches(
        model,
        batches,
        reducers,
        hooks=hooks,
        to=None if to is None else user_path(to),
        layers=layers,
        dtype=dtype,
        progress=progress,
        **settings,
    )
    # Stored batches are all made first, since each can be read on its own.
    return joined(made) if to is None else joined(list(made), user_path(to))


class BatchError(ValueError):
    """A batch of prompts cannot run; `rows` are its prompts, counted from 0."""

    def __init__(self, sentence: str, rows: range) -> None:
        named = f"prompt {rows[0]}" if len(rows) == 1 else f"prompts {rows[0]} to {rows[-1]}"
        super().__init__(f"{sentence} ({named})")
        self.sentence, self.rows = sentence, rows


@dataclass(frozen=True)
class Batches:
    """Prompts as ids without padding, in batches.

    Args:
        ids: token ids of every prompt.
        seeds: of every prompt; None for random ones.
        size: prompts in one batch, at most.
        alike: whether a batch has prompts of one length alone, and so no padding.
    """

    ids: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...] | None
    size: int
    alike: bool = False

    @classmethod
    def of(cls, model: Any, prompts: Any, size: int | None, seed: int | list[int] | None) -> "Batches":
        """Read prompts of any form.

        Raises:
            ValueError: an unusable prompt, a batch size below 1, or too few seeds.
        """
        if size is not None and size < 1:
            raise ValueError(f"batch_size is {size}; it must be at least 1")
        read = read_prompts(model, prompts)
        ids = tuple(tuple(row[keep].tolist()) for row, keep in zip(read.ids, read.attention_mask, strict=True))
        seeds = None if seed is None else row_seeds(seed, len(ids))
        return cls(ids, seeds, size or len(ids))

    def under(self, hooks: Sequence[HookLike]) -> "Batches":
        """Without padding, if one of the hooks names positions that padding would shift.

        Raises:
            ValueError: several batches, and a hook with values for the rows of one.
        """
        found = replace(self, alike=any(hook.shifts_with_padding for hook in checked(hooks)))
        if len(found.parts) > 1:
            refuse_row_lists(
                checked(hooks),
                f"the prompts run in {len(found.parts)} batches (by batch_size, or as another hook names canvas "
                "positions); give one list for all rows",
            )
        return found

    @property
    def parts(self) -> list[range]:
        """The rows of every batch."""
        ends = [len(self.ids)]
        if self.alike:
            ends = [row for row in range(1, len(self.ids)) if len(self.ids[row]) != len(self.ids[row - 1])] + ends
        begins = [0, *ends[:-1]]
        return [
            range(start, min(start + self.size, end))
            for begin, end in zip(begins, ends, strict=True)
            for start in range(begin, end, self.size)
        ]


def record_batches(
    model: Any,
    batches: Batches,
    reducers: Sequence[Any],
    *,
    hooks: Sequence[HookLike] = (),
    to: Path | None = None,
    layers: Sequence[int] | None = None,
    dtype: Storage = "float32",
    progress: bool = False,
    rank: int = 0,
    world: int = 1,
    **settings: Any,
) -> Iterator[Recording]:
    """Record batch by batch; with several processes each records every `world`-th batch, beginning with `rank`.

    Raises:
        ValueError: as `record`, before anything is computed; of several batches a `BatchError`.
    """
    _check(model, settings, to)
    batches = batches.under(hooks)
    recorder = Recorder(model, reducers, layers=layers, dtype=dtype)
    if to is not None:
        _check_partition(to, batches)
    _check_batches(model, batches, hooks, settings)
    mine = batches.parts[rank::world]
    # Processes that share the batches share the lock of the directory; a single process holds it alone.
    with nullcontext() if to is None else held(to, shared=world > 1):
        for rows in tqdm(mine, desc="batches", unit="batch", disable=not progress or len(mine) < 2):
            seeds = None if batches.seeds is None else [batches.seeds[row] for row in rows]
            ids = [batches.ids[row] for row in rows]
            if to is None:
                run = denoise(
                    model, ids, hooks=hooks, observers=recorder, progress=progress, seed=seeds, **settings
                )
                yield replace(recorder.recording(run), rows=tuple(rows))
                continue
            storing = StoringRecorder(model, reducers, to / part_name(rows), layers=layers, dtype=dtype)
            batch = {"prompts": len(batches.ids), "size": batches.size, "rows": [rows.start, rows.stop]}
            yield stored_batch(storing, ids, rows, seeds, hooks, settings, progress, batch)


def stored_batch(
    recorder: StoringRecorder,
    ids: list[tuple[int, ...]],
    rows: Sequence[int],
    seeds: list[int] | None,
    hooks: Sequence[HookLike],
    settings: dict[str, Any],
    progress: bool,
    batch: Mapping[str, Any] | None = None,
) -> Recording:
    """Record a batch in its directory, or continue or load the recording that is there.

    Args:
        recorder: writes the batch.
        ids: token ids of every prompt.
        rows: index of each prompt among all prompts.
        seeds: of every prompt; None for those of the stored batch, or random ones.
        hooks: interventions.
        settings: of `dlm_lens.denoise`.
        progress: show a progress bar.
        batch: which batch of all prompts this is, for the header.

    Raises:
        ValueError: another process or thread records there, or the directory holds another recording or a damaged
            one.
    """
    shards = recorder.shards
    with held(shards.path):
        seeds = seeds or shards.seeds() or list(row_seeds(None, len(ids)))
        shards.begin(request_of(recorder, ids, seeds, hooks, settings, batch))
        if shards.finished:
            return Recording.of(load_part(shards.path, recorder.model.tokenizer))
        resume = shards.resumption()
        if resume is not None:
            logger.info("%s: continuing after step %d", shards.path, len(resume.steps) - 1)
        run_settings = {**settings, "hooks": hooks, "seed": seeds, "resume": resume, "progress": progress}
        try:
            run = denoise(recorder.model, ids, observers=recorder, **run_settings)
        except ValueError:
            shards.forget()
            raise
        return recorder.recording(run, rows)


def _check(model: Any, settings: dict[str, Any], to: Path | None) -> None:
    for name in ("observers", "resume", "attention_mask"):
        if name in settings:
            raise ValueError(f"record takes no {name}; give dlm_lens.denoise a dlm_lens.Recorder as observer")
    if to is not None:
        check_named(model, settings, "record")


def _check_batches(model: Any, batches: Batches, hooks: Sequence[HookLike], settings: dict[str, Any]) -> None:
    """Raise for a batch that cannot run, before the first one begins; a single batch is refused by its own run."""
    if len(batches.parts) < 2:
        return
    for rows in batches.parts:
        try:
            check_recorded_run(model, [batches.ids[row] for row in rows], hooks, **settings)
        except ValueError as error:
            raise BatchError(str(error), rows) from None


def _check_partition(to: Path, batches: Batches) -> None:
    """Raise if the directory holds other batches than these."""
    check_directory(to)
    wanted = {part_name(rows) for rows in batches.parts}
    there = {part.name for part in parts_of(to)} if to.exists() else set()
    if not there <= wanted:
        raise ValueError(
            f"{to} holds other batches ({', '.join(sorted(there - wanted))}); give the same prompts, batch_size "
            "and hooks to continue it, or another directory"
        )
