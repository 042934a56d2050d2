"""Callbacks of the trainer: checkpoints, throughput, evaluation, sink statistics, signals, progress bar."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from dlm_lens.training.checkpoints import TrainingStoppedError
from dlm_lens.training.sink_probe import sink_statistics

CHECK_CLOCK_EVERY = 10
"""Steps between looks at the clock where several processes have to agree."""


class SaveClock(TrainerCallback):
    """Ask for a checkpoint every so many minutes, every so many steps, and at the end."""

    def __init__(self, minutes: float, steps: int) -> None:
        self.seconds, self.steps, self.last = 60 * minutes, steps, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save if it is time; the first process decides for all."""
        due = state.global_step >= state.max_steps or (self.steps and state.global_step % self.steps == 0)
        if not due and (args.world_size == 1 or state.global_step % CHECK_CLOCK_EVERY == 0):
            due = first_decides(time.monotonic() - self.last >= self.seconds, args)
        if due:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock starts again."""
        self.last = time.monotonic()


def first_decides(flag: bool, args: Any) -> bool:
    """The first process's flag, in every process."""
    if args.world_size == 1:
        return flag
    held = torch.tensor(float(flag), device=args.device)
    torch.distributed.broadcast(held, 0)
    return bool(held)


@contextmanager
def _log_of_its_own(control: Any) -> Iterator[None]:
    """Any log entry takes back the request for the step's own; put it back."""
    wanted = control.should_log
    try:
        yield
    finally:
        control.should_log = wanted


class Stopwatch(TrainerCallback):
    """Tokens per second since the last look, and the seconds of the run over all its sittings."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.before = tokens, 0.0
        self.began = self.last = time.monotonic()
        self.step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The watch starts."""
        self.began = self.last = time.monotonic()
        self.step = state.global_step

    def read(self, step: int) -> dict[str, float]:
        """Throughput since the last call, over all processes."""
        now = time.monotonic()
        rate = (step - self.step) * self.tokens / max(now - self.last, 1e-9)
        self.last, self.step = now, step
        return {"tokens_per_second": rate, "tokens": float(step * self.tokens)}

    def seconds(self) -> float:
        """Seconds of training, earlier sittings included."""
        return self.before + time.monotonic() - self.began


class Evaluation(TrainerCallback):
    """Log the evaluation loss every so many steps and at the end."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer, self.steps = trainer, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate if it is time."""
        if state.global_step % self.steps == 0 or state.global_step == state.max_steps:
            with _log_of_its_own(control):
                self.trainer.evaluate()


class SinkMetrics(TrainerCallback):
    """Log sink statistics of the fixed probe batch before the first step, every so many, and at the end."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer, self.steps = trainer, steps
        self.batch: Any = None
        self.before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The state at the start."""
        self._log()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure if it is time."""
        if state.global_step % self.steps == 0 or state.global_step == state.max_steps:
            with _log_of_its_own(control):
                self._log()

    def _log(self) -> None:
        if self.batch is None:
            self.batch = self.trainer.probed()
        found = sink_statistics(self.trainer.model, self.batch, self.trainer.through_wrapper(probed=True))
        self.trainer.log(found.metrics(self.before))
        self.before = found


logger = logging.getLogger(__name__)


class Interruption(TrainerCallback):
    """Finishes the step, asks for a checkpoint, and ends the training; a second signal ends it at once.

    SIGTERM is what a cluster sends before it takes the machine. Of several processes the first decides for all,
    every ten steps. Signals reach the main thread only: in another one nothing is caught.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch both signals inside the block."""
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

    def tell(self, step: int, steps: int, checkpoint: Path | None) -> None:
        """Raise behind a training that was ended before its last step.

        Raises:
            KeyboardInterrupt: by Ctrl-C.
            TrainingStoppedError: by SIGTERM.
        """
        if self.number is None or step >= steps:
            return
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise TrainingStoppedError(f"SIGTERM at step {step} of {steps}; {checkpoint} is whole, resume from it")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop, if a signal came."""
        if args.world_size > 1 and state.global_step % CHECK_CLOCK_EVERY:
            return
        if first_decides(self.number is not None, args):
            control.should_save = control.should_training_stop = True

    def _note(self, number: int, frame: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
        name = signal.Signals(number).name
        logger.warning("%s: finishing the step and saving; once more to stop without", name)


SHOWN = {"loss": "{:.3f}", "eval_loss": "{:.3f}", "tokens_per_second": "{:,.0f}", "sink/learned_share": "{:.2f}"}
NAMES = {"tokens_per_second": "tokens/s", "sink/learned_share": "sink"}


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """No bars of transformers for the files of a checkpoint, which would tear the run's own bar."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


class ProgressBar(TrainerCallback):
    """Steps, loss, tokens per second and the sink's share; shown by the first process."""

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self.held: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The bar appears."""
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", mininterval=1.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One step."""
        if self.bar is not None:
            self.bar.update()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """The newest values."""
        for name, form in SHOWN.items():
            if logs and name in logs:
                self.held[NAMES.get(name, name)] = form.format(logs[name])
        if self.bar is not None:
            self.bar.set_postfix(self.held, refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The bar stays as it is."""
        if self.bar is not None:
            self.bar.close()
