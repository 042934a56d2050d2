"""Builds the pretended device once per build of torch, into `.pretend-gpu/` beside the tests (git ignores it)."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".pretend-gpu"
SOURCES = ("backend/backend.cpp", "backend/devices.h", "backend/rules.h", "operators.py")


class CannotBuildError(RuntimeError):
    """Why there is no pretended device here."""


def library() -> Path:
    """The built library; builds it (about a minute of one core) where it is missing.

    Raises:
        CannotBuildError: no compiler, no CPU build of torch, another system than Linux, or the compiler failed.
    """
    reason = missing()
    if reason is not None:
        raise CannotBuildError(reason)
    built = CACHE / _key() / "libpretend_gpu.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.parent / "lock", "w") as lock:  # several test processes may want it at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(built)
    return built


def missing() -> str | None:
    """Why it cannot be built here; None if it can."""
    if sys.platform != "linux":
        return f"the pretended GPU builds on Linux, and this is {sys.platform}"
    if _compiler() is None:
        return "no C++ compiler for the pretended GPU: install g++ or clang++, or set CXX"
    if find_spec("torchgen") is None:
        return "torch's list of operators (torchgen) is not installed"
    if find_spec("triton") is None and "+cu" in version("torch"):
        return "torch is a CUDA build; the pretended GPU needs one for the CPU"
    return None


def _compiler() -> str | None:
    given = os.environ.get("CXX")
    return shutil.which(given) if given else shutil.which("g++") or shutil.which("clang++")


def _key() -> str:
    """One folder per build of torch, Python and these sources."""
    content = b"".join((HERE / name).read_bytes() for name in SOURCES)
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"torch-{version('torch')}-python{sys.version_info[0]}.{sys.version_info[1]}-{digest}"


def _compile(built: Path) -> None:
    from tests.pretend_gpu import operators

    torch = Path(find_spec("torch").origin).parent  # found, not imported
    operators.write(built.parent / "operators.inc")
    unfinished = built.with_suffix(f".{os.getpid()}")
    includes = [built.parent, HERE / "backend", torch / "include", torch / "include/torch/csrc/api/include"]
    command = [_compiler(), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(HERE / "backend/backend.cpp")]
    command += [f"-I{path}" for path in includes]
    command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}", "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuildError(f"the compiler failed:\n{done.stderr[-3000:]}")
    unfinished.rename(built)


if __name__ == "__main__":
    print(library())  # noqa: T201
