"""`labels=` of every family against a float64 network: the loss reads the outputs that `denoise` reads."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

import dlm_lens as dl
from dlm_lens.adapters.masked_diffusion import MaskedDiffusionMixin
from dlm_lens.sampling.two_copies import Blocks
from dlm_lens.testing import tiny
from dlm_lens.training.losses import masked_loss
from dlm_lens.training.objective import MaskedDiffusionLoss, Noised
from dlm_lens.training.sources import Rows
from tests.adapters.test_sdlm import visible_to
from tests.dit64 import dit64
from tests.gidd64 import network64
from tests.modernbert64 import modernbert64
from tests.reference import forward64

LAYOUTS = [
    (family.name, model_type)
    for family in dl.families()
    for model_type, (_, kind) in family.layouts.items()
    # Beside an encoder a pass has outputs on its canvas alone: there is no loss of a whole text, and labels are
    # refused (test_diffusion_gemma.py).
    if not hasattr(kind, "attention_stacks")
]
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *((family, {"model_type": model_type}) for family, model_type in LAYOUTS),
    ("sink_qwen", {"num_sinks": 2, "sink_placement": "end", "logit_shift": True}),
    ("sink_llama", {"num_sinks": 1, "logit_shift": True}),
    ("sink_qwen", {"num_sinks": 1, "gated_attention": True}),
]
PADDING = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])


@pytest.fixture(params=CONFIGS, ids=lambda one: "-".join(map(str, (one[0], *one[1].values()))))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family, config = request.param
    return tiny(family, **config)


def canvas(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """A batch whose second row is padded on the left, and a label on every position but the padding and two."""
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [0, 0, 8, 9, 7, 9, 3]])
    mask = getattr(model.config, "mask_token_id", None)
    shown = ids.clone()
    labels = ids.masked_fill(PADDING == 0, -100)
    labels[0, 2] = labels[1, 4] = -100
    if not hasattr(model.config, "mask_token_id"):
        labels[1, 2] = -100  # transformers compares it with the padding's output
    elif mask is None:
        pass  # uniform noise: every token may be a random one
    else:
        shown[0, [1, 4, 6]] = shown[1, [2, 5]] = mask
    return shown, labels


def logits64(model: Any, ids: Tensor, causal: bool) -> Tensor:
    """Of one row; a DiT's mask has no probability, and BD3-LM's attention is block causal from the text's start."""
    if model.config.model_type == "modernbert":
        return modernbert64(model, ids)["logits"][0]
    if model.config.model_type == "gidd":
        return network64(model, ids[0], 0)["logits"]
    if model.config.model_type == "wedlm":  # tokens in the order of attention, at their own positions
        order = [
            *(ids[0] != model.config.mask_token_id).nonzero(),
            *(ids[0] == model.config.mask_token_id).nonzero(),
        ]
        moved = torch.cat(order)
        logits = forward64(model, ids[:, moved], causal=True, positions=moved[None])["logits"][0]
        return logits[moved.argsort()]
    if model.config.model_type in ("sdlm", "i_dlm"):
        visible = visible_to((ids[0] == model.config.mask_token_id).tolist(), model.config.mask_window)
        return forward64(model, ids, visible=visible)["logits"][0]
    if not hasattr(model.config, "cond_dim"):
        return forward64(model, ids, causal=causal)["logits"][0]
    width = getattr(model.config, "block_causal_length", None)
    block = torch.arange(ids.shape[1]) // (width or ids.shape[1])
    visible, mask = (block[None] <= block[:, None])[None, None], model.config.mask_token_id
    if mask is None:
        return dit64(model, ids, visible)["logits"][0]
    share = float((ids == mask).double().mean()) if model.config.time_conditioning else 0.0
    level = -math.log(1 - 0.999 * share)
    if model.config.model_type == "dit":  # GIDD is given the time at which so many tokens are masked
        level, strength = share, 2 * model.config.p_uniform / (1 - model.config.p_uniform)
        for _ in range(200):
            level = share * (1 + strength * math.sqrt(level * (1 - level)))
        level = max(level, 1e-4)
    logits = dit64(model, ids, visible, sigma=level)["logits"][0]
    return logits.index_fill(-1, torch.tensor(mask), -torch.inf)


