"""Token ids as text."""

from typing import Any


class TokenTexts:
    """Text of token ids, each decoded once: the id without a tokenizer, "sink(i)" for learned sink tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str | int:
        """The text of one token id."""
        if token < 0:
            return f"sink({-1 - token})"
        if self._tokenizer is None:
            return token
        if token not in self._known:
            self._known[token] = str(self._tokenizer.decode([token]))
        return self._known[token]
