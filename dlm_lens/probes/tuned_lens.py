"""`TunedLens`: one affine map per layer before the final norm, trained on text.

It is saved with a digest of its model's weights.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.adapters.model_names import name_of
from dlm_lens.adapters.registry import fills_masks
from dlm_lens.arguments import FILE, Rule, checked_arguments, is_real, whole
from dlm_lens.attention import (
    SinkLayout,
    attach_hooks,
    attends_causally,
    attention_blocks,
    computed_span,
    decoder_of,
    exclusive,
)
from dlm_lens.files.atomic_writes import remove_stale
from dlm_lens.files.paths import made_file_path, read_utf8, user_path
from dlm_lens.files.sealed_json import Document, fitted, naming, parsed
from dlm_lens.files.tensor_files import metadata_of, read_with_metadata, write_tensors
from dlm_lens.placement import input_device
from dlm_lens.printable import printable_name
from dlm_lens.probes.residual_reader import EntryReader
from dlm_lens.probes.unembedding import Unembedding, kl_divergence
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.sampling.algorithm_registry import algorithm_of

FORMAT = "dlm-lens tuned lens 2"


class LensFacts(Document):
    """The metadata of a saved lens."""

    model: str
    digest: str
    layers: list[int]
    training: dict[str, Any]


@dataclass(frozen=True, eq=False)
class TunedLens:
    """h_l + A_l h_l + b_l, which reads layer l in the basis of the last one (2303.08112, section 3).

    Args:
        weight: A_l; zero for a lens that is the plain logit lens.
        bias: b_l.
        layers: index of each layer that has a map; the others keep their stream.
        model: name of the model that it was trained for.
        digest: of that model's weights.
        training: text and settings of the training.

    Raises:
        ValueError: the shapes contradict each other.
    """

    weight: Float[Tensor, "layer d_model d_model"] = field(repr=False)
    bias: Float[Tensor, "layer d_model"] = field(repr=False)
    layers: tuple[int, ...]
    model: str
    digest: str
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.layers), *self.weight.shape[-1:])
        if tuple(self.bias.shape) != shape or tuple(self.weight.shape) != (*shape, shape[1]):
            raise ValueError(
                f"TunedLens: weight {list(self.weight.shape)}, bias {list(self.bias.shape)} and "
                f"{len(self.layers)} layers contradict each other"
            )

    def __repr__(self) -> str:
        return f"TunedLens(layers {self.layers}, of {self.model})"

    def translate(self, layer: int, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_model"]:
        """The stream of a layer in the last one's basis, in float32."""
        if layer not in self.layers:
            return stream
        place = self.layers.index(layer)
        return _mapped(stream, self.weight[place], self.bias[place])

    def check(self, model: Any) -> None:
        """Raise if the lens is not this model's.

        Raises:
            ValueError: the model has other weights.
        """
        digest = weights_digest(model)
        if digest != self.digest or len(attention_blocks(model)) <= max(self.layers, default=0):
            raise ValueError(
                f"this tuned lens was trained for {self.model} (weights {self.digest}), not for {name_of(model)} "
                f"(weights {digest}); train one with train_tuned_lens"
            )

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, with the model's digest and a checksum among its metadata.

        A missing directory is made.

        Raises:
            OSError: the path is a directory, the disk is full, or takes no files; a file that was there stays as
                it is.
            ValueError: the path is none.
        """
        path = made_file_path(path)
        about = {"model": self.model, "digest": self.digest, "layers": list(self.layers), "training": self.training}
        remove_stale(path.parent)
        write_tensors(
            path, {"weight": self.weight, "bias": self.bias}, {"format": FORMAT, "lens": json.dumps(about)}
        )
        return path

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "TunedLens":
        """Read what `save` wrote, for this model.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no tuned lens, damaged, or another model's.
        """
        path = user_path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; TunedLens.save writes one")
        remedy = "train one with train_tuned_lens"
        version = metadata_of(path, remedy, "tuned lens").get("format")
        if version != FORMAT:
            raise ValueError(f"{path} is no tuned lens of this version (its format is {version!r:.80}); {remedy}")
        tensors, metadata = read_with_metadata(path, remedy)
        about = fitted(LensFacts, parsed(metadata.get("lens", ""), path, remedy), path, remedy)
        if set(tensors) != {"weight", "bias"}:
            raise ValueError(f"{path} is damaged (it holds {sorted(tensors)}); {remedy}")
        layers = tuple(about.layers)
        with naming(path, remedy):
            lens = cls(tensors["weight"], tensors["bias"], layers, about.model, about.digest, about.training)
            lens.check(model)
        return lens


logger = logging.getLogger(__name__)


def _mapped(
    stream: Float[Tensor, "state d_model"], weight: Float[Tensor, "d_model d_model"], bias: Float[Tensor, "d_model"]
) -> Float[Tensor, "state d_model"]:
    """H + A h + b, in float32."""
    wide = stream.float()
    return wide + wide @ weight.to(wide).mT + bias.to(wide)


class _Map(nn.Module):
    """A_l and b_l of one layer in training.

    Each layer has tensors of its own: the gradient of a part of a larger one is as large as the whole.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width, device=device, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=torch.float32))


