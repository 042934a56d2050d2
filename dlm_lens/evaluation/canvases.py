"""`CanvasRecorder`: statistics of the canvases that a likelihood is computed from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from dlm_lens.attention import listening
from dlm_lens.recording import Recorder, Recording
from dlm_lens.recording.recorder import Storage
from dlm_lens.sampling import Denoised, Sampler, StepPlan


class CanvasRecorder(Recorder):
    """A recorder of one request's likelihood: every canvas of its forward passes is a step of its Recording.

    Under guidance the conditional canvases are recorded. The prompt is the context and the answer the continuation,
    whatever of them is masked.

    Args:
        model, reducers, layers, dtype: as for `Recorder`.
        context: how many positions the context has.
        halves: 2 under guidance, else 1.
    """

    def __init__(
        self,
        model: Any,
        reducers: Sequence[Any],
        *,
        context: int,
        halves: int = 1,
        layers: Sequence[int] | None = None,
        dtype: Storage = "float32",
    ) -> None:
        super().__init__(model, reducers, layers=layers, dtype=dtype)
        self.context, self.halves = context, halves
        self._canvases: list[Int[Tensor, "canvas position"]] = []
        self._parts: list[dict[str, Tensor]] = []

    @contextmanager
    def listening(self, model: Any) -> Iterator[None]:
        """Record the forward passes inside the block."""
        decoder: nn.Module = model.get_decoder()
        with listening(model):
            handles = [
                decoder.register_forward_pre_hook(self._before, with_kwargs=True),
                decoder.register_forward_hook(self._behind),
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self.close()

    @property
    def canvases(self) -> int:
        """How many there are so far."""
        return sum(map(len, self._canvases))

    def canvases_of(self, settings: Mapping[str, Any]) -> Recording:
        """The canvases so far, of which there must be one, as the steps of a Recording, the most masked first."""
        canvases, arrays = torch.cat(self._canvases), {}
        order = self._masked(canvases).sum(-1).argsort(descending=True, stable=True)
        for name in self._parts[0]:
            arrays[name] = torch.cat([part[name] for part in self._parts])[order, None]
        canvases = canvases[order]
        run = self._run(canvases[:, None], settings)
        answer = torch.arange(canvases.shape[1])[None] >= self.context
        return replace(self.described(run, arrays), answer=answer)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pass begins."""
        ids: Int[Tensor, "row position"] = args[0] if args else kwargs["input_ids"]
        ids = ids[: len(ids) // self.halves]
        # Whether causal or not: all of the canvas is there.
        self.start(Sampler(), torch.ones_like(ids, dtype=torch.bool))
        self.answer = (torch.arange(ids.shape[1], device=ids.device) >= self.context).expand(ids.shape)
        self.step(StepPlan(0, 1, 0, (self.context, ids.shape[1]), 1), ids, self._masked(ids))

    def _behind(self, module: nn.Module, args: Any, output: Any) -> None:
        """It is over."""
        assert self.now is not None
        self._parts.append(self.step_arrays())
        self._canvases.append(self.now.tokens.detach().cpu())
        self.close()

    def _masked(self, ids: Int[Tensor, "*run position"]) -> Bool[Tensor, "*run position"]:
        mask_id = getattr(self.model.config, "mask_token_id", None)
        return torch.zeros_like(ids, dtype=torch.bool) if mask_id is None else ids == mask_id

    def _run(self, canvases: Int[Tensor, "step batch position"], settings: Mapping[str, Any]) -> Denoised:
        steps, _, positions = canvases.shape
        masked = self._masked(canvases)
        return Denoised(
            canvases=torch.cat([canvases, canvases[-1:]]),
            masked=torch.cat([masked, masked[-1:]]),
            proposals=canvases,
            confidence=torch.full(canvases.shape, -torch.inf),
            selected=torch.zeros_like(masked),
            attention_mask=torch.ones_like(masked[0]),
            prompt_length=self.context,
            spans=((self.context, positions),) * steps,
            blocks=(0,) * steps,
            settings=dict(settings),
            tokenizer=getattr(self.model, "tokenizer", None),
        )
