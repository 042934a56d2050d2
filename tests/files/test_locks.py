"""One process and one thread at a time."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.files import locks
from dlm_lens.files.locks import DirectoryHeldError, held
from dlm_lens.testing import tiny

HOLDS = """
import sys, time
from dlm_lens.files.locks import held
with held(sys.argv[1], shared=len(sys.argv) > 2):
    print("held", flush=True)
    time.sleep(60)
"""


def holding(*arguments: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_second_process_gets_a_sentence_until_the_first_is_killed(tmp_path: Path) -> None:
    with holding(str(tmp_path / "a")) as process:
        with pytest.raises(ValueError, match=r"another process or thread writes .*/a; wait for it,"):
            held(tmp_path / "a").__enter__()
        with pytest.raises(DirectoryHeldError), held(tmp_path / "a", shared=True):
            pass
        process.kill()
        process.wait()
        with held(tmp_path / "a"):
            pass
    assert list((tmp_path / "a").iterdir()) == []


def test_those_who_share_do_and_one_alone_does_not(tmp_path: Path) -> None:
    with holding(str(tmp_path), "shared") as process:
        with held(tmp_path, shared=True):
            pass
        with pytest.raises(DirectoryHeldError), held(tmp_path):
            pass
        process.kill()


def test_threads_are_told_apart(tmp_path: Path) -> None:
    told: list[str] = []

    def other() -> None:
        try:
            with held(tmp_path):
                pass
        except DirectoryHeldError as error:
            told.append(str(error))

    with held(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(told) == 1
    other()
    assert len(told) == 1


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with held(tmp_path):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    try:
        with held(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def network_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks what is open for writing, and a directory never is."""
    real = fcntl.flock

    def network(file: object, kind: int) -> None:
        handle = file if isinstance(file, int) else file.fileno()  # type: ignore[attr-defined]
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(handle, kind)

    monkeypatch.setattr(fcntl, "flock", network)


@pytest.mark.usefixtures("network_disk")
def test_disks_that_lock_files_only(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(DirectoryHeldError), held(tmp_path):
        pass
    with held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    with held(tmp_path / "new/one"):
        assert [one.name for one in (tmp_path / "new/one").iterdir()] == [".held"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("network_disk")
def test_a_waiting_process_locks_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes its file at the end: a lock on what is removed would hold nothing."""
    locked, removed = locks.lock, []

    def locking(*arguments: Any, **options: Any) -> bool:
        found = locked(*arguments, **options)
        if found and not removed:
            (tmp_path / ".held").unlink()  # as the holder does just before its lock ends
            removed.append(True)
        return found

    monkeypatch.setattr(locks, "lock", locking)
    with held(tmp_path):
        assert (tmp_path / ".held").exists()
        with pytest.raises(DirectoryHeldError), held(tmp_path):
            pass
    assert removed


@pytest.mark.usefixtures("network_disk")
def test_a_recording_is_saved_on_such_disks(tmp_path: Path) -> None:
    model = tiny("llada")
    recording = dl.record(model, [[5, 6]], [dl.ReceivedAttention(min_viewers=1)], gen_length=2, to=tmp_path / "to")
    recording.save(tmp_path / "saved")
    assert torch.equal(dl.Recording.load(tmp_path / "saved").received, dl.Recording.load(tmp_path / "to").received)
    assert not list(tmp_path.rglob(".held"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other is not empty; give another directory"):
        recording.save(tmp_path / "other")


def test_parents_that_were_made_are_removed_with_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with held(tmp_path / "there/a/b/c"):
        pass
    assert list((tmp_path / "there").iterdir()) == []
    with held(tmp_path / "there/a/b/c"):
        (tmp_path / "there/a/notes.txt").write_text("mine")
    assert [one.name for one in (tmp_path / "there/a").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("when", ["before its opening", "before its lock"])
def test_a_directory_that_its_holder_removed_is_made_again(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, removed = tmp_path / "a", []
    opened, locked = os.open, locks.lock

    def remove() -> None:
        if not removed:
            there.rmdir()
            removed.append(True)

    def opening(path: Any, flags: int, *mode: int) -> int:
        if when == "before its opening":
            remove()
        return opened(path, flags, *mode)

    def locking(*arguments: Any, **options: Any) -> bool:
        if when == "before its lock":
            remove()
        return locked(*arguments, **options)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(locks, "lock", locking)
    with held(there):
        assert there.is_dir()
        monkeypatch.undo()
        # The lock is on the new directory, and not on the one that was removed.
        with pytest.raises(DirectoryHeldError), held(there):
            pass
    assert removed
