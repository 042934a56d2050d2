"""Likelihoods against float64 sums over all masks, against transformers' loss, alone and in batches."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.sampling import NonFiniteLogitsError
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.corruption import CountCorruption, Drawn, LogLinearCorruption, RateCorruption
from dlm_lens.testing import tiny
from tests.reference import forward64

MASK = 63
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "dream": ("dream", {}),
    "sinks_in_front": ("sink_qwen", {"num_sinks": 2}),
    "sink_at_end_shifted": ("sink_qwen", {"num_sinks": 1, "sink_placement": "end", "logit_shift": True}),
    "gated_shifted_dream": ("sink_qwen", {"gated_attention": True, "logit_shift": True, "sampler": "dream"}),
}
ITEMS = ([[4, 9], [7, 1, 30, 2, 22], [50], [8, 8, 8]], [[11, 3, 40], [5, 6], [12, 33, 9, 21], [1, 2]])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family, config = MODELS[request.param]
    return tiny(family, **config)


def log_softmax64(model: PreTrainedModel, canvas: Tensor, prompt: int = 0, cfg_scale: float = 0.0) -> Tensor:
    """Log-probabilities [position, d_vocab] of one canvas by the independent float64 network."""
    logits = forward64(model, canvas[None])["logits"][0]
    if cfg_scale:
        blind = canvas.clone()
        blind[:prompt] = MASK
        without = forward64(model, blind[None])["logits"][0]
        logits = without + (cfg_scale + 1) * (logits - without)
    if getattr(model.config, "logit_shift", False):
        logits = torch.cat([logits[:1], logits[:-1]])
    return logits.log_softmax(-1)


def loss64(model: PreTrainedModel, prompt: list[int], answer: list[int], masked: list[int]) -> float:
    """Sum of the cross entropies of the answer's positions that are masked."""
    canvas = torch.tensor(prompt + [MASK if m else token for m, token in zip(masked, answer, strict=True)])
    likely = log_softmax64(model, canvas)[len(prompt) :]
    return -sum(float(likely[i, answer[i]]) for i in range(len(answer)) if masked[i])


@pytest.mark.parametrize("order", ["left_to_right", "right_to_left"])
@pytest.mark.parametrize("cfg_scale", [0.0, 0.8])
def test_chain_rule_is_the_sum_over_steps(model: PreTrainedModel, order: str, cfg_scale: float) -> None:
    prompt, answer = [3, 14, 15, 9], [26, 5, 35, 8, 9]
    got = dlm_lens.log_likelihood(model, prompt, answer, "chain_rule", order=order, cfg_scale=cfg_scale)
    expected = []
    for i, token in enumerate(answer):
        hidden = range(i, 5) if order == "left_to_right" else range(i + 1)
        canvas = torch.tensor(prompt + [MASK if j in hidden else t for j, t in enumerate(answer)])
        expected.append(-float(log_softmax64(model, canvas, len(prompt), cfg_scale)[len(prompt) + i, token]))
    assert got.losses[0].tolist() == pytest.approx(expected, abs=1e-4)
    assert got.value.tolist() == pytest.approx([-sum(expected)], abs=3e-4)
    assert got.standard_error.tolist() == [0.0]
    assert got.per_token.tolist() == pytest.approx([-sum(expected) / 5], abs=1e-4)


