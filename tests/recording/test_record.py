"""record, record_forward, Recorder as an observer, and Recording itself."""

import dataclasses

import numpy as np
import pytest
import torch

import dlm_lens
from dlm_lens import hooks, viz
from dlm_lens.attention import hooked_attentions
from dlm_lens.probes import PatternSimilarity, ScoreParts
from dlm_lens.recording import (
    KeyNorm,
    MassiveActivations,
    ReceivedAttention,
    Recorder,
    RecordingSet,
    Reducer,
    RegionMass,
    ResidualNorm,
    TopKeys,
    UpdateNorm,
    ValueNorm,
    WeightedValue,
    record,
    record_forward,
    rerun,
)
from dlm_lens.recording.directories import HEADER, parts_of
from dlm_lens.recording.storage import part_name
from dlm_lens.sampling import denoise
from dlm_lens.sinks import (
    AboveMean,
    AboveMedian,
    LowKeyNorm,
    find_sinks,
    key_statistic_over_steps,
    received_of,
    received_over_steps,
)
from dlm_lens.sinks.analysis.query_splits import SplitAttention
from dlm_lens.testing import tiny
from tests.recording.reference import EVERYTHING, FAMILIES, PROMPTS, RUN, build, equal, settings
from tests.reference import forward64

NO_COUNTS = (0, 2.5, "a", True, float("nan"), None)


def close(found, wanted, **tolerance):
    for name in wanted.specs:
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), equal_nan=True, msg=name, **tolerance
        )


def untouched(model):
    return all(not attention.hook_z.readers for attention in hooked_attentions(model)) and not any(
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    )


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_run_of_denoise_and_the_statistics_of_its_replay(family):
    model, given = build(tiny, family), settings(family)
    rec = record(model, PROMPTS, EVERYTHING, **given)
    plain = denoise(model, PROMPTS, **given)
    assert torch.equal(rec.run.canvases, plain.canvases)
    assert torch.equal(rec.run.unmasked, plain.unmasked)
    assert untouched(model)
    for queries in ("all", "unmasked"):
        found, wanted = received_of(rec, queries), received_over_steps(model, plain, queries=queries)
        # One float32 sum over the queries against another: the networks' scores reach the hundreds.
        torch.testing.assert_close(found.values, wanted.values, equal_nan=True, rtol=1e-4, atol=1e-5)
        for field in dataclasses.fields(wanted):
            a, b = getattr(found, field.name), getattr(wanted, field.name)
            if field.name == "values" or b is None or field.name == "tokenizer":
                continue
            if torch.is_tensor(b):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=field.name)
            else:
                assert a == b, field.name
    detector = AboveMean(1.0)
    assert torch.equal(
        find_sinks(rec, detector).is_sink, find_sinks(received_over_steps(model, plain), detector).is_sink
    )


@pytest.mark.parametrize("family", ["llada", "sink front", "llama"])
def test_hidden_statistics_are_those_of_their_replay(family):
    model, given = build(tiny, family), settings(family)
    rec = record(model, PROMPTS, [MassiveActivations(), KeyNorm()], **given)
    for detector in (AboveMedian(times=3, at_least=0), LowKeyNorm(0.7)):
        wanted = key_statistic_over_steps(model, rec.run, detector.quantity)
        found = find_sinks(rec, detector)
        torch.testing.assert_close(found.scores, find_sinks(wanted, detector).scores, equal_nan=True)
        assert torch.equal(found.is_sink, find_sinks(wanted, detector).is_sink)
        assert bool(found.is_sink.any())


