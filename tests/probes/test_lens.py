"""The lens against float64 loops over independent forward passes, in every family."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import dlm_lens as dl
from dlm_lens.attention import Hook
from dlm_lens.hooks import mask_positions
from dlm_lens.hooks.positions import PositionClass, where
from dlm_lens.probes import LogitLens, logit_lens, sink_updates, sink_writes
from dlm_lens.probes.unembedding import Unembedding
from dlm_lens.recording import rerun
from dlm_lens.testing import tiny
from tests.recording.reference import alone
from tests.reference import forward64, normed

PROMPTS = [[5, 9, 11, 3, 17, 20, 8, 30, 31], [6, 2, 40]]
RUN: dict[str, Any] = {"steps": 4, "gen_length": 8, "temperature": 0.5, "seed": [3, 4]}
CLOSE = {"abs": 2e-4, "rel": 2e-3}  # float32 through two layers and a head against float64
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llada": (lambda: tiny("llada"), {}),
    "llada guided": (lambda: tiny("llada"), {"cfg_scale": 1.0}),
    "dream": (lambda: tiny("dream"), {}),
    "smdm": (lambda: tiny("smdm"), {}),
    "sinks in front": (lambda: tiny("sink_qwen", num_sinks=2), {}),
    "sinks behind": (lambda: tiny("sink_qwen", num_sinks=1, sink_placement="end"), {}),
    "gated": (lambda: tiny("sink_qwen", gated_attention=True), {}),
    "ar": (lambda: tiny("causal"), {}),
}


def started(name: str) -> tuple[Any, Any]:
    make, more = MODELS[name]
    model = make()
    settings = {k: v for k, v in RUN.items() if name != "ar" or k != "steps"} | more
    with torch.no_grad():  # a norm of ones would not show whether it was applied
        model.get_decoder().norm.weight.uniform_(0.3, 2.0, generator=torch.Generator().manual_seed(0))
    return model, dl.denoise(model, PROMPTS, **settings)


def read64(model: Any, stream: Tensor) -> Tensor:
    """Log-probabilities of a stream, by the formula."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = normed(stream, weights["model.norm.weight"], model.config.rms_norm_eps) @ head.T
    return logits - logits.exp().sum(-1, keepdim=True).log()


@pytest.mark.parametrize("name", MODELS)
def test_every_number_is_that_of_loops(name: str) -> None:
    model, run = started(name)
    lens = logit_lens(model, run, steps=[0, -1], top=3)
    shifted = name in ("dream", "ar")
    canvas, mask_id = run.tokens.shape[1], getattr(model.config, "mask_token_id", None)
    index = {
        key: i
        for i, key in enumerate(zip(*(t.tolist() for t in (lens.step, lens.batch, lens.position)), strict=True))
    }
    seen, counted = 0, 0
    for step in (0, run.steps - 1):
        for row in range(2):
            keep, _, kept, queries, order, _ = alone(model, run, step, row)
            network = order if name != "ar" else queries
            keys = [*keep.nonzero()[:, 0].tolist(), *range(canvas, canvas + len(network) - len(queries))]
            assert {key[2] for key in index if key[:2] == (step, row)} == set(keys)
            for at, position in zip(network, keys, strict=True):
                entry = index[step, row, position]
                wanted = [read64(model, kept[f"resid{layer}"][0, at]) for layer in range(2)]
                ahead = position + 1 if shifted else position
                about = ahead if position < canvas and ahead < canvas else -1
                is_asked = about >= 0 and bool(run.masked[step, row, about])
                assert (int(lens.predicts[entry]), bool(lens.predicted[entry])) == (about, is_asked)
                assert bool(lens.masked[entry]) == (position < canvas and bool(run.masked[step, row, position]))
                for layer, logs in enumerate(wanted):
                    p = logs.exp()
                    assert float(lens.entropy[entry, layer]) == pytest.approx(float(-(p * logs).sum()), **CLOSE)
                    best = logs.sort(descending=True)
                    assert lens.top_probabilities[entry, layer].tolist() == pytest.approx(
                        best.values[:3].exp().tolist(), **CLOSE
                    )
                    # Of ties in float32 either may come first.
                    chosen = lens.top_tokens[entry, layer]
                    assert logs[chosen].tolist() == pytest.approx(best.values[:3].tolist(), abs=1e-3)
                    if not is_asked:
                        assert lens.kl[entry, layer].isnan()
                        assert lens.rank[entry, layer] == -1
                        continue
                    kl = float((wanted[1].exp() * (wanted[1] - logs)).sum())
                    assert float(lens.kl[entry, layer]) == pytest.approx(kl, **CLOSE)
                    token = int(run.tokens[row, about])
                    gaps = [float(logs[t] - logs[token]) for t in range(len(logs)) if t not in (mask_id, token)]
                    sure, unsure = sum(g > 1e-3 for g in gaps), sum(abs(g) <= 1e-3 for g in gaps)
                    assert sure <= int(lens.rank[entry, layer]) <= sure + unsure
                    counted += 1
                seen += 1
    assert seen > 30
    assert counted >= 4
    assert len(index) == seen


