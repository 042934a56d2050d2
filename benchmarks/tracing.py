"""Cost of a trace: `denoise` with all logits against the same run under nnsight.

`python -m benchmarks.tracing` prints milliseconds per step (CPU time; medians of the differences within a round of
turns); "untraced" is `lm.generate` without a `with`.
`--calls` prints microseconds of one call of a module, a hook point, instead.
`--memory` measures instead the peak memory (max RSS) of runs that save one layer's reduced statistic at every step,
each in a process of its own.
"""

import os
import resource
import subprocess
import sys
import timeit
from typing import Annotated, Any

import torch
import typer

import dlm_lens
from benchmarks.timing import machine, on_device, side_by_side
from dlm_lens.attention import hooked_attentions
from dlm_lens.testing import tiny

LAYERS = 8


def build(length: int, width: int = 128) -> Any:
    """A random LLaDA of 8 layers."""
    return tiny(
        "llada",
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=length,
        initializer_range=0.05,
    )


def untraced(lm: Any, ids: list[int], run: dict[str, int]) -> None:
    """The plain call."""
    lm.generate(ids, **run)


def nothing(lm: Any, ids: list[int], run: dict[str, int]) -> None:
    """A trace that visits every step and reads nothing."""
    with lm.generate(ids, **run) as tracer:
        for _step in tracer.steps:
            pass


def one_pattern(lm: Any, ids: list[int], run: dict[str, int]) -> None:
    """One layer's column sums, saved at every step."""
    with lm.generate(ids, **run) as tracer:
        sums = [].save()
        for _step in tracer.steps:
            sums.append(lm.layers[4].attn.pattern.sum(-2))


def all_patterns(lm: Any, ids: list[int], run: dict[str, int]) -> None:
    """Every layer's column sums, saved at every step."""
    with lm.generate(ids, **run) as tracer:
        sums = [].save()
        for _step in tracer.steps:
            for layer in range(LAYERS):
                sums.append(lm.layers[layer].attn.pattern.sum(-2))


def all_edited(lm: Any, ids: list[int], run: dict[str, int]) -> None:
    """Every layer's pattern, read and assigned at every step."""
    with lm.generate(ids, **run) as tracer:
        for _step in tracer.steps:
            for layer in range(LAYERS):
                lm.layers[layer].attn.pattern = lm.layers[layer].attn.pattern * 0.5


TRACES = {
    "wrapped, untraced": untraced,
    "traced, nothing read": nothing,
    "one pattern": one_pattern,
    "all patterns": all_patterns,
    "all patterns edited": all_edited,
}


def times(length: int, steps: int, rounds: int) -> None:
    """Print the table of milliseconds per step."""
    raw, ids = on_device(build(length)), [1] * (length - steps)
    lm = dlm_lens.DiffusionLM(on_device(build(length)))
    run = {"steps": steps, "gen_length": steps, "block_length": steps}
    candidates: dict[str, Any] = {"denoise": lambda: dlm_lens.denoise(raw, ids, logits="all", **run)}
    for name, trace in TRACES.items():
        candidates[name] = lambda trace=trace: trace(lm, ids, run)
    seconds = side_by_side(candidates, rounds, clock="cpu")
    print(f"\n{LAYERS} layers, {length} positions, {steps} steps ({machine()})\n")
    print("| | ms per step | over denoise, ms | over untraced, ms | ratio to denoise |\n|---|---:|---:|---:|---:|")
    for name, value in seconds.items():
        over = (seconds.difference(name, base) * 1e3 / steps for base in ("denoise", "wrapped, untraced"))
        cells = " | ".join(f"{each:+.2f}" for each in over)
        print(f"| {name} | {value * 1e3 / steps:.2f} | {cells} | {seconds.ratio(name, 'denoise'):.3f} |")


class _Clock:
    """A hook that measures calls of another module of the model while the run goes on."""

    site, layers = "resid", (LAYERS - 1,)

    def __init__(self, measure: Any) -> None:
        self.measure, self.seconds = measure, 0.0

    def __call__(self, value: torch.Tensor, hook: Any) -> torch.Tensor:
        """Measure once, and change nothing."""
        self.seconds = self.seconds or self.measure()
        return value


def calls(length: int, number: int = 10_000, turns: int = 15) -> None:
    """Print the table of microseconds per call of one module without work of its own."""
    plain, lm = build(length), dlm_lens.DiffusionLM(build(length))
    value = torch.zeros(1, length, 8, 16)

    def least(model: Any) -> float:
        point = hooked_attentions(model)[0].hook_v
        return min(timeit.repeat(lambda: point(value), number=number, repeat=turns)) / number

    clock = _Clock(lambda: least(lm._module))
    with lm.generate([1] * (length - 1), steps=1, gen_length=1, block_length=1, hooks=[clock]) as tracer:
        for _step in tracer.steps:
            pass
    rows = {"a module of the plain model": least(plain), "wrapped, no trace": least(lm._module)}
    rows["wrapped, in a trace that reads nothing"] = clock.seconds
    print(f"\n({machine()})\n\n| | us per call |\n|---|---:|")
    for name, seconds in rows.items():
        print(f"| {name} | {seconds * 1e6:.2f} |")


def peaks(steps: int) -> None:
    """Print the table of peak memory; memory that grows with the number of steps is kept, not freed."""
    print(
        f"\nMax RSS, MiB ({machine()})\n\n| positions | one step's patterns | {steps} steps | {4 * steps} steps |"
    )
    print("|---:|---:|---:|---:|")
    for length in (256, 512, 768):
        row = [_peak(length, many) for many in (steps, 4 * steps)]
        pattern = 8 * length**2 * 4 * LAYERS / 2**20
        print(f"| {length} | {pattern:.0f} | {row[0]:.0f} | {row[1]:.0f} |")


def _peak(length: int, steps: int) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.tracing",
        "--length",
        str(length),
        "--steps",
        str(steps),
        "--child",
    ]
    # glibc raises its threshold when large blocks are freed; the heap then fragments and hides the memory in use.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def main(
    length: Annotated[int, typer.Option(help="positions of the canvas")] = 96,
    steps: Annotated[int, typer.Option(help="denoising steps, and tokens of the answer")] = 32,
    rounds: Annotated[int, typer.Option(help="turns of each candidate")] = 25,
    one_call: Annotated[bool, typer.Option("--calls", help="measure one call of a module instead")] = False,
    memory: Annotated[bool, typer.Option(help="measure peak memory instead of time")] = False,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    if child:
        all_patterns(
            dlm_lens.DiffusionLM(build(length, width=64)),
            [1] * (length - steps),
            dict.fromkeys(("steps", "gen_length"), steps),
        )
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    elif one_call:
        calls(length)
    elif memory:
        peaks(min(steps, 8))
    else:
        times(length, steps, rounds)


if __name__ == "__main__":
    typer.run(main)
