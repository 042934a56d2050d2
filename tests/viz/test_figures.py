"""The figures hold the numbers they were given, mark what is masked, and survive hostile tokens."""

import io
import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from dlm_lens.recording import ReceivedAttention, record
from dlm_lens.sinks import AboveMean, AttentionShare, Received, TopK, find_sinks, received_of, trajectories
from dlm_lens.testing import tiny
from dlm_lens.viz import (
    incoming_attention,
    received_tokens,
    row_blocks,
    score_distribution,
    sink_positions,
    sink_strength,
    sinks_over_eps,
)
from dlm_lens.viz.figures.labels import caption, captioned, token_labels
from dlm_lens.viz.plot_options import PlotOptions
from dlm_lens.viz.plot_registry import find_plot

STEPS, BATCH, LAYERS, HEADS, KEYS = 6, 2, 2, 3, 10
HOSTILE = ["$x_1$", "$\\frac{1}{0}$", "$", "$$a^{", "\n\t", "你好", "\u202e\x1b[31m", "\\", "{}%#&~", ""]


class Hostile:
    def decode(self, ids):
        return HOSTILE[ids[0] % len(HOSTILE)]


@dataclass
class OneText:
    text: str

    def decode(self, ids):
        return self.text


@pytest.fixture
def received():
    generator = torch.Generator().manual_seed(0)
    values = 10 * (2 * torch.randn(STEPS, BATCH, LAYERS, HEADS, KEYS, generator=generator)).softmax(-1)
    valid = torch.ones(BATCH, KEYS, dtype=torch.bool)
    valid[1, :3] = False
    values = values.masked_fill(~valid[None, :, None, None], torch.nan)
    # Positions 5 to 9 are written from left to right, one per step.
    masked = (torch.arange(KEYS) >= 5 + torch.arange(STEPS)[:, None])[:, None].repeat(1, BATCH, 1)
    tokens = torch.arange(KEYS).repeat(STEPS, BATCH, 1).masked_fill(masked, 99)
    return Received(
        values=values,
        expected=torch.ones(STEPS, BATCH, 1, 1, KEYS),
        counted=torch.tensor([KEYS, KEYS - 3]).expand(STEPS, BATCH),
        tokens=tokens,
        masked=masked,
        valid=valid,
        final_tokens=torch.arange(KEYS).repeat(BATCH, 1),
        layers=(4, 7),
        min_viewers=5,
    )


def rendered(figure: Figure) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight", dpi=60)
    return target.getvalue()


def marks(figure, gid):
    found = [c for c in figure.axes[0].collections if c.get_gid() == gid]
    assert len(found) == 1
    return [tuple(point) for point in found[0].get_offsets().tolist()]


def texts(figure):
    return " ".join(t.get_text() for axes in figure.axes for t in (axes._left_title, axes.yaxis.label))


def mesh(figure):
    return figure.axes[0].collections[0].get_array()


def test_heat_map_holds_the_scores_of_the_chosen_head(received):
    drawn = mesh(incoming_attention(received, layer=7, head=2))
    np.testing.assert_array_equal(drawn.filled(np.nan), received.values[:, 0, 1, 2].numpy())


def test_heat_map_leaves_padding_out_and_takes_chosen_steps(received):
    figure = incoming_attention(received, layer=4, head=0, row=1, steps=[5, 2])
    np.testing.assert_array_equal(mesh(figure).filled(np.nan), received.values[[5, 2], 1, 0, 0, 3:].numpy())
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == [str(i) for i in range(3, 10)]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["5", "2"]
    assert marks(figure, "masked") == [(i - 3 + 0.5, 1.5) for i in range(7, 10)]


@pytest.mark.parametrize(("layer", "axes"), [(7, (-2,)), (None, (1, 2))])
def test_heat_map_of_means(received, layer, axes):
    drawn = mesh(incoming_attention(received, layer=layer, head=None))
    values = received.values[:, 0]
    wanted = values[:, 1].mean(1) if layer else values.mean(axes)
    np.testing.assert_allclose(drawn.filled(np.nan), wanted.numpy(), rtol=1e-6)


