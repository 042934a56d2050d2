"""`parse_hooks`: hooks written as text, for command lines and files; parsed, never evaluated as Python."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from dlm_lens.sinks.parameters import DETECTORS

LONGEST = 2000
"""Characters of an expression."""
MOST = 100_000
"""Numbers in a range."""
NO_HOOKS = ("attached", "capture", "mean_activations", "parse_hooks")
"""Functions of the hooks room that make no hook."""


def parse_hooks(text: str) -> tuple[Any, ...]:
    """Read one or several hooks, separated by commas, such as "mask_sinks(above_mean(3), top=5)".

    Known are the functions of `dlm_lens.hooks` that make a hook, the detectors of `dlm_lens.sinks` (`AboveMean` or
    `above_mean`), `range`, literals, lists and tuples, nested as one likes. Nothing else: no attributes, no
    operators but a minus sign in front of a number, no other names.

    Raises:
        ValueError: anything else, an unknown name, arguments that the function does not take, or no hook.
    """
    tree = check_expression(text)
    try:
        values = tuple(_value(item) for item in tree)
    except RecursionError:
        raise ValueError(f"{text!r:.80}... is nested too deeply") from None
    for value in values:
        if not (hasattr(value, "site") and callable(value)):
            raise ValueError(f"{text!r} holds {value!r}, which is no hook; hooks are {_listed(hook_names())}")
    return values


def check_expression(text: str) -> list[ast.expr]:
    """The parsed expressions, after every check that needs no torch: form, names, what may stand where.

    Raises:
        ValueError: as `parse_hooks`, but for arguments that a function does not take.
    """
    if not text.strip():
        raise ValueError(f"the hook expression is empty; hooks are {_listed(hook_names())}")
    if len(text) > LONGEST:
        raise ValueError(f"the hook expression has {len(text)} characters; {LONGEST} is the most")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.200} is no hook expression: {error}") from None
    items = tree.elts if isinstance(tree, ast.Tuple | ast.List) else [tree]
    try:
        for item in items:
            _check(item)
    except RecursionError:
        raise ValueError(f"{text!r:.80}... is nested too deeply") from None
    return items


def hook_names() -> tuple[str, ...]:
    """The functions of the hooks room that an expression may call, without importing them."""
    import dlm_lens.hooks as room

    return tuple(sorted(name for name in room.__all__ if name.islower() and name not in NO_HOOKS))


def detector_names() -> tuple[str, ...]:
    """The detectors as an expression writes them: by their names and in snake case."""
    kinds = [entry.kind for entry in DETECTORS.values()]
    return tuple(sorted([*kinds, *map(_snake, kinds)]))


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _check(node: ast.expr) -> None:
    """Raise unless an expression is of the allowed form, with names that there are."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | bool | None):
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _is_number(node.operand):
        return
    if isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            _check(item)
        return
    if isinstance(node, ast.Call):
        _check_call(node)
        return
    if isinstance(node, ast.Name):
        known = _listed([*hook_names(), *detector_names()])
        raise ValueError(f"{node.id!r} alone is no value; call it, as in {node.id}(...), if it is one of {known}")
    raise ValueError(
        f"{ast.unparse(node)!r:.80} is not allowed in a hook expression; it may hold calls of hooks and detectors, "
        "numbers, strings, lists, tuples and range(...)"
    )


def _is_number(node: ast.expr) -> bool:
    """Whether a minus sign may stand before it: a number, or one with a minus sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _check_call(node: ast.Call) -> None:
    known = [*hook_names(), *detector_names(), "range"]
    written = ast.unparse(node)[:120]
    if not isinstance(node.func, ast.Name):
        raise ValueError(f"{written!r} calls something that has no plain name; known are {_listed(known)}")
    if node.func.id not in known:
        near = difflib.get_close_matches(node.func.id, known, 3)
        hint = f"; perhaps {', '.join(near)}" if near else ""
        raise ValueError(f"{node.func.id!r} is no hook and no detector{hint}; known are {_listed(known)}")
    if any(isinstance(item, ast.Starred) for item in node.args) or any(one.arg is None for one in node.keywords):
        raise ValueError(f"{written!r} unpacks arguments with *; write them out")
    for item in [*node.args, *(one.value for one in node.keywords)]:
        _check(item)


def _value(node: ast.expr) -> Any:
    """The value of a checked expression."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand)
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    name, written = node.func.id, ast.unparse(node)[:120]
    function = _functions()[name]
    arguments = [_value(item) for item in node.args]
    named = {str(one.arg): _value(one.value) for one in node.keywords}
    try:
        inspect.signature(function).bind(*arguments, **named)
        return function(*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{written!r}: {error}; it is {name}{_signature(function)}") from None


def _functions() -> Mapping[str, Callable[..., Any]]:
    """What an expression may call, by name."""
    return {**_hook_makers(), **_detectors(), "range": _range}


@cache
def _hook_makers() -> Mapping[str, Callable[..., Any]]:
    import dlm_lens.hooks as room

    return {name: getattr(room, name) for name in hook_names()}


@cache
def _detectors() -> Mapping[str, Callable[..., Any]]:
    import dlm_lens.sinks as room

    kinds = {entry.kind: getattr(room, entry.kind) for entry in DETECTORS.values()}
    return {**kinds, **{_snake(name): kind for name, kind in kinds.items()}}


def _range(start: int, stop: int | None = None, step: int = 1) -> range:
    for number in (start, stop, step):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"range takes whole numbers, not {number!r}")
    found = range(start) if stop is None else range(start, stop, step)
    # Counted without len(), which overflows.
    if abs((found.stop - found.start) // found.step) > MOST:
        raise ValueError(f"{found} has more than {MOST} numbers")
    return found


def _listed(known: Iterable[str]) -> str:
    return ", ".join(sorted(known))


def _signature(function: Callable[..., Any]) -> str:
    names = [str(parameter).split(":")[0] for parameter in inspect.signature(function).parameters.values()]
    return f"({', '.join(names)})"
