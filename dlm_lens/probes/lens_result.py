"""`LogitLens`: what the residual stream of every layer says at chosen positions and steps of a run."""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.probes.intervals import estimate, mean_of, summed
from dlm_lens.sampling import Denoised
from dlm_lens.sampling.prompt_positions import from_prompt
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes

PER_LAYER = ("entropy", "kl", "rank")


@dataclass(frozen=True, eq=False)
class LogitLens:
    """The lens at every entry, a position of a row at a step, in every layer; all on the CPU.

    The stream at `position` is about the token at `predicts`: the same position, or the next one where the family
    shifts its logits (Dream) and in an AR model.

    Args:
        run: whose canvases were read.
        layers: index of each layer in the model; the lens reads the stream behind it.
        step: of each entry.
        batch: its row.
        position: on the canvas; learned sink tokens stand behind it.
        predicts: the position that its prediction is about; -1 for none.
        masked: whether the position itself is masked at the step.
        asked: whether the one that it predicts is; the loss has never trained the others. In an AR run: whether it
            is the next one to be written.
        sink: whether it is a sink in any of the layers; False for controls and other positions.
        sink_layer: in which layers.
        top_tokens: the likeliest tokens.
        top_probabilities: their probabilities.
        entropy: of the whole distribution, in nats.
        kl: KL(model's own output || lens) at the same position, in nats; NaN where not asked. 0 in the last layer.
        rank: how many tokens are likelier than the one that was finally written where it predicts; -1 where not
            asked or never written.
        lens: "logit lens" or the tuned one.
        hooks: the hooks that ran, as they print themselves; () for none.
        hooked: the same entries with hooks; None without hooks.
        change: KL(this || hooked) of what the lens says, in nats, at every entry; None without hooks.
        seed: of intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: Denoised = field(repr=False)
    layers: tuple[int, ...]
    step: Int[Tensor, "entry"]
    batch: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    predicts: Int[Tensor, "entry"]
    masked: Bool[Tensor, "entry"]
    asked: Bool[Tensor, "entry"]
    sink: Bool[Tensor, "entry"]
    sink_layer: Bool[Tensor, "entry layer"]
    top_tokens: Int[Tensor, "entry layer top"]
    top_probabilities: Float[Tensor, "entry layer top"]
    entropy: Float[Tensor, "entry layer"]
    kl: Float[Tensor, "entry layer"]
    rank: Int[Tensor, "entry layer"]
    lens: str = "logit lens"
    hooks: tuple[str, ...] = ()
    hooked: "LogitLens | None" = None
    change: Float[Tensor, "entry layer"] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self, layer=len(self.layers))
        if (self.hooked is None) != (self.change is None):
            raise ValueError("LogitLens has the entries with hooks and what they change, or neither")

    def __repr__(self) -> str:
        return (
            f"LogitLens({len(self.step)} entries, {int(self.sink.sum())} of them sinks, "
            f"{int(self.asked.sum())} asked; layers {self.layers}; {self.lens}; hooks=[{', '.join(self.hooks)}])"
        )

    def table(self, layer: int | None = None) -> pd.DataFrame:
        """One line per entry and layer: where, what stands there, what was written, what the lens says.

        `position` and `predicts` count from the prompt's first token, `canvas_position` and `canvas_predicts` on
        the canvas. `sink` is of this layer; `group` is "sink" for whatever is one in any of the layers, else
        "other". A learned sink token has no position (NA).

        Args:
            layer: only this one.

        Raises:
            ValueError: a layer that was not read.
        """
        text = TokenTexts(self.run.tokenizer)
        canvas = self.run.tokens.shape[1]
        written, seen = self.written().tolist(), self.tokens().tolist()
        entries: dict[str, Any] = {name: getattr(self, name).tolist() for name in ("step", "batch", "position")}
        entries["token"] = [text(i) for i in seen]
        entries |= {"masked": self.masked.tolist(), "group": ["sink" if s else "other" for s in self.sink.tolist()]}
        entries["predicts"] = self.predicts.tolist()
        entries["written"] = ["" if i < 0 else text(i) for i in written]
        frames = []
        for place in self._places(layer):
            frame = pd.DataFrame({**entries, "layer": self.layers[place]})
            frame["sink"] = self.sink_layer[:, place].tolist()
            frame["top"] = [[text(i) for i in row] for row in self.top_tokens[:, place].tolist()]
            frame["probability"] = self.top_probabilities[:, place, 0].tolist()
            for name in PER_LAYER:
                frame[name] = getattr(self, name)[:, place].tolist()
            if self.hooked is not None and self.change is not None:
                frame["top_hooked"] = [[text(i) for i in row] for row in self.hooked.top_tokens[:, place].tolist()]
                frame["change"] = self.change[:, place].tolist()
            frames.append(frame)
        table = pd.concat(frames, ignore_index=True)
        table = from_prompt(table, self.run.padding, canvas, ("position", "predicts"))
        for name in {"predicts", "canvas_predicts", "rank"} & set(table):
            table[name] = table[name].astype("Int64").mask(table[name] < 0)
        return table

    def summary(self) -> pd.DataFrame:
        """Per layer, for sinks and others, masked and visible: means with their 95% intervals over prompts.

        `entropy` over all entries of the group; `kl` and `found`, the share whose likeliest token is the one that
        was finally written, over the asked ones; `change` with hooks. Compare sinks with others of the same class:
        the loss never trained what visible positions say, and their numbers are no predictions.
        """
        first = self.rank.eq(0).double()
        measures: dict[str, tuple[Tensor, Tensor]] = {
            "entropy": (self.entropy, torch.ones_like(self.asked)),
            "kl": (self.kl, self.asked),
            "found": (first, self.asked & (self.rank[:, 0] >= 0)),
        }
        if self.change is not None:
            measures["change"] = (self.change, torch.ones_like(self.asked))
        lines = []
        for place, layer in enumerate(self.layers):
            for sink in (True, False):
                for masked in (True, False):
                    group = (self.sink == sink) & (self.masked == masked)
                    if not bool(group.any()):
                        continue
                    line: dict[str, Any] = {"layer": layer, "group": "sink" if sink else "other"}
                    line |= {"class": "masked" if masked else "visible", "entries": int(group.sum())}
                    for name, (values, kept) in measures.items():
                        line |= self._mean(name, values[:, place], group & kept)
                    lines.append(line)
        return pd.DataFrame(lines)

    def tokens(self) -> Int[Tensor, "entry"]:
        """Id of the token that the step saw at each entry; -1 - i for learned sink token i."""
        canvas = self.run.tokens.shape[1]
        seen = self.run.canvases[self.step, self.batch, self.position.clamp(max=canvas - 1)]
        return torch.where(self.position < canvas, seen, canvas - self.position - 1)

    def written(self) -> Int[Tensor, "entry"]:
        """Id of the token that finally stands where each entry predicts; -1 where none does."""
        at = (self.batch, self.predicts.clamp(min=0))
        missing = (self.predicts < 0) | self.run.masked[-1][at]
        return self.run.tokens[at].masked_fill(missing, -1)

    def _places(self, layer: int | None) -> list[int]:
        if layer is None:
            return list(range(len(self.layers)))
        if layer not in self.layers:
            raise ValueError(f"layer {layer} was not read; there are {self.layers}")
        return [self.layers.index(layer)]

    def _mean(self, name: str, values: Tensor, kept: Tensor) -> dict[str, float]:
        pairs = torch.stack([values[kept].double(), torch.ones(int(kept.sum())).double()], -1)
        e = estimate(summed(pairs, self.batch[kept], len(self.run.tokens)), mean_of, seed=self.seed)
        return {name: e.value, f"{name}_low": e.low, f"{name}_high": e.high}
