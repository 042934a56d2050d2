"""`run_training`: a training run from its settings, resumed where it was interrupted."""

import logging
from pathlib import Path

from dlm_lens.training.settings import TrainingSettings


def run_training(settings: TrainingSettings) -> Path | None:
    """Train by settings, from the newest checkpoint if there is one, and return the last."""
    from dlm_lens.training.data import read_dataset
    from dlm_lens.training.networks import build_model
    from dlm_lens.training.progress import without_progress_bars
    from dlm_lens.training.trainer import MaskedDiffusionTrainer

    logging.getLogger("dlm_lens").setLevel(logging.INFO)
    dataset = read_dataset(settings.data)
    held = read_dataset(settings.data, settings.data.eval_split) if settings.data.eval_split else None
    with without_progress_bars():
        model = build_model(settings)
    trainer = MaskedDiffusionTrainer(model, settings, dataset, held)
    trainer.train(resume_from_checkpoint=True)
    return trainer.last_checkpoint
