"""Does an AR model's circuit for arithmetic survive its conversion to a masked DLM?"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlm_lens.experiments.denoising_axis import networks
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, bootstrapped, difference_of_ratios, ratio_over_prompts, signed
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import all_of, is_above

TASKS = ("copy", "result")
"""The first token of the answer, a number of the problem; and the result of the first calculation."""

PARENT = "toy-ar"


def items(settings: Settings) -> Iterator[Item]:
    """Every network and task."""
    for name in ("toy-ar", "toy"):
        for network in range(settings["networks"]):
            for task in TASKS:
                yield {"model": name, "network": network, "converted": -1, "task": task}
    for steps in settings["conversion_steps"]:
        for task in TASKS:
            yield {"model": PARENT, "network": 0, "converted": steps, "task": task}


def label(item: Item) -> str:
    """A network as tables name it."""
    if item["converted"] >= 0:
        return f"{item['model']} converted, {item['converted']} steps"
    return item["model"] + (f", seed {item['network']}" if item["network"] else "")


@dataclass(frozen=True)
class Question:
    """A prompt and its corruption, with the tokens that are right after each."""

    prompt: str
    corrupted: str
    right: str
    wrong: str


def questions(task: str, count: int) -> list[Question]:
    """Word problems, each corrupted by other first numbers, so that another token is right.

    Raises:
        ValueError: fewer problems than requested.
    """
    from dlm_lens.experiments.attention_sinks.problems import problems

    found = []
    for problem in problems("toy_arithmetic"):
        numbers = [int(n) for n in re.findall(r"\d+", problem.prompt)]
        if len(numbers) < 2:
            continue
        plus = not re.search(r"breaks|drops|gives|loses|sells", problem.prompt.split(".")[1])
        one, two = numbers[:2]
        result = one + two if plus else one - two
        other = one + 3 if one < 16 else one - 3
        changed = other + two if plus else other - two
        if len({result, changed, one, other} & set(range(1, 41))) < 4:
            continue  # one token each, all different
        corrupted = problem.prompt.replace(f" {one} ", f" {other} ", 1)
        if task == "copy":
            found.append(Question(problem.prompt, corrupted, str(one), str(other)))
            continue
        sign = "+" if plus else "-"
        begun, others = (f"{text} {n} {sign} {two} =" for text, n in ((problem.prompt, one), (corrupted, other)))
        found.append(Question(begun, others, str(result), str(changed)))
    if len(found) < count:
        raise ValueError(f"prompts is {count}, and there are {len(found)} problems")
    return found[:count]


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Scores of all edges for every group of prompts, accuracy, and the circuit's faithfulness."""
    import torch

    import dlm_lens as dl
    from dlm_lens.probes import edge_attribution, faithfulness

    model = network(item, settings, bench)
    pairs = questions(item["task"], settings["prompts"])
    autoregressive = item["converted"] < 0 and item["model"].endswith("-ar")
    sampling = {"gen_length": 1} if autoregressive else {"gen_length": settings["gen_length"], "steps": 1}
    done = dl.denoise(model, [one.prompt for one in pairs], **sampling)

    def ids(words: Sequence[str]) -> Any:
        return torch.tensor([model.tokenizer(word)["input_ids"][-1] for word in words])

    right, wrong = ids([one.right for one in pairs]), ids([one.wrong for one in pairs])

    def difference(decisions: Any) -> Any:
        """The logit of the right token minus that of the one that is right after the corrupted prompt."""
        rows = decisions.row.cpu() % len(pairs)
        both = torch.stack([right[rows], wrong[rows]], -1).to(decisions.logits.device)
        found = decisions.logits.gather(-1, both)
        return found[:, 0] - found[:, 1]

    given: dict[str, Any] = {"target": difference, "steps": [0], "explain": [done.prompt_length]}
    corrupted = [one.corrupted for one in pairs]
    scores = edge_attribution(model, done, corrupted, integration=settings["integration"], **given)
    kept = {}
    for edges in settings["edges"]:
        circuit = scores.circuit(edges)
        found = faithfulness(model, done, corrupted, circuit, **given)
        kept[str(edges)] = [len(circuit), *_interval(found.normalised)]
    groups = scores.scores[0].unflatten(0, (settings["groups"], -1)).mean(1)[:, scores.graph.exists]
    return {
        "scores": [[float(f"{value:.4g}") for value in group] for group in groups.tolist()],
        "faithfulness": kept,
        "right": (done.tokens[:, done.prompt_length] == right).tolist(),
        "difference": scores.base[0].tolist(),
        "corrupted": scores.source[0].tolist(),
        "graph": [scores.graph.layers, scores.graph.heads, scores.graph.kv_heads],
    }


