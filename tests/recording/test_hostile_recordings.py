"""Recordings with right checksums and contents that a stranger chose: refused in little memory, or harmless."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlm_lens.files.sealed_json import CHECKSUM, sealed
from dlm_lens.files.tensor_files import write_tensors
from dlm_lens.recording import ReceivedAttention, Recording, RecordingSet, record
from dlm_lens.recording.directories import HEADER
from dlm_lens.recording.shards import MANIFEST, RUN
from dlm_lens.testing import tiny

PART = "rows-00000-00001"
COMMANDS = "\x1b[31m\u202e\r\n\x07"
"""What a terminal acts on: colours, a mark that turns the direction of writing, ends of lines, a bell."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "recording"
    record(tiny("llada"), ["w1 w2", "w3 w4 w5"], [ReceivedAttention()], to=path, steps=2, gen_length=4, seed=0)
    return path


def unsealed(text: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text).items() if name != CHECKSUM}


def forged(
    kept: Path, path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], array: Tensor | None = None
) -> Path:
    """A copy with changed header.json, run.json and array, and the checksums and digests that belong to them."""
    shutil.copytree(kept, path)
    part = path / PART
    header, run = (unsealed((part / name).read_text()) for name in (HEADER, RUN))
    change(header, run)
    (part / HEADER).write_text(json.dumps(sealed(header)))
    lines = [
        unsealed(line) | {"of": sealed(header)[CHECKSUM]} for line in (part / MANIFEST).read_text().splitlines()
    ]
    for line in lines if array is not None else ():
        shard = part / line["file"]
        written = write_tensors(shard, load_file(shard) | {"array.received": array})
        line |= {"bytes": written.size, "digest": written.digest}
    (part / MANIFEST).write_text("".join(json.dumps(sealed(line)) + "\n" for line in lines))
    run["files"] |= {name: hashlib.sha256((part / name).read_bytes()).hexdigest() for name in (HEADER, MANIFEST)}
    (part / RUN).write_text(json.dumps(sealed(run)))
    return path


def test_a_forged_recording_that_says_the_truth_loads(kept: Path, tmp_path: Path) -> None:
    found = Recording.load(forged(kept, tmp_path / "it", lambda header, run: None))
    assert found.received.nan_to_num(nan=-7).equal(Recording.load(kept).received.nan_to_num(nan=-7))


@pytest.mark.parametrize(
    ("sinks", "sentence"),
    [
        # Each is a key of every step, row, layer and head.
        (60_000, "holds received as F32 .* which does not fit the other files"),
        (2**40, r"run.json is damaged \(sinks: "),
    ],
)
def test_sink_tokens_that_no_array_has_are_refused(sinks: int, sentence: str, kept: Path, tmp_path: Path) -> None:
    path = forged(kept, tmp_path / "it", lambda header, run: run.update(sinks=sinks))
    with pytest.raises(ValueError, match=sentence) as error:
        Recording.load(path)
    assert "\n" not in str(error.value)


def test_an_axis_that_is_long_because_another_is_empty_is_refused(kept: Path, tmp_path: Path) -> None:
    """Padded to the canvas, an array of no entries would have 2^40 times as many as there are positions."""

    def change(header: dict[str, Any], run: dict[str, Any]) -> None:
        run["specs"][0]["dims"] = ["step", "batch", "layer", "head", "query"]

    path = forged(kept, tmp_path / "it", change, torch.zeros(2, 2, 2**40, 0))
    with pytest.raises(ValueError, match=r"holds received as F32 \[2, 2, 1099511627776, 0\], which does not fit"):
        Recording.load(path)


@pytest.mark.parametrize("open_it", [Recording.load, RecordingSet])
def test_a_header_that_announces_billions_of_batches_is_refused(
    open_it: Callable[[Path], Any], kept: Path, tmp_path: Path
) -> None:
    path = forged(kept, tmp_path / "it", lambda header, run: header["batch"].update(prompts=2**40, size=1))
    with pytest.raises(ValueError, match=rf"of {2**40} prompts in batches of 1, of which {2**40 - 2} are missing"):
        open_it(path)


@pytest.mark.parametrize("rows", [[0, 0], [2, 1], [0, 3]])
def test_a_header_of_rows_that_are_none_is_refused(rows: list[int], kept: Path, tmp_path: Path) -> None:
    path = forged(kept, tmp_path / "it", lambda header, run: header["batch"].update(rows=rows))
    with pytest.raises(ValueError, match=rf"the rows {rows[0]} to {rows[1] - 1} are none of 2 prompts"):
        Recording.load(path)


def test_names_in_a_recording_are_no_commands_of_a_terminal(kept: Path, tmp_path: Path) -> None:
    def change(header: dict[str, Any], run: dict[str, Any]) -> None:
        run["model"], run["hooks"] = f"a{COMMANDS}", [f"b{COMMANDS}"]
        run["specs"][0]["unit"] = run["settings"]["remasking"] = COMMANDS

    found = Recording.load(forged(kept, tmp_path / "it", change))
    shown = [repr(found), repr(found.run), found._repr_html_(), repr(RecordingSet(tmp_path / "it"))]
    assert r"model: a\x1b[31m\u202e\r\n\x07; under b\x1b[31m" in shown[0]
    assert not [text for text in shown if not set("\x1b\u202e\r\x07").isdisjoint(text)]
