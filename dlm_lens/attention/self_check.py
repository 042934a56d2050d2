"""`check_hook_points`: a few tokens through a model, with and without hooks."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm_lens.attention.hook_points import attention_stacks, hooked_attentions
from dlm_lens.attention.layers import SITES_OF_LAYERS, added_part, attention_blocks
from dlm_lens.placement import input_device
from dlm_lens.printable import printable_name

TOKENS = 7
"""Length of the input: odd, so that it equals no number of heads by chance."""


@torch.no_grad()
def check_hook_points(
    model: Any, *, plain: bool = True, idle: Float[Tensor, "2 position d_vocab"] | None = None
) -> Float[Tensor, "2 position d_vocab"]:
    """Run a few tokens (pictures) and raise unless hook points change nothing, show the pattern, and edits act.

    Logits with idle hook points equal those of the plain attention function; with patterns formed they agree to
    float error, or every attention's output does for equal inputs (in a mixture of experts rounding can choose
    other experts); every hook point fires once; rows of the patterns sum to 1 (or less, with a spare softmax
    entry); an edit of the first pattern, in the second row alone, changes that row's logits.

    Rotation does nothing at position 0: where the query before it has another direction there than the query after
    it, `hook_q` and `hook_k` are removed. Where the outputs of attention and MLP do not sum to what a layer adds to
    the residual stream (Granite scales them), the sites "attn_out" and "mlp_out" are refused from then on.

    Args:
        model: with hook points.
        plain: compare with the model's own attention function; off for families whose attention function does
            more (sink tokens, a float32 rotation).
        idle: logits of `check_ids` with idle hook points, where they are known; saves a pass.

    Returns:
        The logits of `check_ids`, with idle hook points.

    Raises:
        ValueError: one of these does not hold: attention of this class cannot be hooked; or the model takes neither
            ids nor pictures, or its weights hold NaN, infinity, or zeros alone.
    """
    modules = [module for stack in attention_stacks(model) for module in hooked_attentions(model, stack)]
    training = model.training
    _inputs(model)
    if training:
        model.eval()
    try:
        idle = _logits(model) if idle is None else idle.float()
        if plain:
            with _plain_attention(modules):
                expected = _logits(model)
            _compare(model, idle, expected, "idle hook points")
        with _kept_activations(modules) as kept, _sites_found(model), _second_row_edited(modules[0]):
            edited = _logits(model)
        if not _agree(model, edited[:1], idle[:1]):
            with _idle_inputs(model, modules), _kept_activations(modules), _second_row_edited(modules[0]):
                edited = _logits(model)
            _compare(model, edited[:1], idle[:1], "materialised patterns")
        _check_activations(model, modules, kept)
        if not all(each.unrotated_at_origin() for each in kept):
            for attention in modules:
                for name in ("hook_q", "hook_k"):
                    attention._modules.pop(name, None)
        _check_edit(model, modules[0], idle, edited)
    finally:
        if training:
            model.train()
    return idle


@torch.no_grad()
def find_sites(model: Any) -> None:
    """Find out in one forward pass which of "attn_out", "mlp_out" and "resid" the layers have, and nothing else."""
    with _sites_found(model):
        _logits(model)


def check_ids(model: Any) -> Int[Tensor, "2 position"]:
    """The ids that checks run on, evenly over the vocabulary, and a second row with another last token.

    The first ids of many vocabularies are special tokens. A text of special tokens alone lies outside the training
    data, where the rounding of bfloat16 can decide which token a layer attends to.
    """
    rows = len(model.get_input_embeddings().weight)
    ids = (torch.arange(1, TOKENS + 1, device=input_device(model)) * rows // (TOKENS + 1)).repeat(2, 1)
    ids[1, -1] = 0
    return ids


def _logits(model: Any) -> Float[Tensor, "2 position d_vocab"]:
    inputs = _inputs(model)
    output = model(**inputs)
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits.float().to(next(iter(inputs.values())).device)


def _inputs(model: Any) -> dict[str, Any]:
    """The arguments of a forward pass: ids, of an encoder-decoder the decoder's too, or two pictures of noise.

    Raises:
        ValueError: the model takes neither ids nor pictures of one size alone.
    """
    kind = getattr(model, "main_input_name", "input_ids")
    if (kind == "input_ids" or _takes(model, "input_ids")) and _has_token_embedding(model):
        ids = check_ids(model)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        # An encoder-decoder of transformers takes the decoder's tokens too; the decoder alone does not.
        if getattr(model.config, "is_encoder_decoder", False) and _takes(model, "decoder_input_ids"):
            inputs["decoder_input_ids"] = ids
        return inputs
    channels, side = (getattr(model.config, name, None) for name in ("num_channels", "image_size"))
    if kind == "pixel_values" and isinstance(channels, int) and isinstance(side, int):
        pixels = torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))
        device = next(model.parameters()).device
        return {"pixel_values": pixels.to(device, model.dtype)}
    raise ValueError(
        f"check_hook_points runs token ids, or pictures of one size, through a model, and {type(model).__name__} "
        f"takes {kind if kind != 'input_ids' else 'more than ids'}: compare its outputs before and after "
        "dlm_lens.add_hook_points yourself, or check the part that takes ids or pictures"
    )


def _has_token_embedding(model: Any) -> bool:
    """Whether a model has an embedding of token ids; transformers does not know it of models of several parts."""
    try:
        return isinstance(getattr(model.get_input_embeddings(), "weight", None), Tensor)
    except NotImplementedError:
        return False


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


@contextmanager
def _plain_attention(modules: list[Any]) -> Iterator[None]:
    """The modules with their own configs, and so with transformers' attention function."""
    dispatched = [attention.config for attention in modules]
    for attention in modules:
        attention.config = attention.config.wrapped
    try:
        yield
    finally:
        for attention, config in zip(modules, dispatched, strict=True):
            attention.config = config


