"""Sinks hidden in the second half, in a float64 network; controls of the same mass that are drawn here."""

import functools
from typing import Any

import numpy as np
import torch
from scipy import stats

from tests.tasks.checks import comparing, loops

LENGTH, BLOCK, HALF, DRAWS = 24, 8, 12, 2


def changed_by(choose: Any) -> tuple[list[int], float]:
    """Changed tokens per prompt, and the mean mass that the columns of `choose(pattern [query, key])` received."""
    model, changed, masses = loops.loaded("toy"), [], []
    for text, canvases in zip(loops.prompts(), plain(), strict=True):

        def hide(scores: torch.Tensor) -> torch.Tensor:
            patterns = scores[0].softmax(-1).numpy()
            edited = scores.clone()
            for head, pattern in enumerate(patterns):
                columns = choose(pattern)
                masses.append(sum(pattern[:, column].sum() for column in columns) / len(pattern))
                edited[0, head, :, columns] = -torch.inf
            return edited

        edits = {(layer, "scores"): hide for layer in range(4)}

        def network(canvas: torch.Tensor, step: int, edits: Any = edits) -> torch.Tensor:
            return loops.pass64(model, canvas, edits=edits)["logits"]

        hidden = loops.decode(model, text, LENGTH, BLOCK, network, canvases[: HALF + 1])[0][-1]
        changed.append(int((canvases[-1] != hidden).sum()))
    return changed, float(np.mean(masses))


@functools.cache
def plain() -> list[list[torch.Tensor]]:
    """The canvases of every prompt without an edit, which those under edits share in the first half."""
    return [loops.decode(loops.loaded("toy"), text, LENGTH, BLOCK)[0] for text in loops.prompts()]


def sinks(pattern: loops.Floats) -> list[int]:
    found = loops.above_mean(loops.relative_scores(pattern))
    return [j for j, one in enumerate(found) if one]


@functools.cache
def hidden() -> tuple[list[int], float]:
    return changed_by(sinks)


@functools.cache
def controls() -> list[list[int]]:
    """Changed tokens per prompt under other columns of the same mass, of several draws."""
    found = []
    for seed in range(DRAWS):
        draw = np.random.default_rng(seed)

        def matched(pattern: loops.Floats, draw: Any = draw) -> list[int]:
            own, sums = sinks(pattern), pattern.sum(0)
            target, taken, total = sum(sums[j] for j in own), [], 0.0
            others = [int(j) for j in draw.permutation(len(sums)) if j not in own]
            for j in others:
                if total + sums[j] <= target:
                    taken.append(j)
                    total += sums[j]
            rest = sorted((j for j in others if j not in taken), key=lambda j: sums[j])
            if rest and abs(total + sums[rest[0]] - target) < abs(total - target):
                taken.append(rest[0])
            return taken

        found.append(changed_by(matched)[0])
    return found


def check(answer: dict[str, Any]) -> list[str]:
    changed, mass = hidden()
    size = len(changed)
    wrong = comparing.differences(answer, {"changed_hidden": changed}, 0.0)
    wrong += comparing.differences(answer, {"mass_hidden": mass}, 0.002)
    wrong += comparing.differences(answer, {"mass_control": mass}, 0.02)
    control = answer.get("changed_control")
    if not isinstance(control, list) or len(control) != size or not all(type(one) is int for one in control):
        return [*wrong, f"changed_control must be a list of {size} whole numbers"]
    means = [float(np.mean(one)) for one in controls()]
    spread = 0.75 + max(means) - min(means)
    if not min(means) - spread <= np.mean(control) <= max(means) + spread:
        wrong.append(f"changed_control has the mean {np.mean(control):.2f}, outside the spread of matched controls")
    given = answer.get("changed_hidden")
    if wrong or given != changed:
        return wrong
    pairs = np.subtract(changed, control)
    half = float(stats.t.ppf(0.975, size - 1) * pairs.std(ddof=1) / size**0.5)
    mean = float(pairs.mean())
    wrong += comparing.differences(answer, {"difference": mean}, 1e-3)
    return wrong + comparing.differences(answer, {"interval": [mean - half, mean + half]}, 0.6)
