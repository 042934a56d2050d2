"""Random numbers of a run: one generator per row, or the reference's single stream."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling.network import Rows, by_rows, most_likely

Draw = Callable[[Float[Tensor, "n d_vocab"]], Int[Tensor, "n"]]
"""A token for each row, by its probabilities."""

ENTRIES = 2**22
"""Uniform numbers in float64 at a time, 32 MiB, where a token is drawn of each position."""


class Noise(Protocol):
    """Source of the uniform numbers that a sampler draws, always on the CPU so that devices agree."""

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """A float64 number per evaluated position and vocabulary column."""
        ...

    def column_rows(
        self,
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        width: int,
        *,
        masked: bool = False,
    ) -> Rows:
        """The same numbers for `by_rows`, drawn when a part of them is read; to be read once, before other draws.

        Args:
            evaluated: as in `columns`.
            eligible: likewise.
            width: likewise.
            masked: the reference draws numbers for the evaluated positions only.
        """
        ...

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """A float32 number per position."""
        ...

    def masked_positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """A float32 number per eligible position; 1 elsewhere."""
        ...

    def tokens(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """One column per evaluated position, drawn by its probabilities (up to a factor)."""
        ...

    def draw(
        self,
        weights: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """`count` positions per row, drawn without replacement from softmax(weights)."""
        ...

    def uniform_tokens(self, wanted: Bool[Tensor, "batch position"], size: int) -> Int[Tensor, "batch position"]:
        """A token id from 0 to `size` - 1 for every wanted position, all with the same probability; 0 elsewhere."""
        ...


class _DrawnRows:
    """Rows that `parts` draws, so many at a time."""

    def __init__(self, parts: Callable[[int], Iterator[tuple[slice, Tensor]]]) -> None:
        self.parts = parts

    def split(self, split_size: int, /) -> Iterator[Tensor]:
        """The rows, a part after another."""
        return (values for _, values in self.parts(split_size))


class RowNoise:
    """A generator per row, which draws for that row's eligible positions only.

    So a row's numbers depend on its own seed and content, not on the batch or the padding around it.
    """

    def __init__(self, seeds: tuple[int, ...]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def state(self) -> dict[str, Tensor]:
        """The generators' states, row by row."""
        return {"noise": torch.stack([generator.get_state() for generator in self.generators])}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        for generator, row in zip(self.generators, state["noise"], strict=True):
            generator.set_state(row.cpu().clone())

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """A float64 number per evaluated position and column; 1/e, no noise, where it is not eligible."""
        return next(self._column_parts(evaluated, eligible, width, max(1, int(evaluated.sum()))))[1]

    def _column_parts(
        self,
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        width: int,
        size: int,
    ) -> Iterator[tuple[slice, Float[Tensor, "part width"]]]:
        """The numbers of `size` evaluated positions after another; a generator gives the same in any parts."""
        here = evaluated.cpu()
        rows = here.nonzero()[:, 0].where(eligible.cpu()[here], -1)
        for first in range(0, max(1, len(rows)), size):
            part = slice(first, first + size)
            values = torch.empty(len(rows[part]), width, dtype=torch.float64)
            start = 0
            stretches = rows[part].unique_consecutive(return_counts=True)
            for row, count in zip(*(each.tolist() for each in stretches), strict=True):
                stretch = values[start : start + count]
                start += count
                if row < 0:
                    # -ln(-ln(1/e)) = 0: what is evaluated but cannot be written keeps its plain argmax.
                    stretch.fill_(torch.e**-1)
                else:
                    stretch.uniform_(generator=self.generators[row])
            yield part, values

    def column_rows(
        self,
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        width: int,
        *,
        masked: bool = False,
    ) -> Rows:
        """The same numbers, of which no more than a part is in memory; `columns` draws for eligible ones alone."""
        return _DrawnRows(lambda size: self._column_parts(evaluated, eligible, width, size))

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """A float32 number per eligible position, 0 elsewhere."""
        wanted = eligible.cpu()
        values = torch.zeros(wanted.shape, dtype=torch.float32)
        for row, (keep, generator) in enumerate(zip(wanted, self.generators, strict=True)):
            values[row, keep] = torch.rand(int(keep.sum()), generator=generator, dtype=torch.float32)
        return values

    def masked_positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """A float32 number per eligible position; 1 elsewhere."""
        return self.positions(eligible).masked_fill(~eligible.cpu(), 1.0)

    def tokens(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """One column per evaluated position, by the Gumbel trick on that row's own numbers."""
        width = probabilities.shape[-1]
        found = [
            drawn_tokens(probabilities[part], uniform)
            for part, uniform in self._column_parts(evaluated, eligible, width, max(1, ENTRIES // width))
        ]
        return torch.cat(found)

    def draw(
        self,
        weights: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """The `count` largest of weights plus Gumbel noise, which is drawing without replacement."""
        scores = add_gumbel(weights, self.positions(eligible).double(), 1.0)
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return rank < count[:, None]

    def uniform_tokens(self, wanted: Bool[Tensor, "batch position"], size: int) -> Int[Tensor, "batch position"]:
        """A token id per wanted position, 0 elsewhere."""
        chosen = wanted.cpu()
        tokens = torch.zeros(chosen.shape, dtype=torch.long)
        for row, (keep, generator) in enumerate(zip(chosen, self.generators, strict=True)):
            tokens[row, keep] = torch.randint(size, (int(keep.sum()),), generator=generator)
        return tokens.to(wanted.device)


class SharedNoise:
    """The reference's stream: one generator for the batch, numbers for every position, in its order."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"noise": self.generator.get_state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        self.generator.set_state(state["noise"].cpu().clone())

    def columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """Draw for all positions of the batch, return the evaluated ones'."""
        values = torch.rand(*evaluated.shape, width, generator=self.generator, dtype=torch.float64)
        return values[evaluated.cpu()]

    def masked_columns(
        self, evaluated: Bool[Tensor, "batch position"], eligible: Bool[Tensor, "batch position"], width: int
    ) -> Float[Tensor, "evaluated width"]:
        """Draw for the evaluated positions of the batch, one row after the other."""
        return torch.rand(int(evaluated.sum()), width, generator=self.generator, dtype=torch.float64)

    def column_rows(
        self,
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        width: int,
        *,
        masked: bool = False,
    ) -> Rows:
        """`columns` or `masked_columns`, all in memory: the stream is in the order of the reference's positions."""
        return (self.masked_columns if masked else self.columns)(evaluated, eligible, width)

    def positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Draw for all positions of the batch."""
        return torch.rand(*eligible.shape, generator=self.generator, dtype=torch.float32)

    def masked_positions(self, eligible: Bool[Tensor, "batch position"]) -> Float[Tensor, "batch position"]:
        """Draw for the eligible positions of the batch, one row after the other."""
        wanted = eligible.cpu()
        return torch.ones(wanted.shape, dtype=torch.float32).masked_scatter(
            wanted, torch.rand(int(wanted.sum()), generator=self.generator, dtype=torch.float32)
        )

    def tokens(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """`torch.multinomial`, whose stream belongs to the installed torch."""
        drawn = torch.multinomial(probabilities.cpu(), 1, generator=self.generator)
        return drawn.squeeze(-1).to(probabilities.device)

    def tokens_among(
        self,
        probabilities: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        drawn: Bool[Tensor, "batch position"],
    ) -> Int[Tensor, "evaluated"]:
        """`torch.multinomial` for the positions `drawn`, evaluated or not, of code that draws for those.

        How many numbers it takes does not depend on the probabilities. Positions that are evaluated and not drawn,
        which the step cannot write, keep their most likely token.
        """
        among, given, likely = drawn.cpu(), evaluated.cpu(), probabilities.cpu()
        found = most_likely(likely)
        if bool(among.any()):
            rows = torch.ones(int(among.sum()), likely.shape[-1], dtype=likely.dtype)
            rows[given[among]] = likely[among[given]]
            sampled = torch.multinomial(rows, 1, generator=self.generator).squeeze(-1)
            found[among[given]] = sampled[given[among]]
        return found.to(probabilities.device)

    def tokens_by_output(
        self, probabilities: Float[Tensor, "evaluated d_vocab"], evaluated: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "evaluated"]:
        """`torch.multinomial` for every output, of code in which that at i - 1 predicts position i.

        Position i takes what is drawn for the output at i - 1. The first position of a row has no output before it
        and takes its most likely token.
        """
        outputs = torch.zeros_like(evaluated)
        outputs[:, :-1] = evaluated[:, 1:]
        later = evaluated.nonzero()[:, 1] > 0
        drawn = self.tokens_among(probabilities[later], outputs, torch.ones_like(evaluated))
        return most_likely(probabilities).masked_scatter(later, drawn)

    def draw(
        self,
        weights: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """`torch.multinomial` for the whole batch at once."""
        chosen = torch.zeros(weights.shape, dtype=torch.bool)
        number = int(count[0])
        if number:
            drawn = torch.multinomial(weights.softmax(-1).cpu(), number, generator=self.generator)
            chosen.scatter_(-1, drawn, True)
        return chosen.to(weights.device)

    def uniform_tokens(self, wanted: Bool[Tensor, "batch position"], size: int) -> Int[Tensor, "batch position"]:
        """Draw for all positions of the batch with `torch.randint`; 0 where none is wanted."""
        tokens = torch.randint(size, tuple(wanted.shape), generator=self.generator)
        return tokens.masked_fill(~wanted.cpu(), 0).to(wanted.device)


def drawn_tokens(
    probabilities: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"]
) -> Int[Tensor, "n"]:
    """A column of every row, drawn by its probabilities (up to a factor) with the Gumbel trick."""
    return most_likely(add_gumbel(probabilities.double().log(), uniform, 1.0))


def drawn_by_rows(
    function: Callable[..., tuple[Tensor, ...]],
    noise: Noise,
    logits: Float[Tensor, "evaluated d_vocab"],
    evaluated: Bool[Tensor, "batch position"],
    eligible: Bool[Tensor, "batch position"],
    *,
    at_once: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """What a function returns of the rows of logits, given the way to draw a token by the probabilities of each.

    With a generator per row it is called with a part of the rows at a time (`by_rows`), and the tokens are those of
    `Noise.tokens`. A reference's stream is in the order of all rows: it is called once.

    Args:
        function: of logits and `draw`; returns tensors of one entry per row.
        noise: source of the numbers.
        logits: of the evaluated positions.
        evaluated: as in `Noise.tokens`.
        eligible: likewise.
        at_once: draws from a reference's stream; None for `Noise.tokens`.
    """
    if isinstance(noise, RowNoise):

        def of_rows(part: Tensor, uniform: Tensor) -> tuple[Tensor, ...]:
            return function(part, partial(drawn_tokens, uniform=uniform))

        return by_rows(of_rows, logits, noise.column_rows(evaluated, eligible, logits.shape[-1]))
    return function(logits, at_once or (lambda likely: noise.tokens(likely, evaluated, eligible)))


def add_gumbel(
    logits: Float[Tensor, "n d_vocab"], uniform: Float[Tensor, "n d_vocab"], temperature: float
) -> Float[Tensor, "n d_vocab"]:
    """Scores whose argmax samples from softmax(logits / temperature), in float64.

    The logarithm of LLaDA's exp(logits) / (-ln u)^temperature (ML-GSAI/LLaDA, generate.py), which keeps the
    argmax and cannot overflow.
    """
    return logits.double() - temperature * torch.log(-torch.log(uniform.to(logits.device)))
