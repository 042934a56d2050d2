"""D2F: the authors' decoding token for token, its attention and probabilities in float64, batches, reruns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens.recording import rerun
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_multi_block import chosen_by_hand, running_by_hand

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "d2f" / "sampling.json").read_text())
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
RUN: dict[str, Any] = {
    "gen_length": 18,
    "block_length": 4,
    "add_block_threshold": 0.25,
    "semi_complete_threshold": 0.75,
    "threshold": 0.25,
}


def model_of(family: str = "dream", head: float = 2.0) -> Any:
    model: Any = tiny(family, sampler="d2f")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(head)
    model.config.eos_token_id = model.config.eot_token_id = None
    return model


def network_of(case: dict[str, Any]) -> Any:
    model: Any = dl.load(GOLDEN / case["family"], sampler="d2f", check=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(case["head"])
    model.config.eos_token_id, model.config.eot_token_id = case["eos_token_id"], None
    return model


@pytest.mark.parametrize("given", [{}, {"use_cache": False}, {"reference_quirks": True}])
@BY_NAME
def test_the_run_is_the_original(case: dict[str, Any], given: dict[str, Any]) -> None:
    run = dl.denoise(network_of(case), [case["prompt"]], **case["settings"], **given)
    ends, start, written = case["eos_token_id"] is not None, len(case["prompt"]), len(case["tokens"])
    # The authors' code goes on until every running block is decided; here a row ends with the block of its end.
    assert run.steps == len(case["canvases"]) if not ends else 0 < run.steps <= len(case["canvases"])
    assert run.tokens[0, start : start + written].tolist() == case["tokens"]
    if not ends or given.get("reference_quirks"):  # without quirks blocks join after an end of the text too
        assert run.canvases[: run.steps, 0].tolist() == case["canvases"][: run.steps]
        assert [stop for _, stop in run.spans] == case["stops"][: run.steps]


@FAMILIES
@pytest.mark.parametrize("given", [{}, {"running_blocks": 2}, {"top_p": 0.8}, {"add_block_threshold": 1.0}])
def test_the_rule_by_hand(family: str, given: dict[str, Any]) -> None:
    """Every step of every row from its canvas, its proposals and confidences, which are those of float64."""
    model, settings = model_of(family), RUN | given
    run, written, compared, several = dl.denoise(model, PROMPTS, **settings), 0, 0, 0
    for step in range(run.steps):
        for row in range(3):
            canvas, x0, sure = run.canvases[step, row], run.proposals[step, row], run.confidence[step, row]
            answer = [False] * 7 + run.masked[step, row, 7:].tolist()
            most = settings.get("running_blocks") or 18
            bounds = running_by_hand(answer[7:], [True] * 18, 4, most, settings["add_block_threshold"])
            if bounds is None or run.row_steps[row] <= step:
                assert run.canvases[step + 1, row].equal(canvas)
                continue
            begin, last = bounds[0] + 7, bounds[1] + 7
            several += last - begin >= 4
            assert run.in_block[step, row].nonzero().flatten().tolist() == list(range(begin, last + 1))
            places = [place for place in range(begin, last + 1) if answer[place]]
            assert sure.isfinite().nonzero().flatten().tolist() == places
            chosen = chosen_by_hand((begin, last), answer, sure, settings)
            wanted = canvas.clone()
            wanted[chosen] = x0[chosen]
            written += len(chosen)
            assert run.canvases[step + 1, row].equal(wanted)
            keep = run.attention_mask[row].clone()
            keep[last + 1 :] = False
            prompt, where = int(keep[:7].sum()), torch.arange(int(keep.sum()))
            number = (where - prompt).div(4, rounding_mode="floor").clamp(min=-1)
            visible = (number[None, :] <= number[:, None])[None, None]
            logits = forward64(model, canvas[keep][None], visible=visible)["logits"][0]
            if family == "dream":  # the output at i - 1 predicts position i
                logits = torch.cat([logits[:1], logits[:-1]])
            known = sure[keep].isfinite()
            logits, tokens = logits[known], x0[keep][known]
            mask = model.config.mask_token_id
            if "top_p" in given:
                logits[:, mask] = -torch.inf
                ranked, order = logits.sort(descending=True)
                beyond = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1) > settings["top_p"]
                logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
            likely = logits.softmax(-1)
            torch.testing.assert_close(
                sure[keep][known].double(), likely.gather(-1, tokens[:, None])[:, 0], rtol=1e-4, atol=2e-5
            )
            likely[:, mask] = -1
            assert tokens.equal(likely.argmax(-1))
            compared += len(tokens)
    assert written == int(run.answer.sum()) == 54
    assert compared > 60
    assert (several > 0) == (given != {"add_block_threshold": 1.0})


@FAMILIES
def test_a_row_is_what_it_is_alone(family: str) -> None:
    model = model_of(family)
    together, whole = dl.denoise(model, PROMPTS, **RUN), dl.denoise(model, PROMPTS, use_cache=False, **RUN)
    assert together.canvases.equal(whole.canvases)
    for row, prompt in enumerate(PROMPTS):
        alone, content = dl.denoise(model, [prompt], **RUN), together.attention_mask[row]
        assert together.row_steps[row] == alone.steps
        for name in ("canvases", "unmasked", "proposals", "in_block"):
            theirs = getattr(together, name)[: alone.steps, row][:, content]
            assert theirs.equal(getattr(alone, name)[: alone.steps, 0]), name
    assert (together.in_block[:, 0] != together.in_block[:, 1]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@FAMILIES
def test_the_cache_in_half_precision(family: str, dtype: torch.dtype) -> None:
    """LLaDA rotates in float32, and transformers' cache took the dtype of its keys for the values too."""
    model = model_of(family).to(dtype)
    kept, whole = dl.denoise(model, PROMPTS, **RUN), dl.denoise(model, PROMPTS, use_cache=False, **RUN)
    assert kept.masks_left.tolist() == [0, 0, 0]
    step = torch.arange(min(kept.steps, whole.steps))
    alike = (kept.canvases[step] == whole.canvases[step]).flatten(1).all(-1)
    sure, expected = kept.confidence[step][alike], whole.confidence[step][alike]
    assert alike.sum() > 1  # the second block's steps read the cache
    # The kernel adds in another order for other numbers of queries: a few roundings to 8 bits.
    torch.testing.assert_close(sure, expected, rtol=0.05, atol=0.02)
    likely = [dl.log_likelihood(each, PROMPTS, [[5, 6], [7], [8]]).value for each in (model, model.float())]
    # Sums of up to two logarithms, whose logits of up to 10 are rounded to 8 bits.
    torch.testing.assert_close(likely[0], likely[1], rtol=0.05, atol=0.2, check_dtype=False)


