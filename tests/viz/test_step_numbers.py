"""Figures and views of a part of a recording show the numbers that its steps have in the whole run."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens import viz
from dlm_lens.cli import app as cli
from dlm_lens.probes import activation_patching, logit_lens, proposed_commitment
from dlm_lens.recording import Recording
from dlm_lens.testing import tiny
from dlm_lens.viz.attention_snapshot import snapshot
from dlm_lens.viz.reporting.data import Subject, canvas_content

PART = [1, 4, 5]
RULE = dl.AboveMean(0.01)


@pytest.fixture(scope="module")
def recorded():
    model = tiny("llada")
    reducers = [dl.recording.ReceivedAttention(min_viewers=1)]
    return model, dl.record(model, [[1, 2, 3, 4]], reducers, steps=6, gen_length=6, block_length=6)


@pytest.fixture
def part(recorded) -> Recording:
    return recorded[1].select(step=PART)


def ticks(axis) -> list[str]:
    axis.figure.canvas.draw()
    return [label.get_text() for label in axis.get_ticklabels() if label.get_text()]


def test_incoming_attention(part: Recording) -> None:
    figure = viz.incoming_attention(part, layer=0, head=0)
    assert ticks(figure.axes[0].yaxis) == ["1", "4", "5"]
    figure = viz.incoming_attention(part, layer=0, head=0, steps=[5, 1])
    assert ticks(figure.axes[0].yaxis) == ["5", "1"]
    shown = figure.axes[0].collections[0].get_array().reshape(2, -1)
    assert shown[0].tolist() == part.received[2, 0, 0, 0].tolist()
    with pytest.raises(ValueError, match=r"step 2 does not exist; steps are 1, 4, 5"):
        viz.incoming_attention(part, layer=0, head=0, steps=[2])


@pytest.mark.parametrize("of", [lambda r: r, lambda r: dl.find_sinks(r, RULE), lambda r: dl.trajectories(r, RULE)])
def test_sink_positions(part: Recording, of) -> None:
    given = of(part)
    figure = viz.sink_positions(given, RULE if given is part else None, layer=0, head=0)
    assert ticks(figure.axes[0].xaxis) == ["1", "4", "5"]


@pytest.mark.parametrize("of", [lambda r: r.select(step=3), lambda r: dl.received_of(r).part(steps=slice(3, 4))])
def test_one_step_has_one_number(recorded, of) -> None:
    one = of(recorded[1])
    figure = viz.sink_positions(one, RULE, layer=0, head=0)
    assert ticks(figure.axes[0].xaxis) == ["3"]
    if isinstance(one, Recording):
        figure = viz.region_mass(dl.record(recorded[0], [[1, 2]], [dl.RegionMass()], steps=1, gen_length=1))
        shown = [tick for tick in figure.axes[-1].get_xticks() if -0.5 < tick < 0.5]
        assert shown == [0]


def test_score_distribution(part: Recording) -> None:
    figure = viz.score_distribution(part, parts=2)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[:2] == ["steps 1 to 4", "step 5"]


def test_commitment_map(part: Recording) -> None:
    figure = viz.commitment_map(proposed_commitment(part))
    left, right = figure.axes
    assert ticks(left.xaxis) == ["1", "4", "5"]
    labels = ticks(left.yaxis)
    where = proposed_commitment(part).predicted[:, 0].any(0).nonzero().flatten().tolist()
    assert [int(label.partition(": ")[0]) for label in labels] == where
    assert left.get_legend() is None
    assert len(figure.legends) == 1  # below both panels, where it takes no room of the left one
    (line,) = [one for one in right.lines if one.get_gid() == "accuracy"]
    assert set(line.get_xdata()) <= {1, 4, 5}


def test_lens_table(recorded, part: Recording) -> None:
    lens = logit_lens(recorded[0], part.run, range(4, 10))
    named = viz.lens_table(lens, position=4)
    assert [label.split("\n")[0] for label in ticks(named.axes[0].xaxis)] == ["1", "4", "5"]
    assert "step 4, 6 positions" in viz.lens_table(lens, step=1).axes[0].get_title(loc="left")


def test_attention_maps_and_views(recorded, part: Recording) -> None:
    model, whole = recorded
    for step in PART:
        ours, theirs = (snapshot(model, run, step=step, layer=1) for run in (part.run, whole.run))
        assert ours.pattern.equal(theirs.pattern)
        assert ours.step == theirs.step == step
    figure = viz.attention_maps(model, part.run, steps=[5], layer=0, head=0, detector=RULE)
    assert figure.axes[0].get_title().startswith("step 5:")
    view = viz.attention_pattern(part.run, model, step=4, layer=0, head=0)
    assert view.title.endswith("at step 4")
    assert "step 4" in view.sentences[0]
    with pytest.raises(ValueError, match=r"step 0 of 3: steps are 1, 4, 5"):
        snapshot(model, part.run, step=0, layer=0)


def test_views_of_the_text(part: Recording) -> None:
    views = viz.received_tokens(part, layer=0, head=0), viz.emerging_text(part.run, steps=[4])
    headings = [[piece.heading for piece in view.pieces] for view in views]
    assert headings == [["step 1", "step 4", "step 5"], ["after step 4"]]
    (line,) = viz.emerging_lines(part.run, steps=[5])
    assert line.plain == list(viz.emerging_lines(part.run))[2].plain
    assert re.findall(r"step (\d+)", part.run._repr_html_())[:3] == ["1", "4", "5"]


def test_a_report_of_scores_and_their_run(part: Recording, tmp_path: Path) -> None:
    assert Subject.of(part, 0).steps == Subject.of((dl.received_of(part), part.run), 0).steps == (1, 4, 5)


def test_the_command_line(part: Recording, tmp_path: Path) -> None:
    saved = part.save(tmp_path / "part")

    def plot(step: str) -> tuple[str, str]:
        page = tmp_path / f"{step}.html"
        result = CliRunner().invoke(
            cli.app, ["plot", "emerging-text", str(saved), "--steps", step, "-o", str(page)]
        )
        return str(result.exception or ""), page.read_text() if page.exists() else ""

    error, page = plot("4")
    assert not error
    assert "after step 4" in page
    assert plot("0") == ("step 0 does not exist; steps are 1, 4, 5", "")


def titled(figure) -> str:
    return figure.axes[0].get_title(loc="left").replace("\n", " ")


def test_captions_name_the_heads_layers_and_row_of_a_part(tmp_path: Path) -> None:
    whole = dl.record(tiny("llada"), [[1, 2, 3], [4, 5]], steps=2, gen_length=4)
    some = whole.select(head=[1, 3], layer=[1], batch=1)
    for draw in (viz.incoming_attention, viz.sink_positions):
        assert "level: layer (mean of heads 1, 3 of layer 1)" in titled(draw(some, layer=1, head=None))
        caption = titled(draw(some, layer=None, head=None))
        assert "level: model (mean over layer 1 and heads 1, 3)" in caption
        assert "n = 1 sequence (row 1)" in caption
        assert "level: layer (head mean of layer 1)" in titled(draw(whole, layer=1, head=None))
    view = viz.received_tokens(some, layer=1, head=None)
    assert "mean of heads 1, 3 of layer 1" in view.sentences[0]
    assert "(row 1)" in view.sentences[0]
    about = canvas_content(Subject.of(some, 0))
    assert (about["row"], about["some_rows"], about["some_layers"], about["some_heads"]) == (1, True, [1], [1, 3])


def test_figures_of_a_run_name_its_row_in_the_whole(tmp_path: Path) -> None:
    model = tiny("llada")
    whole = dl.record(model, [[1, 2, 3], [4, 5], [6, 7]], [dl.ReceivedAttention()], steps=2, gen_length=4)
    part = whole.select(batch=[2, 1])
    saved = Recording.load(part.save(tmp_path / "part"))
    rerun = dl.recording.rerun(model, part.run, [dl.ValueNorm()], rows=[1])
    assert part.run.row_numbers == part.rows == saved.run.row_numbers == (2, 1)
    assert rerun.rows == rerun.run.row_numbers == part.select(batch=1).run.row_numbers == (1,)
    for run in (part.run, saved.run):
        effects = activation_patching(model, run, [[8, 7], [9, 5]], steps=[0])
        figures = [
            viz.attribution_map(effects, row=1),
            viz.lens_table(logit_lens(model, run), step=0, row=1),
            viz.sink_discount(torch.ones(run.unmasked.shape), run, row=1),
            viz.commitment_map(proposed_commitment(run), row=1),
            viz.attention_maps(model, run, steps=[0], layer=0, head=0, row=1),
        ]
        for figure in figures:
            assert "(row 1)" in (figure.get_suptitle().replace("\n", " ") or titled(figure))
        assert "(row 2)" in titled(viz.attribution_map(effects, row=0))
        heads = viz.attention_heads(run, model, step=0, layer=0)
        one = viz.attention_pattern(run, model, step=0, layer=0, head=1, row=1)
        assert "; sequence 2; " in heads.sentences[0]
        assert "; sequence 1; " in one.sentences[0]
        assert ", sequence 2. " in viz.emerging_text(run).sentences[0]


def sentences(text: str) -> list[str]:
    return re.split(r" · |\n", text)


def test_captions_say_all_layers_and_heads_of_no_part() -> None:
    reducers = [dl.recording.ReceivedAttention(min_viewers=1), dl.RegionMass()]
    model, prompts = tiny("llada", num_hidden_layers=4), [[1, 2, 3], [4, 5]]
    first, middle = (
        dl.record(model, prompts, reducers, gen_length=4, layers=layers) for layers in ([0, 1], [1, 2, 3])
    )
    for given, layers in ((first, "layers 0, 1"), (middle, "layers 1 to 3"), (first.select(layer=[1]), "layer 1")):
        for part, heads in ((given, ""), (given.select(head=[1, 3]), "heads 1, 3")):
            assert f"mean over {heads or 'the heads'} of {layers}" in sentences(
                viz.region_mass(part).get_suptitle()
            )
            caption = viz.score_distribution(part).axes[0].get_title(loc="left")
            assert f"level: head, {heads or 'all heads'} of {layers}" in sentences(caption)
            model_mean = f"level: model (mean over {layers} and {heads or 'heads'})"
            for draw in (viz.incoming_attention, viz.sink_positions):
                assert model_mean in titled(draw(part, layer=None, head=None))
            paths = dl.trajectories(dl.find_sinks(part, RULE))
            assert (paths.layers, paths.heads) == (part.layers, part.heads or ())
    figure = viz.region_mass(middle.select(head=[1, 3]), layer=2)
    assert "mean over heads 1, 3 of layer 2" in sentences(figure.get_suptitle())
    about = canvas_content(Subject.of(first, 0))
    assert (about["some_layers"], about["some_heads"]) == ([0, 1], [])
    # Scores of a mean do not know the layers and heads that they are of.
    mean = dl.received_of(first).at_level("model")
    assert "level: model" in sentences(viz.score_distribution(mean).axes[0].get_title(loc="left"))


def test_a_step_without_scores_is_no_end_of_a_row() -> None:
    # The first canvas of a causal run has fewer queries than a score needs.
    whole = dl.record(tiny("causal"), [[5, 9, 13, 2, 7, 21, 30, 31], [3, 8]], seed=1, gen_length=6)
    assert bool(whole.received[0, 1].isnan().all())
    figure = viz.sink_positions(whole, layer=0, head=0, row=1, blocks=viz.row_blocks(whole.run, 1))
    assert "6 steps" in titled(figure)
    assert figure.axes[0].patches[0].get_x() == -0.5


def test_the_text_after_a_step_of_a_part_is_that_of_the_whole_run(recorded, part: Recording) -> None:
    whole = recorded[1].run
    lines = [viz.emerging_lines(run, steps=PART) for run in (whole, part.run)]
    assert [line.plain for line in lines[1]] == [line.plain for line in lines[0]]
    views = [viz.emerging_text(run, steps=PART) for run in (whole, part.run)]
    assert [p.props["tokens"] for p in views[1].pieces] == [p.props["tokens"] for p in views[0].pieces]
