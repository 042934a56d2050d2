"""Documents and scorer of the shipped English word problems, for the YAML file beside this one."""

import json
import re
from pathlib import Path
from typing import Any

import datasets


def arithmetic(**_metadata: Any) -> dict[str, Any]:
    """Word problems of one step, with the beginning of the answer."""
    text = (Path(__file__).parent / "english_arithmetic.jsonl").read_text(encoding="utf-8")
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in text.splitlines()])}


def exact_match(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the first whole number of the answer is the target."""
    return {"exact_match": float(first_number(results[0]) == doc["target"])}


def first_number(text: str) -> str | None:
    """The first whole number of a text, or None."""
    found = re.search(r"\d+", text)
    return found.group() if found else None
