"""Corpus, objective and training runs of the embedded checkpoints."""

import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from dlm_lens.training import Example, MaskedDiffusionTrainer, Rows
from dlm_lens.training.optimizers import learning_rate
from experiments.toy.checkpoint import export
from experiments.toy.corpus import Corpus, build_corpus, held_out
from experiments.toy.language import extract_answer
from experiments.toy.model import build_model
from experiments.toy.tokenizer import SEQUENCE_LENGTH, build_tokenizer
from experiments.toy.train import RATE, Settings, train, trainer_of

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2}
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def corpus_and_prompts() -> tuple[Corpus, frozenset[str]]:
    return build_corpus(400)


@pytest.fixture(scope="module")
def corpus(corpus_and_prompts: tuple[Corpus, frozenset[str]]) -> Corpus:
    return corpus_and_prompts[0]


def new_run(
    corpus: Corpus, directory: Path, model: str = "toy", optimizer: str = "muon", **settings: int
) -> MaskedDiffusionTrainer:
    values = {"seed": 0, "steps": 40, "batch_size": 16, "corpus_size": len(corpus), "compiled": False}
    values |= settings
    chosen = Settings(model, optimizer, **values)
    return trainer_of(chosen, directory, corpus, build_model(model, values["seed"], **SMALL))


def sequences(corpus: Corpus, number: int, seed: int) -> list[Example]:
    return [build() for build, _ in islice(corpus.read(None, seed), number)]


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


@pytest.mark.long
def test_list_prompts_really_collide_with_a_large_corpus() -> None:
    _, prompts = build_corpus(20_000)
    assert held_out("L", 200, prompts).seen_in_training > 0


def test_sequences_depend_on_their_number_and_seed_only_and_cover_an_epoch(corpus: Corpus) -> None:
    first = sequences(corpus, 400, seed=1)
    later = [build() for build, _ in islice(corpus.read({"sample": 100}, 1), 50)]
    for here, there in zip(first[100:150], later, strict=True):
        assert torch.equal(here.tokens, there.tokens)
    other = sequences(corpus, 400, seed=2)
    assert any(len(a.tokens) != len(b.tokens) for a, b in zip(first, other, strict=True))
    eos = TOKENIZER.eos_token_id
    seen = sorted(e.tokens.tolist() + [eos] * (SEQUENCE_LENGTH - len(e.tokens)) for e in first)
    assert seen == sorted(corpus.tokens.long().tolist())


def test_canvases_end_after_the_text_and_half_are_full(corpus: Corpus) -> None:
    canvases = sequences(corpus, 400, seed=0)
    ends = [canvas.tokens.tolist().index(TOKENIZER.eos_token_id) for canvas in canvases]
    assert all(len(canvas.tokens) > end for canvas, end in zip(canvases, ends, strict=True))
    assert 0.4 < sum(len(canvas.tokens) == SEQUENCE_LENGTH for canvas in canvases) / 400 < 0.7


@pytest.mark.parametrize("model", ["toy", "toy-sink"])
def test_noise_masks_an_exact_number_in_its_region(model: str, corpus: Corpus, tmp_path: Path) -> None:
    objective = new_run(corpus, tmp_path, model).objective
    rows = Rows.of(sequences(corpus, 64, seed=0), SEQUENCE_LENGTH, corpus.padding)
    noised = replace(objective, group=64).draw(rows, range(64), 0)
    assert not (noised.masked & ~rows.visible).any()
    in_prompt = (noised.masked & rows.prompt).any(dim=1)
    assert 0.1 < in_prompt.double().mean() < 0.5  # 30% of the rows mask the whole sequence
    assert bool((noised.masked.sum(1) >= 1).all())
    asked = replace(objective, group=64).loss_arguments(rows, noised)
    # 1 / (t R) per masked position: a row's weights sum to 1, and the rows are counted.
    totals = torch.zeros(64).index_add_(0, asked["outputs"] // SEQUENCE_LENGTH, asked["weights"])
    torch.testing.assert_close(totals, torch.ones(64))
    assert float(asked["count"]) == 64


def test_training_is_in_bfloat16_with_the_rates_of_the_twins(corpus: Corpus, tmp_path: Path) -> None:
    trainer = new_run(corpus, tmp_path)
    assert trainer.args.bf16
    assert trainer.model.dtype == torch.float32
    rates = [learning_rate(step, 1000, trainer.settings.optimisation) for step in range(1000)]
    assert rates[0] == pytest.approx(RATE / 40)
    assert max(rates) == rates[40] == pytest.approx(RATE)
    assert rates[-1] == pytest.approx(0.02 * RATE)
    assert all(a > b for a, b in pairwise(rates[40:]))
    groups = trainer.create_optimizer().param_groups
    assert sorted(group["weight_decay"] for group in groups) == [0.01, 0.1]
    matrices = {id(p) for group in groups if group["weight_decay"] == 0.1 for p in group["params"]}
    layers = trainer.model.model.layers
    assert matrices == {id(p) for p in layers.parameters() if p.ndim == 2}


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize(("model", "optimizer"), [("toy", "muon"), ("toy-ar", "muon"), ("toy", "adamw")])
def test_a_few_steps_reduce_the_loss(model: str, optimizer: str, corpus: Corpus, tmp_path: Path) -> None:
    trainer = new_run(corpus, tmp_path, model, optimizer)
    trainer.args.logging_steps = 1
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:3]) / 3
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


class Stop(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 24:
            raise KeyboardInterrupt


@pytest.mark.long
def test_a_run_is_resumed_recorded_and_exported(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SAVE_EVERY", "CURVE_EVERY"):
        monkeypatch.setattr(f"experiments.toy.train.{name}", 20)
    monkeypatch.setattr("experiments.toy.train.build_model", lambda name, seed: build_model(name, seed, **SMALL))
    settings = Settings("toy", steps=40, batch_size=8, corpus_size=len(corpus), compiled=False)
    train(settings, tmp_path / "whole", corpus)
    broken = trainer_of(settings, tmp_path / "broken", corpus, build_model("toy", 0, **SMALL))
    broken.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    train(settings, tmp_path / "broken", corpus)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken"))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    records = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "broken")]
    assert records[0]["settings"]["steps"] == records[0]["progress"]["step"] == 40
    assert [step for step, _ in records[0]["progress"]["loss_curve"]] == [20, 40]
    assert records[0]["progress"]["loss_curve"] == records[1]["progress"]["loss_curve"]
    assert records[1]["progress"]["seconds"] > 0


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


@pytest.mark.parametrize("step", ["save_tokenizer", "save"])
def test_an_export_that_is_killed_leaves_no_weights(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"experiments.toy.checkpoint.{step}", killed)
        with pytest.raises(KeyboardInterrupt):
            export(build_model("toy", 0), "toy", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()

    # Killed while the weights are flushed: they are not there in part.
    with monkeypatch.context() as patch:
        patch.setattr("dlm_lens.files.atomic_writes.os.fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            export(build_model("toy", 0), "toy", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
