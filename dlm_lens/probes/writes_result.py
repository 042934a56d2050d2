"""`SinkWrites`: what sinks put into the residual stream, as tokens."""

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


@dataclass(frozen=True, eq=False)
class SinkWrites:
    """W_O^h v_j of single heads and keys, read as tokens; sinks first, then their controls.

    Args:
        run: whose canvases were read.
        step: of each entry.
        batch: its row.
        layer: index in the model.
        head: of the query heads.
        position: the key; learned sink tokens stand behind the canvas.
        sink: False for a control: another key of the same pattern.
        masked: whether the key is masked.
        score: received attention as the sinks had it; NaN where undefined.
        norm: ||W_O^h v_j||, in the units of the residual stream.
        top_tokens: the tokens that softmax(W_U norm(W_O^h v_j)) promotes most.
        top_probabilities: their probabilities.
        entropy: of that distribution, in nats; ln of the vocabulary's size if it promotes nothing.
        rule: how the sinks were found.
        seed: of controls and intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: Denoised = field(repr=False)
    step: Int[Tensor, "entry"]
    batch: Int[Tensor, "entry"]
    layer: Int[Tensor, "entry"]
    head: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    sink: Bool[Tensor, "entry"]
    masked: Bool[Tensor, "entry"]
    score: Float[Tensor, "entry"]
    norm: Float[Tensor, "entry"]
    top_tokens: Int[Tensor, "entry top"]
    top_probabilities: Float[Tensor, "entry top"]
    entropy: Float[Tensor, "entry"]
    rule: str
    seed: int = 0

    def __post_init__(self) -> None:
        check_shapes(self)

    def __repr__(self) -> str:
        return f"SinkWrites({int(self.sink.sum())} sinks of {len(self.step)} entries; by {self.rule})"

    def table(self) -> pd.DataFrame:
        """One line per entry: where, which token, its score, the norm and the tokens of what it writes.

        `position` counts from the prompt's first token, `canvas_position` on the canvas; a learned sink token has
        neither (NA).
        """
        text, canvas = TokenTexts(self.run.tokenizer), self.run.tokens.shape[1]
        names = ("step", "batch", "layer", "head", "position")
        columns: dict[str, Any] = {name: getattr(self, name).tolist() for name in names}
        seen = self.run.canvases[self.step, self.batch, self.position.clamp(max=canvas - 1)]
        seen = torch.where(self.position < canvas, seen, canvas - self.position - 1)
        columns["token"] = [text(i) for i in seen.tolist()]
        columns |= {"masked": self.masked.tolist(), "group": ["sink" if s else "other" for s in self.sink.tolist()]}
        columns |= {name: getattr(self, name).tolist() for name in ("score", "norm", "entropy")}
        columns["top"] = [[text(i) for i in row] for row in self.top_tokens.tolist()]
        table = pd.DataFrame(columns)
        return from_prompt(table, self.run.padding, canvas)

    def summary(self) -> pd.DataFrame:
        """Per layer, sinks and others: mean norm and entropy of what they write, with intervals over prompts."""
        lines = []
        for layer in self.layer.unique().tolist():
            for sink in (True, False):
                group = (self.layer == layer) & (self.sink == sink)
                line: dict[str, Any] = {"layer": layer, "group": "sink" if sink else "other"}
                line["entries"] = int(group.sum())
                for name in ("norm", "entropy"):
                    values = getattr(self, name)[group].double()
                    pairs = torch.stack([values, torch.ones_like(values)], -1)
                    e = estimate(summed(pairs, self.batch[group], len(self.run.tokens)), mean_of, seed=self.seed)
                    line |= {name: e.value, f"{name}_low": e.low, f"{name}_high": e.high}
                lines.append(line)
        return pd.DataFrame(lines)
