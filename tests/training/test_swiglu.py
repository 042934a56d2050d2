"""The product of gated MLPs, whose backward pass keeps two tensors."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from dlm_lens.testing import tiny
from dlm_lens.training import masked_loss
from dlm_lens.training.swiglu import SwiGLU
from tests.training.job import job

FAMILIES = ["sink_qwen", "sink_llama", "llada", "dream", "smdm"]


def inputs(masked: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(0, 20, (3, 17), generator=generator),
        "outputs": torch.randperm(3 * 17, generator=generator)[:masked],
        "targets": torch.randint(0, 20, (masked,), generator=generator),
        "weights": torch.rand(masked, generator=generator) * 2,
    }


def gradients(model: Any, context: Callable[[], Any], precision: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model.zero_grad()
    with context():
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = masked_loss(model, **inputs())
        loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that this file computes."""
    seen: list[tuple[int, ...]] = []
    product: Any = __import__("dlm_lens.training.swiglu", fromlist=["_Product"])._Product
    usual = product.forward

    def forward(ctx: Any, gate: Tensor, up: Tensor, activated: Tensor) -> Tensor:
        seen.append(tuple(gate.shape))
        result: Tensor = usual(ctx, gate, up, activated)
        return result

    monkeypatch.setattr(product, "forward", staticmethod(forward))
    return seen


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_autograds_own_to_the_bit(
    family: str, recomputed: bool, precision: torch.dtype, products: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model = tiny(family).train()
    wanted = gradients(model, nullcontext, precision)
    assert not products
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": SwiGLU.recomputed})
    found = gradients(model, nullcontext if recomputed else SwiGLU, precision)
    layers, width = model.config.num_hidden_layers, model.config.intermediate_size
    assert len(products) == layers * (2 if recomputed else 1)
    assert {shape[-1] for shape in products} == {width}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_backward_pass_outside_the_context_is_refused() -> None:
    model = tiny("sink_qwen").train()
    model.gradient_checkpointing_enable()
    with SwiGLU():
        loss = masked_loss(model, **inputs())
    with pytest.raises(CheckpointError):
        loss.backward()


def test_a_layer_keeps_one_tensor_of_the_mlp_less() -> None:
    model = tiny("sink_qwen", num_hidden_layers=1, intermediate_size=77).train()

    def kept(context: Callable[[], Any]) -> int:
        found: set[int] = set()

        def keep(value: Tensor) -> Tensor:
            if value.shape[-1] == 77 and value.dim() == 3:
                found.add(value.data_ptr())
            return value

        with context(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            loss = masked_loss(model, **inputs())
        loss.backward()
        return len(found)

    assert kept(nullcontext) - kept(SwiGLU) == 1


def silu_then(use: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: use(nn.functional.silu(gate), up)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": silu_then(lambda one, up: one * up),
    "other order": silu_then(lambda one, up: up * one),
    "torch.mul": silu_then(torch.mul),
    "used twice": silu_then(lambda one, up: one * up + one.square()),
    "square": silu_then(lambda one, up: one * one + up),
    "broadcast": silu_then(lambda one, up: one * up[:1]),
    "number": silu_then(lambda one, up: one * 2.0 + up),
    "transposed": lambda gate, up: nn.functional.silu(gate.T) * up.T,
    "one variable": lambda gate, up: nn.functional.silu(gate) * gate + up,
    "no rows": lambda gate, up: nn.functional.silu(gate[:0]) * up[:0],
    "constant gate": lambda gate, up: nn.functional.silu(gate.detach()) * up,
    "constant up": lambda gate, up: nn.functional.silu(gate) * up.detach(),
    "doubled in place": silu_then(lambda one, up: one.mul_(2.0) * up),
    "in place": lambda gate, up: nn.functional.silu(gate * 1.0, inplace=True) * up,
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_silu_has_its_gradients(use: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2100, 1000, generator=generator) for _ in range(2))

    def slopes(context: Callable[[], Any]) -> list[Tensor | None]:
        leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        with context():
            value = USES[use](*leaves)
            (value * torch.linspace(-1, 1, value.numel()).view_as(value)).sum().backward()
        return [leaf.grad for leaf in leaves]

    for found, wanted in zip(slopes(SwiGLU), slopes(nullcontext), strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None and found is not None:
            # Gradients of two uses are added in another order.
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_an_input_that_was_changed_is_the_error_that_it_was() -> None:
    for context in (nullcontext, SwiGLU):
        leaf = torch.ones(3, requires_grad=True)
        with context():
            gate = leaf * 2.0
            activated = nn.functional.silu(gate)
            gate.add_(1.0)
            value = (activated * leaf).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                value.backward()


def test_nothing_is_replaced_where_no_gradient_is_computed(products: list[tuple[int, ...]]) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with SwiGLU(), torch.no_grad():
        assert not (nn.functional.silu(leaf) * leaf).requires_grad
    with SwiGLU():
        activated = nn.functional.silu(leaf)
        with torch.no_grad():
            assert not (activated * leaf).requires_grad
    assert not products


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_uses_it_and_learns_the_same(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, products: list[tuple[int, ...]]
) -> None:
    trainer = job(tmp_path / "with", steps=3, checkpointing=checkpointing)
    trainer.train()
    assert products
    monkeypatch.setattr("dlm_lens.training.swiglu._PRODUCTS", ())
    count = len(products)
    plain = job(tmp_path / "without", steps=3, checkpointing=checkpointing)
    plain.train()
    assert len(products) == count
    for name, value in plain.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
