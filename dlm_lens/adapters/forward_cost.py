"""`ForwardCost`: what a forward pass computes, counted on a network that is built without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dlm_lens.adapters.config_fields import active_experts, built_config
from dlm_lens.adapters.hub import config_values
from dlm_lens.adapters.model_names import embedded_path
from dlm_lens.adapters.model_preparation import finish_model, known_values, prepare_config
from dlm_lens.adapters.registry import family_of, model_type_of
from dlm_lens.adapters.text_part import text_values
from dlm_lens.attention import head_width, hooked_attentions

_LLADA = {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
          "mlp_hidden_size": 12288, "vocab_size": 126464, "embedding_size": 126464, "weight_tying": False,
          "max_sequence_length": 4096, "dtype": "bfloat16"}  # fmt: skip
_DREAM = {"model_type": "Dream", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
          "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
          "max_position_embeddings": 131072, "dtype": "bfloat16"}  # fmt: skip
_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True, "num_key_value_heads": 2,
         "max_position_embeddings": 32768, "dtype": "bfloat16"}  # fmt: skip

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Instruct": _LLADA,
    "GSAI-ML/LLaDA-8B-Base": _LLADA,
    "Gen-Verse/MMaDA-8B-MixCoT": {**_LLADA, "model_type": "mmada", "vocab_size": 134656, "embedding_size": 134656},
    "Dream-org/Dream-v0-Instruct-7B": _DREAM,
    "Dream-org/Dream-v0-Base-7B": _DREAM,
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "dtype": "bfloat16",
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN, "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864,
    },
    "Qwen/Qwen2.5-1.5B": {
        **_QWEN, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960,
    },
    "smollm2": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "dtype": "float32",
    },
}  # fmt: skip
"""Sizes of the checkpoints of the shipped settings, so that an estimate needs no download."""


@dataclass(frozen=True)
class ForwardCost:
    """Operations and weights of a network, from which the cost of a forward pass follows.

    Args:
        parameters: number of weights, tied ones once.
        matrices: of them, those of all matrices that act on text, without embeddings and output embedding.
        active: of `matrices`, those that a position is multiplied with: of a mixture's experts the chosen ones'.
        rowwise: of `active`, those that act once on a row, on the noise level of a DiT.
        query_widths: heads x d_head of every layer.
        key_widths: of the keys that a cache holds, the same.
        d_model: width of the residual stream.
        d_vocab: number of logits of a position.
    """

    parameters: int
    matrices: int
    active: int
    rowwise: int
    query_widths: tuple[int, ...]
    key_widths: tuple[int, ...]
    d_model: int
    d_vocab: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ForwardCost":
        """The cost of a model with hook points; one on the meta device will do."""
        text = model.config.get_text_config()
        # GPT-2 has a table of positions too, and an embedding may hold learned sinks.
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        ends += [each for each in model.modules() if isinstance(each, nn.Embedding)]
        tables = {id(each) for part in ends for each in part.parameters()}
        matrices = [pair for pair in model.named_parameters() if pair[1].ndim > 1 and id(pair[1]) not in tables]
        # An encoder's vision tower does not see text.
        used = [(name, each.numel()) for name, each in matrices if "vision" not in name]
        widths = [_widths(each) for each in hooked_attentions(model)]
        return cls(
            parameters=sum(each.numel() for each in model.parameters()),
            matrices=sum(count for _, count in used),
            active=int(sum(count * active_experts(name, text) for name, count in used)),
            rowwise=sum(count for name, count in used if "modulation" in name or "sigma_map" in name),
            query_widths=tuple(queries for queries, _ in widths),
            key_widths=tuple(keys for _, keys in widths),
            d_model=text.hidden_size,
            d_vocab=text.vocab_size,
        )

    def layers(self, queries: int, keys: int) -> int:
        """Floating-point operations of all layers on a row: 2 x active for every query, 4 d for every pair.

        d is heads x d_head. Keys that a mask or a sliding window hides count: a masked product computes them.
        """
        once = (self.active - self.rowwise) * queries + self.rowwise
        return 2 * once + 4 * sum(self.query_widths) * queries * keys

    def head(self, positions: float) -> float:
        """Floating-point operations of the logits at so many positions: 2 d_model d_vocab each."""
        return 2 * positions * self.d_model * self.d_vocab


def _widths(attention: Any) -> tuple[int, int]:
    """The widths of all queries and of all keys of a layer; where one projection makes both there are as many."""
    if hasattr(attention, "q_proj"):
        return int(attention.q_proj.out_features), int(attention.k_proj.out_features)
    width = attention.config.num_attention_heads * head_width(attention)
    return width, width


def layout_of(source: str) -> dict[str, Any]:
    """The values of a checkpoint's config.json; the sizes of a `PUBLISHED` one, which is not looked up.

    Args:
        source: an embedded model, a directory, or a hub name.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: it is no JSON file.
    """
    return dict(PUBLISHED.get(source) or config_values(embedded_path(source), {}))


def network_without_weights(
    source: str, layout: Mapping[str, Any] | None = None, given: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """The network of a config on the meta device, finished as `load` does: nothing but config.json is read.

    Args:
        source: as in `layout_of`.
        layout: values in place of those of config.json.
        given: special ids and sampler, as `load` takes them.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: a config that cannot be.
    """
    values = layout_of(source) if layout is None else dict(layout)
    if values.get("model_type") is None:
        raise ValueError(
            f"the config.json of {source} names no model_type, and a plan reads no weights to tell it from: load "
            "the checkpoint, save it with save_pretrained, and plan with that directory"
        )
    values["model_type"] = model_type_of(values, source)
    values = text_values(values, f"the config.json of {source}") or values
    family = family_of(values["model_type"])
    values |= known_values(family, source, values, given or {})
    config_class, model_class = family.layouts[values["model_type"]]
    config = built_config(config_class, values, f"the config.json of {source}")
    prepare_config(config, family)
    with torch.device("meta"):
        return finish_model(model_class(config), family)
