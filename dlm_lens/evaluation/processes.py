"""The harness's language model as the harness makes it, alone or as one of several processes under torchrun."""

import logging
from collections.abc import Mapping
from typing import Any, Self

import torch
from lm_eval.api.model import LM

logger = logging.getLogger(__name__)


class SharedLM(LM):
    """What the harness asks of a model that several processes hold; alone it is one process.

    The process group must exist (`torch.distributed.init_process_group`) before the model is made.
    """

    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()
            self._world_size = torch.distributed.get_world_size()

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """The model that the harness's arguments name."""
        return super().create_from_arg_string(arg_string, _possible(additional_config or {}))

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """The model that the harness's arguments name."""
        return super().create_from_arg_obj(arg_dict, _possible(additional_config or {}))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all processes, one behind the other."""
        if self.world_size == 1:
            return tensor
        parts = [torch.zeros_like(tensor.reshape(-1)) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor.reshape(-1))
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes, on one of them."""
        if self.world_size == 1:
            return [obj]
        found: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        """Wait for the other processes."""
        if self.world_size > 1:
            torch.distributed.barrier()


def _possible(config: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's own arguments on a device that is there: its command line says cuda:0 where nobody said any."""
    device = str(config.get("device"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        logger.warning("the harness asks for %s, and there is no CUDA device; the model goes to the CPU", device)
        return {**config, "device": "cpu"}
    return dict(config)
