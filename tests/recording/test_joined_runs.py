"""A recording of several batches has the texts, steps and sinks of every row alone, also where rows end early."""

from typing import Any

import pandas as pd
import pytest
import torch

import dlm_lens as dl
from dlm_lens.hooks import at_steps, hooks_of_run, mask_positions, mask_top_sinks, steer
from dlm_lens.probes import pattern_stability
from dlm_lens.recording import ReceivedAttention, Recording, ValueNorm, record, record_runs, rerun
from dlm_lens.sampling import StoredRun
from dlm_lens.sinks import AboveMean, find_sinks, received_of, trajectories
from dlm_lens.sinks.analysis.enrichment import position_enrichment
from dlm_lens.sinks.analysis.frontiers import frontier_alignment
from dlm_lens.testing import tiny

PROBLEMS = [
    "tom has 5 apples . tom buys 4 more . how many apples ? :",
    "bob has 3 cups . bob loses 1 . how many ? :",
    "how many ? :",
]
IDS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 20, 7], [9, 9]]
RULE = AboveMean(0.5)
REDUCERS = [ReceivedAttention(min_viewers=2)]

FAMILIES = ("toy-ar", "llada2", "nemotron_labs_diffusion", "sdlm", "i_dlm", "diffusion_gemma", "dream")
"""Rows of all but the last one take different numbers of steps."""


def runs_of(name: str) -> tuple[Any, list[Any], dict[str, int]]:
    if name == "toy-ar":
        return dl.load(name), PROBLEMS, {"gen_length": 16}
    few = {"sampler_defaults": {"steps_per_block": 8}} if name == "diffusion_gemma" else {}
    return tiny(name, **few), IDS, {"gen_length": 12}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_several_batches_are_those_of_each_alone(family: str, tmp_path: Any) -> None:
    model, prompts, settings = runs_of(family)
    record(model, prompts, REDUCERS, batch_size=1, to=tmp_path / "joined", **settings)
    joined, steps = Recording.load(tmp_path / "joined"), []
    for row, prompt in enumerate(prompts):
        alone, part = record(model, [prompt], REDUCERS, **settings), joined.select(batch=[row])
        steps.append(len(alone.steps))
        assert joined.run.answers[row] == part.run.answers[0] == alone.run.answers[0]
        assert joined.run.texts[row] == part.run.texts[0] == alone.run.texts[0]
        one, other = (trajectories(received_of(each), RULE) for each in (part, alone))
        for table in (
            lambda paths: paths.table(),
            position_enrichment,
            frontier_alignment,
        ):
            columns = [name for name in table(other) if name not in ("batch", "trajectory")]
            pd.testing.assert_frame_equal(table(one)[columns], table(other)[columns], rtol=1e-4, check_dtype=False)
        assert int(find_sinks(part, RULE).is_sink.sum()) == int(find_sinks(alone, RULE).is_sink.sum())
        assert torch.equal(part.run.tokens[part.run.attention_mask], alone.run.tokens[alone.run.attention_mask])
    assert len({*steps}) > (family != "dream")


def test_pairs_of_steps_end_with_the_row() -> None:
    model, prompts, settings = runs_of("llada2")
    joined = record(model, prompts, REDUCERS, batch_size=1, **settings)
    alone, part = record(model, prompts[:1], REDUCERS, **settings), joined.select(batch=[0])
    assert len(alone.steps) < len(part.steps)
    one, other = (pattern_stability(model, each.run, RULE, reference=1) for each in (part, alone))
    pd.testing.assert_frame_equal(one.by_change(), other.by_change(), rtol=1e-4)
    pd.testing.assert_frame_equal(one.table(), other.table(), rtol=1e-4)
    pairs = len(alone.steps) - 1
    assert int(sum(kind.sum() for kind in one.changes.values())) == pairs * one.cosine[0, 0].numel()


