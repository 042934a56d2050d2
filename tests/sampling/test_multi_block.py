"""Multi-block decoding: the authors' engine token for token, the rule by hand, batches, recordings, traces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import BlockCounts, BlockLayout, RunningBlocks
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.recording import rerun
from dlm_lens.sampling import StoredRun
from dlm_lens.sampling.samplers.multi_block import SelectInBlocks
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken
from tests.sampling.test_dmax_golden import SAMPLING as LLADA2

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "multi_block" / "sampling.json").read_text())
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
RUN: dict[str, Any] = {
    "gen_length": 18,
    "block_length": 4,
    "running_blocks": 3,
    "add_block_threshold": 0.25,
    "semi_complete_threshold": 0.75,
    "threshold": 0.25,
}


def model_of(family: str = "sdar", head: float = 4.0, **config: Any) -> Any:
    """A random network whose probabilities reach the thresholds."""
    model: Any = tiny(family, sampler="multi_block", **config)
    with torch.no_grad():
        model.lm_head.weight.mul_(head)
    model.config.eos_token_id = model.config.eot_token_id = None
    return model


def network_of(case: dict[str, Any]) -> Any:
    own = {"mask_token_id": LLADA2["mask_token_id"]} if case["family"] == "llada2" else {}
    model: Any = dl.load(GOLDEN / case["family"], sampler="multi_block", check=False, **own)
    with torch.no_grad():
        model.lm_head.weight.mul_(case["head"])
    model.config.eos_token_id, model.config.eot_token_id = case["eos_token_id"], None
    return model


def running_by_hand(
    masked: list[bool], content: list[bool], length: int, most: int, share: float
) -> tuple[int, int] | None:
    """The running blocks of one row, as its first and its last position."""
    first = content.index(True)
    blocks = [range(start, min(start + length, len(masked))) for start in range(first, len(masked), length)]
    opened = [[place for place in block if masked[place]] for block in blocks]
    begin = next((i for i, left in enumerate(opened) if left), None)
    if begin is None:
        return None
    last = begin
    while last + 1 - begin < most and last + 1 < len(blocks) and content[blocks[last + 1][0]]:
        if (len(blocks[last]) - len(opened[last])) / len(blocks[last]) < share:
            break
        last += 1
    return blocks[begin][0], blocks[last][-1]


def chosen_by_hand(
    bounds: tuple[int, int], masked: list[bool], sure: Tensor, settings: dict[str, Any], length: int = 4
) -> list[int]:
    """The positions that a step writes in one row, block by block of its running ones."""
    begin, last = bounds
    chosen = []
    for start in range(begin, last + 1, length):
        block = [place for place in range(start, min(start + length, last + 1)) if masked[place]]
        above = [place for place in block if sure[place] > settings["threshold"]]
        decided = 1.0 if start == begin else 1 - sum(masked[start - length : start]) / length
        if block and not above and decided >= settings["semi_complete_threshold"]:
            above = [max(block, key=lambda place: float(sure[place]))]
        chosen += above
    return chosen


@pytest.mark.parametrize("use_cache", [True, False])
@BY_NAME
def test_reference_quirks_reproduce_the_original(case: dict[str, Any], use_cache: bool) -> None:
    given = {"reference_quirks": True, "use_cache": use_cache, **case["settings"]}
    run = dl.denoise(network_of(case), [case["prompt"]], **given)
    theirs = len(case["canvases"])
    assert run.canvases[: run.steps, 0].tolist() == case["canvases"][: run.steps]
    assert [list(span) for span in run.spans] == case["spans"][: run.steps]
    start, written = len(case["prompt"]), len(case["tokens"])
    assert run.tokens[0, start : start + written].tolist() == case["tokens"]
    # The engine goes on until every running block is decided; here a row ends with the block of its end.
    assert run.steps == theirs if case["eos_token_id"] is None else 0 < run.steps <= theirs


@BY_NAME
def test_a_finished_block_leaves_its_place_at_once(case: dict[str, Any]) -> None:
    """Without quirks the running blocks follow from the canvas alone."""
    run, given = dl.denoise(network_of(case), [case["prompt"]], **case["settings"]), case["settings"]
    for step in range(run.steps):
        masked, content = run.masked[step, 0].tolist(), run.attention_mask[0].tolist()
        numbers = given["block_length"], given["running_blocks"], given["add_block_threshold"]
        bounds = running_by_hand(masked, content, *numbers)
        assert bounds is not None
        assert run.spans[step] == (bounds[0], bounds[1] + 1)
    waits = case["name"] in ("math", "four_blocks", "confident", "never_confident", "text_ends")
    assert (run.canvases[: run.steps, 0].tolist() != case["canvases"]) == waits


@pytest.mark.parametrize("family", ["sdar", "llada2"])
@pytest.mark.parametrize("given", [{}, {"running_blocks": 1}, {"threshold": 0.9, "semi_complete_threshold": 0.25}])
def test_the_rule_by_hand(family: str, given: dict[str, Any]) -> None:
    """Every step of every row from its canvas, its proposals and confidences, which are those of float64."""
    model, given = model_of(family, 2.0), RUN | given
    run, written, compared = dl.denoise(model, PROMPTS, **given), 0, 0
    for step in range(run.steps):
        for row in range(3):
            canvas, x0, sure = run.canvases[step, row], run.proposals[step, row], run.confidence[step, row]
            content, answer = run.attention_mask[row], run.answer[row]
            own = (content & run.in_own_blocks[row]).tolist()
            masked = (run.masked[step, row] & run.in_own_blocks[row]).tolist()
            numbers = 4, given["running_blocks"], given["add_block_threshold"]
            bounds = running_by_hand(masked, own, *numbers) if any(masked) else None
            if bounds is None or run.row_steps[row] <= step:
                assert run.canvases[step + 1, row].equal(canvas)
                continue
            begin, last = bounds
            assert run.in_block[step, row].nonzero().flatten().tolist() == list(range(begin, last + 1))
            places = [place for place in range(begin, last + 1) if masked[place]]
            assert sure.isfinite().nonzero().flatten().tolist() == places
            chosen = chosen_by_hand(bounds, masked, sure, given)
            wanted = canvas.clone()
            wanted[chosen] = x0[chosen]
            written += len(chosen)
            assert run.canvases[step + 1, row].equal(wanted)
            keep = content.clone()
            keep[last + 1 :] = False
            where = torch.arange(int(keep.sum()))
            visible = (where[None, :] // 4 <= where[:, None] // 4)[None, None]
            logits = forward64(model, canvas[keep][None], visible=visible)["logits"][0]
            logits[:, model.config.mask_token_id] = -torch.inf
            likely, known = logits.softmax(-1), sure[keep].isfinite()
            torch.testing.assert_close(
                sure[keep][known].double(),
                likely.gather(-1, x0[keep][:, None])[known, 0],
                # Of float32 probabilities of logits that the head multiplies by 4.
                rtol=1e-4,
                atol=2e-5,
            )
            assert x0[keep][known].equal(likely.argmax(-1)[known])
            compared += int(known.sum())
            assert not answer[:begin][run.masked[step, row, :begin]].any()
    assert written == int(run.answer.sum()) > 50
    assert compared > 75


@pytest.mark.parametrize("head", [2.0, 8.0])
def test_a_row_is_what_it_is_alone(head: float) -> None:
    model = model_of(head=head)
    together, whole = dl.denoise(model, PROMPTS, **RUN), dl.denoise(model, PROMPTS, use_cache=False, **RUN)
    assert together.canvases.equal(whole.canvases)
    uneven = 0
    for row, prompt in enumerate(PROMPTS):
        alone, content = dl.denoise(model, [prompt], **RUN), together.attention_mask[row]
        length, padding = alone.tokens.shape[1], int(together.padding[row])
        own = slice(0, alone.steps)
        assert together.row_steps[row] == alone.steps
        for name in ("canvases", "unmasked", "proposals"):
            theirs = getattr(together, name)[own][:, row][:, content][:, :length]
            assert theirs.equal(getattr(alone, name)[own, 0]), name
        assert together.in_block[own, row][:, content][:, :length].equal(alone.in_block[:, 0])
        assert together.answers[row] == alone.answers[0]
        uneven += sum(
            (start + padding, stop + padding) != span
            for (start, stop), span in zip(alone.spans, together.spans, strict=False)
        )
    assert uneven > 0  # rows had running blocks at unequal positions


def test_one_running_block_is_llada2s() -> None:
    """One block at once, each step by the threshold and at least the best mask: LLaDA2.0's rule."""
    model, other = model_of("llada2", 2.0), tiny("llada2", sampler="llada2")
    run = dl.denoise(model, PROMPTS[:1], **RUN | {"running_blocks": 1})
    other.load_state_dict(model.state_dict())
    other.config.eos_token_id = None
    given = {name: RUN[name] for name in ("gen_length", "block_length", "threshold")}
    # As many steps as a block has positions plan one token each.
    plain = dl.denoise(other, PROMPTS[:1], steps_per_block=4, **given)
    assert run.steps == 8 > 18 / 4
    assert plain.tokens.equal(run.tokens)


