"""`dlm-lens paths`, `sinks --layer --head` and `record --hooks` print and record what the library does."""

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.hooks import parse_hooks
from tests.sampling.test_dreamon import GREEDY, resizing
from tests.sampling.test_dreamon import PROMPTS as GAPS

PROMPTS = [
    "leo has 26 cups . leo loses 6 . how many cups now ? :",
    "mia has 14 eggs . how many eggs ? :",
]
RUN = {"gen_length": 15, "block_length": 5, "steps": 15, "seed": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    place = tmp_path_factory.mktemp("paths") / "rec"
    return str(place), dl.record(dl.load("toy"), PROMPTS, to=place, **RUN)


def output(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_paths_are_those_of_the_library(saved: tuple[str, Any]) -> None:
    path, rec = saved
    found = json.loads(output("paths", path, "--detector", "above-mean:2", "--by", "pattern", "--json"))
    paths = dl.trajectories(rec, dl.AboveMean(2.0))
    assert found["rule"] == paths.rule
    lifetimes, summary = paths.table(), paths.summary(by="pattern")
    assert len(found["lives"]) == len(lifetimes) > 20
    for name in ("batch", "layer", "head", "position", "token", "first_step", "last_step", "trajectory"):
        assert [line[name] for line in found["lives"]] == lifetimes[name].tolist(), name
    assert [line["peak"] for line in found["lives"]] == pytest.approx(lifetimes["peak"].tolist())
    moved = lifetimes[lifetimes["came_from"].notna()]
    assert [line["moved_by"] for line in found["moves"]] == moved["moved_by"].tolist()
    assert len(moved) > 0
    assert [line["kind"] for line in found["summary"]] == summary["kind"].tolist()


def test_switches_are_changes_of_the_largest_sink_between_two_that_stay(saved: tuple[str, Any]) -> None:
    path, rec = saved
    rule = dl.AboveMean(1.0)
    found = pd.read_csv(
        io.StringIO(output("paths", path, "--detector", "above-mean:1", "--hysteresis", "1", "--csv", "switches"))
    )
    # By hand, from the scores: who is on, and who is largest.
    scores = dl.received_of(rec).values
    on = rule.detect(scores)
    largest = scores.masked_fill(~on, -torch.inf).nan_to_num(nan=-torch.inf).argmax(-1)
    wanted = []
    for row in range(2):
        for layer in range(4):
            for head in range(4):
                for step in range(1, len(scores)):
                    here = on[:, row, layer, head]
                    old, new = (int(largest[t, row, layer, head]) for t in (step - 1, step))
                    if old != new and all(bool(here[t, key]) for t in (step - 1, step) for key in (old, new)):
                        wanted.append([row, layer, head, step, old, new])
    assert len(wanted) > 10
    padding = rec.run.attention_mask.int().argmax(-1).tolist()
    columns = ["batch", "layer", "head", "step", "from_position", "to_position"]
    shown = [[r, i, j, step, a - padding[r], b - padding[r]] for r, i, j, step, a, b in wanted]
    assert found[columns].values.tolist() == shown
    assert found["moved_by"].tolist() == [b - a for *_, a, b in shown]
    word = rec.run.tokenizer.decode([int(rec.run.canvases[wanted[0][3], wanted[0][0], wanted[0][5]])])
    assert found["to_token"].astype(str)[0] == word


def test_a_row_a_layer_and_a_head_alone(saved: tuple[str, Any]) -> None:
    path, rec = saved
    whole = dl.trajectories(rec, dl.AboveMean(3.0)).table()
    part = whole[(whole["layer"] == 2) & (whole["head"] == 3) & (whole["batch"] == 0)]
    found = json.loads(output("paths", path, "--layer", "2", "--head", "3", "--row", "0", "--by", "all", "--json"))
    assert [line["position"] for line in found["lives"]] == part["position"].tolist()
    assert {(line["batch"], line["layer"], line["head"]) for line in found["lives"]} == {(0, 2, 3)}
    assert found["summary"][0]["patterns"] == 1
    assert found["summary"][0]["lives"] == len(part)
    assert (found["row"], found["layer"], found["head"]) == (0, 2, 3)
    for option, value in (("--layer", "9"), ("--head", "4"), ("--row", "2")):
        with pytest.raises(ValueError, match=f"{option} {value}: the recording has"):
            CliRunner().invoke(cli.app, ["paths", path, option, value], catch_exceptions=False)


def test_text_lists_the_first_ones_and_csv_all(saved: tuple[str, Any]) -> None:
    path, rec = saved
    count = len(dl.trajectories(rec, dl.AboveMean(3.0)).table())
    text = output("paths", path, "--top", "3")
    assert f"lives: 3 of {count}" in text
    for part in ("summary", "lives", "moves", "switches", "AboveMean(eps=3.0), off below 0.75"):
        assert part in text
    assert len(pd.read_csv(io.StringIO(output("paths", path, "--csv", "lives", "--top", "3")))) == count
    with pytest.raises(ValueError, match="give one of the two"):
        CliRunner().invoke(cli.app, ["paths", path, "--csv", "lives", "--json"], catch_exceptions=False)
    with pytest.raises(ValueError, match="reads hidden states"):
        CliRunner().invoke(cli.app, ["paths", path, "--detector", "low-key-norm"], catch_exceptions=False)


def test_tokens_are_followed_where_they_move(tmp_path: Path) -> None:
    rec = dl.record(
        resizing(seed=6), GAPS, [dl.ReceivedAttention(queries=("all", "masked"), min_viewers=1)], **GREEDY
    )
    rec.save(tmp_path / "rec")
    given = ("paths", str(tmp_path / "rec"), "--detector", "above-mean:1", "--json")
    found = {follow: json.loads(output(*given, "--follow", follow)) for follow in ("position", "token")}
    for follow, one in found.items():
        paths = dl.trajectories(rec, "above-mean:1", follow=follow)  # type: ignore[arg-type]
        lifetimes = paths.table()
        assert one["rule"] == paths.rule
        assert ("tokens followed" in one["rule"]) == (follow == "token")
        assert [line["position"] for line in one["lives"]] == lifetimes["position"].tolist()
        assert ("canvas_position" in one["lives"][0]) == (follow == "position")  # rows are padded
        assert [line["lives"] for line in one["summary"]] == pytest.approx(paths.summary()["lives"].tolist())
    assert [line["position"] for line in found["token"]["lives"]] != [
        line["position"] for line in found["position"]["lives"]
    ]
    assert json.loads(output(*given)) == found["position"]
    masked = json.loads(output(*given, "--follow", "token", "--queries", "masked", "--row", "0"))
    assert masked["rule"].endswith("queries: masked; tokens followed where they move")
    assert {line["batch"] for line in masked["lives"]} == {0}


def test_sinks_of_one_layer_and_head(saved: tuple[str, Any]) -> None:
    path, rec = saved
    found = json.loads(output("sinks", path, "--layer", "2", "--head", "3", "--top", "100", "--json"))
    sinks = dl.find_sinks(rec, dl.AboveMean(3.0))
    here = sinks.is_sink[:, :, 2, 3]
    assert {(line["layer"], line["head"]) for line in found["sinks"]} == {(2, 3)}
    wanted = {(int(row), int(key)) for _, row, key in here.nonzero()}
    padding = rec.run.attention_mask.int().argmax(-1).tolist()
    assert {(line["batch"], line["position"] + padding[line["batch"]]) for line in found["sinks"]} == wanted
    (layer,) = found["layers"]
    assert (layer["layer"], layer["sinks"]) == (2, int(here.sum()))
    assert layer["sinks_per_pattern"] == pytest.approx(float(here.sum(-1).float().mean()))
    heads = json.loads(output("sinks", path, "--head", "3", "--json"))
    assert [line["sinks"] for line in heads["layers"]] == sinks.is_sink[:, :, :, 3].sum((0, 1, 3)).tolist()
    with pytest.raises(ValueError, match="--layer 4: the recording has layers 0, 1, 2, 3"):
        CliRunner().invoke(cli.app, ["sinks", path, "--layer", "4"], catch_exceptions=False)


@pytest.mark.long
def test_a_run_is_recorded_under_hooks(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    text = "at_layers(mask_positions(0), [1]), mask_top_sinks(1)"
    command = ["record", "toy", "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "rec")]
    command += ["--gen-length", "15", "--block-length", "5", "--hooks", text]
    assert "2 of 2 prompts recorded" in output(*command)
    found = dl.Recording.load(tmp_path / "rec")
    wanted = dl.record(dl.load("toy"), PROMPTS, hooks=list(parse_hooks(text)), **RUN)
    assert torch.equal(found.run.tokens, wanted.run.tokens)
    torch.testing.assert_close(found.received, wanted.received, equal_nan=True, rtol=1e-5, atol=1e-6)
    plain = dl.record(dl.load("toy"), PROMPTS, **RUN)
    assert not torch.equal(plain.received.nan_to_num(), wanted.received.nan_to_num())
    # Other hooks are another recording.
    with pytest.raises(ValueError, match="hooks"):
        CliRunner().invoke(cli.app, [*command[:-1], "mask_top_sinks(2)"], catch_exceptions=False)
