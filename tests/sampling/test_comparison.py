"""`compare`: two runs from one seed, and what differs, against loops over their canvases."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import dlm_lens as dl
from dlm_lens.hooks import ablate, at_steps, mask_positions, mask_random, mask_top_sinks, steer
from dlm_lens.sampling.comparison import STATISTICS, Comparison, ComparisonDifference, compare
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 14, 3, 8, 2], [7, 2, 11]]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "block_length": 4, "temperature": 0.7}


@pytest.fixture(scope="module", params=["llada", "dream", "causal"])
def pair(request: Any) -> Comparison:
    return compare(tiny(request.param), PROMPTS, [ablate("mlp_out", "visible")], **settings_of(request.param))


def settings_of(family: str) -> dict[str, Any]:
    if family == "causal":
        return {"gen_length": 8, "temperature": 0.7}
    own = {"llada": {"block_length": 4}, "dream": {"remasking": "entropy"}}[family]
    return {"steps": 4, "gen_length": 8, "temperature": 0.7, **own}


def test_both_runs_are_those_of_denoise_from_one_seed(pair: Comparison) -> None:
    family = pair.plain.settings["sampler"]
    model, settings = tiny(family), settings_of(family)
    settings |= {"use_cache": False} if family == "causal" else {}
    plain = dl.denoise(model, PROMPTS, **settings)
    assert plain.canvases.equal(pair.plain.canvases)
    hooked = dl.denoise(model, PROMPTS, hooks=[ablate("mlp_out", "visible")], **settings)
    assert hooked.canvases.equal(pair.hooked.canvases)
    assert not plain.tokens.equal(hooked.tokens)


def over(run: dl.DenoisingRun, row: int) -> int:
    """The position after the row's first end of text in AR decoding; after the canvas in other runs."""
    tokens = run.tokens[row].tolist()
    ends = [p + 1 for p in range(run.prompt_length, len(tokens)) if tokens[p] in run.eos_token_ids]
    return ends[0] if ends and run.autoregressive else len(tokens)


def test_what_differs_equals_loops(pair: Comparison) -> None:
    one, two = pair.plain, pair.hooked
    if one.steps != two.steps:
        pytest.fail("these seeds give runs of one length; the other case has its own test")
    table = pair.table()
    line = 0
    for row in range(2):
        firsts = [
            step
            for step in range(one.steps)
            if any(
                (int(a.canvases[step + 1, row, p]) if not a.masked[step + 1, row, p] else -1)
                != (int(b.canvases[step + 1, row, p]) if not b.masked[step + 1, row, p] else -1)
                for a, b in [(one, two)]
                for p in range(one.tokens.shape[1])
            )
        ]
        assert int(pair.first_difference[row]) == (firsts[0] if firsts else -1)
        changed = counted = 0
        stops = [over(run, row) for run in (one, two)]
        for p in range(one.tokens.shape[1]):
            if not one.masked[0, row, p] or p >= max(stops):
                assert bool(pair.confidence_change[row, p].isnan())
                assert not pair.changed[row, p]
                continue
            differs = int(one.tokens[row, p]) != int(two.tokens[row, p])
            changed += differs
            counted += 1
            a, b = (run.confidence[int(run.step_of[row, p]), row, p] for run in (one, two))
            if p < min(stops):
                assert float(pair.confidence_change[row, p]) == pytest.approx(float(b - a), abs=1e-7)
                assert int(pair.step_change[row, p]) == int(two.step_of[row, p]) - int(one.step_of[row, p])
            else:
                assert bool(pair.confidence_change[row, p].isnan())
                assert bool(pair.step_change[row, p].isnan())
            found = table.iloc[line]
            assert (found["batch"], found["canvas_position"], found["changed"]) == (row, p, differs)
            assert found["position"] == p - pair.plain.padding[row]
            assert found["token_hooked"] == f"w{int(two.tokens[row, p])}" or int(two.tokens[row, p]) >= 61
            assert found["step_hooked"] == (int(two.step_of[row, p]) if p < stops[1] else -1)
            line += 1
        assert int(pair.tokens_changed[row]) == changed
        assert float(pair.share_changed[row]) == pytest.approx(changed / counted)
        assert counted == max(stops) - one.prompt_length
    assert line == len(table)
    assert one.autoregressive or line == 16
    assert int(pair.tokens_changed.sum()) > 0


