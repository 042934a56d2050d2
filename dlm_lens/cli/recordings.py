"""What the commands on a recording share: its sinks by a rule of the command line, and its model."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_lens.recording import Recording
    from dlm_lens.sinks import Sinks

logger = logging.getLogger(__name__)


def path_ends(paths: Sequence[Path]) -> list[str]:
    """The last names of every path, as many as tell the paths from each other."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(set(parts)):
            break
    return ends


def load_recording(path: Path) -> "Recording":
    """A recording, whose tokens have the texts that it stores."""
    from dlm_lens.recording import Recording

    return Recording.load(path)


def network_of(
    recording: "Recording", model: str | None, device: str | None, dtype: str | None, loading: Mapping[str, Any]
) -> Any:
    """The recording's model, or the one that the user names, loaded with these arguments of `load`.

    Raises:
        ValueError: the recording's model had an adapter, and none is given.
    """
    from dlm_lens.adapters import load
    from dlm_lens.adapters.model_names import base_of
    from dlm_lens.cli.options import device_or_gpu

    name = base_of(recording.model, loading) if model is None else model
    return load(name, dtype=dtype, device_map=device_or_gpu(device), **loading)


def detector_of(text: str) -> Any:
    """The detector that an option names, such as "above-std:3".

    Raises:
        ValueError: no such detector, or a setting that it does not take.
    """
    from dlm_lens.sinks.detector_registry import parse_detector

    return parse_detector(text).build()


def sinks_of(recording: "Recording", detector: str, level: str, queries: str = "all") -> "Sinks":
    """The sinks of a recording by a rule.

    Raises:
        ValueError: the recording lacks what the rule reads; a class of queries or another level for a rule that
            reads hidden states.
    """
    from dlm_lens.sinks import find_sinks

    return find_sinks(recording, detector_of(detector), level=level, queries=queries)  # type: ignore[arg-type]
