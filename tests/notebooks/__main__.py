"""`python -m tests.notebooks [NAME ...]`: execute notebooks and store their outputs (`make notebooks`)."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.notebooks.execution import NOTEBOOKS, executed, read
from tests.notebooks.head import with_head

torch.set_num_threads(1)


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Store a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


for path in NOTEBOOKS:
    if not sys.argv[1:] or path.stem in sys.argv[1:]:
        start = time.process_time()
        write(path, with_head(read(path), path.name))
        write(path, executed(path))
        sys.stdout.write(f"{path.name}: {time.process_time() - start:.1f} s, {path.stat().st_size / 1e3:.0f} kB\n")
