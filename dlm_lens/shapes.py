"""`check_shapes`: check the tensors of a result against their annotations; `same_shape`: what replaces a tensor."""

from collections.abc import Mapping
from functools import cache
from inspect import get_annotations
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from jaxtyping import Shaped, jaxtyped
from torch import Tensor

from dlm_lens.printable import shown


def same_shape(who: object, before: Tensor, after: object, *, or_none: bool = False) -> Tensor:
    """What a callback, an observer or a hook returned, if it can replace `before`.

    Args:
        who: returned it, for the message.
        before: what it replaces.
        after: what was returned.
        or_none: None would leave `before` as it is (the caller sees to that), for the message.

    Raises:
        ValueError: it is no tensor, of another shape, or not of whole numbers where these are.
    """
    if not isinstance(after, Tensor) or after.shape != before.shape:
        kind = f"a tensor of shape {list(after.shape)}" if isinstance(after, Tensor) else shown(after)
        wanted = f"{'None or ' * or_none}a tensor of shape {list(before.shape)}"
        raise ValueError(f"{who} returned {kind}; it must return {wanted}")
    plain = not after.is_complex() and after.dtype != torch.bool
    if not plain or after.is_floating_point() != before.is_floating_point():
        kind = "floating-point numbers" if before.is_floating_point() else "token ids"
        raise ValueError(f"{who} returned a tensor of {after.dtype}; it must hold {kind}")
    return after.to(before.device) if before.is_floating_point() else after.to(before.device, before.dtype)


def edited_by(hook: object, activation: Tensor, edited: object) -> Tensor:
    """What a hook returned, in the activation's precision; None leaves the activation, as in PyTorch.

    Raises:
        ValueError: as `same_shape`.
    """
    return activation if edited is None else same_shape(hook, activation, edited, or_none=True).to(activation.dtype)


def check_shapes(result: Any, **sizes: int) -> None:
    """Compare every tensor of a dataclass with its jaxtyping annotation; an axis has one size in all of them.

    A field that may be None and is None is left out. Broadcasting axes (`#layer`) may also have size 1.

    Args:
        result: the dataclass, with annotations such as `Float[Tensor, "step batch key"]`.
        **sizes: axes of known size, such as layer=len(self.layers).

    Raises:
        ValueError: a field of another shape or kind, named with its axes and the sizes that they must have.
    """
    known = dict(sizes)
    with jaxtyped("context"):
        for axis, size in sizes.items():
            bound: Any = Shaped[Tensor, axis]
            isinstance(torch.empty(size, device="meta"), bound)
        kind: Any = type(result)
        for name, annotation, or_none in _tensors(kind):
            given = getattr(result, name)
            if given is None and or_none:
                continue
            if not isinstance(given, annotation):
                raise ValueError(_complaint(f"{type(result).__name__}.{name}", given, annotation, known))
            axes = annotation.dim_str.split()
            known |= {axis: size for axis, size in zip(axes, given.shape, strict=True) if axis.isidentifier()}


def tensor_axes(kind: Any) -> dict[str, tuple[str, ...]]:
    """The axes of every tensor of a dataclass, from its jaxtyping annotation."""
    return {name: tuple(annotation.dim_str.split()) for name, annotation, _ in _tensors(kind)}


def taken(result: Any, places: Mapping[str, slice | Tensor]) -> dict[str, Any]:
    """The tensors of a dataclass at some places of their axes; with slices they are views.

    A field that is None is left out. A broadcasting axis (`#layer`) of size 1 stays as it is.

    Args:
        result: the dataclass, with annotations such as `Float[Tensor, "step batch key"]`.
        places: axis -> a slice of it, or indices (of one axis only).
    """
    found = {}
    for name, axes in tensor_axes(type(result)).items():
        given = getattr(result, name)
        if given is None:
            continue
        cut = [axis.lstrip("#") if size > 1 else axis for axis, size in zip(axes, given.shape, strict=True)]
        found[name] = given[tuple(places.get(axis, slice(None)) for axis in cut)]
    return found


@cache
def _tensors(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """The annotated tensors of a dataclass, its own before those of its bases, and whether each may be None."""
    hints = get_type_hints(kind)
    names = dict.fromkeys(name for each in kind.__mro__ for name in get_annotations(each) if name in hints)
    found = []
    for name in names:
        among = get_args(hints[name])
        found += [(name, one, NoneType in among) for one in (hints[name], *among) if hasattr(one, "dim_str")]
    return tuple(found)


def _complaint(name: str, given: Any, annotation: Any, known: dict[str, int]) -> str:
    axes = annotation.dim_str.split()
    sizes = ", ".join(f"{axis}={known[axis]}" for axis in axes if axis in known)
    wanted = f"{annotation.dtype.__name__} [{', '.join(axes)}]{' with ' * bool(sizes)}{sizes}"
    if not isinstance(given, Tensor):
        return f"{name} is a {type(given).__name__}; it must be a tensor, {wanted}"
    return f"{name} has shape {list(given.shape)} ({given.dtype}); it must be {wanted}"
