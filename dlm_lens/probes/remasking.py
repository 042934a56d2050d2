"""`remask`: mask decided positions again in the middle of a run, and count what comes out differently."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from dlm_lens.arguments import Rule, checked_arguments, chosen_indices, is_real, whole
from dlm_lens.attention import exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.sampling import DenoisingRun, denoise
from dlm_lens.sampling.algorithm_registry import moves_tokens
from dlm_lens.shapes import check_shapes
from dlm_lens.statistics import SHARE_BOUNDS, Estimate, estimate_mean

SHARE = Rule("a share, above 0 and at most 1", lambda value: is_real(value) and 0 < value <= 1)


@dataclass(frozen=True, eq=False)
class RemaskSensitivity(ShowsItself):
    """What a run becomes when decided positions are masked again on the canvas of one step.

    For each step of `steps` one more run, equal to the plain one until there. Of the answer's positions, `direct`
    is the share of the re-masked ones whose final token is another one than in the plain run, `collateral` that of
    all others: how far a local change spreads (2604.23235, which counts accuracy instead of changes). Positions
    that the plain run leaves masked do not count; a mask that a changed run leaves counts as another token.

    Args:
        run: the plain run.
        steps: on whose canvas positions were masked.
        remasked: which ones.
        tokens: the results of the changed runs, at the positions of the plain run; -1 where a changed run has
            ended before, which counts as another token.
        seed: of the positions and the intervals.

    Raises:
        ValueError: the shapes contradict each other.
    """

    run: DenoisingRun = field(repr=False)
    steps: tuple[int, ...]
    remasked: Bool[Tensor, "changed batch position"]
    tokens: Int[Tensor, "changed batch position"]
    seed: int = 0

    def __post_init__(self) -> None:
        _, batch, position = self.run.unmasked.shape
        check_shapes(self, changed=len(self.steps), batch=batch, position=position)

    def __repr__(self) -> str:
        lines = [f"step {step}: {self.mean('direct', step)}" for step in self.steps]
        return f"RemaskSensitivity(direct change, {'; '.join(lines)})"

    @property
    def changed(self) -> Bool[Tensor, "changed batch position"]:
        """Where the final token is another one."""
        return self.tokens != self.run.tokens

    @property
    def direct(self) -> Float[Tensor, "changed batch"]:
        """The changed share of the positions that were masked again; NaN where there were none."""
        return self._share(self.remasked)

    @property
    def collateral(self) -> Float[Tensor, "changed batch"]:
        """The changed share of the other positions that the plain run decides, per changed run and row.

        NaN where there are none, or none was masked again.
        """
        others = self.run.answer & ~self.run.open[-1] & ~self.remasked
        return self._share(others).masked_fill(~self.remasked.any(-1), torch.nan)

    def mean(self, name: str, step: int) -> Estimate:
        """The mean of "direct" or "collateral" over rows; the interval is over prompts.

        Raises:
            ValueError: another name, or a step at which nothing was masked.
        """
        if name not in ("direct", "collateral"):
            raise ValueError(f"name is {shown(name)}; it must be 'direct' or 'collateral'")
        if step not in self.steps:
            raise ValueError(f"nothing was masked at step {step}; there are {', '.join(map(str, self.steps))}")
        values = getattr(self, name)[self.steps.index(step)]
        rows = values.isfinite().nonzero().flatten()
        prompt = self.run.row_prompts
        of_prompt = prompt[rows].numpy()
        return estimate_mean(values[rows].numpy(), of_prompt, len(prompt), bounds=SHARE_BOUNDS, seed=self.seed)

    def table(self) -> pd.DataFrame:
        """One line per step, with intervals over prompts."""
        lines = []
        for index, step in enumerate(self.steps):
            line: dict[str, Any] = {"step": step, "remasked": int(self.remasked[index].sum())}
            for name in ("direct", "collateral"):
                line |= self.mean(name, step).columns(name)
            lines.append(line)
        return pd.DataFrame(lines)

    def _share(self, where: Bool[Tensor, "changed batch position"]) -> Float[Tensor, "changed batch"]:
        return (self.changed & where).sum(-1) / where.sum(-1)


@checked_arguments(share=SHARE, seed=whole(least=0))
@torch.no_grad()
@exclusive
def remask(
    model: Any,
    prompts: Any,
    *,
    steps: int | None = None,
    at: Sequence[int] | None = None,
    share: float = 0.15,
    seed: int = 0,
    progress: bool = False,
    **settings: Any,
) -> RemaskSensitivity:
    """Denoise prompts, then again once for every step of `at`, with a share of what is decided masked again there.

    The sampler fills the positions in again in the steps that are left. Only for runs that do not depend on their
    seed, which is tried with a second one: with draws, tokens would change by chance.

    Args:
        model: from `dlm_lens.load`, with a mask token.
        prompts: as for `dlm_lens.denoise`.
        steps: of every run.
        at: on the canvases of which steps, negative from the end; None for all on which something is decided.
        share: of each row's decided positions, at least one; in block diffusion those of the step's block, the
            others being finished. A row that has ended by then stays as it is and does not count.
        seed: of the choice of positions, which are drawn for all rows together: rows of one prompt have other ones,
            and a row has other ones in another batch.
        progress: show a progress bar.
        **settings: of `dlm_lens.denoise`: gen_length, block_length, remasking, ...

    Raises:
        ValueError: a run that depends on its seed, a model without a mask token or whose tokens move (DreamOn,
            LLaDA2.2), a step at which nothing is decided, or what `denoise` refuses.
    """
    mask = getattr(model.config, "mask_token_id", None)
    if mask is None:
        raise ValueError(f"remask: {type(model).__name__} has no mask token, so that nothing can be masked again")
    if moves_tokens(model.config):
        raise ValueError(
            f"remask: the sampler of {type(model).__name__} moves tokens, so that two runs have other parts of the "
            "text at one position; give a model that keeps every position"
        )
    plain = denoise(model, prompts, steps=steps, seed=seed, **settings)
    # What is masked in a row that has ended stays masked: no step is left to fill it in.
    decided = plain.answer & ~plain.open[:-1] & plain.running[..., None]
    if plain.attention.blocks is not None:
        decided &= plain.in_block
    there = decided.any(-1).any(-1).nonzero().flatten().tolist()
    if not there:
        raise ValueError(
            f"remask: nothing is decided on the canvas of any step, with steps={plain.steps}; give more steps, so "
            "that a step begins with some decided positions and some open ones"
        )
    chosen = tuple(there) if at is None else chosen_indices("step", at, plain.steps, "remask: ")
    for step in chosen:
        if step not in there:
            raise ValueError(f"remask: nothing is decided on the canvas of step {step}; there is on {there}")
    if not torch.equal(plain.tokens, denoise(model, prompts, steps=steps, seed=seed + 1, **settings).tokens):
        raise ValueError(
            "remask: the result depends on the seed, so that tokens would change by chance; give temperature=0 and "
            "a rule without random positions"
        )
    remasked, tokens = [], []
    for step in tqdm(chosen, desc="remasking", unit="run", disable=not progress):
        where = _drawn(decided[step], share, torch.Generator().manual_seed(seed * 2**20 + step))
        remasked.append(where)

        def edit(now: int, canvas: Tensor, step: int = step, where: Tensor = where) -> Tensor | None:
            if now != step:
                return None
            # In block diffusion the canvas ends with other blocks than the plain run's result.
            return canvas.masked_fill(_as_long(where, canvas.shape[1], False).to(canvas.device), mask)

        changed = denoise(model, prompts, steps=steps, seed=seed, on_canvas=edit, **settings)
        tokens.append(_as_long(changed.tokens, plain.tokens.shape[1], -1))
    return RemaskSensitivity(plain, chosen, torch.stack(remasked), torch.stack(tokens), seed)


def _as_long(values: Tensor, positions: int, missing: int) -> Tensor:
    """`values` [batch, position] with so many positions: cut, or with `missing` at the end."""
    return nn.functional.pad(values, (0, positions - values.shape[1]), value=missing)


def _drawn(
    decided: Bool[Tensor, "batch position"], share: float, generator: torch.Generator
) -> Bool[Tensor, "batch position"]:
    """A share of every row's positions, at least one where there are any."""
    rank = (
        torch.rand(decided.shape, generator=generator, dtype=torch.float32)
        .masked_fill(~decided, 2.0)
        .argsort(-1)
        .argsort(-1)
    )
    count = (decided.sum(-1) * share).round().clamp(min=1)
    return decided & (rank < count[:, None])
