"""A model on one GPU, with half of its layers on the CPU, and over two GPUs where there are two.

`python -m benchmarks.device.places [--small]`: the layers of Qwen2.5-0.5B's width, in float32. Every placement must
write the tokens of one device and record its received attention; times are ratios to it.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dlm_lens as dl
from benchmarks.device.llada import measured
from benchmarks.timing import machine
from dlm_lens.testing import tiny

TOLERANCE = 1e-3
"""Of received attention in float32, whose largest values are above 1: sums in another order."""


def build(small: bool) -> Any:
    """A random LLaDA."""
    width, layers, heads = (64, 4, 2) if small else (896, 12, 14)
    return tiny(
        "llada", hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, vocab_size=4096,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024, mask_token_id=4095,
        initializer_range=0.05,
    )  # fmt: skip


def placements() -> dict[str, str]:
    """Names of placements and what `placed` calls them; one device alone where there is no GPU."""
    if not torch.cuda.is_available():
        return {"one device": ""}
    found = {"one device": "one", "half of the layers on the CPU": "cpu", "half of the layers on the disk": "disk"}
    return found | ({"over two GPUs": "split"} if torch.cuda.device_count() > 1 else {})


def main(small: Annotated[bool, typer.Option("--small")] = False, rounds: int = 2) -> None:
    """Print one line per placement; other tokens or numbers make the exit status 1."""
    from tests.pretend_gpu.placing import placed

    length, steps = (48, 2) if small else (512, 8)
    prompt = torch.randint(0, 4000, (1, length // 2), generator=torch.Generator().manual_seed(0)).tolist()
    settings = {"gen_length": length // 2, "block_length": length // 2, "steps": steps}
    print(f"\n{length} positions, {steps} steps, float32; {torch.cuda.device_count()} GPU(s); {machine()}\n")
    print("| | seconds | over one device | peak MiB of cuda:0 beyond the model | equal |\n|---|---:|---:|---:|---|")
    expected: Any = None
    one, wrong = float("nan"), []
    for name, where in placements().items():
        with tempfile.TemporaryDirectory() as folder:
            model = placed(build(small), where, Path(folder)) if where else build(small)
            recording = dl.record(model, prompt, [dl.ReceivedAttention()], **settings)
            seconds, peak = measured(lambda model=model: dl.denoise(model, prompt, **settings), rounds, bool(where))
        found = (recording.run.tokens.cpu(), recording.received.cpu().float())
        expected, one = (found, seconds) if expected is None else (expected, one)
        gap = float((found[1] - expected[1]).abs().nan_to_num().max())
        equal = bool(found[0].equal(expected[0])) and gap <= TOLERANCE
        wrong += [] if equal else [name]
        said = "yes" if equal else f"NO, {gap:.1e}"
        print(f"| {name} | {seconds:.3f} | {seconds / one:.2f} | {peak:.0f} | {said} |", flush=True)
    if wrong:
        print(f"\nunequal: {', '.join(wrong)}")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
