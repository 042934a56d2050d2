"""Intervals over prompts, by a bootstrap that resamples prompts.

The steps, layers and heads of one prompt are not independent, so that whole prompts are drawn.
Used for everything that the sinks, the probes and the experiments report with an interval.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm_lens.printable import shown

RESAMPLES = 2000

Z = 1.959964
"""Quantile of the normal distribution, two-sided 95%."""

Bounds = tuple[float, float]
"""The smallest and largest possible value of a statistic."""

SHARE_BOUNDS: Bounds = (0.0, 1.0)
POSITIVE_BOUNDS: Bounds = (0.0, math.inf)
CORRELATION_BOUNDS: Bounds = (-1.0, 1.0)
"""Also of cosines and of differences of shares."""
R2_BOUNDS: Bounds = (-math.inf, 1.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval over prompts.

    Args:
        value: over all prompts.
        low: lower end, see `expanded`; NaN with fewer than two prompts.
        high: upper end.
        prompts: how many prompts contribute; of means that are compared, to the one with cases in fewest of them.
    """

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4g} [no interval: {self.prompts} prompt{'' if self.prompts == 1 else 's'}]"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def columns(self, name: str) -> dict[str, float]:
        """The columns of a table: `name`, `name_low`, `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


DRAWN = 2**22
"""Numbers of draws in memory at a time, 64 MiB with their copy in float64."""


def _in_resamples(sums: Floats, resamples: int, seed: int) -> Floats:
    """Sums [prompt, summand] over the prompts of every resample, drawn with replacement: [resample, summand]."""
    generator, prompts = np.random.default_rng(seed), len(sums)
    size = max(1, DRAWN // prompts)
    parts = (min(size, resamples - first) for first in range(0, resamples, size))
    share = np.full(prompts, 1 / prompts)
    return np.concatenate([generator.multinomial(prompts, share, size=part) @ sums for part in parts])


def student_quantile(degrees: float) -> float:
    """Quantile of Student's t, two-sided 95%; the degrees of freedom need not be whole."""
    from scipy import stats

    return float(stats.t.ppf(0.975, degrees))


def wilson_bounds(successes: int, n: int, z: float = Z) -> Bounds:
    """Wilson's score interval of a share p, (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n); n > 0.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference", J. Am. Stat. Assoc. 22.
    """
    p, scale = successes / n, 1 + z**2 / n
    centre = (p + z**2 / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / scale
    return 0.0 if not successes else centre - half, 1.0 if successes == n else centre + half


def expanded(value: float, drawn: Any, prompts: int) -> Bounds:
    """The interval of a statistic from its values in a bootstrap that draws prompts; NaN with fewer than two.

    The percentile interval is too narrow for few prompts: its variance is (n - 1) / n times too small, and its
    quantiles are the normal distribution's instead of Student's (Hesterberg 2015, "What Teachers Should Know About
    the Bootstrap", on expanded percentiles). Both of its distances from the value are multiplied by

        t(n - 1) / z * sqrt(n / (n - 1)),

    two-sided 95% quantiles: by 1.44 for n = 6, by 1.04 for n = 48. Draws without a value are left out.

    Args:
        value: of all prompts.
        drawn: of every draw.
        prompts: n, how many prompts count.
    """
    drawn = np.asarray(drawn, dtype=np.float64)
    drawn = drawn[np.isfinite(drawn)]
    if prompts < 2 or not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, (0.025, 0.975))
    wider = student_quantile(prompts - 1) / Z * math.sqrt(prompts / (prompts - 1))
    return float(value - wider * (value - low)), float(value + wider * (high - value))


ROUNDING = 1e-6
"""A share this near to 0 or 1 is 0 or 1, and a number that varies less is the same in all prompts: sums of
attention in float32 are off by a few 2^-24, by device."""


FEW_PROMPTS = 5
"""So many prompts may have the same share of a few cases by chance: six, of 3 cases each, in less than 1%."""


