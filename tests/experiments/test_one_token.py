import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import dlm_lens as dl
from dlm_lens.adapters import family_of
from dlm_lens.adapters.model_preparation import finish_model
from dlm_lens.experiments import find_experiment, list_experiments, run_experiment
from dlm_lens.experiments.attention_sinks.prompt_scores import exact_match
from dlm_lens.experiments.intervals import over_seeds, paired_over_seeds, plus_minus, wilson
from dlm_lens.experiments.one_token import metrics, paper, tables, toy_language
from dlm_lens.experiments.one_token.metrics import measured, validation_losses
from dlm_lens.experiments.one_token.miniature import VARIANTS, Miniature, network
from dlm_lens.experiments.one_token.text_metrics import moved
from dlm_lens.experiments.results import Record, Results
from dlm_lens.files.locks import alone
from tests.experiments.one_token_stories import write_story

TINY = {"steps": 2, "batch_size": 4, "corpus": 200, "prompts": 2, "watched": 1, "validation": 4, "seeds": 1}


def settings(trained: Path, **changed: object) -> dict:
    return {**tables.SMALL, **TINY, "trained": str(trained), **changed}


# Numbers over seeds


def test_intervals_are_students() -> None:
    values = [0.3, 0.1, 0.4, 0.15, 0.9]
    found = over_seeds(values)
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert found == pytest.approx((np.mean(values), low, high, 5, 4), rel=1e-12)


def test_a_single_seed_has_no_interval() -> None:
    found = over_seeds([0.25])
    assert found.value == 0.25
    assert math.isnan(found.low)
    assert plus_minus(found) == "0.250"
    with pytest.raises(ValueError, match="at least one"):
        over_seeds([])


def test_differences_are_paired_over_the_seeds_of_both() -> None:
    found = paired_over_seeds({0: 1.0, 1: 2.0, 5: 9.0}, {0: 0.5, 1: 1.75, 2: 0.0})
    assert (found.value, found.n) == (0.375, 2)
    assert plus_minus(found, sign=True) == "+0.375 ± 1.588"  # 12.706 * 0.125


def losses_of(centres: dict[str, float], spread: float) -> Results:
    """Three seeds whose paired differences to the plain network are centre - spread, centre, centre + spread."""
    values = {("plain", seed): 1.0 + seed for seed in range(3)}
    for name, centre in centres.items():
        values |= {(name, seed): 1.0 + seed + centre + spread * (seed - 1) for seed in range(3)}
    return made(values)


@pytest.mark.parametrize(("centre", "verdict"), [(-0.3, "agrees"), (0.3, "disagrees"), (-0.2, "undecided")])
def test_a_comparison_needs_its_whole_interval(centre: float, verdict: str) -> None:
    # Half the interval is 4.303 * 0.1 / sqrt(3) = 0.248.
    found = tables.improves(losses_of({"sink": centre}, 0.1), "", "", "sink", "plain")
    assert found.verdict == verdict
    assert found.p is not None
    assert (found.p < 0.05) == (verdict != "undecided")
    assert "standard deviation of 1.000" in found.null


@pytest.mark.parametrize(
    ("apart", "verdict"), [(0.004, "agrees"), (0.009, "undecided"), (0.013, "disagrees"), (-0.013, "disagrees")]
)
@pytest.mark.parametrize("gain", [-0.02, -5.0])
def test_alike_is_within_the_margin_in_nats(apart: float, verdict: str, gain: float) -> None:
    # Half the interval is 4.303 * 0.001 / sqrt(3) = 0.0025 around `apart`; the margin is 0.01 whatever the gain.
    assert tables.MARGIN == 0.01
    results = losses_of({"sink": gain}, 0.0)
    end = losses_of({"end": gain + apart}, 0.001).records[3:]
    found = tables.alike(Results(results.config, [*results.records, *end]), "", "", "end", "sink")
    assert found.verdict == verdict
    assert found.p is not None
    assert (found.p < 0.05) == (verdict != "undecided")


@pytest.mark.parametrize(
    ("apart", "verdict"), [(0.5, "agrees"), (-0.006, "agrees"), (-0.009, "undecided"), (-0.02, "disagrees")]
)
def test_no_better_is_one_sided(apart: float, verdict: str) -> None:
    results = losses_of({"sink": -0.1}, 0.0)
    more = losses_of({"sinks2": -0.1 + apart}, 0.001).records[3:]
    both = Results(results.config, [*results.records, *more])
    assert tables.no_better(both, "", "", "sinks2", "sink").verdict == verdict


