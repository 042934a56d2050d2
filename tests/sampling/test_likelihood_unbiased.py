"""The Monte Carlo likelihood against the exact bound, by enumeration of all masks of 2 and of 8 tokens."""

from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import dlm_lens as dl
from dlm_lens.evaluation import LikelihoodSettings, find_preset
from dlm_lens.evaluation.likelihood_requests import Item, Likelihoods
from dlm_lens.evaluation.settings import read_settings
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.testing import tiny

QUESTION = "tom has 5 apples . tom buys 4 more . how many apples ? :"
ANSWERS = {2: "5 +", 8: "5 + 4 = 8 . answer 8"}


def mean_losses(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> Tensor:
    """[mask count 0..n] in float64: the mean over all masks of that many tokens of (n / count) times their loss."""
    n, masks = len(answer), torch.tensor(list(product([False, True], repeat=len(answer))))[1:]
    canvases = torch.tensor(prompt + answer).expand(len(masks), -1).clone()
    canvases[:, len(prompt) :][masks] = model.config.mask_token_id
    with torch.no_grad():
        logits = model(input_ids=canvases).logits.double()
    if getattr(model.config, "logit_shift", False):
        logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
    likely = logits[:, len(prompt) :].log_softmax(-1)
    losses = -likely.gather(-1, torch.tensor(answer).expand(len(masks), -1)[..., None])[..., 0]
    count = masks.sum(-1)
    found = torch.zeros(n + 1, dtype=torch.float64)
    found.index_add_(0, count, (losses * masks).sum(-1) * n / count)
    return found / torch.tensor([comb(n, size) for size in range(n + 1)])


def bound(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> float:
    """The exact bound: every number of masks in 1..n is equally likely.

    It is the bound of independent masks too: the mean over a uniform rate r of r^(c - 1) (1 - r)^(n - c) is
    1 / (c binom(n, c)).
    """
    return -float(mean_losses(model, prompt, answer)[1:].mean())


@pytest.mark.parametrize("rounding", ["half_up", "half_to_even"])
@pytest.mark.parametrize("samples", [1, 2, 3, 8, 16, 20])
def test_every_number_of_masks_is_equally_likely(rounding: Any, samples: int) -> None:
    for length in (1, 2, 3, 7, 8, 12, 40, 257):
        drawn = [CountCorruption(rounding).counts(first, length, samples) for first in range(1, length + 1)]
        numbers = torch.stack(drawn).sort(0).values
        uniform = bool((numbers == torch.arange(1, length + 1)[:, None]).all())
        # With the authors' rounding an even length has as many of each where no i n / b is halfway.
        tie = any((2 * i * length) % samples == 0 and (2 * i * length // samples) % 2 for i in range(samples))
        assert uniform or (rounding == "half_to_even" and tie)
        for group in drawn if rounding == "half_up" else []:
            often = group.bincount(minlength=length + 1)[1:]
            assert int(often.max() - often.min()) <= 1
            assert int(group[0]) in range(1, length + 1)


def test_the_authors_shares_of_two_masks_are_those_of_the_issue() -> None:
    counts = torch.stack([CountCorruption("half_to_even").counts(first, 2, 16) for first in (1, 2)]).flatten()
    assert counts.bincount().tolist() == [0, 14, 18]
    counts = torch.stack([CountCorruption("half_to_even").counts(first, 8, 16) for first in range(1, 9)]).flatten()
    assert (counts.bincount() / 128).tolist() == [0.0, *[1 / 16, 3 / 16] * 4]
    with pytest.raises(ValueError, match=r"rounding is 'up'; it must be 'half_up' or 'half_to_even'"):
        CountCorruption("up")  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 8])
def test_the_mean_is_the_exact_bound_on_toy_and_the_authors_is_not(n: int) -> None:
    """n tokens, 65,536 samples in groups of 16: 4,096 independent estimates, an interval of 4 standard errors."""
    model = dl.load("toy")
    prompt = model.tokenizer(QUESTION)["input_ids"]
    answer = model.tokenizer(ANSWERS[n], add_special_tokens=False)["input_ids"]
    assert len(answer) == n
    options: dict[str, Any] = {"samples": 65536, "strata": 16, "seed": 11}
    ours = dl.log_likelihood(model, prompt, answer, **options)
    theirs = dl.log_likelihood(model, prompt, answer, reference_quirks=True, **options)
    each, exact = mean_losses(model, prompt, answer), bound(model, prompt, answer)
    error = float(ours.standard_error)
    assert float(ours.value) == pytest.approx(exact, abs=4 * error)
    shares = CountCorruption("half_to_even")
    biased = torch.stack([shares.counts(first, n, 16) for first in range(1, n + 1)]).flatten()
    expected = -float(each[biased].mean())
    assert float(theirs.value) == pytest.approx(expected, abs=4 * float(theirs.standard_error))
    # The interval tells the two apart.
    assert abs(expected - exact) > 8 * error
    assert theirs.settings["rounding"] == "half_to_even"
    assert ours.settings["rounding"] == "half_up"


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize(
    ("family", "config", "settings"),
    [
        ("llada", {}, {}),
        ("sink_qwen", {"num_sinks": 2}, {}),
        ("sink_llama", {"num_sinks": 1}, {}),
        ("smdm", {}, {}),
        ("diffugpt", {}, {"eps": 0.0}),
        ("diffugpt", {"model_type": "diffullama"}, {"eps": 0.0}),
        ("dream", {}, {"eps": 0.0, "protect_ends": False}),
        ("sink_qwen", {"sampler": "dream", "logit_shift": True}, {"eps": 0.0, "protect_ends": False}),
    ],
)
def test_every_family_estimates_the_exact_bound(
    n: int, family: str, config: dict[str, Any], settings: dict[str, Any]
) -> None:
    """n tokens, 8,192 samples in groups of 16: 512 independent estimates, an interval of 4 standard errors."""
    model = tiny(family, **config)
    prompt, answer = [3, 14, 15], [26, 5, 35, 8, 9, 7, 9, 3][:n]
    exact = bound(model, prompt, answer)
    got = dl.log_likelihood(model, prompt, answer, samples=8192, strata=16, seed=5, **settings)
    error = float(got.standard_error)
    assert float(got.value) == pytest.approx(exact, abs=4 * error)
    # Independent masks are noisier than counted ones.
    assert error < 0.02 * abs(exact)


def test_dreams_default_is_the_bound_without_the_last_token_and_rates_from_a_thousandth() -> None:
    """The quadrature of 8 nodes is exact for polynomials of degree 15 at most."""
    model, prompt, answer = tiny("dream"), [3, 14, 15], [26, 5, 35, 8, 9]
    nodes, weights = map(torch.from_numpy, np.polynomial.legendre.leggauss(8))
    rate, weights = 1e-3 + (1 - 1e-3) * (nodes + 1) / 2, weights / 2
    exact = 0.0
    masks = torch.tensor(list(product([False, True], repeat=4)))[1:]
    canvases = torch.tensor(prompt + answer).expand(len(masks), -1).clone()
    canvases[:, 3:7][masks] = model.config.mask_token_id
    with torch.no_grad():
        likely = model(input_ids=canvases).logits.double().log_softmax(-1)[:, 2:6]
    for mask, row in zip(masks, likely, strict=True):
        size = int(mask.sum())
        share = float((weights * rate ** (size - 1) * (1 - rate) ** (4 - size)).sum())
        exact += share * float(row[mask, torch.tensor(answer)[:4][mask]].sum())
    got = dl.log_likelihood(model, prompt, answer, samples=8192, strata=16)
    assert float(got.value) == pytest.approx(exact, abs=4 * float(got.standard_error))


def test_an_evaluation_is_unbiased_unless_a_preset_says_whose_it_is() -> None:
    model = dl.load("toy")
    prompt = model.tokenizer(QUESTION)["input_ids"]
    answer = model.tokenizer(ANSWERS[2], add_special_tokens=False)["input_ids"]
    preset = find_preset("llada/eval_llada_lm_eval/piqa").likelihood
    assert preset.options == {"rounding": "half_to_even"}

    def value(likelihood: Any) -> float:
        settings = read_settings(LikelihoodSettings, likelihood)
        return next(Likelihoods(model, settings).run([Item(0, prompt, answer, 3, False)]))[0].value

    sampled: dict[str, Any] = {"method": "mc", "samples": 8192, "strata": 16}
    ours = dl.log_likelihood(model, prompt, answer, samples=8192, strata=16, seed=3)
    assert value(sampled) == pytest.approx(float(ours.value), rel=1e-6)
    assert value(sampled) == pytest.approx(bound(model, prompt, answer), abs=4 * float(ours.standard_error))
    theirs = dl.log_likelihood(model, prompt, answer, samples=8192, strata=16, seed=3, reference_quirks=True)
    assert value(sampled | {"options": preset.options}) == pytest.approx(float(theirs.value), rel=1e-6)