def expectation(model: PreTrainedModel, prompt: list[int], answer: list[int], corruption: Any) -> float:
    """The mean of the estimate over every mask (and, by quadrature, every rate), in float64."""
    n = len(answer)
    total = 0.0
    # Gauss-Legendre on 4 points integrates these polynomials of degree at most 3 exactly.
    nodes = torch.tensor(
        [0.06943184420297371, 0.33000947820757187, 0.6699905217924281, 0.9305681557970262]
    ).double()
    weights = torch.tensor([0.17392742256872692, 0.3260725774312731, 0.3260725774312731, 0.17392742256872692])
    for masked in product([0, 1], repeat=n):
        size = sum(masked)
        if not size:
            continue
        if isinstance(corruption, CountCorruption):
            subsets = sum(1 for other in product([0, 1], repeat=n) if sum(other) == size)
            share = 1 / n / subsets / (size / n)
        else:
            free = n - 1 if corruption.protect_ends else n
            if corruption.protect_ends and masked[-1]:
                continue
            rate = (1 - corruption.eps) * nodes + corruption.eps
            share = float((weights * rate ** (size - 1) * (1 - rate) ** (free - size)).sum())
        total -= share * loss64(model, prompt, answer, list(masked))
    return total


def test_the_mean_of_many_samples_is_the_expectation(model: PreTrainedModel) -> None:
    prompt, answer = [3, 14, 15], [26, 5, 35]
    dream = model.sampler_defaults["remasking"] == "origin"
    choices: list[tuple[dict[str, Any], Any]] = [({}, CountCorruption())]
    if dream:
        choices = [
            ({}, RateCorruption(1e-3, protect_ends=True)),
            ({"protect_ends": False, "eps": 0.2}, RateCorruption(0.2)),
        ]
    for settings, corruption in choices:
        got = dlm_lens.log_likelihood(model, prompt, answer, samples=4096, seed=2, **settings)
        exact = expectation(model, prompt, answer, corruption)
        error = float(got.standard_error)
        assert float(got.value) == pytest.approx(exact, abs=4 * error)
        # An estimate this sharp tells the expectations of neighbouring rules apart.
        assert error < 0.02 * abs(exact)


