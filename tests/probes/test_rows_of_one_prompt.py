"""Rows of equal prompts, such as those of several seeds, are one prompt of an interval."""

from collections.abc import Callable
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks.statistics import Estimate
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
}
BLOCK = dl.ReceivedAttention("block", min_viewers=1)

TABLES: dict[str, Callable[[Any, DenoisingRun], Any]] = {
    # A share of 0 or 1 has Wilson's interval where every prompt is one row, and no width where it is several.
    "region_flow": lambda model, run: (
        probes.region_flow(dl.recording.rerun(model, run, [dl.RegionMass()])).table().query("0.01 < mass < 0.99")
    ),
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
}
RULE = dl.AboveMean(eps=0.2)


def sinks_of(model: Any, run: DenoisingRun) -> dl.Sinks:
    return dl.find_sinks(dl.recording.rerun(model, run, [dl.ReceivedAttention()]), RULE)


@pytest.mark.parametrize("name", READ)
def test_an_interval_of_repeated_prompts_is_that_of_the_prompts(name: str) -> None:
    model = tiny("llada")
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
            sinks = dl.find_sinks(rec, dl.AboveMean(eps=0.2))
            table = probes.sink_writes(model, rec.run, sinks, steps=[2], limit=100_000).summary()
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
    sinks = [table[table["masked"] == "sinks"] for table in tables]  # the others are masked at random
    for column in ("dependent_low", "others_high", "correlation_low", "correlation_high"):
        assert sinks[1][column].tolist() == pytest.approx(sinks[0][column].tolist(), rel=1e-3, nan_ok=True)


def test_rows_without_a_prompt_are_drawn_each_on_its_own() -> None:
    """They have nothing in common, so that each is a case of its own; so are those of special tokens alone."""
    model = tiny("llada")
    end = model.tokenizer.eos_token_id
    run = dl.denoise(model, [[end], [5, 9], [end], [5, 9]], steps=2, gen_length=4)
    assert run.row_prompts.tolist() == [0, 1, 2, 1]
