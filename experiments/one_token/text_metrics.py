"""Metrics of a network trained on a text: validation loss per token and per byte, and sinks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.experiments.one_token.text_corpus import LENGTH, encoded, read_text
from dlm_lens.experiments.one_token.text_network import diffusion

STEPS = 16
"""Canvases of the sink statistics, from all positions masked to one in sixteen."""

MASKS = 4
"""Masks per row of the validation loss."""

VERSION = 1
"""Version of the stored metrics; those of another version are computed again."""


def requested(settings: Mapping[str, Any]) -> list[Any]:
    """The values besides the network that the metrics depend on."""
    return ["text", VERSION, EPS, MASKS, STEPS, settings["watched"], settings["validation"]]


def measure(checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics of one trained network, as JSON values."""
    import dlm_lens as dl
    from dlm_lens.training.checkpoints import read_run

    model = dl.load(checkpoint)
    text = encoded(settings["text"])
    rows = text.held_out(settings["validation"])
    loss = validation_loss(model, rows)
    return {
        "loss": loss,
        "loss_per_byte": per_byte(loss, rows.numel(), text.bytes_of(rows)),
        "tokens": rows.numel(),
        "bytes": text.bytes_of(rows),
        **sink_numbers(record_canvases(model, text.held_out(settings["watched"]))),
        "text": read_text(settings["text"]).digest,
        "tokenizer": text.digest,
        "training_seconds": round(read_run(checkpoint)["seconds"], 1),
    }


def validation_loss(model: Any, rows: Int[Tensor, "row position"], batch_size: int = 32) -> float:
    """The objective's loss on rows of text, in nats per token; the same masks for every network."""
    from dlm_lens.training.losses import evaluation_loss
    from dlm_lens.training.sources import Example
    from dlm_lens.training.trainer import EVALUATION_SEED

    return evaluation_loss(
        model,
        [Example(row) for row in rows],
        diffusion().for_model(model, MASKS),
        length=LENGTH,
        samples=MASKS,
        batch_size=batch_size,
        seed=EVALUATION_SEED,
    )


def per_byte(loss: float, tokens: int, size: int) -> float:
    """Nats per token as nats per byte of `size` bytes, which do not depend on the tokenizer."""
    return loss * tokens / size


def record_canvases(model: Any, rows: Int[Tensor, "row position"]) -> Any:
    """A Recording of canvases of the text, with fewer masks from step to step as in denoising."""
    import dlm_lens as dl
    from dlm_lens.placement import input_device

    with torch.inference_mode(), dl.record_forward(model, [dl.ReceivedAttention(), dl.ValueNorm()]) as recorded:
        for canvas in canvases(rows, model.config.mask_token_id):
            model(input_ids=canvas.to(input_device(model)), use_cache=False)
    return recorded.recording


def canvases(
    rows: Int[Tensor, "row position"], mask: int, steps: int = STEPS
) -> Iterator[Int[Tensor, "row position"]]:
    """Rows with ceil((1 - s/T) S) of S positions masked at step s of T, in a random order per row."""
    orders = [np.random.default_rng((0, row)).permutation(rows.shape[1]) for row in range(len(rows))]
    rank = torch.from_numpy(np.stack(orders)).argsort(-1)
    for step in range(steps):
        count = -(-(steps - step) * rows.shape[1] // steps)
        yield rows.masked_fill(rank < count, mask)


EPS = 3.0
"""Of Eq. 3 of 2510.15731: a sink receives this much more than the mean of the others, relative to uniform."""


def sink_numbers(recording: Any) -> dict[str, Any]:
    """Value norms and shares of sinks, learned and found, over all steps of a Recording.

    Returns:
        moved, share of (prompt, layer, head) whose key with most attention is another at the last step than at the
        first (canvas and learned sinks), and moved_prompts, the same per prompt; found, sinks by Eq. 3 per pattern;
        found_norm and found_other, mean value norm of those sinks and of others in the same state (masked or not);
        with learned sinks also norm, other and share, lists over layers.
    """
    import dlm_lens as dl
    from dlm_lens.probes import value_norms

    found = dl.find_sinks(recording, dl.AboveMean(EPS))
    each = moved(found.scores)
    result: dict[str, Any] = {"moved": sum(each) / len(each), "moved_prompts": [round(value, 4) for value in each]}
    result |= {"found": float(found.is_sink.sum(-1).float().mean())}
    result |= {"found_norm": None, "found_other": None, "found_percentile": None}
    if bool(found.is_sink.any()):
        norms = value_norms(recording, found, match="masked")
        if len(norms.sink):
            result["found_norm"], result["found_other"] = float(norms.sink.mean()), float(norms.other.mean())
            result["found_percentile"] = float(norms.percentile.mean())
    if recording.sinks:
        profile = value_norms(recording, "learned").profile
        for name, column in (("norm", "norm_sink"), ("other", "norm_other"), ("share", "share")):
            result[name] = [round(value, 5) for value in profile[column]]
    return result


def moved(scores: Any) -> list[float]:
    """Per prompt, the share of (layer, head) whose largest key differs between the first and the last step."""
    main = scores.nan_to_num(nan=-1.0).argmax(-1)
    shares: list[float] = (main[0] != main[-1]).double().flatten(1).mean(-1).tolist()
    return shares
