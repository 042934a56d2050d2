"""A row whose text ends before those beside it: probes read what they read of the row alone."""

from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens import probes
from dlm_lens.features import SparseAutoencoder
from dlm_lens.hooks import ablate, at_steps, capture, mask_tokens
from dlm_lens.probes.feature_insertion import _means
from dlm_lens.sampling import part_of_run
from dlm_lens.sampling.run_rows import decided_answer
from dlm_lens.sampling.stored_run import StoredRun
from dlm_lens.testing import tiny

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9 w4 w1 w1"]


def pair(family: str, **settings: Any) -> tuple[Any, dl.DenoisingRun, dl.DenoisingRun]:
    """A model whose first row ends early, the run of that row alone, and the run of both rows."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    settings = {"gen_length": 16, "temperature": 0.0, **settings}
    first = dl.denoise(model, PROMPTS, **settings)
    end = int(first.tokens[0, first.prompt_length + 2])
    assert end not in first.tokens[1].tolist()
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    return model, dl.denoise(model, PROMPTS[:1], **settings), dl.denoise(model, PROMPTS, **settings)


CASES: dict[str, Any] = {"llada2": {"block_length": 4}, "sdar": {"block_length": 4}, "causal": {}}


@pytest.mark.parametrize("family", CASES)
def test_probes_read_what_they_read_of_the_row_alone(family: str) -> None:
    model, alone, both = pair(family, **CASES[family])
    assert alone.steps < both.steps
    ends = int(alone.steps)
    assert both.row_steps.tolist() == [ends, both.steps]
    assert alone.row_steps.tolist() == [ends]
    shared = slice(0, alone.tokens.shape[1])
    hook = [ablate("resid", dims=[0])]
    one, two = (probes.replay(model, run, hook, attention=False) for run in (alone, both))
    assert torch.equal(one.predicted[:, 0], two.predicted[:ends, 0, shared])
    assert not bool(two.predicted[ends:, 0].any())
    assert bool(two.predicted[ends:, 1].any())
    torch.testing.assert_close(one.kl[:, 0], two.kl[:ends, 0, shared], rtol=1e-3, atol=1e-5, equal_nan=True)
    lens = dl.logit_lens(model, both)
    assert not bool(((lens.batch == 0) & (lens.step >= ends)).any())
    found = [probes.commitment(model, run) for run in (alone, both)]
    assert torch.equal(found[0].committed_at[0], found[1].committed_at[0, shared])
    assert not bool((found[1].token[ends:, 0] >= 0).any())
    # The other row's predictions are its own, not those of the row that ended.
    right = found[1].token[both.step_of[1].clamp(min=0), 1, torch.arange(both.tokens.shape[1])]
    decided = (both.step_of[1] >= 0) & (right >= 0)
    assert bool(decided.any())
    assert torch.equal(right[decided], both.tokens[1][decided])
    proposed = probes.proposed_commitment(both)
    assert not bool((proposed.token[ends:, 0] >= 0).any())


@pytest.mark.parametrize("family", CASES)
def test_replayed_sinks_are_those_of_the_row_alone(family: str) -> None:
    model, alone, both = pair(family, **CASES[family])
    hook = [ablate("resid", dims=[0])]
    one, two = (probes.replay(model, run, hook) for run in (alone, both))
    ends, keys = alone.steps, slice(0, alone.tokens.shape[1])
    for name in ("received", "received_hooked"):
        single, beside = getattr(one, name), getattr(two, name)
        assert bool(beside.values[ends:, 0].isnan().all())
        assert bool((~beside.values[ends:, 1].isnan()).any())
        assert not bool(beside.counted[ends:, 0].any())
        # Another batch: other roundings in float32.
        torch.testing.assert_close(
            beside.values[:ends, 0][..., keys], single.values[:, 0], rtol=1e-4, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("family", CASES)
def test_the_mean_that_is_inserted_is_of_rows_that_run(family: str) -> None:
    model, alone, both = pair(family, **CASES[family])
    width, generator = int(model.config.hidden_size), torch.Generator().manual_seed(0)
    down, up = (torch.randn(24, width, generator=generator) for _ in range(2))
    sae = SparseAutoencoder(down.T.contiguous(), torch.zeros(24), up, torch.zeros(width), k=5, layer=1)
    other = dl.denoise(model, PROMPTS[1:], gen_length=16, temperature=0.0, **CASES[family])
    sums = []
    for run in (alone, other):
        kept = capture(model, run, "resid", layers=[1])
        for step in range(run.steps):
            states = kept["resid", 1, step].double()
            seen = run.attention_mask[:, : states.shape[1]]
            sums.append((states[seen].sum(0), int(seen.sum())))
    wanted = torch.stack([total for total, _ in sums]).sum(0) / sum(count for _, count in sums)
    (found,) = _means(StoredRun(model, both), [sae], range(both.steps))
    # Another batch: other roundings in float32.
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_row_without_an_end_is_over_with_the_run() -> None:
    run = dl.denoise(tiny("llada"), PROMPTS, steps=4, gen_length=8)
    assert run.row_steps.tolist() == [4, 4]
    joined = dl.record(tiny("causal"), PROMPTS, gen_length=5, batch_size=1).run
    assert joined.row_steps.tolist() == [5, 5]


def test_an_end_of_text_is_a_token_like_others_where_the_sampler_ends_no_row() -> None:
    model, settings = tiny("mdlm"), {"gen_length": 12, "steps": 12, "seed": 3, "noise_removal": False, "eps": 0.4}
    for ends in (list(range(40)), None):
        model.config.eos_token_id = ends
        run = dl.denoise(model, [[1, 2, 3]], **settings)
        assert int(run.masks_left[0])
        assert run.row_steps.tolist() == [12]
    model = tiny("llada")
    model.config.eos_token_id = list(range(60))
    holes = [[1, model.config.mask_token_id, 3]]
    run = dl.denoise(model, holes, gen_length=4, steps=8, reference_quirks=True)
    assert int(run.masks_left[0])
    assert run.row_steps.tolist() == [8]


def test_a_run_that_fails_between_decisions_counts_its_last_steps() -> None:
    model = tiny("smdm")
    model.config.eos_token_id = list(range(60))

    def break_it(step: int, _: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | None:
        return logits * float("nan") if step == 16 else None

    with pytest.raises(dl.sampling.NonFiniteLogitsError) as caught:
        dl.denoise(model, [[1, 2, 3]], gen_length=8, steps=24, seed=1, on_logits=break_it)
    assert caught.value.partial.row_steps.tolist() == [16]


def test_a_row_whose_block_ends_with_its_end_of_turn_is_over() -> None:
    model, settings = tiny("llada"), {"gen_length": 12, "steps": 12, "block_length": 4, "temperature": 0.0}
    first = dl.denoise(model, PROMPTS, **settings)
    end = int(first.tokens[0, first.prompt_length + 3])
    assert end != int(first.tokens[1, first.prompt_length + 3])
    run = dl.denoise(model, PROMPTS, eot_token=end, **settings)
    assert run.row_steps.tolist()[0] == 4
    assert run.row_steps.tolist()[1] > 4


@pytest.mark.parametrize("family", ["llada", "causal", "sdar", "uniform_qwen"])
def test_a_run_that_failed_at_its_first_step_has_no_steps(family: str) -> None:
    model = tiny(family)
    with pytest.raises(dl.sampling.NonFiniteLogitsError) as caught:
        dl.denoise(model, PROMPTS, gen_length=4, on_logits=lambda *given: given[-1] * float("nan"))
    run = caught.value.partial
    assert run.steps == 0
    assert run.row_steps.tolist() == run.steps_in_all.tolist() == [0, 0]
    assert bool((run.step_of == -1).all())
    assert bool((run.last_written == -1).all())
    assert run.running.shape == (0, 2)
    assert not run._preview().lines
    assert run._repr_html_()
    for within in ("answer", "block"):
        assert probes.decision_order(run, within=within).pairs.tolist() == [0, 0]
    found = probes.commitment(model, run)
    assert bool(found.lead.isnan().all())
    assert bool((found.committed_at == -1).all())
    assert not int(found.flips.sum())
    assert "nan" in repr(found)


def of_canvases() -> tuple[Any, list[list[int]], dict[str, Any]]:
    """A DiffusionGemma, and prompts and settings with which the last row ends before the others."""
    model = tiny("diffusion_gemma", eos_token_id=[3, 50, 20, 33, 8])
    model.set_experts_implementation("eager")
    prompts = [[5, 9, 13, 2, 7, 30, 31], [3, 8, 1, 4], [11, 12, 13, 14, 15, 16, 17, 18, 19]]
    settings: dict[str, Any] = {"gen_length": 24, "steps_per_block": 5, "seed": 3, "entropy_bound": 3.0}
    settings |= {"t_min": 0.9, "t_max": 1.6, "stability_threshold": 0, "confidence_threshold": 3.8}
    return model.double(), prompts, settings


def test_canvases_after_a_row_s_end_are_no_decisions_of_it() -> None:
    model, prompts, settings = of_canvases()
    both, alone = (dl.denoise(model, given, **settings) for given in (prompts, prompts[2:]))
    ends, width = alone.steps, alone.tokens.shape[1]
    assert both.row_steps.tolist() == [both.steps, both.steps, ends]
    # The batch closes the row's other canvases, and decides nothing there.
    assert not bool(both.open[-1, 2].any())
    assert bool((both.last_written[2, width:] == -1).all())
    assert both.tokens.shape[1] > width
    orders = [probes.decision_order(run) for run in (both, alone)]
    assert int(orders[0].pairs[2]) == int(orders[1].pairs[0]) == 0
    assert torch.equal(orders[0].retracted[2, :width], orders[1].retracted[0])
    smeared = [probes.token_smearing(model, run, radius=5, threshold=0.02) for run in (both, alone)]
    torch.testing.assert_close(smeared[0].near_tokens_by_chance[:ends, 2], smeared[1].near_tokens_by_chance[:, 0])
    assert torch.equal(smeared[0].places[:ends, 2], smeared[1].places[:, 0])
    assert bool((probes.class_readability(model, both).wanted[2, width:] == -1).all())
    # The canvas of the row alone ends with its text: positions after it were open at these steps too.
    clock = probes.denoising_clock(model, both, layers=[1])
    readings = [probes.read_clock(model, run, clock) for run in (both, alone)]
    assert readings[0].quantities[:, :ends, 2].equal(readings[1].quantities[:, :, 0])
    missed = [reading.baseline_errors("open", "open count") for reading in readings]
    assert float(missed[0][2]) == float(missed[1][0]) > 0
    hook = [at_steps(mask_tokens("prompt"), [1])]
    compared = [dl.compare(model, given, hook, **settings) for given in (prompts, prompts[2:])]
    assert torch.equal(compared[0].answer[2, :width], compared[1].answer[0, :width])
    assert not bool(compared[0].answer[2, width:].any())
    assert float(compared[0].share_changed[2]) == float(compared[1].share_changed[0]) > 0


def test_a_part_of_a_run_counts_a_row_s_answer_up_to_its_end() -> None:
    model, prompts, settings = of_canvases()
    runs = [dl.denoise(model, given, **settings) for given in (prompts, prompts[2:])]
    width = runs[1].tokens.shape[1]
    both, alone = (part_of_run(run, [0, 1], range(len(run.tokens))) for run in runs)
    assert torch.equal(decided_answer(both), decided_answer(runs[0]))
    wanted = [probes.class_readability(model, run).wanted for run in (runs[0], both)]
    assert torch.equal(*wanted)
    smeared = [probes.token_smearing(model, run, radius=5, threshold=0.02) for run in (both, alone)]
    assert torch.equal(smeared[0].places[:, 2], smeared[1].places[:, 0])
    torch.testing.assert_close(smeared[0].near_tokens_by_chance[:, 2], smeared[1].near_tokens_by_chance[:, 0])
    # With the quirks a row that has ended is denoised like the others.
    quirks = dl.denoise(model, prompts, reference_quirks=True, **settings)
    decided = decided_answer(part_of_run(quirks, [0], range(3)))
    assert torch.equal(decided, decided_answer(quirks))
    assert bool(decided[:, width:].any())


def test_a_part_of_an_ar_run_counts_a_row_s_answer_up_to_its_end() -> None:
    _, alone, both = pair("causal")
    part = part_of_run(both, [0, 1], [0, 1])
    assert torch.equal(decided_answer(part), decided_answer(both))
    assert int(decided_answer(part)[0].sum()) == alone.steps < both.steps
