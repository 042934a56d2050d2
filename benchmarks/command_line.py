"""Time of commands from start to exit, and of the import: `python -m benchmarks.command_line [--wheel]`.

Every command runs in a fresh process; the median of five runs. The import's time is that of a process that imports
the package and nothing else, minus that of a process that does nothing. No command that loads a model can be faster
than the import of transformers' class, which is a line of its own. `--wheel` also builds the wheel.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.timing import machine

COMMANDS = (
    "--help",
    "paths --help",
    "plot list",
    "experiment list",
    "sinks nowhere",
    "record toy --prompts no --out o",
    "report nowhere",
    "train nowhere.yaml",
    "experiment nothing",
    "demo",
)
MODEL_CLASS = "from transformers import LlamaForCausalLM"
ROOT = Path(__file__).parents[1]


def seconds_of(words: Sequence[str], folder: Path) -> float:
    """Seconds of a fresh Python process with these arguments; the median of five."""
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        subprocess.run([sys.executable, *words], capture_output=True, check=False, cwd=folder)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def wheel_size(folder: Path) -> float:
    """Megabytes of the wheel that this checkout builds."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(folder),
    ]
    subprocess.run([*words, str(ROOT)], check=True, capture_output=True)
    return next(folder.glob("*.whl")).stat().st_size / 1e6


def main(
    commands: Annotated[list[str] | None, typer.Argument(help="Commands; without one those of the list.")] = None,
    wheel: Annotated[bool, typer.Option("--wheel", help="Build the wheel and print its size.")] = False,
) -> None:
    """Print the seconds of each command."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if wheel:
            print(f"\nsize of what is installed\n\n| | MB |\n|---|---:|\n| wheel | {wheel_size(folder):.3f} |")
        print(f"\nseconds from start to exit; {machine()}\n\n| | seconds |\n|---|---:|")
        nothing = seconds_of(["-c", "pass"], folder)
        imported = seconds_of(["-c", "import dlm_lens"], folder)
        print(f"| import dlm_lens, beyond Python itself | {imported - nothing:.3f} |")
        needed = seconds_of(["-c", MODEL_CLASS], folder)
        print(f"| import of torch and a model class of transformers, the least with a model | {needed:.2f} |")
        frozen = seconds_of(["-c", "import atexit, gc; atexit.register(gc.freeze)\n" + MODEL_CLASS], folder)
        print(f"| the same, its modules left out of the collections at the exit, as commands do | {frozen:.2f} |")
        for command in commands or COMMANDS:
            seconds = seconds_of(["-m", "dlm_lens.cli", *command.split()], folder)
            print(f"| dlm-lens {command} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
