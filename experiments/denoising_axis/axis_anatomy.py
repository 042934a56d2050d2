"""What are sinks made of, which heads copy, and is the largest channel needed? On recorded runs of the models."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlm_lens.experiments.attention_sinks.charts import forest_plot
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.denoising_axis import networks
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above, is_below

MAJORITY, NEEDED = 0.5, 0.05
"""Rules: a part explains sinks if more than half survive on it alone; a channel is needed if its removal changes
0.05 of the predictions more than a random channel's does. Set after a try on two prompts per model."""

TRIED = "set before this run, after a try on two prompts"

PATTERNS = ("equal norms", "equal angles", "no position", "shuffled norms", "shuffled angles")


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: sinks and survivors, shares of variance, copying of every head, effects of removed channels."""
    import dlm_lens as dl
    from dlm_lens import probes

    model = networks.model_named(item["model"], settings, bench)
    texts = chat(model, problems_of(settings, item["start"]), settings)
    done = dl.denoise(model, texts, **settings["sampler"])
    rule = dl.AboveMean(settings["eps"])
    anatomy = probes.sink_anatomy(model, done, rule)
    heads = probes.retrieval_heads(model, done)
    removal = probes.channel_removal(model, done, top=1, controls=settings["controls"], detector=rule)
    sinks = [_sinks_of(anatomy, row) for row in range(len(texts))]
    shares = anatomy.variance_shares.double()
    return {
        "sinks": sinks,
        "variance": _rounded(shares.nanmean((0, 2, 3))),
        "heads": _rounded(heads.sums.double()),
        "removal": _rounded(removal.sums.transpose(0, 1)),
        "channel": removal.channels[0],
        "ratio": _rounded(removal.ratio.amax(-1)),
    }


def _sinks_of(anatomy: Any, row: int) -> dict[str, Any]:
    """Counts of one prompt: sinks, causes, survivors by pattern and expected ones, sinks by layer."""
    from dlm_lens.probes.score_parts import PARTS

    is_sink, known = anatomy.is_sink[:, row], anatomy.received.values[:, row].isfinite()
    own = is_sink[..., 0]
    angles, norms, still = (is_sink[..., PARTS.index(name)] & own for name in PATTERNS[:3])
    counts = own.sum(-1).double()
    chance = {
        name: float((counts * (is_sink[..., PARTS.index(name)] & known).sum(-1) / known.sum(-1).clamp(min=1)).sum())
        for name in PATTERNS
    }
    return {
        "sinks": int(own.sum()),
        "norms": int((norms & ~angles).sum()),
        "angles": int((angles & ~norms).sum()),
        "either": int((angles & norms).sum()),
        "together": int((own & ~angles & ~norms).sum()),
        "angles without position": int((angles & ~norms & still).sum()),
        "survive": {name: int((is_sink[..., PARTS.index(name)] & own).sum()) for name in PATTERNS},
        "chance": {name: round(value, 6) for name, value in chance.items()},
        "layers": own.sum((0, 2, 3)).tolist(),
    }


def _rounded(values: Any) -> Any:
    """Nested lists with six significant digits; None for NaN."""
    if isinstance(values, list):
        return [_rounded(one) for one in values]
    if not isinstance(values, float | int):
        return _rounded(values.tolist())
    return None if values != values else float(f"{values:.6g}")


def cost(item: Item, settings: Settings) -> list[Cost]:
    """The run, a replay each for scores, heads and channels, and two per removed channel."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    answer = int(settings["sampler"].get("gen_length", 32))
    steps = int(settings["sampler"].get("steps", answer))
    return [Cost(steps * (4 + 2 * (1 + settings["controls"])), rows, 32 + answer, item["model"])]