@checked_arguments(
    text=FILE,
    steps=whole(least=1),
    batch_size=whole(least=1),
    length=whole(least=2),
    learning_rate=Rule("a number above 0", lambda value: is_real(value) and value > 0),
    seed=whole(),
)
@exclusive
@torch.enable_grad()
def train_tuned_lens(
    model: Any,
    text: str | Path,
    *,
    steps: int = 250,
    batch_size: int = 8,
    length: int = 128,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: bool = False,
) -> TunedLens:
    """Fit a tuned lens: minimise KL(model's output || lens) at masked positions (2303.08112, section 3).

    Each step draws `batch_size` windows of the file, masks every token of a window with its own probability t,
    uniform in (0, 1), as the masked-diffusion loss does, and minimises the KL at the positions that predict masked
    tokens (one to the left where the family shifts its logits); an AR model gets unmasked text and all positions.
    In a model of uniform noise random tokens stand for masks; in DiffusionGemma on the canvas alone, the last
    `canvas_length` tokens of a window, whose first step (without self-conditioning) the passes are.
    The model's weights do not change; the last layer needs no map, and a model of one layer no training. Adam with
    a linear decay to zero. A model whose runs attend block by block or through a window of masks is refused, unless
    every forward pass of it does: its windows would be seen as no canvas of a run is.

    Memory: the maps (d_model^2 numbers a layer, in float32) four times, the states of a step in every layer, and
    the logits of a few positions in one layer.

    Args:
        model: from `dlm_lens.load`.
        text: a UTF-8 file; not the text that the lens will be used on.
        steps: optimiser steps.
        batch_size: windows in one step.
        length: tokens of a window; a shorter file is one window.
        learning_rate: at the first step.
        seed: of windows and masks.
        progress: show a progress bar.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a text that is no path, a model without a tokenizer, one that is given the noise level, one of
            blocks that its sampler lays out, a file of fewer than 2 tokens, or a setting out of range.
    """
    if takes_noise_level(model):
        raise ValueError(
            f"{type(model).__name__} is given the noise level (time_conditioning), on which its last norm depends, "
            "and a tuned lens is trained without one; use the logit lens of a run (dlm_lens.logit_lens)"
        )
    _refuse_blocks(model)
    path = user_path(text)
    ids, head = _ids(model, path), Unembedding(model)
    layers = tuple(range(len(attention_blocks(model)) - 1))
    width = int(model.config.hidden_size)
    maps = [_Map(width, head.device) for _ in layers]
    losses = [0.0]
    if layers:
        batches = tqdm(_batches(model, ids, steps, batch_size, length, seed), total=steps, disable=not progress)
        losses = _trained(model, head, maps, batches, steps, learning_rate)
    name = name_of(model)
    logger.info("tuned lens of %s: mean KL over layers %.4g -> %.4g nats", name, losses[0], losses[-1])
    training = {"text": path.name, "tokens": len(ids), "steps": steps, "batch_size": batch_size}
    training |= {"length": length, "learning_rate": learning_rate, "seed": seed, "last_loss": losses[-1]}
    shape = (len(layers), width)
    weight = torch.zeros(*shape, width, dtype=torch.float32)
    bias = torch.zeros(shape, dtype=torch.float32)
    for place, one in enumerate(maps):
        weight[place], bias[place] = one.weight.detach(), one.bias.detach()
    return TunedLens(weight, bias, layers, name, weights_digest(model), training)


