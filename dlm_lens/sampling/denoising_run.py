"""`DenoisingRun`: what a denoising run did, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.arguments import checked_arguments, whole
from dlm_lens.attention import padding_before
from dlm_lens.display import Preview, ShowsItself
from dlm_lens.sampling.algorithm_registry import sampler_class
from dlm_lens.sampling.emerging_text import parts_of_texts, preview
from dlm_lens.sampling.moved_tokens import followed, places_of, room_of_canvases
from dlm_lens.sampling.run_parts import RunPart
from dlm_lens.sampling.run_rows import (
    open_and_planned,
    prompt_numbers,
    steps_of_rows,
    until_ends,
)
from dlm_lens.sampling.step_attention import StepAttention, attention_of


@dataclass(frozen=True)
class StepPlan:
    """The place of a step in its run, known before the step; Python numbers only.

    Args:
        index: the step, from 0.
        total: steps of the whole run; at most, where the number of steps depends on the tokens.
        block: index of the block that is decoded.
        span: that block, as (start, stop) canvas positions. Where blocks are counted from the text, rows of unequal
            prompts have blocks at unequal positions: the union over the rows, from the first start to the last end;
            `Sampler.reach` has each row's own block.
        remaining: steps left in the block, this one included.
        seen: how many positions of the canvas the network sees, where that is a prefix of it: in AR decoding what
            is written, in block diffusion everything up to the block's end. None: all of it.
        computed: with an approximate cache, the span of the canvas whose queries, keys and values the step
            computes; the keys and values of the other positions are those of an earlier step. None: all that it
            sees.
    """

    index: int
    total: int
    block: int
    span: tuple[int, int]
    remaining: int
    seen: int | None = None
    computed: tuple[int, int] | None = None

    @property
    def prefix_length(self) -> int:
        """`seen` in AR decoding: the position after the prefix is written."""
        assert self.seen is not None
        return self.seen


class Proposal(NamedTuple):
    """x0 and its confidence; the canvas's own token and -inf where nothing is proposed."""

    tokens: Int[Tensor, "batch position"]
    confidence: Float[Tensor, "batch position"]