def test_batches_that_a_hook_has_split_are_read_apart_where_they_do_not_join(tmp_path: Any) -> None:
    model = tiny("sdar")
    given: dict[str, Any] = {"hooks": [mask_positions(1)], "gen_length": 8, "to": tmp_path / "apart"}
    one = tmp_path / "apart" / "rows-00000-00000"
    remedy = f"apart holds every one of them: read them with dlm_lens.RecordingSet, or one .* such as {one}$"
    for read in (lambda: record(model, IDS, REDUCERS, **given), lambda: Recording.load(tmp_path / "apart")):
        with pytest.raises(ValueError, match=f"at step 1 one decodes block 1 and another block 0, .*{remedy}"):
            read()
    assert [one.rows for one in dl.RecordingSet(tmp_path / "apart")] == [(0,), (1,), (2,)]
    assert Recording.load(one).rows == (0,)


def test_batches_that_do_not_join_are_refused_before_the_next_one_runs(monkeypatch: Any) -> None:
    made: list[int] = []
    run = record_runs.denoise
    monkeypatch.setattr(record_runs, "denoise", lambda *args, **given: made.append(1) or run(*args, **given))
    with pytest.raises(ValueError, match=r"record these prompts in one batch \(batch_size=None; .* or with to="):
        record(tiny("sdar"), IDS, REDUCERS, batch_size=1, gen_length=8)
    assert len(made) == 2, "the second of three batches has other steps than the first"


def test_padding_that_joining_adds_is_seen_by_no_network_that_sees_padding(tmp_path: Any) -> None:
    """MMaDA's quirk is about the padding of a batch, which these rows had none of."""
    model, reducers = tiny("mmada"), [ReceivedAttention(("all", "masked"), min_viewers=1), ValueNorm()]
    given: dict[str, Any] = {"gen_length": 8, "block_length": 4, "cfg_scale": 1.5, "reference_quirks": True}
    record(model, IDS, reducers, batch_size=1, to=tmp_path / "joined", seed=3, **given)
    joined = Recording.load(tmp_path / "joined")
    assert joined.unpadded
    again = rerun(model, joined.run, reducers)
    for row, prompt in enumerate(IDS):
        alone, pad = record(model, [prompt], reducers, seed=3, **given), len(IDS[0]) - len(prompt)
        part = rerun(model, joined.run, reducers, rows=[row])
        stored = StoredRun(model, joined.run), StoredRun(model, alone.run)
        states = [each.states(0) for each in stored]
        width = states[1].shape[1]
        torch.testing.assert_close(states[0][:, row * width : (row + 1) * width], states[1], rtol=1e-4, atol=1e-5)
        for found, place in ((joined, row), (again, row), (part, 0), (joined.select(batch=[row]), 0)):
            pairs = [(getattr(found, name)[:, place], getattr(alone, name)[:, 0]) for name in alone.specs]
            pairs += [(found.expected(name)[:, place], alone.expected(name)[:, 0]) for name in ("all", "masked")]
            pairs.append((found.received_sums()[:, place], alone.received_sums()[:, 0]))
            for one, other in pairs:
                torch.testing.assert_close(one[..., pad:], other, rtol=1e-4, atol=1e-5, equal_nan=True)


HOLES = [
    "w1 w2 [MASK] w4 w5 [MASK] w7 [MASK] w3 [MASK]",
    "w7 [MASK] w9 w2",
    "w5 w5 w20 [MASK] w1 [MASK] w3 w3",
    "w6 [MASK] w9 w2 w2",
]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("family", ["sedd", "mdlm, given the noise", "llada"])
def test_prompts_with_other_numbers_of_masks_keep_their_plans(family: str, order: int, tmp_path: Any) -> None:
    name, _, conditioned = family.partition(", ")
    model = tiny(name, time_conditioning=True) if conditioned else tiny(name)
    prompts, reducers = HOLES[::order], [*REDUCERS, ValueNorm()]
    given: dict[str, Any] = {"gen_length": 0, "seed": [7, 8, 9, 10]}
    for hooks in ([], [at_steps(mask_top_sinks(1), [-1])]):
        path = tmp_path / str(len(hooks))
        record(model, prompts, reducers, hooks=hooks, batch_size=1, to=path, **given)
        joined = Recording.load(path)
        assert joined.settings["steps"] == tuple([4, 1, 2, 1][::order])
        assert joined.run.planned == max(joined.run.rows_planned)
        again = rerun(model, joined.run, reducers, hooks=hooks_of_run(joined.run))
        some = rerun(model, joined.run, reducers, hooks=hooks, rows=[1, 2], steps=[0])
        for array in joined.specs:
            for found, wanted in ((again, joined), (some, joined.select(batch=[1, 2], step=[0]))):
                torch.testing.assert_close(
                    getattr(found, array), getattr(wanted, array), rtol=1e-4, atol=1e-5, equal_nan=True
                )
        assert again.run.rows_planned == joined.run.rows_planned
        for row, prompt in enumerate(prompts):
            alone = record(model, [prompt], reducers, hooks=hooks, **{**given, "seed": 7 + row})
            steps, pad = alone.run.steps, int(joined.run.padding[row])
            own = joined.received[:steps, row, ..., pad:]
            torch.testing.assert_close(own, alone.received[:, 0], rtol=1e-4, atol=1e-5, equal_nan=True)
            part = joined.select(batch=[row]).run
            assert (part.planned, part.settings["steps"]) == (alone.run.planned, alone.settings["steps"])
            assert part.rows_planned is None
        whole = Recording.load(joined.save(tmp_path / f"whole-{len(hooks)}"))
        assert whole.run.rows_planned == joined.run.rows_planned
        with pytest.raises(ValueError, match=r"planned with \[.*\] steps .*; take rows of one plan"):
            StoredRun(model, whole.run)
        StoredRun(model, whole.select(batch=[1]).run)


