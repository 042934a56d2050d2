import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback

import dlm_lens
from dlm_lens.testing import tiny
from dlm_lens.training import (
    CheckpointError,
    DataSettings,
    Example,
    MaskedDiffusionLoss,
    MaskedDiffusionTrainer,
    NextToken,
    NonFiniteLossError,
    Optimisation,
    RowSource,
    TrainingSettings,
    evaluation_loss,
)
from dlm_lens.training.checkpoints import TrainingDataError, checkpoints, read_run
from dlm_lens.training.optimizers import learning_rate
from tests.training.job import ROWS, STEPS, dropping, job, losses, weights


def test_the_loss_of_the_first_step_is_the_objective(unbroken: MaskedDiffusionTrainer, tmp_path: Path) -> None:
    """Recomputed from the untrained model: all logits, all positions, no part of the trainer but its batch."""
    trainer = job(tmp_path, micro_batch_size=8)
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    with torch.no_grad():
        logits = tiny("sink_qwen", num_sinks=1)(**inputs).logits.double()
    flat = logits.log_softmax(-1).flatten(0, 1)
    total = -sum(
        float(w) * float(flat[o, t])
        for o, t, w in zip(batch["outputs"], batch["targets"], batch["weights"], strict=True)
    )
    assert losses(unbroken)[0] == pytest.approx(total / float(batch["count"]), rel=1e-5)
    assert bool((batch["input_ids"].flatten()[batch["outputs"]] == 63).all())


@pytest.mark.long
def test_training_learns(tmp_path: Path) -> None:
    trainer = job(tmp_path, steps=100, eval_dataset=ROWS, eval_steps=50, optimisation=Optimisation(rate=3e-3))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    logged = [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e]
    assert [step for step, _ in logged] == [50, 100]
    assert logged[-1][1] < logged[0][1] < before
    assert logged[-1][1] < 0.8 * before


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulated_passes_are_one_batch(optimizer: str, tmp_path: Path) -> None:
    settings = {"steps": 4, "optimisation": Optimisation(rate=1e-2, optimizer=optimizer)}
    whole = job(tmp_path / "whole", micro_batch_size=8, **settings)
    parts = job(tmp_path / "parts", micro_batch_size=1, **settings)
    whole.train()
    parts.train()
    # The order of additions differs, nothing else; Muon orthogonalises in bfloat16.
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4 if optimizer == "adamw" else 2e-3)


@pytest.mark.long
@pytest.mark.parametrize("how", [{"workers": 1}, {"checkpointing": True}])
def test_batches_prepared_beside_and_recomputed_activations_change_nothing(
    how: dict, tmp_path: Path, unbroken: MaskedDiffusionTrainer
) -> None:
    trainer = job(tmp_path, **how)
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(unbroken), rel=1e-6)


@pytest.mark.long
@pytest.mark.in_turn
def test_compiled_layers_learn_the_same(tmp_path: Path, unbroken: MaskedDiffusionTrainer) -> None:
    trainer = job(tmp_path, compile=True, objective=unbroken.settings.objective)
    trainer.train()
    # Fused operations round differently, and eight steps carry it on.
    assert losses(trainer) == pytest.approx(losses(unbroken), rel=1e-3)


