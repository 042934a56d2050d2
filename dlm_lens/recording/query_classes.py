"""Classes of queries: which queries a statistic counts. Nothing here imports torch."""

from typing import Literal, get_args

QueryClass = Literal["all", "masked", "unmasked", "prompt", "block"]
"""Which queries count: all content, the positions that are masked or not masked at the step, the prompt, the block
that is being decoded."""

QUERY_CLASSES: tuple[QueryClass, ...] = get_args(QueryClass)


def checked_class(name: str, owner: str) -> QueryClass:
    """The class of queries with this name.

    Args:
        name: of the class.
        owner: the function or class that takes it, for the error.

    Raises:
        ValueError: there is no such class.
    """
    if name not in QUERY_CLASSES:
        raise ValueError(f"{owner}(queries={name!r}): the classes of queries are {', '.join(QUERY_CLASSES)}")
    return name
