"""`parse_hooks`: hooks written as text, for command lines, files and finished runs; parsed, never executed."""

import ast
import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from dlm_lens.sinks.detector_registry import DETECTORS

MAX_LENGTH = 2000
"""Characters of an expression."""
MAX_ERROR_LENGTH = 800
"""Characters of an error of a hook, which may quote the whole expression."""
MAX_DEPTH = 20
"""Levels of nested calls, lists and minus signs."""
MAX_NUMBERS = 100_000
"""Numbers in all ranges of an expression together."""
NOT_HOOKS = ("attach_hooks", "capture", "hooks_of_run", "mean_activations", "parse_hooks")
"""Functions that `dlm_lens.hooks` exports beside those that make hooks and positions."""


def parse_hooks(text: str) -> tuple[Any, ...]:
    """Read one or several hooks, separated by commas, such as "mask_sinks(above_mean(3), top=5)".

    An expression may call the functions that `dlm_lens.hooks` exports, the detectors of `dlm_lens.sinks`
    (`AboveMean` or `above_mean`), `range` and `slice`, with literals, lists, tuples and such calls as arguments.
    Attributes, other names, and operators other than the minus sign of a number are refused.

    Raises:
        ValueError: anything else, an unknown name, arguments that the function does not take, or a value that is no
            hook; with the character where it is.
    """
    from dlm_lens.attention import is_hook

    tree = check_expression(text)
    values = []
    for node in tree:
        value = _value(node)
        if not is_hook(value):
            message = f"{text!r:.200} holds {value!r:.200}, which is no hook; hooks are {_listed(hook_names())}"
            raise _located(ValueError(message), node)
        values.append(value)
    return tuple(values)


def hooks_of_run(run: Any) -> tuple[Any, ...]:
    """The hooks of a finished run, made again from their text in `run.settings["hooks"]`.

    With them a probe sees what the run computed: `commitment(model, run, hooks=hooks_of_run(run))`.

    Args:
        run: from `denoise`, or a recording.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a hook whose text does not hold all that it was made of, such as a tensor or a function.
    """
    settings = getattr(run, "settings", None)
    if not isinstance(settings, Mapping):
        raise TypeError(f"the run is a {type(run).__name__}; give one of dlm_lens.denoise, or a recording")
    texts, found = settings.get("hooks", ()), list[Any]()
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the run's settings name hooks {texts!r:.80}; they should be texts")
    for text in texts:
        try:
            made = parse_hooks(text)
        except (ValueError, OSError) as error:
            raise ValueError(f"{_not_made_of(text)} ({error})") from None
        if tuple(map(repr, made)) != (text,):
            raise ValueError(_not_made_of(text))
        found += made
    return tuple(found)


RUN = "run"
"""The word that stands for a run's own hooks where a command reads the run."""


def check_given(text: str) -> None:
    """Check what a command that reads a run was given for its hooks, as `check_expression` does, or `RUN`."""
    if text and text != RUN:
        check_expression(text)


def given_hooks(text: str, run: Any) -> tuple[Any, ...]:
    """The hooks that a command was given: none for an empty text, those of the run for `RUN`, or an expression's.

    Raises:
        ValueError: `RUN` for a run without hooks, or as `hooks_of_run` and `parse_hooks`.
    """
    if not text:
        return ()
    if text != RUN:
        return parse_hooks(text)
    if not (found := hooks_of_run(run)):
        raise ValueError("hooks=run takes the hooks of the recording's run, which had none; leave hooks= out")
    return found


def _not_made_of(text: str) -> str:
    return f"the run's hook {text!r:.200} cannot be made from its text; in Python give the hook itself, hooks=[...]"


def check_expression(text: str) -> list[ast.expr]:
    """Parse an expression and check its form and names, without importing torch.

    Raises:
        ValueError: as `parse_hooks`, except for arguments that a function does not take.
    """
    if not isinstance(text, str) or not text.strip():
        kind = "empty" if isinstance(text, str) else f"{text!r:.60}, which is no text"
        raise ValueError(f"the hook expression is {kind}; hooks are {_listed(hook_names())}")
    if len(text) > MAX_LENGTH:
        raise ValueError(f"the hook expression has {len(text)} characters; {MAX_LENGTH} is the most")
    source = text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about "\\d" and "1is"; both are read or refused here
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        place = _character(source, error.lineno or 1, (error.offset or 1) - 1)
        raise ValueError(f"{text!r:.200} is no hook expression: {error.msg}, at character {place}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.200} is no hook expression: {error}") from None
    _check_depth(tree, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr):
            before = _lines(source)[node.lineno - 1].encode()[: node.col_offset]
            setattr(node, _CHARACTER, _character(source, node.lineno, len(before.decode())))
    items = tree.elts if isinstance(tree, ast.Tuple | ast.List) else [tree]
    if not items:
        raise ValueError(f"{text!r:.80} holds no hook; hooks are {_listed(hook_names())}")
    for item in items:
        _check(item)
    _check_ranges(tree)
    return items


