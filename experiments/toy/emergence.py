"""How sinks emerge in a small model: `python -m experiments.toy.emergence --out runs/emergence`.

Trains `toy-sink` (or another variant) from nothing with sink statistics every 25 steps, and draws them
(docs/images/sink-emergence.png).
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from dlm_lens.files.atomic_writes import write_figure
from dlm_lens.training import MaskedDiffusionTrainer
from dlm_lens.viz import sink_emergence
from experiments.toy.corpus import build_corpus
from experiments.toy.model import build_model
from experiments.toy.tokenizer import build_tokenizer
from experiments.toy.train import Settings


def main(
    out: Annotated[Path, typer.Option(help="Directory of the run and its picture.")] = Path("runs/emergence"),
    model: Annotated[str, typer.Option(help="toy, toy-sink or toy-gated.")] = "toy-sink",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 500,
    corpus_size: Annotated[int, typer.Option(help="Training sequences to generate.")] = 100_000,
) -> None:
    """Train with sink statistics and draw them; an interrupted run goes on."""
    torch.set_num_threads(1)
    corpus, _ = build_corpus(corpus_size)
    usual = Settings(model, steps=steps, corpus_size=corpus_size).full(out)
    settings = replace(usual, probe_steps=25, probe_rows=4, log_steps=5, save_steps=100)
    trainer = MaskedDiffusionTrainer(build_model(model, 0), settings, corpus, tokenizer=build_tokenizer())
    trainer.train(resume_from_checkpoint=True)
    if trainer.last_checkpoint is not None:
        figure = sink_emergence(trainer.last_checkpoint, title=f"{model} from scratch")
        write_figure(out / "sink-emergence.png", figure, dpi=110)


if __name__ == "__main__":
    typer.run(main)
