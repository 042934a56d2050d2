"""`CheckpointingTrainer`: a Trainer that writes complete checkpoints atomically and reads no pickles."""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import TrainOutput

from dlm_lens.adapters import load
from dlm_lens.adapters.lora import WEIGHTS as ADAPTER_WEIGHTS
from dlm_lens.training.callbacks import Stopwatch, without_progress_bars
from dlm_lens.training.checkpoints import (
    MOMENTS_FILE,
    PARTIAL,
    CheckpointError,
    NonFiniteLossError,
    last_checkpoint,
    partial_directory,
    publish,
    read_run,
    step_of,
    tidy,
)
from dlm_lens.training.data import data_record, evaluation_record
from dlm_lens.training.optimizers import learning_rate, optimizer_tensors, restore_optimizer
from dlm_lens.training.settings import TrainingSettings
from dlm_lens.training.sources import Cursor, Example
from dlm_lens.training.weight_average import RAW, Averaging, WeightAverage

logger = logging.getLogger(__name__)


class CheckpointingTrainer(Trainer):
    """A `Trainer` whose checkpoints are complete or absent, and hold weights, optimiser moments and run.json."""

    settings: TrainingSettings
    tokenizer: Any
    stopwatch: Stopwatch
    last_cursor: Cursor | None
    train_data: Any
    examples: list[Example] | None
    control: Any
    optimizer: Any
    lr_scheduler: Any
    _tr_loss: torch.Tensor
    _partial: Path | None = None
    _open_loss: dict[str, Any] | None = None
    """Of the resumed checkpoint: the losses since its last log entry, per process, and the step of that entry."""
    _loss_after_step: torch.Tensor | None = None
    _saved_step: int | None = None
    _evaluated_before: str = ""
    """The `evaluation_record` of the resumed checkpoint."""
    average: WeightAverage | None = None
    """Of the weights, from the first step on; None without `optimisation.ema_decay`."""
    _initial_global_step: int

    def _stop_message(self, why: str, remedy: str = "") -> str:
        kept = last_checkpoint(self.settings.output)
        left = f"the last complete checkpoint is {kept}" if kept else "no checkpoint had been saved yet"
        usual = "Lower the learning rate or the clipping, or look at the data of this step"
        return f"step {self.state.global_step + 1}: {why}; training stopped, {left}. {remedy or usual}"

    def _save_the_steps_done(self) -> None:
        """Save a checkpoint between two steps, unless there is one or there are other processes, which go on."""
        step, kept = self.state.global_step, last_checkpoint(self.settings.output)
        if step and self.args.world_size == 1 and (kept is None or step_of(kept) < step):
            self._save_checkpoint(self.model, trial=None)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial) if self._partial is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write to a temporary directory, flush and rename: a failure leaves the earlier checkpoint intact."""
        output = Path(self.settings.output)
        parameters = {} if self._sharded else dict(self.model.named_parameters())
        bad = next((name for name, p in parameters.items() if not bool(p.detach().isfinite().all())), None)
        if bad is not None:
            raise NonFiniteLossError(self._stop_message(f"the weight {bad} is not finite"))
        try:
            if self.args.should_save:
                partial_directory(output)
            self.accelerator.wait_for_everyone()
            self._partial = output / PARTIAL
            losses = self._losses_since_log()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                record = {**self._record(), "open_loss": losses}
                publish(self._partial, record, self.settings.keep, self.state.best_global_step)
        except (OSError, RuntimeError, SafetensorError) as error:
            tidy(output)
            kept = last_checkpoint(output)
            left = f"the checkpoint before it, {kept}, is complete" if kept else "there is none before it"
            raise CheckpointError(
                f"step {self.state.global_step}: the checkpoint could not be written to {output} ({error}); "
                f"{left}. Make room and resume"
            ) from error
        finally:
            self._partial = None
        self._saved_step = self.state.global_step
        self.accelerator.wait_for_everyone()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Whether the evaluation loss is the least so far; then request a checkpoint, with `keep_best`."""
        better = bool(super()._determine_best_metric(metrics, trial))
        if better and self.settings.keep_best:
            self.state.best_global_step = self.state.global_step
            self.control.should_save = True
        return better

    def _load_callback_state(self) -> None:
        """Give the callbacks that have a state (EarlyStoppingCallback) that of the checkpoint.

        Their arguments stay those of this run.
        """
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                stored = self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
                vars(callback).update({} if isinstance(stored, list) else stored.get("attributes", {}))

    def _losses_since_log(self) -> dict[str, Any]:
        """The sum of the losses since the last log entry in each process, and the step of that entry."""
        after = self._tr_loss if self._loss_after_step is None else self._loss_after_step
        return {
            "sums": self.accelerator.gather(after.reshape(1)).tolist(),
            "since": self._globalstep_last_logged,
        }

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._loss_after_step = None
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step = self.state.global_step
        if self.control.should_training_stop and step > self._initial_global_step and self._saved_step != step:
            # A callback ends the training, perhaps after those that request checkpoints.
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        # A checkpoint that is saved later, between two steps, has no part of the step that was stopped.
        self._loss_after_step = self._tr_loss.clone()

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The state of the checkpoint, with the `log_steps` of this run in place of the earlier one's."""
        begun: tuple[int, int] = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        self._forget_the_best_of_other_data()
        return begun

    def _forget_the_best_of_other_data(self) -> None:
        """Begin anew with the least evaluation loss where the checkpoint has that of other texts or masks."""
        before = self._evaluated_before
        if self.state.best_metric is None or not before or before == self.evaluation_record:
            return
        logger.warning(
            "the least evaluation loss so far, %.4g, is of other evaluation data or masks than those of this run: "
            "keep_best and EarlyStoppingCallback begin anew",
            self.state.best_metric,
        )
        self.state.best_metric = self.state.best_global_step = None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """Continue the mean loss of the next log entry where the checkpoint left it, if it holds that."""
        left, self._open_loss, self._loss_after_step = self._open_loss, None, None
        if left:
            sums, world = left["sums"], self.args.world_size
            self._tr_loss += sums[self.args.process_index] if len(sums) == world else sum(sums) / len(sums)
            # They are part of that entry, but not of the mean over the steps of this call.
            self._total_loss_scalar -= sum(sums) / len(sums)
            self._globalstep_last_logged = left["since"]
        return super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Average the losses since the last log entry over the processes, as log entries do."""
        self._tr_loss = self.accelerator.gather(self._tr_loss.reshape(1)).mean()
        output: TrainOutput = super()._finalize_training(*args, **kwargs)
        return output

    def _record(self) -> dict[str, Any]:
        return {
            "step": self.state.global_step,
            "total_steps": self.args.max_steps,
            "cursor": self.last_cursor,
            "settings": json_values(self.settings.identity()),
            "data": self.data_record,
            "evaluation": self.evaluation_record,
            "seconds": self.stopwatch.seconds(),
            "versions": {"torch": torch.__version__},
        }

    @cached_property
    def data_record(self) -> dict[str, Any]:
        """What identifies the training data."""
        return data_record(self.train_data, self.settings.data)

    @cached_property
    def evaluation_record(self) -> str:
        """What identifies the evaluation data and their masks; empty where there are none."""
        return evaluation_record(self.examples, self.settings.eval_samples)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model as `dlm_lens.load` reads it, and its tokenizer; nothing is pickled.

        With `optimisation.ema_decay` that is the model with the averaged weights, and the one with the trained
        weights is in the directory `RAW` below it.
        """
        if not self.args.should_save:
            return
        target = output_dir or self.args.output_dir
        with self.averaged_weights():
            self._save_model(target, state_dict)
        if self.average is not None:
            self._save_model(os.path.join(target, RAW), state_dict)

    def _save_model(self, target: str, state_dict: dict[str, Any] | None) -> None:
        """Save the weights that the model holds, its config and its tokenizer."""
        os.makedirs(target, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        with without_progress_bars():
            model.save_pretrained(target, state_dict=state_dict)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(target)

    def _add_average(self) -> None:
        """Keep the average of `optimisation.ema_decay` during the training.

        Raises:
            ValueError: the weights are sharded.
        """
        decay = self.settings.optimisation.ema_decay
        if decay is None:
            return
        if self._sharded:
            raise ValueError(
                f"optimisation.ema_decay is {decay}, and FSDP and DeepSpeed split the weights, of which no average "
                "is kept; leave it out, or train with DDP"
            )
        self.add_callback(Averaging(self))

    def averaged_weights(self) -> AbstractContextManager[None]:
        """In this block `trainer.model` holds the averaged weights of `optimisation.ema_decay`.

        Outside of it the model holds the trained ones, as it does without the setting, or before the training.
        """
        return nullcontext() if self.average is None else self.average.in_model()

    @property
    def _sharded(self) -> bool:
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            save_file(optimizer_tensors(self.optimizer.state_dict()), os.path.join(output_dir, MOMENTS_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        restore_optimizer(self.optimizer, load_file(os.path.join(checkpoint, MOMENTS_FILE)).items())
        step, steps = int(read_run(checkpoint)["step"]), self.state.max_steps
        self.lr_scheduler.last_epoch = step
        rate = learning_rate(step, steps, self.settings.optimisation)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.lr_scheduler._last_lr = [rate] * len(self.optimizer.param_groups)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._read_model(resume_from_checkpoint)

    def _read_model(self, checkpoint: str) -> None:
        """Read the weights of a checkpoint, and their average where one is kept."""
        _read_weights(self.model, checkpoint)
        decay = self.settings.optimisation.ema_decay
        if decay is not None:
            self.average = WeightAverage(self.model, decay)
            _read_weights(self.model, os.path.join(checkpoint, RAW))

    def _restore_ended(self, checkpoint: Path) -> None:
        """Take weights and state of a run from its last checkpoint, after which no step is left to train."""
        self._read_model(str(checkpoint))
        state = checkpoint / TRAINER_STATE_NAME
        if state.exists():
            self.state = TrainerState.load_from_json(str(state))
        self.state.global_step, self.state.max_steps = int(read_run(checkpoint)["step"]), self.args.max_steps

    def _save_rng_state(self, output_dir: str) -> None:
        """Save nothing: every pass seeds the generators (`dropout_seed`), and no other random number needs them."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load nothing: bfloat16 and float32 do not scale gradients, and a scaler.pt would be a pickle."""


def _read_weights(model: Any, checkpoint: str) -> None:
    if hasattr(model, "peft_config"):
        _read_adapters(model, checkpoint)
        return
    # Through `load`, because a family may store its weights under other names than its parameters have, and
    # because transformers would read any file that the checkpoint's config.json names, pickles too.
    with without_progress_bars():
        stored = load(checkpoint, dtype=model.dtype)
    model.load_state_dict(stored.state_dict())


def _read_adapters(model: Any, checkpoint: str) -> None:
    """Read the adapters that PEFT saved, the one called "default" in the checkpoint itself; its base is not saved.

    Raises:
        ValueError: they are of other modules.
    """
    from peft import set_peft_model_state_dict

    for name in model.peft_config:
        directory = Path(checkpoint) if name == "default" else Path(checkpoint) / name
        weights = directory / ADAPTER_WEIGHTS
        found = set_peft_model_state_dict(model, load_file(weights), adapter_name=name)
        if found.unexpected_keys:
            raise ValueError(
                f"{weights} holds {found.unexpected_keys[0]}, which the model's adapter {name!r} has not: resume "
                "with the adapter that was trained, or choose another output"
            )


def json_values(values: Any) -> Any:
    """Values as they return from JSON, to compare stored and present settings."""
    if isinstance(values, dict):
        return {str(name): json_values(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [json_values(value) for value in values]
    return values