def test_every_micro_batch_has_its_own_dropout(tmp_path: Path) -> None:
    """Two micro-batches with the same rows: the same dropout would give the same loss."""
    trainer = dropping(tmp_path, steps=1)
    trainer.model.config.attention_dropout = 0.2  # the name in other families, GPT-2 has attn_pdrop
    trainer.source = RowSource([0], lambda row: Example(torch.arange(12)), 12)
    found: list[float] = []
    usual = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = usual(*args, **kwargs)
        found.append(float(loss.detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    assert len(found) == 2
    assert found[0] != found[1]


def test_a_checkpoint_loads_and_holds_nothing_pickled(unbroken: MaskedDiffusionTrainer) -> None:
    path = unbroken.last_checkpoint
    assert path is not None
    model = dlm_lens.load(path)
    for name, value in unbroken.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert model.tokenizer.mask_token_id == model.config.mask_token_id
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    assert (read_run(path)["step"], read_run(path)["total_steps"]) == (STEPS, STEPS)


@pytest.mark.long
def test_only_so_many_checkpoints_are_kept(tmp_path: Path) -> None:
    trainer = job(tmp_path, save_steps=1, keep=2)
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]


@pytest.mark.long
def test_checkpoints_come_by_the_clock(tmp_path: Path) -> None:
    trainer = job(tmp_path, save_minutes=1e-9)
    trainer.train()
    assert len(checkpoints(tmp_path)) == STEPS


BAD = [*ROWS[:60], {"text": "w1 [MASK] w2"}, *ROWS[60:]]


class Stream:
    """Texts that are read in their order and whose number is not known."""

    column_names = ("text",)

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_a_mask_token_in_a_text_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the document that begins 'w1 \[MASK\] w2' holds the mask token 63"):
        job(tmp_path, train_dataset=BAD, steps=1).train()
    columns = DataSettings(length=12, prompt_column="q", answer_column="text")
    pairs = [{"q": "w1", **row} for row in BAD]
    with pytest.raises(ValueError, match="row 60 of the data holds the mask token 63"):
        job(tmp_path, train_dataset=pairs, data=columns, steps=1).train()
    with pytest.raises(ValueError, match="a text of the evaluation data holds the mask token 63"):
        job(tmp_path, eval_dataset=BAD, eval_rows=1000)
    assert not list(tmp_path.iterdir())
    job(tmp_path, train_dataset=BAD, family="causal", objective=NextToken(), steps=1).train()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mask_token_in_a_stream_stops_after_a_checkpoint(workers: int, tmp_path: Path) -> None:
    rows = [*ROWS[:40], {"text": "w1 [MASK] w2"}]
    trainer = job(tmp_path, train_dataset=Stream(rows), workers=workers)
    with pytest.raises(TrainingDataError, match=r"the text holds the mask token 63.*checkpoint-\d\. Mend") as found:
        trainer.train()
    (kept,) = checkpoints(tmp_path)
    step = trainer.state.global_step
    assert 0 < step < STEPS
    assert kept.name == f"checkpoint-{step}"
    assert f"step {step + 1}: " in str(found.value)
    assert "\n" not in str(found.value)
    whole = job(tmp_path / "whole", train_dataset=Stream(ROWS[:40]), steps=STEPS, save_steps=step)
    whole.train()
    for name, value in weights(tmp_path / "whole" / kept.name).items():
        assert torch.equal(value, weights(kept)[name]), name


def poison(trainer: MaskedDiffusionTrainer, step: int) -> None:
    usual = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        loss = usual(*args, **kwargs)
        return loss * torch.nan if trainer.state.global_step == step else loss

    trainer.compute_loss = compute_loss


@pytest.mark.long
class Ended:
    """A source with 20 sequences and no further epoch, which a `Source` has to have."""

    length, padding = 12, 0

    def read(self, cursor: Any, seed: int) -> Any:
        for sample in range((cursor or {}).get("sample", 0), 20):
            yield lambda: Example(torch.arange(12)), {"sample": sample + 1}


def test_a_source_that_ends_stops_after_a_checkpoint(tmp_path: Path) -> None:
    trainer = job(tmp_path, train_dataset=Ended())
    with pytest.raises(TrainingDataError, match=r"step 3: the training source has ended; .*checkpoint-2\. Let its"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = job(tmp_path, save_steps=2)
    poison(trainer, 5)
    with pytest.raises(NonFiniteLossError, match=r"step 6: the loss is nan.*checkpoint-4"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert all(bool(value.isfinite().all()) for value in weights(tmp_path / "checkpoint-4").values())


@pytest.mark.long
def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    trainer = job(tmp_path, save_steps=4)
    usual = trainer.create_optimizer

    def create_optimizer(*args):
        optimizer = usual(*args)
        step = optimizer.step

        def broken(*args, **kwargs):
            step(*args, **kwargs)
            if trainer.state.global_step == 7:
                trainer.model.model.norm.weight.data[0] = torch.inf

        optimizer.step = broken
        return optimizer

    trainer.create_optimizer = create_optimizer
    with pytest.raises(NonFiniteLossError, match=r"model\.norm\.weight is not finite"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]


@pytest.mark.long
@pytest.mark.parametrize("place", ["model", "moments", "record"])
def test_a_full_disk_leaves_the_checkpoint_before(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = job(tmp_path, save_steps=4)
    names = {
        "model": ("transformers.modeling_utils", "safe_save_file"),
        "moments": ("dlm_lens.training.trainer_checkpoints", "save_file"),
        "record": ("dlm_lens.training.checkpoints", "_flush"),
    }
    module, name = names[place]
    usual = getattr(sys.modules[module], name)

    def full(*args, **kwargs):
        if trainer.state.global_step > 4:
            raise OSError(28, "No space left on device")
        return usual(*args, **kwargs)

    monkeypatch.setattr(f"{module}.{name}", full)
    with pytest.raises(CheckpointError, match=r"step 8: .*No space left on device.*checkpoint-4, is complete"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    dlm_lens.load(tmp_path / "checkpoint-4")


def test_evaluation_texts_do_not_depend_on_the_shuffle_buffer(tmp_path: Path) -> None:
    found = []
    for buffer in (0, 50):
        stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
        data = DataSettings(length=12, shuffle_buffer=buffer)
        trainer = job(tmp_path / str(buffer), data=data, eval_dataset=stream, eval_rows=8)
        found.append([example.tokens.tolist() for example in trainer.examples])
    assert found[0] == found[1]
    assert found[0][0][:6] == [int(word[1:]) for word in ROWS[0]["text"].split()]


class Stop(TrainerCallback):
    """Ends the training after some steps, or at an evaluation loss, and notes what it is given."""

    def __init__(self, step: int = STEPS) -> None:
        self.step, self.metrics = step, []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stops = state.global_step + 1 == self.step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.step < STEPS and self.stops:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.metrics.append((state.global_step, dict(metrics)))
        if len(self.metrics) == 2:
            control.should_training_stop = True


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_callback_that_ends_the_training_leaves_a_checkpoint(
    evaluates: bool, tmp_path: Path, unbroken: MaskedDiffusionTrainer
) -> None:
    """None was saved: the request for the last one comes at the last step of the settings."""
    stop = Stop() if evaluates else Stop(4)
    given = {"eval_dataset": ROWS, "eval_steps": 2} if evaluates else {}
    trainer = job(tmp_path, callbacks=(stop,), **given)
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]
    if evaluates:
        logged = [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e]
        assert [(step, metrics["eval_loss"]) for step, metrics in stop.metrics] == logged
        assert [step for step, _ in logged] == [2, 4]
    again = job(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(unbroken)


def test_a_training_that_ends_before_its_first_step_saves_nothing(tmp_path: Path) -> None:
    class Never(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    trainer = job(tmp_path, callbacks=(Never(),))
    trainer.train()
    assert checkpoints(tmp_path) == []
    assert trainer.state.global_step == 0


def test_evaluate_scores_the_data_that_it_is_given(tmp_path: Path) -> None:
    """It scored those of the constructor, without a word."""
    other = [{"text": " ".join(f"w{(7 * i + j) % 40}" for j in range(20))} for i in range(30)]
    trainer = job(tmp_path, eval_dataset=ROWS)
    own, given = trainer.evaluate()["eval_loss"], trainer.evaluate(other, metric_key_prefix="other")
    assert "eval_loss" not in given
    assert given["other_loss"] == job(tmp_path, eval_dataset=other).evaluate()["eval_loss"] != own
    assert job(tmp_path).evaluate(ROWS)["eval_loss"] == own == trainer.evaluate()["eval_loss"]
    for wrong, message in (
        ([], "eval_dataset is empty; give at least one row"),
        ({"a": ROWS}, "eval_dataset holds 'a'; give one dataset"),
        ([{"text": "w1 [MASK] w2"}], "a text of the evaluation data holds the mask token 63"),
        (datasets.Dataset.from_dict({"other": ["w1"]}), "has no column 'text'"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(wrong)
    with pytest.raises(ValueError, match=r"ignore_keys is \['logits'\], and evaluate computes the loss alone"):
        trainer.evaluate(ignore_keys=["logits"])
    with pytest.raises(ValueError, match="needs eval_dataset, which was not given"):
        job(tmp_path).evaluate()


def test_blocks_of_a_network_with_a_noise_level_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_length is 4, and BD3LM.* is given one noise level for a row"):
        MaskedDiffusionLoss().for_model(tiny("bd3lm", time_conditioning=True), 2)
    assert MaskedDiffusionLoss().for_model(tiny("bd3lm"), 2).block_length == 4


def test_budgets() -> None:
    settings = TrainingSettings(tokens=30e9, data=DataSettings(length=2048))
    assert settings.total_steps() == 28610  # 30e9 / (512 * 2048)
    with pytest.raises(ValueError, match=r"budget of 1,000,000 tokens is smaller than one batch of 512"):
        replace(settings, tokens=1e6).total_steps()
    with pytest.raises(ValueError, match="tokens and steps given as the length"):
        TrainingSettings(tokens=1e6, steps=3)
    with pytest.raises(ValueError, match="nothing given as the length"):
        TrainingSettings()
    assert TrainingSettings(epochs=10, batch_size=256).total_steps(769_240) == 30_048
    with pytest.raises(ValueError, match="epochs needs a dataset of known size"):
        TrainingSettings(epochs=1).total_steps()
    assert TrainingSettings(epochs=0.29, batch_size=1).total_steps(100) == 29
    assert TrainingSettings(epochs=0.58, batch_size=2).total_steps(100) == 29
    with pytest.raises(ValueError, match="epochs is 1 of 10 sequences, which is less than one batch of 64; raise"):
        TrainingSettings(epochs=1, batch_size=64).total_steps(10)
    with pytest.raises(ValueError, match="epochs is nan; a run has at least one step"):
        TrainingSettings(epochs=float("nan"))


def test_epochs_of_packed_texts_are_counted_in_tokens(tmp_path: Path) -> None:
    tokens = sum(len(row["text"].split()) + 1 for row in ROWS)  # a word is a token, and every text has an end
    trainer = job(tmp_path, steps=None, epochs=2.5)
    assert trainer.args.max_steps == int(2.5 * tokens / 12 / 8)
    with pytest.raises(ValueError, match="epochs needs a dataset of known size; give tokens or steps for a stream"):
        job(tmp_path, train_dataset=Stream(ROWS), steps=None, epochs=2.5)


@pytest.mark.parametrize(
    ("cpu", "precision", "said"),
    [
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, "bf16", True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, "fp32", False),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, "bf16", False),
        ({"architecture": "aarch64"}, "bf16", False),
        ({}, "bf16", False),
    ],
)
def test_a_slow_precision_is_said_before_training(
    cpu: dict[str, Any],
    precision: str,
    said: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    job(tmp_path, precision=precision)
    assert ("no bfloat16 instructions" in caplog.text) == said


def test_the_learning_rate_warms_up_and_falls_to_its_least() -> None:
    settings = Optimisation(rate=1e-4, min_rate=1e-5, warm_up=0.01)
    rates = [learning_rate(step, 1000, settings) for step in range(1001)]
    assert rates[0] == pytest.approx(1e-5)
    assert max(rates) == rates[10] == pytest.approx(1e-4)
    assert (rates[504] + rates[505]) / 2 == pytest.approx(5.5e-5)  # the middle of steps 10 to 999
    assert rates[998] > rates[999] == rates[1000] == pytest.approx(1e-5)
    few = replace(settings, rate=1.0, min_rate=0.0)
    assert [learning_rate(step, 5, few) for step in range(5)] == pytest.approx([1.0, 1.0, 0.75, 0.25, 0.0])
    assert [learning_rate(step, 2, few) for step in range(2)] == [1.0, 0.0]


@pytest.mark.long
def test_an_autoregressive_baseline_trains_on_the_same_rows(tmp_path: Path) -> None:
    trainer = job(tmp_path, family="causal", objective=NextToken(), steps=60)
    trainer.train()
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]


def test_the_evaluation_loss_is_the_mean_over_its_set_whatever_the_seed(tmp_path: Path) -> None:
    """Against all logits in float64, each document of the set once; for `NextToken`, which draws no noise."""
    few = [{"text": f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4}"} for i in range(7)]  # 7 sequences of 6 tokens
    found = []
    for seed in (0, 1):
        trainer = job(tmp_path, family="causal", objective=NextToken(), data=DataSettings(length=6), seed=seed,
                      eval_dataset=few, eval_rows=10)  # fmt: skip
        found.append(trainer.evaluate()["eval_loss"])
    model, total = tiny("causal").double(), 0.0
    for row in few:
        ids = torch.tensor([[*model.tokenizer(row["text"]).input_ids, model.tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total -= float(logits[torch.arange(5), ids[0, 1:]].sum())
    assert found == pytest.approx([total / 35] * 2, rel=1e-5)
    trainer.model.train()
    assert evaluation_loss(trainer.model, trainer.examples, NextToken(), length=6) == pytest.approx(total / 35)
    assert trainer.model.training  # as it was before
    most = [job(tmp_path, seed=seed, eval_dataset=ROWS, eval_rows=5).examples for seed in (0, 1)]
    for one, other in zip(*most, strict=True):
        assert torch.equal(one.tokens, other.tokens)


def test_the_evaluation_of_a_baseline_has_one_pass_for_each_row(tmp_path: Path) -> None:
    """It draws no masks, so that `eval_samples` passes would all be the same."""
    trainer = job(tmp_path, family="causal", objective=NextToken(), eval_dataset=ROWS, eval_rows=6, eval_samples=4)
    rows: list[int] = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    trainer.evaluate()
    assert sum(rows) == 6


@pytest.mark.long
def test_the_evaluation_loss_is_the_same_every_time_and_close_to_many_masks(tmp_path: Path) -> None:
    trainer = job(tmp_path)
    model = tiny("sink_qwen", num_sinks=1)
    settings = {"length": 12, "batch_size": 5}
    examples = trainer.probe() * 4
    objective = replace(trainer.objective, random_length_share=0.0, group=8)
    first = evaluation_loss(model, examples, objective, samples=8, seed=1, **settings)
    torch.manual_seed(99)
    assert evaluation_loss(model, examples, objective, samples=8, seed=1, **settings) == first
    repeats = [evaluation_loss(model, examples, objective, samples=8, seed=s, **settings) for s in range(2, 12)]
    mean, spread = sum(repeats) / 10, torch.tensor(repeats).std()
    assert abs(first - mean) < 4 * float(spread)
    assert not model.training
