"""`received_from_pattern`: received attention from given attention patterns."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import level_of_caller
from dlm_lens.attention import MIN_VIEWERS, expected_received, received_attention, viewers, visible_keys
from dlm_lens.sinks.key_axes import AXES
from dlm_lens.sinks.received import COLUMN_SUM, RELATIVE, Received, warn_unscored

LEADING = AXES[:-1]
DEFAULT_DIMS = {
    3: ("head",),
    4: ("batch", "head"),
    5: ("step", "batch", "head"),
    6: LEADING,
}
"""Number of axes of a pattern -> the names of the axes before [query, key]."""

ROW_TOLERANCE = 1e-2
"""The largest deviation of a row's sum from 1. Probabilities rounded to bfloat16 deviate by up to 2^-8 of their
value; scores before the softmax, patterns after dropout and patterns without some columns deviate more."""


def received_from_pattern(
    pattern: Float[Tensor, "*leading query key"],
    *,
    dims: Sequence[str] | None = None,
    relative: bool = True,
    visible: Bool[Tensor, "*leading query key"] | None = None,
    queries: Bool[Tensor, "*rows query"] | None = None,
    attention_mask: Int[Tensor, "*rows key"] | Bool[Tensor, "*rows key"] | None = None,
    causal: bool = False,
    tokens: Int[Tensor, "*rows key"] | None = None,
    masked: Bool[Tensor, "*rows key"] | None = None,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
    min_viewers: int = MIN_VIEWERS,
    check_rows: bool = True,
) -> Received:
    """Received attention of the keys of a pattern: r_j = sum_i A_ij over the counted queries, by default over e_j.

    The axes before [query, key] are [head], [batch, head], [step, batch, head] or
    [step, batch, layer, head]; `dims` names any other part of step, batch, layer, head. `rows` below are the
    step and batch axes among them, of which leading ones may be left out.

    Args:
        pattern: attention probabilities; the rows of counted queries sum to 1, see `check_rows`.
        dims: names of the axes before [query, key].
        relative: divide by e_j = sum_i M_ij / sum_k M_ik, the value under even attention.
        visible: M, which query sees which key: [query, key], [batch, head, query, key] or the pattern's axes
            (any of size 1). None for the mask of `attention_mask` and `causal`.
        queries: the queries that count, of those in `attention_mask`; None for all.
        attention_mask: 1 content, 0 padding, which is neither a counted query nor a visible key.
        causal: whether a query sees only itself and the keys before it.
        tokens: ids of the keys.
        masked: which keys are still [MASK].
        tokenizer: decodes `tokens`.
        layers: index of each layer in the model; counted from 0 by default.
        min_viewers: a key seen by fewer counted queries is undefined (NaN).
        check_rows: False for a pattern whose rows may sum to less than 1: of off-by-one softmax, of sink logits, or
            edited after the softmax. Then nothing says whether it is a pattern at all.

    Raises:
        TypeError: the pattern is not a tensor of floating-point numbers.
        ValueError: axes that do not fit; rows that do not sum to 1; attention on keys that should be invisible.
    """
    names = _names(pattern, dims)
    shape = tuple(pattern.shape[names.index(n)] if n in names else 1 for n in LEADING)
    wide = pattern.detach().reshape(*shape, *pattern.shape[-2:])
    steps, batch, length = shape[0], shape[1], wide.shape[-1]
    content = _rows("attention_mask", attention_mask, names, (steps, batch, length))
    seen = _visibility(wide, visible, content, names, causal=causal)
    counted = _counted(wide, queries, content, names)
    if check_rows:
        _check_rows(wide, seen, counted)
    if visible is None and not causal:
        _warn_if_causal(wide)
    warn_unscored(counted.sum(-1), min_viewers)
    # The layer axis is broadcast: [step, batch, layer = 1, query].
    expected = expected_received(seen, counted[:, :, None])
    values = received_attention(
        wide, visible=seen, queries=counted[:, :, None], relative=relative, min_viewers=min_viewers
    )
    return Received(
        values=values,
        expected=expected,
        counted=counted.sum(-1),
        tokens=_rows("tokens", tokens, names, (steps, batch, length)),
        masked=_rows("masked", masked, names, (steps, batch, length)),
        valid=None if content is None else content.bool().any(0),
        scale=RELATIVE if relative else COLUMN_SUM,
        layers=tuple(layers) if layers is not None else tuple(range(shape[2])) if "layer" in names else (),
        queries="all" if queries is None else "as given",
        min_viewers=min_viewers,
        dims=(*names, "key"),
        tokenizer=tokenizer,
        viewers=viewers(seen, counted[:, :, None]),
    )


def _names(pattern: Any, dims: Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(pattern, Tensor) or not pattern.is_floating_point():
        kind = str(pattern.dtype) if isinstance(pattern, Tensor) else type(pattern).__name__
        raise TypeError(
            f"attention is a {kind}; give a Received, or a tensor of probabilities [..., head, query, key], or "
            "what dlm_lens.record recorded"
        )
    if dims is None:
        if pattern.ndim not in DEFAULT_DIMS:
            raise ValueError(
                f"the pattern has shape {list(pattern.shape)}; it needs [head, query, key] and at most batch, step "
                "and layer axes before them"
            )
        return DEFAULT_DIMS[pattern.ndim]
    names = tuple(dims)
    if names != tuple(n for n in LEADING if n in names) or len(names) != pattern.ndim - 2:
        raise ValueError(
            f"dims is {names} for a pattern of shape {list(pattern.shape)}; it names the axes before "
            f"[query, key], a part of {LEADING} in this order"
        )
    return names


def _rows(name: str, tensor: Tensor | None, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor | None:
    """Expand a tensor with some of the axes [step, batch, position] to all of them."""
    if tensor is None:
        return None
    given = list(tensor.shape)
    if tensor.ndim == 2 and "step" in names and "batch" not in names:
        tensor = tensor[:, None]
    try:
        return tensor.expand(shape)
    except RuntimeError:
        axes = [n for n in ("step", "batch") if n in names]
        sizes = [size for n, size in zip(("step", "batch"), shape, strict=False) if n in names]
        raise ValueError(
            f"{name} has shape {given}; it must be {[*axes, 'position']} = {[*sizes, shape[-1]]}, of which leading "
            "axes may be left out"
        ) from None


def _visibility(
    pattern: Tensor, visible: Tensor | None, content: Tensor | None, names: tuple[str, ...], *, causal: bool
) -> Bool[Tensor, "#step #batch #layer #head query key"]:
    queries, keys = pattern.shape[-2:]
    if visible is None:
        if queries != keys and causal:
            raise ValueError(
                f"the pattern has {queries} queries and {keys} keys (a cache?); give visible= instead of causal"
            )
        everything = torch.ones(*pattern.shape[:2], keys, dtype=torch.bool, device=pattern.device)
        keep = everything if content is None else content.bool()
        if causal:
            return visible_keys(keep, causal=True).unsqueeze(2)
        return keep[:, :, None, None, None, :].expand(-1, -1, -1, -1, queries, -1)
    if causal or visible.dtype != torch.bool:
        raise ValueError(
            f"visible is {visible.dtype} with causal={causal}; it must be boolean (True = sees) and replaces causal"
        )
    if visible.ndim == pattern.ndim or visible.ndim == 2:
        axes: tuple[str, ...] = LEADING if visible.ndim == pattern.ndim else ()
    elif visible.ndim == len(names) + 2:
        axes = names
    elif visible.ndim == 4:
        axes = ("batch", "head")
    else:
        axes = ("?",)
    for axis, name in enumerate(LEADING):
        visible = visible if name in axes else visible.unsqueeze(axis)
    try:
        torch.broadcast_shapes(visible.shape, pattern.shape)
    except RuntimeError:
        raise ValueError(
            f"visible has shape {list(visible.shape)} where the pattern has {list(pattern.shape)} "
            "[step, batch, layer, head, query, key]; it must fit, with any leading axis of size 1"
        ) from None
    # Keys and queries are expanded, since sums over them count.
    visible = visible.expand(*visible.shape[:-2], queries, keys)
    return visible if content is None else visible & content.bool()[:, :, None, None, None, :]


def _counted(
    pattern: Tensor, queries: Tensor | None, content: Tensor | None, names: tuple[str, ...]
) -> Bool[Tensor, "step batch query"]:
    shape = (*pattern.shape[:2], pattern.shape[-2])
    counted = _rows("queries", queries, names, shape)
    if counted is not None and counted.dtype != torch.bool:
        raise ValueError(f"queries is {counted.dtype}; it must be boolean, True for the queries that count")
    if content is not None:
        if pattern.shape[-2] == pattern.shape[-1]:
            counted = content.bool() if counted is None else counted & content.bool()
        elif counted is None:
            raise ValueError(
                f"the pattern has {pattern.shape[-2]} queries and {pattern.shape[-1]} keys, so attention_mask does "
                "not say which queries are content; give queries="
            )
    return torch.ones(shape, dtype=torch.bool, device=pattern.device) if counted is None else counted


def _check_rows(pattern: Tensor, visible: Tensor, counted: Tensor) -> None:
    counts = counted[:, :, None, None]
    sums = pattern.sum(-1, dtype=torch.float32)
    # In this form NaN is wrong too.
    wrong = ~((sums - 1).abs() <= ROW_TOLERANCE) & counts
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"row sums of the pattern must be 1, but step {where[0]}, row {where[1]}, layer {where[2]}, head "
            f"{where[3]}, query {where[4]} sums to {float(sums[tuple(where)]):.4g}; give probabilities (after the "
            "softmax, without dropout), and leave padding out with attention_mask= or queries=; scores of a "
            "recording are no pattern: give the recording itself"
        )
    if bool((pattern < 0).logical_and(counts[..., None]).any()):
        raise ValueError(f"the pattern has entries as low as {float(pattern.min()):.4g}; give probabilities")
    hidden = (pattern * ~visible).sum(-1, dtype=torch.float32).masked_fill(~counts, 0.0)
    if bool((hidden > ROW_TOLERANCE).any()):
        raise ValueError(
            f"a counted query puts {float(hidden.max()):.3g} of its attention on keys that it cannot see; "
            "attention_mask, causal or visible do not describe the forward pass of this pattern"
        )


def _warn_if_causal(pattern: Tensor) -> None:
    if pattern.shape[-1] != pattern.shape[-2] or pattern.shape[-1] < 2:
        return
    diagonal = pattern.diagonal(dim1=-2, dim2=-1)
    if not bool(pattern.triu(1).any()) and bool((diagonal > 0).all()) and bool(pattern.tril(-1).any()):
        warnings.warn(
            "no query attends to a later key: if the model is causal, pass causal=True, else its first keys are "
            "sinks because of the mask alone",
            stacklevel=level_of_caller(),
        )
