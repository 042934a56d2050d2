"""The runner: nothing lost, nothing twice, nothing mixed, whatever happens in between."""

import errno
import json
import math
import os
import random
import runpy
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

import dlm_lens as dl
from dlm_lens.experiments import (
    Bench,
    Experiment,
    Rendering,
    Table,
    list_experiments,
    read_results,
    render_experiment,
    run_experiment,
)
from dlm_lens.experiments.cost_estimate import NetworkCost
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.intervals import paired_difference, ratio_over_prompts, wilson
from dlm_lens.experiments.results import Record, ResultsFile
from dlm_lens.files.atomic_writes import DiskFullError
from dlm_lens.option_values import read_setting
from dlm_lens.testing import tiny
from dlm_lens.training import ModelSettings, NextToken, TrainingSettings, plan
from tests.files.damage import damage
from tests.files.kills import kill_when

SCRIPTS = sorted((Path(__file__).parents[2] / "experiments").glob("[ado]*/*.py"))


def squares(pause: float = 0.0) -> Experiment:
    def run(item, settings, bench):
        time.sleep(pause)
        return {"square": item["number"] ** 2 * settings["factor"]}

    def render(results):
        rows = [[str(record.item["number"]), str(record.value["square"])] for record in results.records]
        return Rendering([Table("squares", ["number", "square"], rows)])

    settings = {"count": 12, "factor": 1}
    return Experiment(
        name="squares", shows="arithmetic", title="squares", metric="number", small=settings, full=settings,
        items=lambda given: [{"number": n} for n in range(given["count"])], run=run, render=render,
        grows=("count",),
    )  # fmt: skip


def config_of_squares():
    """As `run_experiment(squares(), ..., small=True)` has it."""
    return {**squares().config(True), "dtype": None}


def test_items_are_kept_and_rendered_in_order(tmp_path: Path) -> None:
    results = run_experiment(squares(), tmp_path, settings={"factor": 3})
    assert [record.value["square"] for record in results.records] == [3 * n * n for n in range(12)]
    page = render_experiment(squares(), tmp_path).read_text()
    assert "| 11 | 363 |" in page
    assert "factor=3" in page
    assert results.sessions[0]["torch"]


def test_a_picture_that_has_no_room_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(results: Any) -> Rendering:
        return Rendering([], {"line": Figure(figsize=(1, 1))})

    drawn = replace(squares(), render=draw)
    run_experiment(drawn, tmp_path)
    render_experiment(drawn, tmp_path)
    picture = tmp_path / "squares-line.png"
    before = picture.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("dlm_lens.files.atomic_writes.os.fsync", full)
    with pytest.raises(DiskFullError, match=r"squares-line\.png could not be written"):
        render_experiment(drawn, tmp_path)
    assert picture.read_bytes() == before


def test_a_second_call_computes_nothing(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path)
    before = [line for line in (tmp_path / "results-00000.jsonl").read_text().splitlines() if '"item"' in line]
    run_experiment(squares(), tmp_path)
    after = [line for line in (tmp_path / "results-00000.jsonl").read_text().splitlines() if '"item"' in line]
    assert before == after


def test_another_config_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path)
    with pytest.raises(ValueError, match=r"with settings.factor=1, and this run has settings.factor=2"):
        run_experiment(squares(), tmp_path, settings={"factor": 2})
    with pytest.raises(ValueError, match="no setting 'colour'"):
        run_experiment(squares(), tmp_path, settings={"colour": 2})


def test_a_dtype_of_torch_is_kept_by_its_name(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path, loading={"dtype": torch.bfloat16})
    assert run_experiment(squares(), tmp_path, loading={"dtype": "bfloat16"}).config["dtype"] == "bfloat16"


def test_results_of_models_that_were_loaded_otherwise_are_not_mixed(tmp_path: Path) -> None:
    """Only the dtype was compared: items of two samplers or mask tokens could stand in one table."""
    run_experiment(squares(), tmp_path, loading={"mask_token_id": 5, "device_map": "cpu"})
    found = run_experiment(squares(), tmp_path, loading={"mask_token_id": 5, "device_map": None})
    assert found.config["load"] == {"mask_token_id": 5}
    with pytest.raises(ValueError, match=r"with load\.mask_token_id=5, and this run has load\.mask_token_id=6"):
        run_experiment(squares(), tmp_path, loading={"mask_token_id": 6})
    with pytest.raises(ValueError, match=r"with load=.*'mask_token_id': 5.*, and this run has load=None"):
        run_experiment(squares(), tmp_path)


