import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM

from dlm_lens.adapters import load
from dlm_lens.attention import HOOK_POINTS, add_hook_points, attach_hooks, hooked_attention, received_by_class
from dlm_lens.attention.functions import HOOKED
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling import denoise
from dlm_lens.testing import tiny
from tests.reference import forward64

# float32 against float64 through two layers; logits are of order 10. A wrong head mapping costs over 0.1.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}

FAMILIES = [("llada", None), ("sink_qwen", None), ("causal", "llama"), ("causal", "qwen2")]


def canvas(padded: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    if not padded:
        return ids, None
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids, mask


def watch(model: torch.nn.Module) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        for name in HOOK_POINTS:
            point = getattr(block.self_attn, f"hook_{name}")
            point.register_forward_hook(lambda _m, _a, out, key=f"{name}{layer}": seen.__setitem__(key, out))
    return seen


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "hooked", "eager"])
@pytest.mark.parametrize(("family", "model_type"), FAMILIES)
@torch.no_grad()
def test_logits_equal_float64(family: str, model_type: str | None, implementation: str, padded: bool) -> None:
    model = tiny(family, model_type=model_type)
    model.set_attn_implementation(implementation)
    ids, mask = canvas(padded)
    expected = forward64(model, ids, mask, causal=family == "causal")["logits"]
    got = model(input_ids=ids, attention_mask=mask).logits.double()
    content = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(got[content], expected[content], **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "model_type"), FAMILIES)
@torch.no_grad()
def test_every_hook_point_equals_float64(family: str, model_type: str | None, padded: bool) -> None:
    model = tiny(family, model_type=model_type)
    ids, mask = canvas(padded)
    expected = forward64(model, ids, mask, causal=family == "causal")
    seen = watch(model)
    model(input_ids=ids, attention_mask=mask)
    assert set(seen) == {f"{name}{layer}" for name in HOOK_POINTS for layer in range(2)}
    content = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    for key, value in seen.items():
        want, got = expected[key], value.double()
        if key.startswith(("scores", "pattern")):
            want, got = want.transpose(1, 2), got.transpose(1, 2)
        torch.testing.assert_close(got[content], want[content], **CLOSE, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", HOOK_POINTS)
@pytest.mark.parametrize("family", ["llada", "causal"])
@torch.no_grad()
def test_an_edit_at_a_hook_point_equals_the_same_edit_in_float64(family: str, name: str) -> None:
    model = tiny(family)
    ids, _ = canvas(padded=False)

    def edit(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., 1, :] *= 0.5
        value[..., 2] = value[..., 2] * 0.7
        return value

    plain = forward64(model, ids, causal=family == "causal")["logits"]
    expected = forward64(model, ids, causal=family == "causal", edits={(1, name): edit})["logits"]
    point = getattr(model.model.layers[1].self_attn, f"hook_{name}")
    point.register_forward_hook(lambda _m, _a, out: edit(out))
    torch.testing.assert_close(model(input_ids=ids).logits.double(), expected, **CLOSE)
    assert (expected - plain).abs().max() > 1e-3  # the edit matters


@torch.no_grad()
def test_scores_of_hidden_keys_are_the_minimum_and_get_no_attention() -> None:
    model = tiny("llada")
    ids, mask = canvas(padded=True)
    seen = watch(model)
    model(input_ids=ids, attention_mask=mask)
    assert (seen["scores0"][0, :, :, :4] == torch.finfo(torch.float32).min).all()
    assert (seen["pattern0"][0, :, :, :4] == 0).all()
    torch.testing.assert_close(seen["pattern0"].sum(-1), torch.ones(2, 4, 11))


@torch.no_grad()
def test_a_four_dimensional_mask_works_and_a_query_without_keys_gets_nothing() -> None:
    model = tiny("llada")
    ids, _ = canvas(padded=False)
    visible = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    visible[:, :, range(11), range(11)] = True
    visible[1, :, 3] = False
    sdpa = model(input_ids=ids, attention_mask=visible).logits
    seen = watch(model)
    hooked = model(input_ids=ids, attention_mask=visible).logits
    torch.testing.assert_close(sdpa, hooked, **CLOSE)
    assert (seen["z0"][1, 3] == 0).all()
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=additive).logits, hooked, **CLOSE)


