"""Table 3: the sink token before or after the sequence."""

from dataclasses import replace

from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.one_token import paper, paper_scale, tables
from dlm_lens.experiments.results import Results

VARIANTS = ("plain", "sink", "end")


def findings(results: Results) -> list[Finding]:
    """Both places do the same."""
    points = paper.mean_gain(paper.TABLE3, "End", "Front")
    worse = "; ".join(paper.lower(paper.TABLE3, "End", "Front", paper.FEWER))
    return [
        tables.alike(
            results,
            f"the place does not matter (end - front: {points:+.2f} points over five benchmarks; lower on {worse})",
            "end - front",
            "end",
            "sink",
        ),
        tables.improves(
            results,
            "at the end it is better than none (Table 4, column 0)",
            "end - DLM",
            "end",
            "plain",
        ),
    ]


def render(results: Results) -> Rendering:
    """Tables and findings; differences are to the token in front."""
    made = tables.rendering(results, "sink", findings, VARIANTS)
    return replace(made, notes=[*tables.ablated(results), *made.notes])


EXPERIMENT = tables.experiment(
    name="one-token-table3",
    shows="2601.19657, Table 3",
    title="the sink token in front or at the end",
    small=tables.small(VARIANTS, start="toy-ar"),
    full=tables.full(VARIANTS, ("qwen2.5-0.5b-sink", "qwen2.5-0.5b-end"), paper_scale.cells("table1", paper.FEWER)),
    render=render,
    paper=[paper.printed("Table 3", paper.TABLE3, paper.FEWER)],
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
