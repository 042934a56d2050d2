"""Two recordings on the disk, one of them interrupted and continued."""

import tempfile
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
)


def solve(
    detector: Any = "above-mean:3",
    exchanged: bool = False,
    patterns: bool = False,
    length: int = 12,
    again: bool = False,
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    answer: dict[str, Any] = {"directories": {}, "left": 36}
    for name in ("toy", "toy-ar"):
        model, to = dl.load(name), folder / name
        settings: dict[str, Any] = {"gen_length": length, "seed": 0, "batch_size": 4}
        settings |= {"block_length": length} if name == "toy" else {"use_cache": False}
        reducers = [dl.ReceivedAttention(), *([dl.recording.AttentionPattern()] if patterns else [])]
        if name == "toy":
            interrupted(model, reducers, to, settings)
            before = len(list(to.rglob("step-*.safetensors")))
            answer["left"] = 36 if again else 3 * length - before
        rec = dl.record(model, PROMPTS, reducers, to=to, **settings)
        shares = {}
        for scale in ("relative", "column_sums"):
            sinks = dl.find_sinks(dl.received_of(rec), detector, relative=scale == "relative")
            shares[scale] = float(sinks.is_sink.any(-1).double().mean())
        if exchanged:
            shares = {"relative": shares["column_sums"], "column_sums": shares["relative"]}
        answer[name] = shares
        answer["directories"][name] = str(to)
    return answer


def interrupted(model: Any, reducers: Any, to: Path, settings: dict[str, Any]) -> None:
    """Record until 20 forward passes are finished."""
    passes = 0

    def stop(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > 20:
            raise KeyboardInterrupt

    handle = model.model.norm.register_forward_hook(stop)
    try:
        dl.record(model, PROMPTS, reducers, to=to, **settings)
    except KeyboardInterrupt:
        pass
    finally:
        handle.remove()
