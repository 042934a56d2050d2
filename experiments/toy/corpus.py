"""The training corpus as one tensor, batches by step number, and test prompts that it does not hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int

from experiments.toy.language import Example, Task, stream
from experiments.toy.tokenizer import SEQUENCE_LENGTH, build_tokenizer

CORPUS_SEED = 0  # training text; the training seed changes weights, order and masks, never the text
TEST_SEED = 1
TRAINING_SEQUENCES = 400_000


@dataclass(frozen=True)
class Batch:
    """Canvases of unequal length, padded on the right.

    tokens: the text, `<eos>` up to each row's own length. prompt_length and length: per row, the first
    position of the answer and of the padding.
    """

    tokens: Int[torch.Tensor, "batch position"]
    prompt_length: Int[torch.Tensor, " batch"]
    length: Int[torch.Tensor, " batch"]

    @property
    def visible(self) -> Bool[torch.Tensor, "batch position"]:
        """True on the row's own positions, False on padding."""
        return torch.arange(self.tokens.shape[1]) < self.length[:, None]


@dataclass(frozen=True)
class Corpus:
    """Encoded examples: `<bos> prompt answer <eos>*`, with where answer and padding begin."""

    tokens: Int[torch.Tensor, "sequence position"]
    prompt_length: Int[torch.Tensor, " sequence"]
    text_length: Int[torch.Tensor, " sequence"]

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step: a pure function of its arguments, so that a resumed run sees the same data.

        Epochs are reshuffled. Half of the rows keep the full canvas; the others end at a uniformly drawn
        position after the text, because at inference the canvas is prompt + answer length, not always 64.
        """
        epoch, offset = divmod(step, len(self) // size)
        rows = torch.from_numpy(_epoch_order(len(self), seed, epoch)[offset * size : (offset + 1) * size])
        rng = np.random.default_rng((seed, 1, step))
        shortest = self.text_length[rows].long().numpy() + 1  # at least one <eos>
        drawn = rng.integers(shortest, SEQUENCE_LENGTH + 1)
        full = rng.random(size) < 0.5
        length = torch.from_numpy(np.where(full, SEQUENCE_LENGTH, drawn))
        return Batch(self.tokens[rows].long(), self.prompt_length[rows].long(), length)


@lru_cache(maxsize=1)
def _epoch_order(sequences: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, 0, epoch)).permutation(sequences)


def build_corpus(sequences: int = TRAINING_SEQUENCES) -> tuple[Corpus, frozenset[str]]:
    """Generate and encode the training text; also return its prompts, which no test may use."""
    tokenizer = build_tokenizer()
    vocabulary, eos, bos = tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.bos_token_id
    tokens = np.full((sequences, SEQUENCE_LENGTH), eos, dtype=np.uint8)
    prompt_length, text_length = np.zeros(sequences, np.uint8), np.zeros(sequences, np.uint8)
    prompts = set()
    for row, example in enumerate(islice(stream("train", CORPUS_SEED), sequences)):
        # split() is the tokenisation of this language (tested), and faster than the tokenizer.
        ids = [bos, *(vocabulary[word] for word in example.text.split())]
        tokens[row, : len(ids)] = ids
        prompt_length[row] = 1 + len(example.prompt.split())
        text_length[row] = len(ids)
        prompts.add(example.prompt)
    arrays = (torch.from_numpy(array) for array in (tokens, prompt_length, text_length))
    return Corpus(*arrays), frozenset(prompts)


def training_prompts(sequences: int = TRAINING_SEQUENCES) -> frozenset[str]:
    """The prompts of the training text, without encoding it."""
    return frozenset(example.prompt for example in islice(stream("train", CORPUS_SEED), sequences))


@dataclass(frozen=True)
class HeldOut:
    """Test examples of one task, and how many candidates were dropped, having been trained on or repeated."""

    examples: tuple[Example, ...]
    seen_in_training: int
    repeated: int


def held_out(task: Task, count: int, seen: frozenset[str] | set[str], seed: int = TEST_SEED) -> HeldOut:
    """Draw test examples, from seeds of their own, until `count` have prompts that are new and distinct."""
    candidates: Iterator[Example] = stream("test", seed, [task])
    kept: dict[str, Example] = {}
    in_training = repeated = 0
    while len(kept) < count:
        example = next(candidates)
        if example.prompt in seen:
            in_training += 1
        elif example.prompt in kept:
            repeated += 1
        else:
            kept[example.prompt] = example
    return HeldOut(tuple(kept.values()), in_training, repeated)
