"""`RecordingFields`: the data of a recording, on which storage and joining work; `Recording` adds the methods."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxtyping import Bool
from torch import Tensor

from dlm_lens.recording.arrays import ArraySpec
from dlm_lens.sampling import DenoisingRun
from dlm_lens.sampling.token_text import StoredTokenizer


@dataclass(frozen=True, eq=False)
class RecordingFields:
    """A run, the arrays that were recorded of it, and their coordinates.

    Args:
        run: the run itself: `run.tokens`, `run.texts`, ...
        arrays: by name, on the CPU, in the dtype of storage; those of a loaded recording are read on first use.
        specs: the dims, unit, formula and reducer of each array.
        layers: index of each layer in the model.
        answer: positions that were masked when the run began.
        steps: index of each step in the run.
        rows: index of each row among the prompts.
        heads: index of each head; None for all.
        sinks: the number of learned sink tokens, which are the last keys.
        causal: an AR baseline, in which step t has the written prefix as queries and keys.
        unpadded: the network took padding for content (a reference's quirk).
        windows: the sliding window of each layer (None where it has none); empty if no layer has one.
        model: name or path of the model.
        versions: of the packages that computed the arrays.
        scale: factor of the scores in the first of the layers, usually d_head ** -0.5.
        query_heads: number of query heads of the model.
        words: the text of every token id that occurs.
        hooks: under which the arrays were computed, in order; those of the run, unless `rerun` made them.

    Raises:
        ValueError: shapes that contradict each other.
    """

    run: DenoisingRun
    arrays: Mapping[str, Tensor]
    specs: Mapping[str, ArraySpec]
    layers: tuple[int, ...]
    answer: Bool[Tensor, "batch position"]
    steps: tuple[int, ...]
    rows: tuple[int, ...]
    heads: tuple[int, ...] | None = None
    sinks: int = 0
    causal: bool = False
    unpadded: bool = False
    windows: tuple[int | None, ...] = ()
    model: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    scale: float | None = None
    query_heads: int = 1
    words: Mapping[int, str] = field(default_factory=dict, repr=False)
    hooks: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if set(self.arrays) != set(self.specs):
            raise ValueError(f"arrays {sorted(self.arrays)} and specs {sorted(self.specs)} do not name the same")
        if len(self.steps) != self.run.steps or len(self.rows) != len(self.run.tokens):
            raise ValueError(
                f"{len(self.steps)} steps and {len(self.rows)} rows, but the run has {self.run.steps} and "
                f"{len(self.run.tokens)}"
            )
        if self.run.row_numbers != self.rows:
            object.__setattr__(self, "run", replace(self.run, rows=self.rows))
        if self.hooks is None:
            object.__setattr__(self, "hooks", self.run_hooks)
        if all(window is None for window in self.windows):
            object.__setattr__(self, "windows", ())
        if self.windows and len(self.windows) != len(self.layers):
            raise ValueError(f"{len(self.windows)} sliding windows for {len(self.layers)} layers")
        if self.run.tokenizer is None and self.words:
            # Without a tokenizer the run decodes its tokens by the recorded words.
            object.__setattr__(self, "run", replace(self.run, tokenizer=StoredTokenizer.read(self.words, None)))
        if not isinstance(self.arrays, dict):
            return  # read from files, whose shapes storage checks
        for name, array in self.arrays.items():
            self._check(name, array)

    @property
    def run_hooks(self) -> tuple[str, ...]:
        """The hooks under which the run was made."""
        return tuple(self.run.settings.get("hooks", ()))

    def _check(self, name: str, array: Tensor) -> None:
        dims, sizes = self.specs[name].dims, self.sizes
        if array.ndim != len(dims) or any(
            sizes.get(dim, size) != size for dim, size in zip(dims, array.shape, strict=True)
        ):
            wanted = ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in dims)
            raise ValueError(f"{name} has shape {list(array.shape)}; its axes are {wanted}")

    @property
    def sizes(self) -> dict[str, int]:
        """Length of every axis that all arrays share."""
        positions = self.run.tokens.shape[1]
        found = {"step": len(self.steps), "batch": len(self.rows), "layer": len(self.layers)}
        found |= {"key": positions + self.sinks, "query": positions}
        return found | ({"head": len(self.heads)} if self.heads is not None else {})
