"""`identity_of`: what a hook or a function computes, as text that is the same in every process."""

import dis
import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cached_property, partial, partialmethod
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from dlm_lens.attention.hook import is_hook

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""What Python's default repr says of an object: its place in memory, which differs between processes."""

LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
"""Folders of installed code, whose functions are identified without the globals that they read."""

LIBRARY_NAMES = {"site-packages", "dist-packages"}
"""Names of such folders elsewhere: the user's own, the system's (`--system-site-packages`), those of PYTHONPATH."""

HOSTS = {"dlm_lens", "torch", "transformers", "tokenizers", "numpy", "nnsight", "transformer_lens"}
"""Packages that count as installed also where they lie elsewhere (`pip install -e`)."""

IN_IDENTITY = "in identity"
"""In the metadata of a dataclass's field: False where what a hook computes does not depend on it."""

PLAIN = (bool, int, float, complex, str, bytes, range, slice, Enum, PurePath, np.generic, torch.dtype, torch.device)
"""Values that their repr describes wholly, as it does None."""


def identity_of(value: Any, *, strict: bool = True) -> str:
    """A value's repr without addresses, with a digest of the tensors and functions that it holds.

    The repr of a hook shows neither a tensor's entries nor a function's code. A tensor is identified by its bytes;
    a function by its module, qualified name, bytecode, constants and defaults, and by the values of its closure and
    of the globals that it reads; a module of torch.nn by its class, weights, and public attributes; any other
    object by its class and attributes; a class of the user's own also by the bytecode of its methods and by its
    class attributes. An object that occurs again is identified by which of the earlier ones it is. Bytecode differs
    between versions of Python.

    Args:
        value: a hook or a function.
        strict: False to leave out what has no identity.

    Raises:
        ValueError: the value holds an object that only its place in memory distinguishes, such as an open file.
    """
    shown = ADDRESS.sub("", repr(value))
    parts = list(_parts(value, "", not ADDRESS.search(repr(value)), strict, {}))
    if not parts:
        return shown
    digest = hashlib.sha256()
    for part in parts:
        # With their lengths, so that no two lists of parts have the same bytes.
        for content in (part.name.encode(), part.content):
            digest.update(b"%d " % len(content) + content)
    return f"{shown} #{digest.hexdigest()[:16]}"


class Part(NamedTuple):
    """The path of a part in a value, and what identifies it."""

    name: str
    content: bytes


Inside = Iterable[tuple[Any, Any]]
"""The values in a value, by the last name of their paths."""


@dataclass
class Visit:
    """An object that was seen, which is kept so that no later object gets its id, and its place in the order.

    `in_parts` is False where it yielded no part, because the repr of the whole contains all of it.
    """

    value: Any
    number: int
    in_parts: bool = True


def _parts(value: Any, name: str, shown: bool, strict: bool, seen: dict[int, Visit]) -> Iterator[Part]:
    """What identifies a value, beside its repr if `shown` (the repr of the whole contains it)."""
    if isinstance(value, torch.Tensor):
        yield Part(name, _tensor_bytes(value))
        return
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield Part(name, _array_bytes(value))
        return
    if value is None or isinstance(value, (*PLAIN, type, ModuleType)):
        if not shown:
            yield Part(name, _plain_text(value).encode())
        return
    visit = seen.get(id(value))
    if visit is not None:
        if visit.in_parts or not shown:
            yield Part(name, f"object {visit.number} again".encode())
        return
    visit = Visit(value, len(seen))
    # Tuples do not change: whether two are one object or equal ones says nothing of what the whole computes.
    if not isinstance(value, tuple | frozenset):
        seen[id(value)] = visit
    text, inside, shown = _opened(value, name, shown, strict)
    in_parts = bool(text)
    if text:
        yield Part(name, text.encode())
    for key, one in inside:
        for part in _parts(one, f"{name}.{key}", shown, strict, seen):
            in_parts = True
            yield part
    visit.in_parts = in_parts


