"""`plan_experiment`: forward passes, time and memory of a run, estimated before it starts."""

from collections.abc import Mapping, Sequence
from typing import Any

from dlm_lens.experiments.experiment import Experiment
from dlm_lens.experiments.model_settings import settings_of_item
from dlm_lens.experiments.runner import list_items
from dlm_lens.training.gpus import DEVICES, UTILISATION


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
    from dlm_lens.experiments.network_cost import NetworkCost, seconds_per_flop

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
