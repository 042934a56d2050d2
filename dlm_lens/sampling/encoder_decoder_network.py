"""Logits of DiffusionGemma's canvases: prompt and finished canvases in the encoder's cache, self-conditioning."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.encoder_decoder import new_cache
from dlm_lens.attention import decoder_of, position_ids
from dlm_lens.attention.cache_argument import cache_argument
from dlm_lens.placement import input_device
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import LogitsRequest, logits_of, most_likely


class EncodedPrefix:
    """The encoder's keys and values of what is before a canvas, and the ids that they are of."""

    def __init__(self) -> None:
        self.cache: Any = new_cache()
        self.ids: Tensor | None = None

    def enter(self, prefix: Int[Tensor, "batch prefix"]) -> Any:
        """The cache for a canvas after these ids: emptied if it holds others, to be extended if it holds fewer."""
        known = self.ids
        if known is not None:
            shorter = known.shape[1] > prefix.shape[1]
            if shorter or not torch.equal(known, prefix[:, : known.shape[1]]):
                self.cache = new_cache()
        self.ids = prefix
        return self.cache


class EncoderDecoderLogits:
    """Logits of a step's canvas, at the span of its plan, for one run.

    All before the canvas goes through the encoder once: the prompt, and every finished canvas in a pass of its own.
    The canvas goes through the decoder, which sees the encoder's keys and values and the whole canvas, and is
    conditioned on the logits of the step before, divided by that step's temperature; the first step of a canvas on
    none. An edit of what is before the canvas empties the cache.

    The keys of a step are all positions up to the canvas's end.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
        prompt_length: positions before the first canvas.
        length: of a canvas.
        temperature: of a step.
        conditions_on: what the decoder is conditioned on: the "logits"; their "top" token alone, with probability
            1 (the token bottleneck of 2606.20560); or "none".
        counts_padding: positions count the padding, as transformers' `generate` does (a quirk).
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        *,
        prompt_length: int,
        length: int,
        temperature: Callable[[StepPlan], float],
        conditions_on: str = "logits",
        counts_padding: bool = False,
    ) -> None:
        self.model, self.content, self.temperature = model, content, temperature
        self.prompt_length, self.length, self.conditions_on = prompt_length, length, conditions_on
        counted = torch.ones_like(content) if counts_padding else content
        self.positions = position_ids(counted)
        self.conditioning: Float[Tensor, "batch canvas d_vocab"] | None = None
        self._prefix, self._clean = EncodedPrefix(), EncodedPrefix()
        self._plan: StepPlan | None = None
        self._block = -1

    def enter(self, plan: StepPlan) -> None:
        """The step of the next passes; the first one of a canvas is not conditioned."""
        if plan.block != self._block:
            self.conditioning, self._block = None, plan.block
        self._plan = plan

    def of_step(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan, request: LogitsRequest
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of the evaluated positions of the canvas, on which the next step is conditioned.

        An edit gets those of the whole canvas, NaN elsewhere.
        """
        start, stop = plan.span
        with request.graph():
            logits = self._run(self.model, canvas, self._prefix).logits.to(canvas.device).detach()
        if request.edit is not None:
            whole = logits.new_full((*canvas.shape, logits.shape[-1]), torch.nan)
            whole[:, start:stop] = logits
            logits = request.edit(whole)[:, start:stop]
        self.condition(logits)
        found: Tensor = logits[request.evaluated[:, start:stop]]
        return found

    def condition(self, logits: Float[Tensor, "batch canvas d_vocab"]) -> None:
        """Condition the next step on these logits of the present one."""
        assert self._plan is not None
        if self.conditions_on == "none":
            return
        if self.conditions_on == "top":
            best = most_likely(logits)[..., None]
            logits = torch.full_like(logits, torch.finfo(torch.float16).min).scatter(-1, best, 0.0)
        self.conditioning = (logits / self.temperature(self._plan)).to(self.model.dtype)

    def states(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "1 needed d_model"]:
        """The inputs of the head for the `needed` positions of the canvas."""
        states = self._run(decoder_of(self.model), canvas, self._prefix).last_hidden_state.to(canvas.device)
        start, stop = self._span
        wanted: Tensor = states[needed[:, start:stop]][None]
        return wanted

    def head(self, states: Float[Tensor, "1 needed d_model"]) -> Float[Tensor, "needed d_vocab"]:
        """Logits of (some of) these states."""
        return logits_of(self.model, states[0])

    def forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """A pass of the step without the head, with an encoder's cache of such passes, which no hook has edited."""
        return self._run(decoder_of(self.model), canvas, self._clean)

    def run_forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """A pass of the step without the head, with the encoder's cache of the run's own passes."""
        return self._run(decoder_of(self.model), canvas, self._prefix)

    @property
    def _span(self) -> tuple[int, int]:
        assert self._plan is not None
        return self._plan.span

    def _run(
        self, network: Callable[..., Any], canvas: Int[Tensor, "batch position"], prefix: EncodedPrefix
    ) -> Any:
        start, stop = self._span
        model, cache = decoder_of(self.model), prefix.enter(canvas[:, :start])
        device = input_device(self.model)
        canvas, whole, positions = (part.to(device) for part in (canvas, self.content, self.positions))
        content = whole[:, :stop]
        # The prompt in one pass and every finished canvas in one of its own, as when each was finished. What is
        # kept for later steps has no graph.
        with torch.no_grad():
            for end in range(self.prompt_length, start + 1, self.length):
                model.encode(canvas, whole, positions, cache, end)
        given: dict[str, Any] = {} if bool(content.all()) else {"attention_mask": content}
        return network(
            input_ids=canvas[:, :stop],
            canvas_start=start,
            position_ids=positions[:, :stop],
            **cache_argument(network, cache),
            self_conditioning_logits=None if self.conditioning is None else self.conditioning.to(device),
            **given,
        )


