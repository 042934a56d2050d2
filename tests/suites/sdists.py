"""Source distributions of packages, fetched when a test needs the tests that they hold; never committed."""

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(__file__).parents[2] / ".sdists"
"""Ignored by git; remove it to fetch anew."""


def unpacked_sdist(name: str, version: str | None = None) -> Path:
    """A package's source distribution, unpacked, by default of the installed version; skips without registry."""
    version = version or importlib.metadata.version(name)
    target = CACHE / f"{name}-{version}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            _download(folder, "--no-binary", name, f"{name}=={version}")
            (archive,) = Path(folder).glob("*.tar.gz")
            # Python before 3.11.4 has no filters.
            options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            with tarfile.open(archive) as held:
                held.extractall(Path(folder) / "unpacked", **options)
            (root,) = (Path(folder) / "unpacked").iterdir()
            _put(root, target)
    return target


def wheel(name: str, version: str) -> Path:
    """The wheel of a pure package that such tests import; a path for `sys.path`. Skips without registry."""
    found = list(CACHE.glob(f"{name}-{version}-*.whl"))
    if not found:
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            _download(folder, "--only-binary", ":all:", f"{name}=={version}")
            (archive,) = Path(folder).glob("*.whl")
            found = [CACHE / archive.name]
            _put(archive, found[0])
    return found[0]


def _cache() -> Path:
    CACHE.mkdir(exist_ok=True)
    return CACHE


def _put(source: Path, target: Path) -> None:
    """Rename into the cache; where another process was faster, its copy stays."""
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(source, ignore_errors=True)


def _download(folder: str, *wanted: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", folder, *wanted], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip cannot fetch {wanted[-1]}: {reason}")
