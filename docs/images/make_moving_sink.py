"""Draw `moving-sink.gif`, the moving picture of the README: `python docs/images/make_moving_sink.py`.

A real run of the embedded model `toy` and the figure `dl.viz.attention_maps`, one frame per step: the canvas with
the tokens that are decided, and the attention of the head whose sink moves, its main sink marked.
"""

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

import dlm_lens as dl

PROMPT = "leo has 26 stones . leo breaks 6 . leo loses 9 . he picks 12 stones . how many stones now ? :"
LAYER, HEAD = 2, 3
DPI = 90
INK, MASKED, SINK, NEW = "#333333", "#7fa8cc", "#b2182b", "#1a7f37"


def frame(model: Any, run: Any, sinks: Any, step: int) -> Image.Image:
    """One step: the answer on the canvas above the head's attention."""
    main = int(sinks.main()[step, 0, LAYER, HEAD])
    answer = range(run.prompt_length, run.canvases.shape[2])
    after = run.canvases[step + 1, 0]
    band = Figure(figsize=(6.2, 0.9), dpi=DPI)
    head = f"Step {step}, main sink of layer {LAYER}, head {HEAD}:"
    band.text(0.02, 0.72, head, fontsize=10, color=INK)
    sink = run.tokenizer.decode([int(after[main])]) if main >= 0 else "none"
    band.text(
        0.48, 0.72, f"{sink}" if main < 0 else f"{sink}, at position {main}", fontsize=10, color=SINK, weight="bold"
    )
    x = 0.02
    for position in answer:
        decided = not bool(run.masked[step, 0, position]) or bool(run.unmasked[step, 0, position])
        new = bool(run.unmasked[step, 0, position])
        text = run.tokenizer.decode([int(after[position])]) if decided else "▢"
        colour = SINK if position == main else NEW if new else INK if decided else MASKED
        band.text(x, 0.22, text, fontsize=9.5, color=colour, weight="bold" if new or position == main else "normal")
        # The room of the final token, so that nothing moves when it is decided.
        x += 0.02 + 0.015 * len(run.tokenizer.decode([int(run.tokens[0, position])]))
    figure = dl.viz.attention_maps(model, run, steps=(step,), layer=LAYER, head=HEAD)
    return stacked(drawn(band), drawn(figure))


def drawn(figure: Figure) -> Image.Image:
    """The figure as pixels."""
    memory = io.BytesIO()
    figure.savefig(memory, format="png", dpi=DPI)
    return Image.open(memory).convert("RGB")


def stacked(above: Image.Image, below: Image.Image) -> Image.Image:
    """One picture above the other."""
    whole = Image.new("RGB", (max(above.width, below.width), above.height + below.height), "white")
    whole.paste(above, (0, 0))
    whole.paste(below, ((whole.width - below.width) // 2, above.height))
    return whole


def main() -> None:
    """Denoise, draw every step and write the GIF beside this file."""
    model = dl.load("toy")
    run = dl.denoise(model, PROMPT, gen_length=21, block_length=7, seed=0)
    sinks = dl.find_sinks(dl.received_over_steps(model, run), dl.AboveMean(eps=3.0))
    frames = [frame(model, run, sinks, step) for step in range(run.steps)]
    # One palette for all frames: colours that change from frame to frame flicker.
    film = Image.new("RGB", (frames[0].width, frames[0].height * len(frames)))
    for number, one in enumerate(frames):
        film.paste(one, (0, number * one.height))
    palette = film.quantize(128, method=Image.Quantize.MAXCOVERAGE)
    frames = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames]
    durations = [600] * (len(frames) - 1) + [3000]
    path = Path(__file__).with_name("moving-sink.gif")
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    main()
