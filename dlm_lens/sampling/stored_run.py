"""`StoredCanvases` and `StoredRun`: the network of a finished run, step by step on the canvases that it saw."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.adapters.head import head_logits
from dlm_lens.attention import Hook
from dlm_lens.placement import input_device
from dlm_lens.sampling.denoising import ALGORITHMS
from dlm_lens.sampling.denoising_run import DenoisingRun
from dlm_lens.sampling.network import CanvasLogits, network_inputs
from dlm_lens.sampling.observers import HookRunner
from dlm_lens.sampling.samplers.base import Sampler, StepPlan
from dlm_lens.sampling.settings import check_model
from dlm_lens.sampling.token_text import tokenizer_of


class StoredCanvases:
    """The canvases of a finished run, and the network's forward pass over the canvas of a step.

    Args:
        model: with hook points, the run's.
        run: from `denoise`, or a recording's; without a tokenizer of its own it takes the model's.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: a model without token embeddings, or a run with token ids that the model does not embed.
    """

    def __init__(self, model: Any, run: DenoisingRun) -> None:
        if not isinstance(run, DenoisingRun):
            raise TypeError(
                f"the run is a {type(run).__name__}; give the DenoisingRun that dlm_lens.denoise returned"
            )
        if not hasattr(model, "get_input_embeddings"):
            raise ValueError(f"{type(model).__name__} has no hook points; load it with dlm_lens.load")
        embedded, highest = model.get_input_embeddings().weight.shape[0], int(run.canvases.max())
        if highest >= embedded:
            raise ValueError(
                f"the run has token id {highest}, but the model embeds {embedded}; is it another model's?"
            )
        self.model, self.run = model, replace(run, tokenizer=tokenizer_of(run, model))
        self.causal = run.settings.get("sampler") == "causal"
        self.device = input_device(model)
        self.content = run.attention_mask.to(self.device)
        self.sampler = None if self.causal else _sampler_like(run)

    def length(self, step: int) -> int:
        """Canvas positions that the network sees at a step: all, or in an AR run the written prefix."""
        run = self.run
        if not self.causal:
            return int(run.canvases.shape[-1])
        return int((run.attention_mask & ~run.masked[step]).any(0).nonzero().amax()) + 1

    def plan(self, step: int) -> StepPlan:
        """The plan that the run had for a step."""
        run, span = self.run, self.run.spans[step]
        if self.causal:
            # An observer of an AR step reads the length of the prefix as span[0] + index.
            span = (self.length(step) - step, span[1])
        return StepPlan(step, run.steps, run.blocks[step], span, run.steps - step)

    def forward(self, step: int) -> Any:
        """The network without its head on the canvas of a step; in a guided run the conditional half alone."""
        canvas = self.run.canvases[step, :, : self.length(step)].to(self.device)
        content = self._network_content[:, : canvas.shape[1]]
        return self.model.get_decoder()(input_ids=canvas, **network_inputs(content))

    @property
    def _network_content(self) -> Bool[Tensor, "batch position"]:
        """What the network takes for content: a reference's quirk includes the padding."""
        unpadded = self.sampler is not None and self.sampler.unpadded
        return torch.ones_like(self.content) if unpadded else self.content


