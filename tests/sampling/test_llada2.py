"""LLaDA2's samplers as ours: batches, ends, edits, recordings, hooks and hosts, against a float64 network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.registry import fills_masks
from dlm_lens.hooks import at_progress, mask_positions, mask_top_sinks
from dlm_lens.sampling.samplers.base import Revise
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken, resumed_recording

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
RUN: dict[str, Any] = {"gen_length": 10, "block_length": 4, "threshold": 0.3}
EDIT: dict[str, Any] = {**RUN, "editing_threshold": 0.2, "max_post_steps": 3}
BOTH = pytest.mark.parametrize(("sampler", "given"), [("llada2", RUN), ("llada2_editing", EDIT)])


def model_of(sampler: str = "llada2", **config: Any) -> Any:
    return tiny("llada2", sampler=sampler, **config)


def alone64(
    model: Any, run: dl.DenoisingRun, step: int, row: int, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The positions of a row up to its block's end, and everything that a float64 network computes of them."""
    keep = run.attention_mask[row].clone()
    keep[int(run.in_block[step, row].nonzero().max()) + 1 :] = False
    length, block = int(keep.sum()), int(run.settings["block_length"])
    visible = torch.tensor([[key // block <= query // block for key in range(length)] for query in range(length)])
    if "hidden" in options:
        visible[:, options.pop("hidden")] = False
    return keep, forward64(model, run.canvases[step, row][keep][None], visible=visible[None, None], **options)


@pytest.mark.long
@BOTH
def test_confidences_are_those_of_a_float64_network(sampler: str, given: dict[str, Any]) -> None:
    model = model_of(sampler)
    run = dl.denoise(model, PROMPTS, **given)
    compared = 0
    for step in range(run.steps):
        for row in range(len(PROMPTS)):
            if not run.confidence[step, row].isfinite().any():
                continue
            keep, kept = alone64(model, run, step, row)
            found, likely = run.confidence[step, row][keep], kept["logits"][0].softmax(-1)
            known, x0 = found.isfinite(), run.proposals[step, row][keep]
            wanted = likely.gather(-1, x0[:, None])[:, 0]
            torch.testing.assert_close(found[known].double(), wanted[known], atol=1e-5, rtol=1e-5)
            likely[:, model.config.mask_token_id] = 0
            assert x0[known].equal(likely.argmax(-1)[known])
            compared += int(known.sum())
    assert compared > 60


@pytest.mark.long
@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}]
)
def test_a_row_is_what_it_is_alone(sampler: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    model = model_of(sampler)
    together = dl.denoise(model, PROMPTS, **given | options)
    whole = dl.denoise(model, PROMPTS, use_cache=False, **given | options)
    assert together.canvases.equal(whole.canvases)
    assert together.revised.equal(whole.revised)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **given | options)
        content = together.attention_mask[row]
        length = alone.tokens.shape[1]
        assert together.tokens[row, content][:length].equal(alone.tokens[0])
        assert together.masked[-1, row, content][length:].all()
        assert together.answers[row] == alone.answers[0]
        # The same steps, without those at which the row waits.
        own = (together.confidence[:, row].isfinite()).any(-1)
        for name in ("canvases", "unmasked", "revised", "proposals"):
            theirs = getattr(together, name)[: together.steps][own][:, row][:, content][:, :length]
            assert theirs.equal(getattr(alone, name)[: alone.steps, 0]), name


@BOTH
def test_answer_and_progress_of_a_row_are_those_that_it_has_alone(sampler: str, given: dict[str, Any]) -> None:
    model = model_of(sampler)
    given = given | {"hooks": [at_progress(mask_top_sinks(2), (0.4, 1))]}
    together = dl.denoise(model, PROMPTS, **given)
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **given)
    assert together.canvases.equal(recording.run.canvases)
    assert recording.progress.equal(together.progress[:-1])
    assert together.answer.sum(-1).tolist() == [13, 13, 12]
    for row, prompt in enumerate(PROMPTS):
        alone, content = dl.denoise(model, [prompt], **given), together.attention_mask[row]
        length = alone.tokens.shape[1]
        assert together.tokens[row, content][:length].equal(alone.tokens[0])
        assert together.answer[row, content][:length].equal(alone.answer[0])
        assert not together.answer[row, content][length:].any()
        own = together.confidence[:, row].isfinite().any(-1)
        assert together.progress[:-1][own, row].equal(alone.progress[: int(own.sum()), 0])
        assert together.progress[-1, row] == alone.progress[-1, 0] == 1


