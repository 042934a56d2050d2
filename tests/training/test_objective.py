"""The objective against float64 computations written from the formulas, with noise that is given."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, ModernBertConfig, ModernBertForMaskedLM

import dlm_lens
from dlm_lens.adapters.registry import families
from dlm_lens.testing import tiny
from dlm_lens.training import (
    Example,
    LikelihoodBoundLoss,
    MaskedDiffusionLoss,
    NextToken,
    Rows,
    UniformDiffusionLoss,
    masked_loss,
)
from dlm_lens.training.objective import Noised
from dlm_lens.training.settings import OBJECTIVES
from tests.reference import forward64

MASK = 63


def example_rows(batch: int = 3, length: int = 10, **fields: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 60, (batch, length), generator=generator)
    return Rows.of([Example(row, **fields) for row in tokens], length, 0)


def given_noise(rows: Rows, share: float = 0.5) -> Noised:
    generator = torch.Generator().manual_seed(1)
    rate = torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)[: len(rows.tokens)]
    masked = (torch.rand(rows.tokens.shape, generator=generator) < share) & rows.answer
    return Noised(masked, rate, 1 / rate, rows.answer)


def loss_of(model: torch.nn.Module, objective: Any, asked: dict[str, Tensor]) -> float:
    count = float(asked.pop("count"))
    return float(masked_loss(model, **asked)) / count


def loss64(
    model: torch.nn.Module, rows: Rows, noised: Noised, normalisation: str, shift: bool, prompts: int = 0
) -> float:
    """Eq. 3 and 4, one position after the other."""
    canvas = rows.tokens.clone()
    canvas[noised.masked] = model.config.mask_token_id
    mask = None if bool(rows.visible.all()) else rows.visible
    logits = forward64(model, canvas, mask)["logits"]
    total, tokens, sequences = 0.0, 0, 0.0
    for row in range(len(canvas)):
        own, size = 0.0, 0
        for i in range(canvas.shape[1]):
            if not rows.visible[row, i] or i < prompts:
                continue
            size += 1
            if noised.masked[row, i]:
                values = logits[row, max(i - 1, 0) if shift else i]
                log_p = values - torch.log(torch.exp(values).sum())
                own -= float(log_p[rows.tokens[row, i]]) / float(noised.rate[row])
        total, tokens, sequences = total + own, tokens + size, sequences + own / size
    return total / tokens if normalisation == "token" else sequences / len(canvas)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("family", "config"), [("llada", {}), ("sink_qwen", {"num_sinks": 2}), ("smdm", {})])
def test_loss_is_eq_3(family: str, config: dict, shift: bool, normalisation: str) -> None:
    model = tiny(family, **config)
    rows = example_rows()
    objective = MaskedDiffusionLoss(
        normalisation=normalisation, logit_shift=shift, mask_token_id=model.config.mask_token_id
    )
    noised = given_noise(rows)
    with torch.no_grad():
        loss = loss_of(model, objective, objective.loss_arguments(rows, noised))
    assert loss == pytest.approx(loss64(model, rows, noised, normalisation, shift), rel=2e-5)  # float32 network


def test_loss_of_a_fine_tuning_batch_with_padding() -> None:
    model = tiny("sink_qwen", num_sinks=1, sink_placement="end")
    examples = [Example(torch.arange(4, 4 + size), prompt_length=3) for size in (10, 7, 5)]
    rows = Rows.of(examples, 10, 0)
    objective = MaskedDiffusionLoss(normalisation="sequence", logit_shift=False, mask_token_id=MASK)
    noised = given_noise(rows)
    assert not noised.masked[:, :3].any()
    with torch.no_grad():
        loss = loss_of(model, objective, objective.loss_arguments(rows, noised))
    assert loss == pytest.approx(loss64(model, rows, noised, "sequence", False, prompts=3), rel=2e-5)


@pytest.mark.parametrize("normalisation", ["token", "sequence", "batch"])
def test_next_token_loss_is_the_mean_of_log_probabilities(normalisation: Any) -> None:
    model = tiny("causal", model_type="qwen2")
    rows = Rows.of([Example(torch.arange(3, 13)), Example(torch.arange(20, 27))], 10, 0)
    objective = NextToken(normalisation)
    logits = forward64(model, rows.tokens, rows.visible, causal=True)["logits"]
    losses: list[list[float]] = [[], []]
    for row, size in enumerate((10, 7)):
        for i in range(1, size):
            values = logits[row, i - 1]
            losses[row].append(float(torch.logsumexp(values, 0) - values[rows.tokens[row, i]]))
    total = sum(map(sum, losses))
    means = [sum(each) / len(each) for each in losses]
    wanted = {"token": total / (9 + 6), "sequence": sum(means) / 2, "batch": total / 2}[normalisation]
    with torch.no_grad():
        loss = loss_of(model, objective, objective.prepare(rows, [0, 1], 0))
    assert loss == pytest.approx(wanted, rel=2e-5)


def test_rates_of_the_schedules() -> None:
    times = torch.linspace(0, 0.999, 1000, dtype=torch.float64)
    for schedule in ("linear", "cosine"):
        rate, weight = MaskedDiffusionLoss(schedule=schedule, floor=0.01).rate(times)
        assert rate[0] == pytest.approx(0.01)
        assert rate[-1] == pytest.approx(1, abs=2e-3)
        torch.testing.assert_close(weight, 1 / rate)
        # elbo: tau' / tau, here against a difference quotient.
        _, elbo = MaskedDiffusionLoss(schedule=schedule, floor=0.01, weighting="elbo").rate(times)
        slope = (rate[2:] - rate[:-2]) / (times[2:] - times[:-2])
        torch.testing.assert_close(elbo[1:-1], slope / rate[1:-1], rtol=1e-4, atol=1e-4)
    middle = MaskedDiffusionLoss(schedule="cosine", floor=0.01).rate(torch.tensor([0.5]).double())[0]
    assert float(middle) == pytest.approx(0.01 + 0.99 * (1 - math.sqrt(0.5)))


def test_masks_have_their_rate_and_spare_the_prompt() -> None:
    rows = example_rows(400, 50, prompt_length=10)
    noised = MaskedDiffusionLoss(floor=0.2).draw(rows, range(400), 0)
    assert not noised.masked[:, :10].any()
    share = noised.masked[:, 10:].double().mean(1)
    # A binomial share of 40 positions: standard error below 0.08, 400 rows.
    assert float((share - noised.rate).abs().max()) < 5 * 0.08
    assert float((share - noised.rate).mean().abs()) < 5 * 0.08 / 20
    assert 0.2 <= float(noised.rate.min()) < 0.22
    assert float(noised.rate.max()) > 0.98


def test_counted_masks_are_exact_and_weighted_by_their_share() -> None:
    rows = example_rows(200, 20, prompt_length=5)
    objective = MaskedDiffusionLoss(masks="count", whole_share=0.3)
    noised = objective.draw(rows, range(200), 0)
    whole = noised.region[:, 0]
    assert 0.2 < float(whole.double().mean()) < 0.4
    sizes = torch.where(whole, 20, 15)
    rate = objective.rate(objective.times(range(200), 0))[0]
    torch.testing.assert_close(noised.masked.sum(1), (rate * sizes).ceil().long())
    torch.testing.assert_close(noised.weight * noised.masked.sum(1) / sizes, torch.ones(200).double())
    assert bool((noised.masked[~whole][:, :5] == 0).all())


def test_low_discrepancy_times_fill_the_interval_evenly_in_every_group() -> None:
    objective = MaskedDiffusionLoss(low_discrepancy=True, group=32)
    for group in range(3):
        times = objective.times(range(32 * group, 32 * group + 32), 5).sort().values
        gaps = torch.diff(torch.cat([times, times[:1] + 1]))
        torch.testing.assert_close(gaps, torch.full((32,), 1 / 32).double())
    assert not torch.equal(objective.times(range(32), 5), objective.times(range(32, 64), 5))


def test_noise_depends_on_the_sample_alone() -> None:
    rows = example_rows(6, 12)
    objective = MaskedDiffusionLoss(low_discrepancy=True, group=4, random_length_share=0.5)
    torch.manual_seed(0)
    whole = objective.draw(rows, range(6), 3)
    torch.manual_seed(1)
    later = Rows(*(getattr(rows, name)[4:] for name in ("tokens", "visible", "answer", "prompt")))
    part = objective.draw(later, [4, 5], 3)
    assert torch.equal(whole.masked[4:], part.masked)
    assert torch.equal(whole.rate[4:], part.rate)
    assert objective.lengths([4, 5], 100, 3) == objective.lengths(range(6), 100, 3)[4:]
    assert not torch.equal(whole.masked, objective.draw(rows, range(6), 4).masked)


def test_random_lengths() -> None:
    lengths = MaskedDiffusionLoss(random_length_share=0.01).lengths(range(20_000), 64, 0)
    short = [length for length in lengths if length < 64]
    assert 0.006 < len(short) / 20_000 < 0.014  # a full length is among the drawn ones, 1 in 64
    assert min(short) < 8 < 56 < max(short)
    assert set(MaskedDiffusionLoss().lengths(range(100), 64, 0)) == {64}


def test_documents_that_do_not_see_each_other_are_what_they_are_alone() -> None:
    model = tiny("sink_qwen", num_sinks=1, logit_shift=True)
    first, second = torch.arange(3, 9), torch.arange(30, 40)
    documents = torch.tensor([7] * 6 + [8] * 10)
    packed = Rows.of([Example(torch.cat([first, second]), documents=documents)], 18, 0)
    objective = MaskedDiffusionLoss(mask_token_id=MASK, logit_shift=True)
    masked = torch.zeros(1, 18, dtype=torch.bool)
    masked[0, [0, 4, 6, 7, 15]] = True
    noise = Noised(masked, torch.ones(1), torch.ones(1), packed.answer)
    total = 0.0
    for text, where in ((first, [0, 4]), (second, [0, 1, 9])):
        rows = Rows.of([Example(text)], len(text), 0)
        own = torch.zeros(1, len(text), dtype=torch.bool)
        own[0, where] = True
        asked = objective.loss_arguments(rows, Noised(own, torch.ones(1), torch.ones(1), rows.answer))
        asked.pop("count")
        total += float(masked_loss(model, **asked).detach())
    asked = objective.loss_arguments(packed, noise)
    asked.pop("count")
    assert float(masked_loss(model, **asked).detach()) == pytest.approx(total, rel=1e-5)
    joined = Rows.of([Example(torch.cat([first, second]))], 18, 0)
    seen = objective.loss_arguments(joined, noise)
    seen.pop("count")
    assert float(masked_loss(model, **seen).detach()) != pytest.approx(total, rel=1e-3)


def test_the_first_output_of_a_document_predicts_itself_when_outputs_are_shifted() -> None:
    rows = Rows.of([Example(torch.arange(6), documents=torch.tensor([0, 0, 0, 1, 1, 1]))], 6, 0)
    noised = Noised(torch.ones(1, 6, dtype=torch.bool), torch.ones(1), torch.ones(1), rows.answer)
    asked = MaskedDiffusionLoss(mask_token_id=9, logit_shift=True).loss_arguments(rows, noised)
    assert asked["outputs"].tolist() == [0, 0, 1, 3, 3, 4]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"floor": 0.0}, "floor is 0.0"),
        ({"schedule": "linaer"}, "schedule is 'linaer'; it must be one of 'linear', 'cosine'"),
        ({"whole_share": 1.5}, "whole_share is 1.5"),
        ({"group": -1}, "group is -1"),
    ],
)
def test_wrong_objectives_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedDiffusionLoss(**fields)


def test_a_mask_token_in_the_text_is_refused() -> None:
    rows = Rows.of([Example(torch.tensor([3, MASK, 5]))], 3, 0)
    with pytest.raises(ValueError, match=f"the text holds the mask token {MASK}"):
        MaskedDiffusionLoss(mask_token_id=MASK, logit_shift=False).prepare(rows, [0], 0)


def test_a_model_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no mask token; turn .* with dlm_lens\.training\.convert"):
        MaskedDiffusionLoss().for_model(tiny("causal"), 8)


@pytest.mark.parametrize("family", [family.name for family in families()])
def test_next_token_takes_causal_models_and_each_refusal_names_an_objective_that_fits(family: str) -> None:
    """The loss of a network that sees its target falls to nothing, and says nothing."""
    model = tiny(family)
    if family == "causal":
        assert NextToken().for_model(model, 2) == NextToken()
    else:
        with pytest.raises(ValueError, match=r"is not causal, so that it sees the tokens|is not trained here"):
            NextToken().for_model(model, 2)
    every: Any = (MaskedDiffusionLoss, UniformDiffusionLoss, LikelihoodBoundLoss, NextToken)
    kinds = {kind.__name__: kind() for kind in every}
    named = set()
    for objective in kinds.values():
        try:
            objective.for_model(model, 2)
        except ValueError as refusal:
            named |= {name for name in kinds if name in str(refusal).partition("; ")[2]}
    # The sentences on encoders and windows name another model instead.
    for name in named:
        kinds[name].for_model(model, 2)
    assert bool(named) == (family not in ("diffusion_gemma", "sdlm", "i_dlm"))


def test_next_token_takes_the_networks_of_transformers_that_are_causal() -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, bos_token_id=None, eos_token_id=None)
    NextToken().for_model(GPT2LMHeadModel(config), 2)
    NextToken().for_model(dlm_lens.load("toy-ar"), 2)
    encoder = ModernBertForMaskedLM(ModernBertConfig(intermediate_size=16, pad_token_id=0, **shape))
    with pytest.raises(ValueError, match=r"is not causal.* train it with MaskedDiffusionLoss"):
        NextToken().for_model(encoder, 2)


@pytest.mark.parametrize("mask", [-1, 64])
def test_a_mask_token_that_the_model_does_not_embed_is_refused(mask: int) -> None:
    """It was an IndexError in the first pass."""
    model = tiny("llada")
    with pytest.raises(ValueError, match=rf"mask_token_id is {mask}, and the model embeds 0 to 63"):
        MaskedDiffusionLoss(mask_token_id=mask).for_model(model, 8)
    assert MaskedDiffusionLoss(mask_token_id=62).for_model(model, 8).mask_token_id == 62
    with pytest.raises(ValueError, match="vocabulary is 65, and the model embeds 64 ids"):
        UniformDiffusionLoss(vocabulary=65).for_model(tiny("uniform_qwen"), 8)


def uniform_loss64(model: torch.nn.Module, rows: Rows, noised: Noised, tokens: Tensor, normalisation: str) -> float:
    """-log p(x_0^i | x_t) of every position that could be noise, one after the other."""
    canvas = torch.where(noised.masked, tokens, rows.tokens)
    logits = forward64(model, canvas, None if bool(rows.visible.all()) else rows.visible)["logits"]
    sums = []
    for row in range(len(canvas)):
        own = [
            float(logits[row, i].exp().sum().log() - logits[row, i, rows.tokens[row, i]])
            for i in range(canvas.shape[1])
            if noised.region[row, i]
        ]
        sums.append(own)
    if normalisation == "token":
        return sum(map(sum, sums)) / sum(map(len, sums))
    return sum(sum(own) / len(own) for own in sums) / len(sums)


@pytest.mark.parametrize("normalisation", ["token", "sequence"])
@pytest.mark.parametrize("config", [{}, {"num_sinks": 2}])
def test_uniform_noise_is_the_cross_entropy_of_every_position(normalisation: str, config: dict[str, int]) -> None:
    model = tiny("uniform_qwen", **config)
    rows = example_rows(prompt_length=4)
    objective = UniformDiffusionLoss(normalisation=normalisation).for_model(model, 3)  # type: ignore[arg-type]
    tokens = torch.randint(0, 64, rows.tokens.shape, generator=torch.Generator().manual_seed(5))
    noised = given_noise(rows)
    asked = objective.loss_arguments(rows, noised, tokens)
    assert asked["input_ids"].equal(torch.where(noised.masked, tokens, rows.tokens))
    # A float32 network of two layers.
    assert loss_of(model, objective, asked) == pytest.approx(
        uniform_loss64(model, rows, noised, tokens, normalisation), rel=1e-5
    )


def test_uniform_noise_replaces_the_share_of_the_time_by_every_token_alike() -> None:
    objective = UniformDiffusionLoss(masks="count", vocabulary=64)
    rows = example_rows(400, length=20, prompt_length=4)
    rows = Rows(torch.full_like(rows.tokens, 99), rows.visible, rows.answer, rows.prompt)
    shown = objective.prepare(rows, range(400), 0)["input_ids"]
    noise = shown != 99
    times = objective.noise.times(range(400), 0)
    assert noise.sum(-1).equal((objective.noise.rate(times)[0] * 16).ceil().long())
    assert not noise[:, :4].any()
    counts = torch.bincount(shown[noise], minlength=64).double()
    # Chi squared with 63 degrees of freedom: mean 63, standard deviation 11.2.
    expected = counts.sum() / 64
    assert 63 - 4 * 11.2 < float(((counts - expected) ** 2 / expected).sum()) < 63 + 4 * 11.2
    again = objective.prepare(Rows.of([Example(rows.tokens[7], 4)], 20, 0), [7], 0)["input_ids"]
    assert again[0].equal(shown[7])


@pytest.mark.parametrize("family", ["llada", "causal"])
def test_uniform_noise_needs_a_model_without_a_mask_token(family: str) -> None:
    with pytest.raises(ValueError, match="is no model of uniform noise"):
        UniformDiffusionLoss().for_model(tiny(family), 4)
    with pytest.raises(ValueError, match="has no mask token"):
        MaskedDiffusionLoss().for_model(tiny("uniform_qwen"), 4)


def test_a_network_that_predicts_from_the_other_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="the sampler of DuoForDiffusion counts the token that a position holds"):
        UniformDiffusionLoss().for_model(tiny("duo"), 4)


def test_every_objective_is_registered_by_its_kind() -> None:
    assert list(OBJECTIVES) == ["masked_diffusion", "next_token", "uniform_diffusion", "likelihood_bound"]
    assert all(one.kind == kind for kind, one in OBJECTIVES.items())
    shares = {kind: one().predicted_share for kind, one in OBJECTIVES.items()}
    assert shares.pop("masked_diffusion") == 0.5
    assert set(shares.values()) == {1.0}
    assert MaskedDiffusionLoss(block_length=4, ar_weight=0.1).predicted_share == 1.5


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_evaluation_has_whole_rows_and_spread_times(kind: str) -> None:
    found = OBJECTIVES[kind](normalisation="sequence", random_length_share=0.5).for_evaluation(6)
    times = {} if kind == "next_token" else {"low_discrepancy": True, "group": 6}
    assert found == OBJECTIVES[kind](normalisation="sequence", **times)


@pytest.mark.parametrize("masks", ["independent", "count"])
@pytest.mark.parametrize(("family", "options"), [("sedd", {}), ("mdlm", {"time_conditioning": True})])
def test_a_network_is_given_the_noise_level_of_its_masking_rate(
    family: str, options: dict[str, Any], masks: Any
) -> None:
    """-ln(1 - 0.999 tau) as the authors train, not that of the share of masks, which the prompt lowers."""
    model = tiny(family, **options)
    objective = MaskedDiffusionLoss(masks=masks).for_model(model, 4)
    rows = Rows.of([Example(torch.arange(12), 7)] * 4, 14, 0)
    arguments = objective.prepare(rows, range(4), 3)
    rate = objective.draw(rows, range(4), 3).rate
    seen: list[torch.Tensor] = []
    model.model.sigma_map.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    del arguments["count"]
    masked_loss(model, **arguments)
    expected = [-math.log(1 - 0.999 * float(tau)) for tau in rate]
    assert seen[0].tolist() == pytest.approx(expected, rel=1e-6)  # float32
    assert "sigma" not in MaskedDiffusionLoss().for_model(tiny("mdlm"), 4).prepare(rows, range(4), 3)
