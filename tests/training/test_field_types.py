from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlm_lens.training import (
    DataSettings,
    LikelihoodBoundLoss,
    MaskedDiffusionLoss,
    ModelSettings,
    NextToken,
    Optimisation,
    TrainingSettings,
    UniformDiffusionLoss,
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrainingSettings(steps="4"), "^steps is '4'; it must be a whole number or None$"),
        (lambda: TrainingSettings(steps=2.5), r"^steps is 2\.5; it must be a whole number or None$"),
        (lambda: TrainingSettings(steps=True), "^steps is True; it must be a whole number or None$"),
        (lambda: TrainingSettings(tokens="1e6"), "^tokens is '1e6'; it must be a number or None$"),
        (lambda: TrainingSettings(steps=4, output=3), "^output is 3; it must be a text or a path$"),
        (
            lambda: TrainingSettings(steps=4, data={"length": 32}),
            r"^data is \{'length': 32\}; it must be a DataSettings$",
        ),
        (
            lambda: TrainingSettings(steps=4, report_to="tensorboard"),
            "^report_to is 'tensorboard'; it must be a list, and each part a text$",
        ),
        (lambda: TrainingSettings(steps=4, compile=1), "^compile is 1; it must be True or False$"),
        (lambda: Optimisation(rate="1e-3"), r"^optimisation\.rate is '1e-3'; it must be a number$"),
        (
            lambda: Optimisation(betas=0.9),
            r"^optimisation\.betas is 0\.9; it must be a list, and each part a number$",
        ),
        (lambda: DataSettings(length="32"), r"^data\.length is '32'; it must be a whole number$"),
        (lambda: DataSettings(path=Path("a.txt")), r"^data\.path is .*a\.txt'\); it must be a text$"),
        (lambda: ModelSettings(sinks="1"), r"^model\.sinks is '1'; it must be a whole number$"),
        (lambda: MaskedDiffusionLoss(floor="1e-3"), "^floor is '1e-3'; it must be a number$"),
        (lambda: NextToken(random_length_share=None), "^random_length_share is None; it must be a number$"),
        (lambda: UniformDiffusionLoss(vocabulary="64"), "^vocabulary is '64'; it must be a whole number$"),
        (lambda: LikelihoodBoundLoss(group=1.5), r"^group is 1\.5; it must be a whole number$"),
    ],
)
def test_a_value_of_another_type_is_one_sentence(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_values_of_the_types_are_taken() -> None:
    settings = TrainingSettings(output=Path("run"), tokens=10**6, report_to=["wandb"], save_minutes=5)  # type: ignore[arg-type]
    assert settings.tokens == 10**6
    assert Optimisation(rate=1, min_rate=0, betas=[0, 0.9], clip=0).rate == 1  # type: ignore[arg-type]
    assert MaskedDiffusionLoss(block_length=None, logit_shift=True).logit_shift