def within(value: float, found: Bounds, prompts: int, bounds: Bounds | None) -> Bounds:
    """An interval over prompts, cut at the bounds; where no prompt differs, that of what was not seen.

    Where no prompt has any of its cases, or every prompt has all of them, all draws are equal, and a bootstrap's
    interval has no width: it says that the share is certain. So it is with a difference (or a correlation) that is
    the same in all prompts, and with 2 of 3 cases in both of two. The interval then is

        value - w (value - bounds[0]) to value + w (bounds[1] - value),  w = z^2 / (n + z^2):

    so many prompts, Wilson's upper bound of 0 of n (`wilson_bounds`), may have any other value. Of a share of 0 or
    1 it is Wilson's interval. The cases of a prompt (its steps, heads, positions, and its rows, such as those
    of several seeds) count as one, as far as they may depend on each other: more of them do not make it narrower.
    That of two prompts with 3 cases each covers a share in 97% or more of all outcomes, without a width of equal
    ones in 72% to 84% (`tests/test_statistics.py`). A share between 0 and 1 that is the same in more than
    `FEW_PROMPTS` is so by construction, such as one key of as many, and has no width.

    Args:
        value: of all prompts.
        found: its interval (`expanded`); NaN where there is none, which stays.
        prompts: n, how many prompts have cases.
        bounds: as for `estimate`. Where one is infinite, a number that is the same in all prompts has no width.
    """
    if bounds is None or math.isnan(found[0]):
        return found
    least, most = bounds
    at_bound = bounds == SHARE_BOUNDS and min(value, 1 - value) < ROUNDING
    equal = -math.inf < least and most < math.inf and found[1] - found[0] < ROUNDING
    equal &= least < 0 or prompts <= FEW_PROMPTS
    if at_bound or equal:
        value, unseen = float(round(value)) if at_bound else value, wilson_bounds(0, prompts)[1]
        found = value - unseen * (value - least), value + unseen * (most - value)
    return max(least, found[0]), min(most, found[1])


def estimate(
    sums: Any,
    statistic: Callable[[Floats], Floats],
    *,
    bounds: Bounds | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """A statistic of sums over prompts, and its interval (`expanded`).

    Where means are compared (`COUNTS_OF_MEANS`), its prompts are those with cases of the mean that has fewest of
    them: it varies most, and the draws show it too little. Of cases in one prompt alone there is no interval.

    Args:
        sums: [prompt, summand]; a prompt whose row is all zeros is left out.
        statistic: from sums over prompts [*draws, summand] to numbers [*draws].
        bounds: where the interval is cut (`within`): `SHARE_BOUNDS` of a mean, whose last summand counts cases;
            `POSITIVE_BOUNDS`, `CORRELATION_BOUNDS`, `R2_BOUNDS`; None for nowhere.
        resamples: how many draws of as many prompts, with replacement.
        seed: of the draws.
    """
    sums = np.asarray(sums, dtype=np.float64)
    sums = sums[(sums != 0).any(-1)]
    counts = COUNTS_OF_MEANS.get(statistic, ())
    prompts = min((int((sums[:, place] > 0).sum()) for place in counts), default=len(sums))
    drawn = _in_resamples(sums, resamples, seed) if prompts > 1 else sums
    found = estimate_in_draws(statistic, sums.sum(0), drawn, prompts)
    low, high = within(found.value, (found.low, found.high), prompts, bounds)
    return replace(found, low=low, high=high)


def estimate_in_draws(
    statistic: Callable[[Floats], Floats], total: Floats, drawn: Floats, prompts: int
) -> Estimate:
    """A statistic of sums over prompts, and the interval (`expanded`) of its values in draws of whole prompts.

    Args:
        statistic: as for `estimate`.
        total: the sums over all prompts, [summand].
        drawn: those over the prompts of every draw, [draw, summand].
        prompts: how many prompts count, such as those with a denominator. With fewer than two there is no interval,
            without any no value.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(total)) if prompts else np.nan
        values = statistic(drawn) if prompts > 1 else np.empty(0)
    return Estimate(value, *expanded(value, values, prompts), prompts)


def estimate_mean(
    values: Any, prompt: Any, prompts: int, *, bounds: Bounds | None = None, seed: int = 0
) -> Estimate:
    """Mean of values [entry], and its interval over prompts.

    Args:
        values: one number per entry.
        prompt: the prompt of each entry, from 0.
        prompts: how many prompts there are.
        bounds: as for `estimate`.
        seed: of the draws.

    Raises:
        ValueError: as `summed`.
    """
    values = np.asarray(values, dtype=np.float64)
    pairs = summed(np.stack([values, np.ones_like(values)], -1), prompt, prompts)
    return estimate(pairs, mean_of, bounds=bounds, seed=seed)


def prompts_or_rows(prompt: Any, rows: int) -> NDArray[np.int64]:
    """The number of each row's prompt (`DenoisingRun.row_prompts`); where it is None, every row is a prompt."""
    return np.arange(rows) if prompt is None else np.asarray(prompt)


def prompts_with_cases(denominator: Floats, prompt: Any) -> NDArray[np.int64]:
    """How many prompts have a denominator [row, *entry], by entry: those of an interval of `ratio_by_prompt`."""
    names, numbers = np.unique(prompts_or_rows(prompt, len(denominator)), return_inverse=True)
    return np.asarray((summed(denominator, numbers, len(names)) > 0).sum(0))


def summed(values: Any, prompt: Any, prompts: int) -> Floats:
    """Sums of values [entry, summand] over the entries of every prompt: [prompt, summand].

    Args:
        values: some numbers per entry.
        prompt: the prompt of each entry, from 0.
        prompts: how many prompts there are.

    Raises:
        ValueError: not one prompt per entry, or one that is not from 0 to `prompts` - 1.
    """
    values, numbers = np.asarray(values, dtype=np.float64), np.asarray(prompt)
    if np.asarray(prompts).dtype.kind not in "iu" or prompts < 0:
        raise ValueError(f"prompts is {shown(prompts)}; it must be a whole number of at least 0")
    if numbers.shape != values.shape[:1]:
        raise ValueError(
            f"prompt has shape {list(numbers.shape)} for {len(values)} entries; give each entry's prompt, a number"
        )
    wrong = numbers[~np.isin(numbers, np.arange(prompts))]
    if len(wrong):
        raise ValueError(f"prompt {shown(wrong[0].item())} of {prompts}: prompts go from 0 to {prompts - 1}")
    found = np.zeros((prompts, *values.shape[1:]))
    np.add.at(found, numbers.astype(np.int64), values)
    return found


def mean_of(sums: Floats) -> Floats:
    """Sum over count, of sums [..., (sum, count)]."""
    mean: Floats = sums[..., 0] / sums[..., 1]
    return mean


def difference_of(sums: Floats) -> Floats:
    """The first mean minus the second, of sums [..., (sum, count, sum, count)]."""
    difference: Floats = sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]
    return difference


