"""Help and wrong arguments, which need neither torch nor a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlm_lens.cli import app as cli


def without_models(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run lines that use `run(*arguments)`, which ends the process if a command imports a model library."""
    begin = """
import json, sys
from typer.testing import CliRunner
from dlm_lens.cli.app import app

def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    heavy = [name for name in ("torch", "transformers", "pandas", "matplotlib") if name in sys.modules]
    if heavy:
        sys.exit(f"{arguments} imports {heavy}")
    return result
"""
    return subprocess.run([sys.executable, "-c", begin + script], capture_output=True, text=True, cwd=tmp_path)


def test_help_imports_no_library_beside_typer(tmp_path: Path) -> None:
    # The time of `dlm-lens --help` is that of its imports: rich alone takes as long as all the others.
    script = """
assert run("--help").exit_code == 0
found = {name.partition(".")[0] for name in sys.modules}
print(sorted(found & {"rich", "pygments", "markdown_it", "attr", "numpy", "yaml", "pydantic", "asyncio"}))
"""
    done = without_models(script, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_help_shows_the_whole_first_sentence_of_every_command() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["--help"]).output.split())
    for name, command in cli.COMMANDS.items():
        assert f"{name} {' '.join(command.__doc__.partition(chr(10) * 2)[0].split())}" in shown


@pytest.mark.long
def test_help_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = """
from typer.main import get_command
for name in ("", *get_command(app).commands):
    result = run(*filter(None, [name]), "--help")
    assert result.exit_code == 0 and "Usage" in result.output, name
    print(name)
for listing in (["plot", "list"], ["experiment", "list"], ["eval", "--presets"], ["--version"]):
    assert run(*listing).exit_code == 0, listing
"""
    done = without_models(script, tmp_path)
    assert done.returncode == 0, done.stderr
    commands = {
        "demo",
        "record",
        "sinks",
        "paths",
        "norms",
        "lens",
        "clock",
        "insertion",
        "plot",
        "report",
        "train",
        "eval",
        "experiment",
    }
    assert commands <= set(done.stdout.split())


TWICE = (
    ["record", "toy", "--prompts", "p", "--out", "o", "--set", "cfg_scale=1", "--set", "cfg_scale = 2"],
    ["lens", "nowhere", "--load", "sampler=p2", "--load", "sampler=dmax"],
    ["train", "laptop", "--set", "optimisation.rate=1e-4", "--set", "optimisation.rate=1e-4"],
    ["experiment", "beyond-context", "--set", "prompts=1", "--set", "prompts=2"],
    ["plan", "toy", "--set", "cfg_scale=1", "--set", "cfg_scale=2"],
    ["eval", "--tasks", "x", "--likelihood", "samples=1,samples=2"],
    ["eval", "--tasks", "x", "--generation", "gen_length=1", "--generation", "gen_length=2"],
)


@pytest.mark.parametrize("arguments", TWICE, ids=lambda one: one[0])
def test_a_setting_that_is_given_twice_is_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").write_text('{"prompt": "w1"}\n')
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, ValueError)
    assert "is set twice, as " in str(result.exception)


