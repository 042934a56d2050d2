"""`feature_contexts` against all activations of a run, in parts, and its windows."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import FeatureContexts, feature_contexts
from dlm_lens.recording import FeatureActivations, Recording, record
from dlm_lens.testing import tiny
from tests.recording.test_features import RUN, _all, autoencoder

PROMPTS = [[5, 9, 11, 3, 17], [4, 8, 2], [6, 7, 12, 4], [9, 9, 3, 21]]
TOP = 3


def test_the_merge_is_the_largest_of_all_activations_each_position_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_lens.probes.top_contexts.ENTRIES_AT_ONCE", 500)
    model = tiny("llada")
    sae = autoencoder(model)
    recording = record(model, PROMPTS, [FeatureActivations(sae, top=TOP)], layers=[1], **RUN)
    found = feature_contexts(recording, context=2)
    values, classes = _all(model, recording.run, sae)
    values = values.masked_fill(~classes.any(2)[..., None], 0.0)
    best, step = values.max(0)  # [batch, position, feature]
    fires = 0
    for feature in range(sae.features):
        wanted = best[..., feature].flatten().sort(descending=True)
        for rank in range(TOP):
            if wanted.values[rank] <= 0:
                assert bool(found.activation[feature, rank].isnan())
                assert found.where[feature, rank].tolist() == [-1] * 4
                continue
            fires += 1
            batch, position = divmod(int(wanted.indices[rank]), best.shape[1])
            at = int(step[batch, position, feature])
            torch.testing.assert_close(found.activation[feature, rank], wanted.values[rank], rtol=1e-4, atol=1e-5)
            assert found.where[feature, rank].tolist() == [0, at, batch, position]
            canvas = recording.run.canvases[at, batch].tolist()
            content = recording.run.attention_mask[batch].tolist()
            around = [
                canvas[one] if 0 <= one < len(canvas) and content[one] else -(2**31)
                for one in range(position - 2, position + 3)
            ]
            assert found.window[feature, rank].tolist() == around
    assert fires > 2 * sae.features
    table = found.table(5)
    assert table["activation"].is_monotonic_decreasing
    padding = recording.run.padding
    assert table["position"].tolist() == [
        int(position - padding[batch]) for _, _, batch, position in found.where[5].tolist() if position >= 0
    ]


def left_out_of_windows(recording: Recording, present: list[list[set[int]]], context: int) -> int:
    """Compare windows with the positions [step][row] that each pass has; how many other positions are in reach."""
    found, left_out = feature_contexts(recording, context=context), 0
    places, windows = found.where.flatten(0, 1).tolist(), found.window.flatten(0, 1).tolist()
    for (_, step, row, position), window in zip(places, windows, strict=True):
        if position < 0:
            continue
        canvas = recording.run.canvases[step, row].tolist()
        around = range(position - context, position + context + 1)
        assert window == [canvas[one] if one in present[step][row] else -(2**31) for one in around]
        left_out += len(set(around) & set(range(len(canvas))) - present[step][row])
    return left_out


@pytest.mark.parametrize("pad", [61, None])
def test_a_context_of_an_ar_run_ends_with_the_written_prefix(pad: int | None) -> None:
    model = tiny("causal", pad_token_id=pad)
    reducers = [FeatureActivations(autoencoder(model), top=TOP)]
    recording = record(model, PROMPTS[:2], reducers, layers=[1], seed=[1, 2], gen_length=4, temperature=1.0)
    length, padding = recording.run.prompt_length, recording.run.padding.tolist()
    steps = range(recording.run.steps)
    present = [[set(range(start, length + step)) for start in padding] for step in steps]
    assert left_out_of_windows(recording, present, 2) > 0


def test_a_context_of_block_diffusion_ends_with_the_block_of_its_step() -> None:
    model = tiny("bd3lm")
    reducers = [FeatureActivations(autoencoder(model), top=TOP)]
    recording = record(model, [[5, 9, 11, 3]], reducers, layers=[1], seed=1, gen_length=12, block_length=4)
    ends = [stop for _, stop in recording.run.spans]
    assert len(set(ends)) > 1
    assert left_out_of_windows(recording, [[set(range(end))] for end in ends], 4) > 0


def test_recordings_in_parts_give_what_one_gives() -> None:
    model = tiny("llada")
    sae = autoencoder(model)
    reducers = [FeatureActivations(sae, top=TOP)]
    parts = [record(model, [prompt], reducers, layers=[1], **RUN) for prompt in PROMPTS]
    whole = feature_contexts(record(model, PROMPTS, reducers, layers=[1], **RUN), [3, 7, 11], top=2)
    found = feature_contexts(iter(parts), [3, 7, 11], top=2)
    torch.testing.assert_close(found.activation, whole.activation, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert found.where[..., 0].equal(whole.where[..., 2])  # each recording has one prompt
    assert found.where[..., 1].equal(whole.where[..., 1])
    one, other = (each.table().drop(columns=["recording", "batch", "activation"]) for each in (found, whole))
    assert one.equals(other)
    assert "feature 3" not in repr(found)


def test_parts_by_rows_are_one_run_and_parts_by_steps_repeat_positions() -> None:
    model = tiny("llada")
    reducers = [FeatureActivations(autoencoder(model), top=TOP)]
    rec = record(model, PROMPTS, reducers, layers=[1], **RUN)
    features, steps = [3, 7, 11], range(rec.run.steps)
    whole = feature_contexts(rec, features)
    rows = feature_contexts([rec.select(batch=[row]) for row in range(len(PROMPTS))], features)
    torch.testing.assert_close(rows.activation, whole.activation, equal_nan=True)
    found = feature_contexts([rec.select(step=[step]) for step in steps], features)

    def repeated(contexts: FeatureContexts) -> bool:
        """Whether a feature has a position of a row twice."""
        places = [[tuple(at[2:]) for at in one if at[0] >= 0] for one in contexts.where.tolist()]
        return any(len(set(one)) < len(one) for one in places)

    assert not repeated(whole)
    assert repeated(found)


def test_a_text_is_shown_with_its_token_marked() -> None:
    model = dl.load("toy")
    sae = autoencoder(model)
    recording = record(model, ["tom has 5 apples ."], [FeatureActivations(sae)], layers=[1], steps=3, gen_length=3)
    line = feature_contexts(recording, context=1).table().query("position == 3").iloc[0]
    assert line["context"] == "has >5< apples"
    assert "&gt;" in feature_contexts(recording, context=1)._repr_html_()


def test_what_cannot_be_merged_is_refused() -> None:
    model = tiny("llada")
    sae, other = autoencoder(model), autoencoder(model, seed=1)
    one, two = (record(model, PROMPTS[:1], [FeatureActivations(each)], layers=[1], **RUN) for each in (sae, other))
    with pytest.raises(ValueError, match=r"top is 2 and the recording keeps 1 a step; record .*top=2"):
        feature_contexts(one, top=2)
    with pytest.raises(ValueError, match="give those of one"):
        feature_contexts([one, two])
    with pytest.raises(ValueError, match="there is no recording"):
        feature_contexts([])
    with pytest.raises(TypeError, match=r"the recording is a int; give a Recording of dlm_lens.record"):
        feature_contexts([3])
    with pytest.raises(TypeError, match=r"the recording is a int; give a Recording of dlm_lens.record"):
        feature_contexts(3)
    plain = record(model, PROMPTS[:1], [dl.ReceivedAttention()], **RUN)
    assert isinstance(plain, Recording)
    with pytest.raises(ValueError, match="the recording has no features"):
        feature_contexts(plain)
    with pytest.raises(ValueError, match="feature is 9; chosen were 3"):
        feature_contexts(one, [3]).table(9)
