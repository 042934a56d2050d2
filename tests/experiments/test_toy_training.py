"""Corpus, objectives and training loop of the embedded checkpoints."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.toy.checkpoint import export
from experiments.toy.corpus import Batch, Corpus, build_corpus, held_out
from experiments.toy.language import extract_answer
from experiments.toy.model import build_model
from experiments.toy.objective import diffusion_loss, next_token_loss, noise
from experiments.toy.optimization import PEAK_RATE, learning_rate
from experiments.toy.tokenizer import SEQUENCE_LENGTH, build_tokenizer
from experiments.toy.train import Run, Settings

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2}
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def corpus_and_prompts() -> tuple[Corpus, frozenset[str]]:
    return build_corpus(400)


@pytest.fixture(scope="module")
def corpus(corpus_and_prompts: tuple[Corpus, frozenset[str]]) -> Corpus:
    return corpus_and_prompts[0]


def new_run(corpus: Corpus, model: str = "toy", optimizer: str = "muon", **settings: int) -> Run:
    values = {"seed": 0, "steps": 40, "batch_size": 16, "corpus_size": len(corpus), "compiled": False}
    values |= settings
    return Run(Settings(model, optimizer, **values), corpus, build_model(model, values["seed"], **SMALL))


def test_corpus_rows_are_prompt_answer_and_end(corpus_and_prompts: tuple[Corpus, frozenset[str]]) -> None:
    corpus, prompts = corpus_and_prompts
    for row in range(0, 400, 20):
        start, stop = int(corpus.prompt_length[row]), int(corpus.text_length[row])
        ids = corpus.tokens[row].tolist()
        assert TOKENIZER.decode(ids[1:start]) in prompts
        assert extract_answer(TOKENIZER.decode(ids[start:stop])) is not None
        assert set(ids[stop:]) == {TOKENIZER.eos_token_id}


def test_held_out_prompts_are_new_and_distinct() -> None:
    unfiltered = held_out("L", 200, seen=frozenset())
    forbidden = {example.prompt for example in unfiltered.examples[::2]}
    filtered = held_out("L", 200, seen=forbidden)
    prompts = {example.prompt for example in filtered.examples}
    assert len(prompts) == 200
    assert not prompts & forbidden
    assert filtered.seen_in_training >= 100
    assert {example.prompt for example in unfiltered.examples[1::2]} <= prompts
    assert unfiltered.seen_in_training == 0


def test_list_prompts_really_collide_with_a_large_corpus() -> None:
    _, prompts = build_corpus(20_000)
    assert held_out("L", 200, prompts).seen_in_training > 0


def test_batches_depend_on_step_and_seed_only_and_cover_an_epoch(corpus: Corpus) -> None:
    here, again = corpus.batch(5, 16, seed=1), corpus.batch(5, 16, seed=1)
    assert torch.equal(here.tokens, again.tokens)
    assert torch.equal(here.length, again.length)
    assert not torch.equal(here.tokens, corpus.batch(5, 16, seed=2).tokens)
    rows = torch.cat([corpus.batch(step, 16, seed=1).tokens for step in range(25)])
    assert torch.equal(rows.unique(dim=0, return_counts=True)[0], corpus.tokens.long().unique(dim=0))


def test_canvases_end_after_the_text_and_half_are_full(corpus: Corpus) -> None:
    batch = corpus.batch(0, 400, seed=0)
    ends = (batch.tokens == TOKENIZER.eos_token_id).int().argmax(dim=1)
    assert bool((batch.length > ends).all())
    assert 0.4 < (batch.length == SEQUENCE_LENGTH).double().mean() < 0.7


def test_noise_masks_an_exact_number_in_its_region(corpus: Corpus) -> None:
    batch = corpus.batch(0, 64, seed=0)
    noised = noise(batch, TOKENIZER.mask_token_id, torch.Generator().manual_seed(0))
    positions = torch.arange(SEQUENCE_LENGTH)
    assert not (noised.masked & (positions >= batch.length[:, None])).any()
    in_prompt = (noised.masked & (positions < batch.prompt_length[:, None])).any(dim=1)
    assert 0.1 < in_prompt.double().mean() < 0.5  # 30% of the rows mask the whole sequence
    assert bool((noised.masked.sum(1) >= 1).all())
    assert torch.equal(noised.tokens[~noised.masked], batch.tokens[~noised.masked])
    assert bool((noised.tokens[noised.masked] == TOKENIZER.mask_token_id).all())
    # 1 / (t R) per masked position: a row's weights sum to its share of the batch.
    torch.testing.assert_close(noised.weight.sum(1), torch.full((64,), 1 / 64))
    assert bool((noised.weight[~noised.masked] == 0).all())


def test_masking_ratios_are_stratified() -> None:
    tokens = torch.zeros(50, SEQUENCE_LENGTH, dtype=torch.long)
    batch = Batch(tokens, torch.zeros(50, dtype=torch.long), torch.full((50,), SEQUENCE_LENGTH))
    counts = noise(batch, 3, torch.Generator().manual_seed(0)).masked.sum(1).sort().values
    expected = (torch.arange(50) + 0.5) / 50 * SEQUENCE_LENGTH
    assert (counts - expected).abs().max() <= 1 + SEQUENCE_LENGTH / 100


def test_losses_of_known_logits() -> None:
    """With p(right) = 1/2 everywhere both are log 2, whatever the length of canvases and number of masks."""
    batch = Batch(torch.full((6, 10), 2), torch.full((6,), 4), torch.tensor([10, 9, 8, 7, 6, 5]))

    def forward(tokens: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*tokens.shape, 5), -torch.inf)
        logits[..., 1:3] = 0.0
        return logits

    generator = torch.Generator().manual_seed(0)
    expected = torch.tensor(2.0).log()
    torch.testing.assert_close(diffusion_loss(forward, batch, 3, generator), expected)
    torch.testing.assert_close(next_token_loss(forward, batch), expected)


@pytest.mark.parametrize("model", ["toy", "toy-ar"])
def test_training_forward_sees_what_it_should(model: str, corpus: Corpus) -> None:
    run = new_run(corpus, model)
    tokens = corpus.tokens[:1].long()
    visible = torch.arange(SEQUENCE_LENGTH)[None] < 50
    with torch.no_grad():
        before = run._forward(tokens, visible)
        later = run._forward(tokens.index_fill(1, torch.tensor([40]), 7), visible)
        padding = run._forward(tokens.index_fill(1, torch.tensor([55]), 7), visible)
    changed = (before - later).abs().amax(-1)[0] > 0
    assert bool(changed[:40].any()) is (model == "toy")  # only the diffusion model looks ahead
    assert bool(changed[41:50].any())
    assert torch.equal(before[:, :50], padding[:, :50])


@pytest.mark.parametrize(("model", "optimizer"), [("toy", "muon"), ("toy-ar", "muon"), ("toy", "adamw")])
def test_a_few_steps_reduce_the_loss(model: str, optimizer: str, corpus: Corpus) -> None:
    run = new_run(corpus, model, optimizer)
    losses = [run.advance() for _ in range(40)]
    assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:3]) / 3
    assert all(torch.isfinite(p).all() for p in run.network.parameters())


@pytest.mark.parametrize(("model", "optimizer"), [("toy", "muon"), ("toy-ar", "adamw")])
def test_a_resumed_run_equals_an_uninterrupted_one(
    model: str, optimizer: str, corpus: Corpus, tmp_path: Path
) -> None:
    whole = new_run(corpus, model, optimizer)
    losses = [whole.advance() for _ in range(6)]
    first = new_run(corpus, model, optimizer)
    for _ in range(3):
        first.advance()
    first.save(tmp_path)
    second = new_run(corpus, model, optimizer)
    second.resume(tmp_path)
    assert second.progress.step == 3
    assert [second.advance() for _ in range(3)] == losses[3:]
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, second.network.state_dict()[name]), name


def test_a_state_of_other_settings_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    new_run(corpus, seed=0).save(tmp_path)
    with pytest.raises(ValueError, match="belongs to a run with"):
        new_run(corpus, seed=1).resume(tmp_path)


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 1000) for step in range(1001)]
    assert rates[0] == pytest.approx(PEAK_RATE / 40)
    assert max(rates) == rates[40] == pytest.approx(PEAK_RATE)
    assert rates[1000] == pytest.approx(0.02 * PEAK_RATE)
    assert all(a > b for a, b in pairwise(rates[40:]))


@pytest.mark.parametrize(("name", "model_type"), [("toy", "sink_qwen"), ("toy-ar", "qwen2")])
def test_export_writes_half_precision_under_qwen2_names(name: str, model_type: str, tmp_path: Path) -> None:
    network = build_model(name, 0)
    export(network, name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == model_type
    assert ("mask_token_id" in config) is (name == "toy")
    weights = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert "model.layers.3.self_attn.q_proj.bias" in weights
    for key, value in network.state_dict().items():
        torch.testing.assert_close(weights[key].float(), value, atol=1e-3, rtol=1e-3)
