"""`MaskedDiffusionTrainer`: transformers' Trainer with the objective, exact resumption and loud failures."""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput

from dlm_lens.attention import decoder_of, in_use
from dlm_lens.files.locks import held
from dlm_lens.placement import emulates_bfloat16
from dlm_lens.training.callbacks import (
    Interruption,
    ProgressBar,
    SaveClock,
    SinkMetrics,
    Stopwatch,
    name_failing_reporters,
    without_progress_bars,
)
from dlm_lens.training.checkpoints import (
    MOMENTS_FILE,
    NonFiniteLossError,
    TrainingDataError,
    check_files,
    checkpoints,
    last_checkpoint,
    read_run,
    step_of,
    tidy,
)
from dlm_lens.training.data import (
    Batching,
    BatchStream,
    build_source,
    check_texts,
    check_tokens,
    sequences,
)
from dlm_lens.training.dataset_files import read_dataset, read_evaluation
from dlm_lens.training.fit_checks import (
    check_early_stopping,
    check_evaluated,
    check_fit,
    check_positions,
    check_rows,
)
from dlm_lens.training.initialization import build_model
from dlm_lens.training.losses import evaluation_loss, loss_forward
from dlm_lens.training.objective import DROPOUT, random_numbers
from dlm_lens.training.optimizers import build_optimizer, learning_rate
from dlm_lens.training.settings import EVALUATED, TrainingSettings, differences
from dlm_lens.training.sink_probe import probe_batch
from dlm_lens.training.sources import Cursor, Example, Source, take
from dlm_lens.training.swiglu import SwiGLU
from dlm_lens.training.trainer_arguments import training_arguments
from dlm_lens.training.trainer_checkpoints import CheckpointingTrainer
from dlm_lens.training.weight_average import WeightAverage

logger = logging.getLogger(__name__)

EVALUATION_SEED = 20_250_101
"""Seed of the evaluation masks, the same at every step and in every run."""

EVALUATION_ORDER = 0
"""Seed of the order in which evaluation rows are taken from their dataset, the same in every run."""


