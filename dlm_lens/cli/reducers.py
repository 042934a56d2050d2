"""Reducers on the command line: names separated by commas, each with its setting after a colon."""

from collections.abc import Callable, Mapping
from typing import Any

from dlm_lens.cli.options import CLASSES
from dlm_lens.option_values import whole_number, words

HEADS = ("each", "mean", "both")
REDUCERS: Mapping[str, tuple[str, ...]] = {
    "received": CLASSES,
    "value-norm": HEADS,
    "key-norm": HEADS,
    "weighted-value": CLASSES,
    "top-keys": ("K",),
    "residual-norm": (),
    "massive": (),
    "entropy": (),
    "region-mass": (),
    "update-norm": (),
}
"""Name of a reducer on the command line -> what may follow its colon."""

REDUCERS_HELP = (
    "names separated by commas, such as received:all+masked,value-norm,top-keys:5; there are "
    f"{', '.join(REDUCERS)}. received and weighted-value take classes of queries ({', '.join(CLASSES)}), "
    "value-norm and key-norm take each, mean or both (over heads)"
)


def check_reducers(option: str, text: str) -> None:
    """Raise unless an option lists reducers, each with an argument that it takes.

    Raises:
        ValueError: no such reducer, or an argument that it does not take.
    """
    for part in words(option, text):
        _check_reducer(option, part)


def read_reducers(option: str, text: str) -> list[Any]:
    """The reducers that an option lists.

    Raises:
        ValueError: no such reducer, or an argument that it does not take.
    """
    check_reducers(option, text)
    return [_reducer_of(part) for part in words(option, text)]


def _check_reducer(option: str, text: str) -> None:
    name, colon, given = text.partition(":")
    if name not in REDUCERS:
        raise ValueError(f"{option} {text!r}: there are {', '.join(REDUCERS)}")
    allowed = REDUCERS[name]
    if colon and not allowed:
        raise ValueError(f"{option} {text!r}: {name} takes nothing after a colon")
    if name == "top-keys":
        if given and whole_number(f"{option} top-keys", given) < 1:
            raise ValueError(f"{option} {text!r}: K is at least 1")
        return
    for word in given.split("+") if given and name == "received" else [given] if given else []:
        if word not in allowed:
            what = "the classes of queries are" if allowed == CLASSES else "it is one of"
            raise ValueError(f"{option} {text!r}: {what} {', '.join(allowed)}")


def _reducer_of(text: str) -> Any:
    from dlm_lens import recording as r

    made: Mapping[str, Callable[[str], Any]] = {
        "received": lambda given: r.ReceivedAttention(given.split("+") if given else "all"),  # type: ignore[arg-type]
        "value-norm": lambda given: r.ValueNorm(given or "each"),  # type: ignore[arg-type]
        "key-norm": lambda given: r.KeyNorm(given or "each"),  # type: ignore[arg-type]
        "weighted-value": lambda given: r.WeightedValue(given or "all"),  # type: ignore[arg-type]
        "top-keys": lambda given: r.TopKeys(int(given) if given else 5),
        "residual-norm": lambda given: r.ResidualNorm(),
        "massive": lambda given: r.MassiveActivations(),
        "entropy": lambda given: r.AttentionEntropy(),
        "region-mass": lambda given: r.RegionMass(),
        "update-norm": lambda given: r.UpdateNorm(),
    }
    name, _, given = text.partition(":")
    return made[name](given)
