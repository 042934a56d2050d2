"""The average of the weights: its numbers, what holds it, and what a resumed training has of it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import dlm_lens as dl
from dlm_lens.testing import tiny
from dlm_lens.training import (
    DataSettings,
    MaskedDiffusionTrainer,
    Optimisation,
    TrainingSettings,
    evaluation_loss,
    plan,
    sink_statistics,
)
from dlm_lens.training.checkpoints import checkpoints
from dlm_lens.training.trainer import EVALUATION_SEED
from dlm_lens.training.weight_average import RAW, WeightAverage
from tests.training.job import ROWS, STEPS, job, losses, weights

DECAY = 0.4
"""That of `job`: above (1 + n) / (10 + n) in steps 1 to 4, below it afterwards."""


def averaged(output: Path, **values: Any) -> MaskedDiffusionTrainer:
    return job(output, average=1, **values)


class Weights(TrainerCallback):
    """Notes the weights before the first step and after every one, in float64."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found.append({name: value.detach().double() for name, value in model.named_parameters()})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> MaskedDiffusionTrainer:
    output = tmp_path_factory.mktemp("averaged")
    trainer = averaged(output, callbacks=(Weights(),), save_steps=3, eval_dataset=ROWS, eval_steps=2, probe_steps=4)
    trainer.train()
    return trainer


def rule64(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rule of the authors' code in float64: the average loses (1 - d_n) of its distance to the weights."""
    average = dict(found[0])
    for step, now in enumerate(found[1:], 1):
        decay = min(DECAY, (1 + step) / (10 + step))
        average = {name: value - (1 - decay) * (value - now[name]) for name, value in average.items()}
    return average


def test_a_checkpoint_is_the_average_by_the_rule_of_the_authors(whole: MaskedDiffusionTrainer) -> None:
    notes = next(one for one in whole.callback_handler.callbacks if isinstance(one, Weights))
    assert len(notes.found) == STEPS + 1
    expected, last = rule64(notes.found), whole.last_checkpoint
    stored = dict(dl.load(last).named_parameters())
    assert stored.keys() == expected.keys()
    for name, value in expected.items():
        # Float32, rounded in each of eight updates of values below 10.
        torch.testing.assert_close(stored[name].detach().double(), value, rtol=1e-5, atol=1e-6)
    raw = dl.load(last / RAW)
    assert raw.tokenizer.mask_token_id == raw.config.mask_token_id
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, raw.state_dict()[name]), name
    distances = [float((stored[name] - value).detach().abs().max()) for name, value in raw.named_parameters()]
    assert max(distances) > 1e-4  # far above the rounding


def test_evaluation_and_sink_statistics_are_of_the_average(whole: MaskedDiffusionTrainer) -> None:
    last = whole.last_checkpoint
    found, raw = (
        evaluation_loss(
            dl.load(path), whole.examples, whole.objective.for_evaluation(whole.settings.eval_samples),
            length=12, samples=whole.settings.eval_samples, batch_size=4, seed=EVALUATION_SEED,
        )
        for path in (last, last / RAW)
    )  # fmt: skip
    logged = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    assert logged[-1] == found != raw
    assert whole.evaluate()["eval_loss"] == found
    probes = [entry for entry in whole.state.log_history if "sink/main_share" in entry]
    shares = [
        sink_statistics(dl.load(path), whole.probe_canvases()).metrics()["sink/main_share"]
        for path in (last, last / RAW)
    ]
    assert probes[-1]["sink/main_share"] == shares[0] != shares[1]


def test_a_resumed_training_has_the_average_of_the_unbroken_one(
    whole: MaskedDiffusionTrainer, tmp_path: Path
) -> None:
    given = {"save_steps": 3, "eval_dataset": ROWS, "eval_steps": 2, "probe_steps": 4}
    averaged(tmp_path, **given).train()
    for path in checkpoints(tmp_path)[1:]:
        (path / "run.json").unlink()  # as if they had never been finished
    rest = averaged(tmp_path, **given)
    rest.train(resume_from_checkpoint=True)
    assert losses(rest) == losses(whole)
    for name in ("eval_loss", "sink/main_share", "sink/value_norm"):
        expected, found = (
            {e["step"]: e[name] for e in one.state.log_history if name in e} for one in (whole, rest)
        )
        assert found == expected, name
    for part in (".", RAW):
        expected, found = weights(whole.last_checkpoint / part), weights(rest.last_checkpoint / part)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    ended = averaged(tmp_path, **given)
    ended.train(resume_from_checkpoint=True)  # no step is left
    assert ended.evaluate() == whole.evaluate()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, ended.model.state_dict()[name]), name
    with pytest.raises(ValueError, match=r"optimisation\.ema_decay was 0\.4 and is None"):
        job(tmp_path, **given).train(resume_from_checkpoint=True)


