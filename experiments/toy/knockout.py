"""Hiding the strongest column of every head while a model writes, against hiding a random one.

A plain measurement for the model card, before the softmax and per head; `dlm_lens.hooks` is the place for
more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float

from dlm_lens.adapters import family_of
from dlm_lens.attention import received_attention, top_columns
from experiments.toy.evaluate import answers
from experiments.toy.language import Example, is_correct
from experiments.toy.statistics import Estimate, wilson

Choice = Literal["strongest", "random"]
Scores = Float[torch.Tensor, "batch head query key"]


def accuracy_without(model: Any, examples: Sequence[Example], choice: Choice, **settings: Any) -> Estimate:
    """Exact match while one column per (step, layer, head) is hidden from every query but itself."""
    # A baseline's cache would leave one query per step, and the strongest column needs all of them.
    extra = {"use_cache": False} if family_of(model.config.model_type).causal else {}
    with _hidden_column(model, choice):
        texts = answers(model, examples, **settings, **extra)
    return wilson(sum(is_correct(text, e.target) for text, e in zip(texts, examples, strict=True)), len(texts))


@contextmanager
def _hidden_column(model: Any, choice: Choice) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)

    def edit(module: Any, args: Any, scores: Scores) -> Scores:
        return hide_column(scores, choice, generator)

    points = [layer.self_attn.hook_scores for layer in model.model.layers]
    handles = [point.register_forward_hook(edit) for point in points]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hide_column(scores: Scores, choice: Choice, generator: torch.Generator) -> Scores:
    """Mask, in every head, the key that receives most relative to uniform attention, or a random one.

    A query keeps its own position, so no row becomes empty. Random keys are drawn from those with a score,
    the same set from which the strongest comes.
    """
    floor = torch.finfo(scores.dtype).min
    visible = scores > floor / 2
    content: Bool[torch.Tensor, "batch key"] = visible[:, 0, -1]  # the last query sees all that is no padding
    received = received_attention(scores.softmax(-1), visible=visible[:, :1], queries=content)
    if choice == "random":
        noise = torch.rand(received.shape, generator=generator)
        received = torch.where(received.isnan(), received, noise)
    hidden = top_columns(received, 1)[:, :, None, :]
    own = torch.eye(scores.shape[-1], dtype=torch.bool)
    return scores.masked_fill(hidden & ~own, floor)