class StoredRun(StoredCanvases):
    """Runs a model again over the canvases of a run, with its guidance, padding and logit shift.

    The canvases stay fixed. A pass goes over all rows of a step; an AR step sees the prefix and predicts one
    position.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, or a recording's; without a tokenizer of its own it takes the model's.

    Raises:
        TypeError: the run is not a `DenoisingRun`.
        ValueError: a run of another model, or of a sampler whose logits cannot be computed again.
    """

    def __init__(self, model: Any, run: DenoisingRun) -> None:
        if isinstance(run, DenoisingRun):
            check_model(model)
        super().__init__(model, run)
        name = str(run.settings.get("sampler"))
        if name not in ("causal", *ALGORITHMS):
            raise ValueError(f"a run of the sampler {name!r} cannot be run again; take one of dlm_lens.denoise")
        own = family_of(model.config.model_type).sampler_of(model.config)
        if name != own:
            raise ValueError(
                f"the run has the sampler {name!r} and the model samples with {own!r}: is it another model's?"
            )
        self._network = None if self.causal else self._canvas_logits(name)

    @property
    def halves(self) -> int:
        """How often the network sees every row: twice with guidance."""
        return 2 if self.sampler is not None and self.sampler.cfg_scale else 1

    def predicted(self, step: int) -> Bool[Tensor, "batch position"]:
        """The positions that the step's logits are about: every masked one, in an AR run the next one.

        A row that has ended has none.
        """
        if not self.causal:
            return self.run.masked[step].to(self.device)
        predicted = torch.zeros_like(self.content)
        predicted[:, self.length(step)] = (self.run.row_steps > step).to(self.device)
        return predicted

    def states(self, step: int) -> Float[Tensor, "half predicted d_model"]:
        """A forward pass over the canvas of a step: what the head reads for the positions predicted, row by row."""
        canvas = self.run.canvases[step].to(self.device)
        if self._network is not None:
            return self._network.states(canvas, self.predicted(step))
        last: Tensor = self._prefix(canvas[:, : self.length(step)]).last_hidden_state[:, -1]
        return last[None].to(self.device)

    def logits(self, states: Float[Tensor, "half predicted d_model"]) -> Float[Tensor, "predicted d_vocab"]:
        """Logits of (some of) the states, guided as in the run."""
        if self._network is not None:
            return self._network.head(states)
        logits: Tensor = head_logits(self.model, states[0])
        return logits.to(self.device)

    def runner(self, hooks: Sequence[Hook]) -> HookRunner:
        """What runs `hooks` over these steps: `with runner: enter(runner, step); states(step)`."""
        forward = self._prefix if self._network is None else self._network.forward
        runner = HookRunner(self.model, hooks, forward)
        runner.start(self.sampler, self.content)
        runner.answer = self.run.masked[0].to(self.device)
        return runner

    def enter(self, runner: HookRunner, step: int) -> None:
        """Tell the hooks of a runner which step comes."""
        canvas, masked = self.run.canvases[step], self.run.masked[step]
        runner.step(self.plan(step), canvas.to(self.device), masked.to(self.device))

    def _prefix(self, canvas: Int[Tensor, "batch prefix"]) -> Any:
        return self.model.get_decoder()(input_ids=canvas, **network_inputs(self.content[:, : canvas.shape[1]]))

    def _canvas_logits(self, name: str) -> CanvasLogits:
        run, sampler = self.run, self.sampler
        scale = 0.0 if sampler is None else sampler.cfg_scale
        fixed = ~run.masked[0]
        if ALGORITHMS[name][1].hides_prompt:
            fixed = (torch.arange(fixed.shape[1]) < run.prompt_length).expand_as(fixed)
        mask_id = self.model.config.mask_token_id
        return CanvasLogits(
            self.model,
            self._network_content,
            cfg_scale=scale,
            fixed=fixed.to(self.device),
            mask_token_id=mask_id,
        )


def _sampler_like(run: DenoisingRun) -> Sampler:
    """A sampler with what observers read of it: the run's guidance, and whether the network sees the padding."""
    sampler, settings = Sampler(), run.settings
    name = str(settings.get("sampler"))
    default = getattr(ALGORITHMS[name][0], "cfg_scale", 0.0) if name in ALGORITHMS else 0.0
    sampler.cfg_scale = float(settings.get("cfg_scale") or 0.0) if "cfg_scale" in settings else default
    quirk = settings.get("reference_quirks") and settings.get("unpadded_guidance")
    sampler.unpadded = bool(sampler.cfg_scale and quirk)
    return sampler
