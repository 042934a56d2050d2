"""ModernBERT as a masked DLM against transformers' own ModernBertForMaskedLM and plain loops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, ModernBertConfig

import dlm_lens as dl
from dlm_lens.attention import hooked_attentions
from dlm_lens.testing import tiny
from dlm_lens.training.losses import masked_loss
from tests.modernbert64 import modernbert64
from tests.sampling.plain_dllm import plain_dllm

PROMPTS = [[5, 9, 11, 3, 17, 20, 8], [6, 12, 40]]
RUN: dict[str, Any] = {"gen_length": 12, "block_length": 6, "steps": 8}
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 1e-5}
"""float32 attention over up to 19 keys."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint under the names of the originals: global, local, local, global layers, windows of 4."""
    path = tmp_path_factory.mktemp("modernbert")
    model = tiny("modernbert", num_hidden_layers=4, global_attn_every_n_layers=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros: what is left out would not show
                weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=torch.Generator().manual_seed(1))
            elif "Wqkv" in name:
                weight.mul_(3)  # attention far from even
    model.save_pretrained(path)
    model.tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    hub = {name: config[name] for name in config if name not in OWN} | {"eos_token_id": 62}
    (path / "config.json").write_text(json.dumps(hub))
    return path


OWN = (
    "is_causal",
    "mask_token_id",
    "eot_token_id",
    "sampler",
    "sampler_defaults",
    "layer_types",
    "rope_parameters",
)
"""Fields that no config.json of the originals has; the last two follow from the others there."""


@pytest.fixture(scope="module")
def model(saved: Path) -> Any:
    return dl.load(saved)


@pytest.fixture(scope="module")
def stock(saved: Path) -> Any:
    return AutoModelForMaskedLM.from_pretrained(saved, attn_implementation="eager").eval()


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_are_those_of_transformers(saved: Path, dtype: torch.dtype) -> None:
    ours, theirs = dl.load(saved, dtype=dtype), AutoModelForMaskedLM.from_pretrained(saved, dtype=dtype).eval()
    assert type(theirs).__module__ == "transformers.models.modernbert.modeling_modernbert"
    ids, mask = padded([list(range(3, 20)), list(range(30, 41))])
    assert ours(input_ids=ids, attention_mask=mask).logits.equal(theirs(ids, attention_mask=mask).logits)
    assert ours(ids, logits_to_keep=2).logits.equal(theirs(ids).logits[:, -2:])
    assert ours(ids, labels=ids).loss.isclose(theirs(ids, labels=ids).loss)


@torch.no_grad()
def test_patterns_are_those_of_transformers_and_local_layers_see_their_window(model: Any, stock: Any) -> None:
    ids = torch.arange(3, 20)[None]
    expected = stock(ids, output_attentions=True).attentions
    lm: Any = dl.DiffusionLM(model)
    with lm.trace(ids):
        found = [lm.layers[layer].attn.pattern.clone() for layer in range(4)].save()
    near = (torch.arange(17)[:, None] - torch.arange(17)).abs() <= 4
    for layer, (pattern, theirs) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(pattern, theirs, **CLOSE)
        assert bool((pattern[0, 0] > 0).equal(near if layer in (1, 2) else torch.ones_like(near)))


@torch.no_grad()
def test_an_independent_float64_network_gives_the_same(model: Any) -> None:
    ids = torch.arange(3, 20)[None]
    expected = modernbert64(model, ids)
    torch.testing.assert_close(model(ids).logits.double(), expected["logits"], **CLOSE)
    seen: dict[int, Tensor] = {}
    for layer, attention in enumerate(hooked_attentions(model)):
        handle = attention.hook_pattern.register_forward_hook(lambda _m, _i, out, n=layer: seen.__setitem__(n, out))
        model(ids)
        handle.remove()
        torch.testing.assert_close(seen[layer].double(), expected[f"pattern{layer}"], **CLOSE)


