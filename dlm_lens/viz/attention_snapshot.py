"""`snapshot`: one layer's attention at one step of a run, from one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dlm_lens.arguments import is_whole
from dlm_lens.attention import HookLike
from dlm_lens.printable import shown
from dlm_lens.recording import AttentionPattern, QueryClass, ValueNorm, rerun
from dlm_lens.recording.query_classes import checked_class
from dlm_lens.sampling.run_like import RunLike, as_run
from dlm_lens.shapes import check_shapes
from dlm_lens.sinks import Detector, Received, find_sinks, received_from_pattern
from dlm_lens.sinks.from_patterns import ROW_TOLERANCE
from dlm_lens.viz.selection import numbers_in_words


def rows_sum(*shots: "Snapshot") -> str:
    """What the rows of patterns sum to, for the label of a scale."""
    low, high = min(shot.row_sums[0] for shot in shots), max(shot.row_sums[1] for shot in shots)
    exact = max(abs(low - 1), abs(high - 1)) <= ROW_TOLERANCE
    return "rows sum to 1" if exact else f"rows sum to {low:.2f} to {high:.2f}"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Attention of one layer over the content of one sequence at one step.

    Padding is left out, also where the network attends to it, and in an AR baseline positions that are not written
    yet. Learned sink tokens come after the canvas positions, as queries and as keys.

    Args:
        pattern: A, the rows of which sum to 1, but for off-by-one softmax, sink logits, hooks after the softmax,
            and attention to padding; 0 for queries that a step with a cache does not compute.
        value_norms: ||v_j||_2 of every query head's value.
        tokens: ids; learned sink i is -1 - i.
        masked: which positions are open (masked, or holding a random token).
        positions: canvas positions; as long as the canvas part.
        padding: number of canvas positions before the row's first token; figures count positions from that token.
        sinks: number of learned sink tokens, which are the last keys.
        uniform_noise: whether open positions hold random tokens.
        causal: whether a query sees only itself and earlier positions.
        visible: which query sees which key; of a step with a cache the queries that it does not compute see none.
        layer: index in the model.
        step: number in the whole run, of which the given run may be a part.
        row: index in the given run, which does not hold the numbers that its rows have in a recording.
        tokenizer: decodes ids.
        hooks: under which the pattern was computed.
        padding_keys: how many padding positions every query attends to (a reference's quirk), which are no keys
            here but have a share in the attention that is expected of a key.
        counted: the queries that `received` counts; None for all that are computed.
        queries: their class.

    Raises:
        ValueError: the shapes contradict each other.
    """

    pattern: Float[Tensor, "head query key"]
    value_norms: Float[Tensor, "head key"]
    tokens: list[int]
    masked: Bool[Tensor, "key"]
    positions: list[int]
    sinks: int
    causal: bool
    visible: Bool[Tensor, "query key"]
    layer: int
    step: int
    row: int
    padding: int = 0
    tokenizer: Any = field(default=None, repr=False)
    uniform_noise: bool = False
    hooks: tuple[str, ...] = ()
    padding_keys: int = 0
    counted: Bool[Tensor, "query"] | None = None
    queries: QueryClass = "all"

    def __post_init__(self) -> None:
        check_shapes(self, key=len(self.tokens), query=len(self.tokens))
        if len(self.positions) + self.sinks != len(self.tokens):
            raise ValueError(
                f"{len(self.positions)} positions and {self.sinks} sink tokens are not {len(self.tokens)} keys"
            )

    def received(self) -> Received:
        """Received attention of every head from the counted queries, relative to uniform.

        The learned sinks' own rows do not count.
        """
        visible = self.visible[: len(self.positions)]
        pattern, computed = self.pattern[:, : len(self.positions)], visible.any(-1)
        # Attention to padding counts in e_j; its keys have no score.
        there = (..., slice(len(self.tokens)))
        visible = torch.cat([visible, computed[:, None].expand(-1, self.padding_keys)], 1)
        pattern = torch.nn.functional.pad(pattern, (0, self.padding_keys))
        counted = computed if self.counted is None else computed & self.counted[: len(self.positions)]
        found = received_from_pattern(pattern, dims=("head",), visible=visible, queries=counted, check_rows=False)
        assert found.viewers is not None
        return replace(
            found,
            values=found.values[there],
            expected=found.expected[there],
            viewers=found.viewers[there],
            queries=self.queries,
        )

    @property
    def row_sums(self) -> tuple[float, float]:
        """The least and the greatest sum of a row of the pattern, over heads and computed queries."""
        sums = self.pattern.sum(-1)[:, self.visible.any(-1)]
        return (float(sums.min()), float(sums.max())) if sums.numel() else (1.0, 1.0)

    def sinks_of(self, detector: Detector, head: int | None) -> list[int]:
        """Keys that are sinks of a head (None: of the head-mean pattern), the largest first."""
        received = self.received()
        level = received.at_level("layer") if head is None else received.part(heads=slice(head, head + 1))
        found = find_sinks(level, detector, level=level.level)
        scores = found.scores.flatten().nan_to_num(nan=-torch.inf)
        order = scores.argsort(descending=True, stable=True)
        return [int(key) for key in order if bool(found.is_sink.flatten()[key])]


