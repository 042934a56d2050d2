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
    from dlm_lens.viz.plot_options import PlotOptions

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
    make: "Callable[[PlotOptions], Figure | View]"
    options: str
    needs: str = "received"
    suffixes: tuple[str, ...] = FIGURES


def _positions(options: "PlotOptions") -> "Figure":
    if len(options.recordings) == 1:
        layer, head = options.place()
        return viz.sink_positions(
            options.received,
            options.rule,
            layer=layer,
            head=head,
            row=options.row,
            blocks=options.run.spans,
            title=options.name,
        )
    from dlm_lens.viz.selection import as_received

    given = {name: as_received(recording) for name, recording in options.recordings.items()}
    return viz.sink_positions_by_model(
        given,
        options.rule,
        heads={name: options.place(received) for name, received in given.items()},
        rows=dict.fromkeys(given, options.row),
        blocks={name: recording.run.spans for name, recording in options.recordings.items()},
        title=", ".join(options.chosen) if options.title is None else options.title,
    )


def _incoming(options: "PlotOptions") -> "Figure":
    layer, head = options.place()
    return viz.incoming_attention(
        options.received, layer=layer, head=head, row=options.row, steps=options.steps or None, title=options.name
    )


def _distribution(options: "PlotOptions") -> "Figure":
    layer, head = options.wide
    return viz.score_distribution(
        options.received, layer=layer, head=head, detector=options.rule, title=options.name
    )


def _strength(options: "PlotOptions") -> "Figure":
    return viz.sink_strength(options.received, options.rule, title=options.name)


def _sweep(options: "PlotOptions") -> "Figure":
    return viz.sinks_over_eps(options.received, marked=options.eps, title=options.name)


def _regions(options: "PlotOptions") -> "Figure":
    layer, head = options.wide
    return viz.region_mass(options.recording, layer=layer, head=head, title=options.name)


def _norms(name: str) -> "Callable[[PlotOptions], Figure]":
    def make(options: "PlotOptions") -> "Figure":
        from dlm_lens.probes import value_norms
        from dlm_lens.sinks import find_sinks

        found = value_norms(options.recording, find_sinks(options.received, options.rule))
        return getattr(viz, name)(found, title=options.name)

    return make


def _maps(options: "PlotOptions") -> "Figure":
    layer, head = options.place()
    if layer is None:
        raise ValueError("this picture is of one layer; give --layer")
    last = options.row_steps - 1
    steps = options.steps or tuple(dict.fromkeys((last // 4, 3 * last // 4)))
    return viz.attention_maps(
        options.network, options.run, steps=steps, layer=layer, head=head, row=options.row, detector=options.rule,
        title=options.name,
    )  # fmt: skip


def _lens(options: "PlotOptions") -> "Figure":
    from dlm_lens.probes import logit_lens

    model = options.network
    run = options.run
    if (position := options.canvas_position()) is not None:
        lens = logit_lens(model, run, [position], steps=options.steps or None)
        return viz.lens_table(lens, position=position, row=options.row, title=options.name)
    start, stop = run.spans[options.step()]
    lens = logit_lens(model, run, list(range(start, stop)), steps=[options.step()])
    return viz.lens_table(lens, step=options.step(), row=options.row, title=options.name)


def _heads(options: "PlotOptions") -> "View":
    layer, _ = options.place()
    if layer is None:
        raise ValueError("this view is of one layer; give --layer")
    return viz.attention_heads(options.run, options.network, step=options.step(), layer=layer, row=options.row)


def _one_head(name: str) -> "Callable[[PlotOptions], View]":
    def make(options: "PlotOptions") -> "View":
        place, step = options.one_head(), options.step()  # before the model is loaded
        return getattr(viz, name)(options.run, options.network, step=step, row=options.row, **place)

    return make


def _tokens(options: "PlotOptions") -> "View":
    layer, head = options.place()
    return viz.received_tokens(
        options.received, layer=layer, head=head, row=options.row, steps=options.steps or None
    )


def _text(options: "PlotOptions") -> "View":
    return viz.emerging_text(options.run, row=options.row, steps=options.steps or None)


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


def draw(kind: str, options: "PlotOptions", out: Path, given: frozenset[str]) -> Path:
    """Make a picture and write it.

    Args:
        kind: a name of `KINDS`.
        options: what of.
        out: the file; its suffix says the format.
        given: the options that the user gave.

    Raises:
        ValueError: an option that means nothing to this kind, another format, or a statistic that was not recorded.
        FileNotFoundError: the file's directory is not there.
    """
    check_options(kind, given, out)
    entry = KINDS[kind]
    for name, recording in options.recordings.items():
        if entry.needs and entry.needs not in recording.specs:
            raise ValueError(
                f"{name} has no {entry.needs}, which {kind} needs; it has {', '.join(recording.specs)}"
            )
    from dlm_lens.viz.views.view import View

    made = entry.make(options)
    if isinstance(made, View):
        return made.save(out)
    made.savefig(out, bbox_inches="tight", dpi=150)
    return out
