"""The two scales and their nulls, on planted scores whose answer is known."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.experiments.attention_sinks import fig8_static, two_scales
from dlm_lens.experiments.attention_sinks.two_scales import (
    aligned,
    differ_in_random_order,
    drift_of_random_positions,
    effective_cases,
    followed,
    moving_at_random_times,
    static_at_random_keys,
    uniform_attention,
)
from dlm_lens.experiments.intervals import Interval, bounded_share, ratio_over_prompts, unpaired_difference
from dlm_lens.sinks import Received

RULE = dl.AboveMean(3.0)


def bidirectional(sinks: list[list[int]], keys: int = 40, masked: torch.Tensor | None = None) -> Received:
    """One pattern whose sinks at every step are given; the score of a sink is 9, of another key 0.5."""
    values = torch.full((len(sinks), 1, 1, 1, keys), 0.5)
    for step, places in enumerate(sinks):
        values[step, ..., places] = 9.0
    return Received(
        values=values, expected=torch.ones(len(sinks), 1, 1, 1, keys),
        counted=torch.full((len(sinks), 1), keys), layers=(0,), masked=masked,
    )  # fmt: skip


def growing_prefix(steps: int = 12, prompt: int = 40) -> Received:
    """A causal pass with two heads: even attention, and one that gives most of its late queries to key 30."""
    total = prompt + steps
    values = torch.full((steps, 1, 1, 2, total), torch.nan)
    expected = torch.ones(steps, 1, 1, 1, total)
    for step in range(steps):
        length = prompt + step
        even = torch.ones(length, length).tril()
        even /= even.sum(-1, keepdim=True)
        preferring = even.clone()
        preferring[30:] = 0.2 * even[30:]
        preferring[30:, 30] += 0.8
        expected[step, ..., :length] = even.sum(0)
        for head, pattern in enumerate((even, preferring)):
            values[step, 0, 0, head, :length] = pattern.sum(0) / even.sum(0)
    return Received(
        values=values, expected=expected, layers=(0,),
        counted=torch.arange(prompt, total)[:, None],
    )  # fmt: skip


def test_uniform_causal_attention_is_a_static_first_key_on_column_sums_and_nothing_relative_to_uniform() -> None:
    # H_40 = 4.28 against a mean of the others of about 0.9: a sink of eps = 3 by the mask alone.
    paths = followed(growing_prefix(), RULE)
    assert paths["sums"].kinds[0, 0].tolist() == ["static", "static"]
    assert paths["sums"].static_position[0, 0, 0] == 0
    assert paths["relative"].kinds[0, 0].tolist() == ["none", "static"]
    assert paths["relative"].static_position[0, 0, 1] == 30
    even = followed(uniform_attention(growing_prefix()), RULE)
    assert even["sums"].kinds.tolist() == [[["static"]]]
    assert even["sums"].static_position.tolist() == [[[0]]]
    assert even["relative"].kinds.tolist() == [[["none"]]]


def test_a_sink_that_moves_by_construction_moves_on_both_scales() -> None:
    received = bidirectional([[4 + 6 * (step // 6)] for step in range(24)])
    paths = followed(received, RULE)
    for scale in two_scales.SCALES:
        assert paths[scale].kinds.tolist() == [[["moving"]]]
        assert int((paths[scale].before >= 0).sum()) == 3
        assert paths[scale].measures["moved_over_run"].item() == 1
    assert followed(uniform_attention(received), RULE)["sums"].kinds.tolist() == [[["none"]]]


def test_chance_of_a_hand_over_is_that_of_all_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_scales, "DRAWS", 4000)
    steps = 12
    paths = followed(bidirectional([[3] if step < 6 else [20] for step in range(steps)]), RULE)["sums"]
    assert paths.kinds.tolist() == [[["moving"]]]
    # The first sink is there from the start and ends after a step up to 10; the other begins at a step from 1 on.
    placements = [(last, first) for last in range(steps - 1) for first in range(1, steps)]
    together = [abs(first - last - 1) <= 1 for last, first in placements]
    moving, moves = moving_at_random_times(paths, seed=0)
    expected = sum(together) / len(placements)
    assert moves == pytest.approx(expected, abs=4 * math.sqrt(expected / 4000))
    # A moving pattern is not static: neither sink is there in 90% of the steps.
    apart = [
        hit and max(last + 1, steps - first) < 0.9 * len({*range(last + 1), *range(first, steps)})
        for hit, (last, first) in zip(together, placements, strict=True)
    ]
    assert moving == pytest.approx(sum(apart) / len(placements), abs=0.03)


def test_sinks_that_never_change_have_no_chance_to_move() -> None:
    paths = followed(bidirectional([[3, 20]] * 9), RULE)["sums"]
    assert moving_at_random_times(paths, seed=1) == (0.0, 0.0)


def test_lifetimes_are_placed_where_their_key_exists() -> None:
    received = bidirectional([[3] if step < 15 else [38] for step in range(20)])
    received.values[:14, ..., 38] = torch.nan
    paths = followed(received, RULE)["sums"]
    lives = paths.lives
    exists = np.where(lives.position == 38, 14, 0)
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, last = two_scales._placed(lives, exists, 20, rng)
        assert (first >= exists).all()
        assert (last[lives.position == 38] == 19).all()
        assert (first[lives.position == 3] == 0).all()


def test_random_order_of_the_steps_by_all_pairs() -> None:
    main = np.asarray([[1, 5, -1, 2], [1, 5, -1, 3], [1, 7, -1, -1], [1, 8, 4, -1], [2, 5, -1, 3]])
    found = differ_in_random_order(main)
    for pattern, path in enumerate(main.T):
        pairs = list(combinations(path[path >= 0].tolist(), 2))
        if pairs:
            assert found[pattern] == pytest.approx(sum(a != b for a, b in pairs) / len(pairs))
        else:
            assert math.isnan(found[pattern])


def test_static_at_random_keys() -> None:
    # A sink of one step is static wherever it is; one of 20 steps among 40 keys is not.
    once = followed(bidirectional([[]] * 9 + [[7]] + [[]] * 9), RULE)["sums"]
    assert static_at_random_keys(once, seed=0) == 1
    often = followed(bidirectional([[7]] * 20), RULE)["sums"]
    assert often.kinds.tolist() == [[["static"]]]
    assert static_at_random_keys(often, seed=0) == 0
    assert static_at_random_keys(followed(bidirectional([[]] * 9), RULE)["sums"], seed=0) == 0


def test_drift_of_an_order() -> None:
    steps = torch.eye(10, dtype=torch.bool).numpy()
    assert drift_of_random_positions(steps, seed=0) == pytest.approx({"drift": 1.0, "right": 1.0})
    assert drift_of_random_positions(steps[:, ::-1], seed=0) == pytest.approx({"drift": -1.0, "right": 0.0})
    nowhere = drift_of_random_positions(np.zeros((10, 10), bool), seed=0)
    assert all(math.isnan(value) for value in nowhere.values())


def test_alignment_by_hand() -> None:
    main = np.asarray([[9, 4, 9], [8, 4, -1], [7, 4, 2]])
    found = aligned(main, np.asarray([9.0, 8.0, 7.0]))
    assert found[0].tolist() == pytest.approx([0.0, 8 / 9])
    assert np.isnan(found[1]).all()  # one position
    assert found[2].tolist() == pytest.approx([(0 + 5) / 2, (0 + 2 + 7 + 5) / 4])


def test_the_frontier_of_a_sink_that_is_always_at_the_last_mask() -> None:
    steps, keys = 20, 40
    masked = torch.zeros(steps, 1, keys, dtype=torch.bool)
    for step in range(steps):
        masked[step, 0, 10 : 38 - step] = True
    follows = bidirectional([[37 - step] for step in range(steps)], masked=masked)
    found = fig8_static._frontier(followed(follows, RULE)["sums"])
    assert found["onsets"] == found["onsets near"] == steps
    assert found["onsets by chance"] == pytest.approx(steps * 3 / keys)
    assert found["rightmost mask distance"] == 0
    differences = [abs(a - b) for a in range(steps) for b in range(steps)]
    assert found["rightmost mask random order"] == pytest.approx(sum(differences) / steps**2)
    away = fig8_static._frontier(followed(bidirectional([[2]] * steps, masked=masked), RULE)["sums"])
    assert (away["onsets"], away["onsets near"], away["rightmost mask n"]) == (1, 0, 0)


def test_the_heads_that_figure_8_shows() -> None:
    steps, keys = 20, 40
    masked = torch.zeros(steps, 1, keys, dtype=torch.bool)
    for step in range(steps):
        masked[step, 0, 10 : 38 - step] = True
    away, follows = [[30 - (step % 2)] for step in range(steps)], [[37 - step] for step in range(steps)]
    parts = [bidirectional(sinks, masked=masked) for sinks in ([[1]] * steps, away, follows)]
    joined = replace(parts[0], values=torch.cat([part.values for part in parts], 3))
    paths = followed(joined, RULE)["sums"]
    static = fig8_static._static_example(paths, shift=0)
    assert static == {"layer": 0, "head": 0, "steps": [0, 19], "positions": [1, 1]}
    assert fig8_static._at_beginning(paths, shift=0) == (1, 1)
    assert fig8_static._at_beginning(paths, shift=-3) == (1, 0)
    assert fig8_static._base(paths, shift=0) == pytest.approx(4 / keys)
    following = fig8_static._following_example(paths)
    assert following is not None
    assert (following["layer"], following["head"]) == (0, 2)
    assert following["positions"] == following["last masks"]
    assert fig8_static._following_example(followed(parts[0], RULE)["sums"]) is None


def test_difference_and_shares_without_spread() -> None:
    one, other = Interval(0.5, 0.4, 0.7, 96), Interval(0.1, 0.0, 0.4, 96)
    found = unpaired_difference(one, other)
    assert found.value == pytest.approx(0.4)
    assert found.low == pytest.approx(0.4 - math.hypot(0.1, 0.3))
    assert found.high == pytest.approx(0.4 + math.hypot(0.2, 0.1))
    none = bounded_share(Interval(0.0, 0.0, 0.0, 96), 96)
    assert none.low == 0
    assert none.high == pytest.approx(1.959964**2 / (96 + 1.959964**2))
    assert bounded_share(other, 96) == other


def test_a_share_of_none_of_many_patterns() -> None:
    # Bernoulli patterns in 96 prompts of 16: a design effect of 1. Equal patterns in a prompt: one of 16.
    rng = np.random.default_rng(0)
    alone = ratio_over_prompts(rng.binomial(16, 0.3, 96), [16] * 96, bounds=(0, 1))
    together = ratio_over_prompts(16 * rng.binomial(1, 0.3, 96), [16] * 96, bounds=(0, 1))
    assert effective_cases(96 * 16, alone) == pytest.approx(96 * 16, rel=0.25)
    assert effective_cases(96 * 16, together) == pytest.approx(96, rel=0.25)
    assert effective_cases(96 * 16, Interval(1.0, 1.0, 1.0, 96)) == 96
    none = Interval(0.0, 0.0, 0.0, 96)
    assert bounded_share(none, 960).high == pytest.approx(1.959964**2 / (960 + 1.959964**2))
    assert bounded_share(none, 10).high == bounded_share(none, 96).high


@pytest.mark.long
def test_every_order_of_a_model() -> None:
    from dlm_lens.experiments import find_experiment
    from dlm_lens.experiments.experiment import Bench

    settings = find_experiment("fig7-paths").config(True, given={"prompts": 2, "batch": 2})["settings"]
    settings["sampler"] = {"gen_length": 16, "steps": 16, "block_length": 8}
    bench = Bench()
    runs = two_scales.runs_in_every_order({"model": "toy", "start": 0}, settings, bench)
    assert list(runs) == ["blocks", "no blocks"]
    lengths = [{stop - start for start, stop in one[0].run.spans} for one in runs.values()]
    assert lengths == [{8}, {16}]
    settings["sampler"] = {"gen_length": 4}
    assert list(two_scales.runs_in_every_order({"model": "toy-ar", "start": 0}, settings, bench)) == [
        "left to right"
    ]
