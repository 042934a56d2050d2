"""`KeyAxes`: the axes of a statistic of keys and what is known of them, the fields of every result of sinks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.attention import beside_sinks
from dlm_lens.attention.hook_identity import IN_IDENTITY
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.moved_tokens import answer_of_steps, decisions_of, room_of_canvases
from dlm_lens.sampling.run_rows import until_ends
from dlm_lens.shapes import check_shapes, tensor_axes

AXES = ("step", "batch", "layer", "head", "key")

Follow = Literal["position", "token"]
"""What a key is: a position of the canvas, or what is there, also where the sampler moves it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyAxes:
    """The axes of a statistic of keys: its tokens, steps, layers, heads and prompts.

    One result takes them over from another: `Sinks` from a `Received`, `Trajectories` from both. All axes are
    always there; those that are not in `dims` have size 1. In `Sinks` the tensors [..., key] are without them.

    Args:
        dims: the axes that exist, a part of ("step", "batch", "layer", "head", "key").
        tokens: ids of the keys at each step; None if unknown.
        masked: which keys are masked (in an AR baseline: not decoded yet) at each step; None if unknown. What
            follows the end of an AR row, where others of its batch go on, is none of it.
        answer: where tokens move (DreamOn, LLaDA2.2), which keys are of the answer at each step: not the prompt's
            tokens, wherever they are, nor room for masks. None elsewhere: the positions that were open at first.
        decided: likewise, which masks each step decides as tokens of the result.
        final_tokens: ids of the keys after the last step; None if unknown.
        layers: index of each layer in the model; empty without a layer axis.
        steps: number of each step in its run, which tables and figures show; empty for 0, 1, ....
        heads: likewise, index of each head in the model.
        rows: number of each row in its whole run or recording, which tables and captions show; empty for 0, 1, ....
        sinks: how many of the keys, the last ones, are the model's learned sink tokens: they have no canvas
            position, and in `tokens` sink i has the id -1 - i.
        tokenizer: decodes token ids; None if there is none.
        row_prompts: the number of each row's prompt (`DenoisingRun.row_prompts`), which intervals resample; None:
            every row is one of its own.
        model: name of the model (`DenoisingRun.model`); "" if unknown.
        follow: "position": keys are those of the canvas. "token": they count what the canvases of all steps held.

    Raises:
        ValueError: unknown axes, or shapes that contradict each other.
    """

    IDENTITY_ORDER: ClassVar[str] = ""
    """The fields in the order of stored identities (`attention.hook_identity`); a new field is not listed."""

    dims: tuple[str, ...] = AXES
    tokens: Int[Tensor, "step batch key"] | None = None
    masked: Bool[Tensor, "step batch key"] | None = None
    final_tokens: Int[Tensor, "batch key"] | None = None
    layers: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    sinks: int = 0
    tokenizer: Any = None
    # Intervals alone read it: hooks do the same without it, and recordings of before have no such field.
    row_prompts: Int[Tensor, "batch"] | None = field(default=None, metadata={IN_IDENTITY: False})
    answer: Bool[Tensor, "step batch key"] | None = field(default=None, repr=False, metadata={IN_IDENTITY: False})
    decided: Bool[Tensor, "step batch key"] | None = field(default=None, repr=False, metadata={IN_IDENTITY: False})
    model: str = field(default="", metadata={IN_IDENTITY: False})
    rows: tuple[int, ...] = field(default=(), metadata={IN_IDENTITY: False})
    follow: Follow = field(default="position", metadata={IN_IDENTITY: False})

    def __post_init__(self) -> None:
        if tuple(name for name in AXES if name in self.dims) != tuple(self.dims):
            raise ValueError(
                f"{type(self).__name__}.dims is {self.dims}; it must be a part of {AXES}, in this order"
            )
        known = {"layer": len(self.layers), "step": len(self.steps), "head": len(self.heads)}
        known["batch"] = len(self.rows)
        check_shapes(self, **{axis: size for axis, size in known.items() if size})

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis in `dims`."""
        raise NotImplementedError

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The number of each step in its run."""
        return self.steps or tuple(range(self.sizes.get("step", 1)))

    @property
    def head_numbers(self) -> tuple[int, ...]:
        """The index of each head in the model."""
        return self.heads or tuple(range(self.sizes.get("head", 1)))

    @property
    def row_numbers(self) -> tuple[int, ...]:
        """The number of each row in its whole run or recording."""
        return self.rows or tuple(range(self.sizes.get("batch", 1)))

    @property
    def followed(self) -> str:
        """The end of a rule whose keys are tokens; empty for positions."""
        return "; tokens followed where they move" if self.follow == "token" else ""

    @property
    def shared_fields(self) -> dict[str, Any]:
        """The fields of `KeyAxes`, with all axes, for another result of the same keys."""
        return {each.name: getattr(self, each.name) for each in fields(KeyAxes)}


