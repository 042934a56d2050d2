"""Our solutions of the tasks, with the library's own functions; `solve()` gives the answer of the page.

Options of `solve` are mistakes that one could make; `WRONG` lists those that the check must reject.
"""

from typing import Any

import dlm_lens as dl
from tests.tasks.checks import loops

PROMPTS = loops.prompts()


def toy() -> Any:
    return dl.load("toy")
