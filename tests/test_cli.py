import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dlm_lens
from dlm_lens import cli, doctor
from dlm_lens.testing import tiny
from dlm_lens.viz import emerging_lines


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    defaults = {"steps": 8, "gen_length": 16, "block_length": 8}
    model = tiny("sink_qwen", sampler_defaults=defaults)
    path = tmp_path / "checkpoint"
    model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


def test_the_demo_prints_the_run_and_writes_figures_and_numbers(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    result = CliRunner().invoke(
        cli.app, ["demo", "--model", str(checkpoint), "--prompt", "w1 w2 w3", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == [
        "incoming-attention-moving.png",
        "incoming-attention-strongest.png",
        "sink-positions-moving.png",
        "sink-positions-strongest.png",
        "sinks.json",
    ]
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((out / "sinks.json").read_text())
    run = dlm_lens.denoise(dlm_lens.load(checkpoint), "w1 w2 w3")
    assert numbers["tokens"] == run.canvases[:, 0].tolist()
    assert numbers["text"] == run.texts[0]
    received = dlm_lens.received_over_steps(dlm_lens.load(checkpoint), run)
    largest = received.values[:, 0].amax(-1)
    assert numbers["largest"]["score"][3][1][2] == pytest.approx(largest[3, 1, 2].item(), abs=1e-4)
    assert len(numbers["sinks"]) == int(dlm_lens.find_sinks(received, dlm_lens.AboveMean(3.0)).is_sink.sum())
    assert numbers["rule"] == "AboveMean(eps=3.0); scale: relative to uniform; level: head; queries: all"
    assert numbers["rule"] in " ".join(result.output.split())
    assert run.texts[0].split()[-1] in result.output


def test_words_that_the_model_does_not_know_are_named(tmp_path: Path) -> None:
    prompt = "tom has 5 zebras . tom buys 4 more . how many zebras ? :"
    output = CliRunner().invoke(cli.app, ["demo", "--prompt", prompt, "--out", str(tmp_path)]).output
    assert "Not in this model's language, and read as <unk>: zebras" in output


def test_the_families_are_listed() -> None:
    output = CliRunner().invoke(cli.app, ["families"]).output
    names = ("llada", "mmada", "dream", "smdm", "sink_qwen", "causal", "GSAI-ML/LLaDA-8B-Instruct", "toy-ar")
    for word in (*names, "126336", "134656", "151666", "32000", "low_confidence", "origin"):
        assert word in output


def test_the_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == dlm_lens.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nowhere"], "nowhere is no directory; give a checkpoint's directory or a hub name"),
        (["--prompt", ""], "prompt 0 is empty"),
    ],
)
def test_an_expected_error_is_one_sentence_and_writes_nothing(
    arguments: list[str], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "dlm_lens.cli", "demo", "--out", str(tmp_path / "out")]
    if "--model" not in arguments:
        arguments = ["--model", str(checkpoint), *arguments]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileExistsError(17, "File exists", "there"), "there is a file already; give another directory"),
        (IsADirectoryError(21, "Is a directory", "there"), "there is a directory; give the name of a file in it"),
        (PermissionError(13, "Permission denied", "there"), "there may not be written or read by you"),
        (OSError(28, "No space left on device", "there"), "there does not fit on its disk"),
        (FileNotFoundError("no recording; make one"), "no recording; make one"),
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), "try again with a connection"),
        (ValueError("steps is 0; give 1"), "steps is 0; give 1"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_the_system_says_becomes_a_sentence_with_a_remedy(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("dlm-lens: ")
    assert sentence in shown
    assert "Errno" not in shown


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        sys.exit(130)

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err


def test_the_demo_refuses_a_file_as_its_directory_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "file")])
    assert isinstance(result.exception, FileExistsError)
    assert "is a file; give a directory" in str(result.exception)
    assert "step" not in result.output


def test_tokens_cannot_command_the_terminal() -> None:
    model = tiny("llada")
    hostile = {"w5": "[bold red]\x1b[2J\x07"}
    vocabulary = {hostile.get(word, word): i for word, i in model.tokenizer.get_vocab().items()}
    inner = json.loads(model.tokenizer.backend_tokenizer.to_str())
    inner["model"]["vocab"] = vocabulary
    tokenizer = type(model.tokenizer.backend_tokenizer).from_str(json.dumps(inner))
    model.tokenizer = type(model.tokenizer)(tokenizer_object=tokenizer, unk_token="w0")

    def always_five(step: int, canvas: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill(-1, torch.tensor([5]), 50.0)

    run = dlm_lens.denoise(model, [[1]], gen_length=2, on_logits=always_five)
    assert run.tokens[0, 1:].tolist() == [5, 5]
    shown = "".join(line.plain for line in emerging_lines(run))
    assert "[bold␣red]" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_the_doctor_names_what_is_wrong_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nnsight": "0.7.0", "torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name == "einops":
            raise doctor.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.9", "nnsight<0.9,>=0.8.1", "einops>=0.8"])
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "_traces", lambda: "fine")

    def broken() -> str:
        raise RuntimeError("the bridge is [down]")

    monkeypatch.setattr(doctor, "_bridges", broken)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    lines = {line.split()[1]: line for line in result.output.splitlines() if line.startswith(("ok", "bad"))}
    assert lines["torch"].startswith("ok")
    assert lines["toy:denoise"].startswith("ok")
    assert "0.7.0, but dlm_lens needs <0.9,>=0.8.1" in lines["nnsight"]
    assert "pip install 'einops>=0.8'" in lines["einops"]
    assert "RuntimeError: the bridge is [down]" in lines["toy:bridge"]


def test_the_doctor_finds_the_models_well_in_every_host() -> None:
    checks = {finding.subject: finding for finding in doctor.findings()}
    assert all(checks[name].good for name in ("toy:denoise", "toy:nnsight", "toy:bridge", "torch"))
    assert "5 + 4 =" in checks["toy:denoise"].found
