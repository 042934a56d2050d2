"""`patch_from` between runs of other rows: halves of guidance, numbers of rows, padding; against captures."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import Activations, attach_hooks, by_row, capture, patch_from, sink
from dlm_lens.testing import tiny

RUN: dict[str, Any] = {"steps": 2, "gen_length": 4, "block_length": 4}
GUIDED: dict[str, Any] = {**RUN, "cfg_scale": 1.5}
A, B, LONG = [5, 9, 11, 3], [6, 2, 40, 7], [8, 4, 17, 22, 30, 12]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llada")


def patched(model: Any, prompts: Any, hook: Any, **settings: Any) -> Tensor:
    """The residual stream after the first layer at step 0 of a run under a patch."""
    return capture(model, prompts, "resid", layers=[0], cache_steps=0, hooks=[hook], **settings)["resid", 0, 0]


def kept(model: Any, prompts: Any, **settings: Any) -> Activations:
    return capture(model, prompts, "resid", layers=[0], cache_steps=0, **settings)


@pytest.mark.parametrize("host", ["denoise", "nnsight", "transformerlens"])
def test_rows_get_the_half_of_guidance_that_they_are(model: Any, host: str) -> None:
    plain, guided = (kept(model, A, **settings) for settings in (RUN, GUIDED))
    conditional, unconditional = guided["resid", 0, 0]
    both = kept(model, [A, B], **GUIDED)
    assert both["resid", 0, 0].shape[0] == 4
    cases: list[tuple[Any, Activations, dict[str, Any], list[Tensor]]] = [
        ([A, B], guided, RUN, [conditional, conditional]),
        ([B, A], both, RUN, list(both["resid", 0, 0][:2])),
        ([A, B], guided, GUIDED, [conditional, conditional, unconditional, unconditional]),
        ([B, A], both, GUIDED, list(both["resid", 0, 0])),
        (B, plain, GUIDED, [plain["resid", 0, 0][0]] * 2),
    ]
    for prompts, source, settings, expected in cases:
        found = states_in(host, model, prompts, patch_from(source, 0), settings)
        torch.testing.assert_close(found, torch.stack(expected))


def states_in(host: str, model: Any, prompts: Any, hook: Any, settings: dict[str, Any]) -> Tensor:
    if host == "denoise":
        return patched(model, prompts, hook, **settings)
    if host == "transformerlens":
        name = "blocks.0.hook_resid_post"
        _, cache = dl.bridge(model).denoise_with_cache(
            prompts, names_filter=name, cache_steps=0, hooks=[hook], **settings
        )
        found: Tensor = cache[name, 0]
        return found
    lm = dl.DiffusionLM(model)
    with lm.generate(prompts, **settings) as tracer:
        for step in tracer.steps[0]:
            lm.layers[0].attn.apply(hook, step)
            traced = lm.layers[0].output.clone().save()
    result: Tensor = traced
    return result


def test_other_numbers_of_rows_are_refused_before_the_first_pass(model: Any) -> None:
    two = kept(model, [A, B], **RUN)
    for prompts, settings in ((A, GUIDED), ([A, B, A], RUN), ([A, B, A, B], RUN)):
        count = 1 if prompts is A else len(prompts)
        with pytest.raises(ValueError, match=f"the other run has 2 rows and this one {count}; capture as many"):
            dl.denoise(model, prompts, hooks=[patch_from(two, 0), Never()], **settings)


class Never:
    """Fails where it is called: no forward pass may run."""

    site = "resid"

    def __call__(self, tensor: Tensor, hook: Any = None) -> Tensor:
        raise AssertionError("a forward pass ran")


def test_a_row_with_other_padding_is_refused(model: Any) -> None:
    unequal = kept(model, [A, LONG], **RUN)
    alone = kept(model, LONG, **RUN)
    message = "row 0 of the other run has {} positions of padding and row 0 of this one {}, .*empty list of by_row"
    for source, prompts, numbers in (
        (unequal, [LONG, LONG], (2, 0)),
        (alone, [A, LONG], (0, 2)),
        (kept(model, [LONG, A], **RUN), [A, LONG], (0, 2)),
    ):
        for positions in (None, "answer", -1, (3, 1), by_row([0], [0])):
            hook = patch_from(source, 0, positions=positions)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=message.format(*numbers)):
                dl.denoise(model, prompts, hooks=[hook, Never()], **RUN)
    expected = unequal["resid", 0, 0]
    found = patched(model, [B, LONG], patch_from(unequal, 0), **RUN)  # equal padding
    assert found[0, 2:].equal(expected[0, 2:])
    assert found[1].equal(expected[1])
    found = patched(model, [LONG, LONG], patch_from(unequal, 0, positions=by_row([], [1, -1])), **RUN)
    plain = kept(model, [LONG, LONG], **RUN)["resid", 0, 0]
    assert found[0].equal(plain[0])
    assert found[1, [1, -1]].equal(expected[1, [1, -1]])


def test_learned_sink_tokens_of_padded_rows_are_patched() -> None:
    model = tiny("sink_qwen", num_sinks=1)
    source = kept(model, [A, LONG], **RUN)
    found = patched(model, [LONG, LONG], patch_from(source, 0, positions=sink(0)), **RUN)
    assert found[:, 0].equal(source["resid", 0, 0][:, 0])


def test_outside_a_run_padding_and_halves_are_not_known(model: Any) -> None:
    ids = kept(model, [A, B], **RUN).run.canvases[0]
    for source, what in ((kept(model, [A, LONG], **RUN), "padding"), (kept(model, A, **GUIDED), "guidance")):
        with (
            torch.no_grad(),
            attach_hooks(model, patch_from(source, 0)),
            pytest.raises(ValueError, match=f"the other run has {what}, and outside a run that of these 2 rows"),
        ):
            model(input_ids=ids)
    guided = kept(model, A, **GUIDED)
    with torch.no_grad(), attach_hooks(model, patch_from(guided, 0)):
        model(input_ids=ids[:1])
