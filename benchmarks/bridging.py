"""Cost of a TransformerLens bridge: its forward against the native one with materialised patterns.

`python -m benchmarks.bridging [--hidden 768 --layers 12 --heads 12 --length 256]`, on the CPU or on a GPU if
there is one. The native path is `attn_implementation="hooked"`, which computes scores and patterns as the bridge
does. The goal at 256 positions is a ratio under 1.10 for a plain forward and under 1.25 with every pattern cached.
"""

import torch
import typer

import dlm_lens as dl
from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.hooks import mask_positions
from dlm_lens.testing import tiny


def main(hidden: int = 768, layers: int = 12, heads: int = 12, length: int = 256, threads: int = 1) -> None:
    """Time one forward pass, side by side."""
    torch.set_num_threads(threads)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    native = tiny(
        "llada", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length,
    ).to(device, dtype)  # fmt: skip
    native.set_attn_implementation("hooked")
    tl = dl.bridge(native)
    ids = torch.randint(0, 60, (1, length), device=device)
    hook = mask_positions(0)
    scores = [(f"blocks.{layer}.attn.hook_attn_scores", hook) for layer in range(layers)]
    with torch.no_grad():
        assert torch.equal(native(input_ids=ids).logits, tl(ids))
        seconds = side_by_side(
            {
                "native, hooked": lambda: native(input_ids=ids),
                "bridge, no hooks": lambda: tl(ids),
                "bridge, patterns cached": lambda: tl.run_with_cache(
                    ids, names_filter=lambda name: name.endswith("attn.hook_pattern")
                ),
                "bridge, everything cached": lambda: tl.run_with_cache(ids),
                "bridge, a hook on every layer's scores": lambda: tl.run_with_hooks(ids, fwd_hooks=scores),
            }
        )
    millions = sum(p.numel() for p in native.parameters()) / 1e6
    title = f"{millions:.0f} million parameters, {layers} layers of width {hidden}, {length} positions, {dtype}"
    print_table(f"{title}; {machine()}", seconds, "native, hooked")


if __name__ == "__main__":
    typer.run(main)
