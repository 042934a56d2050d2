"""Train an embedded checkpoint from nothing: `python -m experiments.toy.train --model toy --out runs/toy`.

A run can be killed at any time and continued by the same command: weights, optimiser moments and the loss
curve are saved every few hundred steps, and batches and masks depend on the step number only. When the last
step is done the checkpoint is exported next to that state; `experiments.toy.release` measures it and writes
its card.
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from jaxtyping import Bool, Float, Int
from torch import nn
from tqdm import tqdm

from experiments.toy.checkpoint import export
from experiments.toy.corpus import TRAINING_SEQUENCES, Batch, Corpus, build_corpus
from experiments.toy.model import VARIANTS, build_model
from experiments.toy.objective import Forward, diffusion_loss, next_token_loss
from experiments.toy.optimization import (
    OptimizerName,
    build_optimizers,
    learning_rate,
    load_state,
    save_state,
)
from experiments.toy.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)

CURVE_EVERY = 50
SAVE_EVERY = 500
STATE_FILE, RECORD_FILE = "state.safetensors", "training.json"


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


@dataclass
class Progress:
    """How far a run is: steps done, seconds spent over all its sittings, mean loss of each 50 steps."""

    step: int = 0
    seconds: float = 0.0
    loss_curve: list[tuple[int, float]] = field(default_factory=list)


class Run:
    """A training run: a network, its optimisers, its corpus and its progress."""

    def __init__(self, settings: Settings, corpus: Corpus, network: nn.Module) -> None:
        self.settings, self.corpus, self.network = settings, corpus, network
        self.optimizers = build_optimizers(network, settings.optimizer)
        self.progress = Progress()
        self.compiled = settings.compiled and any(map(shutil.which, ("g++", "c++", "clang++")))
        self._forward = training_forward(network, VARIANTS[settings.model].causal, self.compiled)
        self._mask_token_id = build_tokenizer().mask_token_id
        self._recent: list[float] = []

    def advance(self) -> float:
        """Take one optimiser step and return its loss in nats."""
        step = self.progress.step
        loss = self._loss(self.corpus.batch(step, self.settings.batch_size, self.settings.seed), step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.settings.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self._recent.append(loss.item())
        if self.progress.step % CURVE_EVERY == 0:
            self.progress.loss_curve.append((self.progress.step, sum(self._recent) / len(self._recent)))
            self._recent.clear()
        return loss.item()

    def _loss(self, batch: Batch, step: int) -> Float[torch.Tensor, ""]:
        if VARIANTS[self.settings.model].causal:
            return next_token_loss(self._forward, batch)
        # 1_000_003 (a prime) keeps the mask streams of neighbouring training seeds apart.
        generator = torch.Generator().manual_seed(1_000_003 * self.settings.seed + step)
        return diffusion_loss(self._forward, batch, self._mask_token_id, generator)

    def save(self, directory: Path) -> None:
        """Write the resumable state and record; between multiples of `CURVE_EVERY` its curve has gaps."""
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "compiled": self.compiled}
        record = {"settings": asdict(self.settings), "progress": asdict(self.progress), "machine": machine}
        save_state(directory / STATE_FILE, self.network, self.optimizers, record)
        (directory / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")

    def resume(self, directory: Path) -> None:
        """Continue from the state in `directory`, if there is one.

        Raises:
            ValueError: a run with other settings wrote it.
        """
        path = directory / STATE_FILE
        if not path.exists():
            return
        record = load_state(path, self.network, self.optimizers)
        if record["settings"] != asdict(self.settings):
            raise ValueError(
                f"{path} belongs to a run with {record['settings']}; choose another --out or delete it"
            )
        progress = record["progress"]
        curve = [(step, loss) for step, loss in progress["loss_curve"]]
        self.progress = Progress(progress["step"], progress["seconds"], curve)


def training_forward(network: nn.Module, causal: bool, compiled: bool) -> Forward:
    """Wrap the network as `(tokens, visible) -> logits`, in bf16 autocast."""

    def forward(
        tokens: Int[torch.Tensor, "batch position"], bias: Float[torch.Tensor, "batch 1 query key"]
    ) -> Float[torch.Tensor, "batch position d_vocab"]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return network(input_ids=tokens, attention_mask=bias, use_cache=False).logits

    call = torch.compile(forward) if compiled else forward

    def with_bias(
        tokens: Int[torch.Tensor, "batch position"], visible: Bool[torch.Tensor, "batch position"]
    ) -> Float[torch.Tensor, "batch position d_vocab"]:
        seen = visible[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        if causal:
            seen = seen.tril()
        # Finite, so that a compiled softmax in bf16 never meets inf - inf.
        return call(tokens, torch.zeros(seen.shape).masked_fill(~seen, -1e9))

    return with_bias


@contextmanager
def _clock(progress: Progress) -> Iterator[None]:
    """Add the time spent inside to the run's seconds."""
    began, before = time.monotonic(), progress.seconds
    try:
        yield
    finally:
        progress.seconds = before + time.monotonic() - began


def train(settings: Settings, directory: Path, corpus: Corpus | None = None) -> Run:
    """Run to the last step, saving on the way, and export the checkpoint into `directory`.

    `corpus` saves building it again where several runs share it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if corpus is None:
        logger.info("Encoding %d training sequences.", settings.corpus_size)
        corpus, _ = build_corpus(settings.corpus_size)
    run = Run(settings, corpus, build_model(settings.model, settings.seed))
    run.resume(directory)
    with tqdm(total=settings.steps, initial=run.progress.step, desc=directory.name, mininterval=5) as bar:
        while run.progress.step < settings.steps:
            with _clock(run.progress):
                loss = run.advance()
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if run.progress.step % SAVE_EVERY == 0 or run.progress.step == settings.steps:
                run.save(directory)
    export(run.network, settings.model, directory)
    return run


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
) -> None:
    """Train one embedded checkpoint, or continue an interrupted run."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if model not in VARIANTS or optimizer not in ("muon", "adamw"):
        raise typer.BadParameter(f"{model} with {optimizer}; choose from {', '.join(VARIANTS)} and muon, adamw")
    torch.set_num_threads(threads)
    name = cast(OptimizerName, optimizer)
    train(Settings(model, name, seed, steps, batch_size, corpus_size, compiled), out)


if __name__ == "__main__":
    typer.run(main)
