"""BD3-LM's sampler by default: rows, blocks, the cache, times; recordings, hooks, likelihoods."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions
from dlm_lens.recording import UpdateNorm, rerun
from dlm_lens.sampling import StoredRun
from dlm_lens.sampling.samplers.bd3lm import BD3LMSettings
from dlm_lens.testing import tiny
from tests.dit64 import dit64
from tests.sampling.interrupted import resumed_recording

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11]]
RUN: dict[str, Any] = {"gen_length": 10, "seed": 1}


def model_of(**config: Any) -> Any:
    return tiny("bd3lm", **{"block_size": 4, "bos_token_id": 60, **config})


def alone64(model: Any, run: dl.DenoisingRun, step: int, row: int, hidden: int | None = None) -> dict[str, Tensor]:
    """Everything that a float64 network computes of one row at a step, up to the end of the row's block."""
    padding, start = int(run.padding[row]), run.spans[step][0]
    # The first position in the span or after it at which one of the row's blocks begins.
    while (start - padding) % 4:
        start += 1
    stop = min(start + 4, run.tokens.shape[1])
    ids = run.canvases[step, row, padding:stop][None]
    of = torch.arange(ids.shape[1]) // 4
    visible = (of[None] <= of[:, None])[None, None]
    if hidden is not None:
        visible = visible.clone()
        visible[..., hidden] = False
    return dit64(model, ids, visible)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"first_hitting": False, "steps_per_block": 7},
    {"nucleus_p": 0.7},
    {"steps": 6},
    {"temperature": 0.0},
    {"block_length": 3, "first_hitting": False, "steps_per_block": 3},
]


@pytest.mark.parametrize("config", [{}, {"adaln": False}])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_rows_cache_and_ends(config: dict[str, Any], options: dict[str, Any]) -> None:
    model = model_of(**config, **({"block_size": options["block_length"]} if "block_length" in options else {}))
    together = dl.denoise(model, PROMPTS, **RUN | options)
    assert not together.masks_left.any()
    assert together.canvases.equal(dl.denoise(model, PROMPTS, use_cache=False, **RUN | options).canvases)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **RUN | options)
        kept = together.attention_mask[row]
        assert together.tokens[row, kept].equal(alone.tokens[0])
        mine = together.canvases[:, row, kept].unique_consecutive(dim=0)
        assert mine.equal(alone.canvases[:, 0].unique_consecutive(dim=0))
        assert alone.tokens[0, : len(prompt)].tolist() == prompt


def test_first_hitting_writes_one_token_at_a_random_place() -> None:
    model = model_of()
    run = dl.denoise(model, [[60]] * 40, gen_length=7, seed=list(range(40)))
    assert (run.counts == 1).all()
    assert run.steps == 7
    assert set(run.blocks) == {0, 1}
    # The first of three places, each with probability 1/3: three standard deviations of 40 draws.
    places = run.unmasked[0].float().argmax(-1)
    for place in (1, 2, 3):
        assert abs(int((places == place).sum()) - 40 / 3) <= 3 * math.sqrt(40 * 2 / 9)
    fewer = dl.denoise(model, [[60]], gen_length=11, steps_per_block=2)
    assert fewer.counts.flatten().tolist() == [2, 1, 2, 2, 2, 2]


def test_draws_are_those_of_a_float64_network() -> None:
    """Ancestral sampling of one row: t = 1 - i / n, s = 1 - (i + 1) / n, a mask stays with s / t."""
    model = model_of()
    run = dl.denoise(model, [[60]], gen_length=11, first_hitting=False, steps_per_block=5, nucleus_p=0.8, seed=3)
    generator, begun = torch.Generator().manual_seed(3), 0
    for step in range(run.steps):
        if step and run.blocks[step] != run.blocks[step - 1]:
            begun = step
        stop = run.spans[step][1]
        masked = run.masked[step, 0].clone()
        masked[stop:] = False
        likely = alone64(model, run, step, 0)["logits"][0, masked[:stop]]
        likely[:, 63] = -torch.inf
        likely = likely.softmax(-1)
        kept = torch.zeros_like(likely)
        for row, p in enumerate(likely):
            total = 0.0
            for rank, token in enumerate(p.argsort(descending=True).tolist()):
                total += float(p[token])
                if rank and total > 0.8:
                    break
                kept[row, token] = p[token]
        kept = kept / kept.sum(-1, keepdim=True)
        i = step - begun
        stays = (1 - (i + 1) / 5) / (1 - i / 5)
        weights = kept * (1 - stays)
        weights[:, 63] = stays
        uniform = torch.rand(len(weights), 64, generator=generator, dtype=torch.float64)
        drawn = (weights / -uniform.log()).argmax(-1)
        assert run.canvases[step + 1, 0].equal(run.canvases[step, 0].masked_scatter(masked, drawn)), step


