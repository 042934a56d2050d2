"""`dlm-lens eval` on the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dlm_lens.cli import app as cli
from dlm_lens.cli.evaluate import _settings, read_pairs
from dlm_lens.evaluation import Evaluation, Score, find_preset, list_presets
from dlm_lens.recording import RecordingSet


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["eval", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.long
def test_it_prints_a_table_and_keeps_everything(tmp_path: Path) -> None:
    asked = ["toy", "--tasks", "toy_arithmetic,toy_choice", "--limit", "3", "--batch-size", "2"]
    asked += ["--hooks", "mask_positions(5)", "--likelihood", "method=chain_rule", "--out", str(tmp_path / "run")]
    printed = run(*asked)
    assert "| toy_arithmetic | exact_match |" in printed
    assert printed.count("| 3 |") == 2
    kept = json.loads((tmp_path / "run/results.json").read_text())
    assert kept["settings"]["hooks"] == ["mask_positions(5)"]
    assert kept["settings"]["likelihood"] == {"method": "chain_rule"}
    assert [one["n"] for one in kept["scores"]] == [3, 3]
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert [one["task"] for one in samples] == ["toy_arithmetic"] * 3 + ["toy_choice"] * 3
    assert len((tmp_path / "run/responses.jsonl").read_text().splitlines()) == 1 + 3 + 12
    scores = json.loads(run(*asked, "--json"))["scores"]
    assert [one["task"] for one in scores] == ["toy_arithmetic", "toy_choice"]
    assert [one["value"] for one in scores] == [one["value"] for one in kept["scores"]]
    # The same command again is answered from the file.
    assert run(*asked) == printed
    with pytest.raises(ValueError, match="holds answers with seed=0"):
        run(*asked, "--seed", "1")


def test_it_prints_the_differences_from_a_saved_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(values: list[float]) -> Evaluation:
        lines = [
            {"task": "t", "doc_id": n, "doc_hash": f"h{n}", "filter": "none", "acc": one}
            for n, one in enumerate(values)
        ]
        score = Score("t", "acc", "none", sum(values) / len(values), 0.1, len(values))
        return Evaluation((score,), {"samples": {"t": lines}, "config": {}})

    monkeypatch.setattr("dlm_lens.evaluation.evaluate", lambda *_, **__: made([1.0, 0.0, 0.0, 0.0]))
    made([1.0, 1.0, 1.0, 0.0]).save(tmp_path / "plain")
    given = ["toy", "--tasks", "t", "--against", str(tmp_path / "plain")]
    printed = run(*given)
    assert "| t | acc |" in printed
    # Differences 0, 1, 1, 0: s / sqrt(n) = sqrt(1/3) / 2.
    assert printed.splitlines()[-1].split() == ["t", "acc", "none", "0.25", "0.75", "-0.5", "0.2887", "4"]
    (line,) = json.loads(run(*given, "--json"))["differences"]
    assert (line["difference"], round(line["standard_error"], 4)) == (-0.5, 0.2887)
    monkeypatch.setattr("dlm_lens.evaluation.evaluate", pytest.fail)
    with pytest.raises(ValueError, match=r"nowhere/results\.json does not exist; give the directory of a saved"):
        run("toy", "--tasks", "t", "--against", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"--against and --out are both .*plain, whose results would be replaced"):
        run(*given, "--out", str(tmp_path / "plain"))


@pytest.mark.long
def test_json_is_all_that_is_printed_also_where_texts_are_impossible(tmp_path: Path) -> None:
    # Errors of perplexity are bootstrapped; no text is the greedy completion, so that word_perplexity is infinite.
    asked = ["toy", "--tasks", "toy_last_word,toy_text", "--limit", "2", "--likelihood", "method=greedy_completion"]
    found = json.loads(run(*asked, "--json", "--out", str(tmp_path)), parse_constant=pytest.fail)
    values = {one["metric"]: one["value"] for one in found["scores"]}
    assert values == {"perplexity": 1.0, "acc": 1.0, "word_perplexity": "inf"}
    assert (
        json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["scores"] == found["scores"]
    )
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [one["resps"] for one in samples] == [[[[0.0, True]]]] * 2 + [[["-inf"]]] * 2


@pytest.mark.long
def test_it_records_every_request(tmp_path: Path) -> None:
    asked = ["toy", "--tasks", "toy_lists", "--limit", "2", "--generation", "steps=4,block_length=32"]
    asked += [
        "--record",
        "received:all+masked,top-keys:3",
        "--record-to",
        str(tmp_path / "recordings"),
    ]
    asked += ["--record-layers", "0,-1", "--record-storage", "float16"]
    printed = run(*asked)
    first, second = RecordingSet(tmp_path / "recordings/toy_lists")
    assert (first.rows, second.rows, first.layers) == ((0,), (1,), (0, 3))
    assert {*first.specs} == {"received", "received_masked", "top_keys", "top_scores"}
    assert first.arrays["received"].dtype == torch.float16
    assert run(*asked) == printed
    for wrong, says in (
        (["--record", "received"], "need --record-to"),
        (["--record-layers", "0"], "need --record-to"),
        (
            ["--record", "recieved", "--record-to", str(tmp_path)],
            r"--record 'recieved' \(did you mean 'received'\?\): there are channels, entropy",
        ),
        (
            ["--record-layers", "x", "--record-to", str(tmp_path)],
            "--record-layers takes whole numbers separated by commas, got 'x'",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            run("--tasks", "toy_lists", *wrong)


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dlm_lens.cli",
        "eval",
        "toy",
        "--tasks",
        "toy_lists",
        "--hooks",
    ]
    done = subprocess.run([*command, "open('x')"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("dlm-lens: 'open' is no hook and no detector")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--tasks", "nosuch"], "no task is named 'nosuch'"),
        (["--batch-size", "0"], "it must be at least 1"),
        (["--max-length", "1"], "at least 2 positions"),
        (["--likelihood", "method=foo"], "method is 'foo'; it must be one of 'mc'"),
        (["--likelihood", "samples=abc"], "samples is 'abc'; it must be a whole number"),
        (["--likelihood", "samples=null"], "samples is None; it must be a whole number"),
        (["--generation", "temperature=hot"], "temperature is 'hot'; it must be a finite number"),
        (["--generation", "stop=no"], "stop is 'no'; it must be True or False"),
        (["--hooks", "at_steps(mask_positions(0), 3)"], "needs the steps of a run"),
    ],
)
def test_what_is_refused_leaves_no_directory(given: list[str], says: str, tmp_path: Path) -> None:
    to = ["--out", str(tmp_path / "new/out"), "--record-to", str(tmp_path / "new/recordings")]
    asked = ["toy", "--tasks", "toy_choice", "--limit", "1", *given, *to]
    with pytest.raises(ValueError, match=re.escape(says)):
        CliRunner().invoke(cli.app, ["eval", *asked], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_presets_are_listed_with_what_they_assume() -> None:
    printed = run("--presets")
    assert "one-token/table2/piqa\n  piqa: acc, a likelihood" in printed
    assert "method=chain_rule, cfg_scale=0.6" in printed
    assert "assumed: one step per token" in printed


def test_an_option_of_a_method_replaces_that_of_the_preset_alone() -> None:
    (name,) = [preset.name for preset in list_presets() if "dream" in preset.name and preset.task == "piqa"]
    plain = find_preset(name).settings()["likelihood"]
    found = _settings(name, {}, {"likelihood": read_pairs(['options={"eps": 0.01}', "samples=8"])})["likelihood"]
    assert plain.options["eps"] != 0.01
    assert len(plain.options) > 1
    assert found == {**vars(plain), "samples": 8, "options": {**plain.options, "eps": 0.01}}


def test_it_needs_a_task() -> None:
    with pytest.raises(ValueError, match="no task given"):
        run("toy")


@pytest.mark.parametrize("limit", ["2.7", "inf", "0"])
def test_a_limit_that_is_no_number_of_documents_is_refused(limit: str) -> None:
    result = CliRunner().invoke(cli.app, ["eval", "toy", "--tasks", "toy_lists", "--limit", limit])
    assert result.exit_code != 0
    assert f"limit is {float(limit)}; give a number of documents" in str(result.exception)


def test_settings_are_read_as_json_or_text() -> None:
    assert read_pairs(["samples=16,cfg_scale=0.5,method=mc", "is_greedy=False,strata=null"]) == {
        "samples": 16,
        "cfg_scale": 0.5,
        "method": "mc",
        "is_greedy": False,
        "strata": None,
    }
    nested = 'gen_length=8,options={"threshold": 0.9, "cache": "dual", "more": {"a": [1, 2]}},steps=4'
    assert read_pairs([nested]) == {
        "gen_length": 8,
        "options": {"threshold": 0.9, "cache": "dual", "more": {"a": [1, 2]}},
        "steps": 4,
    }
    for text in ("samples", 'options={"a": 1}, 2'):
        with pytest.raises(ValueError, match="write name=value"):
            read_pairs([text])


@pytest.mark.parametrize(
    ("option", "text", "example"),
    [("--likelihood", "samples", "samples=128"), ("--generation", "gen_length", "gen_length=256")],
)
def test_a_setting_without_a_value_is_answered_with_one_of_its_option(option: str, text: str, example: str) -> None:
    with pytest.raises(ValueError, match=f"write name=value, such as {example}"):
        CliRunner().invoke(cli.app, ["eval", "toy", option, text], catch_exceptions=False)


def test_the_command_line_starts_without_torch_and_harness() -> None:
    code = (
        "import sys, dlm_lens.cli.app\nprint([m for m in ('torch', 'lm_eval', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_without_the_harness_there_is_a_sentence() -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from dlm_lens.evaluation import evaluate\n"
        "try:\n    evaluate('toy', 'toy_lists')\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'dlm-lens[eval]'" in done.stdout


def test_the_results_are_saved_before_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("the output is closed")

    monkeypatch.setattr("dlm_lens.cli.evaluate._show", gone)
    given = ["toy", "--tasks", "toy_lists", "--limit", "1", "--generation", "gen_length=2"]
    with pytest.raises(RuntimeError, match="the output is closed"):
        run(*given, "--out", str(tmp_path))
    assert len(json.loads((tmp_path / "results.json").read_text())["scores"]) == 1