def _opened(value: Any, name: str, shown: bool, strict: bool) -> tuple[str, Inside, bool]:
    """What identifies a value beside the values in it; these; and whether the whole's repr contains them."""
    kind = type(value)
    if isinstance(value, Mapping):
        return "" if shown else f"{kind.__name__} {len(value)}", value.items(), shown
    if isinstance(value, list | tuple):
        return "" if shown else f"{kind.__name__} {len(value)}", enumerate(value), shown
    if isinstance(value, set | frozenset):
        return "" if shown else f"{kind.__name__} {len(value)}", enumerate(sorted(value, key=repr)), shown
    if isinstance(value, FunctionType):
        return f"function {_function_text(value)}", _function_values(value), False
    if isinstance(value, MethodType):
        return "method", (("self", value.__self__), ("function", value.__func__)), False
    if isinstance(value, partial):
        return "partial", (("function", value.func), ("args", value.args), ("keywords", value.keywords)), False
    if isinstance(value, BuiltinFunctionType):
        owner = () if isinstance(value.__self__, ModuleType | type(None)) else (("self", value.__self__),)
        return f"builtin {value.__module__}.{value.__qualname__}", owner, False
    text = f"{_class_text(kind)} {ADDRESS.sub('', repr(value))}"
    if isinstance(value, torch.nn.Module):
        public = ((key, one) for key, one in _attributes(value) if not key.startswith("_"))
        return text, (*value.state_dict().items(), *public, *_class_values(kind)), False
    attributes = [*_attributes(value), *_class_values(kind)]
    has_address = bool(ADDRESS.search(repr(value)))
    # The repr of a user's own class may leave attributes out.
    complete = not has_address and _is_installed(kind)
    if is_dataclass(value) or is_hook(value):
        return "" if shown and _is_installed(kind) else _class_text(kind), attributes, shown and complete
    if complete:
        return "" if shown and not callable(value) else text, (), shown
    # What is implemented in C keeps its state outside of its attributes.
    in_python = not _is_installed(kind) or (isinstance(kind.__init__, FunctionType) and hasattr(value, "__dict__"))
    if strict and not in_python:
        raise ValueError(
            f"{name.lstrip('.') or 'it'} is {ADDRESS.sub('', repr(value))}, which has no identity that a later "
            "process could compare"
        )
    return _class_text(kind) if has_address else text, attributes, False


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The fields, slots and attributes of an object that are of its identity, without what a property cached."""
    declared = fields(value) if is_dataclass(value) else ()
    names = [one.name for one in declared]
    # Identities are stored, and fields that moved to a base class keep their place in them.
    names = [*getattr(type(value), "IDENTITY_ORDER", "").split(), *names]
    own = [kind for kind in type(value).__mro__ if not _is_installed(kind)]
    names += [name for kind in own for name, one in vars(kind).items() if isinstance(one, MemberDescriptorType)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
    left_out = {name for name in found if isinstance(getattr(type(value), name, None), cached_property)}
    left_out |= {one.name for one in declared if not one.metadata.get(IN_IDENTITY, True)}
    return [(name, one) for name, one in found.items() if name not in left_out]


def _class_values(kind: type) -> Iterator[tuple[str, Any]]:
    """The methods of a user's own class and of those that it inherits from, and their class attributes."""
    for parent in kind.__mro__:
        if _is_installed(parent):
            continue
        for name, entry in sorted(vars(parent).items()):
            for one in _values_of(entry):
                if isinstance(one, FunctionType):
                    # What a dataclass generates says nothing that its fields do not say.
                    generated = "__dataclass_fields__" in vars(parent) and one.__code__.co_filename == "<string>"
                    counts = not (generated and name.startswith("__"))
                else:
                    # What an abstract class keeps for itself and the docstring compute nothing.
                    counts = name != "_abc_impl" and (callable(one) or not name.startswith("__"))
                if counts:
                    yield f"{parent.__qualname__}.{name}", one


