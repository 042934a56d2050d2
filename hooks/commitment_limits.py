"""`until_committed`: a hook of activations that acts on each position only before a step of its own."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import Hook, HookLike, HookWrapper, PointContext, RunStep, as_hook, run_of
from dlm_lens.hooks.positions import activation_site, spread
from dlm_lens.sampling.algorithm_registry import moves_tokens


@dataclass(frozen=True, eq=False, repr=False)
class UntilCommitted(HookWrapper):
    """A hook whose edits reach a position before its step alone; build it with `until_committed`.

    Raises:
        ValueError: a hook of scores or patterns, or steps that are no whole numbers [batch, position].
    """

    hook: Hook
    steps: Int[Tensor, "batch position"]

    def __post_init__(self) -> None:
        activation_site(self.hook.site, "until_committed")
        steps: Any = self.steps
        if (
            not isinstance(steps, Tensor)
            or steps.ndim != 2
            or steps.is_floating_point()
            or steps.dtype == torch.bool
        ):
            raise ValueError(
                f"until_committed: steps is {steps!r:.60}; give whole numbers [batch, position], such as "
                "commitment(model, run).committed_at"
            )

    def __repr__(self) -> str:
        known = self.steps[self.steps >= 0].float()
        mean = f", mean {float(known.mean()):.3g}" if len(known) else ""
        return f"until_committed({self.hook!r}, steps=Tensor({list(self.steps.shape)}{mean}))"

    @property
    def stateless(self) -> bool:
        """Never: it depends on the step."""
        return False

    @property
    def remembers(self) -> bool:
        """As the hook inside."""
        return self.hook.remembers

    @property
    def row_count(self) -> int | None:
        """The rows that the steps are of; with those of one row, as the hook inside."""
        return len(self.steps) if len(self.steps) > 1 else self.hook.row_count

    def check_run(self, run: RunStep) -> None:
        """Refuse a run of other prompts or another length, or one whose tokens move.

        Raises:
            ValueError: naming both shapes, or the sampler.
        """
        if run.config is not None and moves_tokens(run.config):
            raise ValueError(
                f"{self}: the sampler of {run.config.model_type} moves tokens, so that no position is one token; "
                "end the hook for all positions, such as with at_steps(hook, range(8))"
            )
        positions = run.tokens.shape[1] if run.whole is None else run.whole
        # A run without a mask token may have ended early, on a canvas shorter than it began with.
        ended = self.steps.shape[1] < positions and getattr(run.config, "mask_token_id", None) is None
        rows = len(run.tokens) // run.halves
        if len(self.steps) not in (1, rows) or not (positions == self.steps.shape[1] or ended):
            raise ValueError(
                f"{self}: the run has {rows} rows of {positions} positions; give the steps of a run of "
                "the same prompts and length"
            )
        self.hook.check_run(run)

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the edited activation at the positions whose step is still to come, and the given one elsewhere.

        Raises:
            ValueError: outside a run, or what the hook inside refuses.
        """
        # A hook may edit its tensor in place, which would reach the positions that are kept.
        edited = self.hook(tensor.clone(), hook)
        return torch.where(spread(self._before(tensor, hook), tensor), edited, tensor)

    def _before(self, tensor: Tensor, hook: PointContext) -> Bool[Tensor, "row position"]:
        run = run_of(hook, self)
        rows, length = tensor.shape[:2]
        canvas = hook.sinks.canvas(length)
        count = len(range(*canvas.indices(length)))
        # With an approximate cache a step computes a span of the canvas, and an AR step sees its beginning.
        start = run.queries[0] if run.queries is not None and count != run.tokens.shape[1] else 0
        steps = self.steps[:, start : start + count]
        steps = torch.nn.functional.pad(steps, (0, count - steps.shape[1]), value=-1)
        before = (run.step < steps).repeat(rows // len(steps), 1)
        chosen = torch.zeros(rows, length, dtype=torch.bool, device=tensor.device)
        chosen[:, canvas] = before.to(tensor.device)
        return chosen


def until_committed(hook: HookLike, steps: Int[Tensor, "batch position"]) -> UntilCommitted:
    """Let a hook act on a position only at the steps before a step of its own, and never on learned sink tokens.

    With the steps at which predictions settle in a run without the hook, `commitment(model, run).committed_at`,
    steering ends where there is nothing left to decide: a schedule that follows commitment, as 2605.10971 proposes
    for attributes; per position, this definition is ours. `run.step_of` ends it where a position is decided.

    Args:
        hook: of an activation [batch, position, ...]: "resid", "attn_out", "mlp_out", "q", "k", "v", "z".
        steps: for every position of the canvas; -1 for never, as for positions after the end of a run that ended
            early (AR, or without a mask token).

    Raises:
        ValueError: a hook of scores or patterns, or steps of another form; before a run of a sampler that moves
            tokens (DreamOn, LLaDA2.2).
    """
    return UntilCommitted(as_hook(hook), steps)