@pytest.mark.parametrize("order", [1, -1])
def test_prompts_with_other_numbers_of_blocks_keep_their_plans(order: int, tmp_path: Any) -> None:
    model, prompts = tiny("sdar"), [[22, 36, 15, 0], [11], [52, 55, 29, 20, 11]][::order]
    given: dict[str, Any] = {"gen_length": 8, "steps_per_block": 2, "remasking": "sequential", "seed": 1}
    for hooks in ([at_steps(steer(torch.ones(32)), -3)], [mask_top_sinks(1)]):
        joined = record(model, prompts, REDUCERS, hooks=hooks, batch_size=1, **given)
        alone = [record(model, [prompt], REDUCERS, hooks=hooks, **given) for prompt in prompts]
        assert joined.run.rows_planned == tuple(one.run.planned for one in alone) == (4, 6, 6)[::order]
        whole = Recording.load(joined.save(tmp_path / f"{len(list(tmp_path.iterdir()))}"))
        for run in (joined.run, whole.run):
            again = rerun(model, run, REDUCERS, hooks=hooks)
            torch.testing.assert_close(again.received, joined.received, rtol=1e-4, atol=1e-5, equal_nan=True)
        for row, one in enumerate(alone):
            part = joined.select(batch=[row]).run
            assert (part.planned, part.rows_planned, part.settings["steps"]) == (one.run.planned, None, None)
    StoredRun(model, joined.run, hooks=hooks)
    with pytest.raises(ValueError, match=r"planned with \[4, 6\] steps .*; take rows of one plan"):
        StoredRun(model, joined.run, hooks=[at_steps(mask_top_sinks(1), -1)])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_batch_that_never_used_its_cache_joins_one_that_did(order: tuple[int, int], tmp_path: Any) -> None:
    model = tiny("llada")
    model.get_output_embeddings().weight.data.mul_(8.0)
    given = ([54, 24, 48, 56, 26, 2], [34, 45, 51, 38, 57, 9])
    prompts, settings = [given[row] for row in order], {"gen_length": 4, "block_length": 4, "steps": 4}
    cached: dict[str, Any] = {**settings, "cache": "dual", "threshold": 0.4}
    alone = [dl.denoise(model, prompt, **cached).computed for prompt in given]
    assert alone == [(), (None, (6, 10))]
    both = record(model, prompts, REDUCERS, **cached)
    apart = record(model, prompts, REDUCERS, batch_size=1, to=tmp_path / "apart", **cached)
    for joined in (apart, Recording.load(tmp_path / "apart")):
        assert joined.run.computed == both.run.computed == (None, (6, 10))
        assert joined.run.row_steps.equal(both.run.row_steps)
        assert joined.run.canvases.equal(both.run.canvases)
        torch.testing.assert_close(joined.received, both.received, rtol=1e-4, atol=1e-5, equal_nan=True)
        again = rerun(model, joined.run, REDUCERS)
        torch.testing.assert_close(again.received, both.received, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("family", "first", "second", "why"),
    [
        ("wedlm", {"window_length": 4}, {"window_length": 8}, "the setting window_length: 4 and 8"),
        ("llada", {"cfg_scale": 0.0}, {"cfg_scale": 2.0, "seed": 5}, "the setting cfg_scale: 0.0 and 2.0"),
        ("llada", {}, {"temperature": 0.7}, "the setting temperature: 0.0 and 0.7"),
        (
            "llada",
            {"gen_length": 4, "steps": 4},
            {"steps": 4, "block_length": 4},
            "the setting gen_length: 4 and 8",
        ),
    ],
)
def test_recordings_of_other_settings_are_not_joined(
    family: str, first: dict[str, Any], second: dict[str, Any], why: str, tmp_path: Any
) -> None:
    model = tiny(family)
    for name, given in (("a", first), ("b", second)):
        record(model, [IDS[name == "b"]], REDUCERS, **{"gen_length": 8, **given}).save(tmp_path / name)
    with pytest.raises(ValueError, match=f"recordings differ in {why}; .* dlm_lens.RecordingSet"):
        Recording.load(tmp_path)
    assert [len(one.rows) for one in dl.RecordingSet(tmp_path)] == [1, 1]


