"""Activation patching against the library's own hooks, and on a planted circuit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook, PointContext
from dlm_lens.hooks import ablate, at_heads, at_layers, capture, patch_from
from dlm_lens.probes import (
    LogitDifference,
    LogProbability,
    activation_patching,
    attribution_patching,
    circuit_overlap,
    edge_attribution,
    faithfulness,
    missed_effects,
)
from dlm_lens.probes.lens_positions import PositionMask
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.testing import tiny
from tests.probes.attribution.planted import AGAINST, CIRCUIT, OTHER, planted, run_of

PROMPTS, OTHERS = [[1, 2, 3, 4, 5], [8, 9, 10]], [[1, 2, 30, 4, 5], [8, 19, 20]]
FAMILIES: dict[str, dict[str, Any]] = {
    "llada": {"steps": 3, "gen_length": 6, "cfg_scale": 0.5},
    "dream": {"steps": 3, "gen_length": 6},
    "sdar": {"gen_length": 4, "block_length": 2, "steps": 4},
    "causal": {"gen_length": 3},
}


def by_hand(model: Any, run: DenoisingRun, step: int, hooks: list[Any]) -> Tensor:
    """The summed log-probabilities of what a step decides, under hooks, in float64."""
    stored = StoredRun(model, run, hooks=hooks)
    with torch.no_grad():
        logits = stored.logits(stored.states(step)).double()
    mask = getattr(model.config, "mask_token_id", None)
    if mask is not None:
        logits[:, mask] = -torch.inf
    logs, found = logits.log_softmax(-1), torch.zeros(len(run.tokens), dtype=torch.float64)
    for entry, (row, place) in enumerate(stored.predicted(step).nonzero().tolist()):
        if run.unmasked[step, row, place]:
            found[row] += logs[entry, run.tokens[row, place]]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_effects_are_those_of_the_hook_patch_from(family: str) -> None:
    model = tiny(family).double()
    run = dl.denoise(model, PROMPTS, **FAMILIES[family])
    found = activation_patching(model, run, OTHERS, target=LogProbability(), steps=[-1], batch=3)
    canvases = run.canvases.clone()
    canvases[:, 0, :5], canvases[:, 1, 2:5] = torch.tensor(OTHERS[0]), torch.tensor(OTHERS[1])
    corrupted = replace(run, canvases=canvases)
    step, other = run.steps - 1, capture(model, corrupted, "z")
    base = by_hand(model, run, step, [])
    torch.testing.assert_close(found.base[0].double(), base)
    torch.testing.assert_close(found.source[0].double(), by_hand(model, corrupted, step, []))
    for layer, head in ((0, 0), (0, 3), (1, 2)):
        hook = at_heads(at_layers(patch_from(other, step, "z"), [layer]), [head])
        wanted = by_hand(model, run, step, [hook]) - base
        torch.testing.assert_close(found.effects[0, :, layer, head, 0], wanted, atol=1e-9, rtol=1e-6)
        assert bool((wanted.abs() > 1e-6).any())


def test_kinds_of_values_directions_and_single_positions() -> None:
    model = tiny("llada").double()
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    target = LogProbability()
    base = by_hand(model, run, 0, [])
    for site in ("mlp_out", "v"):
        zero = activation_patching(model, run, "zero", site, target=target, steps=[0], positions=[4, 6])
        for index, place in enumerate((4, 6)):
            hook = at_layers(ablate(site, [place]), [1])
            hook = at_heads(hook, [1]) if site == "v" else hook
            wanted = by_hand(model, run, 0, [hook]) - base
            torch.testing.assert_close(zero.effects[0, :, 1, -1, index], wanted, atol=1e-9, rtol=1e-6)
    hooks = [ablate("mlp_out")]
    denoised = activation_patching(model, run, hooks, "resid", target=target, steps=[0], direction="denoising")
    # The last layer's stream of the clean run undoes whatever the hooks did.
    last = denoised.effects[0, :, -1, 0, 0]
    torch.testing.assert_close(last, base - by_hand(model, run, 0, hooks), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_the_default_target_is_against_the_likeliest_other_token_of_the_corrupted_run(direction: Any) -> None:
    model = tiny("llada").double()
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    found = activation_patching(model, run, OTHERS, steps=[1], direction=direction)
    canvases = run.canvases.clone()
    canvases[:, 0, :5], canvases[:, 1, 2:5] = torch.tensor(OTHERS[0]), torch.tensor(OTHERS[1])
    logits = []
    for one in (run, replace(run, canvases=canvases)):
        stored = StoredRun(model, one)
        with torch.no_grad():
            logits.append(stored.logits(stored.states(1)).double())
    clean, corrupted = torch.zeros(2, 2, dtype=torch.float64)
    for entry, (row, place) in enumerate(run.open[1].nonzero().tolist()):
        if run.unmasked[1, row, place]:
            token = int(run.tokens[row, place])
            likely = logits[1][entry].argsort(descending=True).tolist()
            other = next(one for one in likely if one not in (token, model.config.mask_token_id))
            clean[row] += logits[0][entry, token] - logits[0][entry, other]
            corrupted[row] += logits[1][entry, token] - logits[1][entry, other]
    base, source = (clean, corrupted) if direction == "noising" else (corrupted, clean)
    torch.testing.assert_close(found.base[0].double(), base)
    torch.testing.assert_close(found.source[0].double(), source)


class MeanAt(Hook):
    """Replaces an output of layer 0 by the mean over the row's open, or decided, positions."""

    site = "mlp_out"
    layers = (0,)

    def __init__(self, place: int, others: PositionMask) -> None:
        self.place, self.others = place, others

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        edited = tensor.clone()
        for row, others in enumerate(self.others):
            edited[row, self.place] = tensor[row][others].mean(0)
        return edited


