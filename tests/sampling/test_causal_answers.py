"""Answers that share a prompt: equal to whole texts, with fewer positions, and only where that is exact."""

from functools import wraps
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.evaluation.likelihood_requests import Item, Likelihoods
from dlm_lens.evaluation.settings import LikelihoodSettings
from dlm_lens.hooks import attach_hooks, mask_top_sinks
from dlm_lens.sampling import NonFiniteLogitsError
from dlm_lens.sampling.cached_network import keeps_keys
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.causal_answers import score_answers
from dlm_lens.sampling.likelihood.scoring import Scorer
from dlm_lens.testing import tiny
from tests.attention.test_hook_points import build
from tests.reference import forward64

PROMPTS = ([4, 9, 2], [7], [50, 1, 1, 8, 30, 2, 22])
ANSWERS = ([11, 3, 40], [5], [12, 33, 9, 21], [5, 6])


def pairs() -> list[tuple[int, Pair]]:
    """Four answers to each prompt, in turn, and one answer to a prompt of its own."""
    both = [(prompt, answer) for answer in ANSWERS for prompt in PROMPTS] + [([3, 3], [9, 9])]
    return [(item, Pair(torch.tensor(prompt), torch.tensor(answer))) for item, (prompt, answer) in enumerate(both)]


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the positions of every forward pass of a Llama; no hook, which would end the sharing."""
    from transformers import LlamaModel

    seen: list[int] = []
    original = LlamaModel.forward

    @wraps(original)
    def forward(self: Any, input_ids: Any = None, **options: Any) -> Any:
        seen.append(input_ids.numel())
        return original(self, input_ids=input_ids, **options)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    return seen


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_score_answers_is_the_float64_sum(batch_size: int | None) -> None:
    model = tiny("causal")
    assert keeps_keys(model)
    found = {one.item: one for one in score_answers(Scorer(model, batch_size=batch_size, shift=True), pairs())}
    assert len(found) == 13
    for item, pair in pairs():
        logits = forward64(model, pair.tokens[None], causal=True)["logits"][0, len(pair.prompt) - 1 : -1]
        expected = -logits.log_softmax(-1)[range(len(pair.answer)), pair.answer]
        torch.testing.assert_close(found[item].losses, expected, rtol=0, atol=1e-4)  # float32 against float64
        assert found[item].greedy.equal(logits.argmax(-1) == pair.answer)


def test_a_shared_prompt_is_computed_once(positions: list[int]) -> None:
    model = tiny("causal", model_type="llama")
    positions.clear()  # of the pass that finds the sites of the layers
    list(score_answers(Scorer(model, shift=True), pairs()))
    # The single text; three prompts of up to 7; to each, three answers with 3, 2 and 1 tokens before the last.
    assert positions == [4, 3 * 7, 9 * 3]


def test_the_harness_puts_a_context_in_one_pass(positions: list[int]) -> None:
    model = tiny("causal", model_type="llama")
    positions.clear()  # of the pass that finds the sites of the layers
    items = [
        Item(item, pair.prompt.tolist(), pair.answer.tolist(), 0, False) for item, pair in reversed(pairs()[:12])
    ]
    answers = [answer for chunk in Likelihoods(model, LikelihoodSettings()).run(items) for answer in chunk]
    assert positions == [3 * 7, 9 * 3]
    whole = dl.log_likelihood(model, [i.context for i in items], [i.continuation for i in items], batch_size=1)
    values = {item.place: float(value) for item, value in zip(items, whole.value, strict=True)}
    assert {answer.place for answer in answers} == set(range(12))
    assert all(abs(answer.value - values[answer.place]) < 1e-4 for answer in answers)  # rounding


KEPT = {"gpt2": True, "granite": True, "gpt_oss": False, "gemma2": False, "mistral": False}


@pytest.mark.parametrize(("kind", "kept"), KEPT.items())
def test_every_kind_of_cache_gives_the_values_of_whole_texts(
    kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sliding windows are not kept, and all others give what transformers' own pass over the text gives."""
    model = build(kind)
    model.tokenizer = tiny("causal").tokenizer
    assert keeps_keys(model) is kept
    for item, losses, _ in score_answers(Scorer(model, shift=True), pairs()):
        pair = dict(pairs())[item]
        with torch.no_grad():
            likely = model(input_ids=pair.tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
        expected = -likely[range(len(pair.prompt) - 1, len(pair.tokens) - 1), pair.answer]
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)  # rounding of other matrix shapes


def test_a_hook_of_the_user_before_a_layer_sees_whole_texts() -> None:
    model = tiny("causal").double()

    def first_position(module: Any, args: Any) -> Any:
        states = args[0].clone()
        states[:, 0] += 3.0  # after a shared prompt this would be the answer's first position
        return (states, *args[1:])

    with model.model.layers[0].register_forward_pre_hook(first_position):
        for item, losses, _ in score_answers(Scorer(model, batch_size=1, shift=True), pairs()):
            pair = dict(pairs())[item]
            with torch.no_grad():
                likely = model(input_ids=pair.tokens[None], use_cache=False).logits[0].log_softmax(-1)
            expected = -likely[range(len(pair.prompt) - 1, len(pair.tokens) - 1), pair.answer]
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)  # logits are read in float32


def test_what_listens_sees_whole_texts() -> None:
    model = tiny("causal")
    with attach_hooks(model, mask_top_sinks(1)):
        assert not keeps_keys(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not keeps_keys(model)
    handle.remove()
    assert keeps_keys(model)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    assert not keeps_keys(model)


def test_infinite_logits_name_item_and_position() -> None:
    model = tiny("causal")
    with torch.no_grad():
        model.model.embed_tokens.weight[33] = torch.nan
    items = [(0, [4, 9], [11, 3]), (1, [4, 9], [12, 33, 9])]
    # The token at 3 is what position 4 is predicted from; in the fused kernel a masked NaN reaches position 3 too.
    with pytest.raises(NonFiniteLogitsError, match=r"item 1: the logits of position [34]"):
        list(
            score_answers(
                Scorer(model, shift=True), [(i, Pair(torch.tensor(p), torch.tensor(a))) for i, p, a in items]
            )
        )
