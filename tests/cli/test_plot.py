"""dlm-lens plot: every kind writes its file, and what cannot work is one sentence."""

import errno
import json
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli import app as cli
from dlm_lens.recording import ReceivedAttention, Recording, RegionMass, ValueNorm, record
from dlm_lens.sinks import find_sinks, received_of
from dlm_lens.sinks.detector_registry import parse_detector
from dlm_lens.testing import tiny
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import plots
from dlm_lens.viz.selection import strongest
from tests.adapters.test_lora import factors_of, write_adapter

STARTS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".html": b"<!DOCTYPE html>"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("plot")
    model = tiny("llada")
    model.save_pretrained(path / "model")
    model.tokenizer.save_pretrained(path / "model")
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w4 w5"]
    reducers = [ReceivedAttention(), ValueNorm(), RegionMass()]
    record(model, texts, reducers, steps=3, gen_length=8).save(path / "rec")
    record(model, texts, [ValueNorm()], steps=3, gen_length=8).save(path / "norms")
    masked = [ReceivedAttention("masked", min_viewers=1), ValueNorm()]
    record(model, texts, masked, steps=3, gen_length=8).save(path / "masked")
    return path


def plot(*arguments):
    result = CliRunner().invoke(cli.app, ["plot", *map(str, arguments)])
    return result, str(result.exception) if result.exception else ""


@pytest.mark.long
@pytest.mark.parametrize("kind", plots())
def test_every_kind_writes_its_file(files, tmp_path, kind):
    for suffix in plots()[kind].formats[-1:]:
        out = tmp_path / f"{kind}{suffix}"
        rule = ["--detector", "above-mean:0.3"] if "detector" in plots()[kind].options else []
        model = ["--model", files / "model"] if "model" in plots()[kind].options else []
        result, error = plot(kind, files / "rec", "-o", out, *rule, *model)
        assert (result.exit_code, error) == (0, "")
        assert out.read_bytes().startswith(STARTS[suffix])
        assert result.output.strip().endswith(out.name)


def test_a_full_disk_is_named_with_the_file_and_leaves_what_was_there(files, tmp_path, monkeypatch):
    out = tmp_path / "sinks.png"
    for suffix in (".png", ".pdf", ".svg"):
        assert plot("sink-positions", files / "rec", "-o", out.with_suffix(suffix))[0].exit_code == 0
        assert out.with_suffix(suffix).read_bytes().startswith(STARTS[suffix])
    before = out.read_bytes()

    def full(self, file, **options):
        file.write(b"\x89PNG")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    result, error = plot("sink-positions", files / "rec", "-o", out)
    assert result.exit_code == 1
    assert f"{out} could not be written (No space left on device); make room and do it again" in error
    assert out.read_bytes() == before
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".png", ".svg"]


def test_the_head_is_the_strongest_one_unless_told(files):
    from dlm_lens import Recording

    recording = Recording.load(files / "rec")
    options = PlotOptions({"rec": recording})
    layer, head = options.place()
    best = recording.received[:, 0].nan_to_num(nan=0).amax(-1).mean(0)
    assert best[layer, head] == best.max()
    assert strongest(options.received, 0) == (layer, head)
    assert PlotOptions({"rec": recording}, layer="mean", head="mean").place() == (None, None)
    assert PlotOptions({"rec": recording}, layer=1).place() == (1, None)
    assert find_sinks(options.received, options.rule).detector.eps == 3.0


def test_a_head_picked_in_some_recorded_heads_is_that_head_of_the_model(files):
    from dlm_lens import Recording

    recording = Recording.load(files / "rec")
    for heads in ([1, 3], [2], [3, 0]):
        options = PlotOptions({"rec": recording.select(head=heads)})
        values = recording.received[:, 0].nan_to_num(nan=0).amax(-1).mean(0)[:, heads]
        layer, place = divmod(int(values.argmax()), len(heads))
        assert options.one_head() == options.place() == (layer, heads[place])
        assert PlotOptions(options.recordings, layer=1, head=3).one_head() == (1, 3)


def test_the_strongest_head_is_that_of_the_row(files):
    recording = Recording.load(files / "rec")
    values = recording.received.clone()
    values[:, 1, 1, 2] += 5  # of row 1 alone, where no other key has as much
    values[:, 0, 0, 3] += 9
    planted = replace(recording, arrays={**recording.arrays, "received": values})
    assert [PlotOptions({"rec": planted}, row=row).place() for row in (0, 1)] == [(0, 3), (1, 2)]
    assert strongest(received_of(planted)) == (0, 3)
    with pytest.raises(ValueError, match="row 2 is not among the rows 0, 1"):
        PlotOptions({"rec": planted}, row=2).place()


