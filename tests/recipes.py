"""Follow a page `docs/add-a-*.md` literally, in a scratch copy of the package.

Its programs are forks of a server that has the libraries and not the package (`tests.preloaded.hosts_python`): a
recipe starts six to ten, and what it checks is in the copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.preloaded import hosts_python

ROOT = Path(__file__).parent.parent


def scratch_copy(folder: Path) -> Path:
    """Copy the package to a folder; `dlm_lens` is imported from there by what `follow` runs."""
    # With the compiled files, which are valid where the time of a source is the same.
    shutil.copytree(ROOT / "dlm_lens", folder / "dlm_lens")
    commands = {"dlm-lens": " -m dlm_lens.cli", "python": ""}
    (folder / "bin").mkdir()
    for name, arguments in commands.items():
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {hosts_python()}{arguments} "$@"\n', encoding="utf-8")
        command.chmod(0o755)
    return folder


def follow(page: Path, scratch: Path) -> str:
    """Do what a page says, from top to bottom, and return what it printed.

    A block of Python whose first line is `# PATH` is the content of that file. Other blocks of Python that follow
    each other are one script; each `sh` block is a shell script that stops at its first failure.

    Raises:
        AssertionError: a script failed; with its output.
    """
    printed, python = [], ""
    text = page.read_text(encoding="utf-8")
    for kind, block in [*re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL), ("", "")]:
        file = re.match(r"# ([\w/.-]+)\n", block) if kind == "python" else None
        if kind == "python" and file is None:
            python += block
            continue
        if python:
            printed.append(_run([hosts_python(), "-c", python], scratch))
            python = ""
        if file is not None:
            path = scratch / file.group(1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block[file.end() :], encoding="utf-8")
        elif kind == "sh":
            printed.append(_run(["bash", "-ec", block], scratch))
    return "".join(printed)


def _run(command: list[str], scratch: Path) -> str:
    tools = os.pathsep.join([str(scratch / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(scratch), "PATH": tools}
    done = subprocess.run(
        command,
        cwd=scratch,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
    return done.stdout
