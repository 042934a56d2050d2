"""dLLM-Var by default: a float64 network with stale keys, batches, ends, edits, hooks, reruns, refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.registry import family_of
from dlm_lens.hooks import mask_positions, mask_sinks, mask_top_sinks
from dlm_lens.recording import rerun
from dlm_lens.sampling.stored_run import StoredRun
from dlm_lens.testing import tiny
from tests.adapters.golden import GOLDEN
from tests.reference import Edit, forward64
from tests.sampling.interrupted import resumed_as_unbroken

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
RUN: dict[str, Any] = {"gen_length": 14, "block_length": 4, "threshold": 0.4, "stop_tokens": []}
STOPS = RUN | {"stop_tokens": [12]}


@pytest.fixture(scope="module")
def model() -> Any:
    """A sharper network than `tiny` makes, so that some proposals are above a threshold and others are not."""
    found: Any = tiny("llada", sampler="dllm_var", seed=4)
    with torch.no_grad():
        found.lm_head.weight *= 3
    return found


def stale64(model: Any, run: dl.DenoisingRun, row: int) -> list[dict[str, Tensor]]:
    """Every step of a row in a float64 network: the first step of a block computes the block before it too.

    Its keys and values, and those of everything before, then stay what they are until the next block begins.
    """
    keep, padding = run.attention_mask[row], int(run.padding[row])
    steps, kept, computed = list[dict[str, Tensor]](), dict[str, Tensor](), 0
    for step in range(run.steps):
        stop = run.spans[step][1] - padding
        first = run.blocks[:step].count(run.blocks[step]) == 0
        start = run.spans[step][0] - padding
        begin = 0 if step == 0 else computed if first else start
        edits: dict[tuple[int, str], Edit] = {}
        for layer in range(model.config.num_hidden_layers if begin else 0):
            for name in ("rot_k", "v"):
                old = kept[f"{name}{layer}"][:, :begin]
                edits[layer, name] = lambda new, old=old, begin=begin: torch.cat([old, new[:, begin:]], 1)
        found = forward64(model, run.canvases[step, row][keep][None, :stop], edits=edits)
        if first:
            for layer in range(model.config.num_hidden_layers):
                for name in ("rot_k", "v"):
                    new = found[f"{name}{layer}"]
                    kept[f"{name}{layer}"] = edits[layer, name](new) if begin else new
            computed = start
        steps.append(found)
    return steps


def test_every_step_is_that_of_a_float64_network_with_stale_keys(model: Any) -> None:
    run = dl.denoise(model, PROMPTS, **RUN)
    assert run.computed[0] is None
    assert len(set(run.blocks)) == 4
    assert run.spans[-1] == (19, 21)  # the last block is shorter
    for row in range(2):
        padding = int(run.padding[row])
        for step, found in enumerate(stale64(model, run, row)):
            likely = found["logits"][0].softmax(-1)
            tokens = found["logits"][0].index_fill(-1, torch.tensor([63]), -torch.inf).argmax(-1)
            start, stop = run.spans[step]
            here = run.masked[step, row] & (torch.arange(21) >= start) & (torch.arange(21) < stop)
            assert run.confidence[step, row].isfinite().equal(here)
            inside = here[padding:stop]
            expected = likely.gather(-1, tokens[:, None])[:, 0][inside]
            # float32 against float64, of probabilities
            torch.testing.assert_close(run.confidence[step, row][here].double(), expected, atol=2e-5, rtol=1e-3)
            assert run.proposals[step, row][here].equal(tokens[inside])
            if len(expected):
                written = (expected > RUN["threshold"]) | (expected == expected.max())
                assert run.unmasked[step, row][here].equal(written)
    assert {1, 2} <= set(run.counts.flatten().tolist())
    assert run.steps > 7


def test_without_the_cache_every_step_is_exact(model: Any) -> None:
    run = dl.denoise(model, PROMPTS, use_cache=False, **RUN)
    assert run.computed == ()
    for row in range(2):
        keep = run.attention_mask[row]
        for step in range(run.steps):
            stop = run.spans[step][1]
            canvas = run.canvases[step, row, :stop][keep[:stop]][None]
            likely = forward64(model, canvas)["logits"][0].softmax(-1)
            here = run.confidence[step, row].isfinite()
            inside = here[:stop][keep[:stop]]
            proposed = run.proposals[step, row][here]
            expected = likely[inside].gather(-1, proposed[:, None])[:, 0]
            torch.testing.assert_close(run.confidence[step, row][here].double(), expected, atol=2e-5, rtol=1e-3)
    kept = dl.denoise(model, PROMPTS, **RUN)
    assert not run.confidence[-1].equal(kept.confidence[-1])


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("stop", range(0, 60, 7))
def test_a_row_is_what_it_is_alone(model: Any, cache: bool, stop: int) -> None:
    given = RUN | {"use_cache": cache, "stop_tokens": [stop, stop + 1, stop + 2]}
    together = dl.denoise(model, PROMPTS, **given)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **given)
        keep = together.attention_mask[row]
        ours, theirs = together.tokens[row, keep], alone.tokens[0]
        assert ours[: len(theirs)].equal(theirs)
        assert (ours[len(theirs) :] == 63).all()  # blocks of the other row
        assert together.answers[row] == alone.answers[0]


def test_a_row_ends_with_the_block_of_its_end(model: Any) -> None:
    free = dl.denoise(model, PROMPTS, **RUN)
    end = int(free.tokens[0, 12])  # in the second block of the first row
    run = dl.denoise(model, PROMPTS[:1], **RUN | {"stop_tokens": end})
    first = int((free.tokens[0, 7:] == end).int().argmax())
    assert run.tokens.shape[1] == 7 + 4 * (first // 4 + 1)
    assert run.tokens[0].equal(free.tokens[0, : run.tokens.shape[1]])
    assert not run.masks_left.any()
    model.config.eos_token_id, before = end, model.config.eos_token_id
    by_config = dl.denoise(
        model, PROMPTS[:1], **{name: value for name, value in RUN.items() if name != "stop_tokens"}
    )
    model.config.eos_token_id = before
    assert by_config.tokens.equal(run.tokens)


def test_an_edit_before_the_span_makes_the_step_compute_everything(model: Any) -> None:
    def edit(step: int, canvas: Tensor) -> Tensor | None:
        if step == 3:
            canvas[:, 1] = 30
        if step == 6:
            canvas[:, 8] = 63  # in the first block: it is filled in again
        return canvas

    slow = RUN | {"threshold": 1.0}
    run = dl.denoise(model, PROMPTS[:1], on_canvas=edit, **slow)
    whole = [step for step, span in enumerate(run.computed) if span is None]
    filled = int(run.unmasked[6:, 0, 8].int().argmax()) + 6
    assert whole == [0, 3, *range(6, filled + 1)]  # as long as a mask is before the block
    assert not run.masks_left.any()
    for step in (3, 6):
        stop = run.spans[step][1]
        likely = forward64(model, run.canvases[step, :, :stop])["logits"][0].softmax(-1)
        here = run.confidence[step, 0].isfinite()
        expected = likely.gather(-1, run.proposals[step, 0, :stop, None])[:, 0][here[:stop]]
        torch.testing.assert_close(run.confidence[step, 0][here].double(), expected, atol=2e-5, rtol=1e-3)
    again = rerun(model, run, [dl.ReceivedAttention(min_viewers=1)])
    assert again.run.computed == run.computed


def test_a_block_that_is_filled_in_beforehand_is_computed_with_the_next(model: Any) -> None:
    def fill(step: int, canvas: Tensor) -> Tensor | None:
        if step == 0:
            canvas[:, 11:15] = torch.tensor([20, 21, 22, 23])  # the second block
        return canvas

    run = dl.denoise(model, PROMPTS[:1], on_canvas=fill, **RUN)
    assert 1 not in run.blocks
    assert run.computed[run.blocks.index(2)] == (7, 19)
    assert run.tokens[0, 11:15].tolist() == [20, 21, 22, 23]


def test_received_attention_is_that_of_what_each_step_sees(model: Any) -> None:
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    for row in range(2):
        padding = int(run.padding[row])
        for step, found in enumerate(stale64(model, run, row)):
            span = run.computed[step] or (0, run.spans[step][1])
            start, stop = max(span[0], padding), span[1]
            seen = slice(padding, stop)
            assert run.seen_content[step, row].nonzero().flatten().tolist() == list(range(padding, stop))
            queries = slice(start - padding, stop - padding)
            for layer in range(model.config.num_hidden_layers):
                sums = received.column_sums[step, row, layer][:, seen].double()
                expected = found[f"pattern{layer}"][0, :, queries].sum(-2)
                torch.testing.assert_close(sums, expected, atol=5e-5, rtol=1e-3)
            e = torch.full((stop - padding,), (stop - start) / (stop - padding))
            torch.testing.assert_close(recording.expected()[step, row, seen], e)
            assert received.values[step, row, ..., stop:].isnan().all()


def test_passes_over_a_finished_run_are_its_own_in_any_order(model: Any) -> None:
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, wanted = recording.run, dl.received_of(recording).values
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, wanted, equal_nan=True)
    stored = StoredRun(model, run)
    order = [run.steps - 1, 2, run.steps - 2, 0, 1, run.steps - 1]
    for step in order:
        with stored.at(step):
            likely = stored.logits(stored.states(step)).softmax(-1)
        here = stored.predicted(step)
        proposed = run.proposals[step][here][:, None]
        torch.testing.assert_close(likely.gather(-1, proposed)[:, 0], run.confidence[step][here])
    replayed = dl.replay(model, run, hooks=[mask_positions(1)])
    assert replayed.predicted.equal(run.confidence.isfinite())
    part = recording.select(step=range(3, run.steps)).run
    with pytest.raises(ValueError, match="attends to keys of an earlier step, which this part"):
        dl.received_over_steps(model, part)


@pytest.mark.parametrize("hooks", [[mask_positions(8)], [mask_top_sinks(1)]])
def test_hooks_act_in_every_row_as_alone(hooks: list[Any]) -> None:
    model = tiny("llada", sampler="dllm_var", seed=4).double()  # so that a batch's rounding chooses no other sinks
    prompts = [PROMPTS[0], [8, 9, 10, 11, 12, 13, 14]]
    together = dl.denoise(model, prompts, hooks=hooks, **RUN)
    for row, prompt in enumerate(prompts):
        assert together.tokens[row].equal(dl.denoise(model, [prompt], hooks=hooks, **RUN).tokens[0])
    assert not together.confidence.equal(dl.denoise(model, prompts, **RUN).confidence)


@pytest.mark.parametrize("source", ["clean", "current"])
def test_a_rerun_under_hooks_is_the_hooked_run(model: Any, source: Any) -> None:
    """With "clean" a pass without hooks runs beside each pass, with kept keys of such passes."""
    given: dict[str, Any] = RUN | {"gen_length": 36, "block_length": 12}
    hooks = [mask_sinks(dl.AboveMean(eps=0.1), source=source)]
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], hooks=hooks, **given)
    again = rerun(model, recording.run, [dl.ReceivedAttention(min_viewers=1)], hooks=hooks)
    wanted = dl.received_of(recording).values
    torch.testing.assert_close(dl.received_of(again).values, wanted, equal_nan=True)
    assert not recording.run.confidence.equal(dl.denoise(model, PROMPTS, **given).confidence)


@pytest.mark.parametrize("passes", [2, 5, 7])
def test_a_recording_resumes_in_the_middle(model: Any, tmp_path: Path, passes: int) -> None:
    whole = resumed_as_unbroken(model, PROMPTS, tmp_path, passes=passes, **STOPS)
    assert whole.run.computed[0] is None


def test_joined_recordings_are_passed_over_again(model: Any, tmp_path: Path) -> None:
    prompts = [*PROMPTS, [20, 21, 22, 23, 24, 25, 26, 27, 28]]
    given: dict[str, Any] = RUN | {"batch_size": 1, "threshold": 1.0}
    recording = dl.record(model, prompts, [dl.ReceivedAttention(min_viewers=1)], to=tmp_path / "joined", **given)
    again = dl.received_over_steps(model, recording.run, min_viewers=1).values
    wanted = dl.received_of(recording).values
    torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_the_hosts_run_it(model: Any) -> None:
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        patterns = list().save()  # noqa: C408  # nnsight's list
        for _ in tracer.steps[:3]:
            patterns.append(lm.layers[1].attn.pattern)
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert len(patterns) == 3
    for step, pattern in enumerate(patterns):
        span = plain.computed[step] or (0, 21)
        assert pattern.shape[2] == span[1] - span[0]
        assert not pattern[..., plain.spans[step][1] :].any()
    bridged = dl.bridge(model).denoise(PROMPTS, **RUN)
    assert bridged.canvases.equal(plain.canvases)


def test_the_released_checkpoint_has_this_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of the hub's name is found before the hub; its files are LLaDA's."""
    name = "maomaocun/dLLM-Var"
    assert name in family_of("llada").hub_names
    shutil.copytree(GOLDEN / "llada", tmp_path / name, ignore=shutil.ignore_patterns("variants"))
    monkeypatch.chdir(tmp_path)
    model: Any = dl.load(name)
    assert (
        model.sampler_defaults | {"gen_length": 1024, "block_length": 64, "threshold": 0.9}
        == model.sampler_defaults
    )
    run = dl.denoise(model, [[1, 2]], gen_length=5)
    assert (run.settings["sampler"], run.spans[0]) == ("dllm_var", (2, 7))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1, 63, 3]], {}, "a prompt has mask tokens, and dLLM-Var writes an answer after the prompt alone"),
        (PROMPTS[:1], {"gen_length": 0}, "gen_length is 0; block diffusion writes an answer"),
        (PROMPTS[:1], {"threshold": 1.5}, "threshold is 1.5; it is a probability, from 0 to 1"),
        (PROMPTS[:1], {"block_length": 0}, "block_length is 0"),
        (PROMPTS[:1], {"cache": "prefix"}, "the dllm_var sampler has no setting 'cache'"),
        (PROMPTS, {"reference_quirks": True, "gen_length": 8}, "there are 2 prompts"),
        (PROMPTS[:1], {"reference_quirks": True}, "gen_length 14 is no multiple of block_length 4"),
    ],
)
def test_what_cannot_be(model: Any, prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(model, prompts, **RUN | options)
