"""transformers' EarlyStoppingCallback, and the checkpoint with the least evaluation loss."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback

import dlm_lens as dl
from dlm_lens.training import MaskedDiffusionTrainer, TrainingSettings, evaluation_loss
from dlm_lens.training.checkpoints import checkpoints
from dlm_lens.training.trainer import EVALUATION_SEED
from tests.training.job import ROWS, STEPS, job


def scored(
    output: Path, scores: list[float], monkeypatch: pytest.MonkeyPatch, **values: Any
) -> MaskedDiffusionTrainer:
    """A trainer whose evaluations find these losses, one after the other."""
    left: Iterator[float] = iter(scores)
    monkeypatch.setattr("dlm_lens.training.trainer.evaluation_loss", lambda *args, **kwargs: next(left))
    return job(output, **{"eval_dataset": ROWS, "eval_steps": 1} | values)


def names(output: Path) -> list[str]:
    return [path.name for path in checkpoints(output)]


def test_a_training_stops_early_and_keeps_its_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"callbacks": (EarlyStoppingCallback(2),), "keep_best": True, "keep": 1}
    trainer = scored(tmp_path, [3.0, 2.0, 2.5, 2.6], monkeypatch, **given)
    trainer.train()
    assert trainer.state.global_step == 4
    assert [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e] == [
        (1, 3.0), (2, 2.0), (3, 2.5), (4, 2.6),
    ]  # fmt: skip
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert trainer.best_checkpoint == tmp_path / "checkpoint-2"
    assert trainer.last_checkpoint == tmp_path / "checkpoint-4"


def test_a_resumed_training_stops_where_the_unbroken_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(tmp_path, [3.0, 2.0, 2.5, 2.6], monkeypatch, save_steps=3, callbacks=(EarlyStoppingCallback(2),)).train()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    (tmp_path / "checkpoint-4" / "run.json").unlink()  # as if it had never been finished
    rest = scored(tmp_path, [2.6, 2.7], monkeypatch, save_steps=3, callbacks=(EarlyStoppingCallback(2),))
    rest.train(resume_from_checkpoint=True)
    assert rest.state.global_step == 4
    (tmp_path / "checkpoint-4" / "run.json").unlink()
    # The argument is that of the run that resumes; the count of losses is the checkpoint's.
    other = scored(tmp_path, [2.6, 2.7, 2.8], monkeypatch, save_steps=3, callbacks=(EarlyStoppingCallback(3),))
    other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 5


def test_a_resume_may_add_early_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored(tmp_path, [3.0] * STEPS, monkeypatch, save_steps=3).train()
    for path in checkpoints(tmp_path)[1:]:
        (path / "run.json").unlink()
    rest = scored(tmp_path, [3.0] * STEPS, monkeypatch, callbacks=(EarlyStoppingCallback(1),))
    rest.train(resume_from_checkpoint=True)
    assert rest.state.global_step == 4
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_the_best_checkpoint_is_kept_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"save_steps": 2, "keep": 1, "keep_best": True}
    scored(tmp_path, [3.0, 3.1, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0], monkeypatch, **given).train()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-8"]
    (tmp_path / "checkpoint-8" / "run.json").unlink()
    rest = scored(tmp_path, [1.5] * STEPS, monkeypatch, **given)
    rest.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-8"]
    assert rest.best_checkpoint == tmp_path / "checkpoint-3"


def test_losses_of_other_evaluation_data_are_not_compared_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No loss of harder texts would be below those of the texts before, and no checkpoint would be the best."""
    given = {"keep": 9, "keep_best": True}
    scored(tmp_path, [3.0, 1.0, 2.0], monkeypatch, steps=3, **given).train()
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    (tmp_path / "checkpoint-3" / "run.json").unlink()
    other = scored(tmp_path, [5.0], monkeypatch, steps=3, **given | {"eval_dataset": ROWS[:5]})
    other.train(resume_from_checkpoint=True)
    assert "the least evaluation loss so far, 1, is of other evaluation data or masks" in caplog.text
    assert other.best_checkpoint == tmp_path / "checkpoint-3"
    assert other.state.best_metric == 5.0


def test_the_best_checkpoint_has_the_least_loss_that_was_logged(tmp_path: Path) -> None:
    trainer = job(tmp_path, eval_dataset=ROWS, eval_steps=3, keep_best=True)
    trainer.train()
    logged = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert list(logged) == [3, 6, STEPS]  # and at the last step
    best = min(logged, key=lambda step: logged[step])
    assert trainer.best_checkpoint == tmp_path / f"checkpoint-{best}"
    objective = trainer.objective.for_evaluation(4)
    found = evaluation_loss(
        dl.load(trainer.best_checkpoint), trainer.examples, objective, length=12, batch_size=4, seed=EVALUATION_SEED
    )
    assert found == logged[best]


def test_early_stopping_without_evaluation_is_refused(tmp_path: Path) -> None:
    """It was an AssertionError of transformers'."""
    message = (
        r"^there is an EarlyStoppingCallback and eval_steps is 0, .*; set eval_steps and give eval_dataset, or"
    )
    with pytest.raises(ValueError, match=message):
        job(tmp_path, callbacks=(EarlyStoppingCallback(1),), eval_dataset=ROWS).train()
    late = job(tmp_path)
    late.add_callback(EarlyStoppingCallback)
    with pytest.raises(ValueError, match=message):
        late.train()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"keep_best is True and eval_steps is 0, .* or keep_best to false"):
        TrainingSettings(steps=1, keep_best=True)
    assert job(tmp_path).best_checkpoint is None
