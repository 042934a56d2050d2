"""Figures 1 and 3 and the no-op bound: what they ask, and what is measured against float64 by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import listening
from dlm_lens.experiments import find_experiment
from dlm_lens.experiments.attention_sinks.charts import forest_plot, scatter_plots
from dlm_lens.experiments.attention_sinks.recorded_runs import head_pattern
from dlm_lens.experiments.intervals import Interval, over_networks
from dlm_lens.experiments.one_token import figure1, figure3, noop_bound
from dlm_lens.experiments.one_token.page import RESULTS, twins_line
from dlm_lens.experiments.one_token.recorded_runs import conversion, over
from dlm_lens.experiments.results import Record, Results
from dlm_lens.experiments.runner import load_results
from dlm_lens.experiments.verdicts import p_value
from dlm_lens.recording import AttentionPattern, ResidualNorm, UpdateNorm, rerun

PROMPTS = ["tom has 2 cups . bob has 3 more . how many ? a :", "how many ? a :"]
SAMPLER = {"gen_length": 8, "steps": 2, "block_length": 8}


@pytest.fixture(scope="module")
def recorded() -> tuple:
    model = dl.load("toy-sink")
    return model, dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm()], seed=0, **SAMPLER)


def by_hand(model: torch.nn.Module, run: object, step: int, row: int, layer: int) -> tuple:
    """Patterns, values and head outputs of one canvas in float64; canvas keys, then the learned sink."""
    content = run.attention_mask[row].bool()
    held: dict[str, torch.Tensor] = {}
    attention = model.get_decoder().layers[layer].self_attn
    with torch.inference_mode(), listening(model):
        handles = [
            getattr(attention, f"hook_{name}").register_forward_hook(
                lambda module, args, out, name=name: held.__setitem__(name, out.detach().double())
            )
            for name in ("v", "pattern")
        ]
        try:
            model(input_ids=run.canvases[step, row][content][None], use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
    values = held["v"][0]
    values = values.transpose(0, 1) if values.shape[0] == int(content.sum()) + 1 else values
    values = torch.cat([values[:, 1:], values[:, :1]], 1)
    pattern = held["pattern"][0][:, 1:]  # without the learned sink's own query
    pattern = torch.cat([pattern[..., 1:], pattern[..., :1]], -1)
    groups = len(pattern) // len(values)
    return pattern, values.repeat_interleave(groups, 0), content


def test_the_learned_sink_per_prompt_is_that_of_the_patterns(recorded: tuple) -> None:
    model, recording = recorded
    found = figure3.per_prompt(recording)
    for row in range(2):
        for layer in (0, 3):
            steps = [by_hand(model, recording.run, step, row, layer) for step in range(2)]
            received = [pattern.mean(0).sum(0) / pattern.shape[1] for pattern, *_ in steps]
            assert found["share"][row, layer] == pytest.approx(np.mean([one[-1] for one in received]), rel=1e-4)
            strongest = np.mean([one[:-1].max() for one in received])
            assert found["strongest"][row, layer] == pytest.approx(strongest, rel=1e-4)
            assert found["even"][row, layer] == pytest.approx(1 / len(received[0]), rel=1e-6)
            norms = torch.stack([values.norm(dim=-1) for _, values, _ in steps])
            assert found["norm_sink"][row, layer] == pytest.approx(float(norms[..., -1].mean()), rel=1e-4)
            assert found["norm_other"][row, layer] == pytest.approx(float(norms[..., :-1].mean()), rel=1e-4)


def test_a_map_of_an_ar_model_has_the_positions_that_are_decoded() -> None:
    model = dl.load("toy-ar")
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(), AttentionPattern()], seed=0, gen_length=8)
    run = recording.run
    for step, row in ((0, 0), (0, 1), (5, 1)):
        written = run.attention_mask[row] & ~run.masked[step, row]
        found = head_pattern(model, run, step=step, row=row, layer=1, head=2)
        assert len(found) == int(written.sum()) < int(run.attention_mask[row].sum())
        wanted = recording.pattern[step, row, 1, 2][written][:, written]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    maps = figure1._maps(model, run, dl.find_sinks(recording, dl.AboveMean(1.0)).scores, {"late": 3})
    assert [len(one) for one in maps["patterns"]] == [int((~run.masked[step, 0]).sum()) for step in (0, 3)]


CANVASES = ("llada", "diffugpt", "modernbert", "sedd", "bd3lm", "llada2", "gidd", "diffusion_gemma")
"""Families whose layers have other names, and whose passes are more than one call on the canvas."""


@pytest.mark.parametrize("family", CANVASES)
def test_a_map_is_the_pattern_of_the_run_s_own_pass(family: str, tiny_model: Any) -> None:
    """Its column sums are what the run's recording says that every key received."""
    model = tiny_model(family)
    prompts = ["w1 w2 w3 w4 w5", "w7 w8 w9 w1 w2 w3 w4 w5 w6 w7"]
    recording = dl.record(model, prompts, [dl.ReceivedAttention()], gen_length=8, seed=0)
    run, sums = recording.run, dl.received_of(recording).on_scale("column sum").values
    compared = 0
    for step, row in ((0, 0), (2, 1)):
        content = run.attention_mask[row]
        wanted = sums[step, row, 1, 3][torch.cat([content, content.new_ones(recording.sinks)])]
        found = head_pattern(model, run, step=step, row=row, layer=1, head=3).nansum(0)
        known = ~wanted.isnan()  # keys that few queries see have no received attention
        compared += int(known.sum())
        torch.testing.assert_close(found[known], wanted[known], atol=1e-4, rtol=1e-4)  # float32, sums of up to 18
    assert compared > 8


