"""The largest sink, the ends of its path and the table of switches, where keys are held or steps have no score."""

import math

import pytest
import torch

from dlm_lens.sinks import AboveMean, trajectories
from tests.sinks.test_trajectories import RULE, received_of


def test_a_held_sink_is_the_largest_where_a_key_that_never_entered_has_a_higher_score():
    """Key 2 is held at 3.6, above 0.75 eps; key 7 has 3.8, below eps, and enters one step later."""
    values = torch.zeros(4, 10)
    values[:, 2] = torch.tensor([5.0, 3.6, 0.0, 0.0])
    values[:, 7] = torch.tensor([0.0, 3.8, 6.0, 5.0])
    paths = trajectories(received_of(values), AboveMean(4.0))
    assert paths.main.flatten().tolist() == [2, 2, 7, 7]
    assert paths.main_score.flatten().tolist() == pytest.approx([5.0, 3.6, 6.0, 5.0])


def test_the_ends_of_a_path_are_those_of_the_steps_that_have_scores():
    values = torch.full((6, 12), 0.5)
    for step, position in enumerate((2, 2, 4, 8, 0, 9)):
        values[step, position] = 20.0
    values[[0, 5]] = math.nan
    for changed, moved in ((values, 1.0), (values.index_copy(0, torch.tensor([4]), values[1:2]), 0.0)):
        measures = trajectories(received_of(changed), RULE).measures
        assert measures["moved_over_run"].tolist() == [moved]
        assert measures["displacement"].tolist() == [-2.0 * moved]
    # Of a pattern without any score there is no pair of steps.
    nothing = trajectories(received_of(torch.full_like(values, math.nan)), RULE).measures
    assert nothing[["move_rate", "switch_rate", "with_sink", "moved_over_run"]].isna().all(axis=None)


def test_rates_are_of_the_pairs_of_steps_that_both_have_scores():
    """A sink moves within each of two blocks, between which a class of queries is too small for scores."""
    values = torch.full((8, 12), 0.5)
    for step, position in enumerate((2, 4, 4, 0, 0, 7, 9, 9)):
        values[step, position] = 20.0
    values[3:5] = math.nan
    measures = trajectories(received_of(values), RULE).measures
    assert measures["moves"].tolist() == [2.0]
    assert measures["move_rate"].tolist() == [2 / 4]


def test_a_switch_says_how_far_the_largest_sink_moved():
    """Keys 0 and 7 are sinks at every step; which of them is larger changes twice."""
    values = torch.zeros(3, 12)
    values[:, 7], values[:, 0] = torch.tensor([9.0, 8.0, 9.0]), torch.tensor([8.0, 9.0, 8.0])
    table = trajectories(received_of(values), RULE).switches()
    assert table[["step", "from_position", "to_position", "moved_by"]].to_numpy().tolist() == [
        [1, 7, 0, -7],
        [2, 0, 7, 7],
    ]
    # Key 7 as a learned sink token has no position, so that no distance to it is known.
    table = trajectories(received_of(values[:, :8], sinks=1), RULE).switches()
    assert table[["from_position", "to_position"]].isna().to_numpy().tolist() == [[True, False], [False, True]]
    assert table["moved_by"].isna().all()
