"""From a text to rows of tokens: a small byte-level tokenizer, learned from the training part."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.experiments.one_token.text_corpus import LENGTH, Text, read_text
from dlm_lens.training.sources import Example, RowSource

VOCABULARY = 1024
"""Tokens at most: 256 bytes, merges, and the three below."""

PAD, EOS, MASK = "<pad>", "<eos>", "[MASK]"


def build_tokenizer(documents: Sequence[str], size: int = VOCABULARY) -> Any:
    """A byte-level BPE of `size` tokens at most, learned from the documents; nothing begins a text.

    `<eos>` ends a document, `[MASK]` has the last id. The same documents give the same tokenizer.

    Raises:
        ValueError: a size that leaves no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(alphabet) + 3:
        raise ValueError(f"a vocabulary of {size} has no room for {len(alphabet)} bytes and three special tokens")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents, trainer)
    # Last, so that a conversion, which sets the mask's row to the mean of the rows before it, averages all tokens.
    backend.add_special_tokens([MASK])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        mask_token=MASK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as full rows, with `<eos>` after every document; an incomplete last row is dropped.

    Args:
        tokenizer: of the training part.
        training: rows to learn from.
        validation: rows held out.
    """

    tokenizer: Any
    training: Int[Tensor, "row position"]
    validation: Int[Tensor, "row position"]

    def source(self) -> RowSource:
        """The training rows without end, for the trainer."""
        return RowSource(self.training, Example, LENGTH, self.tokenizer.pad_token_id)

    def held_out(self, count: int) -> Int[Tensor, "row position"]:
        """`count` validation rows, evenly over the held-out text; all, if there are no more."""
        rows = len(self.validation)
        return self.validation[torch.arange(min(count, rows)) * rows // min(count, rows)]

    def bytes_of(self, rows: Int[Tensor, "row position"]) -> int:
        """UTF-8 bytes that the tokens stand for; `<eos>` stands for one, the empty line between documents."""
        return int(self._sizes()[rows].sum())

    def _sizes(self) -> Int[Tensor, "d_vocab"]:
        """A character of a byte-level token is a byte."""
        words = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        special = {PAD: 0, EOS: 1, MASK: 0}
        return torch.tensor([special.get(word, len(word)) for word in words])

    @property
    def digest(self) -> str:
        """Of the tokenizer, with all its merges."""
        return hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:12]


@cache
def encoded(place: str) -> Encoded:
    """The text at that place, encoded.

    Raises:
        FileNotFoundError: as `read_text`.
        ValueError: as `read_text`, or a part shorter than a row.
    """
    return encode(read_text(place))


def encode(text: Text) -> Encoded:
    """A text as rows.

    Raises:
        ValueError: a part shorter than a row.
    """
    tokenizer = build_tokenizer(text.training)
    return Encoded(tokenizer, *(_rows(tokenizer, part) for part in (text.training, text.validation)))


def _rows(tokenizer: Any, documents: Sequence[str]) -> Int[Tensor, "row position"]:
    found = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
    ids = [token for document in found for token in (*document, tokenizer.eos_token_id)]
    rows = len(ids) // LENGTH
    if not rows:
        raise ValueError(
            f"a part of the text has {len(ids)} tokens, and a row has {LENGTH}; give a longer text (a twentieth of "
            "it and more is held out)"
        )
    return torch.tensor(ids[: rows * LENGTH]).view(rows, LENGTH)