def test_without_strata_the_mean_is_the_same() -> None:
    model = tiny("llada")
    exact = expectation(model, [3, 14, 15], [26, 5, 35], CountCorruption())
    got = dlm_lens.log_likelihood(model, [3, 14, 15], [26, 5, 35], samples=4096, strata=1)
    assert float(got.value) == pytest.approx(exact, abs=4 * float(got.standard_error))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_standard_error_is_the_spread_of_independent_estimates(family: str) -> None:
    model, runs = tiny(family), 300
    got = dlm_lens.log_likelihood(model, [3, 14], [[26, 5, 35, 2]] * runs, samples=64, seed=list(range(runs)))
    typical = float(got.standard_error.square().mean().sqrt())
    # The spread of 300 estimates is known to 4%, the root mean square error of 4 groups each to 2.4%.
    assert typical / float(got.value.std()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_an_ar_model_gives_transformers_own_loss(model_type: str) -> None:
    model = tiny("causal", model_type=model_type)
    prompts, answers = ITEMS
    got = dlm_lens.log_likelihood(model, prompts, answers)
    for item, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        labels = torch.tensor([[-100] * len(prompt) + answer])
        loss = model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss.detach()
        assert float(got.value[item]) == pytest.approx(-float(loss) * len(answer), rel=1e-5)
    likely = forward64(model, torch.tensor([prompts[1] + answers[1]]), causal=True)["logits"][0].log_softmax(-1)
    steps = [-float(likely[4 + i, token]) for i, token in enumerate(answers[1])]
    assert got.losses[1].tolist() == pytest.approx(steps, abs=1e-4)
    assert got.method == "chain_rule"


METHODS = [("mc", {"cfg_scale": 0.5}), ("mc", {}), ("chain_rule", {}), ("greedy_completion", {})]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_an_item_is_what_it_is_alone(model: PreTrainedModel, method: str, options: dict[str, Any]) -> None:
    prompts, answers = ITEMS
    options = {"method": method, "seed": 3, **({"samples": 24} if method == "mc" else {}), **options}
    together = dlm_lens.log_likelihood(model, prompts, answers, **options)
    others = {
        "two at a time": dlm_lens.log_likelihood(model, prompts, answers, batch_size=2, **options),
        "backwards": dlm_lens.log_likelihood(model, prompts[::-1], answers[::-1], **options),
    }
    for item in range(4):
        alone = dlm_lens.log_likelihood(model, prompts[item], answers[item], batch_size=1, **options)
        got = {"alone": alone.losses[0]} | {
            name: run.losses[3 - item if name == "backwards" else item] for name, run in others.items()
        }
        for losses in got.values():
            torch.testing.assert_close(losses, together.losses[item], atol=1e-4, rtol=1e-4)
        if method == "greedy_completion":
            assert alone.completions[0].equal(together.completions[item])


def greedy64(model: PreTrainedModel, prompt: list[int], length: int) -> list[int]:
    canvas = torch.tensor(prompt + [MASK] * length)
    for _ in range(length):
        likely = log_softmax64(model, canvas)
        likely[:, MASK] = -torch.inf
        best = likely.max(-1)
        holes = (canvas == MASK).nonzero().squeeze(-1)
        here = holes[best.values[holes].argmax()]
        canvas[here] = best.indices[here]
    return canvas[len(prompt) :].tolist()


def test_greedy_completion_writes_the_surest_position_first(model: PreTrainedModel) -> None:
    written = greedy64(model, [3, 14, 15], 6)
    wrong = [*written[:-1], (written[-1] + 1) % 60]
    got = dlm_lens.log_likelihood(model, [3, 14, 15], [written, wrong], "greedy_completion")
    assert [ids.tolist() for ids in got.completions] == [written, written]
    assert got.value.tolist() == [0.0, -torch.inf]
    assert got.is_greedy.tolist() == [True, False]


def test_greedy_completion_of_an_ar_model_is_its_generation() -> None:
    model = tiny("causal")
    prompts, answers = ITEMS
    got = dlm_lens.log_likelihood(model, prompts, answers, "greedy_completion")
    for prompt, answer, ids in zip(prompts, answers, got.completions, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=len(answer), do_sample=False)
        assert ids.tolist() == expected[0, len(prompt) :].tolist()


def test_the_mask_is_written_only_where_the_reference_is_asked_for() -> None:
    model = tiny("llada")

    def prefer_mask_first(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
        """At the first of two masked positions; the original writes it again and again, and stands still."""
        wanted = torch.zeros_like(out)
        wanted[0, MASK] = 1e3 * (len(out) == 2)
        return out + wanted

    model.lm_head.register_forward_hook(prefer_mask_first)
    ours = dlm_lens.log_likelihood(model, [3], [4, 5], "greedy_completion")
    theirs = dlm_lens.log_likelihood(model, [3], [4, 5], "greedy_completion", reference_quirks=True)
    assert not (ours.completions[0] == MASK).any()
    assert theirs.completions[0].tolist() == [MASK, MASK]


@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_completion_of_subs_gives_the_mask_no_probability(seed: int) -> None:
    """MDLM, 2406.07524: the logit of [MASK] is -inf, so that it does not change which position is the surest."""
    model, draw = tiny("mdlm", seed=seed), torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=draw))
        head.weight[MASK] *= 3
    canvas = torch.tensor([3, 14, 15] + [MASK] * 6)
    orders: dict[bool, list[int]] = {True: [], False: []}
    for subs, order in orders.items():
        filled = canvas.clone()
        while (filled == MASK).any():
            logits = model(input_ids=filled[None]).logits[0].detach().double()
            logits[:, MASK] = -torch.inf if subs else logits[:, MASK]
            likely = logits.softmax(-1)[:, :MASK].max(-1)
            holes = (filled == MASK).nonzero().squeeze(-1)
            here = holes[likely.values[holes].argmax()]
            filled[here] = likely.indices[here]
            order.append(int(here))
        orders[subs] = [*order, *filled[3:].tolist()]
    assert orders[True] != orders[False]
    written = orders[True][6:]
    for quirks in (False, True):
        got = dlm_lens.log_likelihood(model, [3, 14, 15], written, "greedy_completion", reference_quirks=quirks)
        assert got.completions[0].tolist() == written
    assert got.is_greedy.tolist() == [True]