@torch.no_grad()
def test_patterns_are_computed_only_while_somebody_listens() -> None:
    model = tiny("llada")
    ids, _ = canvas(padded=False)
    assert len(model(input_ids=ids, output_attentions=True).attentions) == 0
    handle = model.model.layers[0].self_attn.hook_pattern.register_forward_hook(lambda *_: None)
    attentions = model(input_ids=ids, output_attentions=True).attentions
    assert len(attentions) == 1
    torch.testing.assert_close(attentions[0].sum(-1), torch.ones(2, 4, 11))
    handle.remove()
    assert len(model(input_ids=ids, output_attentions=True).attentions) == 0


def test_gradients_flow_through_both_functions_alike() -> None:
    model = tiny("sink_qwen")
    ids, mask = canvas(padded=True)
    gradients = []
    for implementation in ("sdpa", "hooked"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=ids, attention_mask=mask).logits.square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_foreign_mask_is_refused_with_the_remedy() -> None:
    attention = tiny("llada").model.layers[0].self_attn
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(ValueError, match=r"a dict; reading .*attn_implementation='sdpa'"):
        hooked_attention(attention, q, q, q, {})
    with pytest.raises(ValueError, match=r"a \(1, 7\) tensor"):
        hooked_attention(attention, q, q, q, torch.ones(1, 7))


@torch.no_grad()
def test_a_copy_has_its_own_hook_points() -> None:
    model = tiny("llada")
    twin = copy.deepcopy(model)
    seen = watch(twin)
    ids, _ = canvas(padded=False)
    model(input_ids=ids)
    assert not seen
    twin(input_ids=ids)
    assert len(seen) == 16


def test_hook_points_are_added_once_and_only_where_they_fit() -> None:
    model = tiny("llada")
    before = dict(model.named_modules())
    assert dict(add_hook_points(model).named_modules()) == before
    with pytest.raises(ValueError, match="Linear has no attention module that calls"):
        add_hook_points(torch.nn.Linear(2, 2))  # type: ignore[type-var]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("family", ["llada", "sink_qwen"])
@torch.no_grad()
def test_a_mask_of_whole_numbers_says_who_sees_whom(family: str, watched: bool, dtype: torch.dtype) -> None:
    """[batch, 1, query, key] of 0 and 1, as the goldens store it; an additive mask of these would hide nothing."""
    model = tiny(family)
    ids, mask = canvas(True)
    assert mask is not None
    expected = forward64(model, ids, mask)["logits"]
    if watched:
        model.model.layers[0].self_attn.hook_pattern.register_forward_hook(lambda *_: None)
    square = (mask[:, :, None] & mask[:, None, :])[:, None].to(dtype)
    got = model(input_ids=ids, attention_mask=square).logits.double()
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], **CLOSE)


def test_padded_rows_of_a_float64_model_have_numbers() -> None:
    """What the float64 minimum hides from every query is minus infinity in the float32 of the softmax."""
    prompts = [[5, 9], [3, 8, 1, 4]]
    model = tiny("causal").double()
    fused = denoise(model, prompts, gen_length=3)
    model.config._attn_implementation = HOOKED
    assert denoise(model, prompts, gen_length=3).tokens.equal(fused.tokens)


