"""RND1's sampler: every stored trajectory, and counts, bounds, filters and rows against loops in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.sampling.checkpoints import loaded

GOLDEN = Path(__file__).parent.parent / "golden" / "rnd1"
SAMPLING = json.loads((GOLDEN / "sampling.json").read_text())
MASK, PAD = SAMPLING["mask_token_id"], SAMPLING["pad_token_id"]
NAMES = {"num_steps": "steps", "max_new_tokens": "gen_length", "eb_gamma": "entropy_bound"}
STORED = load_file(GOLDEN / "sampling.safetensors")


def settings_of(setting: dict[str, Any]) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in setting["args"].items()}


@pytest.mark.parametrize("setting", SAMPLING["settings"], ids=lambda setting: setting["name"])
def test_reference_quirks_reproduce_the_original(setting: dict[str, Any]) -> None:
    if setting["seed"] is not None and not torch.__version__.startswith("2.13"):
        pytest.skip("torch.multinomial's stream belongs to a torch build; the golden's is 2.13")
    name = setting["name"]
    run = dl.denoise(
        loaded(GOLDEN), STORED[f"{name}.prompt"], seed=setting["seed"] or 0, reference_quirks=True,
        **settings_of(setting),
    )  # fmt: skip
    assert run.steps == setting["passes"]
    # The stored trajectory goes on after the last pass, on a canvas that does not change any more.
    assert run.canvases.equal(STORED[f"{name}.trajectory"][: run.steps + 1])
    assert run.counts[:, 0].tolist() == setting["counts"][: run.steps]
    assert not any(setting["counts"][run.steps :])
    assert run.tokens.tolist() == setting["final"]
    assert (run.tokens[:, -1] == PAD).all()


def deterministic(setting: dict[str, Any]) -> bool:
    """Whether the last position is the only difference to the authors' code; it ranks equal entropies otherwise."""
    return setting["seed"] is None and setting["name"] != "ties"


@pytest.mark.parametrize(
    "setting", [s for s in SAMPLING["settings"] if deterministic(s)], ids=lambda setting: setting["name"]
)
def test_with_their_padding_in_the_prompt_the_default_is_the_original(setting: dict[str, Any]) -> None:
    name, given = setting["name"], settings_of(setting)
    masks = torch.full((1, given["gen_length"] - 1), MASK)
    canvas = torch.cat([STORED[f"{name}.prompt"], masks, torch.tensor([[PAD]])], 1)
    run = dl.denoise(loaded(GOLDEN), canvas, **given | {"gen_length": 0})
    assert run.canvases.equal(STORED[f"{name}.trajectory"][: run.steps + 1])


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("bound", [None, 2.0])
def test_a_row_is_what_it_is_alone(greedy: bool, bound: float | None) -> None:
    model = tiny("rnd1")
    options: dict[str, Any] = {
        "gen_length": 9, "steps": 5, "temperature": 0.6, "greedy": greedy, "entropy_bound": bound, "top_p": 0.9,
        "seed": 5,
    }  # fmt: skip
    prompts = [[1, 2, 3, 4], [5, 63, 7], [8]]
    together = dl.denoise(model, prompts, **options)
    assert together.masks_left.tolist() == [0, 0, 0]
    for row, prompt in enumerate(prompts):
        alone = dl.denoise(model, [prompt], **options)
        kept = together.attention_mask[row]
        # Steps at which this row has no mask left run for the others.
        assert together.canvases[: alone.steps + 1, row, kept].equal(alone.canvases[:, 0])
        assert together.canvases[-1, row, kept].equal(alone.canvases[-1, 0])


def entropies(logits: Tensor, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor]:
    """Entropy of the filtered distribution of every position, in nats, and its probabilities; plain loops."""
    found, kept = [], []
    for row in logits.double():
        probabilities = row.softmax(-1)
        keep = list(range(len(row)))
        if top_k is not None:
            keep = row.topk(top_k).indices.tolist()
        if top_p is not None:
            among = torch.full_like(row, -torch.inf)
            among[keep] = row[keep]
            total, nucleus = 0.0, []
            for token in among.argsort(descending=True).tolist()[: len(keep)]:
                nucleus.append(token)
                total += float(among.softmax(-1)[token])
                if total > top_p:
                    break
            keep = nucleus
        probabilities = torch.zeros_like(row)
        probabilities[keep] = row[keep].softmax(-1)
        found.append(-sum(p * p.log() for p in probabilities if p > 0))
        kept.append(probabilities)
    return torch.stack([torch.as_tensor(value) for value in found]), torch.stack(kept)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (5, None), (None, 0.7), (6, 0.8)])
