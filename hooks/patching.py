"""`patch_from`: patch activations of one run into another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_lens.arguments import is_whole, kept_step, store_plain_numbers
from dlm_lens.attention import Hook, PointContext, RunStep, padding_before, run_of
from dlm_lens.hooks.activation_capture import Activations
from dlm_lens.hooks.base import makes_hook
from dlm_lens.hooks.positions import (
    ActivationSite,
    GivenPositions,
    Positions,
    RowPositions,
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
        """Refuse a step that is in one of the two runs alone, and rows that are not those of the other run.

        Raises:
            ValueError: no such step, another number of rows, or a row with other padding.
        """
        super().check_run(run)
        self._check_rows(run)
        source = self.source
        theirs = source[self.site, self.layers[0], source.steps[0]].shape[1] - source.sinks.count
        # Elsewhere the number depends on the step, at which it is compared.
        if theirs != run.tokens.shape[1] and run.whole is None and not (source.run.computed or self.stack):
            raise ValueError(
                f"{self}: the other run had {theirs} positions and this one has {run.tokens.shape[1]}; patching "
                "needs prompts and answers of one length"
            )
        if self.step is None:
            return
        if not -run.total <= self.step < run.total:
            raise ValueError(
                f"{self}: step {self.step} is not there; the run has {run.total}, 0 to {run.total - 1}"
            )
        if self.from_step is None:
            self._taken(self._acts_at(run.total))

    def _check_rows(self, run: RunStep) -> None:
        """Raise unless every row that is patched has the captured row's padding, so that a position is one place.

        Raises:
            ValueError: another number of rows, or naming the row.
        """
        theirs, ours = self.source.run.padding.tolist(), padding_before(run.valid).tolist()
        ours = ours[: len(ours) // run.halves]
        if len(theirs) not in (1, len(ours)):
            raise ValueError(
                f"{self}: the other run has {len(theirs)} rows and this one {len(ours)}; capture as many rows, or "
                "one"
            )
        for row in range(len(ours)):
            from_row = row % len(theirs)
            if theirs[from_row] != ours[row] and self._writes_canvas(row):
                raise ValueError(
                    f"{self}: row {from_row} of the other run has {theirs[from_row]} positions of padding and row "
                    f"{row} of this one {ours[row]}, so that a position is another token there; capture and patch "
                    "prompts of one length, or leave the row out with an empty list of by_row(...)"
                )

    def _writes_canvas(self, row: int) -> bool:
        """Whether the hook patches canvas positions of a row; learned sink tokens are beside its padding."""
        if not isinstance(self.positions, tuple):
            return True
        of_row = (each.rows[row % len(each.rows)] for each in self.positions if isinstance(each, RowPositions))
        return any(of_row) or any(isinstance(each, int) for each in self.positions)

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
        theirs = self._for_rows(theirs, tensor, hook.run)
        chosen = spread(where(self.positions, tensor, hook, self), tensor)
        return torch.where(chosen, theirs.to(tensor), tensor)

    def _for_rows(self, theirs: Tensor, tensor: Tensor, run: RunStep | None) -> Tensor:
        """The other run's activation with a row for each of `tensor`, the halves of guidance to the same halves.

        A run without guidance gets the conditional half; one with guidance gets a run without it in both.

        Raises:
            ValueError: another shape, or rows outside a run of which the halves or the padding are not known.
        """
        rows = len(self.source.run.tokens)
        halves = len(theirs) // rows
        if run is None:
            padded, guided = bool(self.source.run.padding.any()), halves > 1 and rows == 1 < len(tensor)
            if padded or guided:
                raise ValueError(
                    f"{self}: the other run has {'padding' if padded else 'guidance'}, and outside a run that of "
                    f"these {len(tensor)} rows is not known; patch in dlm_lens.denoise(..., hooks=[...])"
                )
            ours = halves if len(tensor) == len(theirs) else 1
        else:
            ours = run.for_rows(len(tensor)).halves
        count = len(tensor) // ours
        if theirs.shape[1:] != tensor.shape[1:] or rows not in (1, count):
            raise ValueError(
                f"{self}: the other run had shape {list(theirs.shape)} there and this one has "
                f"{list(tensor.shape)}; patching needs prompts and answers of one length, and as many rows (or one)"
            )
        # The conditional half comes first.
        kept = theirs.unflatten(0, (halves, rows))[:ours]
        return kept.expand(ours, count, *theirs.shape[1:]).flatten(0, 1)


@makes_hook
def patch_from(
    activations: Activations,
    step: int | None = None,
    site: ActivationSite = "resid",
    positions: GivenPositions = None,
    *,
    from_step: int | None = None,
) -> PatchFrom:
    """Replace an activation by that of another run (activation patching), at one step or at every captured step.

    The hook acts in the captured layers; `at_layers` restricts it further. With guidance each half gets the other
    run's, or that of a run without guidance; without guidance, the rows get the conditional half.

    Args:
        activations: returned by `capture`; the run has the same number of positions, as many rows or one, and in
            every row that is patched the same padding.
        step: the step at which to act, negative from the end of the patched run; None for every captured step.
        site: "resid", "attn_out", "mlp_out", "q", "k", "v" or "z".
        positions: canvas positions, `sink(i)`, `by_row`, or "masked", "visible", "prompt", "answer" of the patched
            run; None for all.
        from_step: the other run's step, if it is not `step`; negative from the last captured one.

    Raises:
        ValueError: a site or a step that was not captured, or an unknown class.
    """
    return PatchFrom(activations, step, site, positions, from_step)  # type: ignore[arg-type]
