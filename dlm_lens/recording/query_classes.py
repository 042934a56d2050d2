"""Classes of queries: which queries a statistic counts. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Literal, get_args

from dlm_lens.printable import shown

StoredClass = Literal["all", "masked", "unmasked", "prompt", "block"]

QueryClass = Literal["all", "masked", "unmasked", "prompt", "block", "open", "decided"]
"""Which queries count: all content, the positions that are masked or not masked at the step, the prompt, the block
that is being decoded. "open" is "masked" and "decided" is "unmasked": the words that fit models without a mask
token, whose open positions hold random tokens. Arrays are stored under the first names, whatever the model."""

QUERY_CLASSES: tuple[StoredClass, ...] = get_args(StoredClass)

OTHER_NAMES: Mapping[str, StoredClass] = {"open": "masked", "decided": "unmasked"}
"""A class's other name -> the one under which arrays are stored."""


def stored_name(name: str) -> str:
    """The name under which a class's arrays are stored; other words stay as they are."""
    return OTHER_NAMES.get(name, name)


def received_name(queries: QueryClass) -> str:
    """The name of a class's received attention in a recording: received of all queries, else received_CLASS."""
    return "received" if queries == "all" else f"received_{stored_name(queries)}"


def checked_class(name: str, owner: str) -> StoredClass:
    """The class of queries with this name, by the name under which it is stored.

    Args:
        name: of the class.
        owner: the function or class that takes it, for the error.

    Raises:
        ValueError: there is no such class.
    """
    for known in QUERY_CLASSES:
        if isinstance(name, str) and stored_name(name) == known:
            return known
    listed = ", ".join((*QUERY_CLASSES, *OTHER_NAMES))
    raise ValueError(f"{owner}(queries={shown(name)}): the classes of queries are {listed}")
