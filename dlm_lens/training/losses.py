"""The training loss: weighted cross entropy of the masked positions, computed in chunks of logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dlm_lens.adapters.head import head_states, logit_scaling
from dlm_lens.attention import SinkLayout, decoder_of, has_causal_context
from dlm_lens.placement import float64_device, input_device
from dlm_lens.sampling.clean_context_network import clean_context_inputs
from dlm_lens.sampling.two_copies import attention_in_copies, two_copies
from dlm_lens.training.bound_objective import bound_of
from dlm_lens.training.objective import Objective, check_trained_whole
from dlm_lens.training.sources import Example, Rows
from dlm_lens.training.tied_gradient import HeadGradient, TiedLookup, tied_gradient

ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits in memory at once, per device type: 128 MiB and 1 GiB in float32."""


def weighted_cross_entropy(
    states: Float[Tensor, "n d_model"],
    head: nn.Module,
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    elements: int | None = None,
    never: int | None = None,
    tied: TiedLookup | None = None,
    scaling: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """sum_n weights_n (logsumexp(u_n) - u_n[target_n]), u_n = s(W x_n), in float32, a few rows of logits at a time.

    For a plain linear head the gradient is computed in the forward pass, so that logits are computed once. Another
    head (quantised, wrapped, or partitioned by DeepSpeed) is recomputed in the backward pass, as with `scaling`.

    Args:
        states: input of the head.
        head: maps states to logits.
        targets: ids.
        weights: of each loss.
        elements: logits in memory at once; None for 2**25 on a CPU and 2**28 on a GPU.
        never: an id without probability, [MASK] in the SUBS parameterisation of MDLM.
        tied: the states' lookup in the weight of a plain head, which takes its gradient; from `tied_gradient`.
        scaling: s, from `logit_scaling`; it is given float32. None for none.
    """
    vocabulary = getattr(head, "out_features", None) or cast(Any, head).weight.shape[0]
    budget = elements or ELEMENTS.get(states.device.type, ELEMENTS["cuda"])
    rows = max(1, budget // int(vocabulary))
    if not len(states):
        # No position was masked: a loss of zero with a gradient, because distributed ranks wait for each other's.
        return states.sum() * 0.0 + sum(parameter.sum() * 0.0 for parameter in head.parameters())
    if _plain(head) and never is None and scaling is None:
        dtype = torch.get_autocast_dtype(states.device.type) if _autocast(states) else states.dtype
        anchor, gradient = (None, None) if tied is None else (tied.anchor, tied.gradient)
        weight = cast(Tensor, head.weight)
        kernel = weight if anchor is None else weight.detach()
        loss: Tensor = _LinearLoss.apply(states, kernel, anchor, targets, weights.float(), rows, dtype, gradient)
        return loss
    total = states.new_zeros((), dtype=torch.float32)
    for part in range(0, len(states), rows):
        piece = slice(part, part + rows)
        total = total + checkpoint(
            _piece, head, states[piece], targets[piece], weights[piece].float(), never, scaling, use_reentrant=False
        )
    return total


def bound_loss(
    states: Float[Tensor, "n d_model"],
    model: Any,
    seen: Int[Tensor, "n"],
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    levels: Float[Tensor, "n 2"],
    elements: int | None = None,
) -> Float[Tensor, ""]:
    """sum_n weights_n l_n, the integrand of the model's bound (`LikelihoodBoundLoss`).

    A few rows of logits at a time: logits and their softmax are float32, the integrand float64; both are computed
    again in the backward pass.

    Args:
        states: input of the head.
        model: whose noise has random tokens.
        seen: x_t.
        targets: of the text.
        weights: of each loss.
        levels: of the noise of each, for the integrand: the sum of the two numbers.
        elements: as in `weighted_cross_entropy`; of the integrand an eighth of them.
    """
    head, scaling, integrand = model.get_output_embeddings(), logit_scaling(model), bound_of(model.config)
    vocabulary = getattr(head, "out_features", None) or head.weight.shape[0]
    rows = max(1, (elements or ELEMENTS.get(states.device.type, ELEMENTS["cuda"])) // (8 * int(vocabulary)))
    if not len(states):
        return states.sum() * 0.0 + sum(parameter.sum() * 0.0 for parameter in head.parameters())

    def piece(states: Tensor, seen: Tensor, targets: Tensor, weights: Tensor, levels: Tensor) -> Float[Tensor, ""]:
        """Of a few rows."""
        logits = head(states).float()
        logits = logits if scaling is None else scaling(logits)
        place = float64_device(logits.device)
        logs, level = logits.log_softmax(-1).to(place), levels.to(place).double().sum(-1)
        return (integrand(logs, seen.to(place), targets.to(place), level) * weights.to(place)).sum()

    total = torch.zeros((), dtype=torch.float64, device=float64_device(states.device))
    for parts in zip(*(part.split(rows) for part in (states, seen, targets, weights, levels)), strict=True):
        total = total + checkpoint(piece, *parts, use_reentrant=False)
    return total.float().to(states.device)


def _piece(
    head: nn.Module,
    states: Tensor,
    targets: Tensor,
    weights: Tensor,
    never: int | None,
    scaling: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    logits = head(states).float()
    if scaling is not None:
        logits = scaling(logits)
    if never is not None:
        logits = logits.index_fill(-1, torch.tensor([never], device=logits.device), -torch.inf)
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum()


def _autocast(states: Tensor) -> bool:
    return bool(torch.is_autocast_enabled(states.device.type))


def _plain(head: nn.Module) -> bool:
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        return False
    # ds_id: a parameter that DeepSpeed gathers only while its module runs.
    hooked = bool(head._forward_hooks) or bool(head._forward_pre_hooks)
    return not hooked and head.weight.is_floating_point() and not hasattr(head.weight, "ds_id")


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        kernel: Tensor,
        anchor: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        rows: int,
        dtype: torch.dtype,
        gradient: HeadGradient | None,
    ) -> Tensor:
        """The loss, with the gradients of states and kernel kept for `backward`."""
        with torch.autocast(states.device.type, enabled=False):
            wide_states, wide_kernel = ctx.needs_input_grad[0], ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
            grad_states = torch.empty_like(states) if wide_states else None
            grad_kernel = torch.zeros_like(kernel, dtype=torch.float32) if wide_kernel else None
            total = torch.zeros((), device=states.device)
            weight = kernel.to(dtype)
            for part in range(0, len(states), rows):
                piece = slice(part, part + rows)
                x, target, factor = states[piece].to(dtype), targets[piece, None], weights[piece, None]
                logits = (x @ weight.T).float()
                largest = logits.amax(-1, keepdim=True)
                chosen = logits.gather(-1, target) - largest
                # In place: another tensor of this size would double the memory of the loss.
                sums = logits.sub_(largest).exp_().sum(-1, keepdim=True)
                total += (factor * (sums.log() - chosen)).sum()
                if grad_states is None and grad_kernel is None:
                    continue
                # d loss / d logits = weight (softmax - one-hot), in place of the logits.
                logits.mul_(factor / sums).scatter_add_(-1, target, -factor)
                slope = logits.to(dtype)
                if grad_states is not None:
                    grad_states[piece] = (slope @ weight).to(states.dtype)
                if grad_kernel is not None:
                    if dtype == torch.float32:
                        grad_kernel.addmm_(slope.T, x)
                    else:
                        grad_kernel += (slope.T @ x).float()
        ctx.gradients = grad_states, None if grad_kernel is None else grad_kernel.to(kernel.dtype)
        ctx.head_gradient = gradient if ctx.needs_input_grad[2] else None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `forward` times the slope; with an anchor that of the kernel goes to its lookup."""
        if ctx.gradients is None:
            raise RuntimeError(
                "This loss was differentiated before, and its gradients were freed; compute masked_loss again."
            )
        states, kernel = (None if value is None else value.mul_(slope.to(value.dtype)) for value in ctx.gradients)
        ctx.gradients = None
        anchor = None
        if ctx.head_gradient is not None and kernel is not None:
            ctx.head_gradient.put(kernel)
            anchor = kernel.new_zeros(())
            kernel = None
        return states, kernel, anchor, None, None, None, None, None, None


def masked_loss(
    model: Any,
    input_ids: Int[Tensor, "batch position"],
    outputs: Int[Tensor, "n"],
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    *,
    levels: Float[Tensor, "n 2"] | None = None,
    clean: Bool[Tensor, "batch position"] | None = None,
    elements: int | None = None,
    **inputs: Tensor,
) -> Float[Tensor, ""]:
    """sum_n weights_n CE(logits of output n, target n): the numerator of an objective's loss.

    With `levels` it is sum_n weights_n l_n, the integrand of the model's bound (`LikelihoodBoundLoss`).

    The head runs on the requested outputs only, in chunks; learned sinks are removed before it. Its logits are
    scaled as the model scales them (`logit_scaling`).

    Args:
        model: any causal LM or masked DLM of transformers' layout.
        input_ids: the canvas.
        outputs: indices into the flattened [batch * position].
        targets: ids.
        weights: of each loss.
        levels: of the noise of each output, for the integrand of a bound, the sum of the two numbers; None for the
            cross entropy.
        clean: positions that do not see the others, for GIDD.
        elements: as in `weighted_cross_entropy`.
        **inputs: attention_mask and position_ids of the decoder; for block diffusion what `two_copies` takes beside
            x_t, with x_0 as clean_ids, and `outputs` are then indices into [batch * 2 position].

    Raises:
        ValueError: a model with an encoder, which has no outputs outside its canvas.
    """
    check_trained_whole(model)
    if "clean_ids" in inputs:
        clean_ids, blocks, positions = (inputs.pop(name) for name in ("clean_ids", "blocks", "position_ids"))
        # As the authors train, whichever sampler decodes afterwards.
        causal = has_causal_context(model.config)
        options: dict[str, Any] = {**inputs, **attention_in_copies(model.config, input_ids, causal=causal)}
        inputs = two_copies(input_ids, clean_ids, blocks, positions, dtype=model.dtype, **options)
        input_ids = inputs.pop("input_ids")
    if clean is not None:
        content = inputs.pop("attention_mask", torch.ones_like(clean)).bool()
        inputs |= clean_context_inputs(model, content, clean)
    with nullcontext() if levels is not None else tied_gradient(model) as tied:
        states = decoder_of(model)(input_ids=input_ids, **{"use_cache": False, **inputs}).last_hidden_state
    states = states[:, SinkLayout.of(model).canvas(states.shape[1])]
    requested = head_states(model, states.flatten(0, 1)[outputs])
    if levels is not None:
        seen = input_ids.flatten()[outputs]
        return bound_loss(requested, model, seen, targets, weights, levels, elements)
    never = model.config.mask_token_id if getattr(model.config, "subs", False) else None
    head = model.get_output_embeddings()
    return weighted_cross_entropy(requested, head, targets, weights, elements, never, tied, logit_scaling(model))


@contextmanager
def loss_forward(model: Any) -> Iterator[None]:
    """In this context `model(input_ids=, outputs=, targets=, weights=)` returns `{"loss": masked_loss}`.

    DDP, FSDP and DeepSpeed wrap a module's forward, so the loss has to be computed in it. Calls without `outputs`
    are not changed. A forward that the instance had, such as a hook of accelerate, is there again afterwards.
    """
    usual, own = model.forward, vars(model).get("forward")

    def forward(self: Any, *args: Any, outputs: Tensor | None = None, **inputs: Any) -> Any:
        """The loss where `outputs` is given, else the model's own forward."""
        if outputs is None:
            return usual(*args, **inputs)
        return {"loss": masked_loss(self, outputs=outputs, **inputs)}

    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


@torch.no_grad()
def evaluation_loss(
    model: Any,
    examples: Sequence[Example],
    objective: Objective,
    *,
    length: int,
    samples: int = 4,
    batch_size: int = 8,
    seed: int = 0,
    loss_of: Callable[..., Tensor] | None = None,
) -> float:
    """The objective's loss over fixed sequences and masks, in nats.

    Every sequence gets `samples` masks, whose noise depends only on `seed` and the sequence's number. Calls with
    equal arguments share their masks, so differences between them come from the model.

    Args:
        model: the network.
        examples: the sequences.
        objective: as returned by its `for_model`.
        length: positions of a row.
        samples: masks per sequence.
        batch_size: rows per forward pass.
        seed: of the masks.
        loss_of: used in place of `masked_loss(model, ...)`, for weights that are sharded among processes.
    """
    loss_of = partial(masked_loss, model) if loss_of is None else loss_of
    jobs = [(number, sample) for number in range(len(examples)) for sample in range(samples)]
    was_training, total, count = model.training, 0.0, 0.0
    model.eval()
    try:
        for start in range(0, len(jobs), batch_size):
            part = jobs[start : start + batch_size]
            padding = int(examples[0].tokens[0])
            rows = Rows.of([examples[number] for number, _ in part], length, padding)
            arguments = objective.prepare(rows, [number * samples + sample for number, sample in part], seed)
            count += float(arguments.pop("count"))
            inputs: dict[str, Any] = {name: value.to(input_device(model)) for name, value in arguments.items()}
            if len(arguments["targets"]):
                total += float(loss_of(**inputs))
    finally:
        model.train(was_training)
    return total / max(count, 1.0)
