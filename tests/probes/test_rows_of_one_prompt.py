"""Rows of equal prompts, such as those of several seeds, are one prompt of an interval."""

from collections.abc import Callable
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens import hooks, probes, sinks
from dlm_lens.sampling import DenoisingRun
from dlm_lens.statistics import SHARE_BOUNDS, Estimate, ratio_by_prompt
from dlm_lens.testing import tiny
from tests.hooks.test_feature_edits import autoencoder

PROMPTS = [[5, 9, 14, 3, 20], [9, 16, 4, 20], [7, 30, 12]]
READ: dict[str, Callable[[Any, DenoisingRun], list[Estimate]]] = {
    "commitment": lambda model, run: [probes.commitment(model, run).mean_lead],
    "decision_order": lambda _, run: [probes.decision_order(run).mean],
    "token_smearing": lambda model, run: [
        (found := probes.token_smearing(model, run)).share("near"),
        found.mean("own"),
    ],
    "retrieval_heads": lambda model, run: [
        (found := probes.retrieval_heads(model, run)).score(1, 2, "mass"),
        found.excess(0, 1, "mass"),
    ],
    "early_attention": lambda model, run: [
        (found := probes.early_attention(dl.recording.rerun(model, run, [BLOCK]), keys="all")).mean("recall"),
        found.excess("correlation", "step before"),
    ],
    "insertion_loss": lambda model, run: [
        (found := probes.insertion_loss(model, run, autoencoder(model))).recovered(1, "sae"),
        found.added(1, "untrained"),
    ],
    "agreement": lambda model, run: [
        probes.activation_patching(model, run, "zero", steps=[1]).agreement(
            probes.attribution_patching(model, run, "zero", steps=[1])
        )
    ],
    "faithfulness": lambda model, run: [
        probes.faithfulness(
            model, run, HALF, probes.edge_attribution(model, run, HALF, steps=[1]).circuit(64), steps=[1]
        ).normalised
    ],
}
BLOCK = dl.ReceivedAttention("block", min_viewers=1)
HALF = [hooks.scale_attention([0], 0.5)]

TABLES: dict[str, Callable[[Any, DenoisingRun], Any]] = {
    "region_flow": lambda model, run: probes.region_flow(dl.recording.rerun(model, run, [dl.RegionMass()])).table(),
    "sink_updates": lambda model, run: probes.sink_updates(model, run, sinks_of(model, run), attends=0.1).table(),
    "pattern_stability": lambda model, run: probes.pattern_stability(model, run, RULE).by_change(),
    "sink_anatomy": lambda model, run: probes.sink_anatomy(model, run, RULE).causes(),
    "sink_anatomy, variance": lambda model, run: probes.sink_anatomy(model, run, RULE).variance(),
    "channel_removal": lambda model, run: probes.channel_removal(model, run, controls=1, detector=RULE).table(),
    "value_norms": lambda model, run: (
        dl.value_norms(
            dl.recording.rerun(model, run, [dl.ReceivedAttention(), dl.ValueNorm()]), sinks_of(model, run)
        ).profile
    ),
    "compare_query_classes": lambda model, run: sinks.compare_query_classes(
        *(dl.received_over_steps(model, run, queries=name, min_viewers=1) for name in ("masked", "unmasked")), RULE
    ),
    "compare_detectors": lambda model, run: sinks.compare_detectors(
        dl.received_over_steps(model, run), [RULE, dl.AboveStd(1.0)]
    ),
    "compare_detectors, Sinks": lambda model, run: sinks.compare_detectors(
        None, [sinks_of(model, run), dl.find_sinks(dl.received_over_steps(model, run), dl.AboveStd(1.0))]
    ),
    "eps_sweep": lambda model, run: sinks.eps_sweep(dl.received_over_steps(model, run), [0.1, 0.2]),
    "token_enrichment": lambda model, run: sinks.token_enrichment(paths_of(model, run), by="layer"),
    "position_enrichment": lambda model, run: sinks.position_enrichment(paths_of(model, run), by="head"),
    "frontier_alignment": lambda model, run: sinks.frontier_alignment(paths_of(model, run), in_block=run.in_block),
    "frontier_alignment, Sinks": lambda model, run: sinks.frontier_alignment(
        dl.trajectories(sinks_of(model, run)), by="layer"
    ),
}
RULE = dl.AboveMean(eps=0.2)


def sinks_of(model: Any, run: DenoisingRun) -> dl.Sinks:
    return dl.find_sinks(dl.recording.rerun(model, run, [dl.ReceivedAttention()]), RULE)


def paths_of(model: Any, run: DenoisingRun) -> sinks.Trajectories:
    return dl.trajectories(dl.received_over_steps(model, run), RULE)


@pytest.mark.parametrize("name", READ)
def test_an_interval_of_repeated_prompts_is_that_of_the_prompts(name: str) -> None:
    model = tiny("llada").double()  # in float32 another processor's rounding is in differences of logits
    once, often = (
        READ[name](model, dl.denoise(model, PROMPTS * copies, steps=4, gen_length=8)) for copies in (1, 8)
    )
    for one, other in zip(once, often, strict=True):
        assert one.prompts == other.prompts == len(PROMPTS)
        assert (other.value, other.low, other.high) == pytest.approx((one.value, one.low, one.high), rel=1e-4)


