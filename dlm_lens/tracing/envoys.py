"""The views of attention and of the sampler that a trace reads and edits."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from nnsight import Envoy
from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.interleaver import Mediator
from torch import Tensor

from dlm_lens.attention import (
    HOOK_POINTS,
    NAMES,
    Hook,
    HookKey,
    PointContext,
    SinkLayout,
    as_hook,
    hook_keys,
    hook_point,
)
from dlm_lens.tracing.module_names import site_path
from dlm_lens.tracing.steps import Step


class PointProperty(eproperty):
    """A hook point of an attention module as a value of a trace.

    Raises:
        ValueError: when it is read or assigned, of an attention that does not have the point (`q` of GPT-2).
    """

    def __get__(self, envoy: Any, owner: Any = None) -> Any:
        if envoy is not None:
            hook_point(envoy._module, str(self.name))
        return super().__get__(envoy, owner)

    def __set__(self, envoy: Any, value: Any) -> None:
        hook_point(envoy._module, str(self.name))
        super().__set__(envoy, value)


class AttentionEnvoy(Envoy):
    """An attention module: its hook points as values to read, to edit in place and to assign.

    `q`, `k`, `v`, `rot_q`, `rot_k`, `z` are `[batch, position, head, d_head]`, `scores` and `pattern`
    `[batch, head, query, key]`; in a sink model positions count the sink tokens, and with guidance the batch is the
    conditional rows and then the unconditional ones. Scores and pattern exist only where somebody asks for them.

    A point that an architecture does not have (`q` and `k` of GPT-2, which projects both at once) is a ValueError
    that lists those that it has.
    """

    @PointProperty(key="hook_q.output", description="queries before rotation")
    def q(self, value: Tensor) -> Float[Tensor, "batch position head d_head"]:
        """Queries before rotation."""
        return value

    @PointProperty(key="hook_k.output", description="keys before rotation")
    def k(self, value: Tensor) -> Float[Tensor, "batch position kv_head d_head"]:
        """Keys before rotation, of the key/value heads."""
        return value

    @PointProperty(key="hook_v.output", description="values")
    def v(self, value: Tensor) -> Float[Tensor, "batch position kv_head d_head"]:
        """Values, of the key/value heads."""
        return value

    @PointProperty(key="hook_rot_q.output", description="queries after rotation")
    def rot_q(self, value: Tensor) -> Float[Tensor, "batch position head d_head"]:
        """Queries after rotation."""
        return value

    @PointProperty(key="hook_rot_k.output", description="keys after rotation")
    def rot_k(self, value: Tensor) -> Float[Tensor, "batch position kv_head d_head"]:
        """Keys after rotation, of the key/value heads."""
        return value

    @PointProperty(key="hook_scores.output", description="attention scores before the softmax")
    def scores(self, value: Tensor) -> Float[Tensor, "batch head query key"]:
        """Scores before the softmax, masked."""
        return value

    @PointProperty(key="hook_pattern.output", description="attention probabilities")
    def pattern(self, value: Tensor) -> Float[Tensor, "batch head query key"]:
        """Attention probabilities; every row sums to 1."""
        return value

    @PointProperty(key="hook_z.output", description="values mixed by the pattern")
    def z(self, value: Tensor) -> Float[Tensor, "batch position head d_head"]:
        """Values mixed by the pattern, before the output projection."""
        return value

    def __repr__(self) -> str:
        """Nnsight's tree, without the points that this attention does not have."""
        absent = tuple(f"  ({name}) -> " for name in HOOK_POINTS if f"hook_{name}" not in self._module._modules)
        lines = super().__repr__().split("\n")
        return "\n".join(line for line in lines if not (absent and line.startswith(absent)))

    def apply(self, hook: Hook, step: Step | None = None) -> None:
        """Run a hook of `dlm_lens.hooks` at its site in this layer, with the context of `step`.

        Its site may also be what the layer's attention or MLP add to the residual stream ("attn_out", "mlp_out") or
        what the layer leaves ("resid"): `lm.layers[i].attn.output`, `.mlp.output` and `lm.layers[i].output`.

        Raises:
            ValueError: its site is none.
        """
        hook = as_hook(hook)
        if hook.site in HOOK_POINTS:
            value = getattr(self, hook.site)
            setattr(self, hook.site, hook(value, self._context(hook, step, rows=len(value))))
            return
        layer = self.root.layers[self._module.hook_layer]
        place = layer if hook.site == "resid" else layer.get(site_path(layer._module, hook.site))
        value = place.output
        first = value[0] if isinstance(value, tuple) else value
        edited = hook(first, self._context(hook, step, rows=len(first)))
        place.output = (edited, *value[1:]) if isinstance(value, tuple) else edited

    def _context(self, hook: Hook, step: Step | None, rows: int) -> PointContext:
        root, site = self.root, hook.site
        causal = bool(getattr(root.config, "is_causal", True))
        layer = self._module.hook_layer
        name = f"blocks.{layer}.{NAMES[site]}"
        run = None if step is None else root.told(step).for_rows(rows)
        known = rows_of_pass = None
        if site in ("scores", "pattern"):
            known = self._module.get_submodule(f"hook_{site}").attention_pass
            rows_of_pass = root.own_rows()
        depth = int(root.config.num_hidden_layers)
        place = self._place(hook, step)
        return PointContext(name, layer, SinkLayout.of(root), causal, run, depth, known, rows_of_pass, place)

    def _place(self, hook: Hook, step: Step | None) -> HookKey | None:
        """What tells the hook from equal ones that were applied to this layer at this step."""
        if step is None:
            return None
        key = ("applied", self._module.hook_layer, hook.site)
        at, applied = step.run.memory.get(key, (-1, ()))
        applied = (*(applied if at == int(step) else ()), hook)
        step.run.memory[key] = (int(step), applied)
        return hook_keys(applied)[-1]


