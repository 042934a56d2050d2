"""A setting of the wrong kind is one sentence, in every sampler, before the first pass."""

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.arguments import FINITE, rules_of
from dlm_lens.sampling.algorithm_registry import algorithms
from dlm_lens.testing import tiny

PROMPT = [[5, 9, 13]]


def test_every_setting_of_a_sampler_has_a_rule() -> None:
    """By its name, or by the type of its field; names of rules are told by the samplers themselves."""
    for algorithm in algorithms().values():
        names = {field.name for field in fields(algorithm.settings) if field.type not in (str, "str")}
        assert names <= set(rules_of(algorithm.settings)), algorithm.name


@pytest.mark.parametrize(
    ("family", "setting", "value", "must_be"),
    [
        ("llada2", "steps_per_block", "x", "a whole number"),
        ("llada2", "steps_per_block", 1.5, "a whole number"),
        ("llada2", "minimal_topk", [1], "a whole number"),
        ("llada2", "eos_early_stop", "no", "True or False"),
        ("bd3lm", "nucleus_p", "x", FINITE),
        ("bd3lm", "first_hitting", 1, "True or False"),
        ("a2d_qwen3", "schedule", 3, "one of linear, cosine"),
        ("a2d_qwen3", "suppress_tokens", "12", "a token id, or a list of them"),
        ("a2d_qwen3", "cfg_keep_tokens", 1.5, "a token id, or a list of them"),
        ("sdar", "stop_tokens", "12", "a token id, or a list of them"),
        ("sdar", "stop_tokens", [1.5], "a token id, or a list of them"),
        ("sdar", "stop_tokens", {7}, "a token id, or a list of them"),
        ("sdar", "stop_tokens", -1, "a token id, or a list of them"),
        ("sdlm", "stop_tokens", True, "a token id, or a list of them"),
        ("wedlm", "entropy_threshold", "low", FINITE),
        ("i_dlm", "stride", 1.5, "a whole number"),
    ],
)
def test_a_setting_of_another_kind_is_named(family: str, setting: str, value: Any, must_be: str) -> None:
    """Of text and fractions `stop_tokens` took other tokens, 1 and 2 of "12"; flags took any text for True."""
    with pytest.raises(ValueError, match=rf"^{setting} is .*; it must be {re.escape(must_be)}$"):
        dl.denoise(tiny(family), PROMPT, gen_length=4, **{setting: value})


@pytest.mark.parametrize("setting", ["high_mode", "middle_mode", "low_mode", "time_profile", "noise_removal"])
@pytest.mark.parametrize("value", [1, ["pure-pc"], b"pure-pc"])
def test_a_name_of_another_kind_is_answered_with_the_names(setting: str, value: Any) -> None:
    model = tiny("duo", sampler="duo_psi")
    with pytest.raises(ValueError, match=rf"^{setting} is .*; it must be one of \w+"):
        dl.denoise(model, PROMPT, gen_length=4, **{setting: value})


def test_a_token_of_another_vocabulary_cannot_be_suppressed() -> None:
    with pytest.raises(ValueError, match="token 64 is to be suppressed, and the model has 64 tokens, 0 to 63"):
        dl.denoise(tiny("a2d_qwen3", vocab_size=64), PROMPT, gen_length=4, suppress_tokens=[3, 64])


@pytest.mark.parametrize(
    "form", [int, lambda i: [i], lambda i: np.array([i]), lambda i: torch.tensor([i]), torch.tensor]
)
def test_one_token_or_several_of_any_kind(form: Any) -> None:
    model = tiny("sdar")
    plain = dl.denoise(model, PROMPT, gen_length=16, temperature=0, stop_tokens=())
    end = int(plain.tokens[0, 3 + 4])  # a token of the second block
    listed = dl.denoise(model, PROMPT, gen_length=16, temperature=0, stop_tokens=(end,))
    assert listed.steps < plain.steps
    run = dl.denoise(model, PROMPT, gen_length=16, temperature=0, stop_tokens=form(end))
    assert run.settings["stop_tokens"] == (end,)
    assert torch.equal(run.tokens, listed.tokens)
    assert run.steps == listed.steps