@pytest.mark.parametrize("family", [family.name for family in dlm_lens.families()])
def test_every_family_has_likelihoods(family: str) -> None:
    model = tiny(family)
    if family in ("diffusion_gemma", "uniform_qwen"):
        for method in ("mc", "chain_rule", "greedy_completion"):
            with pytest.raises(ValueError, match="open positions hold random tokens instead of"):
                dlm_lens.log_likelihood(model, "w3 w14 w15", "w9 w26", method)
        return
    run = dlm_lens.log_likelihood(model, "w3 w14 w15", "w9 w26", samples=16)
    assert -100 < float(run.value) < 0
    if family in ("duo", "udlm", "sumi", "gidd"):  # the chain rule needs masks: test_likelihood_uniform.py
        return
    if family == "efficient_dlm":  # the prompt sees itself whole, wherever it ends: test_efficient_dlm.py
        return
    # What is decided attends causally, but not in its own block.
    blocks = {"block_length": 1} if family == "nemotron_labs_diffusion" else {}
    chain = dlm_lens.log_likelihood(model, "w3 w14 w15", "w9 w26", "chain_rule", **blocks)
    alone = dlm_lens.log_likelihood(model, "w3 w14 w15 w9", "w26", "chain_rule", **blocks)
    assert float(chain.losses[0][1]) == pytest.approx(-float(alone.value), rel=1e-4)


def test_stratified_numbers_and_rates() -> None:
    pair = Pair(torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6, 7, 8]))
    drawn = CountCorruption().draw(pair, 6, torch.Generator().manual_seed(1))
    assert sorted(drawn.masked.sum(-1).tolist()) == [1, 2, 3, 4, 5, 6]
    assert drawn.masked.sum(-1).tolist() == [round(6 * rate) for rate in drawn.rate.tolist()]
    rates = RateCorruption(eps=0.1).draw(pair, 4, torch.Generator().manual_seed(1)).rate.sort().values
    torch.testing.assert_close(rates.diff(), torch.full((3,), 0.9 / 4))


def test_numbers_between_two_whole_ones_are_rounded_as_the_setting_says() -> None:
    """Two samples of an answer of 5 are 2.5 apart: 2 and 4.5, and 4 and 6.5, which is 1.5 in 1..5."""
    assert [CountCorruption("half_up").counts(first, 5, 2).tolist() for first in (2, 4)] == [[2, 5], [4, 2]]
    assert [CountCorruption("half_to_even").counts(first, 5, 2).tolist() for first in (2, 4)] == [[2, 4], [4, 1]]


def test_times_that_are_not_stratified_are_uniform_numbers_themselves() -> None:
    pair = Pair(torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6, 7, 8]))
    for stratified in (False, True):
        drawn = LogLinearCorruption(0.1, stratified=stratified).draw(pair, 4, torch.Generator().manual_seed(1))
        numbers = torch.rand(4, generator=torch.Generator().manual_seed(1)).double()
        spaced = (numbers / 4 + torch.arange(4) / 4) % 1
        torch.testing.assert_close(drawn.rate.double(), 0.9 * (spaced if stratified else numbers) + 0.1)


def test_a_rate_of_zero_masks_nothing_and_divides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("dream")
    masked = torch.tensor([[False] * 4, [False, False, True, False]])
    drawn = Drawn(masked, torch.tensor([0.0, 0.5]))
    monkeypatch.setattr(RateCorruption, "draw", lambda *_: drawn)
    got = dlm_lens.log_likelihood(model, [1, 2], [3, 4], samples=2, strata=2)
    assert got.losses[0].tolist() == pytest.approx([0.0, loss64(model, [1, 2], [3, 4], [1, 0]) / 0.5], rel=1e-5)


