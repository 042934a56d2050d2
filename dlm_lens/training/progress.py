"""A progress bar for training, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

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
