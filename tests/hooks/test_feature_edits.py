"""Hooks in terms of features, and `until_committed`, against edits computed by hand, in three hosts."""

import pytest
import torch

import dlm_lens as dl
from dlm_lens.features import SparseAutoencoder, save_sae
from dlm_lens.hooks import (
    ablate_features,
    at_layers,
    at_steps,
    attach_hooks,
    capture,
    parse_hooks,
    reconstruct,
    scale_features,
    splice,
    steer,
    steer_feature,
    until_committed,
)
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17], [4, 8, 2]]
RUN = {"steps": 4, "gen_length": 8, "block_length": 4}


def autoencoder(model, layer=1, features=24, k=5, seed=0, **settings):
    """A Top-K autoencoder with random weights."""
    made = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    down, up = (torch.randn(features, width, generator=made) for _ in range(2))
    bias, shift = torch.randn(features, generator=made), torch.randn(width, generator=made)
    return SparseAutoencoder(down.T.contiguous(), bias, up, shift, k=k, layer=layer, **settings)


def _edited(hook, x):
    return hook(x.clone())


X = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(3))


def _sae(**settings):
    class Model:
        class config:
            hidden_size = 64

    return autoencoder(Model, **settings)


@pytest.mark.parametrize("normalisation", ["none", "layer_norm"])
def test_edits_are_differences_of_decoded_features(normalisation):
    sae = _sae(normalisation=normalisation)
    double = sae.to(dtype=torch.float64)
    features = double.encode(X.double())
    plain = double.decode(features, X.double())
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(_edited(reconstruct(sae), X), plain, **close)
    torch.testing.assert_close(_edited(reconstruct(sae, schedule=0.25), X), 0.75 * X + 0.25 * plain, **close)
    fires = features.sum((0, 1)).topk(2).indices.tolist()
    scaled = features.clone()
    scaled[..., fires] *= 3
    changed = double.decode(scaled, X.double())
    torch.testing.assert_close(_edited(scale_features(sae, fires, 3.0), X), X + changed - plain, **close)
    torch.testing.assert_close(_edited(scale_features(sae, fires, 3.0, keep_error=False), X), changed, **close)
    scaled[..., fires] = 0
    gone = double.decode(scaled, X.double())
    torch.testing.assert_close(_edited(ablate_features(sae, fires), X), X + gone - plain, **close)
    more = features.clone()
    more[..., 3] += 2.5
    steered = double.decode(more, X.double())
    torch.testing.assert_close(_edited(steer_feature(sae, 3, 2.5), X), X + steered - plain, **close)
    assert _edited(scale_features(sae, fires, 1.0), X).equal(X)
    assert _edited(reconstruct(sae, schedule=0), X).equal(X)
    assert _edited(reconstruct(sae), X.bfloat16()).dtype == torch.bfloat16


def test_reconstruct_is_a_splice_in_its_layer_and_steer_a_direction():
    model = tiny("llada")
    sae = autoencoder(model)
    run = dl.denoise(model, PROMPTS, hooks=[reconstruct(sae, positions="open")], **RUN)
    spliced = dl.hooks.at_layers(splice(sae, positions="open"), [1])
    same = dl.denoise(model, PROMPTS, hooks=[spliced], **RUN)
    torch.testing.assert_close(run.confidence, same.confidence)
    assert run.tokens.equal(same.tokens)
    assert not run.confidence.equal(dl.denoise(model, PROMPTS, **RUN).confidence)
    given = {"positions": "answer", "schedule": (1.0, 0.0)}
    steered = dl.denoise(model, PROMPTS, hooks=[steer_feature(sae, 3, 2.0, **given)], **RUN)
    added = dl.hooks.at_layers(steer(sae.decoder_weight[3], 2.0, **given), [1])
    torch.testing.assert_close(steered.confidence, dl.denoise(model, PROMPTS, hooks=[added], **RUN).confidence)