def network(item: Item, settings: Settings, bench: Any) -> Any:
    """The network of an item: shipped, its twin with another seed, or a conversion of it."""
    from dlm_lens.experiments.attention_sinks import twin_networks

    if item["converted"] < 0:
        return twin_networks.model_of(item, settings, bench)
    return networks.converted(item["model"], item["converted"], settings, bench)


def cost(item: Item, settings: Settings) -> list[Cost]:
    """Both runs, the integral, and a pass for each circuit whose layers run once more for every head."""
    rows, positions = settings["prompts"], 32 + settings["gen_length"]
    forward = 5 + 13 * len(settings["edges"])
    return [
        Cost(forward, rows, positions, item["model"]),
        Cost(settings["integration"] * 13, rows, positions, item["model"], backward=True),
    ]


def render(results: Results) -> Rendering:
    """Overlaps with the AR parent's circuit, faithfulness, and where the scores are."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    settings, edges = results.settings, results.settings["edges"][0]
    overlap_rows, faithful_rows = [], []
    findings: list[Finding] = []
    depth: dict[tuple[str, str], Interval] = {}
    shared: dict[tuple[str, str], Overlap] = {}
    notes: list[str] = []
    for task in TASKS:
        records = {label(one.item): one.value for one in results.where(task=task)}
        needed = (PARENT, "toy", last_conversion(settings))
        if lacking := [name for name in needed if name not in records]:
            notes.append(f"{task}: no comparison with the paper; no results of {', '.join(lacking)}.")
        parent = records.get(PARENT)
        for name, value in records.items():
            faithful_rows.append(_faithful(task, name, value, settings))
            depth[task, name] = early_share(value)
            if name != PARENT and parent is not None:
                shared[task, name] = overlap(parent, value, edges)
                overlap_rows.append(_overlap_row(task, name, shared[task, name]))
        if not lacking:
            findings += _findings(task, records, settings, shared, depth)
    tables = [
        Table(
            f"overlap with the circuit of {PARENT}, the {edges} strongest edges on paths; intervals over groups of "
            "prompts",
            ("task", "network", "Jaccard", "random edges of the same kinds", "weighted"),
            overlap_rows,
        ),
        Table(
            "circuits of each network",
            ("task", "network", "right answers", *(f"faithfulness, {k} edges" for k in settings["edges"]),
             "share of scores that enters the first half"),
            faithful_rows,
        ),
    ]  # fmt: skip
    curves = {
        f"{name}, {task}": [(k, _faithfulness(value, k)) for k in sorted(settings["edges"])]
        for task in TASKS
        for name, value in ((label(one.item), one.value) for one in results.where(task=task))
    }
    figure = line_chart(curves, x="edges chosen by EAP-IG", y="faithfulness")
    captions = {"circuits": "Whole networks are at 1."}
    return Rendering(tables, {"circuits": figure}, findings, notes, captions)


def _faithful(task: str, name: str, value: Any, settings: Settings) -> list[str]:
    right = f"{sum(value['right'])} of {len(value['right'])}"
    kept = [str(_faithfulness(value, k)) for k in settings["edges"]]
    return [task, name, right, *kept, str(early_share(value))]


def _faithfulness(value: Any, edges: int) -> Interval:
    _, share, low, high = value["faithfulness"][str(edges)]
    return Interval(share, low, high, len(value["right"]), len(value["right"]) - 1)


def _overlap_row(task: str, name: str, shared: "Overlap") -> list[str]:
    null = f"{shared.null[0]:.2f} [{shared.null[1]:.2f}, {shared.null[2]:.2f}]"
    return [task, name, str(shared.jaccard), null, str(shared.weighted)]


@dataclass(frozen=True)
class Overlap:
    """The overlap of two networks' circuits, with intervals over groups of prompts, and of random edges."""

    jaccard: Interval
    weighted: Interval
    null: tuple[float, float, float]
    drawn: tuple[float, ...]
    """The Jaccard index in every draw; the draws are the same for all pairs of networks with as many groups."""

    def minus(self, other: "Overlap") -> Interval:
        """The Jaccard index minus another pair's, with an interval over draws of the same groups in both.

        Raises:
            ValueError: the two have different numbers of groups.
        """
        one, two = self.jaccard, other.jaccard
        if one.n != two.n:
            raise ValueError(
                f"{one.n} and {two.n} groups of prompts cannot be paired; give the same groups of both"
            )
        apart = [a - b for a, b in zip(self.drawn, other.drawn, strict=True)]
        return bootstrapped(one.value - two.value, apart, one.n)


