"""Evaluation with lm-evaluation-harness: its tasks and those shipped here, under interventions, in batches.

Names load on first use: `HarnessLM` needs the extra `eval`, the rest does not.
"""

from dlm_lens.public_names import attach_names

__getattr__, __dir__, __all__ = attach_names(__name__, __file__)
