"""AR rows that end early, in a recording of several batches: behind its end a row counts in nothing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.hooks import mask_sinks
from dlm_lens.probes import logit_lens
from dlm_lens.probes import replay as replayed
from dlm_lens.recording import Recording
from dlm_lens.recording.concatenation import joined
from dlm_lens.testing import tiny
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.reporting.data import Subject, content_of

RULE = dl.AboveMean(0.2)
RAN = (3, 7)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [12, 13, 14]]
REDUCERS = [dl.recording.ReceivedAttention(["all", "block"], min_viewers=1), dl.recording.RegionMass()]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Two batches of one row; the first row ends after 3 steps, the second after 7."""
    model = tiny("causal")
    parts = [
        replace(dl.record(model, [prompt], REDUCERS, gen_length=steps, seed=row), rows=(row,))
        for row, (prompt, steps) in enumerate(zip(PROMPTS, RAN, strict=True))
    ]
    rec = joined(parts)
    assert [part.run.steps for part in parts] == list(RAN)
    assert rec.run.row_steps.tolist() == list(RAN)
    return model, rec, parts, rec.save(tmp_path_factory.mktemp("ended") / "rec")


def test_a_row_knows_how_many_steps_it_ran(ended):
    _, rec, parts, path = ended
    assert parts[0].run.rows_ran is None
    assert Recording.load(path).run.rows_ran == RAN
    assert rec.select(step=slice(2, 6)).run.row_steps.tolist() == [1, 4]
    assert rec.select(batch=1).run.row_steps.tolist() == [7]
    assert rec.run.first_steps(5).row_steps.tolist() == [3, 5]
    with pytest.raises(ValueError, match="rows_ran has 1 entries for 2 rows"):
        replace(rec.run, rows_ran=(3,))


def test_a_report_of_a_row_that_was_over_says_so(ended, tmp_path):
    _, rec, _, _ = ended
    later = rec.select(step=slice(4, 6))
    with pytest.raises(ValueError, match="row 0 was over before the first of these steps; give another row"):
        dl.viz.report(later, tmp_path / "report.html")
    assert dl.viz.report(later, tmp_path / "report.html", row=1).is_file()
    # Pictures that choose a step said "tuple index out of range", and divided by zero.
    for draw in (lambda row: PlotOptions({"later": later}, row=row).step(),
                 lambda row: dl.viz.emerging_text(later.run, row=row)):  # fmt: skip
        with pytest.raises(ValueError, match="row 0 was over before the first of these steps; give another row"):
            draw(0)
        assert draw(1)


def test_e_j_of_the_block_is_that_of_the_row(ended):
    """The block of a row is its own, also where the other row's answer is shorter."""
    _, rec, parts, _ = ended
    for row, part in enumerate(parts):
        steps, keys = part.run.steps, part.run.tokens.shape[1]
        start = rec.run.prompt_length - part.run.prompt_length
        own = part.expected("block")[:, 0]
        assert torch.equal(rec.expected("block")[:steps, row, start : start + keys], own)
        assert float(own.sum()) > 0


def test_sinks_counts_the_defined_steps(ended):
    _, rec, _, path = ended
    result = CliRunner().invoke(
        cli.app, ["sinks", str(path), "--detector", "above-mean:0.2", "--json"], catch_exceptions=False
    )
    found = dl.find_sinks(rec, RULE)
    for line in json.loads(result.stdout)["layers"]:
        place = found.layers.index(line["layer"])
        kept = [
            found.is_sink[step, row, place, head]
            for row in (0, 1)
            for step in range(RAN[row])
            for head in range(found.is_sink.shape[3])
        ]
        assert line["patterns_with_sink"] == pytest.approx(np.mean([bool(one.any()) for one in kept]))
        assert line["sinks_per_pattern"] == pytest.approx(np.mean([int(one.sum()) for one in kept]))


def test_replays_leave_out_what_is_behind_the_end(ended):
    model, rec, _, _ = ended
    received = dl.received_over_steps(model, rec.run, min_viewers=1)
    ours = dl.sinks.received_of(rec)
    assert torch.equal(received.values.isnan(), ours.values.isnan())
    assert torch.allclose(received.values, ours.values, atol=1e-4, equal_nan=True)
    assert received.counted[3:, 0].eq(0).all()
    assert bool(received.values[3:, 0].isnan().all())
    norms = dl.sinks.key_statistic_over_steps(model, rec.run, "key norm")
    assert bool(norms.values[3:, 0].isnan().all())
    assert not bool(norms.values[6, 1].isnan().all())
    lens = logit_lens(model, rec.run)
    assert set(lens.step[lens.batch == 0].tolist()) == {0, 1, 2}
    assert set(lens.step[lens.batch == 1].tolist()) == set(range(7))
    table = replayed(model, rec.run, [mask_sinks(RULE)]).table()
    assert table.groupby("batch").size().tolist() == list(RAN)