def test_the_reference_has_one_stream_over_all_items() -> None:
    model = tiny("llada")
    got = dlm_lens.log_likelihood(model, *ITEMS, samples=8, batch_size=4, seed=5, reference_quirks=True)
    generator, prompts, answers = torch.Generator().manual_seed(5), *ITEMS
    for item, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for group in range(2):
            drawn = CountCorruption("half_to_even").draw(
                Pair(torch.tensor(prompt), torch.tensor(answer)), 4, generator
            )
            losses = [
                loss64(model, prompt, answer, mask[len(prompt) :].tolist()) / float(rate)
                for mask, rate in zip(drawn.masked, drawn.rate, strict=True)
            ]
            assert float(got.groups[item, group]) == pytest.approx(sum(losses) / 4, rel=1e-5)
    alone = dlm_lens.log_likelihood(model, prompts[2], answers[2], samples=8, strata=4, seed=5)
    assert float(alone.value) != pytest.approx(float(got.value[2]), rel=1e-3)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("w4 w5", "w6 w7"),
        (["w4 w5"], ["w6 w7"]),
        ([4, 5], [6, 7]),
        ([[4, 5]], torch.tensor([[6, 7]])),
        (torch.tensor([4, 5]), torch.tensor([6, 7])),
        ([[4, 5]], [torch.tensor([6, 7])]),
        ("w4 w5", [6, 7]),
        ({"input_ids": [[4, 5]], "attention_mask": [[1, 1]]}, ["w6 w7"]),
        (np.array([4, 5]), np.array([6, 7])),
        (np.array([[4, 5]]), [np.array([6, 7])]),
        (list(np.array([4, 5])), list(torch.tensor([6, 7]))),
    ],
)
def test_pairs_in_any_form_are_the_same(prompt: Any, answer: Any) -> None:
    model = tiny("llada")
    expected = dlm_lens.log_likelihood(model, [[4, 5]], [[6, 7]], samples=4)
    assert dlm_lens.log_likelihood(model, prompt, answer, samples=4).value.equal(expected.value)


def test_one_prompt_serves_several_answers() -> None:
    model = tiny("dream")
    got = dlm_lens.log_likelihood(model, "w4 w5", ["w6 w7", "w8", "w9 w1 w2"], "chain_rule")
    each = dlm_lens.log_likelihood(model, [[4, 5]] * 3, [[6, 7], [8], [9, 1, 2]], "chain_rule")
    assert got.value.equal(each.value)
    assert got.tokens.tolist() == [2, 1, 3]


@pytest.mark.parametrize("family", ["llada", "smdm", "sdar", "duo"])
def test_a_dlm_takes_no_prompt_alone_and_beside_others(family: str) -> None:
    model = tiny(family)
    prompts, answers = [[], "w5 w6", [5, 6], (), ""], [[7, 8], [9], [9], [3, 4, 5], [7, 8]]
    got = dlm_lens.log_likelihood(model, prompts, answers, samples=8, seed=1).value
    torch.testing.assert_close(got[4], got[0], rtol=1e-6, atol=1e-6)
    pairs = zip(prompts, answers, strict=True)
    alone = [dlm_lens.log_likelihood(model, one, given, samples=8, seed=1).value[0] for one, given in pairs]
    torch.testing.assert_close(got, torch.stack(alone), rtol=1e-6, atol=1e-6)  # other batches of float32 passes


