"""Sinks followed by token where a sampler inserts and deletes masks, against lists and planted scores."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling.moved_tokens import NOWHERE, history_places
from dlm_lens.sinks.followed_tokens import of_tokens
from dlm_lens.testing import tiny
from tests.sampling.test_dreamon import GREEDY, PROMPTS, resizing
from tests.sampling.test_moved_tokens import by_hand

RULE = dl.AboveMean(eps=3.0)


@pytest.fixture(scope="module")
def model() -> Any:
    """A network whose texts grow and shrink, also before tokens that were given."""
    return resizing(seed=6)


@pytest.fixture(scope="module")
def recording(model: Any) -> dl.Recording:
    return dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **GREEDY)


def histories(model: Any, prompt: list[int], seen: Tensor) -> list[dict[int, int]]:
    """Of everything that the text ever held, its canvas position at each step: from lists of numbers."""
    texts = by_hand(model, prompt)
    order = list(range(len(texts[0])))
    here = list(order)
    found: dict[int, dict[int, int]] = {entry: {} for entry in order}
    for step, text in enumerate(texts[: len(seen)]):
        if step:
            was, here = here, []
            for element in text:
                entry = was[element.places[-1]]
                if entry in here:  # the second of two masks
                    entry = len(found)
                    order.insert(order.index(here[-1]) + 1, entry)
                    found[entry] = {}
                here.append(entry)
        for entry, position in zip(here, seen[step].nonzero()[:, 0].tolist(), strict=True):
            found[entry][step] = position
    return [found[entry] for entry in order]


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_an_entry_is_where_lists_by_hand_have_it(model: Any, recording: dl.Recording, row: int) -> None:
    run = recording.run
    steps = int(run.row_steps[row])
    padding = int((~run.attention_mask[row]).sum())
    expected = histories(model, PROMPTS[row], run.seen_content[:steps, row])
    places = history_places(run)[:steps, row, padding : padding + len(expected)]
    for entry, history in enumerate(expected):
        assert places[:, entry].tolist() == [history.get(step, NOWHERE) for step in range(steps)]
    later = history_places(run)[:steps, row, padding + len(expected) :]
    assert bool((later == NOWHERE).all())


def test_something_is_inserted_and_deleted_in_these_runs(recording: dl.Recording) -> None:
    places = history_places(recording.run)
    there = places != NOWHERE
    assert bool((there[1:] & ~there[:-1]).any())
    assert bool((there[:-1] & ~there[1:]).any())
    assert bool((there[1:] & there[:-1] & (places[1:] != places[:-1])).any())


def test_every_number_is_the_one_at_the_tokens_position(recording: dl.Recording) -> None:
    run, given = recording.run, dl.received_of(recording)
    found, places = of_tokens(given, run), history_places(run)
    assert found.values.shape[-1] == places.shape[-1]
    for step, row, entry in torch.cartesian_prod(*map(torch.arange, places[:-1].shape)).tolist():
        at = int(places[step, row, entry])
        values = found.values[step, row, :, :, entry]
        if at == NOWHERE:
            assert bool(values.isnan().all())
            continue
        assert torch.equal(values.nan_to_num(-1), given.values[step, row, :, :, at].nan_to_num(-1))
        assert found.tokens is not None
        assert int(found.tokens[step, row, entry]) == int(run.canvases[step, row, at])
        for name in ("masked", "answer", "decided"):
            assert bool(getattr(found, name)[step, row, entry]) == bool(getattr(given, name)[step, row, at])
    # All attention is at an entry: nothing is left out.
    assert torch.allclose(found.column_sums.nansum(-1), given.column_sums.nansum(-1), rtol=1e-5)


def planted(recording: dl.Recording, row: int, entry: int) -> dl.Recording:
    """The recording with attention of 1 everywhere, and of 50 at one entry, wherever it is."""
    at = history_places(recording.run)[:-1, row, entry]
    values = torch.where(recording.received.isnan(), torch.nan, 1.0)
    for step, position in enumerate(at.tolist()):
        if position != NOWHERE:
            values[step, row, ..., position] = 50.0
    return replace(recording, arrays={**recording.arrays, "received": values})


def test_a_sink_whose_token_is_moved_has_not_moved(recording: dl.Recording) -> None:
    places = history_places(recording.run)
    there = places != NOWHERE
    moved = (there[1:] & there[:-1] & (places[1:] != places[:-1])).sum(0)
    row, entry = np.unravel_index(int(moved.argmax()), moved.shape)
    changed = planted(recording, int(row), int(entry))
    steps = there[:-1, row, entry].nonzero()[:, 0]
    by_token = dl.trajectories(changed, RULE, follow="token")
    own = by_token.table().query("batch == @row")
    assert set(own["first_step"]) == {int(steps[0])}
    assert set(own["last_step"]) == {int(steps[-1])}
    assert own["came_from"].isna().all()
    assert (by_token.kinds[row] == "static").all()
    assert "tokens followed" in by_token.rule
    by_position = dl.trajectories(changed, RULE)
    moves = by_position.table().query("batch == @row")["moved_by"].notna().sum()
    assert moves == int(moved[row, entry]) * by_position.kinds[row].size


def test_where_nothing_moves_it_changes_nothing() -> None:
    recording = dl.record(tiny("llada"), ["w5 w9", "w3"], [dl.ReceivedAttention(min_viewers=1)], gen_length=8)
    tables = [dl.trajectories(recording, "above-mean:1", follow=each).table() for each in ("position", "token")]
    assert len(tables[0])
    assert tables[0].equals(tables[1])


def test_what_levenshtein_steps_delete_and_insert_is_followed() -> None:
    edits = {"delete_token_id": 14, "split_token_id": 61}
    model = tiny("llada2", expert_capacity=4, block_size=4, **edits)
    settings: dict[str, Any] = {"gen_length": 24, "threshold": 0.1, "max_post_steps": 6}
    recording = dl.record(model, ["w5 w9 w14", "w7"], [dl.ReceivedAttention(min_viewers=1)], **settings)
    run, places = recording.run, history_places(recording.run)
    assert run.origins is not None
    assert places.shape[-1] > run.tokens.shape[-1]
    for step, row in torch.cartesian_prod(torch.arange(run.steps), torch.arange(2)).tolist():
        before, after = places[step, row].tolist(), places[step + 1, row].tolist()
        # Every canvas position is one entry's, in the order of the entries.
        assert [at for at in after if at != NOWHERE] == list(range(run.tokens.shape[-1]))
        origin = dict(zip(after, before, strict=True))
        assert [origin[at] for at in range(run.tokens.shape[-1])] == run.origins[step, row].tolist()


def test_what_cannot_be_followed_is_refused(recording: dl.Recording) -> None:
    with pytest.raises(TypeError, match="in a Recording, not in a Received"):
        dl.trajectories(dl.received_of(recording), RULE, follow="token")
    with pytest.raises(ValueError, match="follow"):
        dl.trajectories(recording, RULE, follow="tokens")  # type: ignore[arg-type]
