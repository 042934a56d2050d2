"""Arguments that do not fit a function: the sentence names the function, the argument and what it is here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.arguments import check_index, chosen_indices, chosen_steps
from dlm_lens.hooks import (
    ablate,
    ablate_features,
    at_heads,
    at_layers,
    at_progress,
    at_steps,
    attach_hooks,
    by_row,
    capture,
    freeze_sinks,
    hooks_of_run,
    keep_only,
    mask_positions,
    mask_random,
    mask_sinks,
    mask_tokens,
    mask_top_sinks,
    scale_attention,
    steer,
    steer_feature,
    zero_value,
)
from dlm_lens.recording import FeatureActivations, Recording, rerun
from dlm_lens.sinks import AboveMedian, AboveStd, AttentionShare, LowKeyNorm, SoftSigmoid
from dlm_lens.statistics import Estimate
from dlm_lens.testing import tiny
from tests.recording.test_features import autoencoder


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


def test_a_function_says_which_arguments_it_needs() -> None:
    for call, sentence in (
        (lambda: dl.find_sinks(None), r"'detector'; it is called as find_sinks\(attention, detector\)$"),
        (lambda: dl.denoise(None), r"'prompt'; it is called as denoise\(model, prompt\)$"),
    ):
        with pytest.raises(TypeError, match=sentence):
            call()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: ablate("z", heads=[3]),
            r"ablate has no argument 'heads' \(heads is at_heads\(hook, heads\) here\)",
        ),
        (
            lambda: mask_sinks(AboveStd(3), layer=2),
            r"mask_sinks has no argument 'layer' \(layer is at_layers\(hook",
        ),
        (lambda: mask_top_sinks(1, steps=[2]), r"mask_sinks has no argument 'steps' \(steps is at_steps\(hook"),
        (lambda: steer(torch.ones(4), 1.0, position=3), r"\(did you mean 'positions'\?\); it has direction"),
        (lambda: dl.hooks.patch_from(None, steps=[2]), r"no argument 'steps' \(did you mean 'step'\?\)"),
        (lambda: dl.denoise(tiny("llada"), [[5]], layers=[2]), r"setting 'layers' \(layers is at_layers\(hook"),
    ],
)
def test_a_hook_says_how_it_is_limited(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        make()


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("genlength", "did you mean 'gen_length'?"),
        ("max_new_tokens", "max_new_tokens is gen_length here"),
        ("sampler", "sampler is an argument of dlm_lens.load here"),
        ("fwd_hooks", "fwd_hooks is an argument of dlm_lens.bridge(model).denoise here"),
    ],
)
def test_a_sampler_names_the_setting_that_is_meant(setting: str, hint: str) -> None:
    with pytest.raises(ValueError, match="sampler has no setting") as caught:
        dl.denoise(dl.load("toy"), "1", **{setting: 1})
    assert f"has no setting {setting!r} ({hint}); it has steps, " in str(caught.value)


def test_arguments_that_are_missing_or_too_many_are_told_with_the_call() -> None:
    for given, sentence in (
        ((1,), r"pattern_stability: missing .*; it is called as pattern_stability\(model, run, detector\)$"),
        ((1, 2, 3, 4), r"too many .*; it is called as pattern_stability\(model, run, detector, \.\.\.\)$"),
    ):
        with pytest.raises(TypeError, match=sentence):
            dl.probes.pattern_stability(*given)
    with pytest.raises(TypeError, match=r"it is called as sink_positions_by_model\(models, heads=\.\.\.\)$"):
        dl.viz.sink_positions_by_model({})  # type: ignore[call-arg]


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
    with pytest.raises(ValueError, match=r"^explain is 3; give a list, such as explain=\[3\], or None for all$"):
        chosen_indices("position", 3, 8, argument="explain")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^steps is 'all'; give a list of whole numbers, or None for all$"):
        chosen_indices("step", "all", 8)  # type: ignore[arg-type]
    assert chosen_indices("step", [-1, 3, 3], 8) == (3, 7)


RUN = {"steps": 4, "gen_length": 8, "block_length": 4}


def test_indices_of_numpy_and_torch_are_stored_as_pythons(tmp_path: Any) -> None:
    model, ids = tiny("llada"), [5, 9, 11]
    run = dl.denoise(model, ids, **RUN)
    rerun(model, run, [dl.ValueNorm()], layers=np.arange(2)).save(tmp_path / "rerun")  # type: ignore[arg-type]
    dl.record(model, ids, [dl.ValueNorm()], layers=[np.int64(1)], to=tmp_path / "record", **RUN)
    assert [Recording.load(tmp_path / name).layers for name in ("rerun", "record")] == [(0, 1), (1,)]
    chosen = chosen_indices("layer", torch.tensor([1, -2]), 2)  # type: ignore[arg-type]
    assert chosen == (0, 1)
    assert {type(one) for one in chosen} == {int}


@pytest.mark.parametrize("one", [np.int64(1), torch.tensor(1), np.array(1)])
def test_one_index_of_numpy_or_torch_is_an_index(one: Any) -> None:
    hook, sae = ablate("z"), autoencoder(tiny("llada"))
    for limit in (at_layers, at_steps, at_heads):
        assert limit(hook, one) == limit(hook, [one]) == limit(hook, 1)  # type: ignore[operator]
    assert at_steps(hook, slice(one, None)) == at_steps(hook, slice(1, None))
    assert repr(ablate("resid", dims=one)) == repr(ablate("resid", dims=(1,)))
    assert repr(ablate_features(sae, one)) == repr(ablate_features(sae, [1]))
    assert FeatureActivations(sae, one).features == FeatureActivations(sae, (1,)).features == (1,)
    assert chosen_steps(one, 4) == (1,)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, np.array])
def test_a_number_of_numpy_or_torch_is_the_number_of_a_picture(kind: Any) -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 9, 11], [5, 9, 12]], **RUN)
    numbers = {"step": 2, "layer": 1, "head": 0, "row": 1}
    other, plain = (
        dl.viz.attention_pattern(run, model, **{name: given(value) for name, value in numbers.items()})
        for given in (kind, int)
    )
    assert (other.title, other.pieces) == (plain.title, plain.pieces)
    maps = [dl.viz.attention_maps(model, run, steps=[1], layer=1, head=0, row=given(1)) for given in (kind, int)]
    found, expected = (figure.axes[0].collections[0].get_array().tolist() for figure in maps)
    assert found == expected
    with pytest.raises(ValueError, match="rows go from 0 to 1"):
        dl.viz.attention_pattern(run, model, **numbers | {"row": kind(2)})


WRONG_POSITIONS = ("x", 1.5, [1.5], [], (0, 1, 2, 3), slice("a", None), True)


@pytest.mark.parametrize("wrong", [2.0, "12", [1, "2"], [True], torch.tensor([0.5]), {1: 2}])
def test_what_is_no_index_is_refused_in_a_sentence(wrong: Any) -> None:
    model = tiny("llada")
    sae, tl = autoencoder(model), dl.bridge(model)
    for name, call in (
        ("layer", lambda: at_layers(ablate("z"), wrong)),
        ("step", lambda: at_steps(ablate("z"), wrong)),
        ("head", lambda: at_heads(ablate("z"), wrong)),
        ("dim", lambda: ablate("resid", dims=wrong)),
        ("feature", lambda: ablate_features(sae, wrong)),
        ("feature", lambda: FeatureActivations(sae, wrong)),
        ("cache_step", lambda: capture(model, [5, 9, 11], cache_steps=wrong, **RUN)),
        ("cache_step", lambda: tl.denoise_with_cache([5, 9, 11], cache_steps=wrong, **RUN)),
    ):
        with pytest.raises(ValueError, match=f"give at least one {name} as a whole number"):
            call()


def test_arguments_of_kept_activations_are_refused_in_a_sentence_before_the_first_pass() -> None:
    model = tiny("llada")
    tl, passes = dl.bridge(model), []
    handle = model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))

    def kept(**given: Any) -> Any:
        return tl.denoise_with_cache([5, 9, 11], **RUN, **given)

    def captured(**given: Any) -> Any:
        return capture(model, [5, 9, 11], **RUN, **given)

    observers = r"observers is 3; it must be a RunObserver"
    pairs = "fwd_hooks takes pairs"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        *(
            (call, {"max_bytes": "1GB"}, "max_bytes is '1GB'; it must be a number of bytes")
            for call in (kept, captured)
        ),
        *((call, {"max_bytes": np.nan}, "max_bytes is nan; it must be a number") for call in (kept, captured)),
        *(
            (call, {"device": "cudaa"}, "device is 'cudaa'; it must be a device of this")
            for call in (kept, captured)
        ),
        *(
            (call, {"device": 1.5}, "device is 1.5; it must be a device of this machine")
            for call in (kept, captured)
        ),
        *(
            (call, {"cache_steps": slice("a")}, "cache_steps is slice.*; it must be a slice")
            for call in (kept, captured)
        ),
        *(
            (kept, {"pos_slice": wrong}, "pos_slice is .*; it must be a position, a list")
            for wrong in WRONG_POSITIONS
        ),
        (
            lambda **given: tl.bytes_per_step(None, 4, **given),
            {"pos_slice": [1.5]},
            r"pos_slice is \[1.5\]; it must",
        ),
        (kept, {"observers": 3}, observers),
        (tl.denoise, {"prompt": [5, 9], "observers": 3}, observers),
        *((tl.denoise, {"prompt": [5, 9], "fwd_hooks": [(wrong, print)]}, pairs) for wrong in (3, None)),
        (tl.denoise, {"prompt": [5, 9], "fwd_hooks": 3}, "fwd_hooks is 3; give a list of pairs"),
        *((captured, {"sites": wrong}, f"capture: site is {wrong}; it must be one of q") for wrong in (None, 3)),
        (captured, {"sites": []}, r"capture: sites is \[\]; give at least one of q"),
        (captured, {"encoder": "x"}, "encoder is 'x'; it must be True or False"),
    ]
    passes.clear()
    for call, given, message in cases:
        with pytest.raises(ValueError, match=message):
            call(**given)
    assert not passes
    handle.remove()
    plain = tl.denoise([5, 9, 11], **RUN)
    assert tl.denoise([5, 9, 11], **RUN, fwd_hooks=None).canvases.equal(plain.canvases)
    assert captured(max_bytes=1e9, device=torch.device("cpu")).steps == kept(max_bytes=1e9)[1].steps


def test_none_and_a_slice_are_refused_where_indices_are_listed() -> None:
    sae = autoencoder(tiny("llada"))
    for wrong in (None, slice(1, 3)):
        for name, call in (
            ("layer", lambda given: at_layers(ablate("z"), given)),
            ("head", lambda given: at_heads(ablate("z"), given)),
            ("feature", lambda given: ablate_features(sae, given)),
            ("feature", lambda given: FeatureActivations(sae, given)),
        ):
            with pytest.raises(ValueError, match=f"give at least one {name} as a whole number"):
                call(wrong)


def test_layers_in_an_array_and_an_array_as_a_layer() -> None:
    model, ids = tiny("llada"), torch.tensor([[5, 9, 11]])
    with attach_hooks(model, ablate("z"), layers=np.array([1])):  # type: ignore[arg-type]
        found = model(ids).logits
    with attach_hooks(model, ablate("z"), layers=[1]):
        torch.testing.assert_close(found, model(ids).logits)
    with pytest.raises(ValueError, match="layers is 0; give a list"), attach_hooks(model, layers=0):  # type: ignore[arg-type]
        pass
    recording = dl.record(model, [5, 9, 11], [dl.ReceivedAttention()], **RUN)
    with pytest.raises(ValueError, match=r"layer is a ndarray .*; it must be a whole number"):
        dl.viz.incoming_attention(recording, layer=np.array([0, 1]), head=0)


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.tensor, np.array])
def test_numbers_of_numpy_and_torch_in_settings_are_pythons(kind: Any) -> None:
    half = kind(0.5)
    for make in (
        dl.AboveMean,
        AboveStd,
        SoftSigmoid,
        AttentionShare,
        LowKeyNorm,
        lambda one: AboveMedian(one, one),
        lambda one: scale_attention(0, one),
        lambda one: at_progress(mask_positions(0), (one, 1.0)),
    ):
        assert make(half) == make(0.5)
        assert repr(make(half)) == repr(make(0.5))
    for make in (
        lambda one: steer(torch.ones(32), one, schedule=(one, 1.0)),
        lambda one: steer(torch.ones(32), 1.0, schedule=one),
        lambda one: steer_feature(autoencoder(tiny("llada")), 3, one, schedule=one),
    ):
        assert repr(make(half)) == repr(make(0.5))


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, np.array])
def test_whole_numbers_of_numpy_and_torch_in_settings_are_pythons(kind: Any) -> None:
    two = kind(2)
    for make in (
        dl.TopK,
        mask_positions,
        mask_tokens,
        mask_top_sinks,
        mask_random,
        lambda one: mask_random(1, seed=one),
        lambda one: mask_sinks(dl.AboveMean(one), top=one),
        lambda one: keep_only(one, one, ahead=one),
        lambda one: freeze_sinks(dl.TopK(1), step=one),
        lambda one: scale_attention([one], 0.5),
        lambda one: zero_value(one),
        lambda one: by_row([one], [3, one]),
    ):
        assert make(two) == make(2)
        assert repr(make(two)) == repr(make(2))


def test_a_run_whose_hook_has_a_number_of_numpy_can_be_repeated(tmp_path: Any) -> None:
    model = tiny("llada")
    hooks = [mask_sinks(dl.AboveMean(np.linspace(1, 3, 2)[0])), at_progress(ablate("z"), (np.float64(0.5), 1.0))]
    recording = dl.record(model, [5, 9], [dl.ValueNorm()], hooks=hooks, to=tmp_path / "run", **RUN)
    assert [repr(one) for one in hooks_of_run(recording.run)] == [repr(one) for one in hooks]
    hooks = [mask_sinks(dl.AboveMean(1.0)), at_progress(ablate("z"), (0.5, 1.0))]
    again = dl.record(model, [5, 9], [dl.ValueNorm()], hooks=hooks, to=tmp_path / "run", **RUN)
    assert again.value_norm.equal(recording.value_norm)


@pytest.mark.parametrize("wrong", [np.float64("nan"), np.bool_(True), torch.ones(2), np.int64(-1), "3"])
def test_what_is_no_setting_of_a_detector_is_refused(wrong: Any) -> None:
    for kind in (dl.AboveMean, dl.TopK):
        with pytest.raises(ValueError, match=r": (eps|k) must be"):
            kind(wrong)


def test_what_names_no_activation_no_recording_and_no_model_is_refused() -> None:
    found = capture(tiny("llada"), [5, 9, 11], cache_steps=0, **RUN)
    assert found["resid", 1, torch.tensor(0)].equal(found["resid", np.int64(1), 0])  # type: ignore[index]
    for key in ("resid", ("resid", 1)):
        with pytest.raises(KeyError, match=r"give activations\[site, layer, step\]"):
            found[key]  # type: ignore[index]
    with pytest.raises(ValueError, match=r"Recording\.load: None is no directory"):
        Recording.load(None)  # type: ignore[arg-type]
    for wrong in (None, "gpt2"):
        with pytest.raises(ValueError, match=f"add_hook_points: {wrong!r} is no model"):
            dl.add_hook_points(wrong)  # type: ignore[type-var]


def test_a_diffusion_lm_of_a_diffusion_lm_is_of_its_model() -> None:
    lm = dl.DiffusionLM("toy")
    assert dl.DiffusionLM(lm).generate("sort 4 2 :", **RUN).tokens.equal(lm.generate("sort 4 2 :", **RUN).tokens)


def test_a_recorder_of_another_model_or_given_twice_is_named() -> None:
    model, other = tiny("llada"), tiny("llada")
    for recorders in ([dl.Recorder(other, [dl.ValueNorm()])], [dl.Recorder(model, [dl.ValueNorm()])] * 2):
        with pytest.raises(ValueError, match="it is of another model, was given twice, or other code replaced"):
            dl.denoise(model, [5, 9, 11], observers=recorders, **RUN)


@pytest.mark.parametrize(
    ("method", "value"),
    [("thresholds", 3.0), ("thresholds", torch.zeros(3)), ("detect", torch.ones(())), ("detect", None)],
)
def test_a_detector_that_returns_no_value_for_every_key_is_named(method: str, value: Any) -> None:
    detector = type("Mine", (dl.sinks.Detector,), {method: lambda self, scores: value})()
    model = tiny("llada")
    recording = dl.record(model, [5, 9, 11], [dl.ReceivedAttention()], **RUN)
    whole = type("Mine", (dl.sinks.Detector,), {method: lambda self, scores: scores * 0 + 9 > 10})()
    sentence = rf"Mine.*\.{method} returned .*; return (truth values|numbers) in a tensor of the scores' shape"
    if method == "detect":
        with pytest.raises(ValueError, match=sentence):
            dl.denoise(model, [5, 9, 11], hooks=[mask_sinks(detector)], **RUN)
        assert not dl.find_sinks(recording, whole).is_sink.any()
    else:
        detector.detect = lambda scores: scores > 1  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=sentence):
        dl.find_sinks(recording, detector)


@pytest.mark.parametrize("value", [None, np.zeros(3)])
def test_a_reducer_that_returns_no_tensor_is_named(value: Any) -> None:
    reducer = type("Mine", (dl.recording.Reducer,), {"reduce": lambda self, layer: value})()
    with pytest.raises(ValueError, match=r"returned .*; return a tensor \[batch"):
        dl.record(tiny("llada"), [5, 9, 11], [reducer], **RUN)
