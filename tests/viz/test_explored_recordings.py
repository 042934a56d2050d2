"""Recordings in the explorer: shown as they are where they have every score, repeated before a change."""

import pytest

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.sinks import received_of
from dlm_lens.testing import tiny
from tests.viz.test_explorer import Page


def test_a_recording_of_one_prompt_is_shown_without_a_pass(monkeypatch):
    model = tiny("llada")
    recording = dl.record(model, "w1 w2", gen_length=8)
    monkeypatch.setattr("dlm_lens.viz.exploring.sides.denoise", None)
    explorer = dl.viz.explore(model, recording)
    assert explorer.received.values.data_ptr() == recording.received.data_ptr()
    received = dl.viz.explore(model, (received_of(recording), recording.run)).received
    assert received.values.equal(recording.received)


def test_a_recording_that_its_settings_do_not_repeat_has_no_twin():
    model, sentence = tiny("llada"), "repeated from its prompt, seed and settings, has other tokens"

    def plant(step, canvas):
        if step == 2:
            canvas[:, 9] = 5
        return canvas

    edited = dl.record(model, "w1 w2 w3 w4", gen_length=8, steps=8, seed=2, on_canvas=plant)
    other = dl.record(tiny("llada", seed=1), "w1 w2 w3 w4", gen_length=8)
    for recording in (edited, other):
        explorer = dl.viz.explore(model, recording)
        for change in (lambda explorer: explorer.plant(7, 0, 9), lambda explorer: explorer.hide(1)):
            with pytest.raises(ValueError, match=sentence):
                change(explorer)
        assert explorer.twin is None
        assert explorer.changes == ()
        assert sentence in Page(explorer).ask("key", position=1)["problem"]


def test_a_recording_is_repeated_once_before_its_changes(monkeypatch):
    model, runs = tiny("llada"), []
    recording = dl.record(model, "w1 w2", gen_length=8)
    denoise = dl.denoise
    monkeypatch.setattr(
        "dlm_lens.viz.exploring.sides.denoise", lambda *a, **k: runs.append(k["hooks"]) or denoise(*a, **k)
    )
    explorer = dl.viz.explore(model, recording)
    explorer.hide(0)
    explorer.hide(1)
    assert list(map(repr, runs)) == ["()", "(mask_positions(0),)", "(mask_positions(0, 1),)"]
    assert explorer.received.values.data_ptr() == recording.received.data_ptr()


@pytest.mark.parametrize("part", [{"layer": [1]}, {"head": [1, 3]}, {"head": [0, 1]}], ids=str)
def test_a_recording_of_some_layers_or_heads_is_made_again_with_all(part):
    model = tiny("llada")
    whole = dl.record(model, [[*range(5, 17)]], gen_length=4, seed=2, temperature=0.5)
    explorer = dl.viz.explore(model, whole.select(**part))
    assert explorer.received.values.equal(received_of(whole).values)
    explorer.select(step=2, layer=1, head=3)
    explorer.hide(4)
    for twin, name in ((explorer.twin_received, "twin"), (explorer.received, "recording")):
        assert twin.layers == (0, 1)
        space = {"model": model}
        exec(explorer.code, space)  # noqa: S102  # our own code
        assert received_of(space[name]).values.equal(twin.values)
    assert space["received"].equal(explorer.twin_received.values[2, 0, 1, 3])


def test_scores_under_other_hooks_or_for_other_keys_are_made_again():
    model = tiny("llada")
    whole = dl.record(model, [[*range(5, 17)]], gen_length=4, seed=2)
    other = dl.recording.rerun(model, whole.run, [dl.ReceivedAttention()], hooks=[mask_positions(3)])
    few = dl.record(model, [[*range(5, 17)]], [dl.ReceivedAttention(min_viewers=1)], gen_length=4, seed=2)
    for source in (other, few):
        explorer = dl.viz.explore(model, source)
        assert explorer.received.values.equal(received_of(whole).values)
        space = {"model": model}
        exec(explorer.code, space)  # noqa: S102  # our own code
        assert received_of(space["recording"]).values.equal(explorer.received.values)
    ar = tiny("causal")
    few = dl.record(ar, [[*range(5, 17)]], [dl.ReceivedAttention(min_viewers=1)], gen_length=4)
    explorer = dl.viz.explore(ar, few)
    explorer.hide(0)
    assert explorer.received.values.isnan().sum() == explorer.twin_received.values.isnan().sum()


@pytest.mark.parametrize("steps", [slice(0, 3), [1, 4, 5]], ids=["first", "others"])
@pytest.mark.parametrize(
    "of",
    [lambda part: part, lambda part: (received_of(part), part.run), lambda part: part.run],
    ids=["recording", "scores and run", "run"],
)
def test_a_part_of_the_steps_is_refused_before_any_work(monkeypatch, of, steps):
    model = tiny("llada")
    whole = dl.record(model, [[1, 2, 3], [4, 5]], [dl.ReceivedAttention()], gen_length=8, steps=8)
    monkeypatch.setattr("dlm_lens.viz.exploring.sides.denoise", None)
    part = whole.select(step=steps, batch=[0])
    numbers = ", ".join(map(str, part.steps))
    wanted = rf"recording of every step; this one has a part of them \(steps {numbers}\): give the whole"
    with pytest.raises(ValueError, match=wanted):
        dl.viz.explore(model, of(part))
    # All steps of some rows are whole runs.
    monkeypatch.undo()
    assert dl.viz.explore(model, of(whole.select(batch=[0]))).run.steps == 8
