"""Section 5.2: flips at equal confidence, on planted predictions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlm_lens.experiments.attention_sinks import beyond_confidence
from dlm_lens.experiments.attention_sinks.beyond_confidence import CELLS, bin_of, count_flips
from dlm_lens.experiments.results import Record, Results
from tests.experiments.finished_runs import finished_run


def replayed(plain: torch.Tensor, hooked: torch.Tensor, flipped: torch.Tensor) -> SimpleNamespace:
    """A replay of one row, [step, 1, position], whose whole canvas is one open block."""
    steps, _, positions = plain.shape
    return SimpleNamespace(
        run=SimpleNamespace(spans=[(0, positions)] * steps),
        predicted=torch.ones_like(flipped),
        confidence=plain,
        confidence_hooked=hooked,
        flipped=flipped,
    )


def results_of(draw: "object", prompts: int = 40) -> Results:
    records = []
    for kind in beyond_confidence.KINDS:
        counts = [count_flips(draw(number, kind), 0) for number in range(prompts)]  # type: ignore[operator]
        records.append(Record({"model": "toy", "hidden": kind, "start": 0}, {"flips": counts}, 0.0))
    return finished_run({"settings": {"columns": 1}}, records)


def test_bins_are_half_units_of_the_log_odds() -> None:
    assert [bin_of(c) for c in (0.5, 0.49, 0.74, 0.99, 0.0, 1.0)] == [0, -1, 2, 9, -16, 30]
    assert all(bin_of(c) == math.floor(2 * math.log(c / (1 - c))) for c in (0.01, 0.2, 0.6, 0.9999))


def test_counts_are_those_of_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    plain, hooked = (torch.rand(6, 1, 9, generator=draw) for _ in range(2))
    flipped = torch.rand(6, 1, 9, generator=draw) < 0.4
    found = count_flips(replayed(plain, hooked, flipped), 0)
    best, before = hooked[:, 0].argmax(-1), plain[:, 0].argmax(-1)
    steps = torch.arange(6)
    assert found["open"] == 54
    assert found["flipped"] == int(flipped.sum())
    assert found["first_flipped"] == int(flipped[steps, 0, best].sum())
    assert found["plain_first_flipped"] == int(flipped[steps, 0, before].sum())
    assert found["rechosen"] == int((best != before).sum())
    totals = np.sum(list(found["bins"].values()), 0)
    named = dict(zip(CELLS, totals, strict=True))
    assert named["kept"] + named["flipped"] == named["first"] + named["others"] == 54
    assert named["first"] == 6
    change = (hooked - plain).double()
    assert named["flipped change"] == pytest.approx(float(change[flipped].sum()), abs=1e-3)
    assert named["kept change"] == pytest.approx(float(change[~flipped].sum()), abs=1e-3)


def test_at_equal_confidence_is_mantel_and_haenszel_s_difference() -> None:
    draw = np.random.default_rng(0)
    cells = draw.integers(0, 9, size=(5, len(CELLS))).astype(float)
    counts = {"bins": {str(number): one.tolist() for number, one in enumerate(cells)}}
    top, bottom = beyond_confidence.at_equal_confidence(counts, "first", "others", " flipped")
    expected, weights = [], []
    for one in cells:
        named = dict(zip(CELLS, one, strict=True))
        if named["first"] and named["others"]:
            weights.append(1 / (1 / named["first"] + 1 / named["others"]))
            expected.append(named["first flipped"] / named["first"] - named["others flipped"] / named["others"])
    assert top / bottom == pytest.approx(np.average(expected, weights=weights))


def test_sure_predictions_that_flip_less_are_no_evidence() -> None:
    """Flips depend on the confidence without the mask alone, and the mask does not change confidences."""

    def draw(number: int, kind: str) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(7 * number + len(kind))
        odds = torch.randint(-3, 6, (20, 1, 12), generator=generator) + 0.3
        plain = torch.sigmoid(odds) + 1e-6 * torch.rand(odds.shape, generator=generator)
        return replayed(plain, plain, torch.rand(odds.shape, generator=generator) > plain)

    found = results_of(draw)
    first, everywhere = (
        beyond_confidence.flips(found, "toy", "sinks", top, bottom)
        for top, bottom in (("first_flipped", "first"), ("flipped", "open"))
    )
    assert first.high < everywhere.low - 0.2  # the rule that this one replaces would agree
    verdicts = [one.verdict for one in beyond_confidence.findings(found)]
    assert verdicts[1:] == ["undecided", "undecided", "no counterpart"]


def test_a_mask_that_lowers_the_confidence_where_it_flips_is_found() -> None:
    def draw(number: int, kind: str) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(11 * number + len(kind))
        plain = 0.5 + 0.4 * torch.rand(20, 1, 12, generator=generator)
        flipped = torch.rand(plain.shape, generator=generator) < 0.3
        hooked = torch.where(flipped & (torch.tensor(kind == "sinks")), plain - 0.3, plain)
        return replayed(plain, hooked, flipped)

    found = results_of(draw)
    less, spared, chosen, about = beyond_confidence.findings(found)
    assert [one.verdict for one in (less, spared, chosen)] == ["agrees"] * 3
    # The same in all 40 prompts: so many as Wilson's bound of 0 of 40 may have any other difference.
    unseen = 1.96**2 / (40 + 1.96**2)
    assert f"-0.300 [{-0.3 - 0.7 * unseen:.3f}, {-0.3 + 1.3 * unseen:.3f}]" in less.here
    more = beyond_confidence.more_than_control(found, "toy")
    assert more.high < -0.1
    assert about.verdict == "no counterpart"
