"""Training objectives: masked diffusion, also in blocks ("One Token Is Enough", Eq. 3, 4), and AR."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.attention import SinkLayout, computed_span, has_causal_context, mask_window_of
from dlm_lens.sampling.two_copies import Blocks, predicting_output
from dlm_lens.training.config_files import check_types
from dlm_lens.training.fitting_objective import check_causal, fitting_objective
from dlm_lens.training.sources import Rows

Schedule = Literal["linear", "cosine"]
Weighting = Literal["inverse", "elbo", "uniform"]
Normalisation = Literal["token", "sequence", "batch"]
Masks = Literal["independent", "count"]

TIMES, POSITIONS, LENGTHS, TOKENS, DROPOUT = 0, 1, 2, 4, 5
"""Random streams, so that one setting does not change the random numbers of another."""


class Noised(NamedTuple):
    """The noise of a batch.

    Args:
        masked: masked positions of x_t.
        rate: masking probability tau.
        weight: of a masked position's loss.
        region: positions that could be masked.
    """

    masked: Bool[Tensor, "batch position"]
    rate: Float[Tensor, "batch"]
    weight: Float[Tensor, "batch"]
    region: Bool[Tensor, "batch position"]


class Objective(Protocol):
    """Turns a batch of clean rows into the network's input and the arguments of the loss."""

    def prepare(self, rows: Rows, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """The network's input, and `outputs`, `targets`, `weights`, `count` of the loss.

        The loss is sum_n weights_n CE(output outputs_n, targets_n) / (sum of count over the optimiser's step).
        `outputs` are indices into the flattened [batch * position]. Random numbers depend on `seed` and on each
        row's number in the run, `samples`, and on nothing else.
        """
        ...

    def lengths(self, samples: Sequence[int], length: int, seed: int) -> list[int]:
        """The length of each row, at most `length`."""
        ...


def check_choices(settings: Any, **choices: Any) -> None:
    """Raise where a named field of `settings` has a value outside its Literal.

    Raises:
        ValueError: naming the field, its value and the possible values.
    """
    for name, literal in choices.items():
        if getattr(settings, name) not in get_args(literal):
            listed = ", ".join(map(repr, get_args(literal)))
            raise ValueError(f"{name} is {getattr(settings, name)!r}; it must be one of {listed}")


def check_trained_whole(model: Any) -> None:
    """Raise unless a forward pass of the model has outputs at every position, which all objectives read.

    Raises:
        ValueError: the model has an encoder, and outputs on its canvas alone; or it is an SDLM or I-DLM.
    """
    if mask_window_of(model.config) is not None:
        raise ValueError(
            f"{type(model).__name__} is not trained here: its loss is that of a window of masks after every "
            "prefix, and the objectives draw masks at random; an sdar is trained with these"
        )
    if computed_span(model, 2) is not None:
        raise ValueError(
            f"{type(model).__name__} is not trained here: it predicts its canvas alone, after an encoder, and an "
            "objective needs outputs at every position; train a uniform_qwen, whose noise is uniform too"
        )


def check_no_mask(tokens: Int[Tensor, "..."], mask_token_id: int, where: str = "the text") -> None:
    """Raise where the clean tokens hold the mask token.

    Raises:
        ValueError: they do; `where` names them.
    """
    if bool((tokens == mask_token_id).any()):
        raise ValueError(
            f"{where} holds the mask token {mask_token_id}, which would be learned as a word; choose a mask token "
            "that the text does not contain, or leave such texts out"
        )


def check_embedded(tokens: Int[Tensor, "..."], rows: int, where: str = "the text") -> None:
    """Raise where the clean tokens hold an id that the network does not embed.

    Raises:
        ValueError: they do; `where` names them.
    """
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= rows):
        bad = tokens[(tokens < 0) | (tokens >= rows)][0]
        raise ValueError(
            f"{where} holds the token id {int(bad)}, and the model embeds 0 to {rows - 1}; take the ids of the "
            "model's own tokenizer, or leave such texts out"
        )


