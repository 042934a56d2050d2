"""The token ids that samplers and results treat specially: [MASK] and the ends of a text and of a turn."""

from dataclasses import dataclass
from typing import Any

from dlm_lens.sampling.settings import first_id


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that are treated specially.

    Args:
        mask: of [MASK]; None for an AR model.
        eos: of the end of the text, the first if there are several.
        eot: of the end of a turn.
        ends: every id that ends a text.
    """

    mask: int | None
    eos: int | None = None
    eot: int | None = None
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> "SpecialIds":
        """The ids of a model's config."""
        mask, eos, eot = (getattr(config, f"{name}_token_id", None) for name in ("mask", "eos", "eot"))
        ends = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        return cls(mask, first_id(eos), eot, tuple(int(end) for end in ends))

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a text or a turn."""
        return self.ends if self.eot is None else (*self.ends, int(self.eot))