class MaskedDiffusionTrainer(CheckpointingTrainer):
    """Train a masked DLM (or, with `NextToken`, an AR baseline).

    Batches and noise are functions of the seed and of the sample's number: a resumed run, or one divided among
    processes, sees the same samples as an uninterrupted run of one process. Dropout is a function of the seed, the
    step, the micro-batch and the process. Checkpoints are written atomically, and
    `dlm_lens.load` opens them (of an adapter of PEFT with `adapter=`; not the sharded ones of FSDP and DeepSpeed).

    Args:
        model: from `convert`, `dlm_lens.load`, or a config; its weights should be float32.
        settings: of the run.
        train_dataset: of the datasets library, a list of mappings, or a `Source`.
        eval_dataset: likewise, for the evaluation loss; its first `eval_rows` sequences are used, each once, in an
            order that no setting changes. None for no evaluation.
        tokenizer: the model's by default.
        callbacks: of transformers.

    Raises:
        ValueError: a budget smaller than a batch, a batch that does not divide, a missing column, no rows, a model
            that the objective does not train, evaluation data that hold its mask token or an id that it does not
            embed, rows beyond its table of positions, an average of sharded weights; and as `check_fit`.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Any,
        settings: TrainingSettings,
        train_dataset: Any,
        eval_dataset: Any = None,
        *,
        tokenizer: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        self.settings = settings
        self.tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
        self.objective = settings.objective.for_model(model, settings.batch_size)
        check_fit(model, settings, self.objective, evaluates=eval_dataset is not None)
        # Before an engine splits the weights.
        self._embedded = int(model.get_input_embeddings().weight.shape[0])
        self.train_data = train_dataset
        self.source = self._source(train_dataset, "train_dataset", settings.seed)
        check_positions(model, self.source.length)
        place = settings.data.eval_path or (settings.data.path if settings.data.eval_split else "")
        self.examples = None if eval_dataset is None else self._examples(eval_dataset, place)
        if getattr(model, "dtype", torch.float32) != torch.float32:
            logger.warning("the weights are %s, in which small updates are lost; load them in float32", model.dtype)
        steps = settings.total_steps(None if settings.epochs is None else sequences(self.source))
        arguments = training_arguments(settings, steps)
        if arguments.use_cpu and arguments.bf16 and emulates_bfloat16():
            logger.warning("this CPU has no bfloat16 instructions; a step is faster with precision='fp32'")
        self.batching = Batching(
            settings.batch_size, settings.micro_batch_size, arguments.world_size, arguments.process_index
        )
        arguments.gradient_accumulation_steps = self.batching.accumulation
        self.last_cursor: Cursor | None = None
        self._reading: tuple[int, Cursor | None] = (0, None)
        self._part = 0  # micro-batches of the step that are done
        super().__init__(model=model, args=arguments, eval_dataset=self.examples, callbacks=list(callbacks))
        name_failing_reporters(self.callback_handler.callbacks)
        self.remove_callback(PrinterCallback)
        self.add_callback(ProgressBar())
        self.add_callback(SaveClock(settings.save_minutes, settings.save_steps))
        self.interruption = Interruption()
        self.add_callback(self.interruption)
        self.stopwatch = Stopwatch(settings.batch_size * self.source.length)
        self.add_callback(self.stopwatch)
        self._add_average()
        if settings.probe_steps:
            self.add_callback(SinkMetrics(self, settings.probe_steps))

    def _source(self, dataset: Any, name: str, seed: int, **changed: Any) -> Source:
        check_rows(dataset, name)
        if hasattr(dataset, "read") and hasattr(dataset, "length"):
            found: Source = dataset
            return found
        shift = bool(getattr(self.objective, "logit_shift", False))
        return build_source(dataset, replace(self.settings.data, **changed), self.tokenizer, shift=shift, seed=seed)

    def _examples(self, dataset: Any, path: str = "") -> list[Example]:
        """The sequences of an evaluation set, the same in every run; `path` is for errors while it is read."""
        source = self._source(dataset, "eval_dataset", EVALUATION_ORDER, shuffle_buffer=0, path=path)
        if source.length > self.source.length:
            raise ValueError(
                f"eval_dataset has rows of {source.length} positions and train_dataset of {self.source.length}; "
                "give one length to both"
            )
        examples = take(source, self.settings.eval_rows, EVALUATION_ORDER, repeat=False)
        for example in examples:
            check_tokens(example.tokens, self._mask, self._embedded, "a text of the evaluation data")
        return examples

    @property
    def _mask(self) -> int | None:
        return getattr(self.objective, "mask_token_id", None)

    # Data and loss

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """This process's batches, from the first step that is not done yet."""
        step, cursor = self._reading
        seed, embedded = self.settings.seed, self._embedded
        stream = BatchStream(self.source, self.objective, self.batching, seed, step, cursor, embedded)
        # The stream is read in order by one worker, which prepares batches while the model computes.
        workers = min(1, self.settings.workers)
        return DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available())

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and the denominator of its loss over all processes.

        Raises:
            TrainingDataError: a text cannot be used, or a `Source` of one's own ended; the steps before it are
                saved first.
        """
        self._part = 0
        try:
            samples = [next(epoch_iterator) for _ in range(num_batches)]
        except ValueError as error:
            self._save_the_steps_done()
            why = str(error).strip().splitlines()[-1]  # of a worker, its traceback is before it
            remedy = "Mend the data, and start from that checkpoint (model.start) or anew"
            raise TrainingDataError(self._stop_message(why, remedy)) from error
        except StopIteration:
            self._save_the_steps_done()
            remedy = "Let its `read` go on with the next epoch (a Source is endless), or train for fewer steps"
            raise TrainingDataError(self._stop_message("the training source has ended", remedy)) from None
        self.last_cursor = samples[-1].pop("cursor")
        total = torch.stack([batch.pop("count") for batch in samples]).sum().to(device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return samples, total.clamp(min=1)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This process's part of sum(weight CE) / (count over the whole step)."""
        loss = model(**inputs)["loss"] / num_items_in_batch
        # Gradients are averaged over the processes, but the loss is a sum over them.
        loss = loss * self.accelerator.num_processes
        return (loss, {"loss": loss}) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Float[Tensor, ""]:
        """Forward and backward pass of one micro-batch.

        Raises:
            NonFiniteLossError: the loss is not finite.
        """
        part, self._part = self._part, self._part + 1
        torch.manual_seed(dropout_seed(self.settings.seed, self.state.global_step, part, self.batching.rank))
        with SwiGLU() if self._keeps_activations() else nullcontext():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not bool(loss.isfinite()):
            raise NonFiniteLossError(self._stop_message(f"the loss is {loss.item()}"))
        return loss

    def _keeps_activations(self) -> bool:
        # Recomputed layers have their own context (`_enable_checkpointing`); a compiler chooses what it keeps.
        recomputed = any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        return not (recomputed or self.settings.compile or self._sharded)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = super()._clip_grad_norm(model)
        if norm is not None and not math.isfinite(float(norm)):
            raise NonFiniteLossError(self._stop_message(f"the norm of the gradient is {float(norm)}"))
        return norm

    # Optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser of the settings.

        Raises:
            ValueError: Muon on sharded weights, which are not matrices.
        """
        if self.optimizer is None:
            if self.settings.optimisation.optimizer == "muon" and (
                self.is_fsdp_enabled or self.is_deepspeed_enabled
            ):
                raise ValueError("Muon needs whole matrices, and FSDP and DeepSpeed split them; choose adamw")
            self.optimizer = build_optimizer(self.model if model is None else model, self.settings.optimisation)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up, then what the settings say (see `learning_rate`)."""
        if self.lr_scheduler is None:
            settings = self.settings.optimisation
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda step: learning_rate(step, num_training_steps, settings) / (settings.rate or 1.0),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # Running

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train to the last step; with True from the newest checkpoint, or from the start if there is none.

        `training_loss` of what is returned is the mean over the steps of this call; nan if none is left.
        Ctrl-C and SIGTERM end the training after the current step, with a checkpoint; a second one stops at once.

        Raises:
            KeyboardInterrupt: Ctrl-C.
            TrainingStoppedError: SIGTERM.
            ValueError: the checkpoint is damaged, belongs to a run with other settings or data, or has moments of
                other weights, or moments that are sharded where this run's are not (or the other way round); a new
                run would start in a directory that holds checkpoints, another process trains there, or an
                EarlyStoppingCallback has no evaluation losses.
            ValueError: a text of a dataset of known size (`CHECKED_TEXTS`) holds the mask token or an id that
                the model does not embed, or cannot be used.
            TrainingDataError: likewise, of a stream or a larger dataset, at the step that reads it.
            NonFiniteLossError: the loss, the gradient or a weight is not finite.
            CheckpointError: a checkpoint could not be written.
        """
        check_early_stopping(self.callback_handler.callbacks, self.settings)
        # Process 0 holds the lock of the directory for the whole run.
        with held(self.settings.output) if self.args.process_index == 0 else nullcontext():
            if self.args.process_index == 0:
                tidy(self.settings.output)
            return self._train(resume_from_checkpoint, **kwargs)

    def _train(self, resume_from_checkpoint: str | bool | None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            found = last_checkpoint(self.settings.output)
        else:
            found = Path(resume_from_checkpoint) if resume_from_checkpoint else None
            held = last_checkpoint(self.settings.output)
            if found is None and held is not None:
                raise ValueError(
                    f"{held} exists already; resume it with train(resume_from_checkpoint=True), or choose another "
                    "output than its directory"
                )
        if found is None:
            check_texts(self.source, self._mask, self._embedded)
        self._reading = (0, None) if found is None else self._resumed(found)
        if found is not None and self._reading[0] >= self.args.max_steps:
            logger.warning("%s is already the last step of this run", found)
            self._restore_ended(found)
            return TrainOutput(self.state.global_step, math.nan, {})
        if found is None and (decay := self.settings.optimisation.ema_decay) is not None:
            self.average = WeightAverage(self.model, decay)
        if self.settings.checkpointing:
            _enable_checkpointing(self.model, None if self.settings.compile else {"context_fn": SwiGLU.recomputed})
        if self.settings.compile:
            decoder_of(self.model).compile()
        with in_use(self.model, training=True), loss_forward(self.model), self.interruption.caught():
            output = super().train(resume_from_checkpoint=None if found is None else str(found), **kwargs)
        self.interruption.raise_if_stopped(self.state.global_step, self.args.max_steps, self.last_checkpoint)
        return output

    def _resumed(self, found: Path) -> tuple[int, Cursor]:
        record = read_run(found)
        self._check_engine(found, record["files"])
        if self.args.process_index == 0:
            check_files(found, record)
        if changed := self.settings.changes(record["settings"]):
            raise ValueError(
                f"{found} belongs to a run with other settings: {'; '.join(changed)}. Resume with the old "
                "settings, or choose another output"
            )
        known, now = record["data"], self.data_record
        other = differences(known, now) if known and now else []
        if other:
            raise ValueError(
                f"{found} belongs to a run with other training data: {'; '.join(other)}. Resume with the old data, "
                "or choose another output (model.start takes the weights of a checkpoint)"
            )
        self.stopwatch.before = record["seconds"]
        self._open_loss, self._evaluated_before = record["open_loss"], record["evaluation"]
        return record["step"], record["cursor"]

    def _check_engine(self, found: Path, files: Mapping[str, str]) -> None:
        """Raise unless the moments of a checkpoint are in the form that this run reads.

        Raises:
            ValueError: they are sharded by FSDP or DeepSpeed and this run has neither, or the other way round.
        """
        if files and (MOMENTS_FILE in files) == self._sharded:
            engine = "FSDP or DeepSpeed"
            saved, now = (f"without {engine}", "with") if self._sharded else (f"by {engine}", "without")
            raise ValueError(
                f"{found} was saved {saved}, and this run is {now} them, which does not read its moments; resume "
                "it as it was started, or choose another output (model.start takes the weights of a checkpoint)"
            )

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint of the run."""
        return last_checkpoint(self.settings.output)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the least evaluation loss of the run, with `keep_best`; None where there is none."""
        step = self.state.best_global_step
        return next((path for path in checkpoints(self.settings.output) if step and step_of(path) == step), None)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The evaluation loss under fixed masks, logged as eval_loss, which `on_evaluate` of callbacks is given.

        It is that of the averaged weights where there is an average (`averaged_weights`). Several processes divide
        the data, so that every one of them has to call it; the number is that of one process.

        Args:
            eval_dataset: as in the constructor, whose one is the default; the masks are the same for both.
            ignore_keys: none, as there are no outputs beside the loss.
            metric_key_prefix: in place of eval.

        Raises:
            ValueError: no evaluation data were given, they cannot be used, or `ignore_keys`.
        """
        if ignore_keys:
            raise ValueError(f"ignore_keys is {ignore_keys}, and evaluate computes the loss alone; leave it out")
        examples = self.examples if eval_dataset is None else self._examples(eval_dataset)
        if examples is None:
            raise ValueError("the evaluation loss needs eval_dataset, which was not given")
        with self.averaged_weights():
            loss = evaluation_loss(
                self.model,
                examples,
                self.objective.for_evaluation(self.settings.eval_samples),
                length=self.source.length,
                samples=self.settings.eval_samples,
                batch_size=self.settings.micro_batch_size,
                seed=EVALUATION_SEED,
                loss_of=self.wrapped_forward(),
                processes=self.args.world_size,
                rank=self.args.process_index,
                in_step=self._sharded,
            )
        metrics = {f"{metric_key_prefix}_loss": loss}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def wrapped_forward(self, *, for_probe: bool = False) -> Callable[..., Any] | None:
        """The forward of the wrapped network where FSDP or DeepSpeed gather its weights in it, else None."""
        if not (self._sharded and self.is_in_train):
            return None
        wrapped: Any = self.model_wrapped
        if not for_probe:
            return lambda **inputs: wrapped(**inputs)["loss"]
        nothing = torch.zeros(1, dtype=torch.long, device=self.args.device)
        # One output of weight 0: the wrapped forward is that of the loss.
        unused = {"outputs": nothing, "targets": nothing, "weights": nothing.float()}
        return lambda ids, **inputs: wrapped(input_ids=ids, **inputs, **unused)

    def probe(self) -> list[Any]:
        """The fixed sequences of the sink statistics."""
        return take(self.source, self.settings.probe_rows, self.settings.seed)

    def probe_canvases(self) -> Any:
        """The fixed canvases of the sink statistics."""
        return probe_batch(self.probe(), self.objective, self.source)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the values, with the throughput where they hold the loss."""
        # Trainer counts epochs from the start of the process; here an epoch is the share of the run.
        self.state.epoch = self.state.global_step / max(1, self.state.max_steps)
        if "loss" in logs:
            logs = {**logs, **self.stopwatch.read(self.state.global_step)}
        super().log(logs, start_time)


def dropout_seed(seed: int, step: int, part: int, rank: int) -> int:
    """The seed of torch's generators in one forward and backward pass, a pure function of its arguments.

    Args:
        seed: of the run.
        step: optimiser steps that are done.
        part: micro-batches of this step that are done.
        rank: of the process.
    """
    return int(random_numbers(seed, DROPOUT, step, part, rank).integers(2**63))


def _enable_checkpointing(model: Any, options: Mapping[str, Any] | None) -> None:
    """Recompute the layers' activations in the backward pass; `options` of `torch.utils.checkpoint`."""
    # transformers renamed it in 5.18.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(None if options is None else {"use_reentrant": False, **options})


def end_processes() -> None:
    """End what several processes of a training have in common, before they exit; their trainer is no longer held.

    Without it their threads may still run while Python exits, which then aborts, after a training that succeeded.
    Whatever holds the process group last waits for its threads. A DDP model holds the interpreter while it waits,
    and if a thread frees a tensor then, which needs the interpreter, neither ends (pytorch/pytorch#56297). The
    group's own object does not hold it. So models go first, also those that only refer to themselves.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def run_training(settings: TrainingSettings) -> Path | None:
    """Train by settings, resuming from the newest checkpoint if there is one; return the last checkpoint.

    Raises:
        ValueError: eval_steps without data.eval_path or data.eval_split; and what `MaskedDiffusionTrainer` raises.
    """
    check_evaluated(settings, evaluates=any(getattr(settings.data, name) is not None for name in EVALUATED))
    logging.getLogger("dlm_lens").setLevel(logging.INFO)
    dataset = read_dataset(settings.data)
    evaluation = read_evaluation(settings.data)
    with without_progress_bars():
        model = build_model(settings)
    trainer = MaskedDiffusionTrainer(model, settings, dataset, evaluation)
    trainer.train(resume_from_checkpoint=True)
    return trainer.last_checkpoint
