"""Measure trained checkpoints and put them into the package: `python -m experiments.toy.release --runs runs`.

`runs` holds the directories that `experiments.toy.train` wrote. Those named like a variant (`toy`, `toy-ar`)
are shipped; any others (`toy-adamw`, `toy-seed1`) are measured for comparison only. Without `--runs` the
shipped checkpoints are measured again. The numbers go to `experiments/toy/results/<run>.json`; the model
cards are written from these files alone.
"""

import json
import logging
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import safe_open
from tqdm import tqdm

import dlm_lens
from experiments.toy import card
from experiments.toy.corpus import TEST_SEED, HeldOut, held_out, training_prompts
from experiments.toy.evaluate import accuracy
from experiments.toy.knockout import accuracy_without
from experiments.toy.language import TASK_WEIGHTS
from experiments.toy.model import VARIANTS
from experiments.toy.phenomena import measure
from experiments.toy.train import RECORD_FILE

logger = logging.getLogger(__name__)

RESULTS = Path(__file__).parent / "results"
CHECKPOINTS = Path(dlm_lens.__file__).parent / "checkpoints"
SHIPPED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
LARGEST_FILE = 2_500_000
REPLAYED_PROMPTS = 32


def measure_checkpoint(directory: Path, tests: dict[str, HeldOut], previous: dict[str, Any]) -> dict[str, Any]:
    """Accuracy, sinks, and accuracy without the strongest column of one checkpoint, as JSON values.

    Training facts come from the run's record; for a shipped checkpoint, which has none, from the `previous`
    result.
    """
    model = dlm_lens.load(directory)
    record = directory / RECORD_FILE
    replayed = dlm_lens.denoise(model, [e.prompt for e in tests["A"].examples[:REPLAYED_PROMPTS]], seed=0)
    examples = tests["A"].examples[: 4 * REPLAYED_PROMPTS]
    return {
        "training": json.loads(record.read_text()) if record.exists() else previous["training"],
        "parameters": model.num_parameters(),
        "weights_bytes": (directory / "model.safetensors").stat().st_size,
        "sampler_defaults": dict(model.sampler_defaults),
        "tests": {
            task: {"n": len(t.examples), "seen_in_training": t.seen_in_training, "repeated": t.repeated}
            for task, t in tests.items()
        },
        "accuracy": [asdict(result) for result in accuracy(model, tests)],
        "phenomena": measure(model, replayed),
        "without_a_column": {
            choice: accuracy_without(model, examples, choice) for choice in ("strongest", "random")
        },
        "measured_with": {"torch": torch.__version__, "python": platform.python_version()},
    }


def stored_results() -> dict[str, dict[str, Any]]:
    """Every measured run by its name; other experiments keep numbers of another form in the same folder."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: result for name, result in found.items() if "phenomena" in result}


def ship(directory: Path, name: str) -> None:
    """Copy a run's checkpoint into the package.

    Raises:
        ValueError: the weights are too large or not in half precision.
    """
    target = CHECKPOINTS / name
    target.mkdir(parents=True, exist_ok=True)
    size = (directory / "model.safetensors").stat().st_size
    with safe_open(directory / "model.safetensors", framework="pt") as weights:
        dtypes = {weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118 (not a dict)
    if size > LARGEST_FILE or dtypes != {"F16"}:
        raise ValueError(
            f"{directory}: weights of {size} bytes in {dtypes}; at most {LARGEST_FILE} in F16 are shipped"
        )
    for file in SHIPPED_FILES:
        # Not copy2: safetensors creates private files, and a package's files are readable by everybody.
        shutil.copyfile(directory / file, target / file)
        (target / file).chmod(0o644)


def main(
    runs: Annotated[Path, typer.Option(help="Directory with the runs, by default the shipped ones.")] = CHECKPOINTS,
    tests: Annotated[int, typer.Option(help="Test prompts per task.")] = 256,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    measured: Annotated[
        bool, typer.Option(help="Measure; otherwise only write the cards from stored results.")
    ] = True,
) -> None:
    """Measure every run, ship those that are named like a variant, and write their cards."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(threads)
    RESULTS.mkdir(exist_ok=True)
    directories = sorted(path.parent for path in runs.glob("*/model.safetensors"))
    if measured:
        seen = training_prompts()
        held = {task: held_out(task, tests, seen, TEST_SEED) for task in TASK_WEIGHTS}
        for directory in tqdm(directories, desc="runs"):
            path = RESULTS / f"{directory.name}.json"
            previous = json.loads(path.read_text()) if path.exists() else {}
            result = measure_checkpoint(directory, held, previous)
            path.write_text(json.dumps(result, indent=1, default=asdict) + "\n")
    for directory in directories:
        if directory.name in VARIANTS and runs != CHECKPOINTS:
            ship(directory, directory.name)
    results = stored_results()
    for name in sorted(VARIANTS.keys() & results.keys()):
        (CHECKPOINTS / name / "README.md").write_text(card.write_card(name, results))
        logger.info("Wrote %s", CHECKPOINTS / name / "README.md")


if __name__ == "__main__":
    typer.run(main)
