"""Code of other projects for `benchmarks.peers`: files of a checkout that the caller names, over weights of ours.

A package's own `__init__` is not executed, because it imports training and data; only the named modules and what
these import are. Nothing is copied into this repository.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dlm_lens.adapters.families.llada import FIXED


def commit_of(checkout: Path) -> str:
    """The first ten digits of the checkout's commit."""
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()[:10] or "no commit"


def package(name: str, folder: Path, **attributes: Any) -> ModuleType:
    """A package of `folder`'s modules without its `__init__`."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def module_at(name: str, file: Path) -> ModuleType:
    """A module from its file."""
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LLaDANetwork(nn.Module):
    """The inner network of a checkout's `modeling_llada.py`, with the interface that its samplers call."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False, **kept: Any
    ) -> Any:
        """Logits, and with `use_cache` keys and values."""
        out = self.network(input_ids, attention_mask=attention_mask, use_cache=use_cache, **kept)
        return SimpleNamespace(logits=out.logits, past_key_values=out.attn_key_values)


def llada_network(name: str, folder: Path, model: Any) -> LLaDANetwork:
    """A checkout's own LLaDA on the weights of a LLaDA of ours.

    Args:
        name: of the package that `folder` becomes.
        folder: with `modeling_llada.py` and `configuration_llada.py`.
        model: whose weights, under the original's names, and config are read.
    """
    package(name, folder)
    configuration = import_module(f"{name}.configuration_llada")
    modeling = import_module(f"{name}.modeling_llada")
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        saved: Mapping[str, Any] = json.loads((Path(directory) / "config.json").read_text())
        weights = load_file(Path(directory) / "model.safetensors")
    known = {field.name for field in fields(configuration.ModelConfig)}
    given = {key: value for key, value in {**saved, **FIXED}.items() if key in known}
    config = modeling.create_model_config_from_pretrained_config(configuration.LLaDAConfig(**given))
    config.init_device = "cpu"
    network = modeling.LLaDAModel(config, init_params=False)
    network.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    return LLaDANetwork(network.to(model.device, model.dtype).eval())


def token_ids(model: Any) -> SimpleNamespace:
    """The special tokens of a model, as a peer's sampler reads them from a tokenizer."""
    names = ("mask_token_id", "bos_token_id", "pad_token_id", "eos_token_id")
    return SimpleNamespace(**{name: getattr(model.config, name, None) for name in names})
