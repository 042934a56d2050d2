"""Pytest fixtures: put `pytest_plugins = ["dlm_lens.testing.fixtures"]` into the top conftest.py."""

import pytest
from transformers import PreTrainedModel

from dlm_lens.testing.models import tiny


@pytest.fixture
def tiny_llada() -> PreTrainedModel:
    """A tiny LLaDA with grouped queries."""
    return tiny("llada")


@pytest.fixture
def tiny_sink_qwen() -> PreTrainedModel:
    """A tiny masked DLM of Qwen2 layers."""
    return tiny("sink_qwen")


@pytest.fixture
def tiny_causal() -> PreTrainedModel:
    """A tiny AR Llama."""
    return tiny("causal")
