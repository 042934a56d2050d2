"""The networks that the paper compares, by name."""

from dataclasses import dataclass
from typing import Any

from dlm_lens.attention import Placement


@dataclass(frozen=True)
class Variant:
    """What distinguishes one network from the plain DLM.

    Args:
        label: in tables.
        sinks: learned sink tokens.
        position: of them.
        zero_value: their values are forced to zero.
        gated: gated attention.
        softmax: "standard", "off_by_one" or "sink_logits".
    """

    label: str
    sinks: int = 0
    position: Placement = "front"
    zero_value: bool = False
    gated: bool = False
    softmax: str = "standard"

    def fields(self) -> dict[str, Any]:
        """Fields of the config of a network."""
        return {
            "num_sinks": self.sinks,
            "sink_placement": self.position,
            "zero_sink_value": self.zero_value,
            "gated_attention": self.gated,
            "softmax": self.softmax,
        }

    def options(self) -> dict[str, Any]:
        """Arguments of `convert` and of `ModelSettings`."""
        named = ("sinks", "position", "zero_value", "gated", "softmax")
        return {name: getattr(self, name) for name in named}


VARIANTS = {
    "plain": Variant("DLM"),
    "sink": Variant("DLM + sink token", sinks=1),
    "gated": Variant("DLM + GA", gated=True),
    "end": Variant("sink token at the end", sinks=1, position="end"),
    "sinks2": Variant("2 sink tokens", sinks=2),
    "sinks4": Variant("4 sink tokens", sinks=4),
    "zero": Variant("zero-value token", sinks=1, zero_value=True),
    "off-by-one": Variant("off-by-one softmax", softmax="off_by_one"),
}