@pytest.mark.parametrize("family", ["llada", "mmada", "smdm", "sink front"])
def test_of_guidance_the_conditional_half(family):
    # A guided run's conditional rows see the same canvas as an unguided forward of it.
    model = build(tiny, family)
    rec = record(model, PROMPTS, EVERYTHING, cfg_scale=1.5, **RUN)
    assert not torch.equal(rec.run.tokens, denoise(model, PROMPTS, **RUN | {"cfg_scale": 0.0}).tokens)
    canvas, mask = rec.run.canvases[3], rec.run.attention_mask
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), record_forward(model, EVERYTHING) as alone:
        model(input_ids=canvas, attention_mask=mask.long(), position_ids=positions, use_cache=False)
    for name in ("received", "value_norm", "entropy", "mixed_norm", "residual_norm", "weighted_value"):
        torch.testing.assert_close(
            getattr(rec, name)[3], getattr(alone, name)[0], equal_nan=True, rtol=1e-4, atol=1e-5
        )


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_become_one_recording(batch_size, tmp_path):
    prompts = [*PROMPTS, [7, 7, 7, 1, 2], [9, 4]]
    model = build(tiny, "sink front")
    whole = record(model, prompts, EVERYTHING, **RUN | {"seed": [1, 2, 3, 4]})
    parts = record(model, prompts, EVERYTHING, batch_size=batch_size, to=tmp_path, **RUN | {"seed": [1, 2, 3, 4]})
    assert torch.equal(parts.run.attention_mask, whole.run.attention_mask)
    content = whole.run.attention_mask
    assert torch.equal(parts.run.canvases.masked_fill(~content, 0), whole.run.canvases.masked_fill(~content, 0))
    assert parts.rows == (0, 1, 2, 3)
    assert parts.seeds == (1, 2, 3, 4)
    assert parts.run.spans == whole.run.spans
    close(parts, whole, rtol=1e-4, atol=1e-5)
    many = RecordingSet(tmp_path)
    assert len(many) == 4 // batch_size
    assert [r.rows[0] for r in many] == list(range(0, 4, batch_size))
    assert many[-1].run.tokens.shape[0] == batch_size


def test_batches_are_in_the_order_of_their_rows_however_many_digits_these_have(tmp_path):
    rows = [range(99_998), range(99_998, 100_000), range(100_000, 100_002), range(1_000_000, 1_000_001)]
    for part in rows[::-1]:
        (tmp_path / part_name(part)).mkdir()
        (tmp_path / part_name(part) / HEADER).write_text("{}")
    assert parts_of(tmp_path) == [tmp_path / part_name(part) for part in rows]


def test_ar_rows_that_end_early_are_joined():
    model = tiny("causal")
    run = denoise(model, PROMPTS, gen_length=12)
    model.config.eos_token_id = int(run.tokens[1, run.prompt_length + 4])
    whole = record(model, PROMPTS, [ReceivedAttention(min_viewers=1), ValueNorm()], batch_size=1, gen_length=12)
    lengths = [len(record(model, [p], [ValueNorm()], gen_length=12).steps) for p in PROMPTS]
    assert lengths[1] < lengths[0] == len(whole.steps)
    assert bool(whole.value_norm[lengths[1] :, 1].isnan().all())
    alone = record(model, [PROMPTS[1]], [ValueNorm()], gen_length=12)
    moved = whole.value_norm[: lengths[1], 1, ..., 6 : 6 + alone.value_norm.shape[-1]]
    torch.testing.assert_close(moved, alone.value_norm[:, 0], equal_nan=True)


def test_hooks_in_stream_record_what_they_leave():
    model = tiny("llada")
    hook = hooks.mask_positions(2, 5)

    class Materialised:
        """The same hook as one that attention cannot run in stream."""

        site = hook.site
        shifts_with_padding = True

        def __call__(self, tensor, hook_context=None, *, hook=None):
            return inner(tensor, hook)

    inner = hook
    for reducers in ([ReceivedAttention(), ValueNorm()], EVERYTHING):
        streamed = record(model, PROMPTS, reducers, hooks=[hook], **RUN)
        materialised = record(model, PROMPTS, reducers, hooks=[Materialised()], **RUN)
        assert torch.equal(streamed.run.canvases, materialised.run.canvases)
        assert not torch.equal(streamed.run.canvases, denoise(model, PROMPTS, **RUN).canvases)
        close(streamed, materialised, rtol=1e-4, atol=1e-5)
        # What is hidden receives nothing, and stays defined.
        assert float(streamed.received[:, 0, :, :, 2].max()) == 0.0
    behind = record(model, PROMPTS, [ReceivedAttention()], hooks=[hooks.mask_positions(2, stage="after")], **RUN)
    assert float(behind.received[:, 0, :, :, 2].max()) == 0.0


def test_clean_passes_of_hooks_are_not_recorded():
    model = tiny("llada")

    class AsksForClean:
        site, needs_clean_pass = "z", True

        def __call__(self, tensor, hook=None):
            assert hook.run.clean()[0].sums.shape[-1] == 21
            return tensor * 0.5

    class Plain(AsksForClean):
        needs_clean_pass = False

        def __call__(self, tensor, hook=None):
            return tensor * 0.5

    equal(
        record(model, PROMPTS, EVERYTHING, hooks=[AsksForClean()], **RUN),
        record(model, PROMPTS, EVERYTHING, hooks=[Plain()], **RUN),
    )


