"""Write a trained network as a checkpoint directory that `dlm_lens.load` reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from dlm_lens.files.atomic_writes import write_file
from experiments.toy.model import VARIANTS, checkpoint_fields
from experiments.toy.tokenizer import save_tokenizer


def export(network: nn.Module, name: str, directory: Path) -> None:
    """Write config.json, model.safetensors (float16, Qwen2's key names) and the tokenizer's files.

    The weights are written last: a directory that holds them is complete, also after a kill.
    The config says `dtype` float32: half precision only keeps the file small, and a CPU computes in float32.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config_class, model_class = VARIANTS[name].classes
    config = {
        "model_type": config_class.model_type,
        "architectures": [model_class.__name__],
        "dtype": "float32",
        **checkpoint_fields(name),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {key: value.to(torch.float16).contiguous() for key, value in network.state_dict().items()}
    save_tokenizer(directory)
    # Last and whole: a directory with weights counts as exported.
    write_file(directory / "model.safetensors", save(weights, metadata={"format": "pt"}))
