"""DreamOn's sampler: steps by hand in float64, unequal rows, gaps, room, statistics, hooks, hosts, resumed runs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_random, mask_top_sinks
from dlm_lens.sampling.moved_tokens import at_places
from dlm_lens.sampling.run_rows import first_prompt
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken

EXPAND, DELETE, MASK = 60, 62, 63
PROMPTS = [[5, 9, MASK, MASK, 14, 3, 7], [4, MASK, 6, MASK, MASK, 8], [5, 9, 14]]
RUN: dict[str, Any] = {"gen_length": 8, "temperature": 0.9, "top_p": 1.0, "seed": [1, 2, 3]}
GREEDY: dict[str, Any] = RUN | {"temperature": 0.0, "expand_budget": 6, "seed": 0}


def resizing(**fields: Any) -> Any:
    """A tiny network that often proposes the two tokens that change the length."""
    model: Any = tiny("dreamon", **{"seed": 3} | fields)
    with torch.no_grad():
        model.lm_head.weight[[EXPAND, DELETE]] *= 2
    return model


def lengths(run: dl.DenoisingRun, row: int) -> list[int]:
    """How many positions of a row each step sees."""
    return run.seen_content[: int(run.row_steps[row]), row].sum(-1).tolist()


def by_hand(model: Any, prompt: list[int], settings: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """The text before each greedy step and at the end, as lists, and the entropies by which each step chose."""
    text, grown, budget = list(prompt), settings["gen_length"], settings["expand_budget"]
    if MASK not in text:
        text, grown = text + [MASK] * 4, grown - 4
    texts, entropies = [list(text)], []
    while MASK in text:
        logits = forward64(model, torch.tensor([text]))["logits"][0]
        logits = torch.cat([logits[:1], logits[:-1]])
        if grown <= 0 or budget <= 0:
            logits[:, EXPAND] = -torch.inf
        likely = logits.softmax(-1)
        entropy = -(likely * torch.log(likely + 1e-10)).sum(-1)
        masks = torch.tensor(text) == MASK
        at = int(entropy.masked_fill(~masks, torch.inf).argmin())
        logits[:, MASK] = -torch.inf
        token = int(logits[at].argmax())
        new = {EXPAND: [MASK, MASK], DELETE: []}.get(token, [token])
        text[at : at + 1] = new
        grown -= len(new) - 1
        budget -= token == EXPAND
        texts.append(list(text))
        entropies.append(float(entropy[at]))
    return texts, entropies


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_steps_are_those_of_lists_of_tokens_in_float64(seed: int) -> None:
    model = resizing(seed=seed)
    run = dl.denoise(model, PROMPTS, **GREEDY)
    for row, prompt in enumerate(PROMPTS):
        texts, entropies = by_hand(model, prompt, GREEDY)
        assert int(run.row_steps[row]) == len(texts) - 1
        for step, text in enumerate(texts[:-1]):
            seen = run.seen_content[step, row]
            assert run.canvases[step, row, seen].tolist() == text
            best = float(run.confidence[step, row].max())
            assert -best == pytest.approx(entropies[step], abs=1e-5)
        assert run.tokens[row][run.attention_mask[row] & ~run.masked[-1, row]].tolist() == texts[-1]


def test_the_runs_of_these_tests_grow_and_shrink() -> None:
    changes = set()
    for seed in (3, 5, 8):
        run = dl.denoise(resizing(seed=seed), PROMPTS, **GREEDY)
        for row in range(3):
            each = lengths(run, row)
            changes |= {after - before for before, after in pairwise(each)}
    assert changes == {-1, 0, 1}


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.0}, {"tokens_per_step": 3}, {"delete_to_right": True}, {"alg_temp": 0.5},
        {"top_k": 5}, {"gen_length": 1}, {"remasking": "topk_margin"},
        {"expand_budget": 1, "remasking": "maskgit_plus"},
    ],
)  # fmt: skip
def test_a_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    model, given = resizing(seed=5), RUN | options
    together = dl.denoise(model, PROMPTS, **given)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **given | {"seed": RUN["seed"][row]})
        kept = together.attention_mask[row]
        assert int(together.row_steps[row]) == alone.steps
        assert together.canvases[: alone.steps + 1, row, kept].equal(alone.canvases[:, 0])
        assert together.seen_content[: alone.steps, row, kept].equal(alone.seen_content[:, 0])
        assert together.counts[: alone.steps, row].equal(alone.counts[:, 0])
        assert not together.counts[alone.steps :, row].any()
        assert (together.texts[row], together.answers[row]) == (alone.texts[0], alone.answers[0])
        most = prompt.count(MASK) + given["gen_length"]
        assert (alone.answer & ~alone.masked[-1])[0].sum() <= most


def test_texts_hold_what_follows_a_gap_and_answers_what_fills_it() -> None:
    run = dl.denoise(resizing(), PROMPTS, **GREEDY)
    model = resizing()
    for row, prompt in enumerate(PROMPTS):
        final = by_hand(model, prompt, GREEDY)[0][-1]
        assert run.texts[row] == " ".join(f"w{token}" for token in final)
        before = next((place for place, token in enumerate(prompt) if token == MASK), len(prompt))
        after = len(prompt) - 1 - max((place for place, token in enumerate(prompt) if token == MASK), default=-1)
        filled = final[before : len(final) - (after if MASK in prompt else 0)]
        assert run.answers[row] == " ".join(f"w{token}" for token in filled)


def test_without_room_masks_are_decided_or_deleted() -> None:
    model = resizing(seed=8)
    run = dl.denoise(model, PROMPTS[0], **GREEDY | {"gen_length": 0})
    assert run.tokens.shape[1] == len(PROMPTS[0])
    assert run.seen_content[0].all()
    assert (run.proposals[run.unmasked] != EXPAND).all()
    with pytest.raises(ValueError, match="the prompt holds no mask token"):
        dl.denoise(model, PROMPTS[2], **GREEDY | {"gen_length": 0})
    short = dl.denoise(model, PROMPTS[2], **GREEDY | {"gen_length": 2})  # fewer positions than it would begin with
    assert short.seen_content[0, 0].sum() == 5


def test_a_token_moves_with_the_masks_before_it() -> None:
    """The bookkeeping of positions: a moved token is unmasked where it arrives, and its old position is opened."""
    moved = 0
    for seed in range(16):
        run = dl.denoise(resizing(seed=seed), PROMPTS, **RUN | {"tokens_per_step": 2})
        decided = ~run.masked
        for step in range(run.steps):
            before, after, changed = decided[step], decided[step + 1], run.canvases[step] != run.canvases[step + 1]
            assert run.unmasked[step].equal(~before & after)
            assert run.revised[step].equal(before & (~after | changed))
            assert run.canvases[step + 1][run.unmasked[step]].equal(run.proposals[step][run.unmasked[step]])
            moved += int(run.revised[step].sum())
        # A step decided every token that was no token of the prompt, also of one between two gaps that has moved.
        given = at_places(~run.masked, run.token_places, False)[0]
        content = run.attention_mask & decided[-1]
        assert (run.last_written >= 0)[content].equal(~given[content])
        assert (~given & content).sum(-1).equal((run.last_written >= 0).sum(-1))
    assert moved > 5


def test_edits_of_the_canvas_are_filled_in_again_and_join_the_text() -> None:
    model, opened = resizing(), list[int]()

    def edit(step: int, canvas: Tensor) -> Tensor | None:
        if step != 1:
            return None
        canvas[0, [1, 2, 13]] = MASK  # before the gap, in it, and after it
        opened.append(int((canvas[0] == MASK).sum()))
        return canvas

    plain = dl.denoise(model, PROMPTS[:1], **GREEDY)
    run = dl.denoise(model, PROMPTS[:1], on_canvas=edit, **GREEDY)
    assert opened[0] > int(plain.masked[1].sum()) + 1
    assert run.steps > plain.steps
    assert not torch.isin(run.tokens[0, [1, 13]], torch.tensor([MASK, EXPAND, DELETE])).any()
    assert run.tokens[0, [0, 12, 14]].tolist() == [5, 14, 7]  # the positions of the prompt stay
    left = run.masked[-1, 0, 2:12].int()
    assert (left.diff() >= 0).all()  # the room alone is open

    def write(step: int, canvas: Tensor) -> Tensor | None:
        if step:
            return None
        canvas[0, 6] = 21  # in the room, which begins at 4
        return canvas

    run = dl.denoise(model, PROMPTS[:1], on_canvas=write, **GREEDY)
    assert run.seen_content[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 6, *range(12, 15)]
    assert 21 in run.tokens[0].tolist()


def test_received_attention_is_that_of_the_text_without_its_room() -> None:
    model = resizing(seed=5)
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected, hidden = recording.expected(), 0
    for step in range(run.steps):
        for row in range(3):
            if not run.running[step, row]:
                continue
            seen = run.seen_content[step, row]
            kept = forward64(model, run.canvases[step, row, seen][None])
            torch.testing.assert_close(expected[step, row, seen].double(), torch.ones(int(seen.sum())).double())
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, seen].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
            room = run.attention_mask[row] & ~seen
            assert received.values[step, row, ..., room].isnan().all()
            hidden += int(room.sum())
    assert hidden > 20
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)
    part = recording.select(batch=1, step=[1, 2])
    assert part.run.seen_content.equal(run.seen_content[1:3, 1:2])


def test_probes_of_a_run_read_the_masks_of_each_step() -> None:
    """What a probe reads at a step is of the masks that the step saw, whichever step was entered before."""
    model = resizing(seed=5)
    run = dl.denoise(model, PROMPTS, **GREEDY)
    seen = run.masked[:-1] & run.seen_content & run.running[..., None]
    found = dl.probes.commitment(model, run)
    assert (found.token >= 0).equal(seen)
    own = found.token[seen] == run.proposals[seen]
    moved = (run.unmasked & run.confidence.isneginf())[seen]
    # A token that a full row bans, or that moved, is not the network's most likely one there.
    assert (own | (found.token[seen] == EXPAND) | moved | run.unmasked[seen]).all()
    replayed = dl.replay(model, run, hooks=[mask_positions(0)])
    assert replayed.predicted.equal(seen)


def test_explore_repeats_a_row_with_a_gap() -> None:
    model = resizing(seed=5)
    run = dl.denoise(model, PROMPTS, **RUN)
    for row, prompt in enumerate(PROMPTS):
        assert first_prompt(run, row).tolist() == prompt
        assert dl.viz.explore(model, run, row=row) is not None


@pytest.mark.parametrize("hooks", [[mask_positions(1)], [mask_top_sinks(1)]])
def test_hooks_act_in_every_row_as_alone(hooks: list[Any]) -> None:
    model = resizing(seed=5).double()  # so that equal sinks are not chosen by the batch's rounding
    # Of one length, where the hook names a position of the canvas.
    prompts = PROMPTS if hooks == [mask_top_sinks(1)] else [PROMPTS[0], [5, *PROMPTS[0][:6]]]
    together = dl.denoise(model, prompts, hooks=hooks, **GREEDY)
    for row, prompt in enumerate(prompts):
        alone = dl.denoise(model, [prompt], hooks=hooks, **GREEDY)
        assert together.tokens[row][together.attention_mask[row]].equal(alone.tokens[0])
    assert not together.tokens.equal(dl.denoise(model, prompts, **GREEDY).tokens)


def test_joined_recordings_keep_the_room_of_their_rows(tmp_path: Path) -> None:
    model, given = resizing(seed=5), GREEDY | {"batch_size": 2}
    prompts = [*PROMPTS, [5, *[MASK] * 7, 7, 8, 9]]
    recording = dl.record(model, prompts, [dl.ReceivedAttention(min_viewers=1)], to=tmp_path / "joined", **given)
    run, values = recording.run, dl.received_of(recording).values
    for row, prompt in enumerate(prompts):
        alone, kept = dl.denoise(model, [prompt], **GREEDY), run.attention_mask[row]
        assert int(run.row_steps[row]) == alone.steps
        assert run.seen_content[: alone.steps, row, kept].equal(alone.seen_content[:, 0])
        assert run.texts[row] == alone.texts[0]
    again = dl.received_over_steps(model, run, min_viewers=1).values
    torch.testing.assert_close(
        again, values, atol=1e-5, rtol=1e-4, equal_nan=True
    )  # other rows of the same product


def test_a_traced_run_is_the_run() -> None:
    model = resizing(seed=5)
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        valid = [].save()
        for step in tracer.steps[:]:
            valid.append((int(step), step.valid.clone(), lm.layers[0].attn.pattern.clone()))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert len(valid) == plain.steps
    for step, seen, pattern in valid:
        assert seen.equal(plain.seen_content[step])
        assert not pattern.masked_fill(seen[:, None, None], 0).any()


def test_a_resumed_recording_is_the_unbroken_one(tmp_path: Path) -> None:
    whole = resumed_as_unbroken(resizing(seed=5), PROMPTS, tmp_path / "stored", **RUN)
    assert dl.Recording.load(tmp_path / "stored").run.seen_content.equal(whole.run.seen_content)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype) -> None:
    run = dl.denoise(resizing(seed=5).to(dtype), PROMPTS, **RUN)
    assert not run.masks_left.any()
    assert not (run.masked[-1] & ~run.answer).any()  # the room alone is open
    assert not run.confidence.isnan().any()


def test_what_cannot_be_is_refused() -> None:
    model = resizing()
    with pytest.raises(ValueError, match="denoises one prompt at a time, and there are 3"):
        dl.denoise(model, PROMPTS, **RUN | {"seed": 1}, reference_quirks=True)
    with pytest.raises(ValueError, match="has no setting 'steps'"):
        dl.denoise(model, PROMPTS, steps=4, **RUN)
    with pytest.raises(ValueError, match=r"'number_transfer_tokens'.*tokens_per_step"):
        dl.denoise(model, PROMPTS, number_transfer_tokens=2, **RUN)
    with pytest.raises(ValueError, match="start_length is 0; it must be at least 1"):
        dl.denoise(model, PROMPTS, start_length=0, **RUN)
    with pytest.raises(ValueError, match="remasking 'origin' is none of DreamOn's"):
        dl.denoise(model, PROMPTS, remasking="origin", **RUN)
    model.config.eos_token_id = None
    with pytest.raises(ValueError, match="has no eos_token_id; give one to"):
        dl.denoise(model, PROMPTS, **RUN)


def test_random_columns_do_not_depend_on_the_room() -> None:
    model, top = resizing(seed=4), mask_top_sinks(2)
    for hook in (mask_random(2), mask_random(like=top), mask_random(like=top, match="mass")):
        short, long = (
            dl.denoise(model, PROMPTS, gen_length=room, temperature=0, expand_budget=6, hooks=[hook])
            for room in (8, 12)
        )
        for row in range(len(PROMPTS)):
            texts = [run.tokens[row, run.seen_content[-1, row]].tolist() for run in (short, long)]
            assert texts[0] == texts[1]
        assert short.seen_content.shape[-1] < long.seen_content.shape[-1]
