"""Checkpoints that several tests of a process read and none changes."""

from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import dlm_lens


@cache
def loaded(path: Path, **options: Any) -> PreTrainedModel:
    """`dlm_lens.load`, once in a process."""
    return dlm_lens.load(path, **options)
