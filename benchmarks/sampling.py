"""Cost of the logits: `denoise`, which computes those it needs, against LLaDA's loop, restated, with all of them.

`python -m benchmarks.sampling [--steps 8 --temperature 0.0]`. Each side runs in a process of its own, so that the
peak of its memory (max RSS) is its own; both must write the same tokens. `--proposals 128` times what LLaDA's and
Dream's samplers propose from so many rows of logits, with `argmax` on all rows at once and as it is.
"""

import json
import resource
import subprocess
import sys
import time
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from jaxtyping import Int
from torch import Tensor

import dlm_lens
from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.sampling import network
from dlm_lens.sampling.noise import RowNoise
from dlm_lens.sampling.samplers import dream as dream_sampler
from dlm_lens.sampling.samplers import llada as llada_sampler
from dlm_lens.sampling.settings import SpecialIds
from dlm_lens.testing import tiny

VOCABULARY = 126_464


def build(hidden: int, layers: int, length: int) -> Any:
    """A random LLaDA with the real vocabulary."""
    return tiny(
        "llada",
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=length,
        mask_token_id=VOCABULARY - 1,
    )


@torch.no_grad()
def restated(
    model: Any, prompt: Int[Tensor, "1 prompt"], steps: int, length: int, block: int, temperature: float
) -> Int[Tensor, "1 position"]:
    """The published loop, restated: all logits, and noise for all of them, at every step."""
    mask_id, generator = model.config.mask_token_id, torch.Generator().manual_seed(0)
    canvas = torch.cat([prompt, prompt.new_full((1, length), mask_id)], 1)
    blocks, width = length // block, prompt.shape[1]
    each = steps // blocks
    for number in range(blocks):
        for step in range(each):
            logits = model(input_ids=canvas).logits
            scores = logits
            if temperature > 0:
                noise = torch.rand(logits.shape, dtype=torch.float64, generator=generator)
                scores = logits.double().exp() / (-noise.log()) ** temperature
            proposal = scores.argmax(-1)
            confidence = logits.softmax(-1).gather(-1, proposal[..., None])[..., 0]
            confidence[:, width + (number + 1) * block :] = -torch.inf
            masked = canvas == mask_id
            confidence = confidence.masked_fill(~masked, -torch.inf)
            count = block // each + (step < block % each)
            chosen = confidence[0].topk(count).indices
            canvas = canvas.clone()
            canvas[0, chosen] = proposal[0, chosen]
    return canvas


def measure(side: str, hidden: int, layers: int, length: int, steps: int, temperature: float) -> dict[str, Any]:
    """Run one side: seconds, peak memory in MiB (in all, and beyond the loaded model), and the final tokens."""
    torch.set_num_threads(1)
    model = build(hidden, layers, length)
    prompt = torch.randint(0, 1000, (1, length // 2), generator=torch.Generator().manual_seed(0))
    options = {"steps": steps, "temperature": temperature}
    answer = length - prompt.shape[1]
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    started = time.perf_counter()
    if side == "ours":
        tokens = dlm_lens.denoise(model, prompt, gen_length=answer, block_length=32, **options).tokens
    else:
        tokens = restated(model, prompt, length=answer, block=32, **options)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "peak": peak, "beyond": peak - loaded, "tokens": tokens[0].tolist()}


@torch.no_grad()
def proposals(rows: int, rounds: int) -> None:
    """The proposals of a step for so many masks over Qwen's vocabulary, at temperature 0."""
    size, ids = 151_936, SpecialIds(151_000)
    canvas, here = torch.zeros(1, rows, dtype=torch.long), torch.ones(1, rows, dtype=torch.bool)
    llada = llada_sampler.LLaDAPropose(llada_sampler.LLaDASettings(rows, rows, rows), RowNoise((0,)), ids, False)
    settings = dream_sampler.DreamSettings(rows, rows, remasking="entropy")
    dream = dream_sampler.DreamPropose(settings, RowNoise((0,)), ids, False)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)
        for name, propose, module in (("LLaDA", llada, llada_sampler), ("Dream", dream, dream_sampler)):

            def at_once(propose: Any = propose, module: Any = module, logits: Tensor = logits) -> Any:
                whole, last = patch.object(network, "ROWS", rows), partial(torch.argmax, dim=-1)
                with whole, patch.object(module, "most_likely", last):
                    return propose(canvas, logits, here, here)

            calls = {"all rows, argmax": at_once, "as it is": partial(propose, canvas, logits, here, here)}
            assert all(one.equal(two) for one, two in zip(*(call() for call in calls.values()), strict=True))
            seconds = side_by_side(calls, rounds)
            print_table(f"{name}'s proposals, {rows} x {size:,}, {dtype}; {machine()}", seconds, "all rows, argmax")


def main(
    hidden: int = 384,
    layers: int = 6,
    length: int = 512,
    steps: int = 8,
    temperature: float = 0.0,
    side: Annotated[str, typer.Option(hidden=True)] = "",
    with_proposals: Annotated[int, typer.Option("--proposals", help="Masks whose proposals are timed alone.")] = 0,
) -> None:
    """Measure both sides and print the ratios."""
    if with_proposals:
        torch.set_num_threads(1)
        proposals(with_proposals, 9)
        return
    settings = [f"--{n}={v}" for n, v in [("hidden", hidden), ("layers", layers), ("length", length)]]
    settings += [f"--steps={steps}", f"--temperature={temperature}"]
    if side:
        print(json.dumps(measure(side, hidden, layers, length, steps, temperature)))
        return
    torch.set_num_threads(1)  # as the sides do
    results: dict[str, Any] = {}
    for name in ("theirs", "ours"):
        command = [sys.executable, "-m", "benchmarks.sampling", *settings, f"--side={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    same = results["theirs"]["tokens"] == results["ours"]["tokens"]
    print(f"\ndenoising, {length} positions, block 32, {steps} steps, temperature {temperature}; {machine()}\n")
    print("| | seconds | peak MiB | beyond the loaded model |\n|---|---:|---:|---:|")
    for name, result in results.items():
        print(f"| {name} | {result['seconds']:.2f} | {result['peak']:.0f} | {result['beyond']:.0f} |")
    keys = ("seconds", "peak", "beyond")
    print("| ratio | " + " | ".join(f"{results['ours'][k] / results['theirs'][k]:.2f}" for k in keys) + " |")
    print(f"\nThe same tokens: {'yes' if same else 'no (other random numbers)' if temperature else 'NO'}")


if __name__ == "__main__":
    typer.run(main)
