"""The Triton kernels: right against float64 on the CPU, fast against tiles of torch and sdpa.

`python -m benchmarks.device.kernels --dtype bfloat16 [--small]`. Per case: the largest error of the received
attention, relative to the largest value, of the log-sum-exp, and of what `pattern_stats` says of each query; the
time of received attention in kernels over that of the tiled path on the same device and, where sdpa computes the
same attention, over sdpa's; and the time of `pattern_stats` over that of tiles, which hold the pattern. `path` is
what computed the case; on a GPU tiles mean that the kernels could not be launched, and make the exit status 1. On a
CPU it is always tiles, on the pretended device the interpreted kernels, and no time means anything.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import machine, side_by_side, without_kernels
from dlm_lens.attention import QUERY_STATS, AttentionInputs, pattern_stats
from dlm_lens.attention.kernel_selection import usable
from dlm_lens.attention.received import attention_lse, received_sums
from dlm_lens.attention.tile_sums import tiled_received_sums

TOLERANCE = {"float32": 2e-4, "float16": 2e-3, "bfloat16": 2e-3}
"""Inputs are rounded before both sides see them, products of halves are exact in float32, and sums are in float32:
what remains is the order of summation, exp2 in place of exp, and, of half inputs, what tensor cores drop."""
VARIANTS = ("plain", "causal", "padding", "mask per query", "4 classes", "grouped keys")


@dataclass(frozen=True)
class Case:
    """One layer's inputs."""

    length: int
    width: int
    variant: str

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries, keys and the options of `received_sums`, on the CPU."""
        generator = torch.Generator().manual_seed(self.length + self.width)
        heads, kv = (4, 1) if self.variant == "grouped keys" else (2, 2)
        q = torch.randn(1, heads, self.length, self.width, generator=generator).to(dtype)
        k = torch.randn(1, kv, self.length, self.width, generator=generator).to(dtype)
        options: dict[str, Any] = {"causal": self.variant == "causal"}
        if self.variant == "padding":
            options["visible"] = (torch.arange(self.length) >= self.length // 8)[None, None, None]
        if self.variant == "mask per query":
            options["visible"] = torch.rand(1, 1, self.length, self.length, generator=generator) > 0.2
        if self.variant == "4 classes":
            options["queries"] = torch.rand(1, 4, self.length, generator=generator)
        return q, k, options


def cases(small: bool) -> Iterator[Case]:
    """All variants at the shortest length; the longest lengths without the mask of [query, key]."""
    for length in (64,) if small else (512, 1024, 2048, 4096, 8192):
        for width in (64,) if small else (64, 80, 128, 256):
            for variant in VARIANTS:
                if length <= 2048 or variant in ("plain", "causal", "4 classes"):
                    yield Case(length, width, variant)


def errors(case: Case, dtype: torch.dtype, device: str) -> tuple[float, float, float]:
    """Largest error of the sums, relative to their largest, of the log-sum-exp, and of the queries' statistics."""
    q, k, options = case.inputs(dtype)
    scale, moved = case.width**-0.5, _moved(options, device)
    expected, lse, stats = reference(q.double(), k.double(), scale, options)
    found = received_sums(q.to(device), k.to(device), scale=scale, **moved).cpu()
    inputs, weights = _layer(case, dtype, device)
    found_stats = pattern_stats(inputs, weights, QUERY_STATS)
    assert found_stats.sums is not None
    moved.pop("queries", None)
    found_lse = attention_lse(q.to(device), k.to(device), scale=scale, **moved).cpu()
    sums = max(float((each.cpu() - expected).abs().max() / expected.max()) for each in (found, found_stats.sums))
    by_query = torch.stack([found_stats.per_query[name].cpu() for name in QUERY_STATS])
    return sums, float((found_lse - lse).abs().max()), float((by_query - stats).abs().max())