DRAWS = 100
"""Draws of groups of prompts."""


def overlap(one: Any, two: Any, edges: int) -> Overlap:
    """The overlap of two networks; the same groups of prompts are drawn in both."""
    import numpy as np
    import torch

    from dlm_lens.probes import Circuit, circuit_overlap
    from dlm_lens.probes.attribution.circuits import jaccard

    graph = _graph(one)
    both = [np.asarray(value["scores"]) for value in (one, two)]

    def circuit(mean: Any) -> Circuit:
        scores = torch.zeros(graph.exists.shape, dtype=torch.float64)
        scores[graph.exists] = torch.as_tensor(mean)
        return Circuit.of_scores(graph, scores, edges)

    def shares(mean: Any) -> Any:
        return np.abs(mean) / np.abs(mean).sum()

    whole = circuit_overlap(*(circuit(scores.mean(0)) for scores in both), draws=300)
    count = len(both[0])
    found: dict[str, list[float]] = {"jaccard": [], "weighted": []}
    for drawn in np.random.default_rng(0).integers(count, size=(DRAWS, count)):
        means = [scores[drawn].mean(0) for scores in both]
        found["jaccard"].append(jaccard(*(circuit(mean).edges for mean in means)))
        parts = [shares(mean) for mean in means]
        found["weighted"].append(float(np.minimum(*parts).sum() / np.maximum(*parts).sum()))
    index, weighted = (bootstrapped(getattr(whole, name), drawn, count) for name, drawn in found.items())
    return Overlap(index, weighted, (whole.null, whole.null_low, whole.null_high), tuple(found["jaccard"]))


def _graph(value: Any) -> Any:
    from dlm_lens.probes.attribution.edge_graph import EdgeGraph

    return EdgeGraph(*value["graph"])


def early_share(value: Any) -> Interval:
    """The share of absolute scores on edges into the first half of the layers, over groups of prompts."""
    return ratio_over_prompts(*_early(value), bounds=(0, 1))


def more_early(value: Any, other: Any) -> Interval:
    """`early_share` of one network minus that of another, over the same groups of prompts."""
    return difference_of_ratios(_early(value), _early(other), bounds=None)


