"""The gradient of a weight that is both embedding and head."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_lens.testing import tiny
from dlm_lens.training import masked_loss
from dlm_lens.training.head_loss import HeadGradient, tied_gradient
from dlm_lens.training.losses import loss_forward

FAMILIES = [
    "sink_qwen",
    "sink_llama",
    "llada",
    "dream",
    "smdm",
    "mdlm",
    "sedd",
    "gidd_dit",
    "modernbert",
    "diffugpt",
]


def tied(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return tiny(family, tie_word_embeddings=True, **settings).train()


def inputs(model: Any, masked: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randperm(3 * 17, generator=generator)[:masked]
    return {
        "input_ids": torch.randint(0, 20, (3, 17), generator=generator),  # few ids: rows with several positions
        "outputs": outputs,
        "targets": torch.randint(0, 20, (masked,), generator=generator),
        "weights": torch.rand(masked, generator=generator) * 2,
    }


def gradients(model: Any, *batches: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)  # mdlm has dropout
    for batch in batches:
        (1.5 * masked_loss(model, **batch)).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def separately(model: Any, *batches: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Autograd's own sum of the two gradients."""
    with monkeypatch.context() as patch:
        patch.setattr("dlm_lens.training.losses.tied_gradient", lambda model: nullcontext())
        return gradients(model, *batches)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_autograds_own_to_the_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied(family)
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        pytest.fail(f"{family} does not tie its weights")
    asked = inputs(model)
    assert_same(gradients(model, asked), separately(model, asked, monkeypatch=monkeypatch))


@pytest.mark.parametrize("masked", [9, 0])
def test_gradients_of_several_batches_add_up(masked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen", num_sinks=2)
    batches = inputs(model), inputs(model, masked)
    assert_same(gradients(model, *batches), separately(model, *batches, monkeypatch=monkeypatch))


def test_the_padding_row_gets_the_heads_gradient_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen")
    model.get_input_embeddings().padding_idx = 3
    asked = inputs(model)
    assert (asked["input_ids"] == 3).any()
    found = gradients(model, asked)
    assert_same(found, separately(model, asked, monkeypatch=monkeypatch))
    model.get_input_embeddings().padding_idx = None
    weight = next(name for name in found if "embed_tokens.weight" in name)
    assert not torch.equal(gradients(model, asked)[weight][3], found[weight][3])


def test_a_watched_head_runs_as_a_module_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen")
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: None)
    asked = inputs(model)
    assert_same(gradients(model, asked), separately(model, asked, monkeypatch=monkeypatch))


def test_a_decoder_with_another_kind_of_lookup_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen", num_sinks=0)
    embedding = model.get_input_embeddings()
    asked = inputs(model)
    usual = gradients(model, asked)
    monkeypatch.setattr(type(embedding), "forward", lambda self, input: self.weight[input])
    for name, value in gradients(model, asked).items():
        torch.testing.assert_close(value, usual[name], rtol=1e-5, atol=1e-7)  # rows are summed in another order


@pytest.mark.parametrize("edit", [lambda rows: rows.detach().requires_grad_(), lambda rows: rows * 0.5])
def test_an_edited_embedding_loses_nothing(edit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen")
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: edit(output))
    asked = inputs(model)
    assert_same(gradients(model, asked), separately(model, asked, monkeypatch=monkeypatch))


@pytest.mark.parametrize("again", [False, True])
def test_a_second_lookup_and_a_loss_of_its_own_lose_nothing(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen")
    asked = inputs(model)
    rows: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> Tensor:
        rows.append(output)
        return output + torch.nn.functional.embedding(args[0], module.weight) if again else output

    model.get_input_embeddings().register_forward_hook(keep)

    def both() -> dict[str, Tensor]:
        rows.clear()
        model.zero_grad()
        loss = masked_loss(model, **asked)
        rows[0].square().mean().backward(retain_graph=True)  # before the loss: nothing waits for the lookup
        loss.backward()
        return {name: value.grad.clone() for name, value in model.named_parameters()}

    found = both()
    monkeypatch.setattr("dlm_lens.training.losses.tied_gradient", lambda model: nullcontext())
    for name, value in both().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)  # the rows are summed in another order


def test_a_loss_is_differentiated_once() -> None:
    loss = masked_loss(tied("sink_qwen"), **inputs(tied("sink_qwen")))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated before"):
        loss.backward()


@pytest.mark.parametrize("use", ["backward", "no backward", "gradient of another weight"])
def test_nothing_of_a_loss_is_kept_until_the_garbage_collector_runs(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = tied("sink_qwen"), []

    class Watched(HeadGradient):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

        def put(self, gradient: Tensor) -> None:
            """Watch the gradient too."""
            made.append(weakref.ref(gradient))
            super().put(gradient)

    monkeypatch.setattr("dlm_lens.training.head_loss.HeadGradient", Watched)
    gc.collect()
    gc.disable()
    try:
        loss = masked_loss(model, **inputs(model))
        if use == "backward":
            loss.backward()
            model.zero_grad()
        elif use == "gradient of another weight":
            torch.autograd.grad(loss, model.get_decoder().layers[0].mlp.up_proj.weight)
        del loss
        assert len(made) == (1 if use == "no backward" else 2)
        assert [one() for one in made] == [None] * len(made)
    finally:
        gc.enable()


def test_activation_checkpointing_and_loss_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen", num_sinks=1)
    asked = inputs(model)
    wanted = separately(model, asked, monkeypatch=monkeypatch)
    model.gradient_checkpointing_enable()
    assert_same(gradients(model, asked), wanted)
    model.zero_grad()
    with loss_forward(model):
        (1.5 * model(**asked)["loss"]).backward()
    assert_same({name: value.grad for name, value in model.named_parameters()}, wanted)


class Allocations(TorchDispatchMode):
    """Counts new tensors with as many elements as the weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.seen, self.count = weight, set(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count."""
        given = {value.data_ptr() for value in args if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == self.weight.numel():
            self.count += result.data_ptr() not in given
        return result


def test_the_backward_pass_needs_no_second_tensor_of_the_weights_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied("sink_qwen", vocab_size=4096, mask_token_id=4095)
    weight, asked = model.get_input_embeddings().weight, inputs(model)

    def allocated() -> int:
        model.zero_grad()
        loss = masked_loss(model, **asked)
        with Allocations(weight) as counted:
            loss.backward()
        return counted.count

    assert allocated() == 0
    monkeypatch.setattr("dlm_lens.training.losses.tied_gradient", lambda model: nullcontext())
    assert allocated() >= 1  # the embedding's own gradient


@pytest.mark.parametrize("case", ["untied", "frozen", "no gradients", "compiled", "sharded", "deepspeed"])
def test_other_weights_are_left_to_autograd(case: str, request: pytest.FixtureRequest) -> None:
    model = tied("sink_qwen") if case != "untied" else tiny("sink_qwen", tie_word_embeddings=False)
    weight = model.get_input_embeddings().weight
    if case == "frozen":
        weight.requires_grad_(False)
    if case == "compiled":
        model.get_decoder().compile(backend="eager")
    if case == "sharded":
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            request.addfinalizer(torch.distributed.destroy_process_group)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if case == "deepspeed":
        weight.ds_id = 0
    with torch.no_grad() if case == "no gradients" else nullcontext(), tied_gradient(model) as lookup:
        assert lookup is None
