"""Logs of JSON lines: what is appended is read again; damage and cut lines are found."""

import json
from pathlib import Path

import pytest

from dlm_lens.files.atomic_writes import open_to_append
from dlm_lens.files.sealed_json import DamagedFileError, append_lines, cut_incomplete_line, line_of, read_lines

ENTRIES = [{"head": "ü\n"}, {"n": 1}, {"n": [2.5, None, {"deep": True}]}]


def written(path: Path) -> Path:
    with open_to_append(path) as file:
        append_lines(file, ENTRIES[:1], path)
        append_lines(file, ENTRIES[1:], path)
    return path


def test_appended_lines_are_read_with_their_places(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    found = list(read_lines(path.read_bytes(), path, "delete it"))
    assert [values for _, values in found] == ENTRIES
    assert [where for where, _ in found] == [f"{path}, line {number}" for number in (1, 2, 3)]
    assert path.read_bytes() == b"".join(map(line_of, ENTRIES))


def test_a_cut_line_is_left_out_when_read_and_removed_before_the_next(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        assert [values for _, values in read_lines(whole[:cut], path, "delete it")] == ENTRIES[:lines]
        with open_to_append(path) as file:
            cut_incomplete_line(file, path)
            append_lines(file, [{"next": cut}], path)
        assert path.read_bytes() == b"".join(map(line_of, [*ENTRIES[:lines], {"next": cut}]))


def test_an_empty_log_stays_empty(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with open_to_append(path) as file:
        cut_incomplete_line(file, path)
    assert path.read_bytes() == b""
    assert list(read_lines(b"", path, "delete it")) == []


@pytest.mark.parametrize(("old", "new", "said"), [
    (b'"n": 1', b'"n": 2', r"line 2 is damaged \(its checksum is another\); delete it$"),
    (b'{"n": 1', b'{"n" 1', r"line 2 is damaged \(.+\); delete it$"),
    (line_of({"n": 1}), b'{"n": 1}\n', r"line 2 is damaged \(has no checksum\); delete it$"),
    (line_of({"n": 1}), b"[1]\n", r"line 2 is damaged; delete it$"),
])  # fmt: skip
def test_a_changed_line_is_named(tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    path = written(tmp_path / "log.jsonl")
    changed = path.read_bytes().replace(old, new)
    with pytest.raises(DamagedFileError, match=said):
        list(read_lines(changed, path, "delete it"))


def test_a_log_of_an_earlier_version_needs_no_checksums_but_compares_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    old = (json.dumps(ENTRIES[0]) + "\n").encode() + line_of(ENTRIES[1])
    assert [values for _, values in read_lines(old, path, "delete it")] == ENTRIES[:2]
    with pytest.raises(DamagedFileError, match=r"line 1 is damaged \(has no checksum\)"):
        list(read_lines(old, path, "delete it", required=True))
    with pytest.raises(DamagedFileError, match="line 2 is damaged"):
        list(read_lines(old.replace(b'"n": 1', b'"n": 2'), path, "delete it"))


def test_numbers_that_are_not_finite_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl")
    before = path.read_bytes()
    with open_to_append(path) as file, pytest.raises(ValueError, match="JSON compliant"):
        append_lines(file, [{"n": 1}, {"n": float("nan")}], path)
    assert path.read_bytes() == before
