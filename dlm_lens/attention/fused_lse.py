"""The log-sum-exp that torch's fused attention computes and its public function leaves out.

With the log-sum-exp of every query's scores the statistics of the pattern need no maximum of a row, and their tiles
no whole rows (`tiled`). It is taken where the kernel returns it, below
`torch.nn.functional.scaled_dot_product_attention`, so that z stays what it is, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_lens.attention.tiled import needs_grad

LEAST_ENTRIES = 1 << 14
"""Entries of a head's pattern from which on it is taken: there taking it costs about what it saves
(`benchmarks/received.py`)."""
LARGEST = 1 << 10
"""Largest absolute log-sum-exp that is taken: a score's rounding, which spoils the pattern, grows with it."""


class _Watch(TorchDispatchMode):
    """Keeps the log-sum-exp of every call of the fused kernel of a CPU."""

    # Otherwise torch counts the mode in flags of the whole process, which two threads leave set, and with which
    # torch.compile compiles nothing.
    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch leaves the mode out of what decides about compiling."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether operators of compiled code are left out."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator as it would run without the mode."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.scaled_dot_product_attention.default:  # whole in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.found.append(result[1])
        return result


class FusedLse:
    """What `fused_lse` has found when its block ends."""

    value: Float[Tensor, "batch head query"] | None = None


@contextmanager
def fused_lse(
    q: Float[Tensor, "batch head query d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    mask: Any,
    *,
    sdpa: bool = True,
) -> Iterator[FusedLse]:
    """Take the log-sum-exp, log sum_j exp(scale q_i k_j) over the visible keys, of one attention call in the block.

    It is found on a CPU for float32 without a gradient and without autocast, from `LEAST_ENTRIES` on and up to
    `LARGEST`; else, or where another kernel runs, `value` stays None. Of a query that sees no key it is 0. The
    kernel's scores and those of a second product differ in rounding, so that a pattern normalised with it is off by
    a few 2^-24 of the scores' size.

    Args:
        q: queries of the call.
        k: its keys.
        mask: its mask; nothing is taken with one that is added to the scores, which may hold more than visibility.
        sdpa: whether the block calls `scaled_dot_product_attention`; else (eager, flex, compiled functions of a
            user's own) it runs as if this context were not there.
    """
    found = FusedLse()
    fits = sdpa and q.device.type == "cpu" and q.dtype == torch.float32 and not needs_grad(q, k)
    fits = fits and q.shape[2] * k.shape[2] >= LEAST_ENTRIES
    # Autocast rounds queries and keys on their way to the kernel.
    fits = fits and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))
    if not fits or getattr(mask, "dtype", torch.bool) != torch.bool:
        yield found
        return
    with _Watch() as watch:
        yield found
    if len(watch.found) == 1 and watch.found[0].shape == q.shape[:3]:
        lse = watch.found[0]
        found.value = lse if bool(lse.abs().amax() <= LARGEST) else None  # None for NaN too
