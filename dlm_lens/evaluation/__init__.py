"""Evaluation with lm-evaluation-harness: its tasks and those shipped here, under interventions, in batches.

Names load on first use: `HarnessLM` needs the extra `eval`, the rest does not.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
