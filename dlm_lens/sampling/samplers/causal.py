"""Autoregressive decoding for the baselines, with the result type of a denoising run."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.adapters.head import head_logits
from dlm_lens.attention import position_ids
from dlm_lens.sampling.denoising_run import DenoisingRun, History
from dlm_lens.sampling.loop import OnLogits
from dlm_lens.sampling.network import NonFiniteLogitsError, check_finite
from dlm_lens.sampling.noise import RowNoise, add_gumbel
from dlm_lens.sampling.observers import Resumption, RunObserver, RunObservers, same_shape
from dlm_lens.sampling.samplers.base import Proposal, StepPlan
from dlm_lens.sampling.settings import not_negative


@dataclass(frozen=True)
class CausalSettings:
    """Settings of AR decoding: greedy at temperature 0, else sampling from softmax(logits / temperature).

    `use_cache=False` recomputes the whole prefix at every step, so that whoever watches attention sees every
    query's row and not only the newest.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    temperature: float = 0.0
    use_cache: bool = True

    def __post_init__(self) -> None:
        if self.gen_length < 1:
            raise ValueError(f"gen_length is {self.gen_length}; an AR model writes at least 1 token")
        not_negative(self, "temperature", zero="greedy")


def decode(
    model: Any,
    prompt: Int[Tensor, "batch prompt"],
    padding: Bool[Tensor, "batch position"],
    settings: CausalSettings,
    noise: RowNoise,
    history: History,
    *,
    placeholder: int,
    on_logits: OnLogits | None = None,
    progress: bool = False,
    observers: Sequence[RunObserver] = (),
    resume: Resumption | None = None,
) -> DenoisingRun:
    """Decode token by token; a row that has ended goes on with its end token until every row has ended.

    `padding` covers prompt and answer, `placeholder` stands where nothing is written yet. `observers`
    are told of every step; the canvas of a prefix is not theirs to edit. `resume` goes on behind the steps of an
    unfinished run.

    Raises:
        NonFiniteLogitsError: its `partial` is the `DenoisingRun` of the steps before.
    """
    width, length = prompt.shape[1], settings.gen_length
    canvas = torch.cat([prompt, prompt.new_full((len(prompt), length), placeholder)], 1)
    ends = _end_ids(model.config, prompt.device)
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    guests = RunObservers(observers, [noise])
    prefix = _Prefix(model, padding, settings.use_cache, guests)
    masked = torch.arange(width + length, device=prompt.device).expand_as(canvas) >= width
    if resume is not None:
        resume.enter(history)
        noise.restore(resume.state.own)
        canvas, ended = resume.canvas(history), resume.state.own["ended"].to(prompt.device)
        masked = masked & (torch.arange(width + length, device=prompt.device) >= width + len(resume.steps))

    def not_written(canvas: Tensor) -> Tensor:
        return masked

    guests.start(None, history)
    begun = len(history.plans)
    steps = range(begun, begun if resume is not None and resume.state.over else length)
    for step in tqdm(steps, desc="decoding", unit="token", disable=not progress):
        here, plan = width + step, StepPlan(step, length, 0, (width, width + length), length - step)
        guests.step(plan, canvas, not_written)
        history.start(canvas, masked)
        evaluated = torch.zeros_like(masked).index_fill(1, torch.tensor([here], device=canvas.device), True)
        logits = _checked(prefix.next_logits(canvas, here), on_logits, canvas, evaluated, plan, history)
        token, confidence = _choose(logits, settings.temperature, noise, evaluated)
        if len(ends):
            token = torch.where(ended, ends[0], token)
            ended = ended | torch.isin(token, ends)
        proposal = Proposal(
            canvas.masked_scatter(evaluated, token),
            torch.full(canvas.shape, -torch.inf, device=canvas.device).masked_scatter(evaluated, confidence),
        )
        canvas, masked = proposal.tokens, masked & ~evaluated
        history.finish(plan, proposal, evaluated)
        over = bool(ended.all())
        guests.finish(plan, canvas, proposal, evaluated, over=over, ended=ended)
        if over:
            break
    guests.stop()
    history.start(canvas, masked)
    return _shortened(history, width)


