"""Time of commands that need no model, from start to exit: `python -m benchmarks.command_line`.

Every command runs in a fresh process; the median of five runs.
"""

import statistics
import subprocess
import sys
import time

COMMANDS = (
    "--help",
    "paths --help",
    "plot list",
    "experiment list",
    "sinks nowhere",
    "record toy --prompts no --out o",
    "demo ./nowhere",
    "report nowhere",
    "train nowhere.yaml",
    "experiment nothing",
)


def main() -> None:
    """Print the seconds of each command."""
    for command in COMMANDS:
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "dlm_lens.cli", *command.split()], capture_output=True, check=False
            )
            seconds.append(time.perf_counter() - begun)
        print(f"{statistics.median(seconds):6.2f} s  dlm-lens {command}")


if __name__ == "__main__":
    main()
