"""axis-pruning: planted scores, and an item of an untrained network against runs by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.experiments.attention_sinks.problems import problems
from dlm_lens.experiments.denoising_axis import axis_pruning
from dlm_lens.experiments.denoising_axis.axis_pruning import METHODS, difference, findings, reference_answers
from dlm_lens.experiments.results import Record, Results
from dlm_lens.probes import pruned
from dlm_lens.testing import tiny


def planted() -> Results:
    """Sinks discounted gives 0.4 more than each of two controls' means, and 0.1 less than Wanda."""
    values = {METHODS[0]: [-3.0], METHODS[1]: [-0.5], METHODS[2]: [-0.6], METHODS[3]: [-0.9, -1.1]}
    records = []
    for method, lines in values.items():
        for draw, value in enumerate(lines):
            item = {"model": "m", "sparsity": 0.5, "method": method, "draw": draw}
            likelihood = [value + 0.01 * prompt for prompt in range(6)]
            records.append(Record(item, {"right": [True] * 6, "likelihood": likelihood, "discounted": 1.0}, 0.0))
    return Results({"settings": {"models": ["m"], "sparsities": [0.5]}}, records)


def test_differences_and_verdicts_of_planted_scores() -> None:
    found = planted()
    assert difference(found, "m", 0.5, "likelihood", METHODS[3]).value == pytest.approx(0.4)
    assert difference(found, "m", 0.5, "likelihood", METHODS[1]).value == pytest.approx(-0.1)
    sinks, wanda = findings(found)
    assert (sinks.verdict, wanda.verdict) == ("agrees", "agrees")  # against the control, and against magnitude
    assert "-0.100" in sinks.here


def test_calibration_and_held_out_prompts_are_disjoint_and_solutions_fit_them() -> None:
    settings = axis_pruning.EXPERIMENT.small
    every = problems(settings["task"])
    assert settings["prompts"] + settings["calibration"] <= len(every)
    answers = reference_answers(settings)
    assert len(answers) == settings["prompts"]
    assert all(text.endswith(f"answer {one.target} .") for text, one in zip(answers, every, strict=False))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"prompts": 96}, "prompts is 96 and calibration 16; each is at least 1, and both together at most 100"),
        ({"prompts": 500}, "prompts is 500"),
        ({"calibration": 0}, "calibration 0; each is at least 1"),
        ({"task": "english_arithmetic"}, "task is 'english_arithmetic'; axis-pruning needs solutions"),
    ],
)
def test_prompts_that_overlap_or_have_no_solution_are_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        list(axis_pruning.items({**axis_pruning.EXPERIMENT.small, **changed}))
    assert len(list(axis_pruning.items({**axis_pruning.EXPERIMENT.small, "prompts": 84}))) == 16


@pytest.mark.long
def test_an_item_is_a_run_of_the_pruned_network() -> None:
    settings: dict[str, Any] = {
        "task": "toy_arithmetic", "prompts": 2, "calibration": 2, "sampler": {"gen_length": 4}, "samples": 2,
        "std": 2.0, "alpha": 5.0,
    }  # fmt: skip
    model = tiny("llada")
    bench = SimpleNamespace(model=lambda name: model, once=lambda key, compute: compute())
    for method, norms in (("none", None), ("magnitude", None), (METHODS[2], "sinks")):
        sparsity = 0.0 if method == "none" else 0.4
        item = {"model": "m", "sparsity": sparsity, "method": method, "draw": 0}
        value = axis_pruning.run(item, settings, bench)
        texts = [one.prompt for one in problems("toy_arithmetic")[:2]]
        measured = axis_pruning._norms(model, norms, 0, settings) if norms else None
        with pruned(model, sparsity, measured):
            answers = reference_answers(settings)
            likelihood = dl.log_likelihood(model, texts, answers, "mc", samples=2, seed=[0, 1])
        assert value["likelihood"] == pytest.approx(likelihood.per_token.tolist(), abs=1e-4)
        assert (value["discounted"] is not None) == (norms is not None)