def test_a_hook_acts_alone_in_its_layer_and_at_its_positions():
    model = tiny("llada")
    sae = autoencoder(model)
    before = capture(model, PROMPTS, "resid", **RUN)
    with attach_hooks(model, ablate_features(sae, range(24), positions=[5])):
        hooked = capture(model, before.run, "resid")
    assert hooked["resid", 0, 0].equal(before["resid", 0, 0])
    changed = (hooked["resid", 1, 0] != before["resid", 1, 0]).any(-1)
    assert changed.sum(0).nonzero().flatten().tolist() == [5]


@pytest.mark.long
def test_three_hosts_agree(tmp_path, monkeypatch):
    model = tiny("llada")
    sae = autoencoder(model)
    hook = scale_features(sae, [1, 2, 3], 2.0, positions="open", keep_error=False)
    run = dl.denoise(model, PROMPTS[:1], hooks=[hook], **RUN)
    bridged = dl.bridge(model).denoise(PROMPTS[:1], hooks=[hook], **RUN)
    torch.testing.assert_close(run.confidence, bridged.confidence, rtol=1e-3, atol=1e-4)
    lm = dl.DiffusionLM(model)
    with lm.generate(PROMPTS[:1], **RUN) as tracer:
        for step in tracer.steps[:]:
            lm.layers[1].attn.apply(hook, step)
        traced = tracer.result.save()
    torch.testing.assert_close(run.confidence, traced.confidence)


def test_at_layers_narrows_the_layers_of_a_hook_and_does_not_replace_them():
    model = tiny("llada", num_hidden_layers=3)
    hook = reconstruct(autoencoder(model, layer=1))

    def final(*hooks):
        kept = capture(model, PROMPTS, "resid", hooks=hooks, **RUN)
        return [kept["resid", layer, step] for layer in range(3) for step in range(4)]

    alone = final(hook)
    assert not all(one.equal(other) for one, other in zip(alone, final(), strict=True))
    for limited in (at_layers(hook, [0, 1]), at_layers(hook, [0, -2]), at_layers(at_steps(hook, range(4)), [1, 2])):
        assert all(one.equal(other) for one, other in zip(alone, final(limited), strict=True))
    match = r"the hook inside acts in layers \[1\] alone; give one of them, or leave out at_layers"
    with pytest.raises(ValueError, match=match):
        dl.denoise(model, PROMPTS, hooks=[at_layers(hook, [0, -1])], **RUN)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_until_committed_acts_before_each_positions_step(family):
    model = tiny(family)
    sae = autoencoder(model)
    plain = dl.denoise(model, PROMPTS, **RUN)
    steps = torch.randint(-1, 5, plain.tokens.shape, generator=torch.Generator().manual_seed(1))
    hook = until_committed(steer_feature(sae, 3, 50.0), steps)
    kept = capture(model, plain, "resid", layers=[1])
    edited = capture(model, plain, "resid", layers=[1], hooks=[hook])
    for step in range(4):
        content = plain.attention_mask
        one, two = kept["resid", 1, step], edited["resid", 1, step]
        before = (step < steps) & content
        expected = one + 50.0 * sae.decoder_weight[3] * before[..., None]
        torch.testing.assert_close(two, expected, rtol=1e-4, atol=1e-4)
    never = until_committed(steer_feature(sae, 3, 50.0), torch.full_like(steps, -1))
    assert dl.denoise(model, PROMPTS, hooks=[never], **RUN).confidence.equal(plain.confidence)


def test_until_committed_is_of_the_rows_of_its_steps():
    model = tiny("llada")
    four = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    run = dl.denoise(model, four[:2], **RUN)
    hook = until_committed(steer(torch.ones(model.config.hidden_size)), run.step_of)
    with pytest.raises(ValueError, match="positions for 2 rows, and the run has 4"):
        dl.denoise(model, four, hooks=[hook], **RUN)
    with pytest.raises(ValueError, match="positions for 2 rows"):
        dl.record(model, four, [dl.ReceivedAttention()], hooks=[hook], batch_size=2, **RUN)
    # With guidance every prompt has two rows; steps of one row are for all prompts.
    dl.denoise(model, four[:2], hooks=[hook], cfg_scale=1.0, **RUN)
    dl.denoise(model, four, hooks=[until_committed(steer(torch.ones(32)), run.step_of[:1])], **RUN)


