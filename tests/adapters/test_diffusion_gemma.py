"""DiffusionGemma against transformers' own class, in one process; hook points of encoder and decoder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dlm_lens as dl
from dlm_lens.adapters.encoder_decoder import ROUTER_POINTS, new_cache
from dlm_lens.attention import attention_blocks, attention_of, check_hook_points, hooked_attentions, listening
from dlm_lens.hooks import at_encoder, attach_hooks, mask_positions
from dlm_lens.testing import tiny

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Float32 against float64."""

SHAPES: list[dict[str, Any]] = [
    {},
    {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_experts": 8, "top_k_experts": 3},
    {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 3},
    {"head_dim": 16, "global_head_dim": 8, "num_global_key_value_heads": 4, "final_logit_softcapping": 3.0},
    {
        "use_bidirectional_attention": "vision",
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "top_k_experts": 1,
        "canvas_length": 5,
    },
]
"""Patterns of layers, experts, widths and numbers of heads, soft caps, canvases."""


def pair(dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Any, Any]:
    """Our model and transformers' own with the same weights."""
    model: Any = tiny("diffusion_gemma", **config).to(dtype)
    values = {name: value for name, value in model.config.to_dict().items() if not name.endswith("_token_id")}
    theirs = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig.from_dict(values)).eval().to(dtype)
    found = theirs.load_state_dict(model.state_dict(), strict=True)
    assert not found.missing_keys
    if dtype == torch.float64:  # torch has no grouped product of float64
        model.set_experts_implementation("eager")
        theirs.set_experts_implementation("eager")
    return model, theirs


def ids(rows: int = 2, positions: int = 21, seed: int = 0) -> Tensor:
    return torch.randint(0, 61, (rows, positions), generator=torch.Generator().manual_seed(seed))


