"""The training loss of a model (`masked_loss`), as its forward (`loss_forward`), and of an evaluation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.head import head_states, logit_scaling
from dlm_lens.attention import SinkLayout, decoder_of, has_causal_context
from dlm_lens.placement import input_device
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.block_network import clean_context_inputs
from dlm_lens.sampling.two_copies import attention_in_copies, two_copies
from dlm_lens.training.head_loss import bound_loss, tied_gradient, token_loss, weighted_cross_entropy
from dlm_lens.training.objective import NextToken, Objective, check_trained_whole
from dlm_lens.training.sources import Example, Rows


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

    With `levels` it is sum_n weights_n l_n, the integrand of the model's bound (`LikelihoodBoundLoss`). Of SEDD,
    whose outputs are ratios that need not sum to 1, it is the score entropy of every target
    (`samplers/sedd.py`, 2310.16834) in place of the cross entropy.

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
    with tied_gradient(model) as tied:
        states = decoder_of(model)(input_ids=input_ids, **{"use_cache": False, **inputs}).last_hidden_state
    states = states[:, SinkLayout.of(model).canvas(states.shape[1])]
    requested = head_states(model, states.flatten(0, 1)[outputs])
    if levels is not None:
        seen = input_ids.flatten()[outputs]
        return bound_loss(requested, model, seen, targets, weights, levels, elements, tied)
    head, scaling, subs = model.get_output_embeddings(), logit_scaling(model), getattr(model.config, "subs", False)
    never = model.config.mask_token_id if subs else None
    if subs and (own := algorithm_of(model.config).loss) is not None:
        return token_loss(requested, head, own, targets, weights, elements, never, tied, scaling)
    return weighted_cross_entropy(requested, head, targets, weights, elements, never, tied, scaling)


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
    processes: int = 1,
    rank: int = 0,
    in_step: bool = False,
) -> float:
    """The objective's loss over fixed sequences and masks, in nats.

    Every sequence gets `samples` masks, whose noise depends only on `seed` and the sequence's number. Calls with
    equal arguments share their masks, so differences between them come from the model.

    Several processes, each of which calls it, divide the batches among them and add the losses in the order of the
    batches, so that the result is that of one process to the last bit.

    Args:
        model: the network.
        examples: the sequences, the same in every process.
        objective: as returned by its `for_model`.
        length: positions of a row.
        samples: masks per sequence; of `NextToken`, which draws none, a sequence has one pass.
        batch_size: rows per forward pass.
        seed: of the masks.
        loss_of: used in place of `masked_loss(model, ...)`, for weights that are sharded among processes.
        processes: of the default group of torch.distributed, which has to be there for more than one.
        rank: of this process.
        in_step: whether all processes have to make the same number of passes, as sharded weights require.
    """
    loss_of = partial(masked_loss, model) if loss_of is None else loss_of
    if isinstance(objective, NextToken):
        samples = 1  # without noise every pass over a sequence is the same
    jobs = [(number, sample) for number in range(len(examples)) for sample in range(samples)]
    batches = [jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size)]
    found = torch.zeros(len(batches), 2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        for turn in range(rank, -(-len(batches) // processes) * processes, processes):
            if turn < len(batches) or in_step:
                # A process for which no batch is left repeats the last one, and leaves its loss out.
                numbers = batches[min(turn, len(batches) - 1)]
                rows = Rows.of([examples[number] for number, _ in numbers], length, int(examples[0].tokens[0]))
                arguments = objective.prepare(rows, [number * samples + mask for number, mask in numbers], seed)
                sums = _sums(model, arguments, loss_of, always=in_step)
                if turn < len(batches):
                    found[turn] = sums
    finally:
        model.train(was_training)
    if processes > 1:
        found = found.to(input_device(model))
        torch.distributed.all_reduce(found)  # every entry is 0 in all processes but one
    return _mean(found)


def _mean(found: Float[Tensor, "batch 2"]) -> float:
    """The quotient of numerators and denominators, added in the order of the batches."""
    total, count = 0.0, 0.0
    for loss, predicted in found.tolist():
        total, count = total + loss, count + predicted
    return total / max(count, 1.0)


def _sums(
    model: Any, arguments: dict[str, Tensor], loss_of: Callable[..., Tensor], *, always: bool
) -> Float[Tensor, "2"]:
    """The numerator and the denominator of a batch; without targets there is no pass, unless `always`."""
    count = float(arguments.pop("count"))
    inputs: dict[str, Any] = {name: value.to(input_device(model)) for name, value in arguments.items()}
    loss = float(loss_of(**inputs)) if always or len(arguments["targets"]) else 0.0
    return torch.tensor([loss, count], dtype=torch.float64)
