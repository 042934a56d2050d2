"""Token ids as text: exactly what a token holds, and how it is shown wherever people read it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dlm_lens.printable import escaped, is_visible

SHOWN_LENGTH = 40
"""Most characters of a token in a table, a terminal or a page."""

SPACE, NOTHING, MORE = "␣", "∅", "…"
"""How a space, a token without text, and the rest of a long token are shown."""

FRAGMENT = re.compile(r"(?:<0x[0-9A-F]{2}>)+")
"""Bytes that are no character on their own, as `TokenTexts.exact` writes them."""


def shown(text: str, length: int | None = SHOWN_LENGTH) -> str:
    r"""A token's text as it is shown in every medium: on one line, all of it visible, nothing of it a command.

    A space is ␣, also a leading one; a line break \n, a tab \t; everything else that is not printable (control
    characters, marks that turn the direction of writing, lone surrogates) its code, such as \u001b. No text at all
    is ∅; longer text than `length` characters ends in ….
    """
    visible = "".join(_visible(text, i) for i in range(len(text) if length is None else min(len(text), length + 1)))
    cut = length is not None and (len(visible) > length or len(text) > length)
    return (visible[: (length or 0) - 1] + MORE if cut else visible) or NOTHING


def _visible(text: str, index: int) -> str:
    if text[index] == " ":
        return SPACE
    return text[index] if is_visible(text, index) else escaped(text[index])


class TokenTexts:
    """Text of token ids, each decoded once: the id without a tokenizer, "sink(i)" for learned sink tokens.

    Args:
        tokenizer: the model's, a `StoredTokenizer`, anything with `decode(ids)`; None if there is none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._pieces = _Pieces.of(tokenizer)

    def __call__(self, token: int) -> str | int:
        """One token as tables and terminals show it; the id itself without a tokenizer."""
        if token < 0:
            return f"sink({-1 - token})"
        return token if self._tokenizer is None else shown(self.exact(token))

    def label(self, token: int, length: int | None = SHOWN_LENGTH) -> str:
        """One token as a label of at most `length` characters; its id without a tokenizer."""
        if token < 0 or self._tokenizer is None:
            return str(self(token))
        return shown(self.exact(token), length)

    def exact(self, token: int) -> str:
        """What a token holds, with its spaces; bytes that are no character as <0xE4>, an unknown id as <id>.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError(f"there is no tokenizer to decode token {token}")
        if token not in self._known:
            self._known[token] = self._exact(token)
        return self._known[token]

    def _exact(self, token: int) -> str:
        if isinstance(self._tokenizer, StoredTokenizer):
            return self._tokenizer.exact(token)
        if self._pieces is not None and (text := self._pieces.text(token)) is not None:
            return text
        return str(self._tokenizer.decode([token]))


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The entries of a tokenizer's vocabulary, which hold what `decode` of one id does not tell.

    `decode` makes bytes that are no character U+FFFD, and leaves leading spaces out in some tokenizers.

    Args:
        tokenizer: of transformers.
        bytewise: an entry is bytes, each written as a character of GPT-2's table.
        metaspace: an entry has ▁ for a space, and <0x0A> for a byte, which is a character if it is ASCII.
        added: ids of added tokens, whose entry is their text.
    """

    tokenizer: Any
    bytewise: bool
    metaspace: bool
    added: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any) -> "_Pieces | None":
        """The pieces of a tokenizer that has some."""
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state: bytes = b"" if decoder is None else decoder.__getstate__()
        bytewise = b'"ByteLevel"' in state or isinstance(getattr(tokenizer, "byte_decoder", None), dict)
        metaspace = "\u2581".encode() in state or b"\\u2581" in state
        if not bytewise and not metaspace:
            return None
        return cls(tokenizer, bytewise, metaspace, frozenset(getattr(tokenizer, "added_tokens_decoder", ())))

    def text(self, token: int) -> str | None:
        """The text of an id; None where the pieces do not tell it."""
        if token in self.added:
            return None
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return f"<{token}>"
        if self.bytewise:
            table = _byte_of()
            return _with_fragments(bytes(table[c] for c in piece)) if all(c in table for c in piece) else None
        if len(piece) == len("<0x0A>") and FRAGMENT.fullmatch(piece):
            return _with_fragments(bytes([int(piece[3:5], 16)]))  # a byte of ASCII is a character
        return str(piece).replace("\u2581", " ")


