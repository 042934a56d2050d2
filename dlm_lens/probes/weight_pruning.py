"""`input_norms` and `pruned`: prune weights by size or by Wanda's score, with sinks' activations discounted."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from dlm_lens.arguments import Rule, checked_arguments, instance, is_real, one_of, real, whole
from dlm_lens.attention import SinkLayout, attention_blocks, attention_stacks, exclusive
from dlm_lens.placement import in_float64
from dlm_lens.recording import ReceivedAttention, rerun
from dlm_lens.sampling import DenoisingRun, StoredCanvases
from dlm_lens.sampling.run_like import RunLike, as_run

Discount = Literal["none", "sinks", "random"]
SPARSITY = Rule("a share of the weights, at least 0 and below 1", lambda value: is_real(value) and 0 <= value < 1)


@dataclass(frozen=True, eq=False)
class InputNorms:
    """The norm of every input feature of every linear layer in the blocks of a model, over a run's canvases.

    Args:
        values: name of the layer -> norm of each of its inputs.
        discount: which positions were discounted.
        discounted: mean over canvases of sum_j w_j, how many positions were discounted in effect.
    """

    values: Mapping[str, Float[Tensor, "feature"]] = field(repr=False)
    discount: Discount
    discounted: float


@checked_arguments(
    received=instance(Tensor, "a tensor [step, batch, layer, head, key]"),
    content=instance(Tensor, "a tensor of truth values [batch, key]"),
    std=real(),
    alpha=real(),
)
def sink_weights(
    received: Float[Tensor, "step batch layer head key"],
    content: Bool[Tensor, "batch key"],
    *,
    std: float = 2.0,
    alpha: float = 5.0,
) -> Float[Tensor, "step batch key"]:
    """How much of a sink each position is: w_j = sigmoid(alpha (m_j - mean_j m_j - std sd_j m_j)).

    m_j is the attention that position j receives, summed over layers and heads (2602.17664 and its published code,
    from which std and alpha are; the standard deviation is that of all positions, without Bessel's correction).
    Here m is a mean over layers and heads with 1 for even attention, so that alpha does not depend on their number.

    Args:
        received: column sums, relative to uniform.
        content: positions that count; the others have weight 0.
        std: standard deviations above the mean.
        alpha: steepness.

    Raises:
        ValueError: tensors of other shapes, content that is no truth values, or a setting that is no number.
    """
    shape = (received.shape[1], received.shape[-1]) if received.ndim == 5 else None
    if tuple(content.shape) != shape or content.dtype != torch.bool:
        raise ValueError(
            f"sink_weights: received has shape {list(received.shape)} and content {list(content.shape)} "
            f"({content.dtype}); give [step, batch, layer, head, key] and truth values [batch, key]"
        )
    mass = received.double().mean((2, 3))
    there = content & mass.isfinite()
    mass = mass.masked_fill(~there, 0.0)
    count = there.sum(-1, keepdim=True).clamp(min=1)
    mean = mass.sum(-1, keepdim=True) / count
    spread = (((mass - mean) * there).square().sum(-1, keepdim=True) / count).sqrt()
    return torch.sigmoid(alpha * (mass - mean - std * spread)) * there


@checked_arguments(discount=one_of("none", "sinks", "random"), std=real(), alpha=real(), seed=whole(least=0))
@torch.no_grad()
@exclusive
def input_norms(
    model: Any,
    run: RunLike,
    *,
    discount: Discount = "none",
    std: float = 2.0,
    alpha: float = 5.0,
    seed: int = 0,
    progress: bool = False,
) -> InputNorms:
    """Norms of the inputs of linear layers over the canvases of a run, as Wanda's score needs them.

    n_c = sum over steps t of sqrt(sum over prompts and positions of ((1 - w_tj) x_tjc)^2), x the layer's input
    (2602.17664, whose code adds the norms of the noise levels; Wanda, 2306.11695, with w = 0). The canvases are
    those of a run, where that paper draws masks; of a row those before its end (`row_steps`). w are `sink_weights`,
    the same in random order among each canvas's content ("random", the control: as many positions, discounted as
    much), or 0.

    Args:
        model: from `dlm_lens.load`, the run's, without learned sink tokens.
        run: from `denoise`, of the calibration prompts; without a cache.
        discount: "none", "sinks" or "random".
        std: standard deviations above the mean of a sink.
        alpha: steepness of the weights.
        seed: of the permutations.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a run with a cache, an AR run, blocks that the canvas grows by, a model with an encoder or
            learned sink tokens, or weights that are not plain linear layers.
    """
    run = as_run(run)
    stored = StoredCanvases(model, run)
    if why := _narrower(model, run, stored):
        raise ValueError(f"input_norms: every pass must have the whole canvas as queries, and {why}")
    layers = linear_layers(model)
    weights = torch.zeros(run.unmasked.shape, dtype=torch.float64)
    # Content of rows that are not over, without masks that a step does not see.
    counted = torch.stack([stored.computes(step) for step in range(run.steps)]) & run.attention_mask
    if discount != "none":
        received = rerun(model, run, [ReceivedAttention(min_viewers=1)], progress=progress).received
        weights = sink_weights(received, run.attention_mask, std=std, alpha=alpha)
    if discount == "random":
        weights = _shuffled(weights, counted, seed)
    kept = (1 - weights) * counted
    norms = {name: torch.zeros(layer.in_features, dtype=torch.float64) for name, layer in layers.items()}
    step = 0

    def add(name: str) -> Any:
        """A hook that adds the inputs of a step to the layer's norms."""

        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = in_float64(inputs[0])
            x = x[:, None] if x.ndim == 2 else x  # of a row, for all its positions: the noise level of a DiT
            x = x * kept[step].to(x.device)[..., None]
            norms[name] += x.flatten(0, -2).norm(dim=0).cpu()

        return hook

    handles = [layer.register_forward_pre_hook(add(name)) for name, layer in layers.items()]
    try:
        for step in tqdm(range(run.steps), desc="measuring", unit="step", disable=not progress):
            stored.forward(step)
    finally:
        for handle in handles:
            handle.remove()
    return InputNorms(
        {name: one.float() for name, one in norms.items()}, discount, float(weights.sum(-1)[run.running].mean())
    )


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """The linear layers of the blocks by their name in the model; embeddings and the head are left out.

    Raises:
        ValueError: weights that are not plain linear layers, such as quantised ones or fused experts.
    """
    blocks = attention_blocks(model)
    names = {id(module): name for name, module in model.named_modules()}
    found = {
        names[id(module)]: module for block in blocks for module in block.modules() if type(module) is nn.Linear
    }
    if not found:
        raise ValueError(f"{type(model).__name__} has no plain linear layers in its blocks to prune")
    for block in blocks:
        if other := next(_other_matrices(block), None):
            raise ValueError(
                f"{type(model).__name__} has {other} in {names[id(block)]}, weights of no plain linear layer, "
                "which pruning would leave out; give a model without fused experts or quantised weights"
            )
    return found


