"""The base class of samplers. Its parts are modules: `propose` computes x0 and a confidence, `select` chooses.

The positions that `select` chooses are unmasked at the step. In samplers that edit, `revise` chooses decided
positions that take over the proposal too.

A position is *open* while it is not decided. `Sampler.begin` makes the first canvas and `Sampler.open_positions`
says what is open: where there is a mask token, the positions that hold it; in AR decoding, those after the prefix;
in models of uniform noise, whose open positions hold random tokens, what the sampler has noted. Parameters called
`masked` are the open positions, in every sampler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm_lens.attention import BlockLayout, Context, attends_observed_first, has_causal_context, padding_before
from dlm_lens.sampling.algorithm_registry import algorithms
from dlm_lens.sampling.cached_network import CachedLogits
from dlm_lens.sampling.denoising_run import DenoisingRun, Proposal, StepPlan
from dlm_lens.sampling.network import CanvasLogits, Network, StoredNetwork, network_inputs
from dlm_lens.sampling.step_attention import StepAttention


def one_block(steps: int, prompt_length: int, positions: int, gen_length: int) -> list[StepPlan]:
    """The plans of samplers without blocks: the answer, or with `gen_length` 0 the canvas, is one."""
    span = (prompt_length if gen_length else 0, positions)
    return [StepPlan(index, steps, 0, span, steps - index) for index in range(steps)]


class Revise(nn.Module):
    """Choose the editable positions whose proposal is another token with a confidence above the threshold.

    Args:
        threshold: of the confidence; by default above every confidence.
    """

    def __init__(self, threshold: float = float("inf")) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        tokens: Int[Tensor, "batch position"],
        confidence: Float[Tensor, "batch position"],
        editable: Bool[Tensor, "batch position"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the decided positions that this step rewrites."""
        return editable & (confidence > self.threshold) & (tokens != canvas)


@dataclass(frozen=True)
class FirstCanvas:
    """What a run begins with.

    Args:
        tokens: the prompts, padded on the left, and the answer after them.
        content: False where there is padding.
        masked: the open positions.
        prompt_length: positions before the answer.
    """

    tokens: Int[Tensor, "batch position"]
    content: Bool[Tensor, "batch position"]
    masked: Bool[Tensor, "batch position"]
    prompt_length: int


