"""The networks that are trained on a text, and how."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlm_lens.experiments.one_token.text_corpus import LENGTH

WIDTH, LAYERS, HEADS, INNER = 192, 4, 4, 512
"""2.2 million parameters with 1,024 tokens."""

RATE = 6e-3
"""Largest learning rate, chosen by the plain network's training loss with a seed that no table uses (100)."""

SAMPLER: dict[str, Any] = {"steps": 32, "gen_length": 32, "block_length": 32}
"""What `denoise` does with such a network if nothing is said; the tables do not use it."""


def build_network(tokenizer: Any, seed: int, *, causal: bool = False, **fields: Any) -> Any:
    """An untrained network: Qwen2's layers, bidirectional ones as a masked DLM, or causal ones.

    Args:
        tokenizer: decides the vocabulary and the special ids.
        seed: of the weights.
        causal: an AR model.
        **fields: of the config, such as num_sinks.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from dlm_lens.adapters.families.sink_qwen import SinkQwenConfig, SinkQwenForMaskedLM

    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 2 * LENGTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    own = {} if causal else {"mask_token_id": tokenizer.mask_token_id, "sampler_defaults": SAMPLER}
    kinds: tuple[Any, Any] = (Qwen2Config, Qwen2ForCausalLM) if causal else (SinkQwenConfig, SinkQwenForMaskedLM)
    config_class, model_class = kinds
    torch.manual_seed(seed)
    # Written out as matmul and softmax, attention trains faster on a CPU than the fused kernel.
    return model_class._from_config(
        config_class(**shared, **own, **fields), attn_implementation="eager", dtype=torch.float32
    )


def text_settings(run: Any, output: Path, model: Mapping[str, Any]) -> Any:
    """How a run on a text is trained: schedule, decay and optimiser as on the synthetic language.

    Args:
        run: a `Miniature`.
        output: its directory.
        model: of `ModelSettings`.
    """
    from dlm_lens.training import DataSettings, NextToken, Optimisation, TrainingSettings
    from dlm_lens.training.settings import ModelSettings

    rate = RATE
    settings = TrainingSettings(
        output=str(output),
        model=ModelSettings(**model),
        data=DataSettings(path=run.text_digest, length=LENGTH),
        objective=NextToken() if run.causal else replace(diffusion(), logit_shift=run.converted),
        optimisation=Optimisation(
            optimizer=run.optimizer, rate=rate, min_rate=0.02 * rate, warm_up=0.04, betas=(0.9, 0.98),
            weight_decay=0.1, other_weight_decay=0.01,
        ),
        batch_size=run.batch_size,
        micro_batch_size=run.batch_size,
        steps=run.steps,
        seed=run.seed,
        precision=run.precision,
        save_steps=100,
        save_minutes=1.0,
        keep=1,
        log_steps=50,
        report_to=(),
    )  # fmt: skip
    return settings


def diffusion() -> Any:
    """Eq. 3 and 4: exactly ceil(t S) of the S positions are masked, t evenly spread over the batch."""
    from dlm_lens.training import MaskedDiffusionLoss

    return MaskedDiffusionLoss(masks="count", low_discrepancy=True, floor=1e-6)
