"""Public functions with random good and bad arguments: a valid result, or one sentence that names the value."""

import inspect
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.sampling import generate_image_tokens
from dlm_lens.testing import tiny

FAMILIES = ("llada", "dream", "smdm", "causal")


class Odd:
    """An object of the caller's own whose repr has several lines."""

    def __repr__(self) -> str:
        return "Odd(\n  1,\n)"


ODD = Odd()

BAD: tuple[Any, ...] = (
    True, False, 0, -1, 3, 2.0, 2.5, -0.5, float("nan"), float("inf"), 10**12, 2**63, 10**30, 10**400,
    np.int64(3), np.float32(0.5), np.float64("nan"), np.bool_(True), np.array(3), np.array([1, 2]), np.array([0.5]),
    torch.tensor(3), torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor([1.0, float("nan")]),
    torch.zeros(0, dtype=torch.long), torch.ones(2, 2, 2), torch.tensor([1 + 2j]), torch.tensor([True]),
    torch.tensor([1, 2], dtype=torch.int8), torch.tensor([-3, 99]),
    "", " ", "w1", "all", "1", "auto", "none", "w1 \ud800", "w1\u2028w2", "\x1b[31m", b"w1", [], [[]], (), {},
    [None], [0], [0, 1], [-1], [99], [True], [1.5], ["w1"], ["w1", 3], [[1], "w2"], {"input_ids": [1]},
    {"role": "user"}, [{"role": 1, "content": None}], {1, 2}, range(3), slice(None), int, object, ODD,
    lambda *a: "no", Path("x"), [10**30], None,
)  # fmt: skip
"""What people give by mistake, and what is right for some arguments and wrong for others."""


@cache
def model_of(family: str) -> Any:
    return tiny(family)


@cache
def run_of(family: str) -> Any:
    return dl.denoise(model_of(family), [[1, 2, 3], [4, 5]], gen_length=4)


@cache
def recording_of() -> Any:
    return dl.record(model_of("llada"), [[1, 2, 3]], [dl.ReceivedAttention(), dl.ValueNorm()], gen_length=4)


@cache
def received() -> Any:
    return dl.received_over_steps(model_of("llada"), run_of("llada"))


@cache
def sinks() -> Any:
    return dl.find_sinks(recording_of(), dl.AboveMean(0.1))


def pattern() -> torch.Tensor:
    return torch.full((2, 6, 6), 1 / 6)


