"""Names of models: the embedded ones, and checks of names and paths that need no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlm_lens.arguments import near_name
from dlm_lens.files.paths import user_path
from dlm_lens.printable import shown

LONGEST_PART = 255
"""Characters of a part of a path: more are no name of a file on common file systems."""

LONGEST_PATH = 4095

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
"""Where the embedded models live, one directory each."""


def embedded_models() -> tuple[str, ...]:
    """Names of the small trained models that ship with the package."""
    return tuple(sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))


def embedded_path(name: str | Path) -> str:
    """The directory of an embedded model; every other name as it is."""
    return str(CHECKPOINTS / name) if str(name) in embedded_models() else str(name)


def embedded_name(path: str) -> str:
    """The name of the embedded model in a directory, which is the same wherever the package lies; else the path."""
    return Path(path).name if Path(path).parent == CHECKPOINTS else path


WITH_ADAPTER = " with adapter "
"""Between the name of a model and that of the adapter that was merged into it."""


def name_in(config: Any) -> str:
    """The name with which the model of a config was loaded, without a merged adapter; "" if it has none."""
    from dlm_lens.adapters import smollm2

    path = str(getattr(config, "_name_or_path", "") or "")
    converted = Path(path).parent == smollm2.cache_directory() and Path(path).name.startswith(smollm2.NAME)
    return smollm2.NAME if converted else embedded_name(path)


def name_of(model: Any) -> str:
    """The name with which a model was loaded: of an embedded one, a hub name, or a path; without one its class.

    With a merged adapter (`load(adapter=)`) its name follows.
    """
    name = name_in(model.config) or type(model).__name__
    adapter = getattr(model, "merged_adapter", None)
    return name if adapter is None else f"{name}{WITH_ADAPTER}{adapter}"


def base_of(recorded: str, loading: Mapping[str, Any]) -> str:
    """The model to load for one that a recording names: without its adapter, which `loading` must hold then.

    Args:
        recorded: as `name_of` returns it.
        loading: further arguments of `dlm_lens.load`.

    Raises:
        ValueError: the model had an adapter, and none is given.
    """
    base, adapted, adapter = recorded.partition(WITH_ADAPTER)
    if adapted and "adapter" not in loading:
        raise ValueError(
            f"the recording is of {base} with the adapter {adapter}: give --load adapter= with its directory or "
            "hub name"
        )
    return base


def check_model_name(name: Any) -> str | Path:
    """Return the name of an embedded model, a path that can hold a checkpoint, or a possible hub name.

    Raises:
        FileNotFoundError: a path that does not exist, a directory without a config and without weights, the home of
            a user who does not exist, or a name without an owner that is close to an embedded model's.
        ValueError: neither text nor a path, or too long for one.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise ValueError(
            f"{shown(name)} names no model; give an embedded one ({', '.join(embedded_models())}), a checkpoint's "
            "directory, or a hub name"
        )
    embedded = embedded_models()
    if str(name) in embedded:
        return name
    if len(str(name)) > LONGEST_PATH or any(len(part) > LONGEST_PART for part in Path(name).parts):
        raise ValueError(
            f"{shown(str(name))} is longer than a path or a hub name can be ({len(str(name))} characters); give a "
            "checkpoint's directory or a hub name"
        )
    path = user_path(name)
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"{path} holds no config.json; give the directory that does, or a hub name")
    if "/" not in str(name) and not path.exists() and (hint := near_name(str(name), embedded, {})):
        raise FileNotFoundError(
            f"{str(name)!r} is neither an embedded model ({', '.join(embedded)}) nor a directory{hint}; a hub name "
            "has its owner before it, owner/name"
        )
    if not path.exists() and (isinstance(name, Path) or str(name).startswith((".", "/", "~"))):
        raise FileNotFoundError(f"{path} is no directory; give a checkpoint's directory or a hub name")
    return name
