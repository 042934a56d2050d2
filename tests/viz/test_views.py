"""circuitsvis views: the numbers of the run, both directions, cropped with a sentence, and tokens as text."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

import dlm_lens as dl
from dlm_lens.recording import ReceivedAttention, record
from dlm_lens.sampling import denoise
from dlm_lens.testing import tiny
from dlm_lens.viz.attention_snapshot import snapshot
from dlm_lens.viz.views import heads
from dlm_lens.viz.views.view import Piece, View, rounded, web_labels

TEXTS = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w4 w5"]


@pytest.fixture(scope="module")
def model():
    return tiny("llada")


@pytest.fixture(scope="module")
def run(model):
    return denoise(model, TEXTS, steps=4, gen_length=8, seed=3)


def test_heads_hold_every_pattern_in_both_directions(model, run):
    view = dl.viz.attention_heads(run, model, step=2, layer=1, row=1)
    shot = snapshot(model, run, step=2, layer=1, row=1)
    (piece,) = view.pieces
    assert piece.component == "AttentionHeads"
    assert piece.props["maskUpperTri"] is False
    # Written with four decimals.
    torch.testing.assert_close(torch.tensor(piece.props["attention"]), shot.pattern, rtol=0, atol=5.1e-5)
    assert float(torch.tensor(piece.props["attention"]).triu(1).sum()) > 1
    assert piece.props["tokens"] == [f"w{i}" if i < 61 else {62: "<eos>", 63: "[MASK]"}[i] for i in shot.tokens]
    assert piece.props["attentionHeadNames"] == ["head 0", "head 1", "head 2", "head 3"]
    assert "10 positions" in " ".join(view.sentences)


def test_one_head_and_what_its_values_make_of_it(model, run):
    shot = snapshot(model, run, step=1, layer=0, row=0)
    plain = dl.viz.attention_pattern(run, model, step=1, layer=0, head=3).pieces[0].props
    torch.testing.assert_close(torch.tensor(plain["attention"]), shot.pattern[3], rtol=0, atol=5.1e-5)
    weighted = dl.viz.value_weighted_pattern(run, model, step=1, layer=0, head=3).pieces[0].props
    wanted = torch.empty_like(shot.pattern[3])
    for i in range(len(wanted)):
        for j in range(len(wanted)):
            wanted[i, j] = shot.pattern[3, i, j] * shot.value_norms[3, j]
    torch.testing.assert_close(torch.tensor(weighted["attention"]), wanted, rtol=0, atol=float(wanted.max()) * 1e-3)
    assert weighted["maxValue"] == pytest.approx(float(wanted.max()))
    assert plain["maskUpperTri"] is weighted["maskUpperTri"] is False
    with pytest.raises(ValueError, match="head 4 is not among"):
        dl.viz.attention_pattern(run, model, step=1, layer=0, head=4)


@pytest.mark.parametrize("largest", [3e-5, 0.002, 0.04, 0.6, 1.0, 7.0, 10.0, 250.0, 4e4])
def test_numbers_have_four_digits_of_the_largest(largest):
    values = largest * torch.linspace(0, 1, 23).reshape(1, 23)
    shown = torch.tensor(rounded(values), dtype=torch.float64)
    assert float((shown - values).abs().max()) <= 6e-4 * largest


def test_a_view_of_weak_values_keeps_their_digits():
    network = tiny("llada")
    with torch.no_grad():
        network.model.layers[0].self_attn.v_proj.weight.div_(3000)
    run = denoise(network, TEXTS[0], steps=4, gen_length=8)
    weighted = dl.viz.value_weighted_pattern(run, network, step=1, layer=0, head=3).pieces[0].props
    shot = snapshot(network, run, step=1, layer=0)
    wanted = shot.pattern[3] * shot.value_norms[3]
    assert float(wanted.max()) < 1e-3
    torch.testing.assert_close(torch.tensor(weighted["attention"]), wanted, rtol=0, atol=float(wanted.max()) * 6e-4)


def test_only_a_crop_of_attention_says_what_its_rows_sum_to(model, run):
    place = {"step": 1, "layer": 0, "head": 3, "positions": range(4, 12)}
    plain = dl.viz.attention_pattern(run, model, **place).sentences[-1]
    weighted = dl.viz.value_weighted_pattern(run, model, **place).sentences[-1]
    shown = "Shown are 8 of 17 positions, 4 to 11"
    assert plain == (
        f"{shown}; rows sum to less than 1 by the keys that are left out. Give canvas positions= to show others."
    )
    assert weighted == f"{shown}. Give canvas positions= to show others."


def test_the_labels_of_a_crop_have_positions(model, run, monkeypatch):
    place = {"step": 3, "layer": 1, "head": 2}
    note = "After @ is the position of a token; the numbers in parentheses count the shown keys from 0."
    whole = dl.viz.attention_pattern(run, model, **place)
    texts = whole.pieces[0].props["tokens"]
    chosen = [3, 16, 12]
    view = dl.viz.attention_pattern(run, model, positions=chosen, **place)
    assert view.pieces[0].props["tokens"] == [f"{texts[i]} @{i}" for i in chosen]
    assert note in view.sentences
    # The labels of circuitsvis count the positions of a beginning.
    first = dl.viz.attention_pattern(run, model, positions=range(5), **place)
    assert first.pieces[0].props["tokens"] == texts[:5]
    # Positions of a padded row count from its first token.
    own = run.tokens.shape[1] - 2
    padded = dl.viz.value_weighted_pattern(run, model, row=1, positions=[own], **place)
    (label,) = padded.pieces[0].props["tokens"]
    assert label.endswith(f" @{own - 7}")
    monkeypatch.setattr(heads, "ENTRIES", 4 * 100)
    sunk = tiny("sink_qwen", num_sinks=2)
    view = dl.viz.attention_heads(denoise(sunk, TEXTS[0], steps=4, gen_length=8), sunk, step=3, layer=0)
    labels = view.pieces[0].props["tokens"]
    assert [label.split(" @")[1] for label in labels[:-2]] == [str(i) for i in range(9, 17)]
    assert labels[-2:] == ["sink(0)", "sink(1)"]
    assert note in view.sentences
    assert note not in whole.sentences + first.sentences


def test_a_crop_is_around_the_block_of_the_row(monkeypatch):
    network = tiny("llada2")
    batch = denoise(network, [[*range(5, 45)], [9, 8, 7]], gen_length=8)
    monkeypatch.setattr(heads, "ENTRIES", 4 * 100)
    for row in (0, 1):
        own = batch.in_block[0, row].nonzero().flatten().tolist()
        view = dl.viz.attention_heads(batch, network, step=0, layer=0, row=row)
        (sentence,) = [one for one in view.sentences if "Shown" in one]
        first = max(0, (own[0] + own[-1] + 1 - 10) // 2 - int(batch.padding[row]))
        assert f"{first} to {first + 9}" in sentence


def test_long_sequences_are_cropped_around_the_block_with_a_sentence(model, run, monkeypatch):
    monkeypatch.setattr(heads, "ENTRIES", 4 * 100)  # 10 x 10 for each of 4 heads
    view = dl.viz.attention_heads(run, model, step=0, layer=0)
    (piece,) = view.pieces
    assert (
        len(piece.props["tokens"]) == len(piece.props["attention"][0]) == len(piece.props["attention"][0][0]) == 10
    )
    assert any("Shown are 10 of 17 positions" in sentence for sentence in view.sentences)
    start, stop = run.spans[0]
    shot = snapshot(model, run, step=0, layer=0)
    first = min(max(0, (start + stop - 10) // 2), 7)
    torch.testing.assert_close(
        torch.tensor(piece.props["attention"]), shot.pattern[:, first : first + 10, first : first + 10],
        rtol=0, atol=5.1e-5,
    )  # fmt: skip
    asked = dl.viz.attention_heads(run, model, step=0, layer=0, positions=[0, 16])
    torch.testing.assert_close(
        torch.tensor(asked.pieces[0].props["attention"]),
        shot.pattern[:, [0, 16]][..., [0, 16]],
        rtol=0,
        atol=5.1e-5,
    )
    with pytest.raises(ValueError, match=r"positions \[17\]"):
        dl.viz.attention_heads(run, model, step=0, layer=0, positions=[0, 17])


def test_learned_sinks_stay_when_the_canvas_is_cropped(monkeypatch):
    network = tiny("sink_qwen", num_sinks=2)
    run = denoise(network, TEXTS[0], steps=4, gen_length=8)
    monkeypatch.setattr(heads, "ENTRIES", 4 * 100)
    (piece,) = dl.viz.attention_heads(run, network, step=0, layer=0).pieces
    assert piece.props["tokens"][-2:] == ["sink(0)", "sink(1)"]
    pattern = torch.tensor(piece.props["attention"])
    assert pattern.shape[-1] == 10
    # A learned sink sees itself alone.
    torch.testing.assert_close(pattern[:, -2:, -2:], torch.eye(2).expand(4, 2, 2))


def test_tokens_coloured_by_what_they_receive(model):
    recording = record(model, TEXTS, [ReceivedAttention()], steps=4, gen_length=8, seed=3)
    view = dl.viz.received_tokens(recording, layer=1, head=2, row=1, steps=[0, 3])
    scores = recording.received[:, 1, 1, 2][:, 7:]  # row 1 has 7 columns of padding
    for piece, step in zip(view.pieces, (0, 3), strict=True):
        assert piece.heading == f"step {step}"
        torch.testing.assert_close(torch.tensor(piece.props["values"]), scores[step], rtol=0, atol=5.1e-5)
        hidden = [token.strip() == "▢" for token in piece.props["tokens"]]
        assert hidden == recording.run.masked[step, 1, 7:].tolist()
        assert piece.props["maxValue"] == pytest.approx(float(scores[[0, 3]].max()))
    assert "relative to uniform" in view.sentences[0]
    assert "level: head (layer 1, head 2)" in view.sentences[0]


def test_tokens_without_a_score_are_marked():
    recording = record(tiny("causal"), ["w1 w2 w3 w4 w5 w6 w7 w8 w9 w1 w2 w3"], gen_length=6)
    view = dl.viz.received_tokens(recording, layer=0, head=1, steps=[0, 5])
    for piece, step in zip(view.pieces, (0, 5), strict=True):
        undefined = recording.received[step, 0, 0, 1].isnan()
        marked = [token.endswith("† ") for token in piece.props["tokens"]]
        assert marked == undefined.tolist()
        assert 0 < sum(marked) < len(marked)
    assert "† has no score: it is visible to fewer than 8 counted queries." in view.sentences
    whole = record(tiny("llada"), TEXTS[0], steps=4, gen_length=8)
    view = dl.viz.received_tokens(whole, layer=0, head=1)
    assert "†" not in "".join([*view.sentences, *(token for one in view.pieces for token in one.props["tokens"])])


def test_text_emerges(run):
    view = dl.viz.emerging_text(run, row=0, steps=[0, 2, 3])
    before = run.masked[0, 0]
    for piece, step in zip(view.pieces, (0, 2, 3), strict=True):
        masked = run.masked[step + 1, 0]
        assert piece.props["values"] == (before & ~masked).float().tolist()
        assert [token.strip() == "▢" for token in piece.props["tokens"]] == masked.tolist()
        before = masked
    assert sum(sum(piece.props["values"]) for piece in view.pieces) == 8
    with pytest.raises(ValueError, match="step 4 does not exist"):
        dl.viz.emerging_text(run, steps=[4])


HOSTILE = [
    "</script><script>x",
    '"><img src=x onerror=y>',
    "<!--<script>",
    "&lt;b&gt;",
    "\u2028",
    "\u202eevil",
    "\ud800",
]


def test_nothing_of_a_token_is_markup_or_ends_the_script(tmp_path):
    tokens = web_labels(list(range(len(HOSTILE))), SimpleNamespace(decode=lambda ids: HOSTILE[ids[0]]))
    values = [0.0] * len(tokens)
    square = [values] * len(tokens)
    view = View(
        HOSTILE[0],
        (HOSTILE[1],),
        (
            Piece("ColoredTokens", {"tokens": tokens, "values": values}, HOSTILE[2]),
            Piece("AttentionPattern", {"tokens": tokens, "attention": square}),
        ),
    )
    with pytest.raises(ValueError, match=r"ends in \.png; it is written as \.html, \.htm"):
        view.save(tmp_path / "page.png")
    assert not list(tmp_path.iterdir())
    page = view.save(tmp_path / "page.html").read_text(encoding="utf-8")
    lowered = page.lower()
    assert lowered.count("<script") - lowered.count('innerhtml="<script><\\/script>"') == 1
    assert lowered.count("</script") == 1
    assert "<img" not in lowered.split("<script")[0]
    calls = re.findall(r"CircuitsVis\.(\w+), (\{.*\})\);$", page.replace("</script>", "\n"), re.MULTILINE)
    props = {component: json.loads(text) for component, text in calls}
    assert not any(set("<>&") & set(text) for _, text in calls)
    # ColoredTokens takes HTML, so that it gets what shows as the token; the other takes text.
    assert props["AttentionPattern"]["tokens"] == tokens
    assert props["ColoredTokens"]["tokens"][1] == "&quot;&gt;&lt;img␣src=x␣onerror=y&gt;"
    assert props["ColoredTokens"]["tokens"][3] == "&amp;lt;b&amp;gt;"
    assert "unsafe-inline'" not in re.search(r"script-src [^;]*", page).group()
    assert "http://" not in lowered.split("<script")[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("a\nb", "a\\nb"),
        ("", "∅"),
        (" the", "␣the"),
        ("你", "你"),
    ],
)
def test_labels_for_the_browser(text, shown):
    found, long = web_labels([0, 1], SimpleNamespace(decode=lambda ids: [text, "x" * 1000][ids[0]]))
    assert found == shown
    assert len(long) == 40
