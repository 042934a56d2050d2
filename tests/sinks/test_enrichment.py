"""What sinks stand on and where: planted preferences, and plain loops over sink-steps."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from dlm_lens import ReceivedAttention, TopK, denoise, record
from dlm_lens.recording import rerun
from dlm_lens.sinks import (
    AboveMean,
    Received,
    compare_query_classes,
    find_sinks,
    frontier_alignment,
    position_enrichment,
    received_over_steps,
    sink_consistency,
    token_enrichment,
    trajectories,
)
from dlm_lens.sinks.analysis.enrichment import sink_steps
from dlm_lens.testing import tiny
from tests.sinks.planted import planted

RULE = AboveMean(3.0)
VOCABULARY = {0: "[MASK]", 1: "<eos>", 2: "<bos>", 3: ".", 4: "Ġ", 5: " 12", 6: "Ġtom", 7: ",", 8: "x2", 9: "\n"}


class Tokenizer:
    mask_token_id, eos_token_id, all_special_ids = 0, 1, [0, 1, 2]

    def decode(self, ids):
        return VOCABULARY[ids[0]]


def run_like(seed=0, steps=6, batch=3, keys=20, prompt=6, noise=4.0, sinks=0):
    """Random scores with sinks here and there; the answer is written from left to right, one token a step."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(steps, batch, 2, 2, keys, generator=generator)
    values[torch.rand(values.shape, generator=generator) < 0.08] = noise + 3
    values[:, 1, ..., :2] = torch.nan  # padding
    final = torch.randint(1, 10, (batch, keys), generator=generator)
    masked = torch.zeros(steps, batch, keys, dtype=torch.bool)
    for step in range(steps):
        masked[step, :, prompt + 2 * step : keys - sinks] = True
    tokens = torch.where(masked, 0, final)
    if sinks:
        tokens[..., -sinks:] = -1 - torch.arange(sinks)
    return Received(
        values=values, expected=torch.ones(steps, batch, 1, 1, keys), counted=torch.full((steps, batch), keys),
        tokens=tokens, masked=masked, final_tokens=final, layers=(4, 5), tokenizer=Tokenizer(), sinks=sinks,
    )  # fmt: skip


