"""What `capture` keeps and what `mean_activations` measures, against float64 loops; what both refuse."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import SITES, PointContext, SinkLayout
from dlm_lens.files.tensor_files import write_tensors
from dlm_lens.hooks import (
    Activations,
    MeanActivations,
    ablate,
    at_steps,
    attach_hooks,
    capture,
    hooks_of_run,
    mask_top_sinks,
    mean_activations,
    patch_from,
    scale_attention,
    sink,
    splice,
    steer,
    steer_along,
    zero_value,
)
from dlm_lens.sampling import NonFiniteLogitsError
from dlm_lens.testing import tiny
from tests.tracing.reference import run64

IDS = [5, 9, 14, 3]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4}
CLOSE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("sink_qwen", num_sinks=1)


@pytest.mark.parametrize("again", [False, True])
def test_captured_activations_equal_float64(model: Any, again: bool) -> None:
    sites = ["q", "v", "pattern", "z", "attn_out", "mlp_out", "resid"]
    _, kept = run64(model, IDS, **RUN)
    given, settings = (dl.denoise(model, IDS, **RUN), {}) if again else (IDS, RUN)
    found = capture(model, given, sites, cache_steps=[0, -1], layers=[1], **settings)
    assert (found.sites, found.layers, found.steps) == (("q", "v", "pattern", "z", *sites[-3:]), (1,), (0, 3))
    for step in (0, 3):
        for site in sites:
            torch.testing.assert_close(found[site, -1, step].double(), kept[step][f"{site}1"], **CLOSE)
    assert found["z", 1, -1] is found["z", 1, 3]
    assert found["z", 1, -2] is found["z", 1, 0]  # of the steps kept, as in the stack
    assert found.stacked("z", 1).shape == (2, 1, 13, 4, 8)
    assert found.nbytes == 2 * 4 * (13 * (32 + 16 + 4 * 13 + 32) + 3 * 13 * 32)
    with pytest.raises(KeyError, match=r"layers \[1\], steps \[0, 3\]"):
        found["z", 1, 2]


def test_a_negative_layer_counts_from_the_last_of_the_model(model: Any) -> None:
    some = capture(model, IDS, "resid", layers=[0], **RUN)
    every = capture(model, IDS, "resid", layers=[-1, 0], **RUN)
    assert every["resid", -1, 0] is every["resid", 1, 0]
    assert some["resid", -2, 0].equal(every["resid", 0, 0])
    for absent in (-1, -3):
        with pytest.raises(KeyError, match=rf"\('resid', {absent}, 0\) was not kept; .*layers \[0\]"):
            some["resid", absent, 0]
    own = Activations({("resid", 0, 0): some["resid", 0, 0]}, some.run)
    with pytest.raises(KeyError, match="was not kept"):
        own["resid", -1, 0]


def test_an_ar_run_is_captured_prefix_by_prefix_and_again() -> None:
    model = tiny("causal")
    found = capture(model, IDS, "resid", gen_length=3)
    assert [found["resid", 0, step].shape[1] for step in found.steps] == [4, 5, 6]
    again = capture(model, found.run, "resid")
    for key, value in found.values.items():
        torch.testing.assert_close(again[key], value)
    with pytest.raises(ValueError, match="the steps have 4 to 6 positions"):
        found.stacked("resid", 0)


def test_hooks_act_before_activations_are_kept(model: Any) -> None:
    plain = capture(model, IDS, "v", **RUN)
    hooked = capture(model, plain.run, "v", hooks=[zero_value(sink(0), 2)])
    assert hooked["v", 0, 2][:, [0, 3]].abs().max() == 0
    assert hooked["v", 0, 2][:, [1, 2, 4]].equal(plain["v", 0, 2][:, [1, 2, 4]])


def test_the_run_of_a_capture_names_the_given_hooks_alone(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = capture(model, IDS, ["z", "resid"], **RUN).run
    assert plain.settings == dl.denoise(model, IDS, **RUN).settings
    dl.received_over_steps(model, plain)
    assert "was made under the hooks" not in caplog.text
    hook = mask_top_sinks(1)
    hooked = capture(model, IDS, ["z", "resid"], hooks=[hook], **RUN).run
    assert hooked.settings == dl.denoise(model, IDS, hooks=[hook], **RUN).settings
    assert hooks_of_run(hooked) == (hook,)
    assert hooked.settings["columns_hidden"] == (1.0,)


def test_the_partial_run_of_a_capture_names_the_given_hooks_alone(model: Any) -> None:
    class Spoilt:
        site = "resid"

        def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
            return tensor * math.nan

    hook = at_steps(Spoilt(), slice(2, None))
    with pytest.raises(NonFiniteLogitsError) as caught:
        capture(model, IDS, "resid", hooks=[hook], **RUN)
    assert caught.value.partial.settings["hooks"] == (repr(hook),)


def test_too_large_a_capture_is_refused_with_the_number_before_the_first_pass(model: Any) -> None:
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    # 13 positions x 32 features x 4 bytes = 1664 a step and layer
    for limit, fits in ((2 * 4 * 1664, True), (2 * 4 * 1664 - 1, False)):
        if fits:
            assert capture(model, IDS, max_bytes=limit, **RUN).nbytes == limit
            calls.clear()
        else:
            with pytest.raises(MemoryError, match=r"1\.33e-05 GB .*2 layers, 4 steps.*fewer cache_steps="):
                capture(model, IDS, max_bytes=limit, **RUN)
    handle.remove()
    assert calls == []


@pytest.mark.parametrize("family", ["sink_qwen", "modernbert", "diffusion_gemma"])
def test_the_limit_is_what_the_activations_of_every_site_take(family: str) -> None:
    """With two queries for each key; with one; with layers whose keys have other numbers of heads."""
    model = tiny(family, **({"num_sinks": 2} if family == "sink_qwen" else {}))
    # DiffusionGemma's decoder computes one canvas at a step, and sees keys and values of all before it.
    sites = [site for site in SITES if family != "diffusion_gemma" or site in ("rot_k", "v")]
    settings: dict[str, Any] = {"gen_length": 8, "steps_per_block": 4} if family == "diffusion_gemma" else RUN
    for site in sites:
        size = capture(model, [IDS, IDS[:2]], site, **settings).nbytes
        assert capture(model, [IDS, IDS[:2]], site, max_bytes=size, **settings).nbytes == size
        with pytest.raises(MemoryError):
            capture(model, [IDS, IDS[:2]], site, max_bytes=size - 1, **settings)


@pytest.mark.parametrize(("family", "least"), [("causal", 1.5), ("diffusion_gemma", 2.4)])
def test_the_limit_is_a_bound_where_steps_compute_a_part_of_the_canvas(family: str, least: float) -> None:
    model, settings = tiny(family), {"gen_length": 16}
    kept = capture(model, IDS, "resid", **settings)
    with pytest.raises(MemoryError, match=rf"would take up to .* with all {len(IDS) + 16} positions") as caught:
        capture(model, IDS, "resid", max_bytes=1, **settings)
    bound = float(re.search(r"up to (\S+) GB", str(caught.value))[1]) * 1e9  # type: ignore[index]
    assert least < bound / kept.nbytes < 2 * least


def by_hand(model: Any, runs: list[list[int]], site: str, bins: int) -> tuple[dict[Any, Tensor], dict[Any, int]]:
    sums: dict[Any, Tensor] = {}
    counts: dict[Any, int] = {}
    for ids in runs:
        canvases, kept = run64(model, ids, **RUN)
        for canvas, found in zip(canvases[:-1], kept, strict=True):
            masked = (canvas[0] == model.config.mask_token_id).tolist()
            part = int((8 - sum(masked)) * bins // 8)
            for p in range(13 if len(ids) == 4 else 12):
                kind = "sink" if p == 0 else "masked" if masked[p - 1] else "visible"
                counts[kind, part] = counts.get((kind, part), 0) + 1
                for layer in (0, 1):
                    key = (layer, kind, part)
                    sums[key] = sums.get(key, 0) + found[f"{site}{layer}"][0, p]
    return sums, counts


@pytest.mark.parametrize(("site", "bins"), [("z", 2), ("resid", 3)])
def test_means_per_layer_class_and_bin_equal_float64_loops_whatever_the_padding(
    model: Any, site: Any, bins: int
) -> None:
    runs = [IDS, [7, 8, 2]]
    found = mean_activations(model, runs, site, bins=bins, **RUN)
    sums, counts = by_hand(model, runs, site, bins)
    for c, kind in enumerate(("masked", "visible", "sink")):
        for part in range(bins):
            assert int(found.counts[c, part]) == counts.get((kind, part), 0)
            for layer in (0, 1):
                expected = sums[layer, kind, part] / counts[kind, part]
                torch.testing.assert_close(found.means[layer, c, part].double(), expected, **CLOSE)


def test_means_add_up_save_and_load(model: Any, tmp_path: Path) -> None:
    runs = [IDS, [7, 8, 2, 9]]
    both = mean_activations(model, runs, "z", **RUN)
    added = mean_activations(model, runs[0], "z", **RUN) + mean_activations(model, runs[1], "z", **RUN)
    torch.testing.assert_close(added.means, both.means)
    assert added.counts.equal(both.counts)
    assert repr(both) == "MeanActivations('z', layers=2, bins=4; masked: 40, visible: 56, sink: 8)"
    both.save(tmp_path / "means.safetensors")
    loaded = MeanActivations.load(tmp_path / "means.safetensors")
    assert loaded.means.equal(both.means)
    assert loaded.counts.equal(both.counts)
    assert MeanActivations.load(tmp_path / "means.safetensors", model).digest == both.digest != ""
    hook = ablate("z", value=str(tmp_path / "means.safetensors"))
    assert dl.denoise(model, IDS, **RUN, hooks=[hook]).tokens.equal(
        dl.denoise(model, IDS, **RUN, hooks=[ablate("z", value=both)]).tokens
    )


def test_means_of_another_model_are_refused(model: Any, tmp_path: Path) -> None:
    means = mean_activations(model, IDS, "z", **RUN)
    means.save(tmp_path / "means.safetensors")
    other = tiny("llada", seed=5)
    with pytest.raises(ValueError, match=r"these means are of .* \(weights \w+\), not of .*; measure them with"):
        MeanActivations.load(tmp_path / "means.safetensors", other)
    with pytest.raises(ValueError, match="have no common mean"):
        means + replace(means, digest="0123", model="another")
    # What an earlier version wrote names no model.
    write_tensors(tmp_path / "old.safetensors", {"means": means.means, "counts": means.counts},
                  {"kind": "MeanActivations", "site": "z"})  # fmt: skip
    assert MeanActivations.load(tmp_path / "old.safetensors", other).means.equal(means.means)


def test_guidance_counts_the_conditional_half_only(model: Any) -> None:
    run = {**RUN, "cfg_scale": 1.5}
    found = mean_activations(model, IDS, "resid", bins=1, **run)
    conditional = capture(model, IDS, "resid", **run)
    total, count = torch.zeros(32, dtype=torch.float64), 0
    for step in range(4):
        value = conditional["resid", 1, step]
        assert value.shape[0] == 2
        for p in range(12):
            if not conditional.run.masked[step, 0, p]:
                total, count = total + value[0, p + 1].double(), count + 1
    assert int(found.counts[1, 0]) == count
    torch.testing.assert_close(found.means[1, 1, 0].double(), total / count, **CLOSE)


def test_the_models_own_guidance_counts_the_conditional_half_only() -> None:
    """SMDM's default is a cfg_scale of 2, which `denoise` takes for None too."""
    smdm = tiny("smdm")
    assert smdm.sampler_defaults["cfg_scale"] == 2.0
    run = {"steps": 4, "gen_length": 8, "seed": 0}
    own, none = (mean_activations(smdm, IDS, "z", **run, **given) for given in ({}, {"cfg_scale": None}))
    assert int(own.counts[:2].sum()) == 12 * 4  # positions and steps
    assert none.counts.equal(own.counts)
    assert none.means.equal(own.means)


