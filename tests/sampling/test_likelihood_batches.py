"""Forward passes of likelihoods: what answers share, their bounds and their order."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.hooks import attach_hooks, mask_positions
from dlm_lens.sampling.likelihood import scoring
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.estimates import likelihood_methods
from dlm_lens.testing import tiny

ITEMS = ([[4, 9], [7, 1, 30, 2, 22], [50], [8, 8, 8]], [[11, 3, 40], [5, 6], [12, 33, 9, 21], [1, 2]])


def count(model: PreTrainedModel) -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {"rows": [], "positions": [], "canvases": []}
    model.lm_head.register_forward_hook(lambda _m, _a, out: seen["rows"].append(out.shape[:-1].numel()))

    def embedded(_module: Any, inputs: tuple[Tensor], _out: Tensor) -> None:
        seen["canvases"].append(len(inputs[0]))
        seen["positions"].append(inputs[0].numel())

    model.model.embed_tokens.register_forward_hook(embedded)
    return seen


def test_the_head_runs_on_scored_positions_and_a_mask_is_evaluated_once() -> None:
    model = tiny("llada")
    seen = count(model)
    dlm_lens.log_likelihood(model, *ITEMS, "chain_rule")
    assert seen["rows"] == [3 + 2 + 4 + 2]
    dlm_lens.log_likelihood(model, *ITEMS, "chain_rule", cfg_scale=1.0)
    assert seen["rows"] == [11, 22]
    dlm_lens.log_likelihood(model, [[5, 6], [5, 9]], [[7], [8]], samples=128)
    assert (seen["rows"][2:], seen["canvases"][2:]) == ([2], [2])
    dlm_lens.log_likelihood(model, [5, 6], [1, 2, 3], samples=4096)
    assert (seen["rows"][3:], seen["canvases"][3:]) == ([12], [7])
    causal = tiny("causal")
    seen = count(causal)
    dlm_lens.log_likelihood(causal, *ITEMS)
    assert (seen["rows"], seen["canvases"]) == ([11], [4])


CHOICES = [[7, 8, 9], [7, 10, 9], [11, 8], [12, 13, 14], [12, 8]]


def different(masks: Callable[[int], Iterable[Sequence[bool]]]) -> int:
    """Different canvases, counted by hand."""
    return len({
        tuple(None if hidden else token for token, hidden in zip(answer, mask, strict=True))
        for answer in CHOICES
        for mask in masks(len(answer))
    })  # fmt: skip


ALL_MASKS = different(lambda n: [mask for mask in product([False, True], repeat=n) if any(mask)])
CHAIN = different(lambda n: [[place >= token for place in range(n)] for token in range(n)])


@pytest.mark.parametrize(
    ("method", "options", "canvases"),
    [
        # So many samples that every mask is drawn.
        ("mc", {"samples": 1024}, ALL_MASKS),
        ("mc", {"samples": 1024, "cfg_scale": 0.5}, 2 * ALL_MASKS),
        ("chain_rule", {}, CHAIN),
        # Two completions, of three and of two tokens, in one batch for three forwards.
        ("greedy_completion", {}, 2 * 3),
    ],
)
def test_answers_to_one_prompt_share_the_canvases_that_they_have_in_common(
    method: str, options: dict[str, Any], canvases: int
) -> None:
    model = tiny("llada")
    alone = [dlm_lens.log_likelihood(model, [5, 6], answer, method, **options) for answer in CHOICES]
    seen = count(model)
    together = dlm_lens.log_likelihood(model, [5, 6], CHOICES, method, **options)
    assert sum(seen["canvases"]) == canvases
    # Batches of other sizes round differently in float32.
    torch.testing.assert_close(together.value, torch.cat([run.value for run in alone]), atol=1e-4, rtol=1e-5)
    for mine, run in zip(together.losses, alone, strict=True):
        torch.testing.assert_close(mine, run.losses[0], atol=1e-4, rtol=1e-5)
    written = [ids.tolist() for ids in together.completions]
    assert written == [run.completions[0].tolist() for run in alone if run.completions]


def test_other_prompts_share_nothing() -> None:
    model = tiny("llada")
    seen = count(model)
    prompts = [[5, 6], [5, 9], [5, 6, 6]]
    dlm_lens.log_likelihood(model, prompts, [[7], [7], [7]], "chain_rule")
    assert sum(seen["canvases"]) == 3


def test_a_forward_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llada")
    whole = dlm_lens.log_likelihood(model, *ITEMS, samples=32)
    seen = count(model)
    monkeypatch.setitem(scoring.POSITIONS, "cpu", 40)
    small = dlm_lens.log_likelihood(model, *ITEMS, samples=32)
    assert 30 < max(seen["positions"]) <= 40
    monkeypatch.setitem(scoring.POSITIONS, "cpu", 10**6)
    monkeypatch.setattr(scoring, "LOGITS", 64 * 10)
    seen["rows"].clear()
    narrow = dlm_lens.log_likelihood(model, *ITEMS, samples=32)
    assert 7 < max(seen["rows"]) <= 10
    for run in (small, narrow):
        torch.testing.assert_close(run.value, whole.value, atol=1e-4, rtol=1e-5)
    seen["canvases"].clear()
    dlm_lens.log_likelihood(model, *ITEMS, samples=32, batch_size=3)
    assert max(seen["canvases"]) == 3


def test_a_half_full_forward_is_not_padded_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scoring.POSITIONS, "cpu", 100)

    def sizes(lengths: list[int], **options: Any) -> list[int]:
        pairs = [Pair(torch.ones(1).long(), torch.ones(length - 1).long()) for length in lengths]
        queries = [scoring.Query(i, pair, pair.in_answer, pair.in_answer) for i, pair in enumerate(pairs)]
        return [len(batch) for batch in scoring.Scorer(tiny("llada"), **options).batches(queries)]

    assert sizes([20, 20, 20, 5, 5, 5]) == [3, 3]
    assert sizes([20, 20, 20, 18, 17, 5]) == [4, 2]
    assert sizes([20, 5, 5, 5, 5]) == [3, 2]
    assert sizes([20] * 6) == [5, 1]
    assert sizes([40, 40, *[5] * 10]) == [2, 10]
    assert sizes([20] * 6, cfg_scale=1.0) == [2, 2, 2]
    assert sizes([200, 200]) == [1, 1]
    assert sizes([20, 20, 5, 5], batch_size=4) == [4]


def test_answers_of_like_length_are_completed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llada")
    seen = count(model)
    monkeypatch.setitem(scoring.POSITIONS, "cpu", 40)
    prompts, answers = [[5] * 19, [5] * 10, [6] * 19, [6] * 10], [[7], [7] * 10] * 2
    dlm_lens.log_likelihood(model, prompts, answers, "greedy_completion")
    assert seen["canvases"] == [2] * 11


@pytest.mark.parametrize("place", [0, -2])
@pytest.mark.parametrize("method", ["mc", "chain_rule", "greedy_completion"])
@pytest.mark.parametrize("family", ["llada", "dream", "causal", "sdar", "bd3lm", "duo"])
def test_a_hook_that_counts_positions_acts_on_each_text_as_if_it_were_alone(
    family: str, method: str, place: int
) -> None:
    """Of a padded batch, position 0 is padding in the shorter texts."""
    model = tiny(family)
    if method not in likelihood_methods(model):
        pytest.skip(f"{family} has no {method}")
    given: dict[str, Any] = {"samples": 8} if method == "mc" else {}
    prompts, answers = [[4, 9, 33, 1, 2, 60], [7, 1, 30, 2], [50]], [[11, 3, 40], [5, 6, 9], [12, 33]]
    plain = dlm_lens.log_likelihood(model, prompts, answers, method, **given)
    with attach_hooks(model, mask_positions(place)):
        together = dlm_lens.log_likelihood(model, prompts, answers, method, **given)
        for item, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            alone = dlm_lens.log_likelihood(model, [prompt], [answer], method, **given)
            assert float(together.value[item]) == pytest.approx(float(alone.value), rel=1e-5)  # float32 logits
            if method == "greedy_completion":
                assert together.completions[item].tolist() == alone.completions[0].tolist()
    if method != "greedy_completion":
        assert float((together.value - plain.value).abs().min()) > 1e-3  # the hook does something
