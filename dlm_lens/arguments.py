"""`checked_arguments`: check the arguments of a public function before it runs, and `chosen_indices`."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Never, ParamSpec, TypeVar, get_args, get_type_hints

from dlm_lens.printable import is_array, is_numpy_scalar, shown

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LARGEST_COUNT = 2**20
"""Most steps and tokens: more than any model uses, few enough not to exhaust the memory before an error."""


@dataclass(frozen=True)
class Rule:
    """A requirement on an argument: its text after "it must be", and its test."""

    must_be: str
    holds: Callable[[Any], bool]
    most: int | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise unless the value satisfies the rule.

        Raises:
            ValueError: naming the argument, its value and what it must be.
        """
        try:
            held = self.holds(value)
        except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
            held = False
        if not held:
            raise ValueError(f"{name} is {shown(value)}; it must be {self.must_be}")
        if self.most is not None and value > self.most:
            raise ValueError(f"{name} is {shown(value)}; it must be at most {self.most}")


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, numpy's included; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


FINITE = "a finite number between -2^63 and 2^63"
"""What `is_real` accepts; larger numbers overflow in the formulas that take them."""


def is_real(value: Any) -> bool:
    """Whether this is `FINITE`, numpy's numbers included; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Real) and -(2.0**63) < float(value) < 2.0**63


def whole(least: int | None = None, most: int = 2**63 - 1) -> Rule:
    """A whole number within bounds."""
    low = -(2**63) if least is None else least
    must_be = "a whole number" if least is None else f"a whole number of at least {least}"
    return Rule(must_be, lambda value: is_whole(value) and low <= value, most)


def or_none(rule: Rule, meaning: str) -> Rule:
    """A rule that None satisfies too, where it is not the default of the argument; `meaning` says what for."""
    return Rule(f"{rule.must_be}, or None {meaning}", lambda value: value is None or rule.holds(value))


def real() -> Rule:
    """A finite number."""
    return Rule(FINITE, is_real)


def flag() -> Rule:
    """True or False."""
    return Rule(
        "True or False",
        lambda value: isinstance(value, bool) or (is_numpy_scalar(value) and value.dtype.kind == "b"),
    )


def one_of(*choices: str) -> Rule:
    """One of some words."""
    words = " or ".join(map(repr, choices)) if len(choices) < 3 else f"one of {', '.join(map(repr, choices))}"
    return Rule(words, lambda value: isinstance(value, str) and value in choices)


def _slice(value: Any) -> bool:
    if not isinstance(value, slice):
        return False
    ends = all(one is None or is_whole(one) for one in (value.start, value.stop, value.step))
    return ends and (value.step is None or value.step > 0)


def instance(kind: type | tuple[type, ...], must_be: str) -> Rule:
    """An object of a class."""
    return Rule(must_be, lambda value: isinstance(value, kind))


def function() -> Rule:
    """Something that can be called."""
    return Rule("a function, or None", lambda value: callable(value) and not isinstance(value, type))


def _indices(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping) or is_array(value) or not hasattr(value, "__len__"):
        return False
    return all(is_whole(one) and abs(one) < 2**63 for one in value)


def _token_ids(value: Any) -> bool:
    return not isinstance(value, Set) and min(listed_indices("token", value), default=0) >= 0


def _words(value: Any) -> bool:
    several = isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)
    return several and all(isinstance(one, str) for one in value)


def _device(value: Any) -> bool:
    from dlm_lens.placement import is_device  # needs torch, which the help of the command line does without

    return is_device(value)


DEVICE = or_none(Rule("a device of this machine, such as 'cpu' or 'cuda:0'", _device), "for no move")
TOKEN_IDS = Rule("a token id, or a list of them", _token_ids)
INDICES = Rule("a list of whole numbers, or None for all", _indices)
WORDS = Rule("a list of names", _words)
SLICE = Rule("a slice of whole numbers, such as slice(0, 2)", _slice)


def check_index(name: str, index: int, count: int, prefix: str = "") -> None:
    """Raise unless an index of a layer, a head or a step exists; negative ones count from the end.

    Args:
        name: what is counted, in the singular: "layer".
        index: of one of them.
        count: how many there are.
        prefix: text before the message, such as "ablate('z'): ".

    Raises:
        ValueError: with the index and both ranges, or that it is no whole number.
    """
    if not is_whole(plain_number(index)):
        raise ValueError(f"{prefix}{name} is {shown(index)}; it must be a whole number")
    if not -count <= index < count:
        raise ValueError(
            f"{prefix}{name} {index} of {count}: {name}s go from 0 to {count - 1}, or from -{count} to -1"
        )


def place_of_layer(layer: Any, layers: Sequence[int], done: str = "read") -> int:
    """The place of a layer among those that a result is of.

    Args:
        layer: its index in the model.
        layers: those of the result.
        done: how it came to them, for the message: "read", "measured", "recorded".

    Raises:
        ValueError: it is not among them.
    """
    index = plain_number(layer)
    if not is_whole(index) or index not in layers:
        raise ValueError(f"layer {shown(layer)} was not {done}; there are {', '.join(map(str, layers))}")
    return layers.index(index)


def chosen_indices(
    name: str, indices: Iterable[int] | None, count: int, prefix: str = "", *, argument: str = ""
) -> tuple[int, ...]:
    """The indices of layers, heads or steps that an argument chooses, in increasing order and each once.

    They are Python's ints, so that records can store them.

    Args:
        name: what is counted, in the singular: "layer".
        indices: negative ones count from the end, and may be numpy's or a tensor's; None for all.
        count: how many there are.
        prefix: text before a message, such as "replay: ".
        argument: its name in a message; by default the plural of `name`.

    Raises:
        ValueError: an index that does not exist, no index at all, or a number or a word in the place of a list.
    """
    argument = argument or f"{name}s"
    if isinstance(indices, str | bytes):
        raise ValueError(f"{prefix}{argument} is {shown(indices)}; give a list of whole numbers, or None for all")
    if indices is not None and not isinstance(plain_number(indices), Iterable):
        one = shown(indices)
        raise ValueError(f"{prefix}{argument} is {one}; give a list, such as {argument}=[{one}], or None for all")
    chosen = range(count) if indices is None else tuple(indices)
    for index in chosen:
        check_index(name, index, count, prefix)
    if not chosen:
        raise ValueError(f"{prefix}{argument} is empty; give at least one index, or None for all")
    return tuple(sorted({int(index) % count for index in chosen}))


def listed_indices(name: str, given: Any, prefix: str = "") -> tuple[int, ...]:
    """The indices that an argument lists, one or several, as Python's ints; how many there are is not known yet.

    Args:
        name: what is counted, in the singular: "layer".
        given: a whole number or some, of Python, numpy or torch.
        prefix: text before a message, such as "ablate: ".

    Raises:
        ValueError: anything else.
    """
    one = plain_number(given)
    several = one if isinstance(one, Iterable) and not isinstance(one, str | bytes | Mapping) else (one,)
    found = tuple(map(plain_number, several))
    if not all(map(is_whole, found)):
        raise ValueError(f"{prefix}{name}s is {shown(given)}; give at least one {name} as a whole number")
    return found


def chosen_steps(steps: Any, total: int) -> tuple[int, ...]:
    """The steps that `cache_steps` chooses of a run of `total`, in increasing order and each once.

    Args:
        steps: an index, a slice or indices, negative from the end; None for all.
        total: how many steps the run has.

    Raises:
        ValueError: a step that the run does not have, none, or no whole number.
    """
    if steps is None or isinstance(steps, slice):
        try:
            found: Sequence[int] = range(total)[steps or slice(None)]
        except (TypeError, ValueError):
            raise ValueError(f"cache_steps is {shown(steps)}; it must be {SLICE.must_be}") from None
    else:
        found = listed_indices("cache_step", steps)
    for step in found:
        if not -total <= step < total:
            raise ValueError(f"cache_steps: step {step} is not there: the run has {total} steps, 0 to {total - 1}")
    if not found:
        raise ValueError(f"cache_steps={shown(steps)} names no step of the run's {total}; give at least one")
    return tuple(sorted({step % total for step in found}))


def kept_step(step: Any, kept: Sequence[int]) -> Any:
    """The number of a step among those that were kept, in increasing order; negative from the last of them."""
    step = plain_number(step)
    return kept[step] if is_whole(step) and -len(kept) <= step < 0 else step


def is_seed(value: Any) -> bool:
    """Whether a generator of torch accepts this as its seed."""
    return is_whole(value) and -(2**63) <= value < 2**64


DIRECTORY = instance((str, PathLike), "a directory, as a text or a pathlib.Path")
FILE = instance((str, PathLike), "the path of a file, as a text or a pathlib.Path")
AT_MOST = or_none(whole(least=0), "for all")
"""How many lines or entries to list."""

LEVEL = instance(str, "'head', 'layer' or 'model'")
ONE_SEED = Rule("a whole number from 0 to 2^63 - 1", lambda value: is_whole(value) and 0 <= value < 2**63)
SEED = Rule("a whole number from -2^63 to 2^64 - 1", is_seed)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("steps", "gen_length", "block_length"), whole(most=LARGEST_COUNT)),
    **dict.fromkeys(("top_k", "eot_token", "strata", "batch_size", "top"), whole()),
    "samples": whole(most=16 * LARGEST_COUNT),
    **dict.fromkeys(("rows_per_pass", "min_viewers"), whole(least=1)),
    "max_bytes": Rule("a number of bytes, at least 1", lambda value: is_real(value) and value >= 1),
    **dict.fromkeys(
        ("temperature", "cfg_scale", "eps", "top_p", "alg_temp", "hysteresis", "threshold", "factor"), real()
    ),
    **dict.fromkeys(
        (
            "progress", "reference_quirks", "logits_eos_inf", "confidence_eos_eot_inf", "float64_confidence",
            "unpadded_guidance", "use_cache", "protect_ends", "attention", "controls", "relative", "causal",
        ),
        flag(),
    ),
    **dict.fromkeys(
        ("remasking", "scope", "rounding", "order", "method", "queries", "quantity", "match"),
        instance(str, "a name, as a text"),
    ),
    **dict.fromkeys(("on_logits", "on_canvas"), function()),
    "layers": INDICES,
    "title": instance(str, "a text"),
    "cache": one_of("prefix", "dual"),
    "follow": one_of("position", "token"),
}  # fmt: skip
"""Argument -> its requirement in every function without a rule of its own; a name means one thing everywhere."""


BY_TYPE: Mapping[Any, Rule] = {
    int: whole(most=LARGEST_COUNT), float: real(), bool: flag(), tuple[int, ...]: TOKEN_IDS,
}  # fmt: skip
"""Type of a setting of a sampler -> its requirement, where `RULES` has none; samplers tell the names of rules."""


def rules_of(settings: type[Any]) -> dict[str, Rule]:
    """The requirements on the fields of a dataclass of settings; None is possible beside a type."""
    found: dict[str, Rule] = {}
    for name, kind in get_type_hints(settings).items():
        types = [one for one in (get_args(kind) if isinstance(kind, UnionType) else (kind,)) if one is not NoneType]
        rule = RULES.get(name) or (BY_TYPE.get(types[0]) if len(types) == 1 else None)
        found |= {} if rule is None else {name: rule}
    return found


def check_values(values: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> None:
    """Raise unless every value whose name has a rule satisfies it; None means not given.

    Raises:
        ValueError: naming the argument, its value and what it must be.
    """
    for name, value in values.items():
        if value is not None and name in rules:
            rules[name].check(name, value)


def checked_arguments(
    **own: Rule | None,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator that checks the arguments of a function, and its further settings, against `RULES`.

    None is accepted where it is an argument's default. Single numbers of numpy's, and tensors without axes where
    the argument is a number, arrive as Python's, and objects that stand for another one as that. torch's default
    device and inference mode do not reach inside.

    Args:
        **own: rules of this function's own, in place of those; None for an argument that it checks itself.
    """

    def decorate(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """The function with its arguments checked."""
        signature = inspect.signature(call)
        rules = {name: rule for name, rule in {**RULES, **own}.items() if rule is not None}
        numbers = {name for name, one in signature.parameters.items() if _of_numbers(one.annotation)}

        @wraps(call)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            """Check the arguments, and call the function."""
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                _raise_misfit(call.__name__, signature, kwargs, error)
            for name, given in bound.arguments.items():
                parameter, value = signature.parameters[name], meant(given)
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    check_values(value, rules)
                    bound.arguments[name] = {key: _of_python(one) for key, one in value.items()}
                    continue
                value = plain_number(value) if name in numbers else _of_python(value)
                if name in rules and not (value is None and parameter.default is None):
                    rules[name].check(name, value)
                bound.arguments[name] = value
            from dlm_lens.placement import plain_defaults  # not above: the help of the command line needs no torch

            with plain_defaults():
                return call(*bound.args, **bound.kwargs)

        return checked

    return decorate


ELSEWHERE = {
    "device": "device_map",
    "local_files_only": "HF_HUB_OFFLINE in the environment",
    "torch_dtype": "dtype",
    "trust_remote_code": "never given: the checkpoint's own Python is not executed",
}
"""Arguments of transformers that users give, and what they are here."""


def named_arguments(
    **elsewhere: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator that names the arguments of a function where a call has others; their values it checks itself.

    Args:
        **elsewhere: arguments that users give and that the function does not have -> what they are here.
    """

    def decorate(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """The function with its arguments' names checked."""
        signature = inspect.signature(call)
        # Not where the function has the argument in the singular, which is then what is meant.
        others = {name: here for name, here in elsewhere.items() if name.rstrip("s") not in signature.parameters}

        @wraps(call)
        def named(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            """Check the names of the arguments, and call the function."""
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                _raise_misfit(call.__name__, signature, kwargs, error, others)
            return call(*args, **kwargs)

        return named

    return decorate


def _raise_misfit(
    function: str,
    signature: inspect.Signature,
    given: Mapping[str, Any],
    error: TypeError,
    elsewhere: Mapping[str, str] = ELSEWHERE,
) -> Never:
    """Say which arguments do not fit a function; inspect's own sentence names neither it nor the others."""
    names = [name for name in signature.parameters if name != "self"]
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    unknown = "" if open_ended else next((name for name in given if name not in names), "")
    if unknown:
        hint = near_name(unknown, names, elsewhere)
        known = ", ".join(names) or "none"
        raise TypeError(f"{function} has no argument {unknown!r}{hint}; it has {known}") from None
    call, missing = "", str(error).startswith("missing")
    if missing or str(error).startswith("too many"):
        parameters = [signature.parameters[name] for name in names]
        placed = [
            one.name
            for one in parameters
            if one.kind is one.POSITIONAL_OR_KEYWORD and (one.default is one.empty or not missing)
        ]
        by_name = [one for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
        placed += [f"{one.name}=..." for one in by_name]
        call = f"; it is called as {function}({', '.join(placed)}{'' if missing else ', ...'})"
    raise TypeError(f"{function}: {error}{call}") from None


def near_name(name: str, names: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """A hint in brackets, with a blank before it: what an unknown name is here, or the one that it is close to."""
    if name in elsewhere:
        return f" ({name} is {elsewhere[name]} here)"
    near = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def meant(value: Any) -> Any:
    """The object that an argument stands for, by a method `stands_for` of its class; most stand for themselves."""
    own = getattr(type(value), "stands_for", None)
    return value if own is None else own(value)


def plain_number(value: Any) -> Any:
    """A number of numpy, or of a tensor without axes, as Python's own, so that records hold plain values.

    Anything else is returned as it is.
    """
    if is_numpy_scalar(value):
        return value.item() if value.dtype.kind in "biuf" else value
    return value.item() if is_array(value) and not len(value.shape) else value


def _of_numbers(kind: Any) -> bool:
    """Whether a type has only numbers, and perhaps None."""
    return all(one in (int, float, NoneType) for one in get_args(kind) or (kind,))


def _of_python(value: Any) -> Any:
    """A number of numpy as Python's own; a tensor, which an argument may take as such, stays one."""
    return plain_number(value) if is_numpy_scalar(value) else value


def store_plain_numbers(settings: Any) -> None:
    """Store the numbers in the fields of a frozen dataclass, and in tuples there, as Python's (`plain_number`).

    Equal settings are then equal and print alike, in records too.
    """
    for each in fields(settings):
        value = getattr(settings, each.name)
        plain = tuple(map(plain_number, value)) if type(value) is tuple else plain_number(value)
        object.__setattr__(settings, each.name, plain)


def level_of_caller() -> int:
    """The `stacklevel` at which a warning names the line that called the library."""
    frame, level = inspect.currentframe(), -1
    own = ("dlm_lens", "torch", "contextlib", "nnsight", "transformer_lens")  # hosts call the library in turn
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in own:
        frame, level = frame.f_back, level + 1
    return max(1, level + 1)