def test_a_hook_that_does_nothing_changes_nothing() -> None:
    for family, settings in (("llada", RUN), ("causal", {"gen_length": 5, "temperature": 1.0})):
        found = compare(tiny(family), PROMPTS, [steer(torch.zeros(32))], **settings)
        assert found.first_difference.tolist() == [-1, -1]
        assert found.tokens_changed.tolist() == [0, 0]
        assert found.confidence_change[found.answer].abs().max() == 0


def test_the_first_difference_is_not_before_the_hooks_act() -> None:
    found = compare(tiny("llada"), PROMPTS, [at_steps(ablate("attn_out"), [2, 3])], **RUN)
    assert found.plain.canvases[:3].equal(found.hooked.canvases[:3])
    assert (found.first_difference[found.first_difference >= 0] >= 2).all()
    assert (found.first_difference >= 0).any()


def test_a_fresh_seed_is_drawn_once() -> None:
    found = compare(tiny("llada"), PROMPTS, [steer(torch.zeros(32))], seed=None, **RUN)
    assert found.plain.settings["seeds"] == found.hooked.settings["seeds"]
    assert found.tokens_changed.sum() == 0


def test_an_order_of_nothing_has_no_confidence() -> None:
    found = compare(tiny("dream"), PROMPTS, [mask_positions(0)], steps=4, gen_length=8, remasking="origin")
    assert bool(found.confidence_change.isnan().all())


class FirstRow:
    """Takes the attention of the first row away."""

    site = "attn_out"

    def __call__(self, tensor: torch.Tensor, hook: Any = None) -> torch.Tensor:
        return torch.cat([0 * tensor[:1], tensor[1:]])


def test_an_ar_run_that_ends_earlier_goes_on_with_its_end_token() -> None:
    model, prompts = tiny("causal"), [PROMPTS[0], PROMPTS[0]]
    settings = {"gen_length": 6, "temperature": 2.0, "seed": 6}
    plain = dl.denoise(model, prompts, use_cache=False, **settings)
    # The end token is what both rows write at step 2 for the first time: the plain run then ends.
    end = int(plain.tokens[0, 8])
    assert end not in plain.tokens[0, 6:8].tolist()
    model.config.eos_token_id = end
    found = compare(model, prompts, [at_steps(FirstRow(), slice(1, None))], **settings)
    steps = found.hooked.steps
    assert (found.plain.steps, steps) == (3, 6)
    one, two = found.plain.tokens[0].tolist() + [end] * (steps - 3), found.hooked.tokens[0].tolist()
    differs = [p for p in range(6 + steps) if one[p] != two[p]]
    assert found.changed[0].nonzero().flatten().tolist() == differs
    # An AR step writes the next position. The second row is the same, whatever the first one's end.
    assert found.first_difference.tolist() == [differs[0] - 6, -1]
    assert differs[0] > 6
    assert found.tokens_changed.tolist() == [len(differs), 0]
    # The second row ends at step 2 in both runs: what its batch writes after that is no answer of it.
    first = [False] * 6 + [True] * steps
    assert found.answer.tolist() == [first, [False] * 6 + [True] * 3 + [False] * (steps - 3)]
    assert found.confidence_change[:, 9:].isnan().all()
    assert found.confidence_change[:, 6:9].isfinite().all()
    back = Comparison(found.hooked, found.plain, ())
    assert back.first_difference.equal(found.first_difference)


def test_a_row_of_an_ar_batch_is_compared_as_the_row_alone() -> None:
    model, hooks = tiny("causal"), [ablate("attn_out")]
    settings = {"gen_length": 12, "temperature": 1.0}
    prompts, seeds = [PROMPTS[0], [7, 2, 11, 4, 1, 6]], [3, 4]
    plain = dl.denoise(model, prompts, seed=seeds, **settings)
    end = int(plain.tokens[0, 6 + 3])
    model.config.eos_token_id = end
    both = compare(model, prompts, hooks, seed=seeds, **settings)
    each = zip(prompts, seeds, strict=True)
    alone = [compare(model, prompt, hooks, seed=seed, **settings) for prompt, seed in each]
    rows = both.plain.row_steps.tolist()
    assert len(set(rows)) == 2
    tables = both.table()
    for row, one in enumerate(alone):
        width = one.answer.shape[1]
        assert both.answer[row, :width].equal(one.answer[0])
        assert not both.answer[row, width:].any()
        assert float(both.share_changed[row]) == pytest.approx(float(one.share_changed[0]))
        for name in ("confidence_change", "step_change"):
            found, wanted = getattr(both, name)[row], getattr(one, name)[0]
            torch.testing.assert_close(found[:width], wanted, rtol=1e-4, atol=1e-6, equal_nan=True)
            assert bool(found[width:].isnan().all())
        table = tables[tables["batch"] == row].reset_index(drop=True)
        for name in ("position", "token_plain", "token_hooked", "changed", "step_plain", "step_hooked"):
            assert table[name].tolist() == one.table()[name].tolist()
        last = int(both.plain.row_steps[row])
        torch.testing.assert_close(both.plain.progress[: last + 1, row], one.plain.progress[:, 0])
        assert bool((both.plain.progress[last:, row] == 1).all())


