"""The training corpus as one tensor, its sequences in order, and test prompts that it does not hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, islice

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int

from dlm_lens.training import Example as Canvas
from dlm_lens.training.sources import Build, Cursor
from experiments.toy.language import Example, Task, stream
from experiments.toy.tokenizer import SEQUENCE_LENGTH, build_tokenizer

CORPUS_SEED = 0  # training text; the training seed changes weights, order and masks, never the text
TEST_SEED = 1
TRAINING_SEQUENCES = 400_000
ORDER, LENGTHS = 10, 11  # streams of random numbers, beside those of dlm_lens.training


@dataclass(frozen=True)
class Corpus:
    """Encoded examples: `<bos> prompt answer <eos>*`, with where answer and padding begin."""

    tokens: Int[torch.Tensor, "sequence position"]
    prompt_length: Int[torch.Tensor, " sequence"]
    text_length: Int[torch.Tensor, " sequence"]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Positions of a canvas."""
        return SEQUENCE_LENGTH

    @property
    def padding(self) -> int:
        """An id for the positions after a canvas, which no position sees."""
        return int(self.tokens.flatten()[-1])

    def read(self, cursor: Cursor | None, seed: int) -> Iterator[tuple[Build, Cursor]]:
        """The training sequences without end: a `Source` of dlm_lens.training. Epochs are reshuffled."""
        for sample in count((cursor or {}).get("sample", 0)):
            epoch, index = divmod(sample, len(self))
            row = int(_epoch_order(len(self), seed, epoch)[index])
            yield partial(self.canvas, row, sample, seed), {"sample": sample + 1}

    def canvas(self, row: int, sample: int, seed: int) -> Canvas:
        """A row of the corpus as it is trained on: a pure function, so that a resumed run sees the same data.

        Half of the rows keep the full canvas; the others end at a uniformly drawn position after the text,
        because at inference the canvas is prompt + answer length, not always 64.
        """
        rng = np.random.default_rng((seed, LENGTHS, sample))
        shortest = int(self.text_length[row]) + 1  # at least one <eos>
        length = SEQUENCE_LENGTH if rng.random() < 0.5 else int(rng.integers(shortest, SEQUENCE_LENGTH + 1))
        return Canvas(self.tokens[row, :length].long(), int(self.prompt_length[row]))


@lru_cache(maxsize=1)
def _epoch_order(sequences: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, ORDER, epoch)).permutation(sequences)


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
