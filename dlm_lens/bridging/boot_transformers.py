"""Embedded models by name in TransformerLens's own `boot_transformers`."""

from functools import wraps
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from dlm_lens.adapters.model_names import CHECKPOINTS, embedded_models


def teach_boot_transformers() -> None:
    """Let `TransformerBridge.boot_transformers` know the embedded models' names; safe to call again."""
    boot = TransformerBridge.boot_transformers
    if getattr(boot, "knows_embedded_models", False):
        return

    @wraps(boot)
    def boot_transformers(model_name: str, *args: Any, **options: Any) -> Any:
        known = model_name in embedded_models()
        return boot(str(CHECKPOINTS / model_name) if known else model_name, *args, **options)

    boot_transformers.knows_embedded_models = True  # type: ignore[attr-defined]
    TransformerBridge.boot_transformers = staticmethod(boot_transformers)