def _with_fragments(data: bytes) -> str:
    """UTF-8 as text, with every byte that is not part of a whole character as <0xE4>."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)


@cache
def _byte_of() -> Mapping[str, int]:
    """GPT-2's table of a printable character per byte, the other way round."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, eq=False)
class StoredTokenizer:
    """Decodes the token ids whose text a recording stores; other ids by the model's tokenizer, or as <id>.

    Args:
        words: the text of every id that occurs, as `TokenTexts.exact` gives it.
        all_special_ids: those among them that `skip_special_tokens` leaves out.
        mask_token_id: of [MASK], if it is among them.
        eos_token_id: that ends a text, if it is among them.
        between: the separator of two tokens: a space for tokenizers of whole words.
        strip: the first token's leading space is left out.
        fallback: the model's tokenizer, for ids that were not stored; None if it is not there.
    """

    words: Mapping[int, str]
    all_special_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    between: str = ""
    strip: bool = False
    fallback: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, tokenizer: Any, words: Mapping[int, str]) -> "StoredTokenizer":
        """What has to be stored of a tokenizer beside the words, to decode them as it does."""
        if isinstance(tokenizer, cls):
            return cls(words, **tokenizer.facts())
        special = tuple(sorted(words.keys() & set(getattr(tokenizer, "all_special_ids", ()))))
        plain = [token for token in words if token not in special and FRAGMENT.search(words[token]) is None]
        return cls(
            words,
            special,
            getattr(tokenizer, "mask_token_id", None),
            getattr(tokenizer, "eos_token_id", None),
            " " if any(_blank_between(tokenizer, token, words[token]) for token in plain[:8]) else "",
            any(words[i][:1] == " " != str(tokenizer.decode([i]))[:1] for i in plain if words[i].strip()),
        )

    @classmethod
    def read(cls, words: Mapping[int, str], facts: Mapping[str, Any] | None) -> "StoredTokenizer":
        """From a file. An older file has the texts alone; tokens without any leading space are then whole words."""
        if facts is None:
            return cls(words, between="" if any(word[:1] == " " for word in words.values()) else " ")
        return cls(words, **{**facts, "all_special_ids": tuple(facts["all_special_ids"])})

    def facts(self) -> dict[str, Any]:
        """What a file holds beside the words."""
        names = ("all_special_ids", "mask_token_id", "eos_token_id", "between", "strip")
        return {name: getattr(self, name) for name in names}

    def exact(self, token: int) -> str:
        """The text of one id."""
        if token in self.words:
            return self.words[token]
        return f"<{token}>" if self.fallback is None else TokenTexts(self.fallback).exact(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """The texts, joined as the tokenizer joins them; bytes of several tokens make characters again."""
        special = frozenset(self.all_special_ids) if skip_special_tokens else frozenset()
        text = self.between.join(self.exact(int(i)) for i in ids if int(i) not in special)
        text = text[1:] if self.strip and text[:1] == " " else text
        return FRAGMENT.sub(
            lambda found: bytes.fromhex(re.sub("<0x|>", "", found[0])).decode("utf-8", "replace"), text
        )


def _characters(fragments: re.Match[str]) -> str:
    return bytes.fromhex(fragments[0].replace("<0x", "").replace(">", "")).decode("utf-8", "replace")


def merged(tokenizers: Sequence[Any]) -> Any:
    """The tokenizer of several recordings of one model: of stored ones the words of all."""
    first = tokenizers[0]
    if not all(isinstance(one, StoredTokenizer) for one in tokenizers):
        return first
    words = {i: word for one in tokenizers for i, word in one.words.items()}
    special = tuple(sorted({i for one in tokenizers for i in one.all_special_ids}))
    return StoredTokenizer(words, **{**first.facts(), "all_special_ids": special}, fallback=first.fallback)


def _blank_between(tokenizer: Any, token: int, text: str) -> bool:
    """Whether decoding puts a space between two tokens that is part of neither."""
    return bool(text) and text[:1] != " " and str(tokenizer.decode([token, token])) == f"{text} {text}"


def tokenizer_of(run: Any, model: Any) -> Any:
    """The tokenizer of a run: its own; of a recording the stored words, else the model's.

    Args:
        run: a `DenoisingRun`.
        model: the model that reads it.
    """
    own, models = run.tokenizer, getattr(model, "tokenizer", None)
    if isinstance(own, StoredTokenizer) and own.fallback is None and models is not None:
        return StoredTokenizer(own.words, **own.facts(), fallback=models)
    return models if own is None else own
