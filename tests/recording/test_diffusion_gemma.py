"""DiffusionGemma's runs against transformers' own class in float64: recordings, hooks, lens, traces, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import listening
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.recording import KeyNorm, ReceivedAttention, ResidualNorm, UpdateNorm, rerun
from dlm_lens.testing import tiny
from dlm_lens.viz.attention_snapshot import snapshot
from tests.adapters.test_diffusion_gemma import pair

PROMPTS = [[5, 9, 13, 2, 7, 30, 31], [3, 8, 1, 4]]
RUN: dict[str, Any] = {
    "gen_length": 16, "steps_per_block": 4, "seed": 1, "entropy_bound": 2.0, "t_min": 1.5, "t_max": 2.5
}  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
"""Norms and logits are float32 in a float64 model too; at low temperatures self-conditioning multiplies that error
by ten at every step."""


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    model, theirs = pair(torch.float64)
    theirs.set_attn_implementation("eager")
    return model, theirs


@torch.no_grad()
def steps64(theirs: Any, run: Any, row: int, hidden: tuple[int, ...] = ()) -> list[tuple[Tensor, list[Tensor]]]:
    """Logits of the canvas and patterns of every layer at every step of a row without its padding.

    Every step encodes all before the canvas anew, in one pass. `hidden` are canvas positions that no query sees.
    """
    patterns: list[Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _m, _i, out: patterns.append(out[1]))
        for layer in theirs.model.decoder.layers
    ]
    found, conditioning, block = list[tuple[Tensor, list[Tensor]]](), None, -1
    settings, keep, first = run.settings, run.attention_mask[row], 0
    for step in range(run.steps):
        if run.blocks[step] != block:
            conditioning, block, first = None, run.blocks[step], step
        padding = int((~keep).sum())
        start, stop = (place - padding for place in run.spans[step])
        ids = run.canvases[step, row][keep][None, :stop]
        seen = torch.ones(1, stop, dtype=torch.bool)
        seen[:, [place - padding for place in hidden]] = False
        patterns.clear()
        logits = theirs(
            input_ids=ids[:, :start],
            decoder_input_ids=ids[:, start:],
            self_conditioning_logits=conditioning,
            decoder_attention_mask=seen if hidden else None,
        ).logits
        share = (settings["steps_per_block"] - (step - first)) / settings["steps_per_block"]
        conditioning = logits.double() / (settings["t_min"] + (settings["t_max"] - settings["t_min"]) * share)
        whole = [torch.nn.functional.pad(each[0], (stop - each.shape[-1], 0)) for each in patterns]
        found.append((logits[0], whole))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("hidden", [(), (4, 5)])
def test_logits_of_every_step_are_those_of_the_whole_chain(
    models: tuple[Any, Any], hidden: tuple[int, ...]
) -> None:
    """With the encoder's cache and self-conditioning, over two canvases, plain and with hidden keys."""
    model, theirs = models
    kept: dict[int, Tensor] = {}
    hooks = [mask_positions(*hidden)] if hidden else []
    run = dl.denoise(model, PROMPTS, hooks=hooks, on_logits=lambda t, _c, x: kept.__setitem__(t, x), **RUN)
    assert run.steps == 8
    for row in range(2):
        for step, (logits, _) in enumerate(steps64(theirs, run, row, hidden)):
            start, stop = run.spans[step]
            # Of logits up to 5; without the conditioning they differ by more than 0.1.
            torch.testing.assert_close(kept[step][row, start:stop].float(), logits.float(), rtol=1e-4, atol=2e-4)
            assert kept[step][row, :start].isnan().all()


