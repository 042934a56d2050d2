"""Cross entropies of many masked texts, packed into batches of bounded size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.attention import BlockLayout, Hook, attached_hooks, attends_observed_first, padding_before
from dlm_lens.placement import canvas_device, execution_device
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.block_network import BlockLogits, CleanContextLogits, FirstBlockLogits
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.network import ROWS, CanvasLogits, NonFiniteLogitsError, keep_freed_memory
from dlm_lens.sampling.prompts import padding_id
from dlm_lens.sampling.two_copies import Blocks, TwoCopyLogits

POSITIONS = {"cpu": 1024, "cuda": 8192}
"""Canvas positions of one forward, where the caller gives no number of canvases. More only costs memory."""
LOGITS = 2**26
"""Logits of one forward, in the same case: 256 MiB in float32."""
HEAD_ROWS = 128
"""On a CPU the positions of one product with the head; losses read `ROWS` of its logits at a time."""


Loss = Callable[
    [Float[Tensor, "scored d_vocab"], Int[Tensor, "token"], Int[Tensor, "token"]], Float[Tensor, "token"]
]
"""(logits in float32, -inf where [MASK] has no probability; for each token its row of them; tokens) -> losses."""


def cross_entropy(
    logits: Float[Tensor, "scored d_vocab"], where: Int[Tensor, "token"], targets: Int[Tensor, "token"]
) -> Float[Tensor, "token"]:
    """Minus the log-probabilities of the tokens."""
    return -logits.log_softmax(-1)[where, targets]


@dataclass(frozen=True, eq=False)
class Query:
    """A term of an item's sum: a text with some positions masked, and the positions whose tokens are scored.

    `sigma` is the noise level, for networks that are given it.
    """

    item: int
    pair: Pair
    masked: Bool[Tensor, "position"]
    scored: Bool[Tensor, "position"]
    term: int = 0
    sigma: float | None = None

    def canvas(self, mask: int) -> Int[Tensor, "position"]:
        """What the network sees."""
        return self.pair.tokens.masked_fill(self.masked, mask)


@dataclass(frozen=True, eq=False, kw_only=True)
class Row(Query):
    """A row of a batch for several queries with the same canvas; `scored` is the union of their positions."""

    queries: list[Query]


AnyQuery = TypeVar("AnyQuery", bound=Query)


class Batch(NamedTuple):
    """Left-padded rows on the model's device."""

    canvas: Int[Tensor, "row position"]
    content: Bool[Tensor, "row position"]
    prompt: Bool[Tensor, "row position"]
    scored: Bool[Tensor, "row position"]
    tokens: Int[Tensor, "row position"]