def test_recordings_that_differ_in_seeds_alone_are_joined(tmp_path: Any) -> None:
    model = tiny("llada")
    for seed in (3, 5):
        record(model, IDS[:1], REDUCERS, gen_length=8, temperature=0.7, seed=seed).save(tmp_path / str(seed))
    assert Recording.load(tmp_path).settings["seeds"] == (3, 5)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (([0, 1], [5, 6]), r"\(0, 1\) of the run, .* and \(5, 6\) of the run"),
        (([0, 1], None), r"\(0, 1\) of the run, .* and all of the run"),
    ],
)
def test_parts_of_other_steps_are_not_joined(steps: tuple[Any, Any], why: str, tmp_path: Any) -> None:
    whole = record(tiny("llada"), IDS[:2], REDUCERS, gen_length=8)
    for row, chosen in enumerate(steps):
        whole.select(step=chosen, batch=[row]).save(tmp_path / str(row))
    with pytest.raises(ValueError, match=f"recordings differ in steps: {why}"):
        Recording.load(tmp_path)
    for row in (0, 1):
        whole.select(step=[5, 6], batch=[row]).save(tmp_path / "same" / str(row))
    joined = Recording.load(tmp_path / "same")
    assert joined.run.step_numbers == (5, 6)
    assert joined.received.nan_to_num().equal(whole.select(step=[5, 6]).received.nan_to_num())


def test_parts_at_whose_end_a_row_waits_for_others_keep_its_steps(tmp_path: Any) -> None:
    model = tiny("sdar", eos_token_id=list(range(20, 32)))
    prompts = [[5, 9, 13, 2, 7, 21, 30, 31], [3, 8, 1, 4, 4, 11], [6, 6, 2, 9, 12, 30, 7, 4, 19, 22]]
    given = {"block_length": 4, "steps_per_block": 4, "threshold": 0.05, "temperature": 1.0}
    whole = record(model, prompts, REDUCERS, gen_length=16, seed=[2, 3, 4], **given)
    run, rows = whole.run, [0, 2]
    assert not bool((run.unmasked | run.revised)[2, 2].any()), "the row decides nothing at the part's last step"
    assert 3 < int(run.row_steps[2]) < run.steps, "and is over before others"
    for row in rows:
        whole.select(step=[0, 1, 2], batch=[row]).save(tmp_path / str(row))
    joined, part = Recording.load(tmp_path).run, whole.select(step=[0, 1, 2], batch=rows).run
    assert joined.row_steps.tolist() == part.row_steps.tolist() == [3, 3]
    assert joined.running.equal(part.running)


def test_ar_rows_of_other_lengths_are_joined_and_keep_their_texts(tmp_path: Any) -> None:
    model = tiny("causal")
    runs = []
    for row, length in enumerate((3, 7)):
        one = record(model, [IDS[row]], REDUCERS, gen_length=length, seed=row)
        one.save(tmp_path / str(row))
        runs.append(one.run)
    joined = Recording.load(tmp_path)
    assert joined.run.answers == [run.answers[0] for run in runs]
    assert joined.run.row_steps.tolist() == [run.steps for run in runs]
