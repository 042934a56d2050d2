"""What the tests of recorded requests share."""

import json
from pathlib import Path
from typing import Any

import torch

from dlm_lens.recording import ReceivedAttention, ValueNorm

WITHOUT_MASKS = (ReceivedAttention(("all", "unmasked", "prompt", "block"), min_viewers=1), ValueNorm())


ARGUMENTS: dict[str, Any] = {
    "loglikelihood": lambda one: (one, " w1 w2"),
    "loglikelihood_rolling": lambda one: (one,),
    "generate_until": lambda one: (one, {"until": []}),
}


def equal(found: Any, wanted: Any) -> None:
    """Recordings of the same numbers, bit by bit."""
    assert {*found.specs} == {*wanted.specs}
    for name in wanted.specs:
        a, b = getattr(found, name), getattr(wanted, name)
        assert a.isfinite().any(), name
        assert torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)), name
    for name in ("canvases", "masked", "unmasked", "attention_mask", "spans", "blocks", "prompt_length"):
        a, b = getattr(found.run, name), getattr(wanted.run, name)
        assert a.equal(b) if isinstance(a, torch.Tensor) else a == b, name
    assert torch.equal(found.answer, wanted.answer)


def lines(directory: Path) -> list[dict[str, Any]]:
    """The index, without its first line."""
    return [json.loads(line)["answer"] for line in (directory / "requests.jsonl").read_text().splitlines()[1:]]
