"""`plan_experiment`: forward passes, time and memory of a run, estimated before it starts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_lens.experiments.experiment import Cost, Experiment
from dlm_lens.experiments.model_settings import settings_of_item
from dlm_lens.experiments.runner import list_items

UTILISATION = 0.4
"""Share of a device's peak that matrix products of this size reach; assumed, not measured."""

SHAPES: dict[str, dict[str, Any]] = {
    "GSAI-ML/LLaDA-8B-Instruct": {"parameters": 8.02e9, "layers": 32, "heads": 32, "width": 4096,
                                  "vocabulary": 126464},
    "GSAI-ML/LLaDA-8B-Base": {"parameters": 8.02e9, "layers": 32, "heads": 32, "width": 4096, "vocabulary": 126464},
    "Gen-Verse/MMaDA-8B-MixCoT": {"parameters": 8.08e9, "layers": 32, "heads": 32, "width": 4096,
                                  "vocabulary": 134656},
    "Dream-org/Dream-v0-Instruct-7B": {"parameters": 7.62e9, "layers": 28, "heads": 28, "width": 3584,
                                       "vocabulary": 152064},
    "Dream-org/Dream-v0-Base-7B": {"parameters": 7.62e9, "layers": 28, "heads": 28, "width": 3584,
                                   "vocabulary": 152064},
    "meta-llama/Llama-3.1-8B-Instruct": {"parameters": 8.03e9, "layers": 32, "heads": 32, "width": 4096,
                                         "vocabulary": 128256},
    "Qwen/Qwen2.5-0.5B": {"parameters": 0.494e9, "layers": 24, "heads": 14, "width": 896, "vocabulary": 151936},
    "Qwen/Qwen2.5-1.5B": {"parameters": 1.544e9, "layers": 28, "heads": 12, "width": 1536, "vocabulary": 151936},
    "smdm-472M": {"parameters": 0.554e9, "layers": 18, "heads": 10, "width": 1280, "vocabulary": 32000},
    "smollm2": {"parameters": 0.1345e9, "layers": 30, "heads": 9, "width": 576, "vocabulary": 49152, "itemsize": 4},
    "one-token-text": {"parameters": 2.17e6, "layers": 4, "heads": 4, "width": 192, "vocabulary": 1024,
                       "itemsize": 4},
    "toy-blocks": {"parameters": 0.82e6, "layers": 4, "heads": 4, "width": 128, "vocabulary": 118, "itemsize": 4},
    "toy-uniform": {"parameters": 0.82e6, "layers": 4, "heads": 4, "width": 128, "vocabulary": 118, "itemsize": 4},
}  # fmt: skip
"""Sizes of the checkpoints of the full settings, so that a plan needs neither network nor weights, and of networks
that an experiment trains."""

NEW = "new:"
"""Before the name of a checkpoint: its layout with new weights, as in `model.start` of `dlm_lens.training`."""

STAND_INS = {"one-token-text": "toy", "toy-blocks": "toy", "toy-uniform": "toy"}
"""Networks that an experiment trains -> the embedded model that is timed in their place."""


@dataclass(frozen=True)
class Shape:
    """The size of a network, from which the cost of a forward pass follows.

    Args:
        parameters: number of weights.
        layers: number of layers.
        heads: attention heads per layer.
        width: d_model.
        vocabulary: d_vocab.
        itemsize: bytes per weight.
    """

    parameters: float
    layers: int
    heads: int
    width: int
    vocabulary: int
    itemsize: int = 2

    def flops(self, cost: Cost) -> float:
        """Operations: 2 N S + 4 L S^2 d per canvas of S positions (N weights, L layers), times 3 with backward."""
        positions = cost.positions
        one = 2 * self.parameters * positions + 4 * self.layers * positions**2 * self.width
        return one * cost.rows * cost.passes * (3 if cost.backward else 1)

    def memory(self, cost: Cost) -> float:
        """Bytes: weights, 12 copies of the residual stream, and the logits and one layer's attention in float32.

        With backward: 16 per weight (weights, gradients and two moments in float32), 50 per position, layer and
        unit of the width (what bfloat16 layers keep for the backward pass), and 2 GiB of logits.
        """
        tokens = cost.rows * cost.positions
        if cost.backward:
            return 16 * self.parameters + 50 * tokens * self.layers * self.width + 2**31
        attention = 4 * cost.rows * self.heads * cost.positions**2
        return (
            self.parameters * self.itemsize
            + 12 * tokens * self.width * self.itemsize
            + 4 * tokens * self.vocabulary
            + attention
        )


