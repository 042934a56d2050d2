"""Settings of likelihoods and of generation, as callers give them and as records keep them."""

from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.evaluation import GenerationSettings, HarnessLM, LikelihoodSettings
from dlm_lens.evaluation.settings import changed, read_settings, request_seed
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask, ids, texts


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (GenerationSettings, {"gen_length": 8, "canvas_length": 16}, "gen_length is 8 and canvas_length 16"),
        (GenerationSettings, {"stages": 3}, "stages is 3; it must be 1 or 2"),
        (GenerationSettings, {"stages": 0}, "stages is 0"),
        (GenerationSettings, {"steps": 0}, "steps is 0"),
        (GenerationSettings, {"temperature": -1.0}, "temperature is -1.0"),
        (GenerationSettings, {"cfg_scale": -1.0}, "cfg_scale is -1.0"),
        (LikelihoodSettings, {"samples": 0}, "samples is 0"),
        (LikelihoodSettings, {"strata": 0}, "strata is 0"),
        (LikelihoodSettings, {"cfg_scale": -0.5}, "cfg_scale is -0.5"),
        (LikelihoodSettings, {"method": "monte"}, "method is 'monte'; it must be one of 'mc'"),
        (LikelihoodSettings, {"samples": 4.5}, "samples is 4.5; it must be a whole number"),
        (LikelihoodSettings, {"samples": "abc"}, "samples is 'abc'; it must be a whole number"),
        (LikelihoodSettings, {"samples": None}, "samples is None; it must be a whole number"),
        (LikelihoodSettings, {"is_greedy": "no"}, "is_greedy is 'no'; it must be True or False"),
        (LikelihoodSettings, {"options": "eps"}, "options is 'eps'; it must be a mapping"),
        (LikelihoodSettings, "method=mc", "'method=mc' is no LikelihoodSettings; give an instance of it"),
        (GenerationSettings, {"temperature": float("nan")}, "temperature is nan; it must be a finite number"),
        (GenerationSettings, {"gen_length": "8"}, "gen_length is '8'; it must be a whole number"),
        (GenerationSettings, {"stages": "two"}, "stages is 'two'; it must be a whole number"),
        (GenerationSettings, {"stop": "no"}, "stop is 'no'; it must be True or False"),
        (LikelihoodSettings, {"top_p": 0.5}, "LikelihoodSettings has no setting 'top_p'; it has method, samples"),
        (GenerationSettings, {"max_new_tokens": 4}, r"\(max_new_tokens is gen_length here\); it has"),
        (GenerationSettings, {"step": 4}, r"'step' \(did you mean 'steps'\?\); it has"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_settings(kind, given)


def test_settings_may_be_themselves_a_mapping_or_nothing() -> None:
    wanted = LikelihoodSettings(samples=3)
    assert read_settings(LikelihoodSettings, wanted) is wanted
    assert read_settings(LikelihoodSettings, {"samples": 3}) == wanted
    assert read_settings(LikelihoodSettings, None) == LikelihoodSettings()


def test_a_record_holds_what_differs_from_the_defaults() -> None:
    assert changed(GenerationSettings()) == {}
    given = {"steps": 4, "stop": False, "options": {"top_p": 0.5}}
    assert changed(GenerationSettings(**given)) == given


def test_further_settings_reach_the_sampler_and_the_likelihood() -> None:
    model, (prompt,) = tiny("dream"), texts(1, 5, 5)
    common = {"gen_length": 12, "steps": 6, "temperature": 1.0}
    settings = {**common, "options": {"top_p": 0.2, "eps": 0.1}}
    (found,) = HarnessLM(model, generation=settings).generate_until(ask("generate_until", (prompt, {"until": []})))
    seed = request_seed(0, prompt)
    run = dl.denoise(model, ids(model, prompt), **common, top_p=0.2, eps=0.1, seed=seed)
    assert found.split() == [word for word in run.answers[0].split() if word.startswith("w")]
    other = dl.denoise(model, ids(model, prompt), **common, seed=seed)
    assert run.answers != other.answers

    likelihood = {"samples": 8, "options": {"protect_ends": False}, "is_greedy": False}
    ((value, _),) = HarnessLM(model, likelihood=likelihood).loglikelihood(ask("loglikelihood", (prompt, " w3")))
    direct = dl.log_likelihood(model, ids(model, prompt), [3], samples=8, seed=seed, protect_ends=False)
    assert value == pytest.approx(float(direct), abs=1e-5)  # with protected ends it is refused
