"""GIDD's sampler by default: draws in float64, clean text beside noise, blocks, ends of texts, recordings."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens import hooks
from dlm_lens.sampling.samplers.gidd import GiddSettings
from dlm_lens.testing import tiny
from tests.gidd64 import network64
from tests.sampling.interrupted import resumed_recording
from tests.sampling.test_mixed_noise import mixed_bayes_of

PROMPTS: list[list[int]] = [[5, 6], [11, 12, 13], [9]]
RUN: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps_per_block": 3, "canvas_length": 12, "seed": 4}
SIZE, EOS = 64, 62
NOISES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "masks": {"noise_type": -1000.0, "mask_token_id": 63},
    "both": {"noise_type": 0.5, "mask_token_id": 63, "min_log_snr": -4.0, "max_log_snr": 5.0},
}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def level_at(config: Any, share: float) -> tuple[float, float, float]:
    """Probabilities of the text's token, of [MASK] and of a random token, from the schedule's share."""
    least, most = sigmoid(config.min_log_snr), sigmoid(config.max_log_snr)
    alpha = least + (most - least) * share
    log_snr = min(max(math.log(alpha / (1 - alpha)), config.min_log_snr), config.max_log_snr)
    bounded = max(min(log_snr + config.noise_type, 700.0), -700.0)
    return alpha, (1 - alpha) * (1 - sigmoid(bounded)), (1 - alpha) * sigmoid(bounded)


def cosine(step: int, steps: int) -> float:
    """The schedule's share before a step."""
    return (1 + math.cos(math.pi * (1 - step / steps))) / 2


def expected_text(model: Any, canvas: Tensor, clean: int, temperature: float = 1.0) -> Tensor:
    """The network's probabilities of the text's tokens; [MASK], id 3 where no noise has it, has none."""
    logits = network64(model, canvas, clean)["logits"] / temperature
    logits[:, model.config.excluded_token_id if model.config.mask_token_id is None else 63] = -torch.inf
    return logits.softmax(-1)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_noise_of_the_schedule(noise: str, schedule: str) -> None:
    config = tiny("gidd", **NOISES[noise]).config
    settings = GiddSettings(8, 4, 6, schedule=schedule, **config.sampler_settings)
    for time in range(7):
        share = 1 - time / 6 if schedule == "linear" else (1 + math.cos(math.pi * time / 6)) / 2
        found = [float(one) for one in settings.level(time, torch.float64)]
        assert found == pytest.approx(level_at(config, share), rel=1e-9, abs=1e-12)
        assert sum(found) == pytest.approx(1)


