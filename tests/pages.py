"""The pages of the docs as a reader follows them: `python -m tests.pages [PAGE ...]` draws and prints them anew.

A page is named by its path below docs, `families/llada.md`.

A page writes the picture that it shows under the name that the picture has in docs/images. What a block of Python
prints stands below it, in a block of text.
"""

import ast
import io
import linecache
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from PIL import Image

import dlm_lens as dl
from dlm_lens.testing import tiny
from tests.preloaded import python
from tests.printed import differences

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
CHAT = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}w3"
SAME = 0.1
"""The mean difference of grey levels, 0 to 255, of a picture drawn on another CPU: rounding moves lines by less
than a pixel. Another interval in a caption gives 0.15."""


BLOCK = re.compile(r"^(```python\n.*?^```\n)(?:\n```text\n(.*?)^```\n)?", flags=re.MULTILINE | re.DOTALL)
"""A block of Python, and the block of text below it."""

LINES, WIDTH = 28, 110
"""Lines of an output that a page shows, and the characters in a line of a table."""

OF_SPARSIFY = "Triton disabled, using eager implementation of sparse decoder."
"""What the import of sparsify prints on a machine without a GPU."""


def blocks(page: Path, language: str = "python") -> list[str]:
    """The code blocks of a page in a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def shows_outputs(page: Path) -> bool:
    """Whether the outputs are those that a reader sees: not where random models stand in for released ones."""
    return not released(page)


def outputs(page: Path) -> list[str]:
    """What the page shows as the output of each of its blocks of Python; empty for none."""
    return [output for _, output in BLOCK.findall(page.read_text(encoding="utf-8"))]


def shown(printed: str) -> str:
    """An output as a page shows it: its first lines, if it is long."""
    lines = [line.rstrip() for line in printed.rstrip().splitlines() if line != OF_SPARSIFY]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... ({len(lines) - LINES + 1} more lines)"]
    return "".join(f"{line}\n" for line in lines)


def released(page: Path) -> set[str]:
    """The released checkpoints that a page loads."""
    return set(re.findall(r"dl\.load\(\"([\w.-]+/[\w.-]+)\"", "\n".join(blocks(page))))


def stand_ins(page: Path, directory: Path) -> None:
    """A small random model of the same classes in place of each released checkpoint that a page loads.

    A directory of a hub's name is found before the hub.
    """
    for name in released(page):
        (family,) = [family for family in dl.families() if name in family.hub_names]
        layouts = [model_type for model_type in family.layouts if model_type.split("-")[-1] in name.lower()]
        model = tiny(family.name, model_type=layouts[0] if layouts else None)
        model.tokenizer.chat_template = CHAT
        (directory / name).mkdir(parents=True)
        model.save_pretrained(directory / name)
        model.tokenizer.save_pretrained(directory / name)


def run_blocks(page: Path, directory: Path) -> list[str]:
    """Run the Python blocks of a page, one after the other, in an empty directory; what each of them printed."""
    stand_ins(page, directory)
    # Stand-ins compute in float64, in which what a run decides does not depend on the processor.
    dtypes = ('dtype="bfloat16"', 'dtype="float64"') if released(page) else ("", "")
    space: dict[str, object] = {}
    printed = []
    with chdir(directory), patch.dict(os.environ, COLUMNS=str(WIDTH)), pd.option_context("display.width", WIDTH):
        for number, block in enumerate(block.replace(*dtypes) for block in blocks(page)):
            # As in a notebook cell, whose source linecache knows: nnsight reads the blocks that it traces.
            name = f"{page.name}:{number}"
            linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
            said = []
            for statement in ast.parse(block).body:
                with redirect_stdout(io.StringIO()) as output:
                    exec(compile(ast.Module([statement], []), name, "exec"), space)  # noqa: S102  # our own page
                said.append(output.getvalue())
            printed.append(joined([output for output in said if output]))
    return printed


def joined(printed: Sequence[str]) -> str:
    """The outputs of several statements, with an empty line beside one of several lines."""
    text = ""
    for before, output in zip(["", *printed], printed, strict=False):
        text += "\n" if before and max(before.count("\n"), output.count("\n")) > 1 else ""
        text += output
    return text


def run_commands(page: Path, directory: Path) -> None:
    """Run the shell blocks of a page, in order, in an empty directory; without Chromium those lines are left out.

    Raises:
        RuntimeError: a command fails.
    """
    lines = "".join(blocks(page, "bash")).splitlines()
    if shutil.which("chromium") is None:
        lines = [line for line in lines if not line.startswith("chromium")]
    tool = directory / "bin" / "dlm-lens"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec {python()} -m dlm_lens.cli "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    (directory / "empty").mkdir()
    paths = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(line.replace("chromium ", "chromium --no-sandbox ", 1) for line in lines)
    done = subprocess.run(
        ["bash", "-ec", script], cwd=directory / "empty", env=os.environ | paths, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


def figures(directory: Path) -> list[Path]:
    """The figures of matplotlib that a page wrote and that docs/images has under the same name."""
    named = [path for path in sorted(directory.rglob("*.png")) if (IMAGES / path.name).exists()]
    return [path for path in named if "Matplotlib" in Image.open(path).info.get("Software", "")]


def distance(one: Image.Image, two: Image.Image) -> float:
    """The mean difference of grey levels, 0 to 255, after scaling to one size."""
    values = [np.asarray(image.resize(one.size), dtype=float) for image in (one, two)]
    return float(np.abs(values[0] - values[1]).mean())


def apart_from_stored(path: Path) -> float:
    """The distance of a figure from the stored one; infinite where the sizes differ by more than two pixels."""
    drawn, stored = (Image.open(each).convert("L") for each in (path, IMAGES / path.name))
    alike = all(abs(a - b) <= 2 for a, b in zip(drawn.size, stored.size, strict=True))
    return distance(drawn, stored) if alike else float("inf")


def stale(directory: Path) -> dict[str, float]:
    """The pictures of docs/images that are not what a page wrote now, with their distance."""
    apart = {path.name: apart_from_stored(path) for path in figures(directory)}
    return {name: far for name, far in apart.items() if not far <= SAME}


def with_outputs(text: str, printed: Sequence[str]) -> str:
    """A page with these outputs; one that is stored as close as another CPU would print it stays."""
    fresh = iter(printed)

    def below(found: re.Match[str]) -> str:
        output = shown(next(fresh))
        stored = found[2] or ""
        if not differences(output, stored):
            output = stored
        return found[1] + (f"\n```text\n{output}```\n" if output else "")

    return BLOCK.sub(below, text)


def renew(page: Path) -> None:
    """Run a page, and store the outputs and the pictures that changed."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run_blocks(page, Path(folder))
        text = page.read_text(encoding="utf-8")
        if shows_outputs(page) and (new := with_outputs(text, printed)) != text:
            page.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{page.name}\n")
        if blocks(page, "bash"):
            run_commands(page, Path(folder))
        changed = stale(Path(folder))
        for path in figures(Path(folder)):
            if path.name in changed:
                shutil.copyfile(path, IMAGES / path.name)
                sys.stdout.write(f"{page.name}: {path.name}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        renew(ROOT / "docs" / name)