def test_received_attention_and_its_expectation(models: tuple[Any, Any]) -> None:
    model, theirs = models
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(("all", "masked"), min_viewers=1)], **RUN)
    run = recording.run
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    for row in range(2):
        padding = int((~run.attention_mask[row]).sum())
        for step, (_, patterns) in enumerate(steps64(theirs, run, row)):
            start, stop = run.spans[step]
            opened = run.masked[step, row, start:stop]
            for layer, pattern in enumerate(patterns):
                # Every query of the canvas sees all content up to the canvas's end; in the first two layers of the
                # encoder's keys the last 6 - 1 alone.
                seen = torch.zeros(run.tokens.shape[1], dtype=torch.bool)
                seen[max(padding, start - 5) if layer < 2 else padding : stop] = True
                for name, chosen in (("all", torch.ones_like(opened)), ("masked", opened)):
                    expected = recording.expected(name, layer=layer)[step, row]
                    torch.testing.assert_close(expected, seen * (chosen.sum() / seen.sum()))
                    array = recording.received if name == "all" else recording.received_masked
                    found = array[step, row, layer][:, seen].double() * expected[seen]
                    if not chosen.any():
                        continue
                    sums = pattern[:, chosen].sum(1)
                    torch.testing.assert_close(found, sums[:, seen[padding:stop]].double(), **CLOSE)
                    assert array[step, row, layer][:, ~seen].isnan().all()


@torch.no_grad()
def test_a_forward_pass_is_recorded_as_a_step_is(models: tuple[Any, Any]) -> None:
    """The queries of the canvas, the keys of prompt and canvas, against transformers' own patterns."""
    model, theirs = models
    ids = torch.tensor([[5, 9, 13, 2, 7, 30, 31, 4, 17, 22, 8, 40, 3, 3, 50, 41, 6, 1, 2, 9]])
    patterns: list[Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _m, _i, out: patterns.append(out[1]))
        for layer in theirs.model.decoder.layers
    ]
    theirs(input_ids=ids[:, :11], decoder_input_ids=ids[:, 11:])
    for handle in handles:
        handle.remove()
    reducers = [dl.ReceivedAttention(("all", "open"), min_viewers=1), KeyNorm(), ResidualNorm(), UpdateNorm()]
    with dl.record_forward(model, reducers) as seen:
        model(input_ids=ids, canvas_start=11)
        model(input_ids=ids.flip(1), canvas_start=11)
        with pytest.raises(ValueError, match="say where the canvas begins with canvas_start"):
            model(input_ids=ids[:, :11], decoder_input_ids=ids[:, 11:])
        with pytest.raises(ValueError, match="the ones before at"):
            model(input_ids=ids, canvas_start=12)
    assert seen.run.spans == ((11, 20),) * 2
    assert seen.run.open[0].equal((torch.arange(20) >= 11)[None])
    for layer, pattern in enumerate(patterns):
        whole = torch.nn.functional.pad(pattern[0], (20 - pattern.shape[-1], 0))
        keys = min(20, 9 + (5 if seen.windows[layer] else 11))  # a window of 6: five cached keys
        expected = torch.tensor([0.0] * (20 - keys) + [9 / keys] * keys)
        torch.testing.assert_close(seen.expected(layer=layer)[0, 0], expected)
        torch.testing.assert_close(seen.expected("open", layer=layer)[0, 0], expected)
        received = seen.received[0, 0, layer].double().nan_to_num() * expected
        torch.testing.assert_close(received, whole.sum(1).double(), **CLOSE)
    again = rerun(model, seen.run, reducers)
    torch.testing.assert_close(again.received, seen.received, equal_nan=True)


def test_reruns_give_what_the_run_gave(models: tuple[Any, Any]) -> None:
    model, _ = models
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    again = dl.received_over_steps(model, recording.run, min_viewers=1)
    torch.testing.assert_close(
        again.values.nan_to_num(), dl.received_of(recording).values.nan_to_num(), rtol=1e-6, atol=1e-6
    )
    hidden = dl.replay(model, recording.run, [mask_top_sinks(2)])
    assert float(hidden.kl.nan_to_num().max()) > 1e-4


