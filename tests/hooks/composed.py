"""Compositions of hooks drawn at random, and a float64 network that runs them, written from the documents.

A drawn hook is a `Drawn`: plain settings, from which `built` makes the library's hook and `Network` its own,
without the library's attention, statistics, detectors or hooks.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens import hooks as library
from dlm_lens.attention import sink
from dlm_lens.testing import tiny
from tests.reference import forward64, softmax64, spare64

MASK, EOS, FLOOR = 63, 62, torch.finfo(torch.float32).min
MIN_VIEWERS = 8

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "mmada": ("mmada", {}),
    "dream": ("dream", {}),
    "smdm": ("smdm", {}),
    "qwen front": ("sink_qwen", {"num_sinks": 2, "sink_placement": "front"}),
    "qwen end": ("sink_qwen", {"num_sinks": 1, "sink_placement": "end", "gated_attention": True}),
    "llama front": ("sink_llama", {"num_sinks": 1, "sink_placement": "front", "zero_sink_value": True}),
    "llama end": ("sink_llama", {"num_sinks": 2, "sink_placement": "end"}),
    "off by one": ("sink_llama", {"softmax": "off_by_one"}),
    "sink logits": ("sink_qwen", {"softmax": "sink_logits"}),
    "causal": ("causal", {"model_type": "llama"}),
}


def model_of(name: str) -> Any:
    family, config = FAMILIES[name]
    model = tiny(family, **config)
    if config.get("softmax") == "sink_logits":
        generator = torch.Generator().manual_seed(1)
        for layer in model.model.layers:
            layer.self_attn.sink_logits.data = 2 * torch.randn(4, generator=generator)
    return model


@dataclass(frozen=True)
class Drawn:
    """A hook as plain settings."""

    kind: str
    stage: str = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False
    detector: tuple[str, float] = ("top", 2)
    top: int | None = None
    per: str = "head"
    source: str = "current"
    relative: bool = True
    positions: tuple[Any, ...] = ()
    classes: tuple[Any, ...] = ()
    window: int = 3
    ahead: int | None = None
    step: int = 0
    k: int = 2
    factor: float = 2.0
    match: str = "columns"
    seed: int = 0
    wraps: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def site(self) -> str:
        if self.kind == "zero_value":
            return "v"
        return "scores" if self.stage == "before_softmax" else "pattern"


def draw(rng: random.Random, sinks: int, *, control: bool = True) -> Drawn:
    """A hook at random; `sinks` learned sink tokens may be named."""
    kinds = ["sinks"] * 4 + ["positions", "tokens", "keep"] * 2 + ["freeze", "scale", "zero_value"]
    kind = rng.choice(kinds + ["random", "random"] * control)
    after = rng.random() < 0.5
    stage = "after" if after else "before_softmax"
    renormalise = after and rng.random() < 0.25
    detector = rng.choice([("top", rng.randint(1, 3)), ("mean", rng.choice([0.1, 0.4])), ("share", 0.1)])
    source = rng.choice(["current", "current", "previous", "clean"])
    per = rng.choice(["head", "head", "layer"] + ["model"] * (source != "current"))
    # The shortest canvas is an AR prompt of 11 tokens.
    places = [rng.randint(-11, 10) for _ in range(rng.randint(1, 3))]
    positions = tuple(places) + ((sink(rng.randrange(sinks)),) if sinks and rng.random() < 0.4 else ())
    chosen = Drawn(
        kind,
        stage,
        renormalise,
        keep_self=rng.random() < 0.25,
        detector=detector,
        top=rng.choice([None, None, 1, 3]) if detector[0] != "top" else None,
        per=per,
        source=source,
        relative=rng.random() < 0.8,
        positions=positions,
        classes=tuple(rng.sample(["mask", "prompt", "eos", 7, 41], rng.randint(1, 2))),
        window=rng.randint(1, 6),
        ahead=rng.choice([None, 0, 1, 4]),
        step=rng.choice([0, 1, -1]),
        k=rng.randint(1, 3),
        factor=rng.choice([0.3, 2.0, 5.0]),
        match=rng.choice(["columns", "mass"]),
        seed=rng.randrange(5),
    )
    if kind == "keep" and rng.random() < 0.4:
        chosen = replace(chosen, positions=())
    wraps: list[tuple[str, Any]] = []
    if rng.random() < 0.2:
        wraps.append(("steps", tuple(rng.sample([0, 1, -1], rng.randint(1, 2)))))
    if rng.random() < 0.2 and kind not in ("zero_value", "scale"):
        wraps.append(("heads", tuple(rng.sample([0, 1, 2, -1], rng.randint(1, 3)))))
    if rng.random() < 0.2:
        wraps.append(("layers", (rng.choice([0, 1, -1]),)))
    if rng.random() < 0.15 and kind not in ("zero_value", "scale"):
        wraps.append(("progress", rng.choice([(0.0, 0.5), (0.3, 1.0)])))
    rng.shuffle(wraps)
    return replace(chosen, wraps=tuple(wraps))


def built(drawn: Drawn) -> Any:
    """The library's hook."""
    name, value = drawn.detector
    detector = {"top": dl.TopK, "mean": dl.AboveMean, "share": dl.sinks.AttentionShare}[name](value)
    shared = {"stage": drawn.stage, "renormalise": drawn.renormalise}
    judged = {"top": drawn.top, "per": drawn.per, "source": drawn.source, "relative": drawn.relative}
    kept = {"keep_self": drawn.keep_self}
    hook: Any
    if drawn.kind == "sinks":
        hook = library.mask_sinks(detector, **judged, **shared, **kept)
    elif drawn.kind == "freeze":
        hook = library.freeze_sinks(detector, step=drawn.step, **judged, **shared, **kept)
    elif drawn.kind == "positions":
        hook = library.mask_positions(*drawn.positions, **shared, **kept)
    elif drawn.kind == "tokens":
        hook = library.mask_tokens(*drawn.classes, **shared, **kept)
    elif drawn.kind == "keep":
        window = {"window": drawn.window, "ahead": drawn.ahead}
        if drawn.positions:
            hook = library.keep_only(drawn.positions, **window, **shared)
        elif drawn.k == 1:
            hook = library.keep_only((), **window, **shared)
        else:
            hook = library.keep_only(detector, **window, **shared, **judged)
    elif drawn.kind == "scale":
        hook = library.scale_attention(drawn.positions, drawn.factor, **shared)
    elif drawn.kind == "zero_value":
        hook = library.zero_value(*drawn.positions)
    elif drawn.k == 1:
        hook = library.mask_random(drawn.k + 1, seed=drawn.seed, **shared, **kept)
    else:
        like = library.mask_sinks(detector, **judged, **shared, **kept)
        hook = library.mask_random(like=like, match=drawn.match, seed=drawn.seed)
    for what, value in drawn.wraps:
        wrap = {"steps": "at_steps", "heads": "at_heads", "layers": "at_layers", "progress": "at_progress"}[what]
        hook = getattr(library, wrap)(hook, value)
    return hook