def test_an_ar_model_s_norms_are_also_those_of_the_sinks_on_column_sums() -> None:
    """Under a causal mask the scales find other sinks; all of them are sampled, so that the sums are exact."""
    settings = {**figure1.SMALL, "prompts": 2, "batch": 2, "sampler": {"gen_length": 12}, "late": 3, "eps": 1.0}
    bench = SimpleNamespace(model=dl.load)
    value = figure1.run({"model": "toy-ar", "start": 0}, settings, bench)
    _, recording = figure1.recorded_runs.record_prompts({"model": "toy-ar", "start": 0}, settings, bench)
    expected = {}
    for name, relative in (("any", True), (figure1.COLUMNS, False)):
        is_sink = dl.find_sinks(recording, dl.AboveMean(1.0), relative=relative).is_sink
        norms = torch.as_tensor(recording.value_norm).double()
        for row in range(2):
            own = is_sink[:, row]
            expected[name] = [float(norms[:, row][own].sum()), int(own.sum())]
            found = value[name][row]
            assert found[2] == expected[name][1] > 0
            assert found[0] == pytest.approx(expected[name][0], rel=1e-4)
    assert expected["any"] != expected[figure1.COLUMNS]
    assert figure1.COLUMNS not in figure1.run({"model": "toy", "start": 0}, {**settings, "prompts": 1}, bench)


def test_prompts_without_sinks_in_one_network_stay_paired_with_the_others() -> None:
    sums = {  # network -> the three sums of every prompt: the second has no sink in network 1
        0: [[2.0, 4.0, 2], [3.0, 4.0, 2], [1.0, 4.0, 2], [0.0, 0.0, 0]],
        1: [[2.0, 4.0, 2], [0.0, 0.0, 0], [1.0, 2.0, 1], [0.0, 0.0, 0]],
    }
    records = [
        Record({"model": "toy", "network": number, "start": 0}, {"any": rows}, 0.0) for number, rows in sums.items()
    ]
    results = Results({"settings": {}}, records)
    found = figure1.ratio(results, "toy", "any")
    assert found.value == pytest.approx((6 / 12 + 3 / 6) / 2)
    assert found.n == 3  # no network has a pair in the last prompt
    wanted = over_networks([([2.0, 3.0, 1.0], [4.0, 4.0, 4.0]), ([2.0, 0.0, 1.0], [4.0, 0.0, 2.0])], bounds=(0, 1))
    assert (found.low, found.high) == (wanted.low, wanted.high)
    assert figure1.has_pairs(results, "toy", "any")
    assert not figure1.has_pairs(results, "toy", "masked")


