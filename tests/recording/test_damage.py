"""Damaged recordings: one clear sentence, or the numbers that were recorded; never others."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from dlm_lens.recording import ReceivedAttention, Recording, RecordingSet, TopKeys, ValueNorm, record
from dlm_lens.recording.shards import MANIFEST, ShardDirectory
from dlm_lens.testing import tiny
from tests.files.damage import damage
from tests.recording.reference import PROMPTS

REDUCERS = (ReceivedAttention(("all", "unmasked")), ValueNorm("both"), TopKeys(2))
SETTINGS = {"steps": 3, "gen_length": 6, "temperature": 0.7, "seed": [3, 4], "batch_size": 1}
FIELDS = ("layers", "steps", "rows", "heads", "sinks", "causal", "unpadded", "model", "scale", "query_heads")
FIELDS += ("versions", "words", "specs")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "recording"
    record(tiny("llada"), PROMPTS, REDUCERS, to=path, **SETTINGS)
    record(tiny("causal"), PROMPTS, REDUCERS[1:], gen_length=3, seed=1).save(path.parent / "saved")
    return path


def difference(found: Recording, wanted: Recording) -> str:
    """The first thing in which two recordings differ; nothing where they are the same."""
    for name in FIELDS:
        if getattr(found, name) != getattr(wanted, name):
            return name
    for name in ("canvases", "masked", "proposals", "confidence", "unmasked", "attention_mask"):
        if not torch.equal(getattr(found.run, name), getattr(wanted.run, name)):
            return name
    for name in ("prompt_length", "spans", "blocks", "settings", "eos_token_ids"):
        if getattr(found.run, name) != getattr(wanted.run, name):
            return name
    for name in wanted.specs:
        a, b = found.arrays[name], wanted.arrays[name]
        if a.dtype != b.dtype or not torch.equal(a.nan_to_num(nan=-7), b.nan_to_num(nan=-7)):
            return name
    return "" if torch.equal(found.answer, wanted.answer) else "answer"


def outcome(path: Path, wanted: Recording) -> str:
    """How a damaged recording is read: "told", "the same", or what is wrong with that."""
    try:
        found = Recording.load(path)
        changed = difference(found, wanted)
    except (ValueError, FileNotFoundError) as error:
        told = str(error)
        clear = str(path) in told and "\n" not in told and len(told) < 1500
        return "told" if clear else f"unclear: {type(error).__name__}: {told}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"other {changed}" if changed else "the same"


def fuzz(kept: Path, work: Path, cases: int, seed: int) -> dict[str, int]:
    draw, counts, wrong = random.Random(seed), {"told": 0, "the same": 0}, []
    wanted = Recording.load(kept)
    for case in range(cases):
        path = work / f"case{case}"
        shutil.copytree(kept, path)
        how = damage(path, draw)
        found = outcome(path, wanted)
        if found in counts:
            counts[found] += 1
        else:
            wrong.append(f"{how}: {found}")
        shutil.rmtree(path)
    assert not wrong, f"{len(wrong)} of {cases}: " + "\n".join(wrong[:20])
    return counts


@pytest.mark.parametrize("name", ["recording", "saved"])
def test_damage_is_told_or_without_effect(name: str, kept: Path, tmp_path: Path) -> None:
    counts = fuzz(kept.parent / name, tmp_path, 60, seed=11)
    assert counts["told"] > 40


@pytest.mark.long
@pytest.mark.parametrize("name", ["recording", "saved"])
@pytest.mark.parametrize("seed", range(2))
def test_thousands_of_damages(name: str, seed: int, kept: Path, tmp_path: Path) -> None:
    counts = fuzz(kept.parent / name, tmp_path, 500, seed)
    assert counts["told"] > 400


def test_every_bit_of_a_shard_counts(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "it")
    shard = tmp_path / "it/rows-00001-00001/step-00001.safetensors"
    whole = shard.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        shard.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"step-00001.safetensors is damaged \(its checksum is another\)"):
            Recording.load(tmp_path / "it")
        with pytest.raises(ValueError, match="step-00001"):
            list(RecordingSet(tmp_path / "it"))
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    Recording.load(tmp_path / "it", verify=False)  # on request, the disk is trusted
    shard.write_bytes(whole)
    assert not difference(Recording.load(tmp_path / "it"), Recording.load(kept))


@pytest.mark.parametrize("told", [99, 1, "2", 2.0, True, None])
def test_another_format_is_named(told: object, kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "it")
    for header in tmp_path.glob("it/*/header.json"):
        header.write_text(json.dumps({**json.loads(header.read_text()), "format": told}))
    with pytest.raises(ValueError, match=r"header.json has the format .*, and this version of dlm_lens reads 2"):
        Recording.load(tmp_path / "it")
    with pytest.raises(ValueError, match="has the format"):
        record(tiny("llada"), PROMPTS, REDUCERS, to=tmp_path / "it", **SETTINGS)


def test_a_recording_that_lacks_a_batch_says_how_much_is_there(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "it")
    shutil.rmtree(tmp_path / "it/rows-00001-00001")
    with pytest.raises(
        ValueError, match=r"holds 1 of 2 prompts \(rows-00001-00001 missing\); record with the same"
    ):
        Recording.load(tmp_path / "it")
    found = RecordingSet(tmp_path / "it")
    assert [path.name for path in found.paths] == ["rows-00000-00000"]
    assert [path.name for path in found.unfinished] == ["rows-00001-00001"]
    again = record(tiny("llada"), PROMPTS, REDUCERS, to=tmp_path / "it", **SETTINGS)
    assert not difference(again, Recording.load(kept))
    # A batch may be read on its own.
    assert Recording.load(kept / "rows-00001-00001").rows == (1,)


def test_a_damaged_unfinished_recording_does_not_go_on(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "rows-00000-00000", tmp_path / "it/rows-00000-00000")
    part = tmp_path / "it/rows-00000-00000"
    for name in ("run.json", "run.safetensors"):
        (part / name).unlink()
    lines = (part / MANIFEST).read_text().splitlines(keepends=True)
    (part / MANIFEST).write_text("".join(lines[:2]))
    shard = part / "step-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"step-00001.safetensors is damaged"):
        record(tiny("llada"), PROMPTS, REDUCERS, to=tmp_path / "it", **SETTINGS)
    assert len(ShardDirectory(part).lines()) == 2
