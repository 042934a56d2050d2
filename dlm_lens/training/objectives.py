"""The registry of training objectives: the classes that settings hold, by the kinds that files name."""

from collections.abc import Mapping
from typing import Any, get_args

from dlm_lens.training.bound_objective import LikelihoodBoundLoss
from dlm_lens.training.objective import MaskedDiffusionLoss, NextToken
from dlm_lens.training.uniform_objective import UniformDiffusionLoss

AnyObjective = MaskedDiffusionLoss | NextToken | UniformDiffusionLoss | LikelihoodBoundLoss
"""Every objective: a dataclass of its settings with `kind`, `predicted_share` and `for_evaluation`."""

OBJECTIVES: Mapping[str, Any] = {one.kind: one for one in get_args(AnyObjective)}
"""Kind, as `objective.kind` of a file has it -> class."""
