"""What `dlm-lens demo` does: denoise a prompt, find the sinks, write figures and numbers."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.adapters import embedded_models, load
from dlm_lens.cli.output import lines_of
from dlm_lens.files.atomic_writes import write_figure, write_file
from dlm_lens.files.paths import check_directory
from dlm_lens.printable import counted, printable
from dlm_lens.recording import record
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import AboveMean, Received, Sinks, find_sinks, received_of, trajectories
from dlm_lens.viz import emerging_lines, incoming_attention, sink_positions
from dlm_lens.viz.selection import most_moving, strongest

PROMPT = "leo has 26 stones . leo breaks 6 . leo loses 9 . he picks 12 stones . how many stones now ? :"
"""A word problem of the embedded models' language; `python -m experiments.toy.examples` explains the choice."""

EXAMPLE = {"gen_length": 21, "block_length": 7}
"""The length of its answer, with one line of the calculation per block, so that no step decodes end-of-text."""

LONGEST = 64
"""The largest default length of an answer; models' own defaults go up to 512 steps, hours on a CPU."""

FIGURES = ("incoming-attention", "sink-positions")

SHOWN_STEPS = 24
SHOWN_SINKS = 10


@dataclass(frozen=True)
class Demo:
    """The results of the demo.

    Args:
        run: the run.
        received: received attention at every step.
        sinks: the sinks by `AboveMean(3.0)`.
        heads: "strongest" and, if any sink moves, "moving" -> (layer, head) of the figures.
        files: the files that it wrote.
    """

    run: DenoisingRun
    received: Received
    sinks: Sinks
    heads: dict[str, tuple[int | None, int | None]]
    files: tuple[Path, ...]


def run_demo(
    prompt: str | None = None,
    model: str = "toy",
    out: Path = Path("dlm-lens-demo"),
    *,
    steps: int | None = None,
    gen_length: int | None = None,
    seed: int = 0,
    loading: Mapping[str, Any] = MappingProxyType({}),
    console: Console | None = None,
    started: float | None = None,
) -> Demo:
    """Denoise `prompt`, find its attention sinks at every step, show them, and write it all to `out`.

    The rule is Eq. 3 of 2510.15731 with eps = 3 on received attention relative to uniform, per head. The figures
    show the head whose strongest key scores highest on average over steps, and the one whose sinks move most often,
    if any do. They replace those of an earlier demo in `out`.
    A progress bar of the run is written to stderr.

    Args:
        prompt: the text to continue; None for `PROMPT`.
        model: a name that `dlm_lens.load` takes.
        out: directory for the figures and the numbers.
        steps: denoising steps; None for one per token.
        gen_length: tokens of the answer; None for those of `PROMPT`'s answer in an embedded model, otherwise the
            model's own number, at most `LONGEST`.
        seed: of the run.
        loading: arguments of `dlm_lens.load`, such as a device.
        console: the console to print to; None for the terminal.
        started: when the command began, by `time.perf_counter`, so that the seconds which it prints at the end have
            the imports in them; None for now.

    Raises:
        ValueError: an empty prompt or an unknown model; nothing has been written then.
        FileExistsError: `out` is a file.
    """
    console = console or Console()
    begun = time.perf_counter()
    started = begun if started is None else started
    check_directory(out)
    embedded = model in embedded_models()
    if not embedded:
        console.print(Text(f"Loading {printable(model)} ..."), soft_wrap=True)
    loaded = load(model, **loading)
    settings, sentence = demo_settings(
        loaded, example=embedded and prompt is None, steps=steps, gen_length=gen_length
    )
    prompt = PROMPT if prompt is None else prompt
    console.print(f"{_described(loaded, model)}, loaded in {time.perf_counter() - begun:.1f} s", soft_wrap=True)
    _warn_of_unknown_words(console, loaded, prompt)
    if sentence:
        console.print(sentence, soft_wrap=True)
    # Statistics are recorded during the run, which saves a second pass per step.
    recording = record(loaded, prompt, progress=True, seed=seed, **settings)
    run, received = recording.run, received_of(recording)
    sinks = find_sinks(received, AboveMean(eps=3.0))
    heads = {"strongest": strongest(received), **_most_moving(sinks)}
    out.mkdir(parents=True, exist_ok=True)
    # Written before the tables are printed: the reader of the output may be gone.
    files = _write(out, model, run, received, sinks, heads)
    _print_text(console, run)
    _print_sinks(console, sinks)
    console.print(f"\n{_about_figures(heads)}")
    for path in files:
        console.print(Text(f"  {path}"))
    console.print(f"Done in {time.perf_counter() - started:.1f} s.")
    return Demo(run, received, sinks, heads, files)


