"""What the checks compute with: prompts, a decoding loop, received attention and sinks, in numpy by the formulas.

Nothing here calls what a solution would call. Models come from `dlm_lens.load`, since their classes are needed to
read the files; forward passes are `tests.reference.forward64`, float64 from the formulas, or plain transformers.
"""

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dlm_lens as dl
from tests.reference import forward64

Floats = NDArray[np.float64]
PAGES = Path(__file__).parents[3] / "docs" / "tasks"


@functools.cache
def prompts() -> list[str]:
    """The prompts of docs/tasks/index.md."""
    (block,) = re.findall(r"^PROMPTS = \[\n(.*?)^\]", (PAGES / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', block)


@functools.cache
def loaded(name: str) -> Any:
    """A model, once."""
    return dl.load(name)


def ids_of(model: Any, text: str) -> list[int]:
    """Token ids of a prompt."""
    return list(model.tokenizer(text).input_ids)


def words_of(model: Any, ids: Any) -> str:
    """The answer as text, without what ends it."""
    return str(model.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)).strip()


@torch.no_grad()
def decode(
    model: Any,
    prompt: str | list[int],
    length: int,
    block: int,
    network: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    begun: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], list[int]]:
    """LLaDA's sampler at temperature 0 with one token per step, as a loop: canvases, and the position of each step.

    The positions are those of the steps after `begun`.

    Args:
        model: a masked DLM.
        prompt: text or ids.
        length: of the answer, and the number of steps.
        block: length of a block.
        network: (canvas, step) -> logits [1, position, token]; None for the model itself.
        begun: the canvases of the steps that are done, and the one from which it goes on.
    """
    start = ids_of(model, prompt) if isinstance(prompt, str) else list(prompt)
    mask = model.config.mask_token_id
    canvases, order = list(begun) or [torch.tensor([start + [mask] * length])], []
    canvas = canvases[-1]
    for step in range(len(canvases) - 1, length):
        logits = (model(input_ids=canvas).logits if network is None else network(canvas, step))[0].float()
        sure = logits.softmax(-1)
        allowed = logits.clone()
        allowed[:, mask] = -torch.inf  # [MASK] is never proposed
        until = len(start) + (step // block + 1) * block
        best, place = -1.0, -1
        for position in range(until):
            if int(canvas[0, position]) != mask:
                continue
            confidence = float(sure[position, allowed[position].argmax()])
            if confidence > best:
                best, place = confidence, position
        canvas = canvas.clone()
        canvas[0, place] = allowed[place].argmax()
        canvases.append(canvas)
        order.append(place)
    return canvases, order


@torch.no_grad()
def greedy(model: Any, prompt: str, length: int) -> list[torch.Tensor]:
    """Greedy decoding of an AR model: the prefixes that its steps see."""
    ids = ids_of(model, prompt)
    found = []
    for _ in range(length):
        found.append(torch.tensor([ids]))
        ids = [*ids, int(model(input_ids=found[-1], use_cache=False).logits[0, -1].argmax())]
    return found


def pass64(model: Any, canvas: torch.Tensor, causal: bool = False, edits: Any = None) -> dict[str, torch.Tensor]:
    """A float64 forward pass with all of its intermediate values."""
    with torch.no_grad():
        return forward64(in_float64(model), canvas, causal=causal, edits=edits)


def passes64(model: Any, canvases: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """`pass64` of each canvas of a run, in one batch."""
    found = pass64(model, torch.cat(list(canvases)))
    return [{name: value[row : row + 1] for name, value in found.items()} for row in range(len(canvases))]


@functools.cache
def in_float64(model: Any) -> Any:
    """What `forward64` reads of a model, with the weights in float64 once and not in every pass."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    return SimpleNamespace(config=model.config, state_dict=lambda: weights)


def pattern_of(found: dict[str, torch.Tensor], layer: int) -> Floats:
    """The pattern [head, query, key] of a layer."""
    return found[f"pattern{layer}"][0].numpy()


def relative_scores(pattern: Floats, causal: bool = False) -> Floats:
    """r_j / e_j [key] of one head's pattern [query, key]; NaN for keys that fewer than 8 queries see."""
    size = len(pattern)
    if not causal:
        return pattern.sum(0) if size >= 8 else np.full(size, np.nan)
    # An even query i of a causal pattern gives 1 / (i + 1) to each of its keys; the queries from j on see key j.
    even = (1 / np.arange(1, size + 1))[::-1].cumsum()[::-1]
    return column_sums(pattern) / even


def column_sums(pattern: Floats) -> Floats:
    """r_j [key] of one head's causal pattern; NaN for keys that fewer than 8 queries see."""
    sums = pattern.sum(0)
    sums[max(0, len(sums) - 7) :] = np.nan
    return sums


def above_mean(scores: Floats, eps: float = 3.0) -> list[bool]:
    """Eq. 3: which keys exceed the mean of the others by eps."""
    known = scores[~np.isnan(scores)]
    if len(known) < 2:
        return [False] * len(scores)
    found: list[bool] = (scores > (known.sum() - scores) / (len(known) - 1) + eps).tolist()  # a NaN is none
    return found


def strongest(scores: Floats, allowed: list[bool]) -> int:
    """The key with the largest score among the allowed ones; -1 for none."""
    best = -1
    for j, score in enumerate(scores):
        if allowed[j] and (best < 0 or score > scores[best]):
            best = j
    return best


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) of two rows of logits, in nats."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())
