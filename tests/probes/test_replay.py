"""`replay` against float64 loops over the stored canvases: KL, ranks, residual stream, received attention."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.hooks import (
    ablate,
    at_layers,
    at_steps,
    capture,
    mask_positions,
    patch_from,
    scale_attention,
    steer,
    zero_value,
)
from dlm_lens.probes import Replay, replay
from dlm_lens.sampling import part_of_run
from dlm_lens.testing import tiny
from tests.reference import forward64

CLOSE = {"atol": 5e-5, "rtol": 5e-4}  # float32 through two layers against float64
PROMPTS = [[5, 9, 14, 3, 8, 2], [7, 2, 11, 4]]
RUN: dict[str, Any] = {"steps": 3, "gen_length": 6, "temperature": 1.0, "seed": [3, 4]}
# The factor is far from 1, so that it shows in every number.
FACTOR, KEY, HOLE = 6.0, 4, 2

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llada": (lambda: tiny("llada"), {"block_length": 6}),
    "llada guided": (lambda: tiny("llada"), {"block_length": 6, "cfg_scale": 1.5}),
    "dream": (lambda: tiny("dream"), {"remasking": "entropy"}),
    "smdm guided": (lambda: tiny("smdm"), {"cfg_scale": 0.7}),
    "sinks in front": (lambda: tiny("sink_qwen", num_sinks=2), {"block_length": 6}),
    "sinks behind": (lambda: tiny("sink_qwen", num_sinks=1, sink_placement="end"), {"block_length": 6}),
    "ar": (lambda: tiny("causal"), {}),
}


def place(model: Any, p: int) -> int:
    in_front = getattr(model.config, "sink_placement", "front") == "front"
    return p + (getattr(model.config, "num_sinks", 0) if in_front else 0)


def passed(model: Any, ids: list[int], hooked: bool, key: int, causal: bool) -> dict[str, Tensor]:
    """One row alone; with the hook, the attention to canvas position `key` has FACTOR times the odds."""

    def edit(scores: Tensor) -> Tensor:
        scores = scores.clone()
        for query in range(scores.shape[-2]):
            if not causal or query >= key:
                scores[:, :, query, place(model, key)] += math.log(FACTOR)
        return scores

    edits = {(layer, "scores"): edit for layer in (0, 1)} if hooked else None
    return forward64(model, torch.tensor([ids]), causal=causal, edits=edits)


def logits64(
    model: Any, ids: list[int], hidden: list[int], scale: float, hooked: bool, key: int, causal: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [position, d_vocab] of one row as its sampler reads them; `hidden` is what guidance masks."""
    kept = passed(model, ids, hooked, key, causal)
    raw = kept["logits"][0]
    if scale:
        unconditional = [model.config.mask_token_id if p in hidden else t for p, t in enumerate(ids)]
        other = passed(model, unconditional, hooked, key, causal)
        raw = other["logits"][0] + (scale + 1) * (raw - other["logits"][0])
    if model.config.model_type.lower() == "dream":
        raw = torch.stack([raw[max(p - 1, 0)] for p in range(len(ids))])
    return raw, kept


@pytest.fixture(scope="module", params=CASES)
def case(request: Any) -> tuple[Any, Any, Replay]:
    build, settings = CASES[request.param]
    model = build()
    causal = request.param == "ar"
    given = {k: v for k, v in RUN.items() if not (causal and k == "steps")}
    prompts = PROMPTS
    if "cfg_scale" in settings:
        # A mask in the prompt: once written, LLaDA's guidance shows it to the unconditional half, SMDM's hides it.
        prompts = [[model.config.mask_token_id if i == HOLE else t for i, t in enumerate(PROMPTS[0])], PROMPTS[1]]
    run = dl.denoise(model, prompts, **given, **settings)
    # Counted from the end the position is the same in both rows' own counting only for the padded canvas: row 1
    # stands two places further right.
    length = run.tokens.shape[1]
    found = replay(model, run, [scale_attention(KEY, FACTOR)])
    assert length == 12
    return model, run, found


def rows(run: Any) -> list[tuple[int, int, list[int]]]:
    """(row, padding in front, what guidance masks in its own counting)."""
    hidden = [p for p in range(6) if p != HOLE or run.settings["sampler"] == "smdm"]
    return [(0, 0, hidden), (1, 2, list(range(4)))]


def each(model: Any, run: Any, found: Replay) -> Any:
    """(step, row, padding, predicted position on the padded canvas, plain and hooked logits and values)."""
    causal = run.settings["sampler"] == "causal"
    scale = float(run.settings.get("cfg_scale") or 0.0)
    for step in range(run.steps):
        for row, padding, prompt in rows(run):
            stop = 6 + step if causal else 12
            ids = run.canvases[step, row, padding:stop].tolist()
            pair = [logits64(model, ids, prompt, scale, h, KEY - padding, causal) for h in (False, True)]
            yield step, row, padding, pair


