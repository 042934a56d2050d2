"""Table 5: the sink token's value forced to zero; beside it the softmax that leaves room for nothing."""

from dataclasses import replace

from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.one_token import paper, paper_scale, tables
from dlm_lens.experiments.results import Results

VARIANTS = ("plain", "sink", "zero", "off-by-one")


def findings(results: Results) -> list[Finding]:
    """A zero vector does as well; off-by-one is the same without a learned key."""
    points = paper.mean_gain(paper.TABLE5, "Zero-value token", "Stable sink token")
    off = tables.difference(results, "off-by-one", "plain")
    return [
        tables.alike(
            results,
            f"a value of zero does as well ({points:+.2f} points over five benchmarks)",
            "zero value - sink token",
            "zero",
            "sink",
        ),
        tables.improves(
            results,
            "a value of zero still helps (Table 4, column 0)",
            "zero value - DLM",
            "zero",
            "plain",
        ),
        Finding(
            "-",
            tables.said("off-by-one softmax - DLM", off),
            "no counterpart",
            "beyond the paper: a zero-value token whose key scores 0 for every query (Miller 2023)",
            tables.noise(results),
        ),
    ]


def render(results: Results) -> Rendering:
    """Tables and findings; differences are to the plain network."""
    made = tables.rendering(results, "plain", findings, VARIANTS)
    return replace(made, notes=[*tables.ablated(results), *made.notes])


EXPERIMENT = tables.experiment(
    name="one-token-table5",
    shows="2601.19657, Table 5",
    title="the sink token's value forced to zero, and the off-by-one softmax",
    small=tables.small(VARIANTS, start="toy-ar"),
    full=tables.full(
        VARIANTS,
        ("qwen2.5-0.5b-sink", "qwen2.5-0.5b-zero-value", "qwen2.5-0.5b-off-by-one"),
        paper_scale.cells("table1", paper.FEWER),
    ),
    render=render,
    paper=[paper.printed("Table 5", paper.TABLE5, paper.FEWER)],
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
