"""`ScoreParts`: attention scores as |q||k|cos, and what keys would receive without a part of them."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import AttentionInputs, Hook, PointContext, SinkLayout, Site
from dlm_lens.attention.softmax_variants import softmax
from dlm_lens.recording import LayerStep, QueryClass, Reducer, ReducerGroup
from dlm_lens.recording.query_classes import checked_class

PARTS = ("as it is", "equal norms", "equal angles", "no position", "shuffled norms", "shuffled angles")
"""The patterns whose received attention is computed: the network's own, and five counterfactual ones."""

SHARES = ("norms", "angles", "interaction", "position")
"""Shares of the variance of scores over keys; the first three sum to 1, the last is a part of the angles."""

TILE_ENTRIES = 2**20
"""Entries of a tile of scores: 4 MiB in float32, of which a few are held at a time."""

TOLERANCE = 1e-3
"""How far the recomputed column sums may be from the network's, as a share of the counted queries."""


@dataclass(eq=False)
class BeforeRotation(Hook):
    """Keeps the queries or keys of the current pass before their rotation; changes nothing.

    Args:
        site: "q" or "k".
        states: layer -> [batch, position, head, d_head]; the reducer takes each out as soon as it has read it.
    """

    site: Site
    states: dict[int, Tensor] = field(default_factory=dict)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the tensor."""
        self.states[hook.layer()] = tensor
        return tensor


class Rotation(NamedTuple):
    """The readers of queries and keys before rotation, and where the network has its learned sink tokens."""

    q: BeforeRotation
    k: BeforeRotation
    layout: SinkLayout


@dataclass(frozen=True, eq=False)
class ScoreParts(ReducerGroup):
    """What keys receive in counterfactual patterns, their mean cosine, and the parts of the scores' variance.

    A score is s_ij = c |q_i| |k_j| cos_ij (c the scale; vectors after rotation and q/k norms, as the kernel has
    them; a softcap is applied to it). With the means over the keys that query i sees, k_i = mean_j |k_j| and
    m_i = mean_j cos_ij, the patterns are softmax over j of

        equal norms      c |q_i| k_i cos_ij              (only angles differ)
        equal angles     c |q_i| |k_j| m_i               (only norms differ)
        no position      c |q_i| |k_j| cos0_ij           (cos0: of the vectors before rotation)
        shuffled norms   c |q_i| |k_p(j)| cos_ij         (p: a permutation of the keys per row and head)
        shuffled angles  c |q_i| |k_j| cos_ip(j)

    Rotary embeddings depend on i - j alone, so that vectors before rotation give the score that the pair would have
    at distance 0. Shares of variance: s_ij / (c |q_i|) = k_i m_i + (|k_j| - k_i) m_i + k_i (cos_ij - m_i) +
    (|k_j| - k_i)(cos_ij - m_i); the share of a term is the sum over queries of n_i times its covariance with s over
    the n_i keys that query i sees, over that of n_i times the variance of s: every score counts once, so that under
    a causal mask later queries count more. "position" is that of k_i (cos_ij - cos0_ij), a part of the angles. The
    decomposition into norms and cosine is that of the code published with 2601.07894; the counterfactuals
    and the shares are ours.

    Args:
        queries: the counted queries.
        rotation: readers of the vectors before rotation; None leaves out what depends on position (NaN).
        softcap: of the scores; 0 for none.
        seed: of the permutations, which depend on the prompt, the step and the layer alone.
        numbers: of each step, in the whole run (`DenoisingRun.step_numbers`); empty where they count from 0.
    """

    queries: QueryClass = "all"
    rotation: Rotation | None = None
    softcap: float = 0.0
    seed: int = 0
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checked_class(self.queries, "ScoreParts")

    @property
    def parts(self) -> "tuple[_Sums, _MeanCosine, _Shares]":
        """Column sums, mean cosines and shares of variance; the first computes all three."""
        return _Sums(self), _MeanCosine(), _Shares()


@dataclass(frozen=True, eq=False)
class _Sums(Reducer):
    group: ScoreParts

    name = "part_sums"
    dims = ("step", "batch", "layer", "head", "key", "part")
    unit = "queries"
    formula = "sum_i A_ij of counterfactual patterns"

    @property
    def reads(self) -> tuple[str, ...]:
        return (f"received:{self.group.queries}",)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"part": PARTS}

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head key part"]:
        """The column sums, checked against the network's own.

        Raises:
            ValueError: the network's received attention does not follow from its queries and keys.
        """
        found = reduced(layer, self.group)
        own = layer.sums[checked_class(self.group.queries, "ScoreParts")]
        counted = layer.facts.queries(self.group.queries).sum(-1).clamp(min=1)[:, None, None]
        error = ((found.sums[..., 0] - own).abs() / counted).nan_to_num(posinf=1.0).max()
        if float(error) > TOLERANCE:
            raise ValueError(
                f"layer {layer.index}: received attention from queries and keys alone differs by "
                f"{float(error):.3g} of the counted queries from the network's (a bias by position, hooks, or "
                "scores in half precision); load the model in float32, or choose other layers"
            )
        layer.memory["score parts"] = found
        return layer.only_keys(found.sums, dim=-2)


@dataclass(frozen=True)
class _MeanCosine(Reducer):
    name = "mean_cosine"
    unit = "cosine"
    formula = "mean of cos(q_i, k_j) over the counted queries i that see j"

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head key"]:
        return layer.only_keys(layer.memory["score parts"].cosine)


@dataclass(frozen=True)
class _Shares(Reducer):
    name = "variance_shares"
    dims = ("step", "batch", "layer", "head", "share")
    unit = "share of variance"
    formula = "sum_i n_i cov_j(term, s) / sum_i n_i var_j(s), n_i the keys that query i sees"

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {"share": SHARES}

    def reduce(self, layer: LayerStep) -> Float[Tensor, "batch head share"]:
        found: Reduced = layer.memory.pop("score parts")
        return found.shares


class Reduced(NamedTuple):
    """What `reduced` returns for one layer at one step."""

    sums: Float[Tensor, "batch head key part"]
    cosine: Float[Tensor, "batch head key"]
    shares: Float[Tensor, "batch head share"]


class _Vectors(NamedTuple):
    """Unit vectors and lengths, keys repeated for the query heads of their group."""

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch head key d_head"]
    q_length: Float[Tensor, "batch head query 1"]
    k_length: Float[Tensor, "batch head 1 key"]
    q0: Float[Tensor, "batch head query d_head"] | None
    k0: Float[Tensor, "batch head key d_head"] | None


def reduced(layer: LayerStep, group: ScoreParts) -> Reduced:
    """The statistics of one layer at one step, over tiles of queries."""
    inputs, vectors = layer.inputs, _vectors(layer, group)
    batch, heads, keys, _ = vectors.k.shape
    counted = layer.facts.queries(group.queries).float()
    step = group.numbers[layer.run.step] if group.numbers else layer.run.step
    order = _permutation(layer, heads // inputs.k.shape[1], group.seed, step)
    sums = vectors.q.new_zeros(batch, heads, keys, len(PARTS))
    cosines, seen_by = vectors.q.new_zeros(2, batch, heads, keys)
    moments = vectors.q.new_zeros(batch, heads, len(SHARES) + 1)
    for rows, seen in _tiles(inputs, batch * heads * keys):
        weight = counted[:, None, rows, None]
        terms = _terms(vectors, rows, seen)
        for place, logits in enumerate(_logits(terms, inputs.scale, order)):
            if logits is None:
                sums[..., place] = torch.nan
                continue
            capped = logits if not group.softcap else group.softcap * torch.tanh(logits / group.softcap)
            pattern = softmax(capped.masked_fill(~seen, torch.finfo(capped.dtype).min), inputs.spare) * seen
            sums[..., place] += (pattern * weight).sum(-2)
        cosines += (terms.cosine * seen * weight).sum(-2)
        seen_by += (seen * weight).expand_as(terms.cosine).sum(-2)
        moments += (_covariances(terms, seen) * weight[..., 0, None]).sum(2)
    shares = moments[..., :-1] / moments[..., -1:]
    return Reduced(sums, cosines / seen_by, shares)


def _vectors(layer: LayerStep, group: ScoreParts) -> _Vectors:
    """The vectors after rotation in float32, and those before it."""
    inputs = layer.inputs
    groups = inputs.q.shape[1] // inputs.k.shape[1]
    q, k = inputs.q.float(), inputs.k.float().repeat_interleave(groups, 1)
    q0 = k0 = None
    if group.rotation is not None:
        rows, layout = len(q), group.rotation.layout
        before = group.rotation.q.states.pop(inputs.layer)[:rows]
        # A module may see its learned sink tokens as queries too, which attention then leaves out.
        before = before[:, layout.canvas(before.shape[1])] if before.shape[1] != q.shape[2] else before
        q0 = _unit(before.float().transpose(1, 2))
        after = layout.sinks_last(group.rotation.k.states.pop(inputs.layer)[:rows], 1)
        k0 = _unit(after.float().transpose(1, 2)).repeat_interleave(groups, 1)
    lengths = q.norm(dim=-1, keepdim=True), k.norm(dim=-1)[:, :, None]
    return _Vectors(_unit(q), _unit(k), *lengths, q0, k0)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(vectors.dtype).tiny)


def _permutation(layer: LayerStep, groups: int, seed: int, step: int) -> Int[Tensor, "batch head key"]:
    """A permutation of the defined keys of every row and key head, the same in every process and batch."""
    kv_heads, keys = layer.inputs.k.shape[1:3]
    run = layer.run
    there = layer.facts.keys.cpu()
    found = torch.arange(keys).repeat(len(there), kv_heads, 1)
    for row, defined in enumerate(there):
        where = defined.nonzero().flatten()
        prompt = run.tokens[row][run.prompt[row]].tolist()
        named = zlib.crc32(repr((seed, step, layer.index, prompt)).encode())
        generator = torch.Generator().manual_seed(named)
        for head in range(kv_heads):
            found[row, head, where] = where[torch.randperm(len(where), generator=generator)]
    return found.repeat_interleave(groups, 1).to(layer.inputs.q.device)


def _tiles(inputs: AttentionInputs, entries: int) -> Iterator[tuple[slice, Bool[Tensor, "batch #head tile key"]]]:
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    size = max(1, TILE_ENTRIES // entries)
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        seen = inputs.seen(rows)
        full = inputs.q.new_ones(1, 1, rows.stop - start, keys, dtype=torch.bool)
        yield rows, full if seen is None else seen.expand(-1, -1, rows.stop - start, -1)


class _Terms(NamedTuple):
    """A tile of the scores' parts."""

    cosine: Float[Tensor, "batch head tile key"]
    cosine0: Float[Tensor, "batch head tile key"] | None
    q_length: Float[Tensor, "batch head tile 1"]
    k_length: Float[Tensor, "batch head 1 key"]
    mean_length: Float[Tensor, "batch head tile 1"]
    mean_cosine: Float[Tensor, "batch head tile 1"]