@dataclass(frozen=True)
class Call:
    """A function, arguments with which it works, and the names of those that are changed."""

    function: Callable[..., Any]
    good: Callable[[str], dict[str, Any]]
    families: tuple[str, ...] = FAMILIES
    settings: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Every argument by name, and settings that it takes beside."""
        kinds = inspect.Parameter
        own = [
            p.name
            for p in inspect.signature(self.function).parameters.values()
            if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        ]
        return [name for name in (*own, *self.settings) if name not in self.left_alone]


SAMPLER = (
    "steps", "gen_length", "block_length", "temperature", "cfg_scale", "remasking", "top_p", "top_k", "alg_temp",
    "eps", "logits_eos_inf", "use_cache", "eot_token", "on_logits", "on_canvas", "reference_quirks", "unknown",
    "cache", "threshold", "factor",
)  # fmt: skip

CALLS = {
    "denoise": Call(
        dl.denoise, lambda f: {"model": model_of(f), "prompt": [[1, 2], [3]], "gen_length": 4}, settings=SAMPLER
    ),
    "log_likelihood": Call(
        dl.log_likelihood,
        lambda f: {"model": model_of(f), "prompt": [[1, 2], [3]], "answer": [[4, 5], [6, 7]]},
        settings=("eps", "protect_ends", "scope", "rounding", "order", "mc_num"),
    ),
    # `to` writes to a disk, which is tested elsewhere.
    "record": Call(
        dl.record,
        lambda f: {"model": model_of(f), "prompts": [[1, 2], [3]], "gen_length": 4},
        settings=("host", "resume", "attention_mask", *SAMPLER),
        left_alone=("to",),
    ),
    "compare": Call(
        dl.compare,
        lambda f: {"model": model_of(f), "prompts": [[1, 2]], "hooks": [mask_positions(0)], "gen_length": 4},
        settings=("host", "resume", "attention_mask", *SAMPLER),
    ),
    "replay": Call(
        dl.replay, lambda f: {"model": model_of(f), "run": run_of(f), "hooks": [mask_top_sinks(1)]}
    ),
    "received_over_steps": Call(dl.received_over_steps, lambda f: {"model": model_of(f), "run": run_of(f)}),
    "key_statistic_over_steps": Call(
        dl.sinks.key_statistic_over_steps,
        lambda f: {"model": model_of(f), "run": run_of(f), "quantity": "key norm"},
    ),
    "find_sinks": Call(
        dl.find_sinks, lambda f: {"attention": pattern(), "detector": dl.AboveMean(1.0)},
        settings=(
            "dims", "visible", "queries", "attention_mask", "causal", "tokens", "masked", "layers", "min_viewers",
        ),
    ),
    "find_sinks of received": Call(
        dl.find_sinks, lambda f: {"attention": received(), "detector": dl.AboveMean(1.0)}, settings=("dims",)
    ),
    "trajectories": Call(dl.trajectories, lambda f: {"sinks": received(), "detector": dl.AboveMean(1.0)}),
    "logit_lens": Call(dl.logit_lens, lambda f: {"model": model_of(f), "run": run_of(f)}),
    "value_norms": Call(
        dl.value_norms, lambda f: {"recording": recording_of(), "sinks": sinks()}, families=("llada",)
    ),
    "position_or_token": Call(
        dl.sinks.position_or_token,
        lambda f: {"model": model_of(f), "run": run_of(f), "steps": [0]},
        families=("llada", "dream"),
    ),
    "load": Call(dl.load, lambda f: {"path_or_hub_name": "toy"}, left_alone=("device_map", "quantization_config")),
    "generate_image_tokens": Call(
        generate_image_tokens, lambda f: {"model": model_of("llada"), "prompt": [[1, 2]]}, families=("llada",)
    ),
}  # fmt: skip


def one_sentence(error: Exception) -> None:
    text = str(error)
    assert text.strip(), "an error without a message"
    assert "\n" not in text, f"several lines: {text!r}"
    assert len(text) < 600, f"{len(text)} characters: {text[:200]!r}"
    # Not one of Python's or torch's own, which name no argument and no remedy.
    foreign = (
        "object is not", "object has no attribute", "unsupported operand", "not supported between",
        "indices must be", "must be real number", "expected Tensor", "unhashable", "cannot be interpreted",
        "invalid literal",
        "only integer", "takes no", "ambiguous", "can't convert", "could not be converted",
    )  # fmt: skip
    for part in foreign:
        assert part not in text or "it must" in text or "give" in text or "unexpected keyword" in text, text


def attempt(name: str, family: str, changes: dict[str, Any]) -> None:
    call = CALLS[name]
    arguments = call.good(family) | changes
    if arguments.get("gen_length", 0) is None and family != "causal":
        arguments.setdefault("steps", 2)  # the default length, which takes seconds with a step for every token
    begun = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call.function(**arguments)
    except (ValueError, TypeError, FileNotFoundError) as error:
        one_sentence(error)
    else:
        assert result is not None
    assert time.process_time() - begun < 20


@st.composite
def calls(draw: Any) -> tuple[str, str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(CALLS)))
    call = CALLS[name]
    family = draw(st.sampled_from(call.families))
    changed = draw(st.lists(st.sampled_from(call.names), min_size=1, max_size=2, unique=True))
    return name, family, {one: BAD[draw(st.integers(0, len(BAD) - 1))] for one in changed}


@pytest.mark.long
@settings(
    max_examples=5000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(calls())
def test_every_outcome_is_a_result_or_a_sentence(case: tuple[str, str, dict[str, Any]]) -> None:
    attempt(*case)


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_argument_with_every_value(name: str) -> None:
    """All single changes, of one family: 70 values for every argument of every function."""
    call = CALLS[name]
    for argument in call.names:
        for value in BAD:
            attempt(name, call.families[0], {argument: value})
