"""`plan_experiment`: forward passes, time and memory of a run, estimated before it starts."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dlm_lens
from dlm_lens.adapters import embedded_models
from dlm_lens.adapters.families.smdm import SIZES
from dlm_lens.adapters.forward_cost import ForwardCost, network_without_weights
from dlm_lens.adapters.hub import config_values
from dlm_lens.experiments.experiment import Cost, Experiment
from dlm_lens.experiments.model_settings import settings_of_item
from dlm_lens.experiments.runner import list_items
from dlm_lens.training.cost_estimate import activation_bytes
from dlm_lens.training.gpus import DEVICES, UTILISATION
from dlm_lens.training.initialization import NEW, SCRATCH

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    **{SCRATCH + size: {"model_type": "smdm", "tie_word_embeddings": False, **SIZES[size]} for size in SIZES},
    "one-token-text": {
        "model_type": "sink_qwen", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False,
        "mask_token_id": 1023, "eos_token_id": 1, "dtype": "float32",
    },
}  # fmt: skip
"""Configs of networks that an experiment trains from nothing."""

STAND_INS = {"one-token-text": "toy", "toy-blocks": "toy", "toy-uniform": "toy"}
"""Networks that an experiment trains -> the embedded model that is timed, and without a layout counted, instead."""


@dataclass(frozen=True)
class NetworkCost:
    """The cost of an experiment's passes through one network.

    Args:
        forward: of a pass.
        config: of the network.
    """

    forward: ForwardCost
    config: Any

    @classmethod
    def of(cls, model: str) -> "NetworkCost":
        """The cost of a checkpoint: from its config.json, or from what the package knows of it.

        Weights that come without a config.json, or with one that names no model_type (SEDD's), are loaded.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: a config that cannot be.
        """
        name = model.removeprefix(NEW)
        if Path(name).exists() and not _names_its_type(Path(name)):
            network: Any = dlm_lens.load(name)
        elif name in LAYOUTS:
            network = network_without_weights(name, LAYOUTS[name])
        else:
            network = network_without_weights(STAND_INS.get(name, name))
        return cls(ForwardCost.of(network), network.config)

    def flops(self, cost: Cost) -> float:
        """Operations: those of `ForwardCost`, times 3 with backward."""
        predicted = cost.predicted * cost.positions
        one = self.forward.layers(cost.positions, cost.positions) + self.forward.head(predicted)
        return one * cost.rows * cost.passes * (3 if cost.backward else 1)

    def memory(self, cost: Cost) -> float:
        """Bytes: weights, 12 copies of the residual stream, and the logits and one layer's attention in float32.

        With backward: 16 per weight (weights, gradients and two moments in float32), and `activation_bytes`.
        """
        tokens, forward = cost.rows * cost.positions, self.forward
        if cost.backward:
            return 16 * forward.parameters + activation_bytes(self.config, tokens)
        itemsize = (getattr(self.config, "dtype", None) or torch.float32).itemsize
        attention = 4 * cost.rows * self.config.get_text_config().num_attention_heads * cost.positions**2
        return (
            (forward.parameters + 12 * tokens * forward.d_model) * itemsize
            + 4 * tokens * forward.d_vocab
            + attention
        )


def _names_its_type(path: Path) -> bool:
    """Whether a checkpoint's config.json says what it is, so that its network is known without the weights."""
    return (path / "config.json").is_file() and config_values(str(path), {}).get("model_type") is not None


def seconds_per_flop(model: str) -> float:
    """The least time of three forward passes of 8 x 64 positions, divided by the operations of one.

    Raises:
        ValueError: a model that is not on this machine.
    """
    timed = STAND_INS.get(model, model).removeprefix(NEW)
    if timed not in embedded_models() and not Path(timed).exists():
        raise ValueError(
            f"{model} cannot be timed on this machine, since it is neither an embedded model nor a directory; give "
            "its directory, or plan it for a GPU, as with --plan --device h100"
        )
    loaded: Any = dlm_lens.load(timed)
    ids = torch.zeros(8, 64, dtype=torch.long)
    times = []
    with torch.no_grad():
        for _ in range(4):  # the first one warms up
            start = time.perf_counter()
            loaded(input_ids=ids)
            times.append(time.perf_counter() - start)
    return min(times[1:]) / NetworkCost.of(timed).flops(Cost(1, 8, 64, timed))


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
        FileNotFoundError: there is no config.json of a model.
        ValueError: an unknown device, or for "cpu" a model that is not on this machine.
    """
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
        pace = seconds_per_flop(model) if device == "cpu" else DEVICES[device].seconds(1)
        network = NetworkCost.of(model)
        flops = sum(network.flops(cost) for cost in mine)
        memory = max(network.memory(cost) for cost in mine)
        seconds = flops * pace
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


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
