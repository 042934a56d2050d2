"""Cost of a sink token: a forward pass with and without it, at the same canvas length.

`python -m benchmarks.sink_token [--hidden 512 --layers 4 --length 512]`, on the CPU or on a GPU if there is one.
"masked row" is the alternative that the library does not use: one fused call with a mask for the sink's row.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import typer

from benchmarks.timing import machine, print_table, side_by_side
from dlm_lens.attention import SinkLayout, functions
from dlm_lens.testing import tiny


class MaskedRow:
    """A model whose attention computes the sink's row in the same call as the canvas's rows."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass."""
        with patch.object(functions._Call, "_run_around_sinks", _with_masked_row):
            return self.model(**inputs)


def _with_masked_row(self: Any, layout: SinkLayout) -> Any:
    mask = layout.restrict(self.mask, self.q.shape[2], self.q.device)
    return functions._Mixed(self._plain(self.q, mask))


def main(hidden: int = 512, layers: int = 4, heads: int = 8, length: int = 512, threads: int = 1) -> None:
    """Time one forward pass, side by side."""
    torch.set_num_threads(threads)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    fields: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": length + 8,
    }  # fmt: skip
    models = {
        "plain": tiny("sink_qwen", **fields),
        "1 sink": tiny("sink_qwen", num_sinks=1, **fields),
        "4 sinks": tiny("sink_qwen", num_sinks=4, **fields),
        "1 sink, masked row": tiny("sink_qwen", num_sinks=1, **fields),
        "gated attention": tiny("sink_qwen", gated_attention=True, **fields),
    }
    ids = torch.randint(0, 60, (1, length), device=device)
    runs = {name: partial(model.to(device, dtype), input_ids=ids) for name, model in models.items()}
    runs["1 sink, masked row"] = partial(MaskedRow(models["1 sink, masked row"]), input_ids=ids)
    with torch.no_grad():
        seconds = side_by_side(runs)
    title = f"forward, {layers} layers of width {hidden}, {length} positions, {dtype}; {machine()}"
    print_table(title, seconds, "plain")


if __name__ == "__main__":
    typer.run(main)
