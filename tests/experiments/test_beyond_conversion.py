"""From AR to masked diffusion: statistics against float64 patterns, planted changes, kept and resumed weights."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli.app import app
from dlm_lens.experiments import find_experiment, list_items, load_results, plan_experiment
from dlm_lens.experiments.attention_sinks import conversion_tables, conversion_training
from dlm_lens.experiments.attention_sinks.conversion_statistics import prompt_statistics, row_losses
from dlm_lens.experiments.cost_estimate import NetworkCost
from dlm_lens.experiments.experiment import Cost
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.one_token import paper_scale
from dlm_lens.experiments.results import Record, Results
from dlm_lens.testing import tiny
from dlm_lens.training import convert
from dlm_lens.training.config_files import read_settings
from dlm_lens.training.cost_estimate import plan
from tests.reference import forward64

EXPERIMENT = find_experiment("beyond-conversion")
PROMPTS = [[3, 9, 27, 17, 51, 29, 23, 5, 40, 41, 6, 18], [1, 2, 4, 8, 16, 32, 11, 22, 44, 33, 7, 14]]
EPS = 0.7


def settings(**changed: Any) -> dict[str, Any]:
    """The small settings of toy-ar."""
    return settings_of(EXPERIMENT.config(True, given=changed)["settings"], "toy-ar")


def test_a_conversion_with_a_causal_mask_has_the_logits_of_its_parent() -> None:
    # SmolLM2's layout: 9 query heads on 3 key heads, tied embeddings.
    layout = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    parent: Any = tiny("causal", model_type="llama", **layout)
    parent.tokenizer = None  # the mask token then gets a row of its own, as in SmolLM2
    dlm = convert(parent, sinks=0)
    ids = torch.tensor(PROMPTS)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(2, 1, 12, 12)
    with torch.no_grad():
        states = dlm.get_decoder()(input_ids=ids, attention_mask=visible).last_hidden_state
        logits = dlm.get_output_embeddings()(states)[..., : parent.config.vocab_size]
        torch.testing.assert_close(logits, parent(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
        free = dlm(input_ids=ids).logits[..., : parent.config.vocab_size]
    assert float((free - logits).abs().max()) > 0.1
    assert dlm.get_output_embeddings().weight is dlm.get_input_embeddings().weight


def by_hand(model: Any, recording: Any, row: int, *, causal: bool) -> dict[str, list[float]]:
    """The sums of one prompt, from float64 patterns and values of every canvas, one map at a time."""
    found: dict[str, list[float]] = {}

    def add(name: str, top: float, bottom: float) -> None:
        held = found.setdefault(name, [0.0, 0.0])
        held[0] += top
        held[1] += bottom

    ends: dict[str, dict[tuple[int, int], list[int | None]]] = {"relative": {}, "columns": {}}
    active: dict[tuple[str, int, int], list[int]] = {}
    run, least = recording.run, dl.attention.MIN_VIEWERS
    for step in range(run.steps):
        written = ~run.masked[step, row]
        ids = run.canvases[step, row][written] if causal else run.canvases[step, row]
        masked = torch.zeros(len(ids), dtype=torch.bool) if causal else run.masked[step, row]
        kept = forward64(model, ids[None], causal=causal)
        size = len(ids)
        for layer in range(model.config.num_hidden_layers):
            pattern, values = kept[f"pattern{layer}"][0], kept[f"v{layer}"][0]
            for head in range(pattern.shape[0]):
                sums = pattern[head].sum(0)
                even = torch.tensor([
                    sum(1 / (query + 1) for query in range(key, size)) if causal else 1.0 for key in range(size)
                ]).double()  # fmt: skip
                scored = [key for key in range(size) if not causal or size - key >= least]
                norms = values[:, head // (pattern.shape[0] // values.shape[1])].norm(dim=-1)
                add("first", float(sums[0]) / size, 1)
                add("uniform", float(even[0]) / size, 1)
                for scale, score in (("relative", sums / even), ("columns", sums)):
                    sinks = sinks_of(score, scored)
                    main = max(scored, key=lambda key: float(score[key]))
                    add(f"first_main_{scale}", main == 0, 1)
                    add(f"sinks_{scale}", len(sinks), 1)
                    places = ends[scale].setdefault((layer, head), [])
                    # A sink stays active until its score falls below the rule with 0.75 eps.
                    before, low = active.get((scale, layer, head), []), sinks_of(score, scored, 0.75 * EPS)
                    now = sorted({*sinks, *(key for key in before if key in low)})
                    active[scale, layer, head] = now
                    places.append(max(now, key=lambda key: float(score[key])) if now else None)
                    for sink in sinks:
                        others = [k for k in scored if k not in sinks and masked[k] == masked[sink]]
                        if others:
                            add(f"norm_{scale}", float(norms[sink]), float(norms[others].mean()))
    for scale, patterns in ends.items():
        for places in patterns.values():
            both = places[0] is not None and places[-1] is not None
            add(f"moved_{scale}", both and places[0] != places[-1], both)
    return found


def sinks_of(score: Tensor, scored: list[int], eps: float = EPS) -> list[int]:
    """Eq. 3: keys whose score exceeds the mean of the others by eps."""
    total = float(score[scored].sum())
    return [key for key in scored if float(score[key]) > (total - float(score[key])) / (len(scored) - 1) + eps]


@pytest.mark.parametrize("causal", [False, True])
def test_the_statistics_are_those_of_the_patterns(causal: bool) -> None:
    parent = tiny("causal", model_type="llama")
    model = parent if causal else convert(parent, sinks=0)
    sampler = {"gen_length": 6} if causal else {"gen_length": 6, "steps": 6}
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm()], **sampler)
    for row in range(2):
        ours, wanted = prompt_statistics(recording, row, EPS), by_hand(model, recording, row, causal=causal)
        assert wanted["sinks_columns"][0] > 5
        assert wanted["norm_relative"][1] > 0
        for name, pair in wanted.items():
            assert ours[name] == pytest.approx(pair, rel=2e-4, abs=2e-3), name
        maps = recording.run.steps * 2 * 4
        assert ours["first"][1] == maps
        kinds = [ours[f"{kind}_columns"][0] for kind in ("static", "moving")]
        assert sum(kinds) <= ours["static_columns"][1] == 2 * 4
        if not causal:
            assert all(ours[f"{name}_relative"] == ours[f"{name}_columns"] for name in ("norm", "static", "moved"))


def test_a_learned_sink_is_beside_the_canvas() -> None:
    model = convert(tiny("causal", model_type="llama"), sinks=1)
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm()], gen_length=6, steps=6)
    ours = prompt_statistics(recording, 0, EPS)
    share = []
    for canvas in recording.run.canvases[:-1, 0]:
        kept = forward64(model, canvas[None])
        # The sink is the first key, and its own row is no query of the canvas.
        share += [float(kept[f"pattern{layer}"][0, :, 1:, 0].sum(-1).mean()) / len(canvas) for layer in range(2)]
    assert ours["learned"][0] / ours["learned"][1] == pytest.approx(np.mean(share), abs=1e-4)


def test_the_loss_of_a_row_is_the_bound_under_its_masks() -> None:
    found = conversion_training.material(dl.load("toy-ar").tokenizer, settings(prompts=2, corpus=200))
    model = convert("toy-ar", sinks=0)
    losses = row_losses(model, found, 2)
    assert len(losses) == 2
    assert losses == row_losses(model, found, 2)
    objective = replace(found.objective, low_discrepancy=True, group=2).for_model(model, 2)
    from dlm_lens.training.sources import Rows
    from dlm_lens.training.trainer import EVALUATION_SEED

    for number, example in enumerate(found.held):
        rows = Rows.of([example, example], found.length, 0)
        given = objective.prepare(rows, [0, 1], EVALUATION_SEED + number)
        logits = forward64(model, given["input_ids"])["logits"].flatten(0, 1)[given["outputs"]]
        each = -logits.log_softmax(-1)[torch.arange(len(logits)), given["targets"]]
        wanted = float((each * given["weights"].double()).sum() / given["count"])
        assert losses[number] == pytest.approx(wanted, rel=1e-3)


def planted(before: float, after: float, steps: tuple[int, int] = (0, 100)) -> Results:
    """Two checkpoints and the parent: every statistic is `before` at first, then `after`, with noise of prompts."""
    noise = np.random.default_rng(0).normal(0, 0.02, 40)
    names = ["first", "uniform", "loss"]
    names += [f"{name}_{scale}" for name in ("first_main", "static", "moving", "moved", "norm") for scale in
              ("relative", "columns")]  # fmt: skip
    records = []
    for variant, step, value in (("ar", 0, 0.9), ("plain", steps[0], before), ("plain", steps[1], after)):
        item = {"model": "toy-ar", "variant": variant, "seed": 0, "steps": step}
        stored = {name: [[(value + e) * 10, 10] for e in noise] for name in names}
        records.append(Record(item, {**stored, "tokens": step * 64}, 1.0))
    config = EXPERIMENT.config(True)
    return Results(config, records)


def test_changes_are_paired_by_prompt() -> None:
    results = planted(0.5, 0.4)
    # The noise of the prompts is common to both, and far larger than the interval of a number without bounds.
    found = conversion_tables.change(results, "toy-ar", ("plain", 0), ("plain", 100), "norm_columns")
    assert found.value == pytest.approx(-0.1)
    assert found.high - found.low < 1e-9
    assert found.n == 40
    # Of shares z^2 of n + z^2 prompts may have any other difference, from -1 to 1.
    found = conversion_tables.change(results, "toy-ar", ("plain", 0), ("plain", 100), "first")
    unseen = 1.959964**2 / (40 + 1.959964**2)
    assert found[:2] == pytest.approx((-0.1, -0.1 - unseen * 0.9), abs=1e-6)
    assert found.high == pytest.approx(-0.1 + unseen * 1.1, abs=1e-6)
    assert (
        conversion_tables.change(planted(0.001, 0.999), "toy-ar", ("plain", 0), ("plain", 100), "first").high <= 1
    )
    alone = conversion_tables.measured(results, "toy-ar", "plain", 100, "first")
    assert alone.value == pytest.approx(0.4, abs=0.01)
    assert alone.high - alone.low > 0.005


def test_the_change_of_a_ratio_is_the_difference_of_the_ratios() -> None:
    rng = np.random.default_rng(1)
    stored = [rng.uniform(1, 3, (30, 2)) for _ in range(2)]
    records = [
        Record({"model": "m", "variant": "plain", "seed": 0, "steps": step}, {"norm_columns": part.tolist()}, 1.0)
        for step, part in zip((0, 10), stored, strict=True)
    ]
    results = Results({"settings": {}}, records)
    found = conversion_tables.change(results, "m", ("plain", 0), ("plain", 10), "norm_columns")
    one, two = (part[:, 0].sum() / part[:, 1].sum() for part in stored)
    assert found.value == pytest.approx(two - one)
    # Against a bootstrap of the difference itself.
    draws = rng.integers(30, size=(4000, 30))
    sums = [part[draws].sum(1) for part in stored]
    low, high = np.quantile(sums[1][:, 0] / sums[1][:, 1] - sums[0][:, 0] / sums[0][:, 1], (0.025, 0.975))
    assert found.low == pytest.approx(low, abs=0.03)
    assert found.high == pytest.approx(high, abs=0.03)


@pytest.mark.parametrize(
    ("before", "after", "word"), [(0.5, 0.4, "falls"), (0.4, 0.5, "rises"), (0.5, 0.5, "undec")]
)
def test_findings_name_the_direction(before: float, after: float, word: str) -> None:
    rendering = EXPERIMENT.render(planted(before, after))
    training = [one for one in rendering.findings if one.paper.startswith("expected to ")]
    assert len(training) == 7
    assert {one.verdict for one in rendering.findings} == {"no counterpart"}
    assert all(f": {word}" in one.here and one.null == "a change of 0" for one in training)
    expected = [one for one in training if "as expected" in one.here]
    assert len(expected) == {"falls": 4, "rises": 3, "undec": 0}[word]
    caption = rendering.captions["toy-ar"]
    assert [float(found) for found in re.findall(r"0\.\d{3}", caption)] == pytest.approx([0.9, before], abs=0.01)
    figure = rendering.figures["toy-ar"]
    assert len(figure.axes) == 7
    assert [len(axes.get_lines()) >= 2 for axes in figure.axes] == [True] * 7


def test_a_finding_without_a_last_number_says_so() -> None:
    results = planted(0.5, 0.4)
    for name, pairs in results.records[-1].value.items():
        if name != "tokens":
            pairs[:] = [[0, 0]] * len(pairs)
    training = [one for one in EXPERIMENT.render(results).findings if one.paper.startswith("expected to ")]
    assert all(": 0.499 at step 0, - at step 100 (" in one.here for one in training)
    assert not any("nan" in one.here for one in training)


def test_items_are_in_the_order_of_training() -> None:
    steps = {"": [5, 0], "smollm2": [0, 7]}
    config = EXPERIMENT.config(True, given={"models": ["toy-ar", "smollm2"], "steps": steps})
    assert [(item["model"], item["variant"], item["steps"]) for item in list_items(EXPERIMENT, config)] == [
        ("toy-ar", "ar", 0), ("toy-ar", "plain", 0), ("toy-ar", "plain", 5),
        ("smollm2", "ar", 0), ("smollm2", "plain", 0), ("smollm2", "plain", 7),
    ]  # fmt: skip
    for wrong in ([-1, 3], []):
        with pytest.raises(ValueError, match="give the numbers of optimiser steps"):
            list_items(EXPERIMENT, EXPERIMENT.config(True, given={"steps": wrong}))


def test_text_rows_are_parted_and_begin_unmasked(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    documents = [" ".join(f"w{word}" for word in draw.integers(0, 50, 20)) for _ in range(80)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    tokenizer = tiny("causal", model_type="llama").tokenizer
    own = settings(text=str(tmp_path), length=16, prompts=3, prompt_length=5)
    found = conversion_training.material(tokenizer, own)
    training = found.source.rows
    assert found.length == 16
    assert training.shape[1] == 16
    assert len(found.held) == 3
    for example, prompt in zip(found.held, found.prompts, strict=True):
        assert example.tokens[:5].tolist() == prompt
        assert example.unmasked is not None
        assert example.unmasked.tolist() == [True] + [False] * 15
        assert not bool((training == example.tokens).all(-1).any())
    with pytest.raises(ValueError, match="prompts=300 are requested; give a longer text"):
        conversion_training.material(tokenizer, {**own, "prompts": 300})


def test_conversions_of_two_models_have_two_directories(tmp_path: Path) -> None:
    models = [tmp_path / "a" / "final", tmp_path / "b" / "final", tmp_path / "c" / "final"]
    for index, path in enumerate(models):
        model = dl.load("toy-ar")
        if index == 1:
            model.get_decoder().layers[0].self_attn.q_proj.weight.data.zero_()
        model.save_pretrained(path)
        model.tokenizer.save_pretrained(path)
    whole = settings(trained=str(tmp_path / "trained"), corpus=200)
    kept = [conversion_training.kept(str(path), "plain", 0, 0, whole) for path in models]
    zero = [bool((dl.load(path).get_decoder().layers[0].self_attn.q_proj.weight == 0).all()) for path in kept]
    assert zero == [False, True, False]
    assert kept[0] == kept[2]  # the same weights under another path
    names = [conversion_training.name_of(start, "plain", 0, whole) for start in ("one/m", "two/m")]
    assert names[0] != names[1]
    assert all(name.startswith("m-plain-seed0-") for name in names)
    # Other weights under the same path.
    model = dl.load(models[1])
    model.save_pretrained(models[0])
    assert conversion_training.kept(str(models[0]), "plain", 0, 0, whole) == kept[1]


@pytest.mark.long
def test_a_training_is_kept_resumed_and_independent_of_its_end(tmp_path: Path) -> None:
    shared = {"corpus": 200, "batch_size": 2, "warm_up": 2}
    whole = settings(trained=str(tmp_path / "whole"), **shared)
    conversion_training.train("toy-ar", "plain", 0, [0, 2, 4], whole)
    parts = settings(trained=str(tmp_path / "parts"), **shared)
    two = conversion_training.kept("toy-ar", "plain", 0, 2, parts)
    four = conversion_training.kept("toy-ar", "plain", 0, 4, parts)
    names = [path.name for path in sorted(two.parent.iterdir())]
    assert names == ["step-2", "step-4"]
    weights = {}
    for step, path in ((0, None), (2, two), (4, four)):
        at_once = conversion_training.kept("toy-ar", "plain", 0, step, whole)
        weights[step] = dl.load(at_once).state_dict()
        if path is not None:
            other = dl.load(path).state_dict()
            assert all(torch.equal(weights[step][name], other[name]) for name in other)
    untrained = convert("toy-ar", sinks=0).state_dict()
    assert all(torch.equal(weights[0][name], untrained[name]) for name in untrained)
    moved = [not torch.equal(weights[2][name], weights[4][name]) for name in untrained]
    assert sum(moved) > 0.9 * len(moved)
    # Kept weights that were deleted come back from the last checkpoint, without a step of training.
    shutil.rmtree(four)
    assert conversion_training.kept("toy-ar", "plain", 0, 4, parts) == four
    again = dl.load(four).state_dict()
    assert all(torch.equal(weights[4][name], again[name]) for name in again)
    with pytest.raises(ValueError, match="is at step 4, and the weights after 3 steps were not kept"):
        conversion_training.kept("toy-ar", "plain", 0, 3, parts)
    with pytest.raises(ValueError, match="choose from plain, sink, gate"):
        conversion_training.kept("toy-ar", "gated", 0, 3, parts)


@pytest.mark.long
def test_a_run_ends_in_a_table_for_every_variant(tmp_path: Path) -> None:
    from dlm_lens.experiments import render_experiment, run_experiment

    given = {
        "variants": ["plain", "sink", "gate"], "steps": [0, 2], "corpus": 200, "batch_size": 2, "prompts": 2,
        "gen_length": 8, "denoising_steps": 8, "trained": str(tmp_path / "trained"),
    }  # fmt: skip
    results = run_experiment(EXPERIMENT, tmp_path / "out", small=True, settings=given)
    assert not results.missing
    assert len(results.records) == 7
    page = render_experiment(EXPERIMENT, tmp_path / "out").read_text()
    assert all(f"| toy-ar | {variant} | 2 | 256 |" in page for variant in ("plain", "sink", "gate"))
    (learned,) = (record for record in results.where(variant="sink", steps=2))
    assert len(learned.value["learned"]) == 2


def test_the_plan_for_a_gpu() -> None:
    result = CliRunner().invoke(app, ["experiment", "beyond-conversion", "--plan", "--device", "h100"])
    assert result.exit_code == 0, result.output
    # 1,526 steps of 64 rows in passes of 16, for three variants, and the measurements.
    config = EXPERIMENT.config(False)
    costs = [cost for item in list_items(EXPERIMENT, config) for cost in EXPERIMENT.cost(item, config["settings"])]
    training = [cost for cost in costs if cost.backward]
    assert sum(cost.passes for cost in training) == 3 * 1526 * 4
    assert sum(cost.passes * cost.rows * cost.positions for cost in training) / 3 == pytest.approx(100e6, rel=1e-3)
    assert f"{sum(cost.passes for cost in costs):,} forward passes" in result.output
    # Memory and operations are those of dlm_lens.training's own estimate, without the row of the mask token.
    settings = read_settings("smollm2")
    ours, cost = NetworkCost.of("smollm2"), Cost(1, 16, 1024, "smollm2", backward=True, predicted=0.5)
    theirs = plan(settings)
    assert ours.memory(cost) == pytest.approx(theirs.bytes_per_device, rel=1e-5)
    assert ours.flops(cost) / (16 * 1024) == pytest.approx(theirs.flops / theirs.tokens, rel=1e-4)


@pytest.mark.parametrize("table", ["one-token-table1", "one-token-table2"])
def test_tables_of_the_second_paper_with_smollm2(table: str) -> None:
    name = "smollm2" if table.endswith("1") else "smollm2-scratch"
    configs = [name, f"{name}-sink", f"{name}-gated"]
    experiment = find_experiment(table)
    given = {**experiment.full, "configs": configs, "seeds": 3}
    trainings = [item for item in experiment.items(given) if item["task"] == "train"]
    assert [(item["config"], item["seed"]) for item in trainings] == [
        (c, seed) for seed in range(3) for c in configs
    ]
    found = [paper_scale.training_settings(item, given) for item in trainings[:3]]
    assert [(one.model.sinks, one.model.gated) for one in found] == [(0, False), (1, False), (0, True)]
    assert {one.model.start for one in found} == {"smollm2" if table.endswith("1") else "new:smollm2"}
    assert {(one.total_steps(), one.batch_size, one.data.length) for one in found} == {(10_000, 64, 1024)}
    (cost,) = experiment.cost(trainings[0], given)
    assert (cost.passes, cost.rows) == (10_000 * 64 // 16, 16)
    assert f"{9 * cost.passes:,} forward passes" in plan_experiment(
        experiment, settings={"configs": configs, "seeds": 3}, device="h100"
    )


@pytest.mark.long
@pytest.mark.parametrize("config", ["smollm2-sink", "smollm2-scratch-gated"])
def test_the_configs_train_at_small_scale(config: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": "anna has 3 apples . " * 4}) for _ in range(30)))
    start = "toy-ar" if config == "smollm2-sink" else "new:toy-ar"
    overrides = [
        f"model.start={start}", f"data.path={text}", "data.name=null", "data.length=32", "steps=2", "batch_size=2",
        "micro_batch_size=2", "precision=fp32", "compile=false", "probe_steps=0",
    ]  # fmt: skip
    given = {**find_experiment("one-token-table1").full, "trained": str(tmp_path), "overrides": overrides}
    made = paper_scale.run({"config": config, "seed": 1, "task": "train"}, given)
    loaded = dl.load(made["checkpoint"])
    assert made["checkpoint"].endswith(f"{config}-seed1/checkpoint-2")
    assert (loaded.config.num_sinks, loaded.config.gated_attention) == (
        (1, False) if start == "toy-ar" else (0, True)
    )


def test_the_committed_numbers_are_the_sums_of_the_prompts() -> None:
    directory = Path(conversion_training.__file__).parent / "results" / "beyond-conversion"
    lines = [
        json.loads(line) for path in directory.glob("results*.jsonl") for line in path.read_text().splitlines()
    ]
    results = load_results(EXPERIMENT, directory)
    assert not results.missing
    stored = {tuple(line["item"].values()): line["value"] for line in lines if "item" in line}
    table = {tuple(row[:3]): row for row in conversion_tables.render(results).tables[1].rows}
    for (model, variant, seed, step), value in stored.items():
        row = table[model, variant, "-" if variant == "ar" else f"{step:,}"]
        assert seed == 0
        assert len(value["first"]) == int(row[-1]) >= 32
        for cell, name in zip(row[4:6], ("first", "uniform"), strict=True):
            top, bottom = np.asarray(value[name]).sum(0)
            assert float(cell.split()[0]) == pytest.approx(top / bottom, abs=6e-4)
        top, bottom = np.asarray(value["norm_columns"]).sum(0)
        assert float(row[10].split()[0]) == pytest.approx(top / bottom, abs=6e-4)
    # What the mask alone does: far larger than any interval.
    parent, untrained = (stored["smollm2", variant, 0, 0]["first"] for variant in ("ar", "plain"))
    assert all(a / b > 0.3 for a, b in parent)
    assert np.mean([a / b for a, b in untrained]) < 0.1
