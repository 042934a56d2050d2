"""Training in blocks against the original, a float64 network with a mask by hand, and the sampler's network."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import BlockLayout
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import LogitsRequest
from dlm_lens.sampling.two_copies import TwoCopyLogits, visible_in_copies
from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    Example,
    MaskedDiffusionLoss,
    ModelSettings,
    NextToken,
    Rows,
    TrainingSettings,
    masked_loss,
    plan,
)
from dlm_lens.training.checkpoints import checkpoints
from dlm_lens.training.cost_estimate import _activations
from dlm_lens.training.head_loss import ELEMENTS
from dlm_lens.training.objective import Noised
from dlm_lens.training.swiglu import SwiGLU
from tests.reference import forward64
from tests.training.job import STEPS, job, losses

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
        weighting=weighting,
        normalisation=case["loss_norm_type"],
        block_length=case["block_size"],
        blocks_from_text=True,
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


def test_the_mask_of_packed_texts_is_that_of_sdar() -> None:
    """SDAR's order is [x_t 1, x_0 1, x_t 2, x_0 2], of texts of 7 and 5 tokens; ours x_t of both, then x_0."""
    golden = load_file(GOLDEN.parent / "sdar" / "forward.safetensors")
    bias, positions = (golden[f"train_packed.{name}"] for name in ("attention_bias", "position_ids"))
    within, documents = torch.cat([torch.arange(7), torch.arange(5)])[None], torch.tensor([[0] * 7 + [1] * 5])
    found = visible_in_copies(within // 4, documents=documents)[0]
    order = torch.cat([torch.arange(7), torch.arange(12, 19), torch.arange(7, 12), torch.arange(19, 24)])
    assert found[order][:, order].equal(bias.bool()[0, 0])
    assert within.repeat(1, 2)[:, order].equal(positions)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("from_text", [False, True])
@pytest.mark.parametrize("normalisation", ["token", "sequence", "batch"])
def test_loss_in_float64(from_text: bool, shift: bool, normalisation: Any) -> None:
    """Prompts of other lengths than whole blocks, padding on the right."""
    model = block_model(logit_shift=shift)
    generator = torch.Generator().manual_seed(0)
    sizes, prompts = [13, 9, 11], [3, 0, 6]
    examples = [
        Example(torch.randint(0, 60, (n,), generator=generator), p) for n, p in zip(sizes, prompts, strict=True)
    ]
    rows = Rows.of(examples, 13, 0)
    objective = MaskedDiffusionLoss(normalisation=normalisation, blocks_from_text=from_text).for_model(model, 3)
    assert (objective.block_length, objective.logit_shift) == (BLOCK, shift)
    rate = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    masked = (torch.rand(rows.tokens.shape, generator=generator) < 0.6) & rows.answer
    noised = Noised(masked, rate, 1 / rate, rows.answer)
    total, tokens, rowwise = 0.0, 0, 0.0
    for row, (size, prompt) in enumerate(zip(sizes, prompts, strict=True)):
        first = 0 if from_text else prompt
        blocks = [(i - first) // BLOCK for i in range(size)]
        clean = rows.tokens[row, :size]
        noisy = clean.masked_fill(masked[row, :size], model.config.mask_token_id)
        visible = visible_by_hand(blocks, [0] * size)[None, None]
        positions = torch.arange(size).repeat(2)[None]
        both = torch.cat([noisy, clean])[None]
        logits = forward64(model, both, visible=visible, positions=positions)["logits"][0]
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


NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "a2d-qwen3": ("a2d_qwen3", {"sampler": "dllm_blocks"}),
    "a2d-qwen3, shifted": ("a2d_qwen3", {"sampler": "dllm_blocks", "logit_shift": True}),
    "a2d-qwen2": ("a2d_qwen3", {"model_type": "a2d-qwen2", "sampler": "dllm_blocks"}),
    "a2d-llama": ("a2d_qwen3", {"model_type": "a2d-llama", "sampler": "dllm_blocks"}),
    "sdar": ("sdar", {}),
    "llada2": ("llada2", {}),
    "fast_dllm_v2": ("fast_dllm_v2", {}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_training_and_sampling_have_the_same_network(name: str) -> None:
    """A noisy block given the clean text before it is what a step of the sampler sees, in families with blocks."""
    family, config = NETWORKS[name]
    model = tiny(family, **config)
    objective = MaskedDiffusionLoss(block_length=BLOCK).for_model(model, 2)
    generator = torch.Generator().manual_seed(3)
    clean = torch.randint(0, 60, (2, 14), generator=generator)
    content = torch.ones(2, 14, dtype=torch.bool)
    content[1, :3] = False
    masked = torch.rand(2, 14, generator=generator) < 0.7
    masked[:, :6] = False
    assert objective.logit_shift is getattr(model.config, "logit_shift", False)
    noisy = clean.masked_fill(masked, model.config.mask_token_id)
    layout = BlockLayout(BLOCK, torch.tensor([0, 3] if objective.blocks_from_text else [6, 6]))
    network = TwoCopyLogits(model, content, clean=clean, layout=layout)
    with torch.no_grad():
        found = torch.full((2, 14, network.model.get_output_embeddings().weight.shape[0]), torch.nan)
        found[masked] = network.at(noisy, masked)
        # A row alone, block after block: the clean text before the block, then the noisy block.
        for row, padding in enumerate((0, 3)):
            first = int(layout.first[row]) - padding
            size = 14 - padding
            for start in range(first % BLOCK - BLOCK, size, BLOCK):
                inside = torch.zeros(1, size, dtype=torch.bool)
                inside[0, max(start, 0) : start + BLOCK] = True
                inside &= masked[row, padding:]
                if not inside.any():
                    continue
                stop = min(start + BLOCK, size)
                canvas = torch.cat([clean[row, padding:][: max(start, 0)], noisy[row, padding:][max(start, 0) :]])
                alone = BlockLayout(BLOCK, torch.tensor([first]))
                sampled = BlockLogits(model, inside.new_ones(1, size), layout=alone)
                plan = StepPlan(0, 2, 0, (max(start, 0), stop), 1, stop)
                logits = sampled.of_step(canvas[None], plan, LogitsRequest(inside))
                wanted = found[row, padding:][inside[0]]
                torch.testing.assert_close(wanted, logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("from_text", [False, True])
def test_packed_texts_are_what_each_is_alone(from_text: bool) -> None:
    """Isolated documents: SDAR's layout [x_t 1, x_0 1, x_t 2, x_0 2] in another order."""
    model, generator = block_model(), torch.Generator().manual_seed(5)
    sizes = [7, 5]
    texts = [torch.randint(0, 60, (n,), generator=generator) for n in sizes]
    together = Example(torch.cat(texts), documents=torch.tensor([0] * 7 + [1] * 5))
    masked = torch.rand(1, 12, generator=generator) < 0.5
    objective = MaskedDiffusionLoss(normalisation="batch", blocks_from_text=from_text).for_model(model, 1)
    one = torch.ones(1, dtype=torch.float64)

    def value(example: Example, masks: Tensor) -> float:
        rows = Rows.of([example], len(example.tokens), 0)
        return loss_of(model, objective, rows, Noised(masks, one, one, rows.answer))

    alone = value(Example(texts[0]), masked[:, :7]) + value(Example(texts[1]), masked[:, 7:])
    assert value(together, masked) == pytest.approx(alone, rel=1e-5)
    assert value(Example(together.tokens), masked) != pytest.approx(alone, rel=1e-3)


def test_blocks_are_counted_from_each_answer_and_each_document() -> None:
    examples = [
        Example(torch.arange(9), prompt_length=3),
        Example(torch.arange(7), documents=torch.tensor([0, 0, 0, 0, 0, 4, 4])),
    ]
    rows = Rows.of(examples, 9, 0)
    assert rows.blocks(4, True)[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    # The answer of the first row's only document begins at 3, the last two positions of the second row are padding.
    assert rows.blocks(4, False)[0].tolist() == [-1, -1, -1, 0, 0, 0, 0, 1, 1]
    assert rows.blocks(4, False)[1, :7].tolist() == [0, 0, 0, 0, 1, 0, 0]


def test_a_model_is_trained_as_its_sampler_decodes() -> None:
    loss = MaskedDiffusionLoss()
    assert loss.for_model(tiny("a2d_qwen3"), 8).block_length == 0
    assert loss.for_model(tiny("a2d_qwen3", sampler="dllm_blocks"), 8).block_length == 32
    own = loss.for_model(block_model(), 8)
    assert (own.block_length, own.blocks_from_text) == (BLOCK, False)
    assert replace(loss, block_length=6).for_model(block_model(), 8).block_length == 6
    assert replace(loss, block_length=0).for_model(block_model(), 8).block_length == 0
    with pytest.raises(ValueError, match=r"block_length is 4, and the model has learned sink tokens"):
        replace(loss, block_length=4).for_model(tiny("sink_qwen", num_sinks=1), 8)
    with pytest.raises(ValueError, match=r"block_length is -1; it must be 0 \(no blocks\) or positive"):
        MaskedDiffusionLoss(block_length=-1)


def test_a_probe_of_whole_canvases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="probe_steps is 2: the probe shows whole canvases"):
        job(tmp_path, blocks=1, probe_steps=2)


def test_the_first_loss_of_a_run_is_the_objective(tmp_path: Path) -> None:
    """Recomputed from the untrained model's own logits, row by row."""
    trainer = job(tmp_path, micro_batch_size=8, steps=1, blocks=1)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    ids, clean, width = batch["input_ids"], batch["clean_ids"], batch["input_ids"].shape[1]
    total = 0.0
    for o, t, w in zip(batch["outputs"].tolist(), batch["targets"], batch["weights"], strict=True):
        row, i = divmod(o, 2 * width)
        visible = visible_by_hand(batch["blocks"][row].tolist(), [0] * width)
        if "content" in batch:
            visible &= batch["content"][row].repeat(2)
        logits = forward64(
            tiny("a2d_qwen3"), torch.cat([ids[row], clean[row]])[None], visible=visible[None, None],
            positions=torch.arange(width).repeat(2)[None],
        )["logits"]  # fmt: skip
        total -= float(w) * float(logits[0, i].log_softmax(-1)[t])
    assert losses(trainer)[0] == pytest.approx(total / float(batch["count"]), rel=2e-5)


@pytest.mark.long
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", save_steps=3, blocks=1, precision="bf16")
    whole.train()
    job(tmp_path / "broken", save_steps=3, blocks=1, precision="bf16").train()
    for path in checkpoints(tmp_path / "broken")[1:]:
        (path / "run.json").unlink()
    second = job(tmp_path / "broken", save_steps=3, blocks=1, precision="bf16")
    second.train(resume_from_checkpoint=True)
    assert losses(second) == losses(whole)
    one, other = (
        load_file(tmp_path / name / f"checkpoint-{STEPS}" / "model.safetensors") for name in ("whole", "broken")
    )
    assert all(one[name].equal(other[name]) for name in one)
    again = dl.load(tmp_path / "whole" / f"checkpoint-{STEPS}")
    assert again.config.sampler == "dllm_blocks"
    assert dl.denoise(again, [[1, 2, 3]], gen_length=8).settings["block_length"] == BLOCK


def test_a_plan_counts_both_copies(tmp_path: Path) -> None:
    block_model().save_pretrained(tmp_path)
    settings = TrainingSettings(
        model=ModelSettings(start=str(tmp_path)),
        data=DataSettings(length=64),
        batch_size=8,
        micro_batch_size=4,
        steps=2,
    )
    blocks, plain = plan(settings), plan(replace(settings, objective=MaskedDiffusionLoss(block_length=0)))
    config = block_model().config
    layers = sum(p.numel() for p in block_model().model.layers.parameters() if p.ndim > 1)
    head = 6 * 0.5 * config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    for found, copies in ((plain, 1), (blocks, 2)):
        attention = 12 * copies * 64 * width * config.num_hidden_layers
        assert found.flops / found.tokens == pytest.approx(copies * (6 * layers + attention) + head)
    assert plan(replace(settings, objective=NextToken())).flops > plain.flops  # the head on every position


def test_planned_activations_of_both_copies(tmp_path: Path) -> None:
    model = block_model(num_hidden_layers=6, hidden_size=64, intermediate_size=128)
    model.save_pretrained(tmp_path)
    settings = TrainingSettings(
        model=ModelSettings(start=str(tmp_path)), data=DataSettings(length=32), precision="fp32", batch_size=4,
        micro_batch_size=4, steps=1,
    )  # fmt: skip
    rows = Rows.of([Example(torch.arange(32) % 60) for _ in range(4)], 32, 0)
    arguments = MaskedDiffusionLoss().for_model(model, 4).prepare(rows, range(4), 0)
    arguments.pop("count")
    sizes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: list[Tensor] = []  # so that no storage is used twice

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        held.append(value)
        return value

    with SwiGLU(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        masked_loss(model, **arguments)
    expected = _activations(model.config, settings) - 8 * ELEMENTS["cuda"]
    assert 0.7 < sum(sizes.values()) / expected < 1.4