def test_the_last_layer_of_the_logit_lens_is_the_output(models: tuple[Any, Any]) -> None:
    model, theirs = models
    run = dl.denoise(model, PROMPTS, **RUN)
    lens = dl.logit_lens(model, run)
    found = [
        (t, r, p) for t, r, p in zip(lens.step.tolist(), lens.batch.tolist(), lens.position.tolist(), strict=True)
    ]
    for row in range(2):
        for step, (logits, _) in enumerate(steps64(theirs, run, row)):
            entropy = torch.distributions.Categorical(logits=logits.double()).entropy()
            start = run.spans[step][0]
            for index, (t, r, position) in enumerate(found):
                if (t, r) == (step, row):
                    torch.testing.assert_close(
                        lens.entropy[index, -1].double(), entropy[position - start], rtol=1e-4, atol=1e-4
                    )


def test_traces_read_both_stacks_and_self_conditioning(models: tuple[Any, Any]) -> None:
    model, theirs = models
    lm = dl.DiffusionLM(model)
    decoder, encoder, conditions = [], [], []
    with lm.generate(PROMPTS[:1], **RUN) as tracer:
        for step in tracer.steps:
            if step in (0, 4):
                encoder.append(lm.encoder_layers[2].attn.pattern.save())
            else:
                conditions.append(lm.model.hook_self_conditioning.output.save())
            decoder.append(lm.layers[1].attn.pattern.save())
        run = tracer.result.save()
    assert run.tokens.equal(dl.denoise(model, PROMPTS[:1], **RUN).tokens)
    expected = steps64(theirs, run, 0)
    assert len(decoder) == 8
    for pattern, (_, patterns) in zip(decoder, expected, strict=True):
        torch.testing.assert_close(pattern[0].double(), patterns[1].double(), **CLOSE)
    assert [tuple(each.shape[2:]) for each in encoder] == [(7, 7), (8, 15)]
    last = expected[0][0].double() / 2.5
    torch.testing.assert_close(conditions[0][0].double(), last, rtol=1e-4, atol=1e-4)


def test_the_token_bottleneck_is_the_top_token_at_the_hook_point(models: tuple[Any, Any]) -> None:
    model, _ = models

    def top(_m: Any, _i: Any, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -1e30).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)

    plain = dl.denoise(model, PROMPTS, **RUN)
    with listening(model):
        handle = model.model.hook_self_conditioning.register_forward_hook(top)
        hooked = dl.denoise(model, PROMPTS, **RUN)
        handle.remove()
    run = dl.denoise(model, PROMPTS, self_conditioning="top", **RUN)
    assert run.canvases.equal(hooked.canvases)
    assert not run.canvases.equal(plain.canvases)
    none = dl.denoise(model, PROMPTS, self_conditioning="none", **RUN)
    assert none.canvases[1].equal(plain.canvases[1])  # the first step is conditioned on nothing
    assert not none.canvases.equal(plain.canvases)
    with pytest.raises(ValueError, match="self_conditioning is 'soft'"):
        dl.denoise(model, PROMPTS, self_conditioning="soft", **RUN)


@pytest.mark.parametrize("last", [2, 6])
def test_a_recording_is_stored_and_resumed(models: tuple[Any, Any], tmp_path: Path, last: int) -> None:
    model, _ = models
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    whole = dl.record(model, PROMPTS, reducers, **RUN)
    passes: list[int] = []

    def stop(*_: Any) -> None:
        passes.append(1)
        if len(passes) == last:
            raise KeyboardInterrupt

    handle = model.model.decoder.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        dl.record(model, PROMPTS, reducers, to=tmp_path / "rec", **RUN)
    handle.remove()
    resumed = dl.record(model, PROMPTS, reducers, to=tmp_path / "rec", **RUN)
    for other in (resumed, dl.Recording.load(tmp_path / "rec")):
        for name in ("canvases", "open", "unmasked", "revised", "proposals", "confidence"):
            assert getattr(other.run, name).equal(getattr(whole.run, name)), name
        assert torch.equal(dl.received_of(other).values.nan_to_num(), dl.received_of(whole).values.nan_to_num())


