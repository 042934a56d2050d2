"""Recordings under force: two writers, a full disk, a directory that takes nothing, a killed save."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import dlm_lens.files.atomic_writes as atomic_writes
from dlm_lens.files.locks import DirectoryHeldError, held
from dlm_lens.recording import ReceivedAttention, Recording, record
from dlm_lens.recording.record_runs import Batches, record_batches
from dlm_lens.recording.shards import RUN
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS
from tests.recording.test_damage import difference

SETTINGS: dict[str, Any] = {"steps": 3, "gen_length": 6, "temperature": 0.7, "seed": [3, 4], "batch_size": 1}


def hidden(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.name.startswith(".")]


def filled(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """A disk that takes so many writes."""
    real, left = os.fsync, [calls]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(atomic_writes.os, "fsync", full)


class Pausing:
    """Lets another thread go on while a run is at its second step."""

    site, layers = "z", (0,)

    def __init__(self) -> None:
        self.reached, self.go, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, tensor: Any, hook: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            self.reached.set()
            assert self.go.wait(60)
        return tensor

    def __repr__(self) -> str:
        return "Pausing()"


def test_two_threads_on_one_directory(tmp_path: Path) -> None:
    pausing, made, other = Pausing(), [], tiny("llada")
    first = threading.Thread(
        target=lambda: made.append(record(tiny("llada"), PROMPTS, hooks=[pausing], to=tmp_path, **SETTINGS))
    )
    first.start()
    assert pausing.reached.wait(60)
    try:
        with pytest.raises(ValueError, match="another process or thread writes"):
            record(other, PROMPTS, to=tmp_path, **SETTINGS)
        with pytest.raises(DirectoryHeldError):
            made[0:] or held(tmp_path / "rows-00000-00000").__enter__()
    finally:
        pausing.go.set()
        first.join()
    assert not difference(Recording.load(tmp_path), made[0])
    assert hidden(tmp_path) == []


def test_processes_of_one_command_share_the_directory_and_not_its_batches(tmp_path: Path) -> None:
    model, wanted = tiny("llada"), record(tiny("llada"), PROMPTS, **SETTINGS)
    batches = Batches.of(model, PROMPTS, 1, [3, 4])
    settings = {"steps": 3, "gen_length": 6, "temperature": 0.7}
    ranks = [
        record_batches(model, batches, [ReceivedAttention()], to=tmp_path, rank=rank, world=2, **settings)
        for rank in range(2)
    ]
    parts = [next(iter(rank)) for rank in ranks]  # both hold the directory here
    assert [part.rows for part in parts] == [(0,), (1,)]
    with pytest.raises(DirectoryHeldError):
        record(model, PROMPTS, to=tmp_path, **SETTINGS)
    for rank in ranks:
        rank.close()  # type: ignore[attr-defined]
    assert not difference(record(model, PROMPTS, to=tmp_path, **SETTINGS), wanted)


@pytest.mark.parametrize("calls", [0, 1, 2, 5, 9, 13])
def test_a_full_disk_stops_a_save_that_can_be_done_again(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = record(tiny("llada"), PROMPTS, **SETTINGS)
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        with monkeypatch.context() as patch:
            filled(patch, calls)
            with pytest.raises(
                OSError, match=r"could not be written \(No space left on device\); make room and do"
            ):
                wanted.save(tmp_path / name)
        assert (tmp_path / name).exists() == (name == "there")
        assert not (tmp_path / name).exists() or list((tmp_path / name).iterdir()) == []
        assert not difference(Recording.load(wanted.save(tmp_path / name)), wanted)
        assert hidden(tmp_path) == []


@pytest.mark.parametrize("calls", range(0, 26, 5))
def test_a_full_disk_stops_a_run_that_goes_on(calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = tiny("llada"), record(tiny("llada"), PROMPTS, **SETTINGS)
    with monkeypatch.context() as patch:
        filled(patch, calls)
        with pytest.raises(OSError, match="make room and do it again"):
            record(model, PROMPTS, to=tmp_path, **SETTINGS)
    assert hidden(tmp_path) == []
    assert not difference(record(model, PROMPTS, to=tmp_path, **SETTINGS), wanted)


def test_a_killed_save_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = record(tiny("llada"), PROMPTS, **SETTINGS)
    wanted.save(tmp_path / "it")
    with pytest.raises(FileExistsError, match="is not empty"):
        wanted.save(tmp_path / "it")
    (tmp_path / "it" / RUN).unlink()
    (tmp_path / "it" / f".dlm-lens-{'0' * 16}.part").write_bytes(b"half")
    with pytest.raises(ValueError, match="is not finished"):
        Recording.load(tmp_path / "it")
    assert not difference(Recording.load(wanted.save(tmp_path / "it")), wanted)
    assert hidden(tmp_path) == []


def test_a_finished_recording_is_read_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write whatever the mode: the disk refuses instead.
    model = tiny("llada")
    wanted = record(model, PROMPTS, to=tmp_path, **SETTINGS)
    real = os.open

    def refuses(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    assert not difference(record(model, PROMPTS, to=tmp_path, **SETTINGS), wanted)
    assert not difference(Recording.load(tmp_path), wanted)
    with pytest.raises(OSError, match="Read-only file system"):
        wanted.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
