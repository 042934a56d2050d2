"""The synthetic language of `experiments/toy`, as training data and as tests."""

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]

Tasks = Literal["A", "L", "F"]
TASKS: tuple[Tasks, ...] = ("A", "L", "F")
"""Word problems, lists, look-ups."""


def toy(module: str) -> Any:
    """A module of `experiments/toy`, which is in the repository and in no wheel.

    Raises:
        ValueError: this is no clone.
    """
    if not (ROOT / "experiments" / "toy" / "language.py").is_file():
        raise ValueError(
            f"{ROOT} holds no experiments/toy, whose language the miniature is trained on; run it in a clone of "
            "the repository (`pip install -e .`)"
        )
    if str(ROOT) not in sys.path:
        # The console script does not search the directory it is called from.
        sys.path.append(str(ROOT))
    return import_module(f"experiments.toy.{module}")


@cache
def training_text(rows: int) -> tuple[Any, frozenset[str]]:
    """The corpus, a `Source` of dlm_lens.training, and its prompts."""
    found: tuple[Any, frozenset[str]] = toy("corpus").build_corpus(rows)
    return found


@cache
def tests(task: Tasks, count: int, rows: int) -> tuple[Any, ...]:
    """Examples of a task whose prompts are not in the training text of `rows` sequences."""
    corpus = toy("corpus")
    found: tuple[Any, ...] = corpus.held_out(task, count, training_text(rows)[1], corpus.TEST_SEED).examples
    return found


def validation(count: int, rows: int) -> Any:
    """Held-out text as a corpus, the tasks in the proportions of the training text."""
    weights = toy("language").TASK_WEIGHTS
    return encoded([one for task in TASKS for one in tests(task, max(1, round(count * weights[task])), rows)])


def encoded(examples: Sequence[Any]) -> Any:
    """Examples as a corpus of `experiments/toy`."""
    import torch

    corpus, tokenizer = toy("corpus"), toy("tokenizer").build_tokenizer()
    texts = [tokenizer(one.text)["input_ids"] for one in examples]
    prompts = [len(tokenizer(one.prompt)["input_ids"]) for one in examples]
    length = toy("tokenizer").SEQUENCE_LENGTH
    tokens = torch.full((len(texts), length), tokenizer.eos_token_id, dtype=torch.uint8)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.uint8)
    sizes = [torch.tensor(values, dtype=torch.uint8) for values in (prompts, list(map(len, texts)))]
    return corpus.Corpus(tokens, *sizes)