ENDING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a2d_qwen3": ({"sampler": "dllm_blocks"}, {"block_length": 2, "steps": 12}),
    "fast_dllm_v2": ({}, {"block_length": 4, "sub_block_length": 2}),
    "diffusion_gemma": ({}, {"steps_per_block": 2}),
}
"""Families whose canvas ends with the last block that a row decoded."""


@pytest.mark.parametrize("family", ENDING)
def test_a_run_that_decodes_fewer_blocks_leaves_the_others_open(family: str) -> None:
    fields, settings = ENDING[family]
    model, prompt = tiny(family, **fields), [5, 9, 14]
    longest = dl.denoise(model, prompt, gen_length=16, **settings)
    ended = replace(longest)
    for end in dict.fromkeys(longest.tokens[0, 3:].tolist()):  # the first of these that ends the run early
        model.config.eos_token_id = end
        ended = dl.denoise(model, prompt, gen_length=16, **settings)
        if ended.tokens.shape[1] < longest.tokens.shape[1]:
            break
    width, full = ended.tokens.shape[1], longest.tokens.shape[1]
    assert 3 < width < full
    found = Comparison(longest, ended, ())
    assert found.answer.tolist() == [[False] * 3 + [True] * (full - 3)]
    rest = longest.tokens[0, width:] != longest.canvases[0, 0, width:]
    assert found.changed[0, width:].equal(rest)
    assert found.changed[0, :width].equal(longest.tokens[0, :width] != ended.tokens[0])
    assert bool(rest.any())
    assert found.confidence_change[0, width:].isnan().all()
    assert found.step_change[0, width:].isnan().all()
    # Until the shorter run ends, both have written the same.
    assert int(found.first_difference[0]) >= ended.steps - 1
    assert Comparison(ended, longest, ()).changed.equal(found.changed)
    assert len(found.table()) == full - 3


def test_what_does_not_pair_is_refused() -> None:
    model = tiny("llada")
    with pytest.raises(ValueError, match="hooks is empty"):
        compare(model, PROMPTS, [])
    with pytest.raises(ValueError, match="one observer cannot follow"):
        compare(model, PROMPTS, [mask_positions(0)], observers=())
    one, two = dl.denoise(model, PROMPTS, **RUN), dl.denoise(model, [[5, 9, 14, 3, 8, 1], [7, 2, 11]], **RUN)
    with pytest.raises(ValueError, match="their prompts differ"):
        Comparison(one, two, ())
    with pytest.raises(ValueError, match="they have 14 and 10 positions"):
        Comparison(one, dl.denoise(model, PROMPTS, **{**RUN, "gen_length": 4}), ())
    with pytest.raises(ValueError, match="differ in prompt length or rows"):
        Comparison(one, replace(two, prompt_length=5), ())
    assert repr(Comparison(one, one, ("hook",))) == (
        "Comparison(tokens_changed=0 of 16, first_difference=[-1, -1], hooks=[hook])"
    )
    assert math.isnan(float(Comparison(one, one, ()).confidence_change[0, 0]))


FOUR = [PROMPTS[0], PROMPTS[1], [4, 4, 9, 1], PROMPTS[1], [12, 8]]
"""Five rows of four prompts."""

EARLY_END = [36, 2, 27, 30, 59, 0, 13, 29, 31, 17, 41, 10]
"""End tokens with which the AR runs of `FOUR` have unequal widths, and rows that end at unequal steps."""