def scales(model: Any, seed: int = 1) -> None:
    """Numbers other than 1 for what a fresh network has 1 of: norms, scales of routers, experts and layers."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if (
            name.endswith(("norm.weight", "_1.weight", "_2.weight", "scale", "layer_scalar"))
            and "embed" not in name
        ):
            with torch.no_grad():
                value.copy_(0.5 + torch.rand(value.shape, generator=generator, dtype=value.dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
@torch.no_grad()
def test_logits_are_those_of_transformers_own_class(shape: dict[str, Any], dtype: torch.dtype) -> None:
    model, theirs = pair(dtype, **shape)
    scales(model)
    theirs.load_state_dict(model.state_dict())
    tokens = ids()
    # Norms and logits are float32 in a float64 model too; keys outside a window are hidden here and cut off there.
    close = {"rtol": 1e-5, "atol": 1e-5}
    for start in (1, 9, 20):
        conditioning = torch.randn(2, 21 - start, 64, generator=torch.Generator().manual_seed(start)).to(dtype)
        for given in (None, conditioning):
            expected = theirs(
                input_ids=tokens[:, :start], decoder_input_ids=tokens[:, start:], self_conditioning_logits=given
            ).logits
            got = model(input_ids=tokens, canvas_start=start, self_conditioning_logits=given).logits
            torch.testing.assert_close(got.float(), expected, **close)
            same = model(
                input_ids=tokens[:, :start], decoder_input_ids=tokens[:, start:], self_conditioning_logits=given
            ).logits
            torch.testing.assert_close(same.float(), expected, rtol=0, atol=0 if dtype == torch.float32 else 1e-6)


@torch.no_grad()
def test_a_padded_row_is_what_it_is_alone_and_what_transformers_computes() -> None:
    model, theirs = pair()
    tokens, content = ids(), torch.ones(2, 21, dtype=torch.bool)
    content[1, :7] = False
    got = model(input_ids=tokens, attention_mask=content, canvas_start=12).logits
    expected = theirs(
        input_ids=tokens[:, :12],
        attention_mask=content[:, :12],
        decoder_input_ids=tokens[:, 12:],
        decoder_attention_mask=content,
    ).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    alone = model(input_ids=tokens[1:, 7:], canvas_start=5).logits
    torch.testing.assert_close(got[1:], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_last_canvas_length_positions_are_the_canvas() -> None:
    model = tiny("diffusion_gemma")
    tokens = ids(1)
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens, canvas_start=13).logits)
    assert model(input_ids=tokens[:, :4]).logits.shape[1] == 3  # one token is left to the encoder
    for start in (0, 21):
        with pytest.raises(ValueError, match="at least one token"):
            model(input_ids=tokens, canvas_start=start)


@torch.no_grad()
def test_an_encoder_cache_gives_the_same_logits() -> None:
    model, tokens, cache = tiny("diffusion_gemma"), ids(2, 30), new_cache()
    for start in (6, 14, 22):
        got = model(input_ids=tokens[:, : start + 8], canvas_start=start, past_key_values=cache).logits
        assert cache.get_seq_length() == start
        expected = model(input_ids=tokens[:, : start + 8], canvas_start=start).logits
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_patterns_of_encoder_and_decoder_are_transformers_own() -> None:
    model, theirs = pair(layer_types=["full_attention"] * 3)
    theirs.set_attn_implementation("eager")
    tokens, kept = ids(), dict[tuple[str, int], Tensor]()
    stacks = {"encoder": theirs.model.encoder.language_model, "": theirs.model.decoder}
    seen = dict[tuple[str, int], Tensor]()
    with listening(model):
        for stack in stacks:
            for layer, attention in enumerate(hooked_attentions(model, stack)):
                attention.hook_pattern.register_forward_hook(
                    lambda _m, _i, out, key=(stack, layer): kept.__setitem__(key, out)
                )
            for layer, block in enumerate(stacks[stack].layers):
                block.self_attn.register_forward_hook(
                    lambda _m, _i, out, key=(stack, layer): seen.__setitem__(key, out[1])
                )
        model(input_ids=tokens, canvas_start=9)
        theirs(input_ids=tokens[:, :9], decoder_input_ids=tokens[:, 9:])
    assert len(kept) == 6
    for key, pattern in kept.items():
        torch.testing.assert_close(pattern, seen[key], rtol=1e-5, atol=1e-6)
        assert pattern.shape[2:] == ((9, 9) if key[0] else (12, 21))


@torch.no_grad()
def test_a_sliding_layer_hides_the_encoders_older_keys() -> None:
    model = tiny("diffusion_gemma", sliding_window=4)
    kept: list[Tensor] = []
    for attention in hooked_attentions(model):
        attention.hook_pattern.register_forward_hook(lambda _m, _i, out: kept.append(out))
    with listening(model):
        model(input_ids=ids(), canvas_start=9)
    # Keys of all positions so far; window - 1 = 3 of the encoder's 9 are seen, as transformers' cache keeps them.
    for pattern in kept[:2]:
        assert pattern.shape[2:] == (12, 21)
        assert bool((pattern[..., :6] == 0).all())
        assert bool((pattern[..., 6:] > 0).all())
    assert bool((kept[2] > 0).all())


@pytest.mark.parametrize("stack", ["", "encoder"])
@torch.no_grad()
def test_q_k_v_and_z_are_what_the_layer_computes(stack: str) -> None:
    model, tokens = tiny("diffusion_gemma"), ids(1)
    for block in attention_blocks(model, stack):
        attention, held = attention_of(block), dict[str, Tensor]()

        def keep(name: str, held: dict[str, Tensor] = held) -> Any:
            return lambda _m, _i, out: held.__setitem__(name, out)

        points = {name: attention._modules[f"hook_{name}"] for name in ("q", "k", "v", "pattern", "z")}
        handles = [point.register_forward_hook(keep(name)) for name, point in points.items()]
        norm: Any = block
        handles.append(norm.input_layernorm.register_forward_hook(keep("x")))
        with listening(model):
            model(input_ids=tokens, canvas_start=9)
        for handle in handles:
            handle.remove()
        x, width = held["x"].double(), attention.head_dim

        def rms(value: Tensor, weight: Tensor | None) -> Tensor:
            scaled = value / (value.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            return scaled if weight is None else scaled * weight.double()

        def projected(module: Any, x: Tensor = x, width: int = width) -> Tensor:
            return (x @ module.weight.double().mT).unflatten(-1, (-1, width))

        keys = projected(attention.k_proj)
        values = keys if attention.v_proj is None else projected(attention.v_proj)  # full layers share k and v
        torch.testing.assert_close(
            held["q"].double(), rms(projected(attention.q_proj), attention.q_norm.weight), **CLOSE
        )
        torch.testing.assert_close(held["k"].double(), rms(keys, attention.k_norm.weight), **CLOSE)
        own = held["v"][:, -x.shape[1] :].double()
        torch.testing.assert_close(own, rms(values, None), **CLOSE)
        spread = held["v"].double().repeat_interleave(attention.num_key_value_groups, 2)
        torch.testing.assert_close(
            held["z"].double(), torch.einsum("bhqk,bkhd->bqhd", held["pattern"].double(), spread), **CLOSE
        )


@pytest.mark.parametrize("stack", ["", "encoder"])
@torch.no_grad()
def test_routers_show_probabilities_and_chosen_experts_and_an_edit_acts(stack: str) -> None:
    model, tokens = tiny("diffusion_gemma"), ids(1)
    block: Any = attention_blocks(model, stack)[0]
    plain, held = model(input_ids=tokens, canvas_start=9).logits, dict[str, Tensor]()
    for name in ROUTER_POINTS:
        block.router._modules[f"hook_{name}"].register_forward_hook(
            lambda _m, _i, out, name=name: held.__setitem__(name, out)
        )
    own = block.router.register_forward_pre_hook(lambda _m, args: held.__setitem__("x", args[0]))
    model(input_ids=tokens, canvas_start=9)
    own.remove()
    x = held["x"].double()
    scaled = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * block.router.scale.double() * 32**-0.5
    probabilities = (scaled @ block.router.proj.weight.double().mT).softmax(-1)
    torch.testing.assert_close(held["router_probabilities"].double(), probabilities, rtol=1e-4, atol=1e-6)
    weights, experts = probabilities.topk(2)
    assert torch.equal(held["router_experts"], experts)
    torch.testing.assert_close(
        held["router_weights"].double(), weights / weights.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6
    )
    handle = block.router.hook_router_experts.register_forward_hook(lambda _m, _i, out: (out + 1) % 4)
    edited = model(input_ids=tokens, canvas_start=9).logits
    handle.remove()
    other = held["x"], (experts + 1) % 4
    chosen = probabilities.gather(-1, other[1])
    torch.testing.assert_close(
        held["router_weights"].double(), chosen / chosen.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6
    )
    assert float((edited - plain).abs().max()) > 1e-3


@torch.no_grad()
def test_self_conditioning_is_a_hook_point() -> None:
    model, tokens = tiny("diffusion_gemma"), ids(1)
    logits = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(3))
    seen: list[Tensor] = []

    def bottleneck(module: Any, inputs: Any, value: Tensor) -> Tensor:
        seen.append(value)
        return torch.full_like(value, -torch.inf).scatter(-1, value.argmax(-1, keepdim=True), 0.0)

    handle = model.model.hook_self_conditioning.register_forward_hook(bottleneck)
    got = model(input_ids=tokens, canvas_start=9, self_conditioning_logits=logits).logits
    model(input_ids=tokens, canvas_start=9)  # there is nothing to be conditioned on
    handle.remove()
    assert len(seen) == 1
    assert torch.equal(seen[0], logits)
    # The embedding of the top token alone: logits so far apart that the softmax has one entry.
    top = torch.nn.functional.one_hot(logits.argmax(-1), 64) * 1e4
    expected = model(input_ids=tokens, canvas_start=9, self_conditioning_logits=top.float()).logits
    torch.testing.assert_close(got, expected)
    assert float((got - model(input_ids=tokens, canvas_start=9).logits).abs().max()) > 1e-2


def test_checkpoints_of_transformers_load_and_are_written_for_it(tmp_path: Path) -> None:
    model, theirs = pair()
    theirs.generation_config.update(max_denoising_steps=7, t_min=0.3, eos_token_id=[5, 6])
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = dl.load(tmp_path / "theirs")
    tokens = ids(1)
    # Equal weights at other addresses: a kernel may take another path for another alignment.
    torch.testing.assert_close(
        loaded(input_ids=tokens).logits, model(input_ids=tokens).logits, rtol=1e-5, atol=1e-5
    )
    assert loaded.sampler_defaults["steps_per_block"] == 7
    assert "eos_token_id" not in loaded.sampler_defaults
    assert loaded.config.eos_token_id == [5, 6]
    assert dl.denoise(loaded, [1, 2], gen_length=8, steps_per_block=1).eos_token_ids == (5, 6)
    assert dl.load(tmp_path / "theirs", eos_token_id=7).config.eos_token_id == 7
    assert loaded.sampler_defaults["t_min"] == 0.3
    assert loaded.sampler_defaults["entropy_bound"] == 0.1
    loaded.save_pretrained(tmp_path / "ours")
    again = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "ours").eval()
    assert {name: value for name, value in again.config.to_dict()["text_config"].items() if name != "dtype"} == {
        name: value for name, value in theirs.config.to_dict()["text_config"].items() if name != "dtype"
    }
    got = again(input_ids=tokens[:, :13], decoder_input_ids=tokens[:, 13:]).logits
    expected = theirs(input_ids=tokens[:, :13], decoder_input_ids=tokens[:, 13:]).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_bad_input_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = tiny("diffusion_gemma")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="computes no loss here; leave labels out"):
        model(input_ids=ids(1), labels=ids(1))
    with pytest.raises(ValueError, match="mask_token_id is 3, and diffusion_gemma has no mask token"):
        dl.load(tmp_path, mask_token_id=3)
    file = tmp_path / "generation_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "sampler_config": {"_cls_name": "DynamicCache"}}))
    with pytest.raises(ValueError, match="_cls_name must be EntropyBoundSamplerConfig"):
        dl.load(tmp_path)
    file.write_text(json.dumps(values))
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"hidden_size": -3}, "text_config says hidden_size = -3"),
        ({"per_layer_config": {"0": {"num_experts": 9}}}, "layers differ in head_dim"),
        ({"num_hidden_layers": 2}, "per_layer_config"),
        ({"use_bidirectional_attention": "all"}, "take None or 'vision'"),
    ):
        changed = {**config, "text_config": {**config["text_config"], **change}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            dl.load(tmp_path)


def test_an_embedding_on_the_disk_is_refused(tmp_path: Path) -> None:
    """transformers' own code would multiply with a weight without numbers, and no message."""
    tiny("diffusion_gemma").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the decoder's embedding is offloaded"):
        dl.load(tmp_path, device_map={"": "disk"})
    assert dl.denoise(dl.load(tmp_path, device_map={"": "cpu"}), [1, 2], gen_length=8, steps_per_block=2).steps == 2


