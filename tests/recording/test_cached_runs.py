"""Recording, hooks, traces and reruns under an approximate cache, against a float64 network with stale keys."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.bridging import BridgeRecorder
from dlm_lens.hooks import ablate, mask_positions, mask_top_sinks
from dlm_lens.recording import AttentionEntropy, UpdateNorm, rerun
from dlm_lens.testing import tiny
from dlm_lens.viz.attention_snapshot import snapshot
from tests.sampling.stale import span_of, stale64, whole_step

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
RUN: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 12, "seed": 1, "threshold": 0.1}
WIDE: dict[str, Any] = RUN | {"gen_length": 16, "block_length": 8, "steps": 16}
CASES = [(name, cache) for name in ("llada", "dream") for cache in ("prefix", "dual")]


def queries_of(run: dl.DenoisingRun, step: int, row: int, *, shift: bool) -> Tensor:
    """Which positions of a row without its padding a step computes."""
    start, stop = span_of(run, step, shift=shift) or (0, run.tokens.shape[1])
    where = torch.arange(run.tokens.shape[1])
    return ((where >= start) & (where < stop))[run.attention_mask[row]]


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_received_attention_is_that_of_the_computed_queries(name: str, cache: str) -> None:
    model = tiny(name)
    reducers = [
        dl.ReceivedAttention(("all", "masked", "block"), min_viewers=1), AttentionEntropy(), UpdateNorm(),
        dl.ValueNorm(), dl.KeyNorm(), dl.recording.ResidualNorm(), dl.recording.MassiveActivations(),
    ]  # fmt: skip
    recording = dl.record(model, PROMPTS, reducers, cache=cache, **RUN)
    run, shift = recording.run, name == "dream"
    assert run.canvases.equal(dl.denoise(model, PROMPTS, cache=cache, **RUN).canvases)
    assert run.computed == tuple(span_of(run, step, shift=shift) for step in range(run.steps))
    assert None in run.computed
    assert len(set(run.computed)) > 2
    for step in range(run.steps):
        for row in range(2):
            kept, keep = stale64(model, run, step, row), run.attention_mask[row]
            if not run.masked[step:, row].any():  # the row has its answer
                assert recording.received[step, row].isnan().all()
                assert not recording.expected()[step, row].any()
                continue
            here = queries_of(run, step, row, shift=shift)
            classes = {"all": here, "masked": here & run.masked[step, row][keep]}
            classes["block"] = (
                here & torch.tensor([run.spans[step][0] <= i < run.spans[step][1] for i in range(len(keep))])[keep]
            )
            for query_class, chosen in classes.items():
                array = (
                    recording.received if query_class == "all" else getattr(recording, f"received_{query_class}")
                )
                expected = recording.expected(query_class)[step, row][keep].double()
                # Every query sees every key of its row, so that even attention gives each key the same.
                torch.testing.assert_close(expected, torch.full_like(expected, float(chosen.sum()) / len(chosen)))
                assert (recording.viewers(query_class)[step, row][keep] == chosen.sum()).all()
                for layer in range(2):
                    found = array[step, row, layer][:, keep].double()
                    if not chosen.any():
                        assert found.isnan().all()
                        continue
                    sums = kept[f"pattern{layer}"][0][:, chosen].sum(-2)
                    torch.testing.assert_close(found * expected, sums, atol=2e-5, rtol=2e-4)
            for layer in range(2):
                pattern = kept[f"pattern{layer}"][0]
                entropy = -(pattern * pattern.log()).sum(-1)
                mixed = kept[f"z{layer}"][0].norm(dim=-1).T
                for array, wanted in ((recording.entropy, entropy), (recording.mixed_norm, mixed)):
                    found = array[step, row, layer][:, keep].double()
                    torch.testing.assert_close(found[:, here], wanted[:, here], atol=2e-5, rtol=2e-4)
                    assert found[:, ~here].isnan().all()
                update = recording.update_norm[step, row, layer][keep].double()
                torch.testing.assert_close(
                    update[here], kept[f"attn_out{layer}"][0].norm(dim=-1)[here], atol=2e-5, rtol=2e-4
                )
                stream = kept[f"resid{layer - 1}"][0]
                norm = recording.residual_norm[step, row, layer][keep].double()
                torch.testing.assert_close(norm[here], stream.norm(dim=-1)[here], atol=2e-5, rtol=2e-4)
                assert norm[~here].isnan().all()
                median = stream[here].abs().flatten().sort().values
                found = recording.median_activation[step, row, layer].double()
                torch.testing.assert_close(found, median[(len(median) - 1) // 2], atol=2e-5, rtol=2e-4)
                values = kept[f"v{layer}"][0].norm(dim=-1).T
                torch.testing.assert_close(
                    recording.value_norm[step, row, layer][:, keep].double(), values, atol=2e-5, rtol=2e-4
                )


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_a_row_is_recorded_as_alone(name: str, cache: str) -> None:
    model = tiny(name)
    options = {key: value for key, value in RUN.items() if key != "threshold"} | {"cache": cache}
    if name == "dream":
        options["remasking"] = "maskgit_plus"
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    together = dl.record(model, PROMPTS, reducers, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.record(model, [prompt], reducers, **options)
        keep = together.run.attention_mask[row]
        torch.testing.assert_close(
            together.received[:, row][..., keep], alone.received[:, 0], atol=1e-5, rtol=1e-4, equal_nan=True
        )


@pytest.mark.parametrize(("name", "cache"), CASES)
@pytest.mark.parametrize("stage", ["before_softmax", "after"])
def test_a_hidden_column_is_hidden_from_the_computed_queries(name: str, cache: str, stage: str) -> None:
    model = tiny(name)
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[:1], hooks=[mask_positions(2, stage=stage)], cache=cache,
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    shift = name == "dream"

    def scores(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[..., 2] = torch.finfo(torch.float32).min
        return tensor

    def pattern(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[..., 2] = 0
        return tensor

    edits: dict[Any, Any] = {
        (layer, "scores" if stage == "before_softmax" else "pattern"): scores
        if stage == "before_softmax"
        else pattern
        for layer in range(2)
    }
    for step in range(run.steps):
        logits = stale64(model, run, step, 0, edits=edits, whole_edits=edits)["logits"][0]
        if shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        here = seen[step][0].isfinite().all(-1)
        assert here[slice(*run.spans[step])].all()
        torch.testing.assert_close(seen[step][0][here].double(), logits[here], atol=2e-5, rtol=2e-4)
    assert not run.tokens.equal(dl.denoise(model, PROMPTS[:1], cache=cache, **RUN).tokens)


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_rows_that_were_recorded_apart_are_rerun_on_their_own_canvases(name: str, cache: str) -> None:
    """Such a hook counts from the beginning of a row's own canvas, and so do the spans that its steps compute."""
    model, hooks, reducers = tiny(name), [mask_positions(0)], [dl.ReceivedAttention()]
    one_by_one = {key: value for key, value in RUN.items() if key != "threshold"}
    recorded = dl.record(model, PROMPTS, reducers, hooks=hooks, cache=cache, **one_by_one)
    assert recorded.run.joined_at == (0, 4)
    again = rerun(model, recorded.run, reducers, hooks=hooks)
    torch.testing.assert_close(again.received, recorded.received, atol=1e-6, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("name", "cache"), CASES)
