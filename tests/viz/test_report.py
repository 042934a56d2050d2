"""The report's file: what is in it, that it is exact where it says so, and that it can hold anything."""

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens.cli.app import app
from dlm_lens.hooks import mask_positions
from dlm_lens.recording import MassiveActivations
from dlm_lens.sinks import AboveMedian, AttentionShare, LowKeyNorm, Received, find_sinks, received_of
from dlm_lens.testing import tiny
from dlm_lens.viz.reporting import report
from dlm_lens.viz.reporting.data import Subject, content_of, fitting, levels_of
from dlm_lens.viz.reporting.packing import narrow, packed
from dlm_lens.viz.reporting.page import embedded
from dlm_lens.viz.reporting.rules import stored_rules
from dlm_lens.viz.reporting.score_precision import MARGIN, PRECISIONS, Precision, Scores

PROMPTS = ["Tom has 5 apples and buys 3 more.", "Mia has 2 eggs."]
NUMPY = {"f8": "<f8", "f4": "<f4", "f2": "<f2", "u4": "<u4", "u2": "<u2", "u1": "u1"}


def unpacked(part):
    """The inverse of `packed`, as the page does it."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(part["data"])), dtype=np.uint8)
    dtype = np.dtype(NUMPY[part["dtype"]])
    return planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(part["shape"])


@pytest.fixture(scope="module")
def recording():
    return dl.record(dl.load("toy-sink"), PROMPTS, steps=6, gen_length=12)


def content(source, row=0, **settings):
    return content_of(Subject.of(source, row), **settings)


def exact_scores(found):
    """{(pattern, step): {key: score}} of the exactly kept scores."""
    strongest = {name: unpacked(part) for name, part in found["strongest"].items()}
    ends = np.cumsum(strongest["count"].reshape(-1))
    steps = len(found["steps"])
    lines = {}
    for place, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        entries = zip(strongest["key"][start:end].tolist(), strongest["score"][start:end].tolist(), strict=True)
        lines[divmod(place, steps)] = dict(entries)
    return lines


@pytest.mark.parametrize("dtype", NUMPY.values())
def test_packing_keeps_every_bit(dtype):
    array = np.random.default_rng(0).integers(0, 256, 24 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    part = packed(array.reshape(2, 3, 4))
    assert part["shape"] == [2, 3, 4]
    assert unpacked(part).tobytes() == array.tobytes()


def test_packing_of_views_and_types():
    array = np.arange(12, dtype=np.uint16).reshape(3, 4).T
    np.testing.assert_array_equal(unpacked(packed(array)), array)
    np.testing.assert_array_equal(unpacked(packed(array.astype(">u2"))), array)
    with pytest.raises(ValueError, match="int64"):
        packed(np.arange(3))
    assert [narrow(np.array([1]), most).itemsize for most in (255, 256, 65535, 65536)] == [1, 2, 2, 4]


def test_everything_of_a_small_recording_is_exact(recording):
    found = content(recording, row=1)
    assert found["exact"]["all"]
    assert set(found["exact"]["limits"].values()) == {None}
    valid = torch.cat([recording.run.attention_mask[1], torch.ones(recording.sinks, dtype=torch.bool)])
    lines, received = exact_scores(found), received_of(recording)
    for level in found["levels"]:
        values = received.at_level(level["name"]).values[:, 1][..., valid]
        assert values.shape[1:3] == (level["layers"], level["heads"])
        for layer in range(level["layers"]):
            for head in range(level["heads"]):
                for step in range(6):
                    kept = lines[level["first"] + layer * level["heads"] + head, step]
                    assert kept == dict(enumerate(values[step, layer, head].tolist()))
                    assert list(kept.values()) == sorted(kept.values(), reverse=True)


def test_padding_is_left_out_and_learned_sinks_stand_behind_the_canvas(recording):
    found = content(recording, row=1)
    run = recording.run
    first = int(run.attention_mask[1].nonzero()[0])
    assert first > 0
    assert found["positions"] == [*range(run.tokens.shape[1] - first), -1]
    assert (found["padding"], found["prompt"]) == (first, run.prompt_length - first)
    assert unpacked(found["masked"])[:, :-1].tolist() == run.masked[:, 1, first:].int().tolist()
    assert unpacked(found["written"])[:, :-1].tolist() == run.unmasked[:, 1, first:].int().tolist()
    ids = np.array(found["ids"])[unpacked(found["tokens"])]
    assert ids[:, :-1].tolist() == run.canvases[:, 1, first:].tolist()
    assert set(ids[:, -1]) == {-1}
    assert found["texts"][found["ids"].index(-1)] == "sink(0)"
    token = int(run.tokens[1, -1])
    assert found["texts"][found["ids"].index(token)] == recording.words[token]


def test_facts(recording):
    found = content(recording, row=1)
    assert (found["row"], found["rows"], found["layers"], found["heads"]) == (1, 2, [0, 1, 2, 3], [0, 1, 2, 3])
    assert (found["scale"], found["queries"], found["min_viewers"]) == ("relative to uniform", "all", 8)
    assert found["settings"]["gen_length"] == "12"
    assert found["model"] == "toy-sink"  # not the folder it lies in
    assert found["text"] == recording.run.texts[1]
    assert found["progress"] == pytest.approx(recording.run.progress[:, 1].tolist(), abs=1e-6)
    assert not found["causal"]


def test_parts_keep_their_names(recording):
    part = recording.select(step=[1, 4], layer=[2, 3], head=[1])
    found = content(part)
    assert (found["steps"], found["layers"], found["heads"]) == ([1, 4], [2, 3], [1])
    assert [(level["name"], level["layers"], level["heads"]) for level in found["levels"]] == [
        ("head", 2, 1),
        ("layer", 2, 1),
        ("model", 1, 1),
    ]


def test_received_and_its_run(recording):
    received = received_of(recording)
    assert exact_scores(content((received, recording.run))) == exact_scores(content(recording))
    mean = content((received.at_level("layer"), recording.run))
    assert [level["name"] for level in mean["levels"]] == ["layer", "model"]


def noise(patterns=6, steps=4, keys=40, seed=0):
    values = keys * torch.randn(patterns, steps, keys, generator=torch.Generator().manual_seed(seed)).mul(
        1.5
    ).softmax(-1)
    values[2, 1, 5:] = torch.nan  # fewer defined than kept
    values[3] = torch.nan
    values[4, 0] = 1.0  # no key stands out
    return values


@pytest.mark.parametrize("precision", [Precision(3), Precision(2, 2.0), Precision(1), Precision(5, 0.5)])
def test_from_the_limit_on_every_sink_is_kept(precision):
    scores = Scores(noise())
    kept = scores.kept(precision)
    limits = scores.limits(kept)

    def outside(rule):
        found = rule.detect(scores.values).gather(-1, scores.order)
        return int((found & (torch.arange(40) >= kept[..., None])).sum())

    assert outside(dl.AboveMean(limits["above-mean"])) == 0
    assert outside(dl.AboveStd(limits["above-std"])) == 0
    assert outside(dl.TopK(int(limits["top-k"]))) == 0
    # The limits are no further up than they must be.
    slack = 2 * MARGIN + 1e-3
    assert outside(dl.AboveMean(limits["above-mean"] - slack)) > 0
    assert outside(dl.AboveStd(limits["above-std"] - slack)) > 0
    assert outside(dl.TopK(int(limits["top-k"]) + 1)) > 0
    if precision.eps < 10:
        assert limits["above-mean"] <= precision.eps


def test_kept_scores_are_the_strongest_and_exact():
    values = noise()
    scores = Scores(values)
    kept = scores.kept(Precision(3, 2.0))
    assert kept[3].tolist() == [0, 0, 0, 0]
    assert int(kept[2, 1]) >= 3
    parts = {name: unpacked(part) for name, part in scores.strongest(kept).items()}
    start = 0
    for pattern in range(6):
        for step in range(4):
            row = values[pattern, step].tolist()
            count = int(parts["count"][pattern, step])
            ranked = sorted((k for k in range(40) if row[k] == row[k]), key=lambda k: (-row[k], k))
            assert parts["key"][start : start + count].tolist() == ranked[:count]
            assert parts["score"][start : start + count].tolist() == [row[k] for k in ranked[:count]]
            start += count
    assert start == len(parts["score"])


def test_statistics_are_those_of_the_detectors():
    values = noise()
    parts = {name: unpacked(part) for name, part in Scores(values).statistics().items()}
    wide = values.double().numpy()
    some = ~np.isnan(wide).all(-1)
    np.testing.assert_array_equal(parts["defined"], (~np.isnan(wide)).sum(-1))
    # Sums of 40 float64: the order of summation is all that may differ.
    np.testing.assert_allclose(parts["total"], np.nansum(wide, -1), rtol=1e-14)
    np.testing.assert_allclose(parts["std"][some], np.nanstd(wide[some], -1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("colours", [-1, 0, 1, 2])
def test_bins_bracket_every_score(colours):
    values = noise()
    scores = Scores(values)
    codes, edges = unpacked(scores.bins(colours)).astype(int), np.array([-np.inf, *scores.edges(colours), np.inf])
    wide = values.transpose(1, 2).numpy()
    assert ((codes == 0) == np.isnan(wide)).all()
    there = codes > 0
    assert (edges[codes[there] - 1] <= wide[there] * (1 + 1e-6)).all()
    assert (wide[there] <= edges[codes[there]] * (1 + 1e-6)).all()
    assert scores.edges(colours)[-1] >= scores.highest


def test_scores_stored_in_half_precision_take_half_the_room():
    values = noise().half().float()
    part = Scores(values).strongest(Scores(values).kept(Precision(0)))["score"]
    assert part["dtype"] == "f2"
    assert Scores(noise()).strongest(Scores(values).kept(Precision(0)))["score"]["dtype"] == "f4"
    expected = values[~values.isnan()].sort().values
    np.testing.assert_array_equal(np.sort(unpacked(part).astype(np.float32)), expected.numpy())


def size(found):
    parts = [*found["statistics"].values(), *found["strongest"].values(), found["bins"]]
    return sum(len(part["data"]) for part in parts)


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5])
def test_the_budget_is_kept_by_giving_up_weak_keys(recording, share):
    everything = content(recording)
    budget = int(share * size(everything))
    found = content(recording, budget=budget)
    assert size(found) <= budget
    assert found["exact"]["scores"] < everything["exact"]["scores"]
    full = exact_scores(everything)
    for place, kept in exact_scores(found).items():
        assert list(kept.items()) == list(full[place].items())[: len(kept)]
        assert kept  # the main sink is there, always


def test_the_largest_report_of_scores_that_do_not_compress_stays_below_20_mb():
    # 200 steps x 32 layers x 32 heads x 512 keys, by the bytes of a part; the means are 3% more patterns.
    values = 512 * torch.randn(32, 24, 512, generator=torch.Generator().manual_seed(0)).softmax(-1)
    found = fitting(Scores(values), 0)
    assert size(found) / values.numel() * 200 * (32 * 32 + 32 + 1) * 512 < 20_000_000
    exact = exact_scores({**found, "steps": range(24)})
    assert all(score == float(values[place].max()) for place, kept in exact.items() for score in kept.values())


def test_a_budget_out_of_reach_is_said(recording, caplog):
    found = content(recording, budget=1000)
    assert "instead of" in caplog.text
    assert found["exact"]["fewest"] == PRECISIONS[-1].strongest


def test_json_cannot_leave_its_element():
    data = {"a": "</script><!--<script>&amp;]]>", "b": "\u2028\u2029\x00\ud800é\U0001f600", "%%STYLE%%": 1}
    text = embedded(data)
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == data
    with pytest.raises(ValueError, match="JSON"):
        embedded({"a": float("nan")})


def test_the_page_is_one_file_that_allows_its_own_script_alone(recording, tmp_path):
    path = report(recording, tmp_path / "a.html", title="</title><script>alert(1)</script>é")
    page = path.read_text(encoding="ascii")
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, flags=re.DOTALL)
    assert [attributes for attributes, _ in scripts] == [' type="application/json" id="data"', ' type="module"']
    style = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert len(style) == 1
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page).group(1)
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (scripts[1][1], style[0])
    ]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # The policy holds for what follows it: nothing that loads or runs may stand in front.
    assert page.index("Content-Security-Policy") < min(
        page.index("<style"), page.index("<script"), page.index("<title")
    )
    code = page.replace(scripts[0][1], "")
    assert not re.search(r"https?:|\ssrc=|\shref=|url\(|@import|\son\w+=|innerHTML|eval\(|document\.write", code)
    assert "<title>&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;&#233;</title>" in page
    assert len(json.loads(scripts[0][1])["recordings"]) == 1


def test_comparison_holds_two_with_their_names(recording, tmp_path):
    part = recording.select(step=[0, 3])
    path = report(recording, tmp_path / "b.html", compare=part, detector=dl.TopK(2), labels=("all", "part"), row=1)
    data = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), flags=re.DOTALL).group(1))
    assert [found["label"] for found in data["recordings"]] == ["all", "part"]
    assert [len(found["steps"]) for found in data["recordings"]] == [6, 2]
    assert data["rule"] == {"name": "top-k", "value": 2}
    assert data["title"] == "all and part"


def test_two_sources_of_one_model_have_different_names(recording, tmp_path):
    other = replace(recording, model="toy-other")
    unnamed = (received_of(recording), recording.run)
    names = {}
    for name, pair in {
        "same": (recording, recording), "other": (recording, other), "unnamed": (unnamed, unnamed),
    }.items():  # fmt: skip
        page = report(pair[0], tmp_path / "named.html", compare=pair[1], row=1).read_text()
        data = json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL).group(1))
        names[name] = [found["label"] for found in data["recordings"]]
    model = recording.model
    assert names == {"same": [f"{model} (A)", f"{model} (B)"], "other": [model, "toy-other"], "unnamed": ["A", "B"]}


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"row": 2}, ValueError, "row 2 of 2"),
        ({"row": -1}, ValueError, "row -1 of 2"),
        ({"detector": "low-key-norm:0.7"}, ValueError, r"has no key_norm; record with KeyNorm\(\)"),
        ({"detector": "loud"}, ValueError, "detector 'loud': there are above-mean"),
        ({"compare": "x"}, TypeError, "a report of a str; give a Recording"),
    ],
)
def test_what_cannot_be_shown_is_said_before_a_file_is_there(recording, tmp_path, settings, error, sentence):
    with pytest.raises(error, match=sentence):
        report(recording, tmp_path / "c.html", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_no_file_is_said_with_the_remedy(recording, tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a directory; give the name of a file, such as .*file"):
        report(recording, tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; make the directory first"):
        report(recording, tmp_path / "nowhere" / "r.html")
    # Any other name may be that of a file of the recording.
    with pytest.raises(ValueError, match=r"run\.json ends in \.json; it is written as \.html, \.htm"):
        report(recording, tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_scores_of_another_run_and_too_many_scores(recording, monkeypatch):
    received = received_of(recording)
    with pytest.raises(ValueError, match="give the run that they belong to"):
        Subject.of((received, recording.select(step=[0]).run), 0)
    with pytest.raises(TypeError, match="a report of a Received"):
        Subject.of(received, 0)
    monkeypatch.setattr("dlm_lens.viz.reporting.data.MOST", 10)
    with pytest.raises(ValueError, match="take a part"):
        Subject.of(recording, 0)


def test_an_old_file_is_replaced_whole_or_not_at_all(recording, tmp_path, monkeypatch):
    path = tmp_path / "d.html"
    path.write_text("old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        report(recording, path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["d.html"]
    monkeypatch.undo()
    assert report(recording, str(path)) == path
    assert path.read_text().startswith("<!doctype html>")


def test_column_sums_and_a_causal_run(tmp_path):
    model = dl.load("toy-ar")
    run = dl.denoise(model, PROMPTS[0], gen_length=12)
    received: Received = dl.received_over_steps(model, run, relative=False)
    found = content((received, run))
    assert found["causal"]
    assert found["scale"] == "column sum"
    assert found["undefined_keys"]
    lines = exact_scores(found)
    sinks = find_sinks(received, dl.TopK(1))
    for step in range(run.steps):
        main = int(sinks.main()[step, 0, 1, 2])
        assert next(iter(lines[1 * 4 + 2, step])) == main
    assert report((received, run), tmp_path / "e.html").stat().st_size > 10_000


def test_the_command(recording, tmp_path):
    saved = replace(recording).save(tmp_path / "rec")
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(saved), "-o", str(out), "--detector", "above-std:2.5"])
    assert done.exit_code == 0, done.output
    assert "MB" in done.output
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text(), flags=re.DOTALL).group(1))
    assert data["rule"] == {"name": "above-std", "value": 2.5}
    assert exact_scores(data["recordings"][0]) == exact_scores(content(recording))
    twice = CliRunner().invoke(app, ["report", str(saved), "-o", str(out), "--compare", str(saved)])
    assert twice.exit_code == 0, twice.output
    assert out.read_text().count('"label":"rec"') == 2
    other = replace(recording).save(tmp_path / "other" / "rec")
    CliRunner().invoke(app, ["report", str(saved), "-o", str(out), "--compare", str(other)], catch_exceptions=False)
    assert f'"label":"{tmp_path.name}/rec"' in out.read_text()
    assert '"label":"other/rec"' in out.read_text()
    wrong = CliRunner().invoke(app, ["report", str(saved), "--detector", "loud"])
    assert isinstance(wrong.exception, ValueError)
    assert "--detector 'loud': there are above-mean, above-median, above-std" in str(wrong.exception)


def test_a_report_is_of_the_queries_that_are_given(tmp_path):
    """Scores, stored rules and facts of masked queries are those of a report of their received attention."""
    reducers = [dl.ReceivedAttention(("all", "masked"), 1), dl.KeyNorm()]
    both = dl.record(tiny("llada"), ["w1 w2 w3 w4", "w5 w6"], reducers, steps=3, gen_length=8)
    saved, out = both.save(tmp_path / "rec"), tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(saved), "-o", str(out), "--queries", "masked"])
    assert done.exit_code == 0, done.output
    data = json.loads(re.search(r'id="data">(.*?)</script>', out.read_text(), flags=re.DOTALL).group(1))
    masked, (first,) = dl.received_of(both, "masked"), data["recordings"]
    alone = content((masked, both.run))
    assert first["queries"] == "masked"
    assert exact_scores(first) == exact_scores(alone)
    assert exact_scores(first) != exact_scores(content(both))
    names = [one["name"] for one in first["stored"]]
    assert [one["name"] for one in alone["stored"]] == [name for name in names if "LowKeyNorm" not in name]
    assert any("LowKeyNorm" in name for name in names)
    for one in alone["stored"]:
        assert one == first["stored"][names.index(one["name"])]
    with pytest.raises(ValueError, match="this recording has no received_prompt"):
        report(both, out, queries="prompt")
    with pytest.raises(ValueError, match="queries is 'prompt', and the Received has queries 'masked'"):
        report((masked, both.run), out, queries="prompt")
    assert report((masked, both.run), out, queries="masked") == out


@pytest.mark.parametrize(
    "rule",
    [AttentionShare(0.05), dl.AboveMean(0.03, literal=True), LowKeyNorm(0.9), AboveMedian(5.0, 0.0)],
    ids=repr,
)
def test_a_rule_that_the_page_does_not_compute_is_stored_as_find_sinks_found_it(rule, tmp_path):
    reducers = [dl.ReceivedAttention(), dl.KeyNorm(), MassiveActivations()]
    source = dl.record(dl.load("toy"), PROMPTS, reducers, steps=6, gen_length=12)
    path = report(source, tmp_path / "r.html", detector=rule, row=1)
    data = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), flags=re.DOTALL).group(1))
    assert data["rule"] == {"name": repr(rule), "value": None}
    (recorded,) = data["recordings"]
    # Also the other rules of the registry that the page does not compute, with their default settings.
    kinds = {stored["name"].split("(")[0] for stored in recorded["stored"]}
    assert kinds >= {"AttentionShare", "MeanReceived", "AboveMedian", "LowKeyNorm"}
    (stored,) = [one for one in recorded["stored"] if one["name"] == repr(rule)]
    counts, keys, scores = (unpacked(stored[name]) for name in ("count", "key", "score"))
    places = [place for place, count in enumerate(counts) for _ in range(count)]
    shown = source.run.attention_mask[1].nonzero().flatten().tolist()
    total = 0
    for level in recorded["levels"]:
        patterns = range(level["first"], level["first"] + level["layers"] * level["heads"])
        found = {
            (place // 6, place % 6, shown[key]): score
            for place, key, score in zip(places, keys, scores, strict=True)
            if place // 6 in patterns
        }
        if level["name"] not in stored["levels"]:
            assert not found
            continue
        sinks = find_sinks(source, rule, level="head" if rule.reads_hidden_states else level["name"])
        is_sink, values = (
            t.flatten(2, -2)[:, 1] if t.ndim > 3 else t[:, 1, None] for t in (sinks.is_sink, sinks.scores)
        )
        wanted = {
            (level["first"] + pattern, step, key): values[step, pattern, key].item()
            for step, pattern, key in is_sink.nonzero().tolist()
        }
        assert found == wanted
        total += len(found)
    assert total > 20


def stored_names(source):
    return {stored["name"].split("(")[0] for stored in content(source)["stored"]}


def test_a_rule_whose_statistic_is_absent_is_not_stored() -> None:
    recorded = dl.record(tiny("llada"), [[1, 2, 3]], gen_length=4)
    assert stored_names(recorded) == {"AttentionShare", "MeanReceived"}
    of_keys = dl.record(tiny("llada"), [[1, 2, 3]], [dl.ReceivedAttention(), dl.KeyNorm()], gen_length=4)
    assert stored_names(of_keys) == {"AttentionShare", "MeanReceived", "LowKeyNorm"}
    run = dl.denoise(tiny("causal"), [[1, 2, 3, 4]], gen_length=4)
    received = dl.received_over_steps(tiny("causal"), run, min_viewers=1)
    keys = torch.arange(received.values.shape[-1])
    unknown = replace(received, viewers=None)
    for source, names in ((received, {"AttentionShare", "MeanReceived"}), (unknown, {"AttentionShare"})):
        found = stored_rules(source, dl.AboveMean(3), levels_of(source), keys, row=0, steps=2, budget=10**6)
        assert {one["name"].split("(")[0] for one in found} == names


def test_an_error_of_a_rule_that_has_its_statistic_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = dl.record(tiny("llada"), [[1, 2, 3]], gen_length=4)

    def broken(*_: object) -> None:
        raise ValueError("the rule is broken")

    monkeypatch.setattr(AttentionShare, "thresholds", broken)
    with pytest.raises(ValueError, match="the rule is broken"):
        content(recorded)


def test_a_report_names_the_hooks_under_which_its_scores_were_computed() -> None:
    model = tiny("llada")
    plain, hooked = (dl.denoise(model, [[1, 2, 3]], gen_length=4, hooks=h) for h in ([], [mask_positions(0)]))
    for run, hooks, shown in (
        (plain, [mask_positions(1)], {"hooks": "mask_positions(1)", "hooks of the run": ""}),
        (hooked, [], {"hooks": "", "hooks of the run": "mask_positions(0)"}),
        (hooked, [mask_positions(0)], {"hooks": "mask_positions(0)"}),
    ):
        found = dl.recording.rerun(model, run, [dl.ReceivedAttention()], hooks=hooks)
        settings = content(found)["settings"]
        assert {name: value for name, value in settings.items() if name.startswith("hooks")} == shown