def test_blocks_are_counted_from_the_first_that_holds_an_answer() -> None:
    prompts = [[5, 9, 12, 7, 3, 8, 1, 2, 3, 4], [4, 6]]
    run = dl.denoise(model_of(), prompts, gen_length=8, block_length=4, steps_per_block=2)
    # The answer begins within the third block of the canvas, whose other half is the end of the first prompt.
    assert run.spans == ((8, 12), (12, 16), (12, 16), (16, 20), (16, 20))
    assert run.blocks == (0, 1, 1, 2, 2)
    assert run.planned == 6


def test_a_resumed_run_has_the_answer_of_the_whole_one(tmp_path: Path) -> None:
    hooks, slow = [at_progress(mask_top_sinks(2), (0.9, 1))], RUN | {"threshold": 1.0}
    resumed_as_unbroken(model_of(), PROMPTS, tmp_path / "rec", passes=9, hooks=hooks, **slow)


def test_the_answer_ends_with_a_whole_block_and_the_text_does_not() -> None:
    run = dl.denoise(model_of(), PROMPTS, **RUN)
    # 7 + 10, 3 + 10 and 4 + 10 tokens need 20, 16 and 16 positions.
    assert run.tokens.shape[1] == 7 + 13
    assert run.masks_left.tolist() == [0, 0, 1]
    decode, end = run.tokenizer.decode, run.eos_token_ids[0]
    for row in range(3):
        written = run.tokens[row, 7:17].tolist()
        written = written[: written.index(end)] if end in written else written
        assert run.answers[row] == decode(written, skip_special_tokens=True)


def test_plans_and_thresholds() -> None:
    model = model_of()
    run = dl.denoise(model, [[1, 2, 3, 4]], gen_length=8, block_length=8, steps_per_block=3, threshold=1.0)
    assert run.counts.flatten().tolist() == [3, 1, 3, 3, 2]  # the first block holds the prompt
    at_once = dl.denoise(model, [[1, 2, 3, 4]], gen_length=8, block_length=4, steps_per_block=4, threshold=0.0)
    assert at_once.counts.flatten().tolist() == [4, 4]
    capped = dl.denoise(model, [[1, 2, 3, 4]], gen_length=8, block_length=4, minimal_topk=3, threshold=1.0)
    assert capped.counts.flatten().tolist() == [2, 2, 2, 2]  # 8 // 3 steps
    assert dl.denoise(model, [[1, 2, 3, 4]], gen_length=8, block_length=4, steps=4, threshold=1.0).steps == 4
    edited = model_of("llada2_editing")
    assert (
        dl.denoise(edited, [[1]], gen_length=7, block_length=4, steps=4, max_post_steps=0).settings[
            "num_to_transfer"
        ]
        == 2
    )


