"""`load_sae` and `save_sae`: files written with the foreign names, and what is refused before weights are read."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlm_lens.adapters import load
from dlm_lens.features import checkpoints, load_sae, save_sae
from dlm_lens.testing import tiny
from tests.features.foreign import COUNT, WIDTH, K, draw, kept, vectors, write_saelens, write_sparsify

META = {"metadata": {"hook_name": "blocks.3.hook_resid_post", "model_name": "dream", "sae_lens_version": "6.2.0"}}
BASE = "W_enc W_dec b_dec b_enc"


def _topk(subtracted=True):
    weights = {name: value.astype(np.float64) for name, value in draw().items()}
    x = vectors().astype(np.float64) - (weights["b_dec"] if subtracted else 0)
    features = kept(x @ weights["W_enc"] + weights["b_enc"], K)
    return features @ weights["W_dec"] + weights["b_dec"]


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "topk", "k": K, "apply_b_dec_to_input": True, "normalize_activations": "none", **META},
        {
            "architecture": "standard",
            "activation_fn_str": "topk",
            "activation_fn_kwargs": {"k": K},
            "hook_name": "blocks.3.hook_resid_post",
            "model_name": "dream",
            "normalize_activations": False,
        },
        {"activation_fn": "topk", "activation_fn_kwargs": {"k": K}, "hook_point": "blocks.4.hook_resid_pre"},
    ],
    ids=["saelens 6", "saelens 4", "saelens 2"],
)
def test_topk_of_saelens(tmp_path, settings):
    sae = load_sae(write_saelens(tmp_path, BASE, settings))
    assert (sae.activation, sae.k, sae.site, sae.layer) == ("topk", K, "resid", 3)
    np.testing.assert_allclose(sae(torch.from_numpy(vectors())).numpy(), _topk(), atol=1e-5)


def test_the_bias_is_subtracted_only_where_the_file_says(tmp_path):
    sae = load_sae(
        write_saelens(tmp_path, BASE, {"architecture": "topk", "k": K, "apply_b_dec_to_input": False, **META})
    )
    np.testing.assert_allclose(sae(torch.from_numpy(vectors())).numpy(), _topk(subtracted=False), atol=1e-5)


def test_topk_of_sparsify(tmp_path):
    path = write_sparsify(
        tmp_path / "layers.3", {"num_latents": COUNT, "expansion_factor": 32, "activation": "topk"}
    )
    sae = load_sae(path)
    assert (sae.site, sae.layer) == ("resid", 3)
    np.testing.assert_allclose(sae(torch.from_numpy(vectors())).numpy(), _topk(), atol=1e-5)
    assert load_sae(write_sparsify(tmp_path / "layers.1.mlp", {"num_latents": COUNT})).site == "mlp_out"


@pytest.mark.parametrize(
    ("names", "settings", "activation"),
    [
        (BASE, {"architecture": "standard"}, "relu"),
        (f"{BASE} threshold", {"architecture": "jumprelu"}, "jumprelu"),
        ("W_enc W_dec b_dec b_gate b_mag r_mag", {"architecture": "gated"}, "gated"),
    ],
)
def test_other_architectures_and_their_way_back(tmp_path, names, settings, activation):
    sae = load_sae(write_saelens(tmp_path / "theirs", names, {**settings, **META}))
    assert sae.activation == activation
    again = load_sae(save_sae(sae, tmp_path / "ours"))
    assert again.digest == sae.digest
    assert (again.layer, again.site, again.model) == (3, "resid", "dream")


def test_a_saved_autoencoder_has_the_foreign_names(tmp_path):
    sae = load_sae(write_sparsify(tmp_path / "layers.3", {"num_latents": COUNT}))
    settings = json.loads((save_sae(sae, tmp_path / "out") / "cfg.json").read_text())
    assert (settings["architecture"], settings["k"], settings["d_in"], settings["d_sae"]) == (
        "topk",
        K,
        WIDTH,
        COUNT,
    )
    assert settings["metadata"]["hook_name"] == "blocks.3.hook_resid_post"
    assert load_sae(tmp_path / "out").digest == sae.digest


def test_topk_in_norms_of_the_decoder_is_read_and_written(tmp_path):
    """SAELens's `rescale_acts_by_decoder_norm`: a times the norms before the k largest, f divided by them after."""
    settings = {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True, **META}
    sae = load_sae(write_saelens(tmp_path / "theirs", BASE, settings))
    weights = {name: value.astype(np.float64) for name, value in draw().items()}
    norms = np.linalg.norm(weights["W_dec"], axis=1)
    features = kept(((vectors() - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]) * norms, K)
    expected = (features / norms) @ weights["W_dec"] + weights["b_dec"]
    for found in (sae, load_sae(save_sae(sae, tmp_path / "ours"))):
        np.testing.assert_allclose(found.encode(torch.from_numpy(vectors())).numpy(), features, atol=1e-4)
        np.testing.assert_allclose(found(torch.from_numpy(vectors())).numpy(), expected, atol=1e-4)
    assert np.abs(expected - _topk()).max() > 0.1


