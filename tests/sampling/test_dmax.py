"""DMax's sampler as ours: soft inputs in float64, its rule by hand, batches, recordings, reruns, hooks, traces."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.adapters.families.llada2 import SoftInputs
from dlm_lens.hooks import mask_top_sinks
from dlm_lens.recording import rerun
from dlm_lens.sampling import StoredRun, part_of_run
from dlm_lens.sampling.samplers.sdlm import SelectPrefix
from dlm_lens.testing import tiny
from tests.reference import forward64
from tests.sampling.interrupted import resumed_as_unbroken

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
RUN: dict[str, Any] = {"gen_length": 10, "block_length": 4, "threshold": 0.2}


def model_of(head: float = 4.0, **config: Any) -> Any:
    """A random network whose probabilities reach the thresholds."""
    model: Any = tiny("llada2", sampler="dmax", **config)
    with torch.no_grad():
        model.lm_head.weight.mul_(head)
    return model


def soft64(token: Tensor, mask: Tensor, p: float) -> Tensor:
    """The input of a position in float64, coordinate by coordinate."""
    mixed = [p * float(a) + (1 - p) * float(b) for a, b in zip(token, mask, strict=True)]
    size = sum(x * x for x in mixed) ** 0.5
    first, second = (sum(float(x) ** 2 for x in one) ** 0.5 for one in (token, mask))
    return torch.tensor([x * (p * first + (1 - p) * second) / (size + 1e-6) for x in mixed], dtype=torch.float64)


def inputs64(model: Any, run: dl.DenoisingRun, step: int, row: int) -> Tensor:
    """What the network sees of a row's canvas at a step, from the run's canvases, proposals and confidences."""
    table, mask = model.get_input_embeddings().weight.detach().double(), model.config.mask_token_id
    inputs = table[run.canvases[step, row]].clone()
    if run.block_numbers[step]:
        before, sure = run.proposals[step - 1, row], run.confidence[step - 1, row]
        for place in sure.isfinite().nonzero().flatten().tolist():
            token = int(run.canvases[step, row, place])
            if token == int(before[place]) and token != mask:
                inputs[place] = soft64(table[token], table[mask], float(sure[place]))
    return inputs


def test_soft_inputs_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings, mask = (torch.randn(shape, generator=generator) for shape in ((2, 3, 6), (6,)))
    sure = torch.tensor([[0.25, 1.0, -torch.inf], [0.0, 0.9, 0.5]])
    found = SoftInputs()(embeddings, mask, sure)
    for row, place in torch.ones(2, 3).nonzero().tolist():
        p, token = float(sure[row, place]), embeddings[row, place]
        if p == -torch.inf:
            assert found[row, place].equal(token)
            continue
        torch.testing.assert_close(found[row, place].double(), soft64(token, mask, p), rtol=1e-5, atol=1e-6)
    # As long as the embeddings are on average by their probabilities.
    lengths = sure[1] * embeddings[1].norm(dim=-1) + (1 - sure[1]) * mask.norm()
    torch.testing.assert_close(found[1].norm(dim=-1), lengths, rtol=1e-4, atol=1e-4)


def test_soft_inputs_keep_dtype_and_finite_gradients() -> None:
    embeddings = torch.randn(1, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    sure = torch.tensor([[0.5, -torch.inf, 1.0]])
    found = SoftInputs()(embeddings, torch.ones(4, dtype=torch.bfloat16), sure)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad[0, 1].tolist() == [1.0] * 4


def test_inputs_and_confidences_are_those_of_a_float64_network() -> None:
    model, seen = model_of(), list[tuple[Tensor, Tensor]]()

    def keep(_module: Any, given: Any, output: Tensor) -> None:
        seen.append((given[2], output))

    handle = model.model.soft_inputs.register_forward_hook(keep)
    run = dl.denoise(model, PROMPTS, use_cache=False, **RUN)
    handle.remove()
    later = [step for step in range(run.steps) if run.block_numbers[step]]
    assert len(seen) == len(later)
    compared = 0
    for step, (_, inputs) in zip(later, seen, strict=True):
        for row in range(3):
            wanted = inputs64(model, run, step, row)[: inputs.shape[1]]
            torch.testing.assert_close(inputs[row].double(), wanted, rtol=1e-5, atol=1e-6)
            if not run.confidence[step, row].isfinite().any():
                continue
            keep64 = run.attention_mask[row].clone()
            keep64[int(run.in_block[step, row].nonzero().max()) + 1 :] = False
            length = int(keep64.sum())
            visible = torch.tensor([[key // 4 <= query // 4 for key in range(length)] for query in range(length)])
            state = model.state_dict() | {"model.embed_tokens.weight": inputs64(model, run, step, row)[keep64]}
            network: Any = SimpleNamespace(config=model.config, state_dict=lambda state=state: state)
            logits = forward64(network, torch.arange(length)[None], visible=visible[None, None])["logits"][0]
            found, likely = run.confidence[step, row][keep64], logits.softmax(-1)
            known, x0 = found.isfinite(), run.proposals[step, row][keep64]
            wanted = likely.gather(-1, x0[:, None])[:, 0]
            torch.testing.assert_close(found[known].double(), wanted[known], atol=2e-5, rtol=1e-4)
            likely[:, model.config.mask_token_id] = 0
            assert x0[known].equal(likely.argmax(-1)[known])
            compared += int(known.sum())
    assert compared > 40
    assert any(bool((sure > -torch.inf).any()) for sure, _ in seen)


@pytest.mark.parametrize("given", [{}, {"threshold": 0.9, "end_threshold": 0.3}, {"steps_per_block": 2}])
def test_the_rule_by_hand(given: dict[str, Any]) -> None:
    """Every step of a run from its canvases, proposals and confidences alone."""
    model, given = model_of(), RUN | given
    run, mask = dl.denoise(model, PROMPTS, **given), model.config.mask_token_id
    threshold, end, most = given["threshold"], given.get("end_threshold", 0.9), given.get("steps_per_block", 4)
    done, decoded = [False] * 3, 0
    for step in range(run.steps):
        done = done if run.block_numbers[step] else [False] * 3
        for row in range(3):
            canvas, x0, sure = run.canvases[step, row], run.proposals[step, row], run.confidence[step, row]
            places = (run.answer[row] & run.in_block[step, row]).nonzero().flatten().tolist()
            if done[row] or not places or (run.row_steps[row] <= step):
                assert run.canvases[step + 1, row].equal(canvas)
                continue
            assert sure.isfinite().nonzero().flatten().tolist() == places
            wanted, masks = canvas.clone(), [place for place in places if canvas[place] == mask]
            for place in places:
                if place not in masks:
                    wanted[place] = x0[place]
            front = next((i for i, place in enumerate(masks) if sure[place] < threshold), len(masks))
            last = run.block_numbers[step] == most - 1
            for place in masks if last else masks[: max(1, front)]:
                wanted[place] = x0[place]
                decoded += 1
            assert run.canvases[step + 1, row].equal(wanted)
            over = bool((sure[places] >= end).all()) or wanted.equal(canvas)
            done[row] = over and not bool((wanted == mask)[places].any())
    assert decoded == int(run.answer.sum()) == 38
    assert run.revised.any() or "end_threshold" in given


@pytest.mark.parametrize(("reached", "chosen"), [(True, [1, 3]), (False, [1])])
def test_what_is_as_sure_as_the_threshold_is_decoded(reached: bool, chosen: list[int]) -> None:
    sure, eligible = torch.tensor([[0.1, 0.75, 0.0, 0.5, 0.25, 0.9]]), torch.tensor([[0, 1, 0, 1, 1, 1]]).bool()
    found = SelectPrefix(0.5, reached=reached)(sure, eligible, torch.tensor([1]))
    assert found[0].nonzero().flatten().tolist() == chosen


@pytest.mark.parametrize("head", [2.0, 6.0])
def test_a_row_is_what_it_is_alone(head: float) -> None:
    model = model_of(head)
    together = dl.denoise(model, PROMPTS, **RUN)
    whole = dl.denoise(model, PROMPTS, use_cache=False, **RUN)
    assert together.canvases.equal(whole.canvases)
    for row, prompt in enumerate(PROMPTS):
        alone, content = dl.denoise(model, [prompt], **RUN), together.attention_mask[row]
        length = alone.tokens.shape[1]
        own = together.confidence[:, row].isfinite().any(-1)
        assert int(own.sum()) == alone.steps
        for name in ("canvases", "unmasked", "revised", "proposals"):
            theirs = getattr(together, name)[: together.steps][own][:, row][:, content][:, :length]
            assert theirs.equal(getattr(alone, name)[: alone.steps, 0]), name
        assert together.answers[row] == alone.answers[0]


def test_a_row_ends_with_the_block_of_its_end() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS[:1], **RUN)
    answer = plain.tokens[0, 7:].tolist()
    place = next(place for place in range(1, 5) if answer[place] not in answer[:place])  # in the second block
    model.config.eos_token_id = answer[place]
    ended = dl.denoise(model, PROMPTS[:1], **RUN)
    assert ended.tokens[0, :12].equal(plain.tokens[0, :12])
    assert ended.masked[-1, 0, 12:].all()
    assert ended.steps == plain.blocks.index(2)


def test_a_token_that_something_else_writes_is_seen_as_it_is() -> None:
    model, seen = model_of(), list[Tensor]()
    model.model.soft_inputs.register_forward_hook(lambda _module, given, _output: seen.append(given[2]))
    plain = dl.denoise(model, [PROMPTS[2]], **RUN | {"threshold": 0.0})
    assert plain.steps > 2
    before, seen[:] = seen[0].clone(), []
    other = (int(plain.canvases[1, 0, 5]) + 1) % 60

    def plant(step: int, canvas: Tensor) -> Tensor:
        if step == 1:
            canvas[0, 5], canvas[0, 6] = other, model.config.mask_token_id
        return canvas

    planted = dl.denoise(model, [PROMPTS[2]], use_cache=False, on_canvas=plant, **RUN | {"threshold": 0.0})
    assert planted.canvases[1, 0, 5] == other
    assert (before > -torch.inf)[0, -4:].tolist() == [True] * 4
    assert (seen[0] > -torch.inf)[0, 4:8].tolist() == [True, False, False, True]
    assert not (seen[0] > -torch.inf)[0, :4].any()
    assert not planted.masked[-1, 0, :12].any()


@pytest.mark.parametrize("hooks", [(), (mask_top_sinks(1),)], ids=["plain", "hooks"])
def test_a_rerun_sees_the_inputs_of_the_run(hooks: tuple[Any, ...]) -> None:
    model, reducers = model_of(), [dl.ReceivedAttention(min_viewers=1), dl.ValueNorm()]
    recorded = dl.record(model, PROMPTS, reducers, hooks=hooks, **RUN)
    again = rerun(model, recorded.run, reducers, hooks=hooks)
    hard = rerun(model, recorded.run.first_steps(1), reducers, hooks=hooks)
    assert set(again.arrays) == set(recorded.arrays)
    for name, values in recorded.arrays.items():
        torch.testing.assert_close(again.arrays[name], values, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert hard.arrays["received"][0].nan_to_num().equal(again.arrays["received"][0].nan_to_num())
    later = [step for step in range(recorded.run.steps) if recorded.run.block_numbers[step]]
    alone = rerun(model, recorded.run, reducers, hooks=hooks, steps=later[2:3], rows=[1])
    expected = recorded.arrays["received"][later[2], 1]
    torch.testing.assert_close(alone.arrays["received"][0, 0], expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_replayed_logits_are_those_of_the_run() -> None:
    model, seen = model_of(), list[Tensor]()
    run = dl.denoise(model, PROMPTS, on_logits=lambda _step, _canvas, logits: seen.append(logits.clone()), **RUN)
    stored = StoredRun(model, run, decided=True)
    soft = 0
    for step in range(run.steps):
        predicted = stored.predicted(step)
        with stored.at(step), torch.no_grad():
            logits = stored.logits(stored.states(step))
        torch.testing.assert_close(logits, seen[step][predicted[:, : seen[step].shape[1]]], rtol=1e-4, atol=1e-4)
        soft += bool(run.block_numbers[step]) and len(logits) > 0
    assert soft >= 3


def test_a_part_of_a_run_without_the_step_before_is_refused() -> None:
    model = model_of()
    recorded = dl.record(model, PROMPTS, [dl.ValueNorm()], **RUN)
    later = next(step for step in range(recorded.run.steps) if recorded.run.block_numbers[step])
    part = recorded.select(step=[later])
    with pytest.raises(ValueError, match=f"step {later} sees the confidences of step {later - 1}, which this part"):
        rerun(model, part.run, [dl.ValueNorm()])
    both = recorded.select(step=[later - 1, later])
    again = rerun(model, both.run, [dl.ValueNorm()])
    torch.testing.assert_close(
        again.arrays["value_norm"], both.arrays["value_norm"], equal_nan=True, rtol=1e-4, atol=1e-5
    )


def test_a_recording_is_resumed(tmp_path: Path) -> None:
    whole = resumed_as_unbroken(model_of(2.0), PROMPTS, tmp_path / "rec", passes=6, **RUN)
    assert whole.run.block_numbers[5]  # it was stopped inside a block


def test_traces_read_and_edit_the_soft_inputs() -> None:
    model = model_of()
    plain = dl.denoise(model, PROMPTS[:1], **RUN)
    later = [step for step in range(plain.steps) if plain.block_numbers[step]]
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS[:1], **RUN) as tracer:
        lengths = [].save()
        for step in tracer.steps[:]:
            if int(step) in later:
                lengths.append(lm.model.soft_inputs.output.norm(dim=-1))
        traced = tracer.result.save()
    assert traced.canvases.equal(plain.canvases)
    assert len(lengths) == len(later)
    with lm.generate(PROMPTS[:1], **RUN) as tracer:
        for _ in tracer.steps[later[0] : later[0] + 1]:
            lm.model.soft_inputs.output = lm.model.soft_inputs.output.flip(-1)
        alike = tracer.result.save()
    torch.testing.assert_close(alike.confidence[: later[0]], plain.confidence[: later[0]], rtol=1e-4, atol=1e-5)
    sure = plain.confidence[later[0]].isfinite()
    assert ((alike.confidence[later[0]] - plain.confidence[later[0]])[sure].abs() > 1e-3).any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": 1.5}, "threshold is 1.5; it is a probability, from 0 to 1"),
        ({"end_threshold": -0.1}, "end_threshold is -0.1; it is a probability, from 0 to 1"),
        ({"temperature": 0.5}, "temperature is 0.5; DMax's soft inputs are of the most likely tokens"),
        ({"self_conditioning": "top"}, "self_conditioning is 'top'; it must be one of confidence, none"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dl.denoise(model_of(), [[1, 2]], gen_length=4, **given)


def test_without_self_conditioning_steps_see_tokens_alone() -> None:
    model, soft = model_of(), list[int]()
    model.model.soft_inputs.register_forward_hook(lambda *_: soft.append(1))
    run = dl.denoise(model, PROMPTS, self_conditioning="none", **RUN)
    assert any(run.block_numbers)
    later = next(step for step in range(run.steps) if run.block_numbers[step])
    # A part without the step before is whole, since nothing but tokens passes between them.
    again = rerun(model, part_of_run(run, [later], range(3)), [dl.ValueNorm()])
    whole = rerun(model, run, [dl.ValueNorm()])
    torch.testing.assert_close(again.arrays["value_norm"][0], whole.arrays["value_norm"][later], equal_nan=True)
    assert not soft


def test_attribution_holds_the_confidences_fixed() -> None:
    model = model_of()
    run = dl.denoise(model, PROMPTS, **RUN | {"threshold": 0.9})
    steps = [step for step in range(run.steps) if run.block_numbers[step] and run.unmasked[step].any()]
    found = dl.probes.column_attribution(model, run, steps=steps[:1])
    assert "the confidences of the step before, on which a step is conditioned" in found.contract.fixed


def test_probes_of_changed_canvases_see_tokens_alone() -> None:
    model, soft, seen = model_of(), list[int](), list[Tensor]()
    model.model.soft_inputs.register_forward_hook(lambda *_: soft.append(1))
    run = dl.denoise(model, PROMPTS, **RUN)
    assert soft
    soft.clear()
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, ids, output: seen.append(output.detach()))
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    found = dl.sinks.position_or_token(model, run, dl.TopK(1), min_viewers=1)
    assert {"swap", "shift", "control"} == set(found.table()["change"])
    assert not soft
    # The first layer is given the embeddings of the tokens, unchanged.
    assert seen
    assert all(given.equal(of_tokens) for of_tokens, given in zip(seen[::2], seen[1::2], strict=True))


def test_reference_quirks_take_one_prompt() -> None:
    with pytest.raises(ValueError, match="reference_quirks with 3 prompts: the authors' code goes on with a block"):
        dl.denoise(model_of(), PROMPTS, reference_quirks=True, **RUN)


def test_steps_of_the_answer_are_shared_by_its_blocks() -> None:
    run = dl.denoise(model_of(), [[1, 2, 3, 4]], gen_length=8, block_length=4, steps=4, threshold=1.0)
    assert run.settings["steps_per_block"] == 2
    assert run.counts.flatten().tolist() == [1, 3, 1, 3]
