"""The embedded checkpoints as users get them, and the way from a training run to a released one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dlm_lens
from experiments.toy import card, release
from experiments.toy.corpus import held_out
from experiments.toy.evaluate import answers
from experiments.toy.language import is_correct
from experiments.toy.phenomena import CLASSES, replay
from experiments.toy.tokenizer import build_tokenizer
from experiments.toy.train import Settings, train

CHECKPOINTS = Path(dlm_lens.__file__).parent / "checkpoints"
SHIPPED = ("toy", "toy-ar")
PROMPT = "Tom has 5 apples. Tom buys 4 more. How many apples?:"
FLOOR = 13  # of 16 held-out word problems; a guess of a number from 0 to 30 gets 16 / 31


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> Any:
    return request.param, dlm_lens.load(request.param)


@pytest.mark.parametrize("name", SHIPPED)
def test_files_are_complete_small_and_half_precision(name: str) -> None:
    names = {path.name for path in (CHECKPOINTS / name).iterdir()}
    assert names == {"README.md", *release.SHIPPED_FILES}
    weights = CHECKPOINTS / name / "model.safetensors"
    assert weights.stat().st_size < 2_500_000
    assert {value.dtype for value in load_file(weights).values()} == {torch.float16}


def test_twins_have_the_same_layout() -> None:
    toy, baseline = (load_file(CHECKPOINTS / name / "model.safetensors") for name in SHIPPED)
    assert {key: value.shape for key, value in toy.items()} == {key: value.shape for key, value in baseline.items()}


def test_loaded_tokenizer_is_the_languages(shipped: Any) -> None:
    _, model = shipped
    assert model.tokenizer(PROMPT).input_ids == build_tokenizer()(PROMPT).input_ids
    assert model.config.vocab_size == len(model.tokenizer)


def test_special_ids_agree_with_the_tokenizer(shipped: Any) -> None:
    name, model = shipped
    for token in ("bos", "eos", "pad", *(["mask"] if name == "toy" else [])):
        wanted = getattr(model.tokenizer, f"{token}_token_id")
        assert getattr(model.config, f"{token}_token_id") == wanted is not None


def test_example_of_the_readme_is_solved(shipped: Any) -> None:
    _, model = shipped
    run = dlm_lens.denoise(model, PROMPT)
    assert is_correct(run.answers[0], "9")
    assert run.answers[0].startswith("5 + 4 = 9 .")


@pytest.mark.long
def test_held_out_word_problems_are_solved(shipped: Any) -> None:
    _, model = shipped
    # A seed that neither the choice of a run nor its card used.
    test = held_out("A", 16, frozenset(), seed=99)
    texts = answers(model, test.examples)
    solved = sum(is_correct(text, e.target) for text, e in zip(texts, test.examples, strict=True))
    assert solved >= FLOOR


@pytest.mark.parametrize("name", SHIPPED)
def test_card_is_what_the_stored_results_say(name: str) -> None:
    assert (CHECKPOINTS / name / "README.md").read_text() == card.write_card(name, release.stored_results())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusion run of two steps, exported."""
    directory = tmp_path_factory.mktemp("runs") / "toy"
    train(Settings("toy", steps=2, batch_size=4, corpus_size=50, compiled=False), directory)
    return directory


@pytest.mark.long
def test_run_can_be_loaded_and_measured(fresh: Path) -> None:
    tests = {task: held_out(task, 4, frozenset()) for task in ("A", "L", "F")}
    result = release.measure_checkpoint(fresh, tests, previous={})
    assert result["training"]["progress"]["step"] == 2
    assert [(a["task"], a["decoding"]) for a in result["accuracy"]] == [
        (task, decoding) for task in "ALF" for decoding in ("block 8", "full")
    ]
    assert all(a["correct"]["value"] == 0 for a in result["accuracy"])  # two steps teach nothing
    found = result["phenomena"]
    base_rates = [found["classes"][name]["base_rate"].value for name in CLASSES]
    assert sum(base_rates) == pytest.approx(1.0)
    # 4 prompts, 32 steps, 4 layers, 4 heads
    assert found["maps_with_a_sink"].n == 4 * 32 * 16
    assert found["main_sink_differs_first_to_last"].n == 4 * 16


def test_replayed_scores_average_to_one(fresh: Path) -> None:
    model = dlm_lens.load(fresh)
    short, long = (
        "sort 3 1 2 0 :",
        "the cat is red . the dog is blue . the fox is red . what colour is the dog ? :",
    )
    run = dlm_lens.denoise(model, [short, long], gen_length=8, steps=8, block_length=8)
    maps = replay(model, run)
    assert len(maps.score) == 8
    for score in maps.score:
        # Rows sum to 1, so relative to uniform attention the mean over all keys is 1; padding has no score.
        torch.testing.assert_close(score.nanmean(-1), torch.ones(2, 4, 4))
        assert torch.equal(score.isnan().any(2).any(1), ~run.attention_mask)
    alone = dlm_lens.denoise(model, short, gen_length=8, steps=8, block_length=8)
    own = replay(model, alone)
    for name in ("score", "value_norm"):
        row = getattr(maps, name)[0, 0, ..., -own.score.shape[-1] :]
        torch.testing.assert_close(row, getattr(own, name)[0, 0], atol=1e-5, rtol=1e-5)


def test_only_half_precision_is_shipped(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "CHECKPOINTS", tmp_path)
    release.ship(fresh, "toy")
    assert {path.name for path in (tmp_path / "toy").iterdir()} == set(release.SHIPPED_FILES)
    monkeypatch.setattr(release, "LARGEST_FILE", 1000)
    with pytest.raises(ValueError, match="at most 1000"):
        release.ship(fresh, "toy")
