import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, PretrainedConfig

from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.scoring import Query, Scorer, cross_entropy
from dlm_lens.sampling.two_copies import Blocks
from dlm_lens.testing import tiny
from dlm_lens.training import Example, MaskedDiffusionLoss, Rows, masked_loss, weighted_cross_entropy
from dlm_lens.training.losses import loss_forward
from dlm_lens.training.objective import Noised

N, WIDTH, VOCABULARY = 37, 8, 50


def problem() -> tuple[torch.Tensor, nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    targets, weights = torch.randint(0, VOCABULARY, (N,)), torch.rand(N) * 3
    return torch.randn(N, WIDTH, requires_grad=True), head, targets, weights


def gradients64(states: torch.Tensor, head: nn.Linear, targets: torch.Tensor, weights: torch.Tensor) -> tuple:
    """d/dz of w (logsumexp z - z_y) is w (softmax z - e_y), here in float64 by hand."""
    x, kernel, factor = states.detach().double(), head.weight.detach().double(), weights.double()[:, None]
    logits = x @ kernel.T
    p = torch.exp(logits - logits.max(1, keepdim=True).values)
    p = p / p.sum(1, keepdim=True)
    loss = -(factor[:, 0] * p[torch.arange(N), targets].log()).sum()
    slope = factor * (p - torch.eye(VOCABULARY).double()[targets])
    return loss, slope @ kernel, slope.T @ x


@pytest.mark.parametrize("never", [None, 3])
@pytest.mark.parametrize("plain", [True, False])
def test_a_head_with_a_bias_and_an_id_without_probability(plain: bool, never: int | None) -> None:
    """The head of the DiT families: its bias has a gradient, the id without probability none."""
    states, _, targets, weights = problem()
    head = nn.Linear(WIDTH, VOCABULARY)
    if never is not None:
        targets = targets.masked_fill(targets == never, 4)
    if not plain:
        head.register_forward_hook(lambda module, args, output: None)  # a watched head runs as a module
    (2.5 * weighted_cross_entropy(states, head, targets, weights, 7 * VOCABULARY, never)).backward()
    kernel, offset, x = head.weight.detach().double(), head.bias.detach().double(), states.detach().double()
    e = torch.exp(x @ kernel.T + offset)
    if never is not None:
        e[:, never] = 0.0
    slope = 2.5 * weights.double()[:, None] * (e / e.sum(1, keepdim=True) - torch.eye(VOCABULARY).double()[targets])
    # float32 against float64.
    torch.testing.assert_close(head.bias.grad.double(), slope.sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad.double(), slope.T @ x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.grad.double(), slope @ kernel, rtol=1e-4, atol=1e-5)
    assert never is None or float(head.bias.grad[never]) == 0.0


@pytest.mark.parametrize("elements", [VOCABULARY, 7 * VOCABULARY, 10**6])
@pytest.mark.parametrize("plain", [True, False])
def test_loss_and_gradients(elements: int, plain: bool) -> None:
    states, head, targets, weights = problem()
    wanted = gradients64(states, head, targets, weights)
    if not plain:
        head.register_forward_hook(lambda module, args, output: None)  # a watched head runs as a module
    loss = weighted_cross_entropy(states, head, targets, weights, elements)
    (2.5 * loss).backward()
    # float32 against float64.
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.grad.double() / 2.5, wanted[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.weight.grad.double() / 2.5, wanted[2], rtol=1e-4, atol=1e-5)


def test_autocast_computes_in_bfloat16_and_keeps_float32_gradients() -> None:
    states, head, targets, weights = problem()
    wanted = gradients64(states, head, targets, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = weighted_cross_entropy(states, head, targets, weights, 5 * VOCABULARY)
    loss.backward()
    assert head.weight.grad.dtype == torch.float32
    error = float((head.weight.grad.double() - wanted[2]).norm() / wanted[2].norm())
    assert 1e-4 < error < 2e-2  # bfloat16 has 8 bits


def test_nothing_masked_is_a_loss_of_zero_with_gradients() -> None:
    states, head, targets, weights = problem()
    loss = weighted_cross_entropy(states[:0], head, targets[:0], weights[:0])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_no_more_logits_than_asked_for_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    states, head, targets, weights = problem()
    sizes = []
    whole = torch.Tensor.amax

    def watched(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        sizes.append(self.numel())
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "amax", watched)
    weighted_cross_entropy(states, head, targets, weights, 4 * VOCABULARY)
    assert max(sizes) == 4 * VOCABULARY
    assert sum(sizes) == N * VOCABULARY


TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        GraniteConfig(**TINY, logits_scaling=3.0),
        Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.0),
        CohereConfig(**TINY, logit_scale=0.3, bos_token_id=1, eos_token_id=2),
    ],
    ids=lambda config: config.model_type,
)
def test_scaled_logits_have_the_loss_and_gradient_of_transformers(config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    ids = torch.randint(3, VOCABULARY, (2, 9))
    outputs = torch.arange(18).view(2, 9)[:, :-1].flatten()
    model(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    expected = float(model(input_ids=ids, labels=ids).loss.detach())
    model.zero_grad()
    weights = torch.full((16,), 1 / 16)
    loss = masked_loss(model, ids, outputs, ids[:, 1:].flatten(), weights, elements=5 * VOCABULARY)
    loss.backward()
    # Both take the cross entropy in float32.
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_a_forward_that_the_model_had_is_there_after_loss_forward() -> None:
    """accelerate's hooks are a forward of the instance's own."""
    calls: list[int] = []

    class Counting(ModelHook):
        """Counts the forward passes."""

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple:
            calls.append(len(calls))
            return args, kwargs

    model, ids = tiny("llada"), torch.tensor([[1, 2, 3]])
    usual = model(input_ids=ids).logits
    add_hook_to_module(model, Counting())
    given = {"outputs": torch.tensor([1]), "targets": torch.tensor([4]), "weights": torch.ones(1)}
    with loss_forward(model):
        with loss_forward(model):
            inner = model(input_ids=ids, **given)["loss"]
        assert model(input_ids=ids, **given)["loss"].equal(inner)
        assert calls == []
        assert model(input_ids=ids).logits.equal(usual)
    assert model(input_ids=ids).logits.equal(usual)
    assert len(calls) == 2


def test_sedd_is_trained_with_its_score_entropy() -> None:
    """w (ln N - u_y + sum exp(u) / N - 1) of every target, whose gradient is w (exp(u) / N - e_y), in float64."""
    model = tiny("sedd")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 60, (2, 12), generator=generator)
    outputs, targets = torch.arange(0, 24, 3), torch.randint(0, 60, (8,), generator=generator)
    weights, sigma = torch.rand(8, generator=generator), torch.tensor([0.4, 2.5])
    loss = masked_loss(model, ids, outputs, targets, weights, sigma=sigma, elements=3 * 4 * model.config.vocab_size)
    loss.backward()
    with torch.no_grad():
        states = model.model(ids, sigma=sigma).last_hidden_state.flatten(0, 1)[outputs].double()
    kernel, bias = model.lm_head.weight.detach().double(), model.lm_head.bias.detach().double()
    u = (states @ kernel.T + bias)[:, :-1]  # without [MASK], the last row
    q = u.exp() / u.shape[1]
    expected = (weights.double() * (-q[torch.arange(8), targets].log() + q.sum(-1) - 1)).sum()
    slope = weights.double()[:, None] * (q - torch.eye(u.shape[1]).double()[targets])
    # The library's logits are float32.
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(model.lm_head.bias.grad[:-1].double(), slope.sum(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad[:-1].double(), slope.T @ states, rtol=1e-4, atol=1e-5)
    assert not bool(model.lm_head.weight.grad[-1].any())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llada", {}),
        ("dream", {}),
        ("mdlm", {}),
        ("mdlm", {"time_conditioning": True}),
        ("sedd", {}),
        ("llada2", {}),
        ("nemotron_labs_diffusion", {}),
        ("efficient_dlm", {}),  # its prompt is one block
    ],
)
def test_the_loss_of_given_masks_is_that_of_the_likelihood(family: str, options: dict[str, Any]) -> None:
    """Training and `log_likelihood` see the same canvas, noise level and blocks, in code that they do not share."""
    model = tiny(family, **options)
    mask, prompt, rate = model.config.mask_token_id, 9, 0.6
    tokens = torch.randint(0, 40, (prompt + 8,), generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(1, len(tokens), dtype=torch.bool)
    masked[0, prompt:] = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).bool()
    blocks = Blocks.of(model.config)
    own = {} if blocks is None else {"block_length": 4}
    objective = MaskedDiffusionLoss(normalisation="batch", weighting="uniform", **own).for_model(model, 1)
    rows, one = Rows.of([Example(tokens.masked_fill(tokens == mask, 1), prompt)], len(tokens), 0), torch.ones(1)
    arguments = objective.loss_arguments(rows, Noised(masked, rate * one.double(), one.double(), rows.answer))
    del arguments["count"]
    scorer = Scorer(
        model,
        blocks=None if blocks is None else replace(blocks, length=4),
        loss=algorithm_of(model.config).loss or cross_entropy,
    )
    sigma = -math.log(1 - 0.999 * rate) if options.get("time_conditioning") or family == "sedd" else None
    pair = Pair(rows.tokens[0, :prompt], rows.tokens[0, prompt:])
    with torch.no_grad():
        ((_, losses),) = scorer.losses([Query(0, pair, masked[0], masked[0], sigma=sigma)])
        # Two float32 passes of the same network in other kernels.
        torch.testing.assert_close(masked_loss(model, **arguments).double(), losses.sum(), rtol=1e-5, atol=0.0)
