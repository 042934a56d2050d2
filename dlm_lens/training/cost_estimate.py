"""`plan`: the estimated cost of a run: steps, tokens, floating-point operations, memory, GPU-hours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dlm_lens.adapters import family_of
from dlm_lens.adapters.config_fields import built_config
from dlm_lens.adapters.forward_cost import ForwardCost, layout_of
from dlm_lens.adapters.model_names import embedded_path
from dlm_lens.adapters.tokenizer_files import load_tokenizer
from dlm_lens.attention import SinkLayout, add_hook_points
from dlm_lens.sampling.two_copies import Blocks
from dlm_lens.training.conversion import MASK, TARGETS, with_mask_token
from dlm_lens.training.gpus import DEVICES, UTILISATION, Device
from dlm_lens.training.head_loss import ELEMENTS
from dlm_lens.training.initialization import NEW, SCRATCH, smdm_config
from dlm_lens.training.objective import MaskedDiffusionLoss, NextToken
from dlm_lens.training.optimizers import layer_weights
from dlm_lens.training.settings import TrainingSettings

MOST_DEVICES = 8
"""Of one machine: what a plan assumes where the batch divides among so many."""

FULL = frozenset({"smollm2"})
"""Those of `PUBLISHED` whose embedding has no spare row for a mask token."""


@dataclass(frozen=True)
class Plan:
    """The cost of a run.

    Args:
        steps: optimiser steps.
        tokens: positions that are seen, padding included.
        parameters: of the network, tied ones once. Of a checkpoint of the hub without the row that the mask token
            of a conversion may need, because its tokenizer is not read.
        flops: floating-point operations of the whole run (see `plan`).
        state_bytes: weights, gradients, optimiser moments and the average of `ema_decay` in float32, not divided
            among devices.
        activation_bytes: per device, of a forward pass that is kept for the backward one, and the held logits.
        device: for which hours are given.
        devices: how many.
        utilisation: assumed share of the peak (not measured).
    """

    steps: int
    tokens: int
    parameters: int
    flops: float
    state_bytes: int
    activation_bytes: int
    device: Device
    devices: int
    utilisation: float

    @property
    def device_hours(self) -> float:
        """Hours of one device."""
        return self.device.seconds(self.flops, self.utilisation) / 3600

    @property
    def bytes_per_device(self) -> int:
        """Bytes with the whole state on every device (DDP)."""
        return self.state_bytes + self.activation_bytes

    def rows(self) -> dict[str, str]:
        """Names and values for a table."""
        spread = self.state_bytes / self.devices + self.activation_bytes
        fits = "fits" if self.bytes_per_device < 0.9 * self.device.memory else "does not fit"
        return {
            "optimiser steps": f"{self.steps:,}",
            "tokens": f"{self.tokens:,}",
            "parameters": f"{self.parameters:,}",
            "floating-point operations": f"{self.flops:.3g}",
            "weights, gradients, moments": f"{self.state_bytes / 2**30:.1f} GiB",
            "activations and logits": f"{self.activation_bytes / 2**30:.1f} GiB per device",
            "memory per device": f"{self.bytes_per_device / 2**30:.1f} GiB with DDP ({fits} {self.device.name}), "
            f"{spread / 2**30:.1f} GiB with FSDP over {self.devices}",
            "hours": f"{self.device_hours:,.1f} {self.device.name} hours at {self.utilisation:.0%} of the peak: "
            f"{self.device_hours / self.devices:,.1f} on {self.devices}",
        }


def planned_config(settings: TrainingSettings) -> PreTrainedConfig:
    """The config of the network of a run; no weights are read.

    Raises:
        FileNotFoundError: the checkpoint's config.json is not available.
        ValueError: a checkpoint that cannot be trained.
    """
    chosen = settings.model
    if chosen.start.startswith(SCRATCH):
        return smdm_config(chosen)
    start = chosen.start.removeprefix(NEW)
    source = embedded_path(start)
    values = layout_of(source)
    kind = str(values.get("model_type"))
    extra: dict[str, Any] = {}
    if kind in TARGETS and not isinstance(settings.objective, NextToken):
        kind = TARGETS[kind]
        extra = {"num_sinks": chosen.sinks, "gated_attention": chosen.gated, "softmax": chosen.softmax}
        extra["vocab_size"] = _rows_with_mask(source, values)
    values.pop("model_type", None)
    config_class, _ = family_of(kind).layouts[kind]
    config: PreTrainedConfig = built_config(config_class, values | extra, f"the config.json of {source}")
    return config


def _rows_with_mask(source: str, values: dict[str, Any]) -> int:
    """Rows of the embedding after `convert`, which adds one where no id is left for a mask token."""
    family = family_of(str(values["model_type"]))
    config_class, _ = family.layouts[str(values["model_type"])]
    own = {name: value for name, value in values.items() if name != "model_type"}
    config: Any = built_config(config_class, own, f"the config.json of {source}")
    if not Path(source).is_dir():
        return int(config.vocab_size) + (source in FULL)
    tokenizer = load_tokenizer(source, {}, config, family.tokenizer_classes)
    return with_mask_token(tokenizer, config.vocab_size, MASK, None)[2]


def plan(
    settings: TrainingSettings,
    *,
    device: str = "h100",
    devices: int | None = None,
    utilisation: float = UTILISATION,
    rows: int | None = None,
) -> Plan:
    """Estimate a run without building its weights.

    Operations are those of `ForwardCost`: 3 passes of the layers (forward, and twice that backward), 4 with
    `checkpointing`, which repeats the forward one, and 3 of the head on the masked half of the positions, with
    `ar_weight` on all of the clean copy too. Block diffusion computes two copies of every token in the layers, each
    of which attends over both, and holds an additive mask [2 S, 2 S] of every row. Learned sinks are computed too.

    Args:
        settings: of the run.
        device: a name of `DEVICES`.
        devices: how many of them; by default as many as the batch divides among, 8 at most.
        utilisation: share of the peak that matrix products reach, above 0 and at most 1.
        rows: sequences of the dataset, for budgets in epochs.

    Raises:
        ValueError: an unknown device, a number of devices or a utilisation out of range, a budget smaller than a
            batch, or a batch that does not divide.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not listed; choose from {', '.join(DEVICES)}")
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation is {utilisation}; it is a share of the peak, above 0 and at most 1")
    possible = [count for count in range(1, MOST_DEVICES + 1) if _divides(settings, count)]
    if devices is not None and devices < 1:
        raise ValueError(f"devices is {devices}; a run needs at least 1")
    if not possible or (devices is not None and not _divides(settings, devices)):
        count = devices or 1
        share = settings.micro_batch_size * count
        fits = f", or devices={possible[-1]}" if possible else ""
        raise ValueError(
            f"a batch of {settings.batch_size} sequences does not divide into {count} device(s) of "
            f"{settings.micro_batch_size}; choose batch_size as a multiple of {share}{fits}"
        )
    devices = possible[-1] if devices is None else devices
    config: Any = planned_config(settings)
    steps = settings.total_steps(rows)
    tokens = steps * settings.batch_size * settings.data.length
    model = _network(config)
    cost, data = ForwardCost.of(model), settings.data
    seen = _copies(config, settings) * data.length + SinkLayout.of(model).count
    passes = 4 if settings.checkpointing else 3
    row = passes * cost.layers(seen, seen) + 3 * cost.head(settings.objective.predicted_share * data.length)
    muon = _layer_matrices(model) if settings.optimisation.optimizer == "muon" else 0
    state = (16 if settings.optimisation.ema_decay is None else 20) * cost.parameters - 4 * muon
    return Plan(
        steps,
        tokens,
        cost.parameters,
        steps * settings.batch_size * row,
        state,
        _activations(config, settings),
        DEVICES[device],
        devices,
        utilisation,
    )