def by_hand(one: Comparison, control: Comparison, row: int) -> dict[str, float]:
    """The differences of a row, from the canvases of the four runs."""
    plain, runs = one.plain, (one.hooked, control.hooked)
    start, stops = plain.prompt_length, [over(run, row) for run in (plain, one.hooked, control.hooked)]
    changed, answer, firsts, confidences = [], [], [], []
    for run, stop in zip(runs, stops[1:], strict=True):
        end = max(stops[0], stop)
        tokens = [each.tokens[row].tolist() for each in (plain, run)]
        longer = [one + [plain.eos_token_ids[0] if plain.eos_token_ids else 0] * (end - len(one)) for one in tokens]
        changed.append(sum(longer[0][p] != longer[1][p] for p in range(start, end)))
        answer.append(end - start)
        if plain.autoregressive:  # step t writes position start + t
            differ = [p - start for p in range(start, end) if longer[0][p] != longer[1][p]]
        else:
            canvases = [each.canvases[1:, row].masked_fill(each.masked[1:, row], -1) for each in (plain, run)]
            differ = [step for step in range(plain.steps) if not canvases[0][step].equal(canvases[1][step])]
        firsts.append(float(differ[0]) if differ else math.nan)
        confidences.append(
            {
                p: float(run.confidence[int(run.step_of[row, p]), row, p])
                - float(plain.confidence[int(plain.step_of[row, p]), row, p])
                for p in range(start, min(stops[0], stop))
            }
        )
    both = sorted(confidences[0].keys() & confidences[1].keys())
    return {
        "tokens_changed": float(changed[0] - changed[1]),
        "share_changed": changed[0] / answer[0] - changed[1] / answer[1],
        "first_difference": firsts[0] - firsts[1],
        "confidence_change": float(np.mean([confidences[0][p] - confidences[1][p] for p in both])),
    }


@pytest.mark.parametrize("family", ["llada", "dream", "causal"])
def test_minus_is_the_paired_difference_with_its_interval_over_prompts(family: str) -> None:
    model, settings = tiny(family), {**settings_of(family), "seed": [0, 1, 2, 3, 4]}
    hooks = [[ablate("mlp_out", "visible")], [steer(torch.full((32,), 0.3))]]
    if family == "causal":
        model.config.eos_token_id = EARLY_END
    one, control = (compare(model, FOUR, each, **settings) for each in hooks)
    if family == "causal":
        assert len({run.tokens.shape[1] for run in (one.plain, one.hooked, control.hooked)}) == 3
    found = one.minus(control)
    rows = [by_hand(one, control, row) for row in range(5)]
    table = found.table().set_index("statistic")
    assert list(table.index) == list(STATISTICS) == list(rows[0])
    for name in STATISTICS:
        wanted = np.array([row[name] for row in rows])
        np.testing.assert_allclose(found.rows(name), wanted, atol=1e-6)
        # The second and the fourth row are one prompt, which is drawn whole.
        known = np.isfinite(wanted)
        sums, counts = np.zeros(4), np.zeros(4)
        for row, prompt in enumerate([0, 1, 2, 1, 3]):
            sums[prompt] += wanted[row] if known[row] else 0.0
            counts[prompt] += known[row]
        sums, counts = sums[counts > 0], counts[counts > 0]
        n = len(sums)
        assert n > 2
        draws = np.random.default_rng(0).multinomial(n, [1 / n] * n, size=2000)
        mean = sums.sum() / counts.sum()
        wider = stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975) * math.sqrt(n / (n - 1))
        low, high = mean + wider * (np.quantile((draws @ sums) / (draws @ counts), (0.025, 0.975)) - mean)
        if name == "share_changed":
            low, high = max(low, -1.0), min(high, 1.0)
        estimate = found.mean(name)
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx((mean, low, high), abs=1e-6)
        assert estimate.prompts == table.loc[name, "prompts"] == n
        assert table.loc[name, "hooks"] - table.loc[name, "control"] == pytest.approx(mean, abs=1e-6)
    assert bool((found.rows("tokens_changed") != 0).any())
    # Of a comparison with itself every difference is 0; the other way round it changes its sign.
    torch.testing.assert_close(control.minus(one).rows("share_changed"), -found.rows("share_changed"))
    assert one.minus(one).rows("confidence_change").tolist() == [0.0] * 5


