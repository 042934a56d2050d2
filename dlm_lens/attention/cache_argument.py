"""The cache of keys and values in calls of a network: transformers 5.24 renamed `past_key_values` to `cache`.

Since then its forward methods and outputs have the new name, and warn of the old one. The families of this library,
TransformerLens and other code have the old one.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

NEW, OLD = "cache", "past_key_values"
CURRENT = NEW if NEW in BaseModelOutputWithPast.__dataclass_fields__ else OLD
"""The name that the classes of the installed transformers have."""


def cache_argument(network: Callable[..., Any], kept: Any) -> dict[str, Any]:
    """The cache `kept` as an argument of a network, under the name that it has there."""
    # accelerate replaces the method of an instance.
    called = type(network).forward if isinstance(network, nn.Module) else getattr(network, "__func__", network)
    return {_known_name(called) if isinstance(called, FunctionType | type) else _name(called): kept}


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward pass; None if there is none."""
    found = arguments.get(NEW)
    return arguments.get(OLD) if found is None else found


def returned_cache(output: Any) -> Any:
    """The cache in the output of a forward pass."""
    return getattr(output, NEW) if hasattr(output, NEW) else getattr(output, OLD)


def _name(called: Callable[..., Any]) -> str:
    parameters = inspect.signature(called).parameters
    # One that has neither passes its arguments on.
    return NEW if NEW in parameters else OLD if OLD in parameters else CURRENT


_known_name = cache(_name)
