"""Checkpoints of several parts (images or sound beside text): the text network is loaded, and computes the same."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, Gemma3nForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import dlm_lens as dl
from dlm_lens.adapters.registry import families
from dlm_lens.adapters.text_part import SAME_FOR_TEXT, text_values
from dlm_lens.attention import attach_hooks, attention_blocks, has_hook_points, hooked_attentions
from dlm_lens.hooks import ablate
from dlm_lens.sampling.run_plan import plan_run
from tests.adapters.small_architectures import IDS, PAGES_OF_5_24, SINCE_5_24, small_model
from tests.adapters.test_every_architecture import check_decoding, compare

NAMES = {*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
OWN = {name for family in families() for name in family.layouts}
TYPES = sorted(name for name in NAMES - OWN if "text_config" in CONFIG_MAPPING[name].sub_configs)
"""Model types of several parts of transformers, one of which is text."""

REASONS = {
    "missing keys": "cosmos3_omni minimax_m3_vl",
    "none of the tensors in .* is called embed_tokens": "inkling_mm_model",
    # A prompt of PaliGemma sees itself both ways.
    "the last token changes what GemmaForCausalLM computes before it": "paligemma",
}
REFUSED = {model_type: reason for reason, types in REASONS.items() for model_type in types.split()}

NOT_BUILT = frozenset(
    "blip-2 cohere_compass dots3_note fast_vlm florence2 fun_asr_nano gemma3n inkling2 instructblip "  # noqa: SIM905
    "instructblipvideo janus nemo_speechlm nemotron_h_omni perception_lm qwen4_exp vibevoice_asr".split()
) | ({"apertus1p5", "inkling2_loop", "llama4"} if SINCE_5_24 else set())
"""No small network of them is built here: they need timm or an image, are large, or their sizes do not agree; of
transformers 5.24's Llama 4 a forward pass without an image raises an AttributeError."""

SCALED = frozenset({"aya_vision", "cohere2_vision"})
"""transformers' class of all parts leaves out `logit_scale`, by which Cohere2 multiplies its logits."""

OTHER_NAMES = frozenset({"kimi_k25", "qianfan_ocr"})
"""`save_pretrained` renames their text layers like those of the image network; they are saved under final names."""

QUICK = frozenset({"gemma3", "llava", "qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "voxtral"})


def has_causal_text(model_type: str) -> bool:
    """Whether transformers has a causal LM that computes what the text part of a model type does."""
    text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
    return SAME_FOR_TEXT.get(text, {"model_type": text})["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


LOADED = [name for name in TYPES if has_causal_text(name)]
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LOADED]


@pytest.mark.in_turn
@pytest.mark.parametrize("model_type", CASES)
def test_the_text_network_computes_what_the_whole_model_does(model_type: str, tmp_path: Path) -> None:
    if model_type in NOT_BUILT:
        pytest.skip("no small network of it can be built here")
    model: Any = small_model(model_type, AutoModelForMultimodalLM)
    model.save_pretrained(tmp_path, save_original_format=model_type not in OTHER_NAMES)
    if model_type in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[model_type]) as error:
            dl.load(tmp_path)
        assert "\n" not in str(error.value)
        return
    loaded = dl.load(tmp_path)
    scale = loaded.config.logit_scale if model_type in SCALED else 1.0
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(input_ids=IDS).logits * scale)
    check_decoding(model, loaded)
    loaded.save_pretrained(tmp_path / "text")
    again = dl.load(tmp_path / "text")
    assert type(again) is type(loaded)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("model_type", sorted(set(TYPES) - set(LOADED)))
def test_a_text_network_without_a_causal_lm_is_refused(model_type: str) -> None:
    text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
    with pytest.raises(ValueError, match=re.escape(f"no causal LM of that part ({text})")):
        text_values({"model_type": model_type}, "config.json")


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl_moe", "llava"])
def test_names_of_the_network_itself_are_read_too(model_type: str, tmp_path: Path) -> None:
    """Files of hubs have older names, files of `save_pretrained(save_original_format=False)` the network's."""
    model: Any = small_model(model_type, AutoModelForMultimodalLM)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.language_model.layers.0") for name in names)
    with torch.no_grad():
        assert torch.equal(dl.load(tmp_path)(IDS).logits, model(input_ids=IDS).logits)


