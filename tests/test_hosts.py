"""Tests of a host that is not installed are skipped with that reason, and fail in CI."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.hosts import missing_host
from tests.preloaded import hosts_python

ROOT = Path(__file__).parent.parent
HIDE = """
import sys
from importlib.machinery import PathFinder
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "nnsight" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
IN_A_FILE = "from nnsight import Envoy\n\ndef test_one(): pass\n"
IN_A_TEST = """
import pytest

@pytest.fixture
def lm():
    import nnsight

def test_fixture(lm): pass

def test_call():
    import dlm_lens
    from dlm_lens.testing import tiny
    dlm_lens.DiffusionLM(tiny())

def test_other(): import nothing_of_this_name

def test_none(): pass
"""


def error_of(module: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {module!r}", name=module)


def test_the_reason_is_the_host_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert missing_host(error_of("nnsight.intervention")) is None  # installed: the package has changed
    monkeypatch.setattr("tests.hosts.find_spec", lambda name: None)
    wanted = "transformer-lens is not installed; pip install transformer-lens"
    assert missing_host(error_of("transformer_lens.hook_points")) == wanted
    around = ValueError("no host")
    around.__cause__ = error_of("transformer_lens")
    assert missing_host(around) == wanted
    assert missing_host(error_of("nothing")) is missing_host(ValueError("nnsight")) is missing_host(None) is None
    monkeypatch.setenv("CI", "true")
    assert missing_host(error_of("transformer_lens")) is None


@pytest.mark.long
@pytest.mark.parametrize("ci", ["", "true"])
def test_files_fixtures_and_tests(ci: str, tmp_path: Path) -> None:
    (tmp_path / "hiding.py").write_text(HIDE)
    (tmp_path / "test_file.py").write_text(IN_A_FILE)
    (tmp_path / "test_calls.py").write_text(IN_A_TEST)
    # In a process that has imported the other libraries, and neither nnsight nor this package; pytest warns of what
    # it cannot rewrite any more.
    command = [hosts_python(), "-m", "pytest", "-p", "hiding", "-q", "-rA", "--tb=line"]
    command += ["-p", "no:cacheprovider", "-p", "no:warnings"]
    command += ["-p", "tests.conftest", "--continue-on-collection-errors", f"--rootdir={tmp_path}", str(tmp_path)]
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "CI": ci, "PYTHONPATH": paths}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    last = ended.stdout.strip().splitlines()[-1]
    assert ended.returncode == 1, ended.stdout
    if ci:
        assert "2 failed, 1 passed, 2 errors in" in last
        assert "skipped" not in last
    else:
        assert "1 failed, 1 passed, 3 skipped in" in last
        for count, file in ((1, "test_file.py"), (2, "test_calls.py")):
            line = rf"SKIPPED \[{count}\] \S*{file}:0: nnsight is not installed; pip install nnsight"
            assert re.search(line, ended.stdout), ended.stdout
    assert "No module named 'nothing_of_this_name'" in ended.stdout