def test_hook_points_are_checked_in_both_stacks() -> None:
    model = tiny("diffusion_gemma")
    check_hook_points(model)
    assert [len(hooked_attentions(model, stack)) for stack in ("", "encoder")] == [3, 3]
    assert all("hook_q" in attention._modules for attention in hooked_attentions(model))
    # The vision tower keeps transformers' attention.
    assert not any("hook_z" in name for name, _ in model.model.encoder.vision_tower.named_modules())


@torch.no_grad()
def test_images_are_read_as_transformers_generate_reads_them() -> None:
    """The processor's fields in one pass: features at the image's tokens, which see each other."""
    config = {"image_token_id": 60, "use_bidirectional_attention": "vision", "layer_types": ["full_attention"] * 3}
    model, theirs = pair(**config)
    theirs.config.image_token_id = theirs.model.encoder.config.image_token_id = 60
    tokens = torch.randint(0, 59, (2, 20), generator=torch.Generator().manual_seed(3))
    tokens[:, 3:5] = 60  # two features for every image: 6 x 3 patches, pooled 3 x 3
    kinds = (tokens[:, :12] == 60).long()
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="xy"), -1).reshape(1, 9, 2)
    images = {
        "pixel_values": torch.rand(4, 9, 12, generator=torch.Generator().manual_seed(4)),
        "image_position_ids": grid.expand(4, -1, -1),
    }
    masks = theirs.model.encoder.create_masks_for_generate(
        config=theirs.config,
        inputs_embeds=torch.empty(2, 12, 0),
        attention_mask=torch.ones(2, 12, dtype=torch.long),
        past_key_values=None,
        position_ids=torch.arange(12)[None],
        mm_token_type_ids=kinds,
    )
    expected = theirs(
        input_ids=tokens[:, :12], decoder_input_ids=tokens[:, 12:], attention_mask=masks, **images
    ).logits
    got = model(input_ids=tokens, canvas_start=12, mm_token_type_ids=kinds, **images).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    causal = model(input_ids=tokens, canvas_start=12, **images).logits
    blind = {**images, "pixel_values": images["pixel_values"].flip(0)}
    other = model(input_ids=tokens, canvas_start=12, mm_token_type_ids=kinds, **blind).logits
    assert min(float((each - got).abs().max()) for each in (causal, other)) > 1e-3
    with attach_hooks(model, at_encoder(mask_positions(3))), dl.record_forward(model, [dl.ValueNorm()]) as seen:
        hidden = model(input_ids=tokens, canvas_start=12, mm_token_type_ids=kinds, **images).logits
    assert float((hidden - got).abs().max()) > 1e-3
    assert seen.value_norm.shape[-1] == 20
    cache = new_cache()
    model(input_ids=tokens, canvas_start=11, past_key_values=cache)
    with pytest.raises(ValueError, match="images beside a cache"):
        model(input_ids=tokens, canvas_start=12, past_key_values=cache, **images)
