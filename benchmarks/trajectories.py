"""Time and memory of `trajectories` on a long run.

`python -m benchmarks.trajectories [--steps 256 --layers 32 --heads 32 --length 1024 --dtype float32]`; the scores
are those of random patterns with planted sinks: in every head one that stays and one that moves every 16 steps.
"""

import resource
import time

import torch
import typer

from benchmarks.timing import machine
from dlm_lens.sinks import AboveMean, AboveStd, Received, eps_sweep, sink_profile, trajectories


def planted(steps: int, layers: int, heads: int, length: int, dtype: torch.dtype) -> Received:
    """Scores around 1 with a static sink and one that moves to the right, drawn layer by layer."""
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(steps, 1, layers, heads, length, dtype=dtype)
    step = torch.arange(steps)[:, None]
    for layer in range(layers):
        noise = torch.rand(steps, heads, length, generator=generator).mul_(2)
        still, moving = torch.randint(0, length, (2, heads), generator=generator)
        noise.scatter_(-1, still.expand(steps, -1)[..., None], 9.0)
        noise.scatter_(-1, ((moving + 7 * (step // 16)) % length)[..., None], 6.0)
        values[:, 0, layer] = noise
    return Received(
        values=values,
        expected=torch.ones(steps, 1, 1, 1, length),
        counted=torch.full((steps, 1), length),
        layers=tuple(range(layers)),
    )


def main(
    steps: int = 256,
    layers: int = 32,
    heads: int = 32,
    length: int = 1024,
    dtype: str = "float32",
    threads: int = 1,
) -> None:
    """Follow the sinks of every head, once per rule."""
    torch.set_num_threads(threads)
    received = planted(steps, layers, heads, length, getattr(torch, dtype))
    gibibytes = received.values.nbytes / 2**30
    size = f"{steps} steps x {layers} layers x {heads} heads x {length} keys"
    print(f"{size}, {dtype}, {gibibytes:.2f} GiB; {machine()}")
    print("\n| | seconds | CPU seconds | peak MiB beyond the scores |\n|---|---:|---:|---:|")
    for name, run in {
        "trajectories, AboveMean(3.0), per head": lambda: trajectories(received, AboveMean(3.0)).summary(),
        "trajectories, AboveStd(3.0), per head": lambda: trajectories(received, AboveStd(3.0)).summary(),
        "eps_sweep, 9 values": lambda: eps_sweep(received, [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5]),
        "sink_profile, AboveMean(3.0)": lambda: sink_profile(received, AboveMean(3.0)),
    }.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started, computing = time.perf_counter(), time.process_time()
        run()
        seconds, busy = time.perf_counter() - started, time.process_time() - computing
        beyond = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"| {name} | {seconds:.1f} | {busy:.1f} | {beyond / 2**10:.0f} |")


if __name__ == "__main__":
    typer.run(main)