@dataclass(frozen=True)
class Scorer:
    """Evaluates queries: one forward per batch, the head on the scored positions only.

    Consecutive queries of one prompt with the same canvas share a row: equally long answers of a multiple choice
    have their fully masked canvas in common, and answers of one token every canvas.

    Args:
        model: from `dlm_lens.load`.
        cfg_scale: guidance; the unconditional canvas masks the prompt.
        batch_size: canvases per forward; None for as many as `POSITIONS`, `LOGITS` and padding allow.
        shift: as `CanvasLogits` has it; True for an AR model.
        blocks: of a model that decodes blocks, each of which is scored given the clean blocks before it.
        loss: of the scored tokens.
    """

    model: Any
    cfg_scale: float = 0.0
    batch_size: int | None = None
    shift: bool | None = None
    blocks: Blocks | None = None
    loss: Loss = cross_entropy

    def losses(self, queries: Iterable[Query]) -> Iterator[tuple[Query, Float[Tensor, "scored"]]]:
        """Every query with the losses of its scored tokens (float64), batch by batch.

        Raises:
            NonFiniteLogitsError: naming the item and the position.
        """
        for batch in self.batches(shared(queries, clean=self.blocks is not None)):
            yield from self._evaluate(batch)

    def batches(self, queries: Iterable[AnyQuery]) -> Iterator[list[AnyQuery]]:
        """Cut the stream of queries into lists that fit into one forward, as `may_be_padded` allows."""
        batch: list[AnyQuery] = []
        width = scored = 0
        padded = may_be_padded(self.model, attached_hooks(self.model))
        for query in queries:
            wider, more = max(width, len(query.masked)), scored + int(query.scored.sum())
            together = padded or len(query.masked) == width
            if batch and not (together and self._fits(len(batch) + 1, wider, more, len(query.masked))):
                yield batch
                batch, wider, more = [], len(query.masked), int(query.scored.sum())
            batch.append(query)
            width, scored = wider, more
        if batch:
            yield batch

    def network(
        self,
        content: Bool[Tensor, "row position"],
        prompt: Bool[Tensor, "row position"],
        clean: Int[Tensor, "row position"] | None = None,
    ) -> CanvasLogits:
        """The logits of a batch.

        Args:
            content: False at padding.
            prompt: the prompts' positions.
            clean: the texts without masks, which blocks are conditioned on; None if the blocks before the one that
                is scored are finished on the canvas itself.
        """
        options: dict[str, Any] = {
            "cfg_scale": self.cfg_scale,
            "fixed": prompt | ~content,
            "mask_token_id": getattr(self.model.config, "mask_token_id", None),
            "shift": self.shift,
        }
        if getattr(self.model.config, "clean_context", False):
            return CleanContextLogits(self.model, content, prompt & content)
        if self.blocks is None or (clean is None and attends_observed_first(self.model.config)):
            # Where observed tokens come first, no prediction depends on the masks of later blocks.
            return CanvasLogits(self.model, content, **options)
        layout, causal = self.layout(content, prompt), self.blocks.context == "causal"
        if clean is None:
            if causal:
                return FirstBlockLogits(self.model, content, layout=layout, **options)
            return BlockLogits(self.model, content, layout=layout, **options)
        return TwoCopyLogits(self.model, content, clean=clean, layout=layout, causal=causal, **options)

    def layout(self, content: Bool[Tensor, "row position"], prompt: Bool[Tensor, "row position"]) -> BlockLayout:
        """Where the blocks of every row are."""
        assert self.blocks is not None
        first = padding_before(content)
        first = first if self.blocks.from_text else first + prompt.sum(-1)
        return BlockLayout(self.blocks.length, first, "whole" if self.blocks.context == "whole" else "blocks")

    def logits(self, batch: Batch, rows: Sequence[Query]) -> Iterator[tuple[int, Float[Tensor, "piece d_vocab"]]]:
        """Logits of the scored positions of a batch, some at a time, and how many positions are before them.

        Raises:
            NonFiniteLogitsError: naming the item and the position.
        """
        network = self.network(batch.content, batch.prompt, batch.tokens)
        if rows[0].sigma is not None and takes_noise_level(self.model):
            sigma = torch.tensor([row.sigma for row in rows], dtype=torch.float32, device=batch.canvas.device)
            network.inputs["sigma"] = sigma.repeat(2 if self.cfg_scale else 1)

        def checked(first: int, states: Float[Tensor, "half piece d_model"]) -> Float[Tensor, "piece d_vocab"]:
            logits = decodable(network.head(states), self.model.config)
            check_items(logits, batch.scored, batch.content, rows, first)
            return logits

        yield from logits_in_pieces(checked, network.states(batch.canvas, batch.scored))

    def _fits(self, rows: int, width: int, scored: int, shortest: int) -> bool:
        if self.batch_size is not None:
            return rows <= self.batch_size
        halves = (2 if self.cfg_scale else 1) * (1 if self.blocks is None else 2)
        head = self.model.get_output_embeddings()
        most = POSITIONS.get(execution_device(head).type, max(POSITIONS.values()))
        # A batch that is half full ends here rather than being padded by more than an eighth.
        wasteful = 2 * halves * (rows - 1) * width > most and 8 * (width - shortest) > width
        logits = (2 if self.cfg_scale else 1) * scored * head.weight.shape[0]
        return halves * rows * width <= most and logits <= LOGITS and not wasteful

    def _evaluate(self, rows: Sequence[Row]) -> Iterator[tuple[Query, Float[Tensor, "scored"]]]:
        batch = assemble(self.model, rows)
        where, targets = _scored_tokens(rows)
        found = torch.empty(len(where), dtype=torch.float64)
        for first, logits in self.logits(batch, rows):
            here = ((where >= first) & (where < first + len(logits))).nonzero()[:, 0]
            # With a device map the head may be on another device than the embedding.
            given = ((where[here] - first).to(logits.device), targets[here].to(logits.device))
            found[here] = self.loss(logits.float(), *given).double().cpu()
        queries = [query for row in rows for query in row.queries]
        yield from zip(queries, found.split([int(query.scored.sum()) for query in queries]), strict=True)


def may_be_padded(model: Any, hooks: Iterable[Hook]) -> bool:
    """Whether texts of unequal length may share a pass under these hooks without changing each other's values.

    Where blocks are counted from the text, a canvas ends with the longest row's last block, so that positions that
    a hook counts from the end are none of a shorter row's.
    """
    hooks = tuple(hooks)
    if hooks and algorithm_of(model.config).sampler.from_text:
        return False
    return all(hook.padding_safe for hook in hooks)