def snapshot(
    model: Any,
    run: RunLike,
    *,
    step: int,
    layer: int,
    row: int = 0,
    hooks: Sequence[HookLike] = (),
    queries: QueryClass = "all",
) -> Snapshot:
    """Run the model on the canvas that a step saw, and keep one layer's pattern and value norms.

    `step` is its number in the whole run, also where `run` is a part of it; `row` is its index in `run`. Under
    `hooks` the pattern is the one that they leave, with the steps before run first as in `rerun`. `queries` are
    those that its received attention counts.

    Raises:
        TypeError: neither a run nor a recording.
        ValueError: a step, layer, row or class of queries that does not exist, or a run of another model.
    """
    run = as_run(run)
    queries = checked_class(queries, "attention")
    for name, index, numbers in (("step", step, run.step_numbers), ("row", row, range(len(run.tokens)))):
        if not is_whole(index) or index not in numbers:
            raise ValueError(f"{name} {shown(index)} of {len(numbers)}: {name}s {numbers_in_words(numbers)}")
    place, ran = run.step_numbers.index(step), run.step_numbers[: int(run.row_steps[row])]
    if step not in ran:
        own = f"its steps {numbers_in_words(ran)}" if ran else "this part of the run has none of its steps"
        raise ValueError(f"step {step}: row {row} had ended before it; {own}")
    reducers = [AttentionPattern(), ValueNorm()]
    recording = rerun(model, run, reducers, hooks=hooks, steps=[place], layers=[layer], rows=[row])
    # Without padding and positions that are not written; learned sinks after the canvas, as queries too.
    keys = recording.facts.keys[0, 0].nonzero().flatten()
    positions = keys[: len(keys) - recording.sinks]
    pattern = recording.pattern[0, 0, 0].nan_to_num()
    # A learned sink token sees only itself.
    own_rows = torch.eye(pattern.shape[-1])[pattern.shape[-1] - recording.sinks :].expand(len(pattern), -1, -1)
    pattern = torch.cat([pattern[:, positions], own_rows], 1)[..., keys]
    # Learned sinks are seen by every query, and see themselves alone.
    seen = torch.nn.functional.pad(recording.facts.pairs()[0, 0], (0, recording.sinks), value=True)
    visible = torch.cat([seen[positions], own_rows[0].bool()])[:, keys]
    facts, norms = recording.facts, recording.value_norm[0, 0, 0]
    return Snapshot(
        pattern=pattern,
        value_norms=norms.repeat_interleave(len(pattern) // len(norms), 0)[:, keys],
        tokens=recording.tokens[0, 0, keys].tolist(),
        masked=recording.masked[0, 0, keys],
        uniform_noise=recording.run.uniform_noise,
        positions=positions.tolist(),
        sinks=recording.sinks,
        causal=recording.causal,
        visible=visible,
        layer=recording.layers[0],
        step=step,
        row=row,
        padding=int(run.padding[row]),
        tokenizer=recording.run.tokenizer,
        hooks=recording.hooks or (),
        padding_keys=int((facts.visible & ~facts.valid)[0, 0].sum()),
        counted=torch.nn.functional.pad(facts.queries(queries)[0, 0], (0, recording.sinks))[keys],
        queries=queries,
    )