def test_a_batch_without_any_sink_is_stored_with_no_pairs() -> None:
    settings = {**figure1.SMALL, "prompts": 2, "batch": 2, "sampler": {"gen_length": 8, "steps": 2}, "eps": 1e6}
    found = figure1.run({"model": "toy", "start": 0}, settings, SimpleNamespace(model=dl.load))
    assert found["found"] == 0
    assert found["any"] == found["masked"] == [[0.0, 0.0, 0]] * 2
    assert np.sum(found["any_counts"]) == 0
    record = Record({"model": "toy", "start": 0}, found, 0.0)
    assert not figure1.has_pairs(Results({"settings": settings}, [record]), "toy", "any")
    rendered = figure1.render(Results({"settings": settings}, [record]))
    assert rendered.tables[0].rows == []
    assert not rendered.findings


def test_a_model_without_a_learned_sink_has_no_figure_3() -> None:
    recording = SimpleNamespace(run=SimpleNamespace(tokens=torch.zeros(1, 4)), sinks=0, model="toy")
    with pytest.raises(ValueError, match="toy has no learned sink token"):
        figure3.per_prompt(recording)


def test_contributions_are_those_of_the_patterns_in_float64(recorded: tuple) -> None:
    model, recording = recorded
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(recording.received.shape, generator=generator) < 0.3
    reducers = [noop_bound.Contribution(keys, "some", part) for part in noop_bound.PARTS]
    found = rerun(model, recording.run, [*reducers, UpdateNorm(), ResidualNorm()])
    for step, row, layer in ((0, 0, 0), (1, 1, 2), (1, 0, 3)):
        pattern, values, content = by_hand(model, recording.run, step, row, layer)
        canvas = content.shape[0]
        chosen = torch.cat([keys[step, row, layer][:, :canvas][:, content], keys[step, row, layer][:, canvas:]], -1)
        part = pattern * chosen[:, None]
        wanted = {
            "mass": part.sum(-1),
            "bound": (part * values.norm(dim=-1)[:, None]).sum(-1),
            "output": torch.einsum("hqk,hkd->hqd", part, values).norm(dim=-1),
        }
        for name, expected in wanted.items():
            measured = getattr(found, f"some_{name}")[step, row, layer][:, content]
            torch.testing.assert_close(measured.double(), expected, rtol=1e-4, atol=1e-5)
        whole = torch.einsum("hqk,hkd->hqd", pattern, values).norm(dim=-1)
        torch.testing.assert_close(
            found.mixed_norm[step, row, layer][:, content].double(), whole, rtol=1e-4, atol=1e-5
        )
        assert bool((whole <= (pattern * values.norm(dim=-1)[:, None]).sum(-1)).all())


def test_random_keys_have_the_sinks_attention_and_are_no_sinks(recorded: tuple) -> None:
    _, recording = recorded
    sinks = dl.find_sinks(recording, dl.AboveMean(1.5))
    sets = noop_bound.key_sets(recording, sinks, seed=3)
    received = recording.received_sums().nan_to_num()
    canvas = recording.run.tokens.shape[1]
    some = sinks.is_sink.any(-1)
    assert int(some.sum()) > 20
    for name in ("mass", "count"):
        assert not bool((sets[name] & sinks.is_sink).any())
        assert not bool(sets[name][..., canvas:].any())
        assert not bool((sets[name] & sinks.scores.isnan()).any())
        assert not bool(sets[name][~some].any())
    assert torch.equal(sets["count"].sum(-1), sinks.is_sink.sum(-1))
    theirs, ours = ((received * one).sum(-1)[some] for one in (sets["sinks"], sets["mass"]))
    # The sum ends within half of the key that is drawn last.
    assert bool(((ours - theirs).abs() <= received.amax(-1)[some] / 2 + 1e-4).all())
    assert float(ours.sum() / theirs.sum()) == pytest.approx(1, abs=0.1)
    again = noop_bound.key_sets(recording, sinks, seed=4)
    assert not torch.equal(again["mass"], sets["mass"])


def noop_results(short: float, correlation: float) -> Results:
    """Two models' worth of planted sums: sinks whose values are `short` times the others'."""
    generator = np.random.default_rng(0)
    mass = generator.uniform(1, 2, (12, 4))
    value = {
        "sinks_mass": mass, "sinks_bound": short * mass, "sinks_output": short * mass, "mass_mass": 2 * mass,
        "mass_bound": 2 * mass, "mass_output": 2 * mass, "correlation": correlation + 0.01 * mass,
        "correlation_count": 0.01 * generator.normal(size=(12, 4)),
    }  # fmt: skip
    given = {name: values.tolist() for name, values in value.items()}
    given |= {"heads_bound": [[2.0] * 4] * 4, "heads_output": [[1.0] * 4] * 4, "excess": -0.1}
    settings = {**noop_bound.SMALL, "models": ["toy"]}
    item = {"model": "toy", "network": 0, "start": 0}
    return Results({"settings": settings, "small": True}, [Record(item, given, 1.0)])