def logits_in_pieces(
    head: Callable[[int, Float[Tensor, "half piece d_model"]], Float[Tensor, "piece d_vocab"]],
    states: Float[Tensor, "half scored d_model"],
) -> Iterator[tuple[int, Float[Tensor, "piece d_vocab"]]]:
    """Logits of these states, and how many positions are before them; on a CPU some at a time.

    Args:
        head: the logits of some states, and how many positions are before them.
        states: its inputs.
    """
    on_cpu, first = states.device.type == "cpu", 0
    if on_cpu:
        keep_freed_memory()
    for part in states.split(HEAD_ROWS if on_cpu else states.shape[1], 1):
        logits = head(first, part)
        for piece in logits.split(ROWS if on_cpu else len(logits)):
            yield first, piece
            first += len(piece)


def decodable(logits: Float[Tensor, "n d_vocab"], config: Any) -> Float[Tensor, "n d_vocab"]:
    """The logits, with -inf for [MASK] in models in which it has no probability (SUBS: 2406.07524, Sec. 3.2.3)."""
    if not getattr(config, "subs", False):
        return logits
    return logits.index_fill(-1, torch.tensor([config.mask_token_id], device=logits.device), -torch.inf)


def shared(queries: Iterable[Query], *, clean: bool = False) -> Iterator[Row]:
    """Put consecutive queries of one prompt with the same canvas (`clean`: and the same text) into one row."""
    for _, group in groupby(queries, lambda query: (len(query.masked), _digest(query.pair.prompt))):
        same: dict[tuple[bytes, float | None], list[Query]] = {}
        for query in group:
            tokens = query.pair.tokens
            canvas = _digest(tokens.masked_fill(query.masked, -1)) + (_digest(tokens) if clean else b"")
            same.setdefault((canvas, query.sigma), []).append(query)
        for each in same.values():
            first, scored = each[0], torch.stack([query.scored for query in each]).any(0)
            yield Row(first.item, first.pair, first.masked, scored, sigma=first.sigma, queries=each)


def _digest(ids: Int[Tensor, "n"]) -> bytes:
    """A short key for token ids, because a group has thousands of rows at a time."""
    return sha256(ids.numpy().tobytes()).digest()


def _scored_tokens(rows: Sequence[Row]) -> tuple[Int[Tensor, "token"], Int[Tensor, "token"]]:
    """For each query in turn, the index of its tokens among the batch's scored positions, and the tokens."""
    where, targets, before = [], [], 0
    for row in rows:
        rank = row.scored.cumsum(-1) - 1 + before
        before += int(row.scored.sum())
        where += [rank[query.scored] for query in row.queries]
        targets += [query.pair.tokens[query.scored] for query in row.queries]
    return torch.cat(where), torch.cat(targets)


def check_items(
    logits: Float[Tensor, "scored d_vocab"],
    scored: Bool[Tensor, "row position"],
    content: Bool[Tensor, "row position"],
    queries: Sequence[Query],
    first: int = 0,
) -> None:
    """Raise if a row has no finite largest logit; the rows are those of the scored positions from `first` on.

    Raises:
        NonFiniteLogitsError: naming the item and the position in its text.
    """
    bad = ~logits.amax(-1).isfinite()
    if bool(bad.any()):
        row, position = scored.nonzero()[first + int(bad.nonzero()[0, 0])].tolist()
        position -= int((~content[row]).sum())
        raise NonFiniteLogitsError(f"item {queries[row].item}: the logits of position {position}")


def assemble(model: Any, queries: Sequence[Query]) -> Batch:
    """Put queries into rows, padded on the left."""
    device = canvas_device(model)
    width = max(len(query.masked) for query in queries)

    def padded(rows: list[Tensor], fill: int) -> Tensor:
        out = torch.full((len(rows), width), fill, dtype=rows[0].dtype)
        for line, row in zip(out, rows, strict=True):
            line[width - len(row) :] = row
        return out

    # An AR model has no mask token, and nothing of its text is masked.
    mask = getattr(model.config, "mask_token_id", None) or 0
    tokens = padded([query.pair.tokens for query in queries], padding_id(model))
    canvas = padded([query.canvas(mask) for query in queries], padding_id(model))
    scored = padded([query.scored for query in queries], False)
    content = padded([torch.ones_like(query.masked) for query in queries], False)
    prompt = padded([~query.pair.in_answer for query in queries], False)
    return Batch(*(part.to(device) for part in (canvas, content, prompt, scored, tokens)))
