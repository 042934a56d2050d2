"""Models whose weights are not all where they compute: on the CPU alone, weights offloaded to the disk show it.

Two GPUs, and offloading from a GPU, are tested on a pretended one (`tests/pretend_gpu`).
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dlm_lens as dl
from dlm_lens import placement
from dlm_lens.attention import attention_blocks, attention_stacks
from dlm_lens.evaluation.responses import fingerprint
from dlm_lens.experiments.attention_sinks.recorded_runs import head_pattern
from dlm_lens.experiments.one_token.text_metrics import record_canvases
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.placement import (
    canvas_device,
    devices,
    execution_device,
    float32_products,
    float64_device,
    in_float64,
    input_device,
    named_device,
    named_weights,
    resident,
    seeded,
)
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.testing import tiny

FAMILIES = [family.name for family in dl.families()]
IDS = [[5, 9, 13, 2, 7], [3, 8, 1, 4, 4, 11, 20]]


FEWER: dict[str, dict[str, int]] = {"uniform_qwen": {"steps": 6}, "diffusion_gemma": {"steps_per_block": 4}}
"""Settings of families that make 48 steps by default, whatever the length of the answer."""


def offloaded(family: str, folder: Path, what: str, dtype: str = "float32") -> tuple[Any, Any]:
    """A model on the CPU, and its checkpoint with its layers, with the rest, or with everything on the disk."""
    plain: Any = tiny(family).to(getattr(torch, dtype))
    plain.save_pretrained(folder)
    plain.tokenizer.save_pretrained(folder)
    if what == "all":
        return plain, dl.load(folder, device_map={"": "disk"}, dtype=dtype)
    paths = {id(module): name for name, module in plain.named_modules()}
    blocks = [paths[id(block)] for stack in attention_stacks(plain) for block in attention_blocks(plain, stack)]
    inside = tuple(f"{block}." for block in blocks)
    named = [name for name, _ in [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers()]]
    rest = {name.rsplit(".", 1)[0] for name in named if not name.startswith(inside)}
    layers, others = ("disk", "cpu") if what == "layers" else ("cpu", "disk")
    places = dict.fromkeys(blocks, layers) | dict.fromkeys(rest, others)
    return plain, dl.load(folder, device_map=places, dtype=dtype)


def weighted(model: Any) -> Tensor:
    return dl.record(model, IDS, [dl.recording.WeightedValue()], gen_length=4).weighted_value.nan_to_num()


def traced(model: Any) -> Tensor:
    lm = dl.DiffusionLM(model)
    with lm.generate(IDS, gen_length=4) as tracer:
        for step in tracer.steps:  # noqa: B007
            lm.layers[1].attn.pattern[..., 0] = 0
        run = tracer.result.save()
    return run.tokens


CALLS: dict[str, Callable[[Any], Tensor]] = {
    "denoise": lambda m: dl.denoise(m, IDS, gen_length=8).tokens,
    "denoise with a hook": lambda m: dl.denoise(m, IDS, gen_length=8, hooks=[mask_top_sinks(2)]).tokens,
    "weighted values": weighted,
    "residual norms": lambda m: dl.record(
        m, IDS, [dl.recording.ResidualNorm()], gen_length=4
    ).residual_norm.nan_to_num(),
    "logit lens": lambda m: dl.logit_lens(m, dl.denoise(m, IDS, gen_length=4)).entropy,
    "replay": lambda m: dl.replay(m, dl.denoise(m, IDS, gen_length=4), [mask_top_sinks(1)]).kl.nan_to_num(),
    "likelihood": lambda m: dl.log_likelihood(m, IDS, [[7, 8], [9, 4]], method="chain_rule").value,
    "received attention": lambda m: dl.received_over_steps(m, dl.denoise(m, IDS, gen_length=4)).values.nan_to_num(),
    "nnsight": traced,
    "TransformerLens": lambda m: dl.bridge(m).denoise(IDS, gen_length=4, hooks=[mask_top_sinks(1)]).tokens,
}


@cache
def on_the_cpu(family: str, call: str) -> Tensor:
    return CALLS[call](tiny(family))


@pytest.mark.long
@pytest.mark.parametrize("what", ["layers", "rest", "all"])
def test_calls_on_a_model_offloaded_to_the_disk_equal_those_on_the_cpu(what: str, tmp_path: Path) -> None:
    _, model = offloaded("sink_llama", tmp_path, what)
    assert any(weight.device.type == "meta" for weight in model.parameters())
    for name, call in CALLS.items():
        assert call(model).equal(on_the_cpu("sink_llama", name)), name


@pytest.mark.parametrize("family", ["sedd", "mdlm", "duo", "gidd_dit"])
def test_networks_that_take_a_noise_level_run_offloaded(family: str, tmp_path: Path) -> None:
    plain, model = offloaded(family, tmp_path, "all")
    runs = [dl.denoise(each, IDS, gen_length=4, steps=4) for each in (plain, model)]
    assert runs[0].tokens.equal(runs[1].tokens)


def test_a_head_s_pattern_of_an_offloaded_model(tmp_path: Path) -> None:
    plain, model = offloaded("llada", tmp_path, "all")
    run = dl.denoise(plain, IDS, gen_length=4)
    patterns = [head_pattern(each, run, step=1, row=1, layer=1, head=2) for each in (plain, model)]
    assert patterns[0].equal(patterns[1])


@pytest.mark.parametrize("family", ["llada", "llada2"])
def test_the_serial_depth_of_an_offloaded_model(family: str, tmp_path: Path) -> None:
    plain, model = offloaded(family, tmp_path, "all")
    assert dl.probes.serial_depth(model, 16) == dl.probes.serial_depth(plain, 16)


def test_canvases_of_a_text_are_recorded_from_an_offloaded_model(tmp_path: Path) -> None:
    plain, model = offloaded("llada", tmp_path, "all")
    rows = torch.arange(24).reshape(2, 12) + 3
    received = [record_canvases(each, rows).received.nan_to_num() for each in (plain, model)]
    assert received[0].equal(received[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_act_on_models_loaded_with_a_device_map(family: str, tmp_path: Path) -> None:
    """accelerate wraps `forward` while loading: what it wraps must be the forward with hook points."""
    # Where weights begin in memory changes the order of a DiT's sums: in float64, of which recordings keep float32.
    dtype = "float64" if family in ("mdlm", "bd3lm") else "float32"
    plain, model = offloaded(family, tmp_path, "layers", dtype)
    reducers = [dl.ReceivedAttention(), dl.recording.WeightedValue(), dl.recording.ResidualNorm()]
    settings = {"gen_length": 8, "hooks": [mask_top_sinks(2)], **FEWER.get(family, {})}
    recordings = [dl.record(each, IDS, reducers, **settings) for each in (plain, model)]
    runs = [recording.run for recording in recordings]
    (hidden,) = runs[0].settings["columns_hidden"]
    assert hidden > 1
    assert runs[1].settings["columns_hidden"] == (hidden,)
    assert runs[0].tokens.equal(runs[1].tokens)
    for name in recordings[0].arrays:
        found, expected = recordings[1].arrays[name], recordings[0].arrays[name]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("family", ["smdm", "llada"])
def test_a_checkpoint_has_one_identity_wherever_its_weights_are(family: str, tmp_path: Path) -> None:
    """A recording goes on, and kept responses count, where the model is offloaded this time."""
    _, model = offloaded(family, tmp_path, "all")
    plain = dl.load(tmp_path)
    assert weights_digest(model) == weights_digest(plain)
    assert fingerprint(model) == fingerprint(plain)
    for (name, weight), (other, same) in zip(named_weights(model), plain.named_parameters(), strict=True):
        assert name == other
        assert weight.equal(same)


def test_where_a_module_computes(tmp_path: Path) -> None:
    plain, model = offloaded("llada", tmp_path, "rest")
    cpu = torch.device("cpu")
    assert input_device(model) == input_device(plain) == execution_device(model) == cpu
    assert devices(model) == devices(plain) == {cpu}
    assert model.get_output_embeddings().weight.device.type == "meta"
    assert resident(model.get_output_embeddings()).equal(plain.get_output_embeddings().weight)
    assert execution_device(nn.ReLU()) == cpu


def test_weights_without_numbers_are_refused() -> None:
    with torch.device("meta"):
        linear = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Linear\.weight has no numbers .*device_map"):
        resident(linear)
    with pytest.raises(ValueError, match="Linear has no numbers"):
        execution_device(linear)


def test_in_float64_stays_on_a_device_that_has_it() -> None:
    given = torch.linspace(0, 1, 7)
    found = in_float64(given)
    assert found.equal(given.double())
    assert in_float64(found) is found
    assert in_float64(found, copy=True) is not found
    assert float64_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("refusal", [TypeError("a MPS Tensor"), RuntimeError("Required aspect fp64")])
def test_float64_is_on_the_cpu_where_a_device_refuses_it(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*size: Any, device: torch.device, **options: Any) -> Tensor:
        raise refusal

    placement._has_float64.cache_clear()
    monkeypatch.setattr(torch, "zeros", refuse)
    try:
        assert float64_device(torch.device("mps")) == torch.device("cpu")
        monkeypatch.setattr(placement, "input_device", lambda model: torch.device("mps"))
        assert canvas_device(tiny("llada")) == torch.device("cpu")
    finally:
        placement._has_float64.cache_clear()


def test_fake_tensors_say_nothing_of_float64() -> None:
    placement._has_float64.cache_clear()
    with FakeTensorMode():  # takes "mps" on every machine, and float64 on it
        assert float64_device(torch.device("mps")) == torch.device("cpu")
    placement._has_float64.cache_clear()


def test_memory_that_runs_out_says_nothing_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*size: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        float64_device(torch.device("cuda:7"))


def test_seeded_seeds_an_accelerator_of_any_kind_and_puts_its_generator_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_the_cpu = torch.Generator
    before, after = (of_the_cpu().manual_seed(seed).get_state() for seed in (9, 3))
    states = [before]
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": of_the_cpu())
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: states.append(state))
    with seeded(3):
        assert states[-1].equal(after)
    assert states[-1].equal(before)


def test_products_on_mps_are_of_float32_whatever_is_set() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert [float32_products(torch.device(kind)) for kind in ("cpu", "mps")] == ["bf16", "float32"]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("kind", "expected"), [(None, "cuda:1"), ("xpu", "xpu:1")])
def test_a_number_names_a_device_of_this_machines_kind(
    kind: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert named_device(1) == torch.device(expected)
    assert named_device("cpu") == torch.device("cpu")