@dataclass(frozen=True, eq=False)
class DenoisingRun(ShowsItself):
    """A finished run; all tensors are on the CPU.

    A step is one forward pass, counted from the most open canvas; `canvases[t]` is the input of step t and
    `canvases[-1]` the result. A position is *open* while it is not decided: in a model with a mask token it holds
    [MASK] (in I-DLM also a draft), in a model of uniform noise a random token (in GIDD either), and in an AR
    baseline, whose steps are decoded tokens, a placeholder. `open` and `masked` are one tensor, so that code for
    masked models reads all others; `canvases == mask_token_id` says the same for the first kind alone.

    Args:
        canvases: token ids x_t.
        masked: which positions of each canvas are open; see `open`.
        proposals: x0, the token proposed for every position that was evaluated; elsewhere the canvas's own.
        confidence: the number that the sampler ranked by; -inf where a position was not eligible.
        unmasked: which positions each step decided: they were open at it, and took over the proposal.
        attention_mask: True for content, False for the padding on the left of shorter prompts.
        prompt_length: positions before the answer, padding included.
        spans: the block decoded at each step, as (start, stop) canvas positions; with blocks counted from the text,
            the union over the rows (`StepPlan.span`), `in_block` has those of every row.
        blocks: its index at each step.
        settings: the name of the sampler, the settings that were given or that the model's `sampler_defaults` name,
            and the seeds; others have the sampler's defaults.
        eos_token_ids: ids that end a text.
        tokenizer: decodes `texts`; None if the model has none.
        rows_ran: `row_steps`, where the canvases do not show them: in joined runs of different lengths (a recording
            of several batches), in parts, and where a row needed fewer steps than others; None to read them there.
        revised: which decided positions each step rewrote with another token, or opened again; in samplers that
            edit (LLaDA2.1, 2.2) or renoise (uniform noise). None, which becomes all False: no step did.
        computed: with an approximate cache, the span (start, stop) of positions that each step computed; None for a
            step that computed all. Empty: every step computed all that it saw.
        model: name of the model, as it was loaded; empty if it is not known.
        planned: steps that were planned, which may be more than ran (`StepPlan.total`); None if that is not known.
        joined_at: in joined runs, the position at which each row's own canvas begins, after what shorter prompts
            were padded with when they were joined; None: every row's canvas is this one.
        rows_planned: `planned` of each row, where joined rows differ in it or in `settings["steps"]`, which has one
            for each row where they differ in it.
        part: of a part of a run (`Recording.select(step=)`), its place in the whole run; None: these are all steps.
        rows: of some rows of a run (`Recording.select(batch=)`), their numbers in the whole; None: these are all.
        origins: where the token or mask at each position of the next canvas was on the canvas of each step, in
            samplers that insert and delete masks (DreamOn, LLaDA2.2); -1 for an inserted mask of LLaDA2.2, and for
            room, which holds neither. None: nothing moves.

    Raises:
        ValueError: the shapes contradict each other.
    """

    canvases: Int[Tensor, "step_plus_one batch position"]
    masked: Bool[Tensor, "step_plus_one batch position"]
    proposals: Int[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    unmasked: Bool[Tensor, "step batch position"]
    attention_mask: Bool[Tensor, "batch position"]
    prompt_length: int
    spans: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]
    settings: Mapping[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = field(default=None, repr=False)
    rows_ran: tuple[int, ...] | None = None
    revised: Bool[Tensor, "step batch position"] = None  # type: ignore[assignment]  # filled in by __post_init__
    computed: tuple[tuple[int, int] | None, ...] = ()
    model: str = ""
    planned: int | None = None
    joined_at: tuple[int, ...] | None = None
    rows_planned: tuple[int, ...] | None = None
    part: RunPart | None = field(default=None, repr=False)
    rows: tuple[int, ...] | None = field(default=None, repr=False)
    origins: Int[Tensor, "step batch position"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        steps, batch, positions = self.unmasked.shape
        given: Any = self.revised
        if given is None:
            none = torch.zeros((), dtype=torch.bool).expand(steps, batch, positions)  # takes no memory
            object.__setattr__(self, "revised", none)
        expected = {
            "canvases": (steps + 1, batch, positions),
            "masked": (steps + 1, batch, positions),
            "proposals": (steps, batch, positions),
            "confidence": (steps, batch, positions),
            "revised": (steps, batch, positions),
            "attention_mask": (batch, positions),
            **({} if self.origins is None else {"origins": (steps, batch, positions)}),
        }
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(f"DenoisingRun.{name} has shape {tuple(getattr(self, name).shape)}, not {shape}")
        for name in ("rows_ran", "joined_at", "rows_planned"):
            if (of_rows := getattr(self, name)) is not None and len(of_rows) != batch:
                raise ValueError(f"DenoisingRun.{name} has {len(of_rows)} entries for {batch} rows")
        if self.computed and len(self.computed) != steps:
            raise ValueError(f"DenoisingRun.computed has {len(self.computed)} entries for {steps} steps")
        if not len(self.spans) == len(self.blocks) == steps:
            raise ValueError(f"{len(self.spans)} spans and {len(self.blocks)} blocks for {steps} steps")

    def __repr__(self) -> str:
        steps, batch, positions = self.unmasked.shape
        return f"DenoisingRun(steps={steps}, batch={batch}, positions={positions}, settings={dict(self.settings)})"

    def _preview(self) -> Preview:
        return preview(self)

    @classmethod
    def of_canvases(
        cls,
        canvases: Int[Tensor, "step batch position"],
        masked: Bool[Tensor, "step batch position"],
        attention_mask: Bool[Tensor, "batch position"],
        *,
        prompt_length: int,
        settings: Mapping[str, Any],
        spans: Sequence[tuple[int, int]] | None = None,
        blocks: Sequence[int] | None = None,
        **others: Any,
    ) -> "DenoisingRun":
        """A run whose steps only read canvases: nothing is proposed, nothing is unmasked.

        Forward passes that no sampler made are described by it (`record_forward`, likelihoods, probes that change
        canvases).

        Args:
            canvases: the canvas of each step; the last one is the result too.
            masked: which positions of each are masked.
            attention_mask: True for content.
            prompt_length: positions before the answer.
            settings: where the canvases are from, `{"sampler": ...}`.
            spans: of each step; None for the answer, or the whole canvas if there is none.
            blocks: of each step; None for 0.
            **others: `eos_token_ids`, `tokenizer`, `model`.
        """
        steps, _, positions = canvases.shape
        span = (prompt_length % positions, positions)
        return cls(
            canvases=torch.cat([canvases, canvases[-1:]]),
            masked=torch.cat([masked, masked[-1:]]),
            proposals=canvases,
            confidence=torch.full(canvases.shape, -torch.inf, dtype=torch.float32),
            unmasked=torch.zeros_like(masked),
            attention_mask=attention_mask,
            prompt_length=prompt_length,
            spans=(span,) * steps if spans is None else tuple(spans),
            blocks=(0,) * steps if blocks is None else tuple(blocks),
            settings=dict(settings),
            **others,
        )

    @property
    def logits(self) -> NoReturn:
        """None are kept, and the error says how to get them."""
        raise AttributeError(
            "a run keeps no logits: denoise(..., on_logits=f) calls f(step, canvas, logits) at every step; of a "
            "finished run dlm_lens.sampling.StoredRun computes them again, and dlm_lens.probes.replay compares them"
        )

    @property
    def autoregressive(self) -> bool:
        """Whether this is AR decoding: a step sees the prefix that is written and decides the next position."""
        return sampler_class(self.settings).autoregressive

    def predicts_next(self, step: int, config: Any) -> bool:
        """Whether at a step the output at i - 1 predicts position i, instead of its own.

        Args:
            step: of this run.
            config: of its model, which may have a `logit_shift`.
        """
        if sampler_class(self.settings).predicts_next(self.spans[step]):
            return True
        return self.autoregressive or bool(getattr(config, "logit_shift", False))

    @cached_property
    def attention(self) -> StepAttention:
        """How its steps attend: their blocks, and what of a canvas they see."""
        beside = bool(self.computed)
        return attention_of(self.settings, self.attention_mask, self.prompt_length, beside_encoder=beside)

    @property
    def seen_content(self) -> Bool[Tensor, "step batch position"]:
        """The content that the network sees at each step: all, or a part of it.

        Masks after a window of them are not seen (WeDLM), nor is the room in which masks may be inserted (DreamOn).
        """
        stops = torch.tensor([stop for _, stop in self.spans], dtype=torch.long, device="cpu")
        room = sampler_class(self.settings).room_of(self, slice(None))
        attention = self.attention if room is None else replace(self.attention, room=room)
        return attention.seen_content(self.attention_mask, self.masked[:-1], stops[:, None, None])

    @cached_property
    def in_block(self) -> Bool[Tensor, "step batch position"]:
        """The positions of every row's block at each step."""
        steps = zip(self.masked, self.spans, strict=False)
        found = [self.attention.in_block(self.attention_mask, masked, span) for masked, span in steps]
        return torch.stack(found).expand(self.unmasked.shape) if found else self.unmasked

    @property
    def in_span(self) -> Bool[Tensor, "step 1 position"] | None:
        """The positions that each step computed, where an approximate cache kept the others; None without one."""
        if not self.computed:
            return None
        where = _until(self.unmasked.shape[-1])
        spans = torch.tensor([span or (0, len(where)) for span in self.computed], device="cpu")
        return ((where >= spans[:, :1]) & (where < spans[:, 1:]))[:, None]

    @property
    def open(self) -> Bool[Tensor, "step_plus_one batch position"]:
        """Which positions of each canvas are not decided yet; `masked` is its other name, of the same tensor.

        It is what the sampler says (`Sampler.open_positions`), and no function of the canvas where open positions
        hold random tokens.
        """
        return self.masked

    @cached_property
    def uniform_noise(self) -> bool:
        """Whether open positions hold random tokens, in models without a mask token."""
        return holds_random_tokens(self.canvases, self.masked)

    @property
    def steps(self) -> int:
        """How many steps ran, T."""
        return self.unmasked.shape[0]

    @property
    def answer(self) -> Bool[Tensor, "batch position"]:
        """The positions that were open at the start of the run, also in a part that lacks its first steps.

        Masks after a row's own last block (`in_own_blocks`) are none of it: no step decides them. Of recorded
        likelihoods, the continuation: its masks are drawn, so that no canvas need mask all of it.
        """
        if self.part is not None:
            return self.part.answer
        if self.settings.get("sampler") == "likelihood":
            return (_until(self.masked.shape[-1]) >= self.prompt_length).expand(self.masked.shape[1:])
        return self.masked[0] & self.in_own_blocks

    @property
    def in_own_blocks(self) -> Bool[Tensor, "batch position"]:
        """All positions; where rows end before the canvas (LLaDA2), those to the end of each row's last block."""
        return self.attention.within_own_blocks(torch.ones_like(self.attention_mask))

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The number of each step: 0, 1, ..., in a part of a run those of the whole run."""
        return tuple(range(self.steps)) if self.part is None else self.part.numbers

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """The number of each row: 0, 1, ..., in some rows of a run those of the whole run."""
        return tuple(range(len(self.tokens))) if self.rows is None else self.rows

    @property
    def block_numbers(self) -> tuple[int, ...]:
        """The number of each step among those of its block, in a part of a run those of the whole run."""
        if self.part is not None:
            return self.part.block_numbers
        first: dict[int, int] = {}
        return tuple(step - first.setdefault(block, step) for step, block in enumerate(self.blocks))

    @property
    def tokens(self) -> Int[Tensor, "batch position"]:
        """The final canvas."""
        return self.canvases[-1]

    @property
    def padding(self) -> Int[Tensor, "batch"]:
        """How many positions of each row are padding before its first token.

        Tables, figures and reports count positions from that token; `position + padding` is the canvas position,
        which indexes tensors (tables have it as `canvas_position`).
        """
        return padding_before(self.attention_mask)

    @cached_property
    def row_steps(self) -> Int[Tensor, "batch"]:
        """After how many steps each row was over; after them nothing of a row is defined.

        `rows_ran` where it is given. Else all of its batch, or fewer where its text ended before others': an AR row
        ends with the step that decides its first end of text. In samplers that end rows (`Sampler.ends_rows`), such
        as block diffusion, a row whose text has ended keeps open positions; its last step is the one that decided
        or rewrote something last. In other samplers an end of text is a token like others. Where the number of
        steps depends on the tokens (thresholds, windows), a row is over when nothing of it is left to decide, as it
        is alone; a step at which it waits for others in the middle of a run counts.
        """
        return steps_of_rows(self)

    @property
    def row_prompts(self) -> Int[Tensor, "batch"]:
        """The number of each row's prompt; several seeds of one prompt have the same (`prompt_numbers`)."""
        return prompt_numbers([self])[0]

    @property
    def steps_in_all(self) -> Int[Tensor, "batch"]:
        """`row_steps`; in a part of a run those of the whole run, of which the part has some."""
        if self.part is None:
            return self.row_steps
        most = max(self.planned or 0, *(number + 1 for number in self.part.numbers), 0)
        known = self.part.rows_ran or (most,) * len(self.tokens)
        return torch.tensor(known, dtype=torch.long, device="cpu")

    @cached_property
    def running(self) -> Bool[Tensor, "step batch"]:
        """Whether each row is not over yet at each step, see `row_steps`."""
        return _until(self.steps)[:, None] < self.row_steps

    @checked_arguments(count=whole(least=0))
    def first_steps(self, count: int) -> "DenoisingRun":
        """The first `count` steps, or all that there are; the canvas after them becomes the result.

        Raises:
            ValueError: a count that is negative, or no whole number.
        """
        if count >= self.steps:
            return self
        per_step = ("proposals", "confidence", "unmasked", "revised", "spans", "blocks", "computed")
        per_canvas = ("canvases", "masked")
        parts: dict[str, Any] = {name: getattr(self, name)[:count] for name in per_step}
        parts |= {name: getattr(self, name)[: count + 1] for name in per_canvas}
        ran = tuple(min(count, steps) for steps in self.row_steps.tolist())
        parts["origins"] = None if self.origins is None else self.origins[:count]
        numbers = {name: getattr(self.part, name)[:count] for name in ("numbers", "block_numbers") if self.part}
        return replace(self, **parts, rows_ran=ran, part=self.part and replace(self.part, **numbers))

    @property
    def counts(self) -> Int[Tensor, "step batch"]:
        """How many positions of each row each step unmasked."""
        return self.unmasked.sum(-1)

    @property
    def masks_left(self) -> Int[Tensor, "batch"]:
        """Open positions of the final canvas: left by an early end, an intervention, a quirk or a longer row.

        Room in which no mask was inserted (DreamOn) is none of them.
        """
        room = room_of_canvases(self)
        return (self.masked[-1] if room is None else self.masked[-1] & ~room[-1]).sum(-1)

    @cached_property
    def token_places(self) -> Int[Tensor, "step_plus_one batch position"]:
        """Where the token of each position of the result was on each canvas (`origins`); -1 for nowhere."""
        return places_of(self)

    @cached_property
    def by_token(self) -> "DenoisingRun":
        """The run itself; where tokens move (`origins`), what each step did to the tokens of the result.

        Position j is then that of the result at every step: open before the step that decided its token, wherever
        the token was.
        """
        return followed(self)

    @cached_property
    def step_of(self) -> Int[Tensor, "batch position"]:
        """The (last) step that decided a position; -1 for the prompt and for positions that no step decided.

        Of a token that was moved, the step that decided the token (`by_token`), as in `last_written`.
        """
        return self._last_step(self.by_token.unmasked)

    @cached_property
    def last_written(self) -> Int[Tensor, "batch position"]:
        """The last step that decided or revised a position, which proposed its final token; -1 if none did.

        `step_of` where no step revised it afterwards. A position that is open on the final canvas has no final
        token; its step is the one that opened it.
        """
        return self._last_step(self.by_token.unmasked | self.by_token.revised)

    def _last_step(self, chosen: Bool[Tensor, "step batch position"]) -> Int[Tensor, "batch position"]:
        if not self.steps:  # a run that failed at its first step
            return torch.full(self.tokens.shape, -1, device="cpu")
        return (chosen * (1 + _until(self.steps))[:, None, None]).amax(0) - 1

    @property
    def progress(self) -> Float[Tensor, "step_plus_one batch"]:
        """Share of the answer (the positions open at the start) that is decided, per canvas and row.

        It falls where a sampler opens decided positions again. In AR decoding the answer of a row ends with its
        text (`row_steps`), also where others of its batch go on. Where masks are inserted and deleted (DreamOn) it
        is what the text has between the prompts' parts on that canvas. In other runs it is the whole answer that
        was planned, also where the canvas ends before, as the run has ended with its text.
        """
        answer = self.answer & until_ends(self) if self.autoregressive else self.answer
        opened, planned = open_and_planned(self, answer)
        return 1 - opened.float() / planned.clamp(min=1)

    @property
    def texts(self) -> list[str]:
        """Prompt and answer as text, up to the first end-of-text in the answer; DreamOn: all of it."""
        return [self._decode(torch.cat(parts)) for parts in parts_of_texts(self)]

    @property
    def answers(self) -> list[str]:
        """The answer alone (the text after the prompt; DreamOn: in the gap), up to the first end-of-text."""
        return [self._decode(answer) for _, answer, _ in parts_of_texts(self)]

    def _decode(self, ids: Tensor) -> str:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; read .tokens, or set model.tokenizer before denoising")
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def holds_random_tokens(
    tokens: Int[Tensor, "*axes position"] | None, masked: Bool[Tensor, "*axes position"] | None
) -> bool:
    """Whether open positions hold different tokens, as in models of uniform noise, and not one mask or placeholder.

    Args:
        tokens: of canvases; None if unknown.
        masked: which positions are open; None if unknown.
    """
    if tokens is None or masked is None:
        return False
    held = tokens[masked]
    return bool((held != held[:1]).any())


def _until(count: int) -> Int[Tensor, "count"]:
    """0, 1, ..., count - 1 on the CPU, where a run is whatever torch's default device."""
    return torch.arange(count, device="cpu")
