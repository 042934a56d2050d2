"""Tests of what is written, resumed and removed run again under Windows' rules for files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "tests/files/test_atomic_writes.py": (
        "test_an_error_names_the_file_and_not_its_temporary_one",  # another error where a folder is replaced
        "test_files_of_killed_processes_go_and_those_of_living_ones_stay",  # others' open files are unknown
    ),
    "tests/recording/test_record.py": (),
    "tests/recording/test_resuming.py": (
        "test_every_sampler_goes_on_as_if_nothing_had_been",  # the files of the tests after it, of every sampler
    ),
    "tests/recording/test_locks_and_disks.py": (
        "test_two_threads_on_one_directory",
        "test_processes_of_one_command_share_the_directory_and_not_its_batches",
        "test_a_full_disk_stops_a_save_that_can_be_done_again",  # counts calls that flush directories too
        "test_a_full_disk_stops_a_run_that_goes_on",
    ),
    "tests/cli/test_record.py": ("test_the_program_says_it_in_one_line",),  # in a process without the rules
    "tests/cli/test_evaluate.py": ("test_errors_are_one_sentence",),  # so is this
    "tests/training/test_checkpoints.py": ("test_a_damaged_checkpoint_is_told_or_whole",),  # deletes a mapped file
    "tests/training/test_resumed_training.py": (),
    "tests/evaluation/test_responses.py": ("test_two_evaluations_that_store_answers_in_one_directory",),
    "tests/experiments/test_runner.py": (
        "test_two_processes_never_write_one_file",
        "test_processes_of_one_run_start_beside_each_other",
        "test_processes_that_ended_without_an_item_do_not_bind_the_directory",
    ),
}
"""Test files, with those of their tests that are of locks, which Windows has not, or as the comment says.

The plugin leaves out those that have no directory to write into."""

RULES = """
import os, sys
import tests.pretend_windows.plugin
file = open("a", "wb")
reader = open("a", "rb")
for call in (lambda: os.replace("a", "b"), lambda: os.unlink("a"), lambda: os.open(".", os.O_RDONLY),
             lambda: open("c:d", "w"), lambda: os.fsync(reader.fileno())):
    try:
        call()
    except OSError:
        continue
    sys.exit("allowed")
file.close()
reader.close()
os.replace("a", "b")
os.unlink("b")
"""


def test_the_rules_refuse(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RULES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stderr


@pytest.mark.long
@pytest.mark.in_turn
@pytest.mark.timeout(600)
def test_files_are_written_under_the_rules_of_windows() -> None:
    # A worker of pytest-xdist tells its children so.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.pretend_windows.plugin", "-q", "-p", "no:cacheprovider"]
    command += [*FILES, *(f"--deselect={file}::{name}" for file in FILES for name in FILES[file])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
