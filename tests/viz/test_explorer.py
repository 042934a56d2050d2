"""The explorer's kernel side: what a click makes is what denoise, compare, replay and the lens give directly."""

import builtins
import json
import sys

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import ablate, at_heads, at_layers, capture, mask_positions, sink
from dlm_lens.recording import rerun
from dlm_lens.sinks import LowKeyNorm, find_sinks, received_of
from dlm_lens.testing import tiny
from dlm_lens.viz.exploring.exploration import Selection
from dlm_lens.viz.exploring.page_requests import split
from dlm_lens.viz.exploring.sides import CanvasEdit, HiddenHead, HiddenKey

PROMPT = [[5, 6, 7]]
FAMILIES = [
    "llada",
    "dream",
    "smdm",
    "sink_qwen",
    "bd3lm",
    "llada2",
    "diffugpt",
    "causal",
    "uniform_qwen",
    "duo",
    "diffusion_gemma",
]
HEAD = at_heads(at_layers(ablate("z"), [1]), [2])


def explorer_of(name, given=PROMPT, **settings):
    config = {"num_sinks": 1} if name == "sink_qwen" else {}
    return dl.viz.explore(tiny(name, **config), given, **{"gen_length": 8, **settings})


class Page:
    """Sends what the page sends, and keeps what it would get."""

    def __init__(self, explorer):
        self.explorer, self.answers = explorer, []
        explorer.send = lambda content, buffers=None: self.answers.append((content, buffers))

    def ask(self, kind, side="run", **request):
        shown = self.explorer._shown
        version = shown.get(side)
        self.explorer._received(
            self.explorer, {"kind": kind, "side": side, "version": version, "id": "1", **request}, []
        )
        content, buffers = self.answers[-1]
        json.dumps(content)  # everything but the buffers is JSON
        return self.joined(content, buffers)

    def joined(self, value, buffers):
        if isinstance(value, list):
            return [self.joined(one, buffers) for one in value]
        if not isinstance(value, dict):
            return value
        if set(value) == {"buffer"}:
            return buffers[value["buffer"]]
        return {name: self.joined(one, buffers) for name, one in value.items()}


def array(part):
    return np.frombuffer(part["data"], dtype=np.dtype(f"<{part['dtype']}")).reshape(part["shape"])


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_keys_and_heads_are_the_run_with_these_hooks(name):
    explorer = explorer_of(name)
    model = explorer._exploration.model
    direct = dl.denoise(model, PROMPT, gen_length=8)
    assert explorer.run.tokens.equal(direct.tokens)
    assert explorer.twin is None
    last = direct.tokens.shape[1] - 1
    page = Page(explorer)
    for request in (
        {"kind": "key", "position": 1},
        {"kind": "key", "position": last},
        {"kind": "head", "layer": 1, "head": 2},
    ):
        page.ask(**request)
        assert explorer._problem == ""
    hooks = [mask_positions(1, last), HEAD]
    recorded = dl.record(model, PROMPT, hooks=hooks, gen_length=8)
    assert explorer.twin.tokens.equal(recorded.run.tokens)
    torch.testing.assert_close(explorer.twin_received.values, received_of(recorded).values, equal_nan=True)
    pair = dl.sampling.Comparison(direct, recorded.run, ())
    assert explorer.comparison.changed.equal(pair.changed)
    assert f"{int(pair.tokens_changed)} of {int(pair.answer.sum())} tokens" in explorer._summary
    page.ask("undo")
    assert [repr(hook) for hook in explorer.hooks] == [repr(mask_positions(1, last))]
    page.ask("clear")
    assert explorer.twin is None
    assert explorer.changes == ()


@pytest.mark.parametrize("name", ["llada", "dream", "bd3lm", "uniform_qwen"])
def test_a_planted_token_is_there_at_its_step_and_the_steps_before_are_the_same(name):
    explorer = explorer_of(name)
    model, page = explorer._exploration.model, Page(explorer)
    page.ask("plant", step=2, position=5, token="w9")
    token = model.tokenizer("w9")["input_ids"][0]
    assert explorer.twin.canvases[2, 0, 5] == token
    assert explorer.twin.canvases[:2].equal(explorer.run.canvases[:2])

    def plant(step, canvas):
        if step == 2:
            canvas[:, 5] = token
            return canvas
        return None

    assert explorer.twin.tokens.equal(dl.denoise(model, PROMPT, gen_length=8, on_canvas=plant).tokens)


