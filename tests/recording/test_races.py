"""Processes that race for one directory, and a limit of the system on a file's size."""

import resource
import subprocess
from pathlib import Path

import pytest

from dlm_lens.recording import Recording, record
from dlm_lens.testing import tiny
from tests.files.kills import hidden, run_forked
from tests.preloaded import python
from tests.recording.reference import PROMPTS
from tests.recording.test_damage import difference

RACING = """
import sys
import torch
from dlm_lens.recording import record
from dlm_lens.testing import tiny
torch.set_num_threads(1)
try:
    record(tiny("llada"), [[5, 6], [7, 8, 9]], to=sys.argv[1], steps=8, gen_length=8, seed=3, batch_size=1)
    print("done")
except ValueError as error:
    print(error)
"""


@pytest.mark.long
def test_processes_race_for_one_directory(tmp_path: Path) -> None:
    command = [python(), "-c", RACING, str(tmp_path / "it")]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[0].strip() for process in racing]
    assert "done" in told
    assert all(one == "done" or one.startswith("another process or thread writes") for one in told), told
    wanted = record(tiny("llada"), [[5, 6], [7, 8, 9]], steps=8, gen_length=8, seed=3, batch_size=1)
    assert not difference(Recording.load(tmp_path / "it"), wanted)
    assert hidden(tmp_path) == []


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    held = record(tiny("llada"), PROMPTS, steps=2, gen_length=4)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))  # the header fits, the first shard does not
        held.save(tmp_path / "it")

    status, told = run_forked(limited)
    assert status == 1
    assert "DiskFullError" in told
    assert "make room and do it again" in told
    assert not (tmp_path / "it").exists()
    assert not difference(Recording.load(held.save(tmp_path / "it")), held)