@dataclass
class Step64:
    """What a step of a run is, in the network's rows."""

    index: int
    total: int
    tokens: Tensor
    masked: Tensor
    valid: Tensor
    answer: Tensor
    prefix: bool

    @property
    def progress(self) -> Tensor:
        if self.prefix:
            return torch.full((len(self.tokens),), self.index / self.total)
        return 1 - self.masked.sum(-1) / self.answer.sum(-1).clamp(min=1)


@dataclass
class Map64:
    """What the keys of a layer receive: r_j, e_j, n_j and the number of counted queries."""

    sums: Tensor
    expected: Tensor
    viewers: Tensor
    counted: Tensor


class Network:
    """A model in float64 under drawn hooks, step by step; `margin` is how far any choice was from another."""

    def __init__(self, model: Any, drawn: list[Drawn], run: Any) -> None:
        self.model, self.drawn, self.run, self.config = model, drawn, run, model.config
        self.sinks = getattr(self.config, "num_sinks", 0)
        self.front = getattr(self.config, "sink_placement", "front") == "front"
        self.causal = bool(getattr(self.config, "is_causal", True))
        self.guided = float(run.settings.get("cfg_scale") or 0.0)
        self.held: dict[tuple[int, int, int], Map64] = {}
        self.frozen: dict[tuple[int, int], Tensor | None] = {}
        self.margin = torch.inf

    def step(self, index: int) -> dict[str, Tensor]:
        """Everything that the network computes at a step, and logits as the sampler gets them."""
        run, mask = self.run, self.config.mask_token_id if not self.causal else None
        canvas, masked = run.canvases[index], run.masked[index]
        valid, answer = run.attention_mask, run.masked[0]
        if self.causal:
            stop = run.prompt_length + index
            canvas, masked, valid, answer = (each[:, :stop] for each in (canvas, masked, valid, answer))
        seen = canvas
        if self.guided:
            given = ~answer
            if run.settings["sampler"] == "smdm":
                given = (torch.arange(canvas.shape[1]) < run.prompt_length).expand_as(canvas)
            seen = torch.cat([canvas, torch.where(given, torch.tensor(mask), canvas)])
            canvas, masked, valid, answer = (torch.cat([each, each]) for each in (canvas, masked, valid, answer))
        step = Step64(index, run.steps, canvas, masked, valid, answer, self.causal)
        clean: dict[int, Map64] = {}
        if any(one.source == "clean" for one in self.drawn):
            self._forward(seen, step, lambda layer, site, value, visible: None, clean)
        seeing: dict[int, Tensor] = {}

        def edit(layer: int, site: str, value: Tensor, visible: Tensor) -> Tensor:
            visible = seeing.get(layer, visible) if site == "pattern" else visible
            for index, one in enumerate(self.drawn):
                if one.site == site:
                    value, visible = self._act(index, one, layer, site, value, visible, step, clean)
            seeing[layer] = visible
            return value

        kept = self._forward(seen, step, edit, None)
        if self.guided:
            conditional, unconditional = kept["logits"].chunk(2)
            kept["logits"] = unconditional + (self.guided + 1) * (conditional - unconditional)
        if getattr(self.config, "logit_shift", False):
            rows = run.attention_mask
            first = rows.int().argmax(-1, keepdim=True)
            source = (torch.arange(rows.shape[1]) - 1).expand_as(rows).maximum(first)
            kept["logits"] = kept["logits"][torch.arange(len(rows))[:, None], source]
        kept["logits"] = kept["logits"][:, -1] if self.causal else kept["logits"]
        return kept

    def _forward(self, ids: Tensor, step: Step64, edit: Any, clean: dict[int, Map64] | None) -> dict[str, Tensor]:
        edits: dict[tuple[int, str], Any] = {}
        bases: dict[int, Tensor] = {}

        def scores(layer: int) -> Any:
            def run(value: Tensor) -> Tensor:
                bases[layer] = value > FLOOR / 2
                if clean is not None:
                    spare = spare64(self.config, self.model.state_dict(), layer)
                    clean[layer] = self._maps(softmax64(value, spare), bases[layer], step)
                    return value
                return edit(layer, "scores", value, bases[layer])

            return run

        def at(layer: int, site: str) -> Any:
            return lambda value: value if clean is not None else edit(layer, site, value, bases.get(layer))

        for layer in range(self.config.num_hidden_layers):
            edits |= {(layer, "scores"): scores(layer)}
            edits |= {(layer, site): at(layer, site) for site in ("v", "pattern")}
        positions = (step.valid.long().cumsum(-1) - 1).clamp(min=0)
        return forward64(
            self.model,
            ids,
            step.valid,
            causal=self.causal,
            positions=None if self.sinks else positions,
            edits=edits,
        )

    def _wide(self, canvas: Tensor, fill: Any = False) -> Tensor:
        """Something per canvas position with `fill` at the sinks."""
        beside = torch.full((*canvas.shape[:-1], self.sinks), fill, dtype=canvas.dtype)
        return torch.cat([beside, canvas] if self.front else [canvas, beside], -1)

    def _place(self, position: Any, keys: int) -> int:
        if not isinstance(position, int):
            return int(position.index if self.front else keys - self.sinks + position.index)
        length = keys - self.sinks
        return position % length + (self.sinks if self.front else 0)

    def _maps(self, pattern: Tensor, visible: Tensor, step: Step64) -> Map64:
        counted = self._wide(step.valid).double()
        visible = visible.expand(pattern.shape).double()
        even = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        sums, expected, viewers = (torch.einsum("bq,bhqk->bhk", counted, x) for x in (pattern, even, visible))
        return Map64(sums, expected, viewers, counted.sum(-1))

    def _scores(self, one: Drawn, given: list[Map64]) -> Tensor:
        if one.per == "head":
            sums, expected, few = given[0].sums, given[0].expected, given[0].viewers < MIN_VIEWERS
        else:
            sums = torch.stack([each.sums for each in given]).mean((0, 2))[:, None]
            expected = torch.stack([each.expected for each in given]).mean((0, 2))[:, None]
            few = torch.stack([(each.viewers < MIN_VIEWERS) for each in given]).any(0).any(1)[:, None]
        scores = sums / expected if one.relative else sums
        if one.detector[0] == "share":
            scores = sums / given[0].counted[:, None, None]
        return torch.where(few, torch.nan, scores)

    def _judged(self, one: Drawn, given: list[Map64]) -> Tensor:
        """The sinks among the keys of some maps."""
        scores = self._scores(one, given)
        name, value = one.detector
        if name == "top":
            return self._best(scores, int(value))
        if name == "share":
            level = torch.full_like(scores, value)
        else:
            others = (~scores.isnan()).sum(-1, keepdim=True) - 1
            level = (scores.nansum(-1, keepdim=True) - scores) / others + value
            level = torch.where(others < 1, torch.nan, level)
        found = scores > level
        gaps = (scores - level).abs()
        if bool((~gaps.isnan()).any()):
            self._close(float(gaps[~gaps.isnan()].min()))
        return self._best(torch.where(found, scores, torch.nan), one.top) if one.top else found

    def _best(self, scores: Tensor, k: int) -> Tensor:
        order = scores.nan_to_num(nan=-torch.inf).sort(dim=-1, descending=True, stable=True)
        found = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order.indices[..., :k], True)
        if order.values.shape[-1] > k:
            gap = order.values[..., k - 1] - order.values[..., k]
            gap = gap[torch.isfinite(gap)]
            self._close(float(gap.min()) if len(gap) else torch.inf)
        return found & ~scores.isnan()

    def _close(self, gap: float) -> None:
        self.margin = min(self.margin, gap)

    def _found(
        self, index: int, one: Drawn, layer: int, now: Any, step: Step64, clean: dict[int, Map64]
    ) -> Tensor | None:
        """The sinks by a hook's detector, source and level; None where nothing is known yet."""
        layers = range(self.config.num_hidden_layers)
        if one.source == "current":
            given = [now()]
        elif one.source == "clean":
            given = list(clean.values()) if one.per == "model" else [clean[layer]]
        else:
            self.held[index, layer, step.index] = now()
            before = [self.held.get((index, each, step.index - 1)) for each in layers]
            if one.per == "model":
                if step.index == 0:
                    return None
                given = [each for each in before if each is not None]
            else:
                given = [before[layer] or now()]
        return self._judged(one, given)

    def _columns(
        self, index: int, one: Drawn, layer: int, keys: int, now: Any, step: Step64, clean: dict[int, Map64]
    ) -> Tensor | None:
        """The columns that a hook hides, [batch, #head, key]."""
        named = torch.zeros(1, 1, keys, dtype=torch.bool)
        if one.kind in ("positions", "keep"):
            for position in one.positions:
                named[..., self._place(position, keys)] = True
        if one.kind == "positions":
            return named
        if one.kind == "keep":
            if one.positions or one.k == 1:
                return ~named
            found = self._found(index, one, layer, now, step, clean)
            return ~named if found is None else ~self._grown(found, keys)
        if one.kind == "tokens":
            chosen = torch.zeros_like(step.masked)
            for each in one.classes:
                if each == "mask":
                    chosen |= step.masked
                elif each == "prompt":
                    chosen |= step.valid & ~step.answer
                else:
                    chosen |= (step.tokens == (EOS if each == "eos" else each)) & ~step.masked
            return self._wide(chosen & step.valid)[:, None]
        if one.kind == "freeze":
            at = one.step % step.total
            if step.index <= at:
                found = self._found(index, one, layer, now, step, clean)
                if step.index == at:
                    self.frozen[index, layer] = found
            known = self.frozen.get((index, layer)) if step.index >= at else None
            return None if known is None else self._grown(known, keys)
        found = self._found(index, one, layer, now, step, clean)
        return None if found is None else self._grown(found, keys)

    def _grown(self, found: Tensor, keys: int) -> Tensor:
        beyond = torch.zeros(*found.shape[:-1], keys - found.shape[-1], dtype=torch.bool)
        return torch.cat([found, beyond], -1)

    def _act(
        self,
        index: int,
        one: Drawn,
        layer: int,
        site: str,
        value: Tensor,
        visible: Tensor,
        step: Step64,
        clean: dict[int, Map64],
    ) -> tuple[Tensor, Tensor]:
        """One hook on scores, pattern or values, and who sees whom after it."""
        layers = self.config.num_hidden_layers
        acts = all(
            step.index in {at % step.total for at in given}
            if what == "steps"
            else layer in {at % layers for at in given}
            if what == "layers"
            else True
            for what, given in one.wraps
        )
        keys = value.shape[1] if site == "v" else value.shape[-1]
        if one.kind in ("scale", "zero_value"):
            if not acts:
                return value, visible
            at = torch.zeros(len(step.valid), keys, dtype=torch.bool)
            for position in one.positions:
                at[:, self._place(position, keys)] = True
            at &= self._wide(step.valid, True)
            if one.kind == "zero_value":
                return torch.where(at[:, :, None, None], 0.0, value), visible
            at = at[:, None, None]
            if site == "scores":
                shift = torch.tensor(one.factor).double().log()
                return torch.where(at & visible, value + shift, value), visible
            value = torch.where(at, value * one.factor, value)
            return (value / value.sum(-1, keepdim=True).clamp(min=1e-30) if one.renormalise else value), visible

        def now() -> Map64:
            pattern = value
            if site == "scores":
                spare = spare64(self.config, self.model.state_dict(), layer)
                pattern = softmax64(value, None if spare is None else spare.double())
                pattern = pattern * visible.any(-1, keepdim=True)
            return self._maps(pattern, visible, step)

        margin = self.margin
        columns = self._columns(index, one, layer, keys, now, step, clean)
        if not acts or columns is None:
            self.margin = margin if one.kind != "freeze" else self.margin
            return value, visible
        columns = columns.expand(len(value), value.shape[1], keys)
        acting = torch.ones(columns.shape[:2], dtype=torch.bool)
        for what, given in one.wraps:
            if what == "heads":
                acting = acting & torch.tensor([h in {g % 4 for g in given} for h in range(4)])
            if what == "progress":
                low, high = given
                rows = (step.progress >= low) & ((step.progress < high) | (high >= 1))
                acting = acting & rows[:, None]
        gone = (columns & acting[..., None])[:, :, None] & visible
        own = torch.arange(keys)
        itself = own[:, None] == own
        if one.kind == "keep":
            distance = own - own[:, None]
            near = (distance > -one.window) & (distance <= (keys if one.ahead is None else one.ahead))
            sink = self._wide(torch.zeros(keys - self.sinks, dtype=torch.bool), True)
            gone = gone & ~((near & ~sink & ~sink[:, None]) | itself)
        if one.keep_self and one.kind != "keep":
            gone = gone & ~itself
        empty = ~(visible & ~gone).any(-1, keepdim=True)
        gone = gone & ~(empty & (itself | ~(visible & itself).any(-1, keepdim=True)))
        if site == "scores":
            return torch.where(gone, torch.tensor(FLOOR).double(), value), visible & ~gone
        value = torch.where(gone, 0.0, value)
        if one.renormalise:
            whole = value / value.sum(-1, keepdim=True).clamp(min=1e-30)
            value = torch.where(acting[..., None, None], whole, value)
        return value, visible & ~gone