def test_a_mean_is_over_the_open_or_the_decided_positions_of_the_row() -> None:
    model = tiny("llada").double()
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    found = activation_patching(model, run, "mean", "mlp_out", target=LogProbability(), positions=[4, 6])
    wanted = torch.zeros(2, 2, dtype=torch.float64)
    for step in range(2):
        base = by_hand(model, run, step, [])
        for index, place in enumerate((4, 6)):
            opened = run.open[step, :, place][:, None]
            hook = MeanAt(place, run.attention_mask & (run.open[step] == opened))
            effect = by_hand(model, run, step, [hook]) - base
            torch.testing.assert_close(found.effects[step, :, 0, 0, index], effect, atol=1e-9, rtol=1e-6)
            wanted[:, index] += effect
    torch.testing.assert_close(found.summed[:, 0, 0], wanted, atol=1e-9, rtol=1e-6)
    assert bool((wanted.abs() > 1e-6).all())


def test_planted_heads_alone_have_effects_and_chunks_change_nothing() -> None:
    model = planted(CIRCUIT)
    run = run_of(model)
    target = LogitDifference(AGAINST)
    found = activation_patching(model, run, OTHER, target=target, batch=1)
    whole = (found.source - found.base)[..., None].double()
    wanted = torch.zeros_like(found.effects[..., 0])
    wanted[:, :, 0, 1] = wanted[:, :, 1, 2] = whole[..., 0]
    assert bool((whole.abs() > 1).all())
    torch.testing.assert_close(found.effects[..., 0], wanted, atol=1e-12, rtol=1e-9)
    for batch in (3, 64):
        again = activation_patching(model, run, OTHER, target=target, batch=batch)
        torch.testing.assert_close(again.effects, found.effects, atol=1e-12, rtol=1e-9)
    line = found.table(1).iloc[0]
    assert (line["layer"], line["head"]) in ((0, 1), (1, 2))
    assert found.contract.steps == (0, 1)
    assert "another prompt" in str(found.contract)


def test_what_does_not_fit_is_refused() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    for arguments, message in (
        ({"corrupted": [[1, 2], [3, 4]]}, "tokens a row"),
        ({"site": "pattern"}, "site is 'pattern'"),
        ({"direction": "up"}, "direction is 'up'"),
        ({"corrupted": "zero", "direction": "denoising"}, "no run that clean values"),
        ({"steps": [5]}, "step 5"),
        ({"explain": 5}, r"activation_patching: explain is 5; give a list, such as explain=\[5\]"),
        ({"explain": "answer"}, "explain is 'answer'; give a list of whole numbers"),
        ({"explain": [0]}, "no step has anything to explain; give explain="),
        ({"target": 3}, "target is 3"),
        ({"batch": 0}, "batch is 0"),
        ({"target": lambda decisions: decisions.logits}, "one number for each"),
    ):
        with pytest.raises(ValueError, match=message):
            activation_patching(model, run, **{"corrupted": OTHERS, **arguments})


def test_no_corrupted_run_and_no_circuit_are_refused() -> None:
    """Values of the run itself change nothing: every effect was 0."""
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    estimate = attribution_patching(model, run, OTHERS)
    scores = edge_attribution(model, run, OTHERS, integration=1)
    circuit = scores.circuit(5)
    calls: tuple[Callable[[], object], ...] = (
        lambda: activation_patching(model, run, None),
        lambda: attribution_patching(model, run, None),
        lambda: edge_attribution(model, run, None),
        lambda: faithfulness(model, run, None, circuit),
        lambda: missed_effects(model, run, None, estimate, top=2, subsets=8),
    )
    for call in calls:
        with pytest.raises(ValueError, match="corrupted is None; give a prompt with as many tokens"):
            call()
    not_circuits: tuple[tuple[str, Callable[[], object]], ...] = (
        ("circuit", lambda: faithfulness(model, run, OTHERS, scores)),  # type: ignore[arg-type]
        ("two", lambda: circuit_overlap(circuit, scores)),  # type: ignore[arg-type]
    )
    for name, call in not_circuits:
        with pytest.raises(ValueError, match=f"{name} is .*; it must be a Circuit, such as EdgeScores"):
            call()


def test_a_difference_to_what_is_no_token_is_refused() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    for against in (-1, 999, model.config.mask_token_id):
        with pytest.raises(
            ValueError, match=rf"LogitDifference\(against={against}\); give a token between 0 and 63"
        ):
            activation_patching(model, run, OTHERS, target=LogitDifference(against))


def test_nodes_at_padding_are_not_defined_and_tables_count_from_the_prompt() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    exact = activation_patching(model, run, OTHERS, positions=range(9))
    estimate = attribution_patching(model, run, OTHERS, positions=range(9))
    for found in (exact, estimate):
        undefined = found.effects.isnan()
        assert bool(undefined[:, 1, :, :, :2].all())  # the second prompt is two tokens shorter
        assert int(undefined.sum()) == undefined[:, 1, :, :, :2].numel()
        assert found.table()["position"].min() == 0
    missed = missed_effects(model, run, OTHERS, estimate, top=2, subsets=64)
    assert bool(missed.effects[:, 1, :, :, :2].isnan().all())
    table = missed.table()
    assert (table["canvas_position"] - table["position"]).tolist() == [0, 2] * 2  # two steps of two rows
    none = replace(exact, effects=torch.full_like(exact.effects, torch.nan))
    assert "none defined" in repr(none)
    assert len(none.table()) == 0