def _trained(
    model: Any,
    head: Unembedding,
    maps: Sequence[_Map],
    batches: Iterable[tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]],
    steps: int,
    learning_rate: float,
) -> list[float]:
    """Train the maps, with the model's own weights frozen; the loss of every step."""
    optimizer = torch.optim.Adam([each for one in maps for each in one.parameters()], lr=learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    losses = []
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(False)
        for batch in batches:
            optimizer.zero_grad()
            losses.append(_backward(model, head, maps, *batch))
            optimizer.step()
            decay.step()
    finally:
        for parameter, wanted in frozen:
            parameter.requires_grad_(wanted)
    return losses


def _refuse_blocks(model: Any) -> None:
    """Raise for a model whose sampler, and not its forward pass, says which queries see which keys."""
    config = model.config
    algorithm = algorithm_of(config)
    sampler = algorithm.sampler
    by_itself = getattr(config, "block_causal_length", None) is not None or computed_span(model, 2) is not None
    if sampler.windowed or (sampler.grows and not by_itself):
        how = "through a window of masks" if sampler.windowed else "block by block"
        raise ValueError(
            f"in runs of the sampler {algorithm.name!r} {type(model).__name__} attends {how}, and a tuned lens is "
            "trained on whole pieces of a text; use the logit lens of a run (dlm_lens.logit_lens)"
        )


def _ids(model: Any, path: Path) -> Int[Tensor, "token"]:
    try:
        there = path.is_file()
    except OSError:  # a text in place of its file has too long a name
        there = False
    if not there:
        name = printable_name(str(path), 200)
        raise FileNotFoundError(f"{name} is not there; a tuned lens is trained on a text file: give its path")
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer, which reads the text; set model.tokenizer")
    ids = model.tokenizer(read_utf8(path), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise ValueError(f"{path} has {len(ids)} tokens; a tuned lens needs at least 2")
    return torch.tensor(ids)


def _batches(
    model: Any, ids: Int[Tensor, "token"], steps: int, batch_size: int, length: int, seed: int
) -> Iterator[tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]]:
    """Canvases, and the positions of the loss: those that predict a masked token."""
    generator = torch.Generator().manual_seed(seed)
    length = min(length, len(ids))
    causal = attends_causally(model)
    for _ in range(steps):
        starts = torch.randint(len(ids) - length + 1, (batch_size, 1), generator=generator)
        tokens = ids[starts + torch.arange(length)]
        if causal:
            yield tokens, torch.ones_like(tokens, dtype=torch.bool)
            continue
        masked = torch.rand(tokens.shape, generator=generator, dtype=torch.float32) < torch.rand(
            batch_size, 1, generator=generator, dtype=torch.float32
        )
        if (canvas := computed_span(model, length)) is not None:
            masked[:, : canvas[0]] = False  # an encoder reads what is decided
        masked[:, -1] |= ~masked.any(-1)
        learn = masked.roll(-1, 1) if getattr(model.config, "logit_shift", False) else masked
        if learn is not masked:
            learn[:, -1] = False
            learn[:, -2] |= ~learn.any(-1)
        if not fills_masks(model.config):
            random = torch.randint(model.config.vocab_size, tokens.shape, generator=generator)
            yield torch.where(masked, random, tokens), learn
            continue
        yield tokens.masked_fill(masked, model.config.mask_token_id), learn


def _backward(
    model: Any,
    head: Unembedding,
    maps: Sequence[_Map],
    tokens: Int[Tensor, "batch position"],
    learn: Bool[Tensor, "batch position"],
) -> float:
    """Mean KL over the layers and the positions; its gradient is added up.

    There are logits, and a graph, of one layer and a few positions at a time.
    """
    last = len(maps)
    batch, position = learn.nonzero(as_tuple=True)
    first, _ = computed_span(model, tokens.shape[1]) or (0, 0)
    reader = EntryReader(SinkLayout.of(model), len(tokens), batch, position - first)
    device = input_device(model)
    with torch.no_grad(), attach_hooks(model, reader, layers=range(last + 1)):
        decoder_of(model)(input_ids=tokens.to(device), use_cache=False)
    total = torch.zeros((), device=head.device)
    for start in range(0, len(batch), head.rows_at_once):
        part = slice(start, start + head.rows_at_once)
        with torch.no_grad():
            target = head.logits(reader.streams[last][part]).float().log_softmax(-1)
        for layer, one in enumerate(maps):
            stream = _mapped(reader.streams[layer][part].to(head.device), one.weight, one.bias)
            logs = head.logits(stream).float().log_softmax(-1)
            loss = kl_divergence(target, logs).sum() / (len(batch) * last)
            loss.backward()
            total += loss.detach()
    return float(total)
