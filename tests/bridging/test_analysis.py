"""TransformerLens's own analysis code, unchanged, on a DLM: what it returns is checked against the weights."""

from functools import partial
from typing import Any

import einops
import pytest
import torch
from torch import Tensor
from transformer_lens import ActivationCache, patching
from transformer_lens import utilities as utils
from transformer_lens.head_detector import detect_head
from transformer_lens.tools.analysis import direct_logit_attribution, logit_lens

import dlm_lens as dl
from tests.bridging.cases import model_of, some_ids

PROMPT = "tom has 5 apples . tom buys 4 more . how many apples ? : 5 + 4 = [MASK] . answer [MASK] ."


@pytest.fixture(scope="module", params=["toy", "toy-sink", "toy-gated", "toy-ar"])
def folded(request: pytest.FixtureRequest) -> Any:
    """An embedded model in compatibility mode."""
    tl = dl.bridge(request.param)
    tl.original_model_name = request.param
    tl.enable_compatibility_mode(disable_warnings=True)
    return tl


def ids_of(tl: Any, text: str = PROMPT) -> Tensor:
    return tl.to_tokens(text if tl.cfg.mask_token_id is not None else text.replace(" [MASK]", " 9"))


@torch.no_grad()
def test_decompose_resid_sums_to_the_residual_stream(folded: Any) -> None:
    _, cache = folded.run_with_cache(ids_of(folded))
    parts, labels = cache.decompose_resid(return_labels=True, mode="full")
    assert labels[0] == "embed"
    assert len(labels) == 1 + 2 * folded.cfg.n_layers
    torch.testing.assert_close(
        parts.sum(0), cache[f"blocks.{folded.cfg.n_layers - 1}.hook_resid_post"], atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_accumulated_resid_is_the_stream_before_each_layer(folded: Any) -> None:
    logits, cache = folded.run_with_cache(ids_of(folded))
    stack, labels = cache.accumulated_resid(layer=-1, return_labels=True, apply_ln=True)
    assert labels == [*[f"{i}_pre" for i in range(folded.cfg.n_layers)], "final_post"]
    for layer in range(folded.cfg.n_layers):
        resid = cache[f"blocks.{layer}.hook_resid_pre"]
        # TransformerLens normalises each entry by its own statistics.
        normed = resid / (resid.pow(2).mean(-1, keepdim=True) + folded.cfg.eps).sqrt()
        torch.testing.assert_close(stack[layer], normed, atol=1e-4, rtol=1e-4)
    # the logit lens of the last entry is the output
    canvas = folded.sinks.canvas(stack.shape[2])
    torch.testing.assert_close(stack[-1][:, canvas] @ folded.W_U + folded.b_U, logits, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_logit_attrs_sum_to_the_logit(folded: Any) -> None:
    """Direct logit attribution: the parts of the stream, over all heads and MLPs, add up to the token's logit."""
    ids = ids_of(folded)
    at = folded.sinks.canvas(ids.shape[1] + folded.sinks.count)
    logits, cache = folded.run_with_cache(ids, pos_slice=at)
    token = int(logits[0, -4].argmax())
    parts = cache.decompose_resid(mode="full", pos_slice=-4)
    per_part = cache.logit_attrs(parts, tokens=torch.tensor([token]), pos_slice=-4, has_batch_dim=True)
    torch.testing.assert_close(per_part.sum(0)[0] + folded.b_U[token], logits[0, -4, token], atol=1e-3, rtol=1e-4)
    heads, labels = cache.stack_head_results(layer=-1, return_labels=True, incl_remainder=True, pos_slice=-4)
    assert labels[0] == "L0H0"
    per_head = cache.logit_attrs(heads, tokens=torch.tensor([token]), pos_slice=-4, has_batch_dim=True)
    torch.testing.assert_close(per_head.sum(0)[0] + folded.b_U[token], logits[0, -4, token], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("case", ["sink", "sinks-end", "gated-sink-llama"])
@torch.no_grad()
def test_lens_and_attribution_of_sink_models_read_the_cache_of_the_canvas(case: str) -> None:
    tl, ids = dl.bridge(model_of(case)), some_ids()
    tl.enable_compatibility_mode(disable_warnings=True)
    logits, cache = tl.run_with_cache(ids, pos_slice=tl.sinks.canvas(ids.shape[1] + tl.sinks.count))
    lens = logit_lens(tl, cache=cache, positions=None, targets=ids)
    torch.testing.assert_close(
        lens.values[-1][..., 0], logits.gather(-1, ids[..., None])[..., 0], atol=1e-4, rtol=1e-4
    )
    per_token = cache.logit_attrs(cache.decompose_resid(), tokens=ids).sum(0) + tl.b_U[ids]
    torch.testing.assert_close(per_token, logits.gather(-1, ids[..., None])[..., 0], atol=1e-3, rtol=1e-4)
    for position in (0, 3, -1):
        for unit in ("component", "head"):
            found = direct_logit_attribution(tl, cache=cache, answer_tokens=7, pos=position, unit=unit)
            total = found.attribution.sum(0) + tl.b_U[7]
            torch.testing.assert_close(total, logits[:, position, 7], atol=1e-3, rtol=1e-4)
    # Of ids TransformerLens takes activations with the sinks, whose positions are not those of the logits.
    with pytest.raises(ValueError, match="its readout is not that path"):
        logit_lens(tl, ids, positions=None)
    shifted = -1 if case == "sinks-end" else 3
    with pytest.raises(ValueError, match="transforms the residual stream before its logits"):
        direct_logit_attribution(tl, ids, answer_tokens=7, pos=shifted)


@torch.no_grad()
def test_head_results_are_values_through_w_o(folded: Any) -> None:
    _, cache = folded.run_with_cache(ids_of(folded))
    heads = cache.stack_head_results(layer=1)  # [head, batch, position, d_model] of layer 0
    want = torch.einsum("bphd,hdm->hbpm", cache["blocks.0.attn.hook_z"], folded.W_O[0])
    torch.testing.assert_close(heads, want, atol=1e-5, rtol=1e-4)


@pytest.mark.long
@torch.no_grad()
def test_patching_restores_the_clean_answer(folded: Any) -> None:
    """The activation-patching helper: position and layer where a clean residual stream repairs a corrupted run."""
    clean, other = ids_of(folded), ids_of(folded, PROMPT.replace("buys 4", "buys 2").replace("+ 4", "+ 2"))
    at = -5 if folded.cfg.mask_token_id is not None else -6  # the sum: at its mask, or predicted from the "="
    logits, cache = folded.run_with_cache(clean)
    right, wrong = int(logits[0, at].argmax()), int(folded(other)[0, at].argmax())
    assert right != wrong

    def difference(logits: Tensor) -> Tensor:
        return logits[0, at, right] - logits[0, at, wrong]

    found = patching.get_act_patch_resid_pre(folded, other, cache, difference)
    length = clean.shape[1] + folded.sinks.count
    assert found.shape == (folded.cfg.n_layers, clean.shape[1])
    corrupted, repaired = difference(folded(other)), difference(logits)
    # Before layer 0 only the positions that differ matter; one of them alone is measured by hand.
    token = int((clean != other).nonzero()[0, 1])
    position = folded.sinks.locate(token, length)

    def patch(resid: Tensor, hook: Any) -> Tensor:
        resid = resid.clone()
        resid[:, position] = cache["blocks.0.hook_resid_pre"][:, position]
        return resid

    by_hand = difference(folded.run_with_hooks(other, fwd_hooks=[("blocks.0.hook_resid_pre", patch)]))
    torch.testing.assert_close(found[0, token], by_hand)
    torch.testing.assert_close(found[0, 1], corrupted, atol=1e-4, rtol=1e-4)
    assert repaired > 0 > corrupted


@torch.no_grad()
def test_head_patching_and_ablation_by_tutorial_code(folded: Any) -> None:
    """The main demo's head ablation, word by word."""
    tokens = ids_of(folded)
    layer_to_ablate, head_index_to_ablate = 1, 2

    def head_ablation_hook(value: Tensor, hook: Any) -> Tensor:
        value[:, :, head_index_to_ablate, :] = 0.0
        return value

    plain = folded(tokens)
    ablated = folded.run_with_hooks(
        tokens, fwd_hooks=[(utils.get_act_name("v", layer_to_ablate), head_ablation_hook)]
    )
    heads = folded.run_with_hooks(
        tokens, fwd_hooks=[(utils.get_act_name("z", layer_to_ablate), head_ablation_hook)]
    )
    torch.testing.assert_close(ablated, heads, atol=1e-4, rtol=1e-4)  # no values, no z: gates and sinks included
    assert (ablated - plain).abs().max() > 1e-3


@torch.no_grad()
def test_attention_patterns_by_tutorial_code(folded: Any) -> None:
    """The exploratory-analysis demo's way to patterns: `cache["pattern", layer]`, one prompt without batch axis."""
    tokens = ids_of(folded)
    _, cache = folded.run_with_cache(tokens, remove_batch_dim=True)
    pattern = cache["pattern", 2]
    assert pattern.shape == (4, *[tokens.shape[1] + folded.sinks.count] * 2)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
    upper = einops.reduce(torch.triu(pattern, 1), "head query key -> head", "sum")
    assert (upper == 0).all() == (folded.cfg.attention_dir == "causal")
    _, raw = dl.bridge(folded.original_model_name).run_with_cache(tokens, remove_batch_dim=True)
    torch.testing.assert_close(pattern, raw["pattern", 2], atol=1e-4, rtol=1e-4)  # folding changes no pattern


@pytest.mark.long
@pytest.mark.parametrize("name", ["toy", "toy-gated", "toy-ar"])
@torch.no_grad()
def test_head_detector_runs(name: str) -> None:
    """It compares patterns with a matrix of the text's own length, so it has no place for sink tokens."""
    tl, text = dl.bridge(name), "sort 4 2 9 1 : answer 1 2 4 9 ."
    scores = detect_head(tl, text, "previous_token_head", exclude_bos=False, exclude_current_token=False)
    _, cache = tl.run_with_cache(tl.to_tokens(text), remove_batch_dim=True)
    before = torch.tril(torch.ones(len(cache["pattern", 0][0]), len(cache["pattern", 0][0])), -1)
    shift = torch.diag(torch.ones(len(before) - 1), -1)
    assert scores.shape == (4, 4)
    for layer in range(4):
        want = (cache["pattern", layer] * shift).sum((-1, -2)) / cache["pattern", layer].sum((-1, -2))
        torch.testing.assert_close(scores[layer], want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_start_and_stop_at_a_layer_resume_the_same_pass() -> None:
    for case in ("llada", "sink", "sinks-end", "gated-sink"):
        tl, ids = dl.bridge(model_of(case)), some_ids()
        resid = tl(ids, stop_at_layer=1)
        assert resid.shape == (2, 11 + tl.sinks.count, 32)
        torch.testing.assert_close(tl(resid, start_at_layer=1), tl(ids), atol=1e-5, rtol=1e-5)


def test_gradients_reach_hook_points() -> None:
    tl, ids = dl.bridge(model_of("sink")), some_ids(rows=1)
    grads: dict[str, Tensor] = {}

    def keep(grad: Tensor, hook: Any) -> None:
        grads[hook.name] = grad.clone()

    with tl.hooks(bwd_hooks=[("blocks.1.attn.hook_pattern", keep)]):
        tl(ids)[0, 4, 5].backward()
    _, cache = tl.run_with_cache(ids)
    pattern = cache["blocks.1.attn.hook_pattern"]
    step = 1e-2 * torch.randn(pattern.shape, generator=torch.Generator().manual_seed(0))

    def nudge(value: Tensor, hook: Any, by: float) -> Tensor:
        return value + by * step

    with torch.no_grad():
        ups, downs = (
            tl.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_pattern", partial(nudge, by=by))])[0, 4, 5]
            for by in (1.0, -1.0)
        )
    want = (grads["blocks.1.attn.hook_pattern"] * step).sum()
    torch.testing.assert_close((ups - downs) / 2, want, atol=1e-3, rtol=1e-2)  # a central difference


@torch.no_grad()
def test_text_means_what_the_tokenizer_says() -> None:
    tl = dl.bridge("toy")
    text = "sort 4 2 9 1 :"
    want = torch.tensor([tl.original_model.tokenizer(text)["input_ids"]])
    assert torch.equal(tl.to_tokens(text), want)
    assert torch.equal(tl(text), tl(want))
    assert tl.to_str_tokens(text)[0] == "<bos>"
    both = tl(["sort 4 2 9 1 :", "sort 4 2 :"])  # padded on the left, and masked
    torch.testing.assert_close(both[1, 2:], tl("sort 4 2 :")[0], atol=1e-4, rtol=1e-4)


def test_a_cache_is_an_activation_cache() -> None:
    tl = dl.bridge("toy")
    _, cache = tl.run_with_cache("sort 4 2 9 1 :")
    assert isinstance(cache, ActivationCache)
    assert cache["resid_post", 3].shape == (1, 7, 128)
