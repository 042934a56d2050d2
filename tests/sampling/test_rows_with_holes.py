"""Masks inside prompts: a row is what it is alone, whatever masks and lengths the other rows have."""

from typing import Any

import pytest
import torch

from dlm_lens import denoise
from dlm_lens.testing import tiny

M = 63
EARLY = [2, 11, M, 23, 12, 44, 49, 28]
CASES: dict[str, tuple[str, dict[str, Any], list[list[int]], dict[str, Any]]] = {
    "a mask in another row's padding": ("llada2", {}, [EARLY, [41]], {"gen_length": 6}),
    "with editing": ("llada2", {"sampler": "llada2_editing"}, [EARLY, [41]], {"gen_length": 6}),
    "with deletions and insertions": (
        "llada2", {"expert_capacity": 4, "block_size": 4, "delete_token_id": 14, "split_token_id": 61},
        [EARLY, [41]], {"gen_length": 6},
    ),
    "masks of the prompt in the answer's block": (
        "stable_diffcoder", {}, [[62, 33, M, M, M, M], [27, 5, 47, 5, 20, 38, 50, 26, 3]],
        {"gen_length": 8, "block_length": 8, "threshold": 1.0},
    ),
    "the same in planned numbers": (
        "stable_diffcoder", {}, [[62, 33, M, M, M, M], [27, 5, 47, 5, 20, 38, 50, 26, 3]],
        {"gen_length": 8, "block_length": 8, "parallel": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_row_with_masks_in_its_prompt_is_what_it_is_alone(name: str) -> None:
    family, config, prompts, settings = CASES[name]
    model = tiny(family, **config)
    assert model.config.mask_token_id == M
    batch = denoise(model, prompts, **settings)
    for row, prompt in enumerate(prompts):
        alone = denoise(model, [prompt], **settings)
        padding = batch.prompt_length - len(prompt)
        found = batch.tokens[row, padding:]
        assert found[: alone.tokens.shape[1]].tolist() == alone.tokens[0].tolist()
        assert not bool((alone.tokens == M).any())
        counts = [count for count in batch.counts[:, row].tolist() if count]
        assert counts == [count for count in alone.counts[:, 0].tolist() if count]
    assert all(0 <= start < stop <= batch.tokens.shape[1] for start, stop in batch.spans)


def test_a_threshold_of_one_writes_one_token_a_step_in_a_block_with_masks_of_the_prompt() -> None:
    _, _, prompts, settings = CASES["masks of the prompt in the answer's block"]
    run = denoise(tiny("stable_diffcoder"), prompts[:1], **settings)
    assert run.counts[:, 0].tolist() == [1] * 12


def test_duo_psi_has_fractions_that_are_both_rounded_up() -> None:
    model = tiny("duo", sampler="duo_psi")
    for steps in range(1, 8):
        run = denoise(model, [[5, 6]], gen_length=4, steps=steps, high_frac=0.5, middle_frac=0.5)
        assert run.steps == steps + 1  # the last one removes the noise
        assert torch.equal(run.tokens[:, :2], torch.tensor([[5, 6]]))
