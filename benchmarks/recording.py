"""Cost of recording: statistics of every step against plain denoising, and against ways that keep patterns.

`python -m benchmarks.recording [--lengths 256,512,1024] [--rows received,all,all-torch] [--memory]`. Rows that end
in -torch do without the kernels of numba and Triton. On a GPU the model has LLaDA-8B's shape in bfloat16
(`--lengths 512,1024,4096`); the rows are the same.

Time: the candidates take turns, and the ratio of their best times is reported; on a CPU it is the CPU time of the
process, which other jobs on the machine disturb less than wall time. Memory: each row in a process of its own; the
difference of its peak (max RSS, or CUDA's peak) to the plain run's, and the size of the statistics.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

import dlm_lens
from benchmarks.sampling import VOCABULARY, restated
from benchmarks.timing import machine, without_kernels
from dlm_lens import hooks
from dlm_lens.attention import hooked_attentions
from dlm_lens.attention.softmax_variants import Softmax
from dlm_lens.testing import tiny

ANSWER, BLOCK = 64, 32
PLAIN = "denoise"
STATISTICS = (
    dlm_lens.ReceivedAttention(("all", "masked", "unmasked")),
    dlm_lens.ValueNorm("both"),
    dlm_lens.recording.KeyNorm("both"),
    dlm_lens.recording.WeightedValue(),
    dlm_lens.recording.ResidualNorm(),
    dlm_lens.recording.MassiveActivations(),
    dlm_lens.recording.UpdateNorm(),
    dlm_lens.TopKeys(),
)
PATTERN_STATISTICS = (dlm_lens.recording.AttentionEntropy(), dlm_lens.RegionMass())


def build(length: int, layers: int = 0, softmax: Softmax = "standard") -> Any:
    """A random LLaDA: 12 layers (or so many) of width 768 on a CPU, the 8B's shape in bfloat16 on a GPU."""
    wide = torch.cuda.is_available()
    width, depth, heads = (4096, 32, 32) if wide else (768, 12, 12)
    model = tiny(
        "llada",
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=12_288 if wide else 3 * width,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=length,
        mask_token_id=VOCABULARY - 1,
        initializer_range=0.02,
    )
    model.config.softmax = softmax
    return model.to("cuda", torch.bfloat16) if wide else model


def candidates(model: Any, length: int, steps: int) -> dict[str, Callable[[], Any]]:
    """Every row: a run of the same prompt and settings."""
    prompt = torch.randint(0, 1000, (1, length - ANSWER), generator=torch.Generator().manual_seed(0))
    prompt = prompt.to(model.device)
    settings: dict[str, Any] = {"steps": steps, "gen_length": ANSWER, "block_length": BLOCK}

    def record(*reducers: Any) -> Any:
        return dlm_lens.record(model, prompt, reducers, **settings)

    return {
        "reference": lambda: restated(model, prompt, steps, ANSWER, BLOCK, 0.0),
        PLAIN: lambda: dlm_lens.denoise(model, prompt, **settings),
        "received": lambda: record(dlm_lens.ReceivedAttention()),
        "statistics": lambda: record(*STATISTICS),
        "all": lambda: record(*STATISTICS, *PATTERN_STATISTICS),
        "received-torch": lambda: without_kernels(lambda: record(dlm_lens.ReceivedAttention())),
        "all-torch": lambda: without_kernels(lambda: record(*STATISTICS, *PATTERN_STATISTICS)),
        "masked": lambda: dlm_lens.denoise(model, prompt, hooks=[hooks.mask_top_sinks(5)], **settings),
        "patterns": lambda: _reduced_in_hooks(model, prompt, settings),
        "eager": lambda: _eager(model, prompt, settings),
        "transformerlens": lambda: _bridged(model, prompt, settings),
        "nnsight": lambda: _traced(model, prompt, settings),
    }


def _reduced_in_hooks(model: Any, prompt: Tensor, settings: dict[str, Any]) -> list[Tensor]:
    """Sum patterns in a PyTorch hook; one layer's pattern exists at a time."""
    kept: list[Tensor] = []
    points = [attention.hook_pattern for attention in hooked_attentions(model)]
    handles = [p.register_forward_hook(lambda m, i, pattern: kept.append(pattern.sum(-2).cpu())) for p in points]
    try:
        dlm_lens.denoise(model, prompt, **settings)
    finally:
        for handle in handles:
            handle.remove()
    return kept


@torch.no_grad()
def _eager(model: Any, prompt: Tensor, settings: dict[str, Any]) -> list[Any]:
    """Transformers' way: the patterns of all layers at once, at every step, from the model's own forward."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        kept: list[Any] = []
        dlm_lens.denoise(
            model,
            prompt,
            on_canvas=lambda step, canvas: _keep(kept, model, canvas) if step < settings["steps"] else None,
            **settings,
        )
    finally:
        model.set_attn_implementation(before)
    return kept


def _keep(kept: list[Any], model: Any, canvas: Tensor) -> None:
    kept.append([p.cpu() for p in model.get_decoder()(canvas, output_attentions=True, use_cache=False).attentions])


def _bridged(model: Any, prompt: Tensor, settings: dict[str, Any]) -> Any:
    if not hasattr(model, "_benchmark_bridge"):
        model._benchmark_bridge = (dlm_lens.bridge(model),)  # a module itself would become a child of the model
    return model._benchmark_bridge[0].denoise_with_cache(
        prompt, names_filter=lambda name: name.endswith("attn.hook_pattern"), device="cpu", **settings
    )


def _traced(model: Any, prompt: Tensor, settings: dict[str, Any]) -> Any:
    lm = dlm_lens.DiffusionLM(model, check=False)
    with lm.generate(prompt, **settings) as tracer:
        kept = [].save()
        for _step in tracer.steps[:]:
            for layer in lm.layers:
                kept.append(layer.attn.pattern.cpu())
    return kept


def clock() -> float:
    """CPU seconds of this process, or seconds with a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def times(
    length: int, steps: int, rounds: int, rows: list[str], layers: int = 0, softmax: Softmax = "standard"
) -> dict[str, float]:
    """Best seconds per step of every row; the candidates take turns."""
    model = build(length, layers, softmax)
    chosen = {name: run for name, run in candidates(model, length, steps).items() if name in rows}
    best = dict.fromkeys(chosen, float("inf"))
    for turn in range(rounds + 1):
        for name, run in chosen.items():
            started = clock()
            run()
            if turn:
                best[name] = min(best[name], (clock() - started) / steps)
    return best


