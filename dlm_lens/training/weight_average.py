"""`WeightAverage`: an exponential moving average of the trained weights (`optimisation.ema_decay`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback

RAW = "raw_weights"
"""The directory inside a checkpoint with the trained weights themselves, as a model that `dlm_lens.load` opens."""


class WeightAverage:
    """An exponential moving average of the trained weights of a model, by the rule of MDLM's and SEDD's code.

    It begins as the weights w_0. After optimiser step n = 1, 2, ...

        a_n = d_n a_(n-1) + (1 - d_n) w_n,    d_n = min(decay, (1 + n) / (10 + n)),

    so that the first steps do not leave it at the initial weights. Weights that are not trained are not averaged,
    and a weight with two names (a tied head) has one average.

    Args:
        model: with the weights w_0, in float32.
        decay: d_n of late steps, between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.values = [weight.detach().clone() for weight in self.weights]
        self._in_model = False

    def update(self, step: int) -> None:
        """Take the weights after a step, counted from 1, into the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        get_ema_multi_avg_fn(decay)(self.values, [weight.detach() for weight in self.weights], step)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """In this block the model holds the average in place of the trained weights."""
        if self._in_model:
            yield
            return
        self._exchange()
        self._in_model = True
        try:
            yield
        finally:
            self._in_model = False
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # One weight after the other, so that no third set of them is in memory.
        for weight, value in zip(self.weights, self.values, strict=True):
            held = weight.clone()
            weight.copy_(value)
            value.copy_(held)


class Averaging(TrainerCallback):
    """Takes the weights after every optimiser step into the trainer's average."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the average; the step is counted after this event."""
        self.trainer.average.update(state.global_step + 1)
