"""What a trace calls the modules of a model, whatever its family calls them."""

from contextlib import suppress
from typing import Any

from torch import nn

from dlm_lens.adapters.head import final_norm
from dlm_lens.attention import adding_module, attention_blocks, attention_of
from dlm_lens.attention.layers import MLPS


def module_names(model: Any) -> dict[str, str]:
    """Path of a module -> its name: `layers`, `embed`, `ln_final`, `lm_head`, and in a layer `attn` and `mlp`."""
    paths = {id(module): path for path, module in model.named_modules()}
    block = attention_blocks(model)[0]
    names = {
        paths[id(block)].rpartition(".")[0]: "layers",
        paths[id(model.get_input_embeddings())]: "embed",
        paths[id(model.get_output_embeddings())]: "lm_head",
        _child(block, attention_of(block)): "attn",
    }
    names[_mlp(block)] = "mlp"  # a layer without one (OPT) does without the name
    with suppress(ValueError):
        names[paths[id(final_norm(model))]] = "ln_final"
    return {path: name for path, name in names.items() if path != name}


def _mlp(block: nn.Module) -> str:
    """The layer's MLP itself; what is added to the residual stream may be a norm after it (Gemma 2)."""
    return next((name for name in MLPS if name in block._modules), "mlp")


def _child(block: nn.Module, module: nn.Module) -> str:
    return next(name for name, child in block.named_children() if child is module)


def site_path(block: nn.Module, site: str) -> str:
    """Path in a layer of the module whose output it adds to the residual stream at "attn_out" or "mlp_out"."""
    module = adding_module(block, site)
    return next(path for path, child in block.named_modules() if child is module)
