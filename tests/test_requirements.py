"""An installed package that is not one of the tested versions is named once, before anything is computed."""

import logging
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import dlm_lens as dl
from dlm_lens import requirements

NEEDED = ["transformers<5.24,>=5.22", "torch>=2.9", "pytest; extra == 'dev'"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As in a new process that has transformers 5.24."""
    monkeypatch.setattr(requirements, "requires", lambda name: NEEDED)
    monkeypatch.setattr(requirements, "version", {"transformers": "5.24.0", "torch": "2.13.0+cpu"}.__getitem__)
    requirements.warn_of_version.cache_clear()
    yield
    requirements.warn_of_version.cache_clear()


def small_llama() -> Any:
    """A model without hook points."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))


def test_hooked_models_warn_once_of_a_version_that_was_not_tested(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dl.add_hook_points(small_llama())
        dl.add_hook_points(small_llama())
    found = [record.getMessage() for record in caplog.records if "but dlm_lens needs" in record.getMessage()]
    assert found == [
        "transformers 5.24.0 is installed, but dlm_lens needs transformers<5.24,>=5.22: numbers may be "
        "wrong (dlm-lens doctor lists all packages)"
    ]


@pytest.mark.parametrize("version", ["5.22.2", "5.23.0"])
def test_tested_versions_and_sources_that_are_not_installed_are_not_named(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(requirements, "version", lambda name: version)
    dl.add_hook_points(small_llama())

    def nothing(name: str) -> Any:
        raise PackageNotFoundError(name)

    requirements.warn_of_version.cache_clear()
    monkeypatch.setattr(requirements, "requires", nothing)
    monkeypatch.setattr(requirements, "version", lambda name: "5.24.0")
    dl.add_hook_points(small_llama())
    assert not [record for record in caplog.records if "but dlm_lens needs" in record.getMessage()]


def test_extras_are_not_among_what_is_needed() -> None:
    assert [one.name for one in requirements.declared()] == ["transformers", "torch"]
    assert requirements.installed(requirements.declared()[0]) == ("5.24.0", False)
    assert requirements.installed(requirements.declared()[1]) == ("2.13.0+cpu", True)
