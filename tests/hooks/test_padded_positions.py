"""Hooks that name positions, and prompts of unequal length: `record` keeps these apart, other runs warn."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_lens import DiffusionLM, bridge, denoise, record
from dlm_lens.bridging.step_hooks import fwd_hooks_of
from dlm_lens.hooks import (
    ablate,
    at_steps,
    attach_hooks,
    by_row,
    freeze_sinks,
    mask_positions,
    scale_attention,
    sink,
    steer,
    zero_value,
)
from dlm_lens.recording import ReceivedAttention, Recording, RecordingSet, ValueNorm
from dlm_lens.recording.record_runs import Batches
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 11, 3, 7, 8], [6, 2, 4]]
HOOKS: dict[str, Any] = {
    "mask_positions": mask_positions(2),
    "mask_positions, from the end": mask_positions(-2, 0),
    "mask_positions, after": mask_positions(1, stage="after"),
    "some steps": at_steps(mask_positions(2), [1, 2]),
    "scale_attention": scale_attention(2, 0.1),
    "zero_value": zero_value(2, 1),
    "ablate": ablate("resid", (2, -1)),
    "steer": steer(torch.ones(32), 2.0, positions=(1,)),
    "freeze_sinks": freeze_sinks([2, 3], step=1),
}
SETTINGS = {
    "llada": {"steps": 4, "gen_length": 4},
    "sink_llama": {"steps": 4, "gen_length": 4},
    "causal": {"gen_length": 4},
}


@pytest.mark.parametrize("family", list(SETTINGS))
@pytest.mark.parametrize("name", list(HOOKS))
def test_a_row_gets_what_it_gets_alone(name: str, family: str) -> None:
    model, settings, hook = tiny(family), SETTINGS[family], HOOKS[name]
    reducers = [ReceivedAttention(["all"]), ValueNorm()]
    both = record(model, PROMPTS, reducers, hooks=[hook], **settings)
    plain = record(model, PROMPTS, reducers, **settings)
    assert any(not torch.equal(both.arrays[each], plain.arrays[each]) for each in both.arrays), (
        "the hook does nothing"
    )
    for row, prompt in enumerate(PROMPTS):
        alone = record(model, [prompt], reducers, hooks=[hook], **settings)
        before = both.run.tokens.shape[-1] - alone.run.tokens.shape[-1]
        assert before == len(PROMPTS[0]) - len(prompt)
        assert torch.equal(both.run.tokens[row, before:], alone.run.tokens[0])
        for each, spec in both.specs.items():
            values, expected = both.arrays[each].select(spec.dims.index("batch"), row), alone.arrays[each]
            values = values.narrow(-1, before, expected.shape[-1])
            expected = expected.select(spec.dims.index("batch"), 0)
            # A batch's products round otherwise: float32, sums of up to 10.
            torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", list(HOOKS))
def test_another_run_of_padded_rows_warns(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, settings = tiny("llada"), SETTINGS["llada"]
    denoise(model, PROMPTS, hooks=[HOOKS[name]], **settings)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{HOOKS[name]}: positions count from the beginning of the canvas")
    assert "rows of this batch begin at 0 to 3" in message


def test_a_padded_row_alone_begins_at_one_position(caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = [[0, 0, 5, 6, 7, 8]], [[0, 0, 1, 1, 1, 1]]
    denoise(tiny("llada"), ids, mask, hooks=[mask_positions(0)], **SETTINGS["llada"])
    (message,) = [record.getMessage() for record in caplog.records]
    assert "rows of this batch begin at 2, after their padding" in message


@pytest.mark.parametrize("host", ["attach_hooks", "around denoise", "nnsight", "TransformerLens"])
@pytest.mark.parametrize("name", [name for name in HOOKS if name not in ("some steps", "freeze_sinks")])
def test_a_padded_pass_outside_a_run_warns_once(name: str, host: str, caplog: pytest.LogCaptureFixture) -> None:
    model, hook = tiny("llada"), HOOKS[name]
    outside_a_run(host, model, hook, [PROMPTS[0], PROMPTS[0]])
    assert not caplog.records
    outside_a_run(host, model, hook, PROMPTS)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{hook}: positions count from the beginning of the canvas")
    assert "rows of this batch begin at 0 to 3" in message
    assert message.endswith("pass prompts of one length, or count in every row with by_row(...) in "
                            "dlm_lens.denoise(..., hooks=[...])")  # fmt: skip
    outside_a_run(host, model, SAFE["from the end"], PROMPTS)
    assert len(caplog.records) == 1


def outside_a_run(host: str, model: Any, hook: Any, prompts: list[list[int]]) -> None:
    run = denoise(model, prompts, steps=1, gen_length=1)
    ids, mask = run.tokens, run.attention_mask.long()
    if host == "attach_hooks":
        with torch.no_grad(), attach_hooks(model, hook):
            for _ in range(2):
                model(input_ids=ids, attention_mask=mask)
    elif host == "around denoise":
        with attach_hooks(model, hook):
            denoise(model, prompts, **SETTINGS["llada"])
    elif host == "nnsight":
        lm = DiffusionLM(model)
        with lm.trace(prompts):
            for layer in range(2):
                lm.layers[layer].attn.apply(hook)
    else:
        tl = bridge(model)
        points = fwd_hooks_of(tl, [hook])
        tl.run_with_hooks(ids, fwd_hooks=points, attention_mask=mask)


def test_an_invoke_warns_of_its_own_rows(caplog: pytest.LogCaptureFixture) -> None:
    lm = DiffusionLM(tiny("llada"))
    with lm.trace() as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                lm.layers[0].attn.apply(ablate("resid", (2,)))
        with tracer.invoke(PROMPTS[0]):
            lm.layers[0].attn.apply(mask_positions(2))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "rows of this batch begin at 3, after their padding" in message


def test_the_error_of_a_trace_names_runs() -> None:
    lm = DiffusionLM(tiny("llada"))
    message = r"or give attn\.apply\(hook, step\) a step of lm\.generate\("
    with pytest.raises(ValueError, match=message), lm.trace(PROMPTS):
        lm.layers[0].attn.apply(mask_positions(by_row([0], [0])))


SAFE: dict[str, Any] = {
    "from the end": mask_positions(-2),
    "sinks": zero_value(sink(0)),
    "a class": ablate("resid", "open"),
    "everywhere": scale_attention("prompt", 0.5),
}


@pytest.mark.parametrize("name", list(SAFE))
def test_what_padding_does_not_shift_is_batched_without_a_word(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, settings = tiny("sink_llama", num_sinks=1), SETTINGS["llada"]
    batches = Batches.of(model, PROMPTS, None, 0).under([SAFE[name]])
    assert batches.parts == [range(2)]
    denoise(model, PROMPTS, hooks=[SAFE[name]], **settings)
    assert not caplog.records


def test_batches_end_where_the_length_changes() -> None:
    prompts = [[1, 2], [3, 4], [5, 6], [7], [8, 9, 10], [11, 12, 13]]
    batches = Batches.of(tiny("llada"), prompts, 2, 0)
    assert batches.parts == [range(0, 2), range(2, 4), range(4, 6)]
    assert batches.under([mask_positions(0)]).parts == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert batches.under([at_steps(zero_value(1), [0])]).parts[1] == range(2, 3)


def test_it_goes_on_in_its_directory(tmp_path: Path) -> None:
    model, settings = tiny("llada"), SETTINGS["llada"]
    given: dict[str, Any] = {"hooks": [mask_positions(2)], "batch_size": 8, **settings}
    whole = record(model, PROMPTS, **given)
    for _ in range(2):
        stored = record(model, PROMPTS, to=tmp_path / "run", **given)
        torch.testing.assert_close(stored.received, whole.received, atol=0, rtol=0, equal_nan=True)
    loaded = Recording.load(tmp_path / "run")
    torch.testing.assert_close(loaded.received, whole.received, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(loaded.run.canvases, whole.run.canvases)
    shutil.rmtree(tmp_path / "run" / "rows-00000-00000")  # as if killed: the other batch is there
    with pytest.raises(ValueError, match=r"holds 1 of 2 prompts \(rows-00000-00000 missing\)"):
        Recording.load(tmp_path / "run")
    assert [path.name for path in RecordingSet(tmp_path / "run").unfinished] == ["rows-00000-00000"]
