"""Flow between regions and the stability of patterns, against loops over float64 patterns."""

from typing import Any

import numpy as np
import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import PatternStability, pattern_stability, region_flow
from dlm_lens.probes.stability import MEASURES
from dlm_lens.recording import AttentionPattern, rerun
from dlm_lens.testing import tiny
from tests.recording.reference import alone

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40]]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "temperature": 0.5, "seed": [3, 4]}


def test_flow_is_the_mean_over_heads_layers_and_prompts() -> None:
    model = tiny("llada")
    rec = dl.record(model, PROMPTS, [dl.RegionMass()], **RUN)
    flow = region_flow(rec)
    table = flow.table().set_index(["step", "queries", "keys"])
    for step in range(4):
        values = []
        for row in range(2):
            _, masked, kept, *_ = alone(model, rec.run, step, row)
            where = masked.nonzero()[:, 0].tolist()
            if where:
                patterns = [kept[f"pattern{layer}"][0, head] for layer in range(2) for head in range(4)]
                shares = [float(sum(a[i, j] for j in where)) for a in patterns for i in where]
                values.append(sum(shares) / len(shares))
        if values:
            assert table.loc[(step, "masked", "masked"), "mass"] == pytest.approx(np.mean(values), rel=1e-3)
    one = flow.table(layer=1).set_index(["step", "queries", "keys"]).loc[(0, "all", "self"), "mass"]
    diagonal = []
    for row in range(2):
        _, _, kept, *_ = alone(model, rec.run, 0, row)
        diagonal.append(float(kept["pattern1"][0].diagonal(0, 1, 2).mean()))
    assert one == pytest.approx(np.mean(diagonal), rel=1e-3)
    with pytest.raises(ValueError, match="no region_mass"):
        region_flow(dl.record(model, PROMPTS, **RUN))
    with pytest.raises(ValueError, match="layer 7"):
        flow.table(layer=7)


@pytest.mark.parametrize("name", ["llada", "sinks"])
def test_similarities_are_those_of_loops(name: str) -> None:
    model = tiny("llada") if name == "llada" else tiny("sink_qwen", num_sinks=2)
    run = dl.denoise(model, PROMPTS, **RUN)
    found = pattern_stability(model, run, dl.TopK(1), reference=1, keep=0.2)
    assert found.cosine[0].isnan().all()
    assert found.kept[0].isnan().all()
    for row in range(2):
        patterns = []
        for step in range(4):
            _, _, kept, queries, order, _ = alone(model, run, step, row)
            patterns.append(
                [[kept[f"pattern{layer}"][0, h][queries][:, order] for h in range(4)] for layer in range(2)]
            )
        for layer in range(2):
            for head in range(4):
                for step in range(1, 4):
                    now, before, reference = (patterns[s][layer][head] for s in (step, step - 1, 1))
                    cosine = float((now * before).sum() / now.norm() / before.norm())
                    overlap = sum(
                        min(float(a), float(b)) for a, b in zip(now.flatten(), before.flatten(), strict=True)
                    )
                    kept, best = 0.0, 0.0
                    count = round(0.2 * now.shape[1])  # of the row's own keys
                    for i in range(len(now)):
                        chosen = sorted(range(now.shape[1]), key=lambda j: -float(reference[i, j]))[:count]
                        kept += sum(float(now[i, j]) for j in chosen)
                        best += sum(sorted((float(x) for x in now[i]), reverse=True)[:count])
                    wanted = [cosine, overlap / len(now), kept / len(now), best / len(now)]
                    got = [
                        float(getattr(found, n)[step, row, layer, head])
                        for n in ("cosine", "overlap", "kept", "best")
                    ]
                    assert got == pytest.approx(wanted, abs=2e-5)  # float32 patterns
    assert found.table().shape[0] == 8
    recall = (found.kept / found.best)[2:, :, 1, 2].mean()
    line = found.table().query("layer == 1 and head == 2").iloc[0]
    assert line.recall == pytest.approx(float(recall), rel=1e-5)
    assert recall < 1


