import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dlm_lens
from dlm_lens.adapters.memory import check_memory, free_bytes, weight_bytes
from dlm_lens.cli import app as cli
from dlm_lens.testing import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = tiny("llada")
    model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Any:
    def leave(free: int) -> None:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))

    return leave


def numel(path: Path) -> int:
    return sum(p.numel() for p in dlm_lens.load(path).parameters())


def test_the_estimate_is_what_the_parameters_take(checkpoint: Path, tmp_path: Path) -> None:
    model, options = dlm_lens.load(checkpoint), {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        held = sum(p.numel() * p.element_size() for p in dlm_lens.load(checkpoint, dtype=dtype).parameters())
        assert weight_bytes(str(checkpoint), dtype, options=options) == held
    assert weight_bytes(str(checkpoint), None, options=options) == 4 * numel(checkpoint)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert weight_bytes(str(tmp_path / "sharded"), torch.float16, options=options) == 2 * numel(checkpoint)
    file = str(checkpoint / "model.safetensors")
    assert weight_bytes(file, None, options=options) == 4 * numel(checkpoint)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert weight_bytes(file, None, options=options, element_size=0.5) == 4 * numel(checkpoint) - 3.5 * matrices


def test_files_that_are_still_on_the_hub_are_told_from_their_index(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    index = checkpoint / "index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1000}, "weight_map": {"a": "x.safetensors"}}))
    monkeypatch.setattr("dlm_lens.adapters.memory.local_file", lambda *a: None)
    monkeypatch.setattr("dlm_lens.adapters.memory.optional_file", lambda *a: str(index))
    assert weight_bytes("org/name", None, options={}) == 1000
    assert weight_bytes("org/name", torch.float32, options={}, stored=torch.bfloat16) == 2000
    assert weight_bytes("org/name", torch.float32, options={}) == 1000
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors"}}))
    assert weight_bytes("org/name", None, options={}) is None


def test_too_little_memory_is_refused_before_anything_is_read(
    checkpoint: Path, little: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * numel(checkpoint)
    little(needed - 1)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("was read"))
    with pytest.raises(MemoryError) as caught:
        dlm_lens.load(checkpoint)
    halved, full = f"{needed / 2e9:.3g} GB", f"{needed / 1e9:.3g} GB"
    said = str(caught.value)
    assert f"need {full}, and {(needed - 1) / 1e9:.3g} GB are free on cpu" in said
    assert f'pass dtype="bfloat16" ({halved}), device_map="auto" to spread them' in said
    for place in ("cpu", {"": "cpu"}, torch.device("cpu")):
        with pytest.raises(MemoryError):
            dlm_lens.load(checkpoint, device_map=place)
    little(needed // 2 - 1)
    with pytest.raises(MemoryError) as caught:
        dlm_lens.load(checkpoint, dtype="bfloat16")
    assert "bfloat16" not in str(caught.value)


def test_what_fits_or_is_spread_is_not_refused(checkpoint: Path, little: Any) -> None:
    little(2 * numel(checkpoint))
    assert dlm_lens.load(checkpoint, dtype="bfloat16").dtype == torch.bfloat16
    little(0)
    for place in ("auto", "balanced", {"model": "cpu", "lm_head": "cuda:0"}):
        check_memory(str(checkpoint), None, place, options={})


def test_a_cuda_device_is_asked_itself(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"mem_get_info": (5, 100), "memory_reserved": 30, "memory_allocated": 10}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, value=value: value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert free_bytes(torch.device("cuda:0")) == 25
    for place in ("cuda", "cuda:1", {"": 0}):
        with pytest.raises(MemoryError, match="are free on cuda"):
            check_memory(str(checkpoint), None, place, options={})
    assert free_bytes(torch.device("meta")) is None


@pytest.mark.parametrize("place", ["nowhere", "cuda:77", {"": 77}, 2.5])
def test_a_device_that_is_not_there_is_refused(checkpoint: Path, place: Any) -> None:
    with pytest.raises(
        ValueError, match=r'device_map .* (names no device; give "cpu"|leave device_map out for the)'
    ):
        dlm_lens.load(checkpoint, device_map=place)


@pytest.mark.gpu
def test_the_memory_of_a_real_device(checkpoint: Path) -> None:
    free = free_bytes(torch.device("cuda"))
    assert free is not None
    assert 0 < free <= torch.cuda.get_device_properties(0).total_memory
    assert dlm_lens.load(checkpoint, device_map="cuda").device.type == "cuda"


def test_damaged_files_are_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    for content, said in (
        (whole[:-7], rf"is cut short, {len(whole) - 7} of {len(whole)} bytes; fetch it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a Git LFS pointer, .* fetch them with `git lfs pull`",
        ),
        (b"PK\x03\x04 something else entirely", "is no readable safetensors file; fetch it again"),
        (b"", "is no readable safetensors file; fetch it again"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=said):
            dlm_lens.load(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny("llada").save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=rf"names 5 files, of which {lost.name} is missing: fetch it too"):
        dlm_lens.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    for content in ("", "[]", "{}", json.dumps({"weight_map": json.loads(whole)["weight_map"]})):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"is no index of weights \(.* a weight_map and metadata\); fetch"):
            dlm_lens.load(tmp_path)
        index.write_text(whole)


def test_names_of_missing_files_are_written_safely_and_long_ones_refused(tmp_path: Path) -> None:
    tiny("llada").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    for name, said in (
        ("m\x1b]0;title\x07.safetensors", r"m\\x1b\]0;title\\x07.safetensors is missing"),
        ("a" * 5000 + ".safetensors", r"names the file 'a+\.\.\.', which is no path inside the checkpoint"),
    ):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
        with pytest.raises((ValueError, FileNotFoundError), match=said) as caught:
            dlm_lens.load(tmp_path)
        assert len(str(caught.value)) < 400 + len(str(tmp_path))
    with pytest.raises(ValueError, match=r"device_map \[1\] names no device"):
        dlm_lens.load("toy", device_map=[1])


def test_the_command_line_says_it_in_one_sentence(
    checkpoint: Path, little: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    little(1000)
    out = checkpoint / "out"
    monkeypatch.setattr("sys.argv", ["dlm-lens", "demo", str(checkpoint), "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert said.startswith("dlm-lens: the weights of ")
    assert said.count("\n") == 1
    assert not out.exists()