REFUSALS: list[tuple[str, Any, Any, dict[str, Any], str]] = [
    ("llada", [1], [], {}, r"the answer is \[\]; give at least one answer"),
    ("llada", [], [], {}, r"the answer is \[\]; give at least one answer"),
    ("llada", [1], [[]], {}, "answer 0 is empty"),
    ("llada", [1], [2], {"strata": 0}, "strata is 0; it must be at least 1, or None"),
    ("llada", [1], [2], {"method": "chain_rule", "samples": 4}, "samples is 4, and chain_rule draws no masks"),
    (
        "llada",
        [1],
        [2],
        {"method": "greedy_completion", "strata": 4},
        "strata is 4, and greedy_completion draws no",
    ),
    ("causal", [""], [2], {}, "prompt 0 is empty"),
    ("llada", "w1", ["w2", ""], {}, "answer 1 is empty"),
    ("causal", [], [1], {}, "the prompt is empty"),
    ("causal", [[], [2]], [[1], [1]], {}, "empty"),
    ("llada", [5, []], [[1], [1]], {}, "prompt"),
    ("llada", [[1], [2]], [[3]], {}, "2 prompts, but 1 answers"),
    ("llada", [[1]], [[3], [4]], {}, "1 prompts, but 2 answers"),
    ("llada", [1], [64], {}, "answer 0 holds token id 64, but the model's logits have 64 columns"),
    ("llada", [1], [2, 63], {}, "answer 0 holds the mask token 63"),
    ("llada", [1], 7, {}, "the answer is of an unknown kind: 7"),
    ("llada", [1], torch.tensor([0.5]), {}, "answer ids must be integers"),
    ("llada", [1], [0.5], {}, r"the answer \[0.5\] holds no whole-number ids"),
    ("llada", [1], [True], {}, r"the answer \[True\] holds no whole-number ids"),
    ("llada", [1], b"w4", {}, "the answer is of an unknown kind: b'w4'"),
    ("llada", [1], [2], {"samples": 8.0}, "samples is 8.0; it must be a whole number"),
    ("llada", [1], [2], {"cfg_scale": "1"}, "cfg_scale is '1'; it must be a finite number"),
    ("llada", [1], [2], {"samples": 0}, "samples is 0"),
    ("llada", [1], [2], {"cfg_scale": -0.5}, "cfg_scale is -0.5"),
    ("llada", [1], [2], {"batch_size": 0}, "batch_size is 0"),
    ("llada", [1], [2], {"samples": 10, "strata": 4}, "10 samples do not divide into groups of 4"),
    ("llada", [1], [2], {"method": "exact"}, "method is 'exact'; it must be one of mc, chain_rule"),
    ("llada", [1], [2], {"eps": 0.1}, "the mc likelihood of llada has no setting 'eps'"),
    ("llada", [1], [2], {"hooks": []}, r"no setting 'hooks' \(hooks is with dlm_lens.hooks.attach_hooks\(model"),
    ("llada", [1], [2], {"method": "chain_rule", "order": "ftb"}, "order is 'ftb'; it must be 'left_to_right'"),
    ("llada", [[1], [2]], [[2], [3]], {"seed": [1]}, "1 seeds for 2 prompts"),
    ("llada", [[1], [2]], [[2], [3]], {"seed": [1, 2], "reference_quirks": True}, "give a single seed"),
    ("llada", [1], [2], {"method": "greedy_completion", "order": "x"}, "has no setting 'order'; it has none"),
    ("dream", [1], [2], {}, "answer 0 has a single token, and protect_ends never masks"),
    ("dream", [1], [2, 3], {"scope": "both", "cfg_scale": 1.0}, "guidance masks the prompt"),
    ("dream", [1], [2, 3], {"scope": "union"}, "scope is 'union'"),
    ("dream", [1], [2, 3], {"eps": 1.0}, "eps is 1.0"),
    ("llada", [1], [2], {"mc_num": 64}, "mc_num=64 is the authors' word; here it is samples="),
    ("causal", [1], [2], {"method": "mc"}, "an AR model has no masks to draw"),
    ("causal", [1], [2], {"cfg_scale": 1.0}, "an AR model has no mask token to guide with"),
    ("causal", [1], [2], {"order": "right_to_left"}, "the chain_rule likelihood of causal has no setting 'order'"),
]