class SamplerEnvoy(Envoy):
    """The sampler of the run: what it proposes, how sure it is, and what it writes."""

    @eproperty(key="propose.output", description="tokens proposed for the positions evaluated [batch, position]")
    def proposal(self, value: Any) -> Tensor:
        """x0: the token proposed for every position that was evaluated; elsewhere the canvas's own."""
        return value[0].clone()

    @proposal.postprocess  # type: ignore[no-redef]
    def proposal(self, value: Any) -> Any:
        """Put assigned tokens beside the confidence."""
        raw = self._raw_proposal()
        return type(raw)(value, raw[1])

    @proposal.transform  # type: ignore[no-redef]
    def proposal(self, view: Any, raw: Any) -> Any:
        """Put edited tokens beside the confidence."""
        return type(raw)(view, raw[1])

    @eproperty(key="propose.output", description="confidence that ranks the positions [batch, position]")
    def confidence(self, value: Any) -> Tensor:
        """What the ranking uses; -inf where a position is not eligible."""
        return value[1].clone()

    @confidence.postprocess  # type: ignore[no-redef]
    def confidence(self, value: Any) -> Any:
        """Put an assigned confidence beside the tokens."""
        raw = self._raw_proposal()
        return type(raw)(raw[0], value)

    @confidence.transform  # type: ignore[no-redef]
    def confidence(self, view: Any, raw: Any) -> Any:
        """Put an edited confidence beside the tokens."""
        return type(raw)(raw[0], view)

    @eproperty(key="select.output", description="positions written at this step [batch, position]")
    def unmasked(self, value: Tensor) -> Bool[Tensor, "batch position"]:
        """Which positions are written at this step; assign to force an order."""
        return value

    @unmasked.postprocess  # type: ignore[no-redef]
    def unmasked(self, value: Any) -> Tensor:
        """Numbers 0 and 1 are taken as well."""
        return torch.as_tensor(value).bool()

    @property
    def written(self) -> Tensor:
        """The canvas behind the step, `[batch, position]`; a derived view."""
        return self.output[0]

    @written.setter
    def written(self, value: Any) -> None:
        raise AttributeError(
            "lm.sampler.written follows from lm.sampler.proposal and lm.sampler.unmasked; assign to one of them, "
            "or to lm.canvas in the next step"
        )

    def _raw_proposal(self) -> Any:
        return Mediator.value(f"{self.path}.propose.output")