@pytest.mark.parametrize("source", ["raw", "clean"])
def test_the_top_sink_of_a_step_is_that_of_its_queries(name: str, cache: str, source: str) -> None:
    """The hidden column is the one that receives most from the computed queries, stale keys among the candidates.

    Blocks of 8, since a key that fewer queries see has no score.
    """
    model, shift = tiny(name), name == "dream"
    hook = mask_top_sinks(1, **({} if source == "raw" else {"source": "clean"}))
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[:1], hooks=[hook], cache=cache,
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **WIDE,
    )  # fmt: skip
    for step in range(run.steps):
        logits = hidden64(model, run, step, source, shift=shift)
        if shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        here = seen[step][0].isfinite().all(-1)
        torch.testing.assert_close(seen[step][0][here].double(), logits[here], atol=2e-5, rtol=2e-4)


def hidden64(model: Any, run: dl.DenoisingRun, step: int, source: str, *, shift: bool) -> Tensor:
    """Logits of a step whose top column is hidden in every head, in float64."""
    clean = {at: stale64(model, run, at, 0) for at in {step, whole_step(run, step)}}

    def edits(at: int) -> dict[Any, Any]:
        here = queries_of(run, at, 0, shift=shift)

        def hide(layer: int, scores: Tensor) -> Tensor:
            pattern = scores.softmax(-1) if source == "raw" else clean[at][f"pattern{layer}"]
            top = pattern[0][:, here].sum(-2).argmax(-1)
            scores = scores.clone()
            for head in range(scores.shape[1]):
                scores[:, head, :, top[head]] = torch.finfo(torch.float32).min
            return scores

        return {(layer, "scores"): lambda scores, layer=layer: hide(layer, scores) for layer in range(2)}

    return stale64(model, run, step, 0, edits=edits(step), whole_edits=edits(whole_step(run, step)))["logits"][0]


