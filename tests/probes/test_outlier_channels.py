"""`channel_removal`: planted outliers are found, and effects are those of forward passes edited by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dlm_lens as dl
from dlm_lens.probes import channel_removal
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 17], [6, 2, 40]]


def planted() -> nn.Module:
    """A model with 30 in channel 7 at every position, and 30 more from the first MLP on."""
    model = tiny("llada")
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 7] = 30.0
    return model


def logits_without(model: nn.Module, ids: Tensor, mask: Tensor, channels: list[int]) -> Tensor:
    def zero(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        state = (output if isinstance(output, Tensor) else output[0]).clone()
        state[..., channels] = 0
        return state if isinstance(output, Tensor) else (state, *output[1:])

    handles = [layer.register_forward_hook(zero) for layer in model.model.layers] if channels else []
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask).logits.double()
    for handle in handles:
        handle.remove()
    return found.log_softmax(-1)


def test_a_planted_outlier_is_found_and_its_effect_is_that_of_edited_passes() -> None:
    model = planted()
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    found = channel_removal(model, run, controls=2, detector=dl.AboveMean(0.5))
    assert found.channels == (7,)
    assert found.by_layer(1)["channel"].tolist() == [7, 7]
    assert float(found.ratio[1, 7]) > 20
    assert all(len(one) == 1 and one != (7,) for one in found.random)
    for kind, sets in ((0, [found.channels]), (1, found.random)):
        kl, changed, count = torch.zeros(3, 2, dtype=torch.float64)
        for channels in sets:
            for step in range(3):
                plain, edited = (
                    logits_without(model, run.canvases[step], run.attention_mask.long(), one)
                    for one in ([], list(channels))
                )
                for row, place in run.masked[step].nonzero().tolist():
                    p, q = plain[row, place], edited[row, place]
                    kl[row] += float((p.exp() * (p - q)).sum())
                    changed[row] += float(p[:63].argmax() != q[:63].argmax())  # not [MASK]
                    count[row] += 1
        torch.testing.assert_close(found.sums[kind, :, 0, 0], kl, rtol=1e-3, atol=1e-4)
        assert found.sums[kind, :, 1, 0].tolist() == changed.tolist()
        assert found.sums[kind, :, 1, 1].tolist() == count.tolist()
    table = found.table().set_index("measure")
    assert table.loc["kl", "removed"] == pytest.approx(
        float(found.sums[0, :, 0, 0].sum() / found.sums[0, :, 0, 1].sum())
    )
    difference = table.loc["kl", "removed"] - table.loc["kl", "random"]
    assert table.loc["kl", "excess"] == pytest.approx(difference)
    assert difference > 0


def test_the_ratio_is_to_the_mean_of_the_two_middle_channels() -> None:
    model = tiny("llada")
    found = channel_removal(model, dl.denoise(model, PROMPTS, steps=3, gen_length=6), controls=1)
    size = found.magnitude.numpy()
    assert size.shape[1] % 2 == 0
    np.testing.assert_allclose(found.ratio.numpy(), size / np.median(size, -1, keepdims=True), rtol=1e-5)


def test_the_magnitude_is_a_mean_over_steps_and_prompts_of_means_over_positions() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    found, states = channel_removal(model, run, controls=1), dl.hooks.capture(model, run, "resid")
    # What enters the second layer leaves the first one; rows of unequal lengths weigh the same.
    rows = [
        states.values["resid", 0, step][row][run.attention_mask[row]].abs().mean(0)
        for step in range(run.steps)
        for row in range(len(PROMPTS))
    ]
    torch.testing.assert_close(found.magnitude[1], torch.stack(rows).mean(0), rtol=1e-4, atol=1e-5)


def test_sinks_gone_are_those_that_only_the_plain_pass_has() -> None:
    model = planted()
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=6)
    found = channel_removal(model, run, channels=[7, 8], controls=1, detector=dl.AboveMean(0.5))
    replayed = dl.replay(model, run, [dl.hooks.ablate("resid", dims=(7, 8))])
    plain, hooked = (
        dl.find_sinks(one, dl.AboveMean(0.5)).is_sink for one in (replayed.received, replayed.received_hooked)
    )
    gone = (plain & ~hooked).sum((0, 2, 3, 4))
    assert found.sums[0, :, 2, 0].tolist() == gone.tolist()
    assert found.sums[0, :, 2, 1].tolist() == plain.sum((0, 2, 3, 4)).tolist()
    assert int(gone.sum()) > 0


def test_wrong_channels_are_refused() -> None:
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, steps=2, gen_length=4)
    with pytest.raises(ValueError, match="channel 32 of 32: channels go from 0 to 31"):
        channel_removal(model, run, channels=[32])
    with pytest.raises(ValueError, match="20 of 32 channels leave too few for the control; give at most 16"):
        channel_removal(model, run, top=20)
