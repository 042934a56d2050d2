"""received_over_steps against patterns gathered by hand, row by row, without padding and without hooks."""

import math
import warnings

import pytest
import torch

import dlm_lens as dl
from dlm_lens.attention import HookPoint
from dlm_lens.hooks import mask_positions
from dlm_lens.sampling import denoise
from dlm_lens.sinks import TopK, find_sinks, received_over_steps
from dlm_lens.testing import tiny
from tests.sinks import reference

PROMPTS = [[5, 9, 11, 3, 17, 20, 8], [6, 2, 40]]


def hook_count(model):
    points = [module for module in model.modules() if isinstance(module, HookPoint)]
    return sum(len(point._forward_hooks) + len(point._forward_pre_hooks) for point in points)


def patterns(model, ids):
    """[layer][head][query][key] as floats, from a forward pass of its own."""
    before = model.config._attn_implementation
    model.set_attn_implementation("hooked")
    with torch.no_grad():
        found = model(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return torch.stack(found)[:, 0].double().tolist()


@pytest.fixture(scope="module", params=["llada", "sink_qwen"])
def masked_run(request):
    model = tiny(request.param)
    return model, denoise(model, PROMPTS, steps=6, gen_length=12, block_length=6, seed=1)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def causal_run(request):
    model = tiny("causal", model_type=request.param)
    return model, denoise(model, PROMPTS, gen_length=6, temperature=1.0, seed=[3, 4])


def compare(found, padding, per_head):
    """One row's [key] scores with the reference's for the content behind `padding`."""
    assert bool(found[:padding].isnan().all())
    wanted = [math.nan if v is None else v for v in per_head]
    assert found[padding : padding + len(wanted)].tolist() == pytest.approx(wanted, rel=2e-4, abs=1e-5, nan_ok=True)
    assert bool(found[padding + len(wanted) :].isnan().all())


@pytest.mark.parametrize("queries", ["all", "masked", "unmasked", "prompt", "block"])
@pytest.mark.parametrize("relative", [True, False])
def test_equals_patterns_gathered_row_by_row(masked_run, queries, relative):
    model, run = masked_run
    found = received_over_steps(model, run, queries=queries, relative=relative, min_viewers=5)
    assert found.sizes == {"step": 6, "batch": 2, "layer": 2, "head": 4, "key": 19}
    for row, padding in ((0, 0), (1, 4)):
        assert run.attention_mask[row].tolist() == [i >= padding for i in range(19)]
        for step in (0, 3, 5):
            canvas, masked = run.canvases[step, row, padding:], run.masked[step, row, padding:]
            classes = {
                "all": masked | True,
                "masked": masked,
                "unmasked": ~masked,
                "prompt": ~run.masked[0, row, padding:],
            }
            start, stop = run.spans[step]
            classes["block"] = torch.tensor([start <= i < stop for i in range(padding, 19)])
            counts = classes[queries].tolist()
            everything = [[True] * len(canvas)] * len(canvas)
            alone = patterns(model, canvas)
            for layer in range(2):
                for head in range(4):
                    wanted = reference.scores(alone[layer][head], everything, counts, relative, 5)
                    compare(found.values[step, row, layer, head], padding, wanted)
            assert int(found.counted[step, row]) == sum(counts)


def test_carries_what_each_step_saw(masked_run):
    model, run = masked_run
    found = received_over_steps(model, run)
    assert torch.equal(found.tokens, run.canvases[:-1])
    assert torch.equal(found.masked, run.masked[:-1])
    assert torch.equal(found.valid, run.attention_mask)
    assert torch.equal(found.final_tokens, run.tokens)
    # All content queries count: relative scores sum to the number of them, whatever the step.
    sums = found.values.nan_to_num(0.0).sum(-1)
    torch.testing.assert_close(sums[:, 0], torch.full((6, 2, 4), 19.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(sums[:, 1], torch.full((6, 2, 4), 15.0), rtol=1e-4, atol=0)
    # The last step of this run still has masks, and fewer of them than the first.
    masked = received_over_steps(model, run, queries="masked", min_viewers=1)
    assert masked.counted[:, 0].tolist() == run.masked[:-1, 0].sum(-1).tolist() == [12, 10, 8, 6, 4, 2]
    assert masked.queries == "masked"


def test_classes_of_queries_add_up(masked_run):
    model, run = masked_run
    raw = {
        queries: received_over_steps(model, run, queries=queries, relative=False, min_viewers=1).values[:, 0]
        for queries in ("all", "masked", "unmasked")
    }
    torch.testing.assert_close(raw["masked"] + raw["unmasked"], raw["all"])


def test_causal_model_counts_written_positions_only(causal_run):
    model, run = causal_run
    found = received_over_steps(model, run, min_viewers=3)
    steps = run.steps
    for row, padding in ((0, 0), (1, 4)):
        for step in (0, steps - 1):
            written = 7 + step
            alone = patterns(model, run.canvases[step, row, padding:written])
            size = written - padding
            visible = [[k <= q for k in range(size)] for q in range(size)]
            for layer in range(2):
                for head in range(4):
                    wanted = reference.scores(alone[layer][head], visible, [True] * size, True, 3)
                    compare(found.values[step, row, layer, head], padding, wanted)
            assert int(found.counted[step, row]) == size


def test_causal_raw_scale_differs_from_relative_by_harmonic_numbers(causal_run):
    model, run = causal_run
    raw = received_over_steps(model, run, relative=False, min_viewers=1).values[-1, 0]
    relative = received_over_steps(model, run, min_viewers=1).values[-1, 0]
    size = 7 + run.steps - 1
    expected = [reference.harmonic(size) - reference.harmonic(j) for j in range(size)]
    ratio = (raw / relative)[0, 0, :size].tolist()
    assert ratio == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_the_size_of_a_pass_changes_nothing(masked_run, rows):
    model, run = masked_run
    whole = received_over_steps(model, run).values
    torch.testing.assert_close(
        received_over_steps(model, run, rows_per_pass=rows).values, whole, equal_nan=True, rtol=1e-4, atol=1e-5
    )


def test_chosen_layers_keep_their_indices(masked_run):
    model, run = masked_run
    both = received_over_steps(model, run)
    last = received_over_steps(model, run, layers=[-1])
    assert (both.layers, last.layers) == ((0, 1), (1,))
    torch.testing.assert_close(last.values[:, :, 0], both.values[:, :, 1], equal_nan=True)
    table = find_sinks(last, TopK(1)).table()
    assert set(table["layer"]) == {1}
    assert set(table["token"]) <= {model.tokenizer.decode([i]) for i in range(64)}


@pytest.mark.parametrize("implementation", ["sdpa", "hooked", "eager"])
def test_the_attention_implementation_does_not_matter_and_stays(implementation):
    model = tiny("llada")
    run = denoise(model, PROMPTS, steps=2, gen_length=4, block_length=4)
    usual = received_over_steps(model, run).values
    model.set_attn_implementation(implementation)
    found = received_over_steps(model, run).values
    torch.testing.assert_close(found, usual, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == implementation
    assert hook_count(model) == 0


def test_an_intervention_on_the_model_is_seen_and_left_in_place(masked_run):
    model, run = masked_run
    knock_out = mask_positions(2)
    point = model.model.layers[0].self_attn.hook_scores
    handle = point.register_forward_hook(lambda module, args, scores: knock_out(scores))
    try:
        found = received_over_steps(model, run, relative=False).values[:, 0, 0, :, 2]
        assert hook_count(model) == 1
    finally:
        handle.remove()
    # Only the key's own query still sees it.
    assert float(found.max()) <= 1
    assert float(received_over_steps(model, run, relative=False).values[:, 0, 0, :, 2].max()) > float(found.max())


def test_hooks_go_when_something_breaks(masked_run):
    model, run = masked_run
    layer = model.model.layers[1].self_attn

    def fail(*_):
        raise RuntimeError("broken on purpose")

    handle = layer.hook_z.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        received_over_steps(model, run)
    handle.remove()
    assert hook_count(model) == 0
    assert torch.is_grad_enabled()


def test_patterns_that_are_not_finite_are_named():
    model = tiny("llada")
    run = denoise(model, PROMPTS, steps=2, gen_length=4, block_length=4)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="a pattern of step 0, row 0, layer 0 is not finite"):
        received_over_steps(model, run)
    assert hook_count(model) == 0


def test_what_cannot_work_is_refused(masked_run, causal_run):
    model, run = masked_run
    with pytest.raises(TypeError, match="the run is a Tensor"):
        received_over_steps(model, run.canvases)
    with pytest.raises(ValueError, match=r"queries='answer'.*the classes of queries are all, masked"):
        received_over_steps(model, run, queries="answer")
    with pytest.raises(ValueError, match="layer 2 of 2"):
        received_over_steps(model, run, layers=[0, 2])
    with pytest.raises(ValueError, match="layers is empty"):
        received_over_steps(model, run, layers=[])
    with pytest.raises(ValueError, match="has no masked queries"):
        received_over_steps(*causal_run, queries="masked")
    with pytest.raises(ValueError, match="token id 63, but the model embeds 48"):
        received_over_steps(tiny("llada", vocab_size=48, pad_token_id=0, eos_token_id=1, mask_token_id=2), run)
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear has no hook points"):
        received_over_steps(plain, run)


def test_sliding_windows_are_refused():
    model = tiny("sink_qwen", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    run = denoise(tiny("sink_qwen"), PROMPTS, steps=2, gen_length=4, block_length=4)
    with pytest.raises(ValueError, match="sliding_attention layers"):
        received_over_steps(model, run)


def test_canvases_that_are_too_short_for_any_score_are_named() -> None:
    model = tiny("llada")
    short = dl.record(model, [[5, 6, 7]], [dl.ReceivedAttention()], gen_length=4, steps=2)
    with pytest.warns(UserWarning, match="at most 7 queries count, and a score needs 8; give longer") as told:
        found = dl.find_sinks(short, dl.TopK(1))
    assert told[0].filename == __file__
    assert int(found.is_sink.sum()) == 0
    enough = dl.record(model, [[5, 6, 7]], [dl.ReceivedAttention(min_viewers=1)], gen_length=4, steps=2)
    longer = dl.record(model, [[5, 6, 7]], [dl.ReceivedAttention()], gen_length=5, steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for recording in (enough, longer):
            assert int(dl.find_sinks(recording, dl.TopK(1)).is_sink.sum()) > 0
    pattern = torch.full((1, 1, 6, 6), 1 / 6)
    with pytest.warns(UserWarning, match="at most 6 queries count"):
        dl.find_sinks(pattern, dl.TopK(1))
