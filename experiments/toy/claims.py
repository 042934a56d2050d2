"""The two papers' claims about sinks, compared with the measured numbers of the embedded models.

A verdict follows from the intervals by a rule, so that a card's sentences always match its numbers.
"""

from collections.abc import Callable, Mapping
from typing import Any

Result = Mapping[str, Any]


def table(compared: Mapping[str, Result], labels: Mapping[str, str]) -> str:
    """Claim, measurement and verdict as a Markdown table, and what the optimiser changes."""
    by_name = {name: compared[label] for name, label in labels.items() if label in compared}
    rows = [check(by_name) for check in (_exist, _moving, _static_baseline, _mask_tokens, _low_norm, _robust)]
    lines = [
        "| the papers | here | verdict |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + _optimizer(by_name)


def below(a: Result, b: Result) -> bool | None:
    """Whether estimate a lies below b: None where their intervals overlap."""
    if a["high"] < b["low"]:
        return True
    return False if a["low"] > b["high"] else None


def verdict(holds: bool | None) -> str:
    """`shows`, `does not show`, or `undecided`."""
    return {True: "shows", False: "does not show", None: "undecided: the intervals overlap"}[holds]


def _brief(estimate: Result) -> str:
    return f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def _constant(value: float) -> Result:
    return {"value": value, "low": value, "high": value}


def _exist(by_name: Mapping[str, Result]) -> tuple[str, str, str]:
    filtered = by_name["toy"]["phenomena"]["tokens_filtered_out"]
    maps = by_name["toy"]["phenomena"]["maps_with_a_sink"]
    return (
        "DLMs have sinks; eps = 3 filters out at least 96% of tokens (2510.15731, App. B)",
        f"{_brief(filtered)} of the keys filtered out, {_brief(maps)} of the maps have a sink",
        verdict(below(_constant(0.96), filtered)),
    )


def _moving(by_name: Mapping[str, Result]) -> tuple[str, str, str]:
    ours = by_name["toy"]["phenomena"]["main_sink_differs_first_to_last"]
    # In a bidirectional pass the three readings are one; for the baseline they are not.
    readings = {
        "AR": "main_sink_differs_first_to_last",
        "AR, keys of the first step only": "main_sink_differs_same_keys",
        "AR, raw column sum": "main_sink_differs_by_column_sum",
    }
    found = {name: by_name["toy-ar"]["phenomena"][key] for name, key in readings.items()}
    decided = {below(estimate, ours) for estimate in found.values()}
    measured = ", ".join(f"{name} {_brief(estimate)}" for name, estimate in found.items())
    return (
        "Sinks of DLMs move over the steps, those of ARMs do not (2510.15731)",
        f"main sink differs from first to last step: DLM {_brief(ours)}, {measured}",
        verdict(decided.pop()) if len(decided) == 1 else "depends on how the baseline is counted",
    )


def _static_baseline(by_name: Mapping[str, Result]) -> tuple[str, str, str]:
    bos = by_name["toy-ar"]["phenomena"]["classes"]["bos"]
    return (
        "The sink of an ARM is its first token (2309.17453, repeated in both papers)",
        f"`<bos>` is {_brief(bos['sinks'])} of the AR's sinks (relative to uniform attention) and "
        f"{_brief(bos['base_rate'])} of its keys",
        verdict(below(bos["base_rate"], bos["sinks"])),
    )


def _mask_tokens(by_name: Mapping[str, Result]) -> tuple[str, str, str]:
    mask = by_name["toy"]["phenomena"]["classes"]["mask"]
    return (
        "Masked tokens are the typical sinks (One Token Is Enough)",
        f"[MASK] is {_brief(mask['sinks'])} of the sinks and {_brief(mask['base_rate'])} of the keys",
        verdict(below(mask["base_rate"], mask["sinks"])),
    )


def _low_norm(by_name: Mapping[str, Result]) -> tuple[str, str, str]:
    ratio = by_name["toy"]["phenomena"]["value_norm"]["ratio_within_map"]
    return (
        "Sinks have low value norms (One Token Is Enough: 0.31 of the others' in LLaDA)",
        f"norm of sinks / others in the same map {_brief(ratio)}",
        verdict(below(ratio, _constant(1.0))),
    )


def _robust(by_name: Mapping[str, Result]) -> tuple[str, str, str]:
    cells: dict[str, Callable[[str], str]] = {
        "strongest hidden": lambda name: _brief(by_name[name]["without_a_column"]["strongest"]),
        "random hidden": lambda name: _brief(by_name[name]["without_a_column"]["random"]),
    }
    n = by_name["toy"]["without_a_column"]["strongest"]["n"]
    intact = _task_a(by_name["toy"])
    hidden = by_name["toy"]["without_a_column"]["strongest"]
    measured = "; ".join(f"{what}: {show('toy')}, AR {show('toy-ar')}" for what, show in cells.items())
    return (
        "DLMs keep their accuracy when the strongest column is masked (2510.15731: at most 1% lost)",
        f"task A, one column per head, before the softmax, n = {n}: {measured}; untouched {_brief(intact)}",
        verdict(False if below(hidden, intact) else None),
    )


def _task_a(result: Result) -> Result:
    """Exact match on task A under the first way of decoding."""
    return next(entry["correct"] for entry in result["accuracy"] if entry["task"] == "A")


def _last_loss(result: Result) -> float:
    return result["training"]["progress"]["loss_curve"][-1][1]


def _optimizer(by_name: Mapping[str, Result]) -> str:
    """One sentence on each number that Muon may have changed (2506.19697), with its verdict."""
    if "toy-adamw" not in by_name:
        return "\n\nNo AdamW twin was measured: which of this is due to Muon is unknown."
    ours, twin = by_name["toy"]["phenomena"], by_name["toy-adamw"]["phenomena"]
    words = {True: "lower with Muon", False: "higher with Muon", None: "no clear difference"}
    pairs = {
        "exact match on task A": (_task_a(by_name["toy"]), _task_a(by_name["toy-adamw"])),
        "the same with the strongest column of every head hidden": (
            by_name["toy"]["without_a_column"]["strongest"],
            by_name["toy-adamw"]["without_a_column"]["strongest"],
        ),
        "maps with a sink": (ours["maps_with_a_sink"], twin["maps_with_a_sink"]),
        "main sink differs from first to last step": (
            ours["main_sink_differs_first_to_last"],
            twin["main_sink_differs_first_to_last"],
        ),
        "value norm of sinks / others": (
            ours["value_norm"]["ratio_within_map"],
            twin["value_norm"]["ratio_within_map"],
        ),
    }
    lines = [
        f"- {what}: Muon {_brief(muon)}, AdamW {_brief(adamw)}: {words[below(muon, adamw)]}"
        for what, (muon, adamw) in pairs.items()
    ]
    return (
        "\n\nMuon is reported to remove activation outliers (2506.19697). Against the AdamW twin (same data, "
        f"steps, seed and learning rate, final loss {_last_loss(by_name['toy']):.3f} and "
        f"{_last_loss(by_name['toy-adamw']):.3f}; one run each, so a difference may also be chance "
        "of training, or come from how far each has got):\n\n" + "\n".join(lines)
    )
