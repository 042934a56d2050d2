"""transformers' own common model tests (`ModelTesterMixin`), run on a tiny model of every family of masked DLMs."""

from typing import Any

import pytest

from dlm_lens import families
from tests.suites.transformers_common import run_common_tests

pytestmark = pytest.mark.long

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "mmada": ("mmada", {}),
    "dream": ("dream", {}),
    "smdm": ("smdm", {}),
    "smdm, a sink": ("smdm", {"num_sinks": 1}),
    "smdm, gated": ("smdm", {"gated_attention": True}),
    "a2d": ("a2d_qwen3", {"head_dim": 10}),
    "a2d, qwen2": ("a2d_qwen3", {"model_type": "a2d-qwen2"}),
    "a2d, llama": ("a2d_qwen3", {"model_type": "a2d-llama"}),
    "coda": ("coda", {"head_dim": 10}),
    "bd3lm": ("bd3lm", {"block_size": 4, "adaln": False}),
    "mdlm": ("mdlm", {}),
    "mdlm, given the noise": ("mdlm", {"time_conditioning": True}),
    "sedd": ("sedd", {}),
    "gidd_dit": ("gidd_dit", {}),
    "fast-dllm v2": ("fast_dllm_v2", {}),
    "sdar": ("sdar", {}),
    "nemotron": ("nemotron_labs_diffusion", {}),
    "efficient-dlm": ("efficient_dlm", {}),
    "stable-diffcoder": ("stable_diffcoder", {}),
    "sdlm": ("sdlm", {}),
    "i-dlm": ("i_dlm", {}),
    "dreamon": ("dreamon", {}),
    "wedlm": ("wedlm", {}),
    "wedlm, qwen2": ("wedlm", {"qk_norm": False, "attention_bias": True}),
    "llada2": ("llada2", {}),
    "llada-moe": ("llada_moe", {}),
    "rnd1": ("rnd1", {}),
    "open-dcoder": ("open_dcoder", {}),
    "diffugpt": ("diffugpt", {}),
    "diffullama": ("diffugpt", {"model_type": "diffullama"}),
    "modernbert": ("modernbert", {}),
    "diffusion_gemma": (
        "diffusion_gemma",
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "initializer_range": 0.02,  # in half precision rounding chooses other experts where weights are larger
            "pad_token_id": 0,
        },
    ),
    "sink_qwen": ("sink_qwen", {}),
    "sink_qwen, sinks": ("sink_qwen", {"num_sinks": 2, "tie_word_embeddings": True}),
    "sink_qwen, softmax": ("sink_qwen", {"softmax": "sink_logits"}),
    "sink_llama": ("sink_llama", {}),
    "uniform_qwen": ("uniform_qwen", {}),
    "duo": ("duo", {}),
    "udlm": ("udlm", {}),
    "sumi": ("sumi", {}),
    "gidd": ("gidd", {}),
    "sink_llama, sinks": ("sink_llama", {"num_sinks": 2, "sink_placement": "end", "gated_attention": True}),
}

NO_LOSS = "passes labels, and DiffusionGemma computes no loss"
OWN_SKIP = "transformers' own test file of the model skips it too: "

MASKS_UNKNOWN = "embeddings do not show what is masked; the order of attention has to be passed with them"