def test_an_opened_position_is_open_at_its_step_and_filled_in_again():
    explorer = explorer_of("llada")
    Page(explorer).ask("open", step=3, position=1)
    assert explorer.twin.masked[3, 0, 1]
    assert explorer.twin.canvases[3, 0, 1] == 63
    assert not explorer.twin.masked[-1].any()
    assert not explorer.twin.masked[2, 0, 1]
    # The edited prompt is the run's own for a comparison, which counts the answer.
    assert int(explorer.comparison.answer.sum()) == 8


def test_negative_steps_positions_and_heads_count_from_the_end():
    explorer = explorer_of("llada")
    model, position = explorer._exploration.model, explorer.run.tokens.shape[1] - 1
    explorer.plant(-1, 4, "w11")
    assert explorer._changes[0] == {"kind": "edit", "step": 7, "position": 4, "text": "w11"}
    token = model.tokenizer("w11")["input_ids"][0]

    def plant(step, canvas):
        if step == 7:
            canvas[:, 4] = token
        return canvas

    assert explorer.twin.tokens.equal(dl.denoise(model, PROMPT, gen_length=8, on_canvas=plant).tokens)
    explorer.clear()
    explorer.open_again(-6, -1)
    assert explorer.changes == (dl.viz.CanvasEdit(2, position, 63),)
    explorer.plant(2, position, "w9")  # another edit of the same place
    assert len(explorer.changes) == 1
    explorer.clear()
    explorer.hide_head(-1, 0)
    assert explorer.changes == (dl.viz.HiddenHead(1, 0),)
    explorer.hide_head(1, 0)  # the same head, which is given back
    assert explorer.changes == ()
    explorer.hide(-1)
    assert explorer.changes == (dl.viz.HiddenKey(position),)
    for do, sentence in (
        (lambda: explorer.plant(-9, 4, 9), "step -9 of 8"),
        (lambda: explorer.plant(0, -12, 9), "position -12 of 11"),
        (lambda: explorer.plant(0, sink(0), 9), r"position is sink\(0\); give a whole number"),
        (lambda: explorer.hide_head(-3, 0), "layer -3 of 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            do()


def test_a_negative_position_of_an_ar_model_is_one_of_the_answer():
    explorer = explorer_of("causal")
    explorer.plant(0, -2, 9)
    steps, position = explorer.run.steps, explorer.run.tokens.shape[1] - 2
    assert explorer.changes == (dl.viz.CanvasEdit(steps - 2, position, 9),)
    assert explorer.twin.tokens[0, position] == 9


def test_an_ar_model_decodes_the_planted_token():
    explorer = explorer_of("causal")
    position = explorer.run.prompt_length + 2
    explorer.plant(5, position, 9)
    assert explorer.changes[0].step == 2  # which decodes it
    assert explorer.twin.tokens[0, position] == 9
    assert explorer.twin.tokens[0, :position].equal(explorer.run.tokens[0, :position])
    for do, sentence in (
        (lambda: explorer.plant(0, 1, 9), "position 1 is in the prompt"),
        (lambda: explorer.plant(99, position, 9), "step 99 of"),
        (lambda: explorer.open_again(2, position), "no mask token"),
    ):
        with pytest.raises(ValueError, match=sentence):
            do()
    assert explorer.twin.tokens[0, position] == 9


@pytest.mark.parametrize("name", ["llada", "dream", "sink_qwen", "causal", "llada2"])
def test_lens_and_pattern_are_those_of_direct_calls(name):
    explorer = explorer_of(name)
    model, page = explorer._exploration.model, Page(explorer)
    explorer.hide(1)
    explorer.hide_head(1, 2)
    explorer.select(step=2, layer=1, head=3, position=4)
    hooks = [mask_positions(1), HEAD]
    for side, run, given in (("run", explorer.run, []), ("twin", explorer.twin, hooks)):
        lens = dl.logit_lens(model, run, [4], steps=[2], controls=False, hooks=given)
        lens = lens.hooked or lens
        answer = page.ask("lens", side, step=2, position=4)
        assert answer["probabilities"] == lens.top_probabilities[0].tolist()
        assert answer["entropy"] == lens.entropy[0].tolist()
        layout = dl.attention.SinkLayout.of(model)
        kept = capture(model, run, "pattern", cache_steps=2, layers=[1], hooks=given)["pattern", 1, 2][0, 3]
        expected = layout.sinks_last(kept)[layout.canvas(kept.shape[0])]
        answer = page.ask("pattern", side, step=2, layer=1, head=3)
        found = torch.tensor(array(answer["values"]))
        seen = expected.shape[0]
        keys = [*range(seen), *range(found.shape[1] - layout.count, found.shape[1])]
        torch.testing.assert_close(found[:seen][:, keys], expected)
        torch.testing.assert_close(explorer.pattern(twin=side == "twin"), found)
        if given:
            assert not found[:, 1].any()


@pytest.mark.parametrize("name", ["llada", "sink_qwen", "causal"])
def test_the_page_gets_the_scores_of_the_recording(name):
    explorer = explorer_of(name, gen_length=6)
    page = Page(explorer)
    content = page.ask("run")["content"]
    received, run = explorer.received, explorer.run
    keys = received.values.shape[-1]
    assert content["positions"] == [*range(run.tokens.shape[1]), *(-1 - i for i in range(received.sinks))]
    ids = np.array(content["ids"])[array(content["tokens"])]
    assert ids[:, : run.tokens.shape[1]].tolist() == run.canvases[:, 0].tolist()
    for step in (0, 3):
        answer = page.ask("step", step=step)
        values = received.values[step, 0].flatten(0, 1)
        counts = array(answer["strongest"]["count"])[: len(values), 0]
        at = 0
        found = array(answer["strongest"]["score"]), array(answer["strongest"]["key"])
        for pattern, count in enumerate(counts):
            scores = values[pattern][torch.tensor(found[1][at : at + count].astype(int))]
            assert found[0][at : at + count].tolist() == scores.tolist()
            assert count == int(values[pattern].isfinite().sum())
            at += count
    path = page.ask("path", level="layer", layer=1, head=0)
    mean = received.at_level("layer").values[:, 0, 1, 0]
    totals = array(path["statistics"]["total"])[0]
    np.testing.assert_allclose(totals, mean.double().nansum(-1), rtol=1e-9)
    assert array(path["bins"]).shape == (1, keys, run.steps)
    names = {rule["name"]: rule for rule in path["stored"]}
    rule = names["AttentionShare(threshold=0.3)"]
    sinks = find_sinks(received, dl.sinks.AttentionShare(), level="layer").is_sink
    assert array(rule["count"]).tolist() == sinks[:, 0, 1].sum(-1).tolist()


def test_a_run_of_a_batch_is_shown_alone_and_rows_are_chosen():
    model = tiny("llada")
    batch = dl.denoise(model, ["w1 w2 w3", "w4 w5"], gen_length=8, seed=[3, 4], temperature=0.5)
    explorer = dl.viz.explore(model, batch, row=1)
    assert explorer.run.tokens[0].equal(batch.tokens[1, 1:])
    assert len(explorer._rows) == 2
    explorer.hide(0)
    direct = dl.denoise(model, "w4 w5", gen_length=8, seed=4, temperature=0.5, hooks=[mask_positions(0)])
    assert explorer.twin.tokens.equal(direct.tokens)
    page = Page(explorer)
    facts = page.ask("run")["content"]
    assert (facts["row"], facts["rows"], facts["some_rows"]) == (1, 2, False)
    page.ask("row", row=0)
    explorer.row = np.int64(0)
    assert explorer.row == 0
    assert explorer.run.tokens.equal(batch.tokens[:1])
    assert explorer.twin is None
    assert page.ask("run")["content"]["row"] == 0
    prompts = dl.viz.explore(model, ["w1 w2 w3", "w4 w5"], row=1, gen_length=8, seed=[3, 4], temperature=0.5)
    assert prompts.run.tokens[0].equal(batch.tokens[1, 1:])


def test_hooks_of_the_run_stay_in_the_twin():
    model = tiny("llada")
    own = mask_positions(0)
    run = dl.denoise(model, "w1 w2 w3", gen_length=8, hooks=[own])
    with pytest.raises(
        ValueError, match=r"the run had the hooks \[mask_positions\(0\)\] and explore was given \[\]"
    ):
        dl.viz.explore(model, run)
    explorer = dl.viz.explore(model, run, hooks=[own])
    explorer.hide_head(1, 2)
    assert explorer.twin.tokens.equal(dl.denoise(model, "w1 w2 w3", gen_length=8, hooks=[own, HEAD]).tokens)


def test_a_run_that_its_settings_do_not_repeat_is_refused():
    model = tiny("llada")

    def plant(step, canvas):
        canvas[:, -1] = 9
        return canvas

    run = dl.denoise(model, "w1 w2 w3", gen_length=8, on_canvas=plant)
    with pytest.raises(ValueError, match="repeated from its prompt, seed and settings, has other tokens"):
        dl.viz.explore(model, run)


def test_the_selection_is_read_and_set():
    explorer = explorer_of("sink_qwen")
    page = Page(explorer)
    page.ask("select", step=3, layer=1, head=2, position=-1)
    assert explorer.selection == Selection(3, 1, 2, sink(0))
    for wrong in (1, (1, 2, 3), None):
        with pytest.raises(ValueError, match=r"selection is .*; give a Selection, or step, layer"):
            explorer.selection = wrong
    explorer.selection = (-1, 0, 1, -2)
    steps, positions = explorer.run.steps, explorer.run.tokens.shape[1]
    assert explorer.selection == Selection(steps - 1, 0, 1, positions - 2)
    assert explorer._selection == {"step": steps - 1, "layer": 0, "head": 1, "position": positions - 2}
    for bad, sentence in (
        ({"step": steps}, "step 8 of 8"),
        ({"layer": 5}, "layer 5 was not recorded"),
        ({"head": 9}, "head 9 is not there"),
        ({"position": 99}, "position 99 of"),
        ({"position": sink(7)}, "sink token 7 of 1"),
        ({"place": 1}, "a selection has no place"),
        ({"step": "3"}, "give a whole number"),
    ):
        with pytest.raises(ValueError, match=sentence):
            explorer.select(**bad)
    assert explorer.selection.step == steps - 1


def test_numbers_of_tables_and_tensors_are_whole_numbers():
    """`sinks.table()` has numbers of numpy; an id of numpy was taken for the text of a token."""
    explorer = explorer_of("llada")
    row = dl.find_sinks(explorer.received, dl.AboveMean(0.1)).table().iloc[0]
    explorer.select(step=row["step"], layer=row["layer"], head=row["head"], position=torch.tensor(4))
    assert explorer.selection == Selection(int(row["step"]), int(row["layer"]), int(row["head"]), 4)
    explorer.hide(np.int64(1))
    explorer.hide_head(np.int64(1), torch.tensor(2))
    for token in (np.int64(9), torch.tensor(9)):
        explorer.plant(np.int64(2), np.int64(4), token)
        assert explorer.changes == (HiddenKey(1), HiddenHead(1, 2), CanvasEdit(2, 4, 9))
        assert explorer.twin.canvases[2, 0, 4] == 9
        explorer.undo()
    code = explorer.code
    assert "np.int64" not in code
    assert f"layer={int(row['layer'])}, head={int(row['head'])}" in code
    for bad, sentence in (
        (lambda: explorer.select(layer=True), "layer is True; give a whole number"),
        (lambda: explorer.select(head=1.0), r"head is 1\.0; give a whole number"),
        (lambda: explorer.hide(1.0), r"position is 1\.0; give a whole number from 0 to"),
        (lambda: explorer.plant(2, 4, 7.0), r"the token is 7\.0; give its text or its id"),
        (lambda: explorer.plant(2, 4, True), "the token is True; give its text or its id"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bad()


def test_what_fails_is_a_sentence_and_the_state_stays(monkeypatch):
    explorer = explorer_of("llada")
    page = Page(explorer)
    page.ask("key", position=1)
    twin, changes = explorer.twin, explorer.changes

    def fails(*_, **__):
        raise RuntimeError("CUDA is out of memory\nand more")

    monkeypatch.setattr("dlm_lens.viz.exploring.sides.denoise", fails)
    answer = page.ask("head", layer=0, head=0)
    assert answer["problem"] == "RuntimeError: CUDA is out of memory (explorer.error has the traceback)"
    assert explorer._problem == answer["problem"]
    assert isinstance(explorer.error, RuntimeError)
    assert (explorer.twin is twin, explorer.changes, explorer._busy) == (True, changes, {})
    monkeypatch.undo()
    for request, sentence in (
        ({"kind": "key", "position": 99}, "position 99 of 11"),
        ({"kind": "head", "layer": 7, "head": 0}, "layer 7 of 2"),
        ({"kind": "plant", "step": 1, "position": 4, "token": "w1 w2"}, "is 2 tokens (w1, w2); give one token"),
        ({"kind": "nothing"}, "which is none"),
    ):
        assert sentence in page.ask(**request)["problem"]
        assert explorer.twin is twin
    assert page.ask("step", version=-1, step=0)["stale"]
    page.ask("undo")
    assert explorer._problem == ""
    assert explorer.error is None


def test_the_steps_of_a_run_are_told():
    explorer = explorer_of("llada")
    told = []
    explorer.observe(lambda change: told.append(change["new"]), "_busy")
    explorer.hide(1)
    assert told[0] == {"what": "repeating the run"}
    assert told[-2] == {"what": "repeating the run", "done": 8, "of": 8}
    assert told[-1] == {}


def test_going_back_runs_nothing(monkeypatch):
    explorer = explorer_of("llada")
    explorer.hide(1)
    first = explorer.twin
    explorer.hide_head(1, 2)
    monkeypatch.setattr("dlm_lens.viz.exploring.sides.denoise", None)
    explorer.undo()
    assert explorer.twin is first
    assert explorer.changes == (dl.viz.HiddenKey(1),)
    explorer.undo()
    assert explorer.twin is None
    explorer.undo()  # nothing is left to go back to
    assert explorer.changes == ()


def test_bad_input_is_one_sentence_before_any_work(monkeypatch):
    model = tiny("llada")
    monkeypatch.setattr("dlm_lens.viz.exploring.sides.denoise", None)
    for given, settings, sentence in (
        ("w1", {"row": 1}, "row 1 of 1"),
        ("w1", {"observers": ()}, "explore takes no observers"),
        ("w1", {"detector": LowKeyNorm()}, "reads hidden states"),
        ("w1", {"detector": "above"}, "above"),
        ("", {}, "empty"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dl.viz.explore(model, given, **settings)
    monkeypatch.undo()
    recording = dl.record(model, "w1 w2", gen_length=8)
    with pytest.raises(ValueError, match="settings go with a prompt"):
        dl.viz.explore(model, recording, steps=4)
    with pytest.raises(ValueError, match="a recording of every step"):
        dl.viz.explore(model, recording.select(step=slice(2, 5)))
    keys = rerun(model, recording.run, [dl.recording.KeyNorm()])
    with pytest.raises(ValueError, match="has no received"):
        dl.viz.explore(model, keys)
    with pytest.raises(ValueError, match="has no sampler"):
        dl.viz.explore(torch.nn.Linear(2, 2), "w1")


def test_without_anywidget_there_is_a_sentence(monkeypatch):
    found = builtins.__import__

    def missing(name, *rest):
        if name == "anywidget":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.delitem(sys.modules, "dlm_lens.viz.exploring.widget", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'dlm-lens\[notebook\]'; without it, dl.viz.report"):
        dl.viz.explore(tiny("llada"), "w1")


def test_a_message_is_split_into_json_and_bytes():
    assert split({"a": [b"x", {"b": b"yz"}], "c": (1, "t")}) == (
        {"a": [{"buffer": 0}, {"b": {"buffer": 1}}], "c": [1, "t"]},
        [b"x", b"yz"],
    )