def test_a_torn_last_line_is_computed_again(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path)
    path = tmp_path / "results-00000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rstrip().rfind(b"\n") + 20])
    assert len(read_results(tmp_path).records) == 11
    results = run_experiment(squares(), tmp_path)
    assert [record.value["square"] for record in results.records] == [n * n for n in range(12)]
    assert len(path.read_text().splitlines()) == len({*path.read_text().splitlines()}) + 1  # two equal sessions


def test_a_broken_line_in_the_middle_is_told(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path)
    path = tmp_path / "results-00000.jsonl"
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:10]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"line 6 is damaged \(Expecting.*choose another --out"):
        run_experiment(squares(), tmp_path)


def test_processes_share_the_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0):
        monkeypatch.setenv("RANK", str(rank))
        found = run_experiment(squares(), tmp_path)
    assert found.missing == 4
    assert "4 of 12 items are missing" in render_experiment(squares(), tmp_path).read_text()
    # The rest on a single process: a world of another size takes over.
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    found = run_experiment(squares(), tmp_path)
    assert [record.item["number"] for record in found.records] == list(range(12))
    per_file = {path.name: path.read_text().count('"item"') for path in sorted(tmp_path.glob("*.jsonl"))}
    assert per_file == {"results-00000.jsonl": 8, "results-00002.jsonl": 4}


def test_a_run_grows_without_computing_anything_twice(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path, settings={"count": 3})
    before = (tmp_path / "results-00000.jsonl").read_bytes()
    grown = run_experiment(squares(), tmp_path, settings={"count": 5})
    assert [record.value["square"] for record in grown.records] == [0, 1, 4, 9, 16]
    assert (grown.missing, grown.settings["count"]) == (0, 5)
    after = (tmp_path / "results-00000.jsonl").read_bytes()
    assert after.startswith(before)
    assert after[len(before) :].count(b'"item"') == 2
    assert run_experiment(squares(), tmp_path, settings={"count": 5}).missing == 0
    assert (tmp_path / "results-00000.jsonl").read_bytes().count(b'"item"') == 5
    with pytest.raises(ValueError, match=r"count=5, and this run has settings.count=3; .* or count=5 or more"):
        run_experiment(squares(), tmp_path, settings={"count": 3})
    with pytest.raises(ValueError, match=r"factor=1, and this run has settings.factor=2; .* or the same settings"):
        run_experiment(squares(), tmp_path, settings={"count": 7, "factor": 2})
    assert read_results(tmp_path).settings["count"] == 5


def test_processes_grow_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for count in (2, 5):
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            found = run_experiment(squares(), tmp_path, settings={"count": count})
        assert [record.item["number"] for record in found.records] == list(range(count))


def test_two_processes_never_write_one_file(tmp_path: Path) -> None:
    with ResultsFile(tmp_path, {"a": 1}, {}), pytest.raises(ValueError, match="another process writes"):
        ResultsFile(tmp_path, {"a": 1}, {})


