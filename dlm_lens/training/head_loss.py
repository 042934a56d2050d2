"""A loss of the logits of many states, a few rows at a time: `weighted_cross_entropy`, `token_loss`, `bound_loss`.

Of a linear head the gradient is computed in the forward pass, so that every logit is computed once and only a few
rows of logits are in memory. Another head (quantised, wrapped, or partitioned by DeepSpeed) is run again in the
backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dlm_lens.adapters.head import logit_scaling
from dlm_lens.attention import decoder_of
from dlm_lens.placement import float64_device, without_autocast
from dlm_lens.sampling.likelihood.noisy_texts import Integrand
from dlm_lens.sampling.likelihood.scoring import Loss
from dlm_lens.training.bound_objective import bound_of


class HeadGradient:
    """Takes the head's gradient from the loss's backward pass and gives it to the embedding's."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def put(self, gradient: Float[Tensor, "d_vocab d_model"]) -> None:
        """Hold the head's gradient; the embedding's backward pass adds its rows to it in place."""
        self._held = gradient

    def take(self) -> Float[Tensor, "d_vocab d_model"] | None:
        """The gradient that is held, which is forgotten here; None where only another loss was differentiated."""
        held, self._held = self._held, None
        return held


class TiedLookup(TorchFunctionMode):
    """Gives the first lookup in one weight a backward pass that adds its rows to the head's gradient.

    Autograd adds the gradients of the two uses when it has both: two tensors of the largest weight's size,
    [d_vocab, d_model]. Here the head's gradient is handed to the embedding's backward pass, which runs later, adds
    its few rows and returns the sum. The numbers are the same.

    Beside its rows the lookup returns a zero, the anchor, which the loss takes as an input: so autograd runs the
    lookup's backward pass after the loss's, even where the rows themselves have no path to the loss.

    The graph holds `gradient` and not this object, whose `anchor` holds the graph: so both are freed with the loss.

    Args:
        weight: of embedding and head.

    Attributes:
        gradient: from the loss's backward pass to the lookup's.
        anchor: the output of the lookup that waits for it, an input of the loss; None without such a lookup: the
            head's gradient must then go its usual way.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.gradient = weight, HeadGradient()
        self.anchor: Float[Tensor, ""] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The first lookup with its own backward pass, and every other function as it is."""
        if func is nn.functional.embedding and len(args) >= 2 and args[1] is self.weight:
            ids, padding, plain = _lookup_arguments(*args, **(kwargs or {}))
            if plain and self.anchor is None and torch.is_grad_enabled():
                rows, self.anchor = _Lookup.apply(self.weight, ids, padding, self.gradient)
                return rows
        return func(*args, **(kwargs or {}))


@contextmanager
def tied_gradient(model: Any) -> Iterator[TiedLookup | None]:
    """In this context the decoder's first lookup in a tied embedding shares the head's gradient buffer.

    None, and nothing changes, where the two weights differ, need no gradient, or are handled by another library:
    compiled decoders, FSDP, DeepSpeed.
    """
    weight = model.get_input_embeddings().weight
    compiled = getattr(decoder_of(model), "_compiled_call_impl", None) is not None
    tied = getattr(model.get_output_embeddings(), "weight", None) is weight and isinstance(weight, nn.Parameter)
    # `fully_shard` gives a module the method `unshard`, DeepSpeed a weight the attribute `ds_id`.
    foreign = compiled or hasattr(model, "unshard") or hasattr(weight, "ds_id")
    if foreign or not (tied and weight.requires_grad and torch.is_grad_enabled()):
        yield None
        return
    with TiedLookup(weight) as lookup:
        yield lookup


def _lookup_arguments(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, int, bool]:
    """Of those of `torch.nn.functional.embedding`: ids, padding (-1: none), and whether no other option is set."""
    plain = max_norm is None and not scale_grad_by_freq and not sparse
    return input, -1 if padding_idx is None else padding_idx, plain


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Int[Tensor, "..."], padding: int, gradient: HeadGradient
    ) -> tuple[Tensor, Tensor]:
        """The rows of the ids, and the anchor."""
        ctx.save_for_backward(ids)
        ctx.padding, ctx.gradient, ctx.shape = padding, gradient, weight.shape
        return nn.functional.embedding(ids, weight), weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, anchor: Tensor) -> tuple[Tensor | None, ...]:
        """The head's gradient plus the rows' own, summed per id as torch sums them."""
        (ids,) = ctx.saved_tensors
        whole = ctx.gradient.take()
        if whole is None:
            whole = slope.new_zeros(ctx.shape)
        found, place = ids.unique(return_inverse=True)
        # Each id once: adding rows at equal indices has no fixed order on a GPU.
        rows = torch.ops.aten.embedding_dense_backward(slope, place, len(found), -1, False)
        whole.index_add_(0, found, rows.masked_fill_((found == ctx.padding)[:, None], 0.0).to(whole.dtype))
        return whole, None, None, None