def test_the_times_of_the_original() -> None:
    settings = BD3LMSettings(gen_length=8, block_length=4, steps_per_block=4, first_hitting=False)
    ours = [settings.times(step).masked for step in range(4)]
    assert ours == pytest.approx([3 / 4, 2 / 3, 1 / 2, 0.0])
    assert [settings.times(step).unmasked for step in range(4)] == pytest.approx([1 - stays for stays in ours])
    theirs = [settings.times(step, reference_quirks=True)[1:3] for step in range(4)]
    assert theirs[0] == pytest.approx((1 / 4, 3 / 4))
    assert theirs[1] == pytest.approx((3 / 8, 5 / 8))
    assert theirs[2] == pytest.approx((3 / 4, 1 / 4))
    assert theirs[3] == (math.inf, -math.inf)
    model = model_of()
    short = {"gen_length": 3, "first_hitting": False, "steps_per_block": 2, "seed": 5}
    bad = dl.denoise(model, [[60]], reference_quirks=True, **short)
    left = bad.masked[1, 0]
    assert left.any()
    assert (bad.tokens[0, left] == 0).all()  # the original's defect at t = 0
    good = dl.denoise(model, [[60]], **short)
    assert (good.tokens[0, good.masked[1, 0]] != 0).any()


def test_received_attention_and_its_expectation() -> None:
    model = model_of()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected = recording.expected()
    for step in range(run.steps):
        for row in range(3):
            padding = int(run.padding[row])
            over = run.spans[step][0] + (padding - run.spans[step][0]) % 4 >= run.tokens.shape[1]
            if over or not run.masked[step:, row, padding:].any():
                assert not expected[step, row].any()  # the row has no further block, or no masks
                continue
            kept = alone64(model, run, step, row)
            size = kept["pattern0"].shape[-1]
            where = slice(padding, padding + size)
            of = torch.arange(size) // 4
            visible = (of[None] <= of[:, None]).double()
            even = (visible / visible.sum(-1, keepdim=True)).sum(0)
            torch.testing.assert_close(expected[step, row, where].double(), even, atol=1e-5, rtol=1e-5)
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, where].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)


def test_a_recorded_forward_pass_has_the_blocks_of_the_network() -> None:
    model = tiny("bd3lm")
    with dl.record_forward(model, [dl.ReceivedAttention(min_viewers=1)]) as recorded, torch.no_grad():
        model(input_ids=torch.arange(1, 12)[None])
    block = torch.arange(11) // model.config.block_size
    visible = (block[None, :] <= block[:, None]).double()
    even = (visible / visible.sum(-1, keepdim=True)).sum(0)
    torch.testing.assert_close(recorded.expected()[0, 0].double(), even, atol=1e-5, rtol=1e-5)
    assert recorded.viewers()[0, 0].tolist() == visible.sum(0).tolist()


