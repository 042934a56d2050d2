"""`Replay`: what hooks change at every step while the canvases stay as they were."""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.sampling import Denoised
from dlm_lens.sampling.prompt_positions import from_prompt
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, Level, Received, find_sinks
from dlm_lens.sinks.received import COLUMN_SUM

PER_POSITION = ("kl", "confidence", "confidence_hooked", "rank", "rank_hooked", "token", "token_hooked")


@dataclass(frozen=True, eq=False)
class Replay:
    """A run's canvases with and without hooks, step by step; all on the CPU.

    What is per position is about the positions that a step's logits predict, `asked`: every masked one, in an AR
    run the next one. Elsewhere numbers are NaN and ranks and tokens -1.

    Args:
        run: whose canvases these are.
        hooks: the hooks, as they print themselves.
        asked: which positions the step's logits predict.
        kl: KL(plain || hooked) = sum_v p_v (ln p_v - ln q_v) of the next token at the position, in nats.
        confidence: largest probability of a token, without hooks ([MASK] not among them).
        confidence_hooked: the same with hooks.
        rank: how many tokens are likelier than the one that was finally written, without hooks; 0 for the first.
        rank_hooked: the same with hooks.
        token: the likeliest token, without hooks.
        token_hooked: the same with hooks.
        layers: indices of the layers watched.
        residual_change: ||h' - h|| / ||h|| of what a layer leaves, with hooks h' and without h, mean over the asked
            positions (AR: of the position that predicts); NaN without any.
        residual_cosine: cosine of h' and h, likewise.
        received: received attention without hooks; None if it was not asked for.
        received_hooked: with hooks, divided by the same e_j, so that both are on one scale; a hidden key has 0.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: Denoised = field(repr=False)
    hooks: tuple[str, ...]
    asked: Bool[Tensor, "step batch position"]
    kl: Float[Tensor, "step batch position"]
    confidence: Float[Tensor, "step batch position"]
    confidence_hooked: Float[Tensor, "step batch position"]
    rank: Int[Tensor, "step batch position"]
    rank_hooked: Int[Tensor, "step batch position"]
    token: Int[Tensor, "step batch position"]
    token_hooked: Int[Tensor, "step batch position"]
    layers: tuple[int, ...]
    residual_change: Float[Tensor, "step batch layer"]
    residual_cosine: Float[Tensor, "step batch layer"]
    received: Received | None = None
    received_hooked: Received | None = None

    def __post_init__(self) -> None:
        step, batch, position = self.run.selected.shape
        check_shapes(self, step=step, batch=batch, position=position, layer=len(self.layers))
        if (self.received is None) != (self.received_hooked is None):
            raise ValueError("Replay has received attention with and without hooks, or neither")

    def __repr__(self) -> str:
        steps, batch, positions = self.asked.shape
        kl = float(self.kl.nanmean()) if bool(self.asked.any()) else 0.0
        return (
            f"Replay(steps={steps}, batch={batch}, positions={positions}; mean KL {kl:.4g} nats, "
            f"{float(self.flipped[self.asked].float().mean()):.1%} of the predictions flipped; "
            f"hooks=[{', '.join(self.hooks)}])"
        )

    @property
    def flipped(self) -> Bool[Tensor, "step batch position"]:
        """Where another token is the likeliest one with hooks."""
        return (self.token != self.token_hooked) & self.asked

    @property
    def confidence_change(self) -> Float[Tensor, "step batch position"]:
        """With hooks minus without."""
        return self.confidence_hooked - self.confidence

    @property
    def rank_change(self) -> Int[Tensor, "step batch position"]:
        """Places that the finally written token falls by; 0 where nothing is asked or was written."""
        return self.rank_hooked - self.rank

    @property
    def kl_per_step(self) -> Float[Tensor, "step batch"]:
        """Mean KL over the positions asked at a step; NaN without any."""
        return self.kl.nanmean(-1)

    @property
    def repair(self) -> Float[Tensor, "step batch"]:
        """1 - change behind the last watched layer / largest change behind any: 1 if later layers undo it all.

        0 where the last layer has the largest change; NaN where nothing changed or nothing is asked.
        """
        peak = self.residual_change.amax(-1)
        return (1 - self.residual_change[..., -1] / peak).masked_fill(peak == 0, torch.nan)

    def table(self) -> pd.DataFrame:
        """One line per step and position asked, with its numbers and what was finally written there.

        `position` counts from the prompt's first token, `canvas_position` on the canvas.
        """
        where = self.asked.nonzero(as_tuple=True)
        text = TokenTexts(self.run.tokenizer)
        columns: dict[str, Any] = dict(zip(("step", "batch", "position"), (i.tolist() for i in where), strict=True))
        columns["written"] = [text(int(i)) for i in self.run.tokens[where[1], where[2]]]
        columns["selected"] = self.run.selected[where].tolist()
        for name in PER_POSITION:
            found = getattr(self, name)[where].tolist()
            columns[name] = [text(i) for i in found] if name.startswith("token") else found
        columns["flipped"] = self.flipped[where].tolist()
        return from_prompt(pd.DataFrame(columns), self.run.padding, self.run.tokens.shape[1])

    def layer_table(self) -> pd.DataFrame:
        """One line per layer: change and cosine of the residual stream, mean over steps and rows."""
        return pd.DataFrame(
            {
                "layer": self.layers,
                "residual_change": self.residual_change.nanmean((0, 1)).tolist(),
                "residual_cosine": self.residual_cosine.nanmean((0, 1)).tolist(),
            }
        )

    def gained(self, top: int | None = 10, level: Level = "model") -> pd.DataFrame:
        """The positions that gained most attention under the hooks, mean over the steps in which they are defined.

        `plain` and `hooked` are relative to uniform (r_j / e_j with the e_j of the pass without hooks), `gain` is
        their difference; a negative `top` asks for those that lost most. Each line is a position of one row and, by
        `level`, of one layer and head, or of the mean pattern.

        Raises:
            ValueError: attention was not asked for, or an unknown level.
        """
        one, two = (each.at_level(level) for each in self._pair())
        keys = one.values.shape[-1]
        plain, hooked = (each.values.nanmean(0) for each in (one, two))
        where = plain.isfinite().nonzero(as_tuple=True)
        columns: dict[str, Any] = {"batch": where[0].tolist()}
        if level != "model":
            columns["layer"] = [self.layers[i] for i in where[1].tolist()]
        if level == "head":
            columns["head"] = where[2].tolist()
        columns["position"] = where[3].tolist()
        if one.final_tokens is not None:
            text = TokenTexts(self.run.tokenizer)
            columns["token"] = [text(int(i)) for i in one.final_tokens[where[0], where[3]]]
        columns["plain"], columns["hooked"] = plain[where].tolist(), hooked[where].tolist()
        table = pd.DataFrame(columns)
        table["gain"] = table["hooked"] - table["plain"]
        table = from_prompt(table, self.run.padding, keys - one.sinks)
        losing = top is not None and top < 0
        table = table.sort_values("gain", ascending=losing, kind="stable", ignore_index=True)
        return table if top is None else table.head(abs(top))

    def moved_mass(self) -> Float[Tensor, "step batch layer head"]:
        """Attention that changed its key, as a share of all: half of sum_j |r'_j - r_j| / sum_j r_j, 0 to 1.

        With hooks behind the softmax, which take attention away without giving it to others, half of what is lost
        counts.

        Raises:
            ValueError: attention was not asked for.
        """
        one, two = (each.on_scale(COLUMN_SUM).values for each in self._pair())
        return (two - one).abs().nansum(-1) / 2 / one.nansum(-1).clamp(min=1e-30)

    def new_sinks(self, detector: Detector, level: Level = "head") -> Bool[Tensor, "step batch layer head key"]:
        """Keys that the detector calls a sink with hooks and not without, at every step.

        The keys are the canvas's and, behind them, the sink tokens; `level` merges heads (and layers) to size 1.

        Raises:
            ValueError: attention was not asked for, or an unknown level.
        """
        one, two = (_full(each, detector, level) for each in self._pair())
        return two & ~one

    def _pair(self) -> tuple[Received, Received]:
        if self.received is None or self.received_hooked is None:
            raise ValueError("this replay has no attention; call replay(..., attention=True)")
        return self.received, self.received_hooked


def _full(received: Received, detector: Detector, level: Level) -> Bool[Tensor, "step batch layer head key"]:
    """Sinks with all five axes."""
    found = find_sinks(received, detector, level=level).is_sink
    return found.reshape(received.at_level(level).values.shape)
