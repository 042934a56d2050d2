"""A patch from step to step by PyTorch's own forward hooks."""

import functools
from typing import Any

import torch

from tests.tasks.checks import comparing, loops

LENGTH, LAYER, FROM, TO = 16, 1, 6, 2


@functools.cache
@torch.no_grad()
def right() -> dict[str, Any]:
    model = loops.loaded("toy")
    block, kept = model.model.layers[LAYER], {}
    text = loops.prompts()[2]
    start = len(loops.ids_of(model, text))

    def stream(output: Any) -> torch.Tensor:
        return output[0] if isinstance(output, tuple) else output

    donor = loops.decode(model, loops.prompts()[0], LENGTH, LENGTH)[0]
    handle = block.register_forward_hook(lambda module, args, output: kept.update(donor=stream(output).clone()))
    model(input_ids=donor[FROM])
    handle.remove()

    def network(canvas: torch.Tensor, step: int) -> torch.Tensor:
        if step != TO:
            return model(input_ids=canvas).logits

        def put(module: Any, args: Any, output: Any) -> Any:
            edited = stream(output).clone()
            for position in range(start):
                edited[:, position] = kept["donor"][:, position]
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        handle = block.register_forward_hook(put)
        logits = model(input_ids=canvas).logits
        handle.remove()
        kept["probability"] = float(logits[0, start:].double().softmax(-1).amax(-1).mean())
        return logits

    plain = loops.decode(model, text, LENGTH, LENGTH)[0][-1][0, start:]
    patched = loops.decode(model, text, LENGTH, LENGTH, network)[0][-1][0, start:]
    answer = loops.words_of(model, patched)
    return {
        "plain": loops.words_of(model, plain),
        "nnsight": answer,
        "transformerlens": answer,
        "probability_nnsight": kept["probability"],
        "probability_transformerlens": kept["probability"],
    }


def check(answer: dict[str, Any]) -> list[str]:
    given = {name: value.strip() if isinstance(value, str) else value for name, value in answer.items()}
    return comparing.differences(given, right(), 0.001)
