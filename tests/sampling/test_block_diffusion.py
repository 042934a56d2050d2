"""Block diffusion: cache, batches, recordings, hooks and hosts, against a float64 network without a cache."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import BlockLayout
from dlm_lens.hooks import mask_positions, mask_top_sinks
from dlm_lens.sampling.run_plan import plan_run
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
RUN: dict[str, Any] = {"gen_length": 12, "block_length": 4, "steps": 6, "seed": 1, "temperature": 0.7}


def model_of(**config: Any) -> Any:
    return tiny("a2d_qwen3", sampler="dllm_blocks", **config)


def visible_by_hand(length: int, block: int, first: int) -> Tensor:
    """M of one row without padding, entry by entry."""
    of = [(place - first) // block for place in range(length)]
    return torch.tensor([[of[key] <= of[query] for key in range(length)] for query in range(length)])


def alone64(model: Any, run: dl.DenoisingRun, step: int, row: int, **options: Any) -> dict[str, Tensor]:
    """Everything that a float64 network computes of one row at a step."""
    keep = run.attention_mask[row].clone()
    keep[run.spans[step][1] :] = False
    first = run.prompt_length - int(run.padding[row])
    visible = visible_by_hand(int(keep.sum()), int(run.settings["block_length"]), first)[None, None]
    if "hidden" in options:
        visible = visible.clone()
        visible[..., options.pop("hidden")] = False
    return forward64(model, run.canvases[step, row][keep][None], visible=visible, **options)


def test_blocks_are_counted_from_the_answer() -> None:
    content = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]]).bool()
    found = BlockLayout(3, torch.tensor([4])).visible(content)[0, 0]
    assert found[1:, 1:].equal(visible_by_hand(8, 3, 4)[1:, 1:])
    assert not found[0].any()
    assert not found[:, 0].any()


@pytest.mark.parametrize("config", [{}, {"logit_shift": True}, {"attention_bias": True}])
@pytest.mark.parametrize("options", [{}, {"cfg_scale": 0.8}, {"remasking": "random"}, {"block_length": 5}])
def test_the_cache_changes_nothing(config: dict[str, Any], options: dict[str, Any]) -> None:
    model = model_of(**config)
    cached = dl.denoise(model, PROMPTS, **RUN | options)
    whole = dl.denoise(model, PROMPTS, use_cache=False, **RUN | options)
    assert cached.canvases.equal(whole.canvases)
    finite = whole.confidence.isfinite()
    torch.testing.assert_close(cached.confidence[finite], whole.confidence[finite], atol=1e-5, rtol=1e-5)


def test_an_edit_of_a_finished_block_empties_the_cache() -> None:
    model = model_of()

    def edit(step: int, canvas: Tensor) -> Tensor:
        if step == 3:
            canvas[:, 8] = 30  # in the first block, which ended with step 1
        return canvas

    cached, whole = (dl.denoise(model, PROMPTS, on_canvas=edit, use_cache=use, **RUN) for use in (True, False))
    plain = dl.denoise(model, PROMPTS, **RUN)
    assert cached.canvases.equal(whole.canvases)
    assert not cached.proposals[3:].equal(plain.proposals[3:])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"cfg_scale": 1.0}])
def test_a_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    model = model_of()
    together = dl.denoise(model, PROMPTS, **RUN | options)
    for row, prompt in enumerate(PROMPTS):
        alone = dl.denoise(model, [prompt], **RUN | options)
        kept = together.attention_mask[row]
        steps, length = alone.steps, alone.tokens.shape[1]
        assert together.canvases[: steps + 1, row, kept][:, :length].equal(alone.canvases[:, 0])


def test_confidences_are_those_of_a_float64_network() -> None:
    model = model_of()
    run = dl.denoise(model, PROMPTS, **RUN | {"temperature": 0.0})
    for step in range(run.steps):
        for row in range(2):
            likely = alone64(model, run, step, row)["logits"][0].softmax(-1).amax(-1)
            keep = run.attention_mask[row].clone()
            keep[run.spans[step][1] :] = False
            found = run.confidence[step, row][keep]
            known = found.isfinite()
            # [MASK] is never proposed; it is not the likeliest here, or the two would differ.
            torch.testing.assert_close(found[known].double(), likely[known], atol=1e-5, rtol=1e-5)


def test_received_attention_and_its_expectation() -> None:
    model = model_of()
    recording = dl.record(model, PROMPTS, [dl.ReceivedAttention(min_viewers=1)], **RUN)
    run, received = recording.run, dl.received_of(recording)
    assert run.canvases.equal(dl.denoise(model, PROMPTS, **RUN).canvases)
    expected, viewers = recording.expected(), recording.viewers()
    for step in range(run.steps):
        for row in range(2):
            if step >= run.row_steps[row]:  # its text ended before that of the other row
                assert received.values[step, row].isnan().all()
                assert not expected[step, row].any()
                assert not viewers[step, row].any()
                continue
            keep = run.attention_mask[row].clone()
            keep[run.spans[step][1] :] = False
            kept = alone64(model, run, step, row)
            visible = visible_by_hand(int(keep.sum()), 4, run.prompt_length - int(run.padding[row]))
            even = (visible.double() / visible.sum(-1, keepdim=True)).sum(0)
            torch.testing.assert_close(expected[step, row][keep].double(), even, atol=1e-5, rtol=1e-5)
            assert viewers[step, row][keep].tolist() == visible.sum(0).tolist()
            assert not expected[step, row][~keep].any()
            for layer in range(2):
                sums = received.column_sums[step, row, layer][:, keep].double()
                torch.testing.assert_close(sums, kept[f"pattern{layer}"][0].sum(-2), atol=2e-5, rtol=2e-4)
            assert received.values[step, row, ..., ~keep].isnan().all()
    again = dl.received_over_steps(model, run, min_viewers=1)
    torch.testing.assert_close(again.values, received.values, equal_nan=True)


def test_a_hidden_column_is_hidden_in_every_block() -> None:
    model = model_of()
    seen: list[Tensor] = []
    run = dl.denoise(
        model, PROMPTS[:1], hooks=[mask_positions(2)],
        on_logits=lambda step, canvas, logits: seen.append(logits.clone()), **RUN,
    )  # fmt: skip
    for step in range(run.steps):
        logits = alone64(model, run, step, 0, hidden=2)["logits"][0]
        torch.testing.assert_close(seen[step][0, : len(logits)].double(), logits, atol=2e-5, rtol=2e-4)
    assert not run.tokens.equal(dl.denoise(model, PROMPTS[:1], **RUN).tokens)


def test_hosts_run_the_same() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS, **RUN)
    hooked = dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        shapes = [].save()
        for _ in tracer.steps[:]:
            shapes.append(tuple(lm.layers[0].attn.pattern.shape))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert [shape[-1] for shape in shapes] == [span[1] for span in plain.spans]
    tl = dl.bridge(model_of())
    assert tl.denoise(PROMPTS, **RUN).canvases.equal(plain.canvases)
    assert tl.denoise(PROMPTS, hooks=[mask_top_sinks(1)], **RUN).canvases.equal(hooked.canvases)


def test_a_checkpoint_is_loaded_with_its_sampler(tmp_path: Path) -> None:
    tiny("a2d_qwen3").save_pretrained(tmp_path)
    assert dl.load(tmp_path).config.sampler is None
    model = dl.load(tmp_path, sampler="dllm_blocks")
    assert model.sampler_defaults["block_length"] == 32
    assert dl.denoise(model, [[1, 2]], gen_length=4).settings["sampler"] == "dllm_blocks"
    with pytest.raises(ValueError, match=r"^sampler is 'dream'; a2d_qwen3 has dllm, dllm_blocks"):
        dl.load(tmp_path, sampler="dream")


def test_released_block_checkpoints_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released config.json is that of the MDLM checkpoint; another sampler would show it another mask."""
    name = "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1"
    (tmp_path / name).mkdir(parents=True)
    tiny("a2d_qwen3").save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)  # a directory of the hub's name is found before the hub
    model = dl.load(name)
    assert model.config.sampler == "dllm_blocks"
    with pytest.warns(UserWarning, match="block_length is 8, but the model was trained with blocks of 32"):
        dl.denoise(model, [[1, 2]], gen_length=16, block_length=8)
    with warnings.catch_warnings():  # the answer is a part of a block
        warnings.simplefilter("error")
        assert dl.denoise(model, [[1, 2]], gen_length=16).settings["block_length"] == 16
    assert dl.load(name, sampler="dllm").config.sampler == "dllm"
    other = "divelab/OPDLM-0.6B"
    (tmp_path / other).mkdir(parents=True)
    tiny("a2d_qwen3").save_pretrained(tmp_path / other)
    model = dl.load(other)
    assert (model.config.sampler, model.sampler_defaults["block_length"]) == ("dllm_blocks", 4)
    former = "dllm-collection/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1"
    (tmp_path / former).mkdir(parents=True)
    tiny("a2d_qwen3", model_type="a2d-qwen2").save_pretrained(tmp_path / former)
    assert dl.load(former).sampler_defaults["block_length"] == 32
    assert dl.load(former).config.sampler == "dllm_blocks"
    # Naming the sampler that it has anyway does not change the length of its blocks.
    assert dl.load(other, sampler="dllm_blocks").sampler_defaults["block_length"] == 4
    assert dl.load(other, sampler="dllm").sampler_defaults["block_length"] == 128
    # A plan is that of the run: four blocks of two steps, each of which sees the canvas up to its block's end.
    plan = plan_run(other, prompt_length=2, gen_length=16, steps_per_block=2)
    assert plan.steps == dl.denoise(model, [[1, 2]], gen_length=16, steps_per_block=2).steps == 8


def test_what_cannot_be() -> None:
    model = model_of()
    # Masks in the prompt are no remedy.
    for prompt in ([1, 2], [1, model.config.mask_token_id, 2]):
        with pytest.raises(
            ValueError, match=r"^gen_length is 0; block diffusion writes .* gen_length of at least 1$"
        ):
            dl.denoise(model, prompt, gen_length=0)
    with pytest.raises(ValueError, match="use_cache=True with hooks or a recorder"):
        dl.denoise(model, PROMPTS, hooks=[mask_top_sinks(1)], use_cache=True, **RUN)


def test_a_recording_is_stored_and_resumed(tmp_path: Path) -> None:
    resumed_as_unbroken(model_of(), PROMPTS, tmp_path / "rec", reducers=[dl.ValueNorm()], **RUN)