def ratio_of(sums: Floats) -> Floats:
    """The first mean over the second, of sums [..., (sum, count, sum, count)]."""
    ratio: Floats = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    return ratio


def difference_of_differences(sums: Floats) -> Floats:
    """The first difference minus the second, of sums [..., (sum, count, sum, count) of both]."""
    found: Floats = difference_of(sums[..., :4]) - difference_of(sums[..., 4:])
    return found


COUNTS_OF_MEANS: Mapping[Callable[[Floats], Floats], tuple[int, ...]] = {
    difference_of: (1, 3),
    ratio_of: (1, 3),
    difference_of_differences: (1, 3, 5, 7),
}
"""Where the statistics that compare means have the numbers of cases among their summands."""


def ratio_by_prompt(
    numerator: Floats,
    denominator: Floats,
    prompt: Any = None,
    *,
    bounds: Bounds | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Floats, Floats, Floats]:
    """Ratio of the sums over the first axis (rows), entry by entry, and its interval (`expanded`) over prompts.

    Each resample draws as many prompts as there are, with replacement, and takes both sums over the rows of the
    same draw. An entry with fewer than two prompts that have a denominator has no interval (NaN).

    Args:
        numerator: [row, *entry].
        denominator: the same shape.
        prompt: the number of each row's prompt, as for `prompts_or_rows`.
        bounds: as for `estimate`.
        resamples: how many draws.
        seed: of the draws.

    Returns:
        The ratio, and the lower and the upper bound of its interval.
    """
    _, numbers = np.unique(prompts_or_rows(prompt, len(numerator)), return_inverse=True)
    prompts = int(numbers.max(initial=-1)) + 1
    if not prompts:
        none = np.full((3, *np.shape(numerator)[1:]), np.nan)
        return none[0], none[1], none[2]
    numerator, denominator = (summed(each, numbers, prompts) for each in (numerator, denominator))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.asarray(numerator.sum(0) / denominator.sum(0))
        sums = np.concatenate([each.reshape(prompts, -1) for each in (numerator, denominator)], 1)
        tops, bottoms = np.split(_in_resamples(sums, resamples, seed), 2, 1)
        flat = tops / bottoms
    low, high = np.full((2, flat.shape[1]), np.nan)
    columns = zip(ratio.ravel().tolist(), flat.T, denominator.reshape(prompts, -1).T, strict=True)
    for entry, (value, drawn, below) in enumerate(columns):
        cases = int((below > 0).sum())
        low[entry], high[entry] = within(value, expanded(value, drawn, cases), cases, bounds)
    return ratio, low.reshape(ratio.shape), high.reshape(ratio.shape)
