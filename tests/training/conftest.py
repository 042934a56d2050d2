"""A training that ran to its end without an interruption."""

import pytest

from dlm_lens.training import (
    MaskedDiffusionTrainer,
)
from tests.training.job import job


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> MaskedDiffusionTrainer:
    trainer = job(tmp_path_factory.mktemp("unbroken"), save_steps=2)
    trainer.train()
    return trainer
