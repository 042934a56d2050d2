"""Token smearing against loops over every position, and on planted predictions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_lens.probes import TokenSmearing, token_smearing
from dlm_lens.probes.smearing import PLACES, Results
from dlm_lens.sampling import DenoisingRun, StoredRun, denoise
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"steps": 5, "gen_length": 10, "temperature": 0.7}),
    "guided": ("llada", {"steps": 4, "gen_length": 8, "cfg_scale": 1.0}),
    "shift": ("dream", {"steps": 4, "gen_length": 9, "temperature": 0.5}),
    "blocks": ("sdar", {"gen_length": 8, "block_length": 4, "steps": 8}),
    "cache": ("llada", {"gen_length": 8, "block_length": 4, "steps": 8, "cache": "dual"}),
}


def check_by_loops(found: TokenSmearing, run: DenoisingRun, logits: Callable[[int], Any], mask: int) -> None:
    """Compare with a loop over every pair of positions, and over every order of the answer's tokens."""
    final, unwritten = run.tokens, run.masked[-1]
    for step, row in itertools.product(range(run.steps), range(len(final))):
        where, likely = logits(step)[row]
        counts, chance = dict.fromkeys(("here", "near", "far", "nowhere"), 0), 0.0
        for j, place in enumerate(where):
            token = int(final[row, place])
            others = [i for i, other in enumerate(where) if int(final[row, other]) != token]
            close = [i for i in others if abs(where[i] - place) <= found.radius]
            mean = sum(float(likely[i, token]) for i in others) / len(others) if others else math.nan
            wanted = (float(likely[j, token]), sum(float(likely[i, token]) for i in close), len(close) * mean)
            got = [float(getattr(found, name)[step, row, place]) for name in ("own", "near", "near_by_chance")]
            assert got == pytest.approx(wanted, rel=1e-5, nan_ok=True)
            answer = [p for p in range(final.shape[1]) if bool(run.masked[0][row, p] & ~unwritten[row, p])]
            for token in (likely[j] > found.threshold).nonzero().flatten().tolist():
                assert token != mask
                at = [abs(p - place) for p in answer if int(final[row, p]) == token]
                kind = (
                    "here"
                    if 0 in at
                    else "near"
                    if any(d <= found.radius for d in at)
                    else "far"
                    if at
                    else "nowhere"
                )
                counts[kind] += 1
                if kind == "here":
                    continue
                total = [p for p in answer if p != place]
                inside = sum(abs(p - place) <= found.radius for p in total)
                number = sum(int(final[row, p]) == token for p in total)
                chance += 1 - math.comb(len(total) - number, inside) / math.comb(len(total), inside)
        assert found.places[step, row].tolist() == list(counts.values())
        assert float(found.near_tokens_by_chance[step, row]) == pytest.approx(chance, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_a_loop_over_the_positions(name: str) -> None:
    family, settings = RUNS[name]
    model = tiny(family)
    run = denoise(model, PROMPTS, seed=[3, 4], **settings)
    found = token_smearing(model, run, radius=2, threshold=0.04)
    stored, mask = StoredRun(model, run), model.config.mask_token_id
    # An independent way to the logits: those that the run itself saw.
    seen: list[Tensor] = []
    denoise(
        model, PROMPTS, seed=[3, 4], on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **settings
    )

    def rows(step: int) -> list[tuple[list[int], Tensor]]:
        values = seen[step].double()
        values[..., mask] = -torch.inf
        predicted = stored.predicted(step)[:, : values.shape[1]]  # with blocks, up to the block's end
        return [
            (predicted[row].nonzero().flatten().tolist(), values[row, predicted[row]].softmax(-1))
            for row in range(len(predicted))
        ]

    assert found.places[..., 1:].sum() > 0
    check_by_loops(found, run, rows, mask)


def planted(likely: Tensor, final: list[int], radius: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The measures of one step that predicts all positions of an answer."""
    length = len(final)
    run = DenoisingRun(
        canvases=torch.tensor([[[99] * length], [final]]),
        masked=torch.tensor([[[True] * length], [[False] * length]]),
        proposals=torch.tensor([[final]]),
        confidence=torch.zeros(1, 1, length),
        unmasked=torch.ones(1, 1, length, dtype=torch.bool),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
        prompt_length=0,
        spans=((0, length),),
        blocks=(0,),
        settings={},
    )
    results = Results(run, radius)
    where = torch.arange(length)
    at, token = (likely > 0.03).nonzero().unbind(-1)
    return results.masses_of(0, 0, where, likely[:, torch.tensor(final)]), *results.places_of(0, 0, at, token)


def test_a_token_that_is_spread_over_neighbours_is_found() -> None:
    final, length = list(range(10)), 10
    likely = torch.full((length, length), 1e-3, dtype=torch.float64)
    for place in range(length):  # every token a third here, a third on either side
        for neighbour in (place - 1, place, place + 1):
            if 0 <= neighbour < length:
                likely[neighbour, place] = 1 / 3
    masses, counts, _ = planted(likely, final, radius=1)
    assert torch.allclose(masses["near"][1:-1], torch.tensor(2 / 3, dtype=torch.float64))
    # Two of nine other positions, whose mean is (2/3 + 7e-3) / 9.
    assert torch.allclose(masses["near_by_chance"][1:-1], torch.tensor(2 * (2 / 3 + 7e-3) / 9, dtype=torch.float64))
    assert counts.tolist() == [10, 18, 0, 0]


def test_a_token_that_is_expected_anywhere_is_not_smeared() -> None:
    likely = torch.full((8, 8), 1 / 8, dtype=torch.float64)
    masses, counts, chance = planted(likely, list(range(8)), radius=2)
    assert torch.allclose(masses["near"], masses["near_by_chance"])
    assert counts.sum() == 64
    # Every token is likely at every position: the number near is the number expected.
    assert int(counts[1]) == pytest.approx(float(chance))


def test_the_summaries_are_means_over_prompts() -> None:
    model = tiny("llada")
    run = denoise(model, PROMPTS, seed=[3, 4], steps=4, gen_length=8)
    found = token_smearing(model, run, radius=2)
    defined = found.near_by_chance.isfinite() & found.own.isfinite()
    difference = (found.near - found.near_by_chance)[defined].double().mean()
    assert found.excess.value == pytest.approx(float(difference))
    assert found.excess.low <= found.excess.value <= found.excess.high
    # Sums over four positions may exceed 1, and an excess may be negative: neither interval is cut there.
    less = replace(found, near=found.near + 1.5, near_by_chance=found.near_by_chance + 3.5)
    assert less.excess.value == pytest.approx(found.excess.value - 2, abs=1e-6)
    assert less.excess.low == pytest.approx(found.excess.low - 2, abs=1e-6)
    assert less.excess.high == pytest.approx(found.excess.high - 2, abs=1e-6)
    assert less.mean("near").low > 1.4
    assert less.mean("near").high < 4.5
    assert less.mean("near_by_chance").low <= less.mean("near_by_chance").value <= less.mean("near_by_chance").high
    counts = found.places.sum((0, 1)).double()
    assert found.share("near").value == pytest.approx(float(counts[1] / counts.sum()))
    table = found.table()
    assert [table[f"tokens_{place}"].sum() for place in PLACES] == counts.tolist()
    assert table["predicted"].tolist() == defined.sum((1, 2)).tolist()
    for name in ("own", "near", "near_by_chance"):
        values = getattr(found, name)
        means = [float(values[step][defined[step]].mean()) for step in range(run.steps)]
        assert table[name].tolist() == pytest.approx(means, rel=1e-5)


def test_a_position_that_stays_masked_has_no_token_to_be_smeared() -> None:
    model = tiny("llada")
    run = denoise(model, PROMPTS, seed=[3, 4], steps=4, gen_length=8)
    left = run.masked.clone()
    left[-1, :, -2:] = True
    run = replace(run, masked=left, canvases=run.canvases.masked_fill(left, model.config.mask_token_id))
    found = token_smearing(model, run)
    for name in ("own", "near", "near_by_chance"):
        values = getattr(found, name)
        assert values[..., -2:].isnan().all()
        assert values[0, :, -8:-2].isfinite().all()


def test_a_row_of_one_decided_token_expects_no_token_nearby() -> None:
    model = tiny("sdlm")
    prompts = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40], [7, 7, 12, 50, 7]]
    run = denoise(model, prompts, seed=1, gen_length=8)
    assert 1 in (run.answer & ~run.masked[-1]).sum(-1)
    found = token_smearing(model, run)
    # In the last row the answer has no other position: 1 - C(0, 0) / C(0, 0) = 0.
    wanted = [[5.0, 9.0, 3.0], [5.0, 7.0, 0.0], [0.0, 3.0, 0.0]]
    torch.testing.assert_close(found.near_tokens_by_chance, torch.tensor(wanted))
    assert found.table()["tokens_near_by_chance"].tolist() == pytest.approx([17, 12, 3])


def test_what_cannot_be_asked_is_refused() -> None:
    model, causal = tiny("llada"), tiny("causal")
    run = denoise(model, PROMPTS, steps=2, gen_length=4)
    with pytest.raises(ValueError, match=r"threshold is 1\.5; it must be a probability"):
        token_smearing(model, run, threshold=1.5)
    with pytest.raises(ValueError, match="radius is 0; it must be a whole number of at least 1"):
        token_smearing(model, run, radius=0)
    with pytest.raises(ValueError, match="predicts one position"):
        token_smearing(causal, denoise(causal, PROMPTS, gen_length=3))
    found = token_smearing(model, run)
    with pytest.raises(ValueError, match="place is 'there'; it must be one of here, near, far, nowhere"):
        found.share("there")
    with pytest.raises(ValueError, match="name is 'far'"):
        found.mean("far")