def test_layers_and_dtypes(tmp_path):
    model = tiny("llada", num_hidden_layers=3)
    whole = record(model, PROMPTS, EVERYTHING, **RUN)
    part = record(model, PROMPTS, EVERYTHING, layers=[-1, 0], **RUN)
    assert part.layers == (0, 2)
    equal(part, whole.select(layer=[0, 2]))
    half = record(model, PROMPTS, EVERYTHING, dtype="float16", to=tmp_path, **RUN)
    assert half.arrays["received"].dtype == torch.float16
    assert half.received.dtype == torch.float32
    assert half.top_keys.dtype == torch.int32
    equal_keys = torch.equal(half.top_keys, whole.top_keys)
    assert equal_keys
    for name in whole.specs:
        a, b = getattr(half, name), getattr(whole, name)
        normal = b.abs() > 2**-14
        assert bool((((a - b).abs() / b.abs())[normal] <= 2**-11).all()), name


class TooLarge(Reducer):
    name, unit, formula, reads = "large", "none", "1e5", ()
    dims = ("step", "batch", "layer")

    def reduce(self, layer):
        return torch.full((len(layer.run.tokens),), 1e5)


def test_what_float16_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match=r"large reaches 1e\+05, and float16 ends at 65,504"):
        record(tiny("llada"), PROMPTS, [TooLarge()], dtype="float16", **RUN)
    assert untouched(tiny("llada"))


def test_half_precision_models_accumulate_in_float32():
    model = tiny("llada")
    wanted = record(model, PROMPTS, [ReceivedAttention(), ValueNorm()], **RUN)
    low = tiny("llada").to(torch.bfloat16)
    canvas = wanted.run.canvases[0]
    with record_forward(low, [ReceivedAttention(min_viewers=1), ValueNorm()]) as rec:
        low(input_ids=canvas[:1], use_cache=False)
    assert rec.received.dtype == torch.float32
    # All queries are counted once, whatever the dtype of the model: 256 rounding errors of bf16 would show.
    torch.testing.assert_close(rec.received.sum(-1), torch.full((1, 1, 2, 4), 21.0), atol=1e-4, rtol=0)


def test_record_forward_is_any_forward_of_the_users(tmp_path):
    model = tiny("llada")
    rec = record(model, PROMPTS, EVERYTHING, **RUN)
    canvas, mask = rec.run.canvases[[1, 4]], rec.run.attention_mask
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with record_forward(model, EVERYTHING) as found:
        with pytest.raises(ValueError, match="no forward pass ran"):
            _ = found.received
        for ids in canvas:
            # With gradients, which statistics do not need.
            model(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits.sum().backward()
    assert untouched(model)
    assert not found.received.requires_grad
    close_names = [n for n in rec.specs if n not in ("received_block",)]
    for name in close_names:
        if name in ("received_prompt", "region_mass"):
            continue  # a forward alone does not know what the prompt was
        torch.testing.assert_close(
            getattr(found, name), getattr(rec, name)[[1, 4]], equal_nan=True, rtol=1e-4, atol=1e-5, msg=name
        )
    assert found.settings["sampler"] == "forward"
    assert torch.equal(found.tokens, canvas)
    with record_forward(model, [ValueNorm()]) as other:
        model(input_ids=canvas[0])
        with pytest.raises(ValueError, match=r"ids of shape \[1, 5\]"):
            model(input_ids=canvas[0][:1, :5])
        with pytest.raises(ValueError, match="another attention_mask"):
            model(input_ids=canvas[0], attention_mask=mask.long())
    assert len(other.steps) == 1
    with record_forward(model, [ValueNorm()]), pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=model.get_input_embeddings()(canvas[0]))
    assert untouched(model)
    causal = tiny("causal")
    with torch.no_grad(), record_forward(causal, [ReceivedAttention()]) as rec:
        causal(input_ids=torch.tensor([PROMPTS[0]]))
    # e_j of the first key under a causal mask is the harmonic number H_9.
    assert float(rec.expected()[0, 0, 0]) == pytest.approx(sum(1 / i for i in range(1, 10)))
    assert rec.received[0, 0, 0, 0].isnan().tolist() == [False] * 2 + [True] * 7


