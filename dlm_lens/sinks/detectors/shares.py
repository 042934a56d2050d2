"""`AttentionShare` and `MeanReceived`: one threshold between 0 and 1 for every key."""

from dataclasses import dataclass

from dlm_lens.sinks.detector_registry import DetectorEntry
from dlm_lens.sinks.detectors.base import ConstantThreshold, Quantity

ATTENTION_SHARE = DetectorEntry(
    name="attention-share",
    kind="AttentionShare",
    setting="threshold",
    values="fraction",
    formula="share of all attention > threshold",
)

MEAN_RECEIVED = DetectorEntry(
    name="mean-received",
    kind="MeanReceived",
    setting="threshold",
    values="fraction",
    formula="mean attention of the queries that see the key > threshold",
)


@dataclass(frozen=True)
class AttentionShare(ConstantThreshold):
    """A sink takes more than a share x of the attention of all counted queries: r_j / n > x.

    r_j are the raw column sums over the n counted queries, on every scale. Where every row of the pattern sums to
    1, n is sum_k r_k. Under off-by-one softmax, sink logits, or hooks after the softmax rows sum to less, and what
    goes to no key counts as attention too. Shares compare sequences of different lengths (even attention gives
    1 / S), but do not correct for a causal mask: the first key of an AR baseline has H_S / S under even attention,
    7.4% at S = 64.

    Raises:
        ValueError: x is not between 0 and 1.
    """

    @property
    def quantity(self) -> Quantity:
        """Shares of all counted attention."""
        return "share"


@dataclass(frozen=True)
class MeanReceived(ConstantThreshold):
    """A sink gets more than x of the attention of the queries that see it, on average: alpha_j = r_j / n_j > x.

    2410.10781, section 3.1: alpha_k = 1 / (T - k + 1) sum_{i >= k} A_ik with x = 0.3; the share of (layer, head)
    whose key k passes is its sink rate, see `sink_rate`. n_j is the number of counted queries that see key j, so
    that a causal mask does not make the first key a sink: even attention gives its alpha H_S / S (7.4% at S = 64),
    as `AttentionShare` does, but the last keys are not divided by queries that cannot see them. From 0 to 1. In a
    full bidirectional pass it is `AttentionShare(x)`; even attention has 1 / S there.

    Raises:
        ValueError: x is not between 0 and 1.
    """

    @property
    def quantity(self) -> Quantity:
        """Attention from the counted queries that see the key, on average."""
        return "mean attention"
