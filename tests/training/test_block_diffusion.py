"""Training in blocks: the original's losses, a float64 network with a mask written entry by entry, the sampler's network."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.two_copies import TwoCopyLogits, visible_in_copies
from dlm_lens.testing import tiny
from dlm_lens.training import Example, MaskedDiffusionLoss, Rows, masked_loss
from dlm_lens.training.objective import Noised
from tests.reference import forward64

GOLDEN = Path(__file__).parent.parent / "golden" / "a2d_qwen3_bd3lm"
LOSSES = json.loads((GOLDEN / "loss.json").read_text())["training_loss"]
BLOCK = 4


def block_model(**config: Any) -> Any:
    return tiny("a2d_qwen3", sampler="dllm_blocks", sampler_defaults={"block_length": BLOCK}, **config)


def loss_of(model: Any, objective: MaskedDiffusionLoss, rows: Rows, noised: Noised) -> float:
    arguments = objective.loss_arguments(rows, noised)
    count = float(arguments.pop("count"))
    with torch.no_grad():
        return float(masked_loss(model, **arguments)) / count


def visible_by_hand(blocks: list[int], documents: list[int]) -> Tensor:
    """Every entry of the mask from the words of the paper."""
    size = len(blocks)
    found = torch.zeros(2 * size, 2 * size, dtype=torch.bool)
    for query in range(2 * size):
        for key in range(2 * size):
            i, j = query % size, key % size
            if documents[i] != documents[j]:
                continue
            if query < size and key < size:
                found[query, key] = blocks[i] == blocks[j]
            elif query < size:
                found[query, key] = blocks[j] < blocks[i]
            elif key >= size:
                found[query, key] = blocks[j] <= blocks[i]
    return found


@pytest.mark.parametrize("case", LOSSES, ids=[f"{c['loss_weight_type']}-{c['loss_norm_type']}" for c in LOSSES])
def test_the_originals_losses(case: dict[str, Any]) -> None:
    model = dl.load(GOLDEN, mask_token_id=155, sampler="dllm_blocks")
    ids, labels = torch.tensor(case["input_ids"]), torch.tensor(case["labels"])
    prompts = (labels == -100).sum(-1)
    rows = Rows.of([Example(row, int(n)) for row, n in zip(ids, prompts, strict=True)], ids.shape[1], 0)
    weighting = {"scheduler": "inverse", "uniform": "uniform"}[case["loss_weight_type"]]
    objective = MaskedDiffusionLoss(
        weighting=weighting, normalisation=case["loss_norm_type"], block_length=case["block_size"], block_start="text"
    ).for_model(model, 2)
    rate = torch.tensor(case["t"], dtype=torch.float64)
    weight = 1 / rate if weighting == "inverse" else torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(objective.rate((rate - objective.floor) / (1 - objective.floor))[1], weight)
    noised = Noised(torch.tensor(case["noised_input_ids"]) == 155, rate, weight, rows.answer)
    # The original divides by t + 1e-6.
    assert loss_of(model, objective, rows, noised) == pytest.approx(case["loss"], rel=5e-6)
    other = replace(objective, block_length=3)
    assert abs(loss_of(model, other, rows, noised) - case["loss"]) > 0.01


def test_the_mask_of_the_original() -> None:
    golden = load_file(GOLDEN / "forward.safetensors")
    bias = golden["train_two_copies.attention_bias"].bool()[:, 0]
    blocks = torch.arange(11)[None] // 4
    assert visible_in_copies(blocks).equal(bias[:1])
    assert visible_in_copies(blocks)[0].equal(visible_by_hand(blocks[0].tolist(), [0] * 11))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("start", ["answer", "text"])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "batch"])
def test_loss_in_float64(start: Any, shift: bool, normalisation: Any) -> None:
    """Prompts of other lengths than whole blocks, padding on the right."""
    model = block_model(logit_shift=shift)
    generator = torch.Generator().manual_seed(0)
    sizes, prompts = [13, 9, 11], [3, 0, 6]
    examples = [
        Example(torch.randint(0, 60, (n,), generator=generator), p) for n, p in zip(sizes, prompts, strict=True)
    ]
    rows = Rows.of(examples, 13, 0)
    objective = MaskedDiffusionLoss(normalisation=normalisation, block_start=start).for_model(model, 3)
    assert (objective.block_length, objective.logit_shift) == (BLOCK, shift)
    rate = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    masked = (torch.rand(rows.tokens.shape, generator=generator) < 0.6) & rows.answer
    noised = Noised(masked, rate, 1 / rate, rows.answer)
    total, tokens, rowwise = 0.0, 0, 0.0
    for row, (size, prompt) in enumerate(zip(sizes, prompts, strict=True)):
        first = prompt if start == "answer" else 0
        blocks = [(i - first) // BLOCK for i in range(size)]
        clean = rows.tokens[row, :size]
        noisy = clean.masked_fill(masked[row, :size], model.config.mask_token_id)
        visible = visible_by_hand(blocks, [0] * size)[None, None]
        positions = torch.arange(size).repeat(2)[None]
        logits = forward64(model, torch.cat([noisy, clean])[None], visible=visible, positions=positions)["logits"][0]
        own = 0.0
        for i in range(size):
            if masked[row, i]:
                source = i
                if shift and i:
                    source = i - 1 if blocks[i] == blocks[i - 1] else size + i - 1
                own -= float(logits[source].log_softmax(-1)[clean[i]]) / float(rate[row])
        total, tokens, rowwise = total + own, tokens + size - prompt, rowwise + own / (size - prompt)
    wanted = {"token": total / tokens, "sequence": rowwise / 3, "batch": total / 3}[normalisation]
    assert loss_of(model, objective, rows, noised) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_training_and_sampling_have_the_same_network(shift: bool) -> None:
    """A noisy block given the clean text before it is what a step of the sampler sees."""
    model = block_model(logit_shift=shift)
    generator = torch.Generator().manual_seed(3)
    clean = torch.randint(0, 60, (2, 14), generator=generator)
    content = torch.ones(2, 14, dtype=torch.bool)
    content[1, :3] = False
    masked = torch.rand(2, 14, generator=generator) < 0.7
    masked[:, :6] = False
    noisy = clean.masked_fill(masked, model.config.mask_token_id)
    network = TwoCopyLogits(model, content, clean=clean, block_length=BLOCK, first=torch.tensor([6, 6]))
    with torch.no_grad():
        found = torch.full((2, 14, model.config.vocab_size), torch.nan)
        found[masked] = network.at(noisy, masked)
        for start in (6, 10):
            plan = StepPlan(0, 2, 0, (start, start + BLOCK), 1, start + BLOCK)
            canvas = torch.cat([clean[:, :start], noisy[:, start:]], 1)
            inside = masked & (torch.arange(14) >= start) & (torch.arange(14) < start + BLOCK)
            sampled = BlockLogits(model, content, block_length=BLOCK, prompt_length=6)
            logits = sampled.of_step(canvas, inside, plan, own_forward=False)
            torch.testing.assert_close(found[inside], logits, atol=2e-5, rtol=2e-5)
