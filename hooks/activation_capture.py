"""`capture`: keep activations of some steps of a run, to inspect them or to patch them into another run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dlm_lens.arguments import (
    DEVICE,
    checked_arguments,
    chosen_indices,
    chosen_steps,
    flag,
    is_whole,
    kept_step,
    plain_number,
)
from dlm_lens.attention import (
    SITES,
    Hook,
    HookLike,
    PointContext,
    SinkLayout,
    Site,
    attention_blocks,
    attention_of,
    checked,
    exclusive,
    head_width,
    run_of,
)
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.sampling import DenoisingRun, NonFiniteLogitsError, StepObserver, StepPlan, denoise
from dlm_lens.sampling.run_like import as_run, is_run
from dlm_lens.sampling.stored_run import StoredRun

MAX_BYTES = 4 * 2**30
"""Default limit of the bytes of a capture."""

OF_HOOKS = ("hooks", "columns_hidden", "mass_hidden")
"""Settings of a run that have an entry for each hook."""

Key = tuple[Site, int, int]


@dataclass(frozen=True, eq=False)
class Activations(ShowsItself):
    """Activations of a run; `activations[site, layer, step]` is one, [batch, position, ...].

    With guidance the rows are the conditional ones and then the unconditional ones; in a sink model positions count
    the sink tokens (`sinks.canvas(length)` is the canvas). `stacked(site, layer)` is [step, batch, ...]; a
    negative step counts from the last one kept, as in the stack, a negative layer from the model's last.

    Args:
        values: (site, layer, step) -> the activation.
        run: the run.
        sinks: the positions of the model's sink tokens.
        stack: the part of the model that they are of: "" for the layers that predict, or "encoder", whose positions
            are those that it read at the step.
        depth: how many layers that part has; 0, if it is not known, for no negative layers.

    Raises:
        ValueError: no activation, or a step that the run does not have.
    """

    values: Mapping[Key, Tensor] = field(repr=False)
    run: DenoisingRun = field(repr=False)
    sinks: SinkLayout = field(default_factory=SinkLayout)
    stack: str = ""
    depth: int = 0

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("Activations: nothing was kept")
        beyond = [step for *_, step in self.values if step not in self.run.step_numbers]
        if beyond:
            raise ValueError(f"Activations: step {beyond[0]} of a run with {self.run.steps} steps")

    def __repr__(self) -> str:
        steps = f"{self.steps[0]} to {self.steps[-1]}" if len(self.steps) > 1 else str(self.steps[0])
        of = f" of the {self.stack}" if self.stack else ""
        return (
            f"Activations({', '.join(self.sites)}{of}; layers {list(self.layers)}, {len(self.steps)} steps "
            f"({steps}), {self.nbytes / 2**20:.3g} MiB)"
        )

    def __getitem__(self, key: Key) -> Tensor:
        if not isinstance(key, tuple) or len(key) != 3:
            raise KeyError(f"{shown(key)} names no activation; give activations[site, layer, step]")
        site, layer, step = key[0], plain_number(key[1]), kept_step(key[2], self.steps)
        below = is_whole(layer) and layer < 0
        found = self.values.get((site, layer + self.depth if below else layer, step))
        if found is None:
            raise KeyError(
                f"{key} was not kept; there are sites {', '.join(self.sites)}, layers {list(self.layers)}, steps "
                f"{list(self.steps)}"
            )
        return found

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites."""
        return tuple(site for site in SITES if any(site == one for one, _, _ in self.values))

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers."""
        return tuple(sorted({layer for _, layer, _ in self.values}))

    @property
    def steps(self) -> tuple[int, ...]:
        """The captured steps, by their numbers in the run."""
        return tuple(sorted({step for _, _, step in self.values}))

    @property
    def nbytes(self) -> int:
        """Bytes of all activations."""
        return sum(value.numel() * value.element_size() for value in self.values.values())

    def stacked(self, site: Site, layer: int) -> Tensor:
        """All steps of one activation, [step, batch, ...].

        Raises:
            KeyError: it was not captured.
            ValueError: the steps have unequal lengths (an AR run).
        """
        found = [self[site, layer, step] for step in self.steps]
        if len({value.shape for value in found}) > 1:
            raise ValueError(f"{site}: the steps have {found[0].shape[1]} to {found[-1].shape[1]} positions")
        return torch.stack(found)


@dataclass(eq=False)
class _Keeper(StepObserver):
    """Keeps activations of a run, and refuses a run whose activations exceed the limit."""

    model: Any
    sites: tuple[Site, ...]
    layers: tuple[int, ...]
    wanted: Any
    device: Any
    limit: int
    stack: str = ""
    values: dict[Key, Tensor] = field(default_factory=dict)
    steps: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__init__(self.model)

    def step(self, plan: StepPlan, canvas: Tensor, masked: Tensor) -> Tensor:
        """Check the memory before the first pass, when the length of the run is known."""
        if not self.steps:
            self.check(plan.total, self.sampler.halves * len(canvas), canvas.shape[1])
        return canvas

    def check(self, total: int, rows: int, positions: int) -> None:
        """Choose the steps to keep, and check the memory that they take.

        Raises:
            MemoryError: more than the limit; with the number of bytes and the remedy.
            ValueError: a step that the run does not have.
        """
        self.steps = frozenset(chosen_steps(self.wanted, total))
        blocks = attention_blocks(self.model, self.stack)
        of_layers = (blocks[layer] for layer in self.layers)
        of_step = sum(
            _bytes(self.model, block, site, rows, positions) for block in of_layers for site in self.sites
        )
        # An encoder reads every position once.
        each, needed = of_step / len(self.layers), of_step * (1 if self.stack else len(self.steps))
        if needed > self.limit:
            raise MemoryError(
                f"these activations would take up to {needed / 1e9:.3g} GB ({each / 1e6:.3g} MB a step and layer "
                f"with all {positions} positions, {len(self.layers)} layers, {len(self.steps)} steps), and "
                f"{self.limit / 1e9:.3g} GB are allowed; give fewer cache_steps=, layers= or sites, or a larger "
                "max_bytes="
            )

    def hooks(self) -> list["_Keep"]:
        """One hook for every site."""
        return [_Keep(site, self, self.layers, self.stack) for site in self.sites]

    def result(self, run: DenoisingRun) -> Activations:
        """What was kept.

        Raises:
            ValueError: nothing, because the encoder did not run at the steps to keep.
        """
        if not self.values and self.stack:
            raise ValueError(
                f"capture: the {self.stack} ran at none of the steps {sorted(self.steps)}; it runs at the first "
                "step of every canvas, such as 0"
            )
        depth = len(attention_blocks(self.model, self.stack))
        return Activations(self.values, run, SinkLayout.of(self.model), self.stack, depth)


@dataclass(frozen=True, eq=False)
class _Keep(Hook):
    """Keeps the activation at one site; a hook that changes nothing."""

    site: Site
    keeper: _Keeper
    layers: tuple[int, ...]
    stack: str = ""

    remembers = False

    def __repr__(self) -> str:
        return f"capture({self.site!r}{', encoder=True' if self.stack else ''})"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Keep the activation, if its step is to be kept, and return it unchanged."""
        step, keeper = run_of(hook, self).step, self.keeper
        if step in keeper.steps:
            # A copy, because the model may edit the tensor in place later.
            kept = (
                tensor.detach().clone() if keeper.device is None else tensor.detach().to(keeper.device, copy=True)
            )
            key = (self.site, hook.layer(), step)
            before = keeper.values.get(key) if self.stack else None
            keeper.values[key] = kept if before is None else _continued(self.site, before, kept)
        return tensor