class Sampler(nn.Module):
    """One sampling algorithm: a schedule and the modules `propose`, `select` and `revise`.

    At every step the loop evaluates the positions that are `eligible` or `editable` and calls the sampler, which
    proposes tokens for them, selects `count` eligible ones of each row, and revises editable ones. nnsight and
    TransformerLens hook the children. A subclass per algorithm, in a file of its own in `samplers/`, which ends
    with `ALGORITHM = Algorithm(...)`.

    Attributes:
        autoregressive: a step sees the prefix that is written, and decides the next position (AR decoding).
        grows: a step sees the canvas up to the end of its block (block diffusion), instead of all of it.
        adaptive: how many steps run depends on the tokens: a step of the plans at which nothing is eligible is left
            out, without a forward pass, and the others are counted through.
        from_text: blocks of block causal attention are counted from each row's first token, so that the prompt's
            rest shares its block with the first masks; otherwise from the first position of the answer.
        context: how positions before the block that is decoded attend; `BlockLayout.context`.
        closes_rows: the later blocks of a row whose text has ended are closed, which is no decision of the row.
        decodes_in_order: the answer is decoded in blocks of `block_length` positions, and what is decided stays.
        resizes: steps insert and delete masks, for which the canvas has room (`room_of`).
        moves_tokens: steps move decided tokens to other positions (`origins`).
        whole_blocks: the last block of the answer is decoded whole, also where `gen_length` ends inside it.
        any_block_length: the authors decode with other blocks than those of the training too.
        has_quirks: whether `reference_quirks=True` means something: the authors' code differs from the sampler.
        hides_prompt: guidance masks all of the prompt's positions, instead of those that were not masked at first.
        cfg_scale: classifier-free guidance of the run; 0 for none.
        guidance_keeps: tokens that guidance leaves visible in its second half.
        unpadded: the network sees padding as content (a quirk of MMaDA's code).
        own_canvas: in passes over joined runs, each row's positions without what joining padded; None for all.
        block_length: of the blocks of block causal attention, in samplers that grow.
        training_block_length: of the blocks of the training, where the sampler itself decodes none; None for none.
        attention: how the steps of the run attend, `attention_of` its settings.
        windowed: attention is causal, but for the window of `attention.sees_window`.
        cache: the approximate cache of the network; None for none.
        use_cache: the network keeps keys and values of the prefix.
        proposes_all: propose also where nothing would be unmasked; the loop sets it (`RunObserver.proposes_all`).
        withholds: settings that keep tokens out of the proposals.
        progress: what a progress bar calls the run and its steps.
        sigma: the noise level of the step that was entered, for networks that may be given it; None for others.
        mask_id: of [MASK]; None before the run begins, and for models without a mask token.
        fillable: where [MASK] is open; None before the run begins.
        origins: `DenoisingRun.origins` of the last step, in samplers that move tokens; None in others.
    """

    propose: nn.Module
    select: nn.Module
    revise: nn.Module
    autoregressive: ClassVar[bool] = False
    grows: ClassVar[bool] = False
    adaptive: bool = False
    from_text: ClassVar[bool] = False
    context: ClassVar[Context] = "blocks"
    closes_rows: ClassVar[bool] = False
    decodes_in_order: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    moves_tokens: ClassVar[bool] = False
    whole_blocks: ClassVar[bool] = False
    any_block_length: ClassVar[bool] = False
    has_quirks: ClassVar[bool] = True
    hides_prompt: ClassVar[bool] = False
    training_block_length: ClassVar[int | None] = None
    windowed: ClassVar[bool] = False
    withholds: ClassVar[tuple[str, ...]] = ()
    progress: ClassVar[tuple[str, str]] = ("denoising", "step")
    cfg_scale: float = 0.0
    guidance_keeps: tuple[int, ...] = ()
    unpadded: bool = False
    own_canvas: Bool[Tensor, "batch position"] | None = None
    cache: str | None = None
    use_cache: bool = False
    block_length: int = 0
    attention: StepAttention = StepAttention()
    proposes_all: bool = False
    sigma: float | None = None
    mask_id: int | None = None
    fillable: Bool[Tensor, "batch position"] | None = None
    origins: Int[Tensor, "batch position"] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.revise = Revise()

    @classmethod
    def for_rerun(cls, settings: Mapping[str, Any]) -> Self:
        """A sampler of this class for passes over the canvases of a finished run with these settings.

        It has the run's network; it plans, proposes and selects nothing.
        """
        sampler = cls.__new__(cls)
        nn.Module.__init__(sampler)
        sampler.cfg_scale = float(settings.get("cfg_scale") or 0.0)
        quirk = settings.get("reference_quirks") and settings.get("unpadded_guidance")
        sampler.unpadded = bool(sampler.cfg_scale and quirk)
        sampler.guidance_keeps = tuple(settings.get("cfg_keep_tokens") or ())
        return sampler

    @classmethod
    def block_layout_of(
        cls, block_length: int, content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> BlockLayout:
        """Where the blocks of block causal attention are in every row, in samplers that grow."""
        first = padding_before(content)
        first = first if cls.from_text else torch.full_like(first, prompt_length)
        return BlockLayout(block_length, first, cls.context)

    @property
    def block_layout(self) -> BlockLayout:
        """Where the blocks of block causal attention are in every row of the run, in samplers that grow."""
        assert self.attention.blocks is not None
        return self.attention.blocks

    @classmethod
    def attention_of(
        cls, settings: Mapping[str, Any], content: Bool[Tensor, "batch position"], prompt_length: int
    ) -> StepAttention:
        """How the steps of a run with these settings attend: over all of the canvas, or block by block."""
        if not cls.grows:
            return StepAttention()
        length = int(settings.get("block_length") or settings["gen_length"])
        return StepAttention(blocks=cls.block_layout_of(length, content, prompt_length))

    @classmethod
    def predicts_next(cls, span: tuple[int, int]) -> bool:
        """Whether a step with this span reads the output at i - 1 for position i, though the model has no shift."""
        return False

    @classmethod
    def ends_rows(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a row may end with its text, before others of its batch, and keep open positions."""
        return cls.finished is not Sampler.finished

    @classmethod
    def rows_wait(cls, settings: Mapping[str, Any]) -> bool:
        """Whether how many steps a block takes depends on its tokens, so that a row waits for others."""
        return cls.adaptive or cls.grows

    @classmethod
    def continues(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a run whose prompt ends with finished blocks decodes the next as the run that decoded these."""
        return False

    @property
    def halves(self) -> int:
        """How often the network sees every row: twice with guidance, the conditional rows first."""
        return 2 if self.cfg_scale else 1

    def begin(
        self, model: Any, prompts: Int[Tensor, "batch prompt"], fillable: Bool[Tensor, "batch position"]
    ) -> Int[Tensor, "batch position"]:
        """Begin a run: the first canvas, the prompts and an answer of mask tokens.

        A sampler of uniform noise overrides it with random tokens, and notes that they are open. Another first
        canvas is planted by `on_canvas` at step 0, which changes tokens and not what such a sampler has noted. A
        run that is resumed begins too, before `restore`.

        Args:
            model: from `dlm_lens.load`.
            prompts: padded on the left.
            fillable: positions where [MASK] is to be filled in; with `reference_quirks` padding too.
        """
        self.mask_id, self.fillable = getattr(model.config, "mask_token_id", None), fillable
        answer = prompts.new_full((len(prompts), fillable.shape[1] - prompts.shape[1]), self.mask_id or 0)
        return torch.cat([prompts, answer], 1)

    def open_positions(self, canvas: Int[Tensor, "batch position"], step: int) -> Bool[Tensor, "batch position"]:
        """Which positions of a canvas are open, that is, not decided yet.

        By default those that hold [MASK] and may be filled in. A sampler whose openness is no token id keeps it
        from `begin` on, updates it in `forward`, and stores it with `state`.

        Args:
            canvas: what a step sees, edits included, or what the last one left.
            step: steps that are finished.
        """
        if self.mask_id is None or self.fillable is None:
            return torch.zeros_like(canvas, dtype=torch.bool)
        return (canvas == self.mask_id) & self.fillable

    def network(self, model: Any, first: FirstCanvas) -> Network:
        """The network of a run: the logits that the sampler reads.

        Args:
            model: from `dlm_lens.load`.
            first: what the run begins with.
        """
        return CanvasLogits(model, self.network_content(first.content), **self.guidance(model, first))

    def network_content(self, content: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """What the network takes for content: a reference's quirk includes the padding."""
        if not self.unpadded:
            return content
        return torch.ones_like(content) if self.own_canvas is None else self.own_canvas

    def guidance(self, model: Any, first: FirstCanvas) -> dict[str, Any]:
        """The arguments of `CanvasLogits` for guidance: its second half masks what the first canvas has decided."""
        tokens = first.tokens
        fixed = ~first.masked & ~torch.isin(tokens, torch.tensor(self.guidance_keeps, device=tokens.device))
        if self.hides_prompt:
            fixed = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) < first.prompt_length
        mask = getattr(model.config, "mask_token_id", None)
        return {"cfg_scale": self.cfg_scale, "fixed": fixed, "mask_token_id": mask}

    def inputs(
        self,
        model: Any,
        content: Bool[Tensor, "batch seen"],
        canvas: Int[Tensor, "batch seen"],
        prompt_length: int,
    ) -> dict[str, Any]:
        """Arguments of a pass over what a step sees, beside the ids."""
        return network_inputs(content)

    def attends_alike(self, config: Any) -> bool:
        """Whether all queries of a row see the same keys: no blocks, no window of masks, no order of keys."""
        laid_out = self.grows or self.attention.varies or self.autoregressive
        return not (laid_out or attends_observed_first(config) or has_causal_context(config))

    def rerun_network(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        prompt_length: int,
        plans: Sequence[StepPlan],
        block_numbers: Sequence[int],
    ) -> StoredNetwork | None:
        """The network for passes over a finished run whose steps depend on what earlier ones computed; else None.

        Args:
            model: from `dlm_lens.load`.
            content: False where there is padding.
            prompt_length: of the run.
            plans: of its steps, or of those that a part of a run holds.
            block_numbers: the number of each among the steps of its block.
        """
        return None

    @classmethod
    def room_of(cls, run: DenoisingRun, step: int | slice) -> Bool[Tensor, "*step batch position"] | None:
        """What is no part of the text yet at steps of a finished run (`resizes`); None where nothing is."""
        return None

    def planned_again(self, plan: StepPlan, block_number: int) -> StepPlan:
        """The plan of a step of a finished run, with the rest of its block as planned where the network needs it.

        Args:
            plan: as the run tells it; a block that ended early hides how many steps were left.
            block_number: the number of the step among those of its block.
        """
        return plan

    def keys_left_by(self, done: Sequence[StepPlan]) -> list[int]:
        """The steps, in order, that left the keys of an approximate cache: the last whole one, by default."""
        return [index for index, plan in enumerate(done) if plan.computed is None][-1:]

    def cached_network(self, model: Any, content: Bool[Tensor, "batch position"]) -> Network:
        """The network of a finished run that kept keys and values, without guidance."""
        return CachedLogits(model, self.network_content(content))

    def repeated_after(self, done: Sequence[StepPlan]) -> list[int]:
        """The finished steps whose passes are made again before a run is resumed, in order."""
        return self.keys_left_by(done) if self.cache is not None else []

    def answer_length(self, prompts: Bool[Tensor, "batch prompt"], gen_length: int) -> int:
        """How many positions of the canvas follow the prompts.

        With blocks that are counted from the text, those up to the end of the last block of every row, so that they
        can be more than `gen_length`; a run's `texts` end after `gen_length` tokens.

        Args:
            prompts: False at the padding on the left.
            gen_length: tokens of the answer.
        """
        if not self.from_text:
            return gen_length
        ends = prompts.sum(-1) + gen_length
        return gen_length + int((-ends % self.block_length).max())

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """Every step of the run, in order."""
        raise NotImplementedError

    def at(self, plan: StepPlan) -> None:
        """Enter a step, before its passes in runs and reruns; for networks that are given the noise level."""

    def follow(self, run: DenoisingRun, step: int) -> None:
        """Enter a step of a finished run, after `at`, for networks that are given what the step before proposed.

        Args:
            run: the finished run, or a part of it.
            step: of this run.

        Raises:
            ValueError: the part lacks the step before.
        """

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Positions that may be unmasked at this step: by default every masked one."""
        return masked

    def planned(
        self, plan: StepPlan, masked: Bool[Tensor, "batch position"], edited: Bool[Tensor, "batch position"]
    ) -> StepPlan:
        """The plan of a step whose canvas is known; another one where an edit makes the step compute more.

        Args:
            plan: as it was made before the run.
            masked: what is masked on the step's canvas.
            edited: where that canvas is not as the step before left it.
        """
        return plan

    def editable(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Decided positions that this step may rewrite; none, for most."""
        return torch.zeros_like(masked)

    def needed(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Positions whose logits this step needs: those that it may unmask or rewrite."""
        return self.eligible(masked, plan) | self.editable(masked, plan)

    @property
    def edits(self) -> bool:
        """Whether its steps may rewrite decided positions."""
        return type(self).editable is not Sampler.editable

    def leaves_out(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether the step runs no forward pass, on a canvas as the step before left it."""
        return self.adaptive and not bool(self.needed(masked, plan).any())

    def reach(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """Positions that the step's network can predict: all, or in block diffusion those of each row's block."""
        if self.attention.blocks is None:
            return torch.ones_like(masked)
        return self.attention.blocks.inside(plan.span, masked.shape[1]).to(masked.device)

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """How many positions of each row this step unmasks."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on beside the canvas and the random numbers; nothing, for most."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""

    def finished(self, canvas: Int[Tensor, "batch position"], plan: StepPlan) -> bool:
        """Whether the run ends with this step, whatever the plans say; called once, after every step."""
        return False

    def final_length(self, positions: int, steps: int) -> int:
        """How many of the canvas's positions the result keeps after so many steps; all, for most."""
        return positions

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """Give the parts what they need to know of the step, before `propose`; nothing, for most."""

    def forward(
        self,
        canvas: Int[Tensor, "batch position"],
        logits: Float[Tensor, "evaluated d_vocab"],
        evaluated: Bool[Tensor, "batch position"],
        masked: Bool[Tensor, "batch position"],
        plan: StepPlan,
    ) -> tuple[Int[Tensor, "batch position"], Proposal, Bool[Tensor, "batch position"]]:
        """One step: the next canvas (a new tensor), the proposal, the positions unmasked.

        `logits` has a row for every True of `evaluated`, in row-major order.
        """
        self.prepare(masked, plan)
        eligible, editable = self.eligible(masked, plan), self.editable(masked, plan)
        proposal: Any = self.propose(canvas, logits, evaluated, eligible | editable)
        unmasked = self.select(proposal[1], eligible, self.count(eligible, masked, plan))
        return self.canvas_after(canvas, proposal, unmasked, editable), Proposal(*proposal), unmasked

    def canvas_after(
        self,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
        editable: Bool[Tensor, "batch position"] | None = None,
    ) -> Int[Tensor, "batch position"]:
        """The canvas after the step: the proposal where it is unmasked, or where `revise` chooses to rewrite it."""
        none = torch.zeros_like(unmasked)
        revised = self.revise(canvas, *proposal, none if editable is None else editable)
        return torch.where(unmasked | revised, proposal[0], canvas)


class RowEndingSampler(Sampler):
    """Base class of samplers whose rows end one by one.

    Attributes:
        ended: the rows that have ended, which are not decoded any further; None before any has.
    """

    ended: Bool[Tensor, "batch"] | None = None

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masks that the step predicts, in rows that have not ended."""
        masks = masked & self.reach(masked, plan)
        return masks if self.ended is None else masks & ~self.ended[:, None]

    def state(self) -> dict[str, Tensor]:
        """The rows that have ended."""
        return {**super().state(), **({} if self.ended is None else {"ended": self.ended})}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        super().restore(state)
        self.ended = state.get("ended")


def rerun_sampler(settings: Mapping[str, Any]) -> Sampler:
    """The sampler for passes over the canvases of a finished run with these settings.

    Likelihoods in blocks have the network of the sampler that decodes such blocks (`blocks_of`), without its other
    settings. Of an algorithm that is not installed it has the network that every sampler has.
    """
    if (decodes := settings.get("blocks_of")) is not None:
        length = settings["block_length"]
        settings = {"gen_length": length, "sub_block_length": length, **settings}
    algorithm = algorithms().get(str(decodes or settings.get("sampler")))
    if algorithm is None:
        return Sampler.for_rerun(settings)
    guided = {"cfg_scale": getattr(algorithm.settings, "cfg_scale", 0.0)}
    sampler: Sampler = algorithm.sampler.for_rerun(guided | dict(settings))
    return sampler
