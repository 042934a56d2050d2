"""`write_activations` and `ActivationShards`: a stream of activations on disk, in shards of equal size."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.arguments import DIRECTORY, SEED, checked_arguments, is_whole, real
from dlm_lens.attention import HookLike, checked, exclusive
from dlm_lens.attention.hook_identity import identity_of
from dlm_lens.files.atomic_writes import remove_stale, write_file
from dlm_lens.files.json_objects import read_object
from dlm_lens.files.locks import held, other_files
from dlm_lens.files.paths import user_path
from dlm_lens.files.sealed_json import Document, fitted, parsed, sealed, unsealed
from dlm_lens.files.tensor_files import metadata_of, read_with_metadata, write_tensors
from dlm_lens.printable import shown
from dlm_lens.recording.activation_stream import BATCH_SIZE, ActivationBatch, prepared_stream, run_batches
from dlm_lens.recording.model_identity import check_named, in_both, request_of_model, weights_digest
from dlm_lens.recording.reducers.features import POSITION_CLASSES

HEADER = "activations.json"
REMEDY = "write the activations again, to another directory"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ShardFacts(Document):
    """The metadata of a shard: where the stream goes on after it.

    `batch` is a batch of prompts, `offset` how many of its vectors are in this shard or an earlier one.
    """

    batch: int
    offset: int
    last: bool


@dataclass(frozen=True)
class ActivationShards:
    """Activations on disk, written by `write_activations`.

    Args:
        path: the directory.

    Raises:
        FileNotFoundError: it holds none.
    """

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", user_path(self.path))
        if not (self.path / HEADER).is_file():
            raise FileNotFoundError(f"{self.path} holds no activations; write_activations(..., to=) writes them")

    def __repr__(self) -> str:
        state = "" if self.finished else ", unfinished"
        return f"ActivationShards({str(self.path)!r}, {len(self.files)} shards{state})"

    @property
    def files(self) -> list[Path]:
        """The shards, in order, up to the first one that is missing."""
        found: list[Path] = []
        while _shard(self.path, len(found)).is_file():
            found.append(_shard(self.path, len(found)))
        return found

    @property
    def finished(self) -> bool:
        """Whether the last shard of the stream is there."""
        files = self.files
        return bool(files) and _facts(files[-1]).last

    def __iter__(self) -> Iterator[ActivationBatch]:
        """The shards in the order of the stream, each compared with its checksum."""
        for file in self.files:
            yield ActivationBatch(**read_with_metadata(file, REMEDY)[0])

    def batches(self, size: int, *, epochs: int = 1, seed: int = 0) -> Iterator[Float[Tensor, "size d_model"]]:
        """Vectors in random order as float32 tensors of `size`, the form that trainers take.

        Shards are read in random order, two at a time, and their vectors are shuffled together; the last vectors of
        an epoch that do not fill a batch are left out.

        Raises:
            ValueError: size or epochs below 1.
        """
        if not is_whole(size) or not is_whole(epochs) or min(size, epochs) < 1:
            raise ValueError(f"batches(size={shown(size)}, epochs={shown(epochs)}): both are at least 1")
        made = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            files = self.files
            order = torch.randperm(len(files), generator=made, device="cpu").tolist()
            rest = torch.empty(0)
            for start in range(0, len(order), 2):
                read = [read_with_metadata(files[i], REMEDY)[0]["activations"] for i in order[start : start + 2]]
                pool = torch.cat([*([rest] if len(rest) else []), *(one.float() for one in read)])
                pool = pool[torch.randperm(len(pool), generator=made, device="cpu")]
                whole = len(pool) // size * size
                yield from pool[:whole].split(size)
                rest = pool[whole:]


@exclusive
@checked_arguments(share=real(), batch_size=BATCH_SIZE, seed=SEED, to=DIRECTORY)
def write_activations(
    model: Any,
    prompts: Any,
    layer: int,
    to: str | Path,
    *,
    classes: Sequence[str] = POSITION_CLASSES,
    share: float = 1.0,
    batch_size: int | None = 8,
    shard_size: int = 65_536,
    dtype: str = "float32",
    hooks: Sequence[HookLike] = (),
    seed: int = 0,
    progress: bool = False,
    **settings: Any,
) -> ActivationShards:
    """Write `activations` to a directory, in safetensors shards of `shard_size` vectors.

    Call it again after an interruption with the same arguments: whole shards stay, the batch of prompts in which
    the last one ends runs again, and no vector is lost or written twice. The shards are those of an unbroken call,
    bit for bit, where the forward pass is reproducible (on a CPU with the same number of threads).

    Args:
        model: from `dlm_lens.load`.
        prompts: text, chat messages, ids, or a list of any of them.
        layer: whose output is read, negative from the end.
        to: the directory.
        classes: which positions: some of "open", "decided", "prompt".
        share: of these positions, drawn at random for each prompt and step.
        batch_size: prompts in one run; None for all.
        shard_size: vectors in one file; the last has fewer.
        dtype: of the vectors: "float32", "bfloat16" or "float16".
        hooks: interventions under which to run; they act before activations are read.
        seed: of the runs and of the share.
        progress: show a progress bar.
        **settings: of `dlm_lens.denoise`.

    Raises:
        ValueError: as `activations`; a directory with activations of other arguments, or a damaged shard.
        FileExistsError: the directory holds other files.
        OSError: the disk is full; shards written so far stay.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {shown(dtype)}; it must be one of {', '.join(DTYPES)}")
    if not is_whole(shard_size) or shard_size < 1:
        raise ValueError(f"shard_size is {shown(shard_size)}; it must be at least 1")
    check_named(model, settings, "write_activations")
    request, batches, collect, recorder = prepared_stream(
        model, prompts, layer, classes, share, batch_size, DTYPES[dtype], hooks, seed, settings
    )
    values, path = checked(hooks), user_path(to)
    about = {
        "model": {"name": name_of(model), "dtype": str(model.dtype), "weights": weights_digest(model)},
        "prompts": hashlib.sha256(repr(batches.ids).encode()).hexdigest()[:16],
        "stream": {**vars(request), "classes": list(request.classes), "batch_size": batch_size},
        "shards": {"size": shard_size, "dtype": dtype},
        "settings": {name: repr(value) for name, value in settings.items()},
        # What only its place in memory distinguishes, such as a lock, is left out.
        "hooks": [identity_of(hook, strict=False) for hook in values],
        **request_of_model(model, settings),
    }
    with held(path):
        _begin(path, about)
        shards = ActivationShards(path)
        if shards.finished:
            return shards
        start = (0, 0)
        if shards.files:
            facts = _facts(shards.files[-1])
            start = (facts.batch, facts.offset)
        run = run_batches(model, batches, collect, recorder, values, progress, settings, first=start[0])
        _write(path, run, len(shards.files), shard_size, start)
    return shards


