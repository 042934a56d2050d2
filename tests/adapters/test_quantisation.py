import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

import dlm_lens
from dlm_lens.adapters.quantisation import check_quantisation, check_quantised
from dlm_lens.adapters.registry import family_of
from dlm_lens.attention import HOOK_POINTS
from dlm_lens.testing import tiny


def saved(path: Path, family: str = "llada", **changes: Any) -> Path:
    model = tiny(family)
    model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def absent(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is not None, reason=f"{package} is installed")


@absent("bitsandbytes")
@pytest.mark.parametrize("bits", [{"load_in_8bit": True}, {"load_in_4bit": True}])
def test_a_package_that_is_missing_is_named(tmp_path: Path, bits: dict[str, bool]) -> None:
    path = saved(tmp_path)
    for given in (BitsAndBytesConfig(**bits), bits):
        with pytest.raises(ImportError) as caught:
            dlm_lens.load(path, quantization_config=given)
        said = str(caught.value)
        assert f"{path} is to be quantised, which does not work here" in said
        assert "bitsandbytes" in said
        assert said.endswith("install it, or load it without quantization_config")


@absent("gptqmodel")
def test_a_quantised_checkpoint_names_its_package_and_its_way_out(tmp_path: Path) -> None:
    path = saved(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        ImportError, match=r"is quantised, which .*optimum.*: install it, or load a checkpoint that is"
    ):
        dlm_lens.load(path)


def test_what_transformers_cannot_quantise_is_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("was read"))
    # transformers itself loads such a checkpoint as if its weights were plain.
    path = saved(tmp_path / "unknown", quantization_config={"quant_method": "abacus", "bits": 3})
    with pytest.raises(
        ValueError, match=r"is quantised, which does not work here \(Unknown quantization type, got a"
    ):
        dlm_lens.load(path)
    plain = saved(tmp_path / "plain")
    for given in ({"quant_method": "abacus"}, {}, "8bit"):
        with pytest.raises(ValueError, match=r"change quantization_config, or load it without quantization_config"):
            dlm_lens.load(plain, quantization_config=given)


def test_weights_that_are_split_while_loading_cannot_be_quantised(tmp_path: Path) -> None:
    sentence = r"family smdm, whose checkpoints hold several projections in one tensor .* dtype=.bfloat16. for half"
    path = saved(tmp_path / "asked", "smdm")
    with pytest.raises(ValueError, match=sentence):
        dlm_lens.load(path, quantization_config={"load_in_8bit": True})
    with pytest.raises(ValueError, match=sentence):
        dlm_lens.load(saved(tmp_path / "own", "smdm", quantization_config={"quant_method": "torchao"}))


def test_plain_checkpoints_need_no_check() -> None:
    assert check_quantisation("x", family_of("smdm"), "smdm", None, None, None) is None


def test_a_quantised_end_and_a_replaced_attention_are_refused() -> None:
    model = tiny("llada")
    check_quantised(model, "x")
    head = model.lm_head
    for weight in (None, torch.zeros(4, 1, dtype=torch.uint8)):
        model.lm_head = torch.nn.Module()
        model.lm_head.weight = weight
        with pytest.raises(
            ValueError, match="reaches the head, whose rows dlm_lens reads as vectors: leave it out"
        ):
            check_quantised(model, "x")
    model.lm_head = head
    model.model.layers[1].self_attn = torch.nn.Module()
    with pytest.raises(
        ValueError, match="replaced 1 of 2 attention modules, so that their hook points would never"
    ):
        check_quantised(model, "x")


def test_the_element_size_of_a_method_reaches_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = SimpleNamespace(quantized_element_size=0.5, validate_environment=lambda **k: None)
    monkeypatch.setattr("transformers.quantizers.AutoHfQuantizer.from_config", lambda *a, **k: quantizer)
    assert check_quantisation("x", family_of("llada"), "llada", None, {"load_in_4bit": True}, "cuda") == 0.5
    assert check_quantisation("x", family_of("sdar"), "sdar", None, {"load_in_4bit": True}, "cuda") == 0.5
    with pytest.raises(ValueError, match="family sdar, whose checkpoints hold several"):
        check_quantisation("x", family_of("sdar"), "sdar_moe", None, {"load_in_4bit": True}, "cuda")
    assert check_quantisation("x", family_of("llada"), "llada", {"load_in_4bit": True}, None, "cuda") is None