def test_where_the_sink_token_gains_nothing_nothing_is_like_it() -> None:
    # The gain is -0.2 ± 0.248; end and front differ by exactly nothing.
    both = losses_of({"sink": -0.2, "end": -0.2, "sinks2": -0.2}, 0.1)
    for rule, name in ((tables.alike, "end"), (tables.no_better, "sinks2")):
        found = rule(both, "", "", name, "sink")
        assert (found.verdict, found.p) == ("undecided", None)
        assert "holds 0" in found.why


def test_a_difference_is_over_seeds_and_held_out_sequences() -> None:
    generator = np.random.default_rng(0)
    own = {name: generator.normal(size=(4, 32)) for name in ("plain", "sink")}
    records = [
        Record({"variant": name, "seed": seed}, {"loss": float(row.mean()), "losses": row.tolist()}, 1.0)
        for name, rows in own.items() for seed, row in enumerate(rows)
    ]  # fmt: skip
    found = tables.difference(Results({"settings": {}}, records), "sink", "plain")
    apart = own["sink"] - own["plain"]
    assert (found.value, found.n) == (pytest.approx(apart.mean()), 4)
    # Crossed random effects by hand: variance between seeds, and of the mean over groups of the groups' means.
    seeds, groups = apart.mean(1).var(ddof=1) / 4, apart.mean(0).var(ddof=1) / 32
    degrees = (seeds + groups) ** 2 / (seeds**2 / 3 + groups**2 / 31)
    half = stats.t.ppf(0.975, degrees) * np.sqrt(seeds + groups)
    assert found.high - found.value == pytest.approx(half, rel=0.05)  # the variance over groups is a bootstrap's
    # Without the groups' losses the interval is over seeds alone.
    bare = [Record(one.item, {"loss": one.value["loss"]}, 1.0) for one in records]
    alone = tables.difference(Results({"settings": {}}, bare), "sink", "plain")
    assert alone == pytest.approx(over_seeds(apart.mean(1).tolist()))


# The paper's numbers


def test_gains_of_the_papers_tables() -> None:
    # By hand from Table 2: 8.71 - 2.74 + 8.87 + 8.16 + 0.96 + 1.94 + 17.90 + 0.22 = 44.02.
    assert paper.mean_gain(paper.TABLE2, "DLM + extra token", "DLM") == pytest.approx(44.02 / 8)
    assert paper.lower(paper.TABLE2, "DLM + extra token", "DLM") == ["ARC-c 25.09 to 22.35"]
    assert paper.lower(paper.TABLE3, "End", "Front", paper.FEWER) == [
        "RACE 33.79 to 31.77",
        "HellaSwag 48.91 to 48.16",
    ]


def test_the_papers_tables_repeat_the_same_run() -> None:
    # Tables 3 to 5 print the 0.5B run of Table 1 again; a slip in one of them would show.
    table1 = dict(zip(paper.BENCHMARKS, paper.TABLE1_SMALL["DLM + extra token"], strict=True))
    plain = dict(zip(paper.BENCHMARKS, paper.TABLE1_SMALL["DLM"], strict=True))
    fewer = tuple(table1[name] for name in paper.FEWER)
    assert paper.TABLE3["Front"] == paper.TABLE4["1"] == paper.TABLE5["Stable sink token"] == fewer
    assert paper.TABLE4["0"] == tuple(plain[name] for name in paper.FEWER)


# Networks


@pytest.mark.long
def test_variants_begin_with_the_plain_networks_weights() -> None:
    plain = network(Miniature("plain", 3)).state_dict()
    for name, variant in VARIANTS.items():
        model = network(Miniature(name, 3))
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in plain.items() if key in state)
        own = {key.rsplit(".", 1)[-1] for key in state.keys() - plain.keys()}
        config = model.config
        assert (config.num_sinks, config.sink_placement) == (variant.sinks, variant.position)
        assert (config.zero_sink_value, config.softmax) == (variant.zero_value, variant.softmax)
        assert own <= {"sinks", "weight"}
    other = network(Miniature("plain", 4)).state_dict()
    assert not torch.equal(other["lm_head.weight"], plain["lm_head.weight"])


def test_a_conversion_is_shifted_and_has_the_variants_options() -> None:
    model = network(Miniature("zero", 0, start="toy-ar"))
    assert model.config.logit_shift
    assert (model.config.num_sinks, model.config.zero_sink_value) == (1, True)
    run = Miniature("zero", 0, start="toy-ar").settings(Path("x"))
    assert run.objective.logit_shift is True
    assert Miniature("zero", 0).settings(Path("x")).objective.logit_shift is False


