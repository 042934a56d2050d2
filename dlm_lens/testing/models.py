"""`tiny`: a model of any family, small enough for a unit test, built without files or network."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dlm_lens.adapters.model_preparation import finish_model, prepare_config
from dlm_lens.adapters.registry import families, fills_masks
from dlm_lens.attention import find_sites
from dlm_lens.placement import seeded

VOCABULARY = 64
PAD, EOS, MASK = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1


def tiny(family: str = "llada", *, seed: int = 0, model_type: str | None = None, **config: Any) -> PreTrainedModel:
    """A random model of `family` in float32 and eval mode, with a tokenizer of the words w0, w1, ....

    2 layers, width 32, 4 query heads on 2 key/value heads, a vocabulary of 64 whose last three ids are padding,
    end of text and mask (SMDM: the mask is id 64, after its vocabulary). Weights are large enough for attention to
    be far from uniform.

    Args:
        family: a name of `dlm_lens.families()`.
        seed: of the weights.
        model_type: for families with several (causal: "llama" or "qwen2"); the first by default.
        **config: fields of the config to change.

    Raises:
        ValueError: no such family or model type.
    """
    known = {member.name: member for member in families()}
    if family not in known:
        raise ValueError(f"no family {family!r}; there are {', '.join(known)}")
    layouts = known[family].layouts
    chosen = model_type or next(iter(layouts))
    if chosen not in layouts:
        raise ValueError(f"family {family!r} has no model type {chosen!r}; it has {', '.join(layouts)}")
    config_class, model_class = layouts[chosen]
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    if getattr(config_class, "head_dim", None):  # Qwen3, whose heads have a width of their own
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if hasattr(config_class, "cond_dim"):  # the condition of a DiT
        values |= {"cond_dim": 16, "intermediate_size": 0}
    values |= {**known[family].tiny, **known[family].tiny_of_types.get(chosen, {})}
    settings = config_class(**{**values, **config})
    if not known[family].causal and fills_masks(settings) and settings.mask_token_id is None:
        settings.mask_token_id = MASK
    tokenizer = _tokenizer(settings.vocab_size, getattr(settings, "mask_token_id", None))
    prepare_config(settings, known[family], tokenizer)
    with seeded(seed):
        model = finish_model(model_class(settings), known[family], tokenizer)
    if known[family].causal:  # `finish_model` knows the sites of the others
        find_sites(model)
    return model


def _tokenizer(size: int, mask: int | None) -> PreTrainedTokenizerFast:
    words = [f"w{i}" for i in range(size - 3)] + ["<pad>", "<eos>", "[MASK]"]
    if mask == size:  # a mask after the vocabulary
        words = [*words[:-1], f"w{size - 1}", "[MASK]"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="<pad>", eos_token="<eos>", mask_token="[MASK]"
    )
