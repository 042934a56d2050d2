"""Names of models: the embedded ones, and what can be said of a path before torch is imported."""

from pathlib import Path
from typing import Any

from dlm_lens.printable import shown

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
"""Where the embedded models live, one directory each."""


def embedded_models() -> tuple[str, ...]:
    """Names of the small trained models that ship with the package."""
    return tuple(sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))


def check_model_name(name: Any) -> str | Path:
    """An embedded model's name, a path at which a checkpoint may be, or a name that only the hub can judge.

    Raises:
        FileNotFoundError: a path at which there is nothing, or a directory without a config and without weights.
        ValueError: nothing that names a model.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise ValueError(
            f"{shown(name)} names no model; give an embedded one ({', '.join(embedded_models())}), a checkpoint's "
            "directory, or a hub name"
        )
    if str(name) in embedded_models():
        return name
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"{path} holds no config.json; give the directory that does, or a hub name")
    if not path.exists() and (isinstance(name, Path) or str(name).startswith((".", "/", "~"))):
        raise FileNotFoundError(f"{path} is no directory; give a checkpoint's directory or a hub name")
    return name