def test_dots_are_on_the_masked_cells(received):
    dots = marks(incoming_attention(received, layer=4, head=1), "masked")
    assert dots == [(i + 0.5, t + 0.5) for t in range(STEPS) for i in range(5 + t, KEYS)]


def test_steps_of_a_cache_without_a_score_are_drawn():
    prompts, settings = [[*range(5, 17)], [9, 8, 7, 12]], {"gen_length": 8, "block_length": 4}
    rec = record(tiny("llada"), prompts, [ReceivedAttention()], cache="prefix", **settings)
    scored = (~rec.received.isnan()).any(-1)[:, :, 1, 2]
    assert rec.run.row_steps.tolist() == [8, 8]
    assert scored[:, 0].tolist() == [True] * 5 + [False] * 3  # the last block's later steps compute 4 queries
    for row, keys in ((0, 20), (1, 12)):
        figure = incoming_attention(rec, layer=1, head=2, row=row)
        assert mesh(figure).shape == (8, keys)
        assert (~np.ma.getmaskarray(mesh(figure))).any(-1).tolist() == scored[:, row].tolist()
        assert f"{keys} positions, 8 steps" in texts(figure)
        pieces = received_tokens(rec, layer=1, head=2, row=row).pieces
        assert [piece.heading for piece in pieces] == [f"step {step}" for step in range(8)]


def test_undefined_cells_are_blank_and_explained(received):
    values = received.values.clone()
    values[2, 0, 0, 0, 4] = math.nan
    figure = incoming_attention(replace(received, values=values), layer=4, head=0)
    assert np.argwhere(np.ma.getmaskarray(mesh(figure))).tolist() == [[2, 4]]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "masked (not decoded yet)",
        "undefined (visible to fewer than 5 counted queries)",
    ]


@pytest.mark.parametrize(
    ("scale", "layer", "head", "sentences"),
    [
        ("relative to uniform", 7, 2, ["relative to uniform (1 = uniform)", "level: head (layer 7, head 2)"]),
        ("column sum", 4, None, ["column sum (in queries)", "level: layer (head mean of layer 4)"]),
        ("relative to uniform", None, None, ["level: model (mean over layers 4, 7 and heads)"]),
    ],
)
def test_every_figure_names_scale_level_and_n(received, scale, layer, head, sentences):
    received = received.on_scale(scale)
    figure = incoming_attention(received, layer=layer, head=head, title="a model")
    written = texts(figure).replace("\n", " ")
    expected = [f"scale: {scale}", "queries: all", "10 positions, 6 steps, n = 1 sequence (row 0)", "a model"]
    for sentence in [*expected, *sentences]:
        assert sentence in written
    assert sentences[-1] in figure.axes[-1].get_ylabel()  # the colour bar's
    path = texts(sink_positions(received, TopK(1), layer=layer, head=head)).replace("\n", " ")
    for sentence in [f"rule: TopK(k=1); scale: {scale}", sentences[-1], "queries: all", "n = 1 sequence"]:
        assert sentence in path


def test_positions_of_the_largest_and_whether_it_is_a_sink(received):
    rule = AboveMean(4.0)
    figure = sink_positions(received, rule, layer=4, head=1)
    scores = received.values[:, 0, 0, 1]
    largest = scores.argmax(-1).tolist()
    passes = rule.detect(scores).any(-1).tolist()
    assert 0 < sum(passes) < STEPS  # both kinds occur
    assert marks(figure, "sink") == [(t, largest[t]) for t in range(STEPS) if passes[t]]
    assert marks(figure, "largest") == [(t, largest[t]) for t in range(STEPS) if not passes[t]]
    assert f"sink in {sum(passes)} of 6 steps" in texts(figure)


def test_masked_region_is_shaded_where_it_is_masked(received):
    shading = sink_positions(received, layer=4, head=1).axes[0].collections[0]
    np.testing.assert_array_equal(shading.get_array(), received.masked[:, 0].T.numpy().astype(float))
    # Cell (position, step) is centred on its numbers.
    corners = shading.get_coordinates()
    assert corners[0, 0].tolist() == [-0.5, -0.5]
    assert corners[-1, -1].tolist() == [STEPS - 0.5, KEYS - 0.5]


