"""Given answers under an AR model: one pass for each text, or one for each prompt that several answers share.

Nothing after a prompt changes its keys and values, so that they serve every answer to it: n answers of a tokens
to a prompt of p need p + n (a - 1) positions instead of n (p + a). The values differ by rounding.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.head import head_logits
from dlm_lens.attention import decoder_of
from dlm_lens.attention.cache_argument import cache_argument
from dlm_lens.placement import on_input_device
from dlm_lens.sampling.cached_network import empty_cache, keeps_keys
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.scoring import Query, Scorer, assemble, check_items, logits_in_pieces
from dlm_lens.sampling.network import NonFiniteLogitsError, most_likely, network_inputs
from dlm_lens.sampling.prompts import padding_id


class Scored(NamedTuple):
    """An item's tokens: minus their log-probabilities (float64), and whether each is the most probable one."""

    item: int
    losses: Float[Tensor, "answer"]
    greedy: Bool[Tensor, "answer"]


class _Answer(NamedTuple):
    item: int
    pair: Pair
    row: int
    """Of the prompt in its batch."""


@torch.no_grad()
def score_answers(scorer: Scorer, items: Iterable[tuple[int, Pair]]) -> Iterator[Scored]:
    """Every item's tokens given those before them, in any order.

    Raises:
        NonFiniteLogitsError: naming the item and the position.
    """
    groups: dict[bytes, list[tuple[int, Pair]]] = {}
    for item, pair in items:
        groups.setdefault(pair.prompt.numpy().tobytes(), []).append((item, pair))
    several = [group for group in groups.values() if len(group) > 1] if keeps_keys(scorer.model) else []
    single = groups.values() if not several else [group for group in groups.values() if len(group) == 1]
    texts = [_text(*one) for group in single for one in group]
    for batch in scorer.batches(sorted(texts, key=lambda query: -len(query.masked))):
        yield from _whole_texts(scorer, batch)
    prompts = [_prompt(number, group[0][1]) for number, group in enumerate(several)]
    for batch in scorer.batches(sorted(prompts, key=lambda query: -len(query.masked))):
        answers = [_Answer(*one, row) for row, query in enumerate(batch) for one in several[query.item]]
        yield from _after_prompts(scorer, batch, answers)


def _text(item: int, pair: Pair) -> Query:
    return Query(item, pair, torch.zeros_like(pair.in_answer), pair.in_answer)


def _prompt(number: int, pair: Pair) -> Query:
    """A prompt by itself, whose last output predicts the first token of its answers."""
    nothing = torch.zeros(len(pair.prompt), dtype=torch.bool)
    last = torch.arange(len(pair.prompt)) == len(pair.prompt) - 1
    return Query(number, Pair(pair.prompt, pair.answer[:0]), nothing, last)


def _whole_texts(scorer: Scorer, queries: Sequence[Query]) -> Iterator[Scored]:
    batch = assemble(scorer.model, queries)
    network = scorer.network(batch.content, batch.prompt)

    def checked(first: int, states: Float[Tensor, "half piece d_model"]) -> Float[Tensor, "piece d_vocab"]:
        logits = network.head(states)
        check_items(logits, batch.scored, batch.content, queries, first)
        return logits

    found = logits_in_pieces(checked, network.states(batch.canvas, batch.scored))
    losses, greedy = _compare(found, batch.tokens[batch.scored])
    sizes = [len(query.pair.answer) for query in queries]
    for query, *parts in zip(queries, losses.split(sizes), greedy.split(sizes), strict=True):
        yield Scored(query.item, *parts)