def _continued(site: Site, before: Tensor, after: Tensor) -> Tensor:
    """Two passes of an encoder at one step (its cache was emptied), one after the other along the positions."""
    if site not in ("scores", "pattern"):
        return torch.cat([before, after], 1)
    unseen = 0.0 if site == "pattern" else torch.finfo(before.dtype).min
    return torch.cat(
        [torch.nn.functional.pad(before, (0, after.shape[3] - before.shape[3]), value=unseen), after], 2
    )


@checked_arguments(layers=None, device=DEVICE, encoder=flag())
@torch.no_grad()
@exclusive
def capture(
    model: Any,
    prompt: Any,
    sites: Site | Sequence[Site] = "resid",
    *,
    cache_steps: int | slice | Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    hooks: Sequence[HookLike] = (),
    device: Any = "cpu",
    max_bytes: int = MAX_BYTES,
    encoder: bool = False,
    **settings: Any,
) -> Activations:
    """Denoise, or rerun a finished run, and keep activations.

    Args:
        model: from `dlm_lens.load`.
        prompt: as for `dlm_lens.denoise`, or a run or recording, whose canvases are then rerun.
        sites: "q", "k", "v", "rot_q", "rot_k", "scores", "pattern", "z", "attn_out", "mlp_out", "resid"; several in
            a list. Scores and patterns are materialised.
        cache_steps: the steps to keep: an index, a slice or indices, negative from the end; None for all. Of
            a part of a run (`Recording.select(step=)`) places in it; what is kept has the whole run's numbers.
        layers: indices, negative from the end; None for all.
        hooks: interventions under which to run; they act before activations are kept.
        device: device to copy activations to; None to leave them where they are.
        max_bytes: limit of their total size with every position of the canvas at every planned step, an upper
            bound: AR and block decoding compute fewer positions at most steps, and a run may end early.
        encoder: keep those of the encoder beside the decoder (DiffusionGemma), at the steps at which it runs: the
            first of every canvas.
        **settings: of `dlm_lens.denoise`; only with a prompt.

    Raises:
        MemoryError: they would take more; raised before the first forward pass.
        ValueError: an invalid site, layer, step, prompt or setting; settings together with a `DenoisingRun`.
    """
    several = isinstance(sites, Iterable) and not isinstance(sites, str)
    wanted: tuple[Any, ...] = tuple(sites) if several else (sites,)
    if not wanted:
        raise ValueError(f"capture: sites is {shown(sites)}; give at least one of {', '.join(SITES)}")
    for site in wanted:
        if site not in SITES:
            raise ValueError(f"capture: site is {site!r}; it must be one of {', '.join(SITES)}")
    stack = "encoder" if encoder else ""
    chosen = chosen_indices("layer", layers, len(attention_blocks(model, stack)))
    keeper = _Keeper(model, wanted, chosen, cache_steps, device, max_bytes, stack)
    hooks = checked(hooks)
    if is_run(prompt):
        prompt = as_run(prompt)
        if settings:
            raise ValueError(f"{', '.join(settings)}: settings go with a prompt; this run is finished")
        _go_over(model, prompt, keeper, hooks)
        return keeper.result(prompt)
    if "observers" in settings:
        raise ValueError("capture takes no observers: give them to dlm_lens.denoise, and its run to capture")
    own = keeper.hooks()
    try:
        run = denoise(model, prompt, hooks=[*hooks, *own], observers=keeper, **settings)
    except NonFiniteLogitsError as error:
        error.partial = error.partial and _without_last_hooks(error.partial, len(own))
        raise
    return keeper.result(_without_last_hooks(run, len(own)))


