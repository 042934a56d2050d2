"""Figure 6: separate sinks are judged against random sets of queries, on planted and on recorded patterns."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.experiments.attention_sinks import fig6_kinds
from dlm_lens.experiments.results import Record, Results
from dlm_lens.sinks import AboveMean, Received
from dlm_lens.testing import tiny
from experiments.toy.checkpoint import export
from experiments.toy.model import build_model

PROMPTS = 256
UNSEEN = 1.96**2 / (PROMPTS + 1.96**2)
"""The share of prompts that may have any other difference where all have the same (`statistics.within`)."""


def planted(**counts: list[list[float]]) -> Results:
    """Equal prompts of two layers."""
    lives = {
        "lives": [10] * PROMPTS,
        "transient": [1, 2] * (PROMPTS // 2),
        "shuffled_lives": [10] * PROMPTS,
        "shuffled_transient": [6] * PROMPTS,
    }
    values = {name: [value] * PROMPTS for name, value in counts.items()} | lives
    return Results({"settings": {}}, [Record({"model": "toy", "start": 0}, values, 0.0)])


@pytest.mark.parametrize(("null", "verdict", "value"), [([4, 6.0], "agrees", 0.3), ([4, 9.5], "disagrees", -0.05)])
def test_separate_sinks_need_more_than_random_sets(null: list[float], verdict: str, value: float) -> None:
    # The classes differ in 0.9 of the cases; that alone says nothing.
    found = planted(
        both=[12, 12], differ=[10, 11], random_cases=[10, 10], random_state=[9, 9], random_null=null,
        position_cases=[10, 10], position_state=[9, 9], position_null=[9, 9],
    )  # fmt: skip
    first, depth, place, life = fig6_kinds.findings(found)
    assert first.verdict == verdict
    low, high = value - UNSEEN * (value + 1), value + UNSEEN * (1 - value)
    assert f"{value:.2f} [{low:.2f}, {high:.2f}] more" in first.here
    assert first.null.startswith(f"random sets: {null[1] / 10:.2f}")
    assert depth.verdict == "disagrees"  # the null is larger in layer 1
    assert f"differ 0.00 [{-UNSEEN:.2f}, {UNSEEN:.2f}] more often" in place.here
    assert (place.verdict, life.verdict) == ("no counterpart", "agrees")
    assert "0.60" in life.null


@pytest.mark.parametrize(
    ("transient", "verdict"),
    [([1, 2, 1, 2], "agrees"), ([0] * 4, "undecided"), ([9, 8, 9, 8], "disagrees"), ([1, 9, 1, 7], "undecided")],
)
def test_transient_sinks_are_edge_cases(transient: list[int], verdict: str) -> None:
    one = {name: [[1.0]] * 4 for name in fig6_kinds.COUNTS}
    lives = {"lives": [10] * 4, "transient": transient, "shuffled_lives": [10] * 4, "shuffled_transient": [6] * 4}
    found = Results({"settings": {}}, [Record({"model": "toy", "start": 0}, one | lives, 0.0)])
    assert [one.verdict for one in fig6_kinds.findings(found) if "vanish" in one.paper] == [verdict]


def test_cases_are_counted_as_in_a_loop() -> None:
    """Against received attention summed in float64 from the patterns."""
    import dlm_lens as dl
    from dlm_lens.sinks import SplitAttention, received_of_split

    model = tiny("llada", seed=3)
    reducers = [dl.ReceivedAttention(queries=("masked", "unmasked"), min_viewers=2),
                SplitAttention(3, min_viewers=2), SplitAttention(1, "position", min_viewers=2),
                dl.recording.AttentionPattern()]  # fmt: skip
    recording = dl.record(model, ["w3 w4 w5 w6 w7 w8 w9"], reducers, gen_length=8, steps=8)
    classes = {name: dl.received_of(recording, name) for name in ("masked", "unmasked")}
    run = SimpleNamespace(row=0, received=classes, recording=recording)
    found = fig6_kinds._separate(run, {"eps": 0.5, "draws": 3})

    def main(sums: np.ndarray, count: int) -> int:
        """The largest sink of column sums of `count` queries by Eq. 3 relative to uniform, -1 for none."""
        if count < 2:
            return -1
        scores = sums * len(sums) / count
        others = (scores.sum() - scores) / (len(scores) - 1)
        best = int(np.argmax(scores))
        return best if scores[best] > others[best] + 0.5 else -1

    pattern, masked = recording.pattern[:, 0].double().numpy(), recording.masked[:, 0].numpy()
    both, differ, cases, apart = (np.zeros(2) for _ in range(4))
    for step in range(8):
        state = masked[step]
        for layer in range(2):
            for head in range(4):
                a, b = (main(pattern[step, layer, head][part].sum(0), part.sum()) for part in (state, ~state))
                if a < 0 or b < 0:
                    continue
                both[layer] += 1
                differ[layer] += a != b
                drawn = []
                for draw in range(3):
                    parts = (
                        (one.column_sums[step, 0, layer, head].double().numpy(), int(one.counted[step, 0]))
                        for one in received_of_split(recording, "random", draw)
                    )
                    ends = [main(*part) for part in parts]
                    drawn += [ends[0] != ends[1]] if min(ends) >= 0 else []
                if drawn:
                    cases[layer] += 1
                    apart[layer] += np.mean(drawn)
    assert both.sum() > 20
    np.testing.assert_allclose(found["both"], both)
    np.testing.assert_allclose(found["differ"], differ)
    np.testing.assert_allclose(found["random_cases"], cases)
    np.testing.assert_allclose(found["random_null"], apart, atol=2e-3)


def test_the_clearest_separate_sinks_are_the_planted_ones() -> None:
    values = torch.full((5, 1, 2, 3, 24), 0.5)
    first, second = values.clone(), values.clone()
    first[2, 0, 1, 0, 5], second[2, 0, 1, 0, 9] = 9, 8
    first[3, 0, 0, 2, 5], second[3, 0, 0, 2, 9] = 12, 6  # a larger score, a smaller contrast
    first[4, 0, 0, 1, 7], second[4, 0, 0, 1, 7] = 20, 20  # one sink of both
    fields = {"expected": torch.ones(5, 1, 1, 1, 24), "counted": torch.full((5, 1), 24), "layers": (0, 1)}
    masked, written = Received(values=first, queries="masked", **fields), Received(values=second, **fields)
    assert fig6_kinds.clearest(masked, written, AboveMean(3.0)) == (2, 1, 0, 5, 9)
    assert fig6_kinds.clearest(masked, masked, AboveMean(3.0)) is None


def test_shuffled_steps_leave_every_step_s_sinks() -> None:
    values = torch.rand(6, 1, 1, 2, 24, generator=torch.Generator().manual_seed(0))
    given = Received(
        values=values, expected=torch.ones(6, 1, 1, 1, 24), counted=torch.full((6, 1), 24), layers=(0,),
        masked=torch.zeros(6, 1, 24, dtype=torch.bool),
    )  # fmt: skip
    found = fig6_kinds._shuffled(given).values
    assert not torch.equal(found, values)
    assert sorted(found.sum((1, 2, 3, 4)).tolist()) == sorted(values.sum((1, 2, 3, 4)).tolist())


def test_the_maps_of_a_kind_that_is_not_shipped_are_of_its_trained_network(tmp_path: Path) -> None:
    export(build_model("toy-blocks", 0), "toy-blocks", tmp_path / "toy-blocks-3000steps-seed0")
    settings = {
        **fig6_kinds.EXPERIMENT.small, "prompts": 1, "batch": 1, "draws": 1, "eps": 0.05, "trained": str(tmp_path),
        "sampler": {"gen_length": 16, "steps": 16},
    }  # fmt: skip
    bench = SimpleNamespace(model=dl.load)
    value = fig6_kinds.run({"model": "toy-blocks", "network": 0, "start": 0}, settings, bench)
    example = value["examples"]["transient"]
    found = np.array(example["maps"][1], float)
    assert len(example["steps"]) == 3
    assert found.sum(1) == pytest.approx(1, abs=0.2)  # entries have two digits
    assert not found[0, 16:].any()  # block-causal: the first query sees no later block


def test_an_ar_model_has_no_masked_queries_to_compare() -> None:
    settings = {**fig6_kinds.EXPERIMENT.small, "prompts": 1, "batch": 1}
    with pytest.raises(ValueError, match=r"toy-ar is an AR model.*leave it out of the models"):
        fig6_kinds.run({"model": "toy-ar", "network": 0, "start": 0}, settings, SimpleNamespace(model=dl.load))


def test_layers_with_a_sliding_window_are_left_out() -> None:
    """With three layers of which the middle one has a window; the maps are those of the model's own layers."""
    layers = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny("modernbert", num_hidden_layers=3, layer_types=layers)
    settings = {**fig6_kinds.EXPERIMENT.small, "prompts": 2, "batch": 2, "draws": 2, "eps": 0.05,
                "sampler": {"gen_length": 10, "steps": 10}}  # fmt: skip
    value = fig6_kinds.run({"model": "m", "start": 0}, settings, SimpleNamespace(model=lambda name: model))
    assert value["left_out"] == [1]
    assert [len(one) for one in value["both"]] == [2, 2]
    assert {one["layer"] for one in value["examples"].values() if one} <= {0, 2}
    results = Results({"settings": settings}, [Record({"model": "m", "start": 0}, value, 0.0)])
    page = fig6_kinds.render(results)
    assert [row[1] for row in page.tables[0].rows] == ["0", "2"]
    assert "m is measured without the layers 1: they have a sliding window" in page.notes[-1]
    assert "m, layer 2:" in page.findings[0].here


def test_a_sliding_window_in_all_layers_is_refused() -> None:
    model = tiny("modernbert", layer_types=["sliding_attention"] * 2)
    settings = {**fig6_kinds.EXPERIMENT.small, "prompts": 1, "batch": 1}
    with pytest.raises(ValueError, match=r"m has a sliding window in all of its layers.*leave it out"):
        fig6_kinds.run({"model": "m", "start": 0}, settings, SimpleNamespace(model=lambda name: model))


def test_the_clearest_sinks_name_the_layer_of_the_model() -> None:
    values = torch.full((2, 1, 2, 3, 24), 0.5)
    first, second = values.clone(), values.clone()
    first[1, 0, 1, 0, 5], second[1, 0, 1, 0, 9] = 9, 8
    fields = {"expected": torch.ones(2, 1, 1, 1, 24), "counted": torch.full((2, 1), 24), "layers": (0, 3)}
    masked, written = Received(values=first, queries="masked", **fields), Received(values=second, **fields)
    assert fig6_kinds.clearest(masked, written, AboveMean(3.0)) == (1, 3, 0, 5, 9)
