"""`patch_from`: patch activations of one run into another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_lens.arguments import is_whole, kept_step, store_plain_numbers
from dlm_lens.attention import Hook, PointContext, RunStep, run_of
from dlm_lens.hooks.activation_capture import Activations
from dlm_lens.hooks.positions import (
    ActivationSite,
    GivenPositions,
    Positions,
    activation_site,
    printed_call,
    read_positions,
    spread,
    where,
)


@dataclass(frozen=True, eq=False)
class PatchFrom(Hook):
    """Replace an activation by that of another run; build it with `patch_from`.

    Raises:
        ValueError: an invalid step, site or position, or activations that `capture` did not return.
    """

    source: Activations
    step: int | None
    site: ActivationSite = "resid"
    positions: Positions = None
    from_step: int | None = None

    remembers = False

    def __post_init__(self) -> None:
        store_plain_numbers(self)
        if not isinstance(self.source, Activations):
            raise ValueError(
                f"patch_from: {type(self.source).__name__} holds no activations; give "
                "capture(model, prompt_or_run, sites)"
            )
        activation_site(self.site, "patch_from")
        if self.site not in self.source.sites:
            raise ValueError(f"patch_from: {self.site!r} was not captured; {self.source} has no such site")
        object.__setattr__(self, "positions", read_positions(self.positions, "patch_from"))
        if self.step is not None and not is_whole(self.step):
            raise ValueError(f"patch_from: step is {self.step!r}; give an index, or None for every captured step")
        if self.step is None and self.from_step is not None:
            raise ValueError("patch_from: from_step says what to put in at one step; give that step too")
        if self.from_step is not None:
            object.__setattr__(self, "from_step", kept_step(self.from_step, self.source.steps))
            self._taken(self.from_step)
        elif self.step is not None and self.step >= 0:
            self._taken(self.step)

    def __repr__(self) -> str:
        more = [f"step={self.step}", *([] if self.from_step is None else [f"from_step={self.from_step}"])]
        return printed_call("patch_from", self.site, self.positions, f"source={self.source}", *more)

    def first_step(self, total: int) -> int | None:
        """The patched step, or the first captured one."""
        return min(self.source.steps) if self.step is None else self._acts_at(total)

    def check_run(self, run: RunStep) -> None:
        """Refuse a step that the run does not have, or that was not captured.

        Raises:
            ValueError: no such step.
        """
        super().check_run(run)
        if self.step is None:
            return
        if not -run.total <= self.step < run.total:
            raise ValueError(
                f"{self}: step {self.step} is not there; the run has {run.total}, 0 to {run.total - 1}"
            )
        if self.from_step is None:
            self._taken(self._acts_at(run.total))

    def _acts_at(self, total: int) -> int:
        """The step at which the hook acts, in a run of `total` steps."""
        assert self.step is not None
        return self.step % total if self.step < 0 else self.step

    def _taken(self, step: int) -> None:
        """Check that the other run's step was captured.

        Raises:
            ValueError: it was not.
        """
        if step not in self.source.steps:
            raise ValueError(f"patch_from: step {step} was not captured; there are {list(self.source.steps)}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers; the hook acts in these."""
        return self.source.layers

    @property
    def stack(self) -> str:
        """The part of the model that was captured."""
        return self.source.stack

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Return the activation with the other run's values at the positions.

        Outside a run the hook acts in every call, and `step` must be given and not be negative.

        Raises:
            ValueError: a position or layer that does not exist, a class outside a run, or activations of another
                shape.
        """
        if hook.run is None and self.step is not None and self.step >= 0:
            now = self.step
        else:
            run = run_of(hook, self)
            now = run.step
            steps = self.source.steps if self.step is None else (self._acts_at(run.total),)
            if now not in steps:
                return tensor
        if hook.index is None:
            raise ValueError(f"{self}: a bare call does not know its layer; run it with attach_hooks(model, ...)")
        layer = hook.layer()
        if layer not in self.layers:
            return tensor
        theirs = self.source[self.site, layer, now if self.from_step is None else self.from_step]
        if len(tensor) == len(self.source.run.tokens) < len(theirs):  # the conditional half of a guided run
            theirs = theirs[: len(tensor)]
        if theirs.shape[1:] != tensor.shape[1:] or len(theirs) not in (1, len(tensor)):
            raise ValueError(
                f"{self}: the other run had shape {list(theirs.shape)} there and this one has "
                f"{list(tensor.shape)}; patching needs prompts and answers of one length, and as many rows (or one)"
            )
        chosen = spread(where(self.positions, tensor, hook, self), tensor)
        return torch.where(chosen, theirs.to(tensor), tensor)


def patch_from(
    activations: Activations,
    step: int | None = None,
    site: ActivationSite = "resid",
    positions: GivenPositions = None,
    *,
    from_step: int | None = None,
) -> PatchFrom:
    """Replace an activation by that of another run (activation patching), at one step or at every captured step.

    The hook acts in the captured layers; `at_layers` restricts it further.

    Args:
        activations: returned by `capture`; the run has the same number of positions, and as many rows or one.
        step: the step at which to act, negative from the end of the patched run; None for every captured step.
        site: "resid", "attn_out", "mlp_out", "q", "k", "v" or "z".
        positions: canvas positions, `sink(i)`, `by_row`, or "masked", "visible", "prompt", "answer" of the patched
            run; None for all.
        from_step: the other run's step, if it is not `step`; negative from the last captured one.

    Raises:
        ValueError: a site or a step that was not captured, or an unknown class.
    """
    return PatchFrom(activations, step, site, positions, from_step)  # type: ignore[arg-type]