def test_other_settings_have_another_directory() -> None:
    runs = [Miniature("sink", 0), Miniature("sink", 1), Miniature("end", 0), Miniature("sink", 0, steps=301),
            Miniature("sink", 0, optimizer="adamw"), Miniature("sink", 0, start="toy-ar"),
            Miniature("sink", 0, precision="fp32")]  # fmt: skip
    assert len({run.name for run in runs}) == len(runs)
    with pytest.raises(ValueError, match="'sunk' is no variant"):
        Miniature("sunk", 0)
    with pytest.raises(ValueError, match="steps is 0"):
        Miniature("sink", 0, steps=0)
    with pytest.raises(ValueError, match=r"precision is 'fp16'; choose bf16 or fp32"):
        Miniature("sink", 0, precision="fp16")


@pytest.mark.parametrize("text", [False, True])
def test_networks_are_trained_in_the_precision_of_the_settings(text: bool, tmp_path: Path) -> None:
    shared = {**tables.SMALL, "text": str(write_story(tmp_path / "story.txt")) if text else ""}
    item = {"variant": "plain", "seed": 0}
    runs = {name: Miniature.of(item, {**shared, "precision": name}) for name in ("bf16", "fp32")}
    assert all(run.settings(tmp_path).precision == name for name, run in runs.items())
    # Stored results from before there was a choice name none; their networks were trained with bfloat16 products.
    before = {name: value for name, value in shared.items() if name != "precision"}
    assert Miniature.of(item, before) == runs["bf16"]


# Data


def test_validation_text_is_new_and_has_the_training_texts_proportions() -> None:
    text = toy_language.validation(40, 200)
    _, prompts = toy_language.training_text(200)
    tokenizer = toy_language.toy("tokenizer").build_tokenizer()
    shown_prompts = [
        tokenizer.decode(ids[1:length]) for ids, length in zip(text.tokens.long(), text.prompt_length, strict=True)
    ]
    assert not prompts & set(shown_prompts)
    assert len(set(shown_prompts)) == 40
    kinds = [prompt.split()[0] in ("sort", "reverse", "copy") for prompt in shown_prompts]
    assert sum(kinds) == 6  # 15%
    # As the training corpus encodes: text, then ends.
    corpus, _ = toy_language.training_text(200)
    example = next(toy_language.toy("language").stream("train", 0))
    again = toy_language.encoded([example])
    assert torch.equal(again.tokens[0], corpus.tokens[0])
    assert (again.prompt_length[0], again.text_length[0]) == (corpus.prompt_length[0], corpus.text_length[0])


# Measuring


def test_moved_counts_maps_whose_main_sink_is_another() -> None:
    scores = torch.zeros(3, 2, 1, 2, 4)
    scores[:, ..., 1] = 1.0
    scores[1, ..., 2] = 5.0  # in between does not count
    scores[2, 0, 0, 1, 3] = 2.0
    scores[..., 0] = torch.nan
    assert moved(scores) == [0.5, 0.0]


@pytest.mark.long
def test_the_validation_loss_of_a_trained_model_is_small_and_the_same_twice() -> None:
    asked = settings(Path("x"), validation=16)
    (untrained,) = validation_losses(network(Miniature("plain", 0)), asked)
    (toy,) = validation_losses(dl.load("toy"), asked)
    assert [toy] == validation_losses(dl.load("toy"), asked)
    # Uniform over 118 tokens: log 118 = 4.77; the floor of the loss is the entropy of what cannot be known.
    assert untrained == pytest.approx(math.log(118), abs=0.3)
    assert toy < 0.6


def test_sinks_of_a_model_without_attention_to_choose() -> None:
    model = network(Miniature("zero", 0))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.k_proj.weight)
        if layer.self_attn.k_proj.bias is not None:
            torch.nn.init.zeros_(layer.self_attn.k_proj.bias)
    prompts = [toy_language.tests("L", 1, 200)[0].prompt]
    finish_model(model, family_of("sink_qwen"), toy_language.toy("tokenizer").build_tokenizer())
    found = metrics.sinks(model, prompts, gen_length=8, steps=2)
    length = len(model.tokenizer(prompts[0])["input_ids"]) + 8
    # Even attention: no sinks, and the learned one gets its part of length + 1 keys; its value is zero.
    assert found["share"] == pytest.approx([1 / (length + 1)] * 4, abs=1e-4)
    assert found["norm"] == [0.0] * 4
    assert min(found["other"]) > 0
    assert (found["found"], found["found_norm"]) == (0.0, None)


# Runs


@pytest.mark.long
def test_a_run_is_trained_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(tmp_path)
    run = Miniature.of({"variant": "sink", "seed": 0}, asked)
    first = measured(run, asked)
    assert set(first["right"]) == {"A", "L", "F"}
    assert len(first["right"]["L"]) == 2
    monkeypatch.setattr(metrics, "measure", lambda *_: pytest.fail("measured again"))
    assert measured(run, asked) == first
    # A table that asks for more prompts measures anew.
    monkeypatch.setattr(metrics, "measure", lambda path, _: {"at": path.name})
    assert measured(run, settings(tmp_path, prompts=3)) == {"at": "checkpoint-2"}


