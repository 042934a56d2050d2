"""A Recording as an xarray Dataset."""

import json
from typing import Any

import numpy as np
import xarray

from dlm_lens.recording.result import Recording


def dataset_of(recording: Recording) -> xarray.Dataset:
    """Arrays with their dims, units and formulas; coordinates of steps, keys and axes; settings as attributes."""
    arrays: dict[str, Any] = {}
    coordinates: dict[str, Any] = {
        "step": list(recording.steps),
        "batch": list(recording.rows),
        "layer": list(recording.layers),
    }
    for name, spec in recording.specs.items():
        values = getattr(recording, name).numpy()
        arrays[name] = (spec.dims, values, {"units": spec.unit, "formula": spec.formula, "reducer": spec.reducer})
        coordinates |= {axis: list(labels) for axis, labels in spec.labels.items()}
        if "head" in spec.dims:
            count = values.shape[spec.dims.index("head")]
            coordinates["head"] = list(recording.heads if recording.heads is not None else range(count))
    coordinates |= _of_keys(recording)
    return xarray.Dataset(arrays, coordinates, _attributes(recording))


def _of_keys(recording: Recording) -> dict[str, Any]:
    keys, tokens = ("step", "batch", "key"), recording.tokens.numpy()
    words = np.vectorize(
        lambda i: recording.words.get(i, f"<{i}>") if i >= 0 else f"sink({-1 - i})", otypes=[object]
    )(tokens)
    return {
        "key": np.arange(tokens.shape[-1]),
        "query": np.arange(tokens.shape[-1] - recording.sinks),
        "token": (keys, tokens),
        "token_text": (keys, words.astype(str)),
        "masked": (keys, recording.masked.numpy()),
        "valid": (("batch", "key"), recording.valid.numpy()),
        "progress": (("step", "batch"), recording.progress.numpy()),
        "block": ("step", list(recording.blocks)),
        **({"seed": ("batch", list(recording.seeds))} if recording.seeds else {}),
    }


def _attributes(recording: Recording) -> dict[str, Any]:
    return {
        "model": recording.model,
        "prompt_length": recording.prompt_length,
        "sink_tokens": recording.sinks,
        "causal": int(recording.causal),
        **({"sliding_windows": json.dumps(recording.windows)} if recording.windows else {}),
        "score_scale": recording.scale if recording.scale is not None else "",
        "settings": json.dumps(dict(recording.settings)),
        "versions": json.dumps(dict(recording.versions)),
    }
