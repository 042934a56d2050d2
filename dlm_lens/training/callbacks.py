"""Callbacks of the trainer: checkpoints, throughput, sink statistics, signals, progress bar."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from dlm_lens.training.checkpoints import TrainingStoppedError
from dlm_lens.training.sink_probe import sink_statistics

CHECK_CLOCK_EVERY = 10
"""Steps between decisions that all processes must share."""


class SaveClock(TrainerCallback):
    """Requests a checkpoint every `minutes`, every `steps` (0: never), and at the last step."""

    def __init__(self, minutes: float, steps: int) -> None:
        self.seconds, self.steps, self.last = 60 * minutes, steps, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint where one is due; the first process decides for all."""
        due = state.global_step >= state.max_steps or (self.steps and state.global_step % self.steps == 0)
        if not due and (args.world_size == 1 or state.global_step % CHECK_CLOCK_EVERY == 0):
            due = first_decides(time.monotonic() - self.last >= self.seconds, args)
        if due:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restart the clock."""
        self.last = time.monotonic()


def first_decides(flag: bool, args: Any) -> bool:
    """The flag of process 0, in every process."""
    if args.world_size == 1:
        return flag
    shared = torch.tensor(float(flag), device=args.device)
    torch.distributed.broadcast(shared, 0)
    return bool(shared)


@contextmanager
def _keeping_log_request(control: Any) -> Iterator[None]:
    """Restore the request for the step's log entry, which any other log entry clears."""
    requested = control.should_log
    try:
        yield
    finally:
        control.should_log = requested


class Stopwatch(TrainerCallback):
    """Tokens per second since the last reading, and the training time of the run over all its starts."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.before = tokens, 0.0
        self.began = self.last = time.monotonic()
        self.step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the stopwatch."""
        self.began = self.last = time.monotonic()
        self.step = state.global_step

    def read(self, step: int) -> dict[str, float]:
        """Throughput since the last call, over all processes."""
        now = time.monotonic()
        rate = (step - self.step) * self.tokens / max(now - self.last, 1e-9)
        self.last, self.step = now, step
        return {"tokens_per_second": rate, "tokens": float(step * self.tokens)}

    def seconds(self) -> float:
        """Seconds of training, over all starts of the run."""
        return self.before + time.monotonic() - self.began


class SinkMetrics(TrainerCallback):
    """Logs sink statistics of the probe batch before the first step, every `steps` steps, and at the last one."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer, self.steps = trainer, steps
        self.batch: Any = None
        self.before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure before the first step; after a resume for the next change alone, since the log has its entry."""
        logged = any("sink/main_share" in entry for entry in state.log_history)
        self._measure(log=not logged)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where it is due."""
        if state.global_step % self.steps == 0 or state.global_step == state.max_steps:
            with _keeping_log_request(control):
                self._measure()

    def _measure(self, *, log: bool = True) -> None:
        if self.batch is None:
            self.batch = self.trainer.probe_canvases()
        with self.trainer.averaged_weights():
            found = sink_statistics(self.trainer.model, self.batch, self.trainer.wrapped_forward(for_probe=True))
        if log:
            self.trainer.log(found.metrics(self.before))
        self.before = found


logger = logging.getLogger(__name__)


class Interruption(TrainerCallback):
    """On SIGINT or SIGTERM finishes the step, saves a checkpoint and stops; a second signal stops at once.

    Clusters send SIGTERM before they reclaim a machine. With several processes the first one decides for all, every
    `CHECK_CLOCK_EVERY` steps. Python delivers signals to the main thread only; in another thread none is caught.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch both signals in this block."""
        self.number = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def raise_if_stopped(self, step: int, steps: int, checkpoint: Path | None) -> None:
        """Raise where a signal ended the training before its last step.

        Raises:
            KeyboardInterrupt: the signal was Ctrl-C.
            TrainingStoppedError: the signal was SIGTERM.
        """
        if self.number is None or step >= steps:
            return
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise TrainingStoppedError(
            f"SIGTERM at step {step} of {steps}; resume from {checkpoint}, which is complete"
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint and the end of the training where a signal arrived."""
        if args.world_size > 1 and state.global_step % CHECK_CLOCK_EVERY:
            return
        if first_decides(self.number is not None, args):
            control.should_save = control.should_training_stop = True

    def _note(self, number: int, frame: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        name = signal.Signals(number).name
        logger.warning("%s: finishing the step and saving a checkpoint; send it again to stop at once", name)


FORMATS = {"loss": "{:.3f}", "eval_loss": "{:.3f}", "tokens_per_second": "{:,.0f}", "sink/learned_share": "{:.2f}"}
LABELS = {"tokens_per_second": "tokens/s", "sink/learned_share": "sink"}


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars for checkpoint files, which would break the line of the run's own bar."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class ProgressBar(TrainerCallback):
    """A bar on standard error with steps, loss, tokens per second and the sinks' share; in process 0 only."""

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self.values: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            seconds = float(os.environ.get("TQDM_MININTERVAL", "1"))  # tqdm's own variable
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", mininterval=seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance by one step."""
        if self.bar is not None:
            self.bar.update()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Show the newest values."""
        for name, form in FORMATS.items():
            if logs and name in logs:
                self.values[LABELS.get(name, name)] = form.format(logs[name])
        if self.bar is not None:
            self.bar.set_postfix(self.values, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


def name_failing_reporters(callbacks: Iterable[Any]) -> None:
    """Let the callbacks of `report_to` raise one sentence when they cannot begin, as wandb without a login.

    Args:
        callbacks: of a Trainer; those without a `setup` stay as they are.
    """
    for callback in callbacks:
        if hasattr(callback, "setup"):
            callback.setup = partial(_begin_reporter, type(callback).__name__, callback.setup)


def _begin_reporter(name: str, setup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the `setup` of a callback.

    Raises:
        ValueError: naming the callback, where it fails.
    """
    try:
        return setup(*args, **kwargs)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"report_to: {name} could not begin ({said}); set it up, or leave it out of report_to"
        ) from error