def test_blocks_are_outlined_over_their_steps(received):
    spans = ((5, 7), (5, 7), (7, 9), (7, 9), (9, 10), (9, 10))
    boxes = sink_positions(received, layer=4, head=1, blocks=spans).axes[0].patches
    assert [(*box.get_xy(), box.get_width(), box.get_height()) for box in boxes] == [
        (-0.5, 4.5, 2, 2),
        (1.5, 6.5, 2, 2),
        (3.5, 8.5, 2, 1),
    ]
    figure = sink_positions(received, layer=4, head=1, blocks=spans)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_texts()[-1].get_text() == "block being decoded"
    assert legend.get_window_extent().x1 < figure.bbox.x1  # also in a figure as narrow as this one
    with pytest.raises(ValueError, match="2 blocks for 6 steps"):
        sink_positions(received, layer=4, head=1, blocks=spans[:2])


def test_rewritten_tokens_are_marked_and_blocks_are_those_of_the_row():
    model = tiny("llada2", sampler="llada2_editing")
    prompts = [[5, 9, 14, 3, 20], [7, 8]]
    settings = {"gen_length": 8, "block_length": 4, "threshold": 0.3, "editing_threshold": 0.1}
    rec = record(model, prompts, [ReceivedAttention(min_viewers=1)], **settings)
    for row, padding in ((0, 0), (1, 3)):
        blocks = row_blocks(rec.run, row)
        expected = {
            (step, position - padding)
            for step in range(rec.run.steps)
            for position in range(rec.run.tokens.shape[1])
            if rec.run.revised[step, row, position]
        }
        assert expected
        figure = sink_positions(rec, layer=1, head=0, row=row, blocks=blocks)
        (marks,) = [one for one in figure.axes[0].collections if one.get_gid() == "revised"]
        assert {tuple(map(int, place)) for place in marks.get_offsets()} == expected
        # Blocks of four from the row's own first token.
        corners = {box.get_xy()[1] + 0.5 for box in figure.axes[0].patches}
        assert all(corner % 4 == 0 for corner in corners)
        assert "token rewritten or opened again" in [text.get_text() for text in figure.legends[0].get_texts()]
    plain = sink_positions(received_of(rec), layer=1, head=0)
    assert not [one for one in plain.axes[0].collections if one.get_gid() == "revised"]
    with pytest.raises(ValueError, match=r"revised has 2 steps.*run.revised"):
        sink_positions(rec, layer=1, head=0, revised=rec.run.revised[:2, 0])
    drawn = find_plot("sink-positions").draw(PlotOptions(recordings={"a": rec, "b": rec}, layer=1, head=0))
    assert [len([c for c in axes.collections if c.get_gid() == "revised"]) for axes in drawn.axes] == [1, 1]


@pytest.mark.parametrize(("level", "layer", "head"), [("head", 7, 2), ("layer", 7, None), ("model", None, None)])
@pytest.mark.parametrize("rule", [AboveMean(3.0), AttentionShare(0.4)], ids=repr)
def test_sinks_and_received_draw_the_same(received, level, layer, head, rule):
    sinks = find_sinks(received, rule, level=level)
    for row in (0, 1):
        ours = sink_positions(sinks, layer=layer, head=head, row=row)
        theirs = sink_positions(received, rule, layer=layer, head=head, row=row)
        for gid in ("sink", "largest"):
            assert marks(ours, gid) == marks(theirs, gid)
        assert ours.axes[0].get_ylim() == theirs.axes[0].get_ylim() == ((-0.8, 9.8) if row == 0 else (-0.8, 6.8))
        np.testing.assert_array_equal(
            ours.axes[0].collections[0].get_array(), theirs.axes[0].collections[0].get_array()
        )


