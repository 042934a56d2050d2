"""Open positions: statistics, classes of queries, hooks, figures, sentences, with and without a mask token."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

import dlm_lens as dl
from dlm_lens import hooks, probes, sinks, viz
from dlm_lens.recording import AttentionPattern, CanvasFacts, RegionMass, TopKeys, WeightedValue
from dlm_lens.recording.query_classes import checked_class
from dlm_lens.recording.reducer_registry import parse_reducers
from dlm_lens.sampling import DenoisingRun
from dlm_lens.testing import tiny
from tests.reference import forward64

PROMPTS = ["w5 w6 w9", "w3 w14"]
RUN: dict[str, Any] = {"gen_length": 8, "steps": 6, "entropy_bound": 7.0, "seed": [1, 2]}
CLASSES: Any = ["all", "open", "decided", "prompt", "block"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("uniform_qwen")


@pytest.fixture(scope="module")
def recording(model: Any) -> dl.Recording:
    reducers = [dl.ReceivedAttention(queries=CLASSES, min_viewers=1), dl.ValueNorm(), RegionMass()]
    found: dl.Recording = dl.record(model, PROMPTS, reducers, **RUN)
    return found


def received64(model: Any, run: DenoisingRun, step: int, row: int, counted: Tensor) -> Tensor:
    """r_j / e_j of layer 1 over the counted queries of a row, from float64 patterns."""
    first = int(run.padding[row])
    pattern = forward64(model, run.canvases[step, row : row + 1, first:])["pattern1"][0]
    chosen = counted[first:]
    return pattern[:, chosen].sum(1) / (chosen.sum() / len(chosen))


def test_classes_are_those_of_the_samplers_open_positions(model: Any, recording: dl.Recording) -> None:
    run = recording.run
    for step in range(1, run.steps):
        for row in range(2):
            first = int(run.padding[row])
            for name, counted in (("open", run.open[step, row]), ("decided", ~run.open[step, row])):
                expected = received64(model, run, step, row, counted & run.attention_mask[row])
                found = dl.received_of(recording, name).values[step, row, 1, :, first:]  # type: ignore[arg-type]
                torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "stored"), [("open", "masked"), ("decided", "unmasked")])
def test_both_names_of_a_class_are_one_class(name: Any, stored: Any, recording: dl.Recording) -> None:
    assert checked_class(name, "here") == stored
    for kind in (dl.ReceivedAttention, WeightedValue, lambda q: TopKeys(2, q)):
        assert kind(name) == kind(stored)
    assert (
        getattr(recording, f"received_{name}")
        .nan_to_num()
        .equal(getattr(recording, f"received_{stored}").nan_to_num())
    )
    assert recording.expected(name).equal(recording.expected(stored))
    assert recording.received_sums(name).nan_to_num().equal(recording.received_sums(stored).nan_to_num())
    assert dl.received_of(recording, name).queries == stored
    assert parse_reducers(f"received:{name}")[0].build() == dl.ReceivedAttention([stored])
    with pytest.raises(AttributeError, match="no 'received_closed'"):
        assert recording.received_closed
    with pytest.raises(ValueError, match="the classes of queries are all, masked, unmasked, prompt, block, open"):
        dl.received_of(recording, "closed")  # type: ignore[arg-type]


def test_a_masked_model_has_the_same_classes() -> None:
    model = tiny("llada")
    found = dl.record(model, PROMPTS, [dl.ReceivedAttention(CLASSES, 1)], gen_length=8, steps=4, block_length=4)
    old = dl.record(
        model,
        PROMPTS,
        [dl.ReceivedAttention(["all", "masked", "unmasked"], 1)],
        gen_length=8,
        steps=4,
        block_length=4,
    )
    assert found.received_open.nan_to_num().equal(old.received_masked.nan_to_num())
    assert found.received_decided.nan_to_num().equal(old.received_unmasked.nan_to_num())
    assert found.run.open.equal(found.run.canvases == model.config.mask_token_id)
    assert not found.run.uniform_noise


@pytest.mark.parametrize("family", ["uniform_qwen", "llada"])
def test_hooks_act_on_open_positions(family: str) -> None:
    net = tiny(family)
    settings = RUN if family == "uniform_qwen" else {"gen_length": 8, "steps": 4, "block_length": 4}
    hidden = dl.record(
        net, PROMPTS[:1], [AttentionPattern()], hooks=[hooks.mask_tokens("open")], **settings | {"seed": 1}
    )
    columns = hidden.open[:, :, None, None, None]
    # A row that would be empty keeps its own position.
    own = torch.eye(columns.shape[-1], dtype=torch.bool)
    assert float(hidden.pattern.masked_fill(~columns | own, 0.0).max()) == 0.0
    one = dl.denoise(net, PROMPTS, hooks=[hooks.ablate("z", positions="open")], **settings)
    two = dl.denoise(net, PROMPTS, hooks=[hooks.ablate("z", positions="masked")], **settings)
    other = dl.denoise(net, PROMPTS, hooks=[hooks.ablate("z", positions="decided")], **settings)
    assert one.canvases.equal(two.canvases)
    assert one.open.equal(two.open)
    assert not one.canvases.equal(other.canvases)
    for classes in ("open", "mask"):
        assert hooks.mask_random(1, classes=classes).classes == ("mask",)


def test_a_replay_counts_open_queries(model: Any) -> None:
    run = dl.denoise(model, PROMPTS, **RUN)
    replayed = dl.replay(model, run, [hooks.mask_top_sinks(1)], queries="open", min_viewers=1)
    plain = dl.received_over_steps(model, run, queries="open", min_viewers=1)
    assert replayed.received is not None
    torch.testing.assert_close(replayed.received.values, plain.values, equal_nan=True)


def test_a_trace_selects_steps_by_open_positions(model: Any) -> None:
    plain = dl.denoise(model, PROMPTS, **RUN)
    lm: Any = dl.DiffusionLM(model)
    with lm.generate(PROMPTS, **RUN) as tracer:
        found = [].save()
        for step in tracer.steps.where(lambda step: int(step.open.sum()) < 16):
            found.append((int(step), step.open, lm.sampler.revised.clone()))
        run = tracer.result.save()
    assert run.canvases.equal(plain.canvases)
    assert [index for index, *_ in found] == [t for t in range(6) if int(plain.open[t].sum()) < 16]
    for index, opened, revised in found:
        assert opened.equal(plain.open[index])
        # A position that is opened again is revised too, but does not take over the proposal.
        assert revised.equal(plain.revised[index] & ~plain.open[index + 1])


def test_the_bridge_runs_the_sampler(model: Any) -> None:
    plain = dl.denoise(model, PROMPTS, **RUN)
    run = dl.bridge(model).denoise(PROMPTS, **RUN)
    assert run.canvases.equal(plain.canvases)
    assert run.open.equal(plain.open)


def texts(figure: Figure) -> str:
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return " | ".join(text.get_text() for legend in legends if legend is not None for text in legend.get_texts())


@pytest.mark.parametrize(("family", "word"), [("uniform_qwen", "open"), ("llada", "masked")])
def test_figures_and_tables_say_open_where_there_is_no_mask_token(family: str, word: str, tmp_path: Path) -> None:
    net, open_ = tiny(family), family == "uniform_qwen"
    settings = RUN if open_ else {"gen_length": 8, "steps": 4, "block_length": 4}
    reducers = [dl.ReceivedAttention(queries=CLASSES, min_viewers=1), dl.ValueNorm(), RegionMass()]
    found = dl.record(net, PROMPTS, [*reducers, AttentionPattern()], **settings)
    received, legend = dl.received_of(found), f"{word} (not deco" if word == "masked" else "open (not decided yet)"
    assert legend in texts(viz.incoming_attention(received, layer=1, head=1))
    assert legend in texts(viz.sink_positions(received, layer=1, head=1))
    assert legend in texts(viz.attention_maps(net, found.run, steps=[1], layer=1, head=0))
    pair = "open queries | decided queries" if open_ else "masked queries | unmasked queries"
    assert pair in texts(viz.region_mass(found, queries=("open", "decided")))
    lens = dl.logit_lens(net, found.run)
    assert ("position of the answer" if open_ else "masked position") in texts(viz.lens_table(lens, step=1))
    for view in (viz.emerging_text(found.run), viz.received_tokens(received, layer=1, head=1)):
        assert f"▢ is {word}" in " ".join(view.sentences)
    paths = dl.trajectories(dl.find_sinks(received, dl.AboveMean(1.2)))
    assert word in set(sinks.position_enrichment(paths)["class"])
    assert ("open" if open_ else "mask") in set(sinks.token_enrichment(paths)["class"])
    page = viz.report(found, tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(rf'"open": ?"{word}"', page)


def test_the_lens_covers_what_the_loss_covers(model: Any) -> None:
    run = dl.denoise(model, PROMPTS, **RUN)
    lens = dl.logit_lens(model, run, steps=[3])
    answer = lens.predicts >= run.prompt_length
    assert lens.predicted.equal(answer)
    assert (answer & ~lens.masked).any()
    logits = forward64(model, run.canvases[3, :1])["logits"][0].softmax(-1)
    for entry in (lens.batch == 0).nonzero().flatten().tolist()[-3:]:
        best = logits[lens.position[entry]].max()
        assert float(lens.top_probabilities[entry, -1, 0]) == pytest.approx(float(best), rel=1e-4)


def test_a_tuned_lens_is_trained_on_random_tokens(model: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 " * 20)
    lens = probes.train_tuned_lens(model, tmp_path / "text.txt", steps=2, length=12)
    assert lens.layers == (0,)


def test_sentences_where_a_mask_token_is_needed(model: Any) -> None:
    for method in ("mc", "chain_rule", "greedy_completion"):
        with pytest.raises(ValueError, match="is a model of uniform noise: its open positions hold random tokens"):
            dl.log_likelihood(model, "w3", "w4", method)
    with pytest.raises(ValueError, match="has no setting 'cfg_scale'"):
        dl.denoise(model, "w3", cfg_scale=1.0)


def test_stored_files_keep_their_names(recording: dl.Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "rec")
    stored = dl.Recording.load(tmp_path / "rec")
    assert "received_masked" in stored.specs
    assert stored.run.open.equal(recording.run.open)
    assert stored.run.uniform_noise
    assert json.loads(json.dumps(list(stored.specs))) == list(recording.specs)


def test_facts_take_both_names() -> None:
    valid, opened = torch.ones(1, 6, dtype=torch.bool), torch.tensor([[False, False, True, False, True, True]])
    facts = CanvasFacts(valid, opened, answer=torch.tensor([[False, False, True, True, True, True]]), block=valid)
    assert facts.queries("open").equal(opened)
    assert facts.queries("decided").equal(~opened)
    assert facts.expected("open").equal(torch.full((1, 6), 3 / 6))
