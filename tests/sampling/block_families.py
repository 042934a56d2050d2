"""What the families are held to that decode a text block by block; their own files say who sees whom."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.testing import tiny

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]

Alone = Callable[[dl.DenoisingRun, int, int], tuple[slice, Tensor, dict[str, Tensor]]]
"""Of a step and a row: the positions that the network sees, who sees whom, and an independent network's values."""


def sharp(family: str, **config: Any) -> Any:
    """A tiny network whose confidences are on both sides of the threshold."""
    model = tiny(family, **config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return model


def check_received_attention(model: Any, recording: dl.Recording, alone: Alone) -> None:
    """Received attention, its expectation and the viewers of every row, by themselves and as a replay has them."""
    run, received = recording.run, dl.received_of(recording)
    expected, viewers, pairs = recording.expected(), recording.viewers(), recording.facts.pairs()
    assert int(run.running.sum()) > 8
    for step, row in run.running.nonzero().tolist():
        inside, visible, kept = alone(run, step, row)
        seen = visible[0, 0].double()
        even = (seen / seen.sum(-1, keepdim=True)).sum(0)
        torch.testing.assert_close(expected[step, row, inside].double(), even, atol=1e-5, rtol=1e-5)
        assert viewers[step, row, inside].tolist() == seen.sum(0).tolist()
        assert pairs[step, row][inside, inside].equal(visible[0, 0])
        for nothing in (expected[step, row], viewers[step, row]):
            assert not nothing[: inside.start].any()
            assert not nothing[inside.stop :].any()
        for layer in range(2):
            sums = received.column_sums[step, row, layer][:, inside].double()
            torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)
    assert recording.select(batch=1).expected()[:, 0].equal(expected[:, 1])


def check_hook(model: Any, given: dict[str, Any], hidden64: Callable[[dl.DenoisingRun, int], Tensor]) -> None:
    """A hook that hides position 2 acts at every step as in a network in float64, whose logits are given."""
    seen = list[Tensor]()

    def keep(step: int, canvas: Tensor, logits: Tensor) -> None:
        seen.append(logits.clone())

    run = dl.denoise(model, PROMPTS[1:2], hooks=[mask_positions(2)], on_logits=keep, **given)
    for step in range(run.steps):
        logits = hidden64(run, step)
        torch.testing.assert_close(seen[step][0, : len(logits)].double(), logits, atol=2e-5, rtol=2e-4)


def check_ends(model: Any, given: dict[str, Any]) -> tuple[dl.DenoisingRun, int]:
    """Rows end with a stop token that has no mask before it, and are the same up to it; the run and the token."""
    free = dl.denoise(model, PROMPTS, **given)
    answer = free.tokens[:, free.prompt_length :]
    stop = int(answer[0, 2])
    run = dl.denoise(model, PROMPTS, **given | {"stop_tokens": [stop]})
    assert run.masks_left[0] > 0
    for row, tokens in enumerate(answer):
        places = (tokens == stop).nonzero().flatten().tolist()
        kept = places[0] + 1 if places else len(tokens)
        assert run.tokens[row, free.prompt_length :][:kept].equal(tokens[:kept])
    return run, stop


def check_hosts(model: Any, other: Any, given: dict[str, Any], alone: Alone) -> None:
    """Traces and a bridge of a model and its copy `other` run as `denoise` does, with a hook and without."""
    plain = dl.denoise(model, PROMPTS, **given)
    hooked = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **given)
    assert not hooked.canvases.equal(plain.canvases)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **given) as tracer:
        patterns = [].save()
        for step in tracer.steps[:]:
            patterns.append((int(step), lm.layers[0].attn.pattern))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert len(patterns) == plain.steps
    for step, pattern in patterns:
        inside, _, kept = alone(plain, step, 2)
        torch.testing.assert_close(pattern[2:, :, inside, inside].double(), kept["pattern0"], atol=2e-5, rtol=2e-4)
    with lm.generate(PROMPTS, **given) as tracer:
        for step in tracer.steps[:]:
            for layer in lm.layers:
                layer.attn.apply(mask_top_sinks(1), step)
        edited = tracer.result.save()
    assert edited.canvases.equal(hooked.canvases)
    tl = dl.bridge(other)
    assert tl.denoise(PROMPTS, **given).canvases.equal(plain.canvases)
    assert tl.denoise(PROMPTS, hooks=[mask_top_sinks(1)], **given).canvases.equal(hooked.canvases)
