"""The commands `sinks`, `norms`, `lens`, `clock` and `insertion` print what the library finds."""

import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.cli.errors import as_command_line
from dlm_lens.cli.recordings import detector_of, load_recording
from dlm_lens.features import load_sae, save_sae
from dlm_lens.probes import (
    denoising_clock,
    insertion_loss,
    logit_lens,
    train_tuned_lens,
    untrained_twin,
    value_norms,
)
from dlm_lens.sampling.token_text import StoredTokenizer
from dlm_lens.testing import tiny
from tests.recording.test_features import autoencoder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Any, Any]:
    model, place = tiny("sink_qwen", num_sinks=1), tmp_path_factory.mktemp("saved")
    model.save_pretrained(place / "model")
    model.tokenizer.save_pretrained(place / "model")
    model = dl.load(place / "model")
    reducers = [dl.ReceivedAttention(("all", "masked")), dl.ValueNorm(), dl.KeyNorm()]
    rec = dl.record(model, [[5, 9, 14, 3], [7, 2]], reducers, steps=3, gen_length=9, to=place / "rec")
    return str(place / "rec"), str(place / "model"), model, rec


def printed(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_sinks_are_those_of_the_library(saved: Any) -> None:
    path, _, _, rec = saved
    found = printed("sinks", path, "--detector", "above-mean:1", "--top", "7")
    sinks = dl.find_sinks(rec, dl.AboveMean(1.0))
    assert found["rule"] == sinks.rule
    assert len(found["sinks"]) == 7
    assert [line["score"] for line in found["sinks"]] == pytest.approx(sinks.table(7).score.tolist(), rel=1e-6)
    assert [line["token"] for line in found["sinks"]] == sinks.table(7).token.tolist()
    assert [line["sinks"] for line in found["layers"]] == sinks.is_sink.sum((0, 1, 3, 4)).tolist()
    main = sinks.main()[:, :, 1]
    both = (main[1:] >= 0) & (main[:-1] >= 0)
    stays = (main[1:] == main[:-1])[both].float().mean()
    assert found["layers"][1]["main_sink_stays"] == pytest.approx(float(stays))
    masked = printed("sinks", path, "--detector", "top-k:1", "--queries", "masked", "--level", "layer")
    assert "queries: masked" in masked["rule"]
    assert "level: layer" in masked["rule"]
    assert "LowKeyNorm(below=0.9)" in printed("sinks", path, "--detector", "low-key-norm:0.9")["rule"]


def test_the_hooks_of_a_run_that_had_none_are_refused_before_a_model_is_loaded(saved: Any) -> None:
    sentence = "hooks=run takes the hooks of the recording's run, which had none; leave hooks= out"
    with pytest.raises(ValueError, match=sentence):
        CliRunner().invoke(cli.app, ["lens", saved[0], "--model", "none", "--hooks", "run"], catch_exceptions=False)
    wanted = "--hooks run takes the hooks of the recording's run, which had none; leave --hooks out"
    assert as_command_line(sentence, {"hooks": "--hooks"}) == wanted


def test_sinks_as_csv_are_the_tables_of_the_json(saved: Any) -> None:
    rule = ["sinks", saved[0], "--detector", "above-mean:1", "--top", "7"]
    found = printed(*rule)
    for table in ("layers", "sinks"):
        result = CliRunner().invoke(cli.app, [*rule, "--csv", table], catch_exceptions=False)
        assert result.exit_code == 0
        wanted, csv = pd.DataFrame(found[table]), pd.read_csv(io.StringIO(result.stdout))
        pd.testing.assert_frame_equal(csv, wanted, check_dtype=False, rtol=1e-15)
    for given, sentence in (
        (["--csv", "sink"], "--csv is 'sink'; did you mean sinks"),
        (["--csv", "sinks", "--json"], "--json and --csv: give one of the two"),
    ):
        with pytest.raises(ValueError, match=sentence):
            CliRunner().invoke(cli.app, [*rule, *given], catch_exceptions=False)


@pytest.mark.parametrize("command", ["sinks", "norms", "lens"])
def test_a_rule_of_hidden_states_takes_no_queries_and_no_other_level(saved: Any, command: str) -> None:
    path, *_ = saved
    rule = [command, path, "--detector", "low-key-norm:0.9"]
    for option, value, sentence in (
        ("--queries", "masked", r"queries=masked: LowKeyNorm\(below=0.9\) reads hidden states.*leave queries= out"),
        ("--level", "layer", r"level=layer: LowKeyNorm\(below=0.9\) finds the sinks of each head; leave level="),
    ):
        with pytest.raises(ValueError, match=sentence):
            CliRunner().invoke(cli.app, [*rule, option, value], catch_exceptions=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--level", "layer"), ("--level", "head"), ("--detector", "top-k:3"), ("--queries", "all")],
)
def test_norms_of_learned_sinks_take_no_rule_and_no_level(saved: Any, option: str, value: str) -> None:
    path, *_ = saved
    with pytest.raises(ValueError, match=f"leave out {option} {value}, or --learned"):
        CliRunner().invoke(cli.app, ["norms", path, "--learned", option, value], catch_exceptions=False)


def test_a_rule_that_a_picture_cannot_take_is_named_by_its_option(saved: Any) -> None:
    path, *_ = saved
    arguments = ["plot", "sink-strength", path, "--detector", "low-key-norm"]
    result = CliRunner().invoke(cli.app, arguments)
    sentence = as_command_line(str(result.exception), {"detector": "--detector"})
    assert sentence == (
        "this detector reads 'key norm', not attention; give --detector a rule of received attention, such as "
        "above-mean:3"
    )


def test_norms_are_those_of_the_library(saved: Any) -> None:
    path, _, _, rec = saved
    found = printed(
        "norms", path, "--detector", "above-mean:1", "--match", "masked", "--samples", "30", "--seed", "2"
    )
    norms = value_norms(rec, dl.find_sinks(rec, dl.AboveMean(1.0)), match="masked", samples=30, seed=2)
    assert [line["value"] for line in found["measures"]] == pytest.approx(norms.table().value.tolist(), rel=1e-6)
    assert found["layers"][0]["share"] == pytest.approx(norms.profile.share[0], rel=1e-6)
    learned = printed("norms", path, "--learned")
    assert learned["found"] == 3 * 2 * 2 * 4


def test_norms_and_the_lens_take_the_sinks_of_a_class_of_queries(saved: Any) -> None:
    path, _, model, rec = saved
    rule = ("--detector", "above-mean:1", "--queries", "masked")
    sinks = dl.find_sinks(dl.received_of(rec, "masked"), dl.AboveMean(1.0))
    assert not sinks.is_sink.equal(dl.find_sinks(rec, dl.AboveMean(1.0)).is_sink)
    found = printed("norms", path, *rule, "--samples", "30", "--seed", "2")
    norms = value_norms(rec, sinks, samples=30, seed=2)
    assert [line["value"] for line in found["measures"]] == pytest.approx(norms.table().value.tolist(), rel=1e-6)
    read = printed("lens", path, *rule)
    lens = logit_lens(model, rec.run, sinks, top=3)
    assert [line["entropy"] for line in read["layers"]] == pytest.approx(lens.summary().entropy.tolist(), rel=1e-6)
    assert found["rule"] == read["rule"] == sinks.rule


def test_the_lens_is_that_of_the_library(saved: Any, tmp_path: Path) -> None:
    path, name, model, rec = saved
    found = printed(
        "lens", path, "--detector", "above-mean:1", "--steps", "0,-1", "--hooks", "mask_sinks(above_mean(1))"
    )
    lens = logit_lens(model, rec.run, dl.find_sinks(rec, dl.AboveMean(1.0)), steps=[0, -1], top=3)
    assert [line["entropy"] for line in found["layers"]] == pytest.approx(lens.summary().entropy.tolist(), rel=1e-6)
    assert found["entries"][0]["top"] == lens.table(1).top[0]
    assert found["entries"][0]["change"] > 0
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 50}" for i in range(60)))
    tuned = train_tuned_lens(model, text, steps=2, length=20).save(tmp_path / "lens.safetensors")
    found = printed("lens", path, "--model", name, "--positions", "3,-1", "--tuned", str(tuned), "--lines", "4")
    assert found["lens"].startswith("TunedLens")
    assert {(line["position"], line["canvas_position"]) for line in found["entries"]} == {
        (position, position + padding)
        for padding in rec.run.padding.tolist()
        for position in (3, rec.run.tokens.shape[1] - 1 - padding)
    }
    assert len(found["entries"]) == 4
    found = printed("lens", path, "--model", name, "--positions", "masked", "--lines", "1000")
    masked = logit_lens(model, rec.run, "masked", top=3)
    assert len(found["entries"]) == len(masked.step) == int(rec.run.masked[:-1].sum())
    assert found["entries"][-1]["probability"] == pytest.approx(masked.table(1).probability.iloc[-1], rel=1e-6)


