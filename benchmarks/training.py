"""A training step with the head on masked positions only, against a plain one that computes all logits.

`python -m benchmarks.training [--layers 2 --length 512 --batch 4]`: Qwen2.5-0.5B's shape (width 896, vocabulary of
151,936, tied head) with few layers on a CPU; on a GPU, where there is one, `--layers 24 --length 2048 --batch 8` is
the whole model, in bfloat16. Both sides get the same canvases and compute forward, backward, clipping and an AdamW
step (ours as the trainer does, with its optimiser and `SwiGLU`). The third is ours with `checkpointing: true`. The
losses must agree.

Each side runs in processes of its own: rounds for the time, and one more for the peak of its memory, in which glibc
returns every freed block of a MiB at once. Otherwise its heap hides how much is in use.
"""

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.timing import machine
from dlm_lens.testing import tiny
from dlm_lens.training import Example, MaskedDiffusionLoss, Rows, masked_loss
from dlm_lens.training.optimizers import build_optimizer
from dlm_lens.training.settings import Optimisation
from dlm_lens.training.swiglu import SwiGLU

VOCABULARY = 151_936
SIDES = ("all logits", "ours", "ours, activation checkpointing")


def build(layers: int, length: int) -> Any:
    """Qwen2.5-0.5B's shape with `layers` layers and one sink token."""
    return tiny(
        "sink_qwen",
        num_sinks=1,
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=length + 1,
        initializer_range=0.02,
        tie_word_embeddings=True,
        mask_token_id=VOCABULARY - 1,
    )


def all_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The published loop, restated: all logits, then the cross entropy of the masked ones, divided by tau."""
    logits = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1)
    losses = nn.functional.cross_entropy(logits[inputs["outputs"]].float(), inputs["targets"], reduction="none")
    return (losses * inputs["weights"]).sum()


def peak(device: str) -> float:
    """MiB at the highest: of the process, or of the GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(side: str, layers: int, length: int, batch: int, steps: int) -> dict[str, Any]:
    """Seconds of the fastest step, peak memory in MiB, and the losses of all steps."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(layers, length).train().to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ours = side != SIDES[0]
    if ours:
        optimizer = build_optimizer(model, Optimisation(rate=1e-4, betas=(0.9, 0.999), weight_decay=0.01))
    if side == SIDES[2]:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": SwiGLU.recomputed})
    objective = MaskedDiffusionLoss(low_discrepancy=True).for_model(model, batch)
    loss_of = masked_loss if ours else lambda model, **inputs: all_logits(model, inputs)
    generator = torch.Generator().manual_seed(0)
    losses, seconds = [], []
    for step in range(steps + 1):
        tokens = torch.randint(0, 150_000, (batch, length), generator=generator)
        rows = Rows.of([Example(row) for row in tokens], length, 0)
        inputs = objective.prepare(rows, range(step * batch, (step + 1) * batch), 0)
        count = float(inputs.pop("count"))
        inputs = {name: value.to(device) for name, value in inputs.items()}
        started = time.perf_counter() if device == "cuda" else time.process_time()
        with SwiGLU() if side == SIDES[1] else nullcontext():
            with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext():
                loss = loss_of(model, **inputs) / count
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ended = time.perf_counter() if device == "cuda" else time.process_time()
        if step:  # the first one warms up
            seconds.append(ended - started)
    # Masks differ in number, so that steps do too; their sum is the same for both sides.
    return {"seconds": sum(seconds) / max(1, len(seconds)), "peak": peak(device), "losses": losses}


def _run(side: str, options: list[str], **env: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.training", *options, f"--side={side}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    layers: int = 2,
    length: int = 512,
    batch: int = 4,
    steps: int = 3,
    rounds: int = 2,
    side: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure all sides in turn and print the ratios of the better rounds."""
    if side:
        print(json.dumps(measure(side, layers, length, batch, steps)))
        return
    torch.set_num_threads(1)  # as the sides do
    results: dict[str, Any] = {}
    shape = [f"--layers={layers}", f"--length={length}", f"--batch={batch}"]
    for _ in range(rounds):
        for name in SIDES:
            found = _run(name, [*shape, f"--steps={steps}"])
            results[name] = min(results.get(name, found), found, key=lambda result: result["seconds"])
    if not torch.cuda.is_available():
        for name in SIDES:
            results[name]["peak"] = _run(name, [*shape, "--steps=1"], MALLOC_MMAP_THRESHOLD_=str(2**20))["peak"]
    theirs, *mine = (results[name] for name in SIDES)
    clock = "seconds" if torch.cuda.is_available() else "CPU seconds"
    print(f"\ntraining step, {layers} layers of width 896, {batch} x {length} positions; {machine()}\n")
    print(f"| | {clock} per step | ratio | peak MiB | ratio of peaks |\n|---|---:|---:|---:|---:|")
    for name, result in results.items():
        time_ratio, peak_ratio = result["seconds"] / theirs["seconds"], result["peak"] / theirs["peak"]
        print(f"| {name} | {result['seconds']:.2f} | {time_ratio:.2f} | {result['peak']:.0f} | {peak_ratio:.3f} |")
    worst = max(
        abs(a - b) / abs(b) for result in mine for a, b in zip(result["losses"], theirs["losses"], strict=True)
    )
    print(f"\nlargest relative difference of a loss: {worst:.1e}")


if __name__ == "__main__":
    typer.run(main)