@BOTH
def test_a_row_ends_with_the_block_of_its_end(sampler: str, given: dict[str, Any]) -> None:
    model = model_of(sampler)
    plain = dl.denoise(model, PROMPTS, **given)
    end = int(plain.tokens[0, 8])  # in the first row's first block of the answer
    model.config.eos_token_id = end
    ended = dl.denoise(model, PROMPTS, **given)
    assert ended.tokens[0, :8].equal(plain.tokens[0, :8])
    for row in range(3):
        places = (plain.tokens[row, 7:] == end).nonzero()
        if not len(places):
            assert ended.tokens[row].equal(plain.tokens[row])
            continue
        block = int(plain.padding[row])
        stop = block + -(-(7 + int(places[0]) + 1 - block) // 4) * 4
        assert ended.tokens[row, :stop].equal(plain.tokens[row, :stop])
        assert ended.masked[-1, row, stop:].all()
        assert ended.answers[row] == plain.tokenizer.decode(plain.tokens[row, 7 : 7 + int(places[0])].tolist())


def test_an_early_stop_leaves_the_block() -> None:
    model = tiny("llada2", seed=2)
    plain = dl.denoise(model, [PROMPTS[0]], gen_length=9, block_length=16, threshold=1.0)
    order = plain.step_of[0, 7:]
    # The last token that is written when all before it are, and some after it are not.
    at = max(i for i in range(9) if (order[:i] < order[i]).all() and (order[i + 1 :] > order[i]).any())
    model.config.eos_token_id = int(plain.tokens[0, 7 + at])
    assert model.config.eos_token_id not in plain.tokens[0, 7 : 7 + at]
    early = dl.denoise(model, [PROMPTS[0]], gen_length=9, block_length=16, threshold=1.0, eos_early_stop=True)
    assert early.steps == int(order[at]) + 1
    assert early.canvases.equal(plain.canvases[: early.steps + 1])
    later = dl.denoise(model, [PROMPTS[0]], gen_length=9, block_length=16, threshold=1.0)
    assert later.canvases.equal(plain.canvases)
    assert early.answers == later.answers


@pytest.mark.parametrize(("sampler", "rows"), [("llada2", 2), ("llada2_editing", 1)])
def test_reference_quirks_draw_for_every_position_of_the_block(sampler: str, rows: int) -> None:
    """dllm draws a token for all positions of the block, masked or not: which draw a mask gets depends on it."""
    model, seen = tiny("llada2", sampler=sampler), list[Tensor]()
    run = dl.denoise(
        model, [[5, 9, 14, 3, 7], [8, 2, 6, 1, 4]][:rows], gen_length=10, block_length=4, temperature=1.5, seed=3,
        threshold=0.1, reference_quirks=True, on_logits=lambda _step, _canvas, logits: seen.append(logits.clone()),
        **({"editing_threshold": 0.1, "max_post_steps": 2} if sampler == "llada2_editing" else {}),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    for step, (logits, (start, stop)) in enumerate(zip(seen, run.spans, strict=True)):
        block = (logits[:, start:stop].float() / 1.5).softmax(-1)
        read = run.confidence[step, :, start:stop].isfinite()
        # Positions that are not read have no logits here; what is drawn elsewhere does not depend on theirs.
        drawn = torch.multinomial(block.nan_to_num(1.0).flatten(0, 1), 1, generator=generator).view(read.shape)
        assert run.proposals[step, :, start:stop][read].equal(drawn[read]), step
    assert run.steps > 6


def test_masks_in_the_prompt_are_filled_in() -> None:
    mask = model_of().config.mask_token_id
    prompt = [1, mask, 3, 4, 5, 6, 7, 8, 9]
    run = dl.denoise(model_of(), [prompt], **RUN)
    assert run.masks_left.tolist() == [0]
    assert run.step_of[0, 1] == 0
    quirks = dl.denoise(model_of(), [prompt], reference_quirks=True, **RUN)
    assert quirks.masked[-1, 0, 1]


def test_masks_put_back_are_written_again() -> None:
    def hide(step: int, canvas: Tensor) -> Tensor:
        if step == 2:
            canvas[:, 8:10] = 63
        return canvas

    for sampler, given in (("llada2", RUN), ("llada2_editing", EDIT)):
        run = dl.denoise(model_of(sampler), PROMPTS[:1], on_canvas=hide, **given)
        assert run.masks_left.tolist() == [0]


def edits_of(model: Any) -> dl.DenoisingRun:
    run = dl.denoise(model, PROMPTS, **EDIT)
    assert run.revised.any()
    return run


def test_editing_by_hand() -> None:
    """Every step of a run from its canvases, proposals and confidences alone."""
    run = edits_of(model_of("llada2_editing"))
    post, before = [0, 0, 0], -1
    for step in range(run.steps):
        post = post if run.blocks[step] == before else [0, 0, 0]
        before = run.blocks[step]
        for row in range(3):
            x0, sure = run.proposals[step, row], run.confidence[step, row]
            canvas, masked, block = run.canvases[step, row], run.masked[step, row], run.in_block[step, row]
            if not sure.isfinite().any():
                assert run.canvases[step + 1, row].equal(canvas)
                continue
            post[row] += not bool((masked & block).any())
            assert post[row] <= 3
            wanted = canvas.clone()
            masks = [int(i) for i in (masked & block).nonzero()]
            sure_masks = [i for i in masks if sure[i] > 0.3]
            for i in sure_masks or sorted(masks, key=lambda i: -float(sure[i]))[:1]:
                wanted[i] = x0[i]
            for i in (block & ~masked).nonzero().flatten().tolist():
                if i >= 7 and sure[i] > 0.2:
                    wanted[i] = x0[i]
            assert run.canvases[step + 1, row].equal(wanted)
            assert run.revised[step, row].equal((wanted != canvas) & ~masked)
            assert run.unmasked[step, row].equal((wanted != canvas) & masked)


def test_what_is_as_sure_as_the_threshold_is_not_rewritten() -> None:
    confidence, editable = torch.tensor([[0.5, 0.75, 0.75, 0.75]]), torch.tensor([[True, True, False, True]])
    revised = Revise(0.5)(torch.tensor([[1, 1, 1, 2]]), torch.tensor([[2, 2, 2, 2]]), confidence, editable)
    assert revised.tolist() == [[False, True, False, False]]


@pytest.mark.long
def test_revised_in_results() -> None:
    run = edits_of(model_of("llada2_editing"))
    written = run.last_written
    step, row, position = (int(i[-1]) for i in run.revised.nonzero(as_tuple=True))
    assert written[row, position] == step > run.step_of[row, position]
    chosen = written >= 0
    last = run.proposals.gather(0, written.clamp(min=0)[None])[0]
    assert last[chosen].equal(run.tokens[chosen])
    assert run.first_steps(3).revised.equal(run.revised[:3])
    assert not dl.denoise(model_of(), PROMPTS, **RUN).revised.any()
    changed = dl.compare(model_of("llada2_editing"), PROMPTS, [mask_top_sinks(1)], **EDIT).table()
    rows, places = changed["batch"].tolist(), changed["canvas_position"].tolist()
    assert changed["step_plain"].tolist() == [int(written[r, p]) for r, p in zip(rows, places, strict=True)]


@pytest.mark.long
def test_recordings_keep_what_was_revised(tmp_path: Path) -> None:
    model, reducers = model_of("llada2_editing"), [dl.ReceivedAttention(min_viewers=1)]
    plain = edits_of(model)
    whole = dl.record(model, PROMPTS, reducers, **EDIT)

    resumed = resumed_recording(model, tmp_path / "rec", 9, PROMPTS, reducers, **EDIT)
    saved = whole.save(tmp_path / "saved")
    for other in (whole, resumed, dl.Recording.load(tmp_path / "rec"), dl.Recording.load(saved)):
        assert other.run.canvases.equal(plain.canvases)
        assert other.run.revised.equal(plain.revised)
        assert other.run.unmasked.equal(plain.unmasked)
        torch.testing.assert_close(
            dl.received_of(other).values, dl.received_of(whole).values, rtol=0, atol=0, equal_nan=True
        )
    again = dl.received_over_steps(model, plain, min_viewers=1)
    torch.testing.assert_close(again.values, dl.received_of(whole).values, equal_nan=True)


def test_what_was_not_revised_is_not_stored(tmp_path: Path) -> None:
    from safetensors import safe_open

    dl.record(model_of(), PROMPTS, [dl.ValueNorm()], to=tmp_path / "rec", **RUN)
    for file in sorted((tmp_path / "rec").glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            assert not [name for name in held.keys() if "revised" in name]  # noqa: SIM118
    assert not dl.Recording.load(tmp_path / "rec").run.revised.any()


@pytest.mark.long
@BOTH
def test_received_attention_and_its_expectation(sampler: str, given: dict[str, Any]) -> None:
    model = model_of(sampler)
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **given)
    run, received, expected = recording.run, dl.received_of(recording), recording.expected()
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **given).canvases)
    changes = (run.unmasked | run.revised).any(-1)
    # An editing row is over after a step that edits nothing.
    last = [int(changes[:, row].nonzero().max()) + (sampler == "llada2_editing") for row in range(3)]
    assert min(last) < run.steps - 1
    for step in range(run.steps):
        for row in range(3):
            if step > last[row]:
                assert not expected[step, row].any()
                assert received.values[step, row].isnan().all()
            if step % 3 or step > last[row]:
                continue
            keep, kept = alone64(model, run, step, row)
            pattern = kept["pattern0"][0]
            seen = (pattern[0] > 0).double()
            even = (seen / seen.sum(-1, keepdim=True)).sum(0)
            torch.testing.assert_close(expected[step, row][keep].double(), even, atol=1e-5, rtol=1e-5)
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, keep].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
    assert dl.find_sinks(recording, "top-k:1").is_sink.any()


