"""Which code computes a statistic of attention: compiled kernels, or tiles of torch where those cannot run.

Triton kernels for CUDA tensors (`triton_kernels`), and for tiles on a CPU a loop that numba compiles
(`numba_kernels`). Either is optional: without triton, without numba, or with `DLM_LENS_KERNELS=off`, torch computes
the same.
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
"""Device, dtype and width of heads, which decide whether a kernel can be launched."""

Result = TypeVar("Result")
logger = logging.getLogger(__name__)
_failed: set[Kind] = set()


def run_kernels(kernels: Callable[[], Result], tiles: Callable[[], Result], *tensors: Tensor) -> Result:
    """The result of `kernels`, or of `tiles` where the kernels do not fit the tensors, are off, or fail to launch.

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
    supported = q.dtype == k.dtype and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    fits = supported and q.shape[-1] <= WIDEST and not needs_grad(*tensors)
    return turned_on() and fits and _kind(q) not in _failed and _triton_found()


def turned_on() -> bool:
    """The environment variable `DLM_LENS_KERNELS` as a truth value.

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


LEAST_ENTRIES = 1 << 14
"""Entries of a head's pattern from which on numba's code is loaded: of fewer, loading costs more than it saves."""
THREADS_OF_STATISTICS = 4
"""Threads of torch up to which numba's loop, which runs in one, takes the statistics of queries. In two threads it
takes 0.6 of the time of torch's calls, which share the threads (`benchmarks/README.md`); more were not measured."""
THREADS_OF_SUMS = 1
"""Threads up to which it takes the column sums alone: in two torch's calls are faster."""


def compiled_reduction(entries: int, statistics: bool) -> Callable[..., None] | None:
    """Numba's `reduce_tile`; None where calls of torch are to take its place.

    Args:
        entries: of a head's pattern.
        statistics: whether statistics of queries are wanted, beside the column sums.

    Raises:
        ValueError: the environment variable is neither "on" nor "off".
    """
    most = THREADS_OF_STATISTICS if statistics else THREADS_OF_SUMS
    fits = entries >= LEAST_ENTRIES and torch.get_num_threads() <= most
    return _compiled() if fits and turned_on() else None


@cache
def _compiled() -> Callable[..., None] | None:
    if find_spec("numba") is None:
        return None
    try:
        from dlm_lens.attention.numba_kernels import reduce_tile
    except Exception as error:  # of numba's compiler or cache, or of NumPy in a version that numba refuses
        logger.warning(
            "numba cannot compile the statistics of attention, so calls of torch take its place, which is slower: "
            "%s: %s (NUMBA_CACHE_DIR names a folder for compiled code, %s=off does without numba)",
            type(error).__name__,
            error,
            SWITCH,
        )
        return None
    return reduce_tile
