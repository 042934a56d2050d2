"""Training of Qwen2.5-0.5B's shape under FSDP2 against one plain process: speed, peak memory, equal losses.

`python -m benchmarks.device.fsdp [--small]` starts torchrun with one process per GPU (one is a valid FSDP run) and
then one plain process. The objective's sum of losses is that of `benchmarks.training`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.timing import machine
from benchmarks.training import VOCABULARY, build, peak
from dlm_lens.testing import tiny
from dlm_lens.training.losses import loss_forward

TOLERANCE = 0.02
"""Of a loss: in bfloat16 FSDP casts weights once, autocast casts per operation."""


def batch(vocabulary: int, rows: int, length: int, step: int, device: str) -> dict[str, torch.Tensor]:
    """A canvas, its masked places as flat indices, targets and weights; half of the places are masked."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocabulary - 1, (rows, length), generator=generator)
    outputs = torch.randperm(rows * length, generator=generator)[: rows * length // 2].sort().values
    targets = ids.flatten()[outputs]
    canvas = ids.flatten().index_fill(0, outputs, vocabulary - 1).view_as(ids)
    weights = torch.full((len(outputs),), 1 / len(outputs))
    values = {"input_ids": canvas, "outputs": outputs, "targets": targets, "weights": weights}
    return {name: value.to(device) for name, value in values.items()}


def sharded(model: Any, gpu: bool) -> Any:
    """Shard every layer, then the rest, as accelerate does with transformers' layers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if gpu else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def measure(side: str, small: bool, steps: int) -> dict[str, Any]:
    """Seconds per step, peak MiB of this process, and the losses."""
    from benchmarks.recording import clock

    gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    if side == "fsdp":
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    length, rows, vocabulary = (16, 2, 64) if small else (2048, 8, VOCABULARY)
    model: Any = tiny("sink_qwen", num_sinks=1) if small else build(24, length)
    model = model.train().to(device)
    model = sharded(model, gpu) if side == "fsdp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, seconds = [], []
    for step in range(steps + 1):
        inputs = batch(vocabulary, rows, length, step, device)
        started = clock()
        with torch.autocast("cuda", torch.bfloat16, enabled=gpu and side == "plain"), loss_forward(model):
            loss = model(**inputs)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds += [clock() - started] if step else []
    if side == "fsdp":
        torch.distributed.destroy_process_group()
    return {"seconds": min(seconds), "peak": peak("cuda" if gpu else "cpu"), "losses": losses}


def main(
    small: Annotated[bool, typer.Option("--small")] = False,
    steps: int = 6,
    side: Annotated[str, typer.Option(hidden=True)] = "",
    result: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure both sides; unequal losses make the exit status 1."""
    if side:
        found = measure(side, small, steps)
        if os.environ.get("RANK", "0") == "0":
            Path(result).write_text(json.dumps(found), encoding="utf-8")
        return
    processes, found = max(1, torch.cuda.device_count()), {}
    for name in ("plain", "fsdp"):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "result.json")
            command = [sys.executable, *(launcher if name == "fsdp" else []), "-m", "benchmarks.device.fsdp"]
            command += [f"--side={name}", f"--steps={steps}", f"--result={path}", *(["--small"] if small else [])]
            subprocess.run(command, check=True)
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    print(f"\ntraining step, FSDP2 over {processes} process(es); {machine()}\n")
    print("| | seconds per step | over plain | peak MiB | over plain |\n|---|---:|---:|---:|---:|")
    plain = found["plain"]
    for name, each in found.items():
        ratios = each["seconds"] / plain["seconds"], each["peak"] / plain["peak"]
        print(f"| {name} | {each['seconds']:.3f} | {ratios[0]:.2f} | {each['peak']:.0f} | {ratios[1]:.2f} |")
    pairs = zip(found["fsdp"]["losses"], plain["losses"], strict=True)
    worst = max(abs(one - other) / abs(other) for one, other in pairs)
    print(f"\nlargest relative difference of a loss: {worst:.1e} (at most {TOLERANCE})")
    if not worst <= TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
