"""`denoise_with_cache`: the right values at the right step, nothing else, and no more memory than there is."""

import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from transformer_lens import ActivationCache

import dlm_lens as dl
from dlm_lens.attention import additive_mask
from dlm_lens.testing import tiny
from tests.bridging.cases import CASES, model_of
from tests.reference import forward64

PROMPT = "sort 4 2 9 1 :"
IDS = [[1, 2, 3, 4, 5, 6]]


def patterns(name: str) -> bool:
    return name.endswith("attn.hook_pattern")


def test_a_step_holds_what_an_independent_network_computes_on_its_canvas() -> None:
    model = model_of("gated-sink")
    run, cache = dl.bridge(model).denoise_with_cache(IDS, steps=6, gen_length=6)
    for step in (0, 3, 5):
        want = forward64(model, run.canvases[step])
        for name, ours in {"pattern": "attn.hook_pattern", "q": "attn.hook_q", "resid": "hook_resid_post"}.items():
            got = cache[f"blocks.1.{ours}", step].double()
            torch.testing.assert_close(got, want[f"{name}1"], atol=5e-4, rtol=5e-4)
    assert cache.steps == tuple(range(6))


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_cache_of_its_canvas(case: str) -> None:
    """Equal to `run_with_cache` on the stored canvas, for every name."""
    model = model_of(case)
    tl, causal = dl.bridge(model), CASES[case][0] == "causal"
    given = {"steps": 4, "cfg_scale": 0.0}
    settings = {"gen_length": 4, **{name: given[name] for name in given if name in model.sampler_defaults}}
    if case in ("sdar", "stable-diffcoder"):
        settings["block_length"] = 16  # one block, so that a step sees the whole canvas as the plain pass does
    run, cache = tl.denoise_with_cache(IDS, cache_steps=2, **settings)
    canvas = run.canvases[2][:, :8] if causal else run.canvases[2]
    options: dict[str, Any] = {}
    if case == "efficient-dlm":  # the prompt of 6 is one block
        prompt = torch.arange(10) < 6
        visible = ~prompt[:, None] | prompt
        options = {"attention_mask": additive_mask(visible[None, None], torch.float32)}
    if case == "nemotron":  # the prompt of 6 is causal, the block sees itself in both directions
        block = torch.arange(10) >= 6
        visible = torch.ones(10, 10, dtype=torch.bool).tril() | (block & block[:, None])
        options = {"attention_mask": additive_mask(visible[None, None], torch.float32)}
    with torch.no_grad():
        _, want = tl.run_with_cache(canvas, use_cache=False, **options)
    at = cache.at(2)
    assert isinstance(at, ActivationCache)
    # run_with_cache also lists points that never fire, which hold nothing on either side
    assert set(at.keys()) == set(want.keys())
    assert all(torch.equal(at[name], want[name]) for name in want if isinstance(want[name], torch.Tensor))


@pytest.mark.long
def test_names_and_steps() -> None:
    tl = dl.bridge("toy-sink")
    _, cache = tl.denoise_with_cache(PROMPT, names_filter=patterns, cache_steps=range(10, 14))
    assert cache.steps == (10, 11, 12, 13)
    assert cache.names == tuple(f"blocks.{i}.attn.hook_pattern" for i in range(4))
    stacked = cache["blocks.2.attn.hook_pattern"]
    assert stacked.shape == (4, 1, 4, 40, 40)
    assert torch.equal(stacked[1], cache["blocks.2.attn.hook_pattern", 11])
    assert torch.equal(stacked[-2], cache["blocks.2.attn.hook_pattern", -2])
    assert torch.equal(stacked[-1], cache.at(-1)["blocks.2.attn.hook_pattern"])
    assert ("blocks.2.attn.hook_pattern", -4) in cache
    assert ("blocks.2.attn.hook_pattern", -5) not in cache
    assert ("blocks.2.attn.hook_pattern", 11) in cache
    assert ("blocks.2.attn.hook_pattern", 9) not in cache
    assert "blocks.2.attn.hook_z" not in cache
    with pytest.raises(KeyError, match="step 9 was not kept; there are 10, 11, 12, 13"):
        cache["blocks.2.attn.hook_pattern", 9]
    with pytest.raises(KeyError, match="step -5 was not kept"):
        cache["blocks.2.attn.hook_pattern", -5]
    with pytest.raises(KeyError, match="step 14 was not kept"):
        cache.at(14)
    with pytest.raises(KeyError, match=re.escape("'blocks.2.attn.hook_z' was not kept")):
        cache["blocks.2.attn.hook_z"]
    moved = cache.to("cpu")
    assert torch.equal(moved["blocks.0.attn.hook_pattern"], cache["blocks.0.attn.hook_pattern"])
    assert repr(cache).startswith("StepCache(names=('blocks.0.attn.hook_pattern'")
    for steps, want in ((-1, (31,)), (slice(0, None, 10), (0, 10, 20, 30)), ([3, -2, 3], (3, 30))):
        _, some = tl.denoise_with_cache(PROMPT, names_filter="blocks.0.hook_resid_post", cache_steps=steps)
        assert some.steps == want


