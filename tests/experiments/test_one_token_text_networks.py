"""Networks on real English: paired, converted, and measured against what is known."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import dlm_lens as dl
from dlm_lens.adapters import family_of
from dlm_lens.adapters.model_preparation import finish_model
from dlm_lens.experiments.one_token import tables, text_metrics
from dlm_lens.experiments.one_token.miniature import LONGER, VARIANTS, Miniature, data, network, trained
from dlm_lens.experiments.one_token.text_corpus import LENGTH, encoded
from dlm_lens.experiments.one_token.text_metrics import MASKS, STEPS, canvases, record_canvases, validation_loss
from dlm_lens.experiments.one_token.text_network import build_network, diffusion
from dlm_lens.training import MaskedDiffusionTrainer, NextToken, Rows
from dlm_lens.training.sources import Example
from dlm_lens.training.trainer import EVALUATION_SEED
from tests.experiments.one_token_stories import write_story


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_story(tmp_path_factory.mktemp("text") / "story.txt"))


# Pairs


@pytest.mark.long
def test_variants_begin_with_the_plain_networks_weights(story: str) -> None:
    plain = network(Miniature("plain", 3, text=story)).state_dict()
    for name, variant in VARIANTS.items():
        model = network(Miniature(name, 3, text=story))
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in plain.items())
        config = model.config
        assert (config.num_sinks, config.sink_placement) == (variant.sinks, variant.position)
        assert (config.zero_sink_value, config.softmax) == (variant.zero_value, variant.softmax)
        assert (config.gated_attention, config.logit_shift) == (variant.gated, False)
    other = network(Miniature("plain", 4, text=story)).state_dict()
    assert not torch.equal(other["lm_head.weight"], plain["lm_head.weight"])


def first_batches(run: Miniature, directory: Path) -> list[dict[str, torch.Tensor]]:
    source, tokenizer = data(run)
    trainer = MaskedDiffusionTrainer(
        network(run, directory), run.settings(directory / run.name), source, tokenizer=tokenizer
    )
    batches = iter(trainer.get_train_dataloader())
    return [next(batches) for _ in range(3)]


def test_variants_of_a_seed_see_the_same_canvases(story: str, tmp_path: Path) -> None:
    one, same, other = (
        first_batches(Miniature(name, seed, steps=3, batch_size=4, text=story), tmp_path)
        for name, seed in (("plain", 0), ("sinks4", 0), ("plain", 1))
    )
    for first, second, third in zip(one, same, other, strict=True):
        for name in ("input_ids", "targets", "outputs"):
            assert torch.equal(first[name], second[name])
        assert not torch.equal(first["input_ids"], third["input_ids"])


def test_other_texts_and_settings_have_other_directories(story: str, tmp_path: Path) -> None:
    moved, longer = write_story(tmp_path / "moved.txt"), write_story(tmp_path / "longer.txt", 81)
    name = Miniature("sink", 0, text=story).name
    assert name.startswith("text-scratch-sink-300steps-seed0-")
    assert Miniature("sink", 0, text=str(moved)).name == name, "the text counts, not where it lies"
    others = [
        Miniature("sink", 0, text=str(longer)),
        Miniature("sink", 0),
        Miniature("sink", 0, steps=9, text=story),
    ]
    assert len({name, *(run.name for run in others)}) == 4


def test_names_on_the_synthetic_language_are_those_of_before() -> None:
    # So that networks which are kept since before there was a `text` are found again.
    assert Miniature("sink", 0).name == "scratch-sink-300steps-seed0-571b04be"
    assert Miniature("plain", 1, start="toy-ar", steps=150).name == "toy-ar-plain-150steps-seed1-a90a5800"


# Conversion


@pytest.mark.long
def test_a_conversion_begins_with_the_one_ar_model_of_the_text(story: str, tmp_path: Path) -> None:
    given = {**tables.SMALL, "steps": 2, "batch_size": 4, "text": story, "start": "toy-ar"}
    runs = [Miniature.of({"variant": name, "seed": seed}, given) for name in ("plain", "gated") for seed in (0, 1)]
    (first,) = {run.ar_model() for run in runs}
    assert (first.causal, first.steps, first.seed, first.converted) == (True, LONGER * 2, 0, False)
    model = network(runs[0], tmp_path)
    held = dl.load(tmp_path / first.name / f"checkpoint-{LONGER * 2}")
    assert family_of(held.config.model_type).causal
    mask = held.tokenizer.mask_token_id
    state = model.state_dict()
    for name, value in held.state_dict().items():
        kept = [row for row in range(len(value)) if row != mask or "embed" not in name]
        assert torch.equal(state[name][kept], value[kept]), name
    # [MASK] is the mean of all words, not of the special tokens that stand first.
    embedding = held.get_input_embeddings().weight.double()
    assert torch.allclose(model.get_input_embeddings().weight[mask].double(), embedding[:mask].mean(0), atol=1e-7)
    assert (model.config.logit_shift, model.config._attn_implementation) == (True, "eager")
    # Trained once: its file is not written again.
    weights = tmp_path / first.name / f"checkpoint-{LONGER * 2}" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    network(runs[3], tmp_path)
    assert weights.stat().st_mtime_ns == before


def test_objectives(story: str, tmp_path: Path) -> None:
    shifts = {
        start: Miniature("plain", 0, start=start, text=story).settings(tmp_path).objective.logit_shift
        for start in ("scratch", "ar")
    }
    assert shifts == {"scratch": False, "ar": True}
    assert Miniature("ar", 0, text=story).settings(tmp_path).objective == NextToken()
    with pytest.raises(ValueError, match="'ar' is no variant"):
        Miniature("ar", 0)


@pytest.mark.long
@pytest.mark.in_turn
def test_the_ar_model_learns_next_tokens(story: str, tmp_path: Path) -> None:
    run = Miniature("ar", 0, steps=30, batch_size=4, text=story)
    checkpoint = trained(run, tmp_path / run.name)
    held, model = encoded(story), dl.load(checkpoint)
    rows = held.validation[:8]
    with torch.no_grad():
        logits = model(input_ids=rows).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    # What the frequencies of single tokens give; the next one is well below that in 30 steps of these sentences.
    counts = torch.bincount(held.training.flatten(), minlength=len(held.tokenizer)).double() + 1e-3
    alone = -(counts / counts.sum()).log()[rows[:, 1:]].mean().item()
    assert loss < alone - 0.5


# Measuring


@pytest.mark.parametrize("shift", [False, True])
def test_the_validation_loss_against_every_position_by_hand(story: str, shift: bool) -> None:
    held = encoded(story)
    model = build_network(held.tokenizer, 0, num_sinks=1, logit_shift=shift).double().eval()
    rows, mask = held.validation[:3], held.tokenizer.mask_token_id
    total = 0.0
    for number, row in enumerate(rows):
        for sample in range(MASKS):
            # The same masks; everything else is done anew.
            one = Rows.of([Example(row)], LENGTH, 0)
            (masked,) = diffusion().for_model(model, MASKS).draw(one, [number * MASKS + sample], EVALUATION_SEED)[0]
            with torch.no_grad():
                logits = model(input_ids=row.masked_fill(masked, mask)[None]).logits[0]
            chances = torch.log_softmax(logits, -1)
            places = [place for place in range(LENGTH) if masked[place]]
            source = [max(place - 1, 0) if shift else place for place in places]
            lost = -sum(float(chances[at, row[place]]) for at, place in zip(source, places, strict=True))
            # Eq. 3 with k of S masked: (S / k) sum, per position.
            total += lost / len(places)
    found = validation_loss(model, rows, batch_size=5)
    # Logits of the loss are float32 in places.
    assert found == pytest.approx(total / (3 * MASKS), rel=1e-5)


def test_canvases_lose_their_masks_one_after_the_other() -> None:
    rows = torch.arange(3 * LENGTH).view(3, LENGTH)
    steps = list(canvases(rows, -1))
    counts = [(step == -1).sum(-1).tolist() for step in steps]
    assert counts == [[4 * (16 - step)] * 3 for step in range(STEPS)]
    for before, after in pairwise(steps):
        assert bool(((before == -1) | (before == after)).all()), "what is written stays"
    assert bool(((steps[5] == -1) | (steps[5] == rows)).all()), "and it is the text"
    hidden = steps[8] == -1
    assert not torch.equal(hidden[0], hidden[1])


def test_sinks_of_a_network_without_attention_to_choose(story: str) -> None:
    held = encoded(story)
    model = build_network(held.tokenizer, 0, num_sinks=1, zero_sink_value=True)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.k_proj.weight)
        torch.nn.init.zeros_(layer.self_attn.k_proj.bias)
    finish_model(model, family_of("sink_qwen"), held.tokenizer)
    recording = record_canvases(model, held.held_out(2))
    found = text_metrics.sink_numbers(recording)
    assert recording.received.shape[:2] == (STEPS, 2)
    # Even attention over 64 positions and one learned sink, whose value is zero.
    assert found["share"] == pytest.approx([1 / 65] * 4, abs=1e-4)
    assert found["norm"] == [0.0] * 4
    assert min(found["other"]) > 0
    assert (found["found"], found["found_norm"]) == (0.0, None)


def test_a_planted_sink_is_found_on_every_canvas(story: str) -> None:
    held = encoded(story)
    model = build_network(held.tokenizer, 0)
    rows = held.held_out(2)
    finish_model(model, family_of("sink_qwen"), held.tokenizer)
    # Scores that send every query of head 0 to position 7, and leave the other heads even.
    for layer in model.model.layers:

        def plant(module: object, args: object, scores: torch.Tensor) -> torch.Tensor:
            scores = torch.zeros_like(scores)
            scores[:, 0, :, 7] = 20.0
            return scores

        layer.self_attn.hook_scores.register_forward_hook(plant)
    found = text_metrics.sink_numbers(record_canvases(model, rows))
    # One sink in one of four heads; it never moves there, and even heads have the same first key throughout.
    assert found["found"] == pytest.approx(1 / 4)
    assert found["moved"] == 0.0
