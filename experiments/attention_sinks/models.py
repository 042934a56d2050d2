"""What the tables know of a model."""

from dlm_lens.experiments.results import Results


def is_causal(results: Results, model: str) -> bool:
    """Whether a model of these results is an AR baseline; by its name where they do not say."""
    named = model.endswith("-ar") or "llama" in model.lower()
    return results.causal.get(model, named)
