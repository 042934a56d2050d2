"""What Tables 1 to 5 share: settings, items, runs, and the tables of results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import stdev
from typing import TYPE_CHECKING, Any

from dlm_lens.experiments.attention_sinks.prompt_scores import Prompt, exact_match
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table
from dlm_lens.experiments.intervals import Interval, over_networks, over_seeds, paired_over_seeds, plus_minus
from dlm_lens.experiments.one_token import paper_scale
from dlm_lens.experiments.one_token.miniature import LONGER, SCRATCH, VARIANTS, Miniature
from dlm_lens.experiments.one_token.text_corpus import LENGTH
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import Judged, is_above, is_below, is_within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POSITIONS = 64
"""Positions of a canvas of the synthetic language."""

TEXT_SHAPE = "one-token-text"
"""Name of the networks on real English in cost estimates."""

SMALL: dict[str, Any] = {
    "configs": [], "tasks": [], "overrides": [], "sft": "", "limit": None, "variants": ["plain", "sink", "gated"],
    "start": SCRATCH, "seeds": 2, "steps": 150, "batch_size": 16, "corpus": 20_000, "optimizer": "muon",
    "precision": "bf16", "prompts": 8, "watched": 4, "validation": 64, "trained": "runs/one-token", "text": "",
}  # fmt: skip
"""Settings of a few minutes. Without `configs`: networks of 0.8 million parameters on the synthetic language, or of
2.2 million on the text that `text` names (`read_text`). `trained` is the directory of the networks; tables that
share a network train it once."""

GROWS = ("seeds",)
"""A network and its numbers depend on its own seed alone."""

METRIC = (
    "validation loss in nats per masked token (Eq. 3 and 4, fixed masks); differences paired by seed; intervals "
    "95%, of means Student's t over seeds, of differences over seeds and held-out sequences"
)
"""Exact match has an interval over prompts (`exact_match`), which are the same for all seeds' networks."""

MARGIN = 0.01
"""Nats by which two networks may differ and still count as alike.

Set on 22 November 2026, before any network of 1,500 steps was finished. 0.01 nats are 1% of the perplexity of a
masked token. Conversions of 150 steps were known then: the paired difference of two variants had a standard
deviation of 0.007 to 0.010 between seeds, so that five seeds could show a difference of about this size and none
that is much smaller. The paper has no margin: it calls means that are 0.12 to 0.56 points apart comparable, where
one sink token gains 8.03, and points cannot be turned into nats. No result here enters it."""

DRAWN = (
    "Paired differences with their 95% intervals; every circle is a seed. A gain lies to the left of the line; "
    "inside the grey range two networks count as alike."
)
"""Caption of the picture of a table."""

IMPROVES = "agrees: the whole interval below 0; disagrees: above"

ALIKE = (
    f"agrees: the whole interval within {MARGIN} nats of 0 (1% of perplexity, set beforehand); disagrees: wholly "
    "outside; undecided where the interval of the sink token's own gain holds 0"
)

NO_BETTER = (
    f"agrees: the whole interval above -{MARGIN} nats (1% of perplexity, set beforehand); disagrees: wholly below; "
    "undecided where the interval of the sink token's own gain holds 0"
)

SHORT = (
    "The budget is short: the networks are still learning, so a lower loss says that a network learns faster, not "
    "that it ends better."
)

EVEN = "Attention spread evenly would put about 2% on each learned sink (one of some 50 keys)."

EVEN_TEXT = (
    f"Attention spread evenly would put {100 / (LENGTH + 1):.1f}% on one learned sink (one of {LENGTH + 1} keys)."
)

AR_TEXT = "an AR model of the same text"


def small(variants: Sequence[str], **changed: Any) -> dict[str, Any]:
    """The small settings of a table."""
    return {**SMALL, "variants": list(variants), **changed}