def _most_moving(sinks: Sinks) -> dict[str, tuple[int | None, int | None]]:
    """The head whose sinks move most, as "moving"; nothing where no sink moves."""
    paths = trajectories(sinks)
    return {"moving": most_moving(paths)} if (paths.summary(by="head")["moves"] > 0).any() else {}


def _about_figures(heads: dict[str, tuple[int | None, int | None]]) -> str:
    text = "Figures: the head whose strongest key scores highest on average (layer {}, head {})"
    other = ", and the head whose sinks move most often (layer {}, head {})." if "moving" in heads else ""
    return (text + (other or "; no sink moves.")).format(*(one for head in heads.values() for one in head))


def demo_settings(
    model: Any, *, example: bool, steps: int | None, gen_length: int | None
) -> tuple[dict[str, Any], str]:
    """The settings of `denoise` that differ from the model's own, and a sentence about them or an empty text.

    Args:
        model: from `dlm_lens.load`.
        example: whether an embedded model continues `PROMPT`.
        steps: denoising steps; None if not given.
        gen_length: tokens of the answer; None if not given.
    """
    own: dict[str, Any] = model.sampler_defaults
    settings: dict[str, Any] = {}
    if gen_length is not None:
        settings["gen_length"] = gen_length
    elif example:
        settings = {name: value for name, value in EXAMPLE.items() if name in own}
    elif own.get("gen_length", 0) > LONGEST:
        settings["gen_length"] = LONGEST
    length = settings.get("gen_length", own.get("gen_length", 0))
    if steps is not None:
        settings["steps"] = steps
    elif own.get("steps", 0) > length:
        settings["steps"] = length
    if example or not settings or (gen_length is not None and steps is not None):
        return settings, ""
    shown = f"{length} tokens" + (f" in {settings['steps']} steps" if "steps" in settings else "")
    defaults = f"{own.get('gen_length')} tokens" + (f" in {own['steps']} steps" if "steps" in own else "")
    return settings, f"Writing {shown}; the model's own settings: {defaults} (--gen-length, --steps)."


def _described(model: PreTrainedModel, name: str) -> str:
    config: Any = model.config
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return (
        f"{name}: {type(model).__name__}, {millions:.2f} million parameters, {config.num_hidden_layers} layers "
        f"of {config.num_attention_heads} heads"
    )


def _warn_of_unknown_words(console: Console, model: Any, prompt: str) -> None:
    tokenizer = model.tokenizer
    unknown = getattr(tokenizer, "unk_token_id", None)
    words = [word for word in prompt.split() if unknown is not None and unknown in tokenizer(word)["input_ids"]]
    if words:
        listed = printable(", ".join(dict.fromkeys(words)))
        console.print(Text(f"Not in this model's language, and read as {tokenizer.unk_token}: {listed}", "yellow"))


