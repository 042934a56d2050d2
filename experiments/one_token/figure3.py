"""Figure 3: the learned sink token per layer, its value norm against all others' and the attention it receives."""

from collections.abc import Iterator
from typing import Any

from dlm_lens.experiments.attention_sinks.recorded_runs import items, rounded
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, Table, Verdict, run_script
from dlm_lens.experiments.one_token import recorded_runs
from dlm_lens.experiments.results import Item, Results, Settings

SMALL: dict[str, Any] = {"models": ["toy-sink"], **recorded_runs.SMALL}
FULL: dict[str, Any] = {
    **SMALL, "models": ["runs/qwen2.5-0.5b-sink-sft", "runs/qwen2.5-1.5b-sink-sft"],
    "task": "gsm8k.jsonl", "prompts": 400, "batch": 8, "sampler": {"gen_length": 256, "steps": 256},
}  # fmt: skip
"""The paper samples 100K inference steps: 400 prompts of 256 steps. `models` are your
fine-tuned checkpoints (sft-gsm8k)."""


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per layer: norms and share; every record is a mean over its prompts."""
    from dlm_lens.probes import value_norms

    _, recording = recorded_runs.record_prompts(item, settings, bench)
    profile = value_norms(recording, "learned").profile
    columns = [name for name in profile.columns if name != "layer"]
    return {
        "prompts": recording.run.tokens.shape[0],
        **{name: rounded(profile[name].tolist(), 5) for name in columns},
    }


def per_layer(results: Results, model: str, name: str) -> list[float]:
    """Mean over prompts."""
    records = results.where(model=model)
    total = sum(record.value["prompts"] for record in records)
    columns = zip(*(record.value[name] for record in records), strict=True)
    weights = [record.value["prompts"] / total for record in records]
    return [sum(w * value for w, value in zip(weights, column, strict=True)) for column in columns]


def render(results: Results) -> Rendering:
    """One line per layer, two figures."""
    from dlm_lens.experiments.attention_sinks.charts import line_chart

    rows: list[list[str]] = []
    norms: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    for model in results.models:
        sink, other, share = (per_layer(results, model, name) for name in ("norm_sink", "norm_other", "share"))
        norms |= {f"{model}, sink token": list(enumerate(sink)), f"{model}, others": list(enumerate(other))}
        shares[model] = list(enumerate(share))
        for layer, values in enumerate(zip(sink, other, share, strict=True)):
            one, two, part = values
            rows.append([model, str(layer), f"{one:.3f}", f"{two:.3f}", f"{one / two:.3f}", f"{100 * part:.2f}%"])
    head = ["model", "layer", "value norm of the sink token", "of all others", "ratio", "share of attention"]
    count = results.settings["prompts"]
    table = Table(f"means over {count} prompts, all steps and heads (Eq. 15 and 16)", head, rows)
    figures = {
        "norms": line_chart(norms, x="layer", y="mean value norm"),
        "shares": line_chart(shares, x="layer", y="share of attention on the sink token"),
    }
    told = [finding for model in results.models for finding in findings(results, model)]
    return Rendering([table], figures, told)


def findings(results: Results, model: str) -> Iterator[Finding]:
    """Shorter values, a large share; counted over the layers between the first and the last, as the paper says."""
    sink, other, share = (per_layer(results, model, name) for name in ("norm_sink", "norm_other", "share"))
    inner = range(1, len(sink) - 1)
    short = sum(sink[layer] < other[layer] for layer in inner)
    verdict: Verdict = "agrees" if short == len(inner) else "disagrees" if not short else "undecided"
    yield Finding(
        "in the layers between the first and the last the sink token's value is much shorter than the others'",
        f"{model}: shorter in {short} of {len(inner)} inner layers",
        verdict,
    )
    positions = results.settings["sampler"]["gen_length"]
    mean = sum(share[layer] for layer in inner) / max(1, len(inner))
    large: Verdict = "agrees" if mean > 0.2 else "disagrees"
    yield Finding(
        "there it receives a large share of all attention (a figure without numbers)",
        f"{model}: {100 * mean:.1f}% in the inner layers; evenly spread it would be below {100 / positions:.1f}%",
        large,
        "large is taken as above 20%",
    )


EXPERIMENT = Experiment(
    name="one-token-figure3",
    shows="2601.19657, Figure 3",
    title="the learned sink token per layer: value norm and share of attention",
    metric="L2 norm of values, mean over heads; share of all attention",
    small=SMALL,
    full=FULL,
    items=items,
    run=run,
    render=render,
    cost=recorded_runs.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
