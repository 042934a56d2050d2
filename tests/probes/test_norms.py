"""Value norms and updates of sinks: float64 loops over independent forward passes, and planted norms."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import dlm_lens as dl
from dlm_lens.probes import sink_updates, value_norms
from dlm_lens.probes.updates import spearman
from dlm_lens.recording import rerun
from dlm_lens.statistics import difference_of, estimate, mean_of
from dlm_lens.testing import tiny
from tests.recording.reference import alone

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40], [7, 7, 12, 50]]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "temperature": 0.5, "seed": [3, 4, 5]}
REDUCERS = [dl.ReceivedAttention(), dl.ValueNorm("both")]
CLOSE = {"atol": 2e-5, "rtol": 2e-4}  # float32 through two layers against float64
MODELS = {
    "llada": lambda: tiny("llada"),
    "sinks in front": lambda: tiny("sink_qwen", num_sinks=2),
    "ar": lambda: tiny("causal"),
}


def recorded(name: str = "llada", reducers: Any = REDUCERS) -> tuple[Any, Any]:
    model = MODELS[name]()
    settings = {k: v for k, v in RUN.items() if name != "ar" or k != "steps"}
    return model, dl.record(model, PROMPTS, reducers, **settings)


def by_loops(model: Any, rec: Any, level: str) -> Any:
    """Norm of every defined key in float64: {(step, row, layer[, head]): {key: norm}}."""
    found = {}
    positions = rec.run.tokens.shape[1]
    for step in range(rec.run.steps):
        for row in range(len(PROMPTS)):
            keep, _, kept, _, order, _ = alone(model, rec.run, step, row)
            keys = [*keep.nonzero()[:, 0].tolist(), *range(positions, positions + rec.sinks)]
            for layer in range(2):
                v = kept[f"v{layer}"][0]
                norms = [[sum(float(x) ** 2 for x in v[p, h // 2]) ** 0.5 for h in range(4)] for p in order]
                if level == "layer":
                    found[step, row, layer] = {k: sum(n) / 4 for k, n in zip(keys, norms, strict=True)}
                    continue
                for head in range(4):
                    found[step, row, layer, head] = {k: n[head] for k, n in zip(keys, norms, strict=True)}
    return found


def test_norms_that_do_not_vary_have_no_effect_size() -> None:
    _, rec = recorded()
    one = value_norms(rec, dl.find_sinks(rec, dl.TopK(2), level="head"), samples=1)
    assert np.isfinite(one.difference.value)
    assert np.isnan(one.effect_size.value)
    twice = {name: getattr(one, name).repeat(7) for name in ("sink", "other", "percentile", "prompt", "layer")}
    assert np.isnan(replace(one, **twice).effect_size.value)  # the variance of 7 equal norms is rounding


@pytest.mark.parametrize("level", ["head", "layer"])
@pytest.mark.parametrize("name", MODELS)
def test_norms_ranks_and_profile_are_those_of_loops(name: str, level: Any) -> None:
    model, rec = recorded(name)
    sinks = dl.find_sinks(rec, dl.TopK(2), level=level)
    norms, found = by_loops(model, rec, level), value_norms(rec, sinks, seed=1)
    positions = rec.run.tokens.shape[1]
    wanted, means = [], {(kind, layer): [] for kind in ("sink", "other") for layer in range(2)}
    for place, keys in norms.items():
        here = {k for k in keys if sinks.is_sink[place][k]}
        others = [
            n for k, n in keys.items() if k not in here and k < positions and not sinks.scores[place][k].isnan()
        ]
        means["other", place[2]] += others
        for key in here:
            means["sink", place[2]].append(keys[key])
            if others:
                equal = [abs(n - keys[key]) < 1e-5 * keys[key] for n in others]
                below = sum(0.5 if e else float(n < keys[key]) for n, e in zip(others, equal, strict=True))
                wanted.append((keys[key], below / len(others), place[1], place[2]))
    assert found.found == int(sinks.is_sink.sum())
    assert len(found.sink) == len(wanted) > 20
    columns = (found.sink, found.percentile, found.prompt, found.layer)
    got = list(zip(*(values.tolist() for values in columns), strict=True))
    for column in range(4):  # heads of one group share a norm, so that columns are sorted apart
        ours, theirs = (sorted(line[column] for line in lines) for lines in (got, wanted))
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    profile = found.profile.set_index("layer")
    for (kind, layer), values in means.items():
        assert profile.loc[layer, f"norm_{kind}"] == pytest.approx(
            np.mean(values) if values else np.nan, rel=1e-4, nan_ok=True
        )
        if kind == "sink":
            assert profile.loc[layer, "sinks"] == len(values)


def test_every_other_token_is_of_the_same_pattern_and_no_sink() -> None:
    _, rec = recorded()
    sinks = dl.find_sinks(rec, dl.TopK(2))
    # Every place has a norm of its own, which names it.
    step, row, layer, head, key = torch.meshgrid(*map(torch.arange, rec.value_norm.shape), indexing="ij")
    code = (((step * 3 + row) * 2 + layer) * 2 + head) * 100.0 + key
    planted = replace(rec, arrays={**rec.arrays, "value_norm": code.masked_fill(rec.value_norm.isnan(), torch.nan)})
    for alike in ("any", "masked"):
        found = value_norms(planted, sinks, match=alike, samples=150)
        assert len(found.sink) > 100
        assert torch.equal(found.sink // 100, found.other // 100)
        places = [((found.sink // 100).long() // 2 // 2 // 3), (found.sink // 100).long() // 4 % 3]
        assert torch.equal(places[1], found.prompt)
        assert not torch.equal(found.sink, found.other)
        masks = [rec.masked[places[0], places[1], (values % 100).long()] for values in (found.sink, found.other)]
        assert torch.equal(*masks) == (alike == "masked")


def test_planted_short_values_are_found_with_their_size() -> None:
    _, rec = recorded()
    sinks = dl.find_sinks(rec, dl.TopK(1))
    kv = sinks.is_sink.unflatten(3, (2, 2)).any(4)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(kv.shape, generator=generator)
    planted = torch.where(kv, 2.0 + 0.1 * noise, 5.0 + 0.1 * noise)
    found = value_norms(replace(rec, arrays={**rec.arrays, "value_norm": planted}), sinks)
    # A sink of one head is an ordinary token in the other head of its group.
    assert found.mean_sink.value == pytest.approx(2.0, abs=0.05)
    assert found.ratio.low < found.ratio.value < found.ratio.high < 0.7
    assert found.shorter.value > 0.9
    assert found.mean_percentile.value < 0.1
    assert found.effect_size.value < -2
    table = found.table().set_index("measure")["value"]
    assert table["difference"] == pytest.approx(float(found.sink.mean() - found.other.mean()), rel=1e-5)
    spread = ((found.sink.double().var(correction=0) + found.other.double().var(correction=0)) / 2).sqrt()
    assert table["effect_size"] == pytest.approx(table["difference"] / float(spread), rel=1e-5)
    bars = found.distribution(bins=10)
    assert len(bars) == 10
    assert bars.low.tolist() == pytest.approx([0, *bars.high[:-1]])
    assert bars.high.iloc[-1] == pytest.approx(float(torch.cat([found.sink, found.other]).max()), rel=1e-5)
    assert bars.sinks.sum() == bars.others.sum() == len(found.sink)
    assert bars[bars.sinks > 0].high.max() < 3 < bars[bars.others > 0].high.max()


def test_norms_of_chosen_heads_are_those_of_their_values() -> None:
    _, rec = recorded()
    part = rec.select(head=[1, 3])
    found = value_norms(part, dl.find_sinks(part, dl.TopK(1)))
    here = dl.find_sinks(rec, dl.TopK(1)).is_sink[:, :, :, [1, 3]]
    assert sorted(found.sink.tolist()) == sorted(rec.value_norm[here].tolist())  # heads 1 and 3: values 0 and 1


def test_open_positions_are_the_masked_ones() -> None:
    _, rec = recorded()
    sinks = dl.find_sinks(rec, dl.TopK(1))
    same, masked = (value_norms(rec, sinks, match=match) for match in ("open", "masked"))
    assert same.other.equal(masked.other)
    assert not same.other.equal(value_norms(rec, sinks).other)


def test_sinks_without_another_token_have_no_norms_to_compare() -> None:
    _, rec = recorded()
    sinks = dl.find_sinks(rec, dl.TopK(1))
    found = value_norms(rec, replace(sinks, is_sink=sinks.scores.isfinite()))
    assert len(found.sink) == 0 < found.unmatched == found.found
    assert found.distribution(bins=2)["high"].tolist() == pytest.approx([0.5, 1.0], rel=1e-5)
    for bins in (0, 2.5, "a"):
        with pytest.raises(ValueError, match=f"bins is {bins!r}; it must be a whole number of at least 1"):
            found.distribution(bins)
    assert (np.isnan(found.ratio.value), found.ratio.prompts) == (True, 0)


def test_the_learned_sink_tokens_are_sinks_too() -> None:
    model, rec = recorded("sinks in front")
    found = value_norms(rec, "learned")
    positions = rec.run.tokens.shape[1]
    wanted = [n for keys in by_loops(model, rec, "head").values() for k, n in keys.items() if k >= positions]
    np.testing.assert_allclose(sorted(found.sink), sorted(wanted), **CLOSE)
    sums = rec.received_sums()
    share = sums[..., positions:].sum() / sums.nansum()
    assert found.profile.share.mean() == pytest.approx(float(share), rel=1e-4)
    with pytest.raises(ValueError, match="no learned sink tokens"):
        value_norms(recorded()[1], "learned")


def test_learned_sink_tokens_of_a_row_that_is_over_are_none() -> None:
    model = tiny("sink_qwen", num_sinks=2)
    model.get_output_embeddings().weight.data.mul_(2.5)
    prompts = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w1 w1", "w3 w3"]
    reducers = [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm("both")]
    rec = dl.record(model, prompts, reducers, gen_length=12, steps=12, threshold=0.3)
    steps = rec.run.row_steps
    assert int(steps.min()) < rec.run.steps
    found = value_norms(rec, "learned")
    assert found.found == len(found.sink) == int(steps.sum()) * 2 * 4 * rec.sinks
    assert found.unmatched == 0


@pytest.mark.parametrize("level", ["head", "layer"])
def test_the_share_of_the_sinks_is_of_all_attention_in_an_ar_model(level: Any) -> None:
    """The last keys of a causal pass are seen by too few queries for a score, and receive attention too."""
    prompts = ["w1 w2 w3", "w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"]
    rec = dl.record(tiny("causal"), prompts, [dl.ReceivedAttention(), dl.ValueNorm()], gen_length=8, seed=0)
    every = dl.rerun(tiny("causal"), rec.run, [dl.ReceivedAttention(min_viewers=1)])
    sinks = dl.find_sinks(rec, dl.AboveStd(1.5), level=level)
    sums = every.received_sums().nan_to_num()
    sums = sums if level == "head" else sums.mean(3)
    for layer, share in enumerate(value_norms(rec, sinks).profile.share):
        wanted = (sums[:, :, layer] * sinks.is_sink[:, :, layer]).sum() / sums[:, :, layer].sum()
        assert share == pytest.approx(float(wanted), rel=1e-4)


def test_prompts_and_not_sinks_are_drawn_for_an_interval() -> None:
    one = np.array([[3.0, 2.0], [4.0, 2.0], [10.0, 4.0]])
    many = one * 50  # the same prompts with fifty times as many sinks each: no narrower
    first, second = (estimate(sums, mean_of) for sums in (one, many))
    assert (first.value, first.low, first.high) == pytest.approx((second.value, second.low, second.high))
    # 17 / 8, and drawn thrice the first, thrice the last: 1.5 and 2.5, both moved away from it for three prompts.
    wider = stats.t.ppf(0.975, 2) / stats.norm.ppf(0.975) * (3 / 2) ** 0.5
    assert (first.low, first.high) == pytest.approx((2.125 - 0.625 * wider, 2.125 + 0.375 * wider))
    alone = estimate(one[:1], mean_of)
    assert alone.value == 1.5
    assert np.isnan(alone.low)
    assert estimate(np.array([[4.0, 2.0, 3.0, 3.0]]), difference_of).value == 1.0


@pytest.mark.parametrize("name", MODELS)
def test_a_finished_run_is_recorded_as_it_was(name: str) -> None:
    reducers = [*REDUCERS, dl.RegionMass(), dl.recording.UpdateNorm()]
    model, rec = recorded(name, reducers)
    again = rerun(model, rec.run, reducers)
    for array in rec.specs:
        # The same network on the same canvases.
        torch.testing.assert_close(getattr(again, array), getattr(rec, array), equal_nan=True)
    assert not torch.equal(again.received[0].nan_to_num(), again.received[-1].nan_to_num())


@pytest.mark.parametrize("level", ["head", "layer"])
@pytest.mark.parametrize("name", MODELS)
def test_updates_are_those_of_loops(name: str, level: Any) -> None:
    model, rec = recorded(name)
    sinks = dl.find_sinks(rec, dl.TopK(2), level=level)
    found = sink_updates(model, rec.run, sinks, attends=0.4)
    positions, seen = rec.run.tokens.shape[1], 0
    for step in (0, rec.run.steps - 1):
        for row in range(len(PROMPTS)):
            keep, _, kept, queries, order, _ = alone(model, rec.run, step, row)
            keys = [*keep.nonzero()[:, 0].tolist(), *range(positions, positions + rec.sinks)]
            assert found.mass[step, row, :, :, ~keep].isnan().all()
            for layer in range(2):
                pattern, v, z = (kept[f"{n}{layer}"][0] for n in ("pattern", "v", "z"))
                stream = kept[f"resid{layer - 1}"][0]
                for i, at in zip(queries, keep.nonzero()[:, 0].tolist(), strict=True):
                    assert float(found.update[step, row, layer, at]) == pytest.approx(
                        float(kept[f"attn_out{layer}"][0, i].norm()), rel=1e-3
                    )
                    assert float(found.stream[step, row, layer, at]) == pytest.approx(
                        float(stream[i].norm()), rel=1e-3
                    )
                    for head in range(4):
                        is_sink = sinks.is_sink[step, row, layer]
                        is_sink = is_sink[head] if level == "head" else is_sink
                        a = [float(pattern[head, i, j]) for j in order]
                        mass = sum(x for x, k in zip(a, keys, strict=True) if is_sink[k])
                        bound = sum(x * float(v[j, head // 2].norm()) for x, j in zip(a, order, strict=True))
                        got = [float(t[step, row, layer, head, at]) for t in (found.mass, found.bound, found.mixed)]
                        assert got == pytest.approx([mass, bound, float(z[i, head].norm())], rel=1e-3, abs=1e-5)
                        assert got[2] <= bound * (1 + 1e-5)
                        seen += 1
    assert seen > 200


def test_the_table_of_updates_splits_queries_by_their_attention() -> None:
    model, rec = recorded()
    found = sink_updates(model, rec.run, dl.find_sinks(rec, dl.TopK(2)), attends=0.4)
    line = found.table().query("layer == 1 and measure == 'mixed'").iloc[0]
    mass, mixed = found.mass[:, :, 1], found.mixed[:, :, 1]
    attending, other = mixed[mass > 0.4], mixed[mass <= 0.4]
    assert (line.queries, line.others) == (len(attending), len(other))
    assert len(attending) > 10
    assert line.attending == pytest.approx(float(attending.mean()), rel=1e-5)
    assert line.ratio == pytest.approx(float(attending.mean() / other.mean()), rel=1e-5)
    rhos = []
    for step in range(rec.run.steps):
        for row in range(len(PROMPTS)):
            for head in range(4):
                keep = mass[step, row, head].isfinite()
                ranks = [pd.Series(t[step, row, head][keep]).rank() for t in (mass, mixed)]
                rhos.append(np.corrcoef(*ranks)[0, 1])
    assert line.correlation == pytest.approx(np.mean(rhos), rel=1e-6)
    # A query whose share of attention is not known is in neither group.
    unknown = mass.isfinite() & (torch.rand(mass.shape, generator=torch.Generator().manual_seed(0)) < 0.3)
    less = replace(found, mass=found.mass.masked_fill(unknown[:, :, None], torch.nan))
    line = less.table().query("layer == 1 and measure == 'mixed'").iloc[0]
    attending, other = mixed[~unknown & (mass > 0.4)], mixed[~unknown & (mass <= 0.4)]
    assert (line.queries, line.others) == (len(attending), len(other))
    assert line.ratio == pytest.approx(float(attending.mean() / other.mean()), rel=1e-5)


def test_what_cannot_be_measured_is_refused() -> None:
    model, rec = recorded()
    sinks = dl.find_sinks(rec, dl.TopK(2))
    only_mean = dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm("mean")], **RUN)
    with pytest.raises(ValueError, match=r"no norms of values; record with ValueNorm\(\)$"):
        value_norms(only_mean, sinks)
    with pytest.raises(ValueError, match="find them in this recording"):
        value_norms(rec, dl.find_sinks(rec.select(step=slice(0, 2)), dl.TopK(2)))
    with pytest.raises(ValueError, match=r"the model's mean pattern.*; find them at level 'head' or 'layer'"):
        value_norms(rec, dl.find_sinks(rec, dl.TopK(2), level="model"))
    with pytest.raises(ValueError, match="there is no sink"):
        value_norms(rec, dl.find_sinks(rec, dl.AboveMean(1000.0)))
    with pytest.raises(ValueError, match="samples=0"):
        value_norms(rec, sinks, samples=0)
    with pytest.raises(ValueError, match="attends is 1"):
        sink_updates(model, rec.run, sinks, attends=1)
    with pytest.raises(ValueError, match="the run"):
        sink_updates(model, rec.run, dl.find_sinks(rec.select(step=[0]), dl.TopK(2)))


def test_the_order_of_rounding_errors_is_no_correlation() -> None:
    steps = torch.arange(6.0)
    known = torch.ones(3, 6, dtype=torch.bool)
    other = torch.stack([1 + 1e-7 * steps, 1 + 1e-4 * steps, torch.ones(6)])
    rho, defined = spearman(steps.expand(3, 6), other, known)
    assert defined.tolist() == [False, True, False]
    assert rho[1] == pytest.approx(1)