class StoredConditioning(EncoderDecoderLogits):
    """The network of a finished run: a step is conditioned on a pass over the canvas of the step before.

    That pass leaves the states before the head, which are kept on the CPU.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
        plans: of the run's steps, or of those that a part of a run holds.
        block_numbers: the number of each among the steps of its canvas.
        **options: of `EncoderDecoderLogits`.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        plans: Sequence[StepPlan],
        block_numbers: Sequence[int],
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self._plans, self._block_numbers = plans, block_numbers
        self._places = {plan.index: place for place, plan in enumerate(plans)}
        self._states: dict[int, Tensor] = {}
        self._last: Tensor | None = None

    def missing_before(self, step: int) -> list[int]:
        """The steps of the same canvas from the last one on whose states are kept.

        Raises:
            ValueError: a part of a run lacks one of them.
        """
        missing: list[int] = []
        before = self._before(step)
        while before is not None and before not in self._states:
            missing.insert(0, before)
            before = self._before(before)
        return missing

    def _before(self, step: int) -> int | None:
        """The step whose logits this one is conditioned on, before it in the same canvas; None: on none."""
        if self.conditions_on == "none" or not self._block_numbers[step]:
            return None
        number = self._plans[step].index
        if number - 1 not in self._places:
            raise ValueError(
                f"step {number} is conditioned on the logits of step {number - 1}, which this part of the run does "
                "not hold; give the whole run"
            )
        return self._places[number - 1]

    def keep(self, step: int) -> bool:
        """Keep the states before the head of the last pass, unless there are some of this step."""
        if step in self._states or self._last is None:
            return False
        self._states[step], self._last = self._last.cpu(), None
        return True

    def take(self, other: "StoredConditioning", times: int) -> None:
        """Keep the states that another network has kept, whose rows are here `times` times one after the other."""
        self._states |= {step: states.repeat(times, 1, 1) for step, states in other._states.items()}

    def forget(self, step: int) -> None:
        """Drop the states of a step."""
        self._states.pop(step, None)

    def encode_again(self) -> None:
        """Empty the encoder's caches."""
        self._prefix, self._clean = EncodedPrefix(), EncodedPrefix()

    def _run(
        self, network: Callable[..., Any], canvas: Int[Tensor, "batch position"], prefix: EncodedPrefix
    ) -> Any:
        output = super()._run(network, canvas, prefix)
        self._last = output.last_hidden_state.detach()
        return output

    def enter(self, plan: StepPlan) -> None:
        """The step of the next passes, conditioned on the one before in the same canvas."""
        super().enter(plan)
        self.conditioning = None
        before = self._before(self._places[plan.index])
        if before is not None:
            states = self._states[before].to(self.content.device)
            self._plan = self._plans[before]
            self.condition(logits_of(self.model, states))
            self._plan = plan
