"""`plan_run`: operations and memory of a run, from a checkpoint's config.json alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_lens.adapters.forward_cost import ForwardCost, network_without_weights
from dlm_lens.attention import SinkLayout, decoder_of
from dlm_lens.printable import counted
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.denoising import prepared_run
from dlm_lens.sampling.denoising_run import StepPlan
from dlm_lens.sampling.network import ENTRIES
from dlm_lens.sampling.prompts import MOST_CONTEXTS, Prompts
from dlm_lens.sampling.samplers.base import Sampler

LOGIT_BYTES = 20
"""Of every logit of a step: five float32 copies (logits, scaled, log-softmax, probabilities, conditioning).

Counted in the samplers; not measured."""

PART_BYTES = 32
"""Of every logit that is read at a time, at most `ENTRIES` on a GPU: four float64 copies (random numbers, and the
Gumbel scores that they become), counted likewise."""


LONGEST = 2**20
"""Positions that a model is taken to be trained on where its config does not say it."""

MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class RunPlan:
    """What a run costs at most; a run whose rows end early costs less.

    Args:
        name: of the checkpoint.
        parameters: number of weights, tied ones once.
        active: of them, those that a position is multiplied with: in a mixture of experts the chosen experts'.
        steps: denoising steps.
        positions: computed positions of all steps and rows: those of an encoder, of learned sinks and of the second
            half of guidance included.
        flops: operations: 2 x active + 4 x heads x d_head x keys in every layer for every computed position, and
            2 x d_model for every logit (twice with self-conditioning). Keys that a causal mask hides count: a
            masked product computes them.
        weight_bytes: of the weights.
        cache_bytes: of all keys and values, in the dtype of 2 bytes.
        logit_bytes: of the logits of a step and their copies, `LOGIT_BYTES` each, and `PART_BYTES` of a part.
        rows: of the batch.
    """

    name: str
    parameters: int
    active: int
    steps: int
    positions: int
    flops: float
    weight_bytes: float
    cache_bytes: float
    logit_bytes: float
    rows: int

    @property
    def memory(self) -> float:
        """Bytes at most: weights, keys and values, logits, and a tenth for activations."""
        return 1.1 * (self.weight_bytes + self.cache_bytes + self.logit_bytes)

    def __str__(self) -> str:
        return (
            f"{self.name}: {_number(self.parameters)} parameters, {_number(self.active)} active; "
            f"{counted(self.steps, 'step')} at most, {self.positions:,} positions of {counted(self.rows, 'row')}, "
            f"{self.flops:.2e} FLOPs; {self.memory / 1e9:.3g} GB (weights {self.weight_bytes / 1e9:.3g}, keys and "
            f"values {self.cache_bytes / 1e9:.3g}, logits {self.logit_bytes / 1e9:.3g})"
        )


def _number(count: int) -> str:
    """A number of parameters, in billions or millions."""
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.2f}M"


def plan_run(
    source: str,
    *,
    prompt_length: int = 128,
    rows: int = 1,
    bits: float = 16,
    sampler: str | None = None,
    **settings: Any,
) -> RunPlan:
    """What `denoise` costs with these settings. Nothing but config.json is read, and no weight is allocated.

    Args:
        source: a checkpoint's directory, which need not hold weights, or a hub name.
        prompt_length: tokens of every prompt.
        rows: prompts of the batch.
        bits: per weight of a matrix: 16, or 8 or 4 with a quantization_config; embeddings keep 16.
        sampler: as `load` takes it.
        **settings: of `denoise`.

    Raises:
        FileNotFoundError: there is no config.json.
        ValueError: a config or a setting that cannot be.
    """
    if prompt_length < 1 or rows < 1 or bits <= 0:
        raise ValueError(
            f"prompt_length is {prompt_length}, rows {rows} and bits {bits}; a run has at least one row of one "
            "token, and weights of some bits"
        )
    if rows > MOST_ROWS:
        raise ValueError(f"rows is {rows}; a plan is for at most {MOST_ROWS} prompts in one run")
    model: Any = network_without_weights(source, given={"sampler": sampler})
    algorithm = algorithm_of(model.config)
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
    if prompt_length > MOST_CONTEXTS * trained:
        raise ValueError(
            f"prompt_length is {prompt_length}, more than {MOST_CONTEXTS} times the {trained} positions that the "
            "model was trained on; give fewer"
        )
    # All rows cost the same, so that one is planned and counted `rows` times.
    ids = torch.zeros(1, prompt_length, dtype=torch.long)
    prompts = Prompts(ids, torch.ones_like(ids, dtype=torch.bool))
    run = prepared_run(model, prompts, algorithm, settings, (0,), False)
    return _counted(source, model, run, rows, bits)


def _counted(source: str, model: Any, run: dict[str, Any], rows: int, bits: float) -> RunPlan:
    sampler, length, cost = run["sampler"], run["canvas"].shape[1], ForwardCost.of(model)
    encoder = "encoder" in getattr(model, "attention_stacks", {})
    prompt_length, sinks = run["history"].prompt_length, SinkLayout.of(model).count
    plans = sampler.plans(prompt_length, length)
    passes = [(_queries(plan, length, sampler), plan.seen or length) for plan in plans]
    logits = min(max(queries for queries, _ in passes), length - prompt_length)
    # Another product with the embedding, but not in a canvas's first step.
    conditioned = len(plans) - len({plan.block for plan in plans})
    conditioned *= hasattr(decoder_of(model), "hook_self_conditioning")
    if encoder or sampler.use_cache:
        passes += _kept_passes(plans, prompt_length, sampler, encoder=encoder)
    passes = [(queries + sinks, keys + sinks) for queries, keys in passes]
    flops = sum(cost.layers(*each) for each in passes) + cost.head((len(plans) + conditioned) * logits)
    halves = rows * sampler.halves
    count = halves * logits * cost.d_vocab
    return RunPlan(
        source,
        cost.parameters,
        cost.active,
        len(plans),
        halves * sum(queries for queries, _ in passes),
        halves * float(flops),
        2 * (cost.parameters - cost.matrices) + cost.matrices * bits / 8,
        halves * (length + sinks) * sum(2 * 2 * width for width in cost.key_widths),
        count * LOGIT_BYTES + min(count, ENTRIES) * PART_BYTES,
        rows,
    )


def _kept_passes(
    plans: Sequence[StepPlan], prompt_length: int, sampler: Sampler, *, encoder: bool
) -> list[tuple[int, int]]:
    """Queries and keys of what is computed once, of the prompt and of every finished block.

    A masked product computes all pairs, also those that a causal mask hides. The first step of a block computes
    what the cache lacks in its own pass, with its own keys among the keys.
    """
    passes, kept = [], 0
    for plan in plans:
        start = prompt_length if sampler.autoregressive else plan.span[0]
        if start > kept:
            passes.append((start - kept, start if encoder else plan.seen or start))
            kept = start
    return passes


def _queries(plan: StepPlan, length: int, sampler: Sampler) -> int:
    """The positions that a step computes: with kept keys those of its span."""
    if sampler.use_cache and sampler.autoregressive:
        return 1
    whole = plan.span if sampler.use_cache else (0, plan.seen or length)
    start, stop = plan.computed or whole
    return stop - start
