import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval.tasks as harness_tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from dlm_lens.evaluation import evaluation
from dlm_lens.evaluation.evaluation import TASKS
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


def changed_task(folder: Path, name: str, *changes: tuple[str, str]) -> str:
    """A shipped task with lines of its file changed, in a folder of its own; returns its path."""
    for file in ("toy.py", "problems.txt"):
        shutil.copy(TASKS / file, folder)
    text = (TASKS / f"{name}.yaml").read_text()
    for before, after in (("tag: toy_problems\n", ""), (f"task: {name}", f"task: {name}_changed"), *changes):
        assert before in text or before.startswith("tag")
        text = text.replace(before, after)
    (folder / f"{name}_changed.yaml").write_text(text)
    return str(folder / f"{name}_changed.yaml")


HARNESS = (
    "arc", "bbh", "benchmarks", "ceval", "cmmlu", "gpqa", "gsm8k", "hellaswag", "humaneval", "lambada", "mbpp",
    "minerva_math", "mmlu", "piqa", "race", "siqa", "truthfulqa", "winogrande",
)  # fmt: skip
"""Folders of the harness's tasks that tests name; all 14,000 take seconds to index."""


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the harness's own tasks only those in `HARNESS`."""
    monkeypatch.setattr(evaluation, "_manager", _few)


@cache
def _few(include_defaults: bool) -> Any:
    folders = [Path(harness_tasks.__file__).parent / name for name in HARNESS] if include_defaults else []
    return TaskManager(include_path=[TASKS, *folders], include_defaults=False)


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


class KilledError(Exception):
    pass


def killed_after(model: Any, forwards: int) -> Any:
    """A handle that kills the process, as it were, in the forward after so many."""
    left = [forwards]

    def count(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KilledError

    return model.get_decoder().register_forward_pre_hook(count)


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
