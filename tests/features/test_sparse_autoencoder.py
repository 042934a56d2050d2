"""`SparseAutoencoder`: every architecture and normalisation against its formula in float64, and a planted code."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dlm_lens.features import SparseAutoencoder, random_decoder, save_sae, untrained
from tests.features.foreign import COUNT, WIDTH, K, draw, kept, vectors


def _sae(**settings):
    weights = {name: torch.from_numpy(value) for name, value in draw().items()}
    own = {name: weights[name] for name in ("threshold",) if settings.get("activation") == "jumprelu"}
    if settings.get("activation") == "gated":
        own = {"gate_bias": weights["b_gate"], "gate_scale": weights["r_mag"]}
    given = {"k": K} if settings.get("activation", "topk") in ("topk", "groupmax") else {}
    bias = weights["b_mag" if settings.get("activation") == "gated" else "b_enc"]
    return SparseAutoencoder(weights["W_enc"], bias, weights["W_dec"], weights["b_dec"], **(given | own | settings))


def _inner(x, w):
    return (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]


def _groupmax(x, w):
    inner = np.maximum(_inner(x, w), 0).reshape(len(x), K, COUNT // K)
    return (inner * (inner == inner.max(-1, keepdims=True))).reshape(len(x), COUNT)


FORMULAS = {
    "topk": lambda x, w: kept(_inner(x, w), K),
    "groupmax": _groupmax,
    "relu": lambda x, w: np.maximum(_inner(x, w), 0),
    "jumprelu": lambda x, w: np.maximum(_inner(x, w), 0) * (_inner(x, w) > w["threshold"]),
    "gated": lambda x, w: (
        np.maximum((x - w["b_dec"]) @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"], 0)
        * ((x - w["b_dec"]) @ w["W_enc"] + w["b_gate"] > 0)
    ),
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_encode_and_decode_are_the_formula(activation):
    weights = {name: value.astype(np.float64) for name, value in draw().items()}
    x = vectors().astype(np.float64)
    features = FORMULAS[activation](x, weights)
    assert 0 < (features > 0).mean() < 1
    sae = _sae(activation=activation).to(dtype=torch.float64)
    found = sae.encode(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), features, atol=1e-12)
    restored = features @ weights["W_dec"] + weights["b_dec"]
    np.testing.assert_allclose(sae(torch.from_numpy(x)).numpy(), restored, atol=1e-12)
    assert sae(torch.from_numpy(x).bfloat16()).dtype == torch.bfloat16


def test_norms_of_the_decoder_choose_features_and_leave_the_reconstruction_scale():
    weights = {name: value.astype(np.float64) for name, value in draw().items()}
    x, norms = vectors().astype(np.float64), np.linalg.norm(weights["W_dec"], axis=1)
    features = kept(_inner(x, weights) * norms, K)
    sae = _sae(rescaled=True).to(dtype=torch.float64)
    np.testing.assert_allclose(sae.encode(torch.from_numpy(x)).numpy(), features, atol=1e-12)
    restored = (features / norms) @ weights["W_dec"] + weights["b_dec"]
    np.testing.assert_allclose(sae(torch.from_numpy(x)).numpy(), restored, atol=1e-12)


@pytest.mark.parametrize("normalisation", ["constant_norm_rescale", "layer_norm"])
def test_normalised_activations_are_scaled_back(normalisation):
    weights = {name: value.astype(np.float64) for name, value in draw().items()}
    x = 3 * vectors().astype(np.float64) + 2
    if normalisation == "layer_norm":
        mean, scale = x.mean(1, keepdims=True), x.std(1, ddof=1, keepdims=True)
        inner = (x - mean) / (scale + 1e-5)
    else:
        mean, scale = 0.0, np.linalg.norm(x, axis=1, keepdims=True) / WIDTH**0.5
        inner = x / scale
    restored = (kept(_inner(inner, weights), K) @ weights["W_dec"] + weights["b_dec"]) * scale + mean
    sae = _sae(normalisation=normalisation).to(dtype=torch.float64)
    np.testing.assert_allclose(sae(torch.from_numpy(x)).numpy(), restored, atol=1e-9)
    with pytest.raises(ValueError, match=r"normalises its input; give decode\(features, x\) the activations too"):
        sae.decode(sae.encode(torch.from_numpy(x)))


def test_vectors_and_directions_of_zeros_have_no_nan():
    x = torch.cat([torch.zeros(1, WIDTH), torch.from_numpy(vectors())])
    for normalisation in ("constant_norm_rescale", "layer_norm"):
        restored = _sae(normalisation=normalisation)(x)
        assert not restored.isnan().any()
        assert restored[0].abs().max() < 1e-4  # as small as the vector
    sae = _sae(rescaled=True)
    directions = sae.decoder_weight.clone()
    directions[3] = 0
    one = replace(sae, decoder_weight=directions)
    features, norms = one.encode(x), directions.norm(dim=-1)
    assert not features[:, 3].any()
    features[:, 3] = 2.0
    expected = features[:, norms > 0] / norms[norms > 0] @ directions[norms > 0] + one.decoder_bias
    torch.testing.assert_close(one.decode(features), expected)
    assert not one.change(x, torch.ones(1), [3]).any()


def test_what_would_be_computed_or_stored_otherwise_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'gated' is not rescaled"):
        _sae(activation="gated", rescaled=True)
    with pytest.raises(ValueError, match="SAELens rescales topk alone"):
        save_sae(_sae(activation="relu", rescaled=True), tmp_path / "sae")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=rf"x is a Tensor float32 .*; give a tensor \[\.\.\., {WIDTH}\]"):
        _sae().encode(torch.zeros(2, 5))


def test_a_difference_of_features_adds_what_decoding_it_adds():
    for settings in ({}, {"rescaled": True}, {"normalisation": "layer_norm"}):
        sae = _sae(**settings).to(dtype=torch.float64)
        x = torch.from_numpy(vectors()).double()
        features = sae.encode(x)
        more = torch.zeros_like(features)
        more[:, 3] = 2.5
        expected = sae.decode(features + more, x) - sae.decode(features, x)
        amount = torch.tensor([2.5], dtype=torch.float64)
        torch.testing.assert_close(sae.change(x, amount, [3]), expected, rtol=0, atol=1e-12)


def test_a_planted_sparse_code_is_recovered():
    # Orthogonal directions: the encoder that transposes them reads every code of at most K features exactly.
    directions = torch.linalg.qr(torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).double())[0].T
    code = torch.zeros(30, 48, dtype=torch.float64)
    for row, drawn in zip(code, np.random.default_rng(0).random((30, 48)), strict=True):
        row[np.argsort(drawn)[:K].tolist()] = torch.from_numpy(1 + drawn[:K])
    zero = torch.zeros(48, dtype=torch.float64)
    bias = torch.ones(64, dtype=torch.float64)
    sae = SparseAutoencoder(directions.T.contiguous(), zero, directions, bias, k=K)
    torch.testing.assert_close(sae.encode(code @ directions + bias), code, rtol=0, atol=1e-12)
    # The nulls of the same k do not.
    for null in (untrained(sae), random_decoder(sae)):
        wrong = (null(code @ directions + bias) - code @ directions - bias).norm() / (code @ directions).norm()
        assert float(wrong) > 0.5
    assert (untrained(sae).encode(code @ directions + bias) > 0).sum(-1).max() <= K


def test_nulls_keep_what_they_say():
    sae = _sae()
    torch.testing.assert_close(untrained(sae).decoder_weight.norm(dim=1), torch.ones(COUNT))
    assert untrained(sae).decoder_bias.equal(sae.decoder_bias)
    assert untrained(sae).encoder_weight.equal(untrained(sae).decoder_weight.T)
    drawn = random_decoder(sae, seed=3)
    torch.testing.assert_close(drawn.decoder_weight.norm(dim=1), sae.decoder_weight.norm(dim=1))
    assert drawn.encoder_weight is sae.encoder_weight
    assert not drawn.decoder_weight.equal(random_decoder(sae, seed=4).decoder_weight)


def test_blocks_of_vectors_change_nothing(monkeypatch):
    sae, x = _sae(), torch.from_numpy(vectors())
    whole = sae(x)
    monkeypatch.setattr("dlm_lens.features.sparse_autoencoder.ENTRIES_AT_ONCE", 2 * COUNT)
    assert sae.at_once == 2
    torch.testing.assert_close(sae(x), whole)


def test_the_digest_tells_weights_and_settings_apart():
    sae = _sae()
    assert sae.digest == _sae().digest != replace(sae, k=3).digest
    assert sae.digest != replace(sae, decoder_bias=sae.decoder_bias + 1).digest
    assert sae.digest in repr(sae)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k": 0}, "k is 0; it must be a whole number from 1 to 20"),
        ({"k": None}, "k is None"),
        ({"activation": "groupmax", "k": 3}, "20 features are not 3 groups"),
        ({"activation": "jumprelu", "k": None}, "activation 'jumprelu' needs threshold"),
        ({"threshold": torch.zeros(COUNT)}, "activation 'topk' has no threshold"),
        ({"activation": "tanh"}, "activation is 'tanh'"),
        ({"site": "q"}, "site is 'q'"),
        ({"decoder_bias": torch.full((WIDTH,), torch.nan)}, "a weight is not finite"),
        ({"decoder_bias": torch.zeros(3)}, "decoder_bias has shape"),
    ],
)
def test_contradictions_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        replace(_sae(), **change)
