"""The parts of a decoder layer by their names in any family: attention, MLP, output projection."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dlm_lens.attention.hook_points import attention_stack, attention_stacks, is_hooked_attention
from dlm_lens.attention.model_access import unwrapped
from dlm_lens.placement import resident
from dlm_lens.printable import shown

MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_mlp")
"""Names of a layer's MLP."""

OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "Wo", "out_lin")
"""Names of the projection that attention ends with."""

AFTER_ATTENTION = ("post_self_attn_layernorm", "post_attention_layernorm", "attention_gate")
"""Norms or gates between attention and the residual stream, in layers that also have one of `AFTER_MLP`."""

AFTER_MLP = ("post_mlp_layernorm", "post_feedforward_layernorm", "mlp_gate")
"""Norms or gates between the MLP and the residual stream."""


def attention_blocks(model: Any, stack: str = "") -> list[nn.Module]:
    """The decoder layers, in order, whose attention has hook points.

    A layer may have several attentions (`attentions_of`): of T5 it is the block, not its parts.

    Args:
        model: from `dlm_lens.load`.
        stack: of `attention_stacks`; by default the one that predicts.

    Raises:
        ValueError: there are none, layers were removed or exchanged after they got their hook points, or a
            TransformerLens bridge runs its own attention in place of them.
    """
    blocks: list[nn.Module] = []
    places, modules = [], list(attention_stack(model, stack).modules())
    parents = {
        id(unwrapped(child)): each
        for each in reversed(modules)  # the first place of a module that occurs twice
        for child in each._modules.values()
        if unwrapped(each) is each
    }
    for module in modules:
        attentions = _hooked_children(module) if unwrapped(module) is module else []
        if not attentions:
            continue
        places += [each.hook_layer for each in attentions]
        layer = _layer_around(module, parents)
        if not blocks or blocks[-1] is not layer:
            blocks.append(layer)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no hook points; load it with dlm_lens.load")
    if any(hasattr(block, "original_component") for block in blocks):
        raise ValueError(
            f"{type(model).__name__} is a TransformerLens bridge, or carries one, whose attention runs without the "
            "hook points of dlm_lens; use the bridge's own methods, such as denoise(prompt, hooks=[...]), or the "
            "model that dlm_lens.load returned"
        )
    if places != list(range(len(places))):
        raise ValueError(
            f"the layers of {type(model).__name__} have the numbers {shown(places)}: some were removed or "
            "exchanged after they got their hook points; dlm_lens.add_hook_points(model) counts them again"
        )
    return blocks


def _hooked_children(module: nn.Module) -> list[Any]:
    """The attention modules with hook points among a module's children."""
    children = [unwrapped(child) for child in module._modules.values()]
    return [each for each in children if is_hooked_attention(each)]


def _layer_around(module: nn.Module, parents: Mapping[int, nn.Module]) -> nn.Module:
    """The layer of a module that has attention: the module itself, or that which it is a part of.

    A list of attentions (LongCat-Flash) is a part of a layer. So is an element of a list in which other elements
    have no attention (T5's feed-forward part), where a layer of transformers has the list.
    """
    above = parents.get(id(module))
    if isinstance(module, nn.ModuleList) and above is not None:
        return above
    owner = parents.get(id(above))
    if not isinstance(above, nn.ModuleList) or not isinstance(owner, GradientCheckpointingLayer):
        return module
    return module if all(any(map(is_hooked_attention, each.modules())) for each in above) else owner


def attentions_of(block: nn.Module) -> list[Any]:
    """The attention modules, with hook points, of a decoder layer, in order: its own, and one to an encoder."""
    return _hooked_children(block) or [each for each in block.modules() if is_hooked_attention(each)]


def attention_of(block: nn.Module) -> Any:
    """The attention module, with hook points, of a decoder layer that has one.

    Raises:
        ValueError: it has several.
    """
    found = attentions_of(block)
    if len(found) > 1:
        names = [name for name, each in block.named_modules() if any(each is one for one in found)]
        raise ValueError(
            f"{type(block).__name__} has {len(found)} attentions ({', '.join(names)}), and this takes layers with "
            "one: register PyTorch hooks at their hook points, or use attach_hooks, which acts in all of them"
        )
    return found[0]