def test_the_clock_is_that_of_the_library(saved: Any) -> None:
    path, _, model, rec = saved
    arguments = ["--layers", "-1", "--positions", "open", "--target", "progress", "--shuffles", "2", "--untrained"]
    found = printed("clock", path, *arguments, "--seed", "3")
    settings: dict[str, Any] = {
        "layers": [-1], "positions": ["open"], "target": "progress", "shuffles": 2, "seed": 3,
    }  # fmt: skip
    for name, network in (("layers", model), ("untrained", untrained_twin(model, seed=3))):
        table = denoising_clock(network, rec.run, **settings).table()
        assert [line["r2"] for line in found[name]] == pytest.approx(table.r2.tolist(), rel=1e-6)
        assert [line["layer"] for line in found[name]] == table.layer.tolist()


def test_the_insertion_is_that_of_the_library(saved: Any, tmp_path: Path) -> None:
    path, _, model, rec = saved
    save_sae(autoencoder(model), tmp_path / "sae")
    arguments = ["--sae", str(tmp_path / "sae"), "--steps", "0,-1", "--places", "open", "--by-step"]
    found = printed("insertion", path, *arguments)
    loss = insertion_loss(model, rec.run, load_sae(tmp_path / "sae", model), steps=[0, -1], places=["open"])
    assert [line["added"] for line in found["insertions"]] == pytest.approx(loss.table().added.tolist(), rel=1e-6)
    assert [line["added"] for line in found["steps"]] == pytest.approx(loss.by_step().added.tolist(), rel=1e-6)