def test_the_first_position_is_predicted_too() -> None:
    model = tiny("llada")
    run = dl.denoise(model, [[63, 5, 9, 63, 7]], gen_length=0, steps=2)
    lens = logit_lens(model, run, steps=[0])
    assert lens.position[lens.predicted].tolist() == [0, 3]


def test_under_uniform_noise_decided_positions_are_predicted_too() -> None:
    model = tiny("uniform_qwen")
    run = dl.denoise(model, PROMPTS, gen_length=8, steps=4, seed=[3, 4])
    lens = logit_lens(model, run)
    at = lens.predicts.clamp(min=0)
    answer = run.answer[lens.batch, at] & (lens.predicts >= 0)
    assert lens.predicted.equal(answer)
    assert (answer & ~run.masked[lens.step, lens.batch, at]).any()


def test_the_summary_counts_what_was_decided() -> None:
    """A token that was never decided is found by no layer, and is no miss."""
    model = tiny("llada")
    run = dl.denoise(model, PROMPTS, gen_length=8, steps=4, seed=[3, 4])
    left = run.masked.clone()
    left[-1, :, -3:] = True
    run = replace(run, masked=left, canvases=run.canvases.masked_fill(left, model.config.mask_token_id))
    lens = logit_lens(model, run, positions="masked")
    known = lens.predicted & (run.tokens[lens.batch, lens.predicts] != model.config.mask_token_id)
    assert 0 < known.sum() < lens.predicted.sum()
    lines = lens.summary().set_index("layer")
    for place, layer in enumerate(lens.layers):
        found = (lens.rank[known, place] == 0).double().mean()
        assert lines.found[layer] == pytest.approx(float(found))
    table = lens.table(layer=1)
    assert table.masked.tolist() == lens.masked.tolist() == [True] * len(lens.step)
    assert set(table.group) == {"other"}
    assert table.top.tolist() == [
        run.tokenizer.convert_ids_to_tokens(row) for row in lens.top_tokens[:, 1].tolist()
    ]


def test_the_last_layer_is_the_model() -> None:
    model, run = started("llada")
    lens = logit_lens(model, run, layers=[-1], steps=[1], top=64)
    assert lens.layers == (1,)
    assert float(lens.kl.nanmean()) == 0.0
    logits = model(input_ids=run.canvases[1][:1]).logits.double().softmax(-1)[0]
    for entry in range(len(lens.step)):
        if lens.batch[entry] == 0:
            row = logits[lens.position[entry]]
            torch.testing.assert_close(
                lens.top_probabilities[entry, 0].double(), row[lens.top_tokens[entry, 0]], atol=1e-6, rtol=1e-4
            )


