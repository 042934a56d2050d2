"""Arguments that do not fit a function: the sentence names the function, the argument and what it is here."""

from typing import Any

import pytest

import dlm_lens as dl
from dlm_lens.arguments import check_index, chosen_indices
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


@pytest.mark.parametrize("wrong", ["mean", 0.5, True, None])
def test_an_index_that_is_no_whole_number_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"layer is {wrong!r}; it must be a whole number"):
        check_index("layer", wrong, 4)
    model = dl.load("toy")
    recording = dl.record(model, "tom has 5 apples", gen_length=4, steps=2)
    with pytest.raises(ValueError, match=r"step is .*; it must be a whole number"):
        dl.recording.rerun(model, recording.run, [dl.ReceivedAttention()], steps=[wrong])
    if wrong is not None:  # the default of these
        with pytest.raises(ValueError, match=r"row .* of 1; rows go from 0 to 0"):
            dl.viz.report(recording, "not_written.html", row=wrong)
        with pytest.raises(ValueError, match=r"position is .*; it must be a whole number"):
            dl.sinks.sink_rate(dl.find_sinks(recording, dl.AboveMean(3.0)), position=wrong)


def test_a_number_in_the_place_of_a_list_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^patching: steps is 3; give a list, such as steps=\[3\], or None for all$"
    ):
        chosen_indices("step", 3, 8, "patching: ")  # type: ignore[arg-type]
    assert chosen_indices("step", [-1, 3, 3], 8) == (3, 7)
