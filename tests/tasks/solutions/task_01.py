"""Trajectories of received attention."""

import functools
from typing import Any

import dlm_lens as dl
from tests.tasks.solutions import PROMPTS, toy

WRONG: tuple[dict[str, Any], ...] = (
    {"layer": 1},
    {"steps": (6, 21)},
    {"hysteresis": 1.0},
    {"eps": 2.0},
    {"level": "layer"},
    {"on_canvas": True},
)


@functools.cache
def recorded() -> Any:
    return dl.record(toy(), PROMPTS[:4], [dl.ReceivedAttention()], gen_length=32, block_length=8, seed=0)


def solve(
    layer: int = 2,
    steps: tuple[int, int] = (5, 20),
    hysteresis: float = 0.75,
    eps: float = 3.0,
    level: Any = "head",
    on_canvas: bool = False,
) -> dict[str, Any]:
    table = dl.trajectories(recorded(), dl.AboveMean(eps), hysteresis=hysteresis, level=level).table()
    moved = table[(table["layer"] == layer) & table["came_from"].notna() & table["first_step"].between(*steps)]
    if "head" not in moved:
        moved = moved.assign(head=0)
    old, new = ("canvas_came_from", "canvas_position") if on_canvas else ("came_from", "position")
    moves = [
        {
            "prompt": int(line["batch"]),
            "head": int(line["head"]),
            "step": int(line["first_step"]),
            "from": int(line[old]),
            "to": int(line[new]),
        }
        for _, line in moved.iterrows()
    ]
    moves.sort(key=lambda move: (move["prompt"], move["head"], move["step"], move["to"]))
    return {"heads": sorted({move["head"] for move in moves}), "moves": moves}