def test_padding_stays_as_it_is(model: Any) -> None:
    found = capture(model, [IDS, [7, 8]], "attn_out", hooks=[ablate("attn_out")], **RUN)
    value = found["attn_out", 0, 1]
    assert value[0].abs().max() == 0
    assert value[1, [0, 3]].abs().max() == 0  # the sink, the first token
    assert value[1, 1:3].abs().min(-1).values.min() > 0  # padding


def test_a_hook_outside_a_run_says_what_it_lacks(model: Any) -> None:
    x = torch.zeros(1, 5, 32)
    needs_run = [ablate("resid", "masked"), splice(torch.tanh, schedule=(0, 1)), scale_attention("prompt", 2.0)]
    for hook in needs_run:
        tensor = x if hook.site == "resid" else torch.zeros(1, 2, 5, 5)
        with pytest.raises(ValueError, match=r"needs to know the run's step: pass it to dlm_lens\.denoise"):
            hook(tensor)
    with pytest.raises(ValueError, match=r"zero_value\(sink\(0\)\): the position of a sink depends"):
        zero_value(sink(0))(torch.zeros(1, 5, 2, 8))
    with attach_hooks(model, zero_value(sink(0))):
        model(input_ids=torch.tensor([IDS]))
    assert ablate("resid", -1)(x + 1)[0, :, 0].tolist() == [1, 1, 1, 1, 0]