@dataclass
class _Activations:
    """Activations of one attention module, by hook point, in the order in which they were computed."""

    values: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        """A forward hook that keeps the activation of a hook point."""

        def keep(module: nn.Module, inputs: Any, value: Tensor) -> None:
            self.values[name].append(value)

        return keep

    def unrotated_at_origin(self) -> bool:
        """Whether queries before and after rotation have the same direction at the first position.

        True for an attention without `hook_q`; two queries of zeros have the same direction.
        """
        pattern = self.values["pattern"][0]
        if not self.values["q"] or pattern.shape[-1] > pattern.shape[-2]:  # the first query is at a later position
            return True
        before, after = self.values["q"][0], self.values["rot_q"][0]
        if before.shape != after.shape:
            return False
        before, after = before[:, 0].float(), after[:, 0].float()
        lengths = before.norm(dim=-1), after.norm(dim=-1)
        aligned = (before * after).sum(-1) >= 0.99 * lengths[0] * lengths[1]
        return bool((aligned & ((lengths[0] == 0) == (lengths[1] == 0))).all())


@contextmanager
def _kept_activations(modules: list[Any]) -> Iterator[list[_Activations]]:
    """Keep q, rot_q, pattern and z of every module in the forward passes of the block."""
    kept = [_Activations() for _ in modules]
    with ExitStack() as handles:
        for attention, each in zip(modules, kept, strict=True):
            for name in ("q", "rot_q", "pattern", "z"):
                if f"hook_{name}" in attention._modules:
                    point = attention._modules[f"hook_{name}"]
                    handles.enter_context(point.register_forward_hook(each.hook(name)))
        yield kept


@contextmanager
def _sites_found(model: Any) -> Iterator[None]:
    """Find out in a forward pass which sites beside attention's each layer has, and set its `hook_sites`.

    It has "resid" if it passes on one stream; the others if attention's and the MLP's outputs sum to what it adds.
    """
    layers = {id(layer) for each in model.modules() if isinstance(each, nn.ModuleList) for layer in each}
    with ExitStack() as handles:
        for block in [block for stack in attention_stacks(model) for block in attention_blocks(model, stack)]:
            outputs: list[Tensor] = []
            with suppress(ValueError):  # such a layer has neither site
                for part in [added_part(block, site) for site in ("attn_out", "mlp_out")]:
                    handles.enter_context(part.register_forward_hook(_collect(outputs)))
            # In Zamba attention is in a part of a layer.
            compare = _compare_sum(outputs, is_layer=id(block) in layers)
            handles.enter_context(block.register_forward_hook(compare, with_kwargs=True))
        yield


