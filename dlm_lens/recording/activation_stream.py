"""`activations`: activations of denoising runs as vectors, for trainers of sparse autoencoders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import SEED, checked_arguments, chosen_indices, instance, or_none, real, whole
from dlm_lens.attention import HookLike, attention_blocks, checked, exclusive, padding_before
from dlm_lens.placement import plain_defaults
from dlm_lens.recording.arrays import as_stored
from dlm_lens.recording.record_runs import Batches
from dlm_lens.recording.recorder import Recorder
from dlm_lens.recording.reducers.base import LayerStep, Reducer
from dlm_lens.recording.reducers.features import POSITION_CLASSES, position_classes
from dlm_lens.sampling import DenoisingRun, denoise
from dlm_lens.sampling.settings import check_model
from dlm_lens.shapes import check_shapes

BATCH_SIZE = or_none(whole(), "for all")
DTYPE = instance(torch.dtype, "a dtype of torch, such as torch.float32")


@dataclass(frozen=True, eq=False)
class ActivationBatch:
    """Activations of one step of a batch of prompts, and where each comes from.

    Args:
        activations: the stream that leaves the layer.
        prompt: index among all prompts.
        step: of the run.
        position: from the prompt's first token.
        position_class: index into `POSITION_CLASSES`: open, decided, prompt.

    Raises:
        ValueError: shapes that contradict each other.
    """

    activations: Float[Tensor, "vector d_model"]
    prompt: Int[Tensor, "vector"]
    step: Int[Tensor, "vector"]
    position: Int[Tensor, "vector"]
    position_class: Int[Tensor, "vector"]

    def __post_init__(self) -> None:
        check_shapes(self)

    def __len__(self) -> int:
        return len(self.activations)

    def __repr__(self) -> str:
        return f"ActivationBatch({len(self)} vectors of {self.activations.shape[1]} entries)"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return dict(vars(self))

    @classmethod
    def joined(cls, parts: Sequence["ActivationBatch"]) -> "ActivationBatch":
        """The vectors of several, one after the other."""
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})

    def part(self, where: slice | Bool[Tensor, "vector"]) -> "ActivationBatch":
        """Some of the vectors."""
        return ActivationBatch(**{name: value[where] for name, value in vars(self).items()})


@dataclass(frozen=True)
class StreamRequest:
    """What an activation stream is of; `activations` describes the arguments.

    Raises:
        ValueError: an unknown class, no class, or a share out of range.
    """

    layer: int
    classes: tuple[str, ...]
    share: float
    seed: int

    def __post_init__(self) -> None:
        wrong = [name for name in self.classes if name not in POSITION_CLASSES]
        if wrong or not self.classes:
            raise ValueError(
                f"classes is {list(self.classes)}; give a list of some of {', '.join(POSITION_CLASSES)}"
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is the share of vectors to keep, above 0 and at most 1")


@dataclass(frozen=True, eq=False)
class _Collect(Reducer):
    """Keeps vectors of the layer on the CPU; what it returns is how many."""

    request: StreamRequest
    dtype: torch.dtype
    prompts: list[int] = field(default_factory=list)
    kept: list[ActivationBatch] = field(default_factory=list)

    name = "collected"
    dims = ("step", "batch", "layer")
    reads = ("resid_out",)

    def reduce(self, layer: LayerStep) -> Int[Tensor, "batch"]:
        """Keep the chosen positions of every row."""
        if layer.resid_out is None:
            raise ValueError("activations reads the stream that leaves a layer, which this recorder lacks")
        classes = position_classes(layer).cpu()
        wanted = [POSITION_CLASSES.index(name) for name in self.request.classes]
        chosen = classes[:, wanted].any(1)
        if self.request.share < 1:
            chosen &= self._drawn(layer, chosen)
        row, place = chosen.nonzero(as_tuple=True)
        device = layer.resid_out.device
        vectors = layer.resid_out[row.to(device), place.to(device)]
        remedy = "take float32 or bfloat16 as dtype"
        vectors = as_stored(f"the stream of layer {layer.index}", vectors, self.dtype, remedy).cpu()
        # Masks after a window of them are not seen either, and are no padding.
        padding = padding_before(layer.run.valid).cpu()
        self.kept.append(
            ActivationBatch(
                vectors,
                torch.tensor(self.prompts)[row],
                torch.full_like(row, layer.run.step),
                place - padding[row],
                classes.int().argmax(1)[row, place],
            )
        )
        return chosen.sum(-1)

    def of_rows_that_run(self, run: DenoisingRun) -> list[ActivationBatch]:
        """The kept steps of a finished run, each without the rows that were over; `kept` is emptied.

        When a row is over is known only after the run.
        """
        first, found = self.prompts[0], []
        self.kept.reverse()
        while self.kept:  # so that no step is in memory twice
            part = self.kept.pop()
            running = run.running[part.step, part.prompt - first]
            part = part if bool(running.all()) else part.part(running)
            found += [part] if len(part) else []
        return found

    def _drawn(self, layer: LayerStep, chosen: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """A random share, the same for a prompt whatever batch it is in."""
        drawn = torch.zeros_like(chosen)
        for row, prompt in enumerate(self.prompts):
            number = (self.request.seed * 1_000_003 + prompt) * 1_000_003 + layer.run.step
            made = torch.Generator().manual_seed(number % 2**63)
            drawn[row, chosen[row]] = (
                torch.rand(int(chosen[row].sum()), generator=made, dtype=torch.float32) < self.request.share
            )
        return drawn


@exclusive
@checked_arguments(share=real(), batch_size=BATCH_SIZE, seed=SEED, dtype=DTYPE)
def activations(
    model: Any,
    prompts: Any,
    layer: int,
    *,
    classes: Sequence[str] = POSITION_CLASSES,
    share: float = 1.0,
    batch_size: int | None = 8,
    dtype: torch.dtype = torch.float32,
    hooks: Sequence[HookLike] = (),
    seed: int = 0,
    progress: bool = False,
    **settings: Any,
) -> Iterator[ActivationBatch]:
    """Denoise prompts batch by batch, and yield the residual stream after a layer, one step at a time.

    A row that is over has no more vectors, whatever runs beside it. Under block diffusion a row whose block is
    full waits for the others of its batch, and has its vectors again at these steps; with batch_size=1 there
    are none. The memory holds the chosen vectors of one batch of prompts, steps x positions x share of them for
    each: a large model needs a small share or batch. The order is fixed (batch, step, prompt, position); a
    trainer shuffles.

    Args:
        model: from `dlm_lens.load`.
        prompts: text, chat messages, ids, or a list of any of them.
        layer: whose output is read, negative from the end.
        classes: which positions: some of "open", "decided", "prompt".
        share: of these positions, drawn at random for each prompt and step.
        batch_size: prompts in one run; None for all.
        dtype: of the vectors.
        hooks: interventions under which to run; they act before activations are read. As under `record`, a batch
            ends where the length of the prompts changes if one of them names canvas positions.
        seed: of the runs and of the share.
        progress: show a progress bar.
        **settings: of `dlm_lens.denoise`: steps, gen_length, ...

    Raises:
        ValueError: an unusable prompt or setting, a layer that does not exist, an unknown class, or a share out of
            range; before the first pass. An activation that is too large for float16.
    """
    _, batches, collect, recorder = prepared_stream(
        model, prompts, layer, classes, share, batch_size, dtype, hooks, seed, settings
    )
    run = run_batches(model, batches, collect, recorder, checked(hooks), progress, settings)
    return (part for _, parts in run for part in parts)


def prepared_stream(
    model: Any,
    prompts: Any,
    layer: int,
    classes: Sequence[str],
    share: float,
    batch_size: int | None,
    dtype: torch.dtype,
    hooks: Sequence[HookLike],
    seed: int,
    settings: dict[str, Any],
) -> tuple[StreamRequest, Batches, _Collect, Recorder]:
    """The checked arguments of a stream."""
    check_model(model)
    (place,) = chosen_indices("layer", [layer], len(attention_blocks(model)))
    given = (classes,) if isinstance(classes, str) else tuple(classes)
    request = StreamRequest(place, given, float(share), int(seed))
    for name in ("observers", "resume", "attention_mask"):
        if name in settings:
            raise ValueError(f"a stream of activations takes no {name}")
    collect = _Collect(request, dtype)
    batches = Batches.of(model, prompts, batch_size, seed).under(hooks)
    return request, batches, collect, Recorder(model, [collect], layers=[place])


def run_batches(
    model: Any,
    batches: Batches,
    collect: _Collect,
    recorder: Recorder,
    hooks: Sequence[HookLike],
    progress: bool,
    settings: dict[str, Any],
    first: int = 0,
) -> Iterator[tuple[int, list[ActivationBatch]]]:
    """The index and the steps of every batch of prompts from `first` on."""
    parts = batches.parts
    for number in tqdm(range(first, len(parts)), desc="activations", unit="batch", disable=not progress):
        rows = parts[number]
        collect.prompts[:], collect.kept[:] = list(rows), []
        seeds = None if batches.seeds is None else [batches.seeds[row] for row in rows]
        ids = [batches.ids[row] for row in rows]
        with plain_defaults():
            run = denoise(model, ids, hooks=hooks, observers=recorder, seed=seeds, **settings)
            found = collect.of_rows_that_run(run)
        yield number, found
