"""`FeatureActivations` against all features of all positions, which it does not keep."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.features import SparseAutoencoder, save_sae
from dlm_lens.hooks import capture, zero_value
from dlm_lens.recording import FeatureActivations, Recording, record, rerun
from dlm_lens.recording.reducer_registry import parse_reducers
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17], [4, 8, 2]]
RUN = {"steps": 4, "gen_length": 8, "block_length": 4}


def autoencoder(model, layer=1, features=24, k=5, seed=0):
    """A Top-K autoencoder with random weights."""
    made = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    down, up = (torch.randn(features, width, generator=made) for _ in range(2))
    bias, shift = torch.randn(features, generator=made), torch.randn(width, generator=made)
    return SparseAutoencoder(down.T.contiguous(), bias, up, shift, k=k, layer=layer)


def _all(model, run, sae):
    """[step, batch, position, feature] and [step, batch, class, position], one forward pass a step."""
    stream = capture(model, run, "resid", layers=[sae.layer]).stacked("resid", sae.layer)
    answer = run.masked[0]
    content = run.attention_mask
    masked = run.masked[:-1]
    classes = [masked & content, ~masked & answer & content, (~answer & content).expand_as(masked)]
    return sae.encode(stream), torch.stack(classes, 2)


def _check(recording, sae, features, classes):
    for step in range(features.shape[0]):
        for row in range(features.shape[1]):
            values = features[step, row]
            for index in range(3):
                inside = values[classes[step, row, index]]
                at = (step, row, 0, index)
                assert int(recording.feature_positions[at]) == len(inside)
                assert recording.feature_count[at].equal((inside > 0).sum(0).int())
                if len(inside):
                    torch.testing.assert_close(recording.feature_mean[at], inside.mean(0), rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(recording.feature_max[at], inside.amax(0), rtol=1e-4, atol=1e-5)
                else:
                    assert bool(recording.feature_mean[at].isnan().all() & recording.feature_max[at].isnan().all())
            counted = classes[step, row].any(0)
            best = values.masked_fill(~counted[:, None], 0.0).sort(dim=0, descending=True)
            wanted, place = best.values[:2].T, best.indices[:2].T
            fires = wanted > 0
            found = recording.feature_top[step, row, 0]
            torch.testing.assert_close(found[fires], wanted[fires], rtol=1e-4, atol=1e-5)
            assert bool(found[~fires].isnan().all())
            held = recording.feature_top_position[step, row, 0]
            assert held[fires].equal(place[fires])
            assert bool((held[~fires] == -1).all())
            chosen = values[:, [3, 7]].where(counted[:, None], torch.nan)
            torch.testing.assert_close(
                recording.feature_values[step, row, 0], chosen, rtol=1e-4, atol=1e-5, equal_nan=True
            )


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_every_statistic_is_that_of_all_activations(family, monkeypatch):
    model = tiny(family)
    sae = autoencoder(model)
    monkeypatch.setattr("dlm_lens.features.sparse_autoencoder.ENTRIES_AT_ONCE", 4 * sae.features)
    recording = record(model, PROMPTS, [FeatureActivations(sae, (3, 7), top=2)], layers=[1], **RUN)
    _check(recording, sae, *_all(model, recording.run, sae))


@pytest.mark.long
def test_the_last_layer_a_rerun_and_the_disk(tmp_path):
    model = tiny("llada")
    sae = autoencoder(model, layer=len(model.model.layers) - 1)
    reducers = [FeatureActivations(sae, (3, 7), top=2)]
    stored = record(model, PROMPTS, reducers, layers=[sae.layer], to=tmp_path / "rec", batch_size=1, **RUN)
    run = dl.denoise(model, PROMPTS, **RUN)
    _check(stored, sae, *_all(model, run, sae))
    again = rerun(model, run, reducers, layers=[sae.layer])
    loaded = Recording.load(tmp_path / "rec")
    for name in stored.arrays:
        torch.testing.assert_close(
            getattr(again, name), getattr(loaded, name), rtol=1e-4, atol=1e-5, equal_nan=True
        )
    assert sae.digest in loaded.specs["feature_count"].formula
    other = [FeatureActivations(autoencoder(model, layer=sae.layer, seed=1), (3, 7), top=2)]
    with pytest.raises(ValueError, match="reducers"):
        record(model, PROMPTS, other, layers=[sae.layer], to=tmp_path / "rec", batch_size=1, **RUN)


def test_a_row_that_is_over_has_no_activations():
    model = tiny("sdar")
    sae = autoencoder(model)
    recording = record(
        model, ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4"], [FeatureActivations(sae, (3, 7), top=2)], layers=[1],
        gen_length=8, block_length=4, stop_tokens=(),
    )  # fmt: skip
    masked = recording.run.masked[:-1].any(-1)  # [step, batch]
    nothing = ~masked.flip(0).cummax(0).values.flip(0)  # from some step on the shorter row has no masks
    assert nothing.any(0).tolist() == [False, True]
    assert bool((recording.feature_positions[~nothing].sum(-1) > 0).all())
    for name in ("feature_mean", "feature_max", "feature_top", "feature_values"):
        assert bool(getattr(recording, name)[nothing].isnan().all())
    for name in ("feature_positions", "feature_count", "feature_top_position"):
        assert bool((getattr(recording, name)[nothing] == -1).all())


def test_hooks_act_before_features_are_read():
    model = tiny("llada")
    sae = autoencoder(model)
    given = {"layers": [1], **RUN}
    edited = dl.hooks.at_layers(dl.hooks.ablate("resid"), [1])
    recording = record(model, PROMPTS, [FeatureActivations(sae)], hooks=[edited], **given)
    fires = sae.encode(torch.zeros(sae.d_model)) > 0
    everywhere = recording.feature_positions[..., None] * fires
    assert recording.feature_count.long().equal(everywhere)
    attention = record(model, PROMPTS, [FeatureActivations(sae)], hooks=[zero_value(0)], **given)
    assert not attention.feature_mean.nan_to_num().equal(recording.feature_mean.nan_to_num())


@pytest.mark.long
def test_the_bridge_reads_the_same_features():
    model = tiny("llada")
    sae = autoencoder(model)
    reducers = [FeatureActivations(sae, (3,))]
    plain = record(model, PROMPTS[:1], reducers, layers=[1], **RUN)
    bridge = dl.bridge(model)
    recorder = dl.BridgeRecorder(bridge, reducers, layers=[1])
    bridged = recorder.recording(bridge.denoise(PROMPTS[:1], observers=recorder, **RUN))
    torch.testing.assert_close(bridged.feature_values, plain.feature_values, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert bridged.feature_count.equal(plain.feature_count)


def test_an_ar_run_has_written_positions_and_no_open_ones():
    model = dl.load("toy-ar")
    sae = autoencoder(model)
    recording = record(model, ["tom has 5 apples ."], [FeatureActivations(sae)], layers=[1], steps=3, gen_length=3)
    prompt = int(recording.run.attention_mask[0, : recording.run.prompt_length].sum())
    assert recording.feature_positions[:, 0, 0].tolist() == [[0, 0, prompt], [0, 1, prompt], [0, 2, prompt]]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda sae: FeatureActivations(sae, top=0), "top is 0; it must be a whole number of at least 1"),
        (lambda sae: FeatureActivations(sae, (24,)), "feature"),
        (lambda sae: FeatureActivations(3), "is no SparseAutoencoder; read one with load_sae"),
    ],
)
def test_wrong_settings_are_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make(autoencoder(tiny("llada")))


def test_other_layers_and_widths_are_refused_before_any_work():
    model = tiny("llada")
    sae = autoencoder(model)
    with pytest.raises(ValueError, match=r"record its layer alone, layers=\[1\]"):
        record(model, PROMPTS, [FeatureActivations(sae)], **RUN)
    model.config.hidden_size += 1
    with pytest.raises(ValueError, match="was trained on vectors of"):
        dl.Recorder(model, [FeatureActivations(sae)], layers=[1])


def test_the_command_lines_text_names_a_directory(tmp_path):
    sae = autoencoder(tiny("llada"))
    save_sae(sae, tmp_path / "sae")
    (text,) = parse_reducers(f"features:{tmp_path / 'sae'}")
    assert text.build().sae.digest == sae.digest
    for wrong in ("features", "features:"):
        with pytest.raises(ValueError, match=f"--reducers '{wrong}': give features:PATH"):
            parse_reducers(wrong)