@pytest.mark.parametrize("noise", NOISES)
def test_every_draw_and_confidence_is_that_of_a_float64_network(noise: str) -> None:
    """One draw at every position of the block, with the numbers of the row's generator; the rest stays."""
    model = tiny("gidd", **NOISES[noise]).double()
    run, start = dl.denoise(model, PROMPTS[1], temperature=0.8, **RUN), 3
    mask = 3 if noise == "uniform" else 63
    assert (run.steps, run.blocks) == (6, (0, 0, 0, 1, 1, 1))
    generator = torch.Generator().manual_seed(4)
    canvas = torch.cat([torch.tensor(PROMPTS[1]), torch.full((12,), mask)])
    shares = level_at(model.config, 0.0)
    if noise == "both":
        chosen = torch.rand(12, generator=generator, dtype=torch.float32) < shares[2] / (shares[1] + shares[2])
    else:
        chosen = torch.full((12,), noise == "uniform")
    if bool(chosen.any()):
        ids = torch.randint(SIZE - 1, (int(chosen.sum()),), generator=generator)
        canvas[3:][chosen] = ids + (ids >= mask)
    opened = torch.arange(15) >= 3
    for step in range(6):
        block = slice(start + step // 3 * 4, start + step // 3 * 4 + 4)
        assert run.canvases[step, 0].equal(canvas)
        assert run.open[step, 0].equal(opened)
        likely = expected_text(model, canvas, block.start, 0.8)[block]
        now, then = (level_at(model.config, cosine(one, 3)) for one in (step % 3, step % 3 + 1))
        weights = mixed_bayes_of(likely, canvas[block], now, then, mask)
        numbers = torch.rand(4, 1, generator=generator, dtype=torch.float64)
        canvas = canvas.clone()
        canvas[block] = torch.searchsorted(weights.cumsum(-1), numbers, right=True)[:, 0]
        text = then[0] * likely[torch.arange(4), canvas[block]]
        drawn_by_noise = torch.where(canvas[block] == mask, then[1], then[2] / (SIZE - 1))
        sure = text / (text + drawn_by_noise)
        torch.testing.assert_close(run.confidence[step, 0, block].double(), sure, atol=1e-6, rtol=1e-6)
        decided = torch.zeros(15, dtype=torch.bool)
        decided[block] = sure >= 0.5
        assert run.unmasked[step, 0].equal(opened & decided)
        opened = opened.clone()
        opened[block] = ~decided[block]
    assert run.tokens[0].equal(canvas)
    assert bool((run.canvases[3, 0, 7:] == run.canvases[0, 0, 7:]).all())  # the second block has waited


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0, "tokens_per_step": 3}])
def test_adaptive_steps_write_what_the_network_would_change_most(noise: str, settings: dict[str, Any]) -> None:
    model = tiny("gidd", **NOISES[noise]).double()
    run = dl.denoise(model, PROMPTS[1], remasking="adaptive", **RUN | {"steps_per_block": 6}, **settings)
    mask, generator = 3 if noise == "uniform" else 63, torch.Generator().manual_seed(4)
    canvas, opened = run.canvases[0, 0], torch.arange(15) >= 3
    if noise == "both":
        torch.rand(12, generator=generator, dtype=torch.float32)
    if noise != "masks":
        torch.randint(SIZE - 1, (int((canvas[3:] != mask).sum()),), generator=generator)
    number = settings.get("tokens_per_step", 1)
    for step in range(12):
        assert run.canvases[step, 0].equal(canvas)
        assert run.open[step, 0].equal(opened)
        block = torch.arange(3, 7) + step // 6 * 4
        likely = expected_text(model, canvas, int(block[0]))[block]
        _, masked, random = level_at(model.config, cosine(step % 6, 6))
        written_by_noise = torch.where(canvas[block] == mask, masked, random / (SIZE - 1))
        wanted = (likely.amax(-1) - likely[torch.arange(4), canvas[block]]) * written_by_noise
        torch.testing.assert_close(run.confidence[step, 0, block].double(), wanted, atol=1e-9, rtol=1e-6)
        best = likely.argmax(-1)
        if "temperature" not in settings:
            numbers = torch.rand(4, 1, generator=generator, dtype=torch.float64)
            best = torch.searchsorted(likely.cumsum(-1), numbers * likely.sum(-1, keepdim=True), right=True)[:, 0]
        order = [int(i) for i in wanted.argsort(descending=True)[:number] if wanted[i] > 0]
        before, canvas = canvas, canvas.clone()
        canvas[block[order]] = best[order]
        changed = torch.zeros(15, dtype=torch.bool)
        changed[block[order]] = True
        assert run.unmasked[step, 0].equal(opened & changed)
        assert run.revised[step, 0].equal(~opened & changed & (canvas != before))
        opened = opened & ~changed
    assert run.tokens[0].equal(canvas)
    assert int(run.unmasked.sum()) >= 5


def test_top_k_goes_before_the_nucleus_and_no_end_is_written_early() -> None:
    model = tiny("gidd").double()
    run = dl.denoise(
        model, PROMPTS[1], remasking="adaptive", top_k=5, top_p=0.6, tokens_per_step=4, min_length=6,
        on_logits=lambda step, canvas, found: found.index_fill(-1, torch.tensor([EOS]), 50.0), **RUN,
    )  # fmt: skip
    for step in range(run.steps):
        likely = network64(model, run.canvases[step, 0], run.spans[step][0])["logits"]
        likely[:, 3] = -torch.inf
        likely[:, EOS] = 50.0
        likely[: 3 + 6, EOS] = -torch.inf
        for position in range(*run.spans[step]):
            row = likely[position].softmax(-1)
            order = row.argsort(descending=True)[:5]
            among = row[order] / row[order].sum()
            kept = order[: int((among.cumsum(0) - among <= 0.6).sum())]
            token = int(run.proposals[step, 0, position])
            assert token in kept.tolist()
            assert (token == EOS) == (position >= 9)
    assert run.tokens[0, 9:11].tolist() == [EOS, EOS]


