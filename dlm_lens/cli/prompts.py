"""Files of prompts for `dlm-lens record`: JSON lines."""

import json
from pathlib import Path
from typing import Any

from dlm_lens.printable import shown


def read_prompts(path: Path) -> list[Any]:
    r"""The prompts of a file: texts and chats.

    A line ends with \n alone (jsonlines.org): U+2028 and similar characters, at which `str.splitlines` cuts, belong
    to the text.

    Raises:
        FileNotFoundError: the file does not exist, or is a directory.
        ValueError: a file that is not UTF-8, a line that is no prompt, or no line at all.
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; --prompts takes a file of JSON lines")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}), the encoding of JSON lines") from None
    found = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            found.append(_prompt(text, f"{path} line {number}"))
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def _prompt(text: str, where: str) -> Any:
    try:
        line = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be a prompt") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    if isinstance(line, dict) and isinstance(line.get("prompt"), str):
        return line["prompt"]
    if isinstance(line, dict) and isinstance(line.get("messages"), list) and line["messages"]:
        return line["messages"]
    raise ValueError(f'{where} is {shown(text)}; a line is {{"prompt": "..."}} or {{"messages": [...]}}')