def test_what_is_asked(case: Any) -> None:
    _, run, found = case
    if run.settings["sampler"] == "causal":
        assert found.predicted.nonzero()[:, [0, 2]].tolist() == [
            [s, 6 + s] for s in range(run.steps) for _ in range(2)
        ]
    else:
        assert found.predicted.equal(run.masked[:-1])


def test_kl_confidence_rank_and_token_equal_float64_loops(case: Any) -> None:
    model, run, found = case
    mask_id, seen, largest = getattr(model.config, "mask_token_id", None), 0, 0.0
    for step, row, padding, pair in each(model, run, found):
        for p in range(12):
            if not found.predicted[step, row, p]:
                assert bool(found.kl[step, row, p].isnan())
                assert int(found.rank[step, row, p]) == int(found.token_hooked[step, row, p]) == -1
                continue
            at = -1 if mask_id is None else p - padding
            one, two = (logits[at].softmax(-1) for logits, _ in pair)
            kl = sum(float(a * (a / b).log()) for a, b in zip(one, two, strict=True))
            assert float(found.kl[step, row, p]) == pytest.approx(kl, abs=5e-5, rel=1e-3)
            written = int(run.tokens[row, p])
            for probabilities, ending in ((one, ""), (two, "_hooked")):
                likely = [float(v) if i != mask_id else -1.0 for i, v in enumerate(probabilities)]
                confidence = float(getattr(found, f"confidence{ending}")[step, row, p])
                assert confidence == pytest.approx(max(likely), abs=2e-5)
                assert int(getattr(found, f"token{ending}")[step, row, p]) == likely.index(max(likely))
                better = sum(v > likely[written] for v in likely)
                assert int(getattr(found, f"rank{ending}")[step, row, p]) == better
            seen, largest = seen + 1, max(largest, kl)
    assert seen == int(found.predicted.sum()) > 5
    assert largest > 1e-2


def test_the_residual_stream_equals_float64_loops(case: Any) -> None:
    model, run, found = case
    causal = run.settings["sampler"] == "causal"
    for step, row, padding, pair in each(model, run, found):
        # With a logit shift the output before a position predicts it.
        shift = int(getattr(model.config, "logit_shift", False))
        predicted = [place(model, p - padding - shift) for p in range(12) if found.predicted[step, row, p]]
        predicted = [-1] if causal else predicted
        for layer in (0, 1):
            one, two = (kept[f"resid{layer}"][0] for _, kept in pair)
            change = [float((two[p] - one[p]).norm() / one[p].norm()) for p in predicted]
            cosine = [float(one[p] @ two[p] / one[p].norm() / two[p].norm()) for p in predicted]
            if not predicted:
                assert bool(found.residual_change[step, row, layer].isnan())
                continue
            got = found.residual_change[step, row, layer], found.residual_cosine[step, row, layer]
            assert float(got[0]) == pytest.approx(sum(change) / len(change), rel=1e-3)
            assert float(got[1]) == pytest.approx(sum(cosine) / len(cosine), abs=2e-5)


def test_received_attention_equals_float64_loops(case: Any) -> None:
    model, run, found = case
    causal, sinks = run.settings["sampler"] == "causal", getattr(model.config, "num_sinks", 0)
    one, two = found.received, found.received_hooked
    assert one is not None
    assert two is not None
    assert one.values.shape == two.values.shape == (run.steps, 2, 2, 4, 12 + sinks)
    defined = 0
    for step, row, padding, pair in each(model, run, found):
        patterns = [[kept[f"pattern{layer}"][0] for layer in (0, 1)] for _, kept in pair]
        size = patterns[0][0].shape[-1] - sinks
        queries = [place(model, p) for p in range(size)]
        keys = {p + padding: place(model, p) for p in range(size)}
        at_sink = [k for k in range(size + sinks) if k not in queries]
        keys |= {12 + i: k for i, k in enumerate(at_sink)}
        for key in range(12 + sinks):
            seers = [q for q in queries if key in keys and (not causal or q >= keys[key])]
            for layer in (0, 1):
                for received, pattern in ((one, patterns[0][layer]), (two, patterns[1][layer])):
                    got = received.values[step, row, layer, :, key]
                    if len(seers) < 8:
                        assert bool(got.isnan().all())
                        continue
                    even = sum(1 / (q + 1) if causal else 1 / (size + sinks) for q in seers)
                    want = torch.stack([sum(pattern[h, q, keys[key]] for q in seers) / even for h in range(4)])
                    torch.testing.assert_close(got.double(), want, **CLOSE)
                    defined += 1
    assert defined > 0