PATTERNS = ("attention-heads", "attention-pattern", "value-weighted-pattern")
"""Views of all queries, whose head may be chosen by a class of them."""


@pytest.mark.parametrize("kind", PATTERNS)
def test_the_head_of_a_pattern_is_chosen_by_the_queries_that_are_given(files, kind, tmp_path):
    recording = Recording.load(files / "masked")
    values = torch.zeros_like(recording.received_masked)
    values[:, 0, 1, 2, 5] = 9.0
    whole = Recording.load(files / "rec").received.clone()
    whole[:, 0, 0, 3, 4] = 99.0
    specs = {**recording.specs, "received": Recording.load(files / "rec").specs["received"]}
    arrays = {**recording.arrays, "received_masked": values, "received": whole}
    planted = replace(recording, arrays=arrays, specs=specs)
    for queries, place in (("masked", (1, 2)), ("all", (0, 3))):
        options = PlotOptions({"rec": planted}, queries=queries)
        options.__dict__["network"] = tiny("llada")
        view = plots()[kind].draw(options)
        wanted = f"layer {place[0]}, head {place[1]} at" if kind != PATTERNS[0] else f"layer {place[0]} at"
        assert wanted in view.title
    given = ["-o", tmp_path / "view.html", "--model", files / "model"]
    assert "which this recording lacks" in plot(kind, files / "masked", *given)[1]
    assert plot(kind, files / "masked", *given, "--queries", "masked")[0].exit_code == 0


OF_QUERIES = [name for name, one in plots().items() if "queries" in one.options and name not in PATTERNS]


@pytest.mark.parametrize("kind", OF_QUERIES)
def test_pictures_are_of_the_queries_and_the_level_that_are_given(files, kind):
    """The recording has received attention of masked queries alone, so that no picture can show another class."""
    recording = Recording.load(files / "masked")
    masked = received_of(recording, "masked")
    options = PlotOptions({"rec": recording}, queries="masked", detector=parse_detector("above-mean:0.3"))
    assert torch.equal(options.received.values.nan_to_num(nan=-1), masked.values.nan_to_num(nan=-1))
    assert options.place() == strongest(masked, 0)
    levels = ("head", "layer") if "level" in plots()[kind].options else ("head",)
    for level in levels:
        given = replace(options, level=level)
        given.__dict__["network"] = tiny("llada")  # of pictures that run the recording's model
        made = plots()[kind].draw(given)
        if isinstance(made, Figure):
            texts = " ".join(one.get_text() for one in made.findobj(Text)).replace("\n", " ")
        else:
            texts = " ".join(made.sentences)
        assert "queries: masked" in texts
        assert f"level: {level}" in texts


def test_sinks_of_a_picture_are_those_of_the_library(files):
    recording = Recording.load(files / "masked")
    options = PlotOptions({"rec": recording}, queries="open", level="layer", detector=parse_detector("top-k:2"))
    wanted = find_sinks(received_of(recording, "masked"), dl.TopK(2), level="layer")
    assert torch.equal(options.sinks().is_sink, wanted.is_sink)
    assert options.sinks().rule == wanted.rule
    with pytest.raises(ValueError, match="level is 'heads'; did you mean head"):
        PlotOptions({"rec": recording}, level="heads")


def test_every_recording_has_its_own_panel_and_label(files, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "dlm_lens.viz.plot_registry.write_plot", lambda _, options, out: drawn.append(options) or out
    )
    copies = [tmp_path / name / "rec" for name in "abc"]
    for copy in copies:
        copy.parent.mkdir()
        copy.symlink_to(files / "rec")
    for given, ends in (
        ([files / "rec", files / "norms"], ["rec)", "norms)"]),
        (copies, ["a/rec)", "b/rec)", "c/rec)"]),
        ([*copies, copies[0]], ["a/rec) 1", "b/rec)", "c/rec)", "a/rec) 2"]),
    ):
        result, error = plot("sink-positions", *given, "-o", tmp_path / "x.png")
        assert (result.exit_code, error) == (0, "")
        labels, parts = list(drawn[-1].recordings), list(drawn[-1].recordings.values())
        assert len(labels) == len(given)
        assert labels == [f"LLaDAModelLM ({end}" for end in ends]
        for part, path in zip(parts, given, strict=True):
            assert set(part.specs) == ({"value_norm"} if path.name == "norms" else {*parts[0].specs})