ELEMENTS = {"cpu": 2**25, "cuda": 2**28}
"""Logits in memory at once, per device type: 128 MiB and 1 GiB in float32."""

Scaling = Callable[[Tensor], Tensor]


class RowLoss(Protocol):
    """A loss of logits, which is a sum over rows."""

    def value(self, logits: Float[Tensor, "row d_vocab"], part: slice) -> Float[Tensor, ""]:
        """The loss of these rows, differentiable; the logits are float32, before `logit_scaling`."""
        ...

    def with_slope(
        self, logits: Float[Tensor, "row d_vocab"], part: slice, *, wanted: bool
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_vocab"] | None]:
        """The same and, if wanted, its derivative with respect to the logits, which may be overwritten."""
        ...


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """sum_n w_n (logsumexp(s(u_n)) - s(u_n)[target_n]).

    Args:
        targets: ids.
        weights: of each row.
        never: an id without probability; None for none.
        scaling: s; None for none.
    """

    targets: Int[Tensor, "n"]
    weights: Float[Tensor, "n"]
    never: int | None = None
    scaling: Scaling | None = None

    def value(self, logits: Float[Tensor, "row d_vocab"], part: slice) -> Float[Tensor, ""]:
        """The loss of these rows."""
        logits = logits if self.scaling is None else self.scaling(logits)
        if self.never is not None:
            logits = logits.index_fill(-1, torch.tensor([self.never], device=logits.device), -torch.inf)
        losses = nn.functional.cross_entropy(logits, self.targets[part], reduction="none")
        return (losses * self.weights[part]).sum()

    def with_slope(
        self, logits: Float[Tensor, "row d_vocab"], part: slice, *, wanted: bool
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_vocab"] | None]:
        """The loss, and w (softmax - one-hot) times the derivative of s."""
        if self.scaling is None:
            return self._of_scaled(logits, part, wanted=wanted)
        with torch.set_grad_enabled(wanted):
            raw = logits.requires_grad_(wanted)
            scaled = self.scaling(raw)
        # A copy: the derivative of s may need what it returned.
        loss, slope = self._of_scaled(scaled.detach().clone(), part, wanted=wanted)
        return loss, torch.autograd.grad(scaled, raw, slope)[0] if wanted else None

    def _of_scaled(
        self, logits: Float[Tensor, "row d_vocab"], part: slice, *, wanted: bool
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_vocab"] | None]:
        target, factor = self.targets[part, None], self.weights[part, None]
        if self.never is not None:
            logits[:, self.never] = -torch.inf
        largest = logits.amax(-1, keepdim=True)
        chosen = logits.gather(-1, target) - largest
        # In place: another tensor of this size would double the memory of the loss.
        sums = logits.sub_(largest).exp_().sum(-1, keepdim=True)
        loss = (factor * (sums.log() - chosen)).sum()
        return loss, logits.mul_(factor / sums).scatter_add_(-1, target, -factor) if wanted else None


class Differentiated:
    """A `RowLoss` that has `value`, with its derivative by autograd."""

    def value(self, logits: Float[Tensor, "row d_vocab"], part: slice) -> Float[Tensor, ""]:
        """The loss of these rows."""
        raise NotImplementedError

    def with_slope(
        self, logits: Float[Tensor, "row d_vocab"], part: slice, *, wanted: bool
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "row d_vocab"] | None]:
        """The loss, and its derivative by autograd."""
        with torch.set_grad_enabled(wanted):
            raw = logits.requires_grad_(wanted)
            loss = self.value(raw, part)
        return loss.detach(), torch.autograd.grad(loss, raw)[0] if wanted else None


@dataclass(frozen=True, eq=False)
class TokenLoss(Differentiated):
    """sum_n w_n l(s(u_n), target_n), l the loss of an algorithm's likelihood, in float32.

    Args:
        loss: l, of the logits, for each token its row of them, and the tokens.
        targets: ids.
        weights: of each row.
        never: an id without probability; None for none.
        scaling: s; None for none.
    """

    loss: Loss
    targets: Int[Tensor, "n"]
    weights: Float[Tensor, "n"]
    never: int | None = None
    scaling: Scaling | None = None

    def value(self, logits: Float[Tensor, "row d_vocab"], part: slice) -> Float[Tensor, ""]:
        """The loss of these rows."""
        logits = logits if self.scaling is None else self.scaling(logits)
        if self.never is not None:
            logits = logits.index_fill(-1, torch.tensor([self.never], device=logits.device), -torch.inf)
        where = torch.arange(len(logits), device=logits.device)
        return (self.loss(logits, where, self.targets[part]) * self.weights[part]).sum()


@dataclass(frozen=True, eq=False)
class Bound(Differentiated):
    """sum_n w_n l_n, the integrand of a bound on the likelihood, in float64.

    Args:
        integrand: l of (ln x_theta, x_t, the text's tokens, the levels).
        seen: x_t.
        targets: of the text.
        weights: of each row.
        levels: of the noise of each: the sum of the two numbers.
        scaling: s; None for none.
    """

    integrand: Integrand
    seen: Int[Tensor, "n"]
    targets: Int[Tensor, "n"]
    weights: Float[Tensor, "n"]
    levels: Float[Tensor, "n 2"]
    scaling: Scaling | None = None

    def value(self, logits: Float[Tensor, "row d_vocab"], part: slice) -> Float[Tensor, ""]:
        """The loss of these rows."""
        logs = (logits if self.scaling is None else self.scaling(logits)).log_softmax(-1)
        logs = logs.to(float64_device(logs.device))
        seen, targets, weights, levels = (
            rows[part].to(logs.device) for rows in (self.seen, self.targets, self.weights, self.levels)
        )
        return (self.integrand(logs, seen, targets, levels.double().sum(-1)) * weights).sum()


def weighted_cross_entropy(
    states: Float[Tensor, "n d_model"],
    head: nn.Module,
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    elements: int | None = None,
    never: int | None = None,
    tied: TiedLookup | None = None,
    scaling: Scaling | None = None,
) -> Float[Tensor, ""]:
    """sum_n weights_n (logsumexp(u_n) - u_n[target_n]), u_n = s(W x_n), in float32, a few rows of logits at a time.

    Args:
        states: input of the head.
        head: maps states to logits.
        targets: ids.
        weights: of each loss.
        elements: logits in memory at once; None for 2**25 on a CPU and 2**28 on a GPU.
        never: an id without probability, [MASK] in the SUBS parameterisation of MDLM.
        tied: the states' lookup in the weight of a linear head, which takes its gradient; from `tied_gradient`.
        scaling: s, from `logit_scaling`; it is given float32. None for none.
    """
    return _summed(states, head, CrossEntropy(targets, weights.float(), never, scaling), elements, 1, tied)


def token_loss(
    states: Float[Tensor, "n d_model"],
    head: nn.Module,
    loss: Loss,
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    elements: int | None = None,
    never: int | None = None,
    tied: TiedLookup | None = None,
    scaling: Scaling | None = None,
) -> Float[Tensor, ""]:
    """sum_n weights_n l(u_n, target_n), u_n = s(W x_n), in float32, a few rows of logits at a time.

    Args:
        states: input of the head.
        head: maps states to logits.
        loss: l, the loss of masked tokens in an algorithm's likelihood (`Algorithm.loss`).
        targets: ids.
        weights: of each loss.
        elements: as in `weighted_cross_entropy`; of the rows a quarter of them.
        never: as in `weighted_cross_entropy`.
        tied: as in `weighted_cross_entropy`.
        scaling: as in `weighted_cross_entropy`.
    """
    return _summed(states, head, TokenLoss(loss, targets, weights.float(), never, scaling), elements, 4, tied)


def bound_loss(
    states: Float[Tensor, "n d_model"],
    model: Any,
    seen: Int[Tensor, "n"],
    targets: Int[Tensor, "n"],
    weights: Float[Tensor, "n"],
    levels: Float[Tensor, "n 2"],
    elements: int | None = None,
    tied: TiedLookup | None = None,
) -> Float[Tensor, ""]:
    """sum_n weights_n l_n, the integrand of the model's bound (`LikelihoodBoundLoss`), a few rows at a time.

    Logits and their softmax are float32, the integrand float64.

    Args:
        states: input of the head.
        model: whose noise has random tokens.
        seen: x_t.
        targets: of the text.
        weights: of each loss.
        levels: of the noise of each, for the integrand: the sum of the two numbers.
        elements: as in `weighted_cross_entropy`; of the integrand an eighth of them.
        tied: as in `weighted_cross_entropy`.
    """
    loss = Bound(bound_of(model.config), seen, targets, weights, levels, logit_scaling(model))
    return _summed(states, model.get_output_embeddings(), loss, elements, 8, tied)


def _summed(
    states: Float[Tensor, "n d_model"],
    head: nn.Module,
    loss: RowLoss,
    elements: int | None,
    tensors: int,
    tied: TiedLookup | None,
) -> Float[Tensor, ""]:
    """The loss of all states in float32; `tensors` of the logits' size are in memory at once."""
    if not len(states):
        # No position was masked: a loss of zero with a gradient, because distributed ranks wait for each other's.
        return states.sum() * 0.0 + sum(parameter.sum() * 0.0 for parameter in head.parameters())
    vocabulary = getattr(head, "out_features", None) or cast(Any, head).weight.shape[0]
    budget = elements or ELEMENTS.get(states.device.type, ELEMENTS["cuda"])
    rows = max(1, budget // (tensors * int(vocabulary)))
    if _linear(head):
        autocast = torch.is_autocast_enabled(states.device.type)
        dtype = torch.get_autocast_dtype(states.device.type) if autocast else states.dtype
        anchor, gradient = (None, None) if tied is None else (tied.anchor, tied.gradient)
        weight, bias = cast(Tensor, head.weight), cast(Tensor | None, head.bias)
        kernel = weight if anchor is None else weight.detach()
        total: Tensor = _HeadLoss.apply(states, kernel, bias, anchor, loss, rows, dtype, gradient)
        return total

    def piece(states: Tensor, part: slice) -> Tensor:
        return loss.value(head(states).float(), part)

    parts = [slice(first, first + rows) for first in range(0, len(states), rows)]
    losses = [checkpoint(piece, states[part], part, use_reentrant=False) for part in parts]
    return cast(Tensor, sum(losses)).float().to(states.device)


def _linear(head: nn.Module) -> bool:
    """Whether logits are W x + b, with tensors that are at hand."""
    if type(head) is not nn.Linear:
        return False
    # ds_id: a parameter that DeepSpeed gathers only while its module runs.
    hooked = bool(head._forward_hooks) or bool(head._forward_pre_hooks)
    return not hooked and head.weight.is_floating_point() and not hasattr(head.weight, "ds_id")


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        loss: RowLoss,
        rows: int,
        dtype: torch.dtype,
        gradient: HeadGradient | None,
    ) -> Tensor:
        """The loss, with the gradients of states, kernel and bias kept for `backward`."""
        with without_autocast(states.device):
            wide_kernel = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
            grad_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
            grad_kernel = torch.zeros_like(kernel, dtype=torch.float32) if wide_kernel else None
            wide_bias = bias if ctx.needs_input_grad[2] else None
            grad_bias = None if wide_bias is None else torch.zeros_like(wide_bias, dtype=torch.float32)
            wanted = any(one is not None for one in (grad_states, grad_kernel, grad_bias))
            total: Tensor | None = None
            weight, offset = kernel.to(dtype), None if bias is None else bias.to(dtype)
            for first in range(0, len(states), rows):
                part = slice(first, first + rows)
                x = states[part].to(dtype)
                logits = nn.functional.linear(x, weight, offset).float()
                found, slopes = loss.with_slope(logits, part, wanted=wanted)
                total = found if total is None else total + found
                if slopes is None:
                    continue
                slope = slopes.to(dtype)
                if grad_states is not None:
                    grad_states[part] = (slope @ weight).to(states.dtype)
                if grad_bias is not None:
                    grad_bias += slopes.sum(0)
                if grad_kernel is not None:
                    if dtype == torch.float32:
                        grad_kernel.addmm_(slope.T, x)
                    else:
                        grad_kernel += (slope.T @ x).float()
        ctx.gradients = (
            grad_states,
            None if grad_kernel is None else grad_kernel.to(kernel.dtype),
            None if grad_bias is None or wide_bias is None else grad_bias.to(wide_bias.dtype),
        )
        ctx.head_gradient = gradient if ctx.needs_input_grad[3] else None
        return cast(Tensor, total).float().to(states.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `forward` times the slope; with an anchor that of the kernel goes to its lookup."""
        if ctx.gradients is None:
            raise RuntimeError(
                "This loss was differentiated before, and its gradients were freed; compute masked_loss again."
            )
        states, kernel, bias = (
            None if value is None else value.mul_(slope.to(value.dtype)) for value in ctx.gradients
        )
        ctx.gradients = None
        anchor = None
        if ctx.head_gradient is not None and kernel is not None:
            ctx.head_gradient.put(kernel)
            anchor = kernel.new_zeros(())
            kernel = None
        return states, kernel, bias, anchor, None, None, None, None