def _divides(settings: TrainingSettings, devices: int) -> bool:
    """Whether every device gets whole micro-batches of a batch."""
    return settings.batch_size % (settings.micro_batch_size * devices) == 0


def _copies(config: Any, settings: TrainingSettings) -> int:
    """How often a pass of the training holds every token: twice in block diffusion, which sees x_t and x_0."""
    objective = settings.objective
    if not isinstance(objective, MaskedDiffusionLoss):
        return 1
    found = Blocks.of(config) if objective.block_length is None else objective.block_length
    return 2 if found else 1


def _network(config: Any) -> Any:
    """The network of a config, on the meta device."""
    _, model_class = family_of(config.model_type).layouts[config.model_type]
    with torch.device("meta"):
        return add_hook_points(model_class(config))


def _layer_matrices(model: Any) -> int:
    """Weights of the layers' matrices, those that Muon takes."""
    return sum(parameter.numel() for parameter in layer_weights(model) if parameter.ndim == 2)


def activation_bytes(config: Any, tokens: int, *, itemsize: int = 2, checkpointing: bool = False) -> int:
    """Bytes that a fused attention kernel and matrix products keep of so many positions for the backward pass.

    Per layer and token: the residual stream and the norms' inputs in float32, everything that a matrix product or
    the gate of the MLP (`SwiGLU`) reads in the precision of the products; and the logits that the loss holds.

    Args:
        config: of the network.
        tokens: positions of a pass.
        itemsize: bytes of a number in a matrix product: 2 in bfloat16.
        checkpointing: keep only the residual stream of every layer, and one layer at a time.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width  # GPT-2
    own = getattr(config, "head_dim", None)
    heads = config.num_attention_heads * own if own else width
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    pairs = heads // config.num_attention_heads * key_heads
    per_layer = 4 * 4 * width + itemsize * (2 * width + 3 * heads + 4 * pairs + 3 * inner)
    kept = 4 * width * layers + per_layer if checkpointing else per_layer * layers
    return int(tokens * kept + ELEMENTS["cuda"] * 8)


def _activations(config: Any, settings: TrainingSettings) -> int:
    """Bytes of a micro-batch's pass, `activation_bytes` and the additive mask of block diffusion.

    The mask is held in float32, as the weights are, and in the precision of the matrix products.
    """
    size, copies = 2 if settings.precision == "bf16" else 4, _copies(config, settings)
    tokens = settings.micro_batch_size * settings.data.length * copies
    masks = tokens * settings.data.length * copies * (4 + size % 4) if copies > 1 else 0
    return activation_bytes(config, tokens, itemsize=size, checkpointing=settings.checkpointing) + masks
