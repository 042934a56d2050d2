"""Sink statistics of a fixed probe batch during training: `probe_batch`, `sink_statistics`.

Received attention and value norms are those of `dlm_lens.recording`. No rule of `dlm_lens.sinks` is applied:
rules judge received attention relative to uniform, which differs between DLMs and AR baselines. The log holds
shares of the attention instead, and the main sink is the key with the largest share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.attention import SinkLayout, decoder_of
from dlm_lens.placement import input_device
from dlm_lens.recording import ReceivedAttention, ValueNorm, record_forward
from dlm_lens.sampling.block_network import clean_context_inputs
from dlm_lens.training.bound_objective import ModelBoundLoss
from dlm_lens.training.objective import ModelMaskedLoss
from dlm_lens.training.sources import Example, Rows

LEVELS = (0.9, 0.6, 0.3)
"""Masked shares of the canvases, from the most masked to the least, as in a denoising run."""

PROBE_SEED = 20_250_102
"""Seed of the canvases' masks, the same in every run."""

MEAN_STATISTICS = ("learned_share", "main_share", "sink_norm", "other_norm", "learned_norm", "canvas_norm")


@dataclass(frozen=True, eq=False)
class ProbeBatch:
    """The same sequences at decreasing masking levels; a position masked at one level is masked at the one before.

    Args:
        canvases: token ids.
        masked: masked positions.
        visible: content (True) or padding (False).
        noise_levels: what a network is given that takes the noise level (`sigma_at` of its objective); None for
            another.
        clean: positions that do not see the others (GIDD's prompts); None where every position sees all.
    """

    canvases: Int[Tensor, "level row position"]
    masked: Bool[Tensor, "level row position"]
    visible: Bool[Tensor, "row position"]
    noise_levels: Float[Tensor, "level"] | None = None
    clean: Bool[Tensor, "row position"] | None = None

    def noise_level(self, level: int) -> dict[str, Tensor]:
        """The argument of the network beside the ids of a canvas, if it takes one."""
        return {} if self.noise_levels is None else {"sigma": self.noise_levels[level, None]}

    def clean_mask(self, model: Any, row: int) -> dict[str, Tensor]:
        """The mask of a canvas without its padding, where clean positions do not see the others."""
        if self.clean is None:
            return {}
        clean = self.clean[row, self.visible[row]][None].to(input_device(model))
        return clean_context_inputs(model, torch.ones_like(clean), clean)


@dataclass(frozen=True, eq=False)
class SinkStatistics:
    """Sink statistics of one probe; means over the axes that an array lacks.

    Args:
        learned_share: share of the canvas queries' attention that the learned sinks receive; NaN without sinks.
        main_share: share that the main sink receives: the key with most attention, on the canvas or learned.
        sink_norm: value norm of the main sink.
        other_norm: mean value norm of the other canvas positions in its state, masked or not (all, for a learned
            sink).
        learned_norm: mean value norm of the learned sinks; NaN without sinks.
        canvas_norm: mean value norm of all canvas positions.
        main: index of the main sink; learned sinks are numbered after the canvas.
        learned: whether the model has learned sinks.
    """

    learned_share: Float[Tensor, "layer"]
    main_share: Float[Tensor, "layer"]
    sink_norm: Float[Tensor, "layer"]
    other_norm: Float[Tensor, "layer"]
    learned_norm: Float[Tensor, "layer"]
    canvas_norm: Float[Tensor, "layer"]
    main: Int[Tensor, "level row layer head"]
    learned: bool

    def moved(self) -> float:
        """Share of the (row, layer, head) maps whose main sink differs between the first and the last level."""
        return float((self.main[0] != self.main[-1]).double().mean())

    def metrics(self, before: "SinkStatistics | None" = None) -> dict[str, float]:
        """Names and values for a log; with the probe `before`, also the share of maps whose main sink changed."""
        found = {
            "sink/main_share": float(self.main_share.mean()),
            "sink/moved": self.moved(),
            "sink/value_norm": float(self.sink_norm.mean()),
            "sink/value_norm_others": float(self.other_norm.mean()),
            "sink/value_norm_ratio": float((self.sink_norm / self.other_norm).mean()),
        }
        shares = self.main_share
        if self.learned:
            found["sink/learned_share"] = float(self.learned_share.mean())
            found["sink/learned_norm_ratio"] = float((self.learned_norm / self.canvas_norm).mean())
            shares = self.learned_share
        if before is not None:
            found["sink/changed"] = float((self.main != before.main).double().mean())
        for layer, share in enumerate(shares.tolist()):
            found[f"sink_share/layer_{layer:02d}"] = share
            found[f"sink_norm_ratio/layer_{layer:02d}"] = float(self.sink_norm[layer] / self.other_norm[layer])
        return found


