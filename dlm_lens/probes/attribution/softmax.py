"""Effects of other queries, keys and columns through the softmax itself, with the gradient of z alone."""

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import AttentionInputs
from dlm_lens.attention.softmax_variants import softmax
from dlm_lens.placement import float64_device

TILE_ENTRIES = 2**21
"""Entries of [batch, head, query, key] at a time, in float64."""

LARGEST_EXPONENT = 700.0
"""exp of more is no float64."""


class SoftmaxEffects:
    """First-order effects of the pattern of one layer, given dL/dz of its heads.

    G_ij = dL/dz_i . v_j is the gradient of the pattern A, m_i = sum_j A_ij G_ij, and dL/ds_ij = A_ij (G_ij - m_i)
    that of the scores s. A spare entry of the softmax is one more key with G = 0. The pattern is formed again from
    q and k, a few queries at a time; sums over them are in float64, and results in float32 at least.

    Args:
        inputs: of the layer in the base's pass.
        gradient: dL/dz.
        remedy: what to do about another attention, which ends the error's sentence.

    Raises:
        ValueError: an attention that is not softmax(q k^T scale) v, with a cap or a bias.
    """

    def __init__(
        self, inputs: AttentionInputs, gradient: Float[Tensor, "batch position head d_head"], remedy: str
    ) -> None:
        device = float64_device(gradient.device)
        names = ("q", "k", "v", "z", "visible")
        parts = {name: part.detach().to(device) for name in names if (part := getattr(inputs, name)) is not None}
        self.inputs, gradient = replace(inputs, **parts), gradient.to(device)
        q, k = self.inputs.q, self.inputs.k
        queries = gradient if gradient.shape[1] == q.shape[2] else gradient[:, self.inputs.own]
        self.gradient = queries.transpose(1, 2)
        self.groups = q.shape[1] // k.shape[1]
        self._wide = torch.promote_types(gradient.dtype, torch.float32)
        self._check(remedy)

    def of_queries(self, other: Float[Tensor, "batch query head d_head"]) -> Float[Tensor, "batch head query"]:
        """sum_j G_ij (A'_ij - A_ij) for every query i, where A' has the other queries."""
        other = (other if other.shape[1] == self.inputs.q.shape[2] else other[:, self.inputs.own]).transpose(1, 2)
        found = self.gradient.new_zeros(self.gradient.shape[:3], dtype=torch.float64)
        for rows in self._tiles():
            change = self._pattern(self._scores(rows, other, self.inputs.k), rows)
            change = change - self._pattern(self._scores(rows), rows)
            found[:, :, rows] = (change * self._weights(rows)).sum(-1)
        return found.to(self._wide)

    def of_keys(self, other: Float[Tensor, "batch key kv_head d_head"]) -> Float[Tensor, "batch kv_head"]:
        """sum_ij G_ij (A'_ij - A_ij), where A' has the other keys, all at once."""
        found = self.gradient.new_zeros(self.gradient.shape[:2], dtype=torch.float64)
        for rows in self._tiles():
            change = self._pattern(self._scores(rows, self.inputs.q, other.transpose(1, 2)), rows)
            change = change - self._pattern(self._scores(rows), rows)
            found += (change * self._weights(rows)).sum((-2, -1))
        return self._grouped(found.to(self._wide))

    def of_each_key(self, other: Float[Tensor, "batch key kv_head d_head"]) -> Float[Tensor, "batch kv_head key"]:
        """As `of_keys` with one other key j at a time (2403.00745, section 3.1.1 and its appendix on fast keys).

        With w_ij = A_ij (exp(s'_ij - s_ij) - 1), row i sums to 1 + w_ij before it is divided, so that the effect is
        sum_i w_ij / (1 + w_ij) (G_ij - m_i).
        """
        found = self.gradient.new_zeros(*self.gradient.shape[:2], self.inputs.k.shape[2], dtype=torch.float64)
        for rows in self._tiles():
            found += self._reweighted(rows, self._scores(rows, self.inputs.q, other.transpose(1, 2)))
        return self._grouped(found.to(self._wide))

    def of_hiding(self) -> Float[Tensor, "batch head key"]:
        """The same with key j hidden before the softmax: w_ij = -A_ij, or 0 for a query that has no other."""
        found = self.gradient.new_zeros(*self.gradient.shape[:2], self.inputs.k.shape[2], dtype=torch.float64)
        for rows in self._tiles():
            found += self._reweighted(rows, None)
        return found.to(self._wide)

    def of_log_scale(self) -> Float[Tensor, "batch head key"]:
        """dL/d lambda_j where lambda_j is added to every score of key j: sum_i A_ij (G_ij - m_i)."""
        found = self.gradient.new_zeros(*self.gradient.shape[:2], self.inputs.k.shape[2], dtype=torch.float64)
        for rows in self._tiles():
            pattern, weights = self._pattern(self._scores(rows), rows), self._weights(rows)
            found += (pattern * (weights - (pattern * weights).sum(-1, keepdim=True))).sum(-2)
        return found.to(self._wide)

    def _reweighted(
        self, rows: slice, others: Float[Tensor, "batch head tile key"] | None
    ) -> Float[Tensor, "batch head key"]:
        """Sum over queries of w / (1 + w) (G - m), w for one other score s' of each key, or none: a hidden key.

        With a' = exp(s') / Z and R = 1 - A, w / (1 + w) = (a' - A) / (R + a'). At a row's strongest key, where R
        may be smaller than the rounding of A, R is the sum of the other weights, and G - m = R (G - g) with g the
        mean of G over the other keys.
        """
        scores, weights, visible = self._scores(rows), self._weights(rows), self.inputs.seen(rows)
        sees = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible.expand_as(scores)
        # Nothing is left of such a row without its key, and it is 1 with it.
        alone = sees.sum(-1, keepdim=True) < (2 if self.inputs.spare is None else 1)
        scores = scores.masked_fill(~sees, -torch.inf).masked_fill(alone, 0.0)
        total = self._log_sum(scores)
        pattern = (scores - total).exp()
        log = (
            torch.full_like(scores, -torch.inf)
            if others is None
            else (others - total).masked_fill(~sees, -torch.inf)
        )
        put = log.clamp(max=LARGEST_EXPONENT).exp()
        mean = (pattern * weights).sum(-1, keepdim=True)
        found = (put - pattern) / (1 - pattern + put) * (weights - mean)

        top = scores.argmax(-1, keepdim=True)
        rest = scores.scatter(-1, top, -torch.inf)
        left = self._log_sum(rest)
        rest_mean = ((rest - left).exp() * weights).sum(-1, keepdim=True)
        odds = log.gather(-1, top) - (left - total)  # ln a' - ln R
        share = (left - total).exp() * odds.sigmoid() - pattern.gather(-1, top) * (-odds).sigmoid()
        found = found.scatter(-1, top, share * (weights.gather(-1, top) - rest_mean))
        return found.masked_fill(alone, 0.0).sum(-2)

    def _tiles(self) -> list[slice]:
        batch, heads, queries, _ = self.inputs.q.shape
        size = max(1, TILE_ENTRIES // (batch * heads * self.inputs.k.shape[2]))
        return [slice(start, min(start + size, queries)) for start in range(0, queries, size)]

    def _scores(
        self, rows: slice, q: Tensor | None = None, k: Tensor | None = None
    ) -> Float[Tensor, "batch head tile key"]:
        q, k = self.inputs.q if q is None else q, self.inputs.k if k is None else k
        device = self.gradient.device
        grouped = rearrange(q[:, :, rows].to(device).to(self._wide), "b (g n) q d -> b g n q d", n=self.groups)
        scores = grouped @ k.to(device).to(self._wide).unsqueeze(2).mT * self.inputs.scale
        return rearrange(scores, "b g n q k -> b (g n) q k").double()

    def _pattern(self, scores: Tensor, rows: slice) -> Float[Tensor, "batch head tile key"]:
        visible = self.inputs.seen(rows)
        if visible is None:
            return softmax(scores, self.inputs.spare)
        return softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), self.inputs.spare) * visible

    def _log_sum(self, scores: Tensor) -> Float[Tensor, "batch head tile 1"]:
        """The log-sum-exp of rows of scores, with their spare entries."""
        own = scores.logsumexp(-1, keepdim=True)
        return own if self.inputs.spare is None else torch.logaddexp(own, self.inputs.spare.to(own)[:, None, None])

    def _weights(self, rows: slice) -> Float[Tensor, "batch head tile key"]:
        """G of some queries."""
        grouped = rearrange(self.gradient[:, :, rows].to(self._wide), "b (g n) q d -> b g n q d", n=self.groups)
        found = grouped @ self.inputs.v.to(self._wide).unsqueeze(2).mT
        return rearrange(found, "b g n q k -> b (g n) q k").double()

    def _grouped(self, found: Tensor) -> Tensor:
        """Sums over the query heads of every key/value head."""
        return found.unflatten(1, (-1, self.groups)).sum(2)

    def _check(self, remedy: str) -> None:
        """Compare the z that this class would form with the module's own."""
        z = self.inputs.z
        if z is None:
            return
        rows = self._tiles()[0]
        pattern = self._pattern(self._scores(rows), rows)
        grouped = rearrange(pattern, "b (g n) q k -> b g n q k", n=self.groups)
        formed = rearrange(grouped @ self.inputs.v.to(pattern).unsqueeze(2), "b g n q d -> b q (g n) d")
        sees = pattern.sum(-1).transpose(1, 2)[..., None] > 0  # padding sees nothing, and nothing sees it
        expected = z.detach()[:, rows].to(formed) * sees
        allowed = 1e-3 if z.dtype in (torch.float32, torch.float64) else 0.05
        if float((formed - expected).abs().max()) > allowed * float(expected.abs().max().clamp(min=1e-6)):
            raise ValueError(
                f"layer {self.inputs.layer} computes more than softmax(q k^T scale) v (a soft cap, a bias, or a "
                f"hook): {remedy}"
            )
