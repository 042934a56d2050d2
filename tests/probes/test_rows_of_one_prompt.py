"""Rows of equal prompts, such as those of several seeds, are one prompt of an interval."""

from collections.abc import Callable
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks.statistics import Estimate
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 14, 3, 20], [9, 16, 4, 20], [7, 30, 12]]
READ: dict[str, Callable[[Any, DenoisingRun], list[Estimate]]] = {
    "commitment": lambda model, run: [probes.commitment(model, run).mean_lead],
    "decision_order": lambda _, run: [probes.decision_order(run).mean],
    "token_smearing": lambda model, run: [
        (found := probes.token_smearing(model, run)).share("near"),
        found.mean("own"),
    ],
}


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
