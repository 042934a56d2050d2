"""What `dlm-lens record` is given: reducers by name, and a file of prompts."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlm_lens.command_options import (
    CLASSES,
)
from dlm_lens.printable import shown

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
"""Reducers by their names here, and what may follow a colon."""


def check_reducer(text: str, option: str = "--reducer") -> None:
    """Raise unless an option names a reducer, with an argument that it takes.

    Raises:
        ValueError: no such reducer, or an argument that it does not take.
    """
    name, colon, given = text.partition(":")
    if name not in REDUCERS:
        raise ValueError(f"{option} {text!r}: there are {', '.join(REDUCERS)}")
    taken = REDUCERS[name]
    if colon and not taken:
        raise ValueError(f"{option} {text!r}: {name} takes nothing behind a colon")
    if name == "top-keys":
        if given and _integer(given, f"{option} top-keys") < 1:
            raise ValueError(f"{option} {text!r}: K is at least 1")
        return
    for word in given.split(",") if given and name == "received" else [given] if given else []:
        if word not in taken:
            what = "the classes of queries are" if taken == CLASSES else "it is one of"
            raise ValueError(f"{option} {text!r}: {what} {', '.join(taken)}")


def reducer_of(text: str, option: str = "--reducer") -> Any:
    """The reducer that an option names.

    Raises:
        ValueError: no such reducer, or an argument that it does not take.
    """
    check_reducer(text, option)
    from dlm_lens import recording as r

    known: Mapping[str, Callable[[str], Any]] = {
        "received": lambda given: r.ReceivedAttention(given.split(",") if given else "all"),  # type: ignore[arg-type]
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
    return known[name](given)


def read_lines(path: Path) -> list[Any]:
    r"""The prompts of a file: texts and chats.

    A line ends with \n alone (jsonlines.org): U+2028 and its like, at which `str.splitlines` cuts, are characters
    of a text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is no UTF-8, a line that is no prompt, or no line at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; --prompts takes a file of JSON lines")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 (byte {error.start}); JSON lines are") from None
    found = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            found.append(_prompt(text, f"{path} line {number}"))
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def _prompt(text: str, where: str) -> Any:
    try:
        line = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a prompt") from None
    except ValueError as error:
        raise ValueError(f"{where} is no JSON ({error})") from None
    if isinstance(line, dict) and isinstance(line.get("prompt"), str):
        return line["prompt"]
    if isinstance(line, dict) and isinstance(line.get("messages"), list) and line["messages"]:
        return line["messages"]
    raise ValueError(f'{where} is {shown(text)}; a line is {{"prompt": "..."}} or {{"messages": [...]}}')


def _integer(text: str, owner: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{owner} takes whole numbers, got {text!r}") from None