@pytest.mark.parametrize(("family", "settings"), [("dreamon", {}), ("llada2", {"sampler": "llada2_levenshtein"})])
def test_until_committed_is_refused_where_tokens_move(family, settings):
    model = tiny(family, **settings)
    plain = dl.denoise(model, [[5, 6, 7]], gen_length=4)
    hook = until_committed(steer(torch.ones(model.config.hidden_size)), plain.step_of)
    for call in (
        lambda: dl.denoise(model, [[5, 6, 7]], gen_length=4, hooks=[hook]),
        lambda: dl.replay(model, plain, [hook]),
    ):
        with pytest.raises(ValueError, match=r"moves tokens, so that no position is one token; .*at_steps"):
            call()


def test_until_committed_in_an_ar_run():
    model = dl.load("toy-ar")
    sae = autoencoder(model)
    prompt = ["tom has 5 apples ."]
    plain = dl.denoise(model, prompt, steps=3, gen_length=3)
    always = torch.full_like(plain.tokens, 99)
    steered = dl.denoise(model, prompt, hooks=[steer_feature(sae, 3, 5.0)], steps=3, gen_length=3)
    limited = until_committed(steer_feature(sae, 3, 5.0), always)
    found = dl.denoise(model, prompt, hooks=[limited], steps=3, gen_length=3)
    assert found.confidence.equal(steered.confidence)
    assert not found.confidence.equal(plain.confidence)


def test_an_expression_reads_an_autoencoder_by_its_path(tmp_path):
    model = tiny("llada")
    save_sae(autoencoder(model), tmp_path / "sae")
    path = str(tmp_path / "sae")
    (hook,) = parse_hooks(f"steer_feature({path!r}, 3, 2.5, positions='open')")
    assert hook.sae.digest == autoencoder(model).digest
    assert repr(hook).startswith("steer_feature(SparseAutoencoder(topk 5 of 24 features")
    assert repr(hook).endswith("3, strength=2.5, positions='open')")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda sae: steer_feature(sae, 24, 1.0), "feature"),
        (lambda sae: scale_features(sae, [], 1.0), "no feature; give at least one"),
        (
            lambda sae: steer_feature(sae, 3, float("nan")),
            "strength is nan; it must be a finite number",
        ),
        (lambda sae: steer_feature(sae, 3, None), "steer_feature: strength is None"),
        (lambda sae: scale_features(sae, 3, "a"), "scale_features: factor is 'a'; it must be a finite number"),
        (lambda sae: reconstruct(3), "3 is no SparseAutoencoder"),
        (lambda sae: reconstruct(sae, positions="masked ones"), "positions is 'masked ones'"),
        (lambda sae: until_committed(reconstruct(sae), torch.zeros(2, 3)), "give whole numbers"),
        (lambda sae: until_committed(dl.hooks.mask_positions(0), torch.zeros(2, 3).long()), "site is 'scores'"),
    ],
)
def test_wrong_arguments_are_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make(_sae())


def test_runs_that_do_not_fit_are_refused_before_the_first_pass():
    model = tiny("llada")
    sae = autoencoder(model)
    for wrong, why in (
        (reconstruct(autoencoder(model, layer=9)), "layer 9 of 2"),
        (reconstruct(_sae()), "was trained on vectors of 64 entries; the model's have"),
        (until_committed(reconstruct(sae), torch.zeros(2, 3).long()), "the run has 2 rows of 13 positions"),
    ):
        with pytest.raises(ValueError, match=why):
            dl.denoise(model, PROMPTS, hooks=[wrong], **RUN)