def test_paths_may_begin_with_the_home_directory(files, tmp_path, monkeypatch):
    """No shell replaces it in --out=~/x.svg; the arguments are those of every kind: one, several and options."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(files)
    before = set(files.iterdir())
    (tmp_path / "rec").symlink_to(files / "rec")
    result, error = plot("sink-positions", "~/rec", files / "rec", "--out=~/x.svg")
    assert (result.exit_code, error) == (0, "")
    assert (tmp_path / "x.svg").read_bytes().startswith(STARTS[".svg"])
    result = CliRunner().invoke(cli.app, ["sinks", "~/rec", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["layers"]
    _, error = plot("sink-positions", "rec", "--out=~nobody-here/x.svg")
    assert error.startswith("~nobody-here/x.svg begins with the home directory of a user who does not exist")
    result, error = plot("sink-positions", "rec", "--out=~draft.svg")
    assert (result.exit_code, error) == (0, "")
    assert {path.name for path in set(files.iterdir()) - before} == {"~draft.svg"}
    (files / "~draft.svg").unlink()


def test_list_names_every_kind_and_which_run_the_model():
    result, _ = plot("list")
    assert result.exit_code == 0
    for kind, one in plots().items():
        assert kind in result.output
        assert ("runs the model" in one.about) == ("model" in one.options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "rec"], "there is no picture 'nothing'; there are attention-heads"),
        (["sink-strength"], "plot sink-strength needs the directory of a recording"),
        (["sink-strength", "rec", "--steps", 3], "sink-strength takes no --steps; it takes --detector"),
        (["region-mass", "rec", "rec"], "region-mass is of one recording, not of 2"),
        (
            ["sink-strength", "rec", "-o", "x.gif"],
            "x.gif ends in .gif; sink-strength is written as .png, .pdf, .svg",
        ),
        (["sink-strength", "rec", "-o", "none/x.png"], "none does not exist"),
        (
            ["sink-strength", "norms", "-o", "x.png"],
            "has no received, which sink-strength needs; it has value_norm",
        ),
        (
            ["attention-pattern", "norms", "-o", "x.html"],
            "the strongest head is chosen by received, which this recording lacks; give --layer, and --head in a "
            "picture of one head, or record with ReceivedAttention(queries='all')",
        ),
        (["sink-positions", "rec", "--layer", "first"], "--layer is 'first'; give an index, or mean"),
        (["sink-positions", "rec", "--layer", 9, "--head", 0], "layer 9 is not among the layers 0, 1"),
        (["attention-pattern", "rec", "--layer", "mean"], "is of one head"),
        (["lens-table", "rec", "--steps", 3], "step 3: the steps of row 0 go from 0 to 2"),
        (["lens-table", "rec", "--steps", -1], "step -1: the steps of row 0 go from 0 to 2"),
        (["sink-strength", "rec", "--queries", "masked"], "has no received_masked, which sink-strength needs"),
        (["sink-strength", "rec", "--queries", "mask"], "--queries is 'mask'; did you mean masked?"),
        (["sink-strength", "masked", "--level", "layer"], "sink-strength takes no --level"),
        (["sinks-over-eps", "rec", "--level", "token"], "--level is 'token'; it is one of head, layer, model"),
        (["score-distribution", "rec", "--level", "layer", "--head", 1], "at --level layer there are no heads"),
        (
            ["attention-maps", "rec", "--hooks", "run"],
            "takes the hooks of the recording's run, which had none; leave",
        ),
        (["sinks-over-eps", "rec", "--detector", "top-k:2"], r"marks an eps of above-mean; TopK(k=2) has none"),
    ],
)
def test_what_cannot_work_is_a_sentence(files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    before = set(files.iterdir())
    _, error = plot(*arguments)
    assert message in error
    assert set(files.iterdir()) == before


def test_a_picture_runs_the_recordings_model_with_its_adapter(files, tmp_path):
    """The lens of the merged weights, which a lens of the base model is not."""
    base = files / "model"
    name = "model.transformer.blocks.0.attn_out"
    adapter = write_adapter(tmp_path / "adapter", {name: factors_of(torch.Size([32, 32]), 0)})
    merged = dl.load(base, adapter=adapter)
    record(merged, ["w1 w2 w3"], [ReceivedAttention()], steps=2, gen_length=4).save(tmp_path / "rec")
    out = tmp_path / "lens.svg"
    result, error = plot("lens-table", tmp_path / "rec", "-o", out, "--position", 4)
    assert result.exit_code
    assert "with the adapter" in error
    assert "give --load adapter=" in error
    assert not out.exists()
    result, error = plot("lens-table", tmp_path / "rec", "-o", out, "--position", 4, "--load", f"adapter={adapter}")
    assert (result.exit_code, error) == (0, "")
    options = PlotOptions({"rec": Recording.load(tmp_path / "rec")}, loading={"adapter": adapter})
    for own, wanted in zip(options.network.parameters(), merged.parameters(), strict=True):
        assert torch.equal(own, wanted)
    result, error = plot("sink-positions", tmp_path / "rec", "-o", out, "--dtype", "float32")
    assert error == "sink-positions runs no model; leave --device, --dtype and --load out"