@pytest.mark.long
def test_the_same_settings_give_the_same_numbers(tmp_path: Path) -> None:
    values = []
    for place in ("one", "two"):
        asked = settings(tmp_path / place)
        values.append(measured(Miniature.of({"variant": "end", "seed": 1}, asked), asked))
        values[-1].pop("training_seconds")
    assert values[0] == values[1]


def test_a_second_process_waits(tmp_path: Path) -> None:
    import fcntl

    with alone(tmp_path), (tmp_path / ".lock").open("w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with alone(tmp_path):
        pass


@pytest.mark.long
def test_tables_share_networks_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**TINY, "trained": str(tmp_path / "models"), "variants": ["sink"]}
    table3 = find_experiment("one-token-table3")
    results = run_experiment(table3, tmp_path / "three", small=True, settings=given)
    monkeypatch.setattr(metrics, "measure", lambda *_: pytest.fail("trained again"))
    again = run_experiment(table3, tmp_path / "three", small=True, settings=given)
    other = run_experiment(find_experiment("one-token-table4"), tmp_path / "four", small=True, settings=given)
    assert [record.value for record in other.records] == [record.value for record in results.records]
    assert len(again.records) == 1


def test_all_figures_and_tables_are_listed() -> None:
    names = {one.name for one in list_experiments() if one.shows.startswith("2601.19657")}
    assert names == {f"one-token-{what}" for what in
                     ("figure1", "figure3", "noop", "table1", "table2", "table3", "table4", "table5")}  # fmt: skip


def test_the_plan_counts_training_and_measuring() -> None:
    table = find_experiment("one-token-table2")
    costs = table.cost({"variant": "sink", "seed": 0}, table.small)
    trained = [one for one in costs if one.backward]
    assert [(one.passes, one.rows) for one in trained] == [(table.small["steps"], table.small["batch_size"])]
    assert sum(one.passes for one in costs) == table.small["steps"] + 4 + 96 + 32


def test_outside_a_clone_the_language_is_missed_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toy_language, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="run it in a clone of the repository"):
        toy_language.toy("language")


def made(loss: dict[tuple[str, int], float], sinks: float = 0.5) -> Results:
    def value(one: float) -> dict:
        return {"loss": one, "right": {task: [0, 1] for task in "ALF"}, "moved": one, "found": sinks,
                "found_norm": 2.0, "found_other": 4.0}  # fmt: skip

    records = [Record({"variant": name, "seed": seed}, value(one), 1.0) for (name, seed), one in loss.items()]
    config = {"experiment": "one-token-table2", "small": True, "settings": {**tables.SMALL, "seeds": 2}}
    return Results(config, records)


def test_findings_of_planted_losses() -> None:
    losses = {("plain", 0): 1.0, ("plain", 1): 2.0, ("sink", 0): 0.5, ("sink", 1): 1.49, ("gated", 0): 1.6,
              ("gated", 1): 2.59}  # fmt: skip
    render = find_experiment("one-token-table2").render
    rendering = render(made(losses))
    assert [one.verdict for one in rendering.findings] == ["agrees", "disagrees", "agrees", "agrees"]
    quality, sinks = rendering.tables
    assert quality.rows[1][3] == "-0.505 ± 0.064"  # -0.5 and -0.51: 12.706 * 0.005
    assert sinks.rows[1][4] == "0.500 ± 0.000"
    assert json.dumps(quality.rows[0]).count("0.50 [") == 3
    # With hardly any sinks in the plain network, that its main keys stay says nothing.
    assert render(made(losses, sinks=0.4)).findings[-1].verdict == "undecided"


def test_exact_match_counts_prompts_not_prompts_times_networks() -> None:
    # Five networks that agree on every one of 8 prompts: 3 right of 8, not 15 of 40.
    given = {"right": {"A": [1, 1, 1, 0, 0, 0, 0, 0]}}
    records = [Record({"variant": "plain", "seed": seed}, given, 1.0) for seed in range(5)]
    found = tables.right(Results({"settings": {}}, records), "plain", "A")
    assert exact_match(found) == wilson([True] * 3 + [False] * 5)
    # Where they do not agree, a prompt counts by the part of them that is right.
    records[0] = Record({"variant": "plain", "seed": 0}, {"right": {"A": [0] * 8}}, 1.0)
    mixed = exact_match(tables.right(Results({"settings": {}}, records), "plain", "A"))
    assert (mixed.value, mixed.n) == (pytest.approx(0.3), 8)
    assert mixed.high - mixed.low > 0.4