@pytest.mark.parametrize("remasking", ["ancestral", "adaptive"])
@pytest.mark.parametrize("noise", NOISES)
def test_a_row_is_what_it_is_alone(remasking: str, noise: str) -> None:
    model = tiny("gidd", **NOISES[noise]).double()
    together = dl.denoise(model, PROMPTS, remasking=remasking, **RUN | {"seed": [4, 5, 6]})
    assert (together.canvases[:-1] != together.canvases[1:]).any()
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], remasking=remasking, **RUN | {"seed": 4 + row})
        kept = together.attention_mask[row]
        assert int(kept.sum()) == len(prompt) + 12
        assert together.canvases[:, row, kept].equal(alone.canvases[:, 0])
        assert together.open[:, row, kept].equal(alone.open[:, 0])


def ends_at(step: int, canvas: Tensor, logits: Tensor) -> Tensor:
    """Logits by which the first row writes the end of the text in its first block."""
    found = logits.clone()
    found[0, :, EOS] = 50.0
    return found


def test_a_row_ends_with_the_block_that_holds_an_end_of_its_text() -> None:
    model = tiny("gidd").double()
    alone = dl.denoise(model, PROMPTS[:1], on_logits=ends_at, **RUN)
    assert (alone.steps, alone.blocks) == (3, (0, 0, 0))
    assert EOS in alone.tokens[0, 2:6].tolist()
    assert not alone.open[-1].any()
    assert alone.tokens[0, 6:].equal(alone.canvases[0, 0, 6:])  # noise that nothing has changed
    both = dl.denoise(model, PROMPTS[:2], on_logits=ends_at, **RUN | {"seed": [4, 5]})
    assert both.steps == 6
    kept = both.attention_mask[0]
    assert both.tokens[0, kept].equal(alone.tokens[0])
    assert both.row_steps.tolist() == [3, 6]
    assert both.answers[0] == alone.answers[0]
    assert not both.open[3:, 0].any()
    assert both.open[3, 1].any()


def test_clean_text_sees_no_noise_and_every_query_the_learned_key() -> None:
    model, states, patterns = tiny("gidd").double(), list[Tensor](), list[Tensor]()
    point = model.model.layers[1].self_attn.hook_pattern
    handle = point.register_forward_hook(lambda _m, _a, output: patterns.append(output[0]))
    run = dl.denoise(model, PROMPTS[1], **RUN)
    handle.remove()
    for step, pattern in enumerate(patterns):
        start = run.spans[step][0]
        expected = network64(model, run.canvases[step, 0], start)["pattern1"]
        torch.testing.assert_close(pattern[:, :15], expected, atol=1e-6, rtol=1e-5)
        assert not pattern[:, :start, start:15].any()
        assert bool((pattern[:, :15, 15] > 0).all())

    def watch(_module: Any, _args: Any, output: Any) -> None:
        states.append(output[0, :7])

    handle = model.model.layers[1].register_forward_hook(watch)
    dl.denoise(model, PROMPTS[1], **RUN)
    other = RUN | {"on_canvas": lambda step, canvas: canvas.index_fill(1, torch.arange(11, 15), 50)}
    dl.denoise(model, PROMPTS[1], **other)
    handle.remove()
    torch.testing.assert_close(states[6][:3], states[0][:3], rtol=0, atol=0)  # the prompt
    assert not states[6][3:].allclose(states[0][3:])


@pytest.mark.parametrize("bias", [True, False])
def test_statistics_count_what_each_query_sees(bias: bool) -> None:
    """Received attention and its uniform expectation, from patterns in float64, the learned key as last column."""
    model = tiny("gidd", attention_bias=bias).double()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    for step in (0, 2, 4):
        for row in range(3):
            content = run.attention_mask[row].nonzero()[:, 0]
            first, start = int(content[0]), run.spans[step][0]
            canvas = run.canvases[step, row, first:]
            pattern = network64(model, canvas, start - first)["pattern1"]
            seen = torch.ones(pattern.shape[1:], dtype=torch.bool)
            seen[: start - first, start - first : len(canvas)] = False
            uniform = (seen / seen.sum(-1, keepdim=True)).sum(0)
            columns = [*range(first, run.tokens.shape[1]), *([run.tokens.shape[1]] if bias else [])]
            got = received.values[step, row, 1][:, columns].double()
            torch.testing.assert_close(got, pattern.sum(1) / uniform, atol=2e-5, rtol=2e-5)


