"""Logits of a run's network: of canvases, with guidance in one forward pass, and of the prefixes of AR decoding."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.head import head_logits
from dlm_lens.attention import SinkLayout, decoder_of, position_ids, predicting_position
from dlm_lens.attention.cache_argument import cache_argument, returned_cache
from dlm_lens.placement import execution_device, on_input_device
from dlm_lens.sampling.denoising_run import StepPlan


def run_forward(network: Any, canvas: Int[Tensor, "batch position"]) -> Any:
    """A pass without the head that keeps what a network keeps of a run's own passes; `forward` keeps its own."""
    return getattr(network, "run_forward", network.forward)(canvas)


class NonFiniteLogitsError(RuntimeError):
    """The model produced NaN or infinite logits, `where`; `partial` holds the steps that had finished."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} are not finite; check the model's weights, its dtype (bfloat16 or float32 rather than "
            "float16), and any hook that edits activations"
        )
        self.partial: Any = None


ROWS = 8
"""Positions whose logits are read at a time on a CPU, for proposals and losses: memory of this size is used again,
and new memory for all logits takes longer than the passes over them."""
ENTRIES = 2**26
"""Logits that are read at a time on another device: 512 MiB in float64, and noise and confidence take several such
tensors."""
KEPT = 31 * 2**20
"""Bytes of the block of `keep_freed_memory`."""

EditLogits = Callable[[Tensor], Tensor]
"""Replaces the logits of a step."""


@dataclass(frozen=True, eq=False)
class LogitsRequest:
    """The logits that are requested of a step, and how they are computed.

    Args:
        evaluated: where logits are needed.
        own_forward: run the model's own forward, with all its logits, instead of the decoder and as much of the
            head as is needed.
        grad: keep the graph of the model's own forward.
        edit: replaces the logits before the evaluated ones are taken.
    """

    evaluated: Bool[Tensor, "batch position"]
    own_forward: bool = False
    grad: bool = False
    edit: EditLogits | None = None

    @property
    def everywhere(self) -> bool:
        """Whether the logits of every position are computed."""
        return self.own_forward or self.edit is not None

    def graph(self) -> AbstractContextManager[Any]:
        """The context of the model's own forward, in which its graph is kept if that is requested."""
        return torch.enable_grad() if self.grad else nullcontext()

    def edited(self, logits: Float[Tensor, "*where d_vocab"]) -> Float[Tensor, "*where d_vocab"]:
        """The logits after the edit, if there is one."""
        return logits if self.edit is None else self.edit(logits)


