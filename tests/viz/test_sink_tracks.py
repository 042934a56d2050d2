"""The track of one pattern's largest key: the same from received attention, sinks and trajectories."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.sinks import AboveMean, find_sinks, received_of, trajectories
from dlm_lens.testing import tiny
from dlm_lens.viz.selection import strongest
from dlm_lens.viz.sink_tracks import track_of

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 20, 7], [9, 9]]


@pytest.fixture(scope="module")
def recorded() -> Any:
    """Heads 1 and 3 of rows that end at unequal steps; scores up to 1, and one of 4.5 at every other step."""
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    rec = dl.record(tiny("llada2"), PROMPTS, reducers, gen_length=12, batch_size=1).select(head=[1, 3])
    drawn = torch.rand(rec.received.shape, generator=torch.Generator().manual_seed(0))
    drawn[::2, ..., 8] = 4.5
    return replace(rec, arrays={**rec.arrays, "received": drawn.where(rec.received.isfinite(), torch.nan)})


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_track_is_the_same_from_every_result(recorded: Any, row: int) -> None:
    rule, place = AboveMean(3.0), (1, 3)
    scores, padding = recorded.received[:, row, 1, 1], int(recorded.run.padding[row])
    there = ~scores.isnan()
    known = there.any(-1).nonzero().flatten().tolist()
    largest = [
        int(scores[step].nan_to_num(-1).argmax()) - padding if step in known else -1 for step in range(len(scores))
    ]
    masked = recorded.masked[:, row]
    passes = [step in known and float(scores[step].nan_to_num(-1).max()) == 4.5 for step in range(len(scores))]
    received, sinks = received_of(recorded), find_sinks(recorded, rule)
    found = [track_of(received, rule, *place, row), track_of(sinks, None, *place, row)]
    found.append(track_of(trajectories(recorded, rule), None, *place, row))
    for track in [*found[:2], track_of(received, None, *place, row)]:
        assert track.largest == largest
        assert track.passes == passes
    assert found[2].largest == [key if sink else -1 for key, sink in zip(largest, passes, strict=True)]
    content = ((there | masked).any(0).nonzero().flatten() - padding).tolist()
    for track in found:
        assert track.running == [step <= known[-1] for step in range(len(scores))]
        assert track.masked is not None
        assert track.masked.equal(masked[:, padding:])
        assert track.tokens == recorded.run.tokens[row, padding:].tolist()
    assert found[1].content == found[2].content == content
    assert not all(passes)
    assert any(passes)


def test_rows_end_at_unequal_steps(recorded: Any) -> None:
    assert len(set(recorded.run.row_steps.tolist())) > 1


def test_the_strongest_head_has_the_highest_mean_of_largest_scores(recorded: Any) -> None:
    for layer, head in product(range(2), range(2)):
        values = recorded.received.clone()
        values[1::2, :, layer, head, 8] += 1  # where there is one, at the steps without 4.5
        received = received_of(replace(recorded, arrays={**recorded.arrays, "received": values}))
        means = {}
        for place, of in product(range(2), range(2)):
            peaks = [scores[~scores.isnan()].max() for scores in values[:, :, place, of].flatten(0, 1)
                     if not bool(scores.isnan().all())]  # fmt: skip
            means[place, (1, 3)[of]] = float(torch.stack(peaks).mean())
        assert strongest(received) == max(means, key=lambda key: means[key]) == (layer, (1, 3)[head])
