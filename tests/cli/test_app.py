"""The command line as a whole: the demo, errors, help, what is imported when."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import dlm_lens
from dlm_lens import requirements
from dlm_lens.cli import app as cli
from dlm_lens.cli import installation as doctor
from dlm_lens.cli.demo_run import run_demo
from dlm_lens.experiments.experiment import declared_experiments
from dlm_lens.testing import tiny
from dlm_lens.training.checkpoints import (
    CheckpointError,
    NonFiniteLossError,
    TrainingDataError,
    TrainingStoppedError,
)
from dlm_lens.viz import emerging_lines
from tests.preloaded import python


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    defaults = {"steps": 8, "gen_length": 16, "block_length": 8}
    model = tiny("sink_qwen", sampler_defaults=defaults)
    path = tmp_path / "checkpoint"
    model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    return path


def test_the_demo_counts_its_seconds_from_the_start_of_the_command(checkpoint: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    run_demo("w1 w2", str(checkpoint), tmp_path / "out", console=console, started=time.perf_counter() - 1000)
    seconds = re.findall(r"loaded in ([\d.]+) s|Done in ([\d.]+) s", console.file.getvalue())
    (loaded, _), (_, done) = seconds
    assert float(loaded) < 500
    assert 1000 <= float(done) < 1500


def test_a_command_leaves_imported_objects_out_of_the_collections_of_the_exit() -> None:
    # What was registered first runs last: after main's own function.
    code = "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 10_000)); "
    code += "sys.argv = ['dlm-lens', '--version']; from dlm_lens.cli.app import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [dlm_lens.__version__, "True"]


@pytest.mark.long
def test_the_demo_prints_the_run_and_writes_figures_and_numbers(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    result = CliRunner().invoke(cli.app, ["demo", str(checkpoint), "--prompt", "w1 w2 w3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    strongest = ["incoming-attention-strongest.png", "sink-positions-strongest.png", "sinks.json"]
    assert sorted(path.name for path in out.iterdir()) == strongest
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


@pytest.mark.long
def test_words_that_the_model_does_not_know_are_named(tmp_path: Path) -> None:
    prompt = "tom has 5 zebras . tom buys 4 more . how many zebras ? :"
    output = CliRunner().invoke(cli.app, ["demo", "--prompt", prompt, "--out", str(tmp_path)]).output
    assert "Not in this model's language, and read as <unk>: zebras" in output


def test_the_families_are_listed() -> None:
    output = CliRunner().invoke(cli.app, ["families"]).output
    names = ("llada", "mmada", "dream", "smdm", "sink_qwen", "causal", "GSAI-ML/LLaDA-8B-Instruct", "toy-ar")
    for word in (*names, "126336", "134656", "151666", "32000", "low_confidence", "origin"):
        assert word in output


def test_one_family_is_shown_with_what_its_settings_mean() -> None:
    output = CliRunner().invoke(cli.app, ["families", "smdm"]).output
    assert "nieshen/SMDM/mdm_safetensors" in output
    assert "  cfg_scale = 2.0 (float): guidance, u + (cfg_scale + 1) (c - u); 0 for none." in output.splitlines()
    assert "llada" not in output.lower()
    shown = json.loads(CliRunner().invoke(cli.app, ["families", "mdlm", "--json"]).output)
    assert [one["sampler"] for one in shown["sampler_settings"]] == list(shown["families"][0]["samplers"])
    with pytest.raises(ValueError, match=r"family is 'smmd' \(did you mean 'smdm'\?\); there are a2d_qwen3,"):
        CliRunner().invoke(cli.app, ["families", "smmd"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("command", "field", "name"),
    [
        (["families"], "families", "llada"),
        (["plot", "list"], None, "sink-positions"),
        (["experiment", "list"], None, "fig7-paths"),
        (["eval", "--presets"], None, "one-token/table2/piqa"),
    ],
)
def test_a_list_is_json_for_a_program(command: list[str], field: str | None, name: str) -> None:
    result = CliRunner().invoke(cli.app, [*command, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    listed = json.loads(result.stdout)
    assert name in {one["name"] for one in (listed if field is None else listed[field])}


def test_the_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == dlm_lens.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "nowhere is no directory; give a checkpoint's directory or a hub name"),
        (["--prompt", ""], "--prompt is empty"),
    ],
)
def test_an_expected_error_is_one_sentence_and_writes_nothing(
    arguments: list[str], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    command = [python(), "-m", "dlm_lens.cli", "demo", "--out", str(tmp_path / "out")]
    if "./nowhere" not in arguments:
        arguments = [str(checkpoint), *arguments]
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


@pytest.mark.parametrize("command", [["train", "toy.yaml"], ["experiment", "beyond-conversion", "--small"]])
def test_a_training_that_stops_ends_its_command_with_a_sentence(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object, **__: object) -> None:
        raise TrainingStoppedError("SIGTERM at step 15 of 150; resume from runs/a/checkpoint-15, which is complete")

    monkeypatch.setattr("dlm_lens.training.trainer.run_training", stops)
    monkeypatch.setattr("dlm_lens.training.config_files.read_settings", lambda *_: None)
    monkeypatch.setattr("dlm_lens.experiments.run_experiment", stops)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, command)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    assert result.stderr.startswith("dlm-lens: SIGTERM at step 15 of 150; resume from runs/a/checkpoint-15, which ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", [TrainingStoppedError, CheckpointError, NonFiniteLossError, TrainingDataError])
def test_the_command_of_an_experiment_is_said_to_continue_where_it_does(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*_: object, **__: object) -> None:
        raise kind("step 5: training stopped")

    monkeypatch.setattr("dlm_lens.experiments.run_experiment", stops)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["experiment", "beyond-conversion", "--small"])
    # Numbers and data are the same in a second run.
    continues = kind in (TrainingStoppedError, CheckpointError)
    assert result.stderr == f"dlm-lens: step 5: training stopped{'; the same command continues' * continues}\n"


def test_a_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes(b"w1\n\xff\xfe")
    sentence = r"texts\.txt is not UTF-8 \(byte 3\)"
    result = CliRunner().invoke(cli.app, ["doctor", "toy", "--texts", str(tmp_path / "texts.txt")])
    with pytest.raises(ValueError, match=sentence):
        raise result.exception or AssertionError("no error")
    with pytest.raises(ValueError, match=sentence):
        dlm_lens.probes.train_tuned_lens(tiny("llada"), tmp_path / "texts.txt", steps=1)


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        sys.exit(130)

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert "interrupted; the same command continues" in capsys.readouterr().err


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
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(requirements, "requires", lambda name: ["torch>=2.9", "nnsight<0.9,>=0.8.1", "einops>=0.8"])
    monkeypatch.setattr(requirements, "version", version)
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
    as_json = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert as_json.exit_code == 1
    found = {one["subject"]: one["good"] for one in json.loads(as_json.stdout)}
    assert (found["torch"], found["nnsight"], found["einops"], found.get("CUDA")) == (True, False, False, None)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_the_doctor_computes_on_gpus_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "_computes", lambda device: f"computed on {device}")
    for check in ("_denoises", "_traces", "_bridges"):  # the next test makes them
        monkeypatch.setattr(doctor, check, lambda: "fine")
    found = {finding.subject: finding.found for finding in doctor.findings()}
    subject = {"mps": "mps", "xpu": "xpu:0"}[kind]  # as `device_map=` takes them
    assert found[subject] == f"computed on {subject}"
    assert "CUDA" not in found


def test_the_doctor_finds_the_models_well_in_every_host() -> None:
    import nnsight  # noqa: F401  # the doctor says what is missing; it does not raise
    import transformer_lens  # noqa: F401

    checks = {finding.subject: finding for finding in doctor.findings()}
    assert all(checks[name].good for name in ("toy:denoise", "toy:nnsight", "toy:bridge", "torch"))
    assert "5 + 4 =" in checks["toy:denoise"].found


@pytest.mark.long
def test_no_error_of_a_command_gives_advice_for_python(tmp_path: Path) -> None:
    """End to end, with settings that only the sampler can judge."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "tom has 5 apples"}\n')
    command = ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--gen-length", "8", "--block-length", "3"]
    done = subprocess.run([python(), "-m", "dlm_lens.cli", *command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "--gen-length" in done.stderr
    assert "gen_length" not in done.stderr
    assert not list((tmp_path / "o").rglob("*.safetensors"))


@pytest.mark.long
def test_a_sentence_begins_a_line_also_after_a_progress_bar(tmp_path: Path) -> None:
    recording = dlm_lens.record(tiny("llada"), [[1, 2], [3, 4]], steps=2, gen_length=2).save(tmp_path / "rec")
    command = ["report", str(recording), "--detector", "above-median", "-o", str(tmp_path / "x.html")]
    done = subprocess.run(
        [sys.executable, "-m", "dlm_lens.cli", *command],
        capture_output=True, text=True, env={**os.environ, "TQDM_DELAY": "0"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "report:" in done.stderr
    assert "\ndlm-lens: this recording has no max_activation; record with --reducers massive\n" in done.stderr
    assert not done.stderr.rpartition("dlm-lens:")[2].partition("\n")[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("encoding", "command"), [("ascii", lambda: sys.executable), ("cp1252", python)], ids=["ascii", "cp1252"]
)
def test_a_terminal_without_unicode_shows_codes(
    checkpoint: Path, tmp_path: Path, encoding: str, command: Callable[[], str]
) -> None:
    words = ["demo", str(checkpoint), "--prompt", "w1 w2", "--out", str(tmp_path / "out"), "--gen-length", "4"]
    done = subprocess.run(
        [command(), "-m", "dlm_lens.cli", *words],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    shown = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert "\\u25a2 masked" in shown
    assert (tmp_path / "out" / "sinks.json").exists()


@pytest.mark.long
def test_the_demo_takes_steps_and_a_length_and_shows_progress(checkpoint: Path, tmp_path: Path) -> None:
    command = ["demo", str(checkpoint), "--prompt", "w1 w2", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, [*command, "--steps", "2", "--gen-length", "4"], catch_exceptions=False)
    assert result.exit_code == 0
    numbers = json.loads((tmp_path / "out" / "sinks.json").read_text())
    assert (numbers["settings"]["steps"], numbers["settings"]["gen_length"]) == (2, 4)
    assert [len(numbers["tokens"]), len(numbers["tokens"][0])] == [3, 6]
    assert "denoising: 100%" in result.stderr
    assert "2/2" in result.stderr
    assert "denoising" not in result.stdout


@pytest.mark.parametrize(
    ("own", "given", "settings", "said"),
    [
        ({"steps": 512, "gen_length": 512}, {}, {"gen_length": 64, "steps": 64}, "Writing 64 tokens in 64 steps"),
        ({"steps": 512, "gen_length": 512}, {"steps": 8}, {"gen_length": 64, "steps": 8}, "64 tokens in 8 steps"),
        ({"steps": 512, "gen_length": 512}, {"gen_length": 128}, {"gen_length": 128, "steps": 128}, "128 tokens"),
        ({"steps": 512, "gen_length": 512}, {"gen_length": 9, "steps": 3}, {"gen_length": 9, "steps": 3}, ""),
        ({"steps": 32, "gen_length": 32}, {}, {}, ""),
        ({"steps": 128, "gen_length": 32}, {}, {"steps": 32}, "32 tokens in 32 steps"),
        ({"gen_length": 512}, {}, {"gen_length": 64}, "Writing 64 tokens; the model"),
    ],
)  # fmt: skip
def test_the_demo_of_a_real_model_ends_within_64_steps(own: dict, given: dict, settings: dict, said: str) -> None:
    from types import SimpleNamespace

    from dlm_lens.cli.demo_run import demo_settings

    asked = {"steps": None, "gen_length": None} | given
    found, sentence = demo_settings(SimpleNamespace(sampler_defaults=own), example=False, **asked)
    assert found == settings
    assert said in sentence
    assert bool(said) == bool(sentence)


class Gone(io.StringIO):
    """A stream whose reader goes away as soon as the text of the run is printed."""

    def write(self, text: str) -> int:
        if "Loading" in text or "loaded in" in text or not text.strip():
            return len(text)
        raise RuntimeError("the output is closed")


def test_the_demo_writes_its_files_before_it_prints_tables(checkpoint: Path, tmp_path: Path) -> None:
    console = Console(file=Gone(), width=200)
    with pytest.raises(RuntimeError, match="the output is closed"):
        run_demo("w1 w2", str(checkpoint), tmp_path / "out", gen_length=8, steps=2, console=console)
    assert json.loads((tmp_path / "out/sinks.json").read_text())["model"] == str(checkpoint)
    assert len([*(tmp_path / "out").glob("*.png")]) == 2


def test_names_of_experiments_are_whole_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    printed = CliRunner().invoke(cli.app, ["experiment", "list"]).output
    assert {each.name for each in declared_experiments()} <= {line.split(" ")[0] for line in printed.splitlines()}


@pytest.mark.long
def test_the_demo_of_sinks_that_move_draws_the_head_whose_sinks_move_most(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    demo = run_demo(out=tmp_path, console=console)
    layer, head = demo.heads["moving"]
    assert f"sinks move most often (layer {layer}, head {head})." in console.file.getvalue()
    assert (tmp_path / "incoming-attention-moving.png").exists()
    assert (tmp_path / "sink-positions-moving.png").exists()


def test_the_demo_of_sinks_that_do_not_move_draws_no_moving_head(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "sink-positions-moving.png").write_bytes(b"of an earlier demo")
    command = ["demo", str(checkpoint), "--prompt", "w1 w2", "--gen-length", "1", "--out", str(out)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert "; no sink moves." in " ".join(result.output.split())
    strongest = ["incoming-attention-strongest.png", "sink-positions-strongest.png", "sinks.json"]
    assert sorted(path.name for path in out.iterdir()) == strongest
    assert set(json.loads((out / "sinks.json").read_text())["figures"]) == {"strongest"}


def test_progress_in_a_file_is_whole_lines(tmp_path: Path) -> None:
    code = (
        "import os, sys; from dlm_lens.cli.app import _progress_in_lines; _progress_in_lines()\n"
        "os.environ |= {'TQDM_DELAY': '0', 'TQDM_MININTERVAL': sys.argv[1]}\n"
        "from tqdm.auto import tqdm\nfor _ in tqdm(range(200), desc='denoising', unit='step'): pass"
    )
    log = tmp_path / "log"
    for seconds in ("10", "0"):
        with log.open("wb") as file:
            subprocess.run([sys.executable, "-c", code, seconds], check=True, stderr=file)
    lines = log.read_text().replace("\r", "").split("\n")
    assert all(re.fullmatch(r" *(denoising: +\d+%\| \d+/200 \[.*step/s\])? *", line) for line in lines), lines
    code = "from dlm_lens.cli.app import _progress_in_lines; _progress_in_lines()\nfrom tqdm.auto import tqdm\n"
    code += "for _ in tqdm(range(200)): pass"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""  # of work of less than 5 seconds


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has /dev/full")
def test_what_cannot_be_printed_is_named() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "dlm_lens.cli", "plot", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert "dlm-lens: the output does not fit on its disk" in done.stderr


def test_the_list_of_families_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stdout", Output())
    cli.COMMANDS["families"]()
    assert len(written) == 1
    assert "embedded models: toy" in written[0]
