"""Logits of block diffusion whose steps may compute a part of the block, beside keys and values from before."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from dlm_lens.attention import decoder_of
from dlm_lens.attention.cache_argument import cache_argument
from dlm_lens.placement import on_input_device
from dlm_lens.sampling.block_network import BlockLogits


class KeptBlock(DynamicCache):
    """Keys and values of finished blocks and, after them, those of the present block, some of them stale.

    `update` replaces the keys and values of the `fresh` positions of every row and keeps the others.

    Args:
        finished: the cache of finished blocks, which stays as it is; None if there is none.
        kept: (keys, values) of the block's positions, per layer; empty before its first pass.
        fresh: the positions of the block that are computed.
        first: the first position that the pass computes.
    """

    def __init__(
        self,
        finished: DynamicCache | None,
        kept: list[tuple[Tensor, Tensor]],
        fresh: Bool[Tensor, "batch kept"],
        first: int,
    ) -> None:
        super().__init__()
        self.finished, self.kept, self.fresh, self.first = finished, kept, fresh, first

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values that the pass sees; the arguments are those of the positions that it computes."""
        stop = self.first + key_states.shape[2]
        if layer_idx == len(self.kept):  # the first pass computes the whole block
            self.kept.append((key_states, value_states))
        else:
            fresh = self.fresh[:, None, self.first : stop, None].to(key_states.device)
            both = zip(self.kept[layer_idx], (key_states, value_states), strict=True)
            parts = [(old, torch.where(fresh, new, old[:, :, self.first : stop])) for old, new in both]
            keys, values = (torch.cat([old[:, :, : self.first], new, old[:, :, stop:]], 2) for old, new in parts)
            self.kept[layer_idx] = keys, values
        keys, values = self.kept[layer_idx]
        if self.finished is None:
            return keys, values
        layer = self.finished.layers[layer_idx]
        return torch.cat([layer.keys, keys], 2), torch.cat([layer.values, values], 2)