def test_paths_end_with_their_row(ended):
    _, rec, parts, _ = ended
    whole = dl.trajectories(rec, RULE).summary(by="pattern")
    for row, part in enumerate(parts):
        own = dl.trajectories(part, RULE).summary(by="pattern").drop(columns="batch")
        mine = whole[whole["batch"] == row].drop(columns="batch").reset_index(drop=True)
        for name in set(own) - {"kind", "static_position"}:
            assert mine[name].tolist() == pytest.approx(own[name].tolist(), nan_ok=True), name
        assert mine["moved_over_run"].notna().equals(own["moved_over_run"].notna())
    assert whole[whole["batch"] == 0]["moved_over_run"].notna().any()


def test_a_map_of_a_step_behind_the_end_is_refused(ended):
    model, rec, _, _ = ended
    for call in (
        lambda: dl.viz.attention_maps(model, rec.run, steps=[3], layer=0, head=0),
        lambda: dl.viz.attention_pattern(rec.run, model, step=5, layer=0, head=0),
    ):
        with pytest.raises(ValueError, match="row 0 had ended before it; its steps go from 0 to 2"):
            call()
    for steps, own in (([1, 2, 3], "its steps are 1, 2"), ([3, 4], "this part of the run has none of its steps")):
        part = rec.select(step=steps).run
        with pytest.raises(ValueError, match=f"step 3: row 0 had ended before it; {own}"):
            dl.viz.attention_pattern(part, model, step=3, layer=0, head=0)
    figure = dl.viz.attention_maps(model, rec.run, steps=[2, 3], layer=0, head=0, row=1)
    assert [axes.get_title().split(":")[0] for axes in figure.axes[:2]] == ["step 2", "step 3"]


@pytest.mark.long
def test_commands_choose_steps_of_the_row(ended, monkeypatch, tmp_path):
    model, rec, _, path = ended
    monkeypatch.setattr("dlm_lens.adapters.load", lambda *_, **__: model)
    seen = {}
    monkeypatch.setattr(
        "dlm_lens.viz.figures.maps.snapshot", _spy("dlm_lens.viz.attention_snapshot.snapshot", seen)
    )
    rows = []
    counting = model.model.register_forward_pre_hook(
        lambda _, args, given: rows.append(len(args[0] if args else given["input_ids"])), with_kwargs=True
    )
    for kind, more in (("attention-maps", []), ("lens-table", []), ("lens-table", ["--position", "3"])):
        out = tmp_path / f"{kind}{len(more)}.svg"
        told = ["plot", kind, str(path), "--row", "0", *more, "-o", str(out)]
        CliRunner().invoke(cli.app, told, catch_exceptions=False)
        assert out.exists()
    counting.remove()
    assert set(rows) == {1}  # the other row of the recording does not run
    assert seen["steps"] == [0, 1]  # of steps 0 to 2; of all seven they were 1 and 4
    with pytest.raises(ValueError, match="step 4: the steps of row 0 go from 0 to 2"):
        CliRunner().invoke(
            cli.app, ["plot", "lens-table", str(path), "--row", "0", "--steps", "4", "-o", str(tmp_path / "x.svg")],
            catch_exceptions=False,
        )  # fmt: skip
    lens = logit_lens(model, rec.run, [rec.run.prompt_length - 1])
    columns = dl.viz.lens_table(lens, position=rec.run.prompt_length - 1, row=0).axes[0].get_xticklabels()
    assert [label.get_text().split("\n")[0] for label in columns] == ["0", "1", "2"]
    with pytest.raises(ValueError, match="row 5 is not among the rows 0, 1"):
        CliRunner().invoke(
            cli.app, ["plot", "lens-table", str(path), "--row", "5", "-o", str(tmp_path / "x.svg")],
            catch_exceptions=False,
        )  # fmt: skip


