"""Cost of hook points in a forward pass: idle, and with a hook on the pattern of every layer.

`python -m benchmarks.forward [--hidden 512 --layers 4 --length 512]`, on the CPU or on a GPU if there is one.
The baseline is transformers' own Llama with the same weights and `is_causal = False`.
"""

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.testing import tiny


def main(hidden: int = 512, layers: int = 4, heads: int = 8, length: int = 512, threads: int = 1) -> None:
    """Time one forward pass, side by side."""
    torch.set_num_threads(threads)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    fields = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": length,
    }  # fmt: skip
    ours = tiny("llada", **fields).to(device, dtype)
    config = LlamaConfig(**{k: v for k, v in ours.config.to_dict().items() if k in LlamaConfig().to_dict()})
    config.is_causal = False
    stock = LlamaForCausalLM(config).eval().to(device, dtype)
    stock.load_state_dict(ours.state_dict())
    for layer in stock.model.layers:
        layer.self_attn.is_causal = False
    hooked = tiny("llada", **fields).to(device, dtype)
    for layer in hooked.model.layers:
        layer.self_attn.hook_pattern.register_forward_hook(lambda *_: None)
    ids = torch.randint(0, 60, (1, length), device=device)
    with torch.no_grad():
        seconds = side_by_side(
            {
                "transformers, sdpa": lambda: stock(input_ids=ids, use_cache=False),
                "dlm_lens, sdpa, hook points idle": lambda: ours(input_ids=ids),
                "dlm_lens, a hook on every pattern": lambda: hooked(input_ids=ids),
            }
        )
    title = f"forward, {layers} layers of width {hidden}, {length} positions, {dtype}; {machine()}"
    print_table(title, seconds, "transformers, sdpa")


if __name__ == "__main__":
    typer.run(main)
