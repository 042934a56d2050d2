"""Does it help to discount the activations of sinks when weights are pruned (2602.17664)? With its control."""

from collections.abc import Iterator, Mapping
from typing import Any

from dlm_lens.experiments.attention_sinks.charts import line_panels
from dlm_lens.experiments.attention_sinks.problems import is_right, problems, solved_problems
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, paired_difference, signed
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

METHODS = ("magnitude", "Wanda", "Wanda, sinks discounted", "Wanda, random positions discounted")
DISCOUNTS = {METHODS[1]: "none", METHODS[2]: "sinks", METHODS[3]: "random"}

BOUNDS = {"right": (0.0, 1.0), "likelihood": None}
"""What is measured of a network, and the smallest and largest possible value: a share, and nats per token."""


def items(settings: Settings) -> Iterator[Item]:
    """The network as it is, then every sparsity and method; the control several times.

    Raises:
        ValueError: a task without solutions, or with fewer problems than held-out and calibration prompts.
    """
    task, held, calibration = (settings[name] for name in ("task", "prompts", "calibration"))
    every = solved_problems(task, "axis-pruning")
    if held < 1 or calibration < 1 or held + calibration > len(every):
        raise ValueError(
            f"prompts is {held} and calibration {calibration}; each is at least 1, and both together at most "
            f"{len(every)}, the problems of {task}, since no prompt is both held out and of the calibration"
        )
    for model in settings["models"]:
        yield {"model": model, "sparsity": 0.0, "method": "none", "draw": 0}
        for sparsity in settings["sparsities"]:
            for method in METHODS:
                for draw in range(settings["controls"] if method == METHODS[3] else 1):
                    yield {"model": model, "sparsity": sparsity, "method": method, "draw": draw}


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per held-out prompt: whether the answer is right, and the log-likelihood per token of the solution."""
    from contextlib import nullcontext

    from dlm_lens.probes import pruned

    model = bench.model(item["model"])
    norms = None
    if item["method"] in DISCOUNTS:
        key = ("norms", item["method"], item["draw"])
        norms = bench.once(key, lambda: _norms(model, DISCOUNTS[item["method"]], item["draw"], settings))
    discounted = None if norms is None else round(norms.discounted, 4)
    with pruned(model, item["sparsity"], norms) if item["sparsity"] else nullcontext():
        return {**_scores(model, settings), "discounted": discounted}


def _norms(model: Any, discount: str, seed: int, settings: Settings) -> Any:
    """Norms over the run of the calibration prompts, which are the last ones of the task."""
    import dlm_lens as dl
    from dlm_lens.probes import input_norms

    texts = [one.prompt for one in problems(settings["task"])[-settings["calibration"] :]]
    done = dl.denoise(model, texts, **settings["sampler"])
    chosen: Any = discount
    return input_norms(model, done, discount=chosen, std=settings["std"], alpha=settings["alpha"], seed=seed)


def _scores(model: Any, settings: Settings) -> dict[str, Any]:
    """Exact match, and a likelihood from the same random masks for every network.

    The masks of every prompt are its own: with one seed prompts of equal length share them, and their error is no
    part of an interval over prompts.
    """
    import dlm_lens as dl

    held = problems(settings["task"])[: settings["prompts"]]
    texts = [one.prompt for one in held]
    done = dl.denoise(model, texts, **settings["sampler"])
    references = reference_answers(settings)
    seeds = list(range(len(held)))
    found = dl.log_likelihood(model, texts, references, "mc", samples=settings["samples"], seed=seeds)
    return {
        "right": [is_right(settings["task"], text, one) for text, one in zip(done.answers, held, strict=True)],
        "likelihood": [round(float(one), 5) for one in found.per_token],
    }


def reference_answers(settings: Settings) -> list[str]:
    """The written solutions of the held-out problems."""
    return [one.solution for one in problems(settings["task"])[: settings["prompts"]]]


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A run of the held-out prompts and their likelihoods; norms once per method."""
    steps = int(settings["sampler"].get("steps", settings["sampler"].get("gen_length", 32)))
    return [Cost(steps + settings["samples"], settings["prompts"], 64, item["model"])]


def scores(results: Results, model: str, sparsity: float, method: str, name: str) -> list[float]:
    """A number per prompt, the mean over draws of the control."""
    wanted: Mapping[str, Any] = {"model": model, "sparsity": sparsity, "method": method}
    found = [
        [float(one) for one in record.value[name]]
        for record in results.records
        if all(record.item[key] == value for key, value in wanted.items())
    ]
    return [sum(each) / len(each) for each in zip(*found, strict=True)]


