"""`check_hook_points`: a few tokens through a model, with and without hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm_lens.attention.hook_points import hooked_attentions
from dlm_lens.attention.layers import adding_module, attention_blocks, attention_of
from dlm_lens.placement import input_device

TOKENS = 7
"""Length of the input: odd, so that it equals no number of heads by chance."""


@torch.no_grad()
def check_hook_points(model: Any, *, plain: bool = True) -> Float[Tensor, "1 position d_vocab"]:
    """Run a few tokens and raise unless hook points change nothing, show the pattern, and edits act.

    Logits with idle hook points equal those of the plain attention function; with patterns formed they agree to
    float error; every hook point fires once; rows of the patterns sum to 1 (or less, with a spare softmax entry);
    an edit of the first pattern changes the logits. Rotation does nothing at position 0: where the query before it
    has another direction there than the query after it, `hook_q` and `hook_k` are taken away. Where what attention
    and MLP add does not sum to what a layer adds (Granite scales it), the sites "attn_out" and "mlp_out" are
    refused from then on.

    Args:
        model: with hook points.
        plain: compare with the model's own attention function; off for families whose attention function does
            more (sink tokens, a float32 rotation).

    Returns:
        The logits of `check_ids`, with idle hook points.

    Raises:
        ValueError: one of these does not hold: attention of this class cannot be hooked.
    """
    modules = hooked_attentions(model)
    training = model.training
    model.eval()
    try:
        idle = _logits(model)
        if plain:
            with _plain_attention(modules):
                expected = _logits(model)
            _compare(model, idle, expected, "idle hook points")
        with _keeping(modules) as seen, _adding(model):
            listening = _logits(model)
        _compare(model, listening, idle, "materialised patterns")
        _check_firing(modules, seen)
        if not _same_at_origin(modules, seen):
            for attention in modules:
                for name in ("hook_q", "hook_k"):
                    attention._modules.pop(name, None)
        with _halved(modules[0]):
            edited = _logits(model)
        if torch.equal(edited, listening):
            raise ValueError(
                f"an edit of the pattern of {type(modules[0]).__name__} does not reach the logits of "
                f"{type(model).__name__}: its attention cannot be hooked"
            )
    finally:
        model.train(training)
    return idle


def check_ids(model: Any) -> Int[Tensor, "1 position"]:
    """The ids that checks run on: 1, 2, ..., `TOKENS`."""
    ids = torch.arange(1, TOKENS + 1, device=input_device(model))[None]
    return ids % len(model.get_input_embeddings().weight)


def _logits(model: Any) -> Float[Tensor, "1 position d_vocab"]:
    output = model(input_ids=check_ids(model), use_cache=False)
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits.float()


@contextmanager
def _plain_attention(modules: list[Any]) -> Iterator[None]:
    dispatched = [attention.config for attention in modules]
    for attention in modules:
        attention.config = attention.config.wrapped
    try:
        yield
    finally:
        for attention, config in zip(modules, dispatched, strict=True):
            attention.config = config


@contextmanager
def _keeping(modules: list[Any]) -> Iterator[dict[tuple[int, str], list[Tensor]]]:
    seen: dict[tuple[int, str], list[Tensor]] = {}
    handles = []
    for index, attention in enumerate(modules):
        for name in ("q", "rot_q", "pattern", "z"):
            point = attention._modules.get(f"hook_{name}")
            if point is not None:

                def keep(
                    module: nn.Module, inputs: Any, value: Tensor, place: tuple[int, str] = (index, name)
                ) -> None:
                    seen.setdefault(place, []).append(value)

                handles.append(point.register_forward_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _adding(model: Any) -> Iterator[None]:
    """See what each layer adds to the residual stream, and whether attention and MLP are its parts."""
    handles = []
    for block in attention_blocks(model):
        attention = attention_of(block)
        found: list[Tensor] = []
        attention.adds_up = True
        try:
            parts = [adding_module(block, site) for site in ("attn_out", "mlp_out")]
        except ValueError:
            attention.adds_up = False
            continue
        handles += [part.register_forward_hook(_collect(found)) for part in parts]
        handles.append(block.register_forward_hook(_compare_sum(attention, found), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _collect(found: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    return hook


def _compare_sum(attention: Any, found: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> None:
        before = inputs[0] if inputs else options["hidden_states"]
        after = output if isinstance(output, Tensor) else output[0]
        # With layers over several devices a module's input may lie elsewhere than its output.
        added = (after - before.to(after.device)).float()
        parts = sum(part.to(after.device).float().reshape(after.shape) for part in found)
        # Float error, in bfloat16 of the stream itself.
        scale = 1e-3 if before.dtype in (torch.float32, torch.float64) else 0.05
        attention.adds_up = len(found) == 2 and bool(
            (added - parts).abs().max() <= scale * after.float().abs().max()
        )

    return hook


@contextmanager
def _halved(attention: Any) -> Iterator[None]:
    handle = attention.hook_pattern.register_forward_hook(lambda module, inputs, pattern: pattern * 0.5)
    try:
        yield
    finally:
        handle.remove()


def _compare(model: Any, got: Tensor, expected: Tensor, what: str) -> None:
    # Float error only: with idle hook points the same function runs, with patterns formed another kernel does.
    tolerance = (1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1) * float(expected.abs().max())
    difference = float((got - expected).abs().max())
    if not difference <= tolerance:
        raise ValueError(
            f"the logits of {type(model).__name__} differ by {difference:.3g} with {what} (largest logit "
            f"{float(expected.abs().max()):.3g}): its attention cannot be hooked exactly"
        )


def _check_firing(modules: list[Any], seen: dict[tuple[int, str], list[Tensor]]) -> None:
    for index, attention in enumerate(modules):
        kind = type(attention).__name__
        fired = len(seen.get((index, "z"), ()))
        if fired != 1:
            raise ValueError(
                f"{kind} calls its attention function {fired} times in a forward pass, and not once: its attention "
                "cannot be hooked"
            )
        if "q" in {name for place, name in seen if place == index} and len(seen[index, "q"]) != 1:
            raise ValueError(f"{kind} projects its queries {len(seen[index, 'q'])} times in a forward pass")
        sums = seen[index, "pattern"][0].float().sum(-1)
        if not bool(((sums >= -1e-3) & (sums <= 1 + 2e-2)).all()):
            raise ValueError(
                f"rows of the pattern of {kind} sum to {float(sums.min()):.3g} to {float(sums.max()):.3g}, and not "
                "to at most 1: its attention cannot be hooked"
            )


def _same_at_origin(modules: list[Any], seen: dict[tuple[int, str], list[Tensor]]) -> bool:
    """Whether queries before and after rotation point the same way at the first position."""
    for index in range(len(modules)):
        before, after = seen.get((index, "q")), seen[index, "rot_q"][0]
        if before is None:
            continue
        if before[0].shape != after.shape:
            return False
        pair = before[0][:, 0].float(), after[:, 0].float()
        if float(torch.cosine_similarity(*pair, dim=-1).min()) < 0.99:
            return False
    return True
