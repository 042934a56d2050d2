"""DiffusionGemma's shape with as many layers as the memory holds: denoised, recorded, with hooks.

`python -m benchmarks.device.diffusion_gemma [--small]`. Random weights in bfloat16, canvases of 256 positions; the
width, heads and experts of the 26B model, and a smaller vocabulary.
"""

from typing import Annotated, Any

import torch
import typer

import dlm_lens as dl
from benchmarks.device.llada import measured
from benchmarks.timing import machine
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.testing import tiny

WIDTHS = {
    "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "num_experts": 128,
    "top_k_experts": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 32_768,
    "max_position_embeddings": 2048,
}  # fmt: skip
LAYER_BYTES = 2 * (128 * 3 * 2816 * 704 + 3 * 2816 * 2112 + 4 * 2816 * 16 * 256)
"""Of one layer in bfloat16: the experts, the dense MLP and attention."""


def layers_that_fit(small: bool) -> int:
    """At most 30, in 60% of the free memory; whole groups of 6 (five sliding layers and a full one)."""
    if small or not torch.cuda.is_available():
        return 2
    return max(6, min(30, int(0.6 * torch.cuda.mem_get_info()[0] / LAYER_BYTES) // 6 * 6))


def build(layers: int, small: bool) -> Any:
    """The model, its weights drawn where they are used."""
    kinds = ["full_attention" if place % 6 == 5 else "sliding_attention" for place in range(layers)]
    kinds[-1] = "full_attention"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            shape = {} if small else WIDTHS
            model = tiny("diffusion_gemma", num_hidden_layers=layers, layer_types=kinds, **shape)
    finally:
        torch.set_default_dtype(before)
    if small:  # the CPU has no grouped product that the pretended device could use
        model.config._experts_implementation = "eager"
    return model


def main(small: Annotated[bool, typer.Option("--small")] = False, rounds: int = 2) -> None:
    """Print one line per row; ratios are to the plain path."""
    gpu, layers = torch.cuda.is_available(), layers_that_fit(small)
    model = build(layers, small)
    size = sum(weight.nbytes for weight in model.parameters()) / 2**30
    prompt = torch.randint(0, 50, (1, 8 if small else 256), generator=torch.Generator().manual_seed(0)).tolist()
    settings = {"gen_length": 6, "steps_per_block": 2} if small else {"gen_length": 256, "steps_per_block": 8}
    everything = (
        dl.ReceivedAttention(),
        dl.ValueNorm(),
        dl.recording.ResidualNorm(),
        dl.RegionMass(),
        dl.TopKeys(),
    )
    rows: dict[str, Any] = {
        "denoise": lambda: dl.denoise(model, prompt, **settings),
        "record, received": lambda: dl.record(model, prompt, [dl.ReceivedAttention()], **settings),
        "record, five reducers": lambda: dl.record(model, prompt, everything, **settings),
        "mask_top_sinks(5)": lambda: dl.denoise(model, prompt, hooks=[mask_top_sinks(5)], **settings),
    }
    print(f"\n{layers} layers, {size:.2f} GiB; {machine()}\n")
    print("| | seconds | over denoise | peak MiB beyond the model |\n|---|---:|---:|---:|")
    base = float("nan")
    for name, run in rows.items():
        seconds, peak = measured(run, rounds if not small else 1, gpu)
        base = seconds if name == "denoise" else base
        print(f"| {name} | {seconds:.3f} | {seconds / base:.2f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
