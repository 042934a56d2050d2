"""Hiding the whole prompt makes the masked positions alike: what is written first is a tie, on every device."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_tokens
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 12, 7, 3], [8, 4, 2, 30, 11]]


@pytest.mark.parametrize("family", ["llada", "mmada", "sink_qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_the_prompt_the_masks_of_the_first_step_are_tied(family: str, dtype: torch.dtype) -> None:
    """A [MASK] that sees [MASK]s alone averages equal values, wherever it stands: rotation turns q and k, not v.

    So all positions propose the same token with the same probability, up to the rounding of the matrix products,
    which is another one on every device: a GPU that rounds differently writes another position first.
    """
    run = dl.denoise(
        tiny(family).to(dtype), PROMPTS, gen_length=8, steps=8, hooks=[mask_tokens("prompt")], logits="all"
    )
    confidence, proposals = run.confidence[0, :, 5:], run.proposals[0, :, 5:]
    assert (proposals == proposals[:, :1]).all()
    spread = float((confidence.amax(-1) / confidence.amin(-1) - 1).max())
    if dtype == torch.float64:
        # Stored as float32: rounding of float64 is below it, and of equals the earlier position is written.
        assert spread == 0
        assert run.unmasked[0].nonzero().tolist() == [[0, 5], [1, 5]]
    else:
        assert spread < 8 * torch.finfo(torch.float32).eps
    seen = dl.denoise(tiny(family).to(dtype), PROMPTS, gen_length=8, steps=8).confidence[0, :, 5:]
    assert float((seen.amax(-1) / seen.amin(-1) - 1).min()) > 1e-3


@pytest.mark.parametrize("family", ["llada", "mmada", "sink_qwen"])
def test_where_something_else_is_seen_nothing_is_tied(family: str) -> None:
    hidden = dl.denoise(tiny(family), PROMPTS, gen_length=8, steps=8, hooks=[mask_tokens(5, 9, 12, 8, 4, 2)])
    confidence = hidden.confidence[0, :, 5:]
    assert float((confidence.amax(-1) / confidence.amin(-1) - 1).min()) > 1e-4


def equal_logits(_step: int, _canvas: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Token 3 has the same probability at every position."""
    return torch.zeros_like(logits).index_fill(-1, torch.tensor([3]), 2.0)