def test_one_activation_answers_to_all_its_names() -> None:
    _, cache = dl.bridge("toy").denoise_with_cache(
        PROMPT, steps=4, gen_length=4, names_filter="blocks.1.hook_resid_post"
    )
    assert cache.names == ("blocks.1.hook_resid_post",)
    assert cache["blocks.1.hook_out", 0] is cache["blocks.1.hook_resid_post", 0]
    assert len(cache.values) == 4


@pytest.mark.long
def test_nothing_outside_the_filter_is_kept() -> None:
    """The bytes of the cache are those of the requested activations, as computed in advance."""
    tl = dl.bridge("toy")
    for filter_, slices in ((patterns, None), ("blocks.1.attn.hook_q", None), ("blocks.1.hook_resid_post", (2, 4))):
        run, cache = tl.denoise_with_cache(PROMPT, names_filter=filter_, cache_steps=[0, 5], pos_slice=slices)
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in cache.values.values()}
        assert sum(storages.values()) == cache.nbytes
        if slices is None:
            predicted = tl.bytes_per_step(filter_, positions=run.tokens.shape[1])
            assert cache.nbytes == 2 * sum(predicted.values())
    assert cache["blocks.1.hook_resid_post"].shape == (2, 1, 2, 128)


@pytest.mark.long
@pytest.mark.parametrize("case", ["llada", "sink", "sinks-end", "gated-sink"])
def test_the_cost_of_a_name_is_known_beforehand(case: str) -> None:
    tl = dl.bridge(model_of(case, torch.bfloat16))
    settings = {"steps": 2, "gen_length": 13, "cache_steps": 1}
    _, cache = tl.denoise_with_cache(torch.tensor(IDS * 3), **{**settings, "steps": 13})
    rows = {name: value for (name, _), value in cache.values.items()}
    predicted = tl.bytes_per_step(None, positions=19, rows=3)
    assert predicted.keys() == rows.keys()
    for name, value in rows.items():
        batch = 1 if value.shape[0] == 1 else 3  # rotary tables have no batch axis
        assert predicted[name] == value.numel() * value.element_size() * 3 // batch, name


def test_a_request_that_does_not_fit_is_refused_with_the_number_and_the_remedy() -> None:
    tl = dl.bridge("toy")
    calls: list[int] = []
    needed = 32 * 4 * 4 * 39 * 39 * 4  # steps, layers, heads, queries, keys, bytes
    options: dict[str, Any] = {
        "names_filter": patterns,
        "fwd_hooks": [("hook_embed", lambda t, hook: calls.append(1))],
    }
    with pytest.raises(
        MemoryError, match=re.escape(f"would take {needed / 1e6:.3g} MB (4 activations of 32 steps")
    ) as e:
        tl.denoise_with_cache(PROMPT, max_bytes=needed - 1, **options)
    assert "narrow names_filter, give fewer cache_steps" in str(e.value)
    assert not calls  # not one forward pass of the run
    assert not tl.list_hooks()
    _, cache = tl.denoise_with_cache(PROMPT, max_bytes=needed, **options)
    assert cache.nbytes == needed
    assert len(calls) == 32


@pytest.mark.parametrize("pos_slice", [-1, (2, 9), [0, 3, 4], slice(1, None, 2)])
def test_a_pos_slice_makes_a_request_smaller(pos_slice: Any) -> None:
    """The refusal names it as a remedy, and counted all positions with it too."""
    tl = dl.bridge(tiny("sink_qwen"))
    options: dict[str, Any] = {"steps": 2, "gen_length": 8, "pos_slice": pos_slice}
    prompts = [[1, 2, 3, 4], [5, 6]]
    _, cache = tl.denoise_with_cache(prompts, **options)
    predicted = tl.bytes_per_step(None, positions=12, rows=2, pos_slice=pos_slice)
    assert {name: cache[name, 0].nbytes for name in predicted} == predicted
    assert sum(predicted.values()) < sum(tl.bytes_per_step(None, positions=12, rows=2).values()) / 1.5
    _, again = tl.denoise_with_cache(prompts, max_bytes=cache.nbytes, **options)
    assert again.nbytes == cache.nbytes
    with pytest.raises(MemoryError, match="or a pos_slice"):
        tl.denoise_with_cache(prompts, max_bytes=cache.nbytes - 1, **options)


