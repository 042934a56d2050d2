"""Documents and scorer of the shipped tasks, for the YAML files beside this one.

The sentences are those of the embedded models' language: word problems with a chain of thought, lists, look-ups.
"""

import json
from pathlib import Path
from typing import Any

import datasets


def arithmetic(**_metadata: Any) -> dict[str, Any]:
    """Word problems of one to four steps."""
    return _split("problems.jsonl", "A")


def lists(**_metadata: Any) -> dict[str, Any]:
    """Lists to sort, reverse or copy."""
    return _split("problems.jsonl", "L")


def facts(**_metadata: Any) -> dict[str, Any]:
    """Look-ups of a colour or a place."""
    return _split("problems.jsonl", "F")


def problems(**_metadata: Any) -> dict[str, Any]:
    """All of them."""
    return _split("problems.jsonl")


def choices(**_metadata: Any) -> dict[str, Any]:
    """Look-ups with four answers to choose from."""
    return _split("choices.jsonl")


def exact_match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether what stands between the last "answer" and the next "." is the target."""
    return {"exact_match": float(final_answer(results[0]) == doc["target"])}


def final_answer(text: str) -> str | None:
    """The words between the last "answer" and the next ".", or None where a text has no complete answer."""
    _, word, tail = f" {text} ".rpartition(" answer ")
    answer, stop, _rest = f" {tail}".partition(" . ")
    return answer.strip() if word and stop else None


def before_target(doc: dict[str, Any]) -> str:
    """The prompt and the chain of thought, up to the last "answer"."""
    return f"{doc['prompt']} {doc['answer'].rpartition(' ' + doc['target'] + ' .')[0]}"


def last_words(doc: dict[str, Any]) -> str:
    """The target, as it ends the text."""
    return f" {doc['target']} ."


def whole(doc: dict[str, Any]) -> str:
    """The text as it stood in training."""
    return f"{doc['prompt']} {doc['answer']}"


def _split(name: str, task: str | None = None) -> dict[str, Any]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {"test": datasets.Dataset.from_list([line for line in lines if task in (None, line.get("task"))])}
