"""`fitting_objective`: the objective that trains a model, for the sentences that refuse another one."""

from typing import Any

from dlm_lens.adapters import family_of
from dlm_lens.adapters.registry import fills_masks
from dlm_lens.attention import attends_causally, hooked_attentions
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.noisy_texts import NoisyCorruption


def fitting_objective(model: Any) -> str:
    """The class of the objective that trains a model of a family.

    Args:
        model: of a family that the objectives train (`check_trained_whole`).
    """
    if family_of(model.config.model_type).causal:
        return "NextToken"
    if isinstance(algorithm_of(model.config).corruption, NoisyCorruption):
        return "LikelihoodBoundLoss"
    return "MaskedDiffusionLoss" if fills_masks(model.config) else "UniformDiffusionLoss"


def check_causal(model: Any) -> None:
    """Raise unless no position of a model sees a later one.

    Args:
        model: with hook points, or of transformers without them, whose modules say whether they are causal.

    Raises:
        ValueError: positions see later ones, naming the objective that fits.
    """
    causal = attends_causally(model)
    if not hooked_attentions(model):
        causal = causal and all(getattr(module, "is_causal", None) is not False for module in model.modules())
    if not causal:
        raise ValueError(
            f"the attention of {type(model).__name__} is not causal, so that it sees the tokens that NextToken "
            f"has it predict; train it with {fitting_objective(model)}, or give an autoregressive model"
        )