def blocks_like(steps, positions):
    """Two blocks of six, which begin one position later in each row, as those counted from unequal prompts do."""

    def block(step, row):
        start = 6 + row + 6 * (step >= steps // 2)
        return start, min(start + 6, positions)

    inside = torch.zeros(steps, 3, positions, dtype=torch.bool)
    for step, row in np.ndindex(steps, 3):
        inside[step, row, slice(*block(step, row))] = True
    return inside, block


def of_id(token):
    return {0: "mask", 1: "end of text", 2: "special", 3: "punctuation", 4: "whitespace", 5: "digits", 6: "words",
            7: "punctuation", 8: "words", 9: "whitespace", -1: "learned sink"}[token]  # fmt: skip


def loop(paths, received, member):
    """Observed and expected sink-steps of every class per (row, layer, head), one sink-step after another."""
    seen, base, total = {}, {}, {}
    for step, pattern, position in zip(*(a.tolist() for a in sink_steps(paths)), strict=True):
        row, layer, head = np.unravel_index(pattern, received.values.shape[1:4])
        at = (int(row), int(layer), int(head))
        keys = [k for k in range(received.values.shape[-1]) if not math.isnan(received.values[step, row, 0, 0, k])]
        for name in {c for k in keys for c in member(step, row, k)}:
            share = sum(name in member(step, row, k) for k in keys) / len(keys)
            base[(*at, name)] = base.get((*at, name), 0) + share
        for name in member(step, row, position):
            seen[(*at, name)] = seen.get((*at, name), 0) + 1
        total[at] = total.get(at, 0) + 1
    return seen, base, total


def gather(values, name, **where):
    axes = ("batch", "layer", "head")
    return sum(
        v
        for at, v in values.items()
        if all(at[axes.index(a)] == w for a, w in where.items()) and (name in (at[-1], None))
    )


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize("by", ["all", "layer", "head", "pattern"])
def test_token_enrichment_equals_a_loop(by, sinks):
    received = run_like(sinks=sinks)
    paths = trajectories(received, RULE)
    table = token_enrichment(paths, by)
    seen, base, total = loop(paths, received, lambda t, b, k: [of_id(int(received.tokens[t, b, k]))])
    assert len(table) > 4
    for line in table.to_dict("records"):
        where = {a: line[a] - (4 if a == "layer" else 0) for a in ("batch", "layer", "head") if a in line}
        n = gather(total, None, **where) if total else 0
        assert line["sinks"] == gather(seen, line["class"], **where)
        expected = gather(base, line["class"], **where)
        assert line["share"] == pytest.approx(line["sinks"] / n)
        assert line["base"] == pytest.approx(expected / n)
        assert line["enrichment"] == pytest.approx(line["sinks"] / expected)
        assert line["sequences"] == (1 if by == "pattern" else 3)
        if by == "all":
            assert line["low"] <= line["enrichment"] <= line["high"]
    assert (table["class"] == "learned sink").any() == bool(sinks)


def test_shares_and_bases_add_up_to_one():
    table = token_enrichment(trajectories(run_like(seed=2), RULE))
    assert table["share"].sum() == pytest.approx(1)
    assert table["base"].sum() == pytest.approx(1)


def test_a_planted_preference_is_found_and_no_preference_is_one():
    received = run_like(seed=1, batch=24, steps=8, keys=40, noise=0.0)
    values = torch.rand(received.values.shape, generator=torch.Generator().manual_seed(5))
    full_stop = (received.tokens == 3)[:, :, None, None].expand(values.shape)
    values[full_stop & (torch.rand(values.shape) < 0.5)] = 20.0
    paths = trajectories(received_like(received, values), RULE)
    table = token_enrichment(paths).set_index("class")
    assert table.loc["punctuation", "share"] == 1
    assert table.loc["punctuation", "low"] > 3
    # No sink in the 23 prompts that have a word: the interval of 0 is not [0, 0], but up to Wilson's share of sinks
    # over the base.
    words = table.loc["words"]
    unseen = stats.binomtest(0, 23).proportion_ci(method="wilson").high
    assert (words["enrichment"], words["low"]) == (0, 0)
    assert words["high"] == pytest.approx(unseen / words["base"])
    random = torch.rand(values.shape, generator=torch.Generator().manual_seed(6))
    random[torch.rand(values.shape, generator=torch.Generator().manual_seed(7)) < 0.05] = 20.0
    none = token_enrichment(trajectories(received_like(received, random), RULE)).set_index("class")
    covered = [(line.low <= 1 <= line.high) for line in none.itertuples()]
    assert sum(covered) >= len(covered) - 1  # 95% intervals of seven classes


def received_like(received, values):
    fields = {
        name: getattr(received, name) for name in ("expected", "counted", "tokens", "masked", "layers", "tokenizer")
    }
    return Received(values=values, **fields)


def test_own_classes_need_no_tokenizer():
    received = run_like()
    bare = trajectories(
        Received(values=received.values, expected=received.expected, counted=received.counted,
                 tokens=received.tokens, masked=received.masked, layers=(4, 5)), RULE,
    )  # fmt: skip
    with pytest.raises(ValueError, match="give classes="):
        token_enrichment(bare)
    ours = token_enrichment(bare, classes=lambda token: "even" if token % 2 == 0 else "odd").set_index("class")
    theirs = token_enrichment(trajectories(received, RULE)).set_index("class")
    assert ours.loc["mask", "sinks"] == theirs.loc["mask", "sinks"]
    assert set(ours.index) == {"mask", "even", "odd"}
    stops = token_enrichment(trajectories(received, RULE), eos_token_ids=[3]).set_index("class")
    assert stops.loc["end of text", "sinks"] > theirs.loc["end of text", "sinks"]


@pytest.mark.parametrize("sinks", [0, 1])
def test_place_enrichment_equals_a_loop(sinks):
    received = run_like(seed=3, sinks=sinks)
    paths = trajectories(received, RULE)
    in_block, block = blocks_like(6, 20 - sinks)
    masked = received.masked

    def places(step, row, key):
        if key >= 20 - sinks:
            return ["learned sink"]
        if masked[step, row, key]:
            start, stop = block(step, row)
            return [
                "masked",
                *(["in the block"] if start <= key < stop else []),
                *(["after the block"] if key >= stop else []),
            ]
        return ["prompt"] if not masked[0, row, key] else ["written"]

    seen, base, _ = loop(paths, received, places)
    table = position_enrichment(paths, in_block=in_block).set_index("class")
    for name, line in table.iterrows():
        assert line["sinks"] == gather(seen, name)
        assert line["enrichment"] == pytest.approx(gather(seen, name) / gather(base, name))
    assert ("learned sink" in table.index) == bool(sinks)
    assert set(position_enrichment(paths)["class"]) == {
        "prompt",
        "written",
        "masked",
        *(["learned sink"] if sinks else []),
    }
    with pytest.raises(ValueError, match=r"in_block has shape \[2, 3, .*run.in_block"):
        position_enrichment(paths, in_block=in_block[:2])


@pytest.mark.parametrize("by", ["all", "head", "pattern"])
def test_without_sinks_the_tables_have_their_columns_and_no_line(by):
    received, rare = run_like(seed=3), AboveMean(1000.0)
    groups = {"all": [], "head": ["layer", "head"], "pattern": ["batch", "layer", "head"]}[by]
    wanted = [*groups, "class", "sinks", "share", "base", "enrichment", "low", "high", "sequences", "prompts"]
    for table in (
        token_enrichment(trajectories(received, rare), by, classes=lambda token: "odd" if token % 2 else "even"),
        position_enrichment(trajectories(received, rare), by),
    ):
        assert len(table) == 0
        assert list(table.columns) == wanted
    assert list(position_enrichment(trajectories(received, RULE), by).columns) == wanted


def test_of_the_last_steps_what_was_decided_before_is_written_and_no_prompt():
    received = run_like(seed=3, sinks=2)
    answer, late = received.masked[0, :, :-2], received.part(steps=slice(3, None))
    whole = position_enrichment(trajectories(received, RULE), answer=answer).set_index("class")
    assert whole.equals(position_enrichment(trajectories(received, RULE)).set_index("class"))
    paths = trajectories(late, RULE)
    table = position_enrichment(paths, answer=answer).set_index("class")

    def places(step, row, key):
        if key >= paths.canvas:
            return ["learned sink"]
        if late.masked[step, row, key]:
            return ["masked"]
        return ["written" if answer[row, key] else "prompt"]

    seen, base, _ = loop(paths, late, places)
    for name, line in table.iterrows():
        assert line["sinks"] == gather(seen, name)
        assert line["enrichment"] == pytest.approx(gather(seen, name) / gather(base, name))
    assert table.loc["prompt", "sinks"] < position_enrichment(paths).set_index("class").loc["prompt", "sinks"]
    with pytest.raises(ValueError, match=r"answer has shape \[2, 18\].*\[3, 18\].*run.answer"):
        position_enrichment(paths, answer=answer[:2])


@pytest.mark.parametrize("by", ["all", "head"])
def test_frontier_alignment_equals_a_loop(by):
    received = run_like(seed=4)
    paths = trajectories(received, RULE)
    in_block, block = blocks_like(6, 20)
    table = frontier_alignment(paths, by, in_block=in_block)
    masked, scored = received.masked.tolist(), (~received.values[:, :, 0, 0].isnan()).tolist()

    def references(step, row):
        now = masked[step][row]
        where = [k for k in range(20) if now[k]]
        content = [now[k] or scored[step][row][k] for k in range(20)]
        meet = [k for k in range(20) for other in (k - 1, k + 1)
                if 0 <= other < 20 and content[k] and content[other] and now[k] != now[other]]  # fmt: skip
        written = [k for k in where if step == 5 or not masked[step + 1][row][k]]
        start, stop = block(step, row)
        return {"leftmost mask": where[:1], "rightmost mask": where[-1:], "frontier": meet, "written now": written,
                "block start": [start], "block end": [stop - 1], "block border": [start, stop - 1]}  # fmt: skip

    for line in table.to_dict("records"):
        distances, chances, near, near_chance = [], [], [], []
        for step, row, layer, head in np.ndindex(*paths.main.shape):
            if by == "head" and (layer + 4, head) != (line["layer"], line["head"]):
                continue
            main, places = int(paths.main[step, row, layer, head]), references(step, row)[line["reference"]]
            if main < 0 or not places:
                continue
            keys = [k for k in range(20) if scored[step][row][k]]
            to = {k: min(abs(k - p) for p in places) for k in range(20)}
            distances.append(to[main])
            chances.append(sum(to[k] for k in keys) / len(keys))
            near.append(to[main] <= 1)
            near_chance.append(sum(to[k] <= 1 for k in keys) / len(keys))
        assert line["n"] == len(distances)
        assert line["distance"] == pytest.approx(sum(distances) / len(distances))
        assert line["chance"] == pytest.approx(sum(chances) / len(chances))
        assert line["ratio"] == pytest.approx(sum(distances) / sum(chances))
        assert line["within_1"] == pytest.approx(sum(near) / len(near))
        assert line["chance_within_1"] == pytest.approx(sum(near_chance) / len(near_chance))


@pytest.mark.parametrize(("follow", "reference"), [("left", "leftmost mask"), ("right", "rightmost mask")])
def test_a_sink_planted_on_the_frontier_is_aligned_with_it(follow, reference):
    steps, keys = 10, 30
    masked = torch.zeros(steps, 2, keys, dtype=torch.bool)
    values = torch.full((steps, 2, 1, 1, keys), 0.5)
    for step in range(steps):
        span = slice(8 + 2 * step, keys) if follow == "left" else slice(8, keys - 2 * step)
        masked[step, :, span] = True
        values[step, :, 0, 0, span.start if follow == "left" else span.stop - 1] = 20.0
    received = Received(
        values=values, expected=torch.ones(steps, 2, 1, 1, keys), counted=torch.full((steps, 2), keys),
        masked=masked, layers=(0,),
    )  # fmt: skip
    paths = trajectories(received, RULE)
    line = frontier_alignment(paths).set_index("reference").loc[reference]
    assert (line["distance"], line["within_1"], line["ratio"]) == (0, 1, 0)
    assert line["correlation"] == pytest.approx(1)
    drift = float(paths.summary("all")["drift"].item())
    assert drift == pytest.approx(2 if follow == "left" else -2)
    assert set(frontier_alignment(paths)["reference"]) == {
        "leftmost mask",
        "rightmost mask",
        "frontier",
        "written now",
    }


def test_sinks_split_by_query_class_are_found():
    """Head 0: masked and written queries have sinks of their own; head 1: the same sink; head 2: masked alone."""
    values = torch.full((7, 2, 1, 3, 24), 0.5)
    first, second = values.clone(), values.clone()
    first[..., 0, 5], second[..., 0, 9] = 10, 10
    first[..., 1, 5], second[..., 1, 5] = 10, 10
    first[..., 2, 7] = 10
    first[5:] = torch.nan  # the masks run out
    fields = {"expected": torch.ones(7, 2, 1, 1, 24), "counted": torch.full((7, 2), 24), "layers": (9,)}
    table = compare_query_classes(
        Received(values=first, queries="masked", **fields), Received(values=second, queries="unmasked", **fields)
    )
    assert table["head"].tolist() == [0, 1, 2]
    assert table["layer"].tolist() == [9] * 3
    assert table["differ"].tolist()[:2] == [1, 0]
    assert math.isnan(table["differ"][2])
    assert table["disjoint"].tolist()[:2] == [1, 0]
    assert table["jaccard"].tolist() == [0, 1, 0]
    assert table["only_masked"].tolist() == [0, 0, 1]
    assert table["only_unmasked"].tolist() == [0, 0, 0]
    assert table["both"].tolist() == [10, 10, 0]
    assert table["steps"].tolist() == [10] * 3
    with pytest.raises(ValueError, match="'unmasked' and 'masked'"):
        compare_query_classes(
            Received(values=second, queries="unmasked", **fields),
            Received(values=first, queries="masked", **fields),
        )


@pytest.mark.parametrize("ended", [False, True])
def test_consistency_equals_a_loop_over_pairs(ended):
    received = run_like(seed=8, batch=4)
    if ended:  # row 3 after two steps, row 0 after four: they have no scores then
        received.values[2:, 3] = received.values[4:, 0] = torch.nan
    paths = trajectories(received, RULE)
    table = sink_consistency(paths)
    for line in table.to_dict("records"):
        layer, head = line["layer"] - 4, line["head"]
        kinds = [str(paths.kinds[row, layer, head]) for row in range(4)]
        pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
        assert line["same_kind"] == pytest.approx(sum(kinds[a] == kinds[b] for a, b in pairs) / 6)
        position, token, chance = [], [], []
        for step in range(6):
            for a, b in pairs:
                p, q = (int(paths.main[step, row, layer, head]) for row in (a, b))
                if p < 0 or q < 0:
                    continue
                position.append(p == q)
                token.append(received.tokens[step, a, p] == received.tokens[step, b, q])
                # Two random sequences of this step that have scores, two random keys of theirs.
                alive = [(x, y) for x, y in pairs if not received.values[step, [x, y]].isnan().all(-1).any()]
                chance.append(
                    sum(
                        float(
                            (received.tokens[step, x][:, None] == received.tokens[step, y])[xs][:, ys]
                            .double()
                            .mean()
                        )
                        for x, y in alive
                        for xs, ys in [[~received.values[step, r, 0, 0].isnan() for r in (x, y)]]
                    )
                    / len(alive)
                )
        assert line["n"] == len(position)
        assert line["same_position"] == pytest.approx(sum(position) / len(position))
        assert line["same_token"] == pytest.approx(float(sum(token)) / len(token))
        assert line["chance_token"] == pytest.approx(sum(chance) / len(chance))


def test_the_same_sinks_in_every_sequence_are_consistent():
    received, _ = planted(16, 24, batch=3)
    table = sink_consistency(trajectories(received, RULE))
    assert (table["same_kind"] == 1).all()
    assert table["same_position"].dropna().tolist() == [1.0] * 7
    one, _ = planted(16, 24, batch=1)
    with pytest.raises(ValueError, match="at least two"):
        sink_consistency(trajectories(one, RULE))


def test_masks_that_an_ended_row_keeps_are_no_frontier():
    # Row 1 ends after step 1 (`eot_token`): its last two masks stay, and its steps 2 and 3 decide nothing.
    masked = torch.zeros(4, 2, 8, dtype=torch.bool)
    open_at = [((4, 5, 6, 7), (4, 5, 6, 7)), ((5, 6, 7), (5, 6, 7)), ((6, 7), (6, 7)), ((7,), (6, 7))]
    for step, (whole, ended) in enumerate(open_at):
        masked[step, 0, list(whole)] = True
        masked[step, 1, list(ended)] = True
    tokens = torch.where(masked, 63, torch.arange(8))
    final = torch.arange(8).repeat(2, 1)
    final[1, 6:] = 63
    values = torch.full((4, 2, 1, 1, 8), 0.5)
    values[..., 4] = 6.0
    received = Received(
        values, torch.ones(4, 2, 1, 1, 8), torch.full((4, 2), 8), tokens=tokens, masked=masked, final_tokens=final
    )
    table = frontier_alignment(trajectories(received, RULE)).set_index("reference")
    # Row 0 counts at its four steps, row 1 at the two that write something.
    assert table["n"].to_dict() == {"leftmost mask": 6, "rightmost mask": 6, "frontier": 6, "written now": 6}
    # The sink stays at 4; written: 4, 5, 6, 7 in row 0 and 4, 5 in row 1.
    assert table.loc["written now", "distance"] == pytest.approx((0 + 1 + 2 + 3 + 0 + 1) / 6)
    assert table.loc["leftmost mask", "distance"] == pytest.approx((0 + 1 + 2 + 3 + 0 + 1) / 6)
    assert table.loc["rightmost mask", "distance"] == 3


def test_the_frontier_of_an_ar_row_that_ends_early_is_that_of_the_row_alone():
    model, prompts = tiny("causal"), [[5, 6, 7, 8], [9, 10, 11, 12]]
    model.config.eos_token_id = int(denoise(model, prompts, gen_length=24).tokens[1, 20])
    both, alone = (record(model, each, [ReceivedAttention()], gen_length=24) for each in (prompts, prompts[1:]))
    assert both.run.row_steps.tolist() == [24, alone.run.steps] == [24, 17]
    for steps in (slice(None), slice(5, 12)):
        pair = [whole.select(step=steps, batch=[-1]) for whole in (both, alone)]
        found, expected = (frontier_alignment(trajectories(r, TopK(1)), unmasked=r.run.unmasked) for r in pair)
        pd.testing.assert_frame_equal(found, expected)
        assert expected.set_index("reference").loc["rightmost mask", "n"] > 0


def test_of_a_part_of_a_run_written_now_is_what_its_steps_decode():
    model = tiny("llada")
    run = denoise(model, [[1, 2, 3, 4], [5, 6, 7]], steps=8, gen_length=8, seed=[1, 2])
    recording = rerun(model, run, [ReceivedAttention()])
    whole = trajectories(recording, RULE)
    assert frontier_alignment(whole, unmasked=run.unmasked).equals(frontier_alignment(whole))
    steps = [1, 4, 6]
    part = recording.select(step=steps)
    paths = trajectories(part, RULE)
    table = frontier_alignment(paths, unmasked=part.run.unmasked).set_index("reference")
    distances = []
    for place, step in enumerate(steps):
        for row, layer, head in np.ndindex(*paths.main.shape[1:]):
            main = int(paths.main[place, row, layer, head])
            now = [
                k for k in range(run.tokens.shape[1])
                if int(run.canvases[step, row, k]) != int(run.canvases[step + 1, row, k])
            ]  # fmt: skip
            if main >= 0:
                distances.append(min(abs(main - k) for k in now))
    assert table.loc["written now", "n"] == len(distances) > 0
    assert table.loc["written now", "distance"] == pytest.approx(sum(distances) / len(distances))
    with pytest.raises(ValueError, match=r"unmasked has shape \[8, 2, 12\].*\[3, 2, 12\].*part.run.unmasked"):
        frontier_alignment(paths, unmasked=run.unmasked)


def test_a_step_of_a_part_that_decodes_nothing_counts_while_its_row_is_not_done():
    masked = torch.zeros(2, 2, 8, dtype=torch.bool)
    masked[:, :, 6:] = True  # row 0 gets its last tokens after the part, row 1 never
    tokens = torch.where(masked, 63, torch.arange(8))
    final = torch.arange(8).repeat(2, 1)
    final[1, 6:] = 63
    values = torch.full((2, 2, 1, 1, 8), 0.5)
    values[..., 4] = 6.0
    received = Received(
        values, torch.ones(2, 2, 1, 1, 8), torch.full((2, 2), 8), tokens=tokens, masked=masked, final_tokens=final
    )
    table = frontier_alignment(trajectories(received, RULE), unmasked=torch.zeros_like(masked))
    assert table.set_index("reference")["n"].to_dict() == {
        "leftmost mask": 2,
        "rightmost mask": 2,
        "frontier": 2,
        "written now": 0,
    }


@pytest.mark.parametrize(
    ("family", "config", "settings"),
    [
        ("llada", {"sampler": "dllm_var"}, {"threshold": 1.0, "stop_tokens": [], "use_cache": False}),
        ("diffusion_gemma", {}, {"steps_per_block": 4, "stability_threshold": 4, "seed": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:block_length is 4")
def test_blocks_to_come_are_no_references(family, config, settings):
    """The steps of the first block say the same, whatever blocks the answer may grow by afterwards."""
    model = tiny(family, **config)
    tables = []
    for length in (4, 12):
        run = denoise(model, [[1, 2, 3, 4, 5], [6, 7]], gen_length=length, block_length=4, **settings)
        run = run.first_steps(4)
        paths = trajectories(find_sinks(received_over_steps(model, run, min_viewers=1), TopK(1)))
        tables.append(frontier_alignment(paths, unmasked=run.unmasked))
    one, two = (table.set_index("reference")[["distance", "chance", "within_1", "n"]] for table in tables)
    assert one.loc["rightmost mask", "chance"] < 6  # of at most 9 positions; 11 or more to the end of the canvas
    pd.testing.assert_frame_equal(one, two)
