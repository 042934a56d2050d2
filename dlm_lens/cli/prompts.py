"""Files of prompts for `dlm-lens record`: JSON lines."""

from pathlib import Path
from typing import Any

from dlm_lens.arguments import is_whole
from dlm_lens.files.json_objects import read_json_lines
from dlm_lens.printable import shown

FORM = '{"prompt": "..."}, {"messages": [...]} or {"input_ids": [...]}'
"""Of a line."""


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: texts, chats and token ids.

    Raises:
        FileNotFoundError: the file does not exist, or is a directory.
        ValueError: a file that is not UTF-8, a line that is no prompt, or no line at all.
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; --prompts takes a file of JSON lines")
    found = [_prompt(line, text, where) for where, text, line in read_json_lines(path, "a prompt", FORM)]
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def prompt_places(path: Path) -> list[str]:
    """Where each prompt of a file is: FILE line N."""
    return [where for where, _, _ in read_json_lines(path, "a prompt", FORM)]


def _prompt(line: Any, text: str, where: str) -> Any:
    if isinstance(line, dict) and isinstance(line.get("prompt"), str):
        return line["prompt"]
    if isinstance(line, dict) and isinstance(line.get("messages"), list) and line["messages"]:
        return line["messages"]
    if isinstance(line, dict) and isinstance(ids := line.get("input_ids"), list) and all(map(is_whole, ids)):
        return ids
    raise ValueError(f"{where} is {shown(text)}; a line is {FORM}")
