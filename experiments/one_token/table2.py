"""Table 2: DLMs trained from scratch, plain, with a sink token, and with gated attention."""

from collections.abc import Iterator

from dlm_lens.experiments.experiment import Finding, Rendering, run_script
from dlm_lens.experiments.intervals import Interval, over_networks, over_seeds, paired_over_seeds, plus_minus
from dlm_lens.experiments.one_token import paper, paper_scale, tables
from dlm_lens.experiments.one_token.table1 import VARIANTS, sink_against_gate
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.verdicts import Judged, is_below

ENOUGH = 0.5
"""Sinks per pattern, for a statement about where they are."""

CONFIGS = ("smdm-472m", "smdm-472m-sink", "smdm-472m-gated")


def findings(results: Results) -> Iterator[Finding]:
    """The sink token helps, the gate helps less; where attention goes."""
    for name, label in (("sink", "DLM + extra token"), ("gated", "DLM + GA")):
        gain = paper.mean_gain(paper.TABLE2, label, "DLM")
        yield tables.improves(
            results,
            f"{label} is better than DLM ({gain:+.2f} points over eight benchmarks)",
            f"{label} - DLM",
            name,
            "plain",
        )
    yield sink_against_gate(results)
    yield fixed(results)


def fixed(results: Results) -> Finding:
    """Whether the main sink moves less with a learned one."""
    apart = moved_less(results, "sink", "plain")
    found = over_seeds(tables.number(results, "plain", lambda value: value["found"]))
    judged = is_below(apart, 0.0)
    why = (
        f"agrees: the whole interval below 0. The plain network has {plus_minus(found)} sinks per pattern by Eq. 3"
    )
    if found.value < ENOUGH:
        judged = Judged("undecided")
        keys = "most main sinks are then only the largest of nearly even keys"
        why += f"; below {ENOUGH} it is undecided, because {keys}"
    share = over_seeds(tables.number(results, "plain", lambda value: value["moved"]))
    return Finding.of(
        "the sink token turns the moving sink into one that stays (Section 3; no number)",
        "share of maps whose main sink is another at the last step than at the first, sink token - DLM: "
        f"{plus_minus(apart, sign=True)}, {apart.n} seeds",
        judged,
        why,
        f"0, the plain DLM's own share ({plus_minus(share)})",
    )


def moved_less(results: Results, one: str, other: str) -> Interval:
    """Difference of the shares of maps whose main sink has moved; over seeds, and prompts where they are stored."""
    values = {
        name: {record.item["seed"]: record.value for record in results.where(variant=name)} for name in (one, other)
    }
    seeds = sorted(values[one].keys() & values[other].keys())
    if len(seeds) < 2 or any("moved_prompts" not in held for each in values.values() for held in each.values()):
        moved = [{seed: held["moved"] for seed, held in values[name].items()} for name in (one, other)]
        return paired_over_seeds(*moved)
    pairs = [[values[name][seed]["moved_prompts"] for name in (one, other)] for seed in seeds]
    apart = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return over_networks([(each, [1.0] * len(each)) for each in apart], bounds=(-1, 1))._replace(n=len(seeds))


def render(results: Results) -> Rendering:
    """Tables and findings."""
    made = tables.rendering(results, "plain", findings, VARIANTS)
    worse = "; ".join(paper.lower(paper.TABLE2, "DLM + extra token", "DLM"))
    said = f'The paper says "consistent improvements"; by its own table the sink token loses on {worse}.'
    return Rendering(made.tables, made.figures, made.findings, [*made.notes, said])


EXPERIMENT = tables.experiment(
    name="one-token-table2",
    shows="2601.19657, Table 2",
    title="DLMs from scratch: plain, with a sink token, with gated attention",
    small=tables.small(VARIANTS),
    full=tables.full(VARIANTS, CONFIGS, paper_scale.cells("table2", paper.BENCHMARKS)),
    render=render,
    paper=[paper.printed("Table 2, 0.5B from scratch, 100B tokens", paper.TABLE2)],
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
