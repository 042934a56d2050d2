"""`Hosts`: all who follow one run, told of it in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.sampling.history import History
from dlm_lens.sampling.host import Follower, Host
from dlm_lens.sampling.resuming import RunState, Stateful, StateKeeper
from dlm_lens.sampling.sampler import Proposal, Sampler, StepPlan


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, and the `parts` of the run that have a state of their own (generators, the sampler)."""

    hosts: Sequence[Host] = ()
    parts: Sequence[Stateful] = field(default=())

    @property
    def everywhere(self) -> bool:
        """Whether one of them wants the model's own forward."""
        return any(host.everywhere for host in self.hosts)

    @property
    def grad(self) -> bool:
        """Whether one of them wants graphs."""
        return any(host.grad for host in self.hosts)

    def start(self, sampler: Sampler | None, history: History) -> None:
        """A run begins, or goes on behind the steps that its history already has."""
        for host in self.hosts:
            host.start(sampler, history.attention_mask)
            if history.masked and isinstance(host, Follower):
                host.answer = history.masked[0]

    def step(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        is_masked: Callable[[Tensor], Bool[Tensor, "batch position"]],
    ) -> Int[Tensor, "batch position"]:
        """A step begins; returns the canvas as they left it, each having seen what the ones before it did."""
        for host in self.hosts:
            canvas = same_shape("the host", canvas, host.step(plan, canvas, is_masked(canvas)))
        return canvas

    def finish(
        self,
        plan: StepPlan,
        canvas: Int[Tensor, "batch position"],
        proposal: Proposal,
        selected: Bool[Tensor, "batch position"],
        *,
        over: bool,
        **own: Tensor,
    ) -> None:
        """A step is over; those who keep states are told where the run stands. `own` is what is no part's."""
        for host in self.hosts:
            host.finish(plan, canvas, proposal, selected)
        keepers = [host for host in self.hosts if isinstance(host, StateKeeper)]
        if keepers:
            for part in self.parts:
                own |= part.state()
            remembers = any(isinstance(host, Follower) and host.remembers for host in self.hosts)
            state = RunState(canvas, own, over or plan.index == plan.total - 1, remembers)
            for keeper in keepers:
                keeper.keep(state)

    def stop(self) -> None:
        """The run is over."""
        for host in self.hosts:
            host.stop()


def same_shape(name: str, before: Tensor, after: object) -> Tensor:
    """What a callback or a host returned, if it can stand in for `before`.

    Raises:
        ValueError: it is no tensor, of another shape, or not of whole numbers where these are.
    """
    if not isinstance(after, torch.Tensor) or after.shape != before.shape:
        kind = f"a tensor of shape {list(after.shape)}" if isinstance(after, torch.Tensor) else repr(after)
        raise ValueError(f"{name} returned {kind}; it must return None or a tensor of shape {list(before.shape)}")
    plain = not after.is_complex() and after.dtype != torch.bool
    if not plain or after.is_floating_point() != before.is_floating_point():
        kind = "floating-point numbers" if before.is_floating_point() else "token ids"
        raise ValueError(f"{name} returned a tensor of {after.dtype}; it must hold {kind}")
    return after.to(before.device) if before.is_floating_point() else after.to(before.device, before.dtype)