@torch.no_grad()
def test_queries_and_keys_are_read_and_edited_in_the_fused_projection(model: Any) -> None:
    ids = torch.arange(3, 20)[None]
    attention = model.model.layers[1].attn
    seen: dict[str, Tensor] = {}
    handles = [attention.Wqkv.register_forward_hook(lambda _m, _i, out: seen.__setitem__("fused", out))]
    for name in ("q", "k", "v"):
        point = attention.get_submodule(f"hook_{name}")
        handles.append(point.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out)))
    model(ids)
    for handle in handles:
        handle.remove()
    # transformers views the fused output as [q, k, v, head, d_head].
    for part, name in enumerate(("q", "k", "v")):
        assert seen[name].equal(seen["fused"].unflatten(-1, (3, 4, 8))[..., part, :, :])

    def second_head_off(_module: Any, _inputs: Any, value: Tensor) -> Tensor:
        return value.index_fill(2, torch.tensor([1]), 0.0)

    for part, name in enumerate(("q", "k")):
        handle = attention.get_submodule(f"hook_{name}").register_forward_hook(second_head_off)
        edited = model(ids).logits
        handle.remove()
        rows, weight = slice(32 * part + 8, 32 * part + 16), attention.Wqkv.weight
        kept = weight[rows].clone()
        weight[rows] = 0
        expected = model(ids).logits
        weight[rows] = kept
        torch.testing.assert_close(edited, expected, atol=1e-6, rtol=1e-6)
        assert (edited - model(ids).logits).abs().max() > 1e-3