def test_left_out_layer_and_head_are_those_whose_sinks_move_most(received):
    values = torch.ones(received.values.shape)
    values[..., 4] = 9.0  # a sink that stays, everywhere but where the next lines say
    values[:, :, 1, 2] = 1.0
    for step, position in enumerate((3, 5, 6, 6, 8, 4)):
        values[step, :, 1, 2, position] = 9.0
    moving = replace(received, values=values.masked_fill(received.values.isnan(), torch.nan))
    rule = AboveMean(3.0)
    for given, detector in ((moving, rule), (find_sinks(moving, rule), None), (trajectories(moving, rule), None)):
        chosen = sink_positions(given, detector)
        assert marks(chosen, "sink") == marks(sink_positions(given, detector, layer=7, head=2), "sink")
        assert [y for _, y in marks(chosen, "sink")] == [3, 5, 6, 6, 8, 4]
        assert "layer 7, head 2), whose sinks move most" in texts(chosen).replace("\n", " ")
        with pytest.raises(ValueError, match="give both, or neither"):
            sink_positions(given, detector, layer=7)
    assert "model (mean over layers and heads), whose sinks move most" in texts(
        sink_positions(find_sinks(moving, rule, level="model"))
    ).replace("\n", " ")


def test_a_step_without_a_defined_key_has_no_mark(received):
    values = received.values.clone()
    values[3] = math.nan
    figure = sink_positions(replace(received, values=values), layer=4, head=1)
    steps = [x for gid in ("sink", "largest") for x, _ in marks(figure, gid)]
    assert sorted(steps) == [0, 1, 2, 4, 5]


def test_tokens_beside_the_positions_are_those_of_the_largest(received):
    values = torch.zeros_like(received.values)
    values[:3, ..., 1] = 9
    values[3:, ..., 8] = 9
    figure = sink_positions(replace(received, values=values, tokenizer=Hostile()), layer=4, head=1)
    right = figure.axes[0].child_axes[0]
    assert right.get_yticks().tolist() == [1, 8]
    assert [t.get_text() for t in right.get_yticklabels()] == token_labels([1, 8], Hostile())


def test_a_position_that_the_last_step_decides_has_its_final_token(received):
    values, masked = torch.ones_like(received.values), received.masked.clone()
    values[..., 9] = 9.0
    masked[-1, :, 9] = True
    masked_until_the_end = replace(
        received, values=values, masked=masked, tokens=received.final_tokens.where(~masked, torch.tensor(99))
    )
    rule = AboveMean(3.0)
    sinks = find_sinks(masked_until_the_end, rule)
    # Row 1 begins after three positions of padding.
    for given, detector in ((masked_until_the_end, rule), (sinks, None), (trajectories(sinks), None)):
        for row, position in ((0, 9), (1, 6)):
            right = sink_positions(given, detector, layer=4, head=1, row=row).axes[0].child_axes[0]
            assert right.get_yticks().tolist() == [position]
            assert [t.get_text() for t in right.get_yticklabels()] == ["9"]


def test_a_rule_may_be_a_text_and_a_row_that_is_not_there_is_refused():
    rec = record(tiny("llada"), [[*range(5, 17)]], [ReceivedAttention()], gen_length=4)
    rule = AboveMean(0.5)
    for draw in (
        lambda given: score_distribution(rec, detector=given),
        lambda given: sink_strength(rec, given),
        lambda given: sink_positions(rec, given, layer=0, head=0),
    ):
        assert rendered(draw("above-mean:0.5")) == rendered(draw(rule)) != rendered(draw("above-mean:2"))
    with pytest.raises(ValueError, match="row 3 is not among the rows 0"):
        sink_positions(rec, rule, layer=0, head=0, row=3)


@pytest.mark.filterwarnings("error")
def test_hostile_tokens_and_titles_render_without_warnings(received):
    received = replace(received, tokenizer=Hostile())
    title = "$\\frac{$ \\unknown{ $x$"
    for figure in (
        incoming_attention(received, layer=4, head=1, title=title),
        sink_positions(received, layer=4, head=1, title=title),
    ):
        assert rendered(figure).startswith(b"\x89PNG")
        assert title in figure.axes[0]._left_title.get_text()