def test_a_pos_slice_of_a_position_that_is_not_there_is_refused() -> None:
    tl = dl.bridge(tiny("llada"))
    with pytest.raises(ValueError, match=r"pos_slice is 40, and blocks.0.hook_in has 12 positions, 0 to 11"):
        tl.denoise_with_cache([[1, 2, 3, 4]], names_filter="blocks.0.hook_resid_pre", pos_slice=40, gen_length=8)


def test_without_max_bytes_the_free_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlm_lens.bridging.step_cache.free_bytes", lambda device: 1_000_000)
    tl = dl.bridge("toy")
    with pytest.raises(MemoryError, match="800 kB may be used on cpu"):
        tl.denoise_with_cache(PROMPT, names_filter=patterns)
    tl.denoise_with_cache(PROMPT, names_filter=patterns, cache_steps=slice(0, 8))


def test_impossible_requests_are_refused() -> None:
    tl = dl.bridge("toy")
    with pytest.raises(KeyError, match="matches no hook point"):
        tl.denoise_with_cache(PROMPT, names_filter="blocks.0.attn.pattern")
    with pytest.raises(KeyError, match="hook_patern' is no hook point"):
        tl.denoise_with_cache(PROMPT, names_filter=["blocks.0.attn.hook_z", "blocks.0.attn.hook_patern"])
    with pytest.raises(KeyError, match="switched off"):
        tl.denoise_with_cache(PROMPT, names_filter="blocks.0.attn.hook_result")
    with pytest.raises(ValueError, match="step 32 is not there: the run has 32 steps, 0 to 31"):
        tl.denoise_with_cache(PROMPT, names_filter=patterns, cache_steps=32)
    with pytest.raises(ValueError, match="names no step"):
        tl.denoise_with_cache(PROMPT, names_filter=patterns, cache_steps=[])


@pytest.mark.parametrize(("positions", "rows"), [(-3, 1), (0, 1), (2.5, 1), (4, 0)])
def test_the_size_of_no_positions_is_refused(positions: Any, rows: int) -> None:
    with pytest.raises(ValueError, match="it must be a whole number of at least 1"):
        dl.bridge("toy").bytes_per_step(None, positions, rows)


def test_steps_of_an_ar_run_do_not_stack() -> None:
    _, cache = dl.bridge("toy-ar").denoise_with_cache(PROMPT, gen_length=3, names_filter=patterns)
    assert [cache["blocks.0.attn.hook_pattern", step].shape[-1] for step in cache.steps] == [7, 8, 9]
    with pytest.raises(ValueError, match=re.escape("take cache[name, step]")):
        cache["blocks.0.attn.hook_pattern"]


def test_a_request_of_an_ar_run_is_counted_step_by_step() -> None:
    """Every step was counted with the whole canvas, so that a request that fits was refused."""
    tl = dl.bridge("toy-ar")
    needed = sum(4 * 4 * n * n * 4 for n in (7, 8, 9))  # layers, heads, queries, keys, bytes
    options: dict[str, Any] = {"gen_length": 3, "names_filter": patterns}
    _, cache = tl.denoise_with_cache(PROMPT, max_bytes=needed, **options)
    assert cache.nbytes == needed
    with pytest.raises(MemoryError, match=r"4 activations of 3 steps; .* alone 1\.3 kB per step at most\)"):
        tl.denoise_with_cache(PROMPT, max_bytes=needed - 1, **options)
    some = {**options, "cache_steps": [0, -1], "pos_slice": -1}
    _, last = tl.denoise_with_cache(PROMPT, max_bytes=4 * 4 * (7 + 9) * 4, **some)
    assert last.nbytes == 4 * 4 * (7 + 9) * 4
    with pytest.raises(ValueError, match=r"pos_slice is 8, and .* has 7 positions, 0 to 6 at step 0, which"):
        tl.denoise_with_cache(PROMPT, pos_slice=8, **options)


def test_hooks_act_before_activations_are_kept() -> None:
    tl = dl.bridge("toy")
    _, cache = tl.denoise_with_cache(
        PROMPT,
        steps=4,
        gen_length=4,
        names_filter="blocks.0.hook_mlp_out",
        fwd_hooks=[("blocks.0.hook_mlp_out", lambda t, hook: torch.full_like(t, float(hook.step)))],
    )
    assert [float(value.mean()) for value in cache["blocks.0.hook_mlp_out"]] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("added", [True, False])
