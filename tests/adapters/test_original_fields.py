"""A config is written with the fields that the authors' code reads: `OriginalFields`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Qwen3Config

import dlm_lens
from dlm_lens.adapters.masked_diffusion import MaskedDiffusionFields
from dlm_lens.adapters.original_fields import rotary_fields
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN

NOT_OF_THE_NETWORK = frozenset({
    "auto_map",  # names Python files, which are not saved
    "attn_implementation", "use_cache", "transformers_version",
    "torch_dtype",  # `dtype` of transformers 5
    "org", "name", "padding_multiple",  # how lit_gpt came to padded_vocab_size, which is written
})  # fmt: skip
OTHER = {
    # The class of the script that trains it; n_inner null stands for 4 * n_embd.
    "diffugpt": {"architectures": ["DiffuGPTModel"], "n_inner": 128},
    "llada": {"vocab_size": 256},  # embedding_size, which the authors' code takes in its place
    "llada_moe": {"norm_topk_prob": False},  # null there
    # A name that is transformers' own; the window is that of use_sliding_window false.
    "sdlm": {"architectures": ["SDLMModel"], "sliding_window": None},
    "smdm": {"vocab_size": 192},  # padded_vocab_size, likewise
    "smdm/variants/gqa": {"vocab_size": 64},
    "smdm_gate": {"vocab_size": 192},
}
"""Fields whose value is another one for the same network."""
HOSTS = {
    "diffugpt": "gpt2", "efficient_dlm": "qwen3", "i_dlm": "sdar", "llada_moe": "llada", "sdlm": "qwen2",
    "stable_diffcoder": "llama",
}  # fmt: skip
"""Families whose config.json names the model type of another network, by which they would not be found again."""
PLAIN = frozenset({"diffullama", "open_dcoder"})  # Llama's own type, and no weights


def values_of(model: Any) -> dict[str, Any]:
    """The fields of a model's config, without where it was read."""
    left_out = ("_name_or_path", "transformers_version", "architectures")
    return {name: value for name, value in model.config.to_dict().items() if name not in left_out}


CONFIGS = [
    str(path.parent.relative_to(GOLDEN))
    for path in sorted(GOLDEN.rglob("config.json"))
    if path.parent.name not in PLAIN
]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_the_original_config_is_written(name: str, tmp_path: Path) -> None:
    original: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    named = any(original.get(field) is not None for field in ("mask_token_id", "text_mask_token_id"))
    masked = named or name.startswith(("bd3lm", "duo", "mdlm", "sedd", "smdm", "sumi", "udlm", "gidd"))
    model = dlm_lens.load(GOLDEN / name, **({} if masked else {"mask_token_id": 5}))
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for field, value in original.items():
        if field in NOT_OF_THE_NETWORK:
            continue
        if field == "model_type" and name in HOSTS:
            assert value == HOSTS[name]
        elif field == "model" and name == "sedd":
            assert value == {**written["model"], "name": "small"}
        elif value in (None, False):
            # MMaDA's config class has no defaults, so that null is written too.
            assert field in written or model.config.model_type not in ("llada", "mmada"), field
            assert not written.get(field) or written[field] == OTHER[name][field]
        else:
            assert written[field] == OTHER.get(name, {}).get(field, value), field
    assert values_of(dlm_lens.load(tmp_path)) == values_of(model)


@pytest.mark.parametrize("family", ["llada", "mmada"])
def test_names_that_the_authors_config_class_derives_are_not_written(family: str, tmp_path: Path) -> None:
    """They are properties without setters there, so that the class would raise AttributeError."""
    model = tiny(family)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not {"hidden_size", "num_attention_heads", "num_hidden_layers"} & written.keys()
    assert (written["d_model"], written["n_heads"], written["n_layers"]) == (32, 4, 2)
    assert values_of(dlm_lens.load(tmp_path)) == values_of(model)


def test_the_rotation_is_written_as_before_transformers_5_and_read_as_it_was(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny("dream", rope_parameters=yarn)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 5e5
    assert written["rope_scaling"]["rope_type"] == "yarn"
    assert written["rope_scaling"]["factor"] == 4.0
    assert "rope_theta" not in written["rope_scaling"]
    again = dlm_lens.load(tmp_path)
    assert again.config.rope_parameters == model.config.rope_parameters
    del written["rope_parameters"]  # a config.json of transformers 4
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert dlm_lens.load(tmp_path).config.rope_parameters == model.config.rope_parameters


def test_rotations_that_differ_between_layers_have_no_single_theta() -> None:
    each = {"rope_type": "default", "rope_theta": 1e4}
    assert rotary_fields({"full_attention": each, "sliding_attention": each}) == {}
    assert rotary_fields(each) == {"rope_theta": 1e4}


class Named(MaskedDiffusionFields, Qwen3Config):
    """The config of a family whose authors have another name for the width."""

    model_type = "named"
    original_names: ClassVar[Mapping[str, str]] = {"d_model": "hidden_size"}


def test_a_masked_family_reads_the_names_that_it_writes() -> None:
    assert Named(d_model=96).hidden_size == 96
    assert Named(hidden_size=96).to_dict()["d_model"] == 96
