"""rerun: the statistics of `record` for a finished run, for some of its steps, layers and rows."""

import pytest
import torch

from dlm_lens.recording import (
    AttentionEntropy,
    AttentionPattern,
    KeyNorm,
    MassiveActivations,
    ReceivedAttention,
    TopKeys,
    ValueNorm,
    record,
    record_forward,
    rerun,
)
from dlm_lens.sampling import denoise
from dlm_lens.testing import tiny
from tests.recording.reference import PROMPTS, build, settings
from tests.reference import forward64

REDUCERS = [ReceivedAttention(("all", "unmasked")), ValueNorm(), MassiveActivations(), TopKeys(2)]
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


def close(found, wanted):
    assert list(found.specs) == list(wanted.specs)
    for name in wanted.specs:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **CLOSE, msg=name)
    assert torch.equal(found.answer, wanted.answer)
    assert (found.layers, found.steps, found.rows) == (wanted.layers, wanted.steps, wanted.rows)
    for name in ("canvases", "masked", "unmasked", "attention_mask"):
        assert torch.equal(getattr(found.run, name), getattr(wanted.run, name)), name
    assert found.run.settings == wanted.run.settings


@pytest.mark.parametrize("family", ["llada", "sink front", "llama"])
def test_rerun_is_the_recording_of_the_run(family):
    model, given = build(tiny, family), settings(family)
    recorded = record(model, PROMPTS, REDUCERS, **given)
    close(rerun(model, recorded.run, REDUCERS), recorded)


@pytest.mark.parametrize("family", ["llada", "llama"])
def test_rerun_of_some_steps_layers_and_rows_is_a_part_of_the_whole(family):
    model, given = build(tiny, family), settings(family)
    recorded = record(model, PROMPTS, REDUCERS, **given)
    part = rerun(model, recorded.run, REDUCERS, steps=[1, -1], layers=[-1], rows=[1])
    close(part, recorded.select(step=[1, -1], layer=[1], batch=[1]))
    assert part.expected().equal(recorded.select(step=[1, -1], layer=[1], batch=[1]).expected())


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_per_pass_changes_nothing(rows):
    model = tiny("llada")
    recorded = record(model, PROMPTS, REDUCERS, **settings("llada"))
    close(rerun(model, recorded.run, REDUCERS, rows_per_pass=rows), recorded)


def test_rerun_of_a_guided_run_is_the_conditional_half_in_one_pass_of_its_rows():
    model = tiny("llada")
    recorded = record(model, PROMPTS, REDUCERS, cfg_scale=1.5, **settings("llada"))
    sizes = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = rerun(model, recorded.run, REDUCERS)
    handle.remove()
    assert sizes == [len(PROMPTS)] * recorded.run.steps
    close(found, recorded)


def test_rerun_of_forward_passes():
    model, ids = tiny("llada"), torch.tensor([[5, 9, 11, 63, 3]])
    with record_forward(model, REDUCERS) as recorded, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    found = rerun(model, recorded.recording.run, REDUCERS)
    torch.testing.assert_close(found.received, recorded.received, **CLOSE)


@pytest.mark.parametrize("count", [0, 2])
def test_attention_pattern_is_the_pattern(count):
    model = tiny("sink_qwen", num_sinks=count, sink_placement="end")
    run = denoise(model, [[5, 9, 11, 3], [6, 2]], steps=3, gen_length=4, seed=1)
    found = rerun(model, run, [AttentionPattern(), AttentionEntropy()], steps=[2])
    assert found.pattern.shape == (1, 2, 2, 4, 8, 8 + count)
    wanted = forward64(model, run.canvases[2], run.attention_mask)
    for layer in range(2):
        pattern = wanted[f"pattern{layer}"][:, :, :8]
        content = run.attention_mask
        for row in range(2):
            torch.testing.assert_close(
                found.pattern[0, row, layer][:, content[row]].double(),
                pattern[row][:, content[row]],
                rtol=1e-4,
                atol=1e-5,
            )
            assert bool(found.pattern[0, row, layer][:, ~content[row]].isnan().all())


def test_steps_after_the_end_of_a_row_are_undefined():
    model = tiny("llada")
    recordings = [
        record(model, [[5, 9, 11]], REDUCERS, steps=steps, gen_length=8, block_length=8, seed=1) for steps in (2, 4)
    ]
    from dlm_lens.recording.concatenation import joined

    whole = joined(recordings)
    found = rerun(model, whole.run, [*REDUCERS, KeyNorm()])
    assert whole.run.rows_ran == (2, 4)
    assert bool(found.key_norm[2:, 0].isnan().all())
    assert not bool(found.key_norm[2:, 1].isnan().any())
    for name in whole.specs:
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), **CLOSE, msg=name)


def test_what_cannot_be_rerun_is_refused():
    model = tiny("llada")
    run = denoise(model, PROMPTS, **settings("llada"))
    with pytest.raises(TypeError, match="the run is a Tensor"):
        rerun(model, run.canvases, REDUCERS)
    for wrong, sentence in (
        ({"steps": [6]}, "step 6 of 6"),
        ({"rows": [7]}, "row 7 of"),
        ({"layers": [2]}, "layer 2"),
        ({"rows_per_pass": 1.5}, "rows_per_pass is 1.5; it must be a whole number of at least 1"),
        ({"rows_per_pass": 0}, "rows_per_pass is 0; it must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            rerun(model, run, REDUCERS, **wrong)
    with pytest.raises(ValueError, match="is not a reducer"):
        rerun(model, run, [object()])