def _ratio(
    counts: Sequence[Any],
    top: Callable[[Any], float],
    bottom: Callable[[Any], float],
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Ratio of sums over prompts, a share by default."""
    return ratio_over_prompts([top(one) for one in counts], [bottom(one) for one in counts], bounds=bounds)


def cause_share(counts: Sequence[Any], cause: str) -> Interval:
    """The share of sinks with a cause."""
    return _ratio(counts, lambda one: one[cause], lambda one: one["sinks"])


def survival(results: Results, model: str, pattern: str) -> Interval:
    """The share of sinks that survive in a pattern."""
    return _ratio(
        networks.prompts_of(results, model, "sinks"), lambda one: one["survive"][pattern], lambda one: one["sinks"]
    )


def beyond_chance(results: Results, model: str, pattern: str) -> Interval:
    """That share minus the share of random keys that are sinks in the pattern."""
    return _ratio(
        networks.prompts_of(results, model, "sinks"),
        lambda one: one["survive"][pattern] - one["chance"][pattern],
        lambda one: one["sinks"],
        bounds=(-1.0, 1.0),
    )


def best_head(results: Results, model: str) -> tuple[int, int, Interval, Interval]:
    """The head with the highest score on every other prompt; its score and excess over chance on the rest."""
    found = networks.prompts_of(results, model, "heads")
    chosen, tested = found[::2], found[1::2]
    places = [(layer, head) for layer in range(len(found[0])) for head in range(len(found[0][0]))]

    def total(place: tuple[int, int], measure: int) -> float:
        return sum(one[place[0]][place[1]][measure] for one in chosen)

    layer, head = max(places, key=lambda place: total(place, 1) / max(1, total(place, 0)))
    cells = [one[layer][head] for one in tested]
    score = _ratio(cells, lambda one: one[1], lambda one: one[0])
    return layer, head, score, _ratio(cells, lambda one: one[1] - one[3], lambda one: one[0], bounds=(-1.0, 1.0))


def removed(results: Results, model: str, measure: int, kind: int) -> Interval:
    """A measure with the largest channel removed (kind 0) or random ones (1): KL, changed, sinks gone."""
    return _ratio(
        networks.prompts_of(results, model, "removal"),
        lambda one: one[kind][measure][0],
        lambda one: one[kind][measure][1],
        bounds=(0.0, math.inf if measure == 0 else 1.0),
    )


def more_than_random(results: Results, model: str, measure: int) -> Interval:
    """The difference of the two, prompt by prompt."""
    values = []
    for kinds in networks.prompts_of(results, model, "removal"):
        (a, n), (b, m) = (kinds[kind][measure] for kind in (0, 1))
        values.append(a / n - b / m if n and m else None)
    return mean_over_prompts(values, bounds=(-1.0, 1.0))


def render(results: Results) -> Rendering:
    """Tables of causes, variance, heads and channels."""
    rows, shares, heads, channels = [], [], [], []
    points: dict[str, Interval] = {}
    for model in results.models:
        counts = networks.prompts_of(results, model, "sinks")
        total = sum(one["sinks"] for one in counts)
        causes = [cause_share(counts, name) for name in ("norms", "angles", "either", "together")]
        needs = _ratio(
            counts, lambda one: one["angles"] - one["angles without position"], lambda one: one["angles"]
        )
        rows.append([model, str(total), *map(str, causes), str(needs), str(len(counts))])
        for pattern in PATTERNS:
            points[f"{model}: {pattern}"] = beyond_chance(results, model, pattern)
        columns = list(zip(*networks.prompts_of(results, model, "variance"), strict=True))
        shares.append([model, *(str(mean_over_prompts(one, bounds=None)) for one in columns)])
        layer, head, score, excess = best_head(results, model)
        heads.append([model, f"layer {layer}, head {head}", str(score), str(excess)])
        names = [str(record.value["channel"]) for record in results.records if record.item["model"] == model]
        ratio = max(max(record.value["ratio"]) for record in results.records if record.item["model"] == model)
        effects = [_exact(removed(results, model, m, kind)) for m in range(3) for kind in (0, 1)]
        channels.append([model, ", ".join(dict.fromkeys(names)), f"{ratio:.2f}", *effects])
    tables = [
        Table("causes of sinks, as shares of sinks; 95% intervals over prompts",
              ["model", "sinks", "norms", "angles", "either", "together", "angles: need position", "n"], rows),
        Table("share of the variance of scores over keys",
              ["model", "norms", "angles", "interaction", "of the angles: position"], shares),
        Table("copying: the best head on half of the prompts, measured on the others",
              ["model", "head", "score", "score - chance"], heads),
        Table("the largest channel set to 0, and random channels",
              ["model", "channel", "ratio to median", "KL", "KL, random", "changed", "changed, random",
               "sinks gone", "sinks gone, random"], channels),
    ]  # fmt: skip
    figure = forest_plot(points, x="share of sinks that survive, minus chance")
    caption = "where an interval is above 0, more sinks survive than random keys would be sinks"
    return Rendering(tables, {"survival": figure}, list(findings(results)), captions={"survival": caption})


def _exact(found: Interval) -> str:
    return f"{found.value:.3g} [{found.low:.3g}, {found.high:.3g}]"


def findings(results: Results) -> Iterator[Finding]:
    """One finding per model and question."""
    for model in results.models:
        for pattern, part in (("equal norms", "angles"), ("equal angles", "key norms")):
            found, above = survival(results, model, pattern), beyond_chance(results, model, pattern)
            yield Finding.of(
                f"(question) are sinks explained by {part} alone?",
                f"{model}: {found} of its sinks survive",
                is_above(found, MAJORITY),
                why=f"agreement: more than {MAJORITY} of the sinks survive on {part} alone; {TRIED}",
                null=f"chance: a random key of that pattern; survival minus chance {above}",
            )
        found = survival(results, model, "no position")
        yield Finding.of(
            "(question) are sinks explained by position?",
            f"{model}: {found} of its sinks survive without rotation",
            is_below(found, 1 - MAJORITY),
            why=f"agreement: less than half of the sinks survive when every pair is at distance 0; {TRIED}",
            null=f"chance: a random key; survival minus chance {beyond_chance(results, model, 'no position')}",
        )
        layer, head, score, excess = best_head(results, model)
        yield Finding.of(
            "(2404.15574) some heads attend to copies of the token that is decided",
            f"{model}, layer {layer}, head {head}: {score} of the decisions with a copy",
            is_above(excess, 0),
            why="agreement: above chance on prompts that did not choose the head",
            null=f"as many random keys of the same region; score minus chance {excess}",
        )
        found = more_than_random(results, model, 1)
        if results.is_causal(model):
            claim, judged = "(2605.06366) an AR model hardly needs its largest channel", is_below(found, NEEDED)
        else:
            claim, judged = "(2605.06366) a DLM needs its largest channel", is_above(found, NEEDED)
        yield Finding.of(
            claim,
            f"{model}: {found} more predictions change than with a random channel",
            judged,
            why=f"agreement: {'less' if results.is_causal(model) else 'more'} than {NEEDED}; one step on the "
            "run's canvases, where the paper measures whole answers of models with a far larger outlier; "
            f"{TRIED}",
            null="0: as a random channel",
        )


EXPERIMENT = Experiment(
    name="axis-anatomy",
    shows="2601.07894, 2404.15574, 2605.06366",
    title="what sinks are made of, heads that copy, and the largest channel",
    metric="share of sinks that survive without a part of the scores; excess over random keys and channels",
    small={
        "models": ["toy", "toy-ar"], "task": "toy_arithmetic", "chat": False, "prompts": 96, "batch": 16,
        "sampler": {"gen_length": 24, "steps": 12}, "eps": 3.0, "controls": 1, **networks.SETTINGS,
    },
    full={
        "models": ["GSAI-ML/LLaDA-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"], "task": "english_prompts",
        "chat": True, "prompts": 32, "batch": 4, "sampler": {"gen_length": 64}, "eps": 3.0, "controls": 3,
        **networks.SETTINGS,
    },
    items=networks.items,
    run=run,
    render=render,
    cost=cost,
    own={
        "toy-ar": {"sampler": {"gen_length": 24}},
        "smollm2": {"task": "english_prompts", "chat": True, "sampler": {"gen_length": 8}},
        "smollm2-converted": {
            "task": "english_prompts", "chat": True, "sampler": {"gen_length": 8, "steps": 8},
            "conversion_steps": 50,
        },
    },
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
