"""Figure 10: the share of tokens that are sinks, as a function of eps, in the readings of Eq. 3."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_lens.experiments.attention_sinks import recorded_runs
from dlm_lens.experiments.attention_sinks.recorded_runs import per_network, per_prompt, record_prompts, rounded
from dlm_lens.experiments.experiment import Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALUES = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.5, 10.0]
SHARES = [0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.99]

READINGS = {
    "relative": "scores relative to uniform",
    "column sums": "column sums",
    "percent": "A-bar in percent",
    "literal": "A-bar from 0 to 1, as printed",
}
"""The scores that Eq. 3 may mean; eps is on the same scale."""

SOURCES = ("measured", "exponential")
LEVELS = ("layer", "model")
PAPER_EPS, PAPER_SHARE = 3.0, 0.96


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: the number of keys, and the share of them that are sinks at each eps of each reading.

    The same for exponential scores in place of the model's, one draw per pattern.
    """
    found: dict[str, Any] = {"length": [], "n": []}
    for number, prompt_run in enumerate(record_prompts(item, settings, bench)):
        received = prompt_run.received["all"]
        given = {"measured": received, "exponential": exponential_like(received, item["start"] + number)}
        for source in SOURCES:
            for reading in READINGS:
                kept, n = sweep(given[source], reading, settings)
                found.setdefault(f"{source} {reading}", []).append(kept)
        for level in LEVELS:
            kept, merged = sweep(received.at_level(level), "relative", settings)
            found.setdefault(f"{level} relative", []).append(kept)
            found.setdefault(f"{level} n", []).append(merged)
        found["length"].append(int((~received.values.isnan()).flatten(0, -2).any(0).sum()))
        found["n"].append(n)
    return found


def sweep(received: Any, reading: str, settings: Settings) -> tuple[list[float], int]:
    """The share of the keys that are sinks at each eps of a reading, and the number of keys.

    `eps_sweep` of one prompt, without intervals: one excess over the mean of the others is compared with every eps.
    """
    import torch

    from dlm_lens.sinks import AboveMean

    shares = reading in ("percent", "literal")
    rule = AboveMean(0.0, literal=shares)
    scores = (received.on_scale("column sum") if reading == "column sums" else received).read(rule.quantity)[0]
    excess = (scores.float() - rule.thresholds(scores.float())).flatten()
    excess = excess[~excess.isnan()].sort().values
    values = settings["shares" if reading == "literal" else "values"]
    eps = torch.tensor(values, dtype=excess.dtype) / (100 if reading == "percent" else 1)
    above = len(excess) - torch.searchsorted(excess, eps, right=True)
    return rounded((above.double() / max(1, len(excess))).tolist(), 6), len(excess)


def exponential_like(received: Any, seed: int) -> Any:
    """The same keys with exponential scores s_j, whose sum_j s_j e_j is the pattern's number of queries."""
    import torch

    draw = torch.empty_like(received.values, dtype=torch.float64)
    draw.exponential_(generator=torch.Generator().manual_seed(seed))
    draw = draw.masked_fill(received.values.isnan(), torch.nan)
    even = received.expected.double().expand(draw.shape).masked_fill(draw.isnan(), torch.nan)
    scale = even.nansum(-1, keepdim=True) / (draw * even).nansum(-1, keepdim=True)
    return replace(received, values=(draw * scale).float())


def render(results: Results) -> Rendering:
    """The share of keys that are sinks over eps in every reading; the share that is left out at eps = 1, 3, 5."""
    values, rows = results.settings["values"], []
    shown = [eps for eps in (1.0, 3.0, 5.0) if eps in values]
    for model in results.models:
        lengths = [length for part in per_network(results, "length", model=model) for length in part]
        size = f"{min(lengths)} to {max(lengths)}"
        for reading in readings_of(results, model):
            cells = [removed(results, model, eps, reading) for eps in shown]
            null = [removed(results, model, eps, reading, "exponential") for eps in shown]
            rows.append([
                model, READINGS[reading], "head", size, *map(str, cells),
                ", ".join(f"{one.value:.2f}" for one in null), str(len(lengths)),
            ])  # fmt: skip
        for level in LEVELS:
            cells = [removed(results, model, eps, "relative", level) for eps in shown]
            rows.append([model, READINGS["relative"], level, size, *map(str, cells), "", str(len(lengths))])
    head = ["model", "Eq. 3 on", "level", "S", *[f"left out at eps = {eps:g}" for eps in shown],
            "exponential scores", "n"]  # fmt: skip
    table = Table("share of the keys that are no sink; 95% intervals", head, rows)
    return Rendering([table], {"sweep": curves(results)}, list(findings(results)))


def readings_of(results: Results, model: str) -> list[str]:
    """Readings with eps = 3; in a DLM column sums are the scores relative to uniform."""
    return ["relative", "column sums", "percent"] if results.is_causal(model) else ["relative", "percent"]


def removed(
    results: Results, model: str, eps: float, reading: str = "relative", source: str = "measured"
) -> Interval:
    """Share of the keys that are not sinks by Eq. 3; `source` is "measured", "exponential", or a merged level."""
    place = results.settings["shares" if reading == "literal" else "values"].index(eps)
    names = [f"{source} {reading}", f"{source} n" if source in LEVELS else "n"]
    return per_prompt(
        results, model, names, lambda kept, count: ((1 - kept[place]) * count, float(count)), bounds=(0, 1)
    )