def _begin(path: Path, about: dict[str, Any]) -> None:
    """Write the header, or compare it with the one that is there."""
    remove_stale(path)
    header = path / HEADER
    if not header.is_file():
        if others := other_files(path):
            raise FileExistsError(f"{path} holds other files ({others[0]:.80}); give an empty directory")
        write_file(header, json.dumps(sealed(about), indent=1))
        return
    stored = unsealed(read_object(header, str(header)), header, REMEDY)
    for name, value in sealed(about).items():
        old, new = in_both(name, stored.get(name), value)
        if name != "checksum" and old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                old, new = ({key: side.get(key) for key in differing} for side in (old, new))
            raise ValueError(
                f"{path} holds activations of other arguments: {name} is {shown(old)} there and "
                f"{shown(new)} here; give the same ones to continue, or another directory"
            )


def _write(
    path: Path,
    run: Iterator[tuple[int, list[ActivationBatch]]],
    shards: int,
    size: int,
    start: tuple[int, int],
) -> None:
    """Write the stream from one place on: a batch of prompts, of which so many vectors are in earlier shards."""
    waiting: list[ActivationBatch] = []
    end = start
    for number, parts in run:
        taken = start[1] if number == start[0] else 0
        rest = ActivationBatch.joined(parts).part(slice(taken, None)) if parts else None
        while rest is not None and len(rest):
            # A full shard waits until a vector follows it: the last one says that it is the last.
            if sum(map(len, waiting)) == size:
                _put(path, shards, waiting, end, last=False)
                shards, waiting = shards + 1, []
            waiting.append(rest.part(slice(0, size - sum(map(len, waiting)))))
            rest = rest.part(slice(len(waiting[-1]), None))
            taken += len(waiting[-1])
            end = (number, taken)
    if not waiting:
        raise ValueError(f"{path}: the runs have no position of these classes; give others")
    _put(path, shards, waiting, end, last=True)


def _put(path: Path, number: int, parts: list[ActivationBatch], end: tuple[int, int], *, last: bool) -> None:
    facts = json.dumps({"batch": end[0], "offset": end[1], "last": last})
    write_tensors(_shard(path, number), ActivationBatch.joined(parts).tensors(), {"facts": facts})


def _shard(path: Path, number: int) -> Path:
    return path / f"activations-{number:06d}.safetensors"


def _facts(file: Path) -> ShardFacts:
    return fitted(ShardFacts, parsed(metadata_of(file, REMEDY).get("facts", ""), file, REMEDY), file, REMEDY)
