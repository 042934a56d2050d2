"""Section 5.2: with a sink hidden, is a DLM less confident where the sink mattered, and unmasks elsewhere first?"""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of
from dlm_lens.experiments.attention_sinks.recorded_runs import rounded
from dlm_lens.experiments.experiment import Cost, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, mean_over_prompts, ratio_over_prompts
from dlm_lens.experiments.model_settings import settings_of
from dlm_lens.experiments.results import Item, Results, Settings

KINDS = ("sinks", "random", "random, same mass")


def items(settings: Settings) -> Iterator[Item]:
    """The mask and its controls, on the canvases of the same runs without hooks."""
    for item in recorded_runs.items(settings):
        for kind in KINDS:
            yield {**item, "hidden": kind}


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: how often the prediction flips, over all open positions and at the position unmasked next."""
    import dlm_lens as dl
    from dlm_lens.hooks import mask_random, mask_top_sinks

    model = bench.model(item["model"])
    texts = chat(model, problems_of(settings, item["start"]), settings)
    done = dl.denoise(model, texts, **settings["sampler"])
    mask = mask_top_sinks(settings["columns"])
    hooks = dict(zip(KINDS, (mask, mask_random(like=mask), mask_random(like=mask, match="mass")), strict=True))
    replayed = dl.replay(model, done, [hooks[item["hidden"]]], attention=False)
    return {"flips": [_flips(replayed, row) for row in range(len(texts))]}


def _flips(replayed: Any, row: int) -> dict[str, Any]:
    """Counts of one prompt. Open positions: those that the sampler may unmask at a step, in the current block."""
    import torch

    run, found = replayed.run, dict.fromkeys(("open", "flipped", "first", "first_flipped"), 0)
    kept: dict[str, list[float]] = {"change": [], "sure_flipped": [], "sure_kept": []}
    position = torch.arange(replayed.predicted.shape[-1])
    for step, (start, stop) in enumerate(run.spans):
        here = replayed.predicted[step, row]
        inside = here & (position >= start) & (position < stop)
        here = inside if bool(inside.any()) else here
        if not bool(here.any()):
            continue
        flipped, sure = replayed.flipped[step, row], replayed.confidence_hooked[step, row]
        best = int(sure.masked_fill(~here, -torch.inf).argmax())
        found["open"] += int(here.sum())
        found["flipped"] += int(flipped[here].sum())
        found["first"] += 1
        found["first_flipped"] += int(flipped[best])
        kept["change"] += replayed.confidence_change[step, row][here].tolist()
        kept["sure_flipped"] += sure[here & flipped].tolist()
        kept["sure_kept"] += sure[here & ~flipped].tolist()
    return found | {name: rounded(sum(v) / len(v)) if v else None for name, v in kept.items()}


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A run, and two passes over each of its canvases."""
    return [Cost(one.passes * 3, one.rows, one.positions, one.model) for one in recorded_runs.cost(item, settings)]


def render(results: Results) -> Rendering:
    """Flips over all open positions against flips at the position that is unmasked next."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows, curves = [], {}
    for model in results.models:
        for kind in KINDS:
            rows.append([
                model, kind, str(flips(results, model, kind, "flipped", "open")),
                str(flips(results, model, kind, "first_flipped", "first")),
                *(str(mean_over_prompts(_of(results, model, kind, name)))
                  for name in ("change", "sure_flipped", "sure_kept")),
                str(len(_of(results, model, kind, "open"))),
            ])  # fmt: skip
            curves[f"{model}, {kind}"] = [
                (0, flips(results, model, kind, "flipped", "open")),
                (1, flips(results, model, kind, "first_flipped", "first")),
            ]
    head = ["model", "hidden", "flipped, of the open positions", "flipped, of those surest under the mask",
            "change of confidence", "confidence where flipped", "where not", "n prompts"]  # fmt: skip
    counts = {settings_of(results.settings, model)["columns"] for model in results.models}
    columns = " or ".join(map(str, sorted(counts)))
    table = Table(f"{columns} column(s) per head hidden on canvases of unmasked runs; 95% intervals over prompts",
                  head, rows)  # fmt: skip
    figure = line_chart(curves, x="", y="prediction flipped", ticks=["open positions", "the surest, written next"])
    return Rendering([table], {"flips": figure}, list(_findings(results)))


def flips(results: Results, model: str, kind: str, top: str, bottom: str) -> Interval:
    """Ratio of two counts, with an interval over prompts."""
    return ratio_over_prompts(_of(results, model, kind, top), _of(results, model, kind, bottom))


def _of(results: Results, model: str, kind: str, name: str) -> list[Any]:
    return [one[name] for one in results.listed("flips", model=model, hidden=kind)]


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        everywhere = flips(results, model, "sinks", "flipped", "open")
        first = flips(results, model, "sinks", "first_flipped", "first")
        if results.is_causal(model):
            yield Finding("an AR model must write the affected token", f"{model}: {first} of the next tokens flip",
                          "no counterpart", "every step writes its one open position")  # fmt: skip
            continue
        yield Finding(
            "(hypothesis) the model becomes less confident where the sink mattered, and does not write there",
            f"{model}: {everywhere} of the open positions flip, {first} of those that would be written next",
            "agrees"
            if first.high < everywhere.low
            else "disagrees"
            if first.low > everywhere.high
            else "undecided",
            "on fixed canvases, so that nothing is carried over from step to step",
        )


EXPERIMENT = recorded_runs.experiment(
    name="beyond-confidence",
    shows="2510.15731, Section 5.2",
    title="where predictions flip when sinks are hidden, and whether these are written",
    metric="share of predictions that change on the same canvas",
    small={"models": ["toy", "toy-ar"], "columns": 1},
    full={"columns": 5},
    items=items,
    run=run,
    render=render,
    cost=cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
