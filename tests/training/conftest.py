"""A training that ran to its end without an interruption, and cheap collections of garbage."""

import gc

import pytest

from dlm_lens.training import (
    MaskedDiffusionTrainer,
)
from tests.training.job import job


def pytest_collection_finish() -> None:
    """Leave the imported modules out of all later collections.

    transformers' Trainer starts a full one in every `train()`, which walks through every object of every module:
    more than half of the time of a training of eight steps. What tests make is collected as before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> MaskedDiffusionTrainer:
    trainer = job(tmp_path_factory.mktemp("unbroken"), save_steps=2)
    trainer.train()
    return trainer