class Classes(Hook):
    """What hooks of a run see of every class: (step, row, canvas position)."""

    site = "resid"
    remembers = False

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.found: dict[str, set[tuple[int, int, int]]] = {name: set() for name in get_args(PositionClass)}

    def edit(self, tensor: Tensor, hook: Any) -> Tensor:
        first = hook.run.queries[0] if hook.run.queries else 0
        canvas = hook.sinks.canvas(tensor.shape[1]).start
        for name, found in self.found.items():
            places = where(name, tensor, hook, self)[: self.rows].nonzero().tolist()
            found |= {(hook.run.step, row, first + place - canvas) for row, place in places}
        return tensor


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llada", {"cfg_scale": 1.0}),
        ("llada", {"cache": "dual", "block_length": 4}),
        ("sink_qwen", {}),
        ("causal", {}),
        ("llada2", {}),
        ("fast_dllm_v2", {}),
        ("wedlm", {}),
        ("dreamon", {}),
        ("diffusion_gemma", {}),
        ("duo", {}),
    ],
)
def test_a_class_of_positions_is_that_of_hooks(family: str, more: dict[str, Any]) -> None:
    model, seen = tiny(family), Classes(len(PROMPTS))
    run = dl.denoise(model, PROMPTS, hooks=[seen], gen_length=8, seed=[3, 4], **more)
    for name, places in seen.found.items():
        lens = logit_lens(model, run, name)
        read = set(zip(lens.step.tolist(), lens.batch.tolist(), lens.position.tolist(), strict=True))
        assert read == {place for place in places if run.running[place[0], place[1]]}
    # An AR canvas has nothing open, and DiffusionGemma's encoder reads the prompt.
    assert {name for name, places in seen.found.items() if places} >= {"answer"} | (
        {"decided", "prompt"} if family == "causal" else {"open"}
    )


def test_a_mask_of_every_step_reads_other_positions_at_every_step() -> None:
    model, run = started("sinks behind")
    decided = logit_lens(model, run, run.unmasked, steps=[1, -1])
    every = logit_lens(model, run, steps=[1, -1])
    chosen = run.unmasked[every.step, every.batch, every.position.clamp(max=run.tokens.shape[1] - 1)]
    chosen &= every.position < run.tokens.shape[1]
    assert 0 < int(chosen.sum()) < len(every.step)
    for name in ("step", "batch", "position"):
        assert getattr(decided, name).equal(getattr(every, name)[chosen])
    assert decided.entropy.allclose(every.entropy[chosen], rtol=1e-5)  # other rows of the same product
    with_sinks = torch.nn.functional.pad(run.unmasked, (0, 1), value=True)
    both = logit_lens(model, run, with_sinks, steps=[1])
    assert set(both.position.tolist()) == {*decided.position[decided.step == 1].tolist(), run.tokens.shape[1]}


def test_sinks_are_read_beside_controls_of_their_class() -> None:
    model, run = started("sinks in front")
    rec = dl.record(model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm()], **RUN)
    assert rec.run.tokens.equal(run.tokens)
    sinks = dl.find_sinks(rec, dl.TopK(2))
    lens = logit_lens(model, run, sinks)
    found = sinks.is_sink.any(2).any(2)
    places = list(zip(*(t.tolist() for t in (lens.step, lens.batch, lens.position)), strict=True))
    assert {p for p, s in zip(places, lens.sink, strict=True) if s} == {tuple(p) for p in found.nonzero().tolist()}
    others = [p for p, s in zip(places, lens.sink, strict=True) if not s]
    assert len(set(others)) == len(others) > 10
    for step, row, position in others:
        assert position < run.tokens.shape[1]
        assert run.attention_mask[row, position]
        assert not found[step, row, position]
    for step in range(run.steps):
        for row in range(2):
            here, canvas = (lens.step == step) & (lens.batch == row), run.tokens.shape[1]
            for masked in (True, False):
                kind = here & (lens.masked == masked) & (lens.position < canvas)
                free = int(
                    ((run.masked[step, row] == masked) & run.attention_mask[row] & ~found[step, row, :canvas]).sum()
                )
                wanted = min(int((kind & lens.sink).sum()), free)
                assert int((kind & ~lens.sink).sum()) == wanted
    entry = int((lens.sink_layer[:, 0] & ~lens.sink_layer[:, 1]).nonzero()[0])
    assert sinks.is_sink[lens.step[entry], lens.batch[entry], 0, :, lens.position[entry]].any()
    table = lens.table(1)
    assert set(table.token[table.position.isna()]) == {"sink(0)", "sink(1)"}
    summary = lens.summary().set_index(["layer", "group", "class"])
    kept = lens.sink & lens.masked
    assert summary.loc[(0, "sink", "masked"), "kl"] == pytest.approx(float(lens.kl[kept, 0].mean()), rel=1e-5)
    first = (lens.rank[kept, 0] == 0).float().mean()
    assert summary.loc[(0, "sink", "masked"), "found"] == pytest.approx(float(first), rel=1e-5)
    assert summary.loc[(1, "other", "visible")].isna()["kl"]
    assert len(logit_lens(model, run, sinks, controls=False).step) == int(found.sum())