def test_hidden_columns_traces_and_resuming(tmp_path: Path) -> None:
    model: Any = tiny("gidd").double()
    hide = hooks.mask_positions(hooks.sink(0))
    seen: list[Tensor] = []
    keep = {"on_logits": lambda step, canvas, logits: seen.append(logits.clone())}
    run = dl.denoise(model, PROMPTS[1], hooks=[hide], **RUN, **keep)
    bare = tiny("gidd", attention_bias=False).double()
    bare.load_state_dict(
        {name: value for name, value in model.state_dict().items() if not name.endswith(("k_bias", "v_bias"))}
    )
    for step in range(run.steps):
        expected = network64(bare, run.canvases[step, 0], run.spans[step][0])["logits"]
        # The softmax over the other columns is in float32.
        torch.testing.assert_close(seen[step][0].double(), expected, atol=2e-5, rtol=2e-5)
    reducers = [dl.ReceivedAttention(min_viewers=1)]
    whole = dl.record(model, PROMPTS, reducers, **RUN)
    resumed = resumed_recording(model, tmp_path / "rec", 5, PROMPTS, reducers, **RUN)
    for name in ("canvases", "open", "unmasked", "revised", "proposals"):
        assert getattr(resumed.run, name).equal(getattr(whole.run, name)), name
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        for _ in tracer.steps[4]:
            traced = lm.layers[0].attn.pattern.save()
        found = tracer.result.save()
    assert found.canvases.equal(whole.run.canvases)
    expected = network64(model, whole.run.canvases[4, 1], whole.run.spans[4][0])["pattern0"]
    torch.testing.assert_close(traced[1, :, :15], expected, atol=1e-6, rtol=1e-5)


def test_defaults_of_blocks_and_canvas() -> None:
    model = tiny("gidd")
    run = dl.denoise(model, PROMPTS[1], gen_length=6)
    assert (run.steps, run.settings["block_length"], run.tokens.shape[1]) == (6, 6, 3 + 32)
    assert dl.denoise(model, PROMPTS[1], gen_length=40, block_length=8, steps=10).tokens.shape[1] == 43
    assert dl.denoise(model, PROMPTS[1], gen_length=6, block_length=4, steps=6).settings["steps_per_block"] == 3
    assert dl.denoise(model, "", gen_length=2).tokens[0, 0] == 60  # tiny's beginning of a text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"remasking": "origin"}, "remasking 'origin' is none of GIDD's: ancestral, adaptive"),
        ({"schedule": "quadratic"}, "schedule is 'quadratic'; it must be one of linear, cosine"),
        ({"min_log_snr": 9.0}, r"min_log_snr is 9.0 and max_log_snr 9.0; the first must be the less"),
        ({"tokens_per_step": 0}, "tokens_per_step is 0; it must be at least 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_length": -1}, "min_length is -1"),
        ({"canvas_length": 5, "block_length": 3}, "canvas_length is 5; it must hold the 6 positions of the answer"),
        ({"canvas_length": 5, "reference_quirks": True}, "counts the 2 positions of the prompt; give at least 6"),
        ({"gen_length": 0}, "gen_length is 0; it must be at least 1"),
        ({"sampling_method": "adaptive"}, "sampling_method is remasking here"),
        ({"noise_schedule": "linear"}, "noise_schedule is schedule here"),
        ({"cfg_scale": 1.0}, "has no setting 'cfg_scale'"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dl.denoise(tiny("gidd"), [5, 6], **{"gen_length": 4} | settings)


def test_masks_in_a_prompt_are_refused() -> None:
    with pytest.raises(
        ValueError, match="the prompt has 2 masks; GIDD decodes blocks after a prompt without noise"
    ):
        dl.denoise(tiny("gidd", **NOISES["masks"]), [5, 63, 63], gen_length=4)