class Network(Protocol):
    """What the run loop, hooks and reruns call of a run's network."""

    model: Any

    def enter(self, plan: StepPlan) -> None:
        """The step to which the next passes belong."""
        ...

    def of_step(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan, request: LogitsRequest
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of the evaluated positions of a step, in row-major order.

        Args:
            canvas: that the step sees.
            plan: of the step.
            request: which logits, and how.
        """
        ...

    def states(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "half needed d_model"]:
        """The inputs of the head for the `needed` positions."""
        ...

    def head(self, states: Float[Tensor, "half needed d_model"]) -> Float[Tensor, "needed d_vocab"]:
        """Logits of (some of) these states."""
        ...

    def forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """One pass without the head, as a step of the run makes it, of which nothing is kept."""
        ...


class StoredNetwork(Network, Protocol):
    """The network of a finished run whose steps depend on what the passes of earlier ones leave."""

    def missing_before(self, step: int) -> Sequence[int]:
        """The earlier steps, in order, whose passes this one depends on and that have not been kept."""
        ...

    def keep(self, step: int) -> bool:
        """Keep what the last pass, of this step, leaves for later ones; whether there was nothing yet."""
        ...

    def forget(self, step: int) -> None:
        """Drop what was kept of a step."""
        ...

    def encode_again(self) -> None:
        """Let the next pass run the encoder on all that is before it, with what listens to it."""
        ...


class CanvasLogits:
    """Logits of canvases for one run: the model, its padding mask, and guidance.

    Guidance (ML-GSAI/LLaDA, generate.py): u + (scale + 1) (c - u), where u comes from a canvas
    whose `fixed` positions (all that were not masked at the start) are masked. Both halves go through one
    forward, conditional first.

    With `shift` the output at i - 1 predicts position i; None takes `logit_shift` of the model's config.
    """

    def __init__(
        self,
        model: Any,
        attention_mask: Bool[Tensor, "batch position"],
        *,
        cfg_scale: float = 0.0,
        fixed: Bool[Tensor, "batch position"] | None = None,
        mask_token_id: int | None = None,
        shift: bool | None = None,
    ) -> None:
        self.model, self.cfg_scale, self.fixed, self.mask_token_id = model, cfg_scale, fixed, mask_token_id
        self.sinks = SinkLayout.of(model)
        shift = getattr(model.config, "logit_shift", False) if shift is None else shift
        self.source = predicting_position(attention_mask) if shift else None
        self.inputs = network_inputs(attention_mask.repeat(2 if cfg_scale else 1, 1))

    def enter(self, plan: StepPlan) -> None:
        """Every pass is over a whole canvas, whatever the step."""

    def of_step(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan, request: LogitsRequest
    ) -> Float[Tensor, "evaluated d_vocab"]:
        """Logits of the evaluated positions; an edit gets those of every position."""
        if not request.everywhere:
            return self.at(canvas, request.evaluated)
        with request.graph():
            logits = self.everywhere(canvas)
        return request.edited(logits)[request.evaluated]

    def everywhere(self, canvas: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_vocab"]:
        """Logits of every position, through the model's own forward."""
        inputs = on_input_device(self.model, {"input_ids": self._halves(canvas), **self.inputs_of(canvas)})
        logits = self._guided(self.model(**inputs).logits.to(canvas.device))
        source = self._source(canvas)
        return logits if source is None else logits[self._rows(canvas), source]

    def at(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "needed d_vocab"]:
        """Logits of the `needed` positions, in row-major order; the head runs on those rows only."""
        return self.head(self.states(canvas, needed))

    def states(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "half needed d_model"]:
        """The inputs of the head for the `needed` positions; with guidance twice, the conditional first."""
        # With a device map the last layer may compute elsewhere than the embedding, and the head elsewhere again.
        states = self.forward(canvas).last_hidden_state.to(canvas.device)
        states = states[:, self.sinks.canvas(states.shape[1])]
        halves, source = states.reshape(-1, *canvas.shape, states.shape[-1]), self._source(canvas)
        needed = needed[:, : canvas.shape[1]]
        if source is None:
            wanted: Tensor = halves[:, needed]
        else:
            wanted = halves[:, self._rows(canvas).expand_as(canvas)[needed], source[needed]]
        return wanted

    def head(self, states: Float[Tensor, "half needed d_model"]) -> Float[Tensor, "needed d_vocab"]:
        """Logits of (some of) these states."""
        return self._guided(logits_of(self.model, states.flatten(0, 1)))

    def forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """The pass of `at` without the head."""
        inputs = {"input_ids": self._halves(canvas), **self.inputs_of(canvas)}
        return decoder_of(self.model)(**on_input_device(self.model, inputs))

    def inputs_of(self, canvas: Int[Tensor, "batch position"]) -> dict[str, Any]:
        """Arguments of a pass over the canvas, beside the ids."""
        return self.inputs

    def _source(self, canvas: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"] | None:
        """Which output predicts each position; None: its own."""
        return None if self.source is None else self.source[:, : canvas.shape[1]]

    def _rows(self, canvas: Tensor) -> Int[Tensor, "batch 1"]:
        return torch.arange(len(canvas), device=canvas.device)[:, None]

    def _halves(self, canvas: Tensor) -> Tensor:
        if not self.cfg_scale:
            return canvas
        if self.fixed is None or self.mask_token_id is None:
            raise ValueError("guidance needs `fixed`, the positions that it masks, and `mask_token_id`")
        fixed = self.fixed[:, : canvas.shape[1]]
        return torch.cat([canvas, canvas.masked_fill(fixed, self.mask_token_id)])

    def _guided(self, logits: Tensor) -> Tensor:
        if not self.cfg_scale:
            return logits
        conditional, unconditional = logits.chunk(2)
        return unconditional + (self.cfg_scale + 1) * (conditional - unconditional)


class PrefixLogits:
    """Logits of the next position of AR decoding, from the prefix before it.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left; covers prompt and answer.
        use_cache: keep keys and values, so that a step computes its newest position only.
    """

    def __init__(self, model: Any, content: Bool[Tensor, "batch position"], *, use_cache: bool = False) -> None:
        self.model, self.content, self.use_cache = model, content, use_cache
        self.positions = position_ids(content)
        self._cache: Any = None
        self._cached = 0

    def enter(self, plan: StepPlan) -> None:
        """The step is known from its prefix."""

    def of_step(
        self, canvas: Int[Tensor, "batch position"], plan: StepPlan, request: LogitsRequest
    ) -> Float[Tensor, "batch d_vocab"]:
        """Logits of the next position of every row, which is the one evaluated; an edit gets the same."""
        stop = plan.prefix_length
        network = self.model if request.own_forward else decoder_of(self.model)
        inputs: dict[str, Any] = {"use_cache": self.use_cache, **cache_argument(network, self._cache)}
        if not bool(self.content.all()):
            inputs["attention_mask"] = self.content[:, :stop].long()
        span = slice(self._cached, stop)
        inputs |= {"input_ids": canvas[:, span], "position_ids": self.positions[:, span]}
        inputs = on_input_device(self.model, inputs)
        if request.own_forward:
            with request.graph():
                output = network(**inputs)
            logits: Tensor = output.logits[:, -1].detach()
        else:
            output = network(**inputs)
            logits = head_logits(self.model, output.last_hidden_state[:, -1])
        if self.use_cache:
            self._cache, self._cached = returned_cache(output), stop
        return request.edited(logits.to(canvas.device))

    def states(
        self, canvas: Int[Tensor, "batch prefix"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "1 needed d_model"]:
        """The input of the head for the position after the prefix, of every row that needs it."""
        last: Tensor = self.forward(canvas).last_hidden_state[:, -1]
        return last[needed.any(-1).to(last.device)][None].to(canvas.device)

    def head(self, states: Float[Tensor, "1 needed d_model"]) -> Float[Tensor, "needed d_vocab"]:
        """Logits of (some of) these states."""
        return logits_of(self.model, states[0])

    def forward(self, canvas: Int[Tensor, "batch prefix"]) -> Any:
        """A pass over a whole prefix without the head and without the cache."""
        inputs = {"input_ids": canvas, **network_inputs(self.content[:, : canvas.shape[1]])}
        return decoder_of(self.model)(**on_input_device(self.model, inputs))


def logits_of(model: Any, states: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_vocab"]:
    """`head_logits` of states on any device, there."""
    found = head_logits(model, states.to(execution_device(model.get_output_embeddings())))
    return found.to(states.device)


def most_likely(scores: Float[Tensor, "n d_vocab"]) -> Int[Tensor, "n"]:
    """The first column with the largest entry of every row: `argmax(-1)`, two to four times faster on a CPU."""
    return scores.argmax(-1) if scores.device.type != "cpu" else scores.detach().max(-1).indices


class Rows(Protocol):
    """Rows of numbers that are given a part at a time: a tensor, or what computes each part when it is read."""

    def split(self, split_size: int, /) -> Iterable[Tensor]:
        """The parts, of so many rows each but for the last."""
        ...


def by_rows(
    function: Callable[..., tuple[Tensor, ...]],
    logits: Float[Tensor, "n d_vocab"],
    *others: Rows | None,
    whole: bool = False,
) -> tuple[Tensor, ...]:
    """What a function of rows returns for all of them, called with `ROWS` at a time on a CPU (else by `ENTRIES`).

    Args:
        function: of logits and `others`; returns tensors of one entry per row.
        logits: cut into rows.
        others: likewise; None stays None.
        whole: call it once with all rows, as the authors' code does where sums are rounded to half precision: how
            torch adds them depends on the number of rows.
    """
    rows = max(1, ENTRIES // logits.shape[-1])
    if logits.device.type == "cpu":
        rows = ROWS
        keep_freed_memory()
    if whole:
        rows = max(1, len(logits))
    parts = zip(
        logits.split(rows), *(repeat(None) if one is None else one.split(rows) for one in others), strict=False
    )
    return tuple(torch.cat(found) for found in zip(*(function(*part) for part in parts), strict=True))


@cache
def keep_freed_memory() -> None:
    """Let glibc keep some 60 MiB of freed memory for the next tensors, from now on; others are not concerned.

    It gives memory back, and clears it when it is taken again, beyond twice the largest block of up to 32 MiB that
    was mapped and freed (mallopt(3), M_MMAP_THRESHOLD): such a block is mapped and freed here, once per process.
    """
    torch.empty(KEPT, dtype=torch.uint8)


def network_inputs(content: Bool[Tensor, "batch position"]) -> dict[str, Any]:
    """Arguments of a forward pass beside the ids; `content` is False at the padding on the left."""
    if bool(content.all()):
        return {"use_cache": False}
    return {"use_cache": False, "attention_mask": content.long(), "position_ids": position_ids(content)}


def check_finite(
    logits: Float[Tensor, "evaluated d_vocab"], evaluated: Bool[Tensor, "batch position"], step: int
) -> None:
    """Raise if a row has no finite largest logit.

    Raises:
        NonFiniteLogitsError: naming the step and the first such position.
    """
    bad = ~logits.amax(-1).isfinite()
    if bool(bad.any()):
        row, position = evaluated.nonzero()[bad.nonzero()[0, 0]].tolist()
        raise NonFiniteLogitsError(f"step {step}: the logits of row {row}, position {position}")
