"""Every reducer against statistics of float64 patterns, in every family, with unequal prompts."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from dlm_lens.adapters import load
from dlm_lens.attention import fused_lse, head_width, tiled
from dlm_lens.recording import (
    KEY_REGIONS,
    AttentionEntropy,
    AttentionPattern,
    ChannelActivations,
    KeyNorm,
    MassiveActivations,
    ReceivedAttention,
    Recording,
    RegionMass,
    ResidualNorm,
    StaleAttention,
    TopKeys,
    UpdateNorm,
    ValueNorm,
    WeightedValue,
    record,
)
from dlm_lens.recording.arrays import specs_of
from dlm_lens.sinks import AboveMean, AttentionShare, LowKeyNorm, MeanReceived, find_sinks, received_of
from dlm_lens.testing import tiny
from dlm_lens.viz import region_mass
from tests.recording.reference import FAMILIES, PROMPTS, alone, build, classes, output_matrix, received, settings

# float32 forward passes against float64 ones of networks whose activations reach the hundreds.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
NORMS = (ValueNorm("both"), KeyNorm("both"), ResidualNorm(), MassiveActivations(), UpdateNorm())


WITH_LSE = [f"{family}, lse of the fused kernel" for family in ("llada", "sink front", "sink end", "llama")]


@pytest.fixture(scope="module", params=[*FAMILIES, *WITH_LSE])
def recorded(request):
    family, _, lse = request.param.partition(", ")
    model = build(tiny, family)
    names = ["all", "unmasked", "prompt", "block"]
    names += [] if family in ("llama", "qwen2") else ["masked"]
    reducers = [
        ReceivedAttention(names),
        WeightedValue(),
        TopKeys(5),  # more than there are heads, fewer than the keys of the longer prompt
        AttentionEntropy(),
        RegionMass(AboveMean(1.0)),
        *NORMS,
    ]
    with pytest.MonkeyPatch.context() as patch:
        if lse:  # taken from 128 positions on; in tiles of a few of the columns
            patch.setattr(fused_lse, "LEAST_ENTRIES", 0)
            patch.setattr(tiled, "TILE_COLUMNS", 8)
        return model, record(model, PROMPTS, reducers, **settings(family)), names


def cases(rec):
    return [(step, row) for step in (0, 3, len(rec.steps) - 1) for row in range(2)]


def same(found, wanted, where):
    """What stands where is `wanted`, and NaN everywhere else."""
    torch.testing.assert_close(found[..., where].double(), wanted.double(), equal_nan=True, **CLOSE)
    others = [i for i in range(found.shape[-1]) if i not in where]
    assert bool(found[..., others].isnan().all())


def placed(rec, keep):
    """Keys of a row as the recording orders them."""
    positions = keep.nonzero().squeeze(-1).tolist()
    return positions + [len(keep) + i for i in range(rec.sinks)]


def test_received_attention_and_what_follows_from_it(recorded):
    model, rec, names = recorded
    assert rec.received.shape == (len(rec.steps), 2, 2, 4, rec.run.tokens.shape[1] + rec.sinks)
    for step, row in cases(rec):
        keep, masked, kept, canvas, order, causal = alone(model, rec.run, step, row)
        where = placed(rec, keep)
        queries = classes(rec.run, step, row, keep, masked)
        for layer in range(2):
            w_o = output_matrix(model, layer)
            for head in range(4):
                pattern = kept[f"pattern{layer}"][0, head][canvas][:, order].tolist()
                for name in names:
                    scores, sums = received(pattern, queries[name], causal)
                    array = rec.received if name == "all" else getattr(rec, f"received_{name}")
                    same(array[step, row, layer, head], scores, where)
                    raw = rec.received_sums(name)[step, row, layer, head, where]
                    wanted = sums.masked_fill(scores.isnan(), math.nan)
                    torch.testing.assert_close(raw.double(), wanted, equal_nan=True, **CLOSE)
                scores, sums = received(pattern, queries["all"], causal)
                values = kept[f"v{layer}"][0, order, head // (4 // kept[f"v{layer}"].shape[2])]
                written = (values @ w_o[:, head * 8 : head * 8 + 8].T).norm(dim=-1)
                same(rec.weighted_value[step, row, layer, head], sums * written, where)
                best = scores.nan_to_num(nan=-1).argsort(descending=True, stable=True)[:5].tolist()
                best = [where[i] if not math.isnan(scores[i]) else -1 for i in best]
                best += [-1] * (5 - len(best))  # AR: fewer keys at the first steps
                assert rec.top_keys[step, row, layer, head].tolist() == best
                top = scores[~scores.isnan()].sort(descending=True).values[:5]
                found = rec.top_scores[step, row, layer, head]
                torch.testing.assert_close(found[: len(top)], top.float(), **CLOSE)
                assert bool(found[len(top) :].isnan().all())


def test_entropy_and_region_mass(recorded):
    model, rec, _ = recorded
    for step, row in ((3, 0), (3, 1)):
        keep, masked, kept, canvas, order, causal = alone(model, rec.run, step, row)
        queries = classes(rec.run, step, row, keep, masked)
        where = keep.nonzero().squeeze(-1).tolist()
        for layer in range(2):
            for head in range(4):
                pattern = kept[f"pattern{layer}"][0, head][canvas][:, order]
                entropy = torch.stack([-sum(p * p.log() for p in line if p > 0) for line in pattern])
                same(rec.entropy[step, row, layer, head], entropy, where)
                scores, _ = received(pattern.tolist(), queries["all"], causal)
                defined = scores[~scores.isnan()]
                mean = torch.stack([(defined.sum() - s) / (len(defined) - 1) for s in scores])
                sinks = [
                    bool(s > m + 1) or j >= len(where) for j, (s, m) in enumerate(zip(scores, mean, strict=True))
                ]
                found = rec.region_mass[step, row, layer, head]
                for c, name in enumerate(["all", "masked", "unmasked", "prompt", "block"]):
                    for r, region in enumerate(KEY_REGIONS):
                        wanted, count = 0.0, 0
                        for i, counts in enumerate(queries[name]):
                            count += counts
                            for j, p in enumerate(pattern[i].tolist()):
                                on_canvas = j < len(where)
                                inside = {
                                    "sink": sinks[j],
                                    "self": i == j,
                                    "past": on_canvas and j < i,
                                    "future": on_canvas and j > i,
                                }
                                here = on_canvas and queries[region][j] if region in queries else inside[region]
                                wanted += p * counts * here
                        wanted = wanted / count if count else math.nan
                        assert float(found[c, r]) == pytest.approx(wanted, rel=2e-4, abs=2e-5, nan_ok=True)


def test_norms(recorded):
    model, rec, _ = recorded
    for step, row in cases(rec):
        keep, _, kept, canvas, order, _ = alone(model, rec.run, step, row)
        where, rows = placed(rec, keep), keep.nonzero().squeeze(-1).tolist()
        for layer in range(2):
            values, keys = kept[f"v{layer}"][0, order], kept[f"rot_k{layer}"][0, order]
            for name, tensor in (("value", values), ("key", keys)):
                norms = tensor.norm(dim=-1).T
                same(getattr(rec, f"{name}_norm")[step, row, layer], norms, where)
                # Eq. 16 is a mean over the M query heads, of which each reads its group's value.
                mean = torch.stack([norms[m // (4 // len(norms))] for m in range(4)]).mean(0)
                same(getattr(rec, f"{name}_norm_mean")[step, row, layer], mean, where)
            stream = kept[f"resid{layer - 1}"][0]
            same(rec.residual_norm[step, row, layer], stream[order].norm(dim=-1), where)
            same(rec.max_activation[step, row, layer], stream[order].abs().amax(-1), where)
            median = stream[canvas].abs().flatten().median()
            torch.testing.assert_close(rec.median_activation[step, row, layer].double(), median, **CLOSE)
            z = kept[f"z{layer}"][0, canvas]
            same(rec.mixed_norm[step, row, layer], z.norm(dim=-1).T, rows)
            w_o = output_matrix(model, layer)
            added = z.flatten(-2) @ w_o.T
            same(rec.update_norm[step, row, layer], added.norm(dim=-1), rows)
            same(rec.updated_norm[step, row, layer], (stream[canvas] + added).norm(dim=-1), rows)


def test_the_bound_of_eq_20_holds_and_self_is_the_diagonal():
    model = tiny("llada")
    rec = record(model, PROMPTS, [UpdateNorm(), ValueNorm(), RegionMass()], **settings("llada"))
    # ||o_i|| <= sum_j A_ij ||v_j|| <= max_j ||v_j||
    largest = rec.value_norm.nan_to_num().amax(-1).repeat_interleave(2, 3)
    assert bool((rec.mixed_norm.nan_to_num().amax(-1) <= largest * (1 + 1e-5)).all())
    parts = rec.region_mass[..., [KEY_REGIONS.index(n) for n in ("self", "past", "future", "sink")]].sum(-1)
    torch.testing.assert_close(parts[..., 0], torch.ones_like(parts[..., 0]), atol=1e-5, rtol=0)


def test_what_keys_write_where_values_have_a_width_of_their_own(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    config = DeepseekV3Config(**sizes, **widths, first_k_dense_replace=2, initializer_range=0.2, eos_token_id=63)
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path)
    recording = record(model, [PROMPTS[0]], [WeightedValue(), UpdateNorm()], gen_length=1)
    seen = {}
    for layer, block in enumerate(model.model.layers):
        for name in ("v", "pattern"):
            point = getattr(block.self_attn, f"hook_{name}")
            point.register_forward_hook(lambda _m, _a, out, key=(name, layer): seen.__setitem__(key, out.double()))
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False)
    for layer, block in enumerate(model.model.layers):
        weight = block.self_attn.o_proj.weight.detach().double()
        for head in range(4):
            written = (seen["v", layer][0, :, head] @ weight[:, 6 * head : 6 * head + 6].T).norm(dim=-1)
            expected = seen["pattern", layer][0, head].sum(0) * written
            got = recording.weighted_value[0, 0, layer, head, : len(PROMPTS[0])].double()
            torch.testing.assert_close(got, expected, **CLOSE)
    assert head_width(model.model.layers[0].self_attn) == 6


def test_an_output_projection_without_one_weight_is_refused():
    model = tiny("llada")
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    with pytest.raises(ValueError, match="Sequential of LlamaAttention has no weight; W_O is not known"):
        record(model, PROMPTS, [WeightedValue()], steps=1, gen_length=2)
    with pytest.raises(ValueError, match="Linear has none of v_head_dim, head_dim, head_size"):
        head_width(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("least", [{}, {"min_viewers": 1}])
@pytest.mark.parametrize("rule", [AttentionShare(0.15), MeanReceived(0.15), AboveMean(0.05, literal=True)])
@pytest.mark.parametrize("family", ["llada", "llama"])
def test_the_region_of_sinks_reads_what_the_rule_reads(rule, family, least):
    model = build(tiny, family)
    reducers = [RegionMass(sinks=rule, **least), ReceivedAttention(**least), AttentionPattern()]
    rec = record(model, PROMPTS, reducers, **settings(family))
    sinks = find_sinks(received_of(rec), rule).is_sink
    assert bool(sinks.any())
    assert not bool(sinks.all())
    pattern = rec.pattern.double()
    there = ~pattern.isnan().all(-1)  # queries that count
    mass = (pattern.nan_to_num() * sinks[..., None, :]).sum((-2, -1)) / there.sum(-1)
    found = rec.region_mass[..., 0, KEY_REGIONS.index("sink")]
    torch.testing.assert_close(found, mass.float(), equal_nan=True, **CLOSE)


def test_a_rule_of_hidden_states_has_no_region():
    with pytest.raises(ValueError, match="the detector reads 'key norm', not attention; give one of received"):
        RegionMass(sinks=LowKeyNorm(0.5))


def test_the_sinks_of_a_region_need_a_viewer():
    with pytest.raises(ValueError, match=r"RegionMass.min_viewers is 0; it must be a whole number of at least 1"):
        RegionMass(sinks=AboveMean(1.0), min_viewers=0)


def test_without_a_detector_a_recording_is_described_as_before_min_viewers():
    # Interrupted recordings are continued, and those of before are joined, only under the same description.
    (spec,) = specs_of([RegionMass()])
    assert (spec.reducer, spec.settings) == ("RegionMass(sinks=None)", {})
    detector = AboveMean(1.0)
    (spec,) = specs_of([RegionMass(sinks=detector, min_viewers=3)])
    assert (spec.reducer, spec.settings) == (f"RegionMass(sinks={detector}, min_viewers=3)", {"min_viewers": 3})


def test_a_recording_from_before_min_viewers_is_read(tmp_path):
    rec = record(tiny("llada"), PROMPTS, [RegionMass(sinks=AboveMean(1.0))], **settings("llada"))
    reducer = "RegionMass(sinks=AboveMean(eps=1.0))"
    old = replace(rec, specs={"region_mass": replace(rec.specs["region_mass"], reducer=reducer, settings={})})
    read = Recording.load(old.save(tmp_path / "old"))
    assert torch.equal(read.region_mass.nan_to_num(-7), rec.region_mass.nan_to_num(-7))
    assert reducer in region_mass(read).get_suptitle().replace("\n", " ")


def test_a_recording_of_regions_without_a_detector_is_continued_as_before_min_viewers(tmp_path):
    model, given = tiny("llada"), settings("llada")
    rec = record(model, PROMPTS, [RegionMass()], to=tmp_path / "rec", **given)
    # The header of recordings from before min_viewers has these; without a detector the numbers are the same.
    spec = rec.specs["region_mass"]
    assert (spec.reducer, dict(spec.settings)) == ("RegionMass(sinks=None)", {})
    again = record(model, PROMPTS, [RegionMass(min_viewers=1)], to=tmp_path / "rec", **given)
    assert torch.equal(again.region_mass.nan_to_num(-7), rec.region_mass.nan_to_num(-7))
    sinks = [RegionMass(sinks=AboveMean(1.0), min_viewers=least) for least in (1, 8)]
    record(model, PROMPTS, sinks[:1], to=tmp_path / "sinks", **given)
    text = r"reducer = 'RegionMass\(.*, min_viewers=1\)', and now it is 'RegionMass\(.*, min_viewers=8\)'; with"
    with pytest.raises(ValueError, match=text):
        record(model, PROMPTS, sinks[1:], to=tmp_path / "sinks", **given)


def test_names_units_and_formulas_are_those_of_each_statistic() -> None:
    """The names are keys of stored recordings."""
    found = {
        part.name: (part.unit, part.formula)
        for group in (TopKeys(2), TopKeys(2, queries="masked"), UpdateNorm(), ChannelActivations())
        for part in group.parts
    }
    assert {name: unit for name, (unit, _) in found.items() if name.startswith("top")} == {
        "top_keys": "key position",
        "top_scores": "relative to uniform",
        "top_keys_masked": "key position",
        "top_scores_masked": "relative to uniform",
    }
    assert "masked queries" in found["top_keys_masked"][1]
    assert found["update_norm"][1].startswith("||z_i||_2 ")
    assert found["updated_norm"][1].startswith("||h_i + z_i||_2 ")
    assert (found["channel_max"][1][:5], found["channel_mean"][1][:9]) == ("max_j", "1/n sum_j")
    assert [StaleAttention(queries).name for queries in ("all", "masked")] == [
        "stale_attention", "stale_attention_masked",
    ]  # fmt: skip