class _LocatedError(ValueError):
    """An error that names its character in the expression."""


_CHARACTER = "character"


def _located(error: ValueError, node: ast.expr) -> ValueError:
    """The error with the character of the node, unless it has one."""
    if isinstance(error, _LocatedError):
        return error
    message = str(error)
    message = message if len(message) <= MAX_ERROR_LENGTH else f"{message[: MAX_ERROR_LENGTH - 3]}..."
    return _LocatedError(f"{message} (at character {getattr(node, _CHARACTER)} of the hook expression)")


def _character(source: str, line: int, column: int) -> int:
    """The parser's line and column as a character of the whole text, counted from 1."""
    return sum(len(before) + 1 for before in _lines(source)[: line - 1]) + max(column, 0) + 1


def _lines(source: str) -> list[str]:
    """Lines as the parser counts them; `splitlines` would split at more characters."""
    return re.split("\r\n|\r|\n", source)


def _check_depth(tree: ast.expr, text: str) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise ValueError(f"{text!r:.80}... is nested too deeply; {MAX_DEPTH} levels are the most")


def _check_ranges(tree: ast.expr) -> None:
    """Raise if the ranges of an expression hold too many numbers together."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            total += len(_value(node))
            if total > MAX_NUMBERS:
                message = f"the ranges of the expression have more than {MAX_NUMBERS} numbers together"
                raise _located(ValueError(message), node)


def hook_names() -> tuple[str, ...]:
    """The functions of `dlm_lens.hooks` that an expression may call, without importing their modules."""
    import dlm_lens.hooks

    return tuple(sorted(name for name in dir(dlm_lens.hooks) if name.islower() and name not in NOT_HOOKS))


def detector_names() -> tuple[str, ...]:
    """The detectors as an expression writes them: by their names and in snake case."""
    return tuple(sorted(name for entry in DETECTORS.values() for name in (entry.kind, entry.function)))


def _check(node: ast.expr) -> None:
    """Raise unless a node has an allowed form and known names."""
    try:
        _check_form(node)
    except ValueError as error:
        raise _located(error, node) from None


def _check_form(node: ast.expr) -> None:
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
        "numbers, strings, lists, tuples, range(...) and slice(...)"
    )


def _is_number(node: ast.expr) -> bool:
    """Whether a minus sign is allowed before it: a number, perhaps with a minus sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _check_call(node: ast.Call) -> None:
    known = [*hook_names(), *detector_names(), *NUMBERS]
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
        # Ranges are counted before anything else is evaluated (`_check_ranges`).
        if node.func.id in NUMBERS and isinstance(item, ast.Call):
            raise ValueError(f"{node.func.id} takes whole numbers, not {ast.unparse(item)!r:.80}")
        _check(item)


def _value(node: ast.expr) -> Any:
    try:
        return _evaluated(node)
    except ValueError as error:
        raise _located(error, node) from None


def _evaluated(node: ast.expr) -> Any:
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
    function = _function(name)
    arguments = [_value(item) for item in node.args]
    named = {str(one.arg): _value(one.value) for one in node.keywords}
    try:
        inspect.signature(function).bind(*arguments, **named)
        return function(*arguments, **named)
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{written!r}: {error}; it is {name}{_signature(function)}") from None


def _function(name: str) -> Callable[..., Any]:
    """What an expression may call by this name; only hooks and detectors import torch."""
    return NUMBERS.get(name) or {**_hook_makers(), **_detectors()}[name]


@cache
def _hook_makers() -> Mapping[str, Callable[..., Any]]:
    import dlm_lens.hooks

    return {name: getattr(dlm_lens.hooks, name) for name in hook_names()}


@cache
def _detectors() -> Mapping[str, Callable[..., Any]]:
    return {name: entry.load() for entry in DETECTORS.values() for name in (entry.kind, entry.function)}


def _range(start: int, stop: int | None = None, step: int = 1) -> range:
    for number in (start, stop, step):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"range takes whole numbers, not {number!r}")
    if not step:
        raise ValueError(f"range({start}, {stop}, 0) never ends; its step must not be 0")
    found = range(start) if stop is None else range(start, stop, step)
    # Counted without len(), which overflows.
    if -((found.start - found.stop) // found.step) > MAX_NUMBERS:
        raise ValueError(f"{found} has more than {MAX_NUMBERS} numbers")
    return found


def _slice(start: int | None, stop: int | None = None, step: int | None = None) -> slice:
    for number in (start, stop, step):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"slice takes whole numbers and None, not {number!r}")
    if step == 0:
        raise ValueError(f"slice({start}, {stop}, 0) never ends; its step must not be 0")
    return slice(start, stop, step)


NUMBERS: Mapping[str, Callable[..., Any]] = {"range": _range, "slice": _slice}


def _listed(known: Iterable[str]) -> str:
    return ", ".join(sorted(known))


def _signature(function: Callable[..., Any]) -> str:
    names = [str(parameter).split(":")[0] for parameter in inspect.signature(function).parameters.values()]
    return f"({', '.join(names)})"
