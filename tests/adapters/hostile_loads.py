"""Loads checkpoints one after another under an audit hook; run by test_hostile_files.py in a process of its own.

Arguments: a JSON file of {name: directory}. Writes one JSON line per checkpoint: what came of it, and everything
that Python was seen to do and must not: unpickle, open what lies outside, import or execute files of the
checkpoint, reach the network, start a process. The last line, "control", does each of these on purpose.
"""

import contextlib
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import dlm_lens

seen: list[str] = []
watched: Path | None = None
LIBRARIES = tuple(
    str(Path(place).resolve())
    for place in {*sys.path, sys.prefix, sys.base_prefix, os.path.dirname(dlm_lens.__file__)}
    if place
)
PLACES = ("/proc", "/sys", "/dev", "/usr", "/lib", "/etc/ld", "/etc/local")
FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is None:
        return
    if event in FORBIDDEN or event == "pickle.find_class":
        seen.append(f"{event} {arguments!r:.200}")
    elif event in ("compile", "exec", "import"):
        for one in arguments:
            name = str(getattr(one, "co_filename", one))
            if str(watched) in name:
                seen.append(f"{event} {name}")
    elif event == "open" and isinstance(arguments[0], str | bytes):
        path = Path(os.path.realpath(os.fsdecode(arguments[0])))
        temporary = path.parent.name.startswith(("dlm_lens_tokenizer_", "tmp"))
        blobs = watched.parent.parent / "blobs"  # of the hub's cache, to which the files of a snapshot lead
        inside = any(path.is_relative_to(place) for place in (str(watched), str(blobs), *LIBRARIES, *PLACES))
        if not inside and not (temporary and path.is_relative_to(os.path.realpath(tempfile.gettempdir()))):
            seen.append(f"open {path}")


def forbid(name: str) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        seen.append(f"{name} {args!r:.200}")
        raise AssertionError(name)

    return called


def main() -> None:
    """Load the embedded model for the imports that loading brings, then everything that is listed."""
    global watched
    real_loads = pickle.loads
    dlm_lens.load("toy").tokenizer("a")
    torch.load, pickle.load, pickle.loads = (forbid(name) for name in ("torch.load", "pickle.load", "pickle.loads"))
    sys.addaudithook(audit)
    for name, place in json.loads(Path(sys.argv[1]).read_text()).items():
        watched = Path(place)
        result: dict[str, Any] = {"name": name}
        try:
            model = dlm_lens.load(place)
            ids = model.tokenizer("w3 w4")["input_ids"] if model.tokenizer else None
            with torch.no_grad():
                logits = model(input_ids=torch.arange(8)[None]).logits
            result |= {"kind": "model", "ids": ids, "logits": logits.double().sum().item()}
        except Exception as error:
            result |= {"kind": type(error).__name__, "said": str(error)}
        watched = None
        tell(result)
    watched = Path(sys.argv[1]).parent / "control"
    watched.mkdir()
    (watched / "planted.py").write_text("x = 1\n")
    Path(sys.argv[1]).read_bytes()
    sys.path.append(str(watched))
    importlib.import_module("planted")
    with contextlib.suppress(Exception):
        pickle.loads(b"")  # noqa: S301
    with contextlib.suppress(Exception):
        real_loads(pickle.dumps(Path))
    with contextlib.suppress(OSError):
        subprocess.run(["/nonexistent"], check=False)
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    watched = None
    tell({"name": "control", "kind": "control"})


def tell(result: dict[str, Any]) -> None:
    """One line of the output."""
    sys.stdout.write(json.dumps(result | {"seen": list(seen)}) + "\n")
    sys.stdout.flush()
    seen.clear()


if __name__ == "__main__":
    main()