BLOCKS = {"gen_length": 12, "block_length": 6, "steps": 4}
CASES = {
    "llada": ("llada", {}, BLOCKS, "canvas"),
    "llada, dual": ("llada", {}, {**BLOCKS, "steps": 6, "cache": "dual"}, "computed"),
    "llada, prefix": ("llada", {}, {**BLOCKS, "steps": 6, "cache": "prefix"}, "computed"),
    "mmada": ("mmada", {}, BLOCKS, "canvas"),
    "dream": ("dream", {}, {"gen_length": 12, "steps": 4, "remasking": "maskgit_plus"}, "canvas"),
    "dream, dual": ("dream", {}, {**BLOCKS, "steps": 8, "remasking": "entropy", "cache": "dual"}, "computed"),
    "dllm": ("a2d_qwen3", {}, BLOCKS, "canvas"),
    "dllm_blocks": ("a2d_qwen3", {"sampler": "dllm_blocks"}, BLOCKS, "block"),
    "sdar": ("sdar", {"block_size": 6}, {"gen_length": 12, "steps_per_block": 6, "temperature": 0.0}, "block"),
    "llada2": ("llada2", {}, {"gen_length": 12, "block_length": 6, "steps_per_block": 3}, "block"),
    "llada2_editing": ("llada2", {"sampler": "llada2_editing"},
                       {"gen_length": 12, "block_length": 6, "num_to_transfer": 2}, "block"),
    "smdm": ("smdm", {}, {"gen_length": 12, "steps": 4, "remasking": "greedy", "temperature": 0.0}, "masks"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_reference_quirks_choose_among_equals_as_torch_topk(case: str) -> None:
    """The authors' code gives `torch.topk` the canvas, the computed span, the block, or the masks alone."""
    family, config, given, ranked = CASES[case]
    model = tiny(family, **config)
    options: dict[str, Any] = {"cfg_scale": 0.0} if family == "smdm" else {}
    theirs = dl.denoise(
        model, [PROMPTS[0] + [6]], reference_quirks=True, on_logits=equal_logits, **given, **options
    )
    ours = dl.denoise(model, [PROMPTS[0] + [6]], on_logits=equal_logits, **given, **options)
    tied, other = 0, 0
    for step in range(theirs.steps):
        confidence, chosen = theirs.confidence[step, 0], theirs.unmasked[step, 0]
        number, where = int(chosen.sum()), torch.arange(len(confidence))
        confidence = confidence.masked_fill(~theirs.masked[step, 0], -torch.inf)
        spans = {"block": theirs.spans, "computed": theirs.computed}.get(ranked)
        span = None if spans is None else spans[step]
        where = where[slice(*span)] if span else where
        where = where[confidence > -torch.inf] if ranked == "masks" else where
        best = where[confidence[where].topk(number).indices]
        assert chosen.nonzero().flatten().tolist() == sorted(best.tolist()), step
        eligible = (confidence > -torch.inf).nonzero().flatten()
        assert confidence[eligible].unique().numel() <= 1
        tied += 0 < number < len(eligible)
        other += number > 0 and chosen.nonzero().flatten().tolist() != eligible[:number].tolist()
    assert tied >= 2
    if other:  # which of equals torch.topk chooses belongs to a build of torch
        assert not theirs.canvases.equal(ours.canvases)
    for step in range(ours.steps):
        chosen, eligible = ours.unmasked[step, 0], ours.confidence[step, 0] > -torch.inf
        open_ = (eligible & ours.masked[step, 0]).nonzero().flatten()
        assert chosen.nonzero().flatten().tolist() == open_[: int(chosen.sum())].tolist(), step


def test_reference_quirks_rank_rows_as_code_that_pads_on_the_right() -> None:
    """dllm's rows begin at the first position, so that a short row's equals are at other indices than ours."""
    prompts, given = [[5, 9, 12, 7, 3, 8, 2, 4], [6, 3]], {"gen_length": 12, "steps": 5, "on_logits": equal_logits}
    both = dl.denoise(tiny("a2d_qwen3"), prompts, reference_quirks=True, **given)
    for step in range(both.steps):
        chosen = both.unmasked[step, 1]
        confidence = torch.cat([both.confidence[step, 1, 6:], torch.full((6,), -torch.inf)])
        best = confidence.topk(int(chosen.sum())).indices + 6
        assert chosen.nonzero().flatten().tolist() == sorted(best.tolist()), step
        assert 2 <= len(best) == int(both.unmasked[step, 0].sum())


PARALLEL = {"gen_length": 12, "block_length": 6, "threshold": 0.9}
THRESHOLDS = {
    "nemotron_labs_diffusion": ("nemotron_labs_diffusion", PARALLEL | {"stop_tokens": ()}, "block"),
    "efficient_dlm": ("efficient_dlm", PARALLEL | {"stop_tokens": (), "temperature": 0.0}, "block"),
    "stable_diffcoder": ("stable_diffcoder", PARALLEL | {"block_length": 4, "stop_tokens": ()}, "block"),
    "llada": ("llada", PARALLEL, "canvas"),
    "llada, dual": ("llada", PARALLEL | {"cache": "dual"}, "computed"),
    "llada, prefix": ("llada", PARALLEL | {"cache": "prefix"}, "computed"),
    "dream, dual": ("dream", PARALLEL | {"cache": "dual", "steps": 12}, "computed"),
    "dream, prefix": ("dream", PARALLEL | {"cache": "prefix", "steps": 12}, "computed"),
}


@pytest.mark.parametrize("case", THRESHOLDS)
def test_reference_quirks_write_what_torch_topk_ranks_first_under_a_threshold(case: str) -> None:
    """With a threshold the authors' code lets `torch.topk` rank every mask, and always writes the first."""
    family, given, ranked = THRESHOLDS[case]
    model, prompt = tiny(family), [PROMPTS[0] + [6, 2, 9]]
    theirs = dl.denoise(model, prompt, reference_quirks=True, on_logits=equal_logits, **given)
    tied, other = 0, 0
    for step in range(theirs.steps):
        confidence, chosen = theirs.confidence[step, 0], theirs.unmasked[step, 0]
        left = confidence.isfinite() & theirs.masked[step, 0]
        confidence = confidence.masked_fill(~left, -torch.inf)
        span = {"block": theirs.spans, "computed": theirs.computed or [None] * theirs.steps}.get(ranked)
        start, stop = (span[step] if span else None) or (0, len(confidence))
        best = confidence[start:stop].topk(int(left.sum())).indices[:1] + start
        assert chosen.nonzero().flatten().tolist() == best.tolist(), step
        tied += int(left.sum()) > 1
        other += best.tolist() != left.nonzero().flatten()[:1].tolist()
    assert tied >= 8
    ours = dl.denoise(model, prompt, on_logits=equal_logits, **given)
    if other:  # which of equals torch.topk ranks first belongs to a build of torch
        assert not theirs.canvases.equal(ours.canvases)


def test_reference_quirks_write_the_positions_of_a_factor_as_torch_topk() -> None:
    """With a factor it returns as many positions as are written, here two of equal confidence."""
    model, given = tiny("llada"), {"gen_length": 12, "block_length": 12, "factor": 2.8}
    run = dl.denoise(model, [PROMPTS[0]], reference_quirks=True, on_logits=equal_logits, **given)
    for step in range(run.steps):
        chosen = run.unmasked[step, 0]
        confidence = run.confidence[step, 0].masked_fill(~run.masked[step, 0], -torch.inf)
        best = confidence.topk(int(chosen.sum())).indices
        assert chosen.nonzero().flatten().tolist() == sorted(best.tolist()), step
    assert run.counts[:, 0].tolist() == [2] * 6
