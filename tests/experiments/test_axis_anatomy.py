"""axis-anatomy: counts of an untrained network against the probes, and a planted copying head."""

from types import SimpleNamespace
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.experiments import find_experiment
from dlm_lens.experiments.attention_sinks.problems import problems_of
from dlm_lens.experiments.denoising_axis import axis_anatomy
from dlm_lens.experiments.results import Record, Results
from dlm_lens.probes import channel_removal, retrieval_heads, sink_anatomy
from dlm_lens.testing import tiny


@pytest.mark.long
def test_an_item_holds_what_the_probes_find() -> None:
    settings: dict[str, Any] = {
        "task": "toy_arithmetic", "chat": False, "prompts": 2, "batch": 2, "sampler": {"gen_length": 4}, "eps": 0.5,
        "controls": 1,
    }  # fmt: skip
    model = tiny("llada")
    bench = SimpleNamespace(model=lambda name: model)
    value = axis_anatomy.run({"model": "m", "start": 0}, settings, bench)
    done = dl.denoise(model, [one.prompt for one in problems_of(settings, 0)], gen_length=4)
    rule = dl.AboveMean(0.5)
    anatomy = sink_anatomy(model, done, rule)
    causes = anatomy.causes().set_index("cause")["sinks"].to_dict()
    assert {name: sum(one[name] for one in value["sinks"]) for name in causes} == causes
    survival = anatomy.survival().set_index("pattern")
    for pattern in axis_anatomy.PATTERNS:
        kept, chance = (sum(one[kind][pattern] for one in value["sinks"]) for kind in ("survive", "chance"))
        assert kept / anatomy.sinks == pytest.approx(survival.loc[pattern, "survive"])
        assert chance / anatomy.sinks == pytest.approx(survival.loc[pattern, "chance"], rel=1e-4)
    assert value["heads"][1][0][2][0] == float(retrieval_heads(model, done).sums[1, 0, 2, 0])
    removal = channel_removal(model, done, controls=1, detector=rule)
    kl, count = value["removal"][0][0][0]
    assert kl / count == pytest.approx(float(removal.sums[0, 0, 0, 0] / removal.sums[0, 0, 0, 1]), rel=1e-4)


def planted(prompts: int) -> Results:
    """Head 1 copies in every prompt; head 0 in prompt 0 alone, which would choose it."""
    heads = [[[[4.0, 4.0 * (row == 0), 0.0, 1.0, 0.0], [4.0, 3.0, 0.0, 1.0, 0.0]]] for row in range(prompts)]
    record = Record({"model": "m", "start": 0}, {"heads": heads}, 0.0)
    return Results({"settings": {"models": ["m"]}}, [record])


def test_the_best_head_is_tested_on_prompts_that_did_not_choose_it() -> None:
    layer, head, score, excess = axis_anatomy.best_head(planted(4), "m")
    assert (layer, head, score.value, excess.value) == (0, 1, 0.75, 0.5)
    layer, head, score, excess = axis_anatomy.best_head(planted(2), "m")  # chosen on prompt 0, where head 0 is best
    assert (layer, head, score.value, excess.value) == (0, 0, 0.0, -0.25)


def test_the_experiment_is_listed() -> None:
    assert find_experiment("axis-anatomy") is axis_anatomy.EXPERIMENT