@pytest.mark.parametrize("bound", [None, 1.5])
def test_a_step_in_float64(top_k: int | None, top_p: float | None, bound: float | None) -> None:
    """The authors' entropies are NaN under a filter (0 times -inf); ours are those of what the filter keeps."""
    model, steps, length = tiny("rnd1"), 4, 10
    mask = model.config.mask_token_id
    run = dl.denoise(
        model, [[1, 2, 3]], gen_length=length, steps=steps, temperature=0.7, greedy=True, top_k=top_k, top_p=top_p,
        entropy_bound=bound,
    )  # fmt: skip
    for step in range(run.steps):
        canvas = run.canvases[step]
        with torch.no_grad():
            logits = model(input_ids=canvas).logits[0] / 0.7
        where = (canvas[0] == mask).nonzero().flatten()
        # The output at i - 1 predicts position i; [MASK] is no proposal, and under a filter no choice either.
        shifted = logits[where - 1]
        if top_k is not None or top_p is not None:
            shifted = shifted.index_fill(-1, torch.tensor([mask]), -torch.inf)
        entropy, probabilities = entropies(shifted, top_k, top_p)
        proposed = probabilities.index_fill(-1, torch.tensor([mask]), 0.0).argmax(-1)
        assert run.proposals[step, 0, where].equal(proposed)
        left = 0 if step == steps - 1 else int(length * (steps - 1 - step) / steps)
        if bound is None:
            torch.testing.assert_close(run.confidence[step, 0, where].double(), -entropy, atol=2e-5, rtol=1e-5)
            chosen = where[entropy.argsort()[: len(where) - left]]
        else:
            confidence = probabilities.gather(-1, proposed[:, None]).squeeze(-1).log()
            order, number = confidence.argsort(descending=True), 0
            while number < len(order) and (
                entropy[order[: number + 1]].sum() - entropy[order[: number + 1]].max() <= bound
            ):
                number += 1
            chosen = where[order] if step == steps - 1 else where[order[:number]]
        assert run.unmasked[step, 0].nonzero().flatten().tolist() == sorted(chosen.tolist())
    assert (run.tokens != mask).all()


def test_temperature_0_ranks_by_the_entropy_at_1() -> None:
    model = tiny("rnd1")
    cold = dl.denoise(model, [[1, 2, 3]], gen_length=8, steps=4, temperature=0)
    greedy = dl.denoise(model, [[1, 2, 3]], gen_length=8, steps=4, temperature=1.0, greedy=True)
    assert cold.canvases.equal(greedy.canvases)
    assert cold.confidence.equal(greedy.confidence)


def test_masks_that_are_put_back_are_written_again() -> None:
    model = tiny("rnd1")
    mask = model.config.mask_token_id

    def put_back(step: int, canvas: Tensor) -> Tensor:
        if step == 3:
            canvas[:, 3:7] = mask
        return canvas

    run = dl.denoise(model, [[1, 2, 3]], gen_length=8, steps=6, temperature=0, on_canvas=put_back)
    assert (run.masked[3, 0, 3:7]).all()
    assert (run.tokens != mask).all()
    assert run.counts[:3, 0].tolist() == [2, 1, 1]  # 8, 6, 5, 4 masks: floor(8 * 5 / 6), floor(8 * 4 / 6), 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"entropy_bound": -0.1}, "entropy_bound is -0.1"),
        ({"eb_gamma": 0.1}, "eb_gamma is entropy_bound here"),
        ({"num_diffusion_steps": 4}, "num_diffusion_steps is steps here"),
        ({"remasking": "entropy"}, "the rnd1 sampler has no setting 'remasking'"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(tiny("rnd1"), [[1, 2]], gen_length=4, **options)


def test_numbers_belong_to_outputs_also_where_the_first_position_is_masked() -> None:
    """With quirks position i takes what is drawn for the output at i - 1, the first its likeliest token."""
    model, seed = tiny("rnd1"), 4
    mask = model.config.mask_token_id
    prompt = torch.tensor([[mask, 2, mask, 3]])
    run = dl.denoise(model, prompt, gen_length=5, steps=1, temperature=1.3, seed=seed, reference_quirks=True)
    with torch.no_grad():
        logits = model(input_ids=run.canvases[0]).logits[0].index_fill(-1, torch.tensor([mask]), -torch.inf) / 1.3
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed)).squeeze(-1)
    written = run.unmasked[0, 0].nonzero().flatten()
    assert written.tolist() == [0, 2, 4, 5, 6, 7]
    assert run.tokens[0, written[1:]].equal(drawn[written[1:] - 1])
    assert run.tokens[0, 0] == logits[0].argmax()
