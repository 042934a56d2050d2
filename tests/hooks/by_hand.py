"""Masking columns of attention in float64, written from the definitions with loops, and runs under it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.reference import forward64

FLOOR = torch.finfo(torch.float32).min

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {}),
    "mmada": ("mmada", {}),
    "dream": ("dream", {}),
    "diffugpt": ("diffugpt", {}),
    "smdm": ("smdm", {}),
    "a2d": ("a2d_qwen3", {"head_dim": 10}),
    "front": ("sink_qwen", {"num_sinks": 2, "sink_placement": "front"}),
    "end": ("sink_qwen", {"num_sinks": 2, "sink_placement": "end"}),
    "llama": ("causal", {"model_type": "llama"}),
    "qwen2": ("causal", {"model_type": "qwen2"}),
}

PROMPTS = [
    [3, 41, 7, 7, 19, 28, 55, 2, 33, 14, 9, 50],
    [12, 8, 44, 31, 5, 26, 17, 40, 22],
]


def model_of(name: str) -> Any:
    family, config = FAMILIES[name]
    return tiny(family, **config)


def settings_of(name: str, guided: bool = False) -> dict[str, Any]:
    if name in ("llama", "qwen2"):
        return {"gen_length": 5}
    return {"gen_length": 8, "steps": 4, **({"cfg_scale": 0.7} if guided else {})}


def received(pattern: Tensor, visible: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r_j, e_j and n_j of one head, key by key."""
    queries, keys = pattern.shape
    values, sees = pattern.tolist(), visible.expand(queries, keys).tolist()
    sums, expected, seen = [0.0] * keys, [0.0] * keys, [0.0] * keys
    for i in range(queries):
        if counted[i]:
            for j in range(keys):
                sums[j] += values[i][j]
                if sees[i][j]:
                    expected[j] += 1 / sum(sees[i])
                    seen[j] += 1
    r, e, n = (torch.tensor(one, dtype=torch.float64) for one in (sums, expected, seen))
    return r, e, n


def statistics(pattern: Tensor, visible: Tensor, counted: Tensor) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """`received` of every row and head."""
    batch, heads = pattern.shape[:2]
    return [[received(pattern[b, h], visible[b, h], counted[b]) for h in range(heads)] for b in range(batch)]


def scores(maps: list[tuple[Tensor, Tensor, Tensor]], relative: bool = True) -> Tensor:
    """Scores of the mean of some maps; NaN where fewer than 8 counted queries see a key in one of them."""
    sums = sum(m[0] for m in maps) / len(maps)
    expected = sum(m[1] for m in maps) / len(maps)
    result = sums / expected if relative else sums.clone()
    for j in range(len(result)):
        if min(float(m[2][j]) for m in maps) < 8:
            result[j] = torch.nan
    return result


def top(values: Tensor, k: int) -> list[int]:
    """The k largest that are numbers; of equals the earlier."""
    defined = [j for j in range(len(values)) if not torch.isnan(values[j])]
    return sorted(defined, key=lambda j: (-float(values[j]), j))[:k]


def above_mean(values: Tensor, eps: float) -> list[int]:
    """Eq. 3 of 2510.15731 on the defined scores."""
    defined = [j for j in range(len(values)) if not torch.isnan(values[j])]
    found = []
    for j in defined:
        others = [float(values[k]) for k in defined if k != j]
        if others and float(values[j]) > sum(others) / len(others) + eps:
            found.append(j)
    return found


def hide(
    value: Tensor, visible: Tensor, gone: Callable[[int, int, int], set[int]], stage: str, keep_self: bool = False,
    renormalise: bool = False,
) -> Tensor:  # fmt: skip
    """Scores or a pattern without the keys that `gone(row, head, query)` names; no row ends empty."""
    value = value.clone()
    batch, heads, queries, keys = value.shape
    sees = visible.expand(value.shape).tolist()
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = {j for j in range(keys) if sees[b][h][i][j]}
                leaving = gone(b, h, i) & seen
                if keep_self:
                    leaving -= {i}
                if leaving == seen:
                    leaving = leaving - {i} if i in seen else set()
                for j in leaving:
                    value[b, h, i, j] = FLOOR if stage == "before_softmax" else 0
                if renormalise and stage == "after" and float(value[b, h, i].sum()) > 0:
                    value[b, h, i] /= value[b, h, i].sum()
    return value


class Network:
    """The float64 network of a run, step by step, with a mask written by hand at every layer."""

    def __init__(self, model: Any, guided: float = 0.0) -> None:
        self.model, self.guided = model, guided
        config = model.config
        self.sinks = getattr(config, "num_sinks", 0)
        self.front = getattr(config, "sink_placement", "front") == "front"
        self.causal = bool(getattr(config, "is_causal", True))
        self.answers: Tensor | None = None

    def counted(self, content: Tensor) -> Tensor:
        """Which of the network's queries count."""
        none = torch.zeros(len(content), self.sinks, dtype=torch.bool)
        return torch.cat([none, content] if self.front else [content, none], 1)

    def logits(
        self, canvas: Tensor, content: Tensor, masked: Tensor, edit: Callable[..., Tensor] | None, stage: str
    ) -> Tensor:
        """Logits of a canvas under `edit(layer, value, visible, counted)`, guidance mixed in."""
        if self.answers is None:
            self.answers = masked
        if self.guided:
            blank = torch.where(self.answers | ~content, canvas, self.model.config.mask_token_id)
            canvas, content = torch.cat([canvas, blank]), torch.cat([content, content])
        counted = self.counted(content)
        site = "scores" if stage == "before_softmax" else "pattern"

        def at(layer: int) -> Callable[[Tensor], Tensor]:
            def run(value: Tensor) -> Tensor:
                visible = value > FLOOR / 2 if site == "scores" else value > 0
                return value if edit is None else edit(layer, value, visible, counted)

            return run

        layers = range(self.model.config.num_hidden_layers)
        positions = (content.long().cumsum(-1) - 1).clamp(min=0)
        logits = forward64(
            self.model,
            canvas,
            content,
            causal=self.causal,
            positions=None if self.sinks else positions,
            edits={(layer, site): at(layer) for layer in layers},
        )["logits"]
        if self.guided:
            c, u = logits.chunk(2)
            logits = u + (self.guided + 1) * (c - u)
        return logits


def logits_of_run(model: Any, hooks: list[Any], name: str, **options: Any) -> tuple[Any, list[Tensor]]:
    """A run of `denoise` under hooks, and the logits of every step."""
    kept: list[Tensor] = []
    guided = options.pop("guided", False)

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        kept.append(logits.double())

    run = dl.denoise(model, PROMPTS, hooks=hooks, on_logits=keep, **settings_of(name, guided), **options)
    return run, kept