def render(results: Results) -> Rendering:
    """Exact match and likelihood by sparsity and method."""
    rows, panels = [], {}
    for model in results.models:
        whole = {
            name: mean_over_prompts(scores(results, model, 0.0, "none", name), bounds=bounds)
            for name, bounds in BOUNDS.items()
        }
        rows.append([model, "0", "none", "-", *map(str, whole.values()), str(whole["right"].n)])
        for sparsity in results.settings["sparsities"]:
            for method in METHODS:
                pair = {name: scores(results, model, sparsity, method, name) for name in BOUNDS}
                records = [r for r in results.records if r.item["method"] == method and r.item["model"] == model]
                if not pair["right"]:  # an unfinished run
                    continue
                weight = records[0].value["discounted"]
                means = [str(mean_over_prompts(pair[name], bounds=bounds)) for name, bounds in BOUNDS.items()]
                discounted = "-" if weight is None else f"{weight:.2f}"
                rows.append([model, f"{sparsity:g}", method, discounted, *means, str(len(pair["right"]))])
        for name, title in (("right", "exact match"), ("likelihood", "log-likelihood per token")):
            panels[f"{model}: {title}"] = {
                method: [(0.0, whole[name])]
                + [
                    (sparsity, mean_over_prompts(known, bounds=BOUNDS[name]))
                    for sparsity in results.settings["sparsities"]
                    if (known := scores(results, model, sparsity, method, name))
                ]
                for method in METHODS
            }
    table = Table(
        "pruned networks on held-out prompts; 95% intervals over prompts",
        [
            "model",
            "sparsity",
            "method",
            "positions discounted",
            "exact match",
            "log-likelihood per token",
            "prompts",
        ],
        rows,
    )
    return Rendering([table], {"pruning": line_panels(panels, x="sparsity", y="")}, list(findings(results)))


def difference(
    results: Results, model: str, sparsity: float, name: str, other: str, method: str = METHODS[2]
) -> Interval:
    """Sinks discounted minus another method, over the same prompts."""
    one, two = (scores(results, model, sparsity, which, name) for which in (method, other))
    return paired_difference(one, two, bounds=(-1, 1) if name == "right" else None)


def has(results: Results, model: str, sparsity: float, *methods: str) -> bool:
    """Whether there are results of all these methods."""
    return all(results.where(model=model, sparsity=sparsity, method=method) for method in methods)


def findings(results: Results) -> Iterator[Finding]:
    """The paper's claim against Wanda, and against the control, at every sparsity, on the likelihood.

    Those whose methods are not all computed yet are left out.
    """
    for model in results.models:
        for sparsity in results.settings["sparsities"]:
            if not has(results, model, sparsity, *METHODS[1:]):
                continue
            gain = difference(results, model, sparsity, "likelihood", METHODS[1])
            beyond = difference(results, model, sparsity, "likelihood", METHODS[3])
            right = difference(results, model, sparsity, "right", METHODS[1])
            yield Finding.of(
                "(2602.17664) discounting the activations of sinks makes Wanda's pruning better",
                f"{model}, sparsity {sparsity:g}: {signed(beyond)} nats per token against the control, "
                f"{signed(gain)} against Wanda; exact match {signed(right)} against Wanda",
                is_above(beyond, 0.0),
                why="agreement: a higher likelihood of held-out solutions than with as many random positions "
                "discounted",
                null="0: any discounted positions do as well",
            )
        largest = max(results.settings["sparsities"])
        if not has(results, model, largest, *METHODS[:2]):
            continue
        wanda = difference(results, model, largest, "likelihood", METHODS[0], METHODS[1])
        yield Finding.of(
            "(2306.11695) Wanda's score is better than magnitude",
            f"{model}, sparsity {largest:g}: {signed(wanda)} nats per token",
            is_above(wanda, 0.0),
            why="agreement: a higher likelihood of held-out solutions; shows that the measurement can tell methods "
            "apart",
            null="0: the inputs' norms tell nothing",
        )


EXPERIMENT = Experiment(
    name="axis-pruning",
    shows="2602.17664",
    title="pruning with activations at sinks discounted, and at random positions",
    metric="log-likelihood per token of held-out solutions, and exact match",
    small={
        "models": ["toy"], "task": "toy_arithmetic", "prompts": 48, "calibration": 16,
        "sampler": {"gen_length": 32, "steps": 16}, "sparsities": [0.3, 0.5, 0.6], "controls": 2, "samples": 16,
        "std": 2.0, "alpha": 5.0,
    },
    full={
        "models": ["GSAI-ML/LLaDA-8B-Base"], "task": "toy_arithmetic", "prompts": 64, "calibration": 16,
        "sampler": {"gen_length": 64}, "sparsities": [0.5, 0.6, 0.7], "controls": 3, "samples": 64, "std": 2.0,
        "alpha": 5.0,
    },
    items=items,
    run=run,
    render=render,
    cost=cost,
)  # fmt: skip

if __name__ == "__main__":
    run_script(EXPERIMENT)
