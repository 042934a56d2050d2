"""Config fields of the networks that "One Token Is Enough" trains, for every host layout."""

from dataclasses import dataclass
from typing import Any

from dlm_lens.adapters.config_fields import without_foreign_fields
from dlm_lens.attention import Placement, SinkLayout
from dlm_lens.attention.softmax_variants import Softmax, check_softmax


@dataclass(kw_only=True)
class SinkFields:
    """Mixin in front of a config of transformers.

    Args:
        num_sinks: learned sink tokens around the canvas (the paper: 0, 1, 2, 4).
        sink_placement: "front" (Eq. 5) or "end" (Eq. 7).
        zero_sink_value: force the sinks' values to zero in every layer (Table 5).
        gated_attention: z times sigmoid(W_g x), elementwise, before the output projection (appendix A.2).
        softmax: "standard"; "off_by_one", rows of exp(s) / (1 + sum exp(s)); "sink_logits", the 1 replaced by a
            learned exp(b) per head.
        logit_shift: position i is predicted by the output at i - 1, for models that began autoregressive.
        sampler: "llada" or "dream"; None for LLaDA's.
        sampler_defaults: settings of `denoise` that travel with the checkpoint.

    Raises:
        ValueError: a negative number of sinks, an unknown placement, or another softmax beside sinks.
    """

    is_causal: bool = False
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    num_sinks: int = 0
    sink_placement: Placement = "front"
    zero_sink_value: bool = False
    gated_attention: bool = False
    softmax: Softmax = "standard"
    logit_shift: bool = False
    sampler: str | None = None
    sampler_defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Switch the cache off: every step sees the whole canvas anew."""
        SinkLayout(self.num_sinks, self.sink_placement)
        check_softmax(self.softmax, self.num_sinks)
        super().__post_init__(**without_foreign_fields(kwargs))  # type: ignore[misc]
        self.use_cache = False
