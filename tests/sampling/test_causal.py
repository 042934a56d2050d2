from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.testing import tiny
from tests.reference import forward64


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny("causal", model_type=request.param)


def test_greedy_decoding_is_transformers_own(model: PreTrainedModel) -> None:
    prompt = torch.randint(0, 60, (3, 5), generator=torch.Generator().manual_seed(2))
    run = dlm_lens.denoise(model, prompt, gen_length=9)
    expected = model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=62)
    assert run.tokens.equal(expected)
    assert run.steps == 9
    assert run.step_of[0].tolist() == [-1] * 5 + list(range(9))
    assert run.masked.sum(-1)[:, 0].tolist() == list(range(9, -1, -1))
    assert run.confidence[2, :, 7].equal(run.confidence[2].amax(-1))


def test_confidence_is_the_probability_of_the_token(model: PreTrainedModel) -> None:
    run = dlm_lens.denoise(model, [[5, 6, 7]], gen_length=2)
    logits = forward64(model, torch.tensor([[5, 6, 7]]), causal=True)["logits"][0, -1]
    assert run.tokens[0, 3] == logits.argmax()
    assert run.confidence[0, 0, 3].item() == pytest.approx(logits.softmax(-1).max().item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_unequal_length_are_what_they_are_alone(model: PreTrainedModel, temperature: float) -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    options: dict[str, Any] = {"gen_length": 6, "temperature": temperature, "seed": 11}
    run = dlm_lens.denoise(model, prompts, **options)
    for row, prompt in enumerate(prompts):
        alone = dlm_lens.denoise(model, [prompt], **options)
        assert run.tokens[row, 6 : 6 + alone.steps].equal(alone.tokens[0, len(prompt) :])


def test_the_cache_changes_nothing_but_what_a_watcher_sees(model: PreTrainedModel) -> None:
    shapes: list[Any] = []
    point = model.model.layers[0].self_attn.hook_pattern
    point.register_forward_hook(lambda _m, _a, out: shapes.append(tuple(out.shape)))
    prompts = [[1, 2, 3, 4], [5, 6]]
    cached = dlm_lens.denoise(model, prompts, gen_length=3)
    assert shapes == [(2, 4, 4, 4), (2, 4, 1, 5), (2, 4, 1, 6)]
    shapes.clear()
    whole = dlm_lens.denoise(model, prompts, gen_length=3, use_cache=False)
    assert shapes == [(2, 4, 4, 4), (2, 4, 5, 5), (2, 4, 6, 6)]
    assert whole.tokens.equal(cached.tokens)


def test_sampling_follows_the_softmax_at_its_temperature(model: PreTrainedModel) -> None:
    rows = 1500
    run = dlm_lens.denoise(model, [[1, 2, 3]] * rows, gen_length=1, temperature=3.0, seed=list(range(rows)))
    expected = (forward64(model, torch.tensor([[1, 2, 3]]), causal=True)["logits"][0, -1] / 3).softmax(-1)
    observed = run.tokens[:, 3].bincount(minlength=64) / rows
    assert (observed - expected).abs().sum() / 2 < 0.12  # as in test_denoising.py


def test_a_row_that_has_ended_goes_on_with_its_end_and_all_ended_stops_the_run(model: PreTrainedModel) -> None:
    def end(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        forced = torch.zeros_like(logits)
        forced[0, 62 if step == 1 else 20] = 50
        forced[1, 62 if step == 3 else 21] = 50
        return forced

    run = dlm_lens.denoise(model, [[1, 2], [3]], gen_length=9, on_logits=end)
    assert run.steps == 4
    assert run.tokens[:, 2:].tolist() == [[20, 62, 62, 62], [21, 21, 21, 62]]
    assert run.texts == ["w1 w2 w20", "w3 w21 w21 w21"]
    assert run.masks_left.tolist() == [0, 0]


def test_errors_of_ar_runs(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"steps \(4\) must equal gen_length \(8\)"):
        dlm_lens.denoise(model, [[1]], gen_length=8, steps=4)
    assert dlm_lens.denoise(model, [[1]], gen_length=2, steps=2).steps <= 2
    with pytest.raises(ValueError, match="the causal sampler has no setting 'block_length'"):
        dlm_lens.denoise(model, [[1]], block_length=8)
    with pytest.raises(ValueError, match="gen_length is 0; an AR model writes at least 1 token"):
        dlm_lens.denoise(model, [[1]], gen_length=0)
    with pytest.raises(ValueError, match="no reference quirks and no canvas to edit"):
        dlm_lens.denoise(model, [[1]], reference_quirks=True)


def test_a_callback_that_returns_nonsense_is_told_so(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"on_logits returned a tensor of shape \[3\]; .* of shape \[1, 64\]"):
        dlm_lens.denoise(model, [[1]], gen_length=2, on_logits=lambda *_: torch.ones(3))


def test_nan_logits_name_the_step_and_keep_what_was_done(model: PreTrainedModel) -> None:
    def break_it(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
        logits = torch.zeros_like(logits).index_fill(1, torch.tensor([7]), 9.0)
        return logits * torch.nan if step == 2 else logits

    with pytest.raises(dlm_lens.sampling.NonFiniteLogitsError, match="step 2") as caught:
        dlm_lens.denoise(model, [[1]], gen_length=4, on_logits=break_it)
    assert caught.value.partial.tokens[0, :3].tolist() == [1, 7, 7]
    assert caught.value.partial.steps == 2
