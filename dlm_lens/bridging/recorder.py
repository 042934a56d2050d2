"""`BridgeRecorder`: the statistics of `dlm_lens.Recorder` inside a bridge, from TransformerLens's hook points."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from dlm_lens.arguments import chosen_indices
from dlm_lens.attention import AttentionInputs, SinkLayout, Site
from dlm_lens.bridging.step_hooks import point_of
from dlm_lens.placement import is_quantised, resident
from dlm_lens.recording import Recorder
from dlm_lens.recording.layer_taps import LayerInputs
from dlm_lens.recording.recorder import Storage
from dlm_lens.recording.reducers.base import STREAM_PARTS, AnyReducer
from dlm_lens.sampling import Sampler

logger = logging.getLogger(__name__)

OF_VALUES = ("value_norm", "value_norm_mean", "weighted_value", "mixed_norm")
"""The statistics of this library that are of v or z."""


class BridgeTap:
    """Passes every layer of a bridge to `show` after its attention, with the edits of hooks registered before.

    Args:
        bridge: of `dlm_lens.bridge`.
        layers: indices of the layers, negative from the end; None for all.
        show: called with each layer.

    Raises:
        ValueError: a layer that the model does not have.
    """

    def __init__(self, bridge: Any, layers: Sequence[int] | None, show: Callable[[LayerInputs], None]) -> None:
        self.bridge, self.show = bridge, show
        self.layers = chosen_indices("layer", layers, len(bridge.blocks))
        self.layout = SinkLayout.of(bridge.original_model)
        self._seen: dict[tuple[int, str], Tensor] = {}
        self._open = ExitStack()

    @property
    def scale(self) -> float:
        """The factor that attention scores are multiplied by, in the first of the layers."""
        return self._scale_of(self.layers[0])

    def _scale_of(self, layer: int) -> float:
        return float(self.bridge.blocks[layer].attn.original_component.scaling)

    def open(self) -> None:
        """Add the hooks."""
        self.close()
        hooks: list[tuple[str, Callable[..., None]]] = []
        for layer in self.layers:
            attention = self.bridge.blocks[layer].attn
            sites: tuple[Site, ...] = ("rot_q", "rot_k", "v", "pattern", "z")
            points = {site: point_of(attention, site) for site in sites} | {"resid": "hook_resid_pre"}
            hooks += [(f"blocks.{layer}.{point}", self._keep(layer, name)) for name, point in points.items()]
            hooks.append((f"blocks.{layer}.hook_attn_out", self._keep(layer, "attn_out")))
            hooks.append((f"blocks.{layer}.hook_resid_post", self._show_layer(layer)))
        self._open.enter_context(self.bridge.hooks(fwd_hooks=hooks))

    def close(self) -> None:
        """Remove the hooks."""
        self._open.close()
        self._seen.clear()

    def weight(self, layer: int) -> Tensor:
        """W_O of every head, [head, d_head, d_model]."""
        attention = self.bridge.blocks[layer].attn
        linear = attention.o.original_component
        if is_quantised(linear.weight):
            return resident(linear).T.unflatten(0, (-1, attention.original_component.head_dim))
        found: Tensor = attention.W_O
        return found

    def _keep(self, layer: int, name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: Any) -> None:
            if not self.bridge.silent:
                self._seen[layer, name] = value

        return keep

    def _show_layer(self, layer: int) -> Callable[..., None]:
        def show_layer(left: Tensor, hook: Any) -> None:
            """Show the layer, whose output this is."""
            if self.bridge.silent:
                return
            names = ("resid", "attn_out", "rot_q", "rot_k", "v", "pattern", "z")
            resid, added, q, k, v, pattern, z = (self._seen.pop((layer, name)) for name in names)
            canvas = self.layout.canvas(k.shape[1])
            inputs = AttentionInputs(
                layer,
                q.transpose(1, 2)[:, :, canvas],
                k.transpose(1, 2),
                v.transpose(1, 2),
                self._scale_of(layer),
                own_start=canvas.start,
                pattern=pattern[:, :, canvas],
                z=z[:, canvas],
            )
            self.show(LayerInputs(inputs, resid, added, left))

        return show_layer


class BridgeRecorder(Recorder):
    """Reduces every layer of every step of a bridge's run: an observer for `denoise` and `denoise_with_cache`.

    A bridge computes its patterns in any case. They are reduced after all hooks have edited them.
    `recorder.recording(run)` is the `Recording`. Compatibility mode moves value biases past v and z, and centres
    the residual stream of GPT-2: statistics of them differ from the native model's, and a warning names them.

    Args:
        bridge: of `dlm_lens.bridge`.
        reducers, layers, dtype: as for `dlm_lens.Recorder`.

    Raises:
        ValueError: as `dlm_lens.Recorder`; a run with an approximate cache.
    """

    def __init__(
        self,
        bridge: Any,
        reducers: Sequence[Any],
        *,
        layers: Sequence[int] | None = None,
        dtype: Storage = "float32",
    ) -> None:
        self.bridge = bridge
        super().__init__(bridge.original_model, reducers, layers=layers, dtype=dtype)

    def start(
        self,
        sampler: Sampler,
        content: Bool[Tensor, "batch position"],
        answer: Bool[Tensor, "batch position"] | None = None,
    ) -> None:
        """A run begins.

        Raises:
            ValueError: a run with an approximate cache.
        """
        if sampler.cache is not None:
            raise ValueError(
                f"BridgeRecorder with cache={sampler.cache!r}: the bridge's hook points have the computed keys "
                "without the kept ones; use dlm_lens.record"
            )
        warn_of_processed_weights(self.bridge, self.reducers)
        super().start(sampler, content, answer)

    def tapped(self, layers: Sequence[int] | None) -> BridgeTap:
        """The bridge's hook points."""
        return BridgeTap(self.bridge, layers, self.show)


def warn_of_processed_weights(bridge: Any, reducers: Sequence[AnyReducer]) -> None:
    """Warn of reducers of values and of the residual stream where compatibility mode has changed what they read.

    A reducer of a user may read the values, which it does not declare.
    """
    ours = "dlm_lens.recording.reducers."
    of_values = [each for each in reducers if each.name in OF_VALUES or not type(each).__module__.startswith(ours)]
    of_stream = [each for each in reducers if not STREAM_PARTS.keys().isdisjoint(each.reads)]
    for changed, found, what, option in (
        (bridge.folds_value_biases, of_values, "folded the value biases past v and z", "fold_value_biases"),
        (bridge.centres_stream, of_stream, "centred the residual stream", "center_writing_weights"),
    ):
        if changed and found:
            logger.warning(
                "%s: compatibility mode has %s, so that these statistics differ from those of dlm_lens.record; "
                "enable_compatibility_mode(%s=False) keeps them equal",
                ", ".join(each.name for each in found),
                what,
                option,
            )