def curves(results: Results) -> "Figure":
    """A panel per reading: percentage of the keys that are sinks over eps, with the paper's point at eps = 3."""
    from matplotlib.figure import Figure

    from dlm_lens.experiments.attention_sinks.charts import COLOURS, MARKS

    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    for number, (reading, words) in enumerate(READINGS.items(), 1):
        axes = figure.add_subplot(2, 2, number)
        places = results.settings["shares" if reading == "literal" else "values"]
        for line, model in enumerate(results.models):
            found = [removed(results, model, eps, reading) for eps in places]
            kept = 100 * (1 - np.array([one.value for one in found]))
            bars = 100 * np.array([[one.high - one.value, one.value - one.low] for one in found]).T
            axes.errorbar(
                places, kept, yerr=np.nan_to_num(np.clip(bars, 0, None)), label=model if number == 1 else None,
                color=COLOURS[line % 8], marker=MARKS[line % 8], markersize=3, linewidth=1, capsize=2,
            )  # fmt: skip
        for line, model in enumerate(_null_models(results)):
            null = [100 * (1 - removed(results, model, eps, reading, "exponential").value) for eps in places]
            axes.plot(
                places, null, color="black", linestyle=("--", ":")[line], linewidth=1,
                label=f"exponential scores on the keys of {model} (null)" if number == 1 else None,
            )  # fmt: skip
        if reading != "literal":
            axes.plot([PAPER_EPS], [100 * (1 - PAPER_SHARE)], marker="*", markersize=12, color="#e69f00",
                      markeredgecolor="black", linestyle="", zorder=5,
                      label="the paper: at most 4% at eps = 3, S = 64" if number == 1 else None)  # fmt: skip
        axes.set_yscale("symlog", linthresh=1.0, linscale=0.5)
        axes.set_ylim(0, 100)
        axes.set_yticks([0, 1, 4, 10, 50, 100], ["0", "1", "4", "10", "50", "100"])
        axes.set_xlim(left=0)
        axes.grid(color="0.92", linewidth=0.6)
        axes.tick_params(labelsize=7)
        axes.set_title(f"Eq. 3 on {words}", loc="left", fontsize=8)
        axes.set_xlabel("eps" + (", in points" if reading == "percent" else ""), fontsize=7)
        axes.set_ylabel("keys that are sinks, in percent", fontsize=7)
    figure.legend(loc="outside lower left", ncols=3, fontsize=7, frameon=False)
    return figure


def _null_models(results: Results) -> list[str]:
    """The first DLM and the first AR model, whose keys the null is drawn for."""
    causal = [model for model in results.models if results.is_causal(model)]
    return [*results.diffusion_models[:1], *causal[:1]]


def _three(found: Interval) -> str:
    """An interval with three digits, which the paper's 0.96 is close to."""
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def findings(results: Results) -> Iterator[Finding]:
    """The 96% in every reading."""
    if PAPER_EPS not in results.settings["values"]:
        return
    for model in results.models:
        for reading in readings_of(results, model):
            here = removed(results, model, PAPER_EPS, reading)
            null = removed(results, model, PAPER_EPS, reading, "exponential").value
            yield Finding.of(
                "eps = 3 filters out at least 96% of the tokens of a sequence of 64",
                f"{model}: {_three(here)} (every head; Eq. 3 on {READINGS[reading]})",
                is_above(here, PAPER_SHARE),
                why="agreement: at least 0.96 are left out; this is about the threshold and no evidence for sinks",
                null=f"exponential scores: {null:.3f}; uniform attention: 1",
            )
        literal = [removed(results, model, eps, "literal").value for eps in results.settings["shares"]]
        least = next(
            (eps for eps, share in zip(results.settings["shares"], literal, strict=True) if share >= PAPER_SHARE),
            None,
        )
        yield Finding(
            "eps = 3 filters out at least 96% of the tokens of a sequence of 64",
            f"{model}: 1.00 of the keys, as of any pattern (Eq. 3 on {READINGS['literal']}); 96% are left out from "
            f"eps = {'-' if least is None else f'{least:g}'} on",
            "no counterpart",
            "no mean of probabilities exceeds another by 3",
        )


PAPER = (
    Table("Appendix B and Figure 10", ["statement", "number"], [
        ["tokens left out at eps = 3, S = 64, \"most all the analysed DLMs\"", "at least 96%"],
    ]),
)  # fmt: skip

EXPERIMENT = recorded_runs.experiment(
    name="fig10-eps",
    shows="2510.15731, Figure 10",
    title="share of tokens that are no sink, over the threshold eps",
    metric="share of (step, layer, head, key) that Eq. 3 leaves out",
    small={"values": VALUES, "shares": SHARES, "models": ["toy", "toy-sink", "toy-gated", "toy-ar"]},
    full={"values": VALUES, "shares": SHARES, "sampler": {"gen_length": 32, "steps": 32}},
    run=run,
    render=render,
    paper=PAPER,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