def _early(value: Any) -> tuple[Any, Any]:
    """Per group of prompts the absolute scores on edges into the first half of the layers, and on all edges."""
    import numpy as np

    graph = _graph(value)
    scores = np.abs(np.asarray(value["scores"]))
    last = graph.mlp_input_at(graph.layers // 2 - 1)
    early = graph.exists.nonzero()[:, 1].numpy() <= last
    return scores[:, early].sum(1), scores.sum(1)


def last_conversion(settings: Settings) -> str:
    """The label of the network that was converted for the most steps."""
    return f"{PARENT} converted, {max(settings['conversion_steps'])} steps"


def _findings(task: str, records: Any, settings: Settings, overlaps: Any, depth: Any) -> Iterator[Finding]:
    last = last_conversion(settings)
    right = records[last]["right"]
    keeps = "after conversion masked models largely keep the AR model's circuit where a task is local (2601.14758)"
    if sum(right) < len(right) / 2:
        yield Finding(
            keeps,
            f"{task}: {last} answers {sum(right)} of {len(right)} right",
            "no counterpart",
            "a network that does not do the task has no circuit for it (a rule that was added after the run)",
        )
        return
    shared = overlaps[task, last]
    yield Finding.of(
        keeps,
        f"{task}: Jaccard index {shared.jaccard} of {last} with {PARENT}",
        is_above(shared.jaccard, shared.null[2]),
        why="agreement: above the 97.5% quantile of random edges of the same kinds, set before the run; both tasks "
        "read two numbers of a short prompt, and neither is the paper's",
        null=f"random edges of the same kinds: {shared.null[0]:.2f}",
    )
    controls = [name for name in ("toy", f"{PARENT}, seed 1") if (task, name) in overlaps]
    others = {name: overlaps[task, name].jaccard for name in controls}
    apart = {name: shared.minus(overlaps[task, name]) for name in controls}
    yield Finding.of(
        "the shared circuit is inherited, and not what any network learns from this text",
        f"{task}: {last} {shared.jaccard}; {'; '.join(f'{name} {found}' for name, found in others.items())}; "
        f"differences over the same groups {'; '.join(signed(found, 2) for found in apart.values())}",
        all_of(*(is_above(found, 0.0) for found in apart.values())),
        why="agreement: the differences from the networks with initial weights of their own are above 0, over the "
        f"same groups of prompts; {PAIRED}; toy was set before the run, and the AR network of another seed was "
        "added after it, as the stricter control",
        null="; ".join(f"{name}: {found.value:.2f}" for name, found in others.items()),
    )
    more = more_early(records[last], records[PARENT])
    yield Finding.of(
        "conversion moves processing to early layers (2601.14758)",
        f"{task}: share of scores on edges into the first half of the layers {depth[task, last]}, before "
        f"{depth[task, PARENT]}, difference {signed(more, 2)}",
        is_above(more, 0.0),
        why=f"agreement: the difference over the same groups of prompts is above 0; {PAIRED}",
        null="0: the AR model's own share",
    )


PAIRED = (
    "until a review it was the other network's interval that had to be exceeded, which is no test of a difference"
)
"""How the rules of the comparisons between networks changed after the run."""


def _interval(found: Any) -> tuple[float, float, float]:
    return float(found.value), float(found.low), float(found.high)


SMALL: dict[str, Any] = {
    "networks": 2, "conversion_steps": [30, 300], "prompts": 32, "groups": 8, "edges": [50, 100],
    "integration": 5, "gen_length": 16, "twin_steps": 3000, "trained": "runs/twins",
    "conversions": "runs/conversion",
}  # fmt: skip
"""Five minutes of a core, and the training of the twins and of the conversion where they are not there."""

FULL: dict[str, Any] = {
    **SMALL,
    "networks": 3,
    "conversion_steps": [30, 300, 3000],
    "prompts": 64,
    "integration": 20,
}

EXPERIMENT = Experiment(
    name="axis-circuits",
    shows="2601.14758",
    title="the circuit of an AR model before and after its conversion to a masked DLM",
    metric="Jaccard index of the strongest edges of two networks, and exact faithfulness of each circuit",
    small=SMALL,
    full=FULL,
    items=items,
    run=run,
    render=render,
    cost=cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