@FAMILIES
def test_masks_in_the_prompt_are_filled_in(family: str) -> None:
    model = model_of(family)
    run = dl.denoise(model, [[1, 2, model.config.mask_token_id, 4, 5], [3, 4]], **RUN)
    assert run.masks_left.tolist() == [0, 0]
    assert run.in_block[0, 0].tolist()[:5] == [True] * 5
    assert not run.in_block[0, 1, :5].any()


@pytest.mark.parametrize("quirks", [False, True])
def test_a_rerun_sees_what_the_run_saw(quirks: bool) -> None:
    model, reducers = model_of(), [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
    given = {**RUN, "gen_length": 16, "reference_quirks": quirks}
    recorded = dl.record(model, PROMPTS[:1] if quirks else PROMPTS, reducers, **given)
    again = rerun(model, recorded.run, reducers)
    for name, values in recorded.arrays.items():
        torch.testing.assert_close(again.arrays[name], values, equal_nan=True, rtol=1e-4, atol=1e-5)
    part = recorded.select(step=[recorded.run.steps // 2])
    alone = rerun(model, part.run, reducers).arrays["received"]
    torch.testing.assert_close(alone, part.arrays["received"], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_recording_is_resumed(tmp_path: Path) -> None:
    resumed_as_unbroken(model_of(), PROMPTS, tmp_path / "rec", passes=4, **RUN)


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        (PROMPTS, {}, "reference_quirks with 3 prompts: a stored step tells one row's running blocks"),
        ([[1, 63, 3]], {}, r"the authors' code keeps a \[MASK\] in a prompt as a token"),
        (
            [[1, 2]],
            {"gen_length": 18},
            "gen_length is 18, and the authors' code decodes whole blocks of 4 alone; give 16",
        ),
    ],
)
def test_what_reference_quirks_do_not_take(prompts: Any, given: dict[str, Any], message: str) -> None:
    model = model_of()
    assert model.config.mask_token_id == 63
    with pytest.raises(ValueError, match=message):
        dl.denoise(model, prompts, reference_quirks=True, **{**RUN, "gen_length": 16, **given})