def test_hooks_traces_and_the_lens() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS, **RUN)
    seen: list[Tensor] = []
    hidden = dl.denoise(
        model, PROMPTS[:1], hooks=[mask_positions(2)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    for step in range(hidden.steps):
        logits = alone64(model, hidden, step, 0, hidden=2)["logits"][0]
        torch.testing.assert_close(seen[step][0, : len(logits)].double(), logits, atol=2e-5, rtol=2e-4)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[2]:
            pattern = lm.layers[0].attn.pattern.save()
            gate = lm.model.layers[1].mlp_gate.output.save()
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert gate.shape[1] == plain.spans[2][1]
    kept = alone64(model, plain, 2, 0)["pattern0"]
    torch.testing.assert_close(
        pattern[:1, :, : kept.shape[2], : kept.shape[3]].double(), kept, atol=2e-5, rtol=2e-4
    )
    lens = dl.logit_lens(model, plain, steps=[2], top=3)
    assert lens.top_probabilities.isfinite().all()


def test_an_empty_prompt_is_bos() -> None:
    model = model_of()
    found = dl.denoise(model, ["", "w1 w2"], **RUN)
    assert found.tokens[0, int(found.padding[0])] == 60
    assert found.tokens[0, 1:].equal(dl.denoise(model, [[60]], **RUN).tokens[0])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        dl.denoise(model_of(bos_token_id=None), "", gen_length=4)


def test_the_likelihood_of_blocks() -> None:
    """Each block given the clean blocks before it: -ln p / t at masked positions, one time for all blocks."""
    model = model_of()
    prompt, answer = [60], [14, 3, 8, 21, 5]
    found = dl.log_likelihood(model, prompt, answer, samples=4, strata=2, seed=2)
    generator, losses, text = torch.Generator().manual_seed(2), [], prompt + answer
    for _ in range(2):
        start = float(torch.rand(1, generator=generator))
        uniform = torch.rand(2, 6, generator=generator)
        for i in range(2):
            t = 0.999 * ((start + i / 2) % 1) + 1e-3
            total = 0.0
            for begin, stop in ((0, 4), (4, 6)):
                masked = [j for j in range(max(begin, 1), stop) if uniform[i, j] < t]
                ids = torch.tensor([text[:stop]])
                ids[0, masked] = 63
                of = torch.arange(stop) // 4
                logits = dit64(model, ids, (of[None] <= of[:, None])[None, None])["logits"][0]
                logits[:, 63] = -torch.inf
                total -= sum(float(logits[j].log_softmax(-1)[text[j]]) for j in masked)
            losses.append(total / t)
    assert found.losses[0].tolist() == pytest.approx(losses, rel=1e-5)
    assert losses[2] > 0


def test_stored_and_resumed(tmp_path: Path) -> None:
    model = model_of()
    options = RUN | {"first_hitting": False, "steps_per_block": 6}
    whole = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **options)
    resumed = resumed_recording(model, tmp_path / "rec", 9, PROMPTS, [dl.ReceivedAttention()], **options)
    for other in (resumed, dl.Recording.load(tmp_path / "rec")):
        assert other.run.canvases.equal(whole.run.canvases)
        assert other.run.blocks == whole.run.blocks


def test_a_network_that_is_conditioned_the_noise_level() -> None:
    model = model_of(time_conditioning=True)
    conditioned: list[float] = []
    model.model.sigma_map.register_forward_pre_hook(lambda _m, args: conditioned.extend(args[0].unique().tolist()))
    options = {"first_hitting": False, "steps_per_block": 4, "gen_length": 3}
    run = dl.denoise(model, [[60]], **options)
    expected = [6.9078, math.log(4), math.log(2), math.log(4 / 3)]
    assert conditioned == pytest.approx(expected[: run.steps], rel=1e-4)
    conditioned.clear()
    quirky = dl.denoise(model, [[60]], reference_quirks=True, **options | {"steps_per_block": 20})
    # The original keeps the probabilities of an unchanged block, of another noise level.
    changed = [True, *(bool(one.any()) for one in quirky.unmasked[:-1])]
    assert len(conditioned) == sum(changed) < quirky.steps
    with pytest.raises(ValueError, match="which first_hitting=True does not have"):
        dl.denoise(model, [[60]], gen_length=3)
    for method in ("mc", "chain_rule", "greedy_completion"):
        with pytest.raises(ValueError, match=r"given the noise level.*no likelihood of blocks is defined"):
            dl.log_likelihood(model, [[60]], [[5, 6]], method)


def test_a_finished_run_of_a_conditioned_network_is_seen_with_the_noise_of_its_steps() -> None:
    model = model_of(time_conditioning=True)
    given: dict[str, Any] = {"first_hitting": False, "steps_per_block": 5, "gen_length": 7, "seed": [3, 4]}
    reducers = [UpdateNorm()]
    recorded = dl.record(model, PROMPTS[:2], reducers, **given)
    assert len(set(recorded.blocks)) > 1
    for part in (recorded, recorded.select(step=[2, 5])):
        again = rerun(model, part.run, reducers)
        torch.testing.assert_close(again.update_norm, part.update_norm, rtol=1e-5, atol=1e-6, equal_nan=True)
    # A step's proposals are the most likely tokens at temperature 0, so that the lens has them first.
    greedy = dl.denoise(model, PROMPTS[:2], temperature=0, **given)
    run_again = StoredRun(model, greedy)
    for step in range(greedy.steps):
        at = run_again.predicted(step)
        with torch.no_grad():
            logits = run_again.logits(run_again.states(step))
        logits[:, model.config.mask_token_id] = -torch.inf
        assert greedy.proposals[step][at].equal(logits.argmax(-1))


def test_what_cannot_be() -> None:
    model = model_of()
    with pytest.raises(ValueError, match="nucleus_p is 0"):
        dl.denoise(model, "", gen_length=4, nucleus_p=0)
    with pytest.raises(ValueError, match="takes one prompt at a time"):
        dl.denoise(model, [[60], [60]], gen_length=3, reference_quirks=True)
    with pytest.raises(ValueError, match="prompt and answer have 5 tokens"):
        dl.denoise(model, [[60]], gen_length=4, reference_quirks=True)
    with pytest.warns(UserWarning, match="trained with blocks of 4"):
        dl.denoise(model, "", gen_length=4, block_length=2)
    with pytest.raises(ValueError, match="gen_length is 0"):
        dl.denoise(model, [[60, 63]], gen_length=0)