EXCLUDED = {
    "diffusion_gemma": {
        "test_inputs_embeds": "the model takes token ids alone",
        "test_torch_save_load": "looks for the config among transformers' own, where the type is another's",
        "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": "the class returns no attentions",
        "test_attention_outputs": OWN_SKIP + "queries are the canvas, keys the prompt and the canvas",
        "test_hidden_states_output": OWN_SKIP + "states are those of the canvas",
        "test_can_init_all_missing_weights": OWN_SKIP + "tied weights",
        "test_init_weights_can_init_buffers": OWN_SKIP + "tied weights",
        **dict.fromkeys(
            (
                "test_training",
                "test_training_gradient_checkpointing",
                "test_training_gradient_checkpointing_use_reentrant_false",
                "test_training_gradient_checkpointing_use_reentrant_true",
                "test_enable_input_require_grads_with_gradient_checkpointing",
            ),
            NO_LOSS,
        ),
    },
    "llada2": {"test_reverse_loading_mapping": "names biases that the tiny model does not have"},
    "llada-moe": {
        "test_sliding_window_mask": "takes every layer for a window where no layer_types say otherwise; it has none"
    },
    "rnd1": {
        "test_sliding_window_mask": "takes every layer for a window where no layer_types say otherwise; it has none"
    },
    "modernbert": {
        "test_torch_save_load": "looks for the config among transformers' own, where the type is another's",
    },
    "mdlm, given the noise": {
        "test_inputs_embeds": "embeddings do not show how many tokens are masked; sigma has to be passed with them"
    },
    "sedd": {
        "test_inputs_embeds": "embeddings do not show how many tokens are masked; sigma has to be passed with them",
    },
    "gidd_dit": {
        "test_inputs_embeds": "embeddings do not show how many tokens are masked; sigma has to be passed with them",
    },
    "gidd": {
        "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": "the fused kernel has no soft cap"
    },
    "nemotron": {
        "test_sliding_window_mask": "their diffusion passes have no window; one in config.json is dropped"
    },
    "wedlm": {"test_inputs_embeds": MASKS_UNKNOWN},
    "sdlm": {"test_inputs_embeds": MASKS_UNKNOWN},
    "i-dlm": {"test_inputs_embeds": MASKS_UNKNOWN},
    "wedlm, qwen2": {"test_inputs_embeds": MASKS_UNKNOWN},
    "sink_qwen, sinks": {
        "test_sliding_window_mask": "indexes patterns by a mask of the canvas; theirs have the sinks' rows too"
    },
}
"""Model -> tests that cannot apply, with the reason. What the mixin skips by itself is in `SKIPPED`."""

SKIPPED = (
    "test requires",  # a package or a device
    "test is slow",
    "is not a composite model",
    "model is not composite",
    "No subconfigs",
    "does not support SDPA",  # said of models that are not composite
    "support sdpa",  # GIDD: the fused kernel has no soft cap
    "does not support grouped_mm",
    "no sparse experts",
    "does not have a TP plan",
    "no `output_router_logits`",
    "_keep_in_fp32_modules",
    "no `base_model_class` defined",  # sought among transformers' own class names
    "does not have position embeddings",
    "No sequence-to-sequence",
    "No decoder-only language modeling head",
    "No conversion found",  # weights under transformers' names (Dream, sink_qwen, sink_llama)
    "does not support sliding window mask",  # no such fields in Llama's config
    "Do not take a cache as input",  # masked models see the whole canvas
)
"""Words of the reasons for which the mixin may skip a test; any other fails."""

REQUIRED = (
    "test_attention_outputs",
    "test_batching_equivalence",
    "test_can_init_all_missing_weights",
    "test_determinism",
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions",
    "test_from_pretrained_no_checkpoint",
    "test_gradient_checkpointing_backward_compatibility",
    "test_hidden_states_output",
    "test_inputs_embeds",
    "test_load_save_without_tied_weights",
    "test_model_outputs_equivalence",
    "test_resize_tokens_embeddings",
    "test_retain_grad_hidden_states_attentions",
    "test_save_load",
    "test_tied_weights_keys",
    "test_torch_save_load",
    "test_training",
    "test_training_gradient_checkpointing",
)
"""Tests that have to run and pass, lest everything be skipped unnoticed."""


def test_every_family_of_masked_models_is_here():
    masked = {each.name for each in families() if not each.causal}
    assert {family for family, _ in MODELS.values()} == masked


@pytest.mark.in_turn
@pytest.mark.parametrize("model", MODELS)
def test_common_model_tests(model: str):
    family, settings = MODELS[model]
    outcome = run_common_tests(family, settings, EXCLUDED.get(model, {}), list(MODELS).index(model))
    assert not outcome.failed, "\n".join(f"{name}\n{traceback}" for name, traceback in outcome.failed.items())
    surprising = {
        name: reason for name, reason in outcome.skipped.items() if not any(words in reason for words in SKIPPED)
    }
    assert not surprising
    assert not set(REQUIRED) - outcome.passed - set(EXCLUDED.get(model, {}))
    # GIDD has no sdpa, with which many settings of one test compare.
    without = [name for name, reason in outcome.skipped.items() if "support sdpa" in reason.lower()]
    elsewhere = [*EXCLUDED.get(model, {}), *outcome.other_turns, *(without if family == "gidd" else [])]
    assert len(outcome.passed) + len(elsewhere) >= 95
    if family in ("llada", "mmada", "smdm", "mdlm", "sedd", "gidd_dit"):
        assert {"test_reverse_loading_mapping", "test_can_load_from_already_mapped_keys"} <= outcome.passed
