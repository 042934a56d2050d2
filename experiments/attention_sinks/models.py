"""What the tables know of a model by its name."""


def is_causal(name: str) -> bool:
    """Whether a model of the tables here is an AR baseline, by its name."""
    return name.endswith("-ar") or "llama" in name.lower()
