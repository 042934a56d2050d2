"""`check(number, answer)`: what is wrong with an answer to a task, from an independent computation."""

import importlib
from collections.abc import Callable
from typing import Any

TASKS = tuple(range(1, 13))


def check(number: int, answer: Any) -> list[str]:
    """What is wrong with an answer; nothing if it is right.

    Raises:
        ValueError: there is no such task.
    """
    if number not in TASKS:
        raise ValueError(f"there is no task {number}; tasks are {TASKS[0]} to {TASKS[-1]}")
    if not isinstance(answer, dict):
        return [f"the answer is a {type(answer).__name__}; it must be a JSON object with the fields of the page"]
    task: Callable[[dict[str, Any]], list[str]]
    task = importlib.import_module(f"tests.tasks.checks.task_{number:02d}").check
    return task(answer)