def test_files_stay_those_of_the_original(saved: Path, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    original, written = (load_file(path / "model.safetensors") for path in (saved, tmp_path))
    assert original.keys() == written.keys()
    assert {"model.layers.0.attn.Wqkv.weight", "head.dense.weight", "decoder.bias"} <= original.keys()
    assert all(original[name].equal(written[name]) for name in original)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["ModernBertForMaskedLM"]
    assert (
        type(AutoConfig.for_model("modernbert")) is ModernBertConfig
    )  # transformers' own names are not taken over
    (family,) = [family for family in dl.families() if family.name == "modernbert"]
    assert family.special_ids[50368] == {"mask": 50284}
    assert MaskedConfig().eos_token_id == [50282, 50283]
    assert dl.load(tmp_path).config.eos_token_id == model.config.eos_token_id == [62, 61]


MaskedConfig: Any = next(family for family in dl.families() if family.name == "modernbert").layouts["modernbert"][0]


def test_texts_get_no_special_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer for BERT puts [CLS] and [SEP] around a text, and a prompt does not end with [SEP]."""
    asked: list[dict[str, Any]] = []
    tokenizer = model.tokenizer

    def watched(texts: Any, **options: Any) -> Any:
        asked.append(options)
        return tokenizer(texts, **options)

    monkeypatch.setattr(model, "tokenizer", watched)
    monkeypatch.setattr(watched, "pad_token_id", 61, raising=False)
    dl.denoise(model, "w5 w9", gen_length=2, steps=1, block_length=2)
    assert asked == [{"add_special_tokens": False}]


SETTINGS = [
    {},
    {"steps": 5, "block_length": 5},
    {"temperature": 0.7, "seed": 3},
    {"remasking": "random", "seed": 4},
    {"cfg_scale": 1.5},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_sampler_is_dllm_s_token_for_token(model: Any, stock: Any, changes: dict[str, Any]) -> None:
    settings = {**RUN, **changes}
    with torch.no_grad():
        canvases, ranks = plain_dllm(
            lambda ids, mask: stock(ids, attention_mask=mask).logits, PROMPTS, mask=63, fill=61, **settings
        )
    run = dl.denoise(model, PROMPTS, reference_quirks=True, **settings)
    assert run.steps == len(ranks)
    for row, prompt in enumerate(PROMPTS):
        keep, size = run.attention_mask[row], len(prompt) + 12
        for step, canvas in enumerate(canvases):
            assert run.canvases[step, row, keep].equal(canvas[row, :size])
        for step, confidence in enumerate(ranks):
            torch.testing.assert_close(run.confidence[step, row, keep].float(), confidence[row, :size], **CLOSE)
    if not changes:  # without random numbers and quirks a row is what it is alone
        assert dl.denoise(model, PROMPTS, **settings).tokens.equal(run.tokens)


def test_received_attention_and_sinks_under_windows_to_both_sides(model: Any, stock: Any) -> None:
    kept = dl.ReceivedAttention(("all", "masked"), min_viewers=1)
    recording = dl.record(model, PROMPTS, [kept, dl.ValueNorm()], **RUN)
    run = recording.run
    assert (recording.windows, recording.causal) == ((None, 4, 4, None), False)
    for step, row in ((0, 0), (0, 1), (4, 1), (7, 0)):
        keep = run.attention_mask[row]
        ids, masked = run.canvases[step, row, keep], run.masked[step, row, keep].tolist()
        with torch.no_grad():
            patterns = stock(ids[None], output_attentions=True).attentions
        for layer, pattern in enumerate(patterns):
            size = len(ids)
            sums, even = torch.zeros(2, 4, size).double(), torch.zeros(2, size).double()
            for query in range(size):
                keys = [key for key in range(size) if layer in (0, 3) or abs(query - key) <= 4]
                for key in keys:
                    for kind in range(2):
                        if kind == 0 or masked[query]:
                            sums[kind, :, key] += pattern[0, :, query, key]
                            even[kind, key] += 1 / len(keys)
            for kind, name in enumerate(("all", "masked")):
                found = recording.received_sums(name)[step, row, layer][:, keep].double()
                seen = even[kind] > 0
                torch.testing.assert_close(found[:, seen], sums[kind][:, seen], **CLOSE)
                expected = recording.expected(name, layer=layer)[step, row, keep].double()
                torch.testing.assert_close(expected, even[kind], rtol=1e-6, atol=1e-7)
    sinks = dl.find_sinks(recording, dl.AboveMean(eps=1.0))
    again = dl.find_sinks(dl.received_over_steps(model, run, min_viewers=1), dl.AboveMean(eps=1.0))
    assert sinks.is_sink.any()
    assert sinks.is_sink.equal(again.is_sink)


def test_hooks_in_stream_are_those_of_the_pattern(model: Any, saved: Path) -> None:
    formed = dl.load(saved, attn_implementation="hooked")
    for hook in (dl.hooks.mask_top_sinks(2), dl.hooks.mask_positions(0, 7, 8)):
        runs = [dl.denoise(one, PROMPTS, hooks=[hook], **RUN) for one in (model, formed)]
        assert runs[0].canvases.equal(runs[1].canvases)
        assert not runs[0].canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)


def test_the_lens_passes_the_prediction_head(model: Any, stock: Any) -> None:
    run = dl.denoise(model, PROMPTS[:1], **RUN)
    lens = dl.logit_lens(model, run, steps=[3])
    with torch.no_grad():
        likely = stock(run.canvases[3]).logits[0].double().softmax(-1)
    assert len(lens.position)
    for entry, position in enumerate(lens.position):
        entropy = -(likely[position] * likely[position].log()).sum()
        torch.testing.assert_close(lens.entropy[entry, -1].double(), entropy, **CLOSE)
        assert int(lens.top_tokens[entry, -1, 0]) == int(likely[position].argmax())


def test_the_training_loss_is_the_cross_entropy_of_the_logits(model: Any, stock: Any) -> None:
    ids = torch.arange(3, 20)[None]
    outputs, targets = torch.tensor([2, 5, 11]), torch.tensor([7, 8, 9])
    loss = masked_loss(model, ids, outputs, targets, torch.ones(3))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(stock(ids).logits[0, outputs], targets, reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_there_is_no_bridge(model: Any) -> None:
    assert len(hooked_attentions(model)) == 4
    with pytest.raises(ValueError, match="modernbert"):
        dl.bridge(model)
