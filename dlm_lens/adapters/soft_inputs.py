"""`SoftInputs`: inputs between the embedding of a token and that of [MASK] (DMax)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

EPS = 1e-6
"""Added to the length of a mixed embedding before the division by it, as in the authors' code."""


class SoftInputs(nn.Module):
    """The inputs of a pass some of whose tokens are uncertain.

    With p the probability of a token, e its embedding and m that of [MASK], the input is h = p e + (1 - p) m, times
    (p |e| + (1 - p) |m|) / (|h| + 1e-6), so that it is as long as embeddings are (soft parallel decoding,
    2604.08302; czg1225/DMax, parallel_strategy.py, `decode_uniform` with its `top_k` of 1). The probability is
    float32, and the result has the dtype of the embeddings.
    """

    def forward(
        self,
        embeddings: Float[Tensor, "batch position d_model"],
        mask: Float[Tensor, "d_model"],
        confidence: Float[Tensor, "batch position"],
    ) -> Float[Tensor, "batch position d_model"]:
        """Return the inputs.

        Args:
            embeddings: of the tokens.
            mask: the embedding of [MASK].
            confidence: the probability of each token; -inf where the input is its embedding.
        """
        soft = confidence > -torch.inf
        # Numbers in place of -inf, or gradients through the positions that are not soft would not be finite.
        likely = confidence.masked_fill(~soft, 1.0)[..., None]
        other = (1 - likely).clamp(min=0)
        mixed = embeddings * likely + mask * other
        length = embeddings.norm(dim=-1, keepdim=True) * likely + mask.norm() * other
        mixed = mixed * (length / (mixed.norm(dim=-1, keepdim=True) + EPS))
        return torch.where(soft[..., None], mixed.to(embeddings.dtype), embeddings)
