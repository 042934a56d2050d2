"""`Interruption`: Ctrl-C and SIGTERM end a training behind a checkpoint instead of in the middle of a step."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from dlm_lens.training.checkpoints import TrainingStoppedError
from dlm_lens.training.monitoring import CHECK_CLOCK_EVERY, first_decides

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
