from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from dlm_lens.testing import tiny


def ask(kind: str, *arguments: tuple[Any, ...], same_document: bool = False) -> list[Instance]:
    """Requests as the harness makes them; one document each, or all of one."""
    return [
        Instance(kind, {}, one, 0, metadata=("task", 0 if same_document else number, 1))
        for number, one in enumerate(arguments)
    ]


def words(*ids: int) -> str:
    return " ".join(f"w{one}" for one in ids)


def texts(count: int, low: int, high: int, seed: int = 0) -> list[str]:
    """Texts of unequal length in the tiny models' language."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        found.append(words(*torch.randint(0, 60, (length,), generator=generator).tolist()))
    return found


@contextmanager
def counted(model: Any):
    """Counts the rows of every forward pass of the network inside the block."""
    rows: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows.append(len(ids))

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


@pytest.fixture(scope="session")
def llada() -> Any:
    return tiny("llada", sampler_defaults={"steps": 16, "gen_length": 16, "block_length": 4})


@pytest.fixture(scope="session")
def causal() -> Any:
    return tiny("causal", sampler_defaults={"gen_length": 16})


def ids(model: Any, text: str) -> list[int]:
    return list(model.tokenizer(text)["input_ids"])


def flat(batches: Any) -> Sequence[Any]:
    return [one for batch in batches for one in batch]
