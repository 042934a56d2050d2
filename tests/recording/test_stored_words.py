"""A loaded recording shows its tokens as the recording in memory does, in every function that shows tokens."""

from dataclasses import replace

import pytest

import dlm_lens as dl
from dlm_lens.hooks import mask_sinks
from dlm_lens.probes import logit_lens, replay, sink_writes
from dlm_lens.recording import Recording, RecordingSet
from dlm_lens.sampling.token_text import StoredTokenizer
from dlm_lens.testing import tiny

RULE = dl.AboveMean(0.3)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = tiny("llada")
    rec = dl.record(model, PROMPTS, [dl.recording.ReceivedAttention(), dl.recording.RegionMass()], steps=4,
                    gen_length=6, block_length=6)  # fmt: skip
    path = rec.save(tmp_path_factory.mktemp("words") / "rec")
    return model, rec, Recording.load(path), path


def test_texts_are_those_of_the_run(saved):
    _, rec, loaded, path = saved
    assert isinstance(loaded.run.tokenizer, StoredTokenizer)
    assert loaded.run.texts == rec.run.texts
    assert loaded.run.answers == rec.run.answers
    assert RecordingSet(path)[0].run.texts == rec.run.texts
    assert loaded.select(batch=1).run.texts == rec.run.texts[1:]
    again = loaded.save(path.parent / "again")
    assert Recording.load(again).run.texts == rec.run.texts


def test_tables_of_sinks_show_the_stored_words(saved):
    _, rec, loaded, _ = saved
    ours, theirs = dl.find_sinks(rec, RULE), dl.find_sinks(loaded, RULE)
    assert theirs.table().equals(ours.table())
    assert theirs.table()["token"].map(lambda word: isinstance(word, str) and word[0] in "w[<").all()
    paths = dl.trajectories(loaded, RULE)
    assert paths.table().equals(dl.trajectories(rec, RULE).table())
    enrichment = dl.sinks.token_enrichment(paths)
    assert enrichment.equals(dl.sinks.token_enrichment(dl.trajectories(rec, RULE)))
    assert {"mask", "words"} & set(enrichment["class"])


@pytest.mark.long
def test_probes_of_a_loaded_run_show_words(saved):
    model, rec, loaded, _ = saved
    ours, theirs = logit_lens(model, rec.run, steps=[0, 2]), logit_lens(model, loaded.run, steps=[0, 2])
    assert theirs.table().equals(ours.table())
    # Words that the run never held are the model's tokenizer's.
    tops = {word for words in theirs.table()["top"] for word in words}
    assert tops - {str(word) for word in rec.words.values()}
    assert all(isinstance(word, str) and not word.startswith("<3") for word in tops)
    hook = mask_sinks(dl.AboveMean(0.3))
    assert replay(model, loaded.run, [hook]).table().equals(replay(model, rec.run, [hook]).table())
    assert replay(model, loaded.run, [hook]).gained()["token"].map(type).eq(str).all()
    sinks = dl.find_sinks(loaded, RULE)
    assert sink_writes(model, loaded.run, sinks).table().equals(sink_writes(model, rec.run, sinks).table())
    assert dl.received_over_steps(model, loaded.run).tokenizer.fallback is model.tokenizer
    trials = dl.sinks.position_or_token(model, loaded.run, RULE, min_viewers=1).trials
    assert trials["token"].map(type).eq(str).all()


def test_views_and_reports_of_a_loaded_recording_show_words(saved, tmp_path):
    model, rec, loaded, _ = saved
    for page, run in ((tmp_path / "a.html", rec), (tmp_path / "b.html", loaded)):
        dl.viz.report(run, page)
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()
    ours, theirs = (dl.viz.received_tokens(one, layer=0, head=0) for one in (rec, loaded))
    assert [piece.props for piece in theirs.pieces] == [piece.props for piece in ours.pieces]
    ours, theirs = (dl.viz.attention_heads(one.run, model, step=1, layer=0) for one in (rec, loaded))
    assert [piece.props for piece in theirs.pieces] == [piece.props for piece in ours.pieces]
    ours, theirs = (list(dl.viz.emerging_lines(one.run)) for one in (rec, loaded))
    assert [line.plain for line in theirs] == [line.plain for line in ours]


def test_a_recording_with_words_alone_shows_them(saved):
    _, rec, _, _ = saved
    bare = dl.Recording(
        **{name: getattr(rec, name) for name in ("arrays", "specs", "layers", "answer", "steps", "rows", "words")},
        run=replace(rec.run, tokenizer=None),
        query_heads=rec.query_heads,
    )
    assert bare.run.texts[1].split()[:3] == ["w12", "w13", "w14"]
    assert dl.find_sinks(bare, RULE).table()["token"].tolist() == dl.find_sinks(rec, RULE).table()["token"].tolist()
