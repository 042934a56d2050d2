"""Settings of a training run; a checkpoint stores those that determine the result."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from dlm_lens.attention import Placement
from dlm_lens.training.bound_objective import LikelihoodBoundLoss
from dlm_lens.training.config_files import check_types
from dlm_lens.training.objective import MaskedDiffusionLoss, NextToken, check_choices
from dlm_lens.training.sources import Packing
from dlm_lens.training.uniform_objective import UniformDiffusionLoss

AnyObjective = MaskedDiffusionLoss | NextToken | UniformDiffusionLoss | LikelihoodBoundLoss
"""Every objective: a dataclass of its settings with `kind`, `predicted_share` and `for_evaluation`."""

OBJECTIVES: Mapping[str, Any] = {one.kind: one for one in get_args(AnyObjective)}
"""Kind, as `objective.kind` of a file has it -> class."""

IDS = "input_ids"
"""The name of a column of ids; every other one holds texts."""

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["cosine", "warmup_stable_decay"]
DecayType = Literal["linear", "cosine", "1-sqrt"]
Precision = Literal["bf16", "fp32"]

DECAY_SHARE = 0.1
"""Of the steps, where `warmup_stable_decay` is given none."""

FREE = frozenset(
    {"output", "micro_batch_size", "save_minutes", "save_steps", "keep", "keep_best", "log_steps", "report_to",
     "workers", "probe_steps", "probe_rows", "eval_steps", "eval_samples", "eval_rows"}
)  # fmt: skip
"""Settings that a resumed run may change, because they do not affect the weights."""

EVALUATED = ("eval_split", "eval_path")
"""The settings of data that name evaluation data, which a resumed run may change too."""


@dataclass(frozen=True)
class ModelSettings:
    """Which network is trained.

    Args:
        start: a masked DLM to continue, an AR checkpoint to convert, or a size of SMDM's ("smdm-472M") from
            scratch; a directory or a hub name. "new:" before an AR checkpoint: its layout with new weights.
        sinks: learned sink tokens; like the rest, for converted and new models.
        position: "front" or "end".
        zero_value: force the sinks' values to zero.
        gated: gated attention.
        softmax: "standard", "off_by_one" or "sink_logits".
        shift: the output at i - 1 predicts position i, for converted models.
        tokenizer: directory or hub name, for models from scratch.
    """

    start: str = ""
    sinks: int = 0
    position: Placement = "front"
    zero_value: bool = False
    gated: bool = False
    softmax: str = "standard"
    shift: bool = True
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "model.")


@dataclass(frozen=True)
class DataSettings:
    """The training data.

    Args:
        path: hub name of a dataset, or a .jsonl, .json, .parquet or .txt file or pattern. Every line of a .txt file
            that is not blank is a document.
        name: its configuration on the hub.
        split: its split, or "train+test"; without streaming also a part of it, such as "train[:-100]".
        streaming: read during training; needed for datasets that do not fit on the disk.
        column: the column of texts, or of ids where it is called input_ids. Ids are taken as they are: every
            document must bring its beginning and its end of text.
        prompt_column: for fine-tuning; the prompt is never masked.
        answer_column: for fine-tuning.
        length: positions of a sequence.
        packing: "joined" or "isolated" documents; fine-tuning fills rows with the end of text instead.
        bos: begin every document with a token that is never masked; None: where the outputs are shifted, so that
            every masked position has a predecessor. True is refused for ids, which get no token; None there
            leaves a beginning that they bring unmasked where the outputs are shifted.
        shuffle_buffer: documents among which a stream is shuffled; 0 for its own order.
        eval_split: for the evaluation loss, every `eval_steps` steps; of `eval_path`, where that is given.
        eval_path: data of their own for the evaluation loss, as in `path`, with the same columns; a dataset of the
            hub without a configuration. Their split is `eval_split`, or "train", as that of a file is called.

    Raises:
        ValueError: a value of another type, a length below 2, a negative buffer, one of the fine-tuning columns
            without the other, or `bos` for a column of ids.
    """

    path: str = ""
    name: str | None = None
    split: str = "train"
    streaming: bool = True
    column: str = "text"
    prompt_column: str | None = None
    answer_column: str | None = None
    length: int = 2048
    packing: Packing = "joined"
    bos: bool | None = None
    shuffle_buffer: int = 0
    eval_split: str | None = None
    eval_path: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "data.")
        check_choices(self, packing=Packing)
        if self.length < 2:
            raise ValueError(f"data.length is {self.length}; a sequence has at least 2 positions")
        if self.shuffle_buffer < 0:
            raise ValueError(
                f"data.shuffle_buffer is {self.shuffle_buffer}; it must not be negative, and 0 for none"
            )
        if (self.prompt_column is None) != (self.answer_column is None):
            raise ValueError("fine-tuning needs both data.prompt_column and data.answer_column")
        if self.bos and self.column == IDS and self.prompt_column is None:
            raise ValueError(
                f"data.bos is true and data.column is {IDS!r}, whose ids are taken as they are; begin the ids of "
                "every document with the beginning-of-text token, and leave data.bos out"
            )


@dataclass(frozen=True)
class Optimisation:
    """Optimiser and learning rate.

    The rate rises linearly over `warm_up` of the steps. It then falls along a cosine from `rate` to `min_rate`, or
    stays at `rate` and falls in the last steps alone (`learning_rate`).

    Args:
        optimizer: "adamw", or "muon" for the layers' matrices with AdamW for the rest (2502.16982).
        rate: largest learning rate.
        min_rate: at the last step.
        warm_up: share of the steps.
        schedule: "cosine", or "warmup_stable_decay", in which the rate stays the same between warm-up and decay.
        decay_share: of the steps, in which the rate of warmup_stable_decay falls; None for 0.1, 0 for no decay.
        decay_type: along what it then falls: "linear" (None for it), "cosine" or "1-sqrt", as in transformers.
        second_rate: to which the rate of warmup_stable_decay drops at once before the decay, and from which it then
            falls; None for `rate`. With it LLaDA was pre-trained (2502.09992, section 2.2).
        second_share: of the steps, in which the rate is `second_rate`.
        betas: of AdamW.
        weight_decay: of the layers' matrices and experts.
        other_weight_decay: of embeddings, norms, biases and sinks; None for the same, as in the published code.
        clip: largest norm of the gradient; 0 for no limit.
        ema_decay: of an exponential moving average of the weights (`WeightAverage`), which evaluation, sink
            statistics and checkpoints then have in place of the trained weights; None for none, 0.9999 in MDLM.

    Raises:
        ValueError: a value of another type or out of its range, a min_rate above the rate, a decay or a second rate
            of a schedule that has none, or one of second_rate and second_share without the other.
    """

    optimizer: OptimizerName = "adamw"
    rate: float = 1e-4
    min_rate: float = 1e-5
    warm_up: float = 0.01
    schedule: Schedule = "cosine"
    decay_share: float | None = None
    decay_type: DecayType | None = None
    second_rate: float | None = None
    second_share: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    other_weight_decay: float | None = None
    clip: float = 1.0
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        check_types(self, "optimisation.")
        check_choices(self, optimizer=OptimizerName, schedule=Schedule)
        if 0 <= self.rate < self.min_rate < math.inf:
            raise ValueError(
                f"rate is {self.rate} and min_rate is {self.min_rate}, to which the rate falls; set min_rate to "
                f"{self.rate} or less"
            )
        if not 0 <= self.min_rate <= self.rate < math.inf:
            raise ValueError(
                f"learning rates go from rate {self.rate} down to min_rate {self.min_rate}; they must be finite, "
                "and not negative"
            )
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up is {self.warm_up}; it is a share of the steps, below 1")
        self._check_decay()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}; it must be two numbers from 0 to below 1")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(
                f"ema_decay is {self.ema_decay}; it must be between 0 and 1 (0.9999 is usual), and null for none"
            )
        for name in ("weight_decay", "other_weight_decay", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and not negative, and 0 for none")

    def _check_decay(self) -> None:
        for name in ("decay_share", "decay_type", "second_rate", "second_share"):
            value = getattr(self, name)
            if value is not None and self.schedule == "cosine":
                raise ValueError(
                    f"optimisation.{name} is {value!r} and optimisation.schedule is 'cosine', which falls from the "
                    "warm-up on; set the schedule to warmup_stable_decay, or leave it out"
                )
        if self.decay_type is not None:
            check_choices(self, decay_type=DecayType)
        if self.decay_share is not None and not 0 <= self.decay_share <= self.warm_up + self.decay_share <= 1:
            raise ValueError(
                f"decay_share is {self.decay_share} and warm_up is {self.warm_up}; they are shares of the steps, "
                "not negative and together at most 1"
            )
        if self.second_rate is not None or self.second_share is not None:
            self._check_second(self.second_rate, self.second_share)

    def _check_second(self, rate: float | None, share: float | None) -> None:
        if rate is None or share is None:
            raise ValueError(
                f"second_rate is {rate} and second_share is {share}; give both, or neither for a single stable rate"
            )
        if not self.min_rate <= rate <= self.rate:
            raise ValueError(
                f"second_rate is {rate}; it must be from min_rate, {self.min_rate}, to rate, {self.rate}"
            )
        others = self.warm_up + (DECAY_SHARE if self.decay_share is None else self.decay_share)
        if not (share > 0 and round(share + others, 9) <= 1):  # 0.6 + 0.3 + 0.1 may be above 1 in floats
            raise ValueError(
                f"second_share is {share}, and warm_up and the decay take {others:g} of the steps; it must be "
                "above 0, and all three together at most 1"
            )


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that determines a training run, and how it is logged.

    Exactly one of `tokens`, `steps` and `epochs` sets its length.

    Args:
        output: directory of checkpoints and logs.
        model: the network.
        data: the dataset.
        objective: the loss.
        optimisation: optimiser and learning rate.
        batch_size: sequences per optimiser step, over all devices and accumulated passes.
        micro_batch_size: sequences per forward pass and device.
        tokens: budget; steps = tokens // (batch_size * length).
        steps: optimiser steps.
        epochs: passes over a dataset of known size; packed text is encoded once before the run, to count it.
        seed: of new weights, the order of the data, and noise.
        precision: "bf16" (autocast, weights stay in float32) or "fp32".
        compile: torch.compile the layers.
        checkpointing: recompute activations in the backward pass.
        save_minutes: between checkpoints.
        save_steps: between further checkpoints; 0 for none.
        keep: checkpoints that are kept.
        keep_best: save a checkpoint at every evaluation loss below those before it, and keep the last such one too.
        log_steps: between log entries.
        eval_steps: between evaluation losses; 0 for none.
        eval_rows: sequences of the evaluation loss, at most; a smaller set is used once.
        eval_samples: masks per sequence of the evaluation loss; of no effect for an AR baseline, which has none.
        probe_steps: between sink statistics; 0 for none.
        probe_rows: sequences of the probe batch.
        report_to: "tensorboard", "wandb", or both.
        workers: processes that prepare batches; at most one per training process is used. Where processes are
            spawned (macOS, Windows), a `Source` of one's own must be picklable.

    Raises:
        ValueError: a value of another type, not exactly one budget, a count out of its range, or data.eval_split,
            data.eval_path or keep_best without eval_steps.
    """

    output: str | Path = "runs/training"
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    objective: AnyObjective = field(default_factory=MaskedDiffusionLoss)
    optimisation: Optimisation = field(default_factory=Optimisation)
    batch_size: int = 512
    micro_batch_size: int = 8
    tokens: float | None = None
    steps: int | None = None
    epochs: float | None = None
    seed: int = 0
    precision: Precision = "bf16"
    compile: bool = False
    checkpointing: bool = False
    save_minutes: float = 30.0
    save_steps: int = 0
    keep: int = 2
    keep_best: bool = False
    log_steps: int = 10
    eval_steps: int = 0
    eval_rows: int = 64
    eval_samples: int = 4
    probe_steps: int = 0
    probe_rows: int = 4
    report_to: tuple[str, ...] = ("tensorboard",)
    workers: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self, precision=Precision)
        given = [name for name in ("tokens", "steps", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'nothing'} given as the length of the run; give one "
                "of tokens, steps, epochs"
            )
        if not 0 < getattr(self, given[0]) < math.inf:
            raise ValueError(f"{given[0]} is {getattr(self, given[0])}; a run has at least one step, and an end")
        rows = ("batch_size", "micro_batch_size", "probe_rows", "eval_rows", "eval_samples")
        for name in (*rows, "save_minutes", "keep", "log_steps"):
            if not getattr(self, name) > 0:  # also where it is nan
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("seed", "save_steps", "eval_steps", "probe_steps", "workers"):
            if getattr(self, name) < 0:
                none = "" if name == "seed" else ", and 0 for none"
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative{none}")
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}; it must be below 2^63")
        if self.keep_best and not self.eval_steps:
            raise ValueError(
                "keep_best is True and eval_steps is 0, so that no checkpoint would be the best; set eval_steps, "
                "or keep_best to false"
            )
        for name in EVALUATED:
            value = getattr(self.data, name)
            if value is not None and not self.eval_steps:
                raise ValueError(
                    f"data.{name} is {value!r} and eval_steps is 0, so that no evaluation loss would be computed; "
                    f"set eval_steps, or data.{name} to null"
                )

    def total_steps(self, rows: int | Fraction | None = None) -> int:
        """Optimiser steps of the run: those of whole batches that the budget holds.

        Args:
            rows: sequences of the dataset, where their number is known; of packed text its tokens / length.

        Raises:
            ValueError: the budget is smaller than one batch, or it is in epochs of a stream.
        """
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            steps = int(self.tokens // (self.batch_size * self.data.length))
            if steps < 1:
                raise ValueError(
                    f"the budget of {self.tokens:,.0f} tokens is smaller than one batch of {self.batch_size} "
                    f"sequences of {self.data.length} ({self.batch_size * self.data.length:,} tokens); raise "
                    "tokens or lower batch_size"
                )
            return steps
        if rows is None:
            raise ValueError("epochs needs a dataset of known size; give tokens or steps for a stream")
        # As the decimal number that was given: 0.29 * 100 is less than 29 in floats.
        steps = int(Fraction(str(self.epochs)) * rows // self.batch_size)
        if steps < 1:
            raise ValueError(
                f"epochs is {self.epochs} of {float(rows):,.6g} sequences, which is less than one batch of "
                f"{self.batch_size}; raise epochs or lower batch_size"
            )
        return steps

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the earlier one: all but `FREE`, and `EVALUATED`."""
        values = {name: value for name, value in asdict(self).items() if name not in FREE}
        values["data"] = {name: value for name, value in values["data"].items() if name not in EVALUATED}
        return values | {"objective": {"kind": type(self.objective).__name__, **values["objective"]}}

    def defaults(self) -> dict[str, Any]:
        """What `identity` returns with the default of every setting, and the objective's kind and steps=1."""
        return TrainingSettings(steps=1, objective=type(self.objective)()).identity()

    def changes(self, stored: Mapping[str, Any]) -> list[str]:
        """The settings of `identity` that differ from those in a checkpoint's run.json, with both values."""
        before = completed(stored, self.defaults())
        # Earlier versions stored the evaluation data's.
        before["data"] = {name: value for name, value in before["data"].items() if name not in EVALUATED}
        return differences(before, self.identity())


def completed(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings, with the defaults of those that are not there.

    A checkpoint of an earlier version lacks the settings that were added after it; it was trained as their defaults
    do.
    """
    inner = {
        name: completed(value, defaults[name])
        for name, value in stored.items()
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
    }
    return {**defaults, **stored, **inner}


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """The settings that differ between two runs, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for name in sorted(before.keys() | now.keys()):
            inner = f"{path}.{name}" if path else name
            found += differences(before.get(name), now.get(name), inner)
        return found
    same = (
        list(before) == list(now)
        if isinstance(before, list | tuple) and isinstance(now, list | tuple)
        else before == now
    )
    return [] if same else [f"{path} was {before!r} and is {now!r}"]
