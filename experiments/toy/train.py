"""Train an embedded checkpoint from nothing: `python -m experiments.toy.train --model toy --out runs/toy`.

The language, its corpus and the layout are this folder's; the rest is `dlm_lens.training`. A run can be killed at
any time and continued by the same command. When the last step is done the checkpoint is exported into the run's
directory; `experiments.toy.release` measures it and writes its card.
"""

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from transformers import PreTrainedModel

from dlm_lens.training import (
    DataSettings,
    MaskedDiffusionLoss,
    MaskedDiffusionTrainer,
    NextToken,
    Optimisation,
    TrainingSettings,
    UniformDiffusionLoss,
)
from dlm_lens.training.checkpoints import last_checkpoint, read_run
from dlm_lens.training.settings import OptimizerName, Precision
from experiments.toy.checkpoint import export
from experiments.toy.corpus import TRAINING_SEQUENCES, Corpus, build_corpus
from experiments.toy.model import VARIANTS, build_model
from experiments.toy.tokenizer import SEQUENCE_LENGTH, build_tokenizer

logger = logging.getLogger(__name__)

CURVE_EVERY = 50
SAVE_EVERY = 500
RECORD_FILE = "training.json"

DIFFUSION = MaskedDiffusionLoss(
    masks="count", normalisation="sequence", low_discrepancy=True, whole_share=0.3, floor=1e-6, logit_shift=False
)
"""Exactly ceil(t R) of a region's R positions are masked, t evenly spread over the batch. The region is the answer
with its `<eos>` tail, in 30% of the rows the whole canvas."""

UNIFORM = UniformDiffusionLoss(
    masks="count", normalisation="sequence", low_discrepancy=True, whole_share=0.3, floor=1e-6
)
"""The same positions, with random tokens in place of masks; the loss counts the whole region."""

RATE = 2e-3
OPTIMISATION = Optimisation(
    rate=RATE, min_rate=0.02 * RATE, warm_up=0.04, betas=(0.9, 0.98), weight_decay=0.1, other_weight_decay=0.01
)
"""For Muon and AdamW alike, so that twins differ in the optimiser only."""


@dataclass(frozen=True)
class Settings:
    """What determines a run; two runs with equal settings on one machine give the same weights."""

    model: str
    optimizer: OptimizerName = "muon"
    seed: int = 0
    steps: int = 10_000
    batch_size: int = 64
    corpus_size: int = TRAINING_SEQUENCES
    compiled: bool = True
    precision: Precision = "bf16"

    def full(self, directory: Path) -> TrainingSettings:
        """The trainer's settings."""
        compiled = self.compiled and any(map(shutil.which, ("g++", "c++", "clang++")))
        return TrainingSettings(
            output=str(directory),
            data=DataSettings(length=SEQUENCE_LENGTH),
            objective=objective_of(self.model),
            optimisation=Optimisation(**{**asdict(OPTIMISATION), "optimizer": self.optimizer}),
            batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
            steps=self.steps,
            seed=self.seed,
            precision=self.precision,
            compile=compiled,
            save_steps=SAVE_EVERY,
            keep=1,
            log_steps=CURVE_EVERY,
            report_to=(),
        )


def objective_of(name: str) -> MaskedDiffusionLoss | UniformDiffusionLoss | NextToken:
    """The objective of a variant."""
    variant = VARIANTS[name]
    if variant.causal:
        return NextToken(normalisation="sequence")
    return UNIFORM if variant.uniform else DIFFUSION


def trainer_of(
    settings: Settings, directory: Path, corpus: Corpus, network: PreTrainedModel
) -> MaskedDiffusionTrainer:
    """The trainer of a run."""
    return MaskedDiffusionTrainer(network, settings.full(directory), corpus, tokenizer=build_tokenizer())


def train(settings: Settings, directory: Path, corpus: Corpus | None = None) -> MaskedDiffusionTrainer:
    """Run to the last step, saving on the way, and export the checkpoint into `directory`.

    `corpus` saves building it again where several runs share it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if corpus is None:
        logger.info("Encoding %d training sequences.", settings.corpus_size)
        corpus, _ = build_corpus(settings.corpus_size)
    trainer = trainer_of(settings, directory, corpus, build_model(settings.model, settings.seed))
    trainer.train(resume_from_checkpoint=True)
    (directory / RECORD_FILE).write_text(json.dumps(record(settings, directory), indent=1) + "\n")
    export(trainer.model, settings.model, directory)
    return trainer


def record(settings: Settings, directory: Path) -> dict[str, Any]:
    """The numbers of a run for its card: settings, mean loss per 50 steps, seconds over all starts."""
    checkpoint = last_checkpoint(directory)
    if checkpoint is None:
        raise FileNotFoundError(f"{directory} holds no checkpoint; train first")
    held, logged = read_run(checkpoint), json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    curve = [(entry["step"], entry["loss"]) for entry in logged if "loss" in entry]
    progress = {"step": held["step"], "seconds": held["seconds"], "loss_curve": curve}
    compiled = held["settings"]["compile"]
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "compiled": compiled}
    return {"settings": asdict(settings), "progress": progress, "machine": machine}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(VARIANTS)}.")],
    out: Annotated[Path, typer.Option(help="Directory for the state and the exported checkpoint.")],
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    seed: Annotated[int, typer.Option(help="Initial weights, order of the data, masks.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimiser steps in the schedule.")] = 10_000,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 64,
    corpus_size: Annotated[int, typer.Option(help="Training sequences to generate.")] = TRAINING_SEQUENCES,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    compiled: Annotated[bool, typer.Option(help="Use torch.compile where a C++ compiler exists.")] = True,
    precision: Annotated[str, typer.Option(help="bf16, or fp32: faster without bfloat16 instructions.")] = "bf16",
) -> None:
    """Train one embedded checkpoint, or continue an interrupted run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if model not in VARIANTS or optimizer not in ("muon", "adamw"):
        raise typer.BadParameter(f"{model} with {optimizer}; choose from {', '.join(VARIANTS)} and muon, adamw")
    if precision not in ("bf16", "fp32"):
        raise typer.BadParameter(f"precision is {precision}; choose bf16 or fp32")
    torch.set_num_threads(threads)
    method, products = cast(OptimizerName, optimizer), cast(Precision, precision)
    train(Settings(model, method, seed, steps, batch_size, corpus_size, compiled, products), out)


if __name__ == "__main__":
    typer.run(main)