def test_of_infilled_prompts_the_given_tokens_are_compared() -> None:
    prompts = [[5, 63, 63, 9, 63, 63, 3], [7, 63, 2, 63]]
    found = compare(tiny("llada"), prompts, [ablate("mlp_out", "visible")], gen_length=0, steps=3)
    changed = (found.plain.tokens != found.hooked.tokens) & found.plain.masked[0]
    assert found.tokens_changed.tolist() == changed.sum(-1).tolist()
    assert found.tokens_changed.sum() > 0


def test_minus_takes_runs_with_and_without_the_exact_cache_of_blocks() -> None:
    cached, uncached = (
        compare(tiny("bd3lm"), [[5, 6, 7, 8]], [mask_top_sinks(1)], gen_length=32, **settings)
        for settings in ({}, {"use_cache": False})
    )
    assert [pair.plain.settings["use_cache"] for pair in (cached, uncached)] == [True, False]
    assert cached.minus(uncached).rows("tokens_changed").tolist() == [0.0]
    assert int(cached.tokens_changed.sum()) > 0


def test_minus_shows_what_was_compared() -> None:
    hook = mask_top_sinks(1)
    pair, control = (compare(tiny("llada"), [PROMPTS[0]], [one], **RUN) for one in (hook, mask_random(like=hook)))
    found = pair.minus(control)
    changed = int(pair.tokens_changed[0]) - int(control.tokens_changed[0])
    assert repr(found) == (
        f"ComparisonDifference(tokens_changed={changed} [no interval: 1 prompt], "
        f"share_changed={changed / 8:.4g} [no interval: 1 prompt], hooks=[{hook!r}], "
        f"control=[mask_random(like={hook!r})])"
    )
    assert "confidence_change" in found._repr_html_()


def test_minus_refuses_what_does_not_pair() -> None:
    model, hooks = tiny("llada"), [ablate("mlp_out", "visible")]
    pair = compare(model, PROMPTS, hooks, **RUN)
    others = {
        r"differ in steps \(4 and 2\); give both the same": {"settings": {**RUN, "steps": 2}},
        r"seeds \(\(0, 0\) and \(1, 1\)\)": {"settings": {**RUN, "seed": 1}},
        "differ in their prompts;": {"prompts": [PROMPTS[0], [7, 2, 12]]},
        "their prompts;": {"prompts": PROMPTS[:1]},
        "differ in their runs without hooks;": {"model": tiny("llada", seed=1)},
    }
    for message, other in others.items():
        given: dict[str, Any] = {"model": model, "prompts": PROMPTS, "settings": RUN, **other}
        control = compare(given["model"], given["prompts"], hooks, **given["settings"])
        with pytest.raises(ValueError, match=message):
            pair.minus(control)
    # Another network may write the same tokens with another confidence, and a name may be all that is known.
    plain = replace(pair.plain, confidence=pair.plain.confidence * 0.9)
    with pytest.raises(ValueError, match="differ in their runs without hooks;"):
        pair.minus(Comparison(plain, pair.hooked, ()))
    # Or other tokens at the same places, as surely.
    tokens = torch.where(pair.plain.unmasked.any(0) & ~pair.plain.masked[1:], 0, pair.plain.canvases[1:])
    plain = replace(pair.plain, canvases=torch.cat([pair.plain.canvases[:1], tokens]))
    with pytest.raises(ValueError, match="differ in their runs without hooks;"):
        pair.minus(Comparison(plain, pair.hooked, ()))
    with pytest.raises(ValueError, match=r"differ in model \('.*' and 'other'\);"):
        pair.minus(Comparison(replace(pair.plain, model="other"), pair.hooked, ()))
    shorter = replace(
        pair.hooked, attention_mask=pair.hooked.attention_mask.clone().index_fill_(1, torch.tensor(0), False)
    )
    with pytest.raises(ValueError, match="the runs do not pair: their prompts differ"):
        Comparison(pair.plain, shorter, ())
    with pytest.raises(ValueError, match="control is 3; it must be a Comparison"):
        pair.minus(3)  # type: ignore[arg-type]
    found = pair.minus(pair)
    with pytest.raises(ValueError, match="statistic is 'steps'; it must be one of tokens_changed, share_changed"):
        found.mean("steps")
    with pytest.raises(ValueError, match=r"values has shape \(2, 4, 2\), not \(2, 4, 1\)"):
        replace(found, prompt=found.prompt[:1])
    assert isinstance(found, ComparisonDifference)
