"""Received attention of models with learned sink tokens: canvas positions stay, the sinks stand behind them."""

import pytest
import torch
from torch import Tensor

import dlm_lens
from dlm_lens.attention import SinkLayout
from dlm_lens.testing import tiny
from dlm_lens.viz import incoming_attention, sink_positions
from tests.reference import forward64


@pytest.mark.parametrize("place", ["front", "end"])
@pytest.mark.parametrize("count", [1, 2])
def test_scores_equal_float64_patterns_summed_by_hand(place: str, count: int) -> None:
    model = tiny("sink_qwen", num_sinks=count, sink_placement=place)
    run = dlm_lens.denoise(model, [[1, 2, 3, 4, 5], [6, 7]], gen_length=8, steps=4)
    received = dlm_lens.received_over_steps(model, run)
    assert received.sinks == count
    assert received.values.shape == (4, 2, 2, 4, 13 + count)
    layout = SinkLayout.of(model)
    for step in range(4):
        patterns = forward64(model, run.canvases[step], run.attention_mask)
        for layer in range(2):
            expected = by_hand(patterns[f"pattern{layer}"], run.attention_mask, layout)
            torch.testing.assert_close(
                received.values[step, :, layer].double(), expected, atol=1e-4, rtol=1e-4, equal_nan=True
            )


def by_hand(pattern: Tensor, keep: Tensor, layout: SinkLayout) -> Tensor:
    """r_j / e_j with loops; sinks are no queries."""
    batch, heads, size, _ = pattern.shape
    canvas = list(range(size))[layout.canvas(size)]
    sinks = list(range(size))[layout.sinks(size)]
    scores = torch.full((batch, heads, size), torch.nan, dtype=torch.float64)
    for row in range(batch):
        content = [canvas[i] for i in range(len(canvas)) if keep[row, i]]
        even = len(content) / (len(content) + len(sinks))  # every counted query sees all content and all sinks
        for head in range(heads):
            for place, key in enumerate([*canvas, *sinks]):
                if key in content or key in sinks:
                    scores[row, head, place] = sum(float(pattern[row, head, i, key]) for i in content) / even
    return scores


def test_tables_and_figures_name_the_sink_and_keep_canvas_positions() -> None:
    model = tiny("sink_qwen", num_sinks=1)
    run = dlm_lens.denoise(model, [[1, 2, 3, 4]], gen_length=8)
    received = dlm_lens.received_over_steps(model, run)
    sinks = dlm_lens.find_sinks(received, dlm_lens.TopK(13))
    table = sinks.table()
    learned = table[table["position"].isna()]
    assert set(learned["token"]) == {"sink(0)"}
    assert not learned["masked"].any()
    assert len(learned) == 8 * 2 * 4
    place = learned.iloc[0]
    where = tuple(int(place[name]) for name in ("step", "batch", "layer", "head"))
    assert place["score"] == pytest.approx(received.values[*where, 12].item())
    assert sorted(table["position"].dropna().unique().tolist()) == list(range(12))
    figure = incoming_attention(received, layer=0, head=0)
    axes = figure.axes[0]
    assert axes.get_xticklabels()[-1].get_text() == "sink(0)"
    (line,) = [line for line in axes.lines if line.get_gid() == "sinks"]
    assert line.get_xdata()[0] == 12
    assert "12 positions and 1 learned sink token" in axes.get_title(loc="left")
    positions = sink_positions(sinks, layer=0, head=0).axes[0]
    assert [line.get_ydata()[0] for line in positions.lines if line.get_gid() == "sinks"] == [11.5]


def test_levels_and_shares_count_the_sink() -> None:
    model = tiny("sink_qwen", num_sinks=1)
    run = dlm_lens.denoise(model, [[1, 2, 3, 4]], gen_length=8)
    received = dlm_lens.received_over_steps(model, run)
    torch.testing.assert_close(received.shares.sum(-1), torch.ones(8, 1, 2, 4))
    mean = received.at_level("model")
    assert mean.sinks == 1
    torch.testing.assert_close(mean.shares.sum(-1), torch.ones(8, 1, 1, 1))