@pytest.mark.parametrize(
    ("short", "correlation", "verdicts"),
    [(0.25, -0.5, ["agrees"] * 4), (1.5, 0.5, ["agrees", *["disagrees"] * 3])],
)
def test_no_op_verdicts_of_planted_sums(short: float, correlation: float, verdicts: list[str]) -> None:
    results = noop_results(short, correlation)
    # Twice the attention at random keys does not count: the ratio is per unit of attention.
    assert noop_bound.per_attention(results, "toy", "bound").value == pytest.approx(short)
    assert noop_bound.per_attention(results, "toy", "bound", 2).value == pytest.approx(short)
    assert [one.verdict for one in noop_bound.render(results).findings] == verdicts


def test_the_p_value_of_a_claim_of_two_parts_is_that_of_the_weaker_one() -> None:
    """The correlation is just below 0, its difference to random keys far below: p is that of the correlation."""
    results = noop_results(0.25, -0.5)
    value = dict(results.records[0].value)
    value["correlation"] = [[-0.08] * 4, [0.0] * 4] * 6
    value["correlation_count"] = [[0.5] * 4] * 12
    planted = Results(results.config, [Record(results.records[0].item, value, 1.0)])
    *_, found = noop_bound.findings(planted, "toy")
    correlation = noop_bound.mean_known(noop_bound.by_network(planted, "toy", "correlation"))
    own = p_value(over(correlation, bounds=(-1, 1)), 0.0)
    assert found.verdict == "agrees"
    assert found.p == own
    assert own is not None
    assert 1e-6 < own < 0.05


def test_heads_are_drawn_by_layer_or_by_thirds() -> None:
    bound, output = np.arange(8.0).reshape(4, 2), np.arange(8.0).reshape(4, 2) / 2
    few = noop_bound.by_depth(bound, output)
    assert list(few) == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert few["layer 3"] == [(6.0, 3.0), (7.0, 3.5)]
    many = noop_bound.by_depth(np.ones((30, 9)), np.ones((30, 9)))
    assert {name: len(points) for name, points in many.items()} == {
        f"{third} third of the layers": 90 for third in ("first", "middle", "last")
    }


def test_a_forest_plot_shows_intervals_seeds_margin_and_no_formulas() -> None:
    rows = {"a $x$": Interval(-0.1, -0.3, 0.1, 5), "b": Interval(0.2, float("nan"), float("nan"), 1)}
    figure = forest_plot(rows, {"a $x$": [-0.2, 0.0]}, x="nats", shaded=(-0.01, 0.01))
    (axes,) = figure.axes
    drawn = [line.get_xdata() for line in axes.lines]
    assert any(list(data) == [-0.3, 0.1] for data in drawn)
    assert any(list(data) == [-0.2, 0.0] for data in drawn)
    assert [float(data[0]) for data in drawn if len(data) == 1] == [-0.1, 0.2]
    assert sum(list(data) == [0.0, 0.0] for data in drawn) == 1
    (patch,) = axes.patches
    assert (patch.get_x(), patch.get_x() + patch.get_width()) == pytest.approx((-0.01, 0.01))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a $x$", "b"]
    assert not any(label.get_parse_math() for label in axes.get_yticklabels())


def test_scatter_plots_hold_every_point() -> None:
    figure = scatter_plots({"$m$": {"k": [(1.0, 2.0), (3.0, 1.0)], "l": [(0.0, 0.5)]}}, x="x", y="y", diagonal=True)
    (axes,) = figure.axes
    assert [drawn.get_offsets().tolist() for drawn in axes.collections] == [[[1.0, 2.0], [3.0, 1.0]], [[0.0, 0.5]]]
    assert axes.get_title(loc="left") == "$m$"