class SubBlockLogits(BlockLogits):
    """Logits of a block or of its sub-block, in models whose output at i - 1 predicts position i.

    With `sub_block_length` a step computes the whole block of a row at its first pass and when the first position
    of the row's current sub-block is masked; otherwise the sub-block alone, whose queries see its own new keys and
    values and those that the block's other positions had before. That is approximate.

    Args:
        model: from `dlm_lens.load`.
        content: False where there is padding.
        sub_block_length: of the sub-blocks that are computed alone; None computes blocks whole.
        window: queries of the block that is decoded do not see the keys after the next multiple of so many
            positions (a quirk of the original, whose steps have a block length of their own).
        **options: of `BlockLogits`.
    """

    def __init__(
        self,
        model: Any,
        content: Bool[Tensor, "batch position"],
        *,
        sub_block_length: int | None = None,
        window: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, content, **options)
        self.sub_block_length, self.window = sub_block_length, window
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._kept_of: tuple[Any, tuple[int, int]] | None = None
        self._taken = content[:, 0] & False

    def everywhere(self, canvas: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_vocab"]:
        """Logits of every position.

        Raises:
            ValueError: a step computes a sub-block alone.
        """
        if self.sub_block_length is not None:
            raise ValueError(
                "use_block_cache=True computes a part of the block at a step: leave it out with on_logits and "
                "logits='all', which read the logits of every position"
            )
        return super().everywhere(canvas)

    def _inputs(
        self, canvas: Int[Tensor, "batch seen"], start: int, finished: Int[Tensor, "batch"]
    ) -> dict[str, Any]:
        """As the base class, with the window of the blocks that are not finished."""
        inputs = super()._inputs(canvas, start, finished)
        if self.window is not None:
            where = torch.arange(canvas.shape[1], device=canvas.device)
            # The original counts positions that it sees; the prompt that it drops is not among them.
            number = (where - self._first_seen[:, None]).div(self.window, rounding_mode="floor")
            beyond = number[:, None, :] > number[:, start:, None]
            beyond &= (where[start:] >= finished[:, None])[..., None]
            mask: Tensor = inputs["attention_mask"]
            inputs["attention_mask"] = mask.masked_fill(beyond[:, None], torch.finfo(mask.dtype).min)
        return inputs

    @property
    def _first_seen(self) -> Int[Tensor, "batch"]:
        return self.content.int().argmax(-1)

    def _cached_states(
        self, canvas: Int[Tensor, "batch seen"], needed: Bool[Tensor, "batch seen"], span: tuple[int, int]
    ) -> Float[Tensor, "half needed d_model"]:
        """The needed positions' states, after the finished blocks that are not cached yet."""
        start, starts, source = span[0], self.layout.starts(span), self._source(canvas)
        assert source is not None
        if start > 0 and bool((source[needed] == start - 1).all()):
            # The finished blocks predict all that is needed.
            self._extend(canvas, start, starts)
            assert self._last is not None
            return self._last.transpose(0, 1)[:, needed.any(-1)]
        if self.sub_block_length is None:
            return super()._cached_states(canvas, needed, span)
        self._extend(canvas, start, starts)
        if self._kept_of is None or self._kept_of[0] is not self._cache or self._kept_of[1] != span:
            self._kept, self._kept_of, self._taken = [], (self._cache, span), self._taken & False
        fresh, whole = self._fresh(canvas, needed, start, starts, source)
        first, stop = int(fresh.any(0).int().argmax()), int(fresh.any(0).nonzero().max()) + 1
        # The original's steps over a sub-block have no mask, so that the window does not apply.
        inputs = self._inputs(canvas, first, starts) if whole else super()._inputs(canvas, first, starts)
        return self._partial(canvas, fresh, inputs, first, stop, start, source)[:, needed]

    def _fresh(
        self,
        canvas: Int[Tensor, "batch seen"],
        needed: Bool[Tensor, "batch seen"],
        start: int,
        starts: Int[Tensor, "batch"],
        source: Int[Tensor, "batch seen"],
    ) -> tuple[Bool[Tensor, "batch seen"], bool]:
        """The positions of every row that the step computes anew, and whether these are a row's whole block."""
        assert self.sub_block_length is not None
        where = torch.arange(canvas.shape[1], device=canvas.device).expand_as(canvas)
        number = (where - starts[:, None]).div(self.sub_block_length, rounding_mode="floor")
        inside = (where >= starts[:, None]) & (where < starts[:, None] + self.layout.length)
        # The block before predicts the first position of a block, whose own positions are not needed then.
        reads = (needed & inside & (source >= starts[:, None])).any(-1)
        current = number.masked_fill(~needed, canvas.shape[1]).amin(-1, keepdim=True)
        at_current = inside & (number == current)
        opening = at_current & (where == starts[:, None] + current * self.sub_block_length)
        masked = (opening & (canvas == self.model.config.mask_token_id)).any(-1)
        whole = reads & (masked | ~self._taken)
        self._taken = self._taken | whole
        fresh = (inside & whole[:, None]) | (at_current & (reads & ~whole)[:, None])
        # Also finished positions that the cache does not hold, and all of them before there is anything to keep.
        fresh |= (where >= start) & ((where < starts[:, None]) | (not self._kept))
        return fresh, bool(whole.any())

    def _partial(
        self,
        canvas: Int[Tensor, "batch seen"],
        fresh: Bool[Tensor, "batch seen"],
        inputs: dict[str, Any],
        first: int,
        stop: int,
        start: int,
        source: Int[Tensor, "batch seen"],
    ) -> Float[Tensor, "1 batch seen d_model"]:
        """For every position the state that predicts it, undefined where that is not computed.

        Args:
            canvas: up to the end of the blocks.
            fresh: whose keys and values are replaced.
            inputs: of a pass over the positions from `first` on.
            first: the first position that is computed.
            stop: the position after the last one.
            start: where the cache of finished blocks ends.
            source: which output predicts each position.
        """
        length = stop - first
        inputs |= {"attention_mask": inputs["attention_mask"][:, :, :length]}
        inputs |= {"position_ids": inputs["position_ids"][:, :length]}
        cache = KeptBlock(self._cache, self._kept, fresh[:, start:], first - start)
        decoder = decoder_of(self.model)
        inputs = on_input_device(self.model, {"input_ids": canvas[:, first:stop], **inputs})
        output = decoder(**inputs, **cache_argument(decoder, cache))
        computed = output.last_hidden_state.to(canvas.device)
        states = computed.new_zeros(len(canvas), canvas.shape[1] - start + 1, computed.shape[-1])
        states[:, first - start + 1 : stop - start + 1] = computed
        if self._last is not None:
            states[:, :1] = self._last
        index = (source - start + 1).clamp(min=0)
        return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))[None]
