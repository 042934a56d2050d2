"""The GPUs that a cost estimate knows; nothing here imports torch, so that a command line is checked at once."""

from dataclasses import dataclass

UTILISATION = 0.4
"""Share of a device's peak that matrix products of this size reach; assumed, not measured."""


@dataclass(frozen=True)
class Device:
    """A device: its peak in bfloat16 matrix products (dense, operations per second), and its memory in bytes."""

    name: str
    peak: float
    memory: float

    def seconds(self, flops: float, utilisation: float = UTILISATION) -> float:
        """Time of so many operations at this share of the peak."""
        return flops / (self.peak * utilisation)


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312e12, 80e9),
        Device("h100", 989e12, 80e9),
        Device("h200", 989e12, 141e9),
        Device("l40s", 362e12, 48e9),
        Device("rtx4090", 165e12, 24e9),
    )
}
"""NVIDIA's data sheets."""