@pytest.fixture(scope="module")
def llada() -> Any:
    return tiny("llada")


@pytest.fixture(scope="module")
def run(llada: Any) -> Any:
    return dl.denoise(llada, [[5, 9, 14, 3, 8, 2], [7, 2, 11, 4, 6, 1]], steps=4, gen_length=6, block_length=6)


def test_a_hook_that_changes_nothing_changes_nothing(llada: Any, run: Any) -> None:
    found = replay(llada, run, [steer(torch.zeros(32))])
    assert found.kl[found.predicted].max() == 0
    assert found.rank_change.abs().max() == 0
    assert not found.flipped.any()
    assert found.residual_change.max() == 0
    assert bool(found.repair.isnan().all())
    assert found.moved_mass().max() == 0
    assert repr(found).startswith("Replay(steps=4, batch=2, positions=12; mean KL 0 nats, 0.0% of the predictions")


def test_hooks_know_the_step_and_leave_with_the_replay(llada: Any, run: Any) -> None:
    found = replay(llada, run, [at_steps(mask_positions(0, 1), [2])])
    assert [bool(kl > 1e-6) for kl in found.kl_per_step[:, 0]] == [False, False, True, False]
    again = dl.denoise(llada, run.canvases[0, :, :6], steps=4, gen_length=6, block_length=6)
    assert again.canvases.equal(run.canvases)


def test_replay_s_plain_half_is_the_run_itself(llada: Any, run: Any) -> None:
    found = replay(llada, run, [mask_positions(0)])
    # Greedy: the token written is the likeliest one at its step, at the confidence that the run kept.
    torch.testing.assert_close(found.confidence[run.unmasked], run.confidence[run.unmasked])
    assert found.token[run.unmasked].tolist() == run.proposals[run.unmasked].tolist()
    assert (found.rank[run.unmasked] == 0).all()


def test_a_hidden_column_gives_its_mass_to_the_others(llada: Any, run: Any) -> None:
    found = replay(llada, run, [mask_positions(2)], layers=[0])
    assert found.layers == (0,)
    two = found.received_hooked
    assert two is not None
    assert two.values[..., 2].abs().max() == 0
    torch.testing.assert_close(two.column_sums.sum(-1), torch.full((4, 2, 1, 4), 12.0))
    one = found.received
    assert one is not None
    # Everything that moved left key 2, in the first layer, where nothing else changed.
    torch.testing.assert_close(found.moved_mass(), one.shares[..., 2])
    table = found.gained(top=-1)
    assert table["position"].tolist() == [2]
    per_key = (two.column_sums - one.column_sums).mean((0, 2, 3))
    best = divmod(int(per_key.argmax()), 12)
    line = found.gained(top=1).iloc[0]
    assert (line["batch"], line["position"]) == best
    assert line["gain"] == pytest.approx(float(per_key.max()), abs=1e-5)


def test_attention_lost_behind_the_softmax_is_half_of_what_moved(llada: Any, run: Any) -> None:
    found = replay(llada, run, [mask_positions(2, stage="after")], layers=[0])
    assert found.received is not None
    torch.testing.assert_close(found.moved_mass(), found.received.shares[..., 2] / 2, atol=1e-6, rtol=1e-5)


def test_new_sinks_are_those_of_the_hooks_alone(llada: Any, run: Any) -> None:
    rule = dl.AboveMean(eps=0.2)
    found = replay(llada, run, [scale_attention(5, 1e4)])
    assert found.received is not None
    # Nearly all attention goes to key 5, so that no other key can pass the rule.
    new = found.new_sinks(rule)
    before = dl.find_sinks(found.received, rule).is_sink
    assert new[..., 5].equal(~before[..., 5])
    assert before[..., 5].any()
    assert new[..., 5].any()
    assert not new[..., :5].any()
    assert not new[..., 6:].any()
    assert found.new_sinks(rule, level="model").shape == (4, 2, 1, 1, 12)


def test_a_change_that_a_later_layer_undoes_is_repaired(llada: Any, run: Any) -> None:
    clean = capture(llada, run, "resid", layers=[1])
    found = replay(llada, run, [at_layers(steer(torch.ones(32) * 3.0), [0]), patch_from(clean)])
    assert found.residual_change[..., 0][found.predicted.any(-1)].min() > 0.1
    assert found.residual_change[..., 1].nan_to_num().max() == 0
    assert found.repair[found.predicted.any(-1)].tolist() == [1.0] * 8
    assert found.kl[found.predicted].max() < 1e-9
    worse = replay(llada, run, [at_layers(steer(torch.ones(32) * 3.0), [-1])])
    assert worse.repair[found.predicted.any(-1)].tolist() == [0.0] * 8


