"""`token_effects` against the expectation over every token by hand, and against runs that write another token."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import at_heads, at_layers, capture, patch_from
from dlm_lens.probes import LogProbability, activation_patching, attribution_patching, token_effects
from dlm_lens.probes.attribution.passes import with_prompt
from dlm_lens.probes.attribution.targets import Decisions
from dlm_lens.sampling import DenoisingRun, StoredRun
from dlm_lens.sampling.moved_tokens import decisions_of
from dlm_lens.testing import tiny
from tests.probes.attribution.test_patching import OTHERS, PROMPTS, by_hand
from tests.sampling import test_dreamon as dreamon
from tests.sampling.test_dreamon import resizing

ONE_BY_ONE = {"gen_length": 4, "block_length": 1, "steps": 4}
FAMILIES: dict[str, dict[str, Any]] = {"llada": ONE_BY_ONE, "causal": {"gen_length": 4}}


def probabilities(model: Any, run: DenoisingRun, step: int, hooks: list[Any], temperature: float) -> Tensor:
    """[batch, d_vocab] at the only position of each row that a step decides."""
    stored = StoredRun(model, run, hooks=hooks)
    with torch.no_grad():
        logits = stored.logits(stored.states(step)).double()
    if (mask := getattr(model.config, "mask_token_id", None)) is not None:
        logits[:, mask] = -torch.inf
    row, place = stored.predicted(step).nonzero().unbind(-1)
    return (logits[run.unmasked[step][row, place]] / temperature).softmax(-1)


def written(run: DenoisingRun, step: int, row: int, token: int) -> DenoisingRun:
    """The run with another token at the position that a step decides, from the next canvas on."""
    canvases = run.canvases.clone()
    canvases[step + 1 :, row, int(run.unmasked[step, row].nonzero()[0])] = token
    return replace(run, canvases=canvases)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_effect_on_the_next_step_is_that_on_the_expectation_over_all_tokens(family: str) -> None:
    model = tiny(family).double()
    run = dl.denoise(model, PROMPTS, **FAMILIES[family])
    step, size, temperature = 1, int(model.config.vocab_size), 0.7
    settings: dict[str, Any] = {"target": LogProbability(), "temperature": temperature}
    path = token_effects(model, run, step, [step + 1], candidates=size - 1, batch=40, **settings)
    found = activation_patching(model, run, OTHERS, target=path, steps=[step])
    later = torch.zeros(size, len(PROMPTS), dtype=torch.float64)
    for token in range(size):
        for row in range(len(PROMPTS)):
            later[token, row] = by_hand(model, written(run, step, row, token), step + 1, [])[row]
    other = capture(model, with_prompt(model, run, OTHERS), "z")
    plain = probabilities(model, run, step, [], temperature)
    for layer, head in ((0, 1), (1, 3)):
        hook = at_heads(at_layers(patch_from(other, step, "z"), [layer]), [head])
        patched = probabilities(model, run, step, [hook], temperature)
        wanted = ((patched - plain) * later.T).sum(-1)
        torch.testing.assert_close(found.effects[0, :, layer, head, 0], wanted, atol=1e-10, rtol=1e-6)
        assert float(wanted.abs().min()) > 1e-9


def test_gradients_equal_exact_effects_between_prompts_that_hardly_differ() -> None:
    model = tiny("llada").double()
    embedding, made = model.get_input_embeddings().weight.data, torch.Generator().manual_seed(0)
    for one, other in ((3, 30), (9, 19), (10, 20)):
        embedding[other] = embedding[one] + 1e-3 * torch.randn(embedding.shape[1], generator=made)
    run = dl.denoise(model, PROMPTS, **ONE_BY_ONE)
    path = token_effects(model, run, 1, target=LogProbability(), candidates=10)
    exact = activation_patching(model, run, OTHERS, target=path, steps=[1])
    found = attribution_patching(model, run, OTHERS, target=path, steps=[1])
    torch.testing.assert_close(found.effects, exact.effects, atol=0.02 * float(exact.effects.abs().max()), rtol=0.0)
    assert float(exact.effects.abs().max()) > 1e-5
    assert found.agreement(exact).value > 0.95


def test_effects_are_those_of_a_run_that_writes_the_other_token() -> None:
    model = tiny("llada").double()
    plain = dl.denoise(model, PROMPTS, **ONE_BY_ONE)
    path = token_effects(model, plain, 1, [2], target=LogProbability(), candidates=3)
    assert path.tokens[:, 0].tolist() == plain.tokens[path.row, path.position].tolist()
    assert path.row.tolist() == [0, 1]
    assert path.effects[:, 0].tolist() == [0.0, 0.0]
    token = int(path.tokens[0, 2])

    def edit(step: int, canvas: Tensor) -> Tensor | None:
        changed = canvas.clone()
        changed[0, path.position[0]] = token
        return changed if step == 2 else None

    rerun = dl.denoise(model, PROMPTS, **ONE_BY_ONE, on_canvas=edit)
    assert rerun.canvases[2, 0].tolist() != plain.canvases[2, 0].tolist()
    canvases = plain.canvases.clone()
    canvases[2] = rerun.canvases[2]  # the tokens that are explained stay those of the plain run
    change = by_hand(model, replace(plain, canvases=canvases), 2, []) - by_hand(model, plain, 2, [])
    torch.testing.assert_close(path.effects[0, 2], change[0], atol=1e-9, rtol=1e-6)
    assert float(change[0].abs()) > 1e-6
    assert float(change[1].abs()) == 0


def test_later_steps_add_up_and_batches_change_nothing() -> None:
    model = tiny("dream").double()
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    every = token_effects(model, run, 0, candidates=2, temperature=0.7, batch=5)
    parts = [token_effects(model, run, 0, [later], candidates=2, batch=1) for later in (1, 2)]
    assert every.later == (1, 2)
    torch.testing.assert_close(every.effects, parts[0].effects + parts[1].effects, atol=1e-9, rtol=1e-7)
    assert float(every.effects.abs().max()) > 1e-4
    # As a target it is the expected change of the later ones, summed over the positions of a row.
    stored = StoredRun(model, run)
    with torch.no_grad():
        logits = stored.logits(stored.states(0)).double()
    logits[:, model.config.mask_token_id] = -torch.inf
    chance, wanted = (logits / 0.7).softmax(-1), torch.zeros(2, dtype=torch.float64)
    places = stored.predicted(0).nonzero().tolist()
    for row, position, tokens, effects in zip(every.row, every.position, every.tokens, every.effects, strict=True):
        own = chance[places.index([int(row), int(position)])]
        wanted[row] += sum(own[token] * effect for token, effect in zip(tokens, effects, strict=True))
    base = activation_patching(model, run, OTHERS, target=every, steps=[0]).base[0]
    torch.testing.assert_close(base.double(), wanted, atol=1e-9, rtol=1e-6)
    table = every.table()
    assert len(table) == every.tokens.numel()
    assert table[table["own"]]["effect"].abs().max() == 0


def test_the_logits_that_condition_a_step_are_held_fixed() -> None:
    model = tiny("diffusion_gemma")
    model.set_experts_implementation("eager")
    model = model.double()
    settings: dict[str, Any] = {"gen_length": 8, "steps_per_block": 5, "seed": 3, "entropy_bound": 3.0}
    settings |= {"t_min": 0.9, "t_max": 1.6, "stability_threshold": 0, "confidence_threshold": None}
    run = dl.denoise(model, [[5, 9, 13, 2, 7, 30, 31], [3, 8, 1, 4]], **settings)
    given: dict[str, Any] = {"target": LogProbability(), "candidates": 2}
    found = {later: token_effects(model, run, 0, [later], **given) for later in (1, 2)}
    every = token_effects(model, run, 0, [1, 2], **given)
    torch.testing.assert_close(every.effects, found[1].effects + found[2].effects, atol=1e-9, rtol=1e-7)
    assert float(found[1].effects.abs().max()) > 1e-3
    # A position that the canvas of step 2 does not hold any more changes what step 1 saw, which conditions step 2.
    row, position = found[2].row, found[2].position
    gone = run.canvases[2, row, position] != run.canvases[1, row, position]
    assert bool(gone.any())
    assert float(found[2].effects[gone].abs().max()) < 1e-9


def test_a_candidate_stands_where_the_token_of_the_run_moves() -> None:
    model = resizing(seed=4).double()
    run = dl.denoise(model, dreamon.PROMPTS, **dreamon.GREEDY)
    deciding = decisions_of(run)[0].any(-1).any(-1).nonzero().flatten().tolist()
    assert set(deciding) < set(run.unmasked.any(-1).any(-1).nonzero().flatten().tolist())
    moved = 0
    for step in deciding[:-1]:
        path = token_effects(model, run, step, target=LogProbability(), candidates=1)
        assert path.later == tuple(later for later in deciding if later > step)
        for entry, (row, position) in enumerate(zip(path.row.tolist(), path.position.tolist(), strict=True)):
            places = run.token_places[:, row]
            (end,) = ((places[step] == position) & (run.step_of[row] == step)).nonzero().flatten().tolist()
            canvases = run.canvases.clone()
            for later in range(step + 1, run.steps + 1):
                canvases[later, row, places[later, end]] = path.tokens[entry, 1]
                moved += int(places[later, end]) != position
            changed = replace(run, canvases=canvases)
            wanted = 0.0
            for later in path.later:
                one, two = (LogProbability()(decisions) for decisions in both_decisions(model, run, changed, later))
                wanted += float((one - two).sum())
            assert float(path.effects[entry, 1]) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert moved > 3


def both_decisions(model: Any, run: DenoisingRun, changed: DenoisingRun, step: int) -> list[Any]:
    """What a step decides, with the logits of the changed canvas and with those of the run."""
    chosen, tokens = (each[step] for each in decisions_of(run))
    found = []
    for one in (changed, run):
        stored = StoredRun(model, one)
        with torch.no_grad():
            logits = stored.logits(stored.states(step)).double()
        logits[:, model.config.mask_token_id] = -torch.inf
        row, place = stored.predicted(step).nonzero().unbind(-1)
        kept = chosen[row, place]
        token = tokens[row, place][kept]
        found.append(Decisions(step, logits[kept], row[kept], place[kept], token, token))
    return found


def test_what_is_not_later_is_refused() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, **ONE_BY_ONE)
    with pytest.raises(ValueError, match=r"later is \[1\]; give steps after step 1"):
        token_effects(model, run, 1, [1])
    with pytest.raises(ValueError, match="later is empty; give at least one index, or None for all"):
        token_effects(model, run, 1, [])
    with pytest.raises(ValueError, match=r"later is 2; give a list, such as later=\[2\], or None for all"):
        token_effects(model, run, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no step after step 3 of the run's 4 decides a token"):
        token_effects(model, run, -1)
    path = token_effects(model, run, 1, [2], candidates=1)
    with pytest.raises(ValueError, match=r"is no target of step 2; give steps=\[1\]"):
        activation_patching(model, run, OTHERS, target=path, steps=[2])
    with pytest.raises(ValueError, match="is about the tokens that its step decides; leave explain out"):
        activation_patching(model, run, OTHERS, target=path, steps=[1], explain=[-1])
