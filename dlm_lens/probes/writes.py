"""`sink_writes`: what a sink adds to the residual stream of the positions that attend to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import INDICES, ONE_SEED, checked_arguments, chosen_indices, whole
from dlm_lens.attention import HookLike, SinkLayout, attention_blocks, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.probes.unembedding import Unembedding
from dlm_lens.recording.layer_reduction import on_canvas
from dlm_lens.recording.layer_taps import LayerInputs, Tap
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Sinks
from dlm_lens.sinks.detection import SinksLike, as_sinks, check_all_heads
from dlm_lens.statistics import POSITIVE_BOUNDS, estimate_mean


@dataclass(frozen=True, eq=False)
class SinkWrites(ShowsItself):
    """W_O^h v_j of single heads and keys as distributions over tokens; sinks first, then their controls.

    Args:
        run: the run whose canvases were read.
        step: step of each entry.
        batch: row of each entry.
        layer: index in the model.
        head: index of the query head.
        position: the key; learned sink tokens come after the canvas.
        sink: whether the key is a sink; False for a control, another key of the same pattern.
        masked: whether the key is masked.
        score: received attention, on the scale of the sinks; NaN where undefined.
        norm: ||W_O^h v_j||, in the units of the residual stream, before a norm or gate that may follow attention.
        top_tokens: the tokens that softmax(W_U norm(W_O^h v_j)) promotes most.
        top_probabilities: their probabilities.
        entropy: of that distribution, in nats; ln of the vocabulary's size if it promotes nothing.
        rule: how the sinks were found.
        seed: of controls and intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
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
        """One line per entry: its place, token and score, and the norm and top tokens of W_O^h v_j.

        `step` is the number in the whole run, `position` counts from the prompt's first token, `canvas_position` on
        the canvas; a learned sink token has neither position (NA).
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
        return of_whole_run(pd.DataFrame(columns), self.run)

    def summary(self) -> pd.DataFrame:
        """Per layer, for sinks and others: mean norm and entropy of W_O^h v_j, with intervals over prompts."""
        prompt = self.run.row_prompts
        lines = []
        for layer in self.layer.unique().tolist():
            for sink in (True, False):
                group = (self.layer == layer) & (self.sink == sink)
                line: dict[str, Any] = {"layer": layer, "group": "sink" if sink else "other"}
                line["entries"] = int(group.sum())
                for name in ("norm", "entropy"):
                    values, of_prompt = getattr(self, name)[group], prompt[self.batch[group]]
                    e = estimate_mean(values, of_prompt, len(prompt), bounds=POSITIVE_BOUNDS, seed=self.seed)
                    line |= e.columns(name)
                lines.append(line)
        return pd.DataFrame(lines)


@checked_arguments(steps=INDICES, seed=ONE_SEED, limit=whole(least=1))
@torch.no_grad()
@exclusive
def sink_writes(
    model: Any,
    run: RunLike,
    sinks: SinksLike,
    *,
    hooks: Sequence[HookLike] = (),
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    limit: int = 2000,
    top: int = 5,
    seed: int = 0,
    progress: bool = False,
) -> SinkWrites:
    """The output W_O^h v_j of sinks per head, as a distribution over tokens: softmax(W_U norm(W_O^h v_j)).

    The head adds this vector to the residual stream of a query whose attention goes to the key alone (with gated
    attention: with the gate open). In layers with a norm or a gate between attention and the stream (Gemma, OLMo 2,
    DiTs) it is what the head gives to that norm or gate, whose output depends on all heads or on the noise level.
    The final norm removes its length, so that the distribution shows its direction; the length is reported as
    `norm`. With an approximate cache the values that a step does not compute are those of the step that did. Each
    sink is paired with a control, another key of the same pattern that is no sink, drawn with `seed`.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`, or a recording.
        sinks: of this run, at level "head"; with a recording also a detector, as for `find_sinks`.
        hooks: interventions under which the canvases are seen, as for `recording.rerun`.
        steps: which steps, negative from the end; None for all.
        layers: which layers, negative from the end; None for all of the sinks'.
        limit: the largest number of sinks; the strongest are kept, those with the highest scores (for rules whose
            sinks have low scores, such as `LowKeyNorm`, the lowest).
        top: how many tokens to name.
        seed: of controls and intervals.
        progress: show a progress bar.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: sinks of another run or level or of some heads, a step or layer that does not exist or has no
            sinks looked for, no sink at all, or a limit below 1.
    """
    sinks, run = as_sinks(sinks, run), as_run(run)
    chosen = chosen_indices("step", steps, run.steps, "sink_writes: ")
    stored, head = StoredRun(model, run, hooks=hooks, steps=chosen), Unembedding(model)
    if sinks.dims != ("step", "batch", "layer", "head", "key") or sinks.is_sink.shape[:2] != run.unmasked.shape[:2]:
        raise ValueError(
            f"the sinks have axes {sinks.dims} of {list(sinks.is_sink.shape)}; give those of this run, found at "
            "level 'head'"
        )
    check_all_heads(sinks.is_sink.shape[3], int(model.config.num_attention_heads), "sink_writes")
    if not 1 <= top <= head.vocabulary:
        raise ValueError(f"sink_writes: top is {top}; it must be from 1 to {head.vocabulary}")
    places = _layer_places(sinks, layers, len(attention_blocks(model)))
    entries, is_sink = _entries(run, sinks, chosen, places, limit, seed)
    vectors = torch.zeros(len(entries), int(model.config.hidden_size), dtype=torch.float32)
    reader = _Reader(model, sinks, entries, vectors)
    parts: dict[int, dict[str, Tensor]] = {}
    for step in tqdm(entries[:, 0].unique().tolist(), desc="sink writes", unit="step", disable=not progress):
        reader.run(stored, step)
        head.sigma = stored.sigma
        parts[step] = _token_measures(head, vectors[entries[:, 0] == step], top)
    back = entries[:, 0].argsort(stable=True).argsort()
    found = {name: torch.cat([part[name] for part in parts.values()])[back] for name in _MEASURES}
    step, batch, layer, _, position = entries.unbind(-1)
    canvas = run.tokens.shape[1]
    return SinkWrites(
        run=stored.run,
        **dict(zip(("step", "batch", "head", "position"), entries[:, [0, 1, 3, 4]].unbind(-1), strict=True)),
        layer=torch.tensor(sinks.layers)[layer],
        sink=is_sink,
        masked=run.masked[step, batch, position.clamp(max=canvas - 1)] & (position < canvas),
        score=sinks.scores[tuple(entries.unbind(-1))],
        norm=vectors.norm(dim=-1),
        **found,
        rule=sinks.rule,
        seed=seed,
    )


def _layer_places(sinks: Sinks, layers: Sequence[int] | None, count: int) -> list[int]:
    """The chosen layers' places among those of the sinks.

    Raises:
        ValueError: a layer that the model lacks, or that the sinks lack.
    """
    if layers is None:
        return list(range(len(sinks.layers)))
    chosen = chosen_indices("layer", layers, count, "sink_writes: ")
    for layer in chosen:
        if layer not in sinks.layers:
            raise ValueError(
                f"sink_writes: these sinks have no layer {layer}, only {', '.join(map(str, sinks.layers))}; find "
                "them with that layer, or choose one of these"
            )
    return [sinks.layers.index(layer) for layer in chosen]


def _entries(
    run: DenoisingRun, sinks: Sinks, steps: Sequence[int], layers: Sequence[int], limit: int, seed: int
) -> tuple[Int[Tensor, "entry axis"], Tensor]:
    """(step, batch, layer, head, key) of the sinks, then of the controls; layers index `sinks.layers`."""
    wanted = torch.zeros_like(sinks.is_sink)
    wanted[torch.tensor(list(steps))[:, None], :, torch.tensor(list(layers))] = True
    found = (sinks.is_sink & wanted).nonzero()
    if not len(found):
        raise ValueError(f"there is no sink by {sinks.rule} in these steps and layers")
    strength = sinks.scores[tuple(found.unbind(-1))] * (-1 if sinks.detector.low_is_sink else 1)
    order = strength.argsort(descending=True, stable=True)[:limit]
    found = found[order.sort().values]
    cell = tuple(found[:, :-1].unbind(-1))
    free = ~sinks.is_sink[cell] & ~sinks.scores[cell].isnan()
    free[:, run.tokens.shape[1] :] = False
    chance = torch.rand(free.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).masked_fill(
        ~free, -1
    )
    others = torch.cat([found[:, :-1], chance.argmax(-1, keepdim=True)], -1)[free.any(-1)]
    return torch.cat([found, others]), torch.arange(len(found) + len(others)) < len(found)


class _Reader:
    """Fills in W_O v of the entries during the forward passes."""

    def __init__(self, model: Any, sinks: Sinks, entries: Int[Tensor, "entry axis"], vectors: Tensor) -> None:
        self.entries, self.vectors, self.layers = entries, vectors, sinks.layers
        self.layout, self.step, self.rows = SinkLayout.of(model), 0, sinks.is_sink.shape[1]
        self.canvas = sinks.is_sink.shape[-1] - sinks.sinks
        wanted = sorted({sinks.layers[i] for i in entries[:, 2].unique().tolist()})
        self.tap = Tap(model, wanted, self._layer)

    def run(self, stored: StoredRun, step: int) -> None:
        """One step of the run."""
        self.step = step
        with stored.at(step):
            self.tap.open()
            try:
                stored.states(step)
            finally:
                self.tap.close()

    def _layer(self, shown: LayerInputs) -> None:
        layer = shown.inputs.layer
        here = (self.entries[:, 0] == self.step) & (self.entries[:, 2] == self.layers.index(layer))
        if not bool(here.any()):
            return
        values = on_canvas(shown.inputs, self.rows, self.layout).v
        heads, device = shown.inputs.q.shape[1], values.device
        _, batch, _, head, key = self.entries[here].to(device).unbind(-1)
        # An AR step has fewer keys than the run; learned sink tokens come last.
        key = torch.where(key < self.canvas, key, key - self.canvas + values.shape[2] - self.layout.count)
        value = values[batch, head // (heads // values.shape[1]), key].float()
        weight = self.tap.weight(layer).to(device).float()
        for one in head.unique().tolist():
            mine = head == one
            self.vectors[here.nonzero()[:, 0][mine.cpu()]] = (value[mine] @ weight[one]).cpu()


_MEASURES = ("top_tokens", "top_probabilities", "entropy")


def _token_measures(head: Unembedding, vectors: Tensor, top: int) -> dict[str, Tensor]:
    """Top tokens and entropy of every vector, a few vectors at a time."""
    parts = []
    for part in vectors.split(head.rows_at_once):
        logs = head.log_probabilities(part)
        best = logs.topk(top, dim=-1)
        entropy = torch.special.entr(logs.exp()).sum(-1)
        parts.append((best.indices.cpu(), best.values.exp().float().cpu(), entropy.float().cpu()))
    return {name: torch.cat(values) for name, values in zip(_MEASURES, zip(*parts, strict=True), strict=True)}