def reference(q: Tensor, k: Tensor, scale: float, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The definitions, in the dtype of q (float64), 512 rows of the softmax at a time."""
    length = q.shape[2]
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    weights = options.get("queries", torch.ones(1, 1, length)).to(q)
    sums, lse, stats, places = 0.0, [], [], torch.arange(length)
    for rows in places.split(512):
        scores = q[:, :, rows] @ keys.mT * scale
        if options["causal"]:
            scores = scores.masked_fill(places[None] > rows[:, None], -torch.inf)
        if "visible" in options:
            visible = options["visible"].expand(-1, -1, length, -1)[:, :, rows]
            scores = scores.masked_fill(~visible, -torch.inf)
        lse.append(scores.logsumexp(-1))
        pattern = scores.softmax(-1)
        sums = sums + torch.einsum("bcq,bhqk->bchk", weights[..., rows], pattern)
        regions = (places == rows[:, None], places < rows[:, None], places > rows[:, None])
        given = [(pattern * region).sum(-1) for region in regions]
        stats.append(torch.stack([torch.special.entr(pattern).sum(-1), *given]))
    return sums, torch.cat(lse, -1), torch.cat(stats, -1)


def ratios(case: Case, dtype: torch.dtype, device: str, rounds: int) -> dict[str, float]:
    """Seconds of the kernels, and their time over the tiled path's and over sdpa's."""
    q, k, options = case.inputs(dtype)
    q, k, moved = q.to(device), k.to(device), _moved(options, device)
    scale = case.width**-0.5
    weights = moved.get("queries", torch.ones(1, 1, case.length, device=device))
    runs: dict[str, Any] = {
        "kernels": lambda: received_sums(q, k, scale=scale, **moved),
        "tiles": lambda: tiled_received_sums(q, k, scale, moved.get("visible"), weights, moved["causal"]),
    }
    if case.variant in ("plain", "causal"):
        runs["sdpa"] = lambda: scaled_dot_product_attention(q, k, k, is_causal=moved["causal"])
    seconds = side_by_side(runs, rounds)
    over = {f"over {name}": seconds["kernels"] / seconds[name] for name in runs if name != "kernels"}
    inputs, queries = _layer(case, dtype, device)
    stats = side_by_side(
        {
            "kernels": lambda: pattern_stats(inputs, queries, QUERY_STATS),
            "tiles": lambda: without_kernels(lambda: pattern_stats(inputs, queries, QUERY_STATS)),
        },
        rounds,
    )
    return {"seconds": seconds["kernels"], **over, "stats over tiles": stats["kernels"] / stats["tiles"]}


def _layer(case: Case, dtype: torch.dtype, device: str) -> tuple[AttentionInputs, Tensor]:
    """The inputs of a layer and the weights of the query classes."""
    q, k, options = case.inputs(dtype)
    moved = _moved(options, device)
    weights = moved.get("queries", torch.ones(1, 1, case.length, device=device))
    keys, scale = k.to(device), case.width**-0.5
    return AttentionInputs(
        0, q.to(device), keys, keys, scale, moved.get("visible"), causal=moved["causal"]
    ), weights


def kernels_ran(case: Case, dtype: torch.dtype, device: str) -> bool:
    """Whether the kernels computed a case that was run: after a launch that fails, tiles take their place."""
    heads = torch.empty(1, 1, 1, case.width, dtype=dtype, device=device)
    return heads.is_cuda and usable(heads, heads)


def _moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


@torch.no_grad()
def main(dtype: str = "bfloat16", small: Annotated[bool, typer.Option("--small")] = False, rounds: int = 5) -> None:
    """Print one line per case; an error above the tolerance, or tiles on a GPU, make the exit status 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["DLM_LENS_KERNELS"] = "on"
    kind, limit = getattr(torch, dtype), TOLERANCE[dtype]
    wrong: list[Case] = []
    not_launched: list[Case] = []
    print(f"\nreceived attention in {dtype}, tolerance {limit:g}; {machine()}\n")
    print(
        "| S | width | variant | path | error of sums | lse | queries | ms | over tiles | sdpa | stats over tiles |"
    )
    print("|---:|---:|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for case in cases(small):
        found = errors(case, kind, device)
        time = ratios(case, kind, device, 1 if small else rounds)
        sdpa = f"{time['over sdpa']:.2f}" if "over sdpa" in time else ""
        ran = kernels_ran(case, kind, device)
        path = "kernels" if ran else "tiles"
        line = f"| {case.length} | {case.width} | {case.variant} | {path} |"
        line += "".join(f" {error:.1e} |" for error in found)
        line += f" {time['seconds'] * 1e3:.3f} | {time['over tiles']:.2f} | {sdpa} |"
        print(f"{line} {time['stats over tiles']:.2f} |", flush=True)
        if not all(error <= limit for error in found):
            wrong.append(case)
        if device == "cuda" and not ran:
            not_launched.append(case)
    if wrong:
        print(f"\nabove the tolerance of {limit:g}: {wrong}")
    if not_launched:
        print(f"\nthe kernels could not be launched, and tiles took their place: {not_launched}")
    if wrong or not_launched:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