def test_activations_are_edited_at_canvas_positions() -> None:
    """An ablation at a position acts where the step computes it, and kept keys are those of the ablated pass."""
    model = tiny("llada")
    seen: list[Tensor] = []
    positions = [2, 9]
    run = dl.denoise(
        model, PROMPTS[:1], hooks=[ablate("resid", positions)], cache="dual",
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip

    def zero(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[:, positions] = 0
        return tensor

    edits: dict[Any, Any] = {(layer, "resid"): zero for layer in range(2)}
    for step in range(run.steps):
        logits = stale64(model, run, step, 0, edits=edits, whole_edits=edits)["logits"][0]
        here = seen[step][0].isfinite().all(-1)
        torch.testing.assert_close(seen[step][0][here].double(), logits[here], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_a_rerun_gives_the_recording(name: str, cache: str) -> None:
    model, reducers = tiny(name), [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
    whole = dl.record(model, PROMPTS, reducers, cache=cache, **RUN)
    again = dl.recording.rerun(model, whole.run, reducers)
    torch.testing.assert_close(again.received, whole.received, equal_nan=True)
    some = dl.recording.rerun(model, whole.run, reducers, steps=[2, -1])
    torch.testing.assert_close(some.received, whole.received[[2, -1]], equal_nan=True)
    assert some.expected().equal(whole.expected()[[2, -1]])
    with pytest.raises(ValueError, match="attends to keys of an earlier step"):
        dl.recording.rerun(model, some.run, reducers)


@pytest.mark.parametrize("hooks", [(), (mask_top_sinks(1),)])
@pytest.mark.parametrize("passes", [3, 6])
def test_a_recording_is_stored_and_resumed(hooks: tuple[Any, ...], passes: int, tmp_path: Path) -> None:
    model, reducers = tiny("llada"), [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
    whole = dl.record(model, PROMPTS, reducers, hooks=hooks, cache="dual", **RUN)
    begun: list[int] = []

    def stop(*_: Any) -> None:
        begun.append(1)
        if len(begun) == passes:
            raise KeyboardInterrupt

    handle = model.model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        dl.record(model, PROMPTS, reducers, hooks=hooks, to=tmp_path / "rec", cache="dual", **RUN)
    handle.remove()
    resumed = dl.record(model, PROMPTS, reducers, hooks=hooks, to=tmp_path / "rec", cache="dual", **RUN)
    stored = dl.Recording.load(tmp_path / "rec")
    for other in (resumed, stored):
        assert other.run.canvases.equal(whole.run.canvases)
        assert other.run.computed == whole.run.computed
        assert other.expected().equal(whole.expected())
        torch.testing.assert_close(other.received, whole.received, rtol=0, atol=0, equal_nan=True)
    copy = dl.Recording.load(whole.save(tmp_path / "copy"))
    assert copy.run.computed == whole.run.computed


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_a_recording_is_resumed_after_every_step(name: str, cache: str, tmp_path: Path) -> None:
    model, reducers = tiny(name), [dl.ReceivedAttention(min_viewers=1)]
    options: dict[str, Any] = {"cache": cache, **RUN, "threshold": 0.3}
    whole = dl.record(model, PROMPTS, reducers, **options)
    for step in range(whole.run.steps):
        begun: list[int] = []

        def stop(*_: Any, last: int = step, begun: list[int] = begun) -> None:
            begun.append(1)
            if len(begun) == last + 2:
                raise KeyboardInterrupt

        handle = model.model.register_forward_pre_hook(stop)
        path = tmp_path / str(step)
        with suppress(KeyboardInterrupt):
            dl.record(model, PROMPTS, reducers, to=path, **options)
        handle.remove()
        resumed = dl.record(model, PROMPTS, reducers, to=path, **options)
        assert resumed.run.canvases.equal(whole.run.canvases)
        torch.testing.assert_close(resumed.received, whole.received, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_regions_of_keys_hold_the_kept_ones(name: str, cache: str) -> None:
    model = tiny(name)
    rec = dl.record(model, PROMPTS, [dl.RegionMass()], cache=cache, **RUN)
    run, labels = rec.run, rec.specs["region_mass"].labels
    at = {kind: labels["key_region"].index(kind) for kind in ("prompt", "masked", "unmasked", "block")}
    for step in range(run.steps):
        for row in range(2):
            if not run.masked[step:, row].any():  # the row has its answer
                assert rec.region_mass[step, row].isnan().all()
                continue
            kept, keep = stale64(model, run, step, row), run.attention_mask[row]
            here = queries_of(run, step, row, shift=name == "dream")
            masked = run.masked[step, row][keep]
            start, stop = run.spans[step]
            keys = {"prompt": ~run.masked[0, row][keep], "masked": masked, "unmasked": ~masked}
            keys["block"] = torch.tensor([start <= i < stop for i in range(len(run.tokens[0]))])[keep]
            for layer in range(2):
                for region, chosen in keys.items():
                    wanted = kept[f"pattern{layer}"][0][:, here][..., chosen].sum(-1).mean(-1)
                    found = rec.region_mass[step, row, layer, :, labels["query_region"].index("all"), at[region]]
                    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-4)


def test_a_picture_of_a_cached_step_has_the_queries_that_it_computed() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, cache="dual", **WIDE)
    received = dl.received_over_steps(model, run)
    step = next(step for step, span in enumerate(run.computed) if span)
    for row in range(2):
        shot = snapshot(model, run, step=step, layer=1, row=row)
        shown, at = shot.received(), (step, row, 1, slice(None), shot.positions)
        torch.testing.assert_close(shown.values.flatten(0, -2), received.values[at], rtol=1e-4, atol=1e-5)
        assert not shown.values.isnan().any()
    figure = dl.viz.attention_maps(model, run, layer=1, head=0, row=1, steps=[0, step])
    first, second = (next(c for c in axes.collections if c.get_array().size > 300) for axes in figure.axes[:2])
    assert not first.get_array().mask.any()
    assert second.get_array().mask.sum() == (~shot.visible).sum() > 0
    assert first.norm.vmax <= 1


def test_a_trace_sees_what_is_computed() -> None:
    model = tiny("dream")
    plain = dl.denoise(model, PROMPTS, cache="dual", **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, cache="dual", **RUN) as tracer:
        shapes = [].save()
        for _ in tracer.steps[:]:
            shapes.append(tuple(lm.layers[0].attn.pattern.shape))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    positions = plain.tokens.shape[1]
    spans = [span or (0, positions) for span in plain.computed]
    assert [shape[-2:] for shape in shapes] == [(stop - start, positions) for start, stop in spans]


def test_what_cannot_be() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, cache="dual", **RUN)
    cut = replace(run, computed=(run.computed[1], *run.computed[1:]))
    with pytest.raises(ValueError, match="step 0 attends to keys of an earlier step, which this part"):
        dl.replay(model, cut, hooks=[mask_positions(0)])
    with pytest.raises(ValueError, match="batch_size=None"):
        dl.record(model, PROMPTS, cache="dual", batch_size=1, **RUN)


HOOKS = [mask_positions(2), mask_top_sinks(1), mask_top_sinks(1, stage="after"), ablate("z", "masked")]


@pytest.mark.parametrize(("name", "cache"), CASES)
def test_a_bridge_runs_the_same(name: str, cache: str) -> None:
    model, tl = tiny(name), dl.bridge(tiny(name))
    for hook in HOOKS:
        ours = dl.denoise(model, PROMPTS, hooks=[hook], cache=cache, **WIDE)
        theirs = tl.denoise(PROMPTS, hooks=[hook], cache=cache, **WIDE)
        assert theirs.canvases.equal(ours.canvases), hook
    with pytest.raises(ValueError, match="a bridge has no keys of passes without hooks"):
        tl.denoise(PROMPTS, hooks=[mask_top_sinks(1, source="clean")], cache=cache, **WIDE)
    with pytest.raises(ValueError, match="use dlm_lens\\.record"):
        tl.denoise(PROMPTS, observers=BridgeRecorder(tl, [dl.ReceivedAttention()]), cache=cache, **WIDE)