def test_hooks_that_are_on_the_bridge_see_the_run_alone(added: bool) -> None:
    tl, lengths = dl.bridge(tiny("llada")), []
    names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"]

    def edit_in_place(stream: Any, hook: Any) -> None:
        lengths.append(stream.shape[1])
        stream[:, 9] = 0.0

    plain = tl.denoise_with_cache(IDS, names_filter=names, steps=2, gen_length=4)[1]
    if added:
        tl.add_hook(names[1], edit_in_place)
        cache = tl.denoise_with_cache(IDS, names_filter=names, steps=2, gen_length=4)[1]
        assert tl.bytes_per_step(names, 10)
        tl.reset_hooks()
    else:
        with tl.hooks(fwd_hooks=[(names[1], edit_in_place)]):
            cache = tl.denoise_with_cache(IDS, names_filter=names, steps=2, gen_length=4)[1]
    assert lengths == [10, 10]
    assert cache[names[0], 0].equal(plain[names[0], 0])
    assert not cache[names[1], 0][:, 9].any()
    tl(torch.tensor(IDS))
    assert len(lengths) == 2  # no hook is left


def test_a_step_goes_through_transformerlens_analysis() -> None:
    """Decomposition of a step in compatibility mode, whose sum is the stream that the same step wrote."""
    tl = dl.bridge("toy-sink")
    tl.enable_compatibility_mode(disable_warnings=True)
    _, cache = tl.denoise_with_cache(PROMPT, cache_steps=7)
    step = cache.at(7)
    torch.testing.assert_close(
        step.decompose_resid(mode="full").sum(0), step["blocks.3.hook_resid_post"], atol=1e-4, rtol=1e-4
    )


def test_steps_that_a_run_did_not_reach_are_named() -> None:
    tl = dl.bridge(tiny("fast_dllm_v2"))
    given: dict[str, Any] = {"names_filter": "blocks.1.attn.hook_z", "gen_length": 8}
    run, whole = tl.denoise_with_cache(IDS, **given)
    assert whole.steps == tuple(range(run.steps))
    match = rf"counts the steps that were planned, among them \d+, but this run ended after {run.steps}, which"
    with pytest.raises(ValueError, match=match):
        tl.denoise_with_cache(IDS, cache_steps=-1, **given)
    with pytest.warns(UserWarning, match=rf"this run ended after {run.steps}, .*: give steps below {run.steps}"):
        _, some = tl.denoise_with_cache(IDS, cache_steps=[0, -1], **given)
    assert some.steps == (0,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tl.denoise_with_cache(IDS, cache_steps=slice(2, None), **given)[1].steps == whole.steps[2:]


def test_a_cache_is_read_by_numbers_of_torch_iterated_and_pickled() -> None:
    name = "blocks.0.hook_resid_post"
    _, cache = dl.bridge("toy").denoise_with_cache(PROMPT, names_filter=name, cache_steps=[0, 1])
    assert cache[name, torch.tensor(1)].equal(cache[name, 1])  # type: ignore[index]
    assert (name, torch.tensor(1)) in cache
    assert list(cache) == [name]
    assert len(cache) == 1
    assert pickle.loads(pickle.dumps(cache))[name].equal(cache[name])  # noqa: S301 - its own bytes
    with pytest.raises(KeyError, match=r"give cache\[name, step\]"):
        cache[name, 0, 1]  # type: ignore[index]
    assert (name, 0, 1) not in cache


def _refused_before_a_pass(bridge: Any, message: str, **settings: Any) -> None:
    """`denoise_with_cache` refuses these settings, and the model's layers have not run."""
    ran = []
    handle = bridge.original_model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=message):
        bridge.denoise_with_cache([5, 9, 14], names_filter="hook_embed", **settings)
    handle.remove()
    assert not ran


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("pos_slice", [0, [0, 1], slice(-2, None)])
def test_positions_beside_an_approximate_cache_are_refused(cache: str, pos_slice: Any) -> None:
    bridge = dl.bridge(tiny("llada"))
    settings = {"gen_length": 8, "block_length": 4, "cache": cache}
    run, kept = bridge.denoise_with_cache([5, 9, 14], names_filter="hook_embed", **settings)
    start = run.computed[1][0]
    assert start > 0  # the first activation of step 1 is of another position than that of step 0
    embedded = bridge.original_model.get_input_embeddings()(run.canvases[1])
    assert torch.equal(kept["hook_embed", 1][:, 0], embedded[:, start])
    _refused_before_a_pass(bridge, "pos_slice=.*with cache=.*run.computed", pos_slice=pos_slice, **settings)


def test_a_position_that_an_ar_step_does_not_see_yet_is_named() -> None:
    bridge = dl.bridge(tiny("causal"))
    given = {"names_filter": "hook_embed", "gen_length": 4}
    with pytest.raises(ValueError, match=r"pos_slice is \[4\].*3 positions, 0 to 2 at step 0"):
        bridge.denoise_with_cache([5, 9, 14], pos_slice=[4], **given)
    run, cache = bridge.denoise_with_cache([5, 9, 14], pos_slice=[4], cache_steps=[2, 3], **given)
    embedded = bridge.original_model.get_input_embeddings()(run.tokens)
    assert all(torch.equal(cache["hook_embed", step], embedded[:, 4:5]) for step in cache.steps)