def _terms(vectors: _Vectors, rows: slice, seen: Bool[Tensor, "batch #head tile key"]) -> _Terms:
    cosine = vectors.q[:, :, rows] @ vectors.k.mT
    cosine0 = None
    if vectors.q0 is not None and vectors.k0 is not None:
        cosine0 = vectors.q0[:, :, rows] @ vectors.k0.mT
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    return _Terms(
        cosine,
        cosine0,
        vectors.q_length[:, :, rows],
        vectors.k_length,
        (vectors.k_length * seen).sum(-1, keepdim=True) / count,
        (cosine * seen).sum(-1, keepdim=True) / count,
    )


def _logits(
    terms: _Terms, scale: float, order: Int[Tensor, "batch head key"]
) -> Iterator[Float[Tensor, "batch head tile key"] | None]:
    """The scores of each of `PARTS`, one after the other; None for what is not known."""
    factor = scale * terms.q_length
    yield factor * terms.k_length * terms.cosine
    yield factor * terms.mean_length * terms.cosine
    yield factor * terms.k_length * terms.mean_cosine
    yield None if terms.cosine0 is None else factor * terms.k_length * terms.cosine0
    yield factor * terms.k_length.gather(-1, order[:, :, None]) * terms.cosine
    yield factor * terms.k_length * terms.cosine.gather(-1, order[:, :, None].expand_as(terms.cosine))


def _covariances(
    terms: _Terms, seen: Bool[Tensor, "batch #head tile key"]
) -> Float[Tensor, "batch head tile moment"]:
    """Sums over each query's keys: products of the terms of `SHARES` and the scores, both minus means; squares."""
    count = seen.sum(-1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        values = values * seen
        return (values - values.sum(-1, keepdim=True) / count) * seen

    longer, nearer = terms.k_length - terms.mean_length, terms.cosine - terms.mean_cosine
    score = centred(terms.k_length * terms.cosine)
    parts = [longer * terms.mean_cosine, terms.mean_length * nearer, longer * nearer]
    if terms.cosine0 is None:
        position = torch.full_like(score, torch.nan)
    else:
        position = centred(terms.mean_length * (terms.cosine - terms.cosine0))
    each = [*map(centred, parts), position, score]
    return torch.stack([(one * score).sum(-1) for one in each], -1) * terms.q_length.square()


def rotation_readers(model: Any) -> Rotation:
    """Readers of queries and keys before rotation, to be attached with `attach_hooks`."""
    return Rotation(BeforeRotation("q"), BeforeRotation("k"), SinkLayout.of(model))
