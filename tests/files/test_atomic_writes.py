"""Files are whole or not there, whatever happens while they are written."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlm_lens.files import atomic_writes
from dlm_lens.files.atomic_writes import (
    TEMPORARY,
    DiskFullError,
    append,
    open_to_append,
    remove_stale,
    replacing,
    write_file,
)
from dlm_lens.files.paths import check_directory, check_file
from dlm_lens.files.tensor_files import read_with_metadata, write_tensors


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_file_has_the_mode_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "text", "a")
        write_tensors(tmp_path / "tensors", {"a": torch.ones(2)})
        open_to_append(tmp_path / "lines").close()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "old")
    with pytest.raises(KeyError), replacing(tmp_path / "a") as file:  # noqa: PT012
        file.write(b"new")
        raise KeyError
    assert (tmp_path / "a").read_text() == "old"
    assert hidden(tmp_path) == []


def test_an_error_names_the_file_and_not_its_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as told:
        write_file(tmp_path / "none/a", "new")
    assert (told.value.filename, told.value.filename2) == (str(tmp_path / "none/a"), None)
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError) as told:
        write_file(tmp_path / "b", "new")
    assert told.value.filename == str(tmp_path / "b")
    assert str(told.value) == f"[Errno {errno.EISDIR}] Is a directory: '{tmp_path / 'b'}'"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no directory that nobody can write")
def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    sentence = r"^nothing can be written in /proc \(.*\); give another directory$"
    for check in (
        lambda: check_directory(Path("/proc/new/run")),
        lambda: check_file(Path("/proc/page.html"), (".html",)),
    ):
        with pytest.raises(OSError, match=sentence):
            check()
    check_directory(Path("/proc/self"))  # it may hold a finished run
    check_directory(tmp_path / "new/run")
    check_file(tmp_path / "page.html")
    assert [*tmp_path.iterdir()] == []


def test_planted_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    names = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
    (tmp_path / f".dlm-lens-{'0' * 16}.part").symlink_to(victim)
    with pytest.raises(FileExistsError), replacing(tmp_path / "a") as file:
        file.write(b"new")
    (tmp_path / "b").symlink_to(victim)
    write_file(tmp_path / "b", "new")
    (tmp_path / "c").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "c")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "b").is_symlink()


def test_names_are_unpredictable(tmp_path: Path) -> None:
    seen = set()
    for _ in range(20):
        with replacing(tmp_path / "a"):
            (name,) = hidden(tmp_path)
            assert TEMPORARY.fullmatch(name)
            seen.add(name)
    assert len(seen) == 20


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "a", "old")

    def full(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic_writes.os, "fsync", full)
    for write in (
        lambda: write_file(tmp_path / "a", "new"),
        lambda: write_tensors(tmp_path / "a", {"a": torch.ones(2)}),
    ):
        with pytest.raises(
            DiskFullError, match=r"a could not be written \(.*\); make room and do it again$"
        ) as told:
            write()
        assert told.value.errno == code
    with open_to_append(tmp_path / "a") as file, pytest.raises(DiskFullError):
        append(file, b" and more\n", tmp_path / "a")
    assert (tmp_path / "a").read_text() == "old"
    assert hidden(tmp_path) == []


def test_files_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom dlm_lens.files.atomic_writes import replacing\n"
        f"with replacing({str(tmp_path / 'a')!r}) as file:\n    file.write(b'x'); print('there', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (name,) = hidden(tmp_path)
        remove_stale(tmp_path)
        assert hidden(tmp_path) == [name]
        process.kill()
    (tmp_path / ".dlm-lens-mine.part").write_text("somebody's own")
    deadline = time.monotonic() + 10
    while hidden(tmp_path) != [".dlm-lens-mine.part"] and time.monotonic() < deadline:
        write_file(tmp_path / "b", "2")
    assert hidden(tmp_path) == [".dlm-lens-mine.part"]
    assert not (tmp_path / "a").exists()


def test_a_file_that_is_taken_for_a_stale_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = atomic_writes.lock, []

    def late(file: object, *, wait: bool) -> bool:
        calls.append(wait)
        if len(calls) == 1:
            remove_stale(tmp_path)  # between its making and its lock
        return real(file, wait=wait)  # type: ignore[arg-type]

    monkeypatch.setattr(atomic_writes, "lock", late)
    with replacing(tmp_path / "a") as file:
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert hidden(tmp_path) == []


def test_tensors_with_metadata_come_back_or_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.arange(5.0).bfloat16(), "a": torch.tensor([[True], [False]]), "c": torch.tensor(3)}
    write_tensors(path, tensors, {"kind": "test"})
    found, metadata = read_with_metadata(path, "write again")
    assert metadata == {"kind": "test"}
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert load_file(path).keys() == tensors.keys()
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        found, told = {}, ""
        try:
            found, metadata = read_with_metadata(path, "write again")
        except ValueError as error:
            told = str(error)
        assert str(path) in told or (
            metadata == {"kind": "test"} and all(torch.equal(found[name], tensors[name]) for name in tensors)
        )
