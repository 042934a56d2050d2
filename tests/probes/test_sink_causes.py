"""Parts of attention scores against float64 loops, and sinks whose cause is planted."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext, attach_hooks
from dlm_lens.probes import sink_anatomy
from dlm_lens.probes.score_parts import PARTS, SHARES
from dlm_lens.probes.sink_causes import SinkAnatomy
from dlm_lens.recording import rerun
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS, alone, build, settings
from tests.reference import rotated

EPS = dl.AboveMean(0.5)


def softmax(scores: list[float], spare: bool) -> list[float]:
    top = max([*scores, 0.0])
    total = sum(math.exp(one - top) for one in scores) + spare * math.exp(-top)
    return [math.exp(one - top) / total for one in scores]


def by_loop(
    kept: dict[str, Tensor], layer: int, head: int, model: Any, canvas: list[int], order: list[int], causal: bool
) -> tuple[dict[str, list[float]], list[float], list[float]]:
    """Column sums of the patterns without shuffles, mean cosines and shares of variance, over single pairs."""
    config, groups = model.config, 4 // model.config.num_key_value_heads
    q, k = kept[f"rot_q{layer}"][0], kept[f"rot_k{layer}"][0]
    # Turned back: the vectors before rotation, from those after it.
    positions = kept["positions"]
    theta, halves = config.rope_parameters["rope_theta"], config.model_type == "smdm"
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    q0, k0 = (rotated(one[None], -positions, theta, halves, part)[0] for one in (q, k))
    queries = [(q[i, head], q0[i, head]) for i in canvas]
    keys = [(k[j, head // groups], k0[j, head // groups]) for j in order]
    scale, cosine = q.shape[-1] ** -0.5, torch.nn.functional.cosine_similarity
    sums = {name: [0.0] * len(keys) for name in PARTS[:4]}
    cosines, seen_by = [0.0] * len(keys), [0] * len(keys)
    top, bottom = [0.0] * len(SHARES), 0.0
    for i, (query, query0) in enumerate(queries):
        seen = range(i + 1) if causal else range(len(keys))
        length = [float(keys[j][0].norm()) for j in seen]
        cos = [float(cosine(query, keys[j][0], dim=0)) for j in seen]
        cos0 = [float(cosine(query0, keys[j][1], dim=0)) for j in seen]
        mean_length, mean_cos = sum(length) / len(length), sum(cos) / len(cos)
        factor = scale * float(query.norm())
        scores = {
            "as it is": [factor * n * c for n, c in zip(length, cos, strict=True)],
            "equal norms": [factor * mean_length * c for c in cos],
            "equal angles": [factor * n * mean_cos for n in length],
            "no position": [factor * n * c for n, c in zip(length, cos0, strict=True)],
        }
        for name, line in scores.items():
            for j, share in zip(seen, softmax(line, config.model_type == "sumi"), strict=True):
                sums[name][j] += share
        for j, c in zip(seen, cos, strict=True):
            cosines[j] += c
            seen_by[j] += 1
        own = torch.tensor(scores["as it is"], dtype=torch.float64)
        n, c, c0 = (torch.tensor(one, dtype=torch.float64) for one in (length, cos, cos0))
        variances = [
            (n - mean_length) * mean_cos, mean_length * (c - mean_cos), (n - mean_length) * (c - mean_cos),
            mean_length * (c - c0),
        ]  # fmt: skip
        for place, term in enumerate(variances):
            top[place] += float(((term * factor - (term * factor).mean()) * (own - own.mean())).sum())
        bottom += float((own - own.mean()).square().sum())
    means = [one / count for one, count in zip(cosines, seen_by, strict=True)]
    return sums, means, [one / bottom for one in top]


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("smdm", "a2d_qwen3", "sink front")]


@pytest.mark.parametrize("family", ["llada", "sumi", *LONG, "llama"])
def test_every_number_is_that_of_loops_over_queries_and_keys(family: str) -> None:
    model = build(tiny, family)
    run = dl.denoise(model, PROMPTS, **settings(family, gen_length=6))
    found = sink_anatomy(model, run, EPS, min_viewers=1)
    for step, row in ((0, 0), (run.steps - 1, 1)):
        keep, _, kept, canvas, order, causal = alone(model, run, step, row)
        length = kept["rot_q0"].shape[1]
        count = length - int(keep.sum())
        kept["positions"] = torch.arange(length)[None] if not count else positions_of(model, int(keep.sum()))
        where = [*keep.nonzero().flatten().tolist(), *range(len(keep), len(keep) + count)]
        for layer, head in ((0, 3), (1, 0)):
            looped, cosines, shares = by_loop(kept, layer, head, model, canvas, order, causal)
            own = found.received.column_sums[step, row, layer, head, where]
            torch.testing.assert_close(
                own.double(), torch.tensor(looped["as it is"]).double(), rtol=1e-3, atol=1e-4
            )
            got = found.mean_cosine[step, row, layer, head, where]
            torch.testing.assert_close(got.double(), torch.tensor(cosines).double(), rtol=1e-3, atol=1e-4)
            got = found.variance_shares[step, row, layer, head]
            torch.testing.assert_close(got.double(), torch.tensor(shares).double(), rtol=1e-3, atol=1e-3)
            assert float(got[:3].sum()) == pytest.approx(1, abs=1e-4)
            expected = found.received.expected[step, row, 0, 0, where].tolist()
            for place, name in enumerate(PARTS[:4]):
                scores = [one / even for one, even in zip(looped[name], expected, strict=True)]
                assert found.is_sink[step, row, layer, head, where, place].tolist() == rule(scores)


def positions_of(model: Any, length: int) -> Tensor:
    from tests.reference import with_sinks

    hidden = torch.zeros(1, length, 32, dtype=torch.float64)
    visible = torch.ones(1, 1, length, length, dtype=torch.bool)
    sinks = model.state_dict()["model.embed_tokens.sinks"].double()
    return with_sinks(hidden, visible, torch.arange(length)[None], sinks, model.config)[2]


def rule(scores: list[float], eps: float = 0.5) -> list[bool]:
    """Eq. 3: above the mean of the other keys by eps."""
    return [one - (sum(scores) - one) / (len(scores) - 1) > eps if len(scores) > 1 else False for one in scores]


class Planted(Hook):
    """Writes vectors [position, d_head] into every head."""

    site: Any = "q"

    def __init__(self, site: Any, vectors: Tensor) -> None:
        self.site, self.vectors = site, vectors

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        return self.vectors[None, :, None].expand_as(tensor).to(tensor)


def anatomy_of(planted: dict[str, Tensor], detector: Any = EPS) -> SinkAnatomy:
    model = tiny("llada")
    run = dl.denoise(model, [[5, 6, 7, 8]], steps=2, gen_length=8, block_length=8)
    with attach_hooks(model, *(Planted(*one) for one in planted.items())):
        return sink_anatomy(model, run, detector)


def test_planted_causes_are_found() -> None:
    one, other = torch.eye(8)[0], torch.eye(8)[1]
    queries = 3 * one.expand(12, 8)
    lengths = torch.ones(12, 1)
    lengths[7] = 6.0
    long = anatomy_of({"rot_q": queries, "rot_k": lengths * one})
    shared = torch.where(torch.arange(12)[:, None] == 7, 3 * one, 3 * other)
    turned = anatomy_of({"rot_q": queries, "rot_k": shared})
    for found, cause in ((long, "norms"), (turned, "angles")):
        assert found.is_sink[..., 0].nonzero()[:, -1].unique().tolist() == [7]
        shares = found.causes().set_index("cause")["share"]
        assert shares[cause] == shares.sum() == 1
    variance = long.variance()
    assert variance["norms"].tolist() == pytest.approx([1, 1], abs=1e-5)
    assert turned.variance()["angles"].tolist() == pytest.approx([1, 1], abs=1e-5)
    geometry = long.geometry()
    assert geometry["query_norm"].tolist() == pytest.approx([3, 3], abs=1e-5)
    assert geometry["key_norm_sinks"].tolist() == [6, 6]
    assert geometry["key_norm_others"].tolist() == [1, 1]
    assert geometry["cosine_sinks"].tolist() == pytest.approx([1, 1], abs=1e-6)


def test_a_planted_sink_by_position_disappears_without_it() -> None:
    # All tokens are alike, and scores grow with the distance: the ends of the canvas are far from most positions.
    vector = torch.zeros(8)
    vector[1] = 20.0  # a pair that turns by less than a quarter over 12 positions
    found = anatomy_of({"q": vector.expand(12, 8), "k": -vector.expand(12, 8)}, dl.AboveMean(0.3))
    assert found.sinks > 0
    survival = found.survival().set_index("pattern")["survive"]
    assert survival["equal norms"] == 1
    assert survival["shuffled norms"] == 1
    assert survival["no position"] == 0
    assert survival["equal angles"] == 0
    causes = found.causes().set_index("cause")
    assert causes.loc["angles", "share"] == 1
    assert causes.loc["angles", "position"] == 1
    assert found.variance()["position"].tolist() == pytest.approx([1, 1], abs=1e-4)


def test_shuffled_parts_move_a_planted_sink_and_chance_is_that_of_a_random_key() -> None:
    one = torch.eye(8)[0]
    lengths = torch.ones(12, 1)
    lengths[7] = 6.0
    found = anatomy_of({"rot_q": 3 * one.expand(12, 8), "rot_k": lengths * one})
    shuffled = found.is_sink[..., PARTS.index("shuffled norms")]
    assert bool((shuffled.sum(-1) == 1).all())  # one long key, at another place
    assert shuffled.nonzero()[:, -1].unique().numel() > 1
    survival = found.survival().set_index("pattern")
    assert survival.loc["shuffled norms", "survive"] == pytest.approx(float(shuffled[..., 7].double().mean()))
    assert survival["sinks"].tolist() == [found.sinks] * len(survival)
    chance = survival["chance"].drop("no position").to_dict()
    assert chance == pytest.approx({"equal norms": 0, **dict.fromkeys(list(chance)[1:], 1 / 12)})
    assert survival.loc["equal angles", "excess"] == pytest.approx(11 / 12)


def test_rows_passes_and_layers_change_nothing() -> None:
    model = tiny("dream")
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    whole, part = sink_anatomy(model, run, EPS), sink_anatomy(model, run, EPS, layers=[1], rows_per_pass=1)
    torch.testing.assert_close(part.variance_shares, whole.variance_shares[:, :, 1:], rtol=1e-4, atol=1e-4)
    assert PARTS[-2:] == ("shuffled norms", "shuffled angles")
    assert torch.equal(part.is_sink, whole.is_sink[:, :, 1:])
    alone = sink_anatomy(model, dl.denoise(model, PROMPTS[1:2], steps=3, gen_length=6), EPS)
    width = alone.is_sink.shape[-2]
    assert torch.equal(alone.is_sink[:, 0], whole.is_sink[:, 1, ..., -width:, :])
    with pytest.raises(ValueError, match="layer 0 was not measured; there are 1"):
        part.causes(0)


def test_a_key_that_too_few_queries_see_is_a_sink_in_no_pattern() -> None:
    model = tiny("causal")
    run = dl.denoise(model, [[5, 9, 11, 3, 17, 20], [6, 2, 40]], gen_length=6)
    found = sink_anatomy(model, run, dl.AboveMean(0.2), min_viewers=8)
    assert found.is_sink[..., 0].equal(dl.find_sinks(found.received, found.detector).is_sink)
    seen = torch.zeros(6, 2, 1, 1, 12, dtype=torch.bool)
    for step in range(6):
        for row, first in enumerate((0, 3)):
            seen[step, row, ..., first : max(first, 6 + step - 7)] = True  # by this query and seven after it
    assert found.is_sink.any(-1).sum() > 20
    assert not (found.is_sink & ~seen[..., None]).any()


def test_scores_that_are_not_the_networks_are_refused() -> None:
    model = tiny("causal", model_type="llama")
    run = dl.denoise(model, [[5, 6, 7, 8]], gen_length=6)
    model.config.attn_logit_softcapping = 0.5  # which the network does not have
    with pytest.raises(ValueError, match="from queries and keys alone differs"):
        sink_anatomy(model, run, EPS)


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("diffusion_gemma", {"gen_length": 6, "steps_per_block": 2}, "from its encoder, .*; give position=False"),
        ("llada", {"gen_length": 6, "steps": 3, "cache": "prefix"}, "give position=False, or run without a cache"),
    ],
)
def test_keys_of_an_encoder_or_a_cache_need_position_off(
    family: str, settings: dict[str, Any], sentence: str
) -> None:
    model = tiny(family)
    run = dl.denoise(model, [[5, 6, 7, 8]], **settings)
    with pytest.raises(ValueError, match=sentence):
        sink_anatomy(model, run, EPS)
    found = sink_anatomy(model, run, EPS, position=False)
    assert "no position" not in set(found.survival()["pattern"])
    assert "position" not in found.causes()


def test_channel_activations_are_those_of_the_stream() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    rec = rerun(model, run, [dl.recording.ChannelActivations(), dl.recording.QueryNorm()])
    for step, row in itertools.product(range(3), range(2)):
        _, _, kept, *_ = alone(model, run, step, row)
        for layer in range(2):
            size = kept[f"resid{layer - 1}"][0].abs()
            torch.testing.assert_close(
                rec.channel_max[step, row, layer].double(), size.amax(0), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(
                rec.channel_mean[step, row, layer].double(), size.mean(0), rtol=1e-4, atol=1e-5
            )
            keep = run.attention_mask[row]
            norms = kept[f"rot_q{layer}"][0].norm(dim=-1).T
            torch.testing.assert_close(
                rec.query_norm[step, row, layer][:, keep].double(), norms, rtol=1e-4, atol=1e-5
            )


def test_a_part_of_a_run_has_the_permutations_of_the_whole_run() -> None:
    model = tiny("llada")
    rec = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], steps=6, gen_length=8, seed=[1, 2])
    whole = sink_anatomy(model, rec.run, EPS)
    for steps in ([3, 4, 5], [1, 4]):
        part = sink_anatomy(model, rec.select(step=steps).run, EPS)
        assert torch.equal(part.is_sink, whole.is_sink[steps])