def probe_batch(examples: Sequence[Example], objective: Any, source: Any) -> ProbeBatch:
    """Canvases of fixed sequences at `LEVELS`; for an AR baseline the text itself, once.

    Isolated documents are canvases of their own, as training shows them to the network.

    Open positions hold the mask token, or the random tokens that the objective draws. Beside the ids the network is
    given what it is given in training: the noise level at which the level's share of the time has passed, and the
    clean positions that see no noise.
    """
    rows = Rows.of(examples, source.length, source.padding)
    noise: Any = getattr(objective, "mask_token_id", None)
    if (drawn := getattr(objective, "noise_tokens", None)) is not None:
        noise = drawn(range(len(rows.tokens)), rows.tokens.shape[1], PROBE_SEED)
    if noise is None:
        return _by_document(ProbeBatch(rows.tokens[None], torch.zeros_like(rows.visible)[None], rows.visible), rows)
    generator = torch.Generator().manual_seed(PROBE_SEED)
    draws = torch.rand(rows.tokens.shape, generator=generator, dtype=torch.float32)
    masked = torch.stack([(draws < level) & rows.answer for level in LEVELS])
    batch = ProbeBatch(torch.where(masked, noise, rows.tokens), masked, rows.visible)
    if isinstance(objective, ModelBoundLoss | ModelMaskedLoss) and objective.noise_level:
        batch = replace(batch, noise_levels=objective.sigma_at(torch.tensor(LEVELS)))
    if isinstance(objective, ModelBoundLoss):
        batch = replace(batch, clean=objective.clean_of(rows))
    return _by_document(batch, rows)


def _by_document(batch: ProbeBatch, rows: Rows) -> ProbeBatch:
    """The batch with a row for every isolated document, in which the others are padding."""
    if rows.documents is None:
        return batch
    found = [
        (row, rows.visible[row] & (owners == owner))
        for row, owners in enumerate(rows.documents)
        for owner in owners[rows.visible[row]].unique_consecutive().tolist()
    ]
    index = torch.tensor([row for row, _ in found])
    return replace(
        batch,
        canvases=batch.canvases[:, index],
        masked=batch.masked[:, index],
        visible=torch.stack([visible for _, visible in found]),
        clean=None if batch.clean is None else batch.clean[index],
    )


@torch.no_grad()
def sink_statistics(model: Any, batch: ProbeBatch, forward: Callable[..., object] | None = None) -> SinkStatistics:
    """Run the probe, one canvas at a time, without forming a pattern.

    Shares are over canvas queries. The value norm is that of 2601.19657, Eq. 15, per key/value head.

    Args:
        model: any model with hook points.
        batch: from `probe_batch`.
        forward: runs the network on ids and the noise level, for weights that are sharded among processes; None
            for the decoder.
    """
    if forward is None:
        decoder = decoder_of(model)
        forward = partial(decoder, use_cache=False)
    was_training = model.training
    model.eval()
    try:
        found = [
            [_canvas(model, batch, level, row, forward) for row in range(batch.canvases.shape[1])]
            for level in range(len(batch.canvases))
        ]
    finally:
        model.train(was_training)
    parts = {
        name: torch.stack([torch.stack([one[name] for one in rows]) for rows in found])
        for name in (*MEAN_STATISTICS, "main")
    }
    means = {name: parts[name].double().nanmean((0, 1, 3)) for name in MEAN_STATISTICS}
    return SinkStatistics(**means, main=parts["main"], learned=SinkLayout.of(model).count > 0)


def _canvas(
    model: Any, batch: ProbeBatch, level: int, row: int, forward: Callable[..., object]
) -> dict[str, Tensor]:
    """Statistics [layer, head] of one canvas, without its padding."""
    content = batch.visible[row]
    ids, masked = batch.canvases[level, row, content].to(input_device(model)), batch.masked[level, row, content]
    layout = SinkLayout.of(model)
    length = len(ids) + layout.count
    with record_forward(model, [ReceivedAttention(min_viewers=1), ValueNorm()]) as recorded:
        # Registered after the recorder's hook, which counts who sees whom and takes no mask of [query, key]. Here
        # only sums over queries are read, which need no count.
        mask = batch.clean_mask(model, row)
        with decoder_of(model).register_forward_pre_hook(
            lambda _, args, given: (args, given | mask), with_kwargs=True
        ):
            forward(ids[None], **{name: value.to(ids.device) for name, value in batch.noise_level(level).items()})
    recording = recorded.recording
    share = recording.received_sums()[0, 0] / len(ids)
    norm = recording.value_norm[0, 0]
    norm = norm.repeat_interleave(share.shape[1] // norm.shape[1], 1)
    main = share.argmax(-1)
    learned = torch.arange(length) >= len(ids)
    state = torch.cat([masked.cpu(), torch.zeros(layout.count, dtype=torch.bool)])
    comparable = ((state == state[main][..., None]) | (main[..., None] >= len(ids))) & ~learned
    comparable &= torch.arange(length) != main[..., None]
    others = (norm * comparable).sum(-1) / comparable.sum(-1).clamp(min=1)
    missing = torch.full(main.shape, torch.nan)
    return {
        "main": main,
        "main_share": share.amax(-1),
        "learned_share": share[..., learned].sum(-1) if layout.count else missing,
        "sink_norm": norm.gather(-1, main[..., None]).squeeze(-1),
        "other_norm": torch.where(comparable.any(-1), others, torch.nan),
        "learned_norm": norm[..., learned].mean(-1) if layout.count else missing,
        "canvas_norm": norm[..., ~learned].mean(-1),
    }
