"""`clock_scores` draws the numbers of the clock; `dlm-lens plot clock-scores` draws a recording's."""

from pathlib import Path

import numpy as np
import pytest

import dlm_lens as dl
from dlm_lens.probes import denoising_clock, untrained_twin
from dlm_lens.statistics import Estimate
from dlm_lens.testing import tiny
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import write_plot

PROMPTS = [[5, 6, 7], [8, 9, 3], [11, 4, 2], [9, 9, 1]]


def test_lines_are_the_scores_and_their_nulls(tmp_path: Path) -> None:
    model = tiny("llada")
    recording = dl.record(model, PROMPTS, steps=4, gen_length=8)
    clock, twin = denoising_clock(model, recording.run), denoising_clock(untrained_twin(model), recording.run)
    figure = dl.viz.clock_scores(clock, untrained=twin, title="tiny")
    drawn = {line.get_gid(): np.asarray(line.get_ydata()) for line in figure.axes[0].get_lines()}
    table = clock.table()
    for name in ("open", "written", "prompt"):
        lines = table[table["positions"] == name]
        np.testing.assert_allclose(drawn[name], lines["r2"])
        np.testing.assert_allclose(drawn[f"{name} null"], lines["null"])
        wanted = [twin.reading.r2(name, layer).value for layer in twin.layers]
        np.testing.assert_allclose(drawn[f"{name} untrained"], wanted)
    points = figure.axes[1].containers[0][0]

    by_label = clock.reading.by_label("open", clock.best_layer("open"))
    np.testing.assert_allclose(np.asarray(points.get_xdata(), float), by_label["label"])
    np.testing.assert_allclose(np.asarray(points.get_ydata(), float), by_label["read"])
    assert by_label["label"].tolist() == [0.0, 0.25, 0.5, 0.75]
    options = PlotOptions({"tiny": recording})
    options.__dict__["network"] = model  # a tiny model has no name to load it by
    assert write_plot("clock-scores", options, tmp_path / "clock.svg").stat().st_size > 5000
    with pytest.raises(TypeError, match="give the DenoisingClock"):
        dl.viz.clock_scores(recording)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fit both to the same"):
        dl.viz.clock_scores(clock, untrained=denoising_clock(model, recording.run, layers=[0]))


def test_rows_of_equal_prompts_are_counted_once() -> None:
    model = tiny("llada")
    clock = denoising_clock(model, dl.denoise(model, [*PROMPTS, *PROMPTS], steps=4, gen_length=8))
    prompts = clock.reading.r2("open", 0).prompts
    assert len(clock.reading.steps) == 2 * prompts
    assert f"n = {prompts} others scored" in dl.viz.clock_scores(clock).get_suptitle()


def test_intervals_that_the_axis_cuts_off_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llada")
    clock = denoising_clock(model, dl.denoise(model, PROMPTS, steps=4, gen_length=8))
    for low, said in ((-7.34, True), (-0.01, False)):
        found = Estimate(0.5, low, 0.9, 2)
        monkeypatch.setattr(type(clock.reading), "r2", lambda *_, found=found: found)
        figure = dl.viz.clock_scores(clock)
        assert ("cut off at the bottom (the lowest begins at -7.3)" in figure.get_suptitle()) is said
        assert figure.axes[0].get_ylabel() == "R² of t / T"
