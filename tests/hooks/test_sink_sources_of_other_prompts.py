"""`mask_sinks(source=)` takes sinks that were found in a run of the same prompts, row by row."""

from typing import Any

import pytest
import torch

from dlm_lens import (
    AboveMean,
    bridge,
    denoise,
    find_sinks,
    load,
    received_of,
    received_over_steps,
    record,
)
from dlm_lens.hooks import at_layers, mask_sinks
from dlm_lens.sinks import received_from_pattern
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3], [6, 2, 4, 7]]
SETTINGS = {"steps": 4, "gen_length": 4}
RULE = AboveMean(0.1)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("kind", ["received", "sinks"])
def test_rows_that_are_swapped_are_refused(kind: str, guided: bool) -> None:
    model = tiny("llada")
    settings = {**SETTINGS, **({"cfg_scale": 1.5} if guided else {})}
    recording = record(model, PROMPTS, **settings)
    hook = mask_sinks(RULE, source=received_of(recording))
    if kind == "sinks":
        hook = mask_sinks(source=find_sinks(recording, RULE))
    same = denoise(model, PROMPTS, hooks=[hook], **settings)
    assert same.settings["columns_hidden"][0] > 0
    with pytest.raises(ValueError, match="row 0 of the source is of another prompt than row 0 of the run; give"):
        denoise(model, PROMPTS[::-1], hooks=[hook], **settings)
    with pytest.raises(ValueError, match="row 1 of the source is of another prompt"):
        denoise(model, [PROMPTS[0], [6, 2, 4, 8]], hooks=[hook], **settings)


@pytest.mark.parametrize("guided", [False, True])
def test_more_rows_than_the_source_has_are_not_the_halves_of_guidance(guided: bool) -> None:
    model = tiny("llada")
    settings = {**SETTINGS, **({"cfg_scale": 1.5} if guided else {})}
    source = received_of(record(model, PROMPTS, **settings))
    with pytest.raises(ValueError, match="row 0 of the source is of another prompt than row 2 of the run"):
        denoise(model, [*PROMPTS, [1, 2, 3, 4], [4, 4, 4, 4]], hooks=[mask_sinks(RULE, source=source)], **settings)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["received", "sinks"])
def test_the_prompts_of_a_pattern_without_steps_are_compared(kind: str, rows: int) -> None:
    """Its tokens have no axis of steps to take the first step of."""
    model = tiny("llada")
    pattern = torch.rand(rows, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.tensor([[*prompt, 0, 0, 0, 0] for prompt in PROMPTS[:rows]])
    source = received_from_pattern(pattern, dims=("batch", "layer", "head"), tokens=tokens)
    hook = mask_sinks(RULE, source=source) if kind == "received" else mask_sinks(source=find_sinks(source, RULE))
    assert denoise(model, PROMPTS[:rows], hooks=[hook], **SETTINGS).settings["columns_hidden"][0] > 0
    with pytest.raises(ValueError, match="row 0 of the source is of another prompt than row 0 of the run"):
        denoise(model, PROMPTS[::-1][:rows], hooks=[hook], **SETTINGS)


def test_one_row_is_for_all() -> None:
    model = tiny("llada")
    source = received_of(record(model, [PROMPTS[0]], **SETTINGS))
    run = denoise(model, PROMPTS, hooks=[mask_sinks(RULE, source=source)], **SETTINGS)
    assert run.settings["columns_hidden"][0] > 0


def test_a_source_of_more_steps_is_of_another_run() -> None:
    model = tiny("llada")
    source = received_of(record(model, PROMPTS, **SETTINGS))
    with pytest.raises(ValueError, match="the source has 4 steps and the run 2; give one of the same settings"):
        denoise(model, PROMPTS, hooks=[mask_sinks(RULE, source=source)], **{**SETTINGS, "steps": 2})


@pytest.mark.parametrize("heads", [[2], [1, 3]])
def test_a_source_of_some_heads_is_refused_where_each_head_has_sinks_of_its_own(heads: list[int]) -> None:
    model = tiny("llada")
    part = received_of(record(model, PROMPTS, **SETTINGS).select(head=heads))
    for hook in (mask_sinks(RULE, source=part, per="head"), mask_sinks(source=find_sinks(part, RULE))):
        with pytest.raises(
            ValueError, match=f"the sinks are of {len(heads)} heads and a layer has 4; give those of all"
        ):
            denoise(model, PROMPTS, hooks=[hook], **SETTINGS)
    # A layer's sinks by the mean of some heads are sinks of the layer.
    hook = mask_sinks(RULE, source=part, per="layer")
    assert denoise(model, PROMPTS, hooks=[hook], **SETTINGS).settings["columns_hidden"][0] > 0


def test_a_source_of_another_model_warns(caplog: pytest.LogCaptureFixture) -> None:
    toy, gated, prompt = load("toy"), load("toy-gated"), "sort 4 2 9 1 :"
    settings: dict[str, Any] = {"steps": 2, "gen_length": 4}
    received = received_over_steps(toy, denoise(toy, prompt, **settings))
    sinks = find_sinks(received, AboveMean(1.0))
    assert received.model == sinks.model == "toy"
    inner = (mask_sinks(source=sinks), mask_sinks(AboveMean(1.0), source=received))
    for hook, named in ((inner[0], inner[0]), (at_layers(inner[1], [0, 1]), inner[1])):
        denoise(toy, prompt, hooks=[hook], **settings)
        bridge(toy).denoise(prompt, hooks=[hook], **settings)
        assert not caplog.records
        denoise(gated, prompt, hooks=[hook], **settings)
        bridge(gated).denoise(prompt, hooks=[hook], **settings)
        message = f"{named}: the source is of the model toy, and the run of toy-gated"
        assert [record.getMessage() for record in caplog.records] == [message] * 2
        caplog.clear()
