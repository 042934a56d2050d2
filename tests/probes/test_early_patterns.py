"""`early_attention` against loops and scipy, and planted attention."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

import dlm_lens as dl
from dlm_lens.probes import early_attention
from dlm_lens.probes.early_patterns import MEASURES, PREDICTORS
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17, 20], [6, 2, 40], [7, 8, 9, 10]]


def recorded(family: str = "llada", **more: Any) -> Any:
    settings = {"steps": 9, "gen_length": 9, "block_length": 3, **more}
    return dl.record(tiny(family), PROMPTS, [dl.ReceivedAttention("block", min_viewers=1)], **settings)


def numbers(predictor: Tensor, target: Tensor, top: int) -> tuple[float, float, float]:
    a, b = predictor.tolist(), target.tolist()
    best = set(sorted(range(len(b)), key=lambda j: -b[j])[:top])
    chosen = set(sorted(range(len(a)), key=lambda j: -a[j])[:top])
    kept = sum(b[j] for j in chosen) / sum(b[j] for j in best)
    return float(spearmanr(a, b).statistic), len(best & chosen) / top, kept


BLOCKS = pytest.param("sdar", "all", 2, marks=pytest.mark.long)


@pytest.mark.parametrize(("family", "keys", "first"), [("llada", "context", 1), BLOCKS])
def test_every_predictor_is_compared_as_loops_do(family: str, keys: str, first: int) -> None:
    more = {} if family == "llada" else {"block_length": 4, "gen_length": 12, "steps": 12}
    rec = recorded(family, **more)
    found = early_attention(rec, first=first, share=0.4, keys=keys)
    sums, run = rec.received_sums("block").double(), rec.run
    steps = {number: [t for t in range(run.steps) if run.blocks[t] == number] for number in set(run.blocks)}
    wanted = torch.zeros(len(PREDICTORS), len(MEASURES), 3, 2, 4, 2, dtype=torch.float64)
    for row in range(3):
        usable = {}
        for number, those in steps.items():
            closed = ~run.masked[those[0], row] & ~run.in_block[those[0], row]
            there = [
                j for j in range(run.tokens.shape[1])
                if bool(run.attention_mask[row, j]) and bool(sums[those, row, :, :, j].isfinite().all())
                and (keys == "all" or bool(closed[j]))
            ]  # fmt: skip
            if len(those) > first and len(there) > 1:
                usable[number] = there
        for number, there in usable.items():
            those, top = steps[number], max(1, round(0.4 * len(there)))
            others = sorted((n for n in usable if n != number), key=lambda n: (abs(n - number), n))
            for place, step in enumerate(those[first:], first):
                for layer in range(2):
                    for head in range(4):
                        line = sums[:, :, layer, head][..., there].nan_to_num()
                        made = [(0, line[those[:first], row].mean(0)), (1, line[those[place - 1], row])]
                        made += [(2, line[steps[n][:first], row].mean(0)) for n in others[:1]]
                        made += [(3, line[those[:first], (row + shift) % 3].mean(0)) for shift in (1, 2)]
                        for kind, predictor in made:
                            for index, value in enumerate(numbers(predictor, line[step, row], top)):
                                if value == value:
                                    wanted[kind, index, row, layer, head] += torch.tensor([value, 1.0])
    # A block that another row lacks (sdar: blocks follow the text) is no null; counts say so.
    same = found.by_head[..., 1] == wanted[..., 1]
    if family == "llada":
        assert bool(same.all())
        torch.testing.assert_close(found.by_head, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.by_head[:3], wanted[:3], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.by_lag.sum(3), found.by_head.sum((3, 4)))


def test_rows_of_equal_prompts_are_no_other_prompts() -> None:
    model = tiny("llada")
    settings = {"steps": 9, "gen_length": 9, "block_length": 3, "temperature": 1.0, "seed": [1, 2, 3, 4]}
    reducers = [dl.ReceivedAttention("block", min_viewers=1)]
    place = PREDICTORS.index("other prompt")
    four = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    found = early_attention(dl.record(model, four, reducers, **settings), share=0.4)
    # Six later steps of three blocks: one other prompt for each of three rows, summed, three for the other row.
    assert found.by_head[place, 1, :, 0, 0, 1].tolist() == [3 * 6, 18, 0, 0]
    same = dl.record(model, [PROMPTS[0]] * 4, reducers, **settings)
    alone = early_attention(same, share=0.4)
    assert not bool(alone.by_head[place].any())
    assert bool(alone.by_head[0, 1, 0, ..., 1].all())
    assert alone.mean("recall", "other prompt").value != alone.mean("recall", "other prompt").value  # NaN


def common_by_loops(rec: Any) -> tuple[Tensor, int]:
    """`EarlyAttention.common` of the other prompts, `[measure, prompt, layer, head, 3]`; blocks without these."""
    sums, run = rec.received_sums("block").double(), rec.run
    steps = {number: [t for t in range(run.steps) if run.blocks[t] == number] for number in set(run.blocks)}
    usable: dict[tuple[int, int], list[int]] = {}
    for row, number in product(range(3), steps):
        those = [t for t in steps[number] if t < int(run.row_steps[row])]
        there = [
            j for j in range(run.tokens.shape[1])
            if bool(run.attention_mask[row, j]) and not run.masked[those[0], row, j]
            and not run.in_block[those[0], row, j] and bool(sums[those, row, :, :, j].isfinite().all())
        ] if those else []  # fmt: skip
        if len(those) > 1 and len(there) > 1:
            usable[row, number] = there
    without = 0
    wanted = torch.zeros(len(MEASURES), 3, 2, 4, 3, dtype=torch.float64)
    for (row, number), there in usable.items():
        top, those = max(1, round(0.4 * len(there))), steps[number]
        others = [(row + shift) % 3 for shift in (1, 2)]
        others = [one for one in others if (one, number) in usable]
        without += not others
        for step, layer, head in product(those[1:], range(2), range(4)):
            line = sums[:, :, layer, head][..., there].nan_to_num()
            early = numbers(line[those[0], row], line[step, row], top)
            null = [numbers(line[those[0], one], line[step, row], top) for one in others]
            for measure in range(len(MEASURES)):
                defined = [one[measure] for one in null if one[measure] == one[measure]]
                if defined and early[measure] == early[measure]:
                    sum_of = [early[measure], sum(defined) / len(defined), 1.0]
                    wanted[measure, row, layer, head] += torch.tensor(sum_of, dtype=torch.float64)
    return wanted, without


def test_an_excess_is_over_the_blocks_that_have_both_predictors() -> None:
    # Blocks follow the text: the first blocks of the short prompts have no context, that of the long one has four.
    prompts = [[5, 9, 11, 3, 17, 20], [6, 2], [7, 8]]
    reducers = [dl.ReceivedAttention("block", min_viewers=1)]
    rec = dl.record(tiny("sdar"), prompts, reducers, steps=12, gen_length=12, block_length=4)
    place, start = PREDICTORS.index("other prompt"), rec.run.blocks.index
    values = rec.received_block.clone()
    values[start(3) - 1, 2, :, 0, 7] = torch.nan  # a key that one head does not see at one later step
    found = early_attention(replace(rec, arrays={**rec.arrays, "received_block": values}), share=0.4)
    wanted, without = common_by_loops(replace(rec, arrays={**rec.arrays, "received_block": values}))
    assert without  # some blocks have no other prompt
    torch.testing.assert_close(found.common[place], wanted, rtol=1e-6, atol=1e-6)
    first, other, count = wanted[1].sum((1, 2)).sum(0).tolist()
    assert found.excess("recall").value == pytest.approx((first - other) / count)
    line = found.heads().query("layer == 1 and head == 2").iloc[0]
    first, other, count = wanted[1, :, 1, 2].sum(0).tolist()
    assert line["excess"] == pytest.approx((first - other) / count)


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_a_correlation_counts_only_where_both_predictors_have_ranks() -> None:
    rec = recorded()
    values = rec.received_block.clone()
    values[3, 0, :, 1], values[6, 0, :, 2], values[6, 2, :, 2] = 0.5, 0.25, 0.25
    rec = replace(rec, arrays={**rec.arrays, "received_block": values})
    found, (wanted, _) = early_attention(rec, share=0.4), common_by_loops(rec)
    place = PREDICTORS.index("other prompt")
    torch.testing.assert_close(found.common[place, 0], wanted[0], rtol=1e-6, atol=1e-6)
    # Row 0 has no ranks of its own at two of three first steps, row 1 none of the other prompts at one.
    assert wanted[0, :2, 0, :, 2].tolist() == [[6, 4, 4, 6], [6, 6, 4, 6]]
    first, other, count = wanted[0].sum((0, 1, 2)).tolist()
    assert found.excess("correlation").value == pytest.approx((first - other) / count)


def planted(kind: str) -> Any:
    """A recording whose keys receive planted attention: the same in a block and row, or new at every step."""
    rec = recorded()
    generator, values = torch.Generator().manual_seed(0), rec.received_block.clone()
    for row in range(3):
        for number in range(3):
            steps = [t for t in range(rec.run.steps) if rec.run.blocks[t] == number]
            fixed = torch.rand(values.shape[2:], generator=generator)
            for step in steps:
                values[step, row] = fixed if kind == "fixed" else torch.rand(values.shape[2:], generator=generator)
    return replace(rec, arrays={**rec.arrays, "received_block": values})


def test_planted_attention_gives_one_or_chance() -> None:
    fixed = early_attention(planted("fixed"), share=0.4)
    for measure in MEASURES:
        assert fixed.mean(measure).value == pytest.approx(1)
        assert fixed.mean(measure, "step before").value == pytest.approx(1)
    assert abs(fixed.mean("correlation", "other prompt").value) < 0.15
    chance = float(fixed.chance[:, 0].sum() / fixed.chance[:, 1].sum())
    assert fixed.mean("recall", "other prompt").value == pytest.approx(chance, abs=0.1)
    assert fixed.excess("recall").low > 0.3
    fresh = early_attention(planted("fresh"), share=0.4)
    assert abs(fresh.mean("correlation").value) < 0.15
    assert fresh.mean("recall").value == pytest.approx(chance, abs=0.1)
    assert fixed.lags()["first steps"].tolist() == pytest.approx([1, 1])


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="an AR model has no steps within a block"):
        early_attention(dl.record(tiny("causal"), PROMPTS, [dl.ReceivedAttention()], gen_length=3))
    with pytest.raises(ValueError, match=r'record with ReceivedAttention\("block", min_viewers=1\)'):
        early_attention(dl.record(tiny("llada"), PROMPTS, [dl.ReceivedAttention()], steps=2, gen_length=4))
    with pytest.raises(ValueError, match="no block has more than first=3 steps"):
        early_attention(recorded(), first=3)


def test_a_layer_is_compared_over_its_own_keys_whatever_other_layers_are_recorded() -> None:
    model = tiny("diffusion_gemma", eos_token_id=[3, 50, 20, 33, 8])  # layers 0 and 1 have a sliding window
    model.set_experts_implementation("eager")
    prompts = [[5, 9, 13, 2, 7, 30, 31, 22, 24, 25, 26, 27, 28], [35, 39, 33, 12, 17, 20, 21, 2, 4, 5, 6, 7, 8]]
    settings: dict[str, Any] = {"gen_length": 24, "steps_per_block": 5, "seed": 3, "entropy_bound": 3.0}
    settings |= {"t_min": 0.9, "t_max": 1.6, "stability_threshold": 0, "confidence_threshold": 3.8}

    def found(layers: list[int] | None) -> Any:
        attention = [dl.ReceivedAttention("block", min_viewers=1)]
        return early_attention(dl.record(model.double(), prompts, attention, layers=layers, **settings))

    every = found(None)
    alone = [found([layer]) for layer in every.layers]
    for place, one in enumerate(alone):
        torch.testing.assert_close(every.by_head[:, :, :, [place]], one.by_head)
        torch.testing.assert_close(every.common[:, :, :, [place]], one.common)
    torch.testing.assert_close(every.by_lag, torch.stack([one.by_lag for one in alone]).sum(0))
    torch.testing.assert_close(every.chance, torch.stack([one.chance for one in alone]).mean(0))
    shares = [float(one.chance[:, 0].sum() / one.chance[:, 1].sum()) for one in alone]
    assert len({round(share, 6) for share in shares}) == 2  # the window has fewer keys