def test_what_hooks_change_is_the_divergence_of_two_lenses() -> None:
    model, run = started("llada")
    lens = logit_lens(model, run, [10, -1], hooks=[mask_positions(2, 9)], steps=[1])
    assert lens.hooked is not None
    assert lens.change is not None

    def edit(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[..., [2, 9]] = -torch.inf
        return scores

    # Row 0 has no padding: what a hook calls a position is one there.
    ids = run.canvases[1][:1]
    plain = forward64(model, ids)
    hooked = forward64(model, ids, edits={(layer, "scores"): edit for layer in (0, 1)})
    compared = 0
    for entry in (lens.batch == 0).nonzero()[:, 0].tolist():
        for layer in range(2):
            one, two = (read64(model, kept[f"resid{layer}"][0, lens.position[entry]]) for kept in (plain, hooked))
            assert float(lens.change[entry, layer]) == pytest.approx(
                float((one.exp() * (one - two)).sum()), **CLOSE
            )
            assert float(lens.hooked.entropy[entry, layer]) == pytest.approx(
                float(-(two.exp() * two).sum()), **CLOSE
            )
            compared += 1
    assert compared == 4
    assert float(lens.change.min()) > 1e-4
    assert not lens.hooked.top_probabilities.equal(lens.top_probabilities)


@pytest.mark.long
def test_what_sinks_write_is_that_of_loops() -> None:
    for name in ("llada", "sinks in front", "ar"):
        model, run = started(name)
        settings = {k: v for k, v in RUN.items() if name != "ar" or k != "steps"}
        rec = dl.record(model, PROMPTS, [dl.ReceivedAttention()], **settings)
        sinks = dl.find_sinks(rec, dl.TopK(1))
        writes = sink_writes(model, run, sinks, top=3, limit=40)
        assert int(writes.sink.sum()) == min(40, int(sinks.is_sink.sum()))
        weights, canvas = model.state_dict(), run.tokens.shape[1]
        for entry in range(len(writes.step)):
            step, row, layer, h, position = (
                int(getattr(writes, n)[entry]) for n in ("step", "batch", "layer", "head", "position")
            )
            assert bool(sinks.is_sink[step, row, layer, h, position]) == bool(writes.sink[entry])
            keep, _, kept, _, order, _ = alone(model, run, step, row)
            keys = [*keep.nonzero()[:, 0].tolist(), *range(canvas, canvas + rec.sinks)]
            v = kept[f"v{layer}"][0, order[keys.index(position)], h // 2]
            w = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].double()[:, 8 * h : 8 * h + 8]
            vector = torch.stack([sum(w[d, i] * v[i] for i in range(8)) for d in range(32)])
            assert float(writes.norm[entry]) == pytest.approx(float(vector.norm()), rel=1e-4)
            logs = read64(model, vector)
            assert float(writes.entropy[entry]) == pytest.approx(float(-(logs.exp() * logs).sum()), **CLOSE)
            assert writes.top_probabilities[entry].tolist() == pytest.approx(
                logs.sort(descending=True).values[:3].exp().tolist(), **CLOSE
            )
        floor = writes.score[writes.sink].min()
        assert int((sinks.scores[sinks.is_sink] > floor).sum()) < 40 or name == "llada"
        assert set(writes.summary().group) == {"sink", "other"}


def test_writes_of_chosen_steps_and_layers_are_a_part_of_all_and_others_are_refused() -> None:
    model, run = started("llada")
    rec = rerun(model, run, [dl.ReceivedAttention(), dl.KeyNorm()])
    sinks = dl.find_sinks(rec, dl.TopK(1))
    every = sink_writes(model, run, sinks)
    last = every.sink & (every.step == 3) & (every.layer == 1)
    part = sink_writes(model, run, sinks, steps=[-1], layers=[-1])
    assert part.position[part.sink].tolist() == every.position[last].tolist()
    assert set(part.step.tolist()) == {3}
    for settings, sentence in (
        ({"steps": [9]}, "sink_writes: step 9 of 4: steps go from 0 to 3"),
        ({"layers": [2]}, "sink_writes: layer 2 of 2"),
        ({"steps": []}, "sink_writes: steps is empty"),
        ({"steps": 2}, "steps is 2; it must be a list of whole numbers"),
    ):
        with pytest.raises(ValueError, match=sentence):
            sink_writes(model, run, sinks, **settings)
    with pytest.raises(ValueError, match="these sinks have no layer 0, only 1; find them with that layer"):
        sink_writes(model, run, dl.find_sinks(rec.select(layer=[1]), dl.TopK(1)), layers=[0])
    # Of which heads these are, sinks do not say: one head's would be taken for head 0's, or for those of all.
    one = dl.find_sinks(rec.select(head=[2]), dl.TopK(1))
    for read in (sink_writes, sink_updates):
        with pytest.raises(ValueError, match="the sinks are of 1 heads and a layer has 4; give those of all"):
            read(model, run, one)


@pytest.mark.parametrize("name", ["llada", "sinks behind"])
def test_controls_of_writes_are_tokens_of_the_same_pattern_that_are_no_sinks(name: str) -> None:
    model, run = started(name)
    sinks = dl.find_sinks(rerun(model, run, [dl.ReceivedAttention()]), dl.TopK(2))
    found, canvas = sink_writes(model, run, sinks), run.tokens.shape[1]
    pairs = int(found.sink.sum())
    assert found.sink.tolist() == [True] * pairs + [False] * pairs
    place = found.step, found.batch, torch.tensor([sinks.layers.index(i) for i in found.layer.tolist()]), found.head
    assert sinks.is_sink[*place, found.position].equal(found.sink)
    assert all(each[:pairs].equal(each[pairs:]) for each in place)
    assert (found.position[pairs:] < canvas).all()
    assert (name == "llada") == bool((found.position[:pairs] < canvas).all())
    masked = torch.nn.functional.pad(run.masked, (0, sinks.sinks))
    assert found.masked.equal(masked[found.step, found.batch, found.position])
    assert found.masked.any()
    for line in found.summary().to_dict("records"):
        group = (found.layer == line["layer"]) & (found.sink == (line["group"] == "sink"))
        assert line["entries"] == int(group.sum()) > 0
        assert line["norm"] == pytest.approx(float(found.norm[group].mean()), rel=1e-5)
    assert found.summary()[["layer", "group"]].drop_duplicates().shape == (4, 2)


@pytest.mark.parametrize("rule", ["above-mean:1.2", "low-key-norm:0.98"])
def test_a_limit_keeps_the_strongest_sinks(rule: str) -> None:
    model, run = started("llada")
    sinks = dl.find_sinks(rerun(model, run, [dl.ReceivedAttention(), dl.KeyNorm()]), rule)
    scores = sorted(sinks.scores[sinks.is_sink].tolist(), reverse=not sinks.detector.low_is_sink)
    assert len(scores) > 20
    found = sink_writes(model, run, sinks, limit=10)
    kept = sorted(found.score[found.sink].tolist(), reverse=not sinks.detector.low_is_sink)
    assert kept == scores[:10]
    assert kept[-1] != scores[-1]


def test_chunks_of_entries_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = started("llada")
    one = logit_lens(model, run, hooks=[mask_positions(3)])
    monkeypatch.setattr("dlm_lens.probes.unembedding.ENTRIES_AT_ONCE", 64 * 5)
    two = logit_lens(model, run, hooks=[mask_positions(3)])
    for name in ("entropy", "kl", "change", "top_probabilities"):
        # Another number of rows may take another kernel.
        torch.testing.assert_close(getattr(one, name), getattr(two, name), equal_nan=True, atol=1e-5, rtol=1e-4)


def test_logits_are_computed_once_for_each_layer_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary the head takes most of the time; `change` computed them again."""
    model, run = started("llada")
    logits, counts = Unembedding.logits, []

    def counted(self: Unembedding, stream: Tensor) -> Tensor:
        counts.append(len(stream))
        return logits(self, stream)

    monkeypatch.setattr(Unembedding, "logits", counted)
    for hooks, passes in (((), 1), ((mask_positions(3),), 2)):
        counts.clear()
        lens = logit_lens(model, run, [10, 11], hooks=hooks)
        assert sum(counts) == len(lens.step) * passes * (len(lens.layers) + 1)  # the last one is the reference too


@pytest.mark.parametrize("name", ["llada", "ar"])
def test_no_entries_have_no_measures(name: str) -> None:
    model, run = started(name)
    lens = logit_lens(model, run, torch.zeros_like(run.unmasked), hooks=[mask_positions(3)], top=2)
    assert lens.top_tokens.shape == (0, 2, 2)
    assert lens.change is not None
    assert lens.change.shape == lens.kl.shape == (0, 2)
    assert len(lens.table()) == len(lens.summary()) == 0


def test_what_cannot_be_read_is_refused() -> None:
    model, run = started("llada")
    for settings, sentence in (
        ({"steps": [4]}, "step 4 of 4"),
        ({"steps": []}, "steps is empty"),
        ({"layers": [2]}, "layer 2 of 2"),
        ({"positions": [40]}, "position 40"),
        ({"positions": []}, "positions is empty; give at least one, or None for all"),
        ({"top": 0}, "top is 0"),
        ({"positions": "sinks"}, "positions is 'sinks'; give Sinks, canvas positions, a mask, or one of 'masked'"),
        ({"positions": run.unmasked[:2]}, r"needs a mask of shape \[2, 17\] or \[4, 2, 17\], or a list"),
        ({"positions": 3}, r"positions is 3; give a list, such as positions=\[3\]"),
        ({"steps": 2}, r"steps is 2; give a list, such as steps=\[2\]"),
        ({"layers": 0}, r"layers is 0; give a list, such as layers=\[0\]"),
        ({"steps": [-5]}, "or from -4 to -1"),
        (
            {"positions": run.unmasked.numpy()},
            r"positions is a ndarray bool \[4, 2, 17\]; it must be Sinks, a class such as 'masked', a list",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            logit_lens(model, run, **settings)
    other = dl.find_sinks(dl.record(model, PROMPTS, **{**RUN, "steps": 2}), dl.TopK(1))
    with pytest.raises(ValueError, match="needs sinks of this run"):
        logit_lens(model, run, other)
    with pytest.raises(ValueError, match="level 'head'"):
        sink_writes(model, run, other)
    with pytest.raises(ValueError, match=r"limit is 1\.5; it must be a whole number of at least 1"):
        sink_writes(model, run, other, limit=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attends is 'half'; it must be a share of attention"):
        sink_updates(model, run, other, attends="half")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="DenoisingRun"):
        logit_lens(model, run.canvases)
    assert isinstance(logit_lens(model, run, [0], steps=[0]), LogitLens)
