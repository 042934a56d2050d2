"""`mask_random(like=..., match="mass")` against its rule, written by hand with loops in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import ColumnStats, PointContext, RunStep, SinkLayout, hidden_mass
from dlm_lens.hooks import (
    at_heads,
    at_progress,
    at_steps,
    keep_only,
    mask_positions,
    mask_random,
    mask_top_sinks,
    parse_hooks,
    sink,
)
from dlm_lens.hooks.random_columns import _random_numbers
from tests.hooks.by_hand import PROMPTS, model_of, scores, settings_of, statistics, top
from tests.hooks.test_other_columns import check_run, hidden_by, step_of

SEED = 3


def drawn(run: RunStep, layer: int, sinks: SinkLayout | None = None) -> list[list[list[int]]]:
    """The random order of the content positions of every row and head, asked of `mask_random(k)` one by one."""
    keys = run.tokens.shape[1] + (sinks.count if sinks else 0)
    before = torch.zeros(len(run.tokens), 4, keys, dtype=torch.bool)
    order: list[list[list[int]]] = [[[] for _ in range(4)] for _ in range(len(run.tokens))]
    for k in range(1, keys + 1):
        now = hidden_by(mask_random(k, seed=SEED), run, layer=layer, sinks=sinks)
        for row, head, key in (now & ~before).nonzero().tolist():
            order[row][head].append(key)
        before = now
    return order


def nearest(order: list[int], received: Tensor, gone: set[int]) -> set[int]:
    """The rule: in random order whatever still fits, then the one more that brings the sum nearer."""
    target = sum(float(received[j]) for j in sorted(gone))
    taken: set[int] = set()
    for j in order:
        if gone and j not in gone and sum(float(received[i]) for i in taken) + float(received[j]) <= target:
            taken.add(j)
    total = sum(float(received[i]) for i in taken)
    others = [(abs(target - total - float(received[j])), j) for j in order if j not in taken | gone]
    if gone and others and min(others)[0] < target - total:
        taken.add(min(others)[1])
    return taken


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "per"), [("llada", "head"), ("llada", "layer"), ("front", "head"), ("llama", "head")]
)
@torch.no_grad()
def test_a_run_hides_what_the_rule_says(name: str, per: str) -> None:
    model = model_of(name)
    layout = SinkLayout.of(model)
    shares: list[float] = []
    aims: list[float] = []

    def gone_at(step: int, run: Any, state: Any, pattern: Tensor, visible: Tensor, counted: Tensor) -> Callable:
        canvas, content, masked = state
        answer = run.masked[0][:, : canvas.shape[1]]
        now = RunStep(step, run.steps, 0, (0, 4), canvas, masked, content, answer, model.config, None)
        maps = statistics(pattern, visible, counted)
        held: dict[tuple[int, int, int], set[int]] = {}

        def gone(layer: int, b: int, h: int, i: int) -> set[int]:
            if (layer, b, h) not in held:
                order = drawn(now, layer, layout)[b][h if per == "head" else 0]
                mine = [maps[b][h]] if per == "head" else maps[b]
                received = sum(one[0] for one in mine) / len(mine)
                sinks = set(top(scores(mine), 2))
                held[layer, b, h] = nearest(order, received, sinks)
                count = float(counted[b].sum())
                shares.append(sum(float(maps[b][h][0][j]) for j in held[layer, b, h]) / count)
                aims.append(sum(float(maps[b][h][0][j]) for j in sinks) / count)
            return held[layer, b, h]

        return gone

    control = mask_random(like=mask_top_sinks(2, per=per), match="mass", seed=SEED)
    check_run(name, control, gone_at)
    run = dl.denoise(model, PROMPTS, hooks=[control], **settings_of(name))
    # float32 sums against float64; shares are about 0.2.
    assert run.settings["mass_hidden"][0] == pytest.approx(sum(shares) / len(shares), abs=1e-5)
    # Untrained networks attend nearly evenly, so that the nearest sum is near; some AR prefixes hold too little.
    assert name == "llama" or sum(shares) == pytest.approx(sum(aims), rel=0.05)
    counted = dl.denoise(model, PROMPTS, hooks=[mask_random(like=mask_top_sinks(2, per=per))], **settings_of(name))
    assert abs(sum(shares) - sum(aims)) < abs(counted.settings["mass_hidden"][0] * len(aims) - sum(aims))


def planted(sums: Tensor) -> Callable[[], ColumnStats]:
    """Statistics of keys that every query sees, with these column sums."""
    rows, _, keys = sums.shape
    ones = torch.ones(rows, 1, keys)
    return lambda: ColumnStats(sums, ones, ones * keys, torch.full((rows,), keys))


def chosen(hook: Any, run: RunStep, sums: Tensor, layer: int = 0, clean: Any = None) -> Tensor:
    """The columns that a hook hides where the keys receive `sums`."""
    more = {} if clean is None else {"clean": lambda: {layer: planted(clean)()}}
    context = PointContext("here", layer, SinkLayout(), run=RunStep(**{**vars(run), **more}), depth=2)
    found = hook.hidden(run.tokens.shape[1], planted(sums), context)
    return found.resolved(4, torch.device("cpu")).columns.expand(len(run.tokens), 4, -1)


def a_run() -> RunStep:
    model = model_of("llada")
    ids = torch.tensor([PROMPTS[0] + [63] * 12, [61] * 3 + PROMPTS[1] + [63] * 12])
    return step_of(model, ids, ids == 63, valid=ids != 61)


def uneven(seed: int) -> Tensor:
    """Column sums of 2 rows and 4 heads of 24 keys, padding's 0: a few keys receive most."""
    drawn = torch.rand(2, 4, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    drawn[1, :, :3] = 0
    return (24 * drawn / drawn.sum(-1, keepdim=True)).float()


def test_the_mass_is_that_of_the_statistics_that_ranked_the_sinks() -> None:
    run, now, other = a_run(), uneven(0), uneven(1)
    before = RunStep(**{**vars(run), "step": 0})
    previous = mask_random(like=mask_top_sinks(3, source="previous"), match="mass", seed=SEED)
    chosen(previous, before, other)  # the step before, in the same run's memory
    cases = (
        (mask_random(like=mask_top_sinks(3), match="mass", seed=SEED), now, None),
        (mask_random(like=mask_top_sinks(3, source="clean"), match="mass", seed=SEED), other, other),
        (previous, other, None),
    )
    for hook, ranked, clean in cases:
        found, order = chosen(hook, run, now, clean=clean), drawn(run, 0)
        for row in range(2):
            for head in range(4):
                gone = set(ranked[row, head].topk(3).indices.tolist())
                wanted = nearest(order[row][head], ranked[row, head].double(), gone)
                assert {j for j in range(24) if found[row, head, j]} == wanted, hook


def test_where_all_heads_lose_the_same_columns_the_mass_is_the_heads_mean() -> None:
    run, sums = a_run(), uneven(2)
    found = chosen(mask_random(like=mask_positions(5, 9), match="mass", seed=SEED), run, sums)
    for row in range(2):
        wanted = nearest(drawn(run, 0)[row][0], sums[row].double().mean(0), {5, 9})
        for head in range(4):
            assert {j for j in range(24) if found[row, head, j]} == wanted


def test_the_sum_is_as_near_as_one_more_column_can_bring_it() -> None:
    run = a_run()
    hook = mask_random(like=mask_top_sinks(3), match="mass", seed=SEED)
    misses, strays = [], []
    for seed in range(40):
        sums = uneven(seed)
        found = chosen(hook, run, sums)
        target = sums.topk(3).values.sum(-1)
        missed = (sums * found).sum(-1) - target
        rest = (sums * ~found).masked_fill(found | (sums >= sums.topk(3).values[..., -1:]), torch.inf)
        assert not (found & (sums >= sums.topk(3).values[..., -1:])).any()
        # Nothing left would help, unless nothing is left.
        assert (missed.abs() <= (missed + rest.amin(-1)).abs() + 1e-5).all()
        misses += missed.abs().flatten().tolist()
        counted = chosen(mask_random(like=mask_top_sinks(3), seed=SEED), run, sums)
        strays += ((sums * counted).sum(-1) - target).abs().flatten().tolist()
    # As many columns receive far less than the three largest.
    assert sum(misses) < sum(strays) / 4


def test_where_the_others_receive_less_all_of_them_go() -> None:
    run = a_run()
    sums = torch.full((2, 4, 24), 0.1)
    sums[..., 5], sums[1, :, :3] = 20.0, 0.0
    found = chosen(mask_random(like=mask_positions(5), match="mass"), run, sums)
    assert found[0, 0].tolist() == [j != 5 for j in range(24)]
    assert found[1, 0].tolist() == [j != 5 and j > 2 for j in range(24)]
    nothing = chosen(mask_random(like=mask_positions(1), match="mass"), run, sums)
    assert not nothing[1].any()  # position 1 is padding there
    assert nothing[0].sum() == 4  # 0.1 by one other column in each head
    assert chosen(mask_random(like=mask_positions(7), match="mass", seed=1), run, sums)[1, 0].sum() == 1


def test_learned_sinks_count_and_are_never_chosen() -> None:
    model, options = model_of("front"), settings_of("front")
    control = mask_random(like=mask_positions(sink(0), sink(1)), match="mass")
    run = dl.denoise(model, PROMPTS, hooks=[control], **options)
    aim = dl.denoise(model, PROMPTS, hooks=[mask_random(like=mask_positions(sink(0)), match="mass")], **options)
    assert run.settings["columns_hidden"][0] > aim.settings["columns_hidden"][0] >= 1
    assert run.settings["mass_hidden"][0] > 1.5 * aim.settings["mass_hidden"][0]
    layout = SinkLayout.of(model)
    step = a_run()
    context = PointContext("here", 0, layout, run=step)
    found = control.hidden(26, planted(torch.ones(2, 4, 26)), context)
    assert not found.columns[..., :2].any()
    assert (found.columns.sum(-1) == 2).all()


def test_wrappers_limit_the_control_and_mass_is_counted_where_it_acts() -> None:
    model, options = model_of("llada"), settings_of("llada")
    real = mask_top_sinks(2)

    def mass(*hooks: Any) -> Any:
        return dl.denoise(model, PROMPTS, hooks=hooks, **options).settings["mass_hidden"]

    whole = mass(mask_random(like=at_heads(at_steps(real, 1), [0, 2]), match="mass"))[0]
    aim = mass(at_heads(at_steps(real, 1), [0, 2]))[0]
    # One map counts as one, whatever rests: two keys of some twenty receive about a tenth.
    assert aim == pytest.approx(whole, rel=0.1)
    assert 0.08 < aim < 0.4
    assert mass(at_progress(mask_random(like=real, match="mass"), (0.25, 0.5)))[0] == pytest.approx(aim, rel=0.3)
    assert mass(mask_positions(3), real)[1] > 0
    assert mass(mask_positions(3), real)[0] is None  # it never asked what columns receive
    assert hidden_mass({}, real) is None


def test_it_reads_as_written_and_refuses_what_has_no_mass() -> None:
    hook = mask_random(like=at_heads(mask_top_sinks(2), [1]), match="mass", seed=4)
    written = "mask_random(like=at_heads(mask_sinks(TopK(k=2)), [1]), seed=4, match='mass')"
    assert repr(hook) == written
    assert parse_hooks(written) == (hook,)
    assert parse_hooks("mask_random(like=mask_top_sinks(1), match='mass')")[0].match == "mass"
    for call, sentence in (
        (lambda: mask_random(2, match="mass"), r"a mass is matched to like=, a hook that hides the same columns"),
        (lambda: mask_random(like=keep_only(1, 3), match="mass"), "hides the same columns from every query"),
        (lambda: mask_random(like=at_steps(keep_only(1, 3), 1), match="mass"), "the same columns from every query"),
        (lambda: mask_random(like=mask_top_sinks(1), match="weight"), "match is 'weight'; it must be one of 'col"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def splitmix64(value: int) -> int:
    """One number of the generator (Steele, Lea and Flood 2014, Figure 16) after the state `value`."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


@pytest.mark.parametrize("step", [None, 4])
def test_the_random_numbers_are_those_of_splitmix64(step: int | None) -> None:
    """Of the seed, the step, the layer, the head, the prompt and the position: the same on every device."""
    content = torch.tensor([[False, True, True, True], [True, True, True, True]])
    tokens, prompt = torch.tensor([[0, 5, 9, 63], [8, 4, 2, 63]]), content & torch.tensor([True, True, True, False])
    run = None if step is None else SimpleNamespace(step=step, tokens=tokens, valid=content, prompt=prompt)
    hook: Any = SimpleNamespace(run=run, index=3)
    found = _random_numbers(7, content, 2, hook)
    key = splitmix64(splitmix64(7 + (step or 0)) + 3)
    for row, padding in ((0, 1), (1, 0)):
        seen = 0
        for place in range(padding, 3 if run else 0):
            seen += splitmix64(splitmix64(place - padding) + int(tokens[row, place]))
        for head in range(2):
            own = splitmix64(splitmix64(key + head) + seen)
            for place in range(padding, 4):
                number = splitmix64(own + splitmix64(place - padding))
                signed = number - 2**64 * (number >= 2**63)
                assert float(found[row, head, place]) == float(signed)
