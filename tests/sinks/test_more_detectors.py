"""Eq. 3 taken literally, mean attention, soft sigmoid, and the detectors of hidden states."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlm_lens.sampling import denoise
from dlm_lens.sinks import (
    AboveMean,
    AboveMedian,
    AboveStd,
    AttentionShare,
    Detector,
    KeyStatistic,
    LowKeyNorm,
    MeanReceived,
    Received,
    SoftSigmoid,
    TopK,
    eps_sweep,
    find_sinks,
    key_statistic_over_steps,
    received_from_pattern,
    received_over_steps,
    sink_rate,
)
from dlm_lens.testing import tiny
from tests.sinks import reference

PROMPTS = [[5, 9, 11, 3, 17, 20, 8], [6, 2, 40]]


def softmax_pattern(*shape, causal=False, seed=0, sharp=2.5):
    scores = sharp * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if causal:
        scores = scores.masked_fill(~torch.ones(shape[-1], shape[-1], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1).float()


@given(seed=st.integers(0, 2**16), keys=st.integers(2, 24), eps=st.floats(0.0, 0.9))
@settings(max_examples=60, deadline=None)
def test_eq_3_as_printed_equals_a_loop_over_the_mean_of_all_queries(seed, keys, eps):
    pattern = softmax_pattern(keys, keys, seed=seed)
    rows = pattern.double().tolist()
    mean = [math.fsum(row[j] for row in rows) / keys for j in range(keys)]
    wanted = reference.above_mean(mean, eps)
    found = find_sinks(pattern[None], AboveMean(eps, literal=True), min_viewers=1)
    excess = [m - (math.fsum(mean) - m) / (keys - 1) - eps for m in mean]
    for got, sink, margin in zip(found.is_sink[0].tolist(), wanted, excess, strict=True):
        assert got == sink or abs(margin) < 1e-6  # float32 cannot tell
    assert found.scale == "share of attention"
    torch.testing.assert_close(found.scores[0], torch.tensor(mean), rtol=0, atol=1e-6)
    assert not bool(find_sinks(pattern[None], AboveMean(3.0, literal=True), min_viewers=1).is_sink.any())


def test_the_literal_rule_with_eps_over_s_is_the_relative_rule():
    pattern = softmax_pattern(3, 32, 32, seed=1)
    for eps in (0.5, 1.0, 3.0):
        literal = find_sinks(pattern, AboveMean(eps / 32, literal=True))
        assert torch.equal(literal.is_sink, find_sinks(pattern, AboveMean(eps)).is_sink)
    assert 0 < int(find_sinks(pattern, AboveMean(1.0)).is_sink.sum()) < 90


@pytest.mark.parametrize("causal", [True, False])
def test_mean_attention_is_the_mean_over_the_queries_that_see_the_key(causal):
    keys = 12
    pattern = softmax_pattern(2, keys, keys, causal=causal, seed=4)
    received = received_from_pattern(pattern, causal=causal, min_viewers=3)
    for head in range(2):
        rows = pattern[head].double().tolist()
        for key in range(keys):
            viewers = [row[key] for query, row in enumerate(rows) if not causal or query >= key]
            got = float(received.mean_attention[0, 0, 0, head, key])
            if len(viewers) < 3:
                assert math.isnan(got)
            else:
                assert got == pytest.approx(math.fsum(viewers) / len(viewers), rel=1e-5)
    found = find_sinks(received, MeanReceived(0.15))
    assert found.scale == "mean attention"
    assert torch.equal(found.is_sink, (received.mean_attention > 0.15)[0, 0, 0])
    assert bool(found.is_sink.any())
    if not causal:
        assert torch.equal(found.is_sink, find_sinks(received, AttentionShare(0.15)).is_sink)


def test_without_viewers_mean_attention_is_known_only_where_all_see_all():
    def stripped(received):
        fields = {
            n: getattr(received, n) for n in ("values", "expected", "counted", "layers", "dims", "min_viewers")
        }
        return Received(**fields)

    full = received_from_pattern(softmax_pattern(2, 10, 10))
    torch.testing.assert_close(stripped(full).mean_attention, full.mean_attention)
    causal = received_from_pattern(softmax_pattern(2, 10, 10, causal=True), causal=True, min_viewers=1)
    with pytest.raises(ValueError, match=r"Received\.viewers"):
        _ = stripped(causal).mean_attention


@pytest.mark.parametrize("family", ["llada", "causal"])
def test_mean_attention_of_a_run_with_padding(family):
    model = tiny(family)
    run = denoise(model, PROMPTS, gen_length=6, seed=[1, 2], **({} if family == "causal" else {"steps": 3}))
    received = received_over_steps(model, run, min_viewers=2)
    sums = received.column_sums
    for step, row, key in ((0, 0, 2), (1, 1, 5), (2, 0, 6), (0, 1, 4)):
        content = run.attention_mask[row] & (~run.masked[step, row] if family == "causal" else True)
        seen_by = int(content.sum()) if family != "causal" else int(content[key:].sum())
        if seen_by >= 2 and bool(content[key]):
            wanted = sums[step, row, :, :, key] / seen_by
            torch.testing.assert_close(received.mean_attention[step, row, :, :, key], wanted)


def test_sink_rate_is_the_share_of_layers_and_heads():
    values = torch.full((2, 1, 2, 3, 10), 0.5)
    values[0, 0, 0, 1, 4] = values[0, 0, 1, :, 7] = 8.0
    values[1, 0, 1, 2] = torch.nan  # a pattern that nothing is known of
    values[1, 0, 0, 0, 4] = 8.0
    received = Received(
        values=values, expected=torch.ones(2, 1, 1, 1, 10), counted=torch.full((2, 1), 10), layers=(0, 1)
    )
    sinks = find_sinks(received, MeanReceived(0.3))
    assert sink_rate(sinks).flatten().tolist() == pytest.approx([4 / 6, 1 / 5])
    assert sink_rate(sinks, position=4).flatten().tolist() == pytest.approx([1 / 6, 1 / 5])
    assert sink_rate(sinks, position=-3).flatten().tolist() == pytest.approx([3 / 6, 0])
    with pytest.raises(ValueError, match="position 10"):
        sink_rate(sinks, position=10)
    # The last key is a learned sink token: positions from the end are those of the canvas.
    learned = find_sinks(replace(received, sinks=1), MeanReceived(0.3))
    assert sink_rate(learned, position=-1).flatten().tolist() == pytest.approx([0, 0])
    assert sink_rate(learned, position=-2).flatten().tolist() == pytest.approx([3 / 6, 0])
    # A key without a score, such as padding, does not leave its pattern out.
    padded = find_sinks(
        replace(received, values=values.index_fill(-1, torch.tensor([0]), torch.nan)), MeanReceived(0.3)
    )
    assert sink_rate(padded).flatten().tolist() == pytest.approx([4 / 6, 1 / 5])


@given(seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_soft_sigmoid_equals_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.rand(14, generator=generator)
    scores[3] = torch.nan
    rule = SoftSigmoid(alpha=5.0, k=2.0)
    known = [v for v in scores.double().tolist() if not math.isnan(v)]
    level = statistics.fmean(known) + 2 * statistics.pstdev(known)
    for score, weight in zip(scores.double().tolist(), rule.weights(scores).tolist(), strict=True):
        if math.isnan(score):
            assert math.isnan(weight)
        else:
            assert weight == pytest.approx(1 / (1 + math.exp(-5 * (score - level))), abs=1e-5)
    assert torch.equal(rule.detect(scores), AboveStd(2.0).detect(scores))
    strict = SoftSigmoid(alpha=5.0, k=0.5, above=0.8)
    near = (strict.weights(scores) - 0.8).abs() < 1e-4
    assert torch.equal(strict.detect(scores) | near, (strict.weights(scores) > 0.8) | near)


def test_what_holds_is_the_threshold_with_a_part_of_its_setting():
    scores = 3 * torch.rand(4, 30, generator=torch.Generator().manual_seed(0))
    for rule, relaxed in (
        (AboveMean(1.0), AboveMean(0.75)),
        (AboveMean(0.02, literal=True), AboveMean(0.02 * 0.75, literal=True)),
        (AboveStd(1.6), AboveStd(1.6 * 0.75)),
        (AttentionShare(0.8), AttentionShare(0.8 * 0.75)),
        (MeanReceived(0.8), MeanReceived(0.8 * 0.75)),
        (SoftSigmoid(k=1.6), SoftSigmoid(k=1.6 * 0.75)),
    ):
        assert isinstance(rule, Detector)
        assert rule.relaxed(0.75) == relaxed
        assert torch.equal(rule.holds(scores, 0.75), scores >= relaxed.thresholds(scores))
        assert int(rule.holds(scores, 0.75).sum()) > int(rule.detect(scores).sum())
    assert torch.equal(TopK(3).holds(scores, 0.75), TopK(3).detect(scores))


@given(seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_massive_activation_and_low_key_norm_equal_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(2, 1, 2, 1, 9, generator=generator).exp() * 40
    median = torch.rand(2, 1, 2, 1, 1, generator=generator)
    dims = ("step", "batch", "layer", "key")
    statistic = KeyStatistic(values, "max activation", median, layers=(0, 1), dims=dims)
    found = find_sinks(statistic, AboveMedian(times=100, at_least=50))
    assert (found.level, found.scale, found.dims) == ("layer", "max activation", dims)
    for at in np.ndindex(2, 1, 2, 9):
        step, row, layer, key = at
        wanted = float(values[step, row, layer, 0, key]) > max(50.0, 100 * float(median[step, row, layer]))
        assert bool(found.is_sink[at]) == wanted
    norms = torch.rand(1, 1, 1, 2, 9, generator=generator)
    norms[..., 8] = torch.nan
    low = find_sinks(KeyStatistic(norms, "key norm", layers=(0,)), LowKeyNorm(0.4))
    for head in range(2):
        known = sorted(norms[0, 0, 0, head, :8].tolist())
        half = 0.4 * known[3]  # the lower middle one of eight
        assert low.is_sink[0, 0, 0, head].tolist() == [v < half for v in norms[0, 0, 0, head].tolist()]
        if bool(low.is_sink[0, 0, 0, head].any()):
            assert int(low.main()[0, 0, 0, head]) == int(norms[0, 0, 0, head].nan_to_num(9).argmin())


@pytest.mark.parametrize("family", ["llada", "sink_qwen", "causal"])
def test_hidden_statistics_equal_a_pass_without_padding(family):
    model = tiny(family)
    extra = {} if family == "causal" else {"steps": 3}
    run = denoise(model, PROMPTS, gen_length=6, seed=[1, 2], **extra)
    largest = key_statistic_over_steps(model, run, "max activation", rows_per_pass=3)
    norms = key_statistic_over_steps(model, run, "key norm")
    step, row = 2, 1
    content = run.attention_mask[row] & (~run.masked[step, row] if family == "causal" else True)
    ids = run.canvases[step, row][content]
    keys = []
    points = [m for m in model.modules() if hasattr(m, "hook_k")]
    handles = [m.hook_k.register_forward_hook(lambda _, __, out: keys.append(out)) for m in points]
    with torch.no_grad():
        states = model.get_decoder()(input_ids=ids[None], output_hidden_states=True, use_cache=False).hidden_states
    for handle in handles:
        handle.remove()
    learned = largest.sinks
    for layer in range(2):
        hidden = states[layer][0].double()
        # The learned sinks of sink_qwen stand in front.
        canvas = hidden[hidden.shape[0] - len(ids) :]
        got = largest.values[step, row, layer, 0]
        inside = got[: got.shape[-1] - learned]
        assert inside.isnan().tolist() == (~content).tolist()
        np.testing.assert_allclose(inside[content], canvas.abs().amax(-1), rtol=1e-4)
        flat = sorted(canvas.abs().flatten().tolist())
        assert float(largest.median[step, row, layer]) == pytest.approx(flat[(len(flat) - 1) // 2], rel=1e-3)
        per_head = keys[layer][0].double().norm(dim=-1)
        group = model.config.num_attention_heads // per_head.shape[1]
        for head in range(model.config.num_attention_heads):
            own = per_head[per_head.shape[0] - len(ids) :, head // group]
            np.testing.assert_allclose(
                norms.values[step, row, layer, head, : len(content)][content], own, rtol=1e-4
            )
    assert largest.dims == ("step", "batch", "layer", "key")
    assert norms.level == "head"


def test_detectors_are_values_of_the_base_class():
    rules = [AboveMean(3.0, literal=True), MeanReceived(), SoftSigmoid(), AboveMedian(), LowKeyNorm()]
    assert all(isinstance(rule, Detector) for rule in rules)
    assert [rule.quantity for rule in rules] == [
        "share",
        "mean attention",
        "received",
        "max activation",
        "key norm",
    ]
    assert [repr(rule) for rule in rules] == [
        "AboveMean(eps=3.0, literal=True)",
        "MeanReceived(threshold=0.3)",
        "SoftSigmoid(alpha=5.0, k=2.0, above=0.5)",
        "AboveMedian(times=1000.0, at_least=100.0)",
        "LowKeyNorm(below=0.5)",
    ]
    assert AboveMean(3.0) != AboveMean(3.0, literal=True)
    assert len({*rules, MeanReceived(0.3)}) == 5


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: MeanReceived(0.0), r"MeanReceived\(threshold=0\.0\)"),
        (lambda: MeanReceived(1.0), r"MeanReceived\(threshold=1\.0\)"),
        (lambda: SoftSigmoid(alpha=0), r"alpha must be positive"),
        (lambda: AboveMean(-1.0), r"AboveMean\(eps=-1\.0\): eps must be a finite number of at least 0"),
        (lambda: AboveMean(-1e-9, literal=True), r"at least 0"),
        (lambda: AboveMean(math.inf), r"eps=inf"),
        (lambda: AboveStd(-0.5), r"AboveStd\(k=-0\.5\)"),
        (lambda: SoftSigmoid(k=-1), r"k=-1"),
        (lambda: SoftSigmoid(alpha=math.inf), r"alpha=inf"),
        (lambda: AttentionShare(-0.1), r"AttentionShare\(threshold=-0\.1\)"),
        (lambda: AttentionShare("0.1"), r"threshold='0\.1'"),
        (lambda: AboveMedian(times=math.inf), r"times=inf"),
        (lambda: AboveMedian(at_least=math.nan), r"at_least=nan"),
        (lambda: LowKeyNorm(math.nan), r"below=nan"),
        (lambda: eps_sweep(softmax_pattern(2, 9, 9), [1.0, -1.0]), r"eps=-1\.0"),
        (lambda: SoftSigmoid(above=1.0), r"between 0 and 1"),
        (lambda: SoftSigmoid(k=math.nan), r"k=nan"),
        (lambda: AboveMedian(times=0), r"times must be positive"),
        (lambda: AboveMedian(at_least=-1), r"at_least"),
        (lambda: LowKeyNorm(1.0), r"below=1\.0"),
        (lambda: KeyStatistic(torch.zeros(2, 3), "key norm"), r"shape \[2, 3\]"),
        (lambda: KeyStatistic(torch.zeros(1, 1, 1, 1, 3), "norm"), r"'norm'"),
        (lambda: KeyStatistic(torch.zeros(1, 1, 2, 1, 3), "key norm", layers=(1,)), "with layer=1"),
    ],
)
def test_settings_out_of_range_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


def test_a_statistic_and_a_rule_of_another_quantity_are_refused():
    statistic = KeyStatistic(torch.ones(1, 1, 1, 1, 9), "key norm", layers=(0,))
    with pytest.raises(ValueError, match="'received', but the statistic is of 'key norm'"):
        find_sinks(statistic, AboveMean(3.0))
    with pytest.raises(ValueError, match="KeyStatistic"):
        find_sinks(softmax_pattern(2, 9, 9), LowKeyNorm())
    with pytest.raises(TypeError, match="has the level head"):
        find_sinks(statistic, LowKeyNorm(), level="model")


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("nan"), float("inf"), True, "3"], ids=lambda v: str(v)[:5]
)
def test_settings_beyond_every_float_are_refused_in_a_sentence(value: object) -> None:
    from dlm_lens.sinks.detector_registry import DETECTORS

    for entry in DETECTORS.values():
        if entry.kind != "TopK" or not isinstance(value, int) or isinstance(value, bool) or value < 1:
            with pytest.raises(ValueError, match="must "):
                entry.load()(**{entry.setting: value})
