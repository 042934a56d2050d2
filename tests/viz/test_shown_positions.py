"""Positions that people read count from the prompt's first token, in every table, figure, view and report."""

import json

import pytest
from matplotlib.collections import QuadMesh
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.hooks import mask_sinks
from dlm_lens.probes import commitment, logit_lens, replay, sink_writes
from dlm_lens.testing import tiny
from dlm_lens.viz.reporting.data import Subject, content_of
from tests.sampling import test_dreamon as dreamon
from tests.sampling.test_moved_tokens import by_hand

LONG, SHORT = [5, 6, 7, 8, 9, 10, 11, 12, 13], [12, 13, 14]
PADDING = len(LONG) - len(SHORT)
RULE = dl.AboveMean(0.3)
REDUCERS = [dl.recording.ReceivedAttention()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same short prompt beside a long one, and alone, with the same canvases."""
    model = tiny("sink_qwen")
    kwargs = {"steps": 4, "gen_length": 6, "block_length": 6}
    beside = dl.record(model, [LONG, SHORT], REDUCERS, seed=[1, 2], **kwargs)
    alone = dl.record(model, [SHORT], REDUCERS, seed=[2], **kwargs)
    assert beside.run.padding.tolist() == [0, PADDING]
    assert alone.run.padding.tolist() == [0]
    assert beside.run.canvases[:, 1, PADDING:].tolist() == alone.run.canvases[:, 0].tolist()
    path = beside.save(tmp_path_factory.mktemp("beside") / "rec")
    return model, beside, alone, path


def of_row(table, names):
    """Row 1's lines, whose canvas positions are those before the shift."""
    table = table[table["batch"] == 1]
    for name in names:
        there = table[name].notna() & (table[name] >= 0)
        assert (table[f"canvas_{name}"] - table[name])[there].eq(PADDING).all()
        assert there.any()
    return table.drop(columns=["batch", *(f"canvas_{name}" for name in names)]).reset_index(drop=True)


@pytest.mark.long
def test_tables_do_not_depend_on_what_stands_beside(pair):
    model, beside, alone, _ = pair
    for make, names in (
        (lambda rec: dl.find_sinks(rec, RULE).table(sort="place"), ["position"]),
        (lambda rec: dl.trajectories(rec, RULE).table(), ["position"]),
        (lambda rec: logit_lens(model, rec.run).table(), ["position", "predicts"]),
        (lambda rec: replay(model, rec.run, [mask_sinks(RULE)]).table(), ["position"]),
    ):
        ours, theirs = of_row(make(beside), names), make(alone)
        assert "canvas_position" not in theirs
        theirs = theirs.drop(columns="batch")
        for name in [*names, *({"token", "written", "top"} & set(theirs))]:
            assert ours[name].tolist() == theirs[name].tolist(), name
    gained = replay(model, beside.run, [mask_sinks(RULE)]).gained(None)
    assert (gained["canvas_position"] - gained["position"]).dropna().unique().tolist() == [0, PADDING]
    writes = sink_writes(model, beside.run, dl.find_sinks(beside, RULE)).table()
    of_row(writes, ["position"])
    trials = dl.sinks.position_or_token(model, beside.run, RULE, min_viewers=1).trials
    of_row(trials, ["position", "to"])
    sinks = dl.find_sinks(beside, RULE).table()
    assert sinks[sinks["token"] == "sink(0)"]["position"].isna().all()
    static = dl.trajectories(beside, RULE).summary(by="pattern")
    known = static[(static["batch"] == 1) & (static["canvas_static_position"].fillna(-1) >= 0)]
    assert len(known)
    assert (known["canvas_static_position"] - known["static_position"]).eq(PADDING).all()


def texts(figure):
    return "\n".join(artist.get_text() for artist in figure.findobj(lambda a: hasattr(a, "get_text")))


@pytest.mark.long
def test_figures_do_not_depend_on_what_stands_beside(pair):
    model, beside, alone, _ = pair
    for make in (
        lambda rec, row: dl.viz.sink_positions(rec, RULE, layer=0, head=0, row=row, blocks=rec.run.spans),
        lambda rec, row: dl.viz.sink_positions(dl.find_sinks(rec, RULE), layer=0, head=0, row=row),
        lambda rec, row: dl.viz.sink_positions(dl.trajectories(rec, RULE), layer=0, head=0, row=row),
        lambda rec, row: dl.viz.incoming_attention(rec, layer=0, head=0, row=row),
        lambda rec, row: dl.viz.attention_maps(model, rec.run, steps=[1], layer=0, head=0, row=row, detector=RULE),
        lambda rec, row: dl.viz.lens_table(logit_lens(model, rec.run), step=1, row=row),
        lambda rec, row: dl.viz.lens_table(
            logit_lens(model, rec.run), position=int(rec.run.padding[row]) + 4, row=row
        ),
    ):
        ours, theirs = make(beside, 1), make(alone, 0)
        assert texts(ours).replace("row 1", "row 0") == texts(theirs)
        for one, two in zip(ours.axes, theirs.axes, strict=True):
            assert one.get_ylim() == pytest.approx(two.get_ylim(), rel=1e-4)
            assert [p.get_bbox().bounds for p in one.patches if hasattr(p, "get_xy")] == [
                p.get_bbox().bounds for p in two.patches if hasattr(p, "get_xy")
            ]
            for a, b in zip(one.collections, two.collections, strict=True):
                assert a.get_offsets().tolist() == b.get_offsets().tolist()


def test_reports_and_views_do_not_depend_on_what_stands_beside(pair):
    model, beside, alone, _ = pair
    ours, theirs = content_of(Subject.of(beside, 1)), content_of(Subject.of(alone, 0))
    for name in ("positions", "prompt", "text", "texts"):
        assert ours[name] == theirs[name]
    assert ours["positions"][0] == 0
    assert (ours["padding"], theirs["padding"]) == (PADDING, 0)
    at = [beside.run.prompt_length + i for i in range(3)]
    view = dl.viz.attention_heads(beside.run, model, step=0, layer=0, row=1, positions=at)
    assert f"positions, 3 to 5 ({at[0]} to {at[-1]} on the canvas)" in " ".join(view.sentences)


def test_commands_take_and_show_positions_from_the_prompt(pair, monkeypatch):
    model, beside, _, path = pair
    monkeypatch.setattr("dlm_lens.adapters.load", lambda *_, **__: model)

    def printed(*arguments):
        result = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"], catch_exceptions=False)
        return json.loads(result.stdout)

    found = printed("sinks", path, "--detector", "above-mean:0.3", "--top", "100")["sinks"]
    listed = [line for line in found if line["position"] is not None]
    shift = {(line["batch"], line["canvas_position"] - line["position"]) for line in listed}
    assert shift == {(0, 0), (1, PADDING)}
    found = printed("lens", path, "--positions", "0,-1", "--model", "x", "--lines", "100")["entries"]
    last = beside.run.tokens.shape[1] - 1
    assert {(line["batch"], line["position"], line["canvas_position"]) for line in found} == {
        (0, 0, 0), (0, last, last), (1, 0, PADDING), (1, last - PADDING, last)
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"--positions {last + 1}: positions go from 0 to {last}"):
        CliRunner().invoke(cli.app, ["lens", str(path), "--positions", str(last + 1)], catch_exceptions=False)
    out = path.parent / "lens.svg"
    CliRunner().invoke(
        cli.app, ["plot", "lens-table", str(path), "--position", "0", "--row", "1", "-o", str(out)],
        catch_exceptions=False,
    )  # fmt: skip
    assert out.stat().st_size > 1000
    with pytest.raises(ValueError, match=f"positions of row 1 go from 0 to {last - PADDING}"):
        CliRunner().invoke(
            cli.app,
            ["plot", "lens-table", str(path), "--position", str(last), "--row", "1", "-o", str(out)],
            catch_exceptions=False,
        )


def test_a_commitment_map_names_the_positions_that_other_figures_name(pair):
    model, beside, alone, _ = pair
    maps = [
        dl.viz.commitment_map(commitment(model, rec.run), row=row).axes[0] for rec, row in ((beside, 1), (alone, 0))
    ]
    ours, theirs = ([label.get_text() for label in one.get_yticklabels()] for one in maps)
    assert ours == theirs
    assert [int(label.split(":")[0]) for label in ours] == list(range(len(SHORT), len(SHORT) + 6))


@pytest.mark.parametrize("row", range(3))
def test_a_commitment_map_has_the_readings_of_tokens_that_move(row: int) -> None:
    model = dreamon.resizing(seed=4)
    found = commitment(model, dl.denoise(model, dreamon.PROMPTS, **dreamon.GREEDY))
    axes, run = dl.viz.commitment_map(found, row=row).axes[0], found.run
    labels = [label.get_text().split(": ") for label in axes.get_yticklabels()]
    history = by_hand(model, dreamon.PROMPTS[row])
    (cells,) = [mesh.get_array() for mesh in axes.collections if isinstance(mesh, QuadMesh)]
    drawn = [one for one in history[-1] if one.decided >= 0]
    assert [token for _, token in labels] == [f"w{one.token}" for one in drawn]
    for line, one in zip(cells, drawn, strict=True):
        same = [read == one.token for read in one.read]
        states = [1 + right + (right and all(same[step:])) for step, right in enumerate(same)]
        assert line.tolist() == states + [0] * (run.steps - len(states))


def test_a_report_shows_both_sides_of_a_gap_as_the_prompt() -> None:
    model = dreamon.resizing(seed=5)
    recording = dl.record(model, dreamon.PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **dreamon.GREEDY)
    run = recording.run
    for row, prompt in enumerate(dreamon.PROMPTS):
        subject = Subject.of(recording, row)
        found = content_of(subject)
        assert found["prompt_text"] == " ".join(map(subject.text_of, prompt))
        shown = run.attention_mask[row].nonzero().flatten()
        given = found.get("given", [int(place < found["prompt"]) for place in found["positions"]])
        assert given == (~run.answer[row, shown]).int().tolist()
        assert sum(given) == sum(token != dreamon.MASK for token in prompt)
