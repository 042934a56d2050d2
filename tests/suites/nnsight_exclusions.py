"""Tests of nnsight that do not hold of `DiffusionLM`, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Exclusion:
    """Why a test is excluded.

    Attributes:
        reason: in words.
        hosts: model types that it is excluded for; all, if empty.
        runs: whether it is run, and must fail.
    """

    reason: str
    hosts: tuple[str, ...] = ()
    runs: bool = True


_PIPE = Exclusion(
    "lm.pipe is the pipeline of transformers; DiffusionLM has lm.generate (restated in test_nnsight_own)"
)
_TEXT = Exclusion("asserts words that the weights of the real gpt2 write")
_PLAIN = Exclusion("asks whether a class is nnsight's own, which the tests' name Envoy is not here")
_FUNCTION = Exclusion("names operations of transformers' attention function; ours stands there (restated)")

EXCLUDED: dict[str, Exclusion] = {
    "test_interleaving.py::TestOverloadedMount::test_the_submodule_moves": _PLAIN,
    "test_interleaving.py::TestOverloadedMount::test_the_envoy_class_pickles": _PLAIN,
    "test_source.py::TestRecursiveIntegration::test_capture_nested_in_transformer": _FUNCTION,
    "test_source.py::TestRecursiveIntegration::test_nested_source_across_generate_steps": _FUNCTION,
    "test_batching.py::TestGenerateBatching::test_batched_generate_returns_per_prompt_results": _PIPE,
    "test_batching.py::TestGenerateBatching::test_single_generate_unchanged": _PIPE,
    "test_batching.py::TestBarrier::test_embedding_transfer": _PIPE,
    "test_batching.py::TestBarrier::test_embedding_transfer_three_blocks": _PIPE,
    "test_batching.py::TestBatchedGenerationParity::test_batched_generation_matches_single": _PIPE,
    "test_batching.py::TestInvokerGrouping::test_cross_invoke_isolation": _TEXT,
    "test_batching.py::TestBatchedIteration::test_per_invoke_iter_slices": _TEXT,
    "test_batching.py::TestInvokerInputFormats::test_per_invoke_truncation": Exclusion(
        "settings of the tokenizer in a trace are refused by DiffusionLM, in a sentence (restated)"
    ),
    "test_batching.py::TestCppBacktraceGuard": Exclusion(
        "a subprocess with the real gpt2 from the hub", runs=False
    ),
    "test_batching.py::TestVLLMBatcherTokenAxis": Exclusion("of vLLM", runs=False),
    "test_batching.py::TestVLLMBatcherCloneReads": Exclusion("of vLLM", runs=False),
    "test_language.py::TestCombinedWith::test_combined_with_binds_tracer": Exclusion(
        "a run's result is a DenoisingRun, not a tensor of ids"
    ),
    "test_language.py::TestAdhocModules::test_logit_lens": _TEXT,
    "test_language.py::TestCache::test_cache_alias_navigation": Exclusion(
        "DiffusionLM names modules itself and takes no rename="
    ),
    "test_language.py::TestCache::test_cache_alias_full_navigation_and_index": Exclusion(
        "DiffusionLM names modules itself and takes no rename="
    ),
    "test_language.py::TestSource::test_source_op_output": Exclusion(
        "names the activation of GPT-2's MLP; Llama's layout calls it act_fn", ("llama", "llada")
    ),
    "test_language.py::TestEarlyStop::test_the_module_stopped_at_is_still_cached": Exclusion(
        "looks for the path of GPT-2's layer among a cache's keys", ("llama", "llada")
    ),
    "test_language.py::TestIteration::test_per_step_hidden_states": Exclusion(
        "expects a key/value cache; a masked model reads the whole canvas at each step", ("llada",)
    ),
    "test_language.py::TestIteration::test_with_form_single_step": Exclusion(
        "expects a key/value cache; a masked model reads the whole canvas at each step", ("llada",)
    ),
}