def plan_experiment(
    experiment: Experiment,
    *,
    small: bool = False,
    models: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> str:
    """The estimated cost of a run as text; on "cpu" one forward pass of each model is timed.

    Args:
        experiment: from `find_experiment`.
        small: the small settings.
        models: instead of the settings' own.
        settings: settings to replace.
        device: "cpu", which is this machine, or a device of `dlm_lens.training.gpus.DEVICES`.

    Raises:
        ValueError: an unknown device, or a model of unknown size.
    """
    from dlm_lens.training.gpus import DEVICES

    if device != "cpu" and device not in DEVICES:
        raise ValueError(f"device is {device!r}; it must be cpu (this machine) or one of {', '.join(DEVICES)}")
    config = experiment.config(small, models, settings)
    items = list_items(experiment, config)
    settings_by_item = [(item, settings_of_item(config["settings"], item)) for item in items]
    costs = [
        cost for item, own in settings_by_item for cost in (experiment.cost(item, own) if experiment.cost else ())
    ]
    lines = [f"{experiment.name} ({'small' if small else 'full'}): {len(items)} items, {experiment.shows}"]
    total, largest = 0.0, 0.0
    for model in dict.fromkeys(cost.model for cost in costs):
        mine = [cost for cost in costs if cost.model == model]
        shape = shape_of(model)
        flops = sum(shape.flops(cost) for cost in mine)
        memory = max(shape.memory(cost) for cost in mine)
        if device == "cpu":
            seconds = flops * _seconds_per_flop(model, shape)
        else:
            seconds = flops / (DEVICES[device].peak * UTILISATION)
        total, largest = total + seconds, max(largest, memory)
        lines.append(
            f"  {model}: {sum(cost.passes for cost in mine):,} forward passes of up to "
            f"{max(cost.rows for cost in mine)} x {max(cost.positions for cost in mine)} positions, "
            f"{flops:.2e} FLOPs, "
            f"about {_time(seconds)}, {memory / 1e9:.2f} GB"
        )
    lines.append(
        f"  together about {_time(total)} on {device} in one process, {largest / 1e9:.2f} GB at most "
        f"({_how(device)})"
    )
    if device != "cpu" and largest > DEVICES[device].memory:
        lines.append(f"  {device} has {DEVICES[device].memory / 1e9:.0f} GB, which is too little: lower batch")
    return "\n".join(lines)


def _how(device: str) -> str:
    if device == "cpu":
        return "one forward pass was timed on this machine; hooks, guidance and tokenising are not counted"
    return f"at {UTILISATION:.0%} of the peak of {device}, which is assumed, not measured; hooks are not counted"


def shape_of(model: str) -> Shape:
    """The size of a listed checkpoint, or of an embedded model or a directory, which is loaded.

    Raises:
        ValueError: a hub name that is not listed.
    """
    from pathlib import Path

    from dlm_lens.adapters import embedded_models

    model = model.removeprefix(NEW)
    if model in SHAPES:
        return Shape(**SHAPES[model])
    if model not in embedded_models() and not Path(model).exists():
        raise ValueError(f"the size of {model!r} is unknown; download the model and give its directory")
    import dlm_lens

    loaded: Any = dlm_lens.load(model)
    config = loaded.config
    weight = next(loaded.parameters())
    return Shape(
        parameters=sum(one.numel() for one in loaded.parameters()),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        itemsize=weight.element_size(),
    )


def _seconds_per_flop(model: str, shape: Shape) -> float:
    """The time of one forward pass of 8 x 64 positions, divided by its operations."""
    import torch

    import dlm_lens

    if model in STAND_INS:
        return _seconds_per_flop(STAND_INS[model], shape_of(STAND_INS[model]))
    if model in SHAPES:
        raise ValueError(
            f"{model} cannot be timed on this machine; plan it for a GPU, as with --plan --device h100"
        )
    loaded: Any = dlm_lens.load(model)
    ids = torch.zeros(8, 64, dtype=torch.long)
    with torch.no_grad():
        loaded(input_ids=ids)
        start = time.perf_counter()
        loaded(input_ids=ids)
        spent = time.perf_counter() - start
    return spent / shape.flops(Cost(1, 8, 64, model))


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
