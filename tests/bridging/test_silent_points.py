"""Hook points that do not fire are exactly those that docs/transformerlens.md lists, with what makes them fire."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformer_lens.benchmarks.utils import make_capture_hook, make_grad_capture_hook

import dlm_lens as dl
from tests.bridging.cases import CASES, model_of, some_ids

PAGE = Path(__file__).parents[2] / "docs" / "transformerlens.md"


def table(header: str) -> list[tuple[list[str], list[str]]]:
    """Rows of the page's table with this header: names of the first column, settings of the second."""
    lines = PAGE.read_text().splitlines()
    rows = lines[lines.index(header) + 2 :]
    end = next(number for number, line in enumerate(rows) if not line.startswith("|"))
    cells = [row.strip("|").split(" | ") for row in rows[:end]]
    return [(re.findall("`([^`]*)`", row[0]), re.findall(r"`tl\.(set_\w+)\(True\)`", row[1])) for row in cells]


OFF = table("| hook points | fire after | why they are off |")
REPLACED = table("| hook points | do not fire under |")
FLAT = table("| hook points | why they have no gradient |")
SETTERS = sorted({setter for _, setters in OFF for setter in setters})


NOT_ROTARY = {"pos_embed.hook_in"}
"""Points without a gradient that a model with embedded positions has; those of tables are a rotary model's."""


def every(rows: list[tuple[list[str], list[str]]], layers: int, setter: str | None = None) -> set[str]:
    """The names of all layers, of the rows that mention the setter."""
    names = [name for found, setters in rows if setter is None or setter in setters for name in found]
    assert len(names) == len(set(names))
    return {name.replace("{i}", str(layer)) for name in names for layer in range(layers)}


def silent(tl: Any, ids: torch.Tensor) -> set[str]:
    """Names whose hook does not run in a forward pass."""
    seen: dict[str, torch.Tensor] = {}
    for name, point in tl.hook_dict.items():  # not by tl.add_hook, which refuses points that are off
        point.add_hook(make_capture_hook(seen, name))
    tl(ids)
    tl.reset_hooks()
    return set(tl.hook_dict) - set(seen)


def test_the_page_lists_each_setting() -> None:
    assert SETTERS == [
        "set_use_attn_in",
        "set_use_attn_result",
        "set_use_hook_mlp_in",
        "set_use_split_qkv_input",
    ]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_silent_points_are_those_of_the_page(case: str) -> None:
    tl, ids = dl.bridge(model_of(case)), some_ids(rows=1)
    layers = tl.cfg.n_layers
    want = every(OFF, layers)
    assert silent(tl, ids) == want
    for setter in SETTERS:
        plain = tl(ids)
        getattr(tl, setter)(True)
        assert silent(tl, ids) == want - every(OFF, layers, setter) | every(REPLACED, layers, setter), setter
        torch.testing.assert_close(tl(ids), plain, atol=1e-4, rtol=1e-4)  # other sums of the same float32 numbers
        getattr(tl, setter)(False)
    tl.enable_compatibility_mode(disable_warnings=True)
    assert silent(tl, ids) == want


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Backward hooks on hook_scale")  # the norm is computed in Python for them
def test_the_points_without_a_gradient_are_those_of_the_page(case: str) -> None:
    tl, ids = dl.bridge(model_of(case)), some_ids(rows=1)
    seen: dict[str, torch.Tensor] = {}
    for name, point in tl.hook_dict.items():
        point.add_hook(make_grad_capture_hook(seen, name, return_none=True), dir="bwd")
    tl(ids).sum().backward()
    tl.reset_hooks()
    layers = tl.cfg.n_layers
    tables = {name for name in every(FLAT, layers) if name.endswith(("cos", "sin")) or "rotary" in name}
    flat = every(FLAT, layers) - (tables if case == "diffugpt" else NOT_ROTARY)
    assert set(tl.hook_dict) - set(seen) == every(OFF, layers) | flat


def test_the_toy_has_as_many_as_the_page_says() -> None:
    tl = dl.bridge("toy")
    found = silent(tl, some_ids(rows=1))
    assert found == every(OFF, 4)
    numbers = re.findall(r"(\d+) of the toy's (\d+) names", PAGE.read_text())
    assert numbers == [(str(len(found)), str(len(tl.hook_dict)))]


def test_a_point_that_is_off_or_absent_refuses_a_hook() -> None:
    tl, ids = dl.bridge(model_of("llada")), some_ids(rows=1)
    for names, setters in OFF:
        for name in names:
            with pytest.raises(ValueError, match=setters[0]):
                tl.run_with_hooks(ids, fwd_hooks=[(name.replace("{i}", "1"), lambda value, hook: None)])
    for name in ("hook_pos_embed", "rotary_emb.hook_out", "blocks.0.attn.hook_hidden_states"):
        assert name not in tl.hook_dict
        with pytest.raises(KeyError, match=name):
            tl.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: None)])
