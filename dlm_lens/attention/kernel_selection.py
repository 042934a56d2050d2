"""Whether the Triton kernels run: for CUDA tensors that they hold, unless they are off or could not be launched.

The environment variable DLM_LENS_KERNELS turns them "off" or leaves them "on" (the default). Where a kernel cannot
be launched (a GPU with less shared memory than it needs, no C compiler for Triton), tiles of torch compute the same
statistic, and one warning says so; kernels of that kind are not tried again in the process.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from dlm_lens.attention.tiled import needs_grad

SWITCH = "DLM_LENS_KERNELS"
WIDEST = 256
"""The widest heads that the kernels hold."""

Kind = tuple[torch.device, torch.dtype, int]
"""Device, dtype and width of heads: what decides whether a kernel can be launched."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)
_failed: set[Kind] = set()


def run_kernels(kernels: Callable[[], Result], tiles: Callable[[], Result], *tensors: Tensor) -> Result:
    """What `kernels` returns, or `tiles` where they are not for these tensors, are off, or cannot be launched.

    Raises:
        ValueError: the environment variable is neither "on" nor "off".
    """
    q = tensors[0]
    if not q.is_cuda or not usable(*tensors):
        return tiles()
    try:
        return kernels()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton has classes of its own for each reason, in places that move
        _failed.add(_kind(q))
        logger.warning(
            "the attention kernels cannot be launched on %s for %s heads of width %d, so tiles of torch take their "
            "place, which is slower: %s: %s (%s=off turns the kernels off)",
            q.device,
            str(q.dtype).removeprefix("torch."),
            q.shape[-1],
            type(error).__name__,
            error,
            SWITCH,
        )
    return tiles()


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels would run on these CUDA tensors, the first of them the queries.

    Raises:
        ValueError: the environment variable is neither "on" nor "off".
    """
    q, k = tensors[:2]
    known = q.dtype == k.dtype and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    fits = known and q.shape[-1] <= WIDEST and not needs_grad(*tensors)
    return turned_on() and fits and _kind(q) not in _failed and _triton_found()


def turned_on() -> bool:
    """What the environment variable says.

    Raises:
        ValueError: neither "on" nor "off".
    """
    setting = os.environ.get(SWITCH, "on").strip().lower()
    if setting not in ("on", "off"):
        raise ValueError(f'the environment variable {SWITCH} is {setting!r}; it must be "on" or "off"')
    return setting == "on"


def _kind(q: Tensor) -> Kind:
    return q.device, q.dtype, q.shape[-1]


@cache
def _triton_found() -> bool:
    return find_spec("triton") is not None