@pytest.mark.parametrize("family", ["llada", "mmada", "dream", "sink_qwen", "causal"])
def test_eight_bit_weights_keep_every_hook_point_in_floating_point(tmp_path: Path, family: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    path = saved(tmp_path / "plain", family)
    plain = dlm_lens.load(path)
    model = dlm_lens.load(path, quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    seen: dict[str, torch.dtype] = {}
    for name in HOOK_POINTS:
        point = getattr(model.model.layers[0].self_attn, f"hook_{name}")
        point.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out.dtype}))
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        logits, exact = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert seen == dict.fromkeys(HOOK_POINTS, torch.float32)
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()
    run = dlm_lens.denoise(model, "w3 w4", gen_length=4)
    assert run.tokens.shape[1] >= 4
    model.save_pretrained(tmp_path / "quantised")
    again = dlm_lens.load(tmp_path / "quantised")
    with torch.no_grad():
        # Not bit for bit: the hooks above make `model` compute its pattern explicitly.
        torch.testing.assert_close(again(input_ids=ids).logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quanto_by_a_mapping(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("optimum.quanto")
    model = dlm_lens.load(saved(tmp_path), quantization_config={"quant_method": "quanto", "weights": weights})
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "QLinear"
    run = dlm_lens.denoise(model, "w3 w4", gen_length=4)
    assert run.masks_left.tolist() == [0]


def test_a_quantised_head_of_torchao_is_refused(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig(), include_input_output_embeddings=True)
    with pytest.raises(ValueError, match=r"reaches the (embedding|head)"):
        dlm_lens.load(saved(tmp_path), quantization_config=config)


def eight_bits(path: Path) -> tuple[Any, Any]:
    """The tiny LLaDA, plain and quantised by torchao."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    return dlm_lens.load(saved(path)), dlm_lens.load(path, quantization_config=config)


def test_statistics_that_read_eight_bit_weights(tmp_path: Path) -> None:
    plain, model = eight_bits(tmp_path / "plain")
    run = dlm_lens.denoise(model, "w3 w4", gen_length=8)
    over = {"gen_length": 8, "on_canvas": lambda step, canvas: run.canvases[step]}
    found, exact = (
        dlm_lens.record(each, "w3 w4", [dlm_lens.recording.WeightedValue()], **over).arrays["weighted_value"]
        for each in (model, plain)
    )
    # 8 bits: entries of every matrix move by up to 1/254 of its row's largest.
    torch.testing.assert_close(found, exact, atol=0.05 * float(exact.nan_to_num().max()), rtol=0, equal_nan=True)
    sinks = dlm_lens.find_sinks(dlm_lens.received_over_steps(model, run), dlm_lens.TopK(1))
    writes = dlm_lens.probes.sink_writes(model, run, sinks)
    assert writes.entropy.isfinite().all()
    kept = dlm_lens.record(model, "w3 w4", gen_length=8, to=tmp_path / "recording")
    assert kept.run.tokens.equal(run.tokens)
    bridge = dlm_lens.bridge(model)
    recorder = dlm_lens.BridgeRecorder(bridge, [dlm_lens.recording.WeightedValue()])
    again = recorder.recording(bridge.denoise("w3 w4", observers=recorder, **over)).arrays["weighted_value"]
    # The same weights in the same order; attention is summed explicitly there.
    torch.testing.assert_close(again, found, atol=1e-4, rtol=1e-4, equal_nan=True)
    with pytest.raises(ValueError, match=r"q_proj\.weight is quantised; load the model without"):
        bridge.enable_compatibility_mode()


def test_compatibility_mode_of_quantised_weights_is_refused_before_anything_changes() -> None:
    model = tiny("llada")
    bridge = dlm_lens.bridge(model)
    down = bridge.original_model.model.layers[1].mlp.original_component.down_proj.original_component
    held = down.weight
    down.weight = torch.nn.Parameter(held.to(torch.int8), requires_grad=False)
    for call in (bridge.enable_compatibility_mode, bridge.process_weights):
        with pytest.raises(
            ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is quantised; load the model without"
        ):
            call()
    assert not bridge.compatibility_mode
    down.weight = held
    bridge.enable_compatibility_mode(disable_warnings=True)
