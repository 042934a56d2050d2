"""`Rows`: clean sequences of a batch, with what may be masked in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.shapes import check_shapes


@dataclass(frozen=True, eq=False)
class Example:
    """One clean sequence, without padding.

    Args:
        tokens: its ids.
        prompt_length: the first positions, which the loss leaves out: a prompt in fine-tuning, 0 in pre-training.
        documents: which document each position belongs to, if documents share the sequence without seeing each
            other; None if everything sees everything.
        unmasked: positions that are never masked whatever the settings, such as a beginning of text.
    """

    tokens: Int[Tensor, "position"]
    prompt_length: int = 0
    documents: Int[Tensor, "position"] | None = None
    unmasked: Bool[Tensor, "position"] | None = None

    def shortened(self, length: int) -> "Example":
        """Its first `length` positions."""
        documents = None if self.documents is None else self.documents[:length]
        unmasked = None if self.unmasked is None else self.unmasked[:length]
        return Example(self.tokens[:length], min(self.prompt_length, length), documents, unmasked)


@dataclass(frozen=True, eq=False)
class Rows:
    """Clean sequences side by side, padded on the right.

    Args:
        tokens: x_0.
        visible: content (True) or padding (False).
        answer: positions whose loss counts and that the noise masks: all content in pre-training.
        prompt: positions that the noise masks only in the `whole_share` of the rows.
        documents: as in `Example`, or None.

    Raises:
        ValueError: shapes that differ, or a position that is answer or prompt and padding.
    """

    tokens: Int[Tensor, "batch position"]
    visible: Bool[Tensor, "batch position"]
    answer: Bool[Tensor, "batch position"]
    prompt: Bool[Tensor, "batch position"]
    documents: Int[Tensor, "batch position"] | None = None

    def __post_init__(self) -> None:
        check_shapes(self)
        if bool(((self.answer | self.prompt) & ~self.visible).any()) or bool((self.answer & self.prompt).any()):
            raise ValueError("a position is answer, prompt or padding; here it is two of them")

    @classmethod
    def of(cls, examples: Sequence[Example], length: int, padding: int) -> "Rows":
        """Examples as rows of `length` positions; `padding` is any id, since nobody sees it.

        Raises:
            ValueError: an example that is longer.
        """
        longest = max(len(example.tokens) for example in examples)
        if longest > length:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit rows of {length}; cut it, or raise length"
            )
        tokens = torch.full((len(examples), length), padding)
        visible, answer, prompt = (torch.zeros(len(examples), length, dtype=torch.bool) for _ in range(3))
        packed = any(example.documents is not None for example in examples)
        documents = torch.full((len(examples), length), -1) if packed else None
        for row, example in enumerate(examples):
            size = len(example.tokens)
            tokens[row, :size] = example.tokens
            visible[row, :size] = True
            free = torch.ones(size, dtype=torch.bool) if example.unmasked is None else ~example.unmasked
            prompt[row, : example.prompt_length] = free[: example.prompt_length]
            answer[row, example.prompt_length : size] = free[example.prompt_length :]
            if documents is not None:
                documents[row, :size] = 0 if example.documents is None else example.documents
        return cls(tokens, visible, answer, prompt, documents)

    def first(self) -> Bool[Tensor, "batch position"]:
        """The first position of every row and of every document in it."""
        flags = torch.zeros_like(self.visible)
        flags[:, 0] = True
        if self.documents is not None:
            flags[:, 1:] |= self.documents[:, 1:] != self.documents[:, :-1]
        return flags

    def network_inputs(self) -> dict[str, Tensor]:
        """The mask and the positions that the network is told, nothing where a plain pass is meant.

        Documents: a `[batch, 1, query, key]` mask of blocks, and positions that begin at 0 in each. A padded
        position sees itself, so that no row of the mask is empty.
        """
        if self.documents is not None:
            same = self.documents[:, None, :, None] == self.documents[:, None, None, :]
            own = torch.eye(self.tokens.shape[1], dtype=torch.bool)
            index = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
            starts = index.masked_fill(~self.first(), 0).cummax(-1).values
            mask = same & self.visible[:, None, None, :] | own
            return {"attention_mask": mask, "position_ids": index - starts}
        return {} if bool(self.visible.all()) else {"attention_mask": self.visible.long()}