def test_text_lists_the_first_ones_and_json_and_csv_all(saved: Any) -> None:
    path, _, _, rec = saved
    sinks = dl.find_sinks(rec, dl.AboveMean(0.2))
    places = sinks.is_sink.any(0).sum().item()
    assert places > 20
    rule = [path, "--detector", "above-mean:0.2"]
    assert len(printed("sinks", *rule)["sinks"]) == places
    csv = CliRunner().invoke(cli.app, ["sinks", *rule, "--csv", "sinks"], catch_exceptions=False)
    assert len(pd.read_csv(io.StringIO(csv.stdout))) == places
    text = CliRunner().invoke(cli.app, ["sinks", *rule], catch_exceptions=False).stdout
    assert f"sinks: 20 of {places}, each at its strongest step" in text
    assert len(text.split("\nsinks\n")[1].splitlines()) == 21  # with the names of the columns
    entries = printed("lens", *rule)["entries"]
    shown = CliRunner().invoke(cli.app, ["lens", *rule], catch_exceptions=False).stdout
    assert len(entries) > 20
    assert f"entries: 20 of {len(entries)}, of layer {rec.layers[-1]}" in shown


@pytest.mark.parametrize(("command", "option"), [("sinks", "--top"), ("lens", "--lines")])
def test_a_list_that_is_not_wanted_is_not_said_to_be_empty(saved: Any, command: str, option: str) -> None:
    arguments = [command, saved[0], "--detector", "above-mean:1", option, "0"]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert "\nlayers\n" in result.stdout
    assert "(none)" not in result.stdout
    assert printed(*arguments)["sinks" if command == "sinks" else "entries"] == []


def test_what_cannot_work_is_a_sentence(saved: Any) -> None:
    path = saved[0]
    for arguments, sentence in (
        (["sinks", path, "--detector", "none"], "there are above-mean"),
        (["sinks", path, "--detector", "attention-share:2"], "must lie between 0 and 1"),
        (["sinks", path, "--detector", "attention-share:x"], "attention-share:x"),
        (["sinks", path + "/none"], "no recording"),
        (["lens", path, "--steps", "a"], "--steps takes whole numbers"),
        (["lens", path, "--positions", "sinks"], "--positions is 'sinks'; give whole numbers such as 3,-1"),
        (
            ["lens", path, "--detector", "above-mean:1000"],
            r"there is no sink by AboveMean\(eps=1000.0\); scale: relative",
        ),
        (["clock", path, "--target", "steps"], "--target is 'steps'"),
        (["clock", path, "--positions", "open,closed"], "--positions is 'closed'"),
        (["insertion", path, "--sae", "none"], "none is no directory"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


def test_words_of_a_recording_stand_for_its_tokenizer(saved: Any) -> None:
    rec = load_recording(Path(saved[0]))
    assert rec.run.tokenizer.decode([5, 9]) == "w5 w9"
    assert StoredTokenizer({1: "a"}, between=" ").decode([1, 2]) == "a <2>"
    assert detector_of("top-k") == dl.TopK(5)
    assert detector_of("above-mean:2") == dl.AboveMean(2.0)


def test_a_lens_of_another_model_is_warned_of(saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, model, _, _ = saved
    printed("lens", path, "--steps", "0", "--positions", "3")
    assert not [line for line in caplog.messages if "reads its canvases" in line]
    printed("lens", path, "--steps", "0", "--positions", "3", "--model", "toy-sink")
    assert f"the run is of the model {model}, and " in caplog.text
    assert "toy-sink reads its canvases" in caplog.text