def gemma3n(directory: Path) -> Any:
    """A checkpoint as google/gemma-3n-E2B's, whose image network needs timm: the text network that is in it."""
    text: Any = small_model("gemma3n_text")
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": each for name, each in text.state_dict().items()
    }
    tensors.pop("model.language_model.lm_head.weight")  # tied
    others = (
        "vision_tower.timm_model.blocks.0.conv.weight",
        "embed_vision.embedding.weight",
        "audio_tower.norm.weight",
    )
    tensors |= {f"model.{name}": torch.zeros(3) for name in others}
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
    config = {"model_type": "gemma3n", "text_config": text.config.to_dict(), "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return text


def test_gemma_3n_with_tensors_of_images_and_sound(tmp_path: Path) -> None:
    text = gemma3n(tmp_path)
    loaded = dl.load(tmp_path)
    assert type(loaded) is Gemma3nForCausalLM
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, text(IDS).logits)


@pytest.mark.parametrize(
    ("renamed", "sentence"),
    [
        (("layers.1.mlp.up_proj.weight", None), "missing keys model.layers.1.mlp.up_proj.weight"),
        (("layers.1.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"), "the files hold 3 layers"),
        (
            ("embed_tokens.weight", "table.weight"),
            "is called embed_tokens.weight, so that there is no text network",
        ),
    ],
)
def test_a_text_network_that_does_not_fit_is_refused(
    renamed: tuple[str, str | None], sentence: str, tmp_path: Path
) -> None:
    small_model("gemma3", AutoModelForMultimodalLM).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old, new = (None if name is None else f"language_model.model.{name}" for name in renamed)
    moved = tensors.pop(str(old))
    save_file(tensors if new is None else {**tensors, new: moved}, file)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        dl.load(tmp_path)


