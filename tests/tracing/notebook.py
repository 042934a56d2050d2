"""Run the notebooks of docs/notebooks without Jupyter; `python -m tests.tracing.notebook` renews their outputs."""

import ast
import base64
import contextlib
import io
import json
import linecache
from functools import cache
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run_cell(source: str, name: str, space: dict[str, Any]) -> tuple[str, Any]:
    """What the cell prints, and the value of its last line where that is an expression and not None."""
    # Notebook cells are known to linecache: nnsight reads the blocks that it traces.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    body, printed = ast.parse(source).body, io.StringIO()
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), name, "exec"), space)  # noqa: S102  # our own notebook
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)  # noqa: S307
    return printed.getvalue(), value


def _shown(value: Any) -> dict[str, Any]:
    """What a notebook shows of a cell's value: a figure, a view, a page of circuitsvis."""
    if hasattr(value, "_repr_png_"):
        return {"image/png": base64.b64encode(value._repr_png_()).decode() + "\n"}
    # circuitsvis: the page that fetches the script, 2 kB; a live notebook embeds it without a network.
    page = value.cdn_src if hasattr(value, "cdn_src") else value._repr_html_()
    return {"text/html": page.splitlines(keepends=True)}


@cache
def executed(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    space: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        printed, value = run_cell("".join(cell["source"]), f"{path.name}:{number}", space)
        cell["outputs"], cell["execution_count"] = [], number
        if printed:
            lines = printed.splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
        if value is not None:
            data = {**_shown(value), "text/plain": [type(value).__name__]}
            entry = {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
            cell["outputs"].append(entry)
    return notebook


if __name__ == "__main__":
    for found in NOTEBOOKS:
        found.write_text(json.dumps(executed(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
