"""Table 1's conditions, and what its account says of them, against runs and counts of another make."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

import dlm_lens as dl
from dlm_lens.experiments import Bench, find_experiment, run_experiment
from dlm_lens.experiments.attention_sinks import masking_findings, table1
from dlm_lens.experiments.attention_sinks.hidden_mass import HiddenMass
from dlm_lens.experiments.attention_sinks.masking_conditions import (
    BASE,
    CLASSES,
    VARIANTS,
    condition_cells,
    conditions,
)
from dlm_lens.experiments.intervals import wilson
from dlm_lens.experiments.results import Record, Results
from dlm_lens.hooks import mask_positions, mask_random, mask_sinks, mask_top_sinks, sink
from dlm_lens.testing import tiny
from tests.experiments.finished_runs import finished_run
from tests.preloaded import python

PROMPTS = [[3, 41, 7, 7, 19, 28, 55, 2, 33, 14, 9, 50], [12, 8, 44, 31, 5, 26, 17, 40, 22]]
RUN = {"gen_length": 8, "steps": 4}


@pytest.mark.parametrize(
    "hook",
    [mask_top_sinks(2), mask_sinks(dl.AboveMean(0.3), stage="after"), mask_top_sinks(2, source="clean"),
     mask_top_sinks(2, per="model", source="previous"), mask_random(like=mask_top_sinks(2), match="mass")],
    ids=repr,
)  # fmt: skip
def test_a_weighed_hook_acts_as_it_did_and_its_account_is_the_run_s(hook: Any) -> None:
    model = tiny("llada")
    weighed = HiddenMass(hook)
    plain, watched = (dl.denoise(model, PROMPTS, hooks=[one], **RUN) for one in (hook, weighed))
    assert watched.confidence.equal(plain.confidence)
    assert repr(weighed) == repr(hook)
    account = weighed.totals()
    assert account["hidden"] == pytest.approx(plain.settings["columns_hidden"][0], abs=1e-4)  # rounded
    assert account["learned"] == 0
    (mass,) = plain.settings["mass_hidden"]
    assert mass is None if hook.needs_clean_pass else account["mass"] == pytest.approx(mass, abs=1e-4)
    assert 0 < account["mass"] < 1


@torch.no_grad()
def test_the_mass_of_hidden_positions_is_that_of_the_plain_pattern() -> None:
    # Hidden in layer 0 only, whose pattern the mask does not change beforehand.
    model = tiny("llada")
    plain = dl.denoise(model, [PROMPTS[0]], **RUN)
    weighed = HiddenMass(dl.hooks.at_layers(dl.hooks.at_steps(mask_positions(3, 7), 0), 0))
    dl.denoise(model, [PROMPTS[0]], hooks=[weighed], **RUN)
    received = dl.received_over_steps(model, plain, relative=False).values[0, 0, 0]  # [head, key]
    assert weighed.totals()["mass"] == pytest.approx(float(received[:, [3, 7]].sum(-1).mean() / 20), abs=1e-4)
    assert weighed.totals()["hidden"] == 2


def test_learned_sinks_are_counted_among_the_hidden() -> None:
    model = tiny("sink_qwen", num_sinks=2, sink_placement="front")
    weighed = HiddenMass(mask_positions(sink(0), sink(1), 4))
    dl.denoise(model, PROMPTS, hooks=[weighed], **RUN)
    # Position 4 is content in both rows: the shorter one begins at 3.
    assert weighed.totals()["learned"] == 2
    assert weighed.totals()["hidden"] == 3
    control = HiddenMass(mask_random(like=mask_positions(sink(0), sink(1), 4), match="mass"))
    dl.denoise(model, PROMPTS, hooks=[control], **RUN)
    assert control.totals()["learned"] == 0
    assert control.totals()["hidden"] >= 2


def test_every_condition_is_the_hook_that_it_names() -> None:
    written = {
        "": "mask_sinks(TopK(k=5))",
        "random": "mask_random(like=mask_sinks(TopK(k=5)), seed=3)",
        "mass": "mask_random(like=mask_sinks(TopK(k=5)), seed=3, match='mass')",
        "eps": "mask_sinks(AboveMean(eps=2.5))",
        "layer": "mask_sinks(TopK(k=5), per='layer')",
        "model": "mask_sinks(TopK(k=5), per='model', source='previous')",
        "previous": "mask_sinks(TopK(k=5), source='previous')",
        "clean": "mask_sinks(TopK(k=5), source='clean')",
        "after": "mask_sinks(TopK(k=5), stage='after')",
        "raw": "mask_sinks(TopK(k=5), relative=False)",
        "raw-layer": "mask_sinks(TopK(k=5), per='layer', relative=False)",
        "first": "mask_positions(0, 1, 2, 3, 4)",
        "function": "mask_sinks(TopK(k=5), classes=('punctuation', 'special', 'mask', 'end of text'))",
        "content": "mask_sinks(TopK(k=5), classes=('digits', 'words'))",
    }
    assert set(written) == {"", *VARIANTS}
    bench = SimpleNamespace(once=lambda key, compute: 2.5)
    for variant, text in written.items():
        item = {"model": "toy", "columns": 5, **BASE, **VARIANTS.get(variant, {}), "seed": 3}
        assert repr(table1.mask_of(item, find_experiment("table1-masking").small, bench)) == text
    assert table1.mask_of({"columns": 0}, {}, bench) is None
    # A control matches what is hidden after the restriction to the classes.
    item = {"model": "toy", "columns": 1, **BASE, **VARIANTS["content"], **VARIANTS["mass"], "seed": 0}
    wanted = "mask_random(like=mask_sinks(TopK(k=1), classes=('digits', 'words')), match='mass')"
    assert repr(table1.mask_of(item, {}, bench)) == wanted


def test_prompts_share_a_run_where_padding_shifts_no_mask() -> None:
    model = dl.load("toy-ar")
    prompts = ["tom has 3 apples .", "tom has 3 apples . tom buys 4 more .", "sam has 5 pens .", "a ."]
    lengths = [len(model.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert lengths[0] == lengths[2]
    assert table1._together(model, prompts, mask_positions(0)) == [[0, 2], [1], [3]]
    assert table1._together(model, prompts, mask_positions(-1)) == [[0, 1, 2, 3]]
    assert table1._together(model, prompts, None) == [[0, 1, 2, 3]]
    # Each prompt is answered as alone: its own first position is hidden, not the padding.
    item = {"model": "toy-ar", "columns": 1, **BASE, **VARIANTS["first"], "seed": 0, "start": 0}
    settings = {**find_experiment("table1-masking").small, "prompts": 6, "batch": 6}
    together = table1.run(item, settings, Bench())["correct"]
    single = {**settings, "batch": 1}
    assert together == [table1.run({**item, "start": row}, single, Bench())["correct"][0] for row in range(6)]


def test_controls_stand_beside_every_number_of_columns() -> None:
    given = {"columns": [1, 5], "varied": [1], "variants": ["random", "mass", "clean", "layer", "function"]}
    found = [" ".join(condition_cells(condition)) for condition in conditions(given)]
    assert found == [
        "0 unmasked",
        "1 top k of every head, this pass, before the softmax",
        "5 top k of every head, this pass, before the softmax",
        "1 control: as many random columns",
        "5 control: as many random columns",
        "1 control: random columns of the same mass",
        "5 control: random columns of the same mass",
        "1 source clean",
        "1 per layer",
        "1 control of per layer: random columns of the same mass",
        "1 only function tokens",
        "1 control of only function tokens: as many random columns",
        "1 control of only function tokens: random columns of the same mass",
    ]
    everything = conditions({**given, "variants": list(VARIANTS)})
    assert len({tuple(one.items()) for one in everything}) == len(everything)
    # Items stored before there were classes keep their names.
    assert [one for one in everything if "classes" not in one] == conditions(
        {**given, "variants": [name for name in VARIANTS if name not in CLASSES]}
    )
    with pytest.raises(ValueError, match="unknown variant 'colour'; choose from random, mass"):
        conditions({**given, "variants": ["colour"]})


def results_of(correct: dict[tuple[str, int, str], list[bool]]) -> Results:
    """Results with these answers, by model, columns and choice."""
    records = [
        Record({"model": model, "columns": columns, **BASE, "choose": choose}, {"correct": answers}, 0.0)
        for (model, columns, choose), answers in correct.items()
    ]
    settings = {"columns": [1], "variants": ["mass"], "varied": [1], "task": "t"}
    return finished_run({"settings": settings}, records)


def test_differences_are_paired_by_prompt() -> None:
    found = results_of({
        ("toy", 0, "top"): [True, True, True, False],
        ("toy", 1, "top"): [True, False, True, False],
        ("toy", 1, "mass"): [True, True, False, True],
        ("toy-ar", 0, "top"): [True, True, False, True],
        ("toy-ar", 1, "top"): [False, False, False, True],
    })  # fmt: skip
    assert masking_findings.change(found, "toy", 1).value == -0.25
    # Prompt by prompt: 0, -1, 1, -1.
    assert masking_findings.against_control(found, "toy", 1, "mass").value == -0.25
    # (0, -1, 0, 0) - (-1, -1, 0, 0)
    beside = masking_findings.change_beside(found, "toy", "toy-ar")
    assert beside.value == 0.25
    # Draws of four differences 1, 0, 0, 0 go from none of the 1 to two or three of it; widened for four prompts.
    wider = stats.t.ppf(0.975, 3) / stats.norm.ppf(0.975) * (4 / 3) ** 0.5
    assert beside.low == pytest.approx(0.25 - wider * 0.25, rel=1e-6)
    assert 0.25 + wider * 0.25 <= beside.high <= 0.25 + wider * 0.5 + 1e-6
    told = {finding.here: finding for finding in masking_findings.findings(found)}
    text = next(here for here in told if here.startswith("one sink per head"))
    assert told[text].verdict == "undecided"
    # The control: (0, 0, -1, 1) - (-, ...): toy-ar has none, so that no null is told.
    assert told[text].null == ""


def draws(columns: int, start: int, seed: int, correct: list[bool]) -> Record:
    item = {"model": "toy", "columns": columns, **BASE, "seed": seed, "start": start}
    return Record(item, {"correct": correct, "hidden": float(start), "mass": 0.0, "learned": 0.0}, 0.0)


def test_draws_of_one_prompt_are_one_case() -> None:
    records = [draws(0, 0, seed, [True, True]) for seed in range(8)]
    records += [draws(1, 0, seed, [True, seed < 4]) for seed in range(8)]
    found = finished_run({"settings": {"columns": [1], "variants": [], "varied": [1], "task": "t"}}, records)
    # Two prompts, not 16 cases: all right, all right half of the time.
    assert masking_findings.accuracy(found, "toy", 0) == wilson([True, True])
    assert masking_findings.accuracy(found, "toy", 1)[:4] == (0.75, 0.0, 1.0, 2)  # nothing is known of two
    lost = masking_findings.change(found, "toy", 1)
    assert lost[:4] == (-0.25, -1.0, 1.0, 2)
    assert [row[-1] for row in table1.rows_of(found, "toy", conditions(found.settings))] == ["2", "2"]


def test_an_unfinished_run_pairs_the_prompts_that_both_conditions_have() -> None:
    # As two processes leave it: the conditions have one item in common, and as many items each.
    records = [draws(0, 0, 0, [True, True]), draws(0, 4, 0, [True]),
               draws(1, 2, 0, [False, False]), draws(1, 4, 0, [False])]  # fmt: skip
    settings = {"columns": [1], "variants": [], "varied": [1], "task": "t", "models": ["toy"]}
    found = finished_run({"settings": settings}, records, missing=3)
    lost = masking_findings.change(found, "toy", 1)
    assert (lost.value, lost.n) == (-1, 1)
    told = list(masking_findings.findings(found))
    assert told
    assert {finding.verdict for finding in told} == {"undecided"}
    assert table1.render(found).tables[0].rows[1][-2:] == ["-1.00", "3"]
    # Items count by their prompts: (2 * 2 + 4 * 1) / 3 columns.
    assert table1.mean(found, "hidden", "toy", {"columns": 1, **BASE}) == pytest.approx(8 / 3)


def test_less_than_half_left_is_of_what_there_was() -> None:
    # The baseline answers 40% unmasked and 30% masked: three quarters are left, though less than half are right.
    plain = [place < 40 for place in range(100)]
    found = results_of({("toy-ar", 0, "top"): plain, ("toy-ar", 1, "top"): [place < 30 for place in range(100)]})
    assert masking_findings.part_kept(found, "toy-ar", 1).value == 0.75
    (finding,) = (one for one in masking_findings.findings(found) if "destroys" in one.paper)
    assert finding.verdict == "disagrees"
    assert finding.p is not None
    assert finding.p < 2e-3


def test_ten_sinks_agree_only_within_the_paper_s_range() -> None:
    for lost, verdict in ((10, "agrees"), (24, "undecided"), (60, "disagrees")):
        found = results_of({
            ("toy", 0, "top"): [True] * 100, ("toy", 10, "top"): [place >= lost for place in range(100)],
            ("toy", 10, "mass"): [True] * 100,
        })  # fmt: skip
        (finding,) = (one for one in masking_findings.findings(found) if "ten sinks" in one.paper)
        assert finding.verdict == verdict


def losing(count: int, of: int = 100) -> list[bool]:
    """Answers of which the first `count` are wrong."""
    return [place >= count for place in range(of)]


@pytest.mark.parametrize(
    ("lost", "as_many", "mass", "verdict"),
    [
        (1, 0, 0, "agrees"),  # a loss below 0.05, whatever the controls lose
        (40, 0, 2, "disagrees"),
        (40, 0, 38, "undecided"),  # as much attention hidden elsewhere costs as much
        (40, 60, 0, "undecided"),
        (40, None, None, "undecided"),  # no null, no effect of sinks
        (6, 0, 0, "undecided"),
    ],
)
def test_the_cost_of_a_sink_is_judged_beside_its_controls(
    lost: int, as_many: int | None, mass: int | None, verdict: str
) -> None:
    controls = {
        ("toy", 1, name): losing(count)
        for name, count in (("random", as_many), ("mass", mass))
        if count is not None
    }
    plain = {("toy", 0, "top"): losing(0), ("toy", 1, "top"): losing(lost)}
    (finding,) = masking_findings.findings(results_of({**plain, **controls}))
    assert finding.verdict == verdict
    if as_many is not None:
        assert finding.null.startswith(f"as many random columns: -{as_many / 100:.2f} [".replace("-0.00", "0.00"))
    if (lost, mass) == (40, 38):
        # The larger of both p-values: 2 prompts of 100 differ from the control.
        assert finding.p is not None
        assert finding.p > 0.05


def test_a_baseline_is_destroyed_only_by_more_than_a_control_takes() -> None:
    for mass, verdict in ((10, "agrees"), (90, "undecided")):
        found = results_of({
            ("toy-ar", 0, "top"): losing(0), ("toy-ar", 1, "top"): losing(90), ("toy-ar", 1, "mass"): losing(mass),
        })  # fmt: skip
        (finding,) = masking_findings.findings(found)
        assert finding.verdict == verdict


def test_a_dlm_is_more_robust_only_beyond_what_controls_show() -> None:
    for theirs, verdict in ((0, "agrees"), (88, "undecided")):
        found = results_of({
            ("toy", 0, "top"): losing(0), ("toy", 1, "top"): losing(5), ("toy", 1, "mass"): losing(5),
            ("toy-ar", 0, "top"): losing(0), ("toy-ar", 1, "top"): losing(90),
            ("toy-ar", 1, "mass"): losing(theirs),
        })  # fmt: skip
        (finding,) = (one for one in masking_findings.findings(found) if "less than an AR" in one.paper)
        assert finding.verdict == verdict
        assert f"difference {(theirs - 5) / 100:.2f} [" in finding.null


def class_record(name: str | None, choose: str, correct: list[bool], network: int = 0, **value: float) -> Record:
    item = {"model": "toy", "network": network, "columns": int(name != "plain"), **BASE, "choose": choose}
    item["classes"] = None if name == "plain" else name
    if item["classes"] is None:
        del item["classes"]
    return Record(item, {"correct": correct, "hidden": 1.0, "mass": 0.1, "learned": 0.0, "maps": 1.0, **value}, 0.0)


def test_classes_have_rows_verdicts_and_controls_of_their_own() -> None:
    records = [
        class_record("plain", "top", losing(0)), class_record(None, "top", losing(48)),
        class_record("function", "top", losing(1), hidden=0.57, maps=0.57),
        class_record("function", "mass", losing(0), hidden=3.7, mass=0.05),
        class_record("content", "top", losing(15), hidden=0.42, maps=0.42),
        class_record("content", "mass", losing(3), hidden=2.6, mass=0.03),
    ]  # fmt: skip
    settings = {"columns": [1], "variants": ["mass", "function", "content"], "varied": [1], "task": "t"}
    found = finished_run({"settings": {**settings, "models": ["toy"]}}, records, missing=1)
    shown = table1.render(found)
    rows = {row[2]: row for row in shown.tables[0].rows}
    assert rows["only function tokens"][3:] == ["0.57", "0.57", "0.100", "0.99 [0.95, 1.00]", "-0.01 [-0.03, 0.00]",
                                                "100"]  # fmt: skip
    assert rows["only content tokens"][3] == "0.42"
    assert rows["top k of every head, this pass, before the softmax"][6].startswith("0.52 [")
    controls = {row[2]: row for row in shown.tables[1].rows}
    # As many: not run; of the same mass: 15 - 3 of 100 prompts.
    assert controls["only content tokens"][3:9] == ["-", "-", "-", "-", "2.60", "0.030"]
    assert controls["only content tokens"][-1].startswith("-0.12 [")
    assert "top k of every head, this pass, before the softmax" not in controls
    verdicts = {one.here.partition("(")[2]: one.verdict for one in shown.findings}
    assert verdicts == {
        "one sink per head)": "undecided",  # its control is missing
        "one sink per head, where it is a function token)": "agrees",
        "one sink per head, where it is a content token)": "disagrees",
    }


def test_networks_are_pairs_of_their_own_and_widen_the_interval() -> None:
    def made(losses: list[int]) -> Results:
        records = [class_record("plain", "top", losing(0), network) for network in range(len(losses))]
        records += [class_record(None, "top", losing(lost), network) for network, lost in enumerate(losses)]
        return finished_run({"settings": {"columns": [1], "variants": [], "varied": [1], "task": "t"}}, records)

    one, equal, unequal = (
        masking_findings.change(made(losses), "toy", 1) for losses in ([30], [30, 30, 30], [10, 30, 50])
    )
    assert one.value == equal.value == pytest.approx(-0.3)
    assert unequal.value == pytest.approx(-0.3)
    # Between networks: t(2 to 3 degrees) * 0.2 / sqrt(3) is about 0.4.
    assert 0.3 < (unequal.high - unequal.low) / 2 < 0.55
    assert equal.high - equal.low < 0.25
    assert masking_findings.accuracy(made([10, 30, 50]), "toy", 1).value == pytest.approx(0.7)
    assert masking_findings.part_kept(made([10, 30, 50]), "toy", 1).value == pytest.approx(0.7)
    # Nothing lost by any network: the interval of one, which leaves room for prompts not seen.
    assert masking_findings.change(made([0, 0, 0]), "toy", 1) == masking_findings.change(made([0]), "toy", 1)


def test_twins_are_items_and_models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**find_experiment("table1-masking").small, "models": ["toy", "some/checkpoint"], "networks": 2}
    items = list(table1.items(settings))
    of = {model: [item["network"] for item in items if item["model"] == model] for model in settings["models"]}
    assert {*of["toy"]} == {0, 1}
    assert {*of["some/checkpoint"]} == {0}
    assert len(of["toy"]) == 2 * len(of["some/checkpoint"]) == 2 * len(conditions(settings))
    monkeypatch.setattr("dlm_lens.experiments.attention_sinks.twin_networks.trained_twin",
                        lambda model, seed, settings: f"twins/{model}-{seed}")  # fmt: skip
    asked: list[str] = []
    bench = SimpleNamespace(model=lambda name: asked.append(name) or dl.load("toy"))
    short = {**settings, "prompts": 1, "batch": 1, "sampler": {"gen_length": 4, "steps": 2}}
    for item in (items[0], next(item for item in items if item["network"] == 1)):
        assert item["columns"] == 0
        table1.run(item, short, bench)
    assert asked == ["toy", "twins/toy-1"]


def test_models_with_tasks_of_their_own_are_compared_without_pairing() -> None:
    plain = {(model, 0, "top"): losing(0) for model in ("toy", "toy-ar")}
    found = results_of({**plain, ("toy", 1, "top"): losing(10), ("toy-ar", 1, "top"): losing(60)})
    paired = masking_findings.change_beside(found, "toy", "toy-ar")
    found.config["settings"]["task"] = {"": "t", "toy-ar": "another"}
    apart = masking_findings.change_beside(found, "toy", "toy-ar")
    assert apart.value == pytest.approx(paired.value) == pytest.approx(0.5)
    # Independent shares: sqrt(0.1 * 0.9 + 0.6 * 0.4) / 10 * 1.96; paired the 10 are among the 60.
    assert (apart.high - apart.low) / 2 == pytest.approx(1.96 * (0.33**0.5) / 10, rel=0.1)
    assert paired.high - paired.low < apart.high - apart.low


@pytest.mark.parametrize("family", ["llada", "mmada", "dream"])
def test_the_harness_is_asked_as_the_preset_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.evaluator

    from dlm_lens.evaluation import evaluation, find_preset
    from dlm_lens.experiments.attention_sinks import harness_tasks

    asked: dict[str, Any] = {}

    def simple_evaluate(**given: Any) -> dict[str, Any]:
        asked.update(given)
        name = preset.metric.partition(" (")[0]
        kept = preset.metric.partition(" (")[2].rstrip(")")
        return {"samples": {preset.task: [{"doc_id": 1, "filter": kept, "metrics": [name], name: 1.0}]}}

    preset = find_preset(f"attention-sinks/table1/{family}/gsm8k")
    monkeypatch.setattr(lm_eval.evaluator, "simple_evaluate", simple_evaluate)
    monkeypatch.setattr(evaluation, "find_tasks", lambda names: SimpleNamespace(task_index={}))
    monkeypatch.setattr(harness_tasks, "_documents", lambda task: 1319)
    settings = {"task": "gsm8k", "sampler": {}, "batch": 2, "prompts": 3, "confirm_run_unsafe_code": False}
    item = {"model": preset.model, "start": 2, "seed": 5}
    # Dream's metric has no filter, and so its first sample counts.
    assert harness_tasks.correct_documents(dl.load("toy"), None, item, settings) == [True]
    assert asked["fewshot_as_multiturn"] == preset.multiturn == (family != "mmada")
    assert (asked["num_fewshot"], asked["apply_chat_template"]) == (preset.num_fewshot, preset.chat)
    assert asked["samples"] == {preset.task: [2]}
    assert asked["model"].generation == preset.generation
    assert asked["model"].seed == 5


def test_more_prompts_than_a_task_of_the_harness_has_are_refused_at_the_first_item() -> None:
    from dlm_lens.experiments.attention_sinks import harness_tasks

    settings = {
        "task": "toy_arithmetic", "sampler": {}, "batch": 1, "prompts": 101, "confirm_run_unsafe_code": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="prompts is 101; toy_arithmetic has 1 to 100"):
        harness_tasks.correct_documents(None, None, {"model": "toy", "start": 0, "seed": 0}, settings)


@pytest.mark.long
def test_eps_is_measured_on_the_documents_of_the_harness_s_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_lens.experiments.attention_sinks import harness_tasks

    settings = {**find_experiment("table1-masking").small, "prompts": 3, "calibration": 2, "presets": False}
    model = dl.load("toy")
    monkeypatch.setattr(table1, "holds_problems", lambda task: False)
    found = list(harness_tasks.received_in_documents(model, "toy", settings))
    assert len(found) == 2
    for columns in (1, 5):
        eps = table1.eps_for(model, "toy", columns, settings)
        sinks = [dl.find_sinks(one, dl.AboveMean(eps)) for one in found]
        above = sum(int(one.is_sink.sum()) for one in sinks)
        maps = sum(int((~one.scores.isnan()).any(-1).sum()) for one in sinks)
        assert above / maps == pytest.approx(columns, abs=0.01)  # eps has four digits


@pytest.mark.long
def test_the_harness_s_path_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**find_experiment("table1-masking").small, "prompts": 3, "batch": 3, "presets": False}
    item = {"model": "toy", "columns": 1, **BASE, "seed": 0, "start": 0}
    bench = Bench()
    ours = table1.run(item, settings, bench)
    monkeypatch.setattr(table1, "holds_problems", lambda task: False)
    theirs = table1.run(item, settings, bench)
    assert theirs["correct"] == ours["correct"]
    assert theirs["hidden"] == ours["hidden"] == 1
    # The harness leaves a run when all rows have ended, so that other steps count.
    assert theirs["mass"] == pytest.approx(ours["mass"], rel=0.1)


KILLED = """
import os
from dlm_lens.experiments import find_experiment, run_experiment
print(os.getpid(), flush=True)
run_experiment(find_experiment("table1-masking"), {out!r}, small=True, settings={settings!r})
"""


@pytest.mark.long
def test_table_1_killed_and_resumed_is_the_table_that_was_not(tmp_path: Path) -> None:
    settings = {"models": ["toy"], "prompts": 2, "batch": 1, "columns": [1, 5], "variants": ["random", "mass"],
                "sampler": {"gen_length": 8, "steps": 8}}  # fmt: skip
    path = tmp_path / "killed" / "results-00000.jsonl"
    experiment = find_experiment("table1-masking")
    # No fork of this process: a model is loaded by threads, which fail in a fork of one whose torch has computed.
    script = KILLED.format(out=str(tmp_path / "killed"), settings=settings)
    command = [python(), "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        program, deadline = int(running.stdout.readline()), time.monotonic() + 240
        while not path.exists() or path.read_text().count('"item"') < 4:
            assert running.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(program, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    kept = path.read_text().count('"item"')
    assert 4 <= kept < 14
    resumed = run_experiment(experiment, tmp_path / "killed", small=True, settings=settings)
    whole = run_experiment(experiment, tmp_path / "whole", small=True, settings=settings)
    assert len(resumed.sessions) == 2
    assert [(one.item, one.value) for one in resumed.records] == [(one.item, one.value) for one in whole.records]
    assert len(whole.records) == 14
    assert resumed.missing == 0
