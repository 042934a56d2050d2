"""A pytest plugin for nnsight's own tests: what they build is `DiffusionLM` and the classes that it is made of.

The tests build their models by `TransformersModel("gpt2", ...)` and `Envoy(module)`. While pytest imports them, the
first is `Host` over a random tiny model and the second `PlainHost`, an envoy over any module with our interleaver,
batcher and tracers. `HOST` in the environment chooses the model. Excluded tests must fail (strict xfail), so that
the list stays true.
"""

import os
from collections.abc import Iterator
from typing import Any

import nnsight
import pytest
import torch
from nnsight.intervention import envoy as envoys
from nnsight.intervention.envoy import Envoy, traceable
from nnsight.modeling import transformers as wrappers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dlm_lens as dl
from dlm_lens.adapters.model_preparation import finish_model, prepare_config
from dlm_lens.adapters.registry import family_of
from dlm_lens.tracing import diffusion_lm as tracing
from dlm_lens.tracing.traced_run import RowBatcher
from dlm_lens.tracing.tracers import RunEditingTracer, RunInterleaver, RunTracer
from tests.suites.nnsight_exclusions import EXCLUDED

HOST = os.environ.get("HOST", "gpt2")
"""Model type of the tiny model: gpt2 or llama (AR), llada (masked)."""

SIZES = {
    "gpt2": {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": 64, "initializer_range": 0.1},
    "llama": {
        "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 12,
        "intermediate_size": 64, "initializer_range": 0.1,
    },
}  # fmt: skip
"""Width and depth of GPT-2, which the tests assert."""

GPT2_NAMES = {
    "model": "transformer", "layers": "h", "embed_tokens": "wte", "norm": "ln_f", "o_proj": "c_proj",
    "q_proj": "c_attn",
}  # fmt: skip
"""Modules of Llama's layout -> what GPT-2 calls those that do the same."""


def _tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; the last three ids are padding, end of text and mask."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>", "[MASK]"]
    held = Tokenizer(models.BPE({word: i for i, word in enumerate([*alphabet, *special])}, []))
    held.pre_tokenizer, held.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=held, pad_token="<pad>", eos_token="<eos>", mask_token="[MASK]", padding_side="left"
    )


def _model() -> Any:
    """A random model of `HOST` with the tokenizer of bytes, as `dl.load` would give it."""
    tokenizer, family = _tokenizer(), family_of(HOST)
    ids = {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None}
    config_class, model_class = family.layouts[HOST]
    own = {} if family.causal else {"mask_token_id": 258}
    config = config_class(vocab_size=len(tokenizer), **ids, **own, **SIZES.get(HOST, SIZES["llama"]))
    prepare_config(config, family, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return finish_model(model_class(config), family, tokenizer)


class Host(dl.DiffusionLM):
    """`DiffusionLM`, with GPT-2's module names, and with transformers' words for the length of a generation."""

    @traceable
    def generate(self, prompt: Any, attention_mask: Any = None, *, max_new_tokens: int, **settings: Any) -> Any:
        """Denoise one token a step."""
        settings.pop("do_sample", None)
        generate = dl.DiffusionLM.generate.__wrapped__
        length = {"steps": max_new_tokens, "gen_length": max_new_tokens}
        return generate(self, prompt, attention_mask, **length, **settings)


def host(*given: Any, **options: Any) -> Host:
    """What stands where the tests say `TransformersModel("gpt2", task=..., dispatch=True)`."""
    if not options.pop("dispatch", False) or set(options) - {"task"}:
        raise TypeError(f"DiffusionLM wraps loaded models and has no {', '.join(options) or 'dispatch=False'}")
    names = tracing.module_names
    extra = {} if HOST == "gpt2" else GPT2_NAMES
    tracing.module_names = lambda model: {**extra, **names(model)}
    try:
        return Host(_model())
    finally:
        tracing.module_names = names


class PlainHost(Envoy):
    """An envoy over any module, with what `DiffusionLM` gives its own."""

    _batcher_class = RowBatcher

    def __init__(self, module: Any, *given: Any, **options: Any) -> None:
        options["interleaver"] = options.get("interleaver") or RunInterleaver()
        super().__init__(module, *given, **options)

    def trace(self, *inputs: Any, **options: Any) -> Any:
        """Open a trace by our tracer."""
        self.interleaver.check_free()
        options.setdefault("tracer_cls", RunTracer)
        return super().trace(*inputs, **options)

    def edit(self, *, inplace: bool = False, backend: Any = None) -> Any:
        """Open an editing trace by our tracer."""
        return RunEditingTracer(self, inplace=inplace, backend=backend)


wrappers.TransformersModel = nnsight.LanguageModel = host


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The tests' modules are imported here; nnsight itself goes on with its own `Envoy`."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    envoys.Envoy = PlainHost
    try:
        return (yield)
    finally:
        envoys.Envoy = Envoy


@pytest.fixture(scope="module")
def gpt2() -> Host:
    """The fixture of the tests' conftest, which imports its class when it runs."""
    return host(dispatch=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is excluded, and drop the classes that build no model.

    Tests of envoys over modules of their own never build `HOST`: they run with the first host alone.
    """
    kept, dropped = [], []
    if HOST != "gpt2":
        dropped = [item for item in items if "gpt2" not in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if "gpt2" in getattr(item, "fixturenames", ())]
    for item in items:
        place = item.nodeid.rsplit("/", 1)[-1].split("[")[0]
        names = [place, place.rsplit("::", 1)[0]]
        found = next((EXCLUDED[name] for name in names if name in EXCLUDED), None)
        if found is None or (found.hosts and HOST not in found.hosts):
            kept.append(item)
        elif found.runs:
            item.add_marker(pytest.mark.xfail(reason=found.reason, strict=True))
            kept.append(item)
        else:
            dropped.append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
