"""Our solutions of the tasks, with the library's own functions; `solve()` gives the answer of the page.

Options of `solve` are mistakes that one could make; `WRONG` lists those that the check must reject. What a mistake
does not change, such as a recording that is only read in another way, is computed once.
"""

import functools
from typing import Any

import dlm_lens as dl
from tests.tasks.checks import loops

PROMPTS = loops.prompts()


@functools.cache
def toy() -> Any:
    return dl.load("toy")
