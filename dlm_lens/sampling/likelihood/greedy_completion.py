"""Greedy completion: decode the answer's positions one by one, the most confident token first."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.attention import mask_window_of
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.scoring import Query, Scorer, assemble, check_items, decodable, shared
from dlm_lens.sampling.prompts import padding_id


def greedy_completions(
    scorer: Scorer, pairs: Sequence[Pair], order: Sequence[int], *, causal: bool, allow_mask: bool
) -> Iterator[tuple[int, Int[Tensor, "answer"]]]:
    """The token ids that the model decodes in place of each answer, item by item in the given `order`.

    One token per forward: the argmax of the position whose argmax is the most probable (ML-GSAI/SMDM,
    evaluate_diff.py), in block diffusion among the first block's that is not finished; of an AR model and an SDLM
    the next one. Answers of one length to one prompt are one completion.
    `allow_mask` lets [MASK] be decoded, as in the reference; in models of SUBS it has no probability (`decodable`).

    Raises:
        NonFiniteLogitsError: naming the item and the position.
    """
    queries = (Query(item, pairs[item], pairs[item].in_answer, pairs[item].in_answer) for item in order)
    for batch in scorer.batches(shared(queries)):
        written = _complete(scorer, batch, causal, allow_mask)
        for row, ids in zip(batch, written, strict=True):
            for query in row.queries:
                yield query.item, ids[len(ids) - len(query.pair.answer) :]


def _complete(
    scorer: Scorer, queries: Sequence[Query], causal: bool, allow_mask: bool
) -> Int[Tensor, "row position"]:
    model = scorer.model
    canvas, content, prompt, left, _ = assemble(model, queries)
    network = scorer.network(content, prompt)
    blocks = None if scorer.blocks is None else scorer.layout(content, prompt).numbers(canvas.shape[1])
    mask = None if causal else model.config.mask_token_id
    next_alone = causal or mask_window_of(model.config) is not None
    if mask is None:
        canvas = canvas.masked_fill(left, padding_id(model))
    never = None if allow_mask else mask
    for _ in range(max(len(query.pair.answer) for query in queries)):
        needed = left & (left.cumsum(-1) == 1) if next_alone else left
        if blocks is not None:
            present = blocks.masked_fill(~left, canvas.shape[1]).amin(-1, keepdim=True)
            needed = left & (blocks == present)
        logits = decodable(network.at(canvas, needed), model.config)
        check_items(logits, needed, content, queries)
        token, confidence = (part.to(canvas.device) for part in _choose(logits, never))
        scores = torch.full(canvas.shape, -torch.inf, dtype=torch.float32, device=canvas.device).masked_scatter(
            needed, confidence
        )
        # Of equally confident positions the first; a row without any is finished.
        now = torch.zeros_like(left).scatter(-1, scores.argmax(-1, keepdim=True), True) & needed
        canvas = torch.where(now, canvas.masked_scatter(needed, token), canvas)
        left = left & ~now
        if allow_mask and mask is not None:
            left = left | (now & (canvas == mask))
    return canvas.cpu()


def _choose(logits: Float[Tensor, "n d_vocab"], never: int | None) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
    likely: Any = logits.float().softmax(-1)
    choice = likely
    # SMDM's mask has no column at all.
    if never is not None and never < likely.shape[-1]:
        choice = likely.index_fill(-1, torch.tensor([never], device=likely.device), 0.0)
    confidence, token = choice.max(-1)
    return token, confidence
