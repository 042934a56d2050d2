"""`Bench`: the models of a run, each loaded once."""

from collections.abc import Callable, Mapping
from typing import Any

from dlm_lens.evaluation.responses import fingerprint


class Bench:
    """Loads models by name and keeps the last one.

    Args:
        loading: arguments of `dlm_lens.load`, such as dtype and device_map.
        loaded: called with the name of every model that was loaded, the digest of its weights, and whether it is an
            AR model.
    """

    def __init__(
        self, loading: Mapping[str, Any] | None = None, loaded: Callable[[str, str, bool], None] = lambda *_: None
    ) -> None:
        self.loading, self.loaded = dict(loading or {}), loaded
        self._held: dict[str, Any] = {}
        self._notes: dict[Any, Any] = {}

    def model(self, name: str) -> Any:
        """The model of that name: embedded, a directory or a hub name."""
        if name not in self._held:
            import dlm_lens

            # Two models of 8B do not fit beside each other.
            self._held.clear()
            self._notes.clear()
            model = dlm_lens.load(name, **self.loading)
            self.loaded(name, fingerprint(model), getattr(model.config, "mask_token_id", None) is None)
            self._held[name] = model
        return self._held[name]

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What was computed before for the model at hand under this key, or else what `compute` returns."""
        if key not in self._notes:
            self._notes[key] = compute()
        return self._notes[key]
