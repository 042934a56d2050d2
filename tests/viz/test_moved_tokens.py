"""Texts, reports and figures of runs whose tokens move, against lists of tokens: a move is no decision."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.sampling import part_of_run
from dlm_lens.sampling.emerging_text import canvas_after, changed_by
from dlm_lens.sampling.moved_tokens import history_places
from dlm_lens.viz.figures.attribution import _step_label
from dlm_lens.viz.figures.labels import token_labels
from dlm_lens.viz.reporting.data import Subject, content_of
from dlm_lens.viz.sink_tracks import row_blocks, track_of
from tests.sampling import test_llada2_levenshtein as levenshtein
from tests.sampling.test_dreamon import GREEDY, PROMPTS, resizing
from tests.sampling.test_moved_tokens import Element, by_hand
from tests.viz.test_report import unpacked

Histories = list[list[list[Element]]]


@pytest.fixture(scope="module", params=[4, 5])
def recorded(request: pytest.FixtureRequest) -> tuple[dl.recording.Recording, Histories]:
    model = resizing(seed=request.param)
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **GREEDY)
    return recording, [by_hand(model, prompt) for prompt in PROMPTS]


def decided_at(history: list[list[Element]]) -> list[list[str]]:
    """The tokens that each step decides; one or none."""
    return [[f"w{one.token}" for one in text if one.decided == step] for step, text in enumerate(history[1:])]


def coloured(props: Any, sign: int) -> list[str]:
    return [
        token.strip() for token, value in zip(props["tokens"], props["values"], strict=True) if sign * value > 0
    ]


def test_a_token_that_moves_is_decided_once(recorded: tuple[dl.recording.Recording, Histories]) -> None:
    """A token that an inserted mask moved was shown as decided again."""
    run, histories = recorded[0].run, recorded[1]
    assert any([] in decided_at(history) for history in histories)
    for row, history in enumerate(histories):
        wanted = decided_at(history)
        view = dl.viz.emerging_text(run, row=row, steps=range(len(wanted)))
        assert [coloured(piece.props, 1) for piece in view.pieces] == wanted
        assert not any(coloured(piece.props, -1) for piece in view.pieces)
        lines = [
            [(line.plain[span.start : span.end], str(span.style)) for span in line.spans]
            for line in dl.viz.emerging_lines(run, row=row)
        ]
        assert [[token for token, style in line if "green" in style] for line in lines] == wanted
        assert not any("yellow" in style for line in lines for _, style in line)
        assert [_step_label(run, step, row).split()[1:] for step in range(len(wanted))] == wanted


def test_a_part_shows_what_was_decided_between_its_steps(
    recorded: tuple[dl.recording.Recording, Histories],
) -> None:
    """The token that was decided was where another one had been, and was not green; that one was."""
    run, histories = recorded[0].run, recorded[1]
    for row, history in enumerate(histories):
        wanted = decided_at(history)
        for steps in ([0, 2], [1, 2]):
            pieces = dl.viz.emerging_text(part_of_run(run, steps, [row])).pieces
            assert coloured(pieces[1].props, 1) == sorted_as(pieces[1].props, wanted[steps[0] + 1 : steps[1] + 1])
            assert coloured(pieces[1].props, -1) == []


def test_a_step_before_a_gap_of_a_part_has_its_own_changes_on_its_own_canvas(
    recorded: tuple[dl.recording.Recording, Histories],
) -> None:
    """A token that the step moved was decided where it came, and what it left was opened again."""
    run, histories = recorded[0].run, recorded[1]
    for row, history in enumerate(histories):
        for step in range(len(history) - 3):
            part = part_of_run(run, [step, step + 2], [row])
            before = run.seen_content[step, row].nonzero().flatten().tolist()
            decided = {before[one.places[step]]: one.token for one in history[step + 1] if one.decided == step}
            own = run.canvases[step, row].tolist()
            tokens, opened = canvas_after(part, 0, 0)
            assert tokens[~opened].tolist() == [
                decided.get(at, token)
                for at, token in enumerate(own)
                if at in decided or not run.masked[step, row, at]
            ]
            new, again = changed_by(part, 0, 0)
            assert new.nonzero().flatten().tolist() == list(decided)
            assert not again.any()
            assert bool(part.seen_content[0, 0].equal(run.seen_content[step, row]))


def test_a_part_of_a_part_and_its_tokens_are_those_of_the_run(
    recorded: tuple[dl.recording.Recording, Histories],
) -> None:
    run = recorded[0].run
    for row in range(len(PROMPTS)):
        most = int(run.row_steps[row])
        for steps in ([0, 1, most - 1], [1, most - 2, most - 1]):
            part = part_of_run(run, steps, [row])
            again = part_of_run(part_of_run(run, range(most), [row]), steps, [0])
            for name in ("unmasked", "revised", "proposals", "canvases", "origins"):
                assert getattr(part, name).equal(getattr(again, name)), name
            decided = run.by_token.unmasked[steps, row]
            assert part.by_token.unmasked[:, 0].equal(decided)
            assert part.by_token.proposals[:, 0][decided].equal(run.by_token.proposals[steps, row][decided])


def sorted_as(props: Any, tokens: list[list[str]]) -> list[str]:
    """The tokens in the order of the line."""
    places = [token.strip() for token in props["tokens"]]
    return sorted((token for step in tokens for token in step), key=places.index)


def test_a_report_follows_masks_that_move(recorded: tuple[dl.recording.Recording, Histories]) -> None:
    recording, histories = recorded
    moves = 0
    for row, history in enumerate(histories):
        found = content_of(Subject.of(recording, row))
        seen = recording.run.seen_content[:, row][:, recording.run.attention_mask[row]]
        written, moved = (unpacked(found[name]) for name in ("written", "moved"))
        assert "revised" not in found
        for step, text in enumerate(history[1:]):
            before = seen[step].nonzero().flatten().tolist()
            after = seen[step + 1] if step + 2 < len(history) else None
            decided = [before[one.places[step]] for one in text if one.decided == step]
            assert np.flatnonzero(written[step]).tolist() == decided
            if after is None:
                continue
            keys = after.nonzero().flatten().tolist()
            for place, key in enumerate(before):
                made = [at for at, one in enumerate(text) if one.places[step] == place]
                assert moved[step, key] == (keys[made[0]] if len(made) == 1 else len(found["positions"]))
                moves += len(made) == 1 and keys[made[0]] != key
    assert moves


def marked(figure: Any, kind: str) -> list[tuple[int, int]]:
    """The (step, key) of a kind of marks in the first panel."""
    found = [dots for dots in figure.axes[0].collections if dots.get_gid() == kind]
    return [(round(x), round(y)) for dots in found for x, y in dots.get_offsets().tolist()]


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_sink_positions_of_tokens_are_where_the_tokens_were(
    recorded: tuple[dl.recording.Recording, Histories], row: int
) -> None:
    recording, run = recorded[0], recorded[0].run
    by_position = track_of(recording, "above-mean:1", 1, 1, row)
    by_token = track_of(recording, "above-mean:1", 1, 1, row, "all", "token")
    padding, places = int(run.padding[row]), history_places(run)[:-1, row]
    largest = [key if key < 0 else int(places[step, key + padding]) for step, key in enumerate(by_token.largest)]
    assert largest == [key if key < 0 else key + padding for key in by_position.largest]
    assert by_token.masked is not None
    known = (places != -1).nonzero().tolist()
    assert [bool(by_token.masked[step, key - padding]) for step, key in known if key >= padding] == [
        bool(run.masked[step, row, places[step, key]]) for step, key in known if key >= padding
    ]
    spans = row_blocks(run, row)
    for step, block in enumerate(by_token.blocks(spans)):
        inside = [
            key - padding for key in range(padding, places.shape[1]) if places[step, key] in range(*spans[step])
        ]
        expected = (inside[0], inside[-1] + 1) if inside and step < int(run.row_steps[row]) else None
        assert block == expected
    figure = dl.viz.sink_positions(
        recording, "above-mean:1", layer=1, head=1, row=row, follow="token", blocks=spans
    )
    marks = marked(figure, "sink") + marked(figure, "largest")
    assert sorted(marks) == [(step, key) for step, key in enumerate(by_token.largest) if key >= 0]
    assert figure.axes[0].get_ylabel() == "token, in the order of the canvases"
    about = figure.axes[0].get_title("left").replace("\n", " ")
    assert "Token with the highest score" in about
    assert "tokens followed where they move" in about
    assert f"{len(by_token.content)} tokens" in about
    ever = [any(places[:, key] >= 0) for key in range(padding, places.shape[1])]
    assert len(by_token.content) == sum(ever)


def test_a_token_that_only_moves_is_not_marked_as_rewritten(
    recorded: tuple[dl.recording.Recording, Histories],
) -> None:
    run = recorded[0].run
    assert run.revised.any()
    for row in range(len(PROMPTS)):
        figure = dl.viz.sink_positions(recorded[0], layer=1, head=1, row=row)
        assert marked(figure, "revised") == []
        assert figure.axes[0].get_ylabel() == "position"


def test_trajectories_of_tokens_take_no_canvas_positions(
    recorded: tuple[dl.recording.Recording, Histories],
) -> None:
    recording = recorded[0]
    paths = dl.trajectories(recording, "above-mean:1", follow="token")
    figure = dl.viz.sink_positions(paths, layer=1, head=1, row=2)
    assert figure.axes[0].get_ylabel().startswith("token")
    by_token = track_of(recording, "above-mean:1", 1, 1, 2, "all", "token")
    drawn = track_of(paths, None, 1, 1, 2)
    assert drawn.passes == by_token.passes
    wrong: list[dict[str, Any]] = [
        {"blocks": row_blocks(recording.run, 2)},
        {"revised": recording.run.revised[:, 2]},
    ]
    for given in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(given))} is of canvas positions"):
            dl.viz.sink_positions(paths, layer=1, head=1, row=2, **given)
    with pytest.raises(TypeError, match="in a Recording, not in a Trajectories"):
        dl.viz.sink_positions(paths, layer=1, head=1, follow="token")


def rewritten_by_hand(run: dl.DenoisingRun, row: int) -> list[tuple[int, int]]:
    """The (step, canvas position) whose decided token a step deletes, opens again or replaces by another."""
    found = []
    for step in range(int(run.row_steps[row])):
        came: Sequence[int] = run.origins[step, row].tolist()  # type: ignore[index]
        for place in range(int(run.padding[row]), len(came)):
            there = [at for at, origin in enumerate(came) if origin == place]
            token = run.canvases[step, row, place]
            same = [not run.masked[step + 1, row, at] and run.canvases[step + 1, row, at] == token for at in there]
            if not run.masked[step, row, place] and not (there and all(same)):
                found.append((step, place))
    return found


def test_what_llada2_2_rewrites_is_marked_where_it_was() -> None:
    recording = dl.record(
        levenshtein.model_of(), levenshtein.PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **levenshtein.RUN
    )
    run = recording.run
    raw, places = run.revised.nonzero().tolist(), history_places(run)
    for row in range(len(run.tokens)):
        expected, padding = rewritten_by_hand(run, row), int(run.padding[row])
        assert expected
        assert sorted(expected) != sorted((step, at) for step, of_row, at in raw if of_row == row)
        for step in range(int(run.row_steps[row]) - 2):
            part = part_of_run(run, [step, step + 2], [row])
            assert changed_by(part, 0, 0)[1].nonzero().flatten().tolist() == [at for s, at in expected if s == step]
        figure = dl.viz.sink_positions(recording, layer=1, head=1, row=row)
        assert sorted(marked(figure, "revised")) == sorted((step, at - padding) for step, at in expected)
        figure = dl.viz.sink_positions(recording, layer=1, head=1, row=row, follow="token")
        keys = [(step, places[step, row].tolist().index(at) - padding) for step, at in expected]
        assert sorted(marked(figure, "revised")) == sorted(keys)


def test_what_llada2_2_decides_deletes_and_rewrites_is_where_it_was() -> None:
    """A mask may be decided and take the place of a token that the step deletes."""
    recording = dl.record(
        levenshtein.model_of(), levenshtein.PROMPTS, [dl.ReceivedAttention()], seed=3, **levenshtein.RUN
    )
    run, taken = recording.run, 0
    for row in range(len(run.tokens)):
        found = content_of(Subject.of(recording, row))
        decided, revised, padding = unpacked(found["written"]), unpacked(found["revised"]), int(run.padding[row])
        for step in range(int(run.row_steps[row])):
            before, after, came = (
                run.canvases[step, row],
                run.canvases[step + 1, row],
                run.origins[step, row].tolist(),
            )
            written, rewritten = [], []
            for place in range(padding, len(before)):
                there = [at for at, origin in enumerate(came) if origin == place]
                if run.masked[step, row, place]:
                    written += [place - padding] * any(not run.masked[step + 1, row, at] for at in there)
                elif not there or any(run.masked[step + 1, row, at] or after[at] != before[place] for at in there):
                    rewritten.append(place - padding)
            assert np.flatnonzero(decided[step]).tolist() == written
            assert np.flatnonzero(revised[step]).tolist() == rewritten
            made = [at for at, origin in enumerate(came) if origin - padding in written]
            names = token_labels(
                after[[at for at in made if not run.masked[step + 1, row, at]]].tolist(), run.tokenizer
            )
            more = " …" if len(names) > 2 else ""
            assert _step_label(run, step, row) == f"{step}  {' '.join(names[:2])}{more}"
            taken += sum(not run.masked[step, row, at] for at in made)
    assert taken