def _without_last_hooks(run: DenoisingRun, count: int) -> DenoisingRun:
    """The run with settings that leave out its last hooks, which change nothing and cannot be made from a text."""
    kept = {name: run.settings[name][:-count] for name in OF_HOOKS if name in run.settings}
    # A run without hooks has no such settings.
    others = {name: value for name, value in run.settings.items() if name not in OF_HOOKS}
    return replace(run, settings=others | {name: values for name, values in kept.items() if values})


def _go_over(model: Any, run: DenoisingRun, keeper: _Keeper, hooks: Sequence[HookLike]) -> None:
    plain = StoredRun(model, run, hooks=hooks, steps=())
    keeper.check(run.steps, plain.halves * len(run.tokens), run.tokens.shape[1])
    chosen = sorted(keeper.steps)
    stored = StoredRun(model, run, hooks=[*hooks, *keeper.hooks()], steps=chosen, warn=False)
    keeper.steps = frozenset(run.step_numbers[step] for step in chosen)
    for step in chosen:
        stored.states(step)


def _bytes(model: Any, block: nn.Module, site: Site, rows: int, positions: int) -> int:
    attention, heads = attention_of(block), model.config.num_attention_heads
    # Layers may differ in it (DiffusionGemma), in which case it is the attention's own.
    groups = getattr(attention, "num_key_value_groups", None)
    key_heads = heads // groups if groups else getattr(model.config, "num_key_value_heads", heads)
    length = positions + SinkLayout.of(model).count
    width = {
        **dict.fromkeys(("q", "rot_q", "z"), heads * head_width(attention)),
        **dict.fromkeys(("k", "v", "rot_k"), key_heads * head_width(attention)),
        **dict.fromkeys(("scores", "pattern"), heads * length),
    }.get(site, model.config.hidden_size)
    return int(rows * length * width * model.dtype.itemsize)