def _after_prompts(scorer: Scorer, prompts: Sequence[Query], answers: Sequence[_Answer]) -> Iterator[Scored]:
    """All answers to a batch of prompts: their first tokens from the prompts' pass, the others from the cache."""
    model, batch = scorer.model, assemble(scorer.model, prompts)
    cache = empty_cache(model)
    longer = [answer for answer in answers if len(answer.pair.answer) > 1]
    decoder = decoder_of(model)
    kept = {"use_cache": True, **cache_argument(decoder, cache)} if longer else {}
    inputs = on_input_device(model, {"input_ids": batch.canvas, **network_inputs(batch.content)})
    states = decoder(**inputs | kept).last_hidden_state
    logits = head_logits(model, states[:, -1])
    first = torch.tensor([int(answer.pair.answer[0]) for answer in answers], device=logits.device)
    begun = _compare([(0, logits[[answer.row for answer in answers]])], first)
    rest: dict[int, tuple[Tensor, Tensor]] = {}
    # A query for each answer with the width of its prompt's row: the cache takes as much memory as a pass.
    width = batch.canvas.shape[1]
    shapes = {answer.item: _shape(answer, width) for answer in longer}
    by_item = {answer.item: answer for answer in longer}
    for some in scorer.batches(sorted(shapes.values(), key=lambda query: -len(query.masked))):
        rest |= _continued(scorer, [by_item[query.item] for query in some], cache, batch.content)
    for place, answer in enumerate(answers):
        parts = [begun[0][place : place + 1]], [begun[1][place : place + 1]]
        if answer.item in rest:
            for part, more in zip(parts, rest[answer.item], strict=True):
                part.append(more)
        losses, greedy = (torch.cat(part) for part in parts)
        if bool(losses.isnan().any()):
            position = len(answer.pair.prompt) + int(losses.isnan().nonzero()[0, 0])
            raise NonFiniteLogitsError(f"item {answer.item}: the logits of position {position}")
        yield Scored(answer.item, losses, greedy)


def _shape(answer: _Answer, width: int) -> Query:
    positions = width + len(answer.pair.answer) - 1
    return Query(
        answer.item, answer.pair, torch.zeros(positions, dtype=torch.bool), torch.arange(positions) >= width
    )


def _continued(
    scorer: Scorer, answers: Sequence[_Answer], cache: Any, content: Bool[Tensor, "prompt position"]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Of every answer, the tokens after the first: one pass over the answers, which see their prompts' keys."""
    model, device = scorer.model, content.device
    sizes = [len(answer.pair.answer) - 1 for answer in answers]
    # Padded on the right: what follows a position does not change it.
    ids = torch.full((len(answers), max(sizes)), padding_id(model))
    for line, answer in zip(ids, answers, strict=True):
        line[: len(answer.pair.answer) - 1] = answer.pair.answer[:-1]
    rows = torch.tensor([answer.row for answer in answers], device=device)
    seen, span = content[rows], torch.arange(ids.shape[1], device=device)
    inputs: dict[str, Any] = {"position_ids": seen.sum(-1, keepdim=True) + span}
    if not bool(seen.all()):
        new = torch.ones(ids.shape, dtype=torch.bool, device=device)
        inputs["attention_mask"] = torch.cat([seen, new], 1).long()
    decoder = decoder_of(model)
    inputs |= {"use_cache": True, **cache_argument(decoder, _rows_of(cache, rows, model))}
    inputs = on_input_device(model, {"input_ids": ids, **inputs})
    states = decoder(**inputs).last_hidden_state
    written = span.to(states.device) < torch.tensor(sizes, device=states.device)[:, None]
    found = logits_in_pieces(lambda _, piece: head_logits(model, piece[0]), states[written][None])
    losses, greedy = _compare(found, torch.cat([answer.pair.answer[1:] for answer in answers]))
    parts = zip(answers, losses.split(sizes), greedy.split(sizes), strict=True)
    return {answer.item: (loss, same) for answer, loss, same in parts}


def _rows_of(cache: Any, rows: Int[Tensor, "answer"], model: Any) -> Any:
    """A cache with some rows of another, which stays as it is."""
    chosen = empty_cache(model)
    for number, layer in enumerate(cache.layers):
        on = rows.to(layer.keys.device)
        chosen.update(layer.keys[on], layer.values[on], number)
    return chosen


def _compare(
    pieces: Iterable[tuple[int, Float[Tensor, "piece d_vocab"]]], targets: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Bool[Tensor, "n"]]:
    """Minus the log-probabilities of the targets, and whether each has the largest logit; on the CPU."""
    losses, greedy = torch.empty(len(targets), dtype=torch.float64), torch.empty(len(targets), dtype=torch.bool)
    for first, logits in pieces:
        own = targets[first : first + len(logits)].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits.float(), own, reduction="none")
        losses[first : first + len(own)] = loss.cpu()
        greedy[first : first + len(own)] = most_likely(logits) == own
    return losses, greedy
