"""docs/results_one_token.md against the committed results, computed again from their lines."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dlm_lens.experiments.experiment import find_experiment
from dlm_lens.experiments.one_token.page import PAGE, RESULTS, committed, on_text, page
from dlm_lens.experiments.one_token.text_corpus import encoded, read_text
from dlm_lens.experiments.results import Results
from dlm_lens.experiments.runner import load_results

TABLES = [f"table{number}" for number in range(1, 6)]
ENGLISH = "-text"
MARGIN = 0.01
"""Nats, fixed before the networks of 1,500 steps were trained."""

BOTH = [f"{table}{ending}" for ending in ("", ENGLISH) for table in TABLES]


def lines(what: str) -> list[dict]:
    paths = sorted((RESULTS / f"one-token-{what}").glob("results-*.jsonl"))
    return [line for path in paths for line in map(json.loads, path.read_text().splitlines()) if "item" in line]


def section(what: str) -> str:
    name = f"one-token-{what.removesuffix(ENGLISH)}"
    heading = f"\n### {name}, English text\n" if what.endswith(ENGLISH) else f"\n## {name}\n"
    return re.split(r"\n##+ ", PAGE.read_text().split(heading)[1])[0]


def losses(what: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in lines(what):
        found.setdefault(line["item"]["variant"], {})[line["item"]["seed"]] = line["value"]["loss"]
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its interval by scipy's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else float("nan")
    return float(np.mean(values)), float(half)


def told(mean: float, half: float, sign: str = "") -> str:
    """As the page prints it; one seed has no interval."""
    return f"{mean:{sign}.3f}" + ("" if np.isnan(half) else f" ± {half:.3f}")


def difference(what: str, one: str, other: str) -> tuple[float, float]:
    stored = {(line["item"]["variant"], line["item"]["seed"]): line["value"] for line in lines(what)}
    shared = [seed for name, seed in stored if name == one and (other, seed) in stored]
    if len(shared) > 1 and all("losses" in value for value in stored.values()):
        groups = [np.subtract(stored[one, seed]["losses"], stored[other, seed]["losses"]) for seed in shared]
        return crossed(np.array(groups))
    both = losses(what)
    return interval([both[one][seed] - both[other][seed] for seed in sorted(both[one].keys() & both[other].keys())])


def gains(what: str) -> bool:
    """Whether one sink token changes the loss at all: its interval leaves 0 out."""
    mean, half = difference(what, "sink", "plain")
    return abs(mean) > half


def row(text: str, start: str, table: int = 0) -> list[str]:
    found = [line for line in text.split("\n") if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in found[table].strip("|").split("|")]


def verdict(text: str, claim: str) -> str:
    return next(line for line in text.split("\n") if f"| {claim}:" in line).split("**")[1]


def test_the_page_is_rendered_from_the_results() -> None:
    assert PAGE.read_text() == page()
    names = [one.experiment.name for one in committed()]
    assert names == [f"one-token-{what}" for what in ("figure1", "figure3", "noop", *TABLES)]


def test_every_picture_of_the_page_is_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text())
    assert len(pictures) == len(set(pictures)) == 17  # figures 3, 2, 2, tables 5, English 5
    assert all((PAGE.parent / path).is_file() for path in pictures)


def test_all_comparisons_of_the_page_are_corrected_together() -> None:
    ps = [each.p for one in (*committed(), *on_text()) for each in one.rendering.findings if each.p is not None]
    decided = sum(p <= 0.05 for p in ps)
    left = int((stats.false_discovery_control(ps) <= 0.05).sum())
    text = PAGE.read_text()
    assert f"**Many comparisons.** {len(ps)} statements are compared" in text
    assert f"(false discovery rate 0.05) {left} remain" in text
    assert text.count("(not after the correction)") == decided - left


def crossed(apart: np.ndarray) -> tuple[float, float]:
    """Mean and half of the interval over seeds (rows) and held-out groups (columns), without a bootstrap."""
    seeds, groups = apart.mean(1).var(ddof=1) / len(apart), apart.mean(0).var(ddof=1) / apart.shape[1]
    degrees = (seeds + groups) ** 2 / (seeds**2 / (len(apart) - 1) + groups**2 / (apart.shape[1] - 1))
    return float(apart.mean()), float(stats.t.ppf(0.975, degrees) * np.sqrt(seeds + groups))


@pytest.mark.parametrize("what", BOTH)
def test_losses_and_paired_differences(what: str) -> None:
    text = section(what)
    labels = {"plain": "DLM", "sink": "DLM + sink token", "gated": "DLM + GA", "end": "sink token at the end",
              "sinks2": "2 sink tokens", "sinks4": "4 sink tokens", "zero": "zero-value token",
              "off-by-one": "off-by-one softmax"}  # fmt: skip
    baseline = "sink" if "table3" in what else "plain"
    found = losses(what)
    for variant, own in found.items():
        mean, half = interval(list(own.values()))
        # The paper's own table begins the section; ours has the seeds in its second column.
        (cells,) = [
            cells for number in range(text.count(f"| {labels[variant]} |"))
            if (cells := row(text, labels[variant], number))[1] == str(len(own))
        ]  # fmt: skip
        assert cells[2] == told(mean, half)
        if variant != baseline:
            mean, half = difference(what, variant, baseline)
            assert cells[3] == told(mean, half, "+")


@pytest.mark.parametrize(
    ("what", "claim", "one", "other"),
    [
        ("table1", "sink token - DLM", "sink", "plain"),
        ("table1", "sink token - gate", "sink", "gated"),
        ("table2", "DLM + extra token - DLM", "sink", "plain"),
        ("table2", "DLM + GA - DLM", "gated", "plain"),
        ("table2", "sink token - gate", "sink", "gated"),
        ("table3", "end - DLM", "end", "plain"),
        ("table4", "one - none", "sink", "plain"),
        ("table5", "zero value - DLM", "zero", "plain"),
    ],
)
@pytest.mark.parametrize("ending", ["", ENGLISH])
def test_who_is_better(what: str, claim: str, one: str, other: str, ending: str) -> None:
    what += ending
    mean, half = difference(what, one, other)
    expected = "agrees" if mean + half < 0 else "disagrees" if mean - half > 0 else "undecided"
    assert verdict(section(what), claim) == expected


@pytest.mark.parametrize(
    ("what", "claim", "one", "other"),
    [
        ("table3", "end - front", "end", "sink"),
        ("table5", "zero value - sink token", "zero", "sink"),
    ],
)
@pytest.mark.parametrize("ending", ["", ENGLISH])
def test_who_is_alike(what: str, claim: str, one: str, other: str, ending: str) -> None:
    what += ending
    mean, half = difference(what, one, other)
    expected = "undecided"
    if gains(what) and abs(mean) + half < MARGIN:
        expected = "agrees"
    elif gains(what) and abs(mean) - half > MARGIN:
        expected = "disagrees"
    assert verdict(section(what), claim) == expected


@pytest.mark.parametrize(("claim", "one"), [("2 - one", "sinks2"), ("4 - one", "sinks4")])
@pytest.mark.parametrize("what", ["table4", f"table4{ENGLISH}"])
def test_more_sinks_are_no_better(claim: str, one: str, what: str) -> None:
    mean, half = difference(what, one, "sink")
    expected = "agrees" if mean - half > -MARGIN else "disagrees" if mean + half < -MARGIN else "undecided"
    expected = expected if gains(what) else "undecided"
    assert verdict(section(what), claim) == expected


@pytest.mark.parametrize("what", ["table2", f"table2{ENGLISH}"])
def test_the_main_sink_moves(what: str) -> None:
    values: dict[str, dict[int, dict]] = {}
    for line in lines(what):
        values.setdefault(line["item"]["variant"], {})[line["item"]["seed"]] = line["value"]
    apart: list = [
        np.subtract(one["moved_prompts"], values["plain"][seed]["moved_prompts"])
        if "moved_prompts" in one else one["moved"] - values["plain"][seed]["moved"]
        for seed, one in values["sink"].items()
    ]  # fmt: skip
    if np.ndim(apart[0]):  # prompts and seeds
        mean, low, _ = bounds(np.array(apart))
        half = mean - low
    else:
        mean, half = interval(apart)
    # Without sinks there is nothing to hold still.
    found = np.mean([line["value"]["found"] for line in lines(what) if line["item"]["variant"] == "plain"])
    expected = "agrees" if mean + half < 0 else "disagrees" if mean - half > 0 else "undecided"
    expected = "undecided" if found < 0.5 else expected
    claim = next(line for line in section(what).split("\n") if "whose main sink is another" in line)
    told = re.search(rf"{re.escape(f'{mean:+.3f}')} ± ([0-9.]+)", claim)
    # Over prompts the page's variance is that of a bootstrap.
    assert told is not None
    assert float(told[1]) == pytest.approx(half, rel=0.02 if np.ndim(apart[0]) else 0.0, abs=5e-4)
    assert claim.split("**")[1] == expected


@pytest.mark.parametrize("what", [table for table in BOTH if table.endswith(ENGLISH)])
def test_losses_per_byte(what: str) -> None:
    found: dict[str, list[float]] = {}
    for line in lines(what):
        value = line["value"]
        assert value["tokens"] == 256 * 64
        found.setdefault(line["item"]["variant"], []).append(value["loss"] * value["tokens"] / value["bytes"])
    head = next(line for line in section(what).split("\n") if "| nats per byte |" in line)
    column = [cell.strip() for cell in head.strip("|").split("|")].index("nats per byte")
    cells = [
        row[column] for line in section(what).split("\n")
        if len(row := [cell.strip() for cell in line.strip("|").split("|")]) == column + 1 and row[1].isdigit()
    ]  # fmt: skip
    means = [interval(values) for values in found.values()]
    assert cells == [told(*one) for one in means]


def test_one_text_and_one_tokenizer_in_all_tables() -> None:
    values = [line["value"] for table in TABLES for line in lines(f"{table}{ENGLISH}")]
    assert len({(value["text"], value["tokenizer"], value["bytes"]) for value in values}) == 1
    # Tables that share a network show the same numbers.
    shared: dict[tuple[str, int], float] = {}
    for table in TABLES[1:]:
        for line in lines(f"{table}{ENGLISH}"):
            key = (line["item"]["variant"], line["item"]["seed"])
            assert shared.setdefault(key, line["value"]["loss"]) == line["value"]["loss"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bible") is None, reason="Debian's bible-kjv is not installed")
def test_the_english_text_is_as_the_page_says() -> None:
    text, held = read_text("kjv"), encoded("kjv")
    size = {name: sum(len(one.encode()) for one in getattr(text, name)) / 1e6
            for name in ("documents", "training", "validation")}  # fmt: skip
    rows = held.held_out(256)
    counts = torch.bincount(held.training.flatten(), minlength=len(held.tokenizer)).double()
    alone = -float((counts / counts.sum()).log()[rows].mean())
    page = " ".join(PAGE.read_text().split())
    for said in (
        f"{len(text.documents):,} chapters, 31,102 verses, {size['documents']:.1f} MB",
        f"{len(text.training):,} chapters ({size['training']:.1f} MB) for training",
        f"{len(text.validation)} ({size['validation']:.2f} MB) for validation",
        f"{100 * text.repeated():.1f}% of the held-out verses",
        f"{held.bytes_of(held.validation) / held.validation.numel():.2f} bytes a token",
        f"{len(held.training):,} for training, so that 500 steps of 16 see "
        f"{100 * 500 * 16 / len(held.training):.0f}% of them",
        f"{alone:.3f} nats per token ({alone * rows.numel() / held.bytes_of(rows):.3f} per byte)",
    ):
        assert said in page
    # And the results are of this text.
    value = lines(f"table2{ENGLISH}")[0]["value"]
    assert (value["text"], value["tokenizer"]) == (text.digest, held.digest)


def test_what_came_out_on_english() -> None:
    said = " ".join(PAGE.read_text().split("**What came out.**")[1].split("| experiment |")[0].split())
    verdicts = [
        line.split("**")[1]
        for table in TABLES
        for line in section(f"{table}{ENGLISH}").split("\n")
        if "| **" in line
    ]
    counts = [verdicts.count(kind) for kind in ("undecided", "agrees", "disagrees")]
    undecided, agree, disagree = counts
    assert f"Of {len(verdicts)} verdicts {undecided} are undecided, {agree} agree and {disagree} disagree" in said
    seeds = losses("table2-text")["plain"].values()
    assert f"{len(seeds)} seeds span {max(seeds) - min(seeds):.2f} nats" in said
    _, half = difference("table2-text", "sink", "plain")
    assert f"below {half:.3f} nats cannot be seen" in said
    mean, half = difference("table1-text", "sink", "plain")
    assert f"by more than {max(abs(mean - half), abs(mean + half)):.3f} nats" in said
    plain = {
        table: [line["value"] for line in lines(f"{table}-text") if line["item"]["variant"] == "plain"]
        for table in ("table1", "table2")
    }
    found, moved = (
        {table: np.mean([value[name] for value in values]) for table, values in plain.items()}
        for name in ("found", "moved")
    )
    assert f"{found['table2']:.1f} sinks per pattern in the plain networks from scratch" in said
    assert f"{found['table1']:.1f} in the converted ones" in said
    assert f"in {100 * moved['table2']:.0f}% and {100 * moved['table1']:.0f}% of the maps" in said
    shares = [
        np.mean([np.mean(line["value"]["share"]) for line in lines(f"{table}-text")
                 if line["item"]["variant"] == "sink"])
        for table in ("table2", "table1")
    ]  # fmt: skip
    assert f"{100 * shares[0]:.1f}% and {100 * shares[1]:.1f}% of the attention" in said
    spent = {
        (table == "table1", line["item"]["variant"], line["item"]["seed"]): line["value"]["training_seconds"]
        for table in TABLES for line in lines(f"{table}-text")
    }  # fmt: skip
    long = [seconds for (short, *_), seconds in spent.items() if not short]
    assert (len(long), len(spent)) == (30, 45)
    page = " ".join(PAGE.read_text().split())
    assert f"{sum(spent.values()) / 60:.0f} minutes of training, {min(long):.0f} to {max(long):.0f} s" in page


def values(what: str, model: str, name: str) -> np.ndarray:
    """[network, prompt, ...] of a stored value."""
    found: dict[int, list] = {}
    for line in lines(what):
        if line["item"]["model"] == model:
            found.setdefault(line["item"]["network"], []).extend(line["value"][name])
    return np.array([found[number] for number in sorted(found)], dtype=float)


def models(what: str) -> list[str]:
    return list(dict.fromkeys(line["item"]["model"] for line in lines(what)))


def bounds(top: np.ndarray, bottom: np.ndarray | float = 1.0) -> tuple[float, float, float]:
    """Ratio of sums over prompts, mean over networks, and an interval of two standard errors by the delta method.

    Prompts and networks as crossed random effects; no bootstrap. Prompts of NaN are left out.
    """
    bottom = np.broadcast_to(bottom, top.shape)
    known = np.isfinite(top) & np.isfinite(bottom)
    top, bottom = np.where(known, top, 0), np.where(known, bottom, 0)
    each = top.sum(1) / bottom.sum(1)
    influence = ((top - each[:, None] * bottom) / bottom.mean(1, keepdims=True)).mean(0)
    variance = influence.var(ddof=1) / len(influence)
    if len(each) > 1:
        networks = each.var(ddof=1) / len(each)
        quantile = stats.t.ppf(0.975, (networks + variance) ** 2 / (networks**2 / (len(each) - 1)))
        variance += networks
    else:
        quantile = 1.96
    return each.mean(), each.mean() - quantile * variance**0.5, each.mean() + quantile * variance**0.5


def agrees_below(found: tuple[float, float, float], bound: float) -> str:
    return "agrees" if found[2] < bound else "disagrees" if found[1] > bound else "undecided"


def name_of(model: str) -> str:
    labels = {"converted-plain": "converted toy-ar, DLM", "converted-sink": "converted toy-ar, DLM + sink token"}
    return labels.get(model, model)


def told_of(text: str, model: str, claim: str) -> str:
    """The row of a claim about a model."""
    own = re.compile(rf"\| {re.escape(name_of(model))}(:| \()")
    (line,) = (line for line in text.split("\n") if claim in line and own.search(line) and "**" in line)
    return line


def test_value_norms_of_sinks() -> None:
    text = section("figure1")
    for model in models("figure1"):
        sums = values("figure1", model, "any")
        sink, other, pairs = np.moveaxis(sums, -1, 0)
        cells = row(text, name_of(model))
        assert cells[1:3] == [str(len(sums)), str(int(pairs.sum()))]
        assert cells[3].startswith(f"{(sink.sum(1) / pairs.sum(1)).mean():.2f} [")
        assert cells[4].startswith(f"{(other.sum(1) / pairs.sum(1)).mean():.2f} [")
        stored = [line["value"] for line in lines("figure1") if line["item"]["model"] == model]
        scales = {")": "any", ", sinks on column sums)": "columns"}
        for ending, name in scales.items():
            if any(name in value for value in stored):
                found = bounds(*np.moveaxis(values("figure1", model, name), -1, 0)[:2])
                claim = told_of(text, model, f"network{'s' * (len(sums) > 1)}{ending}")
                assert f"ratio {found[0]:.2f} [" in claim
                assert claim.split("**")[1] == agrees_below(found, 1.0)
        assert ("columns" in stored[0]) == (model == "smollm2")


def test_the_learned_sink_per_layer() -> None:
    text = section("figure3")
    for model in models("figure3"):
        sink, other, share, strongest, even = (
            values("figure3", model, name) for name in ("norm_sink", "norm_other", "share", "strongest", "even")
        )
        layers = sink.shape[-1]
        rows = [row(text, name_of(model), number) for number in range(layers)]
        assert [cells[7].split(" [")[0] for cells in rows] == [f"{100 * value:.1f}" for value in share.mean((0, 1))]
        inside = slice(1, layers - 1)
        ratio = bounds(sink[..., inside].mean(-1), other[..., inside].mean(-1))
        claim = told_of(text, model, "substantially smaller")
        assert f"ratio {ratio[0]:.2f}" in claim
        assert claim.split("**")[1] == agrees_below(ratio, 0.5)
        for against, said in ((even, "significant portion"), (strongest, "large share of all attention")):
            apart = bounds((share - against)[..., inside].mean(-1))
            claim = told_of(text, model, said)
            assert f"{100 * apart[0]:+.2f} points" in claim
            assert claim.split("**")[1] == agrees_below(tuple(-one for one in (apart[0], apart[2], apart[1])), 0.0)


def test_contributions_of_sinks() -> None:
    text = section("noop")
    for model in models("noop"):
        for part, said in (("bound", "to the bound"), ("output", "to the head's output")):
            top, weight, other, others = (
                values("noop", model, f"{of}_{name}").sum(-1) for of in ("sinks", "mass") for name in (part, "mass")
            )
            with np.errstate(invalid="ignore"):
                found = bounds(top / weight * others, other)
            claim = told_of(text, model, f"(after Eq. 20): {said}")
            assert f"random keys {found[0]:.2f} [" in claim
            assert claim.split("**")[1] == agrees_below(found, 1.0)
        own, null = (np.nanmean(values("noop", model, name), -1) for name in ("correlation", "correlation_count"))
        apart, alone = bounds(own - null), bounds(own)
        claim = told_of(text, model, "makes the update small")
        assert f"||h\\|\\| {alone[0]:.2f} [".replace("||", "\\|\\|") in claim
        expected = agrees_below(apart, 0.0)
        expected = "undecided" if expected == "agrees" and alone[2] >= 0 else expected
        assert claim.split("**")[1] == expected
    excess = max(line["value"]["excess"] for line in lines("noop"))
    assert f"of all queries is {1 + excess:.5f}" in text
    assert excess < 1e-4


def test_every_table_names_a_command_that_gives_its_settings() -> None:
    for one in committed():
        name = one.experiment.name
        what = name.removeprefix("one-token-")
        assert f"dlm-lens experiment {name} --small" in section(what)
        if what in TABLES:
            assert f"dlm-lens experiment {name} --small --set" in section(what + ENGLISH)
            assert "--set 'text=\"kjv\"'" in section(what + ENGLISH)


def test_nothing_in_the_results_is_of_an_unfinished_run() -> None:
    assert "Unfinished" not in PAGE.read_text()


def test_the_results_are_small() -> None:
    size = sum(path.stat().st_size for path in Path(RESULTS).rglob("*") if path.is_file())
    assert size < 4_000_000


@pytest.mark.parametrize("number", range(1, 6))
def test_a_table_of_one_seed_renders(number: int) -> None:
    experiment = find_experiment(f"one-token-table{number}")
    results = load_results(experiment, RESULTS / experiment.name)
    kept = [place for place, record in enumerate(results.records) if record.item["seed"] == 0]
    assert len(kept) >= 3
    one = Results(results.config, [results.records[place] for place in kept])
    rendering = experiment.render(one)
    assert rendering.findings
    assert all("standard deviation" not in finding.null for finding in rendering.findings)
    assert any("standard deviation" in finding.null for finding in experiment.render(results).findings)