WRONG = [
    (["sinks", "nowhere"], "nowhere holds no recording"),
    (["sinks", "nowhere", "--detector", "above-men:3"], "'above-men:3' (did you mean 'above-mean'?): there are"),
    (["plot", "sink-position", "nowhere"], "no picture 'sink-position' (did you mean 'sink-positions'?); there"),
    (["train", "laptopp"], "laptopp is neither a file nor a shipped config (did you mean 'laptop'?): laptop, "),
    (["sinks", "nowhere", "--detector", "bogus"], "--detector 'bogus': there are above-mean"),
    (
        ["sinks", "nowhere", "--detector", "above-mean:-1"],
        "--detector 'above-mean:-1': AboveMean(eps=-1.0): eps must be a finite number of at least 0",
    ),
    (["sinks", "nowhere", "--detector", "attention-share:2"], "threshold must lie between 0 and 1"),
    (["sinks", "nowhere", "--detector", "top-k:1.5"], "k must be a whole number"),
    (["sinks", "nowhere", "--detector", "above-mean:"], "--detector 'above-mean:': eps must be a number, got ''"),
    (["sinks", "nowhere", "--level", "heads"], "--level is 'heads'; did you mean head?"),
    (["sinks", "nowhere", "--queries", "mask"], "--queries is 'mask'; did you mean masked?"),
    (["sinks", "nowhere", "--level", "layer", "--head", "1"], "at --level layer there are no heads"),
    (["paths", "nowhere"], "nowhere holds no recording"),
    (["paths", "nowhere", "--by", "heads"], "--by is 'heads'; did you mean head?"),
    (["paths", "nowhere", "--csv", "x"], "--csv is 'x'"),
    (["norms", "nowhere", "--match", "x"], "--match is 'x'"),
    (["lens", "nowhere", "--steps", "a"], "--steps takes whole numbers"),
    (["lens", "nowhere", "--hooks", "bogus(1)"], "'bogus' is no hook"),
    (
        ["lens", "nowhere", "--load", "sampler"],
        "write name=value, such as sampler=dmax",
    ),
    (["clock", "nowhere", "--load", "dtype=float32"], "give --dtype in place of --load dtype="),
    (
        ["insertion", "nowhere", "--sae", "x", "--load", "samplers=p2"],
        "'samplers' (did you mean 'sampler'?); it has adapter",
    ),
    (["record", "toy", "--prompts", "x", "--out", "y", "--load", "device_map=cpu"], "give --device in place of"),
    (
        ["eval", "toy", "--tasks", "x", "--load", "trust_remote_code=true"],
        "--load has no argument 'trust_remote_code'",
    ),
    (["doctor", "--load", "sampler=p2"], "--load are of a checkpoint; name it: dlm-lens doctor MODEL"),
    (["plan", "toy", "--load", "mask_token_id=3"], "--load mask_token_id: a plan reads config.json alone"),
    (["plot", "nothing", "nowhere"], "there is no picture 'nothing'"),
    (["plot", "sink-positions", "nowhere"], "nowhere holds no recording"),
    (["plot", "sink-positions", "nowhere", "--layer", "x"], "--layer is 'x'; give an index, or mean"),
    (
        ["plot", "sink-positions", "nowhere", "--detector", "above-mean:-3"],
        "eps must be a finite number of at least 0",
    ),
    (["plot", "sink-positions", "nowhere", "--row", "-1"], "--row is -1; rows go from 0"),
    (["plot", "sink-positions", "nowhere", "--steps", "4;5"], "--steps takes whole numbers"),
    (["plot", "sink-positions", "nowhere", "--pick", "weakest"], "--pick is 'weakest'"),
    (["plot", "sink-positions", "nowhere", "--position", "3"], "sink-positions takes no --position"),
    (["plot", "sink-positions", "nowhere", "-o", "x.gif"], "x.gif ends in .gif"),
    (["plot", "sink-positions", "nowhere", "-o", "none/x.png"], "none does not exist"),
    (["plot", "sink-positions", "nowhere", "-o", "p.jsonl/x.png"], "p.jsonl is a file; give a directory"),
    (["report", "nowhere", "-o", "p.jsonl/deep/x.html"], "p.jsonl is a file; give a directory"),
    (["report", "nowhere"], "nowhere holds no recording"),
    (["report", "nowhere", "--detector", "share"], "--detector 'share': there are above-mean"),
    (["report", "nowhere", "--detector", "above-std:-2"], "k must be a finite number of at least 0"),
    (["report", "nowhere", "--detector", "above-mean:-1"], "eps must be a finite number of at least 0"),
    (["report", "nowhere", "--compare", "there", "-o", "none/x.html"], "none does not exist"),
    (["record", "toy", "--prompts", "none.jsonl", "--out", "o"], "none.jsonl does not exist"),
    (["record", "./none", "--prompts", "p.jsonl", "--out", "o"], "none is no directory"),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--threshold", "1.5"], "threshold is 1.5; it is a"),
    (
        ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--threshold", "0.5", "--factor", "1"],
        "--threshold and --factor both say",
    ),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--cache", "all"], "--cache is 'all'"),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--set", "top_p"], "'top_p' is not a setting; write"),
    (
        ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--set", "steps=4"],
        "give --steps in place of --set",
    ),
    (
        ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--set", "seed=4"],
        "give --seed in place of --set",
    ),
    (["plan", "toy", "--set", "prompt_length=4"], "give --prompt-length in place of --set"),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "p.jsonl"], "p.jsonl is a file; give a directory"),
    (
        ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--reducers", "x"],
        "--reducers 'x': there are channels, entropy",
    ),
    (
        ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--reducers", "received:x"],
        "the classes of queries are all, masked",
    ),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--layers", "a"], "--layers takes whole numbers"),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--dtype", "int8"], "--dtype is 'int8'"),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--storage", "x"], "--storage is 'x'"),
    (["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--device", "my gpu"], "--device is 'my gpu'"),
    (
        ["record", "toy", "--prompts", "p.jsonl", "--out", "o", "--hooks", "mask_sinks(above_mean(3)"],
        "no hook expr",
    ),
    (["demo", "./none"], "none is no directory"),
    (["demo", "--out", "p.jsonl"], "p.jsonl is a file; give a directory"),
    (["demo", "--prompt", " "], "--prompt is empty"),
    (["demo", "--steps", "0"], "steps is 0; it must be at least 1"),
    (["demo", "--gen-length", "-1"], "gen_length is -1"),
    (["demo", "--dtype", "int8"], "--dtype is 'int8'"),
    (["demo", "--load", "samplr=p2"], "--load has no argument 'samplr'"),
    (["train", "none.yaml"], "none.yaml is neither a file nor a shipped config"),
    (["train", "laptop", "--set", "x"], "is not key=value"),
    (["train", "laptop", "--dry-run", "--device", "q"], "--device is 'q'"),
    (["train", "laptop", "--dry-run", "--utilisation", "0"], "--utilisation is 0.0"),
    (["eval"], "no task given; pass --tasks"),
    (["eval", "--preset", "none"], "no preset is named 'none'"),
    (["eval", "./none", "--tasks", "toy_problems"], "none is no directory"),
    (["eval", "--tasks", "toy_problems", "--hooks", "mask_sink(1)"], "perhaps mask_sinks"),
    (
        ["eval", "--tasks", "toy_problems", "--record", "x", "--record-to", "o"],
        "--record 'x': there are channels, entropy",
    ),
    (["eval", "--tasks", "toy_problems", "--batch-size", "many"], "--batch-size is 'many'"),
    (["experiment", "none"], "no experiment is named 'none'"),
    (["experiment", "fig7-paths", "--models", "toy,./none"], "none is no directory"),
    (["experiment", "fig7-paths", "--set", "prompts"], "'prompts' is not a setting"),
    (
        ["experiment", "fig1-incoming", "--models", "toy", "--set", 'models=["toy-ar"]'],
        "--models and --set both name the models; give one",
    ),
    (["eval", "--tasks", "toy_problems", "--generation", "seed=4"], "give --seed in place of --generation"),
    (
        ["eval", "--tasks", "toy_problems", "--likelihood", "batch_size=4"],
        "give --batch-size in place of --likelihood",
    ),
]
USAGE = [
    ["report", "x", "--row", "-1"], ["paths", "x", "--hysteresis", "2"], ["train", "laptop",
    "--dry-run", "--devices", "0"], ["doctor", "--x"], ["nothing"],
]  # fmt: skip


@pytest.mark.long
def test_wrong_arguments_are_answered_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    script = f"""
for arguments in {[arguments for arguments, _ in WRONG]!r}:
    print(json.dumps([1, str(run(*arguments).exception)]))
for arguments in {USAGE!r}:
    print(json.dumps([run(*arguments).exit_code, ""]))
"""
    done = without_models(script, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, sentence), (_, shown) in zip(WRONG, lines, strict=False):
        assert sentence in shown, (arguments, shown)
    assert [code for code, _ in lines[len(WRONG) :]] == [2] * len(USAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]
