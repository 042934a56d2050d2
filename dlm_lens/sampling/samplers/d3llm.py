"""d3LLM's sampler: multi-block decoding by entropy, with attention over the whole canvas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import BlockCounts, BlockLayout, RunningBlocks
from dlm_lens.sampling.algorithm_registry import MINUS_ENTROPY, Algorithm
from dlm_lens.sampling.denoising_run import Proposal, StepPlan
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.network import Network
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas, Sampler, one_block
from dlm_lens.sampling.samplers.i_dlm import first as first_of
from dlm_lens.sampling.samplers.multi_block import SelectInBlocks, resolve
from dlm_lens.sampling.samplers.wedlm import WeDLMPropose
from dlm_lens.sampling.settings import SpecialIds, at_least_one, not_negative, positive_share


@dataclass(frozen=True)
class D3LLMSettings:
    """Settings of d3LLM's multi-block decoding (2601.07568; hao-ai-lab/d3LLM, `generate_multi_block`).

    Args:
        gen_length: tokens of the answer (`max_new_tokens`); the last block may be shorter.
        block_length: tokens of a block (`block_size`), counted from the first position of the answer.
        add_block_threshold: a block joins once this share of the positions of the one before is decided.
        entropy_threshold: in nats; every mask of the running blocks whose entropy is below it is written
            (`threshold`), and at least the lowest one of the first block that has masks.
        lowest: the lowest one of all running blocks is always written too, as by the authors' code for LLaDA.
        temperature: 0 takes the most likely token.
        early_stop: everything after an end of the text becomes that end.

    Raises:
        ValueError: a value is out of its range.
    """

    gen_length: int
    block_length: int
    add_block_threshold: float = 0.1
    entropy_threshold: float = 0.5
    lowest: bool = False
    temperature: float = 0.0
    early_stop: bool = True
    position_penalty: ClassVar[float] = 0.0
    top_k: ClassVar[int | None] = None
    top_p: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        at_least_one(self, "gen_length", "block_length")
        not_negative(self, "entropy_threshold", zero="one mask a step")
        not_negative(self, "temperature", zero="greedy")
        positive_share(self, "add_block_threshold")


class SelectLowest(SelectInBlocks):
    """`SelectInBlocks`, and with `lowest` the most confident position of each row."""

    def __init__(self, settings: D3LLMSettings) -> None:
        super().__init__(-settings.entropy_threshold)
        self.lowest = settings.lowest

    def forward(
        self,
        confidence: Float[Tensor, "batch position"],
        eligible: Bool[Tensor, "batch position"],
        count: Int[Tensor, "batch"],
    ) -> Bool[Tensor, "batch position"]:
        """Return the positions that this step unmasks; of equals, the earlier one."""
        chosen = super().forward(confidence, eligible, count)
        best = confidence.masked_fill(~eligible, -torch.inf).amax(-1, keepdim=True)
        return chosen | first_of(eligible & (confidence == best)) if self.lowest else chosen


class D3LLMSampler(Sampler):
    """Each step decodes all running blocks of a row, by the entropies of their masks; it computes the whole canvas.

    A row's running blocks are D2F's. Once a row has an end of the text, the rest of its answer is filled with that
    token, decided or not, which is no decision; an earlier mask may become an earlier end.

    With `reference_quirks` (one prompt, temperature 0) the masks that were filled so are chosen among at the next
    step too, as in the authors' code, which then overwrites what it wrote there.
    """

    adaptive = True
    reference_quirks = False
    _closed: Bool[Tensor, "batch position"] | None = None

    def __init__(
        self, settings: D3LLMSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__()
        self.settings, self.reference_quirks = settings, reference_quirks
        self.end = ids.eos if settings.early_stop else None
        self.running = RunningBlocks(settings.gen_length + 1, settings.add_block_threshold)
        self.propose = WeDLMPropose(settings, noise, ids, False)
        self.select = SelectLowest(settings)

    def network(self, model: Any, first: FirstCanvas) -> Network:
        """The network of the whole canvas.

        Raises:
            ValueError: what the authors' code cannot do, with `reference_quirks`.
        """
        self._content, self._begin = first.content, first.prompt_length
        masks = first.masked & first.content
        self._most = int(masks.sum(-1).max())
        if self.reference_quirks:
            own = self.settings
            odd = len(masks) > 1 or bool(masks[:, : self._begin].any())
            if odd or own.gen_length % own.block_length or own.temperature:
                raise ValueError(
                    f"reference_quirks with {len(masks)} prompts, gen_length {own.gen_length} and temperature "
                    f"{own.temperature}: the authors' code decodes one prompt without masks, whole blocks of "
                    f"{own.block_length}, and is followed at temperature 0; leave reference_quirks out"
                )
        return super().network(model, first)

    @property
    def _layout(self) -> BlockLayout:
        return self.block_layout_of(self.settings.block_length, self._content, self._begin)

    def plans(self, prompt_length: int, positions: int) -> list[StepPlan]:
        """As many steps as there are masks, at most."""
        return one_block(self._most, prompt_length, positions, self.settings.gen_length)

    def eligible(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> Bool[Tensor, "batch position"]:
        """The masks of the running blocks; with `reference_quirks` also those that the last step closed."""
        found = masked & self.running.positions(self._layout, self._content, masked)
        return found if self._closed is None else found | (self._closed & masked.any(-1, keepdim=True))

    def count(
        self, eligible: Bool[Tensor, "batch position"], masked: Bool[Tensor, "batch position"], plan: StepPlan
    ) -> Int[Tensor, "batch"]:
        """One in each row, beside those of low entropy."""
        return eligible.any(-1).long()

    def prepare(self, masked: Bool[Tensor, "batch position"], plan: StepPlan) -> None:
        """The blocks; the first that has masks has to write."""
        counts = BlockCounts.of(self._layout, self._content, masked)
        self.select.number, self.select.forced = counts.number, first_of(counts.open > 0)

    def canvas_after(
        self,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        unmasked: Bool[Tensor, "batch position"],
        editable: Bool[Tensor, "batch position"] | None = None,
    ) -> Int[Tensor, "batch position"]:
        """The canvas after the step, closed after the first end of the text in the answer."""
        made = super().canvas_after(canvas, proposal, unmasked, editable)
        if self.end is None:
            return made
        ends = (made == self.end).long()
        ends[:, : self._begin] = 0
        after = ends.cumsum(-1) > ends
        if self.reference_quirks:
            self._closed = after & (made == self.mask_id)
        return made.masked_fill(after, self.end)

    def state(self) -> dict[str, Tensor]:
        """The masks that the last step closed, with `reference_quirks`."""
        return {} if self._closed is None else {"closed": self._closed}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from such a state."""
        self._closed = state.get("closed")


ALGORITHM = Algorithm("d3llm", D3LLMSettings, D3LLMSampler, resolve, MINUS_ENTROPY, corruption=CountCorruption())
