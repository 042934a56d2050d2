"""The training objective of uniform noise: random tokens in place of masks, and a prediction at every position."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.noisy_texts import NoisyCorruption
from dlm_lens.training.config_files import check_types
from dlm_lens.training.fitting_objective import fitting_objective
from dlm_lens.training.objective import (
    TOKENS,
    MaskedDiffusionLoss,
    Masks,
    Noised,
    Normalisation,
    Schedule,
    check_trained_whole,
    random_numbers,
    weights_of_tokens,
)
from dlm_lens.training.sources import Rows


@dataclass(frozen=True)
class UniformDiffusionLoss:
    """L = -E [sum_i log p(x_0^i | x_t)] under uniform noise: D3PM's cross entropy (2107.03006, Eq. 5, second term).

    Each position of the answer is replaced, with probability tau(t) of `MaskedDiffusionLoss`, by a token drawn
    uniformly from the vocabulary, which is its own one with probability 1 / V (D3PM's uniform transition matrix,
    appendix A.2.1). The network predicts x_0 at every position of the answer, noise or not, since it is not told
    which is which, and all count alike. The minimum is the posterior p(x_0^i | x_t), from which
    `samplers/entropy_bound.py` draws. It is no bound on the likelihood.

    Args:
        schedule, floor, normalisation, masks, low_discrepancy, group, whole_share, random_length_share: as in
            `MaskedDiffusionLoss`, with random tokens in place of masks.
        vocabulary: V, the ids 0, ..., V - 1 of random tokens; 0 for the model's.

    Raises:
        ValueError: a value out of its range.
    """

    kind: ClassVar[str] = "uniform_diffusion"
    predicted_share: ClassVar[float] = 1.0
    schedule: Schedule = "linear"
    floor: float = 1e-3
    normalisation: Normalisation = "token"
    masks: Masks = "independent"
    low_discrepancy: bool = False
    group: int = 0
    whole_share: float = 0.0
    random_length_share: float = 0.0
    vocabulary: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        _ = self.noise
        if self.vocabulary < 0:
            raise ValueError(f"vocabulary is {self.vocabulary}; it must be 0 (the model's) or positive")

    def for_evaluation(self, samples: int) -> Self:
        """The same objective for an evaluation loss: whole rows, and each row's times spread over `samples`."""
        return replace(self, random_length_share=0.0, low_discrepancy=True, group=samples)

    @property
    def noise(self) -> MaskedDiffusionLoss:
        """The masked objective that draws which positions are noise."""
        shared = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "vocabulary"}
        return MaskedDiffusionLoss(**shared, weighting="uniform")

    def lengths(self, samples: Sequence[int], length: int, seed: int) -> list[int]:
        """As in `MaskedDiffusionLoss`."""
        return self.noise.lengths(samples, length, seed)

    def noise_tokens(self, samples: Sequence[int], length: int, seed: int) -> Int[Tensor, "batch position"]:
        """The random token of every position, noise or not.

        Raises:
            ValueError: the objective lacks the model's vocabulary.
        """
        if not self.vocabulary:
            raise ValueError("the objective lacks the model's vocabulary; call `for_model` first")
        drawn = [random_numbers(seed, TOKENS, sample).integers(0, self.vocabulary, length) for sample in samples]
        return torch.from_numpy(np.stack(drawn))

    def prepare(self, rows: Rows, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Draw the noise, and return the arguments of the loss."""
        tokens = self.noise_tokens(samples, rows.tokens.shape[1], seed)
        return self.loss_arguments(rows, self.noise.draw(rows, samples, seed), tokens)

    def loss_arguments(
        self, rows: Rows, noised: Noised, tokens: Int[Tensor, "batch position"]
    ) -> dict[str, Tensor]:
        """The canvas with the given noise, and the outputs, targets and weights of its loss.

        Args:
            rows: the clean rows.
            noised: which positions are replaced (`masked`), and which count (`region`).
            tokens: the random token of each position.
        """
        region = noised.region
        weight, count = weights_of_tokens(region, self.normalisation)
        index: Int[Tensor, "batch position"] = torch.arange(rows.tokens.numel()).view_as(rows.tokens)
        return {
            "input_ids": torch.where(noised.masked, tokens, rows.tokens),
            **rows.network_inputs(),
            "outputs": index[region],
            "targets": rows.tokens[region],
            "weights": weight[region].float(),
            "count": torch.tensor(count),
        }

    def for_model(self, model: Any, batch_size: int) -> "UniformDiffusionLoss":
        """The same objective, with the vocabulary of the model and the batch size as `group`.

        Raises:
            ValueError: the model's own sampler does not denoise uniform noise, or has another prediction; or it
                embeds fewer ids.
        """
        check_trained_whole(model)
        if getattr(model.config, "mask_token_id", None) is not None or not hasattr(model.config, "mask_token_id"):
            raise ValueError(
                f"{type(model).__name__} is no model of uniform noise (it has a mask token, or is autoregressive); "
                f"train it with {fitting_objective(model)}, or train a uniform_qwen"
            )
        if isinstance(algorithm_of(model.config).corruption, NoisyCorruption):
            raise ValueError(
                f"the sampler of {type(model).__name__} counts the token that a position holds beside the "
                "prediction (2506.10892), and this loss trains one that reads it too; take LikelihoodBoundLoss"
            )
        vocabulary = self.vocabulary or int(model.config.vocab_size)
        rows = int(model.get_input_embeddings().weight.shape[0])
        if vocabulary > rows:
            raise ValueError(
                f"vocabulary is {vocabulary}, and the model embeds {rows} ids; give 0 for the model's own"
            )
        return replace(self, vocabulary=vocabulary, group=self.group or batch_size)
