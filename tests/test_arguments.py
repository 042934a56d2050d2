"""Arguments that do not fit a function: the sentence names the function, the argument and what it is here."""

from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.sinks.statistics import Estimate


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"device": "cuda"},
            r"load has no argument 'device' \(device is device_map here\); it has path",
        ),
        (
            {"trust_remote_code": True},
            r"'trust_remote_code' \(.* never given: the checkpoint's own Python is",
        ),
        ({"dtyp": None}, r"load has no argument 'dtyp' \(did you mean 'dtype'\?\); it has"),
        ({"zzz": 1}, r"load has no argument 'zzz'; it has path_or_hub_name"),
        ({"path_or_hub_name": "toy"}, r"^load: multiple values for argument 'path_or_hub_name'$"),
    ],
)
def test_a_function_names_the_argument_that_it_does_not_have(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        dl.load("toy", **given)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("genlength", "did you mean 'gen_length'?"),
        ("max_new_tokens", "max_new_tokens is gen_length here"),
        ("sampler", "sampler is an argument of dlm_lens.load here"),
    ],
)
def test_a_sampler_names_the_setting_that_is_meant(setting: str, hint: str) -> None:
    with pytest.raises(ValueError, match="sampler has no setting") as caught:
        dl.denoise(dl.load("toy"), "1", **{setting: 1})
    assert f"has no setting {setting!r} ({hint}); it has steps, " in str(caught.value)


def test_an_estimate_of_one_prompt_shows_no_interval() -> None:
    assert str(Estimate(1.5, float("nan"), float("nan"), 1)) == "1.5 [no interval: 1 prompt]"
    assert str(Estimate(1.5, 1.25, 2.0, 3)) == "1.5 [1.25, 2]"
