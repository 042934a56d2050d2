"""Table 1: DLMs converted from an autoregressive model, plain, with a sink token, and with gated attention."""

from collections.abc import Sequence

from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.one_token import paper, paper_scale, tables
from dlm_lens.experiments.one_token.miniature import SCRATCH
from dlm_lens.experiments.results import Results

SINK, GATE = "DLM + extra token", "DLM + GA"
VARIANTS = ("plain", "sink", "gated")
CONFIGS = ("qwen2.5-0.5b", "qwen2.5-0.5b-sink", "qwen2.5-0.5b-gated",
           "qwen2.5-1.5b", "qwen2.5-1.5b-sink", "qwen2.5-1.5b-gated")  # fmt: skip


def findings(results: Results) -> list[Finding]:
    """The sink token helps; the gate helps the small model and harms the large one."""
    gate = tables.difference(results, "gated", "plain")
    found = [
        tables.improves(
            results,
            f"the sink token is better: {_gain(paper.TABLE1_SMALL, SINK):+.2f} points over eight benchmarks at "
            f"0.5B, {_gain(paper.TABLE1_LARGE, SINK):+.2f} at 1.5B",
            "sink token - DLM", "sink", "plain",
        ),
        Finding(
            f"the gate helps at 0.5B ({_gain(paper.TABLE1_SMALL, GATE):+.2f} points) and harms at 1.5B "
            f"({_gain(paper.TABLE1_LARGE, GATE):+.2f})",
            tables.said("gate - DLM", gate),
            "no counterpart",
            "in the paper the sign depends on the size, and there is one size here; a new gate halves every z at "
            "the start, a new sink token takes a little attention",
            tables.noise(results),
        ),
    ]  # fmt: skip
    return [*found, sink_against_gate(results)]


def sink_against_gate(results: Results) -> Finding:
    """Which of the two is better."""
    table = paper.TABLE2 if results.settings["start"] == SCRATCH else paper.TABLE1_SMALL
    gain = paper.mean_gain(table, SINK, GATE)
    said = f"the sink token is better than the gate ({gain:+.2f} points)"
    return tables.improves(results, said, "sink token - gate", "sink", "gated")


def _gain(rows: paper.Rows, name: str) -> float:
    return paper.mean_gain(rows, name, "DLM")


def wording() -> Sequence[str]:
    """Where the paper's tables say less than its sentences."""
    one, two = (paper.lower(rows, SINK, "DLM") for rows in (paper.TABLE1_SMALL, paper.TABLE1_LARGE))
    gate = paper.lower(paper.TABLE1_SMALL, GATE, "DLM")
    return (
        'The paper says "consistent performance improvements" at 0.5B; by its own table the sink token loses on '
        f"{'; '.join(one)} (0.5B) and {'; '.join(two)} (1.5B), the gate on {'; '.join(gate)} (0.5B). It states no "
        "seeds and no intervals.",
    )


def render(results: Results) -> Rendering:
    """Tables and findings."""
    made = tables.rendering(results, "plain", findings, VARIANTS)
    return Rendering(made.tables, made.figures, made.findings, [*made.notes, *given(results), *wording()])


def given(results: Results) -> Sequence[str]:
    """What the seeds of a conversion share."""
    if results.settings["configs"]:
        return ()
    name = tables.AR_TEXT if tables.on_text(results) else results.settings["start"]
    return (
        f"All seeds begin with the weights of {name}, which has learned this language from left to right; a seed "
        "decides the order of the data, the masks and what is new. Intervals tell no more.",
    )


EXPERIMENT = tables.experiment(
    name="one-token-table1",
    shows="2601.19657, Table 1",
    title="DLMs converted from an AR model: plain, with a sink token, with gated attention",
    small=tables.small(VARIANTS, start="toy-ar"),
    full=tables.full(VARIANTS, CONFIGS, paper_scale.cells("table1", paper.BENCHMARKS)),
    render=render,
    paper=[
        paper.printed("Table 1, 0.5B, 30B tokens", paper.TABLE1_SMALL),
        paper.printed("Table 1, 1.5B, 100B tokens", paper.TABLE1_LARGE),
    ],
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