def test_recorded_passes_are_taken_where_a_recording_is(tmp_path):
    model = tiny("llada")
    with torch.no_grad(), record_forward(model, [ReceivedAttention(), RegionMass()]) as seen:
        model(input_ids=torch.randint(0, 60, (2, 16)))
        sinks = dlm_lens.find_sinks(seen, dlm_lens.AboveMean(0.1))  # also before the block is left
        model(input_ids=torch.randint(0, 60, (2, 16)))
    assert sinks.is_sink.equal(dlm_lens.find_sinks(seen.recording, dlm_lens.AboveMean(0.1)).is_sink[:1])
    found = dlm_lens.received_of(seen)
    torch.testing.assert_close(found.values, dlm_lens.received_of(seen.recording).values, equal_nan=True)
    for draw in (viz.sink_strength, viz.region_mass):
        lines = [
            [line.get_ydata() for axes in draw(one).axes for line in axes.lines] for one in (seen, seen.recording)
        ]
        assert len(lines[0]) > 1
        for ours, theirs in zip(*lines, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    pages = [viz.report(one, tmp_path / f"{name}.html") for name, one in (("a", seen), ("b", seen.recording))]
    assert pages[0].read_text() == pages[1].read_text()


def test_recorder_is_an_observer_of_denoise_and_of_a_trace():
    model = tiny("llada")
    wanted = record(model, PROMPTS, EVERYTHING, **RUN)
    recorder = Recorder(model, EVERYTHING)
    run = denoise(model, PROMPTS, observers=recorder, **RUN)
    equal(recorder.recording(run), wanted)
    equal(recorder.recording(denoise(model, PROMPTS, observers=[recorder], **RUN)), wanted)
    with pytest.raises(ValueError, match="observed 6 steps, but the run has 3"):
        recorder.recording(denoise(model, PROMPTS, **RUN | {"steps": 3}))
    lm = dlm_lens.DiffusionLM(model, check=False)
    untraced = lm.generate(PROMPTS, observers=recorder, **RUN)
    close(recorder.recording(untraced), wanted, rtol=1e-4, atol=1e-5)
    with lm.generate(PROMPTS, observers=recorder, **RUN) as tracer:
        for _step in tracer.steps[2]:
            lm.layers[0].attn.pattern[:, :, :, 4] = 0
        result = tracer.result.save()
    rec = recorder.recording(result)
    # The pattern as edited: the key receives nothing at that step, in that layer.
    assert float(rec.received[2, :, 0, :, 4].nan_to_num().abs().max()) == 0.0
    assert float(rec.received[1, :, 0, :, 4].nan_to_num().min()) >= 0.0
    assert bool((rec.received[1, 0, 0, :, 4] > 0).all())
    assert untouched(model)


@pytest.mark.parametrize("family", ["llada", "dream", "diffugpt", "llama", "sink front"])
def test_a_recorder_does_not_give_the_numbers_of_its_last_run_to_another_run(family):
    model = build(tiny, family)
    recorder = dlm_lens.Recorder(model, [ReceivedAttention(min_viewers=1)])
    runs = [denoise(model, prompt, observers=recorder, **settings(family, seed=1)) for prompt in PROMPTS]
    plain = recorder.recording(runs[1])
    assert plain.received.nan_to_num(-7).equal(recorder.recording(runs[1]).received.nan_to_num(-7))
    with pytest.raises(ValueError, match="has observed another run after this one; take"):
        recorder.recording(runs[0])
    other = denoise(model, [*PROMPTS[1][:2], 41], observers=recorder, **settings(family, seed=1))
    with pytest.raises(ValueError, match="has observed another run after this one"):
        recorder.recording(runs[1])
    assert recorder.recording(other).run is other


def test_a_failing_run_leaves_the_model_as_it_was():
    model = tiny("llada")

    def fail(step, canvas):
        if step == 2:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        record(model, PROMPTS, EVERYTHING, on_canvas=fail, **RUN)
    assert untouched(model)


class NoAxes(Reducer):
    name, unit, formula, reads = "few", "none", "0", ()
    dims = ("step", "batch", "layer", "head")

    def reduce(self, layer):
        return torch.zeros(len(layer.run.tokens))


def named(name, dims=("step", "batch", "layer"), reads=()):
    made = NoAxes()
    made.name, made.dims, made.reads = name, dims, reads
    return made


def test_a_reducer_may_be_a_text():
    model, wanted = tiny("llada"), [ReceivedAttention("masked"), ValueNorm(), TopKeys(2)]
    expected = record(model, PROMPTS, wanted, **RUN)
    for given in ("received:masked,value-norm,top-keys:2", ["received:masked", wanted[1], "top-keys:2"]):
        found = record(model, PROMPTS, given, **RUN)
        assert found.specs == expected.specs
        for name in expected.specs:
            assert torch.equal(getattr(found, name).nan_to_num(-1), getattr(expected, name).nan_to_num(-1)), name


def test_without_reducers_the_run_alone_is_recorded(tmp_path):
    model = tiny("llada")
    run, path = denoise(model, PROMPTS, **RUN), tmp_path / "run"
    found = [
        record(model, PROMPTS, [], **RUN),
        record(model, PROMPTS, [], to=path, **RUN),
        dlm_lens.Recording.load(path),
        record(model, PROMPTS, [], batch_size=1, **RUN),
        rerun(model, run, []),
    ]
    for each in found:
        assert not each.arrays
        assert repr(each).startswith(f"Recording(no statistics; step={run.steps}, batch={len(PROMPTS)}, ")
        for name in ("canvases", "masked", "proposals", "confidence", "unmasked"):
            content = run.attention_mask  # of batches that were joined, padding is another token
            torch.testing.assert_close(getattr(each.run, name)[:, content], getattr(run, name)[:, content])
    with pytest.raises(ValueError, match=r"this recording has no received; .* it has none"):
        received_of(found[0])


@pytest.mark.parametrize(
    ("reducers", "sentence"),
    [
        ([ReceivedAttention], "is not a reducer"),
        (ReceivedAttention(), "give a list, such as"),
        (3, "reducers is 3; give a list"),
        ("recieved", "reducers 'recieved' .did you mean 'received'"),
        (["received:nobody"], "nobody"),
        ([ValueNorm(), ValueNorm("both")], "two reducers have the name 'value_norm'"),
        ([named("a b")], "not an identifier"),
        ([named("tokens")], "which a Recording has already"),
        ([named("x", ("batch", "layer", "key"))], "begin with step, batch, layer"),
        ([named("x", ("step", "batch", "layer", "key", "head"))], "the order is"),
        ([named("x", reads=("received:both",))], "received:CLASS"),
        ([NoAxes()], "returned shape"),
    ],
)
def test_what_no_reducer_can_be(reducers, sentence):
    with pytest.raises(ValueError, match=sentence):
        record(tiny("llada"), PROMPTS, reducers, **RUN)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ReceivedAttention("some"), "classes of queries are all, masked"),
        (lambda: ReceivedAttention(()), "at least one class"),
        *((lambda bad=bad: ReceivedAttention(bad), "give at least one class") for bad in (None, 3)),
        (lambda: ReceivedAttention(("all", 3)), r"\(queries=3\): the classes of queries are all"),
        (lambda: WeightedValue([]), r"WeightedValue\(queries=\[\]\): the classes of queries are all"),
        *((lambda bad=bad: TopKeys(bad), "TopKeys.k is .* whole number of at least 1") for bad in NO_COUNTS),
        *(
            (lambda kind=kind, bad=bad: kind(min_viewers=bad), f"{kind.__name__}.min_viewers is .* at least 1")
            for kind in (ReceivedAttention, TopKeys, RegionMass, SplitAttention)
            for bad in NO_COUNTS
        ),
        *((lambda bad=bad: SplitAttention(bad), "SplitAttention.draws is .* at least 1") for bad in NO_COUNTS),
        (lambda: SplitAttention(seed="a"), "SplitAttention.seed is 'a'"),
        (lambda: PatternSimilarity("a"), "PatternSimilarity.reference is 'a'"),
        (lambda: PatternSimilarity(keep=30), "PatternSimilarity.keep is 30; .* at most 1"),
        (lambda: ScoreParts(3), r"ScoreParts\(queries=3\)"),
        (lambda: RegionMass(AboveMean), "give a detector"),
        (lambda: ValueNorm("one"), "'each', 'mean' or 'both'"),
        (lambda: RegionMass(3.0), "give a detector"),
        (lambda: record(tiny("llada"), PROMPTS, dtype="int8", **RUN), "'float32' or 'float16'"),
        (lambda: record(tiny("llada"), PROMPTS, dtype=torch.float16, **RUN), "the text 'float32' or 'float16'"),
        (lambda: Recorder(tiny("llada"), [ValueNorm()], dtype=[]), "the text 'float32' or 'float16'"),
        (lambda: record(tiny("llada"), PROMPTS, to=3, **RUN), "to is 3; it must be a directory, as a text"),
        (lambda: record(tiny("llada"), PROMPTS, layers=[7], **RUN), "layer 7 of 2"),
        (lambda: record(tiny("llada"), PROMPTS, batch_size=0, **RUN), "batch_size is 0"),
        (lambda: record(tiny("llada"), PROMPTS, observers=3, **RUN), "record takes no observers"),
        (lambda: record(tiny("llada"), [[]], **RUN), "empty"),
        (lambda: record(tiny("causal"), PROMPTS, [ReceivedAttention("masked")]), "no masked queries"),
        (lambda: record(tiny("causal"), PROMPTS, use_cache=True, gen_length=2), "use_cache=True"),
        (lambda: record(tiny("llada"), PROMPTS, to="x", on_logits=print, **RUN), "on_logits with to="),
    ],
)
def test_sentences(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_an_attribute_error_inside_a_forward_recording_is_that_error(monkeypatch):
    """Python asks `__getattr__` for a property that raised one, which must not ask the property again."""
    model = tiny("llada")
    with record_forward(model, [ValueNorm()]) as seen, torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert seen.recording is seen.recording
    assert seen.value_norm.shape == seen.recording.value_norm.shape
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = seen.nothing

    def broken(self):
        raise AttributeError("inside")

    monkeypatch.setattr(type(seen._recorder), "result", broken)
    for name in ("recording", "value_norm"):
        with pytest.raises(AttributeError, match=r"^inside$"):
            getattr(seen, name)
    with pytest.raises(AttributeError, match="_recorder"):  # a copy that has no fields yet
        _ = object.__new__(type(seen)).run


def test_norms_of_a_float64_model_are_its_own_in_float32():
    model = tiny("sink_qwen", num_sinks=1).double()
    ids = torch.tensor([[1, 2, 3, 63, 5]])
    kept = forward64(model, ids)
    with record_forward(model, [ValueNorm(), KeyNorm(), ResidualNorm(), UpdateNorm()]) as seen, torch.no_grad():
        model(input_ids=ids)
    assert seen.key_norm.dtype == seen.residual_norm.dtype == torch.float32
    for layer in range(2):
        expected = kept[f"v{layer}"][0].norm(dim=-1).roll(-1, 0).T  # learned sinks after the canvas
        torch.testing.assert_close(seen.value_norm[0, 0, layer].double(), expected, rtol=1e-6, atol=1e-6)
    low = tiny("sink_qwen", num_sinks=1)
    with record_forward(low, [KeyNorm(), ResidualNorm(), UpdateNorm()]) as plain, torch.no_grad():
        low(input_ids=ids)
    for name in plain.arrays:
        torch.testing.assert_close(seen.arrays[name], plain.arrays[name], rtol=1e-4, atol=1e-5, equal_nan=True)
    run = denoise(model, ids, gen_length=2)
    assert record(model, ids, [dlm_lens.probes.MixingBound()], gen_length=2).run.tokens.equal(run.tokens)


def test_a_stored_recording_is_refused_under_hooks_that_it_would_not_name(tmp_path):
    model = tiny("llada")
    message = r"ablate\(.*\) of attach_hooks with to=.*; give record\(hooks=\[\.\.\.\]\) instead"
    with hooks.attach_hooks(model, hooks.ablate("resid"), layers=[1]):
        with pytest.raises(ValueError, match=message):
            record(model, PROMPTS, [ValueNorm()], to=tmp_path / "here", **RUN)
        inside = record(model, PROMPTS, [ResidualNorm()], **RUN)
    assert not (tmp_path / "here").exists()
    named = record(model, PROMPTS, [ResidualNorm()], hooks=[hooks.at_layers(hooks.ablate("resid"), [1])], **RUN)
    wanted = named.arrays["residual_norm"]
    torch.testing.assert_close(inside.arrays["residual_norm"], wanted, rtol=0, atol=0, equal_nan=True)
    with hooks.attach_hooks(model, hooks.ablate("resid"), off=lambda: True):
        record(model, PROMPTS, [ValueNorm()], to=tmp_path / "here", **RUN)
