"""Tables of a part of a run (`Recording.select(step=)`) have the step numbers of the whole run."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import dlm_lens as dl
from dlm_lens import probes, sinks
from dlm_lens.testing import tiny
from tests.hooks.test_feature_edits import autoencoder

PROMPTS = [[5, 9, 13, 2, 7, 21, 30, 31], [3, 8, 1, 4, 4, 11, 6, 2]]
CORRUPTED = [[8, *prompt[1:]] for prompt in PROMPTS]
CHOSEN = [1, 3, 4]
RULE = dl.AboveMean(1.2)

TABLES: dict[str, Callable[[Any, dl.Recording], pd.DataFrame]] = {
    "logit_lens": lambda model, rec: dl.logit_lens(model, rec.run).table(),
    "activation_patching": lambda model, rec: probes.activation_patching(model, rec.run, CORRUPTED).table(),
    "column_attribution": lambda model, rec: probes.column_attribution(model, rec.run).table(None),
    "token_smearing": lambda model, rec: probes.token_smearing(model, rec.run).table(),
    "commitment": lambda model, rec: probes.commitment(model, rec.run).calibration(),
}

DRAWN: dict[str, Callable[[Any, dl.Recording], pd.DataFrame]] = {
    "sink_writes": lambda model, rec: probes.sink_writes(model, rec.run, dl.find_sinks(rec, RULE)).table(),
    "missed_effects": lambda model, rec: probes.missed_effects(
        model, rec.run, CORRUPTED, probes.attribution_patching(model, rec.run, CORRUPTED), top=1, subsets=4
    ).table(),
    "class_readability": lambda model, rec: probes.class_readability(model, rec.run).by_step(1),
    "insertion_loss": lambda model, rec: probes.insertion_loss(
        model, rec.run, autoencoder(model), nulls=[]
    ).by_step(),
    "position_or_token": lambda model, rec: sinks.position_or_token(
        model, rec.run, RULE, steps=range(rec.run.steps)
    ).table(),
}
"""Their numbers depend on draws, fits or means over all steps."""


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, dl.Recording]:
    model = tiny("llada")
    return model, dl.record(model, PROMPTS, gen_length=16, steps=6, seed=[3, 4])


@pytest.mark.parametrize("name", TABLES)
def test_a_line_of_a_part_is_that_of_the_whole_run(recorded: tuple[Any, dl.Recording], name: str) -> None:
    model, whole = recorded
    found, wanted = TABLES[name](model, whole.select(step=CHOSEN)), TABLES[name](model, whole)
    wanted = wanted[wanted["step"].isin(CHOSEN)]
    places = [name for name in ("step", "batch", "layer", "head", "position") if name in found]
    found, wanted = (table.sort_values(places, kind="stable", ignore_index=True) for table in (found, wanted))
    # Equal passes over equal canvases, of which other rows share a batch.
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DRAWN)
def test_a_table_of_a_part_has_the_step_numbers_of_the_whole(recorded: tuple[Any, dl.Recording], name: str) -> None:
    model, whole = recorded
    assert sorted(set(DRAWN[name](model, whole.select(step=CHOSEN))["step"])) == CHOSEN
