"""Sinks of a part of a recording keep the numbers of its steps in the run and of its heads in the model."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens import AboveMean, KeyNorm, ReceivedAttention, TopK, find_sinks, received_of, record
from dlm_lens.cli.app import app
from dlm_lens.hooks import at_steps, mask_sinks
from dlm_lens.recording import Recording
from dlm_lens.sinks import Received, key_statistic_of, sink_profile, trajectories
from dlm_lens.testing import tiny
from dlm_lens.viz import incoming_attention

STEPS, HEADS = [1, 3], [2, 0]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(tiny("llada"), [[1, 2, 3], [4, 5, 6]], steps=4, gen_length=8)


@pytest.fixture(scope="module")
def part(recording: Recording) -> Recording:
    return recording.select(step=STEPS, head=HEADS)


def chosen(table: pd.DataFrame, **values: list[int]) -> pd.DataFrame:
    """The lines of a whole recording's table with these values, in the order of a part's."""
    for name, kept in values.items():
        table = table[table[name].isin(kept)]
    return table


def test_a_table_of_sinks(recording: Recording, part: Recording) -> None:
    rule = TopK(2)
    whole, found = (find_sinks(each, rule).table(sort="place") for each in (recording, part))
    place = ["step", "batch", "layer", "head", "position"]
    wanted = chosen(whole, step=STEPS, head=HEADS).sort_values(place).reset_index(drop=True)
    pd.testing.assert_frame_equal(found.sort_values(place).reset_index(drop=True), wanted)
    assert len(wanted)


def test_tables_of_trajectories(recording: Recording, part: Recording) -> None:
    steps = recording.select(step=STEPS)
    whole, some = (trajectories(received_of(each), TopK(1)) for each in (steps, part))
    table, lives = some.table(), chosen(whole.table(), head=HEADS)
    assert set(table["first_step"]) | set(table["last_step"]) | set(table["peak_step"]) == set(STEPS)
    place = ["batch", "layer", "head", "position", "first_step"]
    columns = [*place, "last_step", "peak_step", "peak"]
    pd.testing.assert_frame_equal(
        table.sort_values(place)[columns].reset_index(drop=True),
        lives.sort_values(place)[columns].reset_index(drop=True),
    )
    assert set(some.switches()["step"]) <= {STEPS[1]}
    assert set(some.summary("head")["head"]) == set(HEADS)


@pytest.mark.parametrize("name", ["position_enrichment", "frontier_alignment"])
def test_tables_of_analyses_name_the_models_heads(name: str, recording: Recording, part: Recording) -> None:
    steps, rule = recording.select(step=STEPS), TopK(1)
    whole, some = (getattr(dl.sinks, name)(trajectories(received_of(each), rule), "head") for each in (steps, part))
    keys = [column for column in ("layer", "head", "class", "reference") if column in whole]
    found = some.sort_values(keys).reset_index(drop=True)
    pd.testing.assert_frame_equal(found, chosen(whole, head=HEADS).sort_values(keys).reset_index(drop=True))
    assert set(found["head"]) == set(HEADS)


def test_comparisons_of_query_classes_name_the_models_heads() -> None:
    reducer = ReceivedAttention(("masked", "unmasked"), min_viewers=1)
    recording = record(tiny("llada"), [[1, 2, 3], [4, 5, 6]], [reducer], steps=4, gen_length=8)
    tables = []
    for each in (recording, recording.select(head=HEADS)):
        classes = [received_of(each, queries) for queries in ("masked", "unmasked")]
        tables.append(dl.sinks.compare_query_classes(*classes, TopK(1)))
    whole, some = (table.sort_values(["layer", "head"]).reset_index(drop=True) for table in tables)
    pd.testing.assert_frame_equal(some, chosen(whole, head=HEADS).reset_index(drop=True))


def test_commands_take_and_name_the_models_heads(part: Recording, tmp_path: Path) -> None:
    part.save(tmp_path / "part")
    path, runner = str(tmp_path / "part"), CliRunner()

    def table(*arguments: str) -> pd.DataFrame:
        done = runner.invoke(app, [*arguments, path, "--detector", "top-k:1"])
        assert done.exit_code == 0, done.exception
        return pd.DataFrame(json.loads(done.stdout)["sinks" if arguments[0] == "sinks" else "lives"])

    for command in (["sinks", "--json", "--top", "999"], ["paths", "--json"]):
        whole = table(*command)
        assert set(whole["head"]) == set(HEADS)
        for head in HEADS:
            some = table(*command, "--head", str(head))
            columns = ["layer", "head", "position", "batch"]
            wanted = whole[whole["head"] == head][columns].sort_values(columns).reset_index(drop=True)
            pd.testing.assert_frame_equal(some[columns].sort_values(columns).reset_index(drop=True), wanted)
        with pytest.raises(ValueError, match="--head 1: the recording has heads 2, 0"):
            raise runner.invoke(app, [*command, path, "--head", "1"]).exception


def test_figures_and_profiles(recording: Recording, part: Recording) -> None:
    data = [
        incoming_attention(each, layer=1, head=2, steps=STEPS).axes[0].collections for each in (recording, part)
    ]
    first, second = (torch.as_tensor(one[0].get_array()).float() for one in data)
    torch.testing.assert_close(first, second, equal_nan=True)
    with pytest.raises(ValueError, match="head 1 is not among the heads 2, 0"):
        incoming_attention(part, layer=1, head=1)
    assert sink_profile(received_of(part)).heads == (2, 0)


@pytest.mark.parametrize("as_sinks", [True, False])
def test_a_hook_reads_the_sinks_of_the_same_step(recording: Recording, as_sinks: bool) -> None:
    model, settings = tiny("llada"), {"steps": 4, "gen_length": 8}
    received = received_of(recording)
    some = received_of(recording.select(step=STEPS))

    def hook(source: Received) -> object:
        if as_sinks:
            return mask_sinks(source=find_sinks(source, TopK(1)))
        return mask_sinks(TopK(1), source=source)

    runs = [
        dl.record(model, [[1, 2, 3], [4, 5, 6]], hooks=[at_steps(hook(source), STEPS)], **settings)
        for source in (received, some)
    ]
    torch.testing.assert_close(runs[0].received, runs[1].received, equal_nan=True, rtol=0, atol=0)
    assert not torch.equal(runs[0].received.nan_to_num(), recording.received.nan_to_num())
    with pytest.raises(ValueError, match="source has the steps 1, 3 and the run comes to step 0; limit the hook"):
        dl.denoise(model, [[1, 2, 3], [4, 5, 6]], hooks=[hook(some)], **settings)


def test_the_key_norms_of_some_heads_are_those_of_their_key_heads() -> None:
    whole = record(tiny("dream"), [[1, 2, 3], [4, 5, 6]], [KeyNorm(), ReceivedAttention()], steps=2, gen_length=4)
    part = whole.select(head=[3, 0])
    assert whole.key_norm.shape[3] == 2  # four query heads, two to a key head
    norms = key_statistic_of(part, "key norm").values
    assert norms.shape[3] == 2
    for place, head in enumerate((3, 0)):
        assert torch.equal(norms[:, :, :, place], whole.key_norm[:, :, :, head // 2])
    found, every = (find_sinks(each, "low-key-norm:0.95").is_sink for each in (part, whole))
    assert bool(every.any())
    assert torch.equal(found, every[:, :, :, [3, 0]])


def made_of_rows(model: object, recording: Recording) -> dict[str, pd.DataFrame]:
    """Tables with a column of rows; sinks, paths and probes."""
    rule, received = AboveMean(0.1), received_of(recording)
    paths = trajectories(received, rule)
    plain = dl.probes.replay(model, recording.run, [mask_sinks(rule)])
    return {
        "sinks": find_sinks(received, rule).table(sort="place"),
        "strongest": find_sinks(received.at_level("layer"), rule, level="layer").table(top=10**6, sort="place"),
        "lives": paths.table(),
        "patterns": paths.summary("pattern"),
        "switches": paths.switches(),
        "enrichment": dl.sinks.position_enrichment(paths, "pattern"),
        "replay": plain.table(),
        "gained": plain.gained(None),
        "lens": dl.logit_lens(model, recording.run).table(),
        "order": dl.probes.decision_order(recording.run).table(),
    }


def test_tables_have_the_row_numbers_of_the_whole_recording(tmp_path: Path) -> None:
    model = tiny("llada")
    whole = record(model, [[1, 2, 3], [4, 5], [6, 7, 8]], steps=4, gen_length=8)
    part = whole.select(batch=[2, 1])
    wanted = made_of_rows(model, whole)
    for some in (part, Recording.load(part.save(tmp_path / "part"))):
        for name, found in made_of_rows(model, some).items():
            assert set(found["batch"]) == {1, 2}, name
            # Without the number of a trajectory, which counts over the rows at hand.
            mine, theirs = (table.drop(columns="trajectory", errors="ignore") for table in (found, wanted[name]))
            theirs = theirs[theirs["batch"] > 0]
            places = [one for one in mine if one in ("batch", "step", "layer", "head", "class", "first_step")]
            places += [one for one in mine if one in ("position", "to_position", "predicts")]
            mine, theirs = (one.sort_values(places, kind="stable", ignore_index=True) for one in (mine, theirs))
            # Equal passes, whose rows have others beside them.
            pd.testing.assert_frame_equal(mine, theirs, rtol=1e-4, atol=1e-5)


def test_parts_and_figures_of_received_attention_have_the_row_numbers() -> None:
    whole = record(tiny("llada"), [[1, 2, 3], [4, 5], [6, 7, 8]], steps=2, gen_length=8)
    received, rule = received_of(whole.select(batch=[2, 1])), TopK(1)
    assert received_of(whole).rows == ()
    assert received_of(whole).part(rows=slice(1, 3)).rows == (1, 2)
    assert received.part(rows=slice(1, 2)).at_level("layer").first_steps(1).rows == (1,)
    sources = [received, find_sinks(received, rule), trajectories(received, rule)]
    assert [one.row_numbers for one in sources] == [(2, 1)] * 3
    rules = [rule, None, None]
    figures = [
        dl.viz.sink_positions(one, by, layer=0, head=0, row=1) for one, by in zip(sources, rules, strict=True)
    ]
    for figure in [incoming_attention(received, layer=0, head=0, row=1), *figures]:
        assert "(row 1)" in figure.axes[0].get_title(loc="left").replace("\n", " ")
    with pytest.raises(ValueError, match=r"Received\.values has shape .* batch=1"):
        replace(received, rows=(1,))


def test_trials_of_some_rows_have_the_intervals_of_their_prompts() -> None:
    model = tiny("llada")
    whole = record(model, [[1, 2, 3], [4, 5, 6], [7, 8, 9], [4, 5, 6]], steps=3, gen_length=6, seed=[0, 1, 2, 3])
    part = whole.select(batch=[3, 2, 1])
    found = dl.sinks.position_or_token(model, part.run, TopK(1), min_viewers=1)
    assert set(found.trials["batch"]) == {1, 2, 3}
    line = found.summary().iloc[0]
    assert (line["sequences"], line["prompts"]) == (3, 2)
