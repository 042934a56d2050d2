"""`parse_hooks`: hooks written as text, for command lines and files; parsed, never evaluated as Python."""

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

LONGEST = 2000
"""Characters of an expression."""
MOST = 100_000
"""Numbers in a range."""


def parse_hooks(text: str) -> tuple[Any, ...]:
    """Read one or several hooks, separated by commas, such as "mask_sinks(above_mean(3), top=5)".

    Known are the functions of `dlm_lens.hooks` that make a hook, the detectors of `dlm_lens.sinks` (`AboveMean` or
    `above_mean`), `range`, literals, lists and tuples, nested as one likes. Nothing else: no attributes, no
    operators but a minus sign in front of a number, no other names.

    Raises:
        ValueError: anything else, an unknown name, arguments that the function does not take, or no hook.
    """
    values = _parsed(text)
    for value in values:
        if not (hasattr(value, "site") and callable(value)):
            raise ValueError(f"{text!r} holds {value!r}, which is no hook; hooks are {_listed(_hook_makers())}")
    return values


def _parsed(text: str) -> tuple[Any, ...]:
    if not text.strip():
        raise ValueError(f"the hook expression is empty; hooks are {_listed(_hook_makers())}")
    if len(text) > LONGEST:
        raise ValueError(f"the hook expression has {len(text)} characters; {LONGEST} is the most")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.200} is no hook expression: {error}") from None
    items = tree.elts if isinstance(tree, ast.Tuple | ast.List) else [tree]
    try:
        return tuple(_value(item) for item in items)
    except RecursionError:
        raise ValueError(f"{text!r:.80}... is nested too deeply") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | bool | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Call):
        return _call(node)
    if isinstance(node, ast.Name):
        known = _listed({**_hook_makers(), **_detectors()})
        raise ValueError(f"{node.id!r} alone is no value; call it, as in {node.id}(...), if it is one of {known}")
    raise ValueError(
        f"{ast.unparse(node)!r:.80} is not allowed in a hook expression; it may hold calls of hooks and detectors, "
        "numbers, strings, lists, tuples and range(...)"
    )


def _call(node: ast.Call) -> Any:
    known: Mapping[str, Callable[..., Any]] = {**_hook_makers(), **_detectors(), "range": _range}
    written = ast.unparse(node)[:120]
    if not isinstance(node.func, ast.Name):
        raise ValueError(f"{written!r} calls something that has no plain name; known are {_listed(known)}")
    name = node.func.id
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"; perhaps {', '.join(near)}" if near else ""
        raise ValueError(f"{name!r} is no hook and no detector{hint}; known are {_listed(known)}")
    if any(isinstance(item, ast.Starred) for item in node.args) or any(one.arg is None for one in node.keywords):
        raise ValueError(f"{written!r} unpacks arguments with *; write them out")
    arguments = [_value(item) for item in node.args]
    named = {str(one.arg): _value(one.value) for one in node.keywords}
    try:
        inspect.signature(known[name]).bind(*arguments, **named)
        return known[name](*arguments, **named)
    except TypeError as error:
        raise ValueError(f"{written!r}: {error}; it is {name}{_signature(known[name])}") from None


def _range(start: int, stop: int | None = None, step: int = 1) -> range:
    for number in (start, stop, step):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"range takes whole numbers, not {number!r}")
    found = range(start) if stop is None else range(start, stop, step)
    # Counted without len(), which overflows.
    if abs((found.stop - found.start) // found.step) > MOST:
        raise ValueError(f"{found} has more than {MOST} numbers")
    return found


@cache
def _hook_makers() -> Mapping[str, Callable[..., Any]]:
    """The public functions of the hooks room that make a value: they take no model and yield nothing."""
    import dlm_lens.hooks as room

    found = {}
    for name in room.__all__:
        one = getattr(room, name)
        if not inspect.isfunction(one) or inspect.isgeneratorfunction(inspect.unwrap(one)):
            continue
        parameters = list(inspect.signature(one).parameters)
        if parameters[:1] in (["model"], ["text"]):
            continue
        found[name] = one
    return found


@cache
def _detectors() -> Mapping[str, Callable[..., Any]]:
    """The detectors, by their names and in snake case."""
    import dlm_lens.sinks as room

    kinds = [getattr(room, name) for name in room.__all__]
    found: dict[str, Callable[..., Any]] = {}
    for kind in kinds:
        if inspect.isclass(kind) and is_dataclass(kind) and hasattr(kind, "detect"):
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
            found |= {kind.__name__: kind, snake: kind}
    return found


def _listed(known: Mapping[str, Any]) -> str:
    return ", ".join(sorted(known))


def _signature(function: Callable[..., Any]) -> str:
    names = [str(parameter).split(":")[0] for parameter in inspect.signature(function).parameters.values()]
    return f"({', '.join(names)})"
