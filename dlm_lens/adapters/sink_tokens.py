"""The embedding of learned sink tokens."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm_lens.attention import SinkLayout


class SinkEmbedding(nn.Embedding):
    """Token embedding that returns the canvas with the learned sinks around it: `[batch, S + count, d_model]`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layout = SinkLayout(config.num_sinks, config.sink_placement)
        self.sinks = nn.Parameter(torch.randn(config.num_sinks, config.hidden_size) * config.initializer_range)

    def forward(self, input: Int[Tensor, "batch canvas"]) -> Float[Tensor, "batch position d_model"]:
        """Embed the canvas and put the sinks in their place."""
        sinks = self.sinks.expand(input.shape[0], -1, -1)
        return self.layout.surround(super().forward(input), sinks.to(self.weight.dtype))