def _print_text(console: Console, run: DenoisingRun) -> None:
    every = max(1, -(-run.steps // SHOWN_STEPS))
    steps = sorted({*range(0, run.steps, every), run.steps - 1})
    console.print(
        f"\n[bold]The answer, step by step[/bold] ({len(steps)} of {run.steps} steps; ▢ masked, ∎ end of text)"
    )
    width = len(str(run.steps - 1))
    for step, line in zip(steps, emerging_lines(run, steps=steps), strict=True):
        console.print(Text(f"{step:{width}d}  ", style="cyan") + line, soft_wrap=True)
    console.print(Text(f"\n{printable(run.texts[0])}", style="bold"))


def _print_sinks(console: Console, sinks: Sinks) -> None:
    """The strongest sinks, each (layer, head, position) once: at the step at which it is strongest."""
    peaks, count = sinks.table(top=SHOWN_SINKS), len(sinks.table(top=int(sinks.is_sink.sum())))
    table = Table(
        title=f"{len(peaks)} of {count} sinks, each at its strongest step; score: {sinks.scale}",
        title_justify="left",
    )
    names = ("layer", "head", "position", "token", "masked", "step", "score", "sink for")
    for name in names:
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    for _, row in peaks.iterrows():
        cells = {name: str(row[name]) for name in names[:-1]}
        cells["position"] = "-" if pd.isna(row["position"]) else cells["position"]
        cells |= {"masked": "yes" if row["masked"] else "no"}
        cells |= {"score": f"{row['score']:.1f}", "sink for": f"{counted(row['steps'], 'step')}"}
        table.add_row(*(Text(cells[name]) for name in names))
    console.print()
    if len(peaks):
        console.print(table)
    else:
        console.print("No key passes the rule at any step.")
    console.print(Text(f"Rule: {sinks.rule}.", style="dim"))


def _write(
    out: Path,
    model: str,
    run: DenoisingRun,
    received: Received,
    sinks: Sinks,
    heads: dict[str, tuple[int | None, int | None]],
) -> tuple[Path, ...]:
    paths = []
    for path in (out / f"{figure}-moving.png" for figure in FIGURES):
        path.unlink(missing_ok=True)  # of an earlier demo whose sinks moved
    for name, (layer, head) in heads.items():
        place: dict[str, Any] = {"layer": layer, "head": head, "title": model}
        drawn = (
            incoming_attention(received, **place),
            sink_positions(received, sinks.detector, blocks=run.spans, **place),
        )
        for figure, one in zip(FIGURES, drawn, strict=True):
            paths.append(write_figure(out / f"{figure}-{name}.png", one))
    numbers = out / "sinks.json"
    write_file(numbers, json.dumps(_numbers(model, run, received, sinks, heads), indent=1, allow_nan=False))
    return (*paths, numbers)


def _numbers(
    model: str, run: DenoisingRun, received: Received, sinks: Sinks, heads: dict[str, tuple[int | None, int | None]]
) -> dict[str, Any]:
    defined = received.values[:, 0].isnan().logical_not().any(-1)
    largest = received.values[:, 0].nan_to_num(nan=-torch.inf)
    scores = largest.amax(-1).where(defined, 0.0).tolist()
    return {
        "model": model,
        "dlm_lens": dlm_lens.__version__,
        "settings": {key: list(v) if isinstance(v, tuple) else v for key, v in run.settings.items()},
        "text": run.texts[0],
        "answer": run.answers[0],
        "tokens": run.canvases[:, 0].tolist(),
        "masked": run.masked[:, 0].int().tolist(),
        "rule": sinks.rule,
        "scale": sinks.scale,
        "level": sinks.level,
        "figures": {name: {"layer": layer, "head": head} for name, (layer, head) in heads.items()},
        "largest": {
            "axes": ["step", "layer", "head"],
            "position": largest.argmax(-1).where(defined, -1).tolist(),
            "score": [[[round(v, 4) for v in heads] for heads in layers] for layers in scores],
            "is_sink": (sinks.main()[:, 0] >= 0).int().tolist(),
        },
        "sinks": lines_of(sinks.table(sort="place").drop(columns=["scale", "level"])),
    }