def test_a_row_ends_with_the_block_of_its_end() -> None:
    model = model_of(head=2.0)
    plain = dl.denoise(model, PROMPTS, **RUN)
    answer = plain.tokens[0, 7:].tolist()
    place = next(place for place in range(2, 9) if answer[place] not in answer[:place])
    model.config.eos_token_id = answer[place]
    ended = dl.denoise(model, PROMPTS[:1], **RUN)
    stop = (7 + place) // 4 * 4 + 4
    assert ended.tokens[0, :stop].equal(plain.tokens[0, :stop])
    assert ended.masks_left[0] > 0
    assert ended.steps < int(plain.row_steps[0])
    assert ended.steps == 1 + int(plain.step_of[0, :stop].max())


def test_masks_in_the_prompt_are_filled_in() -> None:
    model, mask = model_of(), 63
    assert model.config.mask_token_id == mask
    run = dl.denoise(model, [[1, 2, mask, 4, 5, 6, 7]], **RUN)
    assert run.masks_left.tolist() == [0]
    assert run.spans[0][0] == 0
    assert run.step_of[0, 2] >= 0


def test_a_planted_mask_runs_again() -> None:
    model, mask = model_of(), 63
    plain = dl.denoise(model, PROMPTS[:1], **RUN)
    late = plain.steps - 1

    def plant(step: int, canvas: Tensor) -> Tensor:
        if step == late:
            canvas[0, 8] = mask
        return canvas

    for use_cache in (True, False):
        run = dl.denoise(model, PROMPTS[:1], on_canvas=plant, use_cache=use_cache, **RUN)
        assert run.spans[late][0] == 8
        assert run.masks_left.tolist() == [0]
        assert run.step_of[0, 8] == late