SITES_OF_LAYERS = ("attn_out", "mlp_out", "resid")
"""Sites that are no hook points of attention; `check_hook_points` sets `hook_sites` of a layer to those it has."""


def declare_sites(model: Any) -> None:
    """Say that every layer of a model of a family has all of `SITES_OF_LAYERS`; `check_hook_points` corrects it."""
    for stack in attention_stacks(model):
        block: Any
        for block in attention_blocks(model, stack):
            block.hook_sites = frozenset(SITES_OF_LAYERS)


def adding_module(block: nn.Module, site: str) -> nn.Module:
    """The module whose output a layer adds to the residual stream: "attn_out" or "mlp_out"; "resid": the layer.

    Where a norm follows attention and MLP (Gemma 2, OLMo 2), it is the norm; in a DiT, the gate.

    Raises:
        ValueError: the layer has no such module, scales what it adds, or does not pass on one residual stream; or
            `check_hook_points` did not look at it.
    """
    sites = getattr(block, "hook_sites", None)
    if sites is None:
        raise ValueError(
            f"whether {type(block).__name__} has the site {site} is not known before tokens passed through it: "
            "call dlm_lens.attention.check_hook_points(model) first"
        )
    if site not in sites and site == "resid":
        raise ValueError(
            f"{type(block).__name__} does not pass on the residual stream, or passes on several, so that resid "
            "is no hook point of it; take attention's hook points, or register a hook at the layer itself"
        )
    if site not in sites:
        raise ValueError(
            f"{type(block).__name__} does not add the output of one module for attention and one for the MLP to "
            f"the residual stream, so that {site} is no hook point of it; take resid, or the module itself"
        )
    return block if site == "resid" else added_part(block, site)


def added_part(block: nn.Module, site: str) -> nn.Module:
    """The last module of attention or of the MLP, by its name; whether the layer adds its output is not looked at.

    Raises:
        ValueError: the layer has several attentions, or no module by any known name of an MLP.
    """
    children = block._modules
    normed = any(name in children for name in AFTER_MLP)
    norms = () if not normed else AFTER_ATTENTION if site == "attn_out" else AFTER_MLP
    for name in norms:
        if name in children:
            return block.get_submodule(name)
    return writing_module(block, site)


def writing_module(block: nn.Module, site: str) -> nn.Module:
    """The layer's attention ("attn_out") or MLP ("mlp_out") itself, before a norm or a gate that may follow it.

    Raises:
        ValueError: the layer has several attentions, or no module by any known name of an MLP.
    """
    if site == "attn_out":
        return attention_of(block)
    for name in MLPS:
        if name in block._modules:
            return block.get_submodule(name)
    raise ValueError(
        f"{type(block).__name__} has no module called {', '.join(MLPS)}, so that mlp_out is no hook point of it"
    )


def output_projection(attention: Any) -> nn.Module:
    """The module that maps z to what attention adds.

    Raises:
        ValueError: none of the known names.
    """
    for name in OUTPUTS:
        if isinstance(attention._modules.get(name), nn.Module):
            return attention.get_submodule(name)
    raise ValueError(
        f"{type(attention).__name__} has no output projection called {', '.join(OUTPUTS)}; W_O is not known"
    )


def head_width(attention: Any) -> int:
    """Width of a head's z in an attention module: d_head, or the width of its values where that is another (MLA).

    Raises:
        ValueError: the module does not say it.
    """
    names = ("v_head_dim", "head_dim", "head_size")
    found = next((width for name in names if (width := getattr(attention, name, None))), None)
    if found is None:
        raise ValueError(
            f"{type(attention).__name__} has none of {', '.join(names)}; the width of a head is not known"
        )
    return int(found)


def output_weight(attention: Any) -> Tensor:
    """W_O as [head x d_head, d_model].

    Raises:
        ValueError: the output projection is not known, or has no weight.
    """
    projection = output_projection(attention)
    if not isinstance(getattr(projection, "weight", None), Tensor):
        raise ValueError(
            f"{type(projection).__name__} of {type(attention).__name__} has no weight; W_O is not known"
        )
    weight = resident(projection)
    return weight if type(projection).__name__ == "Conv1D" else weight.mT
