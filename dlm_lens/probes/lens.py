"""`logit_lens`: the residual stream of every layer as a distribution over tokens, at any step and position."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import INDICES, ONE_SEED, Rule, checked_arguments, chosen_indices, instance, place_of_layer
from dlm_lens.attention import HookLike, SinkLayout, attach_hooks, attention_blocks, checked, exclusive
from dlm_lens.display import Preview, ShowsItself
from dlm_lens.printable import shown
from dlm_lens.probes.lens_positions import GivenLensPositions, LensPositions, choose_positions
from dlm_lens.probes.predictions import result_of
from dlm_lens.probes.residual_reader import EntryReader
from dlm_lens.probes.tuned_lens import TunedLens
from dlm_lens.probes.unembedding import Unembedding, lens_measures
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import on_canvases
from dlm_lens.sampling.prompt_positions import of_whole_run
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, Sinks
from dlm_lens.sinks.detection import as_sinks
from dlm_lens.statistics import POSITIVE_BOUNDS, SHARE_BOUNDS, estimate_mean

PER_LAYER = ("entropy", "kl", "rank")


def _positions(value: Any) -> bool:
    flags = isinstance(value, Tensor) and value.dtype == torch.bool
    return flags or isinstance(value, str | Sinks) or INDICES.holds(value)


POSITIONS = Rule(
    "Sinks, a class such as 'masked', a list of whole numbers, a tensor of truth values, or None for all",
    _positions,
)


@dataclass(frozen=True, eq=False)
class LogitLens(ShowsItself):
    """The logit lens of every entry in every layer; an entry is a position of a row at a step. All on the CPU.

    The state at `position` predicts the token at `predicts`: the same position, or the next one in an AR model and
    where the family shifts its logits (Dream).

    Args:
        run: the run whose canvases were read.
        layers: index of each layer in the model; the lens reads the layer's output.
        step: step of each entry.
        batch: row of each entry.
        position: canvas position of each entry; learned sink tokens come after the canvas.
        predicts: the position whose token it predicts; -1 for none.
        masked: whether `position` is masked (open) at the step.
        predicted: whether the training loss covers `predicts`: where it is masked at the step, and in a model of
            uniform noise in the whole answer. In an AR run: whether `predicts` is the next token.
        sink: whether the entry is a sink in any of the layers; False for controls and other positions.
        sink_layer: the layers in which it is a sink.
        top_tokens: the likeliest tokens.
        top_probabilities: their probabilities.
        entropy: of the whole distribution, in nats.
        kl: KL(model's output || lens) at the same position, in nats; NaN where not predicted. 0 in the last layer.
        rank: how many tokens are likelier than the one that was finally decoded at `predicts`. [MASK], which
            is never decoded, does not count, also where it is the first of `top_tokens`; -1 where not predicted or
            never decoded.
        lens: "logit lens", or the repr of the tuned lens.
        hooks: reprs of the hooks that ran; () for none.
        hooked: the same entries with hooks; None without hooks.
        change: KL(this || hooked) of the lens's distributions, in nats, at every entry; None without hooks.
        seed: of the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    layers: tuple[int, ...]
    step: Int[Tensor, "entry"]
    batch: Int[Tensor, "entry"]
    position: Int[Tensor, "entry"]
    predicts: Int[Tensor, "entry"]
    masked: Bool[Tensor, "entry"]
    predicted: Bool[Tensor, "entry"]
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
            f"LogitLens({len(self.step)} entries, {int(self.predicted.sum())} predicted; layers {self.layers}; "
            f"{self.lens}; "
            f"hooks=[{', '.join(self.hooks)}])"
        )

    def _preview(self) -> Preview:
        return Preview(table=self.summary(), note=".summary() per layer; every reading: .table()")

    def table(self, layer: int | None = None) -> pd.DataFrame:
        """One line per entry and layer: its place and token, the token that was decoded, and the lens's measures.

        `step` is the number in the whole run, `position` and `predicts` count from the prompt's first token,
        `canvas_position` and `canvas_predicts` on the canvas. `sink` is of this layer; `group` is "sink" for an
        entry that is a sink in any of the layers, else "other". A learned sink token has no position (NA).

        Args:
            layer: the only layer to list; None for all.

        Raises:
            ValueError: the layer was not read.
        """
        text = TokenTexts(self.run.tokenizer)
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
        table = of_whole_run(pd.concat(frames, ignore_index=True), self.run, ("position", "predicts"))
        for name in {"predicts", "canvas_predicts", "rank"} & set(table):
            table[name] = table[name].astype("Int64").mask(table[name] < 0)
        return table

    def summary(self) -> pd.DataFrame:
        """Per layer, for sinks and others, masked and visible positions: means with 95% intervals over prompts.

        `entropy` is over all entries of the group; `kl` and `found`, the share whose likeliest token is the one
        that was finally decoded, are over the predicted ones; `change` exists with hooks. Compare sinks with
        others of the same class: the training loss does not cover visible positions, so that their outputs are
        no predictions.
        """
        first = self.rank.eq(0).double()
        measures: dict[str, tuple[Tensor, Tensor]] = {
            "entropy": (self.entropy, torch.ones_like(self.predicted)),
            "kl": (self.kl, self.predicted),
            "found": (first, self.predicted & (self.rank[:, 0] >= 0)),
        }
        if self.change is not None:
            measures["change"] = (self.change, torch.ones_like(self.predicted))
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
        """Id of the token at each entry in the step's input; -1 - i for learned sink token i."""
        canvas = self.run.tokens.shape[1]
        seen = self.run.canvases[self.step, self.batch, self.position.clamp(max=canvas - 1)]
        return torch.where(self.position < canvas, seen, canvas - self.position - 1)

    def written(self) -> Int[Tensor, "entry"]:
        """Id of the final token at `predicts`; -1 where there is none."""
        at = (self.step, self.batch, self.predicts.clamp(min=0))
        return on_canvases(self.run, result_of(self.run), -1)[at].masked_fill(self.predicts < 0, -1)

    def _places(self, layer: int | None) -> list[int]:
        return list(range(len(self.layers))) if layer is None else [place_of_layer(layer, self.layers)]

    def _mean(self, name: str, values: Tensor, kept: Tensor) -> dict[str, float]:
        prompt = self.run.row_prompts
        bounds = SHARE_BOUNDS if name == "found" else POSITIVE_BOUNDS
        of_prompt = prompt[self.batch[kept]]
        return estimate_mean(values[kept], of_prompt, len(prompt), bounds=bounds, seed=self.seed).columns(name)


