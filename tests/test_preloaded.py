"""The command of tests/preloaded.py against Python itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.preloaded import hosts_python, python

pytestmark = pytest.mark.long

SHOW = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["SEEN"], sys.stdin.read(), len(os.listdir("/proc/self/task")))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "code",
    [
        SHOW,
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a sentence')",
        "1 / 0",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import atexit; atexit.register(print, 'at the end')",
    ],
)
@pytest.mark.parametrize("form", ["-c", "-m", "-", "file"])
def test_a_program_runs_and_ends_as_with_python(form: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text(code)
    file = str(tmp_path / "a_program.py")
    arguments = {"-c": ["-c", code], "-m": ["-m", "a_program"], "-": ["-"], "file": [file]}[form]
    environment = {**os.environ, "SEEN": "yes", "OMP_NUM_THREADS": "1"}
    done = [
        subprocess.run(
            [command, *arguments, "an argument"],
            input=code if form == "-" else "what is read",
            capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
        )
        for command in (sys.executable, python())
    ]  # fmt: skip
    one, other = ((run.returncode, run.stdout, run.stderr.splitlines()[-1:]) for run in done)
    assert one == other


def test_a_program_without_the_package_imports_the_one_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "dlm_lens").mkdir()
    (tmp_path / "dlm_lens" / "__init__.py").write_text("print('a copy')")
    code = "import sys; print([name in sys.modules for name in ('torch', 'dlm_lens')]); import dlm_lens"
    for given, folder in (({"PYTHONPATH": str(tmp_path)}, tmp_path.parent), ({}, tmp_path)):
        environment = {**os.environ, **given}
        done = subprocess.run(
            [hosts_python(), "-c", code], capture_output=True, text=True, cwd=folder, env=environment, check=False
        )
        assert done.stdout == "[True, False]\na copy\n", done.stderr


def test_programs_run_beside_each_other(tmp_path: Path) -> None:
    """Two that wait for each other's file."""
    code = "import os, sys, time\nopen(sys.argv[1], 'w')\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    names = [str(tmp_path / "a"), str(tmp_path / "b")]
    both = [subprocess.Popen([python(), "-c", code, *order]) for order in (names, names[::-1])]
    assert [process.wait(60) for process in both] == [0, 0]


def test_a_killed_command_kills_its_program(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, time\nopen({str(file)!r}, 'w').write(str(os.getpid()) + '.')\ntime.sleep(600)"
    with subprocess.Popen([python(), "-c", code]) as process:
        while not (file.exists() and file.read_text().endswith(".")):
            time.sleep(0.01)
        process.kill()
    program = Path("/proc", file.read_text().rstrip("."))
    deadline = time.monotonic() + 60
    while program.exists():
        assert time.monotonic() < deadline, "the program goes on"
        time.sleep(0.01)