def full(variants: Sequence[str], configs: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """The paper's settings: training configs, and cells of the table."""
    return {
        **SMALL, "variants": list(variants), "configs": list(configs), "tasks": list(tasks), "seeds": 1,
        "trained": "runs/one-token-real",
    }  # fmt: skip


def items(settings: Settings) -> Iterator[Item]:
    """All variants of one seed after the other, so that an unfinished run holds pairs.

    Raises:
        ValueError: a text is given with configs, which name their own.
    """
    if settings["configs"]:
        if settings.get("text"):
            raise ValueError(
                f"text={settings['text']} goes with --small; the configs of the full settings read data.path, as "
                "in --set 'overrides=[\"data.path=FILE.txt\"]'"
            )
        yield from paper_scale.items(settings)
        return
    for seed in range(settings["seeds"]):
        for variant in settings["variants"]:
            yield {"variant": variant, "seed": seed}


def run(item: Item, settings: Settings, bench: Any) -> Mapping[str, Any]:
    """Train the network where it is not trained yet, and measure it."""
    if "config" in item:
        return paper_scale.run(item, settings)
    from dlm_lens.experiments.one_token.metrics import measured

    return measured(Miniature.of(item, settings), settings)


def cost(item: Item, settings: Settings) -> list[Cost]:
    """Training, validation, exact match and sinks."""
    if "config" in item:
        return paper_scale.cost(item, settings)
    if settings["text"]:
        return text_cost(item, settings)
    shape = "toy-ar" if settings["start"] != SCRATCH else "toy"
    passes = [
        Cost(settings["steps"], settings["batch_size"], POSITIONS, shape, backward=True),
        Cost(-(-settings["validation"] * 4 // 64), 64, POSITIONS, shape),
        Cost(32 * 3, settings["prompts"], POSITIONS, shape),
        Cost(32, settings["watched"], POSITIONS, shape),
    ]
    return passes


def text_cost(item: Item, settings: Settings) -> list[Cost]:
    """The cost on a text; the first item of a conversion includes the AR model that all items share."""
    first = item == next(items(settings))
    shared = LONGER * settings["steps"] if first and settings["start"] != SCRATCH else 0
    return [
        Cost(settings["steps"] + shared, settings["batch_size"], LENGTH, TEXT_SHAPE, backward=True),
        Cost(-(-settings["validation"] * 4 // 32), 32, LENGTH, TEXT_SHAPE),
        Cost(16, settings["watched"], LENGTH, TEXT_SHAPE),
    ]


def losses(results: Results, variant: str) -> dict[int, float]:
    """Validation loss by seed."""
    return {record.item["seed"]: record.value["loss"] for record in results.where(variant=variant)}


def difference(results: Results, variant: str, baseline: str) -> Interval:
    """Validation loss minus the baseline's, paired by seed; interval over seeds and held-out sequences.

    Results without the losses of groups of sequences (`metrics.GROUPS`) have an interval over seeds alone.
    """
    one, other = (
        {record.item["seed"]: record.value for record in results.where(variant=name)}
        for name in (variant, baseline)
    )
    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < 2 or any("losses" not in values[seed] for values in (one, other) for seed in seeds):
        return paired_over_seeds(losses(results, variant), losses(results, baseline))
    apart = [[a - b for a, b in zip(one[seed]["losses"], other[seed]["losses"], strict=True)] for seed in seeds]
    return over_networks([(values, [1.0] * len(values)) for values in apart], bounds=None)._replace(n=len(seeds))


def number(results: Results, variant: str, pick: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    """One number of every seed that has it."""
    found = (pick(record.value) for record in results.where(variant=variant))
    return [value for value in found if value is not None]


def on_text(results: Results) -> bool:
    """Whether the results are of real English; older ones do not say."""
    return bool(results.settings.get("text"))


def variants(results: Results) -> list[str]:
    """Those that have results, in order."""
    return list(dict.fromkeys(record.item["variant"] for record in results.records))


def ablated(results: Results) -> Sequence[str]:
    """Where the ablations of Tables 3 to 5 start, and what the paper says of it."""
    if results.settings["configs"]:
        return ()
    quote = 'The paper ablates the converted model ("we utilize the Qwen2.5-0.5B checkpoint as the initialization",'
    if results.settings["start"] == SCRATCH:
        return (f"{quote} Section 4.3); these networks start from scratch, an earlier and weaker comparison.",)
    return (f"{quote} Section 4.3); so do these networks.",)


def tables(results: Results, baseline: str) -> list[Table]:
    """Losses and exact match (on a text losses per byte), then sinks."""
    given, text = results.settings, on_text(results)
    source = f"{AR_TEXT} ({LONGER * given['steps']} steps)" if text else given["start"]
    start = "from scratch" if given["start"] == SCRATCH else f"converted from {source}"
    title = f"{start}, {given['steps']} steps of {given['batch_size']} x {LENGTH if text else POSITIONS} positions"
    watched = "canvases of held-out text, with ever fewer masks" if text else "runs on held-out prompts of task A"
    own = ["nats per byte"] if text else ["exact match A", "L", "F"]
    return [
        Table(title, ["", "seeds", "validation loss", "paired difference", *own],
              [_quality(results, name, baseline) for name in variants(results)]),
        Table(
            f"sinks, learned or not, over the steps of {watched}: means over seeds, layers",
            ["", "share of attention on learned sinks", "their value norm / others'",
             "sinks found per pattern (eps = 3)", "their value norm / others' in the same state",
             "main sink moved"],
            [_sinks(results, name) for name in variants(results)],
        ),
    ]  # fmt: skip


def _quality(results: Results, variant: str, baseline: str) -> list[str]:
    own = list(losses(results, variant).values())
    alone = variant == baseline or baseline not in variants(results)
    apart = "-" if alone else plus_minus(difference(results, variant, baseline), sign=True)
    if on_text(results):
        cells = [plus_minus(over_seeds(number(results, variant, lambda value: value["loss_per_byte"])))]
        return [VARIANTS[variant].label, str(len(own)), plus_minus(over_seeds(own)), apart, *cells]
    cells = [str(exact_match(right(results, variant, task))) for task in ("A", "L", "F")]
    return [VARIANTS[variant].label, str(len(own)), plus_minus(over_seeds(own)), apart, *cells]


def right(results: Results, variant: str, task: str) -> dict[Prompt, float]:
    """Per prompt, the share of the seeds' networks that answer it correctly; all get the same prompts."""
    answers = zip(*(record.value["right"][task] for record in results.where(variant=variant)), strict=True)
    return {(task, place): sum(seeds) / len(seeds) for place, seeds in enumerate(answers)}


def _sinks(results: Results, variant: str) -> list[str]:
    def cell(pick: Callable[[Mapping[str, Any]], float | None]) -> str:
        values = number(results, variant, pick)
        return plus_minus(over_seeds(values)) if values else "-"

    return [
        VARIANTS[variant].label, cell(share), cell(learned_ratio), cell(lambda value: value["found"]),
        cell(found_ratio), cell(lambda value: value["moved"]),
    ]  # fmt: skip


def share(value: Mapping[str, Any]) -> float | None:
    """Attention on the learned sinks, mean over layers."""
    return sum(value["share"]) / len(value["share"]) if "share" in value else None


def learned_ratio(value: Mapping[str, Any]) -> float | None:
    """Value norm of the learned sinks over that of the canvas, each a mean over layers."""
    return sum(value["norm"]) / sum(value["other"]) if "norm" in value else None


def found_ratio(value: Mapping[str, Any]) -> float | None:
    """Value norm of the sinks found by Eq. 3 over that of others in the same state."""
    return value["found_norm"] / value["found_other"] if value["found_norm"] is not None else None


def improves(results: Results, paper: str, name: str, one: str, other: str, why: str = "") -> Finding:
    """Whether network `one` has a lower validation loss than `other`: its whole interval is below zero."""
    found = difference(results, one, other)
    return Finding.of(paper, said(name, found), is_below(found, 0.0), why or IMPROVES, noise(results))


def alike(results: Results, paper: str, name: str, one: str, other: str) -> Finding:
    """Whether two networks are alike: they differ by less than `MARGIN`, and the sink token changes the loss."""
    found = difference(results, one, other)
    return _beside_gain(results, paper, name, found, is_within(found, -MARGIN, MARGIN), ALIKE)


def no_better(results: Results, paper: str, name: str, one: str, other: str) -> Finding:
    """Whether network `one` gains less than `MARGIN` over `other`, and the sink token changes the loss."""
    found = difference(results, one, other)
    return _beside_gain(results, paper, name, found, is_above(found, -MARGIN), NO_BETTER)


def _beside_gain(results: Results, paper: str, name: str, found: Interval, judged: Judged, why: str) -> Finding:
    """A verdict that stands only where the sink token's own gain is not zero; p is the larger of the two."""
    gain = difference(results, "sink", "plain")
    null = f"{noise(results)}; gain of one sink token in front: {plus_minus(gain, sign=True)}"
    known = is_below(gain, 0.0)
    if known.verdict == "undecided":
        return Finding(paper, said(name, found), "undecided", f"{why}; here the gain's interval holds 0", null)
    both = [p for p in (judged.p, known.p) if p is not None]
    return Finding(paper, said(name, found), judged.verdict, why, null, max(both, default=None))


def said(name: str, found: Interval) -> str:
    """A difference of losses as the page prints it."""
    return f"{name}: {plus_minus(found, sign=True)} nats, {found.n} seeds"


def noise(results: Results) -> str:
    """The null of a paired difference, and how much the plain network's loss varies."""
    own = list(losses(results, "plain").values())
    if len(own) < 2:
        return "0"
    return f"0; the plain network's losses have a standard deviation of {stdev(own):.3f} between seeds"


def forest(results: Results, baseline: str) -> "Figure":
    """Every variant's paired difference to the baseline with its interval and seeds; the margin is shaded."""
    from dlm_lens.experiments.attention_sinks.charts import forest_plot

    rows, points = {}, {}
    base = losses(results, baseline)
    for name in variants(results):
        if name != baseline:
            label = VARIANTS[name].label
            rows[label] = difference(results, name, baseline)
            points[label] = [loss - base[seed] for seed, loss in losses(results, name).items() if seed in base]
    axis = f"validation loss minus that of {VARIANTS[baseline].label}, nats (left: better)"
    return forest_plot(rows, points, x=axis, shaded=(-MARGIN, MARGIN))


def experiment(**own: Any) -> Experiment:
    """An experiment whose items are trainings; what the tables do not share is given."""
    return Experiment(metric=METRIC, items=items, run=run, cost=cost, grows=GROWS, trains=True, **own)


def rendering(
    results: Results, baseline: str, findings: Callable[[Results], Iterable[Finding]], needed: Sequence[str]
) -> Rendering:
    """The tables of a run, miniature or real; findings where every variant that they need has results."""
    if results.settings["configs"]:
        return Rendering([paper_scale.table(results)])
    lacking = [name for name in needed if name not in variants(results)]
    told = [] if lacking else list(findings(results))
    without = [f"No comparison with the paper: {', '.join(lacking)} has no results."] if lacking else []
    even = EVEN_TEXT if on_text(results) else EVEN
    drawn = {"differences": forest(results, baseline)} if baseline in variants(results) else {}
    captions = {"differences": DRAWN} if drawn else {}
    return Rendering(tables(results, baseline), drawn, told, [*without, SHORT, even], captions)
