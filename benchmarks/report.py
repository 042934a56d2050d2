"""Size, build time and load time of the largest reports: `--steps` steps of 32 layers of 32 heads of `--keys` keys.

    python -m benchmarks.report [--steps 200 --keys 512] [--out DIR]

Three kinds of scores: a recording of the embedded model as it is; made-up attention with sinks, in which a key's
logit drifts from step to step; and independent noise, which cannot be compressed. Load time is from opening the
file in headless Chromium to the first painted step; step time is that of showing another step. Both are omitted
without Chromium.
"""

import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dlm_lens
from benchmarks.timing import machine
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sinks import Received

LAYERS, HEADS = 32, 32


def run_of(steps: int, keys: int, prompt: int) -> DenoisingRun:
    """A run that decides its answer in a random order, the same number of positions at every step."""
    generator = torch.Generator().manual_seed(0)
    order = prompt + torch.randperm(keys - prompt, generator=generator)
    step_of = torch.full((keys,), -1)
    step_of[order] = torch.arange(keys - prompt) * steps // (keys - prompt)
    masked = step_of >= torch.arange(steps + 1)[:, None]
    tokens = torch.randint(1, 30000, (keys,), generator=generator)
    return DenoisingRun(
        canvases=torch.where(masked, 0, tokens)[:, None],
        masked=masked[:, None],
        proposals=tokens.expand(steps, 1, keys),
        confidence=torch.zeros(steps, 1, keys),
        unmasked=(step_of == torch.arange(steps)[:, None])[:, None],
        attention_mask=torch.ones(1, keys, dtype=torch.bool),
        prompt_length=prompt,
        spans=((prompt, keys),) * steps,
        blocks=(0,) * steps,
        settings={"sampler": "made up", "steps": steps},
    )


def received_of(run: DenoisingRun, kind: str, layers: int, heads: int) -> Received:
    """Scores that sum to the number of keys: "sinks" that drift over the steps, or independent "noise"."""
    generator = torch.Generator().manual_seed(0)
    steps, _, keys = run.unmasked.shape
    shape = (steps, 1, layers, heads, keys)
    if kind == "noise":
        logits = torch.randn(shape, generator=generator)
    else:
        still = 1.2 * torch.randn(shape[1:], generator=generator)
        still += 5 * (torch.rand(shape[1:], generator=generator) < 0.01)
        drift = 0.05 * torch.randn(shape, generator=generator).cumsum(0)
        logits = still + drift - 1.5 * run.masked[:-1, :, None, None]
    return Received(
        values=keys * logits.softmax(-1),
        expected=torch.ones(steps, 1, 1, 1, keys),
        counted=torch.full((steps, 1), keys),
        tokens=run.canvases[:-1],
        masked=run.masked[:-1],
        final_tokens=run.tokens,
        layers=tuple(range(layers)),
    )


STEP = """() => {
    const start = performance.now();
    document.getElementById("forward").click();
    return performance.now() - start;
}"""


def load_time(path: Path) -> tuple[float, float] | None:
    """Seconds to the first painted step, and from a step to the next; None without Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("html[data-ready]", timeout=120_000)
        seconds = float(page.get_attribute("html", "data-ready") or "nan") / 1000
        step = min(page.evaluate(STEP) for _ in range(5)) / 1000
        browser.close()
    return seconds, step


def measured(name: str, source: Any, folder: Path) -> None:
    """Write a report; print its size, its build time and its load time."""
    path, start = folder / f"{name}.html", time.perf_counter()
    dlm_lens.viz.report(source, path, title=name)
    built = time.perf_counter() - start
    loaded = load_time(path)
    shown = "no Chromium | no Chromium" if loaded is None else f"{loaded[0]:.2f} | {1000 * loaded[1]:.0f}"
    print(f"| {name} | {path.stat().st_size / 1e6:.2f} | {built:.2f} | {shown} |", flush=True)


def recording() -> Any:
    """A run of the embedded model."""
    return dlm_lens.record(dlm_lens.load("toy"), "Tom has 5 apples and buys 3 more.", steps=32, gen_length=32)


def main(
    steps: int = 64,
    keys: int = 128,
    kinds: Annotated[str, typer.Option(help="Kinds of scores.")] = "toy,sinks,noise",
    out: Annotated[Path | None, typer.Option(help="Folder for the reports; a temporary one by default.")] = None,
) -> None:
    """Print a line per case."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    print(f"\nreports of {steps} steps x {LAYERS} layers x {HEADS} heads x {keys} keys, and of toy; {machine()}\n")
    print("| | MB | built, s | first paint, s | a step, ms |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = run_of(steps, keys, keys // 2)
        for kind in kinds.split(","):
            measured(kind, recording() if kind == "toy" else (received_of(run, kind, LAYERS, HEADS), run), folder)


if __name__ == "__main__":
    typer.run(main)