def test_sparsify_counts_features_by_the_width_and_names_no_layer(tmp_path):
    path = write_sparsify(tmp_path / "coder", {"num_latents": 0, "expansion_factor": 2})
    with pytest.raises(ValueError, match=r"encoder.weight has shape \[20, 12\]; cfg.json calls for \[24, 12\]"):
        load_sae(path)
    sae = load_sae(write_sparsify(path, {"num_latents": COUNT}))
    assert (sae.site, sae.layer) == ("resid", None)


def test_the_scaling_factor_of_older_files_multiplies_features(tmp_path):
    factor = np.linspace(0.5, 2, COUNT).astype(np.float32)
    settings = {"architecture": "standard", "finetuning_scaling_factor": True, **META}
    sae = load_sae(write_saelens(tmp_path, f"{BASE} scaling_factor", settings, scaling_factor=factor))
    weights = {name: value.astype(np.float64) for name, value in draw().items()}
    features = np.maximum((vectors() - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"], 0)
    expected = (features * factor) @ weights["W_dec"] + weights["b_dec"]
    np.testing.assert_allclose(sae(torch.from_numpy(vectors())).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("factor", "why"),
    [
        (np.full(1, 2, np.float32), r"scaling_factor has shape \[1\]; cfg.json calls for \[20\]"),
        (np.ones(7, np.float32), r"scaling_factor has shape \[7\]; cfg.json calls for \[20\]"),
        (np.ones(COUNT, np.int64), "scaling_factor holds I64; weights are of F64, F32"),
    ],
)
def test_the_shape_of_a_scaling_factor_is_compared_too(tmp_path, factor, why):
    with pytest.raises(ValueError, match=why):
        load_sae(write_saelens(tmp_path, f"{BASE} scaling_factor", META, scaling_factor=factor))


@pytest.mark.parametrize(
    ("names", "settings", "why"),
    [
        (
            BASE,
            {"architecture": "topk", "k": K, "d_in": 13},
            r"W_enc has shape \[12, 20\]; cfg.json calls for \[13, 20\]",
        ),
        (BASE, {"architecture": "topk", "k": 21}, "k is 21; it must be a whole number from 1 to 20"),
        (BASE, {"architecture": "topk"}, "k is None"),
        ("W_enc W_dec b_dec", {"architecture": "topk", "k": K}, "lacks b_enc; cfg.json calls for"),
        (f"{BASE} threshold", {"architecture": "topk", "k": K}, "holds threshold, which such an autoencoder"),
        (BASE, {"architecture": "matching_pursuit"}, "architecture is 'matching_pursuit'; read are topk, standard"),
        (BASE, {"d_sae": "20"}, "d_sae is '20'; it must be a whole number"),
        (BASE, {"normalize_activations": "expected_average_only_in"}, "fold_activation_norm_scaling_factor"),
        (BASE, {"hook_name": "blocks.2.attn.hook_z"}, "hook_name is 'blocks.2.attn.hook_z'; read are"),
        (BASE, {"hook_name": "blocks.0.hook_resid_pre"}, "from the second layer on"),
        (BASE, {"reshape_activations": "hook_z"}, "reshape_activations is set"),
        (BASE, {"architecture": ["topk"]}, r"architecture is \['topk'\]; read are topk, standard"),
        (BASE, {"normalize_activations": ["none"]}, r"normalize_activations is \['none'\]; read are none"),
        (BASE, {"architecture": "topk", "activation_fn_kwargs": [K]}, "it must be an object of settings"),
        (BASE, {"apply_b_dec_to_input": "false"}, "apply_b_dec_to_input is 'false'; it must be true or false"),
        (BASE, {"d_in": 10**12}, f"d_in is {10**12}; it must be a whole number from 1 to {2**31}"),
    ],
)
def test_what_is_refused_is_named(tmp_path, names, settings, why):
    with pytest.raises(ValueError, match=why):
        load_sae(write_saelens(tmp_path, names, settings))


@pytest.mark.parametrize("shape", [(COUNT + 1,), (COUNT, 3), (1_000_000, 1), ()])
def test_a_scaling_factor_of_another_shape_is_refused(tmp_path, shape):
    factor = np.ones(shape, np.float32)
    path = write_saelens(tmp_path, f"{BASE} scaling_factor", {"architecture": "standard"}, scaling_factor=factor)
    with pytest.raises(ValueError, match=rf"scaling_factor has shape \[.*; cfg.json calls for \[{COUNT}\]$"):
        load_sae(path)


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F8_E8M0", 8), ("I32", 32)])
def test_weights_of_dtypes_that_torch_does_not_compute_in_are_refused(tmp_path, dtype, bits):
    path = write_saelens(tmp_path, BASE, {"architecture": "standard"})
    header, values = {}, b""
    for name in BASE.split():
        shape = list(draw()[name].shape)
        size = int(np.prod(shape)) * (bits if name == "b_enc" else 32) // 8
        own = dtype if name == "b_enc" else "F32"
        header[name] = {"dtype": own, "shape": shape, "data_offsets": [len(values), len(values) + size]}
        values += bytes(size)
    text = json.dumps(header).encode()
    (path / "sae_weights.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + values)
    with pytest.raises(ValueError, match=f"b_enc holds {dtype}; weights are of F64, F32, F16, BF16"):
        load_sae(path)


def test_a_directory_that_is_written_in_part_is_refused(tmp_path, monkeypatch):
    """Never new weights with the settings of the ones before, whose shapes are the same."""
    sae = load_sae(write_saelens(tmp_path / "first", BASE, {"architecture": "topk", "k": K, **META}))
    path = save_sae(sae, tmp_path / "second")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_sae(replace(sae, encoder_weight=-sae.encoder_weight, k=K + 1), path)
    with pytest.raises(FileNotFoundError, match=r"holds sae_weights.safetensors but no cfg.json"):
        load_sae(path)


@pytest.mark.parametrize("name", ["transcode", "skip_connection"])
def test_other_coders_of_sparsify_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} is set"):
        load_sae(write_sparsify(tmp_path, {"num_latents": COUNT, name: True}))


def test_pickles_and_other_directories_are_refused(tmp_path):
    (tmp_path / "ae.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(FileNotFoundError, match=r"holds ae.pt, and no pickle is read here"):
        load_sae(tmp_path)
    write_sparsify(tmp_path / "layers.3", {"num_latents": COUNT})
    with pytest.raises(
        FileNotFoundError, match=r"holds 1 autoencoders; give the directory of one, such as .*layers.3"
    ):
        load_sae(tmp_path)
    (tmp_path / "layers.3" / "cfg.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no cfg\.json"):
        load_sae(tmp_path / "layers.3")


def test_the_model_is_compared_before_weights_are_read(tmp_path):
    model = tiny("llada")
    path = write_saelens(tmp_path, BASE, {"architecture": "topk", "k": K, **META})
    with pytest.raises(ValueError, match=f"vectors of 12 entries; the model's have {model.config.hidden_size}"):
        load_sae(path, model)
    model.config.hidden_size = WIDTH
    with pytest.raises(ValueError, match=r"is of layer 3; the model has the layers 0 to"):
        load_sae(path, model)
    depth = len(model.model.layers)
    for layer in (0, depth - 1):
        assert load_sae(path, model, layer=layer).layer == layer
    with pytest.raises(ValueError, match=f"is of layer {depth}; the model has the layers 0 to {depth - 1}"):
        load_sae(path, model, layer=depth)


def test_the_weights_are_where_an_offloaded_model_takes_its_ids(tmp_path):
    tiny("llada", hidden_size=WIDTH, num_attention_heads=2).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", device_map={"": "disk"})
    assert model.device.type == "meta"
    path = write_saelens(tmp_path, BASE, {"architecture": "topk", "k": K, **META})
    sae = load_sae(path, model, layer=1)
    np.testing.assert_allclose(sae(torch.from_numpy(vectors())).numpy(), _topk(), atol=1e-5)


@pytest.mark.parametrize(
    ("end", "site", "norm"), [("mlp", "mlp_out", "feedforward"), ("self_attn", "attn_out", "attention")]
)
def test_an_autoencoder_of_a_module_that_a_norm_follows_is_refused(tmp_path, end, site, norm):
    """sparsify hooks the module itself; what a layer of Gemma 2 adds to the stream is the norm after it."""
    from dlm_lens.attention import add_hook_points, attach_hooks, attention_blocks, check_hook_points
    from dlm_lens.hooks import at_layers, reconstruct
    from tests.attention.test_hook_points import build

    def written(width):
        rng = np.random.default_rng(0)
        shapes = {
            "encoder.weight": (COUNT, width),
            "encoder.bias": (COUNT,),
            "W_dec": (COUNT, width),
            "b_dec": (width,),
        }
        return {name: torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}

    normed, plain = (add_hook_points(build(kind)) for kind in ("gemma2", "llama"))
    for model in (normed, plain):
        check_hook_points(model)
    path = tmp_path / f"layers.1.{end}"
    path.mkdir()
    width = normed.config.hidden_size
    save_file(written(width), path / "sae.safetensors")
    (path / "cfg.json").write_text(json.dumps({"d_in": width, "num_latents": COUNT, "k": K}))
    message = rf"is of the output of {end}, and Gemma2DecoderLayer adds post_{norm}_layernorm of it to the stream"
    with pytest.raises(ValueError, match=message):
        load_sae(path, normed)
    sae = load_sae(path)
    assert (sae.site, sae.of_module) == (site, True)
    with pytest.raises(ValueError, match=message):
        sae.check(normed)
    for hook in (reconstruct(sae), at_layers(reconstruct(sae), [1])):
        with pytest.raises(ValueError, match=message), attach_hooks(normed, hook):
            pass
    assert not any(m._forward_hooks for b in attention_blocks(normed) for m in b.children())
    assert load_sae(path, normed, site=site).site == site  # the user says that it is of what the layer adds
    with pytest.raises(ValueError, match=message):
        load_sae(save_sae(sae, tmp_path / "again"), normed)  # SAELens's name of the hook point does not say it
    sae.check(plain)
    with attach_hooks(plain, reconstruct(sae)):
        plain(input_ids=torch.tensor([[1, 2, 3]]))
    assert (
        load_sae(write_saelens(tmp_path / "lens", BASE, {**META, "architecture": "topk", "k": K})).of_module
        is False
    )