@pytest.mark.parametrize("hooks", [(), (mask_top_sinks(1),)], ids=["plain", "hooks"])
@pytest.mark.parametrize("quirks", [False, True])
def test_a_rerun_sees_what_the_run_saw(hooks: tuple[Any, ...], quirks: bool) -> None:
    model, reducers = model_of(), [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
    prompts = PROMPTS[:1] if quirks else PROMPTS
    recorded = dl.record(model, prompts, reducers, hooks=hooks, reference_quirks=quirks, **RUN)
    again = rerun(model, recorded.run, reducers, hooks=hooks)
    assert set(again.arrays) == set(recorded.arrays)
    for name, values in recorded.arrays.items():
        torch.testing.assert_close(again.arrays[name], values, equal_nan=True, rtol=1e-4, atol=1e-5)
    step = recorded.run.steps // 2
    part = recorded.select(step=[step])
    alone = rerun(model, part.run, reducers, hooks=hooks)
    expected = recorded.arrays["received"][step]
    torch.testing.assert_close(alone.arrays["received"][0], expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_statistics_count_what_each_row_sees() -> None:
    """Received attention of a batch is that of its rows alone, whose running blocks end elsewhere."""
    model = model_of()
    together = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.record(model, [prompt], [dl.ReceivedAttention(min_viewers=1)], **RUN)
        content = together.run.attention_mask[row]
        theirs = dl.received_of(alone).values[:, 0]
        mine = dl.received_of(together).values[: len(theirs), row][..., content][..., : theirs.shape[-1]]
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_replayed_logits_are_those_of_the_run() -> None:
    model, seen = model_of(), list[Tensor]()
    run = dl.denoise(model, PROMPTS, on_logits=lambda _step, _canvas, logits: seen.append(logits.clone()), **RUN)
    stored, compared = StoredRun(model, run), 0
    for step in range(run.steps):
        predicted = stored.predicted(step)
        with stored.at(step), torch.no_grad():
            logits = stored.logits(stored.states(step))
        torch.testing.assert_close(logits, seen[step][predicted[:, : seen[step].shape[1]]], rtol=1e-4, atol=1e-4)
        compared += len(logits)
    assert compared > 50


@pytest.mark.parametrize("quirks", [False, True])
def test_a_recording_is_resumed(tmp_path: Path, quirks: bool) -> None:
    given = {**RUN, "running_blocks": 2, "reference_quirks": quirks}
    prompts = PROMPTS[:1] if quirks else PROMPTS
    whole = resumed_as_unbroken(model_of(head=2.0), prompts, tmp_path / "rec", passes=4, **given)
    assert whole.run.steps > 5


def test_traces_see_the_running_blocks() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        shapes = [].save()
        for _ in tracer.steps[:]:
            shapes.append(lm.layers[0].attn.pattern.shape[-1])
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert shapes == [stop for _, stop in plain.spans]
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[1:2]:
            lm.canvas[0, 1] = 9
        edited = tracer.result.save()
    assert edited.canvases[1, 0, 1] == 9
    assert not edited.masked[-1][edited.in_own_blocks].any()


def test_selection_in_blocks() -> None:
    select = SelectInBlocks(0.5)
    select.number = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]])
    select.forced = torch.tensor([[True, True, False, True, True]])
    sure = torch.tensor([[0.2, 0.9, 0.1, 0.4, 0.4, 0.3, 0.2, 0.5, 0.7, 0.4, 0.4]])
    eligible = torch.ones_like(sure, dtype=torch.bool)
    eligible[0, 9] = False
    found = select(sure, eligible, torch.tensor([1]))
    # One above; the first of two equals; a block that need not write; one above beside one as sure; one eligible.
    assert found[0].nonzero().flatten().tolist() == [1, 3, 8, 10]