def test_a_dollar_is_drawn_as_it_is_and_not_as_a_formula(received):
    received = replace(received, tokenizer=Hostile())
    labels = incoming_attention(received, layer=4, head=1).axes[0].get_xticklabels()
    assert labels[0].get_text() == "$x_1$"
    assert not any(label.get_parse_math() or label.get_usetex() for label in labels)


def test_figures_leave_pyplot_alone(received):
    before = "matplotlib.pyplot" in sys.modules
    incoming_attention(received, layer=4, head=1)
    sink_positions(received, layer=4, head=1)
    assert ("matplotlib.pyplot" in sys.modules) is before
    if before:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" apples", "␣apples"),
        (" ", "␣"),
        ("a b", "a␣b"),
        ("", "∅"),
        ("\n\n", "\\n\\n"),
        ("你", "\\u4f60"),
        ("\u202e", "\\u202e"),
        ("$x$", "$x$"),
        ("abcdefghijkl", "abcdefghijkl"),
        ("abcdefghijklm", "abcdefghijk…"),
    ],
)
def test_token_labels_are_visible_and_short(text, label):
    assert token_labels([0], OneText(text)) == [label]


def test_labels_of_every_font_hold_characters_that_it_has():
    assert token_labels([0], OneText("Ж")) == ["Ж"]
    with rc_context({"font.family": "cmr10"}):
        assert token_labels([0], OneText("Ж")) == ["\\u0416"]
    assert token_labels([0], OneText("Ж")) == ["Ж"]


def test_token_labels_without_a_tokenizer_are_ids():
    assert token_labels([7, 3, 7]) == ["7", "3", "7"]


def test_captions_break_between_parts():
    assert caption(["a" * 20, "b" * 15, "c" * 10], width=1) == f"{'a' * 20} · {'b' * 15}\n{'c' * 10}"


