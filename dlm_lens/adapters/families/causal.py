"""Autoregressive baselines: Llama, Qwen2 and Qwen3 as transformers ships them, with the same hook points."""

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dlm_lens.adapters.families.nemotron_labs_diffusion import (
    RENAMES,
    NemotronLabsDiffusionARConfig,
    NemotronLabsDiffusionARModel,
)
from dlm_lens.adapters.registry import Family

FAMILY = Family(
    name="causal",
    layouts={
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "nemotron_labs_diffusion_ar": (NemotronLabsDiffusionARConfig, NemotronLabsDiffusionARModel),
    },
    samplers={"causal": {"gen_length": 128, "temperature": 0.0}},
    causal=True,
    hub_names=(
        "meta-llama/Llama-3.1-8B-Instruct",
        "Qwen/Qwen2.5-0.5B",
        "Qwen/Qwen2.5-1.5B",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen3-0.6B",
    ),
    # A DLM that is an AR model too, where the caller says family="causal".
    adapted={"nemotron_labs_diffusion": "nemotron_labs_diffusion_ar"},
    renames_of_types={"nemotron_labs_diffusion_ar": RENAMES},
)
