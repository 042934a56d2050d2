"""`train_tuned_lens`: fit one affine map per layer on a text file."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from dlm_lens.attention import SinkLayout, attention_blocks, exclusive
from dlm_lens.placement import input_device
from dlm_lens.probes.reading import Head, StreamReader, reading
from dlm_lens.probes.tuned import TunedLens
from dlm_lens.recording.names import name_of
from dlm_lens.recording.requests import weights_digest

logger = logging.getLogger(__name__)


@exclusive
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
    uniform in (0, 1), as the masked-diffusion loss does, and learns where the model predicts: at the masked
    positions (one to the left where the family shifts its logits), in an AR model everywhere, unmasked. The model
    stays as it is; the last layer needs no map. Adam with a linear decay to zero.

    Args:
        model: from `dlm_lens.load`.
        text: a UTF-8 file, not one that the run under study is in.
        steps: of the optimiser.
        batch_size: windows in one step.
        length: tokens of a window; a shorter file is one window.
        learning_rate: at the beginning.
        seed: of windows and masks.
        progress: show a progress bar.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a model without a tokenizer, a file of fewer than 2 tokens, or a setting below 1.
    """
    if min(steps, batch_size, length - 1) < 1 or learning_rate <= 0:
        raise ValueError(
            f"train_tuned_lens(steps={steps}, batch_size={batch_size}, length={length}, "
            f"learning_rate={learning_rate}): steps and batch_size are at least 1, length 2, the rate above 0"
        )
    ids, head = _ids(model, Path(text)), Head(model)
    layers = tuple(range(len(attention_blocks(model)) - 1))
    width = int(model.config.hidden_size)
    weight = nn.Parameter(torch.zeros(len(layers), width, width, device=head.device))
    bias = nn.Parameter(torch.zeros(len(layers), width, device=head.device))
    lens = TunedLens(weight, bias, layers, name_of(model), weights_digest(model))
    optimizer = torch.optim.Adam([weight, bias], lr=learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    losses = []
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(False)
        for batch in tqdm(_batches(model, ids, steps, batch_size, length, seed), total=steps, disable=not progress):
            loss = _loss(model, head, lens, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            losses.append(float(loss.detach()))
    finally:
        for parameter, wanted in frozen:
            parameter.requires_grad_(wanted)
    logger.info("tuned lens of %s: mean KL over layers %.4g -> %.4g nats", lens.model, losses[0], losses[-1])
    training = {"text": Path(text).name, "tokens": len(ids), "steps": steps, "batch_size": batch_size}
    training |= {"length": length, "learning_rate": learning_rate, "seed": seed, "last_loss": losses[-1]}
    return TunedLens(weight.detach().cpu(), bias.detach().cpu(), layers, lens.model, lens.digest, training)


def _ids(model: Any, path: Path) -> Int[Tensor, "token"]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; a tuned lens is trained on a text file")
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer, which reads the text; set model.tokenizer")
    ids = model.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise ValueError(f"{path} has {len(ids)} tokens; a tuned lens needs at least 2")
    return torch.tensor(ids)


def _batches(
    model: Any, ids: Int[Tensor, "token"], steps: int, batch_size: int, length: int, seed: int
) -> Iterator[tuple[Int[Tensor, "batch position"], Bool[Tensor, "batch position"]]]:
    """Canvases, and where to learn: the positions whose state predicts a masked token."""
    generator = torch.Generator().manual_seed(seed)
    length = min(length, len(ids))
    causal = bool(getattr(model.config, "is_causal", True))
    for _ in range(steps):
        starts = torch.randint(len(ids) - length + 1, (batch_size, 1), generator=generator)
        tokens = ids[starts + torch.arange(length)]
        if causal:
            yield tokens, torch.ones_like(tokens, dtype=torch.bool)
            continue
        masked = torch.rand(tokens.shape, generator=generator) < torch.rand(batch_size, 1, generator=generator)
        masked[:, -1] |= ~masked.any(-1)
        learn = masked.roll(-1, 1) if getattr(model.config, "logit_shift", False) else masked
        if learn is not masked:
            learn[:, -1] = False
            learn[:, -2] |= ~learn.any(-1)
        yield tokens.masked_fill(masked, model.config.mask_token_id), learn


def _loss(
    model: Any,
    head: Head,
    lens: TunedLens,
    tokens: Int[Tensor, "batch position"],
    learn: Bool[Tensor, "batch position"],
) -> Float[Tensor, ""]:
    """Mean KL over the layers and the positions, a few positions at a time."""
    last = len(lens.layers)
    batch, position = learn.nonzero(as_tuple=True)
    reader = StreamReader(SinkLayout.of(model), len(tokens), batch, position)
    device = input_device(model)
    with torch.no_grad(), reading(model, reader, range(last + 1)):
        model.get_decoder()(input_ids=tokens.to(device), use_cache=False)
    total = torch.zeros((), device=head.device)
    with torch.no_grad():
        target = head.logits(reader.streams[last]).float().log_softmax(-1)
    for layer in lens.layers:
        logs = head.logits(lens.translate(layer, reader.streams[layer].to(head.device))).float().log_softmax(-1)
        total = total + (target.exp() * (target - logs)).sum()
    return total / (len(batch) * max(1, last))
