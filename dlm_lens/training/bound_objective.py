"""The training objective of models of random tokens: the bound on the likelihood that their paper trains with."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.adapters.registry import fills_masks
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.nelbo import MixedCorruption
from dlm_lens.sampling.likelihood.noisy_texts import Integrand
from dlm_lens.sampling.samplers.mixed_noise import noise_mask_id
from dlm_lens.training.fitting_objective import fitting_objective
from dlm_lens.training.objective import (
    POSITIONS,
    TOKENS,
    MaskedDiffusionLoss,
    Normalisation,
    check_no_mask,
    check_trained_whole,
    random_numbers,
    weights_of_tokens,
)
from dlm_lens.training.sources import Rows


@dataclass(frozen=True)
class LikelihoodBoundLoss:
    """L = E [sum_i l(x_0^i, x_t^i, ln x_theta^i, t)], the integrand l of `log_likelihood`'s "mc" at a random time.

    It is the NELBO of uniform noise in continuous time (Duo, 2506.10892; UDLM, 2412.10193, Eq. 18; Sumi), `nelbo`,
    and that of masks and random tokens (GIDD, 2503.04482), `mixed_nelbo`. Every position of the answer is noise by
    itself at its row's time, and every one has a loss. Of GIDD it is the authors' loss where
    `loss_weighting` is neither "clip" nor "dynamic", of Duo that without the curriculum of the first steps.

    Args:
        normalisation, group, random_length_share: as in `MaskedDiffusionLoss`; the mean of a row's tokens
            ("token") is in nats per token.
        low_discrepancy: t = (u + i/group) mod 1 with one u for each group of `group` samples, as GIDD on a DiT
            is trained (`low_discrepancy_sampling`); UDLM has a u for each sample.

    Raises:
        ValueError: a value out of its range.
    """

    kind: ClassVar[str] = "likelihood_bound"
    predicted_share: ClassVar[float] = 1.0
    normalisation: Normalisation = "token"
    low_discrepancy: bool = True
    group: int = 0
    random_length_share: float = 0.0

    def __post_init__(self) -> None:
        _ = self.rows

    def for_evaluation(self, samples: int) -> Self:
        """The same objective for an evaluation loss: whole rows, and each row's times spread over `samples`."""
        return replace(self, random_length_share=0.0, low_discrepancy=True, group=samples)

    @property
    def rows(self) -> MaskedDiffusionLoss:
        """The masked objective that draws times and lengths."""
        shared = {field.name: getattr(self, field.name) for field in fields(LikelihoodBoundLoss)}
        return MaskedDiffusionLoss(**shared)

    def for_model(self, model: Any, batch_size: int) -> "ModelBoundLoss":
        """The same objective, with the noise of the model and the batch size as `group`.

        Raises:
            ValueError: noise of masks alone, or a model without a bound.
        """
        check_trained_whole(model)
        fitting = fitting_objective(model)
        if fitting != "LikelihoodBoundLoss":
            raise ValueError(
                f"{type(model).__name__} has no bound on the likelihood with random tokens; train it with "
                f"{fitting}{' (weighting=elbo is its bound)' if fitting == 'MaskedDiffusionLoss' else ''}"
            )
        values = {field.name: getattr(self, field.name) for field in fields(LikelihoodBoundLoss)}
        values["group"] = self.group or batch_size
        return ModelBoundLoss(**values, config=model.config, noise_level=takes_noise_level(model))


@dataclass(frozen=True)
class ModelBoundLoss(LikelihoodBoundLoss):
    """`LikelihoodBoundLoss` for one model.

    Args:
        config: of the model.
        noise_level: whether its network is given the noise level.
    """

    config: Any = None
    noise_level: bool = False

    @property
    def mask_token_id(self) -> int | None:
        """The id that has no probability, which no text may hold; None where every id has one."""
        mixed = isinstance(algorithm_of(self.config).corruption, MixedCorruption)
        return noise_mask_id(self.config) if mixed else None

    def lengths(self, samples: Sequence[int], length: int, seed: int) -> list[int]:
        """As in `MaskedDiffusionLoss`."""
        return self.rows.lengths(samples, length, seed)

    def noise_tokens(self, samples: Sequence[int], length: int, seed: int) -> Int[Tensor, "batch position"]:
        """What every position holds where all is noise: masks, or random tokens."""
        size, mask = int(self.config.vocab_size), self.mask_token_id
        if fills_masks(self.config) and mask is not None:
            return torch.full((len(samples), length), mask)
        size -= mask is not None
        drawn = [random_numbers(seed, TOKENS, sample).integers(0, size, length) for sample in samples]
        tokens = torch.from_numpy(np.stack(drawn))
        return tokens if mask is None else tokens + (tokens >= mask)

    def prepare(self, rows: Rows, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Draw the noise, and return the arguments of the loss.

        Raises:
            ValueError: the text holds the mask token; or a text of several documents, or of clean and noisy tokens,
                that the network cannot be shown.
        """
        if (mask := self.mask_token_id) is not None:
            check_no_mask(rows.tokens[rows.visible], mask)
        corruption: Any = algorithm_of(self.config).corruption
        times = corruption.time_of(self.rows.times(samples, seed))
        texts = []
        for row, time, sample in zip(rows.tokens, times, samples, strict=True):
            generator = torch.Generator().manual_seed(int(random_numbers(seed, POSITIONS, sample).integers(2**63)))
            texts.append(corruption.texts_at(Pair(row[:0], row), self.config, time[None], generator))
        noisy, level, sigma = (torch.cat(parts) for parts in zip(*texts, strict=True))
        clean = self.clean_of(rows)
        if clean is not None and rows.documents is not None:
            raise ValueError(
                "the text has isolated documents, and clean tokens (prompts) that must not see the noise: there is "
                "no mask for both; set data.packing to joined, or leave the prompts out"
            )
        region = rows.answer
        weights, count = weights_of_tokens(region, self.normalisation)
        index: Int[Tensor, "batch position"] = torch.arange(region.numel()).view_as(rows.tokens)
        # Not every device has float64: a number in two of float32.
        pairs = torch.stack([level.float(), (level - level.float()).float()], -1)
        given = {"sigma": sigma.float()} if self.noise_level else {}
        return {
            "input_ids": torch.where(region, noisy, rows.tokens),
            **rows.network_inputs(),
            **({} if clean is None else {"clean": clean}),
            **given,
            "outputs": index[region],
            "targets": rows.tokens[region],
            "weights": weights[region].float(),
            "levels": pairs[:, None].expand(*region.shape, 2)[region],
            "count": torch.tensor(count),
        }

    def sigma_at(self, share: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The noise level that a network is given at these shares of the time, in [0, 1)."""
        corruption: Any = algorithm_of(self.config).corruption
        one, times = torch.zeros(1, dtype=torch.long), corruption.time_of(share.flatten())
        texts = corruption.texts_at(Pair(one[:0], one), self.config, times, torch.Generator())
        sigma: Float[Tensor, "*batch"] = texts.sigma.float().view_as(share)
        return sigma

    def clean_of(self, rows: Rows) -> Bool[Tensor, "batch position"] | None:
        """The clean positions, of a network in which these do not see the noise; None where none is."""
        clean = rows.visible & ~rows.answer
        return clean if getattr(self.config, "clean_context", False) and bool(clean.any()) else None


def bound_of(config: Any) -> Integrand:
    """The integrand of the bound of a model with this config."""
    corruption: Any = algorithm_of(config).corruption
    found: Integrand = corruption.integrand(config)
    return found
