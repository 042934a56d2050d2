"""Pytest fixtures, available in every environment that has dlm_lens installed (entry point `pytest11`)."""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


@pytest.fixture
def tiny_model() -> "Callable[..., PreTrainedModel]":
    """`dlm_lens.testing.tiny`, to build a tiny model of any family: `tiny_model("sink_qwen", num_sinks=1)`."""
    from dlm_lens.testing import tiny

    return tiny


@pytest.fixture
def tiny_llada(tiny_model: Any) -> "PreTrainedModel":
    """A tiny LLaDA with grouped queries."""
    model: PreTrainedModel = tiny_model("llada")
    return model


@pytest.fixture
def tiny_sink_qwen(tiny_model: Any) -> "PreTrainedModel":
    """A tiny masked DLM of Qwen2 layers with one learned sink token in front."""
    model: PreTrainedModel = tiny_model("sink_qwen", num_sinks=1)
    return model


@pytest.fixture
def tiny_causal(tiny_model: Any) -> "PreTrainedModel":
    """A tiny AR Llama."""
    model: PreTrainedModel = tiny_model("causal")
    return model
