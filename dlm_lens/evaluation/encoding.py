"""Token ids of the harness's contexts, continuations and chats."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dlm_lens.adapters.registry import family_of

logger = logging.getLogger(__name__)

DEFAULT_LENGTH = 2048
"""Positions of a canvas where the config gives none."""


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of what a tokenizer does with text: its vocabulary and special tokens.

    Of a tokenizer of the tokenizers library also its merges, normalisation and other rules; its padding and its
    truncation change with every call, and do not count. Neither does a chat template, which makes the text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {} if backend is None else json.loads(backend.to_str())
    about = {
        "class": type(tokenizer).__name__,
        "rules": {name: value for name, value in rules.items() if name not in ("padding", "truncation")},
        "vocabulary": {} if rules else tokenizer.get_vocab(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=repr).encode()).hexdigest()[:16]


class Encoder:
    """Turns the harness's texts into ids, and cuts them to the model's context from the left.

    Args:
        model: from `dlm_lens.load`, with a tokenizer.
        add_bos: prepend the beginning-of-text token to every text that lacks it.
        max_length: positions of a canvas; None for what the model was trained on.

    Raises:
        ValueError: the model has no tokenizer, or max_length is below 2.
    """

    def __init__(self, model: Any, *, add_bos: bool = False, max_length: int | None = None) -> None:
        family = family_of(model.config.model_type)
        self.tokenizer = model.tokenizer
        self.chat_options, self.text_options = family.chat_options, family.text_options
        if self.tokenizer is None:
            raise ValueError("the harness evaluates texts, but this model has no tokenizer; set model.tokenizer")
        self.add_bos = add_bos
        bos, eos = model.config.bos_token_id, model.config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else eos
        self.bos = self.tokenizer.bos_token_id if bos is None else bos
        if add_bos and self.bos is None:
            raise ValueError("add_bos is True, but the model has no beginning-of-text token; leave add_bos out")
        trained = getattr(model.config, "max_position_embeddings", None) or DEFAULT_LENGTH
        self.max_length = trained if max_length is None else max_length
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; a canvas has at least 2 positions")
        self._rendered: set[str] = set()
        self._warned = False

    def text(self, text: str) -> list[int]:
        """Ids of a context; without special tokens where the text starts with its own or the family adds none."""
        return self._ids(text, self._is_bare(text))

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, split at the length of the context's own ids; spaces between them go to the continuation.

        An empty context becomes the beginning-of-text token, or the end-of-text token without one.

        Raises:
            ValueError: the continuation has no token of its own.
        """
        bare = self._is_bare(context)
        # Trailing spaces of a chat template stay with the context.
        spaces = 0 if context in self._rendered else len(context) - len(context.rstrip())
        if spaces:
            continuation, context = context[-spaces:] + continuation, context[:-spaces]
        if context:
            before = self._ids(context, bare)
            after = self._ids(context + continuation, bare)[len(before) :]
        else:
            before = [self.prefix]
            after = [int(i) for i in self.tokenizer(continuation, add_special_tokens=False)["input_ids"]]
        if not after:
            raise ValueError(f"the continuation {continuation!r:.60} has no token of its own after its context")
        return before, after

    @property
    def prefix(self) -> int:
        """The first token of a text without context."""
        token = self.bos if self.bos is not None else self.eos
        if token is None:
            raise ValueError("the model has neither a beginning-of-text nor an end-of-text token to start from")
        return int(token)

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text, by the tokenizer's template, with the template's special tokens.

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the model's tokenizer has no chat template; evaluate without apply_chat_template")
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_options,
        )
        self._rendered.add(str(text))
        return str(text)

    def fitted(self, context: list[int], room: int) -> list[int]:
        """The last tokens of a context that leave `room` positions free.

        Raises:
            ValueError: not one token of the context fits.
        """
        keep = self.max_length - room
        if keep < 1:
            raise ValueError(
                f"{room} tokens leave no room for a context in {self.max_length} positions; choose a shorter "
                "answer (gen_length) or a larger max_length"
            )
        if len(context) > keep and not self._warned:
            logger.warning(
                "contexts are cut from the left where they exceed the model's %d positions (here %d tokens and an "
                "answer of %d)", self.max_length, len(context), room,
            )  # fmt: skip
            self._warned = True
        return context[-keep:]

    def _is_bare(self, text: str) -> bool:
        bos = self.tokenizer.bos_token
        return text in self._rendered or (bool(bos) and text.startswith(bos))

    def _ids(self, text: str, bare: bool) -> list[int]:
        options = {"add_special_tokens": not bare, **self.text_options}
        ids = [int(i) for i in self.tokenizer(text, **options)["input_ids"]]
        if self.add_bos and not bare and ids[:1] != [self.bos]:
            ids = [int(self.bos), *ids]
        return ids
