"""`mean_activations`: means of an activation per layer, class of positions and progress of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm_lens.adapters.model_names import name_of
from dlm_lens.arguments import checked_arguments, whole
from dlm_lens.attention import (
    Hook,
    HookLike,
    PointContext,
    RunStep,
    Site,
    attention_blocks,
    attention_of,
    checked,
    exclusive,
    head_width,
    run_of,
)
from dlm_lens.display import ShowsItself
from dlm_lens.files.atomic_writes import remove_stale
from dlm_lens.files.paths import user_path
from dlm_lens.files.sealed_json import naming
from dlm_lens.files.tensor_files import metadata_of, read_with_metadata, write_tensors
from dlm_lens.hooks.positions import ActivationSite, activation_site, run_rows
from dlm_lens.placement import in_float64
from dlm_lens.recording.model_identity import weights_digest
from dlm_lens.sampling import DenoisingRun, StoredCanvases, denoise
from dlm_lens.sampling.run_rows import steps_with_work

CLASSES = ("masked", "visible", "sink")
"""Masked (open) positions, content that is not masked, learned sink tokens."""

BINS = 4


@dataclass(frozen=True, eq=False)
class MeanActivations(ShowsItself):
    """Means of one activation; measure them with `mean_activations`.

    `a + b` are the means over both measurements.

    Args:
        site: which activation.
        means: per layer, class of positions ("masked", "visible", "sink") and bin of progress; bin b of B holds
            steps with progress in [b / B, (b + 1) / B).
        counts: number of positions in each mean; 0 for a class that did not occur.
        model: name of the model; empty where it is not known.
        digest: of that model's weights.

    Raises:
        ValueError: an unknown site, or shapes that do not match.
    """

    site: Site
    means: Float[Tensor, "layer klass bin *features"] = field(repr=False)
    counts: Int[Tensor, "klass bin"] = field(repr=False)
    model: str = field(default="", repr=False)
    digest: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        activation_site(self.site, "MeanActivations")
        means, counts = self.means.shape, self.counts.shape
        if len(means) < 4 or means[1] != len(CLASSES) or means[1:3] != counts:
            raise ValueError(
                f"MeanActivations: means of shape {list(means)} and counts of {list(counts)}; they are "
                f"[layer, {len(CLASSES)}, bin, ...] and [{len(CLASSES)}, bin]"
            )

    def __repr__(self) -> str:
        seen = ", ".join(f"{name}: {int(n)}" for name, n in zip(CLASSES, self.counts.sum(-1), strict=True))
        return f"MeanActivations({self.site!r}, layers={len(self.means)}, bins={self.bins}; {seen})"

    def __add__(self, other: "MeanActivations") -> "MeanActivations":
        if (self.site, self.means.shape) != (other.site, other.means.shape):
            raise ValueError(f"{self} and {other} are of different sites or shapes and have no common mean")
        if self.digest != other.digest:
            raise ValueError(
                f"means of {self.model or 'an unknown model'} (weights {self.digest or 'unknown'}) and of "
                f"{other.model or 'an unknown model'} (weights {other.digest or 'unknown'}) have no common mean"
            )
        both = self.counts + other.counts
        wide = (*self.counts.shape, *[1] * (self.means.ndim - 3))
        parts = (one.means.double() * one.counts.reshape(wide) for one in (self, other))
        means = sum(parts) / both.reshape(wide).clamp(min=1)
        return replace(self, means=torch.as_tensor(means).to(self.means.dtype), counts=both)

    def check(self, model: Any) -> None:
        """Raise unless these are the means of this model, if they say of which they are.

        Raises:
            ValueError: another model, or other weights.
        """
        if self.digest and self.digest != (digest := weights_digest(model)):
            raise ValueError(
                f"these means are of {self.model} (weights {self.digest}), not of {name_of(model)} (weights "
                f"{digest}); measure them with mean_activations"
            )

    @property
    def bins(self) -> int:
        """Number of bins of progress."""
        return self.counts.shape[1]

    def at(self, layer: int, classes: Int[Tensor, "row position"], bins: Int[Tensor, "row"]) -> Tensor:
        """Means of a layer for every row and position; for a class that a bin lacks, its mean over all bins.

        Raises:
            ValueError: a layer that does not exist, or a class that never occurred.
        """
        if not 0 <= layer < len(self.means):
            raise ValueError(f"{self} has no layer {layer}")
        counts = self.counts.sum(-1)
        unseen = [CLASSES[i] for i in classes.unique().tolist() if not counts[i]]
        if unseen:
            raise ValueError(f"{self} has seen no {unseen[0]} position; measure it over runs that have some")
        means, weights = self.means[layer].double(), self.counts.double()
        wide = (*weights.shape, *[1] * (means.ndim - 2))
        overall = (means * weights.reshape(wide)).sum(1) / counts.clamp(min=1).reshape(wide[0], *wide[2:])
        found = torch.where((self.counts > 0).reshape(wide), means, overall[:, None])
        device = classes.device
        return found.float().to(device)[classes, bins.to(device)[:, None].expand_as(classes)]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        path = user_path(path)
        remove_stale(path.parent)
        metadata = {"kind": "MeanActivations", "site": self.site, "model": self.model, "digest": self.digest}
        write_tensors(path, {"means": self.means, "counts": self.counts}, metadata)

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> "MeanActivations":
        """Read what `save` wrote.

        Args:
            path: of the file.
            model: whose means they must be (`check`); None to take those of any.

        Raises:
            ValueError: no such file, another kind of file, a damaged one, or means of another model.
        """
        path = user_path(path)
        if not path.is_file():
            raise ValueError(f"{path} is no file; write one with mean_activations(...).save(path)")
        remedy = "write one with mean_activations(...).save(path)"
        if metadata_of(path, remedy).get("kind") != "MeanActivations":
            raise ValueError(f"{path} holds no MeanActivations; {remedy}")
        tensors, metadata = read_with_metadata(path, remedy)
        if set(tensors) != {"means", "counts"}:
            raise ValueError(f"{path} is damaged (it holds {sorted(tensors)}); {remedy}")
        site: Any = metadata.get("site")
        about = {name: metadata.get(name, "") for name in ("model", "digest")}  # earlier versions wrote neither
        with naming(path, remedy):
            found = cls(site, tensors["means"], tensors["counts"], **about)
            if model is not None:
                found.check(model)
        return found


def classes_of(run: RunStep, tensor: Tensor, hook: PointContext) -> Int[Tensor, "row position"]:
    """The class of every network position; padding counts as visible, and is not used."""
    layout, length = hook.sinks, tensor.shape[1]
    classes = torch.full(tensor.shape[:2], CLASSES.index("sink"), device=tensor.device)
    classes[:, layout.canvas(length)] = (~run.masked).long().to(tensor.device)
    return classes


def bins_of(run: RunStep, bins: int) -> Int[Tensor, "row"]:
    """The bin of progress of every row."""
    # Progress is a quotient of counts in float32: the small term keeps exact borders in the upper bin.
    return (run.progress * bins + 1e-5).long().clamp(max=bins - 1)


@dataclass(frozen=True, eq=False)
class _Summing(Hook):
    """Adds up an activation; a hook that changes nothing."""

    site: Site
    bins: int
    counted: Bool[Tensor, "step batch"] | None = None
    sums: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)

    remembers = False

    def __repr__(self) -> str:
        return f"mean_activations({self.site!r}, bins={self.bins})"

    def edit(self, tensor: Tensor, hook: PointContext) -> Tensor:
        """Add the activation to the sums of its layer and return it unchanged."""
        run = run_rows(hook, *tensor.shape[:2]) or run_of(hook, self)
        kind = in_float64(torch.nn.functional.one_hot(classes_of(run, tensor, hook), len(CLASSES)))
        at_bin = in_float64(torch.nn.functional.one_hot(bins_of(run, self.bins), self.bins)).to(kind.device)
        kind[:, hook.sinks.canvas(tensor.shape[1])] *= run.valid[..., None].to(kind.device)
        # With guidance the second half of the rows has a masked prompt.
        kind[len(tensor) // run.halves :] = 0
        if self.counted is not None:
            kind[~self.counted[run.step].to(kind.device)] = 0
        weights = torch.einsum("rpc,rb->cbrp", kind, at_bin)
        layer = hook.layer()
        added = (weights.flatten(2) @ in_float64(tensor.flatten(0, 1).flatten(1))).unflatten(-1, tensor.shape[2:])
        count = weights.sum((2, 3)).round().long()
        self.sums[layer] = self.sums[layer] + added if layer in self.sums else added
        self.counts[layer] = self.counts[layer] + count if layer in self.counts else count
        return tensor


@checked_arguments(bins=whole(least=1))
@torch.no_grad()
@exclusive
def mean_activations(
    model: Any,
    prompts: Any,
    site: ActivationSite,
    *,
    bins: int = BINS,
    hooks: Sequence[HookLike] = (),
    **settings: Any,
) -> MeanActivations:
    """Measure an activation's means over a denoising run of `prompts`, for `ablate(site, value=means)`.

    Masked positions, other content and learned sink tokens have separate means, in every layer and in equal bins of
    progress, because a mean over all would mix states that never occur together. Padding, guidance's
    unconditional rows, the steps after a row's end (`DenoisingRun.row_steps`) and those at which a row whose block
    is full waits for others of its batch do not count, so that rows count as they do alone; where a batch has such
    steps the network sees the run's canvases a second time. In samplers that rewrite decided positions a stored run
    does not tell when a row waits, and these steps count. It takes memory for [layer, 3, bins] activations in
    float64. `+` merges the means of several calls.

    Args:
        model: from `dlm_lens.load`.
        prompts: as for `dlm_lens.denoise`.
        site: "q", "k", "v", "z", "attn_out", "mlp_out" or "resid".
        bins: bins of progress.
        hooks: interventions under which to measure.
        **settings: of `dlm_lens.denoise`.

    Raises:
        ValueError: an invalid site, number of bins, prompt or setting; a site of heads whose layers differ in them.
    """
    activation_site(site, "mean_activations")
    _check_widths(model, site)
    hooks, summing = checked(hooks), _Summing(site, bins)
    run = denoise(model, prompts, hooks=[*hooks, summing], **settings)
    counted = steps_with_work(run)
    if not counted.all():
        # Which rows are over at a step is known only after the run.
        summing = _again(model, run, hooks, _Summing(site, bins, counted))
    layers = range(len(attention_blocks(model)))
    counts = summing.counts[0].cpu()
    wide = (*counts.shape, *[1] * (summing.sums[0].ndim - 2))
    # With a device map the layers' sums lie on several devices.
    means = torch.stack([summing.sums[layer].cpu() / counts.clamp(min=1).reshape(wide) for layer in layers])
    return MeanActivations(site, means.float(), counts, name_of(model), weights_digest(model))


def _again(model: Any, run: DenoisingRun, hooks: Sequence[HookLike], summing: _Summing) -> _Summing:
    """The sums over the steps of a finished run that count for each row."""
    stored = StoredCanvases(model, run, hooks=[*hooks, summing], warn=False)
    with stored.under_hooks():
        for step in range(run.steps):
            stored.enter(step)
            stored.forward(step)
    return summing


def _check_widths(model: Any, site: str) -> None:
    """Raise if heads differ between layers, so that one tensor cannot hold the means of all."""
    attentions = [attention_of(block) for block in attention_blocks(model)]
    heads = {(head_width(each), getattr(each, "num_key_value_groups", None)) for each in attentions}
    widths = {width for width, _ in heads}
    if site in ("q", "k", "v", "z") and len(heads if site in ("k", "v") else widths) > 1:
        raise ValueError(
            f"mean_activations: the heads of {type(model).__name__}'s layers differ in width or number "
            f"(d_head {', '.join(map(str, sorted(widths)))}), so that {site!r} has no means of one shape; take "
            "'resid', or capture(...) and the means of its layers"
        )