def test_a_row_s_stability_does_not_depend_on_its_batch() -> None:
    model = tiny("llada")
    both, short = (dl.denoise(model, prompts, steps=4, gen_length=8) for prompts in (PROMPTS, PROMPTS[1:]))
    assert torch.equal(both.tokens[1, -11:], short.tokens[0])
    found, single = (pattern_stability(model, run, dl.TopK(1), reference=0, keep=0.3) for run in (both, short))
    for name in MEASURES:
        torch.testing.assert_close(
            getattr(found, name)[:, 1], getattr(single, name)[:, 0], atol=2e-5, rtol=0, equal_nan=True
        )


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_with_a_cache_only_queries_computed_at_both_steps_are_compared(cache: Any) -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=8, gen_length=8, block_length=4, cache=cache)
    found = pattern_stability(model, run, dl.TopK(1), reference=1, keep=0.2)
    recorded = rerun(model, run, [AttentionPattern()]).pattern.double()
    partly = never = 0
    for row in range(2):
        inside = run.attention_mask[row]
        patterns = recorded[:, row][..., inside]
        computed = patterns.isfinite().all(-1).all(1).all(1)  # [step, query]
        count = round(0.2 * int(inside.sum()))
        for step in range(1, 8):
            for layer, head in ((0, 1), (1, 3)):
                now, before, first = (patterns[at, layer, head] for at in (step, step - 1, 1))
                queries = (computed[step] & computed[step - 1]).nonzero()[:, 0].tolist()
                partly += 0 < len(queries) < int(inside.sum())
                dot = sum(float(now[i] @ before[i]) for i in queries)
                norms = [sum(float(a[i] @ a[i]) for i in queries) ** 0.5 for a in (now, before)]
                shared = sum(float(torch.minimum(now[i], before[i]).sum()) for i in queries)
                wanted = [dot / norms[0] / norms[1], shared / len(queries)]
                queries = (computed[step] & computed[1]).nonzero()[:, 0].tolist()
                held = best = 0.0
                for i in queries:
                    held += float(now[i, first[i].argsort(descending=True)[:count]].sum())
                    best += float(now[i].sort(descending=True).values[:count].sum())
                never += not queries
                wanted += [one / len(queries) if queries else float("nan") for one in (held, best)]
                got = [float(getattr(found, n)[step, row, layer, head]) for n in MEASURES]
                assert got == pytest.approx(wanted, abs=2e-5, nan_ok=True)
    assert partly > 0
    assert (never > 0) == (cache == "dual")


def test_similarity_is_split_by_what_the_sink_did() -> None:
    # The first key is a key, and what follows the row's end is in no class.
    main = torch.tensor([0, 0, 5, -1, -1, 2, 2]).reshape(7, 1, 1, 1).expand(7, 2, 1, 1)
    similar = torch.tensor([torch.nan, 0.9, 0.2, 0.5, 0.8, 0.6, torch.nan]).reshape(7, 1, 1, 1).expand(7, 2, 1, 1)
    found = PatternStability(similar, similar, similar, similar, main, (0,), 0, 0.3, "planted")
    lines = found.by_change().set_index("sink")
    assert lines.pairs.to_dict() == {"stays": 2, "changes": 2, "comes or goes": 4, "none": 2}
    assert lines.cosine.to_dict() == pytest.approx(
        {"stays": 0.9, "changes": 0.2, "comes or goes": 0.55, "none": 0.8}
    )


def test_a_class_of_one_pair_has_its_similarity() -> None:
    main = torch.tensor([3, 3]).reshape(2, 1, 1, 1)
    similar = torch.tensor([torch.nan, 0.9]).reshape(2, 1, 1, 1)
    found = PatternStability(similar, similar, similar, similar, main, (0,), 0, 0.3, "planted")
    assert found.by_change().set_index("sink").cosine["stays"] == pytest.approx(0.9)
    assert found.table()[["cosine", "overlap", "recall"]].iloc[0].tolist() == pytest.approx([0.9, 0.9, 1.0])


def test_what_has_no_stability_is_refused() -> None:
    ar = tiny("causal")
    with pytest.raises(ValueError, match="AR model"):
        pattern_stability(ar, dl.denoise(ar, PROMPTS, gen_length=3), dl.TopK(1))
    model = tiny("llada")
    with pytest.raises(ValueError, match="reference is 9; the run has 4 steps"):
        pattern_stability(model, dl.denoise(model, PROMPTS, **RUN), dl.TopK(1), reference=9)


def test_stability_of_a_part_of_a_run_compares_its_neighbouring_steps() -> None:
    model = tiny("llada")
    recording = dl.record(model, [[1, 2, 3, 4]], gen_length=8, steps=8)
    whole, part = (
        pattern_stability(model, each.run, dl.AboveMean(1.0)).cosine
        for each in (recording, recording.select(step=slice(3, 8)))
    )
    assert bool(part[0].isnan().all())
    torch.testing.assert_close(part[1:], whole[4:], rtol=1e-5, atol=1e-6)
