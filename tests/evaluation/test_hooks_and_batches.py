"""An answer under hooks does not depend on the requests beside it, also where steps depend on the tokens."""

from pathlib import Path
from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM
from dlm_lens.evaluation.generation_requests import Generator, Job, cut, end_ids
from dlm_lens.hooks import ablate, at_steps, attach_hooks, mask_positions, mask_random, mask_top_sinks
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask

PROMPTS = [
    [3, 41, 7, 7, 19, 28, 55, 2, 33, 14, 9, 50],
    [12, 8, 44, 31, 5, 26, 17, 1, 2, 3, 4, 6],
    [5, 6, 7, 8, 9, 10, 11, 12, 13, 8, 8, 1],
    [9, 8, 7, 6, 5, 4, 3, 2, 1, 22],
]
HOOKS = {
    "from the end": mask_positions(-1),
    "random": mask_random(2),
    "some steps": at_steps(mask_top_sinks(3), slice(1, 5)),
    "the step before": mask_top_sinks(2, source="previous"),
    "an activation": at_steps(ablate("mlp_out", "masked"), slice(1, 4)),
}
CASES: dict[str, dict[str, Any]] = {
    "llada": {"steps": 8, "block_length": 4, "threshold": 0.12},
    "dream": {"steps": 8, "block_length": 4, "cache": "prefix", "threshold": 0.3},
    "sdar": {"block_length": 4, "temperature": 0.0, "threshold": 0.3},
    "llada2": {"block_length": 4, "threshold": 0.3},
    "bd3lm": {"block_length": 4, "steps_per_block": 4},
    "sdlm": {"window_length": 4, "threshold": 0.3},
    "i_dlm": {"temperature": 0.0},
}


LENGTH = 8
"""Of the answers: two blocks."""


def check_alone(model: Any, settings: dict[str, Any], hooks: list[Any], length: int = LENGTH) -> None:
    jobs = [Job(i, prompt, 10 + i, (), length, tuple(sorted(settings.items()))) for i, prompt in enumerate(PROMPTS)]
    together = Generator(model, hooks=hooks, batch_size=4).run(jobs)
    found = {text.place: text.text for some in together for text in some}
    for i, prompt in enumerate(PROMPTS):
        run = dl.denoise(model, [prompt], gen_length=length, seed=[10 + i], hooks=hooks, **settings)
        answer = run.tokens[0].tolist()[len(prompt) : len(prompt) + length]
        assert found[i] == cut(model.tokenizer, answer, end_ids(model.config), ()).text


# In turn: every hook with three families, every family with two or three hooks; which rows share a run follows from
# the hook, and when a step ends from the family's sampler.
@pytest.mark.parametrize(
    ("family", "name"),
    [(one, name) for place, one in enumerate(CASES) for turn, name in enumerate(HOOKS) if (place + turn) % 2 == 0],
)
def test_a_generated_text_is_that_of_its_prompt_alone(family: str, name: str) -> None:
    check_alone(tiny(family), CASES[family], [HOOKS[name]])


@pytest.mark.parametrize("name", ["random", "some steps", "an activation"])
def test_a_rule_that_implies_a_threshold_has_steps_that_depend_on_the_tokens(name: str) -> None:
    """Dream's "confidence_threshold" without a threshold has 0.9, which a sharp network reaches somewhere."""
    model = tiny("dream")
    model.lm_head.weight.data *= 5.0
    check_alone(model, {"steps": 16, "block_length": 4, "remasking": "confidence_threshold"}, [HOOKS[name]], 16)


@pytest.mark.parametrize("family", ["bd3lm", "sdar", "llada2"])
def test_a_likelihood_with_positions_from_the_end_is_that_of_its_request_alone(family: str) -> None:
    model, hooks = tiny(family), [mask_positions(-2)]
    words = [" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS]
    requests = [(text, " w20 w21 w22 w23 w24") for text in words] + [(words[0], " w20 w21")]
    both = [
        HarnessLM(model, likelihood={"method": "mc", "samples": 8}, hooks=hooks, batch_size=size).loglikelihood(
            ask("loglikelihood", *requests)
        )
        for size in (8, 1)
    ]
    for together, alone in zip(*both, strict=True):
        assert together[0] == pytest.approx(alone[0], abs=1e-4)  # sums of float32 logits in other shapes


@pytest.mark.parametrize("family", ["llada", "causal", "sdar"])
@pytest.mark.parametrize("hook", [mask_positions(0), mask_positions(1), mask_top_sinks(2)])
def test_hooks_of_attach_hooks_act_as_those_of_the_evaluation(family: str, hook: Any) -> None:
    model = tiny(family, sampler_defaults={"gen_length": 8})
    words = [" ".join(f"w{i}" for i in prompt) for prompt in ([3, 41, 7, 7, 19, 28], [12, 8, 44], [5])]
    given = {} if family == "causal" else {"likelihood": {"samples": 4}}
    scored = ask("loglikelihood", *[(text, " w20 w21") for text in words])
    written = ask("generate_until", *[(text, {"until": ["w9"]}) for text in words])
    own = HarnessLM(model, hooks=[hook], **given)
    wanted, text = [one[0] for one in own.loglikelihood(scored)], own.generate_until(written)
    with attach_hooks(model, hook):
        lm = HarnessLM(model, **given)
        assert lm.get_model_info()["dlm_lens"]["hooks"] == [repr(hook)]
        assert [one[0] for one in lm.loglikelihood(scored)] == pytest.approx(wanted, abs=1e-5)  # rounding
        if family == "llada":  # the others decode with a cache, under which not every hook acts
            assert lm.generate_until(written) == text


@pytest.mark.parametrize("name", ["responses", "record_to"])
def test_answers_under_attached_hooks_are_not_stored(name: str, tmp_path: Path) -> None:
    model = tiny("llada", sampler_defaults={"gen_length": 8})
    lm = HarnessLM(model, likelihood={"samples": 2}, **{name: tmp_path / "own"})
    requests = ask("loglikelihood", ("w1", " w2 w3"))
    with (
        attach_hooks(model, mask_positions(0)),
        pytest.raises(ValueError, match=r"mask_positions\(0\) of attach_h"),
    ):
        lm.loglikelihood(requests)
    with attach_hooks(model, mask_positions(0)):
        hooked = HarnessLM(model, likelihood={"samples": 2}).loglikelihood(requests)
    assert lm.loglikelihood(requests) != hooked