@pytest.mark.parametrize(("family", "prompt", "answer", "options", "message"), REFUSALS)
def test_what_cannot_work_is_refused(
    family: str, prompt: Any, answer: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dlm_lens.log_likelihood(tiny(family), prompt, answer, **options)


def test_models_without_sampler_or_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"load the model with dlm_lens\.load"):
        dlm_lens.log_likelihood(torch.nn.Linear(1, 1), [1], [2])
    model = tiny("llada")
    model.tokenizer = None
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        dlm_lens.log_likelihood(model, [1], "w2")


@pytest.mark.parametrize(("method", "position"), [("mc", "[1-4]"), ("chain_rule", "1"), ("greedy_completion", "1")])
def test_logits_that_are_not_finite_name_the_item(method: str, position: str) -> None:
    model = tiny("llada")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
    # In a batch with longer items: the position is counted in the item's own text.
    with pytest.raises(NonFiniteLogitsError, match=f"item 2: the logits of position {position} are not finite"):
        dlm_lens.log_likelihood(model, *ITEMS, method, **({"samples": 4} if method == "mc" else {}))


def test_dreams_estimate_of_a_single_token_is_zero_in_the_reference() -> None:
    model = tiny("dream")
    theirs = dlm_lens.log_likelihood(model, [1, 2], [3], samples=8, batch_size=4, reference_quirks=True)
    assert theirs.value.tolist() == [0.0]
    ours = dlm_lens.log_likelihood(model, [1, 2], [3], samples=2048, protect_ends=False, eps=0.5)
    exact = dlm_lens.log_likelihood(model, [1, 2], [3], "chain_rule")
    assert float(ours.value) == pytest.approx(float(exact.value), abs=4 * float(ours.standard_error))


def test_the_result_checks_itself_and_says_what_it_lacks() -> None:
    got = dlm_lens.log_likelihood(tiny("llada"), *ITEMS, samples=8)
    assert got.groups.shape == (4, 4)
    torch.testing.assert_close(got.groups.mean(-1), -got.value)
    assert "method='mc'" in repr(got)
    assert "'strata': 2" in repr(got)
    assert dlm_lens.log_likelihood(tiny("llada"), [1], [2], samples=1).standard_error.isnan().all()
    assert float(dlm_lens.log_likelihood(tiny("llada"), ITEMS[0][2], ITEMS[1][2], samples=8)) == pytest.approx(
        float(got.value[2]), rel=1e-5
    )
    with pytest.raises(ValueError, match="4 items have no single value"):
        float(got)
    with pytest.raises(ValueError, match="is_greedy needs method 'greedy_completion'; this is 'mc'"):
        _ = got.is_greedy
    with pytest.raises(ValueError, match="groups of samples exist with method 'mc'; this is 'chain_rule'"):
        _ = dlm_lens.log_likelihood(tiny("llada"), [1], [2], "chain_rule").groups
    parts = {"value": got.value, "standard_error": got.standard_error, "losses": got.losses, "tokens": got.tokens,
             "method": "mc", "settings": got.settings}  # fmt: skip
    for wrong, message in (
        ({"value": got.value[:3]}, "value has shape"),
        ({"losses": got.losses[:3]}, "losses has 3 entries for 4 items"),
        ({"method": "chain_rule"}, r"must have \[3, 2, 4, 2\] terms"),
        ({"method": "other"}, "method is 'other'"),
        ({"completions": (got.tokens,)}, "completions must have"),
    ):
        with pytest.raises(ValueError, match=message):
            dlm_lens.sampling.LogLikelihood(**(parts | wrong))


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    dlm_lens.log_likelihood(tiny("llada"), *ITEMS, samples=4)
    assert capsys.readouterr().err == ""
    dlm_lens.log_likelihood(tiny("llada"), *ITEMS, samples=4, progress=True)
    assert "4/4" in capsys.readouterr().err