def test_layers_with_fewer_value_heads_repeat_them() -> None:
    """Two value heads in the sliding layers and one in the full layer, whose norms are root(d_head) each."""
    recording = dl.record(tiny("diffusion_gemma"), PROMPTS[:1], [dl.ValueNorm(), dl.KeyNorm()], **RUN)
    norms, keys = recording.value_norm.nan_to_num(), recording.key_norm.nan_to_num()
    assert norms.shape[3] == 2
    assert norms[0, 0, 2, 0].equal(norms[0, 0, 2, 1])
    assert keys[0, 0, 2, 0].equal(keys[0, 0, 2, 1])
    assert not keys[0, 0, 0, 0].equal(keys[0, 0, 0, 1])
    # Values have a norm without a scale: heads of 8 in the sliding layers, of 16 in the full layer.
    seen = slice(0, recording.run.spans[0][1])
    torch.testing.assert_close(norms[0, 0, 2, 0, seen], torch.full((15,), 4.0), rtol=1e-2, atol=0)
    torch.testing.assert_close(norms[0, 0, 0, 0, 2:15], torch.full((13,), 8**0.5), rtol=1e-2, atol=0)


def test_maps_of_a_sliding_layer_show_the_keys_that_its_queries_see(models: tuple[Any, Any]) -> None:
    model, _ = models
    run = dl.denoise(model, PROMPTS, **RUN)
    for step, layer in ((1, 0), (5, 0), (5, 2)):
        shot = snapshot(model, run, step=step, layer=layer)
        start, stop = run.spans[step]
        first = start - 5 if layer == 0 else 0
        expected = torch.zeros(stop, stop, dtype=torch.bool)
        expected[start:stop, first:stop] = True
        assert shot.visible.equal(expected)
        assert shot.received().values.shape[-1] == stop


def test_probes_compare_decided_positions_too_where_asked(models: tuple[Any, Any]) -> None:
    """Every position of the canvas, with the numbers of transformers' own logits of the step."""
    model, theirs = models
    run = dl.denoise(model, PROMPTS, **RUN)
    found = dl.probes.commitment(model, run, decided=True)
    plain = dl.probes.commitment(model, run)
    assert plain.predicted.equal(run.open[:-1] & run.in_block)
    assert found.predicted.equal(run.in_block.expand_as(found.predicted))
    revised = 0
    for row in range(2):
        for step, (logits, _) in enumerate(steps64(theirs, run, row)):
            span = slice(*run.spans[step])
            likely = logits.double().softmax(-1).max(-1)
            assert found.token[step, row, span].equal(likely.indices)
            torch.testing.assert_close(
                found.confidence[step, row, span].double(), likely.values, rtol=1e-3, atol=1e-4
            )
            revised += int(run.revised[step, row, span].sum())
    assert revised
    hooks = [mask_positions(4)]
    every, some = dl.replay(model, run, hooks, decided=True), dl.replay(model, run, hooks)
    both = some.predicted
    torch.testing.assert_close(every.kl[both], some.kl[both])
    assert float(every.kl[every.predicted & ~both].abs().max()) > 1e-4
    assert dl.probes.token_smearing(model, run, decided=True).own.isfinite().sum() > both.sum()
    masked = tiny("llada")
    other = dl.denoise(masked, PROMPTS, gen_length=4)
    with pytest.raises(ValueError, match="'llada' predicts open positions alone"):
        dl.replay(masked, other, hooks, decided=True)


def test_rows_do_not_depend_on_their_batch_in_float64() -> None:
    """All 48 steps. In float32 self-conditioning makes rounding some three times larger a step: tokens differ."""
    model = pair(torch.float64)[0]
    run: dict[str, Any] = {"gen_length": 8, "seed": 3}
    reducers = [ResidualNorm(), ReceivedAttention(min_viewers=1)]
    prompts = [[5], [7, 9, 11, 13, 4, 8, 22], [3, 1, 4, 15]]
    together = dl.record(model, prompts, reducers, **run)
    alone = dl.record(model, prompts, reducers, batch_size=1, **run)
    assert len(together.steps) == len(alone.steps) > 8
    assert torch.equal(together.run.canvases[..., -8:], alone.run.canvases[..., -8:])
    for name in ("residual_norm", "received"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name), equal_nan=True, **CLOSE)
