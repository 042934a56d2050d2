"""What a trace calls the modules of a model, whatever its family calls them."""

from typing import Any

from torch import nn

from dlm_lens.adapters.head import final_norm
from dlm_lens.attention import adding_module, attention_blocks, attention_of


def module_names(model: Any) -> dict[str, str]:
    """Path of a module -> its name in a trace: `layers`, `embed`, `ln_final`, and in a layer `attn` and `mlp`."""
    paths = {id(module): path for path, module in model.named_modules()}
    block = attention_blocks(model)[0]
    names = {
        paths[id(block)].rpartition(".")[0]: "layers",
        paths[id(model.get_input_embeddings())]: "embed",
        _child(block, attention_of(block)): "attn",
    }
    for name, find in (("ln_final", lambda: paths[id(final_norm(model))]), ("mlp", lambda: _mlp(block))):
        try:
            names[find()] = name
        except ValueError:
            continue  # a trace of this family does without the name
    return {path: name for path, name in names.items() if path != name}


def _mlp(block: nn.Module) -> str:
    return _child(block, adding_module(block, "mlp_out"))


def _child(block: nn.Module, module: nn.Module) -> str:
    return next(name for name, child in block.named_children() if child is module)


def site_path(block: nn.Module, site: str) -> str:
    """Path in a layer of the module whose output it adds to the residual stream at "attn_out" or "mlp_out"."""
    module = adding_module(block, site)
    return next(path for path, child in block.named_modules() if child is module)
