"""LLaDA-8B's shape with random weights in bfloat16: loaded from shards, denoised, recorded, masked, scored.

`python -m benchmarks.device.llada [--small] [--length 512 --steps 8 --rounds 2]`. The rows are those of
`benchmarks.recording`; each is a run of the same prompt, and its time and peak memory are compared with the plain
path's (`denoise`). A row that fails is printed with its error, the others go on, and the exit status is 1.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

import dlm_lens as dl
from benchmarks.recording import PLAIN, candidates, clock
from benchmarks.sampling import VOCABULARY
from benchmarks.timing import machine
from dlm_lens.testing import tiny

HOSTS = {"transformerlens": "transformer_lens", "nnsight": "nnsight"}
EIGHT_BILLION = {
    "vocab_size": VOCABULARY, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "mask_token_id": VOCABULARY - 1,
}  # fmt: skip
SMALL = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "mask_token_id": 1023,
}  # fmt: skip


def saved(shape: dict[str, int], length: int, device: str, folder: str) -> float:
    """Write the checkpoint in shards of 2 GB; returns its size in GiB. The weights are drawn on `device`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = tiny("llada", max_position_embeddings=length, initializer_range=0.02, **shape)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder, max_shard_size="2GB")
    return sum(weight.nbytes for weight in model.parameters()) / 2**30


def likelihood(model: Any, length: int, small: bool) -> Any:
    """Monte Carlo likelihood of 8 answers of 16 tokens after one prompt."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 1000, (length - 16,), generator=generator).tolist()
    answers = torch.randint(0, 1000, (8, 16), generator=generator).tolist()
    return dl.log_likelihood(model, [prompt] * 8, answers, samples=2 if small else 16)


def measured(run: Callable[[], Any], rounds: int, gpu: bool) -> tuple[float, float]:
    """Best seconds after a turn to warm up, and the GPU's peak in MiB beyond what lay there before."""
    best, peak = float("inf"), 0.0
    for turn in range(rounds + 1):
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if gpu else 0
        started = clock()
        run()
        if turn:
            best = min(best, clock() - started)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if gpu else 0.0
    return best, peak


def main(
    length: int = 512, steps: int = 8, rounds: int = 2, small: Annotated[bool, typer.Option("--small")] = False
) -> None:
    """Print one line per row; ratios are to the plain path."""
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    if small:
        length, steps, rounds = 96, 2, 1
    with tempfile.TemporaryDirectory() as folder:
        size = saved(SMALL if small else EIGHT_BILLION, length, device, folder)
        if gpu:
            torch.cuda.empty_cache()
        started = time.perf_counter()
        model = dl.load(folder, device_map=device, dtype=torch.bfloat16)
        taken = time.perf_counter() - started
    print(f"\n{size:.2f} GiB in bfloat16, loaded from shards in {taken:.1f} s; {machine()}", flush=True)
    rows = candidates(model, length, steps)
    rows = {PLAIN: rows.pop(PLAIN), **rows, "likelihood": lambda: likelihood(model, length, small)}
    print(f"\n{length} positions, {steps} steps, bfloat16; {machine()}\n")
    print("| | seconds | over denoise | peak MiB beyond the model | over denoise |\n|---|---:|---:|---:|---:|")
    base, failed = (float("nan"), float("nan")), []
    for name, run in rows.items():
        if name in HOSTS and find_spec(HOSTS[name]) is None:
            print(f"| {name} | skipped: {HOSTS[name]} is not installed | | | |", flush=True)
            continue
        try:
            seconds, peak = measured(run, rounds, gpu)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")[:200]
            print(f"| {name} | failed: {said} | | | |", flush=True)
            failed.append(name)
            continue
        base = (seconds, peak) if name == PLAIN else base
        more = f"{peak / base[1]:.2f}" if base[1] else ""
        print(f"| {name} | {seconds:.3f} | {seconds / base[0]:.3f} | {peak:.0f} | {more} |", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
