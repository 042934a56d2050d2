"""Muon without bfloat16 instructions: its iteration, and that it is torch's optimiser otherwise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dlm_lens.training import optimizers
from dlm_lens.training.optimizers import Float32Muon, build_muon, orthogonalised

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = [(24, 24), (40, 16), (16, 40)]


def gradient(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(matrix: Tensor) -> Tensor:
    """The iteration on singular values, each for itself: s goes to a s + b s^3 + c s^5."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = gradient(shape, 0)
    before = matrix.clone()
    found = orthogonalised(matrix, COEFFICIENTS, 5, 1e-7)
    # float64 on both sides: rounding of some ten products.
    torch.testing.assert_close(found, expected(matrix), atol=1e-11, rtol=0)
    assert torch.equal(matrix, before)
    values = torch.linalg.svdvals(found)
    assert (values > 0.5).all()
    assert (values < 1.3).all()


def test_a_gradient_of_zeros_stays_zero() -> None:
    assert torch.equal(orthogonalised(torch.zeros(3, 4), COEFFICIENTS, 5, 1e-7), torch.zeros(3, 4))


def run(
    kind: Callable[..., torch.optim.Optimizer], steps: range, state: dict | None = None
) -> tuple[list[Tensor], dict]:
    """Weights after some steps with the gradients of those numbers; the last weight never has one."""
    weights = [nn.Parameter(gradient(shape, 100 + place).float()) for place, shape in enumerate([*SHAPES, (4, 4)])]
    made = kind(weights, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    if state is not None:
        made.load_state_dict(state)
    for step in steps:
        for place, weight in enumerate(weights[:3]):
            weight.grad = gradient(tuple(weight.shape), 10 * step + place).float()
        made.step()
    return [weight.detach() for weight in weights], made.state_dict()


def test_steps_are_those_of_a_computation_in_float64() -> None:
    weights, _ = run(Float32Muon, range(4))
    for place, shape in enumerate(SHAPES):
        weight, mean = gradient(shape, 100 + place).float().double(), torch.zeros(shape, dtype=torch.float64)
        for step in range(4):
            new = gradient(shape, 10 * step + place).float().double()
            mean = 0.95 * mean + 0.05 * new
            weight = weight * (1 - 0.02 * 0.1)
            weight = weight - 0.02 * 0.2 * max(shape) ** 0.5 * expected(0.05 * new + 0.95 * mean)
        # float32 rounding of four updates of entries up to 0.01, amplified by the steep polynomial.
        torch.testing.assert_close(weights[place].double(), weight, atol=2e-6, rtol=0)
    assert torch.equal(weights[3], gradient((4, 4), 103).float()), "a weight without a gradient stays"


def test_it_is_torchs_optimiser_up_to_the_rounding_of_bfloat16() -> None:
    ours, our_state = run(Float32Muon, range(4))
    theirs, their_state = run(torch.optim.Muon, range(4))
    for place, shape in enumerate(SHAPES):
        change, other = (found[place] - gradient(shape, 100 + place).float() for found in (ours, theirs))
        # bfloat16 has 8 bits: 0.4% in each of ten products; 1 - cosine is of second order.
        assert torch.nn.functional.cosine_similarity(change.flatten(), other.flatten(), dim=0) > 0.999
        assert not torch.equal(change, other)
        assert torch.equal(
            our_state["state"][place]["momentum_buffer"], their_state["state"][place]["momentum_buffer"]
        )


def test_a_run_of_torchs_optimiser_goes_on_with_it() -> None:
    _, state = run(torch.optim.Muon, range(2))
    _, ours = run(Float32Muon, range(2, 4), state)
    _, whole = run(Float32Muon, range(4))
    for place in range(3):
        assert torch.equal(ours["state"][place]["momentum_buffer"], whole["state"][place]["momentum_buffer"])


@pytest.mark.parametrize("slow", [False, True])
def test_the_kind_follows_the_cpu(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "emulates_bfloat16", lambda: slow)
    weights = [nn.Parameter(torch.ones(2, 3))]
    made = build_muon(weights, rate=0.1, weight_decay=0.2)
    assert type(made) is (Float32Muon if slow else torch.optim.Muon)
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.1, 0.2, 0.95)
    away = [nn.Parameter(torch.ones(2, 3, device="meta"))]
    assert type(build_muon(away, rate=0.1, weight_decay=0.2)) is torch.optim.Muon, "not on a CPU"


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.eye(3))
    made = build_muon([weight], rate=0.1, weight_decay=0.0)

    def closure() -> Tensor:
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert Float32Muon([weight], adjust_lr_fn="match_rms_adamw").step(closure) == 3
    assert made.param_groups[0]["params"] == [weight]


def test_another_scale_of_the_updates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adjust_lr_fn is 'original'; Float32Muon takes 'match_rms_adamw' alone"):
        Float32Muon([nn.Parameter(torch.eye(3))], adjust_lr_fn="original")
