"""How many times longer the steps of a tokenizer.json can make a text: a bound, read before any step runs.

Each step of a normalizer may double a text, so that fifty of them, a file of a few kilobytes, ask for more memory
than there is, and the tokenizers library ends the process where it gets none.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from dlm_lens.files.json_objects import parse_json

MOST_GROWTH = 10_000
"""The most by which a tokenizer may multiply the characters of a text.

The bound of ALBERT's and XLNet's is 1,296, the highest of the shapes in tests/adapters/test_tokenizer_growth.py.
"""

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

_BARE: Mapping[str, Any] = MappingProxyType(
    {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    }
)  # fmt: skip
"""A tokenizer without tokens."""

_INNER = ("normalizers", "pretokenizers", "decoders", "processors")
"""Where a sequence holds its steps."""

_UNICODE: Mapping[str, int] = MappingProxyType(
    {
        "NFC": 3,
        "NFD": 4,
        "NFKC": 18,
        "NFKD": 18,
        "Lowercase": 2,
        "BertNormalizer": 24,
        "ByteLevel": 4,
        "Metaspace": 2,
    }
)
"""Steps before the model -> the most characters that they make of one.

Of one code point, the decompositions make at most 18 (U+FDFA), the canonical ones 4 and 3, lower case 2 (U+0130).
BERT's sets spaces around Chinese characters (3), removes accents (NFD, 4) and takes lower case (2). ByteLevel
writes a character per byte; Metaspace begins each piece with one, and each character may be a piece.
"""


def check_growth(path: Path) -> None:
    """Raise where the steps of a tokenizer.json could make a text very long.

    The bound is the product over the steps before the model, or of the decoder, of the most characters that each
    makes of one.

    Args:
        path: of the file.

    Raises:
        ValueError: naming the part of the file; or no JSON.
        Exception: steps that the tokenizers library does not take.
    """
    whole = parse_json(path.read_bytes())
    if not isinstance(whole, dict):
        raise ValueError(f"{path.name} is no JSON object")
    parts = _as_read({name: whole.get(name) for name in _PARTS})
    bounds = {"normalizer and pre_tokenizer": _product(parts, "normalizer") * _product(parts, "pre_tokenizer")}
    bounds |= {name: _product(parts, name) for name in ("decoder", "post_processor")}
    for name, growth in bounds.items():
        if growth > MOST_GROWTH:
            times = f"{growth:,.0f}" if growth < 1e15 else "more than 10^15"
            raise ValueError(f"its {name} can make a text {times} times as long; {MOST_GROWTH:,} is the most")


def _as_read(parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parts as the tokenizers library reads them: it also takes steps without a type, and lists for objects.

    The tokenizer has no tokens, so that no step runs.
    """
    found: Mapping[str, Any] = json.loads(Tokenizer.from_str(json.dumps({**_BARE, **parts})).to_str())
    return found


def _product(parts: Mapping[str, Any], part: str) -> float:
    return math.prod(_growth(step, part) for step in _steps(parts.get(part)))


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a part, in sequences of any depth."""
    left = [part]
    while left:
        step = left.pop()
        if step is not None:
            yield step
            left += [each for name in _INNER for each in step.get(name, ())]


def _growth(step: Mapping[str, Any], part: str) -> float:
    """The most characters that a step makes of one, at least 1."""
    kind = step.get("type")
    if kind == "Replace":
        return _replacing(step.get("pattern"), _length(step.get("content")))
    if kind == "Prepend":
        return 1 + _length(step.get("prepend"))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    if kind in ("BPEDecoder", "CTC"):
        # What they replace by a space: nothing is found before and after every character.
        name = "suffix" if kind == "BPEDecoder" else "word_delimiter_token"
        return 1 if _length(step.get(name)) else 3
    if kind == "TemplateProcessing":
        return max(1, *(_copies(step.get(name)) for name in ("single", "pair")))
    return 1 if part == "decoder" else _UNICODE.get(str(kind), 1)


def _length(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0


def _replacing(pattern: Any, content: int) -> float:
    """The growth where each match of a pattern becomes a text of `content` characters."""
    least = _least_match(pattern)
    # Matches of nothing are found before and after every character, which stays.
    return max(1, content / least) if least else 1 + 2 * content


def _least_match(pattern: Any) -> int:
    """The fewest characters of a match: all of a string, 1 of a regular expression; 0 where it may be none."""
    if not isinstance(pattern, dict):
        return 0
    if isinstance(pattern.get("String"), str):
        return len(pattern["String"])
    text = pattern.get("Regex")
    return int(isinstance(text, str) and _takes_a_character(text))


_ONE = r"(?:\\[pP]\{\^?\w+\}|\\[sSdDwW]|\\[^\w\s]|\[(?:\\.|[^\]\\\[])+\]|[^\\\[\](){}|*+?^$])"
"""A character, a class of them or a shorthand."""

_NEEDS_ONE = re.compile(rf"{_ONE}(?:\+|\{{[1-9]\d*(?:,\d*)?\}})?(?:{_ONE}(?:[+*?]|\{{\d+(?:,\d*)?\}})?|\$)*")
"""Expressions that begin with a character that must be there, without groups and alternatives."""


def _takes_a_character(regex: str) -> bool:
    """Whether every match of a regular expression surely has a character; False where that is not plain to see."""
    return len(regex) <= 1000 and _NEEDS_ONE.fullmatch(regex.removeprefix("^")) is not None


def _longest_replacement(charsmap: Any) -> int:
    """Characters of the longest text that a compiled map of SentencePiece has: a table of texts after its trie."""
    if not isinstance(charsmap, str):
        return 1
    try:
        content = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))


def _copies(template: Any) -> int:
    pieces = template if isinstance(template, list) else []
    return sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)
