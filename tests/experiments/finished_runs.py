"""`finished_run`: results with values by hand, of models that a run would have loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

from dlm_lens.experiments.results import Record, Results

CAUSAL = {
    "toy": False, "toy-sink": False, "toy-gated": False, "m": False, "toy-ar": True, "smollm2": True,
}  # fmt: skip
"""Whether each of these is autoregressive, as their loading notes it."""


def finished_run(config: Mapping[str, Any], records: Sequence[Record], missing: int = 0) -> Results:
    """The results of a run with these records."""
    return Results(config, records, missing, causal=CAUSAL)