def _spy(name, seen):
    from importlib import import_module

    module, function = name.rsplit(".", 1)
    own = getattr(import_module(module), function)

    def spy(*args, **kwargs):
        seen.setdefault("steps", []).append(kwargs["step"])
        return own(*args, **kwargs)

    return spy


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_row_is_drawn_with_its_own_block_and_steps(ended, order):
    _, _, parts, _ = ended
    rec = joined([replace(parts[i], rows=(n,)) for n, i in enumerate(order)])
    for row, i in enumerate(order):
        alone = parts[i]
        for given, own in ((rec, alone), (dl.find_sinks(rec, RULE), dl.find_sinks(alone, RULE)),
                           (dl.trajectories(rec, RULE), dl.trajectories(alone, RULE))):  # fmt: skip
            rule = RULE if given is rec else None
            boxes = [
                [box.get_bbox().bounds for box in dl.viz.sink_positions(
                    one, rule, layer=0, head=0, row=at, blocks=run.spans).axes[0].patches]
                for one, run, at in ((given, rec.run, row), (own, alone.run, 0))
            ]  # fmt: skip
            assert boxes[0] == boxes[1] != []
        figure = dl.viz.sink_positions(rec, RULE, layer=0, head=0, row=row)
        assert f"of {RAN[i]} steps" in figure.axes[0].get_title(loc="left").replace("\n", " ")
        incoming = dl.viz.incoming_attention(rec, layer=0, head=0, row=row)
        assert incoming.axes[0].get_ylim() == (RAN[i], 0)
        view = dl.viz.received_tokens(rec, layer=0, head=0, row=row)
        assert view.pieces[-1].heading == f"step {RAN[i] - 1}"
        assert len(list(dl.viz.emerging_lines(rec.run, row=row))) == RAN[i]
        assert content_of(Subject.of(rec, row))["steps"] == list(range(RAN[i]))


def test_captions_count_the_sequences_that_have_a_number(ended):
    _, rec, _, _ = ended
    later = rec.select(step=slice(4, 6))  # the first row is over
    assert dl.viz.region_mass(later, queries=("all",)).get_suptitle().endswith("n = 1 sequence, 2 steps")
    assert dl.viz.sink_strength(later, RULE).get_suptitle().endswith("mean over n = 2 steps of 1 sequence")
    title = dl.viz.score_distribution(later, detector=RULE).axes[0].get_title(loc="left")
    assert " ".join(title.split()).endswith("keys in 2 steps of 1 sequence")
    sweep = dl.viz.sinks_over_eps(later)
    assert sweep.get_suptitle().endswith("keys of 1 sequence, all steps")
    (label,) = [text.get_text() for text in sweep.axes[0].get_legend().get_texts() if "S = " in text.get_text()]
    assert label.endswith("(1 sequence)")
    assert not label.startswith("S = 0")


def test_region_mass_does_not_lead_across_an_end(ended):
    _, rec, parts, _ = ended
    figure = dl.viz.region_mass(rec, queries=("all",))
    panel = figure.axes[0]
    (line,) = [line for line in panel.get_lines() if line.get_gid() == "all"]
    x, y = (np.asarray(values, dtype=float) for values in line.get_data())
    assert x[np.isfinite(y)].tolist() == list(range(7))
    assert math.isnan(y[3])  # between steps 2 and 3
    mass = [part.region_mass.double()[:, 0, :, :, 0, 0].mean((1, 2)) for part in parts]
    wanted = torch.cat([(mass[0] + mass[1][:3]) / 2, mass[1][3:]]).tolist()
    assert y[np.isfinite(y)] == pytest.approx(wanted, rel=1e-5)
    assert [line.get_xdata()[0] for line in panel.get_lines() if line.get_gid() == "ends"] == [2.5]
    assert "n = 2 sequences (1 to the end), 7 steps" in figure.get_suptitle()
    assert "there are no masked queries" in dl.viz.region_mass(rec).get_suptitle()
    notes = [text.get_text() for text in dl.viz.region_mass(rec, queries=("masked",)).axes[0].texts]
    assert notes == ["no queries"]


def test_uniform_attention_does_not_lead_across_an_end():
    """The share of masked keys of both rows, then of the one that is left."""
    model = tiny("llada")
    both = joined([
        dl.record(model, [prompt], [dl.RegionMass()], steps=steps, gen_length=4, block_length=4)
        for prompt, steps in (([5, 6], 2), ([7, 8, 9, 10], 4))
    ])  # fmt: skip
    masked = dl.viz.region_mass(both).axes[1]
    (line,) = [one for one in masked.get_lines() if one.get_gid() == "even"]
    first = [(4 / 6 + 4 / 8) / 2, (2 / 6 + 3 / 8) / 2]
    assert line.get_ydata().tolist() == pytest.approx([*first, math.nan, 2 / 8, 1 / 8], rel=1e-6, nan_ok=True)
    assert line.get_xdata()[[0, 1, 3, 4]].tolist() == [0, 1, 2, 3]