def stepwise(model: torch.nn.Module, ids: Tensor, mask: Tensor | None, hook: Any = None) -> list[Tensor]:
    """The column sums that readers see, layer by layer, and the logits; no hook needs a pattern."""
    found: list[Tensor] = []
    points = [block.self_attn.hook_z for block in model.model.layers]
    for point in points:
        point.readers = (lambda inputs: found.append(received_by_class(inputs, torch.ones(len(ids), 1, 11))[:, 0]),)
    with attach_hooks(model, *(() if hook is None else (hook,))):
        logits = model(input_ids=ids, attention_mask=mask).logits
    for point in points:
        point.readers = ()
    return [*found, logits]


@pytest.mark.parametrize("hook", [None, mask_positions(3), mask_positions(3, stage="after")], ids=repr)
@torch.no_grad()
def test_a_mask_that_adds_to_visible_scores_is_in_the_statistics_and_beside_hidden_columns(hook: Any) -> None:
    model = tiny("llada")
    ids, _ = canvas(padded=False)
    bias = -0.5 * (torch.arange(11)[:, None] - torch.arange(11)).abs().float()
    bias = bias.masked_fill(torch.arange(11) == 5, torch.finfo(torch.float32).min).expand(2, 1, 11, 11)
    got = stepwise(model, ids, bias, hook)
    seen = watch(model)
    logits = stepwise(model, ids, bias, hook)[-1]
    for layer in range(2):
        sums = seen[f"pattern{layer}"].sum(-2)
        if getattr(hook, "stage", None) == "after":  # the hook came after the one that looks
            sums[..., 3] = 0
        torch.testing.assert_close(got[layer], sums, **CLOSE)
    torch.testing.assert_close(got[-1], logits, **CLOSE)
    first = seen["scores0"][:, :, :, 0] - seen["scores0"][:, :, :, 1]  # hidden columns are others
    q, k = seen["rot_q0"].double(), seen["rot_k0"].double().repeat_interleave(2, 2)
    for row, head, i in ((0, 0, 0), (1, 2, 7)):
        plain = [float(q[row, i, head] @ k[row, j, head]) / 8**0.5 + float(bias[row, 0, i, j]) for j in (0, 1)]
        assert float(first[row, head, i]) == pytest.approx(plain[0] - plain[1], abs=1e-4)


@torch.no_grad()
def test_statistics_of_a_family_whose_masks_hold_a_bias(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DogeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    torch.manual_seed(0)
    built = DogeForCausalLM(config)
    for block in built.model.layers:
        block.self_attn.A.copy_(torch.tensor([1.5, -0.7]))
    built.save_pretrained(tmp_path)
    model = load(tmp_path)
    ids, _ = canvas(padded=False)
    got = stepwise(model, ids, None)
    seen = watch(model)
    model(input_ids=ids)
    for layer in range(2):
        torch.testing.assert_close(got[layer], seen[f"pattern{layer}"].sum(-2), **CLOSE)


@pytest.mark.parametrize("watched", [False, True])
@torch.no_grad()
def test_hidden_columns_leave_the_dropout_of_training(watched: bool) -> None:
    model = tiny("llada", attention_dropout=0.5).train()
    ids, _ = canvas(padded=False)
    if watched:
        watch(model)
    logits = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        logits.append(stepwise(model, ids, None, mask_positions(3))[-1])
    assert float((logits[0] - logits[1]).abs().max()) > 0.1


@torch.no_grad()
def test_a_mask_is_looked_at_again_once_it_was_edited_in_place() -> None:
    model = tiny("llada")
    ids, _ = canvas(padded=False)
    mask = torch.zeros(2, 1, 11, 11)
    plain = stepwise(model, ids, mask)
    mask[..., 4] = 3.0
    edited = stepwise(model, ids, mask)
    assert float((edited[0] - plain[0]).abs().max()) > 0.1
    torch.testing.assert_close(edited, stepwise(model, ids, mask.clone()))
    with torch.inference_mode():
        inferred = torch.zeros(2, 1, 11, 11)
        torch.testing.assert_close(stepwise(model, ids, inferred), plain)
        inferred[..., 4] = 3.0
        torch.testing.assert_close(stepwise(model, ids, inferred), edited)
