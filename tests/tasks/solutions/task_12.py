"""Hook points in a model of transformers."""

from typing import Any

import torch
from transformers import BertConfig, BertModel

import dlm_lens as dl
from dlm_lens.hooks import ablate, at_heads, at_layers, attach_hooks, mask_positions

WRONG: tuple[dict[str, Any], ...] = ({"layer": 2}, {"head": 1}, {"stage": "after"}, {"other": True})


def solve(layer: int = 1, head: int = 2, stage: Any = "before_softmax", other: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.4,
    )
    model = dl.add_hook_points(BertModel(config).eval())
    ids = torch.tensor([[7, 3, 21, 40, 12, 9, 33, 18, 5, 27, 44, 2]])
    with torch.no_grad(), dl.record_forward(model, [dl.ReceivedAttention()]) as seen:
        plain = model(input_ids=ids).last_hidden_state
    received, key = seen.received[0, 0, layer].max(-1)
    where = {"layer": layer, "head": head}
    moved = []
    for hook in (ablate("z"), mask_positions(int(key[head - other]), stage=stage)):
        with torch.no_grad(), attach_hooks(model, at_layers(at_heads(hook, [where["head"]]), [where["layer"]])):
            moved.append(float((model(input_ids=ids).last_hidden_state - plain).norm()))
    return {"key": key.tolist(), "received": received.tolist(), "without_head": moved[0], "without_key": moved[1]}
