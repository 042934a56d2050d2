"""One pass over [x_t, x_0], by which block diffusion trains: every noisy block sees the clean blocks before it."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.adapters.float32_parts import EqualDtypeCache
from dlm_lens.attention import (
    BlockLayout,
    Context,
    additive_mask,
    attends_observed_first,
    decoder_of,
    padding_before,
    position_ids,
    sees_observed_first,
)
from dlm_lens.attention.cache_argument import cache_argument
from dlm_lens.attention.model_access import has_listeners
from dlm_lens.placement import on_input_device
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.cached_network import keeps_keys
from dlm_lens.sampling.network import CanvasLogits


@dataclass(frozen=True)
class Blocks:
    """The blocks that a model decodes, or was trained with.

    Args:
        length: positions of a block.
        from_text: counted from the first token of every row, instead of from the answer.
        context: how positions before a block attend, by the model's sampler; `BlockLayout.context`.
    """

    length: int
    from_text: bool
    context: Context = "blocks"

    @classmethod
    def of(cls, config: Any) -> "Blocks | None":
        """The blocks of a model, from its sampler and the default settings; None if it has none."""
        algorithm = algorithm_of(config)
        sampler = algorithm.sampler
        if not sampler.grows:
            length = sampler.training_block_length
            return None if length is None else cls(length, sampler.from_text)
        settings = family_of(config.model_type).settings_of(config)
        length = int(settings.get("block_length") or settings["gen_length"])
        return cls(length, sampler.from_text, sampler.context)


def visible_in_copies(
    blocks: Int[Tensor, "batch position"],
    content: Bool[Tensor, "batch position"] | None = None,
    documents: Int[Tensor, "batch position"] | None = None,
    masked: Bool[Tensor, "batch position"] | None = None,
    *,
    causal: bool = False,
) -> Bool[Tensor, "batch query key"]:
    """Which query of [x_t, x_0] sees which key (2503.09573; kuleshov-group/bd3lms, models/dit.py).

    A noisy position sees the noisy positions of its block and the clean ones of earlier blocks; a clean position
    the clean ones of its block and earlier blocks. A position of padding sees itself alone, so that no row of the
    mask is empty, and nothing else sees it. With `masked` attention is causal among the clean positions, and in
    every noisy block in the order of `attention.observed_order` (Tencent/WeDLM, finetune/src/masking.py).

    Args:
        blocks: number of every position's block, for one copy.
        content: False at padding; None for none.
        documents: positions of different documents do not see each other; None for one document.
        masked: which noisy positions hold [MASK], for networks that attend to observed tokens first; else None.
        causal: attention is causal among the clean positions, as in Nemotron-Labs-Diffusion's compute_block_mask.
    """
    query, key = blocks[:, :, None], blocks[:, None, :]
    same, earlier = query == key, query > key
    nothing, noisy, clean = torch.zeros_like(same), same, same | earlier
    if masked is not None:
        noisy, causal = same & sees_observed_first(masked), True
    if causal:
        clean = clean.tril()
    visible = torch.cat([torch.cat([noisy, earlier], 2), torch.cat([nothing, clean], 2)], 1)
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :]).repeat(1, 2, 2)
    if content is not None:
        twice = content.repeat(1, 2)
        own = torch.eye(twice.shape[1], dtype=torch.bool, device=twice.device)
        visible = visible & twice[:, :, None] & twice[:, None, :] | own & ~twice[:, :, None]
    return visible


def two_copies(
    noisy: Int[Tensor, "batch position"],
    clean: Int[Tensor, "batch position"],
    blocks: Int[Tensor, "batch position"],
    positions: Int[Tensor, "batch position"],
    *,
    dtype: torch.dtype,
    content: Bool[Tensor, "batch position"] | None = None,
    documents: Int[Tensor, "batch position"] | None = None,
    masked: Bool[Tensor, "batch position"] | None = None,
    causal: bool = False,
) -> dict[str, Tensor]:
    """Arguments of one pass over [x_t, x_0].

    Args:
        noisy: x_t.
        clean: x_0.
        blocks: number of every position's block.
        positions: rotary positions of one copy, which both have.
        dtype: of the additive mask, the model's.
        content: as in `visible_in_copies`.
        documents: likewise.
        masked: likewise.
        causal: likewise.
    """
    visible = visible_in_copies(blocks, content, documents, masked, causal=causal)[:, None]
    return {
        "input_ids": torch.cat([noisy, clean], 1),
        "attention_mask": additive_mask(visible, dtype),
        "position_ids": positions.repeat(1, 2),
    }


def attention_in_copies(
    config: Any, noisy: Int[Tensor, "batch position"], *, causal: bool = False
) -> dict[str, Any]:
    """The arguments of `two_copies` that say how a network attends, beside blocks, content and documents.

    Args:
        config: of the model.
        noisy: x_t.
        causal: as in `visible_in_copies`: in likelihoods as the sampler decodes, in training as the authors train.
    """
    masked = noisy == config.mask_token_id if attends_observed_first(config) else None
    return {"masked": masked, "causal": causal}


def predicting_output(
    blocks: Int[Tensor, "batch position"], begins: Bool[Tensor, "batch position"], *, shift: bool
) -> Int[Tensor, "batch position"]:
    """Which of the 2S outputs predicts each of the S positions: its own, or with `shift` the one before it.

    The first position of a block is then predicted by the clean output before it, as a sampler reads it: what a
    block begins with follows from the finished text. A text's first position is predicted by its own output.

    Args:
        blocks: number of every position's block.
        begins: where a text begins.
        shift: the output at i - 1 predicts position i.
    """
    index = torch.arange(blocks.shape[1], device=blocks.device).expand_as(blocks)
    if not shift:
        return index
    new = torch.ones_like(begins)
    new[:, 1:] = blocks[:, 1:] != blocks[:, :-1]
    before = torch.where(new, index - 1 + blocks.shape[1], index - 1)
    return torch.where(begins, index, before)


class TwoCopyLogits(CanvasLogits):
    """Logits of noisy canvases whose clean texts are known, each block given the clean text before it.

    Args:
        model: from `dlm_lens.load`.
        content: False at the padding on the left.
        clean: x_0.
        layout: where the blocks are; `Sampler.block_layout_of`.
        causal: attention is causal among the clean positions.
        **options: of `CanvasLogits`.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        *,
        clean: Int[Tensor, "batch position"],
        layout: BlockLayout,
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self.content, self.clean, self.causal = content, clean, causal
        self.blocks = layout.numbers(content.shape[1])
        begins = torch.zeros_like(content).scatter(1, padding_before(content)[:, None], True)
        self.outputs = predicting_output(self.blocks, begins, shift=self.source is not None)

    def forward(self, canvas: Int[Tensor, "batch position"]) -> Any:
        """One pass over both copies, for every half."""
        blocks, content = self._repeated()
        inputs = two_copies(
            self._halves(canvas), self._halves(self.clean), blocks, position_ids(content),
            dtype=self.model.dtype, content=content, **self._attention(self._halves(canvas)),
        )  # fmt: skip
        return decoder_of(self.model)(**on_input_device(self.model, inputs), use_cache=False)

    def states(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "half needed d_model"]:
        """The inputs of the head for the `needed` positions of x_t.

        Nothing of a clean copy depends on the noisy one, so that rows of equal texts (the masks of one item) share
        theirs: it is computed once, and the noisy copies see its keys. Where `keeps_keys` is False, it is one pass
        over both copies of every row. While hooks are on the model, it is a pass for each block, over a canvas on
        which a position is what it is in a run.
        """
        if has_listeners(self.model):
            return self._block_by_block(canvas, needed)
        clean, row = self._distinct_texts()
        if len(clean) == len(row) or not keeps_keys(self.model):
            states = self.forward(canvas).last_hidden_state.to(canvas.device)
        else:
            states = self._after_clean(canvas, clean, row)
        halves = states.reshape(-1, len(canvas), 2 * canvas.shape[1], states.shape[-1])
        rows = self._rows(canvas).expand_as(canvas)
        wanted: Tensor = halves[:, rows[needed], self.outputs[needed]]
        return wanted

    def _block_by_block(
        self, canvas: Int[Tensor, "batch position"], needed: Bool[Tensor, "batch position"]
    ) -> Float[Tensor, "half needed d_model"]:
        """A pass for each block, over x_0 before it, x_t in it, and nothing after it.

        It has the rows that need a position of the block.
        """
        length, order = canvas.shape[1], needed.flatten().cumsum(0).view(needed.shape) - 1
        parts, places = list[Tensor](), list[Tensor]()
        for number in self.blocks[needed].unique().tolist():
            chosen = needed & (self.blocks == number)
            some = chosen.any(-1)
            stop = int((self.blocks[some] <= number).any(0).nonzero().max()) + 1
            both = self._halves(torch.where(self.blocks < number, self.clean, canvas))
            shown, blocks, content = (
                part[some.repeat(len(part) // len(some))] for part in (both, *self._repeated())
            )
            copies = visible_in_copies(blocks, **self._attention(shown))
            of_noisy, of_clean = copies[:, :length].unflatten(2, (2, length)).any(2), copies[:, length:, length:]
            seen = content & (blocks <= number)
            visible = torch.where((blocks == number)[:, :, None], of_noisy, of_clean)
            visible = (visible & seen[:, :, None] & seen[:, None, :])[:, None, :stop, :stop]
            inputs = {
                "input_ids": shown[:, :stop],
                "attention_mask": additive_mask(visible, self.model.dtype),
                "position_ids": position_ids(content)[:, :stop],
            }
            output = decoder_of(self.model)(**on_input_device(self.model, inputs), use_cache=False)
            states = output.last_hidden_state.to(canvas.device)
            halves, (row, _) = states.reshape(-1, int(some.sum()), stop, states.shape[-1]), chosen[some].nonzero().T
            parts.append(halves[:, row, (self.outputs % length)[chosen]])
            places.append(order[chosen])
        wanted: Tensor = torch.cat(parts, 1)[:, torch.cat(places).argsort()]
        return wanted

    def _attention(self, noisy: Int[Tensor, "row position"]) -> dict[str, Any]:
        return attention_in_copies(self.model.config, noisy, causal=self.causal)

    def _repeated(self) -> tuple[Int[Tensor, "row position"], Bool[Tensor, "row position"]]:
        halves = 2 if self.cfg_scale else 1
        return self.blocks.repeat(halves, 1), self.content.repeat(halves, 1)

    def _distinct_texts(self) -> tuple[Int[Tensor, "text"], Int[Tensor, "row"]]:
        """The first row of every clean text with its blocks, and which of them each row has."""
        blocks, content = self._repeated()
        lines = torch.stack([self._halves(self.clean), blocks, content.to(blocks.dtype)], 1).flatten(1)
        texts, which = torch.unique(lines, dim=0, return_inverse=True)
        first = torch.full((len(texts),), len(lines), device=which.device)
        return first.scatter_reduce(0, which, torch.arange(len(lines), device=which.device), "amin"), which

    def _after_clean(
        self, canvas: Int[Tensor, "batch position"], texts: Int[Tensor, "text"], which: Int[Tensor, "row"]
    ) -> Float[Tensor, "row copies d_model"]:
        """The states of [x_t, x_0], each distinct x_0 computed once."""
        blocks, content = self._repeated()
        length, decoder = canvas.shape[1], decoder_of(self.model)
        noisy, clean = self._halves(canvas), self._halves(self.clean)
        positions = position_ids(content)
        given = {"content": content, **self._attention(noisy)}
        both = two_copies(noisy, clean, blocks, positions, dtype=self.model.dtype, **given)["attention_mask"]
        keys = CleanKeys()
        given_clean = {
            "input_ids": clean[texts],
            "attention_mask": both[texts][..., length:, length:],
            "position_ids": positions[texts],
        }
        # The keys of x_0 come first here.
        visible = both[..., :length, :].roll(length, -1)
        given_noisy = {"input_ids": noisy, "attention_mask": visible, "position_ids": positions}
        options = {**cache_argument(decoder, keys), "use_cache": True}
        first = decoder(**on_input_device(self.model, given_clean), **options)
        keys.row = which
        second = decoder(**on_input_device(self.model, given_noisy), **options)
        seen, shared = (one.last_hidden_state.to(canvas.device) for one in (second, first))
        return torch.cat([seen, shared[which]], 1)


class CleanKeys(EqualDtypeCache):
    """Keys and values of clean texts: stored in the first pass, seen and not extended in later ones.

    `row` says for every row of a later pass whose text it sees; None during the first pass.
    """

    row: Int[Tensor, "row"] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer's queries see."""
        if self.row is None:
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return found
        layer, row = self.layers[layer_idx], self.row.to(key_states.device)
        key_states = key_states.to(value_states.dtype)
        return torch.cat([layer.keys[row], key_states], -2), torch.cat([layer.values[row], value_states], -2)