def test_shares_are_compared_exactly() -> None:
    layout = BlockLayout(10, torch.tensor([0, 0]))
    masked = torch.ones(2, 20, dtype=torch.bool)
    masked[0, :3], masked[1, :2] = False, False
    content = torch.ones_like(masked)
    # 3 / 10 is 0.3 as Python's number; its float32 quotient is above it, and a share of 0.3 in float32 below.
    assert BlockCounts.of(layout, content, masked).reached(0.3)[:, 1].tolist() == [True, False]
    running = RunningBlocks(2, 0.3).positions(layout, content, masked)
    assert running.sum(-1).tolist() == [20, 10]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"running_blocks": 0}, "running_blocks is 0; it must be at least 1"),
        (
            {"add_block_threshold": 0.0},
            "add_block_threshold is 0.0; it must be above 0 and at most 1",
        ),
        (
            {"semi_complete_threshold": 1.5},
            "semi_complete_threshold is 1.5; it must be above 0 and at most 1",
        ),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"buffer_size": 3}, "has no setting 'buffer_size'.*running_blocks"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(model_of(), [[1, 2]], gen_length=4, **given)


def test_reference_quirks_take_one_prompt() -> None:
    with pytest.raises(ValueError, match="reference_quirks with 3 prompts: a stored step tells one row's running"):
        dl.denoise(model_of(), PROMPTS, reference_quirks=True, **RUN)
