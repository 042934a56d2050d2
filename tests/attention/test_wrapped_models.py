"""Models with hook points under what other libraries do to them: PEFT, compilation, offloading, checkpointing."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import attach_hooks, check_hook_points, hooked_attentions
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.testing import tiny
from tests.attention.test_hook_points import build

IDS = torch.arange(3, 13)[None]
FAMILIES = ("llada", "smdm", "sink_qwen", "qwen3", "gpt2")
peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def make(kind: str, directory: Path) -> Any:
    """A tiny model as `load` returns it."""
    if kind in ("llada", "smdm", "sink_qwen"):
        return tiny(kind, **({"num_sinks": 1} if kind == "sink_qwen" else {}))
    build(kind).save_pretrained(directory)
    return dl.load(directory)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def with_lora(model: Any, *targets: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    # Not zero at first, as LoRA's second matrix is otherwise.
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)).eval()


@peft
@pytest.mark.parametrize("kind", ["llada", "smdm", "sink_qwen", "qwen3"])
def test_hook_q_sees_the_delta_of_lora(kind: str, tmp_path: Path) -> None:
    """q = W x, and W x + (alpha / r) B A x with an adapter, before the norm of qwen3; by hand in float64."""
    model = make(kind, tmp_path)
    attention, seen, inputs = hooked_attentions(model)[0], [], []

    def watch() -> Any:
        return attention.hook_q.register_forward_hook(lambda m, i, value: seen.append(value.detach().clone()))

    handle = watch()
    attention.register_forward_pre_hook(
        lambda m, args, options: inputs.append(args[0] if args else options["hidden_states"]), with_kwargs=True
    )
    plain = logits(model)
    handle.remove()  # a hook from before the projection was replaced is refused
    wrapped = with_lora(model, "q_proj")
    handle = watch()
    adapted = logits(wrapped)
    assert len(seen) == 2
    assert not torch.equal(adapted, plain)
    projection = attention.q_proj
    base, down, up = projection.base_layer, projection.lora_A["default"], projection.lora_B["default"]
    x = inputs[1].double()
    expected = x @ base.weight.double().T + projection.scaling["default"] * (
        x @ down.weight.double().T @ up.weight.double().T
    )
    expected = expected if base.bias is None else expected + base.bias.double()
    expected = expected.unflatten(-1, seen[1].shape[2:])
    if hasattr(attention, "q_norm"):
        norm = attention.q_norm
        scale = (expected.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        expected = expected * scale * norm.weight.double()
    torch.testing.assert_close(seen[1].double(), expected, rtol=1e-4, atol=1e-4)  # float32
    handle.remove()
    merged = wrapped.merge_and_unload()
    watch()
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-4, atol=1e-4)
    assert len(seen) == 3
    torch.testing.assert_close(seen[2], seen[1], rtol=1e-4, atol=1e-4)


@peft
@pytest.mark.parametrize("kind", ["llada", "qwen3"])
def test_a_wrapped_model_runs_as_the_merged_one(kind: str, tmp_path: Path) -> None:
    wrapped = with_lora(make(kind, tmp_path), "q_proj", "v_proj")
    runs = dl.denoise(wrapped, IDS, gen_length=4)
    hidden = dl.denoise(wrapped, IDS, gen_length=4, hooks=[mask_top_sinks(2)])
    recorded = dl.record(wrapped, IDS.tolist(), gen_length=4)
    likelihood = dl.log_likelihood(wrapped, IDS, IDS, samples=4)
    lens = dl.logit_lens(wrapped, runs)
    if kind == "qwen3":
        greedy = wrapped.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
        assert torch.equal(runs.canvases[-1], greedy)
    merged = wrapped.merge_and_unload()
    assert torch.equal(dl.denoise(merged, IDS, gen_length=4).canvases[-1], runs.canvases[-1])
    again = dl.denoise(merged, IDS, gen_length=4, hooks=[mask_top_sinks(2)])
    assert torch.equal(again.canvases[-1], hidden.canvases[-1])
    # W x + B A x against (W + B A) x in float32.
    torch.testing.assert_close(
        dl.record(merged, IDS.tolist(), gen_length=4).received,
        recorded.received,
        rtol=1e-4,
        atol=1e-4,
        equal_nan=True,
    )
    found = dl.log_likelihood(merged, IDS, IDS, samples=4).value
    torch.testing.assert_close(found, likelihood.value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dl.logit_lens(merged, runs).entropy, lens.entropy, rtol=1e-3, atol=1e-4)


@peft
def test_the_hosts_take_lora_in_their_own_ways() -> None:
    """nnsight traces the adapter layers; TransformerLens reads whole weights, so that it takes the merged model."""
    wrapped = with_lora(tiny("llada"), "q_proj")
    expected = logits(wrapped)
    lm = dl.DiffusionLM(wrapped)
    with lm.trace(IDS):
        traced = lm.lm_head.output.save()
    torch.testing.assert_close(traced, expected, rtol=1e-4, atol=1e-4)
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(ValueError, match=r"q_proj is an adapter layer of PEFT.* model\.merge_and_unload\(\)"):
            dl.bridge(model)
    torch.testing.assert_close(dl.bridge(wrapped.merge_and_unload())(IDS), expected, rtol=1e-4, atol=1e-4)


@peft
@pytest.mark.parametrize("host", ["DiffusionLM", "bridge"])  # by name: a machine may lack the hosts
def test_a_learned_prompt_is_refused_by_the_hosts(host: str) -> None:
    from peft import PromptTuningConfig, get_peft_model

    wrapped = get_peft_model(tiny("llada"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"PEFT adapter 'default' .* pass model\.get_base_model\(\)"):
        getattr(dl, host)(wrapped)


class AdapterLayer(torch.nn.Module):
    """A linear layer in an adapter, with the attributes of PEFT's."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer

    def merge(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        """The projection, without an update."""
        return self.base_layer(x)  # type: ignore[no-any-return]


def test_a_bridge_refuses_adapter_layers_without_peft_too() -> None:
    """The check reads attributes, so that it also runs where peft is not installed."""
    model = tiny("llada")
    attention = model.get_decoder().layers[0].self_attn
    attention.q_proj = AdapterLayer(attention.q_proj)
    with pytest.raises(ValueError, match=r"q_proj is an adapter layer of PEFT.* model\.merge_and_unload\(\)"):
        dl.bridge(model)


@peft
def test_hook_points_come_after_lora_too() -> None:
    wrapped = with_lora(build("qwen3"), "q_proj", "k_proj")
    plain = logits(wrapped)
    dl.add_hook_points(wrapped)
    # Eager against eager: the same function runs.
    assert torch.equal(logits(wrapped), plain)
    check_hook_points(wrapped)
    assert all(hasattr(attention, "hook_q") for attention in hooked_attentions(wrapped))


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_idle_hook_points_compile_into_one_graph(kind: str, tmp_path: Path) -> None:
    """The eager backend: what torch traced runs as it is, so that the logits are the same to the bit."""
    model = make(kind, tmp_path)
    expected = logits(model)
    try:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(logits(compiled), expected)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_deep_copy_is_a_model_of_its_own(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    twin = copy.deepcopy(model)
    expected = dl.denoise(model, IDS, gen_length=3)
    with attach_hooks(twin, mask_top_sinks(2)):
        hidden = logits(twin)
        plain = logits(model)
    assert not torch.equal(hidden, plain)
    assert torch.equal(logits(twin), plain)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert torch.equal(dl.denoise(model, IDS, gen_length=3).canvases[-1], expected.canvases[-1])


@pytest.mark.parametrize("kind", [*FAMILIES, "mixtral"])
def test_shards_of_save_pretrained_load_again(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path / "first")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert not any("hook" in name for name in model.state_dict())
    assert torch.equal(logits(dl.load(tmp_path / "shards")), logits(model))


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_that_accelerate_offloads_to_the_cpu(kind: str, tmp_path: Path) -> None:
    from accelerate import cpu_offload

    model = make(kind, tmp_path)
    plain, hidden = (
        dl.denoise(model, IDS, gen_length=3),
        dl.denoise(model, IDS, gen_length=3, hooks=[mask_top_sinks(2)]),
    )
    received, lens = dl.record(model, IDS.tolist(), gen_length=3).received, dl.logit_lens(model, plain)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).is_meta
    assert torch.equal(dl.denoise(model, IDS, gen_length=3).canvases[-1], plain.canvases[-1])
    again = dl.denoise(model, IDS, gen_length=3, hooks=[mask_top_sinks(2)])
    assert torch.equal(again.confidence, hidden.confidence)
    torch.testing.assert_close(
        dl.record(model, IDS.tolist(), gen_length=3).received, received, rtol=0, atol=0, equal_nan=True
    )
    assert torch.equal(dl.logit_lens(model, plain).entropy, lens.entropy)


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradient_checkpointing_gives_the_same_gradients(kind: str, tmp_path: Path) -> None:
    """Idle, and with a hook that runs again in the recomputed forward."""
    model = make(kind, tmp_path).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=IDS).logits.float().logsumexp(-1).sum().backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

    plain = gradients()
    with attach_hooks(model, mask_top_sinks(2)):
        hidden = gradients()
    calls: list[None] = []
    handle = hooked_attentions(model)[0].hook_z.register_forward_hook(lambda m, i, value: calls.append(None))
    model.gradient_checkpointing_enable()
    checkpointed = gradients()
    assert len(calls) == 2
    handle.remove()
    with attach_hooks(model, mask_top_sinks(2)):
        checkpointed_hidden = gradients()
    assert any(not torch.equal(plain[name], hidden[name]) for name in plain)
    for name in plain:
        assert torch.equal(checkpointed[name], plain[name])
        assert torch.equal(checkpointed_hidden[name], hidden[name])
