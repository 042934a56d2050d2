"""The entropy-bound sampler against transformers' own parts, and open positions that are no token id."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler as Original,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSamplerConfig,
    StableAndConfidentStoppingCriteria,
)

import dlm_lens as dl
from dlm_lens.sampling.samplers.entropy_bound import SelectEntropyBound
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken

PROMPTS = [[5, 6], [9, 3, 7, 4]]
RUN: dict[str, Any] = {"gen_length": 9, "steps": 6, "entropy_bound": 5.0, "seed": [3, 8]}
EARLY: dict[str, Any] = {"gen_length": 8, "steps": 24, "entropy_bound": 12.0, "seed": [3, 8]} | {
    "stability_threshold": 0,
    "confidence_threshold": 2.0,
}
STABLE: dict[str, Any] = {"gen_length": 8, "steps": 16, "entropy_bound": 3.0, "seed": [3, 8]} | {
    "t_max": 0.6,
    "stability_threshold": 2,
    "confidence_threshold": 1.0,
}


def copying() -> Any:
    """A network that mostly predicts the token that it sees, so that canvases become stable."""
    model = tiny("uniform_qwen", tie_word_embeddings=True)
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data *= 0.09
    return model


def by_hand(model: Any, prompt: list[int], *, gen_length: int, steps: int, seed: int, **settings: Any) -> Any:
    """One row with the network in float64, transformers' acceptance and stopping, and the row's own numbers."""
    values = model.sampler_defaults | settings
    generator, size = torch.Generator().manual_seed(seed), model.config.vocab_size
    sampler = Original(EntropyBoundSamplerConfig(values["entropy_bound"]), gen_length, size, steps)
    stop = StableAndConfidentStoppingCriteria(values["stability_threshold"], values["confidence_threshold"])
    canvas = torch.randint(size, (gen_length,), generator=generator)[None]
    canvases, accepted = [canvas], []
    for left in range(steps, 0, -1):
        logits = forward64(model, torch.cat([torch.tensor([prompt]), canvas], 1))["logits"][:, len(prompt) :]
        logits = logits / (values["t_min"] + (values["t_max"] - values["t_min"]) * left / steps)
        uniform = torch.rand(gen_length, size, generator=generator, dtype=torch.float64)
        drawn = (logits[0].log_softmax(-1) - (-uniform.log()).log()).argmax(-1)[None]
        best = logits.argmax(-1)
        if bool(stop(best, logits)) or left == 1:
            canvases.append(best)
            accepted.append(torch.ones_like(best, dtype=torch.bool))
            break
        kept = sampler.accept_canvas(canvas, drawn, logits, left)
        chosen = sampler.accepted_token_mask
        random = torch.randint(size, (int((~chosen).sum()),), generator=generator)
        canvas = kept.masked_scatter(~chosen, random)
        canvases.append(canvas)
        accepted.append(chosen)
    return torch.cat(canvases), torch.cat(accepted)


@pytest.mark.parametrize("settings", [RUN, EARLY, STABLE, RUN | {"entropy_bound": 0.0001}])
def test_every_row_is_the_algorithm_by_hand(settings: dict[str, Any]) -> None:
    model = copying() if settings is STABLE else tiny("uniform_qwen")
    run = dl.denoise(model, PROMPTS, **settings)
    early = []
    for row, prompt in enumerate(PROMPTS):
        canvases, accepted = by_hand(model, prompt, **settings | {"seed": settings["seed"][row]})
        steps, answer = len(accepted), run.prompt_length
        early.append(steps < run.settings["steps"])
        assert run.canvases[: steps + 1, row, answer:].equal(canvases)
        assert run.open[1 : steps + 1, row, answer:].equal(~accepted)
        assert run.open[0, row].equal(torch.arange(run.open.shape[-1]) >= answer)
        # A row that has ended stays what it is.
        assert (run.canvases[steps:, row] == run.tokens[row]).all()
        assert not run.open[steps:, row].any()
        assert not run.unmasked[steps:, row].any()
    assert any(early) == ("confidence_threshold" in settings)


def test_the_bound_is_over_eligible_positions_alone() -> None:
    """Of a row whose other positions have low entropies, as a hook on the proposal may give them."""
    entropy = torch.tensor([[0.1, 0.4, 0.2, 0.3, 0.0], [0.1, 0.4, 0.2, 0.3, 0.0]])
    eligible = torch.tensor([[False, True, True, True, False], [True, True, True, True, True]])
    accepted = SelectEntropyBound(0.3)(-entropy, eligible, torch.zeros(2, dtype=torch.long))
    # Row 0: 0.2, 0.3 after 0.2, and 0.4 after 0.5 > 0.3. Row 1: 0, 0.1, 0.2, 0.3 after 0.3, and 0.4 after 0.6.
    assert accepted.tolist() == [[False, False, True, True, False], [True, False, True, True, True]]


def test_open_unmasked_and_revised_follow_from_the_canvases() -> None:
    run = dl.denoise(tiny("uniform_qwen"), PROMPTS, **RUN)
    assert run.masked is run.open
    changed = run.canvases[1:] != run.canvases[:-1]
    assert run.unmasked.equal(run.open[:-1] & ~run.open[1:])
    assert run.revised.equal(~run.open[:-1] & (changed | run.open[1:]))
    opened_again = run.revised & run.open[1:]
    rewritten = run.revised & ~run.open[1:]
    assert opened_again.any()
    assert rewritten.any()
    assert (run.tokens == run.proposals[-1])[:, run.prompt_length :].all()
    assert run.progress[-1].tolist() == [1.0, 1.0]


def test_rows_do_not_depend_on_their_batch() -> None:
    model = tiny("uniform_qwen")
    both = dl.denoise(model, PROMPTS, **EARLY | {"seed": [1, 2]})
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **EARLY | {"seed": row + 1})
        assert both.canvases[: alone.steps, row, 4:].equal(alone.canvases[:-1, 0, len(prompt) :])
        assert both.tokens[row, 4:].equal(alone.tokens[0, len(prompt) :])


def test_the_first_canvas_can_be_planted_and_stays_open() -> None:
    model = tiny("uniform_qwen")
    planted = torch.tensor([[5, 6, *[11] * 9]])

    def plant(step: int, canvas: Tensor) -> Tensor | None:
        return planted if step == 0 else None

    run = dl.denoise(model, [PROMPTS[0]], on_canvas=plant, **RUN | {"seed": 3})
    other = dl.denoise(model, [PROMPTS[0]], **RUN | {"seed": 3})
    assert run.canvases[0].equal(planted)
    assert run.open[0].equal(other.open[0])
    assert not run.canvases[1].equal(other.canvases[1])


def test_a_recording_is_stored_and_resumed(tmp_path: Path) -> None:
    resumed_as_unbroken(tiny("uniform_qwen"), PROMPTS, tmp_path / "rec", **EARLY)


def test_a_resumed_run_knows_the_most_likely_tokens_of_its_last_steps(tmp_path: Path) -> None:
    """Stopped before its last step, whose tokens are those of the two steps before."""
    whole = resumed_as_unbroken(copying(), PROMPTS, tmp_path / "rec", passes=6, **STABLE)
    assert whole.run.steps == 6 < STABLE["steps"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, "t_min=0.0 and t_max=0.0; they must be above 0"),
        ({"temperature": 0.5, "t_max": 0.9}, "temperature 0.5 is t_min and t_max in one"),
        ({"t_min": 0.9, "t_max": 0.5}, "t_max at least t_min"),
        ({"gen_length": 0}, "gen_length is 0; it must be at least 1"),
        ({"entropy_bound": -1.0}, "entropy_bound is -1.0"),
        ({"cfg_scale": 1.0}, "has no setting 'cfg_scale'"),
        ({"reference_quirks": True}, "has no reference quirks"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        dl.denoise(tiny("uniform_qwen"), [5, 6], **settings)
