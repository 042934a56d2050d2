"""Received attention and two edits of a random BERT, with transformers' eager attention alone."""

import functools
from typing import Any

import torch
from transformers import BertConfig, BertModel

from tests.tasks.checks import comparing

LAYER, HEAD, WIDTH = 1, 2, 8
IDS = (7, 3, 21, 40, 12, 9, 33, 18, 5, 27, 44, 2)


def network() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.4,
    )
    model = BertModel(config).eval()
    model.set_attn_implementation("eager")
    return model.double()


@functools.cache
@torch.no_grad()
def right() -> dict[str, Any]:
    model, ids = network(), torch.tensor([IDS])
    plain = model(input_ids=ids, output_attentions=True)
    pattern = plain.attentions[LAYER][0]  # [head, query, key]
    keys, received = [], []
    for head in range(4):
        sums = [float(sum(pattern[head, query, key] for query in range(len(IDS)))) for key in range(len(IDS))]
        keys.append(sums.index(max(sums)))
        received.append(max(sums))
    cut = model.encoder.layer[LAYER].attention

    def without_head(module: Any, args: Any) -> Any:
        mixed = args[0].clone()
        mixed[..., HEAD * WIDTH : (HEAD + 1) * WIDTH] = 0
        return (mixed, *args[1:])

    def without_key(module: Any, args: Any) -> Any:
        seen = pattern[HEAD].clone()
        seen[:, keys[HEAD]] = 0
        seen = seen / seen.sum(-1, keepdim=True)
        values = torch.nn.functional.linear(plain_input[0], cut.self.value.weight, cut.self.value.bias)
        part = slice(HEAD * WIDTH, (HEAD + 1) * WIDTH)
        mixed = args[0].clone()
        mixed[0, :, part] = seen @ values[0, :, part]
        return (mixed, *args[1:])

    plain_input: list[torch.Tensor] = []
    handle = cut.self.register_forward_pre_hook(
        lambda module, args, kwargs: plain_input.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    model(input_ids=ids)
    handle.remove()
    moved = []
    for edit in (without_head, without_key):
        handle = cut.output.dense.register_forward_pre_hook(edit)
        moved.append(float((model(input_ids=ids).last_hidden_state - plain.last_hidden_state).norm()))
        handle.remove()
    return {"key": keys, "received": received, "without_head": moved[0], "without_key": moved[1]}


def check(answer: dict[str, Any]) -> list[str]:
    return comparing.differences(answer, right(), 0.0, 0.001)