def _collect(outputs: list[Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def collect(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    return collect


def _compare_sum(outputs: list[Tensor], *, is_layer: bool) -> Callable[[Any, Any, dict[str, Any], Any], None]:
    def compare(module: Any, inputs: Any, options: dict[str, Any], output: Any) -> None:
        """Set `hook_sites` of a layer in this forward pass of it."""
        before = inputs[0] if inputs else options["hidden_states"]
        after = output if isinstance(output, Tensor) else output[0]
        # Several streams in one (Gemma 3n, DeepSeek-V4) have an axis more, and experts' outputs may have one fewer.
        passes_stream = is_layer and after.ndim == 3
        adds_up = len(outputs) == 2 and all(part.shape == after.shape for part in outputs)
        if adds_up:
            # With layers over several devices a module's input may be on another device than its output.
            added = (after - before.to(after.device)).float()
            parts = sum(part.to(after.device).float() for part in outputs)
            # Float error, in bfloat16 of the stream itself.
            scale = 1e-3 if before.dtype in (torch.float32, torch.float64) else 0.05
            adds_up = bool((added - parts).abs().max() <= scale * after.float().abs().max())
        module.hook_sites = frozenset(
            site for site in SITES_OF_LAYERS if (passes_stream if site == "resid" else adds_up)
        )

    return compare


@contextmanager
def _second_row_edited(attention: Any) -> Iterator[None]:
    """Hide every other key in the pattern of the second row of a batch; the first row stays.

    A factor for all keys would not do: a norm after attention (Gemma 2) undoes it.
    """

    def hide(module: nn.Module, inputs: Any, pattern: Tensor) -> Tensor:
        edited = pattern.clone()
        edited[1:, :, :, ::2] = 0
        return edited

    with attention.hook_pattern.register_forward_hook(hide):
        yield


@contextmanager
def _idle_inputs(model: Any, modules: list[Any]) -> Iterator[None]:
    """Let the attention modules of the passes of the block see what they see with idle hook points.

    Their outputs become those of a pass with idle hook points, but for the edited row of the first module, so that
    rounding does not grow from layer to layer. An output that does not agree with the other in the first row stays.
    """
    outputs: list[Tensor] = []
    with ExitStack() as handles:
        for attention in modules:
            handles.enter_context(attention.register_forward_hook(_collect(outputs)))
        _logits(model)
    in_order = iter(outputs)

    def give(attention: nn.Module, inputs: Any, output: Any) -> Any:
        """The output of the pass with idle hook points, in place of one that agrees with it."""
        found, given = output if isinstance(output, Tensor) else output[0], next(in_order)
        if not _agree(model, found[:1], given[:1]):
            return output
        if attention is modules[0]:
            given = torch.cat([given[:1], found[1:]])
        return given if isinstance(output, Tensor) else (given, *output[1:])

    with ExitStack() as handles:
        for attention in modules:
            handles.enter_context(attention.register_forward_hook(give))
        yield


def _agree(model: Any, got: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by float error only.

    With idle hook points the same function runs, with patterns formed another kernel does.
    """
    tolerance = (1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1) * float(expected.abs().max())
    return float((got - expected).abs().max()) <= tolerance


def _compare(model: Any, got: Tensor, expected: Tensor, what: str) -> None:
    if not _agree(model, got, expected):
        _refuse_infinite_weights(model)
        raise ValueError(
            f"the logits of {type(model).__name__} differ by {float((got - expected).abs().max()):.3g} with {what} "
            f"(largest logit {float(expected.abs().max()):.3g}): its attention cannot be hooked exactly"
        )


def _refuse_infinite_weights(model: nn.Module) -> None:
    """As `_refuse_weights`, of weights with numbers that are not finite."""
    remedy = "the checkpoint is damaged; fetch it again"
    _refuse_weights(model, lambda weight: not bool(weight.isfinite().all()), "holds NaN or infinity", remedy)


def _refuse_weights(model: nn.Module, damaged: Callable[[Tensor], bool], what: str, remedy: str) -> None:
    """Raise if a weight is why a check fails, rather than attention: name it.

    Raises:
        ValueError: of a damaged weight, with its name, and how many others are.
    """
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.is_floating_point()]
    # Weights that accelerate has offloaded have no numbers here.
    found = [name for name, weight in weights if weight.device.type != "meta" and damaged(weight)]
    if found:
        others = f", and so do {len(found) - 1} other weights" if len(found) > 1 else ""
        raise ValueError(f"{printable_name(found[0])} of {type(model).__name__} {what}{others}: {remedy}")


def _check_activations(model: nn.Module, modules: list[Any], kept: list[_Activations]) -> None:
    """Raise unless every hook point fired once, and rows of the patterns sum to at most 1."""
    for attention, each in zip(modules, kept, strict=True):
        kind, values = type(attention).__name__, each.values
        if len(values["z"]) != 1:
            raise ValueError(
                f"{kind} calls its attention function {len(values['z'])} times in a forward pass, and not once: "
                "its attention cannot be hooked"
            )
        if len(values["q"]) > 1:
            raise ValueError(f"{kind} projects its queries {len(values['q'])} times in a forward pass")
        sums = values["pattern"][0].float().sum(-1)
        if not bool(((sums >= -1e-3) & (sums <= 1 + 2e-2)).all()):
            if not bool(sums.isfinite().all()):
                _refuse_infinite_weights(model)
            raise ValueError(
                f"rows of the pattern of {kind} sum to {float(sums.min()):.3g} to {float(sums.max()):.3g}, and not "
                "to at most 1: its attention cannot be hooked"
            )


def _check_edit(model: Any, attention: Any, idle: Tensor, edited: Tensor) -> None:
    """Raise unless the second row, whose first pattern was edited, differs by more than float error.

    Float error is the difference of the first row, of which another kernel formed the pattern, or a few units in
    the last place of the largest logit.
    """
    change, error = ((edited - idle)[row].abs().max() for row in (1, 0))
    units = 4 * min(torch.finfo(model.dtype).eps, 1e-3) if model.dtype.is_floating_point else 4e-3
    if not float(change) > max(2 * float(error), units * float(idle.abs().max())):
        remedy = "if it is a checkpoint's, fetch it again; a network that begins so is checked once it is trained"
        _refuse_weights(
            model, lambda weight: weight.ndim > 1 and not bool(weight.any()), "holds zeros alone", remedy
        )
        raise ValueError(
            f"an edit of the pattern of {type(attention).__name__} does not reach the logits of "
            f"{type(model).__name__}: its attention cannot be hooked"
        )