SLOW = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.experiments.test_runner import squares
from dlm_lens.experiments import run_experiment
run_experiment(squares(0.3), Path({out!r}))
"""


@pytest.mark.long
def test_a_run_alone_beside_a_process_of_an_unfinished_torchrun(tmp_path: Path) -> None:
    # Of two processes the first was killed, the second still computes: now the same command on its own.
    script = SLOW.format(root=str(Path(__file__).parents[2]), out=str(tmp_path))
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, env=environment) as process:
        path = tmp_path / "results-00001.jsonl"
        while not path.exists() or '"item"' not in path.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(
            ValueError, match=r"another process writes .*results-00001.jsonl in a run of 2 processes"
        ):
            run_experiment(squares(), tmp_path)
        assert process.poll() is None
        process.wait()
    found = run_experiment(squares(), tmp_path)
    assert [record.value["square"] for record in found.records] == [n * n for n in range(12)]
    assert path.read_text().count('"item"') == 6


def test_an_item_that_two_runs_computed_counts_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        with ResultsFile(tmp_path, config_of_squares(), {"world_size": 1}, rank) as file:
            file.append(Record({"number": 3}, {"square": 9}, 0.1 * rank))
    found = run_experiment(squares(), tmp_path, small=True)
    assert [record.item["number"] for record in found.records] == list(range(12))
    assert len(read_results(tmp_path).records) == 12


def test_processes_of_one_run_start_beside_each_other(tmp_path: Path) -> None:
    two = {"world_size": 2}
    with (
        ResultsFile(tmp_path, {"a": 1}, two, 0),
        ResultsFile(tmp_path, {"a": 1}, two, 1),
        pytest.raises(ValueError, match="in a run of 2 processes, and this run has 3"),
    ):
        ResultsFile(tmp_path, {"a": 1}, {"world_size": 3}, 2)
    with ResultsFile(tmp_path, {"a": 1}, {"world_size": 3}, 2):
        pass


def damaged_results(kept: Path, work: Path, cases: int, seed: int) -> dict[str, int]:
    """Read damaged directories: told in a sentence, or every record that is read is one that was written."""
    wanted = {record.item["number"]: record for record in read_results(kept).records}
    draw, counts, wrong = random.Random(seed), Counter(), []
    for case in range(cases):
        path = work / f"case{case}"
        shutil.copytree(kept, path)
        how = damage(path, draw)
        try:
            found = read_results(path)
            same = all(wanted[record.item["number"]] == record for record in found.records)
            same = same and found.config == config_of_squares()
            counts["read" if same else "other"] += 1
            wrong += [] if same else [how]
        except (ValueError, FileNotFoundError) as error:
            counts["told"] += 1
            wrong += [] if str(path) in str(error) and "\n" not in str(error) else [f"{how}: {error}"]
        except Exception as error:
            wrong.append(f"{how}: {type(error).__name__} {error}")
        shutil.rmtree(path)
    assert not wrong, wrong[:10]
    return counts


@pytest.mark.parametrize("cases", [60, pytest.param(1500, marks=pytest.mark.long)])
def test_damaged_results_are_told_or_read_right(
    cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        run_experiment(squares(), tmp_path / "kept", small=True)
    with ResultsFile(tmp_path / "kept", config_of_squares(), {"world_size": 2}) as file:
        file.note_weights("m", "abc")
    counts = damaged_results(tmp_path / "kept", tmp_path, cases, seed=5)
    assert counts["told"] > cases / 2
    assert counts["read"] > 0


def test_results_of_earlier_versions_are_read(tmp_path: Path) -> None:
    run_experiment(squares(), tmp_path, small=True)
    path = tmp_path / "results-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("checksum") for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-2]))
    found = run_experiment(squares(), tmp_path, small=True)
    assert [record.value["square"] for record in found.records] == [n * n for n in range(12)]
    # What was written with a checksum is not read without.
    data = path.read_text()
    path.write_text(data.replace('"square": 121', '"square": 122'))
    with pytest.raises(ValueError, match=r"line 15 is damaged \(its checksum is another\)"):
        read_results(tmp_path)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with ResultsFile(tmp_path, {"a": 1}, {}) as file:
        file.note_weights("m", "abc")
        file.append(Record({"n": 1}, {"v": 2.5}, 0.1))
    with ResultsFile(tmp_path, {"a": 1}, {}) as file:
        file.note_weights("m", "abc")
        with pytest.raises(ValueError, match="the weights abc, and the weights are now abd"):
            file.note_weights("m", "abd")


@pytest.mark.long
def test_kill_9_loses_and_repeats_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = out / "results-00000.jsonl"
    for wanted in (2, 6):
        kill_when(
            lambda wanted=wanted: path.exists() and path.read_text().count('"item"') >= wanted,
            lambda: run_experiment(squares(0.05), out),
        )
    kept = [json.loads(line)["item"]["number"] for line in path.read_text().splitlines() if '"item"' in line]
    assert kept == list(range(len(kept)))
    assert 6 <= len(kept) < 12
    found = run_experiment(squares(), out)
    numbers = Counter(record.item["number"] for record in found.records)
    assert numbers == Counter(range(12))
    assert len(found.sessions) == 3


def test_the_bench_holds_one_model_and_tells_its_weights() -> None:
    told = []
    bench = Bench(loaded=lambda name, digest, causal: told.append((name, digest, causal)))
    model = bench.model("toy")
    assert bench.model("toy") is model
    calls = []
    for _ in range(2):
        bench.once("key", lambda: calls.append(1))
    assert len(calls) == 1
    bench.model("toy-ar")
    bench.once("key", lambda: calls.append(1))
    assert len(calls) == 2, "what was computed for one model is not another's"
    assert [(name, causal) for name, _, causal in told] == [("toy", False), ("toy-ar", True)]
    assert told[0][1] != told[1][1]


def test_results_know_which_models_are_ar_whatever_their_names(tmp_path: Path) -> None:
    with ResultsFile(tmp_path, squares().config(True), {}) as file:
        file.note_weights("qwen", "abc", causal=True)
        file.note_weights("sink-llama", "abd", causal=False)
        file.append(Record({"number": 0}, {"square": 0}, 0.0))
    results = read_results(tmp_path)
    assert results.is_causal("qwen")
    assert not results.is_causal("sink-llama")
    # DLMs that an experiment trains are noted by the directories of their weights.
    for trained in ("toy-blocks", "toy-uniform", "converted-plain", "smollm2-converted"):
        assert not results.is_causal(trained)
    for unknown in ("toy-ar", "runs/diffullama", "meta-llama/Llama-3.1-8B"):
        with pytest.raises(ValueError, match=f"do not record whether {unknown} is autoregressive"):
            results.is_causal(unknown)


def test_settings_are_literals() -> None:
    assert read_setting("columns=[1, 5]") == ("columns", [1, 5])
    assert read_setting("task=gsm8k") == ("task", "gsm8k")
    assert read_setting("task=__import__('os')") == ("task", "__import__('os')")
    with pytest.raises(ValueError, match="not a setting"):
        read_setting("prompts")


def test_wilson_solves_its_equation() -> None:
    # The ends p of the interval are where |p_hat - p| = z sqrt(p (1 - p) / n).
    found = wilson([True] * 7 + [False] * 3)
    for end in (found.low, found.high):
        assert abs(0.7 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 10), rel=1e-9)
    assert wilson([True] * 4).high == 1.0
    assert wilson([False] * 4).low == 0.0


def test_equal_differences_leave_room_for_prompts_that_were_not_asked() -> None:
    # Of 16 prompts none differs: by Wilson's bound up to z^2 / (16 + z^2) = 19.4% of all prompts may.
    same = paired_difference([True] * 16, [True] * 16, bounds=(-1, 1))
    assert (same.value, same.low, same.high) == pytest.approx((0, -0.19361, 0.19361), abs=1e-5)
    assert same.high == pytest.approx(wilson([False] * 16).high)
    lost = paired_difference([False] * 16, [True] * 16, bounds=(-1, 1))
    assert (lost.value, lost.low, lost.high) == pytest.approx((-1, -1, -1 + 2 * 0.19361), abs=1e-5)
    # Changes, -1 to 1, can differ by two.
    changes = paired_difference([0, 0, 0, 0], [-1, -1, -1, -1], bounds=(-2, 2))
    assert changes.low == pytest.approx(1 - 3 * wilson([False] * 4).high)
    # Of other numbers nobody knows the range.
    assert paired_difference([2.5, 2.5], [1.0, 1.0], bounds=None)[1:3] == (1.5, 1.5)


def test_bootstraps_draw_prompts() -> None:
    # Two prompts: a draw has both, or one of them twice, so that the percentile interval spans both, widened by
    # t(1) / z sqrt(2).
    found, wider = ratio_over_prompts([1.5, 6.5], [10, 10], bounds=None), 12.706205 / 1.959964 * math.sqrt(2)
    assert (found.value, found.low, found.high) == pytest.approx((0.4, 0.4 - wider / 4, 0.4 + wider / 4), rel=1e-6)
    # One and six cases of ten are a share.
    assert ratio_over_prompts([1, 6], [10, 10], bounds=(0, 1))[:3] == pytest.approx((0.35, 0.0, 1.0))
    assert math.isnan(ratio_over_prompts([1], [2], bounds=(0, 1)).low)
    assert paired_difference([1, 1, 0], [0, 1, 0], bounds=(-1, 1)).value == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference([1], [1, 2], bounds=(-1, 1))


@pytest.mark.parametrize("family", ["llada", "llada_moe"])
def test_the_flops_of_an_experiment_are_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    """Untied embeddings, of which one is looked up; and a mixture, of whose 8 experts a position uses 2."""
    model = tiny(family)
    model.config.save_pretrained(tmp_path)
    model.config._experts_implementation = "eager"  # torch does not count grouped products
    model.set_attn_implementation("hooked")  # nor the fused kernel of a CPU
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(50).reshape(5, 10)).logits.sum().backward()
    network, cost = NetworkCost.of(str(tmp_path)), Cost(7, 5, 10, "m", backward=True)
    assert network.flops(cost) == pytest.approx(7 * counter.get_total_flops(), rel=0.01)
    # 3 passes of the head, of 2 d_model d_vocab each, on the 50 positions.
    assert network.flops(cost) - network.flops(replace(cost, predicted=0.0)) == 7 * 3 * 50 * 2 * 32 * 64


@pytest.mark.parametrize("start", ["smdm-472M", "smdm-1028M", "new:smollm2"])
def test_networks_with_new_weights_cost_what_their_training_does(start: str) -> None:
    settings = TrainingSettings(model=ModelSettings(start=start), objective=NextToken(), steps=3)
    network, found = NetworkCost.of(start), plan(settings)
    assert network.forward.parameters == found.parameters
    rows = 3 * settings.batch_size
    assert network.flops(Cost(1, rows, settings.data.length, start, backward=True)) == pytest.approx(found.flops)


def test_a_checkpoint_whose_config_names_no_type_is_counted_as_its_network() -> None:
    original, ids = Path(__file__).parents[1] / "golden" / "sedd", torch.zeros(1, 10, dtype=torch.long)
    model = dl.load(str(original), attn_implementation="hooked")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids)
    found = NetworkCost.of(str(original)).flops(Cost(1, 1, 10, "m"))
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("name", [one.name for one in list_experiments()])
def test_every_experiment_is_a_script_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    monkeypatch.setattr(
        "dlm_lens.experiments.experiment.run_script", lambda experiment: run.append(experiment.name)
    )
    (file,) = [path for path in SCRIPTS if f'"{name}"' in path.read_text() and "run_script" in path.read_text()]
    runpy.run_path(str(file), run_name="__main__")
    assert run == [name]


def test_a_script_takes_the_options_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = [path for path in SCRIPTS if path.name == "fig7_paths.py"]
    monkeypatch.setattr(sys, "argv", [str(file), "--small", "--plan", "--set", "prompts=1", "--models", "toy"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(file), run_name="__main__")
    assert left.value.code in (0, None)
    assert capsys.readouterr().out.startswith("fig7-paths (small): 1 items")


def test_a_start_without_an_item_does_not_bind_the_directory(tmp_path: Path) -> None:
    def fails(item, settings, bench):
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        run_experiment(replace(squares(), run=fails), tmp_path, settings={"factor": 5})
    results = run_experiment(squares(), tmp_path, settings={"factor": 2})
    assert [record.value["square"] for record in results.records] == [2 * n * n for n in range(12)]
    assert results.config["settings"]["factor"] == 2


def test_processes_that_ended_without_an_item_do_not_bind_the_directory(tmp_path: Path) -> None:
    """The file of another process of that start had its settings, and the next start was refused."""
    for rank in (0, 1):
        with ResultsFile(tmp_path, {"a": 1}, {"world_size": 2}, rank) as file:
            file.note_weights("toy", "1234")
    with ResultsFile(tmp_path, {"a": 2}, {"world_size": 2}, 0) as first:
        assert not first.weights
        with ResultsFile(tmp_path, {"a": 2}, {"world_size": 2}, 1) as second:  # the file of a running process stays
            second.append(Record({"number": 0}, {"square": 0}, 0.1))
    assert read_results(tmp_path).config == {"a": 2}
    with pytest.raises(ValueError, match="holds results with a=2, and this run has a=1"):
        ResultsFile(tmp_path, {"a": 1}, {"world_size": 2}, 0)


def test_without_locks_the_file_of_another_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_lens.experiments.results.lock", lambda file, **_: False)  # a network disk, Windows
    with ResultsFile(tmp_path, {"a": 1}, {"world_size": 2}, 1) as other:
        with pytest.raises(ValueError, match="holds results with a=1, and this run has a=2"):
            ResultsFile(tmp_path, {"a": 2}, {"world_size": 2}, 0)
        other.append(Record({"number": 1}, {"square": 1}, 0.1))
    assert [record.item for record in read_results(tmp_path).records] == [{"number": 1}]


@pytest.mark.parametrize("wrong", ["two", [3], True, 2.5])
def test_a_setting_of_another_kind_is_refused(wrong: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^factor is .*; it must be a whole number, such as factor=1$"):
        run_experiment(squares(), tmp_path, settings={"factor": wrong})
    assert not list(tmp_path.iterdir())


def test_settings_without_a_kind_and_whole_shares_are_taken() -> None:
    settings = {"free": None, "share": 0.5, "names": ["a"]}
    free = replace(squares(), small=settings, full={**settings, "share": 1.5}, grows=())
    given = {"free": "text", "share": 2, "names": ["b", "c"]}
    assert free.config(True, (), given)["settings"] == given
    with pytest.raises(ValueError, match="names is 'b'; it must be a list"):
        free.config(True, (), {"names": "b"})