class _Prefix:
    """Forward passes over what is written so far, with or without a cache; observers may want the whole forward."""

    def __init__(
        self, model: Any, padding: Bool[Tensor, "batch position"], use_cache: bool, guests: RunObservers
    ) -> None:
        self.model, self.padding, self.use_cache = model, padding, use_cache
        self.own_forward, self.grad = guests.needs_full_logits, guests.grad
        self.positions = position_ids(padding)
        self.cache: Any = None
        self.seen = 0

    def next_logits(self, canvas: Int[Tensor, "batch position"], stop: int) -> Float[Tensor, "batch d_vocab"]:
        """Logits for position `stop`, from the positions before it."""
        inputs: dict[str, Any] = {"use_cache": self.use_cache, "past_key_values": self.cache}
        if not bool(self.padding.all()):
            inputs["attention_mask"] = self.padding[:, :stop].long()
        span = slice(self.seen, stop)
        inputs |= {"input_ids": canvas[:, span], "position_ids": self.positions[:, span]}
        if self.own_forward:
            with torch.enable_grad() if self.grad else nullcontext():
                output = self.model(**inputs)
            self._keep(output.past_key_values, stop)
            last: Tensor = output.logits[:, -1].detach().to(canvas.device)
            return last
        states = self.model.get_decoder()(**inputs)
        self._keep(states.past_key_values, stop)
        logits: Tensor = head_logits(self.model, states.last_hidden_state[:, -1])
        return logits.to(canvas.device)

    def _keep(self, cache: Any, stop: int) -> None:
        if self.use_cache:
            self.cache, self.seen = cache, stop


def _checked(
    logits: Float[Tensor, "batch d_vocab"],
    on_logits: OnLogits | None,
    canvas: Int[Tensor, "batch position"],
    evaluated: Bool[Tensor, "batch position"],
    plan: StepPlan,
    history: History,
) -> Float[Tensor, "batch d_vocab"]:
    """The logits as the caller wants them, known to be finite."""
    if on_logits is not None:
        replaced = on_logits(plan.index, canvas, logits)
        logits = logits if replaced is None else same_shape("on_logits", logits, replaced)
    try:
        check_finite(logits, evaluated, plan.index)
    except NonFiniteLogitsError as error:
        error.partial = history.result()
        raise
    return logits


def _choose(
    logits: Float[Tensor, "batch d_vocab"], temperature: float, noise: RowNoise, evaluated: Bool[Tensor, "batch p"]
) -> tuple[Int[Tensor, "batch"], Float[Tensor, "batch"]]:
    scores = logits
    if temperature > 0:
        scores = add_gumbel(logits, noise.columns(evaluated, evaluated, logits.shape[-1]), temperature)
    token = scores.argmax(-1)
    return token, logits.float().softmax(-1).gather(-1, token[:, None]).squeeze(-1)


def _end_ids(config: Any, device: torch.device) -> Int[Tensor, "ends"]:
    eos = config.eos_token_id
    return torch.tensor([eos] if isinstance(eos, int) else list(eos or []), dtype=torch.long, device=device)


def _shortened(history: History, width: int) -> DenoisingRun:
    """Cut the canvases behind the last token that any row wrote."""
    stop = width + len(history.plans)
    history.canvases = [canvas[:, :stop] for canvas in history.canvases]
    history.masked = [masked[:, :stop] for masked in history.masked]
    history.proposals = [Proposal(p.tokens[:, :stop], p.confidence[:, :stop]) for p in history.proposals]
    history.unmasked = [unmasked[:, :stop] for unmasked in history.unmasked]
    history.plans = [StepPlan(p.index, len(history.plans), 0, (width, stop), p.remaining) for p in history.plans]
    history.attention_mask = history.attention_mask[:, :stop]
    return history.result()