def test_masked_queries_alone(llada: Any, run: Any) -> None:
    found = replay(llada, run, [zero_value(0)], queries="masked", min_viewers=1)
    assert found.received is not None
    assert found.received.counted.tolist() == run.masked[:-1].sum(-1).tolist()
    torch.testing.assert_close(found.received.shares.nansum(-1), torch.ones(4, 2, 2, 4))


def test_no_attention_moved_is_not_known_where_no_key_has_a_score(llada: Any, run: Any) -> None:
    found = replay(llada, run, [mask_positions(2)], layers=[0], queries="masked", min_viewers=4)
    assert found.received is not None
    few = run.masked[:-1].sum(-1) < 4
    assert bool(few.any())
    assert found.moved_mass()[few].isnan().all()
    torch.testing.assert_close(found.moved_mass()[~few], found.received.shares[~few][..., 2])


def test_the_table_says_what_the_tensors_say(llada: Any, run: Any) -> None:
    found = replay(llada, run, [ablate("mlp_out", "masked")], attention=False)
    table = found.table()
    assert len(table) == int(found.predicted.sum())
    line = table.iloc[3]
    at = (line["step"], line["batch"], line["position"])
    assert line["kl"] == pytest.approx(float(found.kl[at]))
    assert line["rank_hooked"] == int(found.rank_hooked[at])
    assert line["token"] == f"w{int(found.token[at])}"
    assert line["flipped"] == bool(found.flipped[at])
    assert found.layer_table()["residual_change"].tolist() == pytest.approx(
        found.residual_change.nanmean((0, 1)).tolist()
    )
    with pytest.raises(ValueError, match=r"has no attention; call replay\(\.\.\., attention=True\)"):
        found.gained()


def test_a_part_of_a_run_has_the_step_numbers_of_the_whole(llada: Any, run: Any) -> None:
    part = part_of_run(run, [1, 3], [0, 1])
    found = replay(llada, part, [steer(torch.zeros(32))])
    assert sorted(set(found.table()["step"])) == [1, 3]
    for received in (found.received, found.received_hooked):
        assert received is not None
        assert received.step_numbers == (1, 3)
    whole = replay(llada, run, [steer(torch.zeros(32))], attention=False).table()
    assert found.table()["kl"].tolist() == whole[whole["step"].isin([1, 3])]["kl"].tolist()


def test_logits_are_compared_a_few_at_a_time(llada: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(llada, run, [mask_positions(0)])
    sizes: list[int] = []
    head = llada.lm_head.register_forward_hook(lambda m, a, out: sizes.append(len(out)))
    monkeypatch.setattr("dlm_lens.probes.unembedding.ENTRIES_AT_ONCE", 2 * 64)
    found = replay(llada, run, [mask_positions(0)])
    head.remove()
    assert max(sizes) == 2
    torch.testing.assert_close(found.kl, whole.kl, equal_nan=True)


def test_what_does_not_fit_is_refused(llada: Any, run: Any) -> None:
    with pytest.raises(TypeError, match="the run is a Tensor; give the DenoisingRun"):
        replay(llada, run.tokens, [mask_positions(0)])
    with pytest.raises(ValueError, match="hooks is empty"):
        replay(llada, run, [])
    with pytest.raises(ValueError, match=r"the model samples with 'dream'.*another model's"):
        replay(tiny("dream"), run, [mask_positions(0)])
    with pytest.raises(ValueError, match="queries is 'prompt'"):
        replay(llada, run, [mask_positions(0)], queries="prompt")
    with pytest.raises(ValueError, match="layer 2 of 2"):
        replay(llada, run, [mask_positions(0)], layers=[2])
    found = replay(llada, run, [mask_positions(0)])
    with pytest.raises(ValueError, match=r"Replay\.kl has shape \[1\]"):
        replace(found, kl=torch.zeros(1))


def test_a_run_without_steps_has_no_replay() -> None:
    model = tiny("fast_dllm_v2")
    run = dl.denoise(model, [[5, 9, 13], [3, 8, 1, 4]], gen_length=2, reference_quirks=True)
    assert run.steps == 0
    with pytest.raises(ValueError, match="replay: the run has no steps, as its prompts leave nothing to decide"):
        replay(model, run, [mask_positions(0)])


def test_long_guided_runs_are_replayed_as_their_conditional_rows() -> None:
    """From 128 positions on the kernel's log-sum-exp is read, which a guided pass has for both halves."""
    model = tiny("llada", max_position_embeddings=256)
    prompt = [[number % 60 for number in range(130)]]
    run = dl.denoise(model, prompt, steps=2, gen_length=8, block_length=8, cfg_scale=1.0)
    found = replay(model, run, [mask_positions(1)])
    expected = dl.received_over_steps(model, run)
    assert found.received is not None
    torch.testing.assert_close(found.received.values, expected.values, equal_nan=True)
