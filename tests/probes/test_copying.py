"""`retrieval_heads` against recorded patterns and loops, and a planted copying head."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext, attach_hooks, tiled
from dlm_lens.probes import retrieval_heads
from dlm_lens.probes.copying import Decision, _measured, find_decisions
from dlm_lens.recording import AttentionPattern, rerun
from dlm_lens.sampling import DenoisingRun
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 5, 3, 17, 9, 8, 30, 31], [6, 2, 40, 2]]


def decisions_of(
    run: DenoisingRun, shifted: bool, special: set[int]
) -> list[tuple[int, int, int, list[int], dict]]:
    """Step, row, query, positions of copies, and region -> its copies and positions, by loops over the canvases."""
    found = []
    for step in range(run.steps):
        for row in range(len(run.tokens)):
            canvas, content = run.canvases[step, row].tolist(), run.attention_mask[row].tolist()
            for place in range(len(canvas)):
                if not bool(run.unmasked[step, row, place]):
                    continue
                token = int(run.canvases[step + 1, row, place])
                visible = [
                    j for j in range(len(canvas))
                    if content[j] and not run.masked[step, row, j] and j != place and canvas[j] not in special
                ]  # fmt: skip
                regions = {
                    name: [j for j in visible if bool(run.masked[0, row, j]) == name] for name in (False, True)
                }
                copies, others = [], {}
                for name, members in regions.items():
                    same = [j for j in members if canvas[j] == token]
                    rest = [j for j in members if canvas[j] != token]
                    if same and rest:
                        copies += same
                        others[name] = (len(same), members)
                if copies and token not in special:
                    found.append((step, row, place - 1 if shifted else place, copies, others))
    return found


CASES: list[Any] = [("dream", {"steps": 4}), ("diffugpt", {"steps": 4}), ("causal", {})]
MORE = [("llada", {"steps": 4}), ("sdar", {"block_length": 4, "steps": 8})]


@pytest.mark.parametrize(
    ("family", "settings"), [*CASES, *(pytest.param(*m, marks=pytest.mark.long) for m in MORE)]
)
def test_scores_are_those_of_the_patterns(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    run = dl.denoise(model, PROMPTS, gen_length=8, seed=[1, 2], temperature=1.0, **settings)
    pattern = rerun(model, run, [AttentionPattern()]).pattern
    monkeypatch.setattr(tiled, "TILE_ENTRIES", 2 * 4 * 17 * 5)  # tiles of 5 queries
    # Enough copies for a test: the random model's answers hold tokens of the prompts.
    found = retrieval_heads(model, run)
    ids = [model.config.mask_token_id if hasattr(model.config, "mask_token_id") else None, 61, 62]
    special = {one for one in [*ids, *run.eos_token_ids] if one is not None}
    wanted = torch.zeros(2, 2, 4, 5, dtype=torch.float64)
    for step, row, query, copies, others in decisions_of(run, family != "llada" and family != "sdar", special):
        for layer in range(2):
            for head in range(4):
                line = pattern[step, row, layer, head, query].nan_to_num().tolist()
                best = line.index(max(line))
                chance = sum(n / len(keys) * (best in keys) for n, keys in others.values())
                mass = sum(n / len(keys) * sum(line[j] for j in keys) for n, keys in others.values())
                numbers = [1.0, float(best in copies), sum(line[j] for j in copies), chance, mass]
                wanted[row, layer, head] += torch.tensor(numbers, dtype=torch.float64)
    torch.testing.assert_close(found.sums.double(), wanted, rtol=1e-4, atol=1e-5)
    assert found.decisions == int(wanted[:, 0, 0, 0].sum()) > 0


class Copies(Hook):
    """Head 2 of layer 1 attends to the first copy of the token that its position will get; others uniformly."""

    site: Any = "pattern"

    def __init__(self, run: DenoisingRun) -> None:
        self.run, self.steps = run, [0, 0]

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        layer = hook.layer()
        step, self.steps[layer] = self.steps[layer], self.steps[layer] + 1
        tensor = torch.full_like(tensor, 1 / tensor.shape[-1])
        if layer == 1:
            for row, place in self.run.unmasked[step].nonzero().tolist():
                token = self.run.canvases[step + 1, row, place]
                same = (self.run.canvases[step, row] == token) & ~self.run.masked[step, row]
                if bool(same.any()):
                    tensor[row, 2, place] = 0
                    tensor[row, 2, place, int(same.int().argmax())] = 1
        return tensor


def test_a_planted_copying_head_is_found_and_uniform_heads_are_at_chance() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=6, gen_length=12, temperature=2.0, seed=[1, 2])
    canvases = run.canvases.clone()
    canvases[1:, 0, -12:][run.canvases[1:, 0, -12:] != 63] = 5  # the answer of row 0 copies the prompt's 5
    from dataclasses import replace

    run = replace(run, canvases=canvases, proposals=canvases[1:])
    with attach_hooks(model, Copies(run)):
        found = retrieval_heads(model, run)
    assert found.decisions >= 12
    best = found.table().iloc[0]
    assert (best["layer"], best["head"], best["score"]) == (1, 2, 1)
    assert 0 < best["chance"] < 0.8
    copies = found.sums[..., 0]
    uniform = found.table("mass").query("layer == 0")
    assert uniform["excess"].abs().max() < 1e-6  # even attention gives copies what it gives any key
    assert float(copies.min()) >= 0
    assert repr(found).startswith(f"RetrievalHeads({found.decisions} of {found.decided} decided tokens")
    with pytest.raises(ValueError, match="measure is 'heat'; it must be 'hits' or 'mass'"):
        found.table("heat")
    for call in (found.score, found.excess):
        with pytest.raises(ValueError, match="head 4 of 4"):
            call(0, 4)


@pytest.mark.parametrize("copies", [[0, 1, 2, 3, 4, 5, 6], [2, 9, 11]])
def test_chance_is_that_of_a_simulation_and_at_most_one(copies: list[int]) -> None:
    # Keys 0 to 7 are the prompt, 8 to 12 the decided answer; in the first case nearly all of the prompt are copies.
    regions = [range(8), range(8, 13)]
    generator = torch.Generator().manual_seed(3)
    attention = torch.rand(6, 15, generator=generator, dtype=torch.float64)
    attention[0, 7] = attention[1, 12] = attention[2, 14] = 5
    attention /= attention.sum(-1, keepdim=True)

    def where(places: Any) -> Tensor:
        return torch.isin(torch.arange(15), torch.tensor(list(places)))

    there = [region for region in regions if set(copies) & {*region}]
    chances = tuple((len(set(copies) & {*region}), where(region)) for region in there)
    found = _measured(attention, Decision(0, 0, where(copies), chances), 15)
    draws = 4000
    hits = torch.zeros(6, dtype=torch.float64)
    mass = torch.zeros(6, dtype=torch.float64)
    for _ in range(draws):
        drawn = []
        for (count, _), region in zip(chances, there, strict=True):
            drawn += (torch.randperm(len(region), generator=generator)[:count] + region.start).tolist()
        hits += torch.tensor([float(int(line.argmax()) in drawn) for line in attention])
        mass += attention[:, drawn].sum(-1)
    torch.testing.assert_close(found[3].double(), hits / draws, atol=0.03, rtol=0)
    torch.testing.assert_close(found[4], mass / draws, atol=0.01, rtol=0)
    assert float(torch.stack(found[3:]).max()) <= 1


@pytest.mark.parametrize("family", ["llada", "uniform_qwen", "open_dcoder"])  # the last two revise tokens
def test_a_part_of_a_run_has_the_decisions_of_the_whole_run(family: str) -> None:
    model, reducers = tiny(family), [dl.ReceivedAttention(min_viewers=1)]
    settings = {"temperature": 2.0} if family == "llada" else {}
    rec = dl.record(model, PROMPTS, reducers, gen_length=12, seed=[1, 2], steps=6, **settings)
    some = 0
    for steps in ([1, 3], [0, 2, 4], [2, 3], [4, 5]):
        part = rec.select(step=steps).run
        for place, step in enumerate(steps):
            whole, found = (
                find_decisions(run, at, frozenset([63]), False) for run, at in ((rec.run, step), (part, place))
            )
            assert found[1] == whole[1]
            assert len(found[0]) == len(whole[0])
            for one, other in zip(found[0], whole[0], strict=True):
                assert (one.row, one.query, one.copies.tolist()) == (other.row, other.query, other.copies.tolist())
                assert [(n, keys.tolist()) for n, keys in one.chances] == [
                    (n, keys.tolist()) for n, keys in other.chances
                ]
            some += len(found[0])
    assert some