def test_remasked_positions_are_drawn_by_row_and_summed_by_prompt() -> None:
    model = tiny("llada")
    found = probes.remask(model, PROMPTS * 4, at=[2], steps=4, gen_length=8)
    assert found.mean("direct", 2).prompts == len(PROMPTS)
    assert found.mean("direct", 2).value == pytest.approx(float(found.direct.nanmean()))


@pytest.mark.parametrize("name", ["logit_lens", "sink_writes"])
def test_the_tables_of_entries_have_the_intervals_of_the_prompts(name: str) -> None:
    model, tables = tiny("llada"), []
    for copies in (1, 8):
        run = dl.denoise(model, PROMPTS * copies, steps=4, gen_length=8)
        if name == "logit_lens":
            tables.append(dl.logit_lens(model, run, steps=[2]).summary())
        else:
            rec = dl.record(model, PROMPTS * copies, [dl.ReceivedAttention()], steps=4, gen_length=8)
            found = dl.find_sinks(rec, dl.AboveMean(eps=0.2))
            table = probes.sink_writes(model, rec.run, found, steps=[2], limit=100_000).summary()
            tables.append(table[table["group"] == "sink"])  # the others are drawn
    assert len(tables[0])
    for column in [column for column in tables[0] if column.endswith(("_low", "_high"))]:
        assert tables[1][column].tolist() == pytest.approx(tables[0][column].tolist(), rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_have_the_intervals_of_the_prompts(name: str) -> None:
    model = tiny("llada")
    once, often = (
        TABLES[name](model, dl.denoise(model, PROMPTS * copies, steps=4, gen_length=8)) for copies in (1, 8)
    )
    columns = [column for column in once if column.endswith(("low", "high", "prompts"))]
    assert len(once)
    assert columns
    for column in columns:
        assert often[column].tolist() == pytest.approx(once[column].tolist(), rel=1e-3, abs=1e-6, nan_ok=True)


def test_moved_tokens_are_drawn_by_row_and_summed_by_prompt() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS * 4, steps=4, gen_length=8)
    found = sinks.position_or_token(model, run, RULE, steps=[1], min_viewers=1)
    table = found.summary()
    assert table["sequences"].tolist() == [12] * len(table)
    assert table["prompts"].tolist() == [3] * len(table)
    for line in table.itertuples():
        trials = found.trials[found.trials["change"] == line.change]
        hits = (trials["outcome"] == "token").groupby(trials["batch"] % 3).sum().to_numpy(float)
        cases = trials.groupby(trials["batch"] % 3).size().to_numpy(float)
        _, low, high = ratio_by_prompt(hits, cases, bounds=SHARE_BOUNDS)
        assert (line.token_low, line.token_high) == pytest.approx((float(low), float(high)))


@pytest.mark.parametrize("draw", [dl.viz.region_mass, dl.viz.score_distribution])
def test_the_bands_of_figures_are_of_prompts(draw: Callable[[Any], Any]) -> None:
    model, bands = tiny("llada"), []
    for copies in (1, 8):
        reducers = [dl.ReceivedAttention(), dl.RegionMass()]
        figure = draw(dl.record(model, PROMPTS * copies, reducers, steps=4, gen_length=8))
        bands.append([each.get_paths()[0].vertices for axes in figure.axes for each in axes.collections])
    assert bands[0]
    for one, other in zip(*bands, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-6, nan_ok=True)


def test_pairs_of_sinks_have_the_number_of_their_prompt() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS * 3, steps=4, gen_length=8)
    rec = dl.recording.rerun(model, run, [dl.ReceivedAttention(), dl.ValueNorm()])
    norms = dl.value_norms(rec, sinks_of(model, run))
    assert norms.prompt.unique().tolist() == [0, 1, 2]
    assert norms.ratio.prompts == 3


def test_the_sums_of_a_mechanism_are_by_prompt() -> None:
    model = tiny("llada")
    tables = [
        probes.sink_mechanism(model, PROMPTS * copies, RULE, steps=4, gen_length=8).table() for copies in (1, 8)
    ]
    masked = [table[table["masked"] == "sinks"] for table in tables]  # the others are masked at random
    for column in ("dependent_low", "others_high", "correlation_low", "correlation_high"):
        assert masked[1][column].tolist() == pytest.approx(masked[0][column].tolist(), rel=1e-3, nan_ok=True)


def test_rows_without_a_prompt_are_drawn_each_on_its_own() -> None:
    """They have nothing in common, so that each is a case of its own; so are those of special tokens alone."""
    model = tiny("llada")
    end = model.tokenizer.eos_token_id
    run = dl.denoise(model, [[end], [5, 9], [end], [5, 9]], steps=2, gen_length=4)
    assert run.row_prompts.tolist() == [0, 1, 2, 1]
