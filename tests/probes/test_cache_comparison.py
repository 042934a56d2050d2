"""`compare(cache=)`: every number against float64 networks with and without stale keys."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.recording import StaleAttention
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.stale import span_of, stale64

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
RUN: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 16, "threshold": 0.1}
RULE = dl.AboveMean(0.6)


@pytest.fixture(
    scope="module", params=[("llada", "prefix"), ("dream", "prefix"), ("llada", "dual"), ("dream", "dual")]
)
def found(request: pytest.FixtureRequest) -> tuple[Any, dl.probes.CacheComparison]:
    name, cache = request.param
    model = tiny(name)
    return model, dl.compare(model, PROMPTS, cache=cache, detector=RULE, **RUN)


def test_predictions_and_decisions_are_compared_on_the_cached_runs_canvases(found: Any) -> None:
    model, result = found
    run, shift = result.run, model.config.model_type == "Dream"
    assert run.canvases.equal(dl.denoise(model, PROMPTS, cache=result.cache, **RUN).canvases)
    assert result.pair.plain.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    changed = decided = 0
    divergences = []
    for step in range(run.steps):
        whole = span_of(run, step, shift=shift) is None
        assert bool(result.from_cache[step]) != whole
        for row in range(2):
            keep = run.attention_mask[row]
            exact = forward64(model, run.canvases[step, row][keep][None])["logits"][0]
            cached = stale64(model, run, step, row)["logits"][0]
            if shift:
                exact, cached = (torch.cat([one[:1], one[:-1]]) for one in (exact, cached))
            start, stop = run.spans[step]
            here = run.masked[step, row].clone()
            here[:start] = here[stop:] = False
            p, q = exact.softmax(-1), cached.softmax(-1)
            kl = (p * (p / q).log()).sum(-1)
            got = result.kl[step, row]
            assert got.isfinite().equal(here)
            torch.testing.assert_close(got[here].double(), kl[here[keep]], atol=1e-6, rtol=1e-3)
            mask = torch.tensor([model.config.mask_token_id])
            tokens = [one.index_fill(-1, mask, -torch.inf).argmax(-1) for one in (exact, cached)]
            flips = (tokens[0] != tokens[1]) & here[keep]
            assert result.flipped[step, row][keep].equal(flips)
            written = run.unmasked[step, row][keep]
            best = p.index_fill(-1, mask, 0.0).amax(-1).masked_fill(~here[keep], -1.0)
            chosen = set(best.topk(int(written.sum())).indices.tolist())
            outside = [place for place in written.nonzero()[:, 0].tolist() if place not in chosen]
            assert result.outranked[step, row][keep].nonzero()[:, 0].tolist() == outside
            if not whole:
                divergences += kl[written].tolist()
                decided += int(written.sum())
                changed += sum(bool(flips[i]) or i in outside for i in written.nonzero()[:, 0].tolist())
    assert result.kl_decided == pytest.approx(sum(divergences) / decided, rel=1e-3)
    assert 0 < result.decisions_changed == pytest.approx(changed / decided)
    assert result.kl_decided > 1e-3


def test_sinks_are_those_of_the_blocks_queries_in_both_networks(found: Any) -> None:
    model, result = found
    run, shift = result.run, model.config.model_type == "Dream"
    sinks = lost = moved = 0
    for step in range(run.steps):
        start, stop = run.spans[step]
        for row in range(2):
            if not run.masked[step:, row].any():  # the row has its answer
                assert not result.exact.is_sink[step, row].any()
                assert not result.cached.is_sink[step, row].any()
                continue
            keep = run.attention_mask[row]
            block = torch.zeros(len(keep), dtype=torch.bool)
            block[start:stop] = True
            nets = forward64(model, run.canvases[step, row][keep][None]), stale64(model, run, step, row)
            for layer in range(2):
                maps = []
                for network, ours in zip(nets, (result.exact, result.cached), strict=True):
                    received = network[f"pattern{layer}"][0][:, block[keep]].sum(-2)
                    scores = received / (8 / int(keep.sum()))
                    others = (scores.sum(-1, keepdim=True) - scores) / (scores.shape[-1] - 1)
                    is_sink = scores > others + 0.6
                    assert ours.is_sink[step, row, layer][:, keep].equal(is_sink)
                    maps.append(is_sink)
                if span_of(run, step, shift=shift) is None:
                    continue
                for one, two in zip(*maps, strict=True):
                    gone, new = int((one & ~two).sum()), int((two & ~one).sum())
                    sinks, moved = sinks + int(one.sum()), moved + min(gone, new)
                    lost += gone - min(gone, new)
    assert result.sinks_lost == pytest.approx(lost / sinks)
    assert result.sinks_moved == pytest.approx(moved / sinks)
    assert lost
    assert moved
    table = result.table()
    used = table[table.from_cache]
    assert (used.sinks.sum(), used.lost.sum(), used.moved.sum()) == (sinks, lost, moved)
    assert not table[~table.from_cache][["lost", "moved", "changed"]].to_numpy().any()


def test_attention_to_kept_keys(found: Any) -> None:
    model, result = found
    run, shift = result.run, model.config.model_type == "Dream"
    shares, even = [], []
    for step in range(run.steps):
        span = span_of(run, step, shift=shift)
        where = torch.arange(run.tokens.shape[1])
        for row in range(2):
            if not run.masked[step:, row].any():
                assert result.stale[step, row].isnan().all()
                continue
            keep = run.attention_mask[row]
            inside = (
                torch.ones(len(where), dtype=torch.bool) if span is None else (where >= span[0]) & (where < span[1])
            )[keep]
            network = stale64(model, run, step, row)
            for layer in range(2):
                share = network[f"pattern{layer}"][0][:, inside][..., ~inside].sum(-1).mean(-1)
                torch.testing.assert_close(result.stale[step, row, layer].double(), share, atol=1e-5, rtol=1e-4)
                shares += share.tolist() if span is not None else []
            even += [float((~inside).float().mean())] if span is not None else []
    assert result.stale_share == pytest.approx(sum(shares) / len(shares), rel=1e-4)
    assert result.stale_keys == pytest.approx(sum(even) / len(even))
    assert "of attention to kept keys" in repr(result)


def test_a_class_of_queries() -> None:
    model = tiny("llada")
    recording = dl.record(model, PROMPTS[:1], [StaleAttention("masked"), StaleAttention()], cache="prefix", **RUN)
    run = recording.run
    for step in range(run.steps):
        start = (run.computed[step] or (0, 0))[0]
        pattern = stale64(model, run, step, 0)["pattern0"][0]
        masked = run.masked[step, 0] & (torch.arange(pattern.shape[1]) >= start)
        share = pattern[:, masked][..., :start].sum(-1).mean(-1)
        torch.testing.assert_close(
            recording.stale_attention_masked[step, 0, 0].double(), share, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_the_computed_positions_of_a_step_are_those_of_its_span(cache: Any) -> None:
    run = dl.denoise(tiny("llada"), PROMPTS, cache=cache, **RUN)
    assert run.in_span is not None
    for step, span in enumerate(run.computed):
        start, stop = (0, run.tokens.shape[1]) if span is None else span
        assert run.in_span[step, 0].nonzero().flatten().tolist() == list(range(start, stop))
    assert {None, (run.spans[0][0], run.spans[0][1] if cache == "dual" else run.tokens.shape[1])} <= set(
        run.computed
    )
    assert dl.denoise(tiny("llada"), PROMPTS, **RUN).in_span is None


def test_hooks_under_a_cache_are_compared_with_none_under_it() -> None:
    model = tiny("llada")
    pair = dl.compare(model, PROMPTS, [mask_positions(2)], cache="dual", **RUN)
    assert isinstance(pair, dl.sampling.Comparison)
    assert pair.plain.canvases.equal(dl.denoise(model, PROMPTS, cache="dual", **RUN).canvases)
    assert pair.hooked.canvases.equal(
        dl.denoise(model, PROMPTS, hooks=[mask_positions(2)], cache="dual", **RUN).canvases
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llada", {"remasking": "random"}),
        ("llada", {"temperature": 1.0}),
        ("dream", {"remasking": "origin"}),
        ("dream", {"remasking": "topk_margin"}),
        ("dream", {"remasking": "entropy"}),
        ("dream", {"remasking": "maskgit_plus", "top_p": 0.9}),
        ("dream", {"remasking": "maskgit_plus", "top_k": 5}),
        ("dream", {"remasking": "maskgit_plus", "alg_temp": 0.5}),
        ("llada", {"logits_eos_inf": True}),
        ("llada", {"confidence_eos_eot_inf": True}),
        ("dream", {"remasking": "maskgit_plus"}),
        ("llada", {}),
    ],
)
def test_ranks_count_where_the_sampler_ranks_by_probability(name: str, settings: dict[str, Any]) -> None:
    run = {"gen_length": 16, "block_length": 8, "steps": 8, **settings}
    found = dl.compare(tiny(name), PROMPTS, cache="dual", detector=RULE, **run)
    whole, table = ~found.from_cache, found.table()
    assert bool(whole.any())
    assert not found.flipped[whole].any()
    assert not found.outranked[whole].any()
    assert not table[~table.from_cache]["changed"].any()
    if settings not in ({}, {"remasking": "maskgit_plus"}):
        assert not found.outranked.any()
        decided = found.run.unmasked & found.from_cache[:, None, None]
        assert found.decisions_changed == pytest.approx(float(found.flipped[decided].float().mean()))
    else:
        assert bool(found.outranked.any())


def test_what_cannot_be() -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match="give hooks, or cache='prefix' or 'dual'"):
        dl.compare(model, PROMPTS, **RUN)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="hooks are given; leave it out, or call replay"):
        dl.compare(model, PROMPTS, [dl.hooks.mask_positions(0)], detector=RULE, **RUN)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'on_logits' cannot follow"):
        dl.compare(model, PROMPTS, cache="dual", on_logits=lambda *_: None, **RUN)
    with pytest.raises(ValueError, match="no setting 'cache'"):
        dl.compare(tiny("a2d_qwen3"), PROMPTS, cache="dual", gen_length=4)