def losses64(model: PreTrainedModel, shown: Tensor, labels: Tensor) -> Tensor:
    """Minus the log-probability of each label, by loops: which output predicts which position, in words."""
    causal = not hasattr(model.config, "mask_token_id")
    shift = causal or getattr(model.config, "logit_shift", False)
    found = []
    for row, first in ((0, 0), (1, 2)):
        # Every row by itself, without its padding.
        logits = logits64(model, shown[row : row + 1, first:], causal)
        likely = logits.log_softmax(-1)
        for position in range(first, 7):
            here = position - first
            if labels[row, position] == -100 or (causal and here == 0):
                continue
            output = max(0, here - 1) if shift else here
            found.append(-likely[output, labels[row, position]])
    return torch.stack(found)


def test_the_loss_is_that_of_the_outputs_that_predict_the_labels(model: PreTrainedModel) -> None:
    shown, labels = canvas(model)
    inputs: dict[str, Any] = {"attention_mask": PADDING, "position_ids": (PADDING.cumsum(-1) - 1).clamp(min=0)}
    by_hand = losses64(model, shown, labels)
    with torch.no_grad():
        got = model(input_ids=shown, labels=labels, **inputs)
        # A float32 network of two layers.
        assert float(got.loss) == pytest.approx(float(by_hand.mean()), rel=1e-5)
        summed = model(input_ids=shown, labels=labels, num_items_in_batch=torch.tensor(4), **inputs)
        assert float(summed.loss) == pytest.approx(float(by_hand.sum()) / 4, rel=1e-5)
        positional = model(shown, PADDING, inputs["position_ids"], labels=labels)
        assert float(positional.loss) == float(got.loss)
        loss, logits = model(input_ids=shown, labels=labels, return_dict=False, use_cache=False, **inputs)[:2]
        assert float(loss) == float(got.loss)
        assert logits.equal(got.logits)
        assert model(input_ids=shown, **inputs).logits.equal(got.logits)
        if getattr(model.config, "mask_token_id", None) is not None:
            kept = model(input_ids=shown, labels=labels, logits_to_keep=2, **inputs)
            assert kept.logits.equal(got.logits[:, -2:])
            assert float(kept.loss) == float(got.loss)
            last = model(input_ids=shown, logits_to_keep=2, **inputs).logits
            torch.testing.assert_close(last, got.logits[:, -2:])


def test_training_and_likelihood_have_the_same_loss(model: PreTrainedModel) -> None:
    """On what is masked: the training module's numerator and the chain rule's terms, against the same network."""
    mask = getattr(model.config, "mask_token_id", None)
    if mask is None:
        pytest.skip("a model without masks; its loss is compared in test_objective.py and test_likelihood.py")
    if model.config.model_type in ("sdlm", "i_dlm"):
        pytest.skip("not trained here; likelihoods are those of test_sdlm.py and test_i_dlm.py")
    tokens = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
    masked = torch.tensor([[False, False, False, True, False, True, True]])
    labels = tokens.masked_fill(~masked, -100)
    labels = torch.cat([labels, torch.full_like(labels, -100)])
    shown = torch.cat([tokens.masked_fill(masked, mask), tokens])
    by_hand = losses64(model, shown, labels)
    answer = torch.tensor([[False] * 3 + [True] * 4])
    rows = Rows(tokens, torch.ones_like(answer), answer, torch.zeros_like(answer))
    objective = MaskedDiffusionLoss(block_length=0).for_model(model, 1)  # one pass over the canvas, in every family
    rate = masked.double().mean(-1)  # at which a network that takes the noise level is given that of its masks
    asked = objective.loss_arguments(rows, Noised(masked, rate, torch.ones(1, dtype=torch.float64), answer))
    with torch.no_grad():
        loss = masked_loss(model, **{name: value for name, value in asked.items() if name != "count"})
        whole = model(input_ids=shown[:1], labels=labels[:1]).loss
    of_objective = by_hand.sum()
    if model.config.model_type == "sedd":  # the score entropy, -ln q + Z - 1 with q = Z p
        ratios = logits64(model, shown[:1], False)[masked[0]].exp() / (model.config.vocab_size - 1)
        of_objective = of_objective + (ratios.sum(-1) - ratios.sum(-1).log() - 1).sum()
    assert float(loss) == pytest.approx(float(of_objective), rel=1e-5)
    assert float(whole) == pytest.approx(float(by_hand.mean()), rel=1e-5)
    # One block, except in a network that attends in blocks of its own in every pass.
    own = getattr(model.config, "block_causal_length", None)
    one_block = {"block_length": own or tokens.shape[1]} if Blocks.of(model.config) else {}
    last = dl.log_likelihood(model, tokens[0, :6], tokens[0, 6:], "chain_rule", **one_block)
    labels[0], shown[0] = -100, tokens[0]
    labels[0, 6], shown[0, 6] = tokens[0, 6], mask
    wanted = losses64(model, shown, labels)[0]
    blocks = Blocks.of(model.config)
    if blocks is not None and blocks.context in ("causal", "whole"):
        # A block of one position after a text that does not see it.
        visible = torch.ones(1, 1, 7, 7, dtype=torch.bool)
        visible[..., :6, 6] = False
        visible = visible.tril() if blocks.context == "causal" else visible
        logits = forward64(model, shown[:1], visible=visible)["logits"]
        wanted = -logits[0, 6].log_softmax(-1)[tokens[0, 6]]
    assert float(-last.value) == pytest.approx(float(wanted), rel=1e-5)