def weights_of_tokens(
    region: Bool[Tensor, "batch position"], normalisation: Normalisation
) -> tuple[Float[Tensor, "batch position"], float]:
    """The weight of every position's loss, and what the sum of the losses is divided by.

    Args:
        region: the positions that count.
        normalisation: as in `MaskedDiffusionLoss`.
    """
    weights = torch.ones(region.shape, dtype=torch.float64)
    if normalisation == "sequence":
        weights = weights / region.sum(-1, keepdim=True).clamp(min=1)
    return weights, float(region.sum() if normalisation == "token" else region.any(-1).sum())


def random_numbers(seed: int, stream: int, *place: int) -> np.random.Generator:
    """The random generator of a row (or of another place in a run), a pure function of its arguments."""
    return np.random.default_rng((seed, stream, *place))


@dataclass(frozen=True)
class MaskedDiffusionLoss:
    """L = -E [1/tau sum_{i masked} log p(x_0^i | x_t)] ("One Token Is Enough", Eq. 3 and 4).

    t is uniform in [0, 1), tau = floor + (1 - floor) s(t) with s(t) = t (linear) or 1 - cos(pi t / 2) (cosine).

    A model that decodes blocks (its sampler says so) is trained in blocks: log p(x_0^i | x_t^b, x_0^<b) of every
    block b in one pass over [x_t, x_0] (2503.09573; ZHZisZZ/dllm, core/trainers/bd3lm.py), with a t of
    each row. `two_copies` has the mask.

    Args:
        schedule: s(t).
        floor: least masking probability (published code: 1e-3).
        weighting: "inverse", 1/tau as printed; "elbo", tau'(t)/tau(t), which keeps the bound on the likelihood
            where the schedule is not linear (for linear it is (1 - floor)/tau); "uniform", 1, which is no bound.
        normalisation: "token" divides by the positions that could be masked, over the whole optimiser's step
            (SMDM, LLaDA's pre-training); "sequence" first by each row's, then by the rows (LLaDA's fine-tuning);
            "batch" by the rows alone.
        masks: "independent" coins per position, or exactly ceil(tau R) of a row's R positions ("count", the form
            with less variance, 2502.09992, Eq. 14; tau is then that share).
        low_discrepancy: times of `group` consecutive samples are (u + i / group) mod 1.
        group: samples that share u; 0 for the batch of an optimiser's step.
        whole_share: share of the rows whose prompt is masked like the answer; 0 in LLaDA's fine-tuning.
        random_length_share: share of the rows cut to a length uniform in 1..S (LLaDA's pre-training: 0.01).
        logit_shift: the output at i - 1 predicts position i, for models converted from AR ones; None for the
            model's config. The first token of a row or document, which has no predecessor, is predicted by its
            own output, as in `denoise`.
        mask_token_id: None for the model's.
        block_length: positions of a block; 0 for no blocks, None for the model's.
        blocks_from_text: count blocks from the first token of every row, instead of from its answer; None for the
            model's, whose sampler counts the same way.
        ar_weight: of the AR loss -sum_i log p(x_0^i | x_0^<i) over the same region, read from the clean copy, in a
            model whose clean text attends causally (Nemotron-Labs-Diffusion, `ar_loss_weight`); 0 for none.

    Raises:
        ValueError: a value out of its range.
    """

    kind: ClassVar[str] = "masked_diffusion"
    schedule: Schedule = "linear"
    floor: float = 1e-3
    weighting: Weighting = "inverse"
    normalisation: Normalisation = "token"
    masks: Masks = "independent"
    low_discrepancy: bool = False
    group: int = 0
    whole_share: float = 0.0
    random_length_share: float = 0.0
    logit_shift: bool | None = None
    mask_token_id: int | None = None
    block_length: int | None = None
    blocks_from_text: bool | None = None
    ar_weight: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self, schedule=Schedule, weighting=Weighting, normalisation=Normalisation, masks=Masks)
        if not 0 < self.floor < 1:
            raise ValueError(f"floor is {self.floor}; a masking probability must lie between 0 and 1")
        for name in ("whole_share", "random_length_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a share lies between 0 and 1")
        if self.group < 0:
            raise ValueError(f"group is {self.group}; it must be 0 (the optimiser's batch) or positive")
        if self.block_length is not None and self.block_length < 0:
            raise ValueError(f"block_length is {self.block_length}; it must be 0 (no blocks) or positive")
        if not 0 <= self.ar_weight < math.inf:
            raise ValueError(f"ar_weight is {self.ar_weight}; it must be 0 (no AR loss) or positive")

    @property
    def predicted_share(self) -> float:
        """Logits that a training computes for every position: on average those of half of them are masked."""
        return 1.5 if self.ar_weight else 0.5

    def for_evaluation(self, samples: int) -> Self:
        """The same objective for an evaluation loss: whole rows, and each row's times spread over `samples`."""
        return replace(self, random_length_share=0.0, low_discrepancy=True, group=samples)

    def rate(self, times: Float[Tensor, "batch"]) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"]]:
        """Masking probability tau and the weight of a masked position's loss."""
        if self.schedule == "linear":
            done, slope = times, torch.ones_like(times)
        else:
            done, slope = 1 - torch.cos(math.pi / 2 * times), math.pi / 2 * torch.sin(math.pi / 2 * times)
        rate = self.floor + (1 - self.floor) * done
        weights = {"inverse": 1 / rate, "elbo": (1 - self.floor) * slope / rate, "uniform": torch.ones_like(rate)}
        return rate, weights[self.weighting]

    def times(self, samples: Sequence[int], seed: int) -> Float[Tensor, "batch"]:
        """The time t of each sample, in float64."""
        if not self.low_discrepancy:
            return torch.tensor([random_numbers(seed, TIMES, sample).random() for sample in samples]).double()
        if not self.group:
            raise ValueError("low_discrepancy needs group, the number of samples that share u; see `for_model`")
        pairs = [divmod(sample, self.group) for sample in samples]
        return torch.tensor(
            [(random_numbers(seed, TIMES, g).random() + i / self.group) % 1 for g, i in pairs]
        ).double()

    def draw(self, rows: Rows, samples: Sequence[int], seed: int) -> Noised:
        """Draw the masks of a batch."""
        rate, weight = self.rate(self.times(samples, seed))
        draws, whole = [], []
        for sample in samples:
            generator = random_numbers(seed, POSITIONS, sample)
            whole.append(generator.random() < self.whole_share)
            draws.append(torch.from_numpy(generator.random(rows.tokens.shape[1])))
        region = rows.answer | rows.prompt & torch.tensor(whole)[:, None]
        uniform = torch.stack(draws)
        if self.masks == "independent":
            return Noised((uniform < rate[:, None]) & region, rate, weight, region)
        size = region.sum(-1)
        count = (rate * size).ceil().clamp(min=1).minimum(size)
        # The k positions with the smallest draws are a uniform choice of k positions.
        rank = uniform.masked_fill(~region, 2.0).argsort(-1).argsort(-1)
        share = (count / size.clamp(min=1)).clamp(min=torch.finfo(rate.dtype).tiny)
        own = torch.ones_like(rate) if self.weighting == "uniform" else rate / share
        return Noised((rank < count[:, None]) & region, share, weight * own, region)

    def lengths(self, samples: Sequence[int], length: int, seed: int) -> list[int]:
        """The length of each row: `length`, or in `random_length_share` of the rows uniform in 1..length."""
        found = []
        for sample in samples:
            generator = random_numbers(seed, LENGTHS, sample)
            short = generator.random() < self.random_length_share
            found.append(int(generator.integers(1, length + 1)) if short else length)
        return found

    def prepare(self, rows: Rows, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Draw the noise, and return the arguments of the loss.

        Raises:
            ValueError: the text holds the mask token.
        """
        return self.loss_arguments(rows, self.draw(rows, samples, seed))

    def loss_arguments(self, rows: Rows, noised: Noised) -> dict[str, Tensor]:
        """The canvas with the given noise, and the outputs, targets and weights of its loss.

        Raises:
            ValueError: the text holds the mask token, or the objective lacks the model's settings.
        """
        if self.mask_token_id is None or self.logit_shift is None:
            raise ValueError("the objective lacks the model's mask token or shift; call `for_model` first")
        check_no_mask(rows.tokens[rows.visible], self.mask_token_id)
        each, count = weights_of_tokens(noised.region, self.normalisation)
        inputs, outputs = self._of_blocks(rows) if self.block_length else self._of_canvas(rows)
        weight = (noised.weight[:, None] * each)[noised.masked]
        found = [(outputs[noised.masked], rows.tokens[noised.masked], weight)]
        if self.ar_weight:
            following, width = noised.region & ~rows.first(), rows.tokens.shape[1]
            # The clean copy is the second half, and its output at i - 1 predicts position i.
            before = (outputs + width - 1)[following]
            found.append((before, rows.tokens[following], self.ar_weight * each[following]))
        predicting, targets, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {
            "input_ids": rows.tokens.masked_fill(noised.masked, self.mask_token_id),
            **inputs,
            "outputs": predicting,
            "targets": targets,
            "weights": weights.float(),
            "count": torch.tensor(count),
        }

    def _of_canvas(self, rows: Rows) -> tuple[dict[str, Tensor], Int[Tensor, "batch position"]]:
        """The network's inputs beside x_t, and the output that predicts each position."""
        index = torch.arange(rows.tokens.numel()).view_as(rows.tokens)
        return rows.network_inputs(), torch.where(rows.first(), index, index - 1) if self.logit_shift else index

    def blocks_of(self, rows: Rows) -> Int[Tensor, "batch position"]:
        """Number of every position's block."""
        return rows.blocks(self.block_length or 1, bool(self.blocks_from_text))

    def _of_blocks(self, rows: Rows) -> tuple[dict[str, Tensor], Int[Tensor, "batch position"]]:
        """Likewise, of [x_t, x_0]."""
        blocks = self.blocks_of(rows)
        inputs = {"clean_ids": rows.tokens, "blocks": blocks, "position_ids": rows.position_ids()}
        if not bool(rows.visible.all()):
            inputs["content"] = rows.visible
        if rows.documents is not None:
            inputs["documents"] = rows.documents
        outputs = predicting_output(blocks, rows.first(), shift=bool(self.logit_shift))
        return inputs, outputs + 2 * blocks.shape[1] * torch.arange(len(blocks))[:, None]

    def for_model(self, model: Any, batch_size: int) -> "ModelMaskedLoss":
        """The same objective, with mask token, shift, blocks and noise level of the model, and `group`.

        Raises:
            ValueError: the model has no mask token, or does not embed the one given; or it has learned sink tokens
                or a noise level, and blocks; or it has no AR loss, and `ar_weight` asks for one.
        """
        check_trained_whole(model)
        mask = getattr(model.config, "mask_token_id", None) if self.mask_token_id is None else self.mask_token_id
        if mask is None:
            fitting = fitting_objective(model)
            remedy = (
                "turn an autoregressive checkpoint into a DLM with dlm_lens.training.convert first, or train it "
                "with NextToken"
                if fitting == "NextToken"
                else f"train it with {fitting}"
            )
            raise ValueError(f"{type(model).__name__} has no mask token; {remedy}")
        rows = int(model.get_input_embeddings().weight.shape[0])
        if not 0 <= mask < rows:
            raise ValueError(
                f"mask_token_id is {mask}, and the model embeds 0 to {rows - 1}; give one of these, or none "
                "for the model's own"
            )
        shift = getattr(model.config, "logit_shift", False) if self.logit_shift is None else self.logit_shift
        found = Blocks.of(model.config) if None in (self.block_length, self.blocks_from_text) else None
        own = found or Blocks(0, from_text=False)
        length = own.length if self.block_length is None else self.block_length
        if length and SinkLayout.of(model).count:
            raise ValueError(
                f"block_length is {length}, and the model has learned sink tokens, which block diffusion does not "
                "train; use block_length=0 or a model without sinks"
            )
        if length and takes_noise_level(model):
            raise ValueError(
                f"block_length is {length}, and {type(model).__name__} is given one noise level for a row, which "
                "blocks with masks of their own do not have; use block_length=0 or time_conditioning=False"
            )
        if self.ar_weight and not (length and has_causal_context(model.config)):
            raise ValueError(
                f"ar_weight is {self.ar_weight}, and a {type(model).__name__} with block_length={length} has no "
                "clean copy that attends causally: leave it out, or train a nemotron_labs_diffusion in blocks"
            )
        from_text = own.from_text if self.blocks_from_text is None else self.blocks_from_text
        values = {field.name: getattr(self, field.name) for field in fields(MaskedDiffusionLoss)}
        return ModelMaskedLoss(
            **values
            | {"mask_token_id": mask, "logit_shift": bool(shift), "group": self.group or batch_size}
            | {"block_length": length, "blocks_from_text": from_text},
            config=model.config,
            noise_level=takes_noise_level(model),
        )


@dataclass(frozen=True)
class ModelMaskedLoss(MaskedDiffusionLoss):
    """`MaskedDiffusionLoss` for one model.

    Args:
        config: of the model.
        noise_level: whether its network is given the noise level. It is that of tau, as in the authors' training
            and in `denoise`: the share of masks of a row would be another, in short rows and beside a prompt.
    """

    config: Any = None
    noise_level: bool = False

    def loss_arguments(self, rows: Rows, noised: Noised) -> dict[str, Tensor]:
        """As in `MaskedDiffusionLoss`, with the noise level of every row where the network is given it."""
        given = {"sigma": self.sigma_at(noised.rate)} if self.noise_level else {}
        return super().loss_arguments(rows, noised) | given

    def blocks_of(self, rows: Rows) -> Int[Tensor, "batch position"]:
        """As in `MaskedDiffusionLoss`; a prompt that is one block in the sampler (Efficient-DLM) is one here."""
        found = Blocks.of(self.config)
        whole = found is not None and found.context == "whole"
        return rows.blocks(self.block_length or 1, bool(self.blocks_from_text), whole_prompt=whole)

    def sigma_at(self, share: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The noise level that a network is given where this share of the tokens is masked."""
        sigma: Float[Tensor, "*batch"] = self.config.level_of(share).float()
        return sigma


@dataclass(frozen=True)
class NextToken:
    """The loss of an autoregressive baseline, -sum_{i >= 1} log p(x_i | x_<i).

    An AR network's outputs do not count as shifted for `DataSettings.bos`, whose default adds no beginning of text
    here. On the rows of a converted DLM (shifted outputs) the baseline is trained with bos=True.

    Args:
        normalisation: as in `MaskedDiffusionLoss`.
        random_length_share: as in `MaskedDiffusionLoss`.

    Raises:
        ValueError: an unknown normalisation.
    """

    kind: ClassVar[str] = "next_token"
    predicted_share: ClassVar[float] = 1.0
    normalisation: Normalisation = "token"
    random_length_share: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self, normalisation=Normalisation)

    def for_evaluation(self, samples: int) -> Self:
        """The same objective for an evaluation loss: whole rows, which no time is drawn for."""
        return replace(self, random_length_share=0.0)

    def lengths(self, samples: Sequence[int], length: int, seed: int) -> list[int]:
        """As in `MaskedDiffusionLoss`."""
        return MaskedDiffusionLoss(random_length_share=self.random_length_share).lengths(samples, length, seed)

    def prepare(self, rows: Rows, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Predict every answer and prompt position except the first of a row.

        Raises:
            ValueError: isolated documents, which this objective does not support.
        """
        if rows.documents is not None:
            raise ValueError("isolated documents need masked diffusion; set data.packing to joined")
        predicted = (rows.answer | rows.prompt) & ~rows.first()
        weight, count = weights_of_tokens(predicted, self.normalisation)
        index: Int[Tensor, "batch position"] = torch.arange(rows.tokens.numel()).view_as(rows.tokens)
        return {
            "input_ids": rows.tokens,
            **rows.network_inputs(),
            "outputs": index[predicted] - 1,
            "targets": rows.tokens[predicted],
            "weights": weight[predicted].float(),
            "count": torch.tensor(count),
        }

    def for_model(self, model: Any, batch_size: int) -> "NextToken":
        """This objective itself, which needs nothing else of the model.

        Raises:
            ValueError: the model has an encoder, or its attention is not causal.
        """
        check_trained_whole(model)
        check_causal(model)
        return self