def _other_matrices(block: nn.Module) -> Iterator[str]:
    """The names of the matrices of a block that are in no plain linear layer, router or embedding."""
    for path, module in block.named_modules():
        # transformers has no class of its own for routers; their names have the word.
        if (
            type(module) is nn.Linear
            or isinstance(module, nn.Embedding)
            or "router" in type(module).__name__.lower()
        ):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                yield f"{path}.{name}" if path else name


@contextmanager
def pruned(model: Any, sparsity: float, norms: InputNorms | None = None) -> Iterator[dict[str, float]]:
    """In the `with` block the smallest weights of the model's linear layers are 0; afterwards all are as before.

    The score of a weight is |W_oc| ("magnitude"), with `norms` |W_oc| n_c (Wanda, 2306.11695). Of every output o
    the `sparsity` share of inputs with the lowest score is pruned, so that all scores prune equally much.

    Args:
        model: from `dlm_lens.load`.
        sparsity: the share of weights that become 0, rounded down to whole inputs.
        norms: from `input_norms`; None for magnitude.

    Yields:
        Name of every layer -> its share of pruned weights.

    Raises:
        ValueError: a share out of range, the norms of another model, or weights that are not plain linear layers.
    """
    SPARSITY.check("sparsity", sparsity)
    if norms is not None:
        instance(InputNorms, "the InputNorms of input_norms, or None").check("norms", norms)
    layers, shares = linear_layers(model), {}
    if norms is not None and {name: layer.in_features for name, layer in layers.items()} != {
        name: len(value) for name, value in norms.values.items()
    }:
        raise ValueError("pruned: the norms are those of other layers; measure them on this model")
    before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            keep = kept_weights(layer.weight.detach(), sparsity, None if norms is None else norms.values[name])
            with torch.no_grad():  # in place: torch's own pruning registers the weight anew, after the bias
                layer.weight.masked_fill_(~keep, 0.0)
            shares[name] = float(1 - keep.float().mean())
        yield shares
    finally:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.weight.copy_(before[name])


def kept_weights(
    weight: Float[Tensor, "output feature"], sparsity: float, norms: Float[Tensor, "feature"] | None = None
) -> Bool[Tensor, "output feature"]:
    """Which weights stay: all but the lowest scores of every output."""
    score = weight.abs().float()
    if norms is not None:
        score = score * norms.to(score.device)
    count = math.floor(round(sparsity * weight.shape[1], 6))  # 0.29 * 100 is 28.999999999999996
    keep = torch.ones_like(weight, dtype=torch.bool)
    return keep.scatter_(1, score.topk(count, 1, largest=False).indices, False) if count else keep


def _narrower(model: Any, run: DenoisingRun, stored: StoredCanvases) -> str:
    """Why a pass of the run has other queries than the whole canvas, and the remedy; "" where it has those."""
    name = type(model).__name__
    if len(attention_stacks(model)) > 1:
        return f"{name} has its prompt in an encoder of its own; give a model of one stack"
    if run.computed:
        return "this run keeps keys in a cache; denoise without cache=, or with use_cache=False"
    if run.autoregressive:
        return "this is an AR run, which sees prefixes; give the run of a masked model"
    if stored.sampler.grows:
        return f"the canvas of {name} grows block by block; give the run of a model that is masked as a whole"
    if count := SinkLayout.of(model).count:
        return f"{name} has {count} learned sink tokens beside it; give a model without"
    return ""


def _shuffled(
    weights: Float[Tensor, "step batch position"], content: Bool[Tensor, "step batch position"], seed: int
) -> Float[Tensor, "step batch position"]:
    """The weights of every canvas among its content positions in random order."""
    generator, found = torch.Generator().manual_seed(seed), weights.clone()
    for row in range(content.shape[1]):
        for step in range(len(weights)):
            where = content[step, row].nonzero().flatten()
            found[step, row, where] = weights[step, row, where[torch.randperm(len(where), generator=generator)]]
    return found
