"""The order of decisions against loops over pairs, and for orders that are known."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.probes import decision_order
from dlm_lens.sampling import DenoisingRun, denoise
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS


def run_of(steps: list[int], edits: dict[int, int] | None = None) -> DenoisingRun:
    """A run that decides position i of an answer at steps[i], and at step t rewrites the position edits[t]."""
    length, total, edits = len(steps), max([*steps, *(edits or {})]) + 1, edits or {}
    decided = torch.tensor(steps)
    masked = torch.stack([decided >= step for step in range(total + 1)])[:, None]
    unmasked = torch.stack([decided == step for step in range(total)])[:, None]
    canvases = torch.where(masked, 99, torch.arange(length))
    revised = torch.zeros_like(unmasked)
    for step, place in edits.items():
        revised[step, 0, place] = True
        held = canvases[: step + 1, 0, place]
        held[held != 99] = 50  # another token until then
    return DenoisingRun(
        canvases=canvases,
        masked=masked,
        proposals=canvases[1:],
        confidence=torch.zeros(unmasked.shape),
        unmasked=unmasked,
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        prompt_length=0,
        spans=((0, length),) * total,
        blocks=(0,) * total,
        settings={},
        revised=revised,
    )


@pytest.mark.parametrize(
    ("steps", "tau", "pairs"),
    [
        ([0, 1, 2, 3], 1.0, 6),
        ([3, 2, 1, 0], -1.0, 6),
        ([0, 0, 1, 1], 1.0, 4),  # pairs of one step do not count
        ([1, 0, 3, 2], (4 - 2) / 6, 6),
        ([0, 0, 0], math.nan, 0),
    ],
)
def test_orders_that_are_known(steps: list[int], tau: float, pairs: int) -> None:
    found = decision_order(run_of(steps))
    assert float(found.tau) == pytest.approx(tau, nan_ok=True)
    assert int(found.pairs) == pairs
    assert found.step.tolist() == [steps]
    assert int(found.rewrites.sum()) == int(found.retracted.sum()) == 0


def test_a_token_that_is_replaced_after_its_right_neighbour_is_retracted() -> None:
    # Position 0 is rewritten at step 3, when 1 and 2 are decided; position 2 at step 4, with nothing to its right.
    found = decision_order(run_of([0, 1, 2], edits={3: 0, 4: 2}))
    assert found.retracted.tolist() == [[True, False, False]]
    assert found.rewrites.tolist() == [[1, 0, 1]]
    # The last write counts: position 0 at step 3, after 1 and before 2.
    assert found.step.tolist() == [[3, 1, 4]]
    assert float(found.tau) == pytest.approx((2 - 1) / 3)
    # What is open does not follow: position 1 is decided after position 0 was rewritten.
    assert not decision_order(run_of([0, 2], edits={1: 0})).retracted.any()


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"steps": 6, "gen_length": 12, "temperature": 0.7}),
    "semi-autoregressive": ("llada", {"steps": 6, "gen_length": 12, "block_length": 4, "temperature": 0.7}),
    "blocks of the text": ("sdar", {"gen_length": 8, "block_length": 4, "steps": 8}),
    "editing": ("llada2", {"gen_length": 8, "block_length": 4, "threshold": 0.1}),
    "causal": ("causal", {"gen_length": 6}),
}


@pytest.mark.parametrize("within", ["answer", "block"])
@pytest.mark.parametrize("name", RUNS)
def test_tau_is_that_of_a_loop_over_the_pairs(name: str, within: Any) -> None:
    family, settings = RUNS[name]
    run = denoise(tiny(family), PROMPTS, seed=[3, 4], **settings)
    found = decision_order(run, within=within)
    for row in range(len(run.tokens)):
        answer = (run.masked[0, row] & ~run.masked[-1, row]).nonzero().flatten().tolist()
        written = {
            p: max(t for t in range(run.steps) if run.unmasked[t, row, p] | run.revised[t, row, p]) for p in answer
        }
        block = {p: next(b for t, b in enumerate(run.blocks) if run.in_block[t, row, p]) for p in answer}
        signs = [
            (written[j] > written[i]) - (written[j] < written[i])
            for i, j in itertools.combinations(answer, 2)
            if within == "answer" or block[i] == block[j]
        ]
        count = sum(map(abs, signs))
        assert int(found.pairs[row]) == count
        assert float(found.tau[row]) == pytest.approx(sum(signs) / count if count else math.nan, nan_ok=True)
    if name == "causal":
        assert found.tau.tolist() == [1.0, 1.0]
    assert len(found.table()) == len(run.tokens)


def test_the_blocks_of_a_sampler_order_the_answer() -> None:
    settings: dict[str, Any] = {
        "steps": 12,
        "gen_length": 12,
        "block_length": 2,
        "temperature": 0.7,
        "seed": [3, 4],
    }
    run = denoise(tiny("llada"), PROMPTS, **settings)
    answer, block = decision_order(run), decision_order(run, within="block")
    assert bool((answer.tau > 0.6).all())
    assert block.pairs.tolist() == [6, 6]
    assert bool((block.tau < 1).any())


def test_the_mean_is_over_rows_that_have_a_tau() -> None:
    found = decision_order(run_of([0, 1, 2]))
    assert found.mean.value == 1.0
    assert math.isnan(replace(found, tau=torch.tensor([math.nan])).mean.value)


def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the run is a str; give the DenoisingRun that dlm_lens.denoise returned"):
        decision_order("run")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="within is 'row'"):
        decision_order(run_of([0]), within="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tau"):
        replace(decision_order(run_of([0])), tau=torch.zeros(3))


def test_what_is_written_after_a_row_s_end_is_no_decision() -> None:
    model = dl.load("toy-ar")
    prompts = ["tom has 5 apples . tom buys 4 more . how many apples ? :", "how many ? :"]
    both, alone = (dl.denoise(model, given, gen_length=16) for given in (prompts, prompts[:1]))
    steps = both.row_steps.tolist()
    assert steps[0] == alone.steps < steps[1] == both.steps
    assert bool((both.last_written[0] >= steps[0]).any())  # the batch writes the row on
    found, wanted = (decision_order(run) for run in (both, alone))
    assert found.pairs.tolist()[0] == wanted.pairs.tolist()[0] == steps[0] * (steps[0] - 1) // 2
    assert found.pairs.tolist()[1] == steps[1] * (steps[1] - 1) // 2
    assert found.step[0].tolist() == [step if step < steps[0] else -1 for step in both.last_written[0].tolist()]


@pytest.mark.parametrize("family", ["llada", "open_dcoder"])
@pytest.mark.parametrize("steps", [[0, 1, 2], [3, 4, 5], [1, 4]])
def test_of_a_part_the_positions_count_that_its_steps_decide(family: str, steps: list[int]) -> None:
    settings: dict[str, Any] = {"steps": 6, "gen_length": 12, "temperature": 0.7, "seed": [3, 4]}
    rec = dl.record(tiny(family), PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **settings)
    part = rec.select(step=steps).run
    found = decision_order(part)
    for row in range(len(part.tokens)):
        wrote = (part.unmasked | part.revised)[:, row] & ~part.open[-1, row]
        last = {place: int(wrote[:, place].nonzero().max()) for place in wrote.any(0).nonzero().flatten().tolist()}
        signs = [(last[j] > last[i]) - (last[j] < last[i]) for i, j in itertools.combinations(sorted(last), 2)]
        count = sum(map(abs, signs))
        assert int(found.pairs[row]) == count
        assert float(found.tau[row]) == pytest.approx(sum(signs) / count if count else math.nan, nan_ok=True)
        expected = [last.get(place, -1) for place in range(part.tokens.shape[1])]
        assert found.step[row].tolist() == expected