def test_reprs_say_the_settings(model: Any) -> None:
    direction = torch.tensor([3.0, 4.0])
    assert repr(steer(direction, 2.0)) == "steer('resid', direction=Tensor([2], norm=5), scale=2.0)"
    assert repr(ablate("z", "masked", dims=1)) == "ablate('z', positions='masked', value='zero', dims=(1,))"
    assert repr(scale_attention((0, sink(1)), 0.5)) == (
        "scale_attention(positions=(0, sink(1)), factor=0.5, stage='before_softmax')"
    )
    assert repr(splice(torch.nn.Identity(), schedule=(0, 1))) == "splice('resid', module=Identity, schedule=(0, 1))"
    patch = patch_from(capture(model, IDS, layers=[0], cache_steps=1, **RUN), 1)
    assert repr(patch) == (
        "patch_from('resid', source=Activations(resid; layers [0], 1 steps (1), 0.00159 MiB), step=1)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zero_value(), "no position; give at least one"),
        (lambda: zero_value("mask"), "positions is 'mask'; give canvas positions, sink"),
        (lambda: zero_value("masked", 3), "'masked' is no position"),
        (lambda: scale_attention(1, 0.0), "factor is 0.0; it must be above 0"),
        (lambda: scale_attention(1, 2.0, stage="during"), "stage is 'during'"),
        (lambda: ablate("pattern"), "site is 'pattern'; it must be one of q, k, v, z"),
        (lambda: ablate("z", value="mean"), r"value=mean_activations\(model, prompts, 'z'\)"),
        (lambda: ablate("z", value="no.safetensors"), "no.safetensors is no file"),
        (lambda: ablate("z", dims=[]), r"dims is \[\]"),
        (lambda: ablate("resid", dims=[4])(torch.zeros(1, 2, 3)), "dims go from 0 to 2"),
        (lambda: ablate("resid", value=torch.zeros(5))(torch.zeros(1, 2, 3)), r"value has shape \[5\]"),
        (lambda: steer(torch.zeros(3))(torch.zeros(1, 2, 4)), r"resid has \[4\] features"),
        (lambda: steer(torch.tensor([torch.nan])), "direction is not finite"),
        (lambda: steer(torch.ones(32), "2"), "steer: scale is '2'; it must be a finite number"),  # type: ignore[arg-type]
        (lambda: steer(torch.ones(32), math.inf), "steer: scale is inf; it must be a finite number"),
        (lambda: scale_attention(0, "a"), "factor is 'a'; it must be above 0"),  # type: ignore[arg-type]
        (
            lambda: splice(torch.nn.Linear(5, 5))(torch.zeros(1, 2, 4)),
            r"failed on resid of shape \[1, 2, 4\]",
        ),
        (lambda: steer(np.ones(32)), r"direction is a ndarray float64 \[32\]; give a tensor .*torch.from_numpy"),
        (lambda: steer(torch.zeros(3), schedule=(1, 2, 3)), r"steer: schedule is \(1, 2, 3\); give \(lo, hi\)"),
        (lambda: steer_along(torch.zeros(2, 3), [0.5, 0.5], 1.0), "2 knots for a curve of 2 points"),
        (lambda: steer_along(torch.zeros(3, 3), [0.1, 0.5, 0.4], 1.0), "a number, in rising order"),
        (lambda: steer_along(torch.zeros(3), [0.5], 1.0), r"give a finite tensor \[knot, d_model\]"),
        (lambda: steer_along(torch.zeros(2, 3), [0, 1], math.nan), "by is nan; it must be a finite number"),
        (lambda: steer_along(torch.zeros(2, 3), [0, 1], 1.0, over="step"), "over is 'step'"),  # type: ignore[arg-type]
        (lambda: steer_along(torch.zeros(2, 3), [0, 1], 1.0)(torch.zeros(1, 2, 4)), "has .4. features a position"),
        (lambda: splice(3), "3 cannot be called"),
        (lambda: splice(torch.tanh, schedule=(0, 1, 2)), r"schedule is \(0, 1, 2\)"),
        (lambda: splice(lambda x: x[:, :1])(torch.zeros(1, 2, 4)), r"returned a tensor of shape \[1, 1, 4\]"),
        (lambda: patch_from(torch.zeros(1)), r"Tensor holds no activations; give capture"),
        (lambda: ablate("resid", 7)(torch.zeros(1, 2, 3)), "position 7 is not there"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("call", [capture, mean_activations])
def test_hooks_are_read_as_those_of_denoise(call: Any, model: Any) -> None:
    found = call(model, IDS, "resid", hooks=None, **RUN)
    assert str(found) == str(call(model, IDS, "resid", **RUN))
    with pytest.raises(ValueError, match=r"hooks is steer.*; give a list of hooks"):
        call(model, IDS, "resid", hooks=steer(torch.ones(32)), **RUN)


def test_what_a_measurement_does_not_take_is_told(model: Any) -> None:
    with pytest.raises(ValueError, match=r"capture takes no observers: give them to dlm_lens\.denoise"):
        capture(model, IDS, observers=None, **RUN)
    recording = dl.record(model, IDS, **RUN)
    own, of_run = capture(model, recording), capture(model, recording.run)
    assert own.steps == (0, 1, 2, 3)
    assert torch.equal(own["resid", 0, 3], of_run["resid", 0, 3])
    with pytest.raises(ValueError, match=r"bins is 2\.5; it must be a whole number of at least 1"):
        mean_activations(model, IDS, "resid", bins=2.5, **RUN)  # type: ignore[arg-type]


def test_a_patch_of_another_shape_or_step_is_refused(model: Any) -> None:
    found = capture(model, IDS, cache_steps=[0], **RUN)
    with pytest.raises(ValueError, match=r"step 3 was not captured; there are \[0\]"):
        patch_from(found, 3)
    late = dl.denoise(model, IDS, steps=8, gen_length=8, block_length=8)
    step7 = patch_from(capture(model, late, cache_steps=7), 7)
    with pytest.raises(ValueError, match="step 7 is not there; the run has 4"):
        dl.denoise(model, IDS, **RUN, hooks=[step7])
    with pytest.raises(ValueError, match="step -5 is not there; the run has 4"):
        dl.denoise(model, IDS, **RUN, hooks=[patch_from(found, -5)])
    with pytest.raises(ValueError, match=r"step 3 was not captured; there are \[0\]"):
        dl.denoise(model, IDS, **RUN, hooks=[patch_from(found, -1)])
    with pytest.raises(ValueError, match="needs to know the run's step"):
        patch_from(found, -4)(torch.zeros(1, 13, 32))
    with pytest.raises(ValueError, match=r"step -2 was not captured; there are \[0\]"):
        patch_from(found, 0, from_step=-2)
    with pytest.raises(ValueError, match=r"step is 0\.5; give an index"):
        patch_from(found, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a bare call does not know its layer"):
        step7(torch.zeros(1, 13, 32))
    with pytest.raises(ValueError, match="'z' was not captured"):
        patch_from(found, 0, "z")
    passes: list[int] = []
    handle = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(
        ValueError, match=r"had 12 positions and this one has 13; patching needs prompts and answers"
    ):
        dl.denoise(model, [*IDS, 1], **RUN, hooks=[patch_from(found, 2, from_step=0)])
    handle.remove()
    assert not passes
    with pytest.raises(ValueError, match=r"had shape \[1, 13, 32\] there and this one has \[1, 14, 32\]"):
        patch_from(found, 0)(torch.zeros(1, 14, 32), PointContext("", 0, SinkLayout.of(model)))
    with pytest.raises(ValueError, match="step 4 is not there: the run has 4 steps"):
        capture(model, IDS, cache_steps=4, **RUN)
    with pytest.raises(ValueError, match=r"steps: settings go with a prompt"):
        capture(model, found.run, steps=4)


def test_means_of_a_class_that_never_was_are_refused(model: Any) -> None:
    means = mean_activations(tiny("causal"), IDS, "z", gen_length=2)
    assert means.counts[0].sum() == 0
    with pytest.raises(ValueError, match="has seen no masked position"):
        dl.denoise(tiny("llada"), IDS, **RUN, hooks=[ablate("z", "masked", means)])