def test_a_caption_is_above_the_figure_or_its_axes_without_empty_parts_and_as_wide_as_it():
    figure = Figure(figsize=(3, 2))
    axes = figure.add_subplot()
    assert captioned(figure, "", "a" * 20, "", "$b$") is figure
    assert figure.get_suptitle() == f"{'a' * 20} · $b$"
    captioned(figure, "model", "c" * 30, "d" * 10, axes=axes, fontsize=7)
    assert axes.get_title("left") == f"model · {'c' * 30}\n{'d' * 10}"  # 14 characters an inch
    assert figure.get_suptitle() == f"{'a' * 20} · $b$"


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda r: incoming_attention(r, layer=5, head=0), ValueError, "layer 5 is not among the layers 4, 7"),
        (lambda r: incoming_attention(r, layer=4, head=3), ValueError, "head 3 is not among the heads 0, 1, 2"),
        (lambda r: incoming_attention(r, layer=4, head=0, row=2), ValueError, "row 2 is not among the rows 0, 1"),
        (lambda r: incoming_attention(r, layer=None, head=0), ValueError, "head 0 has no layer"),
        (lambda r: incoming_attention(r, layer=4, head=0, steps=[6]), ValueError, "steps go from 0 to 5"),
        (lambda r: incoming_attention(r, layer=4, head=0, steps=[]), ValueError, "steps is empty"),
        (lambda r: incoming_attention(r.values, layer=4, head=0), TypeError, "first argument is a Tensor"),
        (lambda r: sink_positions(find_sinks(r, TopK(1)), TopK(1), layer=4, head=0), TypeError, "a detector goes"),
        (lambda r: sink_positions(find_sinks(r, TopK(1)), layer=4, head=None), ValueError, "are of 'layer'"),
        (lambda r: sink_positions(find_sinks(r, TopK(1)), layer=5, head=0), ValueError, "layer 5 is not among"),
    ],
)
def test_what_is_not_there_is_refused(received, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(received)


def test_sinks_without_steps_cannot_be_followed():
    pattern = torch.full((2, 12, 12), 1 / 12)
    with pytest.raises(TypeError, match="no steps to follow"):
        sink_positions(find_sinks(pattern, TopK(1)), layer=0, head=0)


@pytest.mark.parametrize(("steps", "keys"), [(4, 12), (64, 181), (128, 400), (512, 700)])
def test_dots_of_masked_positions_can_be_seen_on_long_canvases(steps: int, keys: int) -> None:
    """At least a quarter of the side of a cell, more white than rim, and no larger than the cell."""
    scores = torch.rand(steps, 1, 1, 1, keys)
    received = Received(
        values=scores,
        expected=torch.ones_like(scores),
        counted=torch.ones(steps, 1).long(),
        masked=torch.ones(steps, 1, keys).bool(),
        layers=(0,),
    )
    figure = incoming_attention(received, layer=0, head=0)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    cell = 72 * min(box.width / keys, box.height / steps)
    (dots,) = (one for one in axes.collections if one.get_gid() == "masked")
    across = float(dots.get_sizes()[0]) ** 0.5
    assert min(0.25 * cell, 2) <= across <= cell
    assert 4 * float(dots.get_linewidths()[0]) < across


def made(steps: int = 2, keys: int = 6, scores: float = 0.5, dtype: torch.dtype = torch.float32) -> Received:
    values = torch.full((steps, 1, 1, 1, keys), scores, dtype=dtype)
    return Received(
        values=values, expected=torch.ones_like(values), counted=torch.full((steps, 1), keys), layers=(0,)
    )


DRAWN = {
    "incoming_attention": lambda given: incoming_attention(given, layer=0, head=0),
    "sink_positions": lambda given: sink_positions(given, layer=0, head=0),
    "score_distribution": score_distribution,
    "sink_strength": sink_strength,
    "sinks_over_eps": sinks_over_eps,
}


@pytest.mark.parametrize("name", DRAWN)
def test_of_nothing_nothing_is_drawn(name: str) -> None:
    for empty, axis in ((made(steps=0), "step"), (made(keys=0), "key")):
        with pytest.raises(ValueError, match=f"has no {axis} to draw; select at least one"):
            DRAWN[name](empty)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.filterwarnings("error")
def test_scores_in_bfloat16_are_drawn_and_no_sink_warns_of_nothing(name: str) -> None:
    exact, half = (DRAWN[name](made(dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    half.savefig(io.BytesIO())
    assert_alike(half, exact)
    scores = torch.linspace(0.1, 2, 24).view(4, 1, 1, 1, 6).bfloat16()
    rounded = replace(made(steps=4), values=scores)
    assert_alike(DRAWN[name](rounded), DRAWN[name](replace(rounded, values=scores.float())))


def assert_alike(one: Figure, other: Figure) -> None:
    """Both figures show the same numbers, and some."""
    shown, wanted = (
        [
            np.ma.filled(np.ma.asarray(values, dtype=float), np.nan)
            for axes in figure.axes
            for values in (
                *(line.get_xydata() for line in axes.lines),
                *(part.get_offsets() for part in axes.collections),
                *(part.get_array() for part in axes.collections if part.get_array() is not None),
                *(path.vertices for part in axes.collections for path in part.get_paths()),
            )
        ]
        for figure in (one, other)
    )
    assert sum(np.isfinite(values).sum() for values in shown) > 10
    assert len(shown) == len(wanted)
    for found, expected in zip(shown, wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, equal_nan=True)
    assert [[text.get_text() for text in axes.texts] for axes in one.axes] == [
        [text.get_text() for text in axes.texts] for axes in other.axes
    ]


def test_scores_of_zero_have_no_logarithm() -> None:
    with pytest.raises(ValueError, match="no key has a score above 0"):
        score_distribution(made(scores=0.0))


def test_a_head_of_the_mean_over_heads_has_no_scores() -> None:
    merged = made().at_level("layer")
    assert score_distribution(merged, layer=0).axes
    with pytest.raises(ValueError, match="these scores are of the layer mean, which has no head level left"):
        score_distribution(merged, layer=0, head=0)
