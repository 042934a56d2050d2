"""`Finding`: the result of one check of `dlm-lens doctor`."""

from collections.abc import Callable
from dataclasses import dataclass

from dlm_lens.printable import one_line


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        subject: what was checked.
        found: the result in words.
        good: whether it is as it should be; None for information.
    """

    subject: str
    found: str
    good: bool | None = True


def checked(subject: str, check: Callable[[], str | Finding]) -> Finding:
    """The finding of a check that returns it, or its words where all is well; an exception is a bad finding."""
    try:
        found = check()
    except Exception as error:  # any failure is a result of the check
        return Finding(subject, f"{type(error).__name__}: {one_line(error)}", False)
    return found if isinstance(found, Finding) else Finding(subject, found)
