"""Recorded runs of a batch whose rows end at different steps: figures say of a prompt what they say of it alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.experiments import find_experiment
from dlm_lens.experiments.attention_sinks import recorded_runs

FIGURES = (
    "fig1-incoming", "fig3-distribution", "fig4-moving", "fig7-paths", "fig8-static", "fig10-eps", "beyond-blocks",
    "beyond-noise",
)  # fmt: skip
PROMPTS = 2
DRAWN = ("exponential ", ": block ", ": any ", "at random")
"""Parts of the names of nulls that are drawn on the canvas, which has other columns of padding alone."""


@pytest.fixture(scope="module")
def bench() -> Any:
    model = dl.load("toy-ar")
    return SimpleNamespace(model=lambda name: model)


def settings_of(figure: str, batch: int) -> dict[str, Any]:
    """The small settings of a figure for the first prompts, whose answers have 21 and 9 tokens."""
    small = find_experiment(figure).small
    return {**small, "models": ["toy-ar"], "prompts": PROMPTS, "batch": batch, "keep": None}


def numbers(value: Any) -> list[float]:
    """All numbers of a stored value, in its order."""
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in numbers(value[name])]
    if isinstance(value, list | tuple):
        return [number for one in value for number in numbers(one)]
    return [np.nan if value is None else float(value)] if isinstance(value, int | float | None) else []


def test_a_prompt_has_the_steps_before_its_text_ended(bench: Any) -> None:
    item = {"model": "toy-ar", "start": 0}
    found = recorded_runs.record_prompts(item, settings_of("fig4-moving", PROMPTS), bench)
    steps = [len(one.received["all"].values) for one in found]
    assert steps == found[0].run.row_steps.tolist()
    assert len(set(steps)) > 1
    for one in found:
        assert one.received["all"].counted.all()
        ends = one.run.tokens[one.row, one.run.prompt_length :] == one.run.tokenizer.eos_token_id
        assert int(ends.nonzero()[0]) + 1 == len(one.received["all"].values)


def test_prompts_without_sinks_have_no_shares_of_them() -> None:
    experiment = find_experiment("beyond-future")
    settings = {**experiment.small, "models": ["toy"], "prompts": 1, "batch": 1, "keep": None, "eps": 9.0}
    toy, item = dl.load("toy"), next(iter(experiment.items(settings)))
    found = experiment.run(item, settings, SimpleNamespace(model=lambda name: toy))
    assert found["places"] == [{"prompt": [None, None], "written": [None, None], "masked": [None, None]}]


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_says_of_a_prompt_what_it_says_of_it_alone(figure: str, bench: Any) -> None:
    run = find_experiment(figure).run
    together = run({"model": "toy-ar", "start": 0}, settings_of(figure, PROMPTS), bench)
    alone = [run({"model": "toy-ar", "start": start}, settings_of(figure, 1), bench) for start in range(PROMPTS)]
    lists = [name for name, value in together.items() if isinstance(value, list) and len(value) == PROMPTS]
    compared = [name for name in lists if name != "maps" and not any(part in name for part in DRAWN)]
    assert compared
    for name in compared:
        for row in range(PROMPTS):
            # Stored values are rounded, and a batch rounds in float32 otherwise than a row alone.
            np.testing.assert_allclose(
                numbers(together[name][row]), numbers(alone[row][name][0]), rtol=1e-3, atol=1e-2, err_msg=name
            )
