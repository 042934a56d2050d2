"""Rows of a batch for each invoke: of activations, of guidance's doubled batch, of the finished run."""

from dataclasses import replace
from typing import Any

import torch
from nnsight.intervention.batching import Batcher
from torch import Tensor

from dlm_lens.sampling import Denoised


class RowBatcher(Batcher):
    """nnsight's batcher for runs: a doubled batch belongs to its rows, and a `Denoised` is cut by rows."""

    guided = False

    def narrow(self, value: Any, group: Any) -> Any:
        """What an invoke is served: its own rows."""
        if isinstance(value, Denoised) and self.batching and group is not None:
            return rows_of(value, slice(group[0], group[0] + group[1]))
        return super().narrow(value, group)

    def _narrow_tensor(self, tensor: Tensor, group: Any) -> Tensor:
        if not self._doubled(tensor):
            return super()._narrow_tensor(tensor, group) if tensor.ndim else tensor
        start, size = group
        return torch.cat([half[start : start + size] for half in tensor.chunk(2)])

    def _widen_tensor(self, full: Tensor, group: Any, edited: Tensor) -> Tensor:
        if not self._doubled(full):
            return super()._widen_tensor(full, group, edited) if full.ndim else edited
        start, size = group
        halves = zip(full.chunk(2), edited.chunk(2), strict=True)
        return torch.cat([torch.cat([whole[:start], mine, whole[start + size :]]) for whole, mine in halves])

    def _doubled(self, tensor: Tensor) -> bool:
        return self.guided and tensor.ndim > 0 and tensor.shape[0] == 2 * self.total


def rows_of(run: Denoised, rows: slice) -> Denoised:
    """The run of some of its rows."""
    settings = dict(run.settings)
    if "seeds" in settings:
        settings["seeds"] = settings["seeds"][rows]
    return replace(
        run,
        canvases=run.canvases[:, rows],
        masked=run.masked[:, rows],
        proposals=run.proposals[:, rows],
        confidence=run.confidence[:, rows],
        selected=run.selected[:, rows],
        attention_mask=run.attention_mask[rows],
        settings=settings,
    )
