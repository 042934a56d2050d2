"""Classes of tokens: punctuation, digits, words, masks and others, by the token's id or text."""

import unicodedata
from collections.abc import Collection, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.sampling.token_text import FRAGMENT, TokenTexts

TOKEN_CLASSES = (
    "mask", "end of text", "special", "learned sink", "whitespace", "punctuation", "digits", "words", "other",
)  # fmt: skip
"""The classes exclude each other; the first that fits counts."""

OF_TEXT = frozenset(TOKEN_CLASSES) - {"mask", "end of text", "learned sink"}
"""Classes that only a tokenizer can tell."""


def class_of(text: str) -> str:
    """The class of a token's text: "whitespace", "punctuation" (symbols too), "digits", "words" or "other".

    By the Unicode categories of its characters, without surrounding blanks (tokens of LLaDA and Qwen have a leading
    one): all punctuation (P) or symbols (S); all numbers (N); at least one letter (L); none of these, or
    bytes that are not a character.
    """
    if FRAGMENT.fullmatch(text):
        return "other"
    stripped = text.strip(" \t\r\n\u2581\u0120\u010a")
    if not stripped:
        return "whitespace" if text else "other"
    kinds = {unicodedata.category(character)[0] for character in stripped}
    if kinds <= {"P", "S"}:
        return "punctuation"
    if kinds == {"N"}:
        return "digits"
    return "words" if "L" in kinds else "other"


class TokenClasses:
    """The class of token ids, one of `TOKEN_CLASSES`; every id is looked up once.

    "mask": the mask token, and every open position, whatever it holds (`among`). "end of text": ids that
    end a text or a turn. "special": the tokenizer's other special tokens. "learned sink": negative ids, as results
    number learned sink tokens. By text, the others.

    Args:
        tokenizer: the model's; None if there is none.
        mask_token_id: the mask token, if it is not the tokenizer's.
        eos_token_ids: ids that end a text or a turn, besides the tokenizer's.
    """

    def __init__(
        self, tokenizer: Any, mask_token_id: int | None = None, eos_token_ids: Iterable[int | None] = ()
    ) -> None:
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.masks = _ids(mask_token_id, getattr(tokenizer, "mask_token_id", None))
        self.ends = _ids(*eos_token_ids, getattr(tokenizer, "eos_token_id", None))
        self._known: dict[int, str] = {}

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> "TokenClasses":
        """Those of a model, with the special ids of its config."""
        ids = SpecialIds.of(config)
        return cls(tokenizer, ids.mask, ids.stops)

    def __call__(self, token: int) -> str:
        """The class of one id.

        Raises:
            ValueError: there is no tokenizer, and the id is neither a mask nor an end of text.
        """
        if token not in self._known:
            self._known[token] = self._class_of(token)
        return self._known[token]

    def _class_of(self, token: int) -> str:
        if token < 0:
            return "learned sink"
        if token in self.masks:
            return "mask"
        if token in self.ends:
            return "end of text"
        if token in self._special:
            return "special"
        if self._texts is None:
            raise ValueError(f"there is no tokenizer to tell the class of token {token}")
        return class_of(self._texts.exact(token))

    def among(
        self, tokens: Int[Tensor, "*axes"], masked: Bool[Tensor, "*axes"], classes: Collection[str]
    ) -> Bool[Tensor, "*axes"]:
        """Which tokens belong to the classes; a masked position is "mask", whatever it holds.

        Raises:
            ValueError: there is no tokenizer, and one of the classes depends on the text of the tokens.
        """
        if self._texts is None and not OF_TEXT.isdisjoint(classes):
            told = ", ".join(one for one in classes if one in OF_TEXT)
            raise ValueError(f"there is no tokenizer to tell tokens of the classes {told}")
        known = {*self.masks, *self.ends} if self._texts is None else None
        ids = [i for i in tokens.unique().tolist() if (known is None or i in known) and self(i) in classes]
        found = torch.zeros_like(masked)
        for token in ids:
            found = found | (tokens == token)
        return found | masked if "mask" in classes else found & ~masked


def _ids(*given: int | None) -> frozenset[int]:
    return frozenset(int(one) for one in given if one is not None)
