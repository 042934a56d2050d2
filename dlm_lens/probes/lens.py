"""`logit_lens`: what the network would say if it ended behind a layer, at any step and position."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.arguments import INDICES, ONE_SEED, checked_arguments, instance, shown
from dlm_lens.attention import Hook, SinkLayout, attention_blocks, exclusive
from dlm_lens.probes.lens_result import LogitLens
from dlm_lens.probes.places import Places, places_of
from dlm_lens.probes.reading import Head, StreamReader, change, numbers, reading
from dlm_lens.probes.tuned import TunedLens
from dlm_lens.sampling import Denoised, HookRunner, StoredRun
from dlm_lens.sinks import Sinks


@checked_arguments(
    steps=None, layers=None, seed=ONE_SEED, tuned=instance(TunedLens, "a TunedLens of train_tuned_lens, or None")
)
@torch.no_grad()
@exclusive
def logit_lens(
    model: Any,
    run: Denoised,
    positions: Sinks | Sequence[int] | Bool[Tensor, "batch position"] | None = None,
    *,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    top: int = 5,
    hooks: Sequence[Hook] = (),
    tuned: TunedLens | None = None,
    controls: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> LogitLens:
    """Read the residual stream of every layer as a distribution over tokens, at chosen positions of a run.

    softmax(W_U norm(h_l)) with the network's final norm ("logit lens", nostalgebraist 2020; named in 2510.15731,
    section 7, for what sinks at future positions hold). Beside it: entropy, KL from the network's own output, and
    the rank of the token that was finally written, the latter two only where the token is still masked, since the
    loss never trained what a visible position says. Of a guided run the conditional half is read.

    Memory: the stream of the entries of one step in the chosen layers, and a few rows of logits at a time.

    Args:
        model: from `dlm_lens.load`, the run's.
        run: from `denoise`.
        positions: `Sinks` of this run: every step's sinks, those of any layer and head (where heads are many, find
            them at level "layer" or "model"), each beside a control of its class. Or canvas positions, negative
            from the end; learned sink tokens stand behind the canvas. Or which of them in each row, as True. None
            for all.
        steps: which steps, negative from the end; None for all.
        layers: which layers, negative from the end; None for all.
        top: how many tokens to name.
        hooks: run the pass with these too, and say what they change.
        tuned: a tuned lens of this model instead of the plain one.
        controls: beside the sinks as many positions of the same step, row and class (masked, visible) that are no
            sinks, drawn with `seed`.
        seed: of controls and intervals.
        progress: show a progress bar.

    Raises:
        TypeError: the run is no `Denoised`.
        ValueError: a step, layer or position that is not there, sinks of another run, or another model's lens.
    """
    for name, value in (("positions", positions), ("steps", steps), ("layers", layers)):
        if isinstance(value, int):
            raise ValueError(
                f"{name} is {shown(value)}; give a list, such as {name}=[{shown(value)}], or None for all"
            )
        flags = name == "positions" and isinstance(value, Tensor) and value.dtype == torch.bool
        if value is not None and not flags and not isinstance(value, Sinks):
            INDICES.check(name, value)
    stored, head = StoredRun(model, run), Head(model)
    chosen, wanted = _layers(model, layers), _steps(run, steps)
    if not 1 <= top <= head.vocabulary:
        raise ValueError(f"top is {top}; it must be from 1 to {head.vocabulary}")
    if tuned is not None:
        tuned.check(model)
    learned = SinkLayout.of(model).count
    places = places_of(run, positions, wanted, chosen, learned, controls, seed)
    entries = _Entries(stored, head, places, chosen, top, tuned)
    runner = stored.runner(hooks) if len(hooks) else None
    found = [entries.at(step, runner) for step in tqdm(wanted, desc="reading", unit="step", disable=not progress)]
    joined = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    about: dict[str, Any] = {
        "run": stored.run,
        "layers": chosen,
        "lens": "logit lens" if tuned is None else repr(tuned),
        "seed": seed,
    }
    plain: dict[str, Any] = {name: joined[name] for name in joined if not name.startswith("hooked_")}
    if runner is None:
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
        head: Head,
        places: Places,
        layers: tuple[int, ...],
        top: int,
        tuned: TunedLens | None,
    ) -> None:
        self.stored, self.head, self.places, self.layers, self.top = stored, head, places, layers, top
        self.layout, self.last = SinkLayout.of(stored.model), len(attention_blocks(stored.model)) - 1
        self.translate = (lambda layer, stream: stream) if tuned is None else tuned.translate
        self.shifted = stored.causal or bool(getattr(stored.model.config, "logit_shift", False))

    def at(self, step: int, runner: HookRunner | None) -> dict[str, Tensor]:
        """Every number of a step's entries, those with hooks under hooked_..., what they change under change."""
        place = self._places(step)
        written, asked = place["written"], place["asked"]
        plain = self._streams(step, place, None)
        given = (self.layers, written, asked, self.top, self.translate)
        found = numbers(self.head, plain, *given)
        if runner is not None:
            hooked = self._streams(step, place, runner)
            found |= {f"hooked_{name}": value for name, value in numbers(self.head, hooked, *given).items()}
            found["change"] = change(self.head, plain, hooked, self.layers, self.translate)
        return {name: value for name, value in place.items() if name != "written"} | found

    def _places(self, step: int) -> dict[str, Tensor]:
        run, places = self.stored.run, self.places
        canvas, length = run.tokens.shape[1], self.stored.length(step)
        # An AR step sees the written prefix only; behind its end a row has nothing to read.
        here = (places.step == step) & ((places.position < length) | (places.position >= canvas))
        here &= run.row_steps[places.batch] > step
        names = ("step", "batch", "position", "sink", "sink_layer")
        place = {name: getattr(places, name)[here] for name in names}
        batch, position = place["batch"], place["position"]
        predicts = position + 1 if self.shifted else position
        predicts = predicts.masked_fill((position >= canvas) | (predicts >= canvas), -1)
        masked = run.masked[step, batch, position.clamp(max=canvas - 1)] & (position < canvas)
        asked = run.masked[step, batch, predicts.clamp(min=0)] & (predicts >= 0)
        written = run.tokens[batch, predicts.clamp(min=0)]
        written = written.masked_fill((predicts < 0) | run.masked[-1, batch, predicts.clamp(min=0)], -1)
        return place | {"predicts": predicts, "masked": masked, "asked": asked, "written": written}

    def _streams(self, step: int, place: dict[str, Tensor], runner: HookRunner | None) -> list[Tensor]:
        """The stream behind each layer, and behind the last one."""
        canvas, length = self.stored.run.tokens.shape[1], self.stored.length(step)
        position = torch.where(place["position"] < canvas, place["position"], place["position"] - canvas + length)
        reader = StreamReader(self.layout, len(self.stored.run.tokens), place["batch"], position)
        layers = sorted({*self.layers, self.last})
        with nullcontext() if runner is None else runner:
            if runner is not None:
                self.stored.enter(runner, step)
            with reading(self.stored.model, reader, layers):
                self.stored.states(step)
        return [reader.streams[layer] for layer in layers]


def _steps(run: Denoised, steps: Sequence[int] | None) -> list[int]:
    for step in steps or ():
        if not -run.steps <= step < run.steps:
            raise ValueError(
                f"step {step} of {run.steps}: steps go from 0 to {run.steps - 1}, or from -{run.steps} to -1"
            )
    chosen = list(range(run.steps)) if steps is None else sorted({step % run.steps for step in steps})
    if not chosen:
        raise ValueError("steps is empty; give at least one, or None for all")
    return chosen


def _layers(model: Any, layers: Sequence[int] | None) -> tuple[int, ...]:
    count = len(attention_blocks(model))
    for layer in layers or ():
        if not -count <= layer < count:
            raise ValueError(f"layer {layer} of {count}: layers go from 0 to {count - 1}, or from -{count} to -1")
    chosen = tuple(range(count)) if layers is None else tuple(sorted({layer % count for layer in layers}))
    if not chosen:
        raise ValueError("layers is empty; give at least one, or None for all")
    return chosen
