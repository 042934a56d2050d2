"""The pictures that `dlm-lens plot` makes of a recording: what each shows, takes, and writes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlm_lens import viz
from dlm_lens.command_options import check_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dlm_lens.viz import View
    from dlm_lens.viz.plot_options import Asked

FIGURES = (".png", ".pdf", ".svg")
PAGES = (".html",)


@dataclass(frozen=True)
class Kind:
    """One picture.

    Args:
        about: a sentence.
        make: the figure or view.
        options: which of layer, head, row, step, position, eps, model, recordings mean something to it.
        needs: what must have been recorded.
        suffixes: of the files that it can be written to.
    """

    about: str
    make: "Callable[[Asked], Figure | View]"
    options: str
    needs: str = "received"
    suffixes: tuple[str, ...] = FIGURES


def _positions(asked: "Asked") -> "Figure":
    if len(asked.recordings) == 1:
        layer, head = asked.place()
        return viz.sink_positions(
            asked.received,
            asked.rule,
            layer=layer,
            head=head,
            row=asked.row,
            blocks=asked.run.spans,
            title=asked.name,
        )
    from dlm_lens.viz.selection import as_received

    given = {name: as_received(recording) for name, recording in asked.recordings.items()}
    return viz.sink_positions_by_model(
        given,
        asked.rule,
        heads={name: asked.place(received) for name, received in given.items()},
        rows=dict.fromkeys(given, asked.row),
        blocks={name: recording.run.spans for name, recording in asked.recordings.items()},
        title=", ".join(asked.chosen) if asked.title is None else asked.title,
    )


def _incoming(asked: "Asked") -> "Figure":
    layer, head = asked.place()
    return viz.incoming_attention(
        asked.received, layer=layer, head=head, row=asked.row, steps=asked.steps or None, title=asked.name
    )


def _distribution(asked: "Asked") -> "Figure":
    layer, head = asked.wide
    return viz.score_distribution(asked.received, layer=layer, head=head, detector=asked.rule, title=asked.name)


def _strength(asked: "Asked") -> "Figure":
    return viz.sink_strength(asked.received, asked.rule, title=asked.name)


def _sweep(asked: "Asked") -> "Figure":
    return viz.sinks_over_eps(asked.received, marked=asked.eps, title=asked.name)


def _regions(asked: "Asked") -> "Figure":
    layer, head = asked.wide
    return viz.region_mass(asked.recording, layer=layer, head=head, title=asked.name)


def _norms(name: str) -> "Callable[[Asked], Figure]":
    def make(asked: "Asked") -> "Figure":
        from dlm_lens.probes import value_norms
        from dlm_lens.sinks import find_sinks

        found = value_norms(asked.recording, find_sinks(asked.received, asked.rule))
        return getattr(viz, name)(found, title=asked.name)

    return make


def _maps(asked: "Asked") -> "Figure":
    layer, head = asked.place()
    if layer is None:
        raise ValueError("this picture is of one layer; give --layer")
    last = asked.row_steps - 1
    steps = asked.steps or tuple(dict.fromkeys((last // 4, 3 * last // 4)))
    return viz.attention_maps(
        asked.network, asked.run, steps=steps, layer=layer, head=head, row=asked.row, detector=asked.rule,
        title=asked.name,
    )  # fmt: skip


def _lens(asked: "Asked") -> "Figure":
    from dlm_lens.probes import logit_lens

    model = asked.network
    run = asked.run
    if (position := asked.canvas_position()) is not None:
        lens = logit_lens(model, run, [position], steps=asked.steps or None)
        return viz.lens_table(lens, position=position, row=asked.row, title=asked.name)
    start, stop = run.spans[asked.step()]
    lens = logit_lens(model, run, list(range(start, stop)), steps=[asked.step()])
    return viz.lens_table(lens, step=asked.step(), row=asked.row, title=asked.name)


def _heads(asked: "Asked") -> "View":
    layer, _ = asked.place()
    if layer is None:
        raise ValueError("this view is of one layer; give --layer")
    return viz.attention_heads(asked.run, asked.network, step=asked.step(), layer=layer, row=asked.row)


def _one_head(name: str) -> "Callable[[Asked], View]":
    def make(asked: "Asked") -> "View":
        place, step = asked.one_head(), asked.step()  # before the model is loaded
        return getattr(viz, name)(asked.run, asked.network, step=step, row=asked.row, **place)

    return make


def _tokens(asked: "Asked") -> "View":
    layer, head = asked.place()
    return viz.received_tokens(asked.received, layer=layer, head=head, row=asked.row, steps=asked.steps or None)


def _text(asked: "Asked") -> "View":
    return viz.emerging_text(asked.run, row=asked.row, steps=asked.steps or None)


KINDS: dict[str, Kind] = {
    "incoming-attention": Kind(
        "what every token receives, step by step (2510.15731, Figure 1)", _incoming, "layer head row step pick"
    ),
    "sink-positions": Kind(
        "where the largest sink is at every step (Figure 7); of several recordings side by side",
        _positions,
        "layer head row eps pick recordings",
    ),
    "score-distribution": Kind("how many keys score how high (Figures 3, 9)", _distribution, "layer head eps"),
    "sink-strength": Kind("the main sink's score per layer and head (Figure 5)", _strength, "eps"),
    "sinks-over-eps": Kind("how many keys are sinks as eps grows (Figure 10)", _sweep, "eps"),
    "region-mass": Kind("attention by region of keys over the steps", _regions, "layer head", "region_mass"),
    "value-norms": Kind(
        "value norms of sinks beside matched others (2601.19657, Figure 1)",
        _norms("value_norm_scatter"),
        "eps",
        "value_norm",
    ),
    "value-norm-layers": Kind(
        "value norms and received attention per layer (2601.19657, Figure 3)",
        _norms("value_norm_layers"),
        "eps",
        "value_norm",
    ),
    "attention-maps": Kind(
        "patterns at a few steps, sinks marked (Figures 4, 6, 8); runs the model",
        _maps,
        "layer head row step eps pick model",
        "",
    ),
    "lens-table": Kind(
        "what a logit lens reads per layer, at a position or a step; runs the model",
        _lens,
        "row step position model",
        "",
    ),
    "attention-heads": Kind(
        "circuitsvis: all heads of a layer at a step; runs the model",
        _heads,
        "layer row step pick model",
        "",
        PAGES,
    ),
    "attention-pattern": Kind(
        "circuitsvis: one head with its values; runs the model",
        _one_head("attention_pattern"),
        "layer head row step pick model",
        "",
        PAGES,
    ),
    "value-weighted-pattern": Kind(
        "circuitsvis: one head weighted by value norms; runs the model",
        _one_head("value_weighted_pattern"),
        "layer head row step pick model",
        "",
        PAGES,
    ),
    "received-tokens": Kind(
        "circuitsvis: the text coloured by received attention", _tokens, "layer head row step pick", suffixes=PAGES
    ),
    "emerging-text": Kind("circuitsvis: the text as it emerges", _text, "row step", "", PAGES),
}
"""By the name on the command line."""


def _flag(option: str) -> str:
    return "several recordings" if option == "recordings" else f"--{option}"


def check_options(kind: str, given: frozenset[str], out: Path) -> None:
    """Raise where a kind takes no such option or cannot be written to such a file; needs no torch.

    Args:
        kind: a name of `KINDS`.
        given: the options that the user gave.
        out: the file.

    Raises:
        ValueError: an option that means nothing to this kind, or another format.
        FileNotFoundError: the file's directory is not there.
    """
    entry = KINDS[kind]
    if foreign := sorted(given - set(entry.options.split())):
        names, known = (" ".join(map(_flag, chosen)) for chosen in (foreign, entry.options.split()))
        raise ValueError(f"{kind} takes no {names}; it takes {known}")
    if out.suffix.lower() not in entry.suffixes:
        raise ValueError(
            f"{out} ends in {out.suffix or 'nothing'}; {kind} is written as {', '.join(entry.suffixes)}"
        )
    check_file(out)


def draw(kind: str, asked: "Asked", out: Path, given: frozenset[str]) -> Path:
    """Make a picture and write it.

    Args:
        kind: a name of `KINDS`.
        asked: what of.
        out: the file; its suffix says the format.
        given: the options that the user gave.

    Raises:
        ValueError: an option that means nothing to this kind, another format, or a statistic that was not recorded.
        FileNotFoundError: the file's directory is not there.
    """
    check_options(kind, given, out)
    entry = KINDS[kind]
    for name, recording in asked.recordings.items():
        if entry.needs and entry.needs not in recording.specs:
            raise ValueError(
                f"{name} has no {entry.needs}, which {kind} needs; it has {', '.join(recording.specs)}"
            )
    from dlm_lens.viz.views.view import View

    made = entry.make(asked)
    if isinstance(made, View):
        return made.save(out)
    made.savefig(out, bbox_inches="tight", dpi=150)
    return out
