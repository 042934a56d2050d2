"""`pytest -p tests.pretend_windows.plugin`: the tests of this process meet Windows' rules for files.

Of what Windows refuses and Linux allows, these concern a program that writes files. An open or mapped file cannot
be renamed, replaced or deleted (Python opens files without FILE_SHARE_DELETE), nor can a folder that holds one. A
folder cannot be opened. A file that is open for reading alone cannot be flushed. Some characters are not for names.
Processes are spawned, not forked. The modules of the library that ask for the system see "win32", and none of the
names that `os` lacks there.

Of the tests, those run that have a directory to write into: the rules concern no other.
"""

import builtins
import errno
import multiprocessing
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NOT_IN_NAMES = frozenset('<>:"|?*\\') | {chr(code) for code in range(32)}
UNIX_ONLY = ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY")


class Refusal(PermissionError):
    """Windows would refuse this."""


def _open_files() -> set[str]:
    """Files that this process has open or mapped."""
    found: set[str] = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
            if target.startswith("/") and stat.S_ISREG(os.stat(entry.path).st_mode):
                found.add(target)
        except OSError:
            continue
    with REAL["open"]("/proc/self/maps") as maps:
        found |= {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    return found


def _refuse_open(path: Any) -> None:
    if isinstance(path, int):
        return
    real = os.path.realpath(os.fsdecode(path))
    held = [name for name in _open_files() if name == real or name.startswith(real + "/")]
    if held:
        raise Refusal(errno.EACCES, f"the process cannot access the file, because it has it open: {held[0]}", real)


def _refuse_name(path: Any) -> None:
    if isinstance(path, int):
        return
    named = Path(os.fsdecode(path))
    for part in named.relative_to(named.anchor).parts:
        if part != ".." and (NOT_IN_NAMES & set(part) or part != part.rstrip(" .")):
            raise Refusal(errno.EINVAL, f"the name {part!r} is not one of Windows", os.fsdecode(path))


REAL: dict[str, Callable[..., Any]] = {
    "open": builtins.open,
    "os.open": os.open,
    "fsync": os.fsync,
    **{name: getattr(os, name) for name in ("replace", "rename", "unlink", "remove", "mkdir")},
}


def _own(path: Any) -> bool:
    """Whether the rules concern a path: not those of the system, of Python and its packages."""
    if isinstance(path, int):
        return False
    real = os.path.abspath(os.fsdecode(path))
    return not real.startswith(("/proc", "/dev", "/sys", "/usr", sys.prefix)) and "site-packages" not in real


def _renaming(name: str) -> Callable[..., Any]:
    def call(source: Any, target: Any, **options: Any) -> Any:
        if _own(target):
            _refuse_name(target)
            _refuse_open(source)
            if os.path.exists(target):
                _refuse_open(target)
            if name == "rename" and os.path.exists(target):
                raise FileExistsError(errno.EEXIST, "the target exists", os.fsdecode(target))
            if os.path.isdir(target):
                raise Refusal(errno.EACCES, "a folder cannot be replaced", os.fsdecode(target))
        return REAL[name](source, target, **options)

    return call


def _deleting(name: str) -> Callable[..., Any]:
    def call(path: Any, **options: Any) -> Any:
        # Python's temporary files are deleted while they are open, which Windows does where they are closed.
        if _own(path) and sys._getframe(1).f_globals["__name__"] != "tempfile":
            _refuse_open(path)
        return REAL[name](path, **options)

    return call


def _os_open(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
    if _own(path):
        _refuse_name(path)
        if os.path.isdir(path) and flags & os.O_TMPFILE != os.O_TMPFILE:
            raise Refusal(errno.EACCES, "a folder cannot be opened", os.fsdecode(path))
    return int(REAL["os.open"](path, flags, mode, **options))


def _open(file: Any, *arguments: Any, **options: Any) -> Any:
    if _own(file):
        _refuse_name(file)
    return REAL["open"](file, *arguments, **options)


def _mkdir(path: Any, *arguments: Any, **options: Any) -> None:
    if _own(path):
        _refuse_name(path)
    REAL["mkdir"](path, *arguments, **options)


def _fsync(handle: Any) -> None:
    import fcntl

    number = handle if isinstance(handle, int) else handle.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "a file that is open for reading cannot be flushed")
    REAL["fsync"](number)


def install() -> None:
    """Begin to pretend."""
    multiprocessing.set_start_method("spawn")  # there is no fork
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # deletes by names, as on Windows
    from dlm_lens.evaluation import responses
    from dlm_lens.files import atomic_writes, locks

    modules: Any = (atomic_writes, locks, responses)
    known = {name: value for name, value in vars(os).items() if name not in UNIX_ONLY}
    for module in modules:
        module.sys = SimpleNamespace(platform="win32")  # type: ignore[attr-defined]
        module.os = SimpleNamespace(**known)  # type: ignore[attr-defined]
    for name in ("replace", "rename"):
        setattr(os, name, _renaming(name))
    for name in ("unlink", "remove"):
        setattr(os, name, _deleting(name))
    os.open, os.mkdir, os.fsync, builtins.open = _os_open, _mkdir, _fsync, _open  # type: ignore[assignment]
    for module in modules:
        vars(module.os).update(
            replace=os.replace, rename=os.rename, unlink=os.unlink, open=_os_open, mkdir=_mkdir, fsync=_fsync
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests without a temporary directory."""
    # `fixturenames` has the fixtures of fixtures too.
    writes = [not {"tmp_path", "tmp_path_factory"}.isdisjoint(getattr(item, "fixturenames", ())) for item in items]
    config.hook.pytest_deselected(items=[item for item, kept in zip(items, writes, strict=True) if not kept])
    items[:] = [item for item, kept in zip(items, writes, strict=True) if kept]


install()