@checked_arguments(
    steps=None, layers=None, seed=ONE_SEED, tuned=instance(TunedLens, "a TunedLens of train_tuned_lens, or None")
)
@torch.no_grad()
@exclusive
def logit_lens(
    model: Any,
    run: RunLike,
    positions: GivenLensPositions | Detector = None,
    *,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    top: int = 5,
    hooks: Sequence[HookLike] = (),
    tuned: TunedLens | None = None,
    controls: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> LogitLens:
    """Read the residual stream of every layer as a distribution over tokens, at chosen positions of a run.

    softmax(W_U norm(h_l)) with the network's final norm ("logit lens", nostalgebraist 2020; named in 2510.15731,
    section 7, to read sinks at future positions). It also gives the entropy, the KL from the network's output and
    the rank of the token that was finally decoded; the last two only where the token is still masked, because the
    training loss does not cover visible positions. Of a guided run the conditional half is read; of a step with an
    approximate cache the positions that it computes.

    Memory: the states of the entries of one step in the chosen layers, and a few rows of logits at a time.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        positions: `Sinks` of this run: the sinks of every step in any layer and head (with many heads, find them at
            level "layer" or "model"), each paired with a control of its class; with a recording in place of the
            run also a detector, which finds them in each head. Or canvas positions, negative from
            the end, in every row the same (a padded row begins at `run.padding`); learned sink tokens come after
            the canvas. Or a boolean mask [batch, position], or [step, batch, position] over all steps of the run
            (`run.unmasked`: what each step decides). Or a class of positions at each step, as hooks have them:
            "masked" (or "open"), "visible" (or "decided"), "prompt", "answer". None for all.
        steps: which steps, negative from the end; None for all.
        layers: which layers, negative from the end; None for all.
        top: how many tokens to name.
        hooks: interventions; the pass runs without and with them, and `change` compares the two.
        tuned: a tuned lens of this model instead of the plain one.
        controls: also read as many positions that are no sinks, of the same step, row and class (masked, visible),
            drawn with `seed`.
        seed: of controls and intervals.
        progress: show a progress bar.

    Returns:
        A `LogitLens`, with p the lens's distribution of an entry (a position of a row at a step) in a layer and m
        that of the network's output there: `entropy`, -sum_v p_v ln p_v, and `kl`, KL(m || p) =
        sum_v m_v (ln m_v - ln p_v), both [entry, layer] in nats; `rank` [entry, layer]; `top_tokens` and
        `top_probabilities` [entry, layer, top]. With hooks `hooked`, the same, and `change`, KL(p || p with hooks)
        [entry, layer] in nats.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a step, layer, position or class that is not there, a mask of another shape, sinks of another
            run, or another model's lens.
    """
    if isinstance(positions, Detector):
        positions = as_sinks(positions, run, "positions")
    run = as_run(run)
    for name, value in (("positions", positions), ("steps", steps), ("layers", layers)):
        if isinstance(value, int):
            raise ValueError(
                f"{name} is {shown(value)}; give a list, such as {name}=[{shown(value)}], or None for all"
            )
        (POSITIONS if name == "positions" else INDICES).check(name, [0] if value is None else value)
    hooks = checked(hooks)
    stored, head = StoredRun(model, run, warn=not len(hooks)), Unembedding(model)
    chosen = chosen_indices("layer", layers, len(attention_blocks(model)))
    wanted = list(chosen_indices("step", steps, run.steps))
    hooked = StoredRun(model, run, hooks=hooks, steps=wanted, carried="keys") if len(hooks) else None
    if not 1 <= top <= head.vocabulary:
        raise ValueError(f"top is {top}; it must be from 1 to {head.vocabulary}")
    if tuned is not None:
        tuned.check(model)
    learned = SinkLayout.of(model).count
    places = choose_positions(stored, positions, wanted, chosen, learned, controls, seed)
    entries = _Entries(stored, hooked, head, places, chosen, top, tuned)
    found = [entries.at(step) for step in tqdm(wanted, desc="logit lens", unit="step", disable=not progress)]
    joined = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    about: dict[str, Any] = {
        "run": stored.run,
        "layers": chosen,
        "lens": "logit lens" if tuned is None else repr(tuned),
        "seed": seed,
    }
    plain: dict[str, Any] = {name: joined[name] for name in joined if not name.startswith("hooked_")}
    if hooked is None:
        return LogitLens(**about, **plain)
    own: dict[str, Any] = {name: joined[f"hooked_{name}"] for name in plain if f"hooked_{name}" in joined}
    kept: dict[str, Any] = {name: value for name, value in plain.items() if name != "change"}
    names = tuple(map(repr, hooks))
    return LogitLens(**about, **plain, hooks=names, hooked=LogitLens(**about, **kept | own, hooks=names))


class _Entries:
    """The entries of a run, step by step."""

    def __init__(
        self,
        stored: StoredRun,
        hooked: StoredRun | None,
        head: Unembedding,
        places: LensPositions,
        layers: tuple[int, ...],
        top: int,
        tuned: TunedLens | None,
    ) -> None:
        self.stored, self.head, self.places, self.layers, self.top = stored, head, places, layers, top
        self.hooked, self.results = hooked, on_canvases(stored.run, result_of(stored.run), -1)
        self.layout, self.last = SinkLayout.of(stored.model), len(attention_blocks(stored.model)) - 1
        self.translate = (lambda layer, stream: stream) if tuned is None else tuned.translate

    def at(self, step: int) -> dict[str, Tensor]:
        """All fields of a step's entries; those with hooks are called hooked_..., their KL is `change`."""
        place = self._places(step)
        written, predicted = place["written"], place["predicted"]
        runs = [self.stored] if self.hooked is None else [self.stored, self.hooked]
        passes = [self._streams(run, step, place) for run in runs]
        self.head.sigma = self.stored.sigma
        found = lens_measures(self.head, passes, self.layers, written, predicted, self.top, self.translate)
        return {name: value for name, value in place.items() if name != "written"} | found

    def _places(self, step: int) -> dict[str, Tensor]:
        run, places = self.stored.run, self.places
        canvas = run.tokens.shape[1]
        # An AR step has the prefix only, with blocks a row ends with its own, with a cache a step has its span.
        seen = self.stored.computes(step)[places.batch, places.position.clamp(max=canvas - 1)]
        here = (places.step == step) & (seen | (places.position >= canvas))
        here &= run.running[step, places.batch]
        names = ("step", "batch", "position", "sink", "sink_layer")
        place = {name: getattr(places, name)[here] for name in names}
        batch, position = place["batch"], place["position"]
        predicts = position + int(run.predicts_next(step, self.stored.model.config))
        predicts = predicts.masked_fill((position >= canvas) | (predicts >= canvas), -1)
        masked = run.masked[step, batch, position.clamp(max=canvas - 1)] & (position < canvas)
        # Under uniform noise the loss covers the whole answer, open or decided.
        trained = run.answer.expand_as(run.masked) if run.uniform_noise else run.masked
        predicted = trained[step, batch, predicts.clamp(min=0)] & (predicts >= 0)
        reach = self.stored.sampler.reach(run.masked[step].to(self.stored.device), self.stored.plan(step))
        predicted &= reach.cpu()[batch, predicts.clamp(min=0)]
        written = self.results[step, batch, predicts.clamp(min=0)].masked_fill(predicts < 0, -1)
        return place | {"predicts": predicts, "masked": masked, "predicted": predicted, "written": written}

    def _streams(self, stored: StoredRun, step: int, place: dict[str, Tensor]) -> list[Tensor]:
        """The output of each layer, and of the last one."""
        canvas, length = self.stored.run.tokens.shape[1], self.stored.length(step)
        position = torch.where(place["position"] < canvas, place["position"], place["position"] - canvas + length)
        position = position - stored.first(step)
        reader = EntryReader(self.layout, len(self.stored.run.tokens), place["batch"], position)
        layers = sorted({*self.layers, self.last})
        with stored.at(step), attach_hooks(stored.model, reader, layers=layers):
            stored.states(step)
        return [reader.streams[layer] for layer in layers]