def test_a_hidden_column_is_hidden() -> None:
    model, seen = model_of("llada2_editing"), list[Tensor]()
    run = dl.denoise(
        model, PROMPTS[:1], hooks=[mask_positions(2)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **EDIT,
    )  # fmt: skip
    for step in range(run.steps):
        _, kept = alone64(model, run, step, 0, hidden=2)
        logits = kept["logits"][0]
        torch.testing.assert_close(seen[step][0, : len(logits)].double(), logits, atol=2e-5, rtol=2e-4)


def test_traces_read_and_choose_what_is_revised() -> None:
    model = model_of("llada2_editing")
    plain = edits_of(model)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **EDIT) as tracer:
        revised = [].save()
        for _ in tracer.steps[:]:
            revised.append(lm.sampler.revised.clone())
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert torch.stack(revised).equal(plain.revised)
    with lm.generate(PROMPTS, **EDIT) as tracer:
        for _ in tracer.steps[:]:
            lm.sampler.revised = torch.zeros_like(lm.sampler.revised)
        never = tracer.result.save()
    assert not never.revised.any()
    assert never.masks_left.tolist() == plain.masks_left.tolist()


@pytest.mark.long
@pytest.mark.parametrize("family", [one for one in dl.families() if not one.causal], ids=lambda one: one.name)
def test_traces_have_the_positions_that_the_run_revised(family: Any) -> None:
    lm: Any = dl.DiffusionLM(tiny(family.name))
    with lm.generate([[1, 2, 3]], gen_length=4) as tracer:
        revised = [].save()
        for _ in tracer.steps[:]:
            revised.append(lm.sampler.revised.clone())
    run = dl.denoise(tiny(family.name), [[1, 2, 3]], gen_length=4)
    # What a step opens again is revised in the run; in a trace it is what `unmasked` leaves out.
    assert torch.equal(torch.stack(revised), run.revised & ~run.open[1:])
    # Without a mask token what is not accepted is open again; the others do not edit by default.
    assert bool(run.revised.any()) != fills_masks(tiny(family.name).config)


