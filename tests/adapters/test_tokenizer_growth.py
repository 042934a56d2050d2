"""A tokenizer.json whose steps lengthen a text again and again is refused before they run; real shapes pass."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dlm_lens.adapters.tokenizer_files import load_tokenizer
from dlm_lens.adapters.tokenizer_growth import MOST_GROWTH, _as_read, _product, check_growth

INNER = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders",
    "post_processor": "processors",
}  # fmt: skip
EMPTY = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
}  # fmt: skip


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(*texts: str) -> str:
    """A compiled map with an empty trie and these texts."""
    return base64.b64encode(bytes(4) + b"\0".join(text.encode() for text in texts) + b"\0").decode()


def metaspace(mark: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": mark, "prepend_scheme": "always", "split": True}


NFKC_MAP = {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "صلى الله عليه وسلم", " ")}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
DECODED_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BERT = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
    "lowercase": True,
}  # fmt: skip
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "pair": [SEQUENCE, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
ONCE = TEMPLATE | {"single": [SEQUENCE]}


def sequence(part: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {part: {"type": "Sequence", INNER[part]: list(steps)}}


REAL = {
    "Llama": sequence("normalizer", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
    | sequence("decoder", replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, DECODED_STRIP),
    "Gemma": {"normalizer": replace(" ", "▁")} | sequence("decoder", replace("▁", " "), {"type": "ByteFallback"}),
    "Qwen": {"normalizer": {"type": "NFC"}, "decoder": BYTES} | sequence("pre_tokenizer", SPLIT, BYTES),
    "Llama 3": sequence("pre_tokenizer", SPLIT, BYTES) | {"decoder": BYTES},
    "T5": sequence("normalizer", NFKC_MAP, STRIP, replace(" {2,}", "▁", "Regex"))
    | {"pre_tokenizer": metaspace("▁"), "decoder": metaspace("▁"), "post_processor": ONCE},
    "ALBERT": sequence(
        "normalizer", replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Lowercase"}, NFKC_MAP, replace(" {2,}", " ", "Regex"),
    ) | {"pre_tokenizer": metaspace("▁")},
    "BERT": {"normalizer": BERT, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    "CLIP": sequence("normalizer", {"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"})
    | sequence("pre_tokenizer", SPLIT, BYTES),
    "GPT-2": {"pre_tokenizer": BYTES, "decoder": BYTES},
    "moses": sequence("normalizer", *(replace(mark, '"', "Regex") for mark in ["[«»]", r"[`\-]", "„"] * 20)),
    "BPE": {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}},
    "CTC": {"decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_shapes_of_real_tokenizers_pass(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(EMPTY | REAL[name]))
    check_growth(path)
    parts = _as_read(REAL[name])
    before = _product(parts, "normalizer") * _product(parts, "pre_tokenizer")
    assert before == {
        "Llama": 2, "Gemma": 1, "Qwen": 12, "Llama 3": 4, "T5": 36, "ALBERT": 1296, "BERT": 24, "CLIP": 24,
        "GPT-2": 4, "moses": 1, "BPE": 1, "CTC": 1,
    }[name]  # fmt: skip


GROWING: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "doubling": ("normalizer", [replace("a", "aa")], "a"),
    "nothing": ("normalizer", [replace("", "a")], "a"),
    "lookahead": ("normalizer", [replace("(?=a)", "a", "Regex")], "a"),
    "optional": ("normalizer", [replace("b*", "a", "Regex")], "a"),
    "alternative": ("normalizer", [replace("a|", "aa", "Regex")], "a"),
    "prepended": ("normalizer", [{"type": "Prepend", "prepend": "aaaa"}], "a"),
    "bytes": ("normalizer", [{"type": "ByteLevel"}], "é"),
    "case": ("normalizer", [replace("i", "İ"), {"type": "Lowercase"}, replace("\u0307", "i")], "i"),
    "decomposed": ("normalizer", [replace("ا", "ﷺ"), {"type": "NFKD"}], "ا"),
    "byte pieces": ("pre_tokenizer", [BYTES], "é"),
    "marked pieces": ("pre_tokenizer", [metaspace("▁"), SPLIT, metaspace("x"), SPLIT], "ab"),
    "decoded": ("decoder", [replace("a", "aa")], "a"),
}


def made(part: str, steps: list[dict[str, Any]], text: str) -> int:
    """Characters that the tokenizers library makes of a text."""
    tokenizer: Any = Tokenizer.from_str(json.dumps(EMPTY | sequence(part, *steps)))
    if part == "normalizer":
        return len(tokenizer.normalizer.normalize_str(text))
    if part == "pre_tokenizer":
        return sum(len(piece) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return len(tokenizer.decode([0]))


@pytest.mark.parametrize("name", GROWING)
def test_the_bound_holds_and_many_steps_are_refused(name: str, tmp_path: Path) -> None:
    part, steps, text = GROWING[name]
    for repeated in (1, 2, 3):
        bound = _product(_as_read(sequence(part, *steps * repeated)), part)
        assert len(text) < made(part, steps * repeated, text) <= bound * len(text)
    path = tmp_path / "tokenizer.json"
    nested = {"type": "Sequence", INNER[part]: steps * 20}
    path.write_text(json.dumps(EMPTY | sequence(part, nested, *steps * 20)))
    sentence = (
        rf"the tokenizer of {re.escape(str(tmp_path))} cannot be read \(its .*{part}.* can make a text .* times"
    )
    with pytest.raises(ValueError, match=sentence):
        load_tokenizer(str(tmp_path), {})


def test_one_step_may_be_too_much(tmp_path: Path) -> None:
    path, long = tmp_path / "tokenizer.json", "a" * (MOST_GROWTH + 1)
    for part, step in (
        ("normalizer", replace("a", long)),
        ("normalizer", {"type": "Prepend", "prepend": long}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap("a", long)}),
        ("post_processor", TEMPLATE | {"single": [SEQUENCE] * (MOST_GROWTH + 1)}),
    ):
        path.write_text(json.dumps(EMPTY | {part: step}))
        with pytest.raises(ValueError, match=r"can make a text 10,00[12] times as long; 10,000 is the most"):
            check_growth(path)


@pytest.mark.parametrize(
    "step",
    [
        {"pattern": {"String": "a"}, "content": "aa"},
        [{"String": "a"}, "aa"],
        {"type": "unknown", "prepend": "a"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa", "normalizers": [{"type": "NFC"}]},
    ],
)
def test_other_forms_of_a_step_that_the_library_takes_count_too(step: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    assert made("normalizer", [step], "a") == 2
    path.write_text(json.dumps(EMPTY | sequence("normalizer", *[step] * 40)))
    with pytest.raises(ValueError, match="can make a text 1,099,511,627,776 times as long"):
        check_growth(path)


def test_a_file_that_python_cannot_read_does_not_pass(tmp_path: Path) -> None:
    """The tokenizers library skips a number of too many digits for Python's parser."""
    whole = json.dumps(EMPTY | sequence("normalizer", *[replace("a", "aa")] * 40))
    (tmp_path / "tokenizer.json").write_text(f'{whole[:-1]}, "more": {"1" * 5000}}}')
    with pytest.raises(ValueError, match=r"the tokenizer of .* cannot be read"):
        load_tokenizer(str(tmp_path), {})


@pytest.mark.parametrize(
    "regex", ["a+", "^a", r"\s{2,}", r"\p{Mn}", "[^a-z]", "ab*", r"\.$", "a?b", "a{0,3}", "(a|b)", ""]
)
def test_what_takes_a_character_is_read_from_plain_expressions(regex: str) -> None:
    grown = _product(_as_read({"normalizer": replace(regex, "x", "Regex")}), "normalizer")
    assert grown == (1 if regex in ("a+", "^a", r"\s{2,}", r"\p{Mn}", "[^a-z]", "ab*", r"\.$") else 3)