def test_the_average_takes_no_part_in_the_training(whole: MaskedDiffusionTrainer, tmp_path: Path) -> None:
    plain = job(tmp_path)
    plain.train()
    assert losses(plain) == losses(whole)
    assert [path.name for path in plain.last_checkpoint.iterdir() if path.is_dir()] == []


def test_the_model_holds_the_average_in_the_block_alone() -> None:
    model = tiny("sink_qwen", tie_word_embeddings=True)
    first = {name: value.detach().clone() for name, value in model.named_parameters()}
    average = WeightAverage(model, 0.5)
    assert len(average.values) == len(first)  # the tied weight is there once
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    trained = {name: value.detach().clone() for name, value in model.named_parameters()}
    with average.in_model():
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        with average.in_model():  # a second block changes nothing
            assert all(torch.equal(value, first[name]) for name, value in model.named_parameters())
        assert all(torch.equal(value, first[name]) for name, value in model.named_parameters())
    with pytest.raises(ValueError, match="stopped"), average.in_model():
        raise ValueError("stopped")
    assert all(torch.equal(value, trained[name]) for name, value in model.named_parameters())


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_the_average_of_an_adapter_is_that_of_its_factors(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    tiny("sink_qwen").save_pretrained(tmp_path / "base")

    def trained(*, resume: bool = False) -> tuple[MaskedDiffusionTrainer, Weights]:
        torch.manual_seed(0)  # of the factors
        model = get_peft_model(tiny("sink_qwen"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        settings = TrainingSettings(
            output=str(tmp_path / "run"), steps=6, save_steps=3, batch_size=4, micro_batch_size=2, precision="fp32",
            data=DataSettings(length=12), optimisation=Optimisation(rate=1e-2, ema_decay=DECAY), report_to=(),
        )  # fmt: skip
        notes = Weights()
        trainer = MaskedDiffusionTrainer(model, settings, ROWS, callbacks=(notes,))
        trainer.train(resume_from_checkpoint=resume)
        return trainer, notes

    whole, notes = trained()
    factors = {name for name, weight in whole.model.named_parameters() if weight.requires_grad}
    assert len(whole.average.values) == len(factors) == 8
    expected = rule64(notes.found)
    with whole.averaged_weights():
        for name in factors:
            found = whole.model.get_parameter(name).detach()
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)
    (tmp_path / "run" / "checkpoint-6" / "run.json").unlink()
    rest, _ = trained(resume=True)
    assert all(torch.equal(a, b) for a, b in zip(rest.average.values, whole.average.values, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rest.average.weights, whole.average.weights, strict=True))
    ids = torch.arange(12)[None]
    merged = dl.load(tmp_path / "base", adapter=str(rest.last_checkpoint))
    raw = dl.load(tmp_path / "base", adapter=str(rest.last_checkpoint / RAW))
    with torch.no_grad():
        # W + s B A rounded once, against two products.
        torch.testing.assert_close(raw(ids).logits, rest.model.eval()(ids).logits, rtol=1e-4, atol=1e-5)
        with rest.averaged_weights():
            torch.testing.assert_close(merged(ids).logits, rest.model(ids).logits, rtol=1e-4, atol=1e-5)


def test_averages_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for decay in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=rf"ema_decay is {decay}; it must be between 0 and 1 .* null for none"):
            Optimisation(ema_decay=decay)
    settings = TrainingSettings(
        output=str(tmp_path), steps=1, data=DataSettings(length=12), report_to=(),
        optimisation=Optimisation(ema_decay=DECAY),
    )  # fmt: skip
    message = r"ema_decay is 0\.4, and the weight model\.\S+ is torch\.bfloat16, .*load the model with dtype=torch"
    with pytest.raises(ValueError, match=message):
        MaskedDiffusionTrainer(tiny("sink_qwen").to(torch.bfloat16), settings, ROWS)
    monkeypatch.setattr(MaskedDiffusionTrainer, "_sharded", True)
    with pytest.raises(ValueError, match=r"ema_decay is 0\.4, and FSDP and DeepSpeed split the weights"):
        averaged(tmp_path)


def test_a_plan_counts_the_average(tmp_path: Path) -> None:
    tiny("sink_qwen").save_pretrained(tmp_path)
    settings = {
        "model": dl.training.ModelSettings(start=str(tmp_path)),
        "data": DataSettings(length=12),
        "steps": 1,
    }
    found, more = (
        plan(TrainingSettings(**settings, optimisation=Optimisation(ema_decay=decay))) for decay in (None, 0.9)
    )
    assert more.state_bytes - found.state_bytes == 4 * found.parameters