def allocated(run: Callable[[], Any]) -> tuple[float, Any]:
    """MiB of tensors that torch has allocated on the CPU at the peak of a run, exactly, and the run's result.

    Neither what existed before counts nor what a library allocates for itself.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(live) / 2**20, result


def peak(length: int, steps: int, row: str, layers: int = 0, exact: bool = False) -> dict[str, float]:
    """MiB of one row: its peak, and the statistics that it returned."""
    model = build(length, layers)
    run = candidates(model, length, steps)[row]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    most, result = allocated(run) if exact else (0.0, run())
    size = sum(array.nbytes for array in result.arrays.values()) if hasattr(result, "arrays") else 0
    if torch.cuda.is_available():
        return {"peak": torch.cuda.max_memory_allocated() / 2**20, "statistics": size / 2**20}
    most = most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak": most, "statistics": size / 2**20}


def memory(
    lengths: list[int], steps: int, rows: list[str], plot: Path | None = None, options: Sequence[str] = ()
) -> None:
    """Print the difference of each row's peak to the plain run's, and draw it."""
    beyond: dict[str, list[float]] = {row: [] for row in rows}
    times: list[str] = []
    print(f"\nMiB beyond plain denoising, {steps} steps (in brackets: the statistics returned); {machine()}\n")
    print("| positions | " + " | ".join(rows) + " |\n|---:|" + "---:|" * len(rows))
    for length in lengths:
        found = {}
        for row in [PLAIN, *rows]:
            command = [
                sys.executable,
                "-m",
                "benchmarks.recording",
                f"--lengths={length}",
                f"--steps={steps}",
                *options,
            ]
            done = subprocess.run([*command, f"--row={row}"], capture_output=True, text=True, check=True)
            found[row] = json.loads(done.stdout.splitlines()[-1])
        for row in rows:
            beyond[row].append(found[row]["peak"] - found[PLAIN]["peak"])
        cells = [f"{found[r]['peak'] - found[PLAIN]['peak']:.1f} ({found[r]['statistics']:.1f})" for r in rows]
        print(f"| {length} | " + " | ".join(cells) + " |", flush=True)
        sizes = [found[row]["statistics"] for row in rows]
        cells = [f"{beyond[r][-1] / size:.2f}" if size else "-" for r, size in zip(rows, sizes, strict=True)]
        times.append(f"| {length} | " + " | ".join(cells) + " |")
    heads = "| positions | " + " | ".join(rows) + " |\n|---:|" + "---:|" * len(rows)
    print("\nthe same over the size of the statistics returned\n", heads, *times, sep="\n")
    print("\ngrowth of the same from one length to the next\n", heads, sep="\n")
    for at, length in enumerate(lengths[1:], 1):
        cells = [f"{beyond[row][at] / beyond[row][at - 1]:.2f}" for row in rows]
        print(f"| {length} | " + " | ".join(cells) + " |")
    if plot is not None:
        draw(lengths, beyond, plot)


def draw(lengths: list[int], beyond: dict[str, list[float]], path: Path) -> None:
    """Peak memory beyond plain denoising over the length."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, values in beyond.items():
        axes.plot(lengths, values, marker="o", label=name)
    axes.set(xlabel="positions S", ylabel="MiB beyond plain denoising", xticks=lengths)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(
    lengths: str = "256,512,1024",
    steps: int = 2,
    rounds: int = 5,
    rows: str = "",
    with_memory: Annotated[bool, typer.Option("--memory", help="Peak memory in place of time.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Where to draw the memory over the lengths.")] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model; 0 for 12, or the 8B's 32 on a GPU.")] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="Peak of torch's own allocations, not max RSS.")] = False,
    off_by_one: Annotated[bool, typer.Option("--off-by-one", help="Time a softmax with a spare entry.")] = False,
    row: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure and print the tables."""
    torch.set_num_threads(1)
    sizes = [int(text) for text in lengths.split(",")]
    if row:
        print(json.dumps(peak(sizes[0], steps, row, layers, exact)))
        return
    named = rows.split(",") if rows else []
    if with_memory:
        every = ["received", "statistics", "all", "masked", "patterns", "eager", "nnsight"]
        memory(sizes, steps, named or every, plot, [f"--layers={layers}", *(["--exact"] if exact else [])])
        return
    for length in sizes:
        everything = ("reference", PLAIN, "received", "statistics", "all", "masked", "patterns", "eager")
        chosen = [PLAIN, *(named or [*everything, "transformerlens", "nnsight"])]
        found = times(length, steps, rounds, chosen, layers, "off_by_one" if off_by_one else "standard")
        print(f"\n{length} positions, {ANSWER} of them answer, blocks of {BLOCK}, {steps} steps; {machine()}\n")
        print("| | seconds per step | over denoise |\n|---|---:|---:|")
        for name, value in found.items():
            print(f"| {name} | {value:.3f} | {value / found[PLAIN]:.3f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