def _values_of(entry: Any) -> tuple[Any, ...]:
    """What an entry of a class holds: what a descriptor of Python's own calls, or the entry itself."""
    if isinstance(entry, property):
        return tuple(one for one in (entry.fget, entry.fset) if one is not None)
    if isinstance(entry, staticmethod | classmethod):
        return (entry.__func__,)
    if isinstance(entry, cached_property):
        return (entry.func,)
    if isinstance(entry, partialmethod):
        return entry.func, entry.args, entry.keywords
    is_descriptor = hasattr(type(entry), "__get__") and _is_installed(type(entry))
    if is_descriptor and not isinstance(entry, FunctionType | partial):
        return (entry.__wrapped__,) if hasattr(entry, "__wrapped__") else ()
    return (entry,)


def _plain_text(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    return _class_text(value) if isinstance(value, type) else f"{type(value).__name__} {value!r}"


def _class_text(kind: type) -> str:
    """The name of a class, with the bytecode of its methods where it is the user's own."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_installed(kind):
        return name
    methods = sorted((key, one) for key, one in vars(kind).items() if isinstance(one, FunctionType))
    return " ".join([name, *(f"{key} {_code_text(one.__code__)}" for key, one in methods)])


def _is_installed(what: type | FunctionType) -> bool:
    """Whether a class or function is of this library or an installed one, which the versions identify."""
    root = what.__module__.partition(".")[0]
    if root == "__main__":
        return False
    if root in sys.stdlib_module_names or root in HOSTS:
        return True
    # A package without an __init__.py has no file, but its modules have; modules that C code makes have none.
    files = (getattr(sys.modules.get(name), "__file__", None) for name in (root, what.__module__))
    file = next(filter(None, files), None)
    if file is None:
        return False
    path = Path(file)
    return bool(LIBRARY_NAMES & set(path.parts)) or any(path.is_relative_to(folder) for folder in LIBRARIES)


def _function_text(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__} {_code_text(function.__code__)}"


def _function_values(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The defaults, the attributes, the closure and the globals of a function."""
    yield "defaults", function.__defaults__
    yield "keyword defaults", function.__kwdefaults__
    yield from vars(function).items()
    wrapped = vars(function).get("__wrapped__", object())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            one = cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
        # `functools.wraps` names what a decorator holds, as in every dataclass's own repr: once is enough.
        if one is not wrapped:
            yield name, one
    if not _is_installed(function):
        for name in sorted(_global_names(function.__code__) & function.__globals__.keys()):
            yield name, function.__globals__[name]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _global_names(code: CodeType) -> set[str]:
    reads = ("LOAD_GLOBAL", "LOAD_NAME")
    return {str(one.argval) for part in _codes(code) for one in dis.get_instructions(part) if one.opname in reads}


def _code_text(code: CodeType) -> str:
    """Bytecode, names and constants; neither the file nor the lines."""
    constants = [_constant_text(one) for part in _codes(code) for one in part.co_consts]
    names = [(part.co_code.hex(), part.co_names, part.co_varnames, part.co_freevars) for part in _codes(code)]
    return f"{names} {constants}"


def _constant_text(constant: Any) -> str:
    """A constant of a function; its repr, but for sets, whose order differs between processes, and for code."""
    if isinstance(constant, CodeType):
        return constant.co_qualname
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    # A view that conjugates or negates shares its bytes with what it is a view of.
    plain = plain.resolve_conj().resolve_neg().contiguous()
    # A tensor of an empty array has strides of 0, with which torch views no bytes.
    numbers = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return _head(plain.shape, plain.dtype) + numbers


def _array_bytes(array: np.ndarray) -> bytes:
    """As the tensor of the same numbers, where torch has the dtype."""
    known = getattr(torch, array.dtype.name, None)
    is_tensor = isinstance(known, torch.dtype) and array.dtype.isnative
    return _head(array.shape, known if is_tensor else array.dtype) + array.tobytes()


def _head(shape: tuple[int, ...], dtype: Any) -> bytes:
    return f"{tuple(shape)} {dtype} ".encode()