def test_dreams_loss_is_shifted() -> None:
    model, ids = tiny("dream"), torch.tensor([[3, 14, 63, 9, 63]])
    labels = torch.tensor([[-100, -100, 7, -100, 8]])
    with torch.no_grad():
        got = model(input_ids=ids, labels=labels)
    likely = got.logits[0].double().log_softmax(-1)
    shifted, unshifted = -(likely[1, 7] + likely[3, 8]) / 2, -(likely[2, 7] + likely[4, 8]) / 2
    assert float(got.loss) == pytest.approx(float(shifted), rel=1e-5)
    assert abs(float(shifted - unshifted)) > 0.01


@pytest.mark.parametrize("family", ["llada", "mmada", "smdm"])
def test_a_cast_leaves_rotary_tables_in_float32(family: str, tmp_path: Path) -> None:
    saved: Any = tiny(family, max_position_embeddings=2048)
    saved.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    loaded: Any = dl.load(tmp_path, dtype="bfloat16")
    positions = torch.arange(2048)[None]
    expected = loaded.model.rotary_emb(torch.empty(0), positions)
    for cast in (dl.load(tmp_path).to(torch.bfloat16), dl.load(tmp_path).half(), dl.load(tmp_path).double()):
        rotary: Any = cast.get_submodule("model.rotary_emb")
        assert {value.dtype for value in rotary.buffers()} == {torch.float32}
        assert all(map(torch.equal, rotary(torch.empty(0), positions), expected))
    cast = dl.load(tmp_path).to(torch.bfloat16)
    assert cast.dtype == torch.bfloat16
    ids = torch.arange(40).repeat(2)[None]
    with torch.no_grad():
        assert torch.equal(cast(input_ids=ids).logits, loaded(input_ids=ids).logits)
    moved: Any = dl.load(tmp_path).to("meta", torch.bfloat16)
    assert moved.model.rotary_emb.inv_freq.is_meta


class MaskedGemma(MaskedDiffusionMixin, Gemma2ForCausalLM):
    """A masked DLM on a host whose layers have sliding windows in turn."""


@pytest.mark.parametrize(("windows", "seen"), [(True, [9, 16]), (False, [16, 16])])
@torch.no_grad()
def test_a_host_s_sliding_windows_stay_in_both_directions(windows: bool, seen: list[int]) -> None:
    """A query in the middle of 16 positions sees the 4 on either side and itself, or all of them."""
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        layer_types=None,
    )  # fmt: skip
    config.is_causal = False
    if not windows:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    model: Any = MaskedGemma(config).eval()
    patterns: list[Tensor] = []
    for attention in dl.attention.hooked_attentions(model):
        attention.hook_pattern.register_forward_hook(lambda _module, _inputs, out: patterns.append(out))
    model(torch.arange(16)[None] + 3)
    assert [int((pattern[0, 0, 8] > 0).sum()) for pattern in patterns] == seen