@pytest.mark.parametrize("block_length", [3, 4])
def test_the_likelihood_counts_blocks_from_the_text(block_length: int) -> None:
    """chain_rule: each answer token given the tokens before it, with the rest of the text masked."""
    model, prompt, answer = model_of(), [1, 2, 3, 4, 5], [6, 7, 8]
    found = dl.log_likelihood(model, prompt, answer, "chain_rule", block_length=block_length)
    mask, total = model.config.mask_token_id, 0.0
    visible = torch.tensor(
        [[key // block_length <= query // block_length for key in range(8)] for query in range(8)]
    )
    for place in range(3):
        ids = torch.tensor([prompt + answer[:place] + [mask] * (3 - place)])
        logits = forward64(model, ids, visible=visible[None, None])["logits"][0, 5 + place]
        total += float(logits.log_softmax(-1)[answer[place]])
    assert float(found.value) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_sampler_that_rewrites_finished_blocks_empties_the_cache(
    use_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llada2_editing")

    def past(self: Any, masked: Tensor, plan: Any) -> Tensor:
        where = torch.arange(masked.shape[1])
        return self._answer & ~masked & (where < plan.span[1]) & self.at_work(masked, plan)[:, None]

    from dlm_lens.sampling.samplers.llada2_editing import LLaDA2EditingSampler

    monkeypatch.setattr(LLaDA2EditingSampler, "editable", past)
    run = dl.denoise(model, PROMPTS[:1], use_cache=use_cache, **EDIT | {"editing_threshold": 0.05})
    late = [step for step in range(run.steps) if run.revised[step, 0, : run.spans[step][0]].any()]
    assert late
    for step in range(late[0], run.steps):
        keep, kept = alone64(model, run, step, 0)
        found = run.confidence[step, 0][keep]
        known, x0 = found.isfinite(), run.proposals[step, 0][keep]
        wanted = kept["logits"][0].softmax(-1).gather(-1, x0[:, None])[:, 0]
        torch.testing.assert_close(found[known].double(), wanted[known], atol=1e-5, rtol=1e-5)


def test_what_cannot_be() -> None:
    model = model_of("llada2_editing")
    with pytest.raises(
        ValueError, match=r"prompts of \[7, 3, 4\] tokens: dllm's code takes prompts of equal length"
    ):
        dl.denoise(model_of(), PROMPTS, reference_quirks=True, **RUN)
    with pytest.raises(ValueError, match="2 prompts: dllm's code edits one row only"):
        dl.denoise(model, PROMPTS[:1] * 2, reference_quirks=True, **EDIT)
    with pytest.raises(ValueError, match="gen_length is 0"):
        dl.denoise(model, [[1, 2]], gen_length=0)
    with pytest.raises(ValueError, match="num_to_transfer is 0"):
        dl.denoise(model, [[1, 2]], num_to_transfer=0)
    with pytest.raises(ValueError, match="editing_threshold is -1"):
        dl.denoise(model, [[1, 2]], editing_threshold=-1)
    with pytest.raises(ValueError, match="llada2 sampler has no setting 'cfg_scale'"):
        dl.denoise(model_of(), [[1, 2]], cfg_scale=1.0)
    with pytest.raises(ValueError, match="takes the layouts of Llama, Qwen2, Qwen3 and GPT-2"):
        dl.bridge(model)
