"""Received attention without a pattern: per layer, as a share of a denoising step, and its memory.

`python -m benchmarks.received [--threads 1]`, on the CPU or on a GPU if there is one; `--memory` for the memory
(on a CPU: max RSS, each point in a process of its own). The layer is that of a model with 12 heads of width 64
(`--heads 32 --width 128 --kv 32` for LLaDA-8B's), the model that of `benchmarks.sampling` with 12 layers of 768.
"""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.sampling import build
from benchmarks.timing import machine, print_table, side_by_side, without_kernels
from dlm_lens.attention import QUERY_STATS, AttentionInputs, pattern_stats, pattern_tiles, received_by_class
from dlm_lens.attention.fused_lse import fused_lse
from dlm_lens.attention.received import received_sums

LENGTHS = (64, 256, 512, 1024)
NEEDED = 32
"""Rows of logits in a denoising step: one block."""


def layer_inputs(length: int, heads: int, kv: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the layout in which a model's attention has them."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    shapes = [(1, length, count, width) for count in (heads, kv, kv)]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes)
    return q, k, v


def materialised(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The direct way: softmax of all scores in float32, then the column sum."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ keys.mT * scale).softmax(-1, dtype=torch.float32).sum(-2)


def summed_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Sum the tiles of the pattern, as a user's own reducer does."""
    sums = torch.zeros(*q.shape[:2], k.shape[2], device=q.device)
    for _, pattern in pattern_tiles(AttentionInputs(0, q, k, v, scale)):
        sums += pattern.sum(-2)
    return sums


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The fused attention of a layer and the log-sum-exp that its kernel returns, on a CPU."""
    with fused_lse(q, k, None) as found:
        scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
    return found.value


def classes(length: int, device: torch.device) -> Tensor:
    """Four classes of queries: all, first half, second half, last block."""
    weights = torch.zeros(1, 4, length, device=device)
    weights[:, 0], weights[:, 1, : length // 2], weights[:, 2, length // 2 :] = 1, 1, 1
    weights[:, 3, -NEEDED:] = 1
    return weights


def per_layer(length: int, heads: int, kv: int, width: int) -> None:
    """One layer's statistic against one layer's attention."""
    q, k, v = layer_inputs(length, heads, kv, width)
    scale, split = width**-0.5, classes(length, q.device)
    padding = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    padding[..., : length // 8] = False
    inputs = AttentionInputs(0, q, k, v, scale)
    known = replace(inputs, lse=attention_with_lse(q, k, v))
    seconds = side_by_side(
        {
            "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=kv != heads),
            "sdpa, its lse taken": lambda: attention_with_lse(q, k, v),
            "received_sums": lambda: received_sums(q, k, scale=scale),
            "received_sums, 4 classes": lambda: received_sums(q, k, scale=scale, queries=split),
            "received_sums, 4 classes, lse known": lambda: received_by_class(known, split),
            "received_sums, padding": lambda: received_sums(q, k, scale=scale, visible=padding),
            "received_sums, causal": lambda: received_sums(q, k, scale=scale, causal=True),
            "pattern_stats, 4 classes": lambda: pattern_stats(inputs, split, QUERY_STATS),
            "pattern_stats, 4 classes, lse known": lambda: pattern_stats(known, split, QUERY_STATS),
            "received_sums, 4 classes, lse known, without kernels": lambda: without_kernels(
                lambda: received_by_class(known, split)
            ),
            "pattern_stats, 4 classes, lse known, without kernels": lambda: without_kernels(
                lambda: pattern_stats(known, split, QUERY_STATS)
            ),
            "pattern_tiles, summed": lambda: summed_tiles(q, k, v, scale),
            "materialised softmax, summed": lambda: materialised(q, k, scale),
        }
    )
    print_table(f"one layer, {heads} heads of width {width}, {length} positions; {machine()}", seconds, "sdpa")


def share_of_a_step(length: int, hidden: int, layers: int) -> None:
    """A forward pass with the logits of one block, without and with the statistic of all layers."""
    plain, measured = build(hidden, layers, length), build(hidden, layers, length)
    if torch.cuda.is_available():
        plain, measured = (model.to("cuda", torch.bfloat16) for model in (plain, measured))
    received: list[Tensor] = []
    for layer in measured.model.layers:
        add_received_hooks(layer.self_attn, received)
    ids = torch.randint(0, 1000, (1, length), device=plain.device)

    def step(model: Any) -> None:
        received.clear()
        model.lm_head(model.model(input_ids=ids).last_hidden_state[:, -NEEDED:])

    seconds = side_by_side({"step": lambda: step(plain), "step + received, all layers": lambda: step(measured)})
    assert len(received) == layers
    print_table(f"a step, {layers} layers of {hidden}, {length} positions; {machine()}", seconds, "step")


def add_received_hooks(attention: Any, received: list[Tensor]) -> None:
    """Compute the statistic in every forward pass of `attention`."""
    kept: dict[str, Tensor] = {}

    def read_q(module: Any, inputs: Any, value: Tensor) -> None:
        kept["q"] = value.transpose(1, 2)

    def read_k(module: Any, inputs: Any, value: Tensor) -> None:
        received.append(received_sums(kept.pop("q"), value.transpose(1, 2), scale=attention.scaling))

    attention.hook_rot_q.register_forward_hook(read_q)
    attention.hook_rot_k.register_forward_hook(read_k)


def peak(side: str, length: int, heads: int, kv: int, width: int) -> float:
    """Peak MiB of one call without its inputs, with its result."""
    q, k, _ = layer_inputs(length, heads, kv, width)

    def run(q: Tensor, k: Tensor) -> Tensor:
        return received_sums(q, k, scale=0.1) if side == "ours" else materialised(q, k, 0.1)

    run(q[:, :, :64], k[:, :, :64])  # libraries load and threads start
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(q, k)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(q, k)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def memory(settings: list[str]) -> None:
    """Peak memory of one call against its length."""
    print(
        f"\nMiB without the inputs; {machine()}\n\n| positions | received_sums | materialised |\n|---:|---:|---:|"
    )
    for length in (512, 1024, 2048, 4096, 8192):
        found = []
        for side in ("ours", "materialised") if length <= 4096 else ("ours",):
            point = [f"--side={side}", f"--length={length}"]
            command = [sys.executable, "-m", "benchmarks.received", *settings, *point]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(f"{json.loads(done.stdout.splitlines()[-1]):.1f}")
        print(f"| {length} | " + " | ".join([*found, "not run"][:2]) + " |")


@torch.no_grad()
def main(
    heads: int = 12,
    kv: int = 12,
    width: int = 64,
    layers: int = 12,
    threads: int = 1,
    length: int = 0,
    memory_only: Annotated[bool, typer.Option("--memory")] = False,
    side: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time one layer and one step at several lengths (or one), or measure the memory."""
    torch.set_num_threads(threads)
    if side:
        print(json.dumps(peak(side, length, heads, kv, width)))
        return
    if memory_only:
        memory([f"--heads={heads}", f"--kv={kv}", f"--width={width}", f"--threads={threads}"])
        return
    for positions in [length] if length else LENGTHS:
        per_layer(positions, heads, kv, width)
        share_of_a_step(positions, 64 * 12, layers)


if __name__ == "__main__":
    typer.run(main)