@pytest.mark.parametrize(
    ("ratio", "share", "verdicts"),
    [(0.3, 0.4, ["agrees", "agrees", "agrees"]), (0.9, 0.15, ["disagrees", "agrees", "disagrees"]),
     (0.9, 0.05, ["disagrees", "disagrees", "disagrees"])],
)  # fmt: skip
def test_a_sink_is_much_shorter_below_half_and_large_above_every_other_key(
    ratio: float, share: float, verdicts: list[str]
) -> None:
    noise = 1 + 0.01 * np.random.default_rng(0).normal(size=(2, 8, 4))
    # The first and the last layer say the opposite and do not count.
    inner = np.array([0, 1, 1, 0])
    values = {
        "norm_sink": np.where(inner, ratio, 2 - ratio) * noise, "norm_other": np.ones_like(noise),
        "share": np.where(inner, share, 0.5) * noise, "strongest": 0.25 * noise, "even": 0.1 * np.ones_like(noise),
    }  # fmt: skip
    records = [
        Record({"model": "toy-sink", "network": network, "start": 0},
               {name: value[network].tolist() for name, value in values.items()}, 1.0)
        for network in range(2)
    ]  # fmt: skip
    results = Results({"settings": {**figure3.SMALL, "models": ["toy-sink"]}, "small": True}, records)
    found = figure3.render(results).findings
    assert [one.verdict for one in found] == verdicts
    assert "2 networks" in found[0].here


def test_a_converted_model_is_the_tables_network() -> None:
    given = {**figure3.SMALL, "models": ["converted-sink"], "networks": 2, "prompts": 2, "batch": 2}
    items = list(figure3.EXPERIMENT.items(given))
    assert [(item["model"], item["network"]) for item in items] == [("converted-sink", 0), ("converted-sink", 1)]
    run = conversion(items[1], {**given, "conversions": {"steps": 1500, "batch_size": 16, "kept": "x"}})
    assert (run.variant, run.seed, run.start, run.steps, run.batch_size) == ("sink", 1, "toy-ar", 1500, 16)


@pytest.mark.parametrize("figure", ["figure1", "figure3"])
def test_figures_ask_every_prompt_once(figure: str) -> None:
    experiment = find_experiment(f"one-token-{figure}")
    given = {**experiment.small, "models": ["toy", "toy-sink"], "prompts": 5, "batch": 2}
    items = list(experiment.items(given))
    assert [(item["model"], item["start"]) for item in items] == [
        (model, start) for model in ("toy", "toy-sink") for start in (0, 2, 4)
    ]
    costs = [experiment.cost(item, given)[0] for item in items]
    assert [one.rows for one in costs] == [2, 2, 1] * 2
    # 32 steps of at most 32 of the prompt and 32 of the answer.
    assert {(one.passes, one.positions) for one in costs} == {(32, 64)}
    with pytest.raises(ValueError, match="prompts is 0"):
        list(experiment.items({**given, "prompts": 0}))


def test_the_page_names_the_networks_and_steps_of_the_twins() -> None:
    def entry(models: list[str], **given: object) -> SimpleNamespace:
        settings = {"models": models, "trained": "runs/twins", **given}
        return SimpleNamespace(results=SimpleNamespace(models=models, settings=settings))

    of = " there are 3: the shipped one of 10,000 steps, and twins of other seeds with "
    several = {"networks": {"": 3, "toy-gated": 1}, "twin_steps": {"": 3000, "toy-sink": 10_000}}
    figures = [
        entry(["toy", "toy-sink", "toy-gated", "converted-plain", "smollm2"], **several),
        entry(["toy", "converted-sink"], networks=3, twin_steps=3000),
        entry(["toy"], seeds=5),
    ]
    said = f" Of toy{of}3,000 steps, trained in float32. Of toy-sink{of}10,000 steps, trained in float32."
    assert twins_line(figures) == said
    assert twins_line([entry(["toy"], networks=1, twin_steps=3000)]) == ""


def test_no_two_curves_of_figure_1_look_alike() -> None:
    results = RESULTS / "one-token-figure1"
    rendering = figure1.render(load_results(figure1.EXPERIMENT, results))
    (axes,) = rendering.figures["norms"].axes
    styles = {line.get_label(): (line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}
    assert len(styles) == 10
    assert len(set(styles.values())) == 10
    assert styles["toy, sinks"][:2] == styles["toy, others"][:2]
