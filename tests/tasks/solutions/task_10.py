"""Two recordings on the disk, one of them interrupted and continued."""

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import dlm_lens as dl
from tests.tasks.solutions import PROMPTS

WRONG: tuple[dict[str, Any], ...] = (
    {"detector": "above-mean:2"},
    {"exchanged": True},
    {"patterns": True},
    {"length": 8},
    {"again": True},
    {"another": True},
)


def solve(
    detector: Any = "above-mean:3",
    exchanged: bool = False,
    patterns: bool = False,
    length: int = 12,
    again: bool = False,
    another: bool = False,
) -> dict[str, Any]:
    answer: dict[str, Any] = {"directories": {}, "left": -1}
    for name in ("toy", "toy-ar"):
        mistaken = name == "toy"  # one of the two directories is enough
        rec, to, left = recorded(name, length, patterns and mistaken, again and mistaken)
        if name == "toy":
            answer["left"] = left
        shares = {}
        for scale in ("relative", "column_sums"):
            sinks = dl.find_sinks(dl.received_of(rec), detector, relative=scale == "relative")
            shares[scale] = float(sinks.is_sink.any(-1).double().mean())
        if exchanged:
            shares = {"relative": shares["column_sums"], "column_sums": shares["relative"]}
        answer[name] = shares
        if another and mistaken:  # the directory of another recording: the prompts in another order
            _, to, _ = recorded(name, length, patterns, again, reverse=True)
        answer["directories"][name] = str(to)
    return answer


@functools.cache
def recorded(name: str, length: int, patterns: bool, again: bool, reverse: bool = False) -> tuple[Any, Path, int]:
    """A recording of all prompts, its directory, and its passes, for toy those after the interruption."""
    model, to = dl.load(name), Path(tempfile.mkdtemp()) / name
    prompts = PROMPTS[::-1] if reverse else PROMPTS
    settings: dict[str, Any] = {"gen_length": length, "seed": 0, "batch_size": 4}
    settings |= {"block_length": length} if name == "toy" else {"use_cache": False}
    reducers = [dl.ReceivedAttention(), *([dl.recording.AttentionPattern()] if patterns else [])]
    if name == "toy" and not reverse:
        with counted(model, stop_after=20), suppress(KeyboardInterrupt):
            dl.record(model, prompts, reducers, to=to, **settings)
        to = to.parent / "afresh" if again else to
    with counted(model) as passes:
        rec = dl.record(model, prompts, reducers, to=to, **settings)
    return rec, to, len(passes)


@contextmanager
def counted(model: Any, stop_after: int | None = None) -> Iterator[list[None]]:
    """Counts forward passes; the one after `stop_after` of them is interrupted."""
    passes: list[None] = []

    def count(module: torch.nn.Module, args: Any, output: Any) -> None:
        if len(passes) == stop_after:
            raise KeyboardInterrupt
        passes.append(None)

    handle = model.model.norm.register_forward_hook(count)
    try:
        yield passes
    finally:
        handle.remove()
