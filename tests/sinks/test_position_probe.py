"""position_or_token with models whose sinks are known to follow the token, or to stay at the position."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from dlm_lens.sampling import denoise
from dlm_lens.sinks import (
    AboveMean,
    PositionOrToken,
    Received,
    TopK,
    find_sinks,
    position_or_token,
    received_over_steps,
)
from dlm_lens.sinks.analysis import position_probe as module
from dlm_lens.statistics import SHARE_BOUNDS, ratio_by_prompt
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17, 20, 8], [6, 2, 40, 9, 13]]


def scores_by(rule):
    """In place of a replay: scores whose sink is where `rule(tokens)` says, [step, batch, key] -> bool."""

    def received(model, run, *, min_viewers):
        tokens = run.canvases[:-1]
        sink = rule(tokens) & run.attention_mask
        values = torch.where(sink, 12.0, 0.5).masked_fill(~run.attention_mask, torch.nan)
        values = values[:, :, None, None].expand(-1, -1, 2, 1, -1).clone()
        return Received(
            values=values,
            expected=torch.ones(*tokens.shape[:2], 1, 1, tokens.shape[2]),
            counted=run.attention_mask.sum(-1).expand(len(tokens), -1),
            tokens=tokens,
            layers=(0, 3),
        )

    return received


@pytest.fixture(scope="module")
def case():
    model = tiny("llada")
    return model, denoise(model, PROMPTS, steps=4, gen_length=8, block_length=8, seed=1)


def shares(found):
    return {line["change"]: line for line in found.summary().to_dict("records")}


def test_a_sink_that_follows_its_token(case, monkeypatch):
    monkeypatch.setattr(module, "received_over_steps", scores_by(lambda tokens: tokens == 9))
    result = position_or_token(*case)
    assert result.detector == AboveMean(3.0)
    found = shares(result)
    assert (found["swap"]["token"], found["shift"]["token"]) == (1, 1)
    assert found["control"]["position"] == 1
    assert found["swap"]["n"] == found["control"]["n"] == 2 * 4 * 2  # layers x steps x sequences, one sink each


@pytest.mark.parametrize(("level", "axes", "patterns"), [("layer", ["layer"], 2), ("model", [], 1)])
def test_sinks_of_the_mean_pattern_are_followed_by_layer_or_once(case, monkeypatch, level, axes, patterns):
    monkeypatch.setattr(module, "received_over_steps", scores_by(lambda tokens: tokens == 9))
    found = position_or_token(*case, AboveMean(3.0), level=level)
    assert [name for name in found.table() if name in ("layer", "head")] == axes
    by_change = shares(found)
    assert (by_change["swap"]["token"], by_change["shift"]["token"], by_change["control"]["position"]) == (1, 1, 1)
    assert by_change["swap"]["n"] == patterns * 4 * 2  # patterns x steps x sequences


def test_rows_of_one_prompt_are_drawn_together():
    outcomes = [["token", "token"], ["position", "position"], ["token", "position"]]
    trials = pd.DataFrame(
        [{"batch": row, "change": "swap", "outcome": one} for row in range(3) for one in outcomes[row]]
    )
    found = PositionOrToken(trials, TopK(1), "head", torch.tensor([0, 0, 1]))
    (line,) = found.summary().to_dict("records")
    _, low, high = ratio_by_prompt([[2.0], [1.0]], [[4.0], [2.0]], bounds=SHARE_BOUNDS)
    assert (line["token"], line["token_low"], line["token_high"]) == (0.5, float(low[0]), float(high[0]))
    assert (line["n"], line["sequences"], line["prompts"]) == (6, 3, 2)
    (alone,) = replace(found, row_prompts=None).summary().to_dict("records")
    assert (alone["token"], alone["prompts"]) == (0.5, 3)
    assert alone["token_low"] < line["token_low"]


def test_a_sink_that_stays_at_its_position(case, monkeypatch):
    monkeypatch.setattr(
        module, "received_over_steps", scores_by(lambda t: (torch.arange(t.shape[-1]) == 10).expand(t.shape))
    )
    found = shares(position_or_token(*case, AboveMean(3.0)))
    assert (found["swap"]["position"], found["shift"]["position"], found["control"]["position"]) == (1, 1, 1)


def test_a_sink_of_token_and_position_together_vanishes(case, monkeypatch):
    def both(tokens):
        return (tokens == 9) & (torch.arange(tokens.shape[-1]) == 1)

    monkeypatch.setattr(module, "received_over_steps", scores_by(both))
    found = position_or_token(*case, AboveMean(3.0))
    assert shares(found)["swap"]["neither"] == 1
    assert found.table()["batch"].unique().tolist() == [0]  # the other prompt has its 9 elsewhere
    by_layer = found.summary(by=["layer"])
    assert sorted(by_layer["layer"].unique()) == [0, 3]


def test_changed_canvases_move_what_they_say(case, monkeypatch):
    model, run = case
    seen = []
    rule = scores_by(lambda tokens: tokens == 9)

    def spy(model, run, *, min_viewers):
        seen.append(run)
        return rule(model, run, min_viewers=min_viewers)

    monkeypatch.setattr(module, "received_over_steps", spy)
    found = position_or_token(model, run, steps=[0, -1]).table()
    for row in (0, 1):
        before, after = seen[2 * row], seen[2 * row + 1]
        assert torch.equal(before.canvases[0, 0], run.canvases[0, row])
        assert torch.equal(before.canvases[1, 0], run.canvases[3, row])
        lines = found[(found.batch == row) & (found.layer == 0)].reset_index()
        assert len(lines) == after.steps == 6
        for number, line in lines.iterrows():
            old, new = run.canvases[line.step, row].tolist(), after.canvases[number, 0].tolist()
            masked, mask = run.masked[line.step, row].tolist(), after.masked[number, 0].tolist()
            p, q = line.canvas_position, line.canvas_to
            assert (p - line.position, q - line.to) == (run.padding[row], run.padding[row])
            assert old[p] == 9 != old[q]
            if line.change == "swap":
                wanted = {p: q, q: p}
                assert new == [old[wanted.get(i, i)] for i in range(len(old))]
                assert mask == [masked[wanted.get(i, i)] for i in range(len(old))]
            elif line.change == "shift":
                rest = old[:p] + old[p + 1 :]
                assert new == [*rest[:q], old[p], *rest[q:]]
            else:
                changed = [i for i in range(len(old)) if new[i] != old[i]]
                assert p not in changed
                assert sorted(new) == sorted(old)
                assert new[p] == old[p]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llada", "sink_qwen", "causal"])
def test_real_models_run_through(family):
    model = tiny(family)
    extra = {} if family == "causal" else {"steps": 4}
    run = denoise(model, PROMPTS, gen_length=8, seed=[1, 2], **extra)
    found = position_or_token(model, run, AboveMean(0.05), steps=[-1], min_viewers=3)
    again = position_or_token(model, run, AboveMean(0.05), steps=[-1], min_viewers=3)
    assert found.table().equals(again.table())
    assert (found.table()["position"] < run.tokens.shape[1]).all()
    summary = found.summary()
    assert summary[["token", "position", "both", "neither"]].sum(axis=1).tolist() == pytest.approx(
        [1] * len(summary)
    )
    # No sink, no trial, and a sentence.
    empty = position_or_token(model, run, AboveMean(1e6), steps=[0])
    assert len(empty.table()) == 0
    with pytest.raises(ValueError, match="no trial"):
        empty.summary()


def test_a_step_that_is_not_there(case):
    with pytest.raises(ValueError, match="step 4 of 4"):
        position_or_token(*case, steps=[4])


@pytest.mark.parametrize("family", ["mdlm", "sedd", "duo", "gidd_dit", "uniform_qwen", "dreamon"])
def test_a_canvas_is_read_at_the_noise_level_of_its_step_and_without_its_room(family):
    model = tiny(family, seed=2)
    settings = {} if family == "dreamon" else {"steps": 5}
    run = denoise(model, ["w1 w2 w3 w4 w5 w6 w7", "w7 w8 w9"], gen_length=8, seed=[1, 2], **settings)
    for steps in ([3], [1, run.steps - 1]):
        found = position_or_token(model, run, TopK(1), steps=steps, min_viewers=1).table()
        assert len(found) > len(run.canvases)  # more trials than the run has steps
        main = find_sinks(received_over_steps(model, run, min_viewers=1), TopK(1)).main()
        for line in found.itertuples():
            assert main[line.step, line.batch, line.layer, line.head] == line.canvas_position
