"""Paths that a user gives (home directories, names that safetensors cannot open), and `read_utf8`."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.experiments import find_experiment, render_experiment, run_experiment
from dlm_lens.features import SparseAutoencoder, load_sae, save_sae
from dlm_lens.files.paths import check_directory, check_file, check_utf8, read_utf8, user_path
from dlm_lens.hooks import MeanActivations
from dlm_lens.testing import tiny


def test_a_home_directory_is_not_made_as_one_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for path, check in (("~/run", check_directory), ("~", check_directory), ("~/page.html", check_file)):
        full = Path(path.replace("~", str(tmp_path / "home")))
        with pytest.raises(FileNotFoundError, match=rf"^{path} begins with ~, which is no .*; give {full}$"):
            check(Path(path))
        assert user_path(path) == full
    with pytest.raises(FileNotFoundError, match=r"^~nobody-here/run begins with the home directory of a user who"):
        check_directory(Path("~nobody-here/run"))
    check_file(Path("~draft.html"))
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "~").mkdir()
    check_directory(Path("~/run"))


def test_functions_that_read_and_write_expand_a_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path / "work")
    model = tiny("llada")
    recording = dl.record(model, ["w1"], [dl.ReceivedAttention()], to="~/run", steps=2, gen_length=2)
    recording.save("~/saved")
    weights = torch.eye(4, 6)
    sae = SparseAutoencoder(weights, torch.zeros(6), weights.T.contiguous(), torch.zeros(4), activation="relu")
    save_sae(sae, "~/sae")
    MeanActivations("z", torch.zeros(1, 3, 1, 2), torch.ones(3, 1).long()).save("~/means.safetensors")
    settings = {"prompts": 1, "batch": 1, "sampler": {"gen_length": 4}}
    run_experiment(find_experiment("fig5-depth"), "~/results", small=True, models=["toy"], settings=settings)
    for path in ("~/run", "~/saved"):
        assert dl.Recording.load(path).received.shape == recording.received.shape
    assert len(dl.RecordingSet("~/run")) == 1
    assert load_sae("~/sae").features == 6
    assert MeanActivations.load("~/means.safetensors").site == "z"
    assert render_experiment(find_experiment("fig5-depth"), "~/results").is_relative_to(home)
    written = {one.name for one in home.iterdir() if not one.name.startswith(".")}  # matplotlib has caches there
    assert written == {"run", "saved", "sae", "means.safetensors", "results"}
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.skipif(os.name == "nt", reason="names are UTF-16 there")
def test_names_that_are_not_utf8_are_told_before_any_work(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    sentence = r"bad\\udcff.* is no name in UTF-8, and the safetensors library opens no other; rename it"
    model = tiny("llada")
    settings: dict[str, Any] = {"steps": 2, "gen_length": 2}
    weights = torch.eye(4, 6)
    sae = SparseAutoencoder(weights, torch.zeros(6), weights.T.contiguous(), torch.zeros(4), activation="relu")
    for write in (
        lambda: dl.record(model, ["w1"], [dl.ReceivedAttention()], to=bad, **settings),
        lambda: save_sae(sae, bad / "sae"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write()
    assert not bad.exists()
    model.save_pretrained(good / "model")
    dl.record(model, ["w1"], [dl.ReceivedAttention()], to=good / "run", **settings)
    save_sae(sae, good / "sae")
    MeanActivations("z", torch.zeros(1, 3, 1, 2), torch.ones(3, 1).long()).save(good / "means.safetensors")
    shutil.move(good, bad)
    for read in (
        lambda: dl.load(bad / "model"),
        lambda: dl.Recording.load(bad / "run"),
        lambda: load_sae(bad / "sae"),
        lambda: MeanActivations.load(bad / "means.safetensors"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read()
    check_utf8(tmp_path / "é \u202e")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_end_as_in_an_opened_text_file(end: bytes, mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(mark + end.join(["é".encode(), b"", b"b\x0cc", b""]))
    assert read_utf8(path) == path.read_text(encoding="utf-8-sig") == "é\n\nb\fc\n"


def test_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"text\.txt is not UTF-8 \(byte 0\), the encoding of lists"):
        read_utf8(path, "lists")