def axis_sizes(shape: Sequence[int], dims: tuple[str, ...]) -> dict[str, int]:
    """The length of every axis in `dims` of a tensor that has all of `AXES`, or all but the last one."""
    return {name: size for name, size in zip(AXES, shape, strict=False) if name in dims}


_PER_KEY = {name: axes for name, axes in tensor_axes(KeyAxes).items() if "key" in axes}


def with_all_axes(tensor: Any, dims: tuple[str, ...], axes: tuple[str, ...] = AXES) -> Any:
    """A tensor with the axes that are not in `dims` inserted, with size 1; None stays None."""
    if tensor is None:
        return None
    for axis, name in enumerate(axes):
        tensor = tensor if name in dims else tensor.unsqueeze(axis)
    return tensor


def without_absent_axes(tensor: Any, dims: tuple[str, ...], axes: tuple[str, ...] = AXES) -> Any:
    """A tensor without the axes that are not in `dims`, of size 1; None stays None."""
    if tensor is None:
        return None
    return tensor.squeeze([axis for axis, name in enumerate(axes) if name not in dims])


def each_key_tensor(given: dict[str, Any], change: Callable[..., Any]) -> dict[str, Any]:
    """Fields of `KeyAxes` with each tensor [..., key] changed by `with_all_axes` or `without_absent_axes`."""
    return given | {name: change(given[name], given["dims"], axes) for name, axes in _PER_KEY.items()}


def key_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of `KeyAxes` without the axes that are not in `sizes`; a row's number stays [1]."""
    return {
        name: tuple(sizes.get(axis, 1) for axis in axes if axis in sizes or name not in _PER_KEY)
        for name, axes in tensor_axes(KeyAxes).items()
    }


def shared_fields_of(
    run: DenoisingRun, layers: tuple[int, ...], steps: tuple[int, ...], sinks: int
) -> dict[str, Any]:
    """The fields of `KeyAxes`, and `valid`, for a statistic of all steps and rows of a run.

    Args:
        run: from `denoise`, or a part of one.
        layers: index of each layer in the model.
        steps: number of each step.
        sinks: how many learned sink tokens the model has.
    """
    moved: dict[str, Tensor] = {}
    if run.origins is not None:
        room = room_of_canvases(run)
        answer = answer_of_steps(run) if room is None else answer_of_steps(run) & ~room[:-1]
        moved = {"answer": answer, "decided": decisions_of(run)[0]}
    return {
        **{name: beside_sinks(keys, sinks, value=False) for name, keys in moved.items()},
        "tokens": beside_sinks(run.canvases[:-1], sinks),
        "masked": beside_sinks(run.masked[:-1] & until_ends(run), sinks, value=False),
        "valid": beside_sinks(run.attention_mask, sinks, value=True),
        "final_tokens": beside_sinks(run.tokens, sinks),
        "layers": layers,
        "steps": steps,
        "sinks": sinks,
        "tokenizer": run.tokenizer,
        "model": run.model or "",
        "rows": run.rows or (),
        "row_prompts": run.row_prompts,
    }