def test_thousands_of_embeddings_among_which_to_find_the_texts_are_refused(tmp_path: Path) -> None:
    """Every name is compared with every other network's: of 100,000, which take 7 MB, that is an hour."""
    small_model("gemma3", AutoModelForMultimodalLM).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    others = {f"part{number}.embed_tokens.weight": torch.zeros(0) for number in range(101)}
    save_file(load_file(file) | others, file)
    with pytest.raises(
        ValueError, match=r"^102 of the tensors in .* are called embed_tokens.weight; a checkpoint has"
    ):
        dl.load(tmp_path)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"text_config": 3}, "does not fit Gemma3Config"),
        ({"text_config": {"hidden_size": -4}}, "hidden_size = -4; it must be a whole number"),
        ({"vision_config": {"model_type": "none of them"}}, "does not fit Gemma3Config: Unrecognized model type"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; it must be true or false"),
        ({"eos_token_id": "two"}, "eos_token_id = 'two'; it must be the id of a token"),
        ({"quantization_config": 4}, "quantization_config = 4; it must be an object"),
    ],
)
def test_a_config_that_cannot_be_is_refused(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    small_model("gemma3", AutoModelForMultimodalLM).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    text = values.get("text_config")
    if isinstance(text, dict):
        values = {**values, "text_config": {**config["text_config"], **text}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        dl.load(tmp_path)
    assert "\n" not in str(error.value)


def test_fields_of_the_whole_model_count_for_its_text() -> None:
    """The config.json of Qwen2.5-VL has its text network's fields beside the others; Gemma 3's has ids outside."""
    flat = {
        "model_type": "qwen2_5_vl", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 3, "vocab_size": 512, "eos_token_id": 7, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "vision_config": {"hidden_size": 1280, "num_labels": 10**12},
    }  # fmt: skip
    found = text_values(flat, "config.json")
    assert found is not None
    assert {name: found[name] for name in ("model_type", "hidden_size", "num_hidden_layers", "eos_token_id")} == {
        "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 3, "eos_token_id": 7,
    }  # fmt: skip
    assert found["tie_word_embeddings"] is True
    assert found["dtype"] == "bfloat16"
    assert found["rope_parameters"] == {"type": "mrope", "rope_type": "default", "rope_theta": 1000000.0}
    ids = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {"bos_token_id": 5}, "bos_token_id": 2}
    found = text_values(ids, "config.json")
    assert found is not None
    assert (found["eos_token_id"], found["bos_token_id"]) == ([1, 106], 5)


def test_fields_that_would_replace_what_a_class_keeps_are_left_out(tmp_path: Path) -> None:
    """A number of labels, of which transformers makes as many names, and a method."""
    model: Any = small_model("gemma3", AutoModelForMultimodalLM)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for part in (config, config["text_config"], config["vision_config"]):
        part |= {"num_labels": 10**12, "to_dict": 3, "sub_configs": 4, "attribute_map": 5}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.no_grad():
        assert torch.equal(dl.load(tmp_path)(IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("model_type", ["gemma3", "llava", "qwen2_5_vl"])
def test_hooks_of_the_whole_model_act_in_the_layers_of_its_text(model_type: str) -> None:
    """They counted the layers of the image network first, and changed nothing without an image."""
    model: Any = small_model(model_type, AutoModelForMultimodalLM)
    text = model.get_decoder()
    dl.add_hook_points(model)
    assert attention_blocks(model) == list(text.layers)
    patterns: list[Tensor] = []
    with torch.no_grad():
        plain, states = model(input_ids=IDS).logits, text(IDS).last_hidden_state
        text.layers[1].self_attn.hook_pattern.register_forward_hook(
            lambda point, args, output: patterns.append(output)
        )
        with attach_hooks(model, ablate("z"), layers=[1]):
            edited, of_text = model(input_ids=IDS).logits, text(IDS).last_hidden_state
        with dl.record_forward(text, [dl.ReceivedAttention()]) as seen:
            text(IDS)
        with (
            pytest.raises(ValueError, match="it was given embeddings"),
            dl.record_forward(model, [dl.ReceivedAttention()]),
        ):
            model(input_ids=IDS)
    assert not torch.allclose(edited, plain, atol=1e-3)
    torch.testing.assert_close(edited, model.lm_head(of_text))
    assert not torch.allclose(states, of_text, atol=1e-3)
    compare(seen.received[0, 0, 1:], [patterns[-1][:1]])


def test_another_part_gets_hook_points_by_itself() -> None:
    model: Any = small_model("llava", AutoModelForMultimodalLM)
    dl.add_hook_points(model)
    tower = model.model.vision_tower
    assert not has_hook_points(tower)
    assert len(hooked_attentions(dl.add_hook_points(tower))) == 2


def test_models_of_text_and_our_own_families_are_left_as_they_are() -> None:
    for model_type in ("llama", "qwen3_5_text", "diffusion_gemma", "llada", "unknown"):
        assert text_values({"model_type": model_type}, "config.json") is None


def test_a_run_is_planned_by_the_text_network(tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    model = small_model("gemma3", AutoModelForMultimodalLM)
    for config, directory in ((model.config, whole), (model.config.get_text_config(), alone)):
        config.save_pretrained(directory)
    first, second = (plan_run(str(each), prompt_length=4, gen_length=2) for each in (whole, alone))
    assert replace(first, name=second.name) == second


def test_a_text_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit LlavaConfig"):
        text_values({"model_type": "llava", "text_config": {"model_type": "none of them"}}, "config.json")


@PAGES_OF_5_24
def test_the_pages_name_these_numbers() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "models.md").read_text(encoding="utf-8")
    (row,) = [
        line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| `AutoModelForMultimodalLM`")
    ]
    compared = len(LOADED) - len(NOT_BUILT) - len(REFUSED)
    built = len(TYPES) - len(NOT_BUILT)
    assert [int(cell) for cell in row] == [len(TYPES), built, compared, built - compared]
    words = f"the text networks of {compared} types with images or sound"
    assert words in (root / "README.md").read_text(encoding="utf-8")
