"""Statistics of one denoising run, per prompt, as numerators and denominators: sums over maps and patterns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALES = ("relative", "columns")
"""Received attention relative to uniform, and raw column sums, which the paper plots. In a masked DLM without
learned sinks the two are the same; in an AR model early keys have larger column sums."""


@dataclass(frozen=True)
class Statistic:
    """A number of one prompt, given by two sums.

    Args:
        name: of the stored pair; with `scaled` one pair per scale, NAME_relative and NAME_columns.
        label: of the panel and the table's row.
        scaled: whether it depends on the scale.
    """

    name: str
    label: str
    scaled: bool = False

    def key(self, scale: str) -> str:
        """The stored pair's name on a scale."""
        return f"{self.name}_{scale}" if self.scaled else self.name


STATISTICS = (
    Statistic("first", "share of the attention that the first token receives"),
    Statistic("first_main", "share of the maps whose main sink is the first token", scaled=True),
    Statistic("static", "share of the patterns with a static sink", scaled=True),
    Statistic("moving", "share of the patterns with a moving sink", scaled=True),
    Statistic("moved", "main sink moved over the run, of the patterns with a sink at both ends", scaled=True),
    Statistic("norm", "value norm of the sinks over that of the other tokens", scaled=True),
    Statistic("loss", "validation loss in nats per token"),
)


def prompt_statistics(recording: Any, row: int, eps: float) -> dict[str, list[float]]:
    """The sums of one prompt, each [numerator, denominator].

    A map is one (step, layer, head), a pattern one (layer, head) over the run. Sinks are those of Eq. 3 with `eps`.
    With r_j the column sum of key j over n queries:

    - first: sum over maps of r_0 / n, and the number of maps; uniform: the same with even attention.
    - first_main_SCALE: maps whose largest score is at position 0, and maps.
    - static_SCALE, moving_SCALE: patterns of this kind (`dlm_lens.trajectories`), and patterns.
    - moved_SCALE: patterns whose main sink at the last step is another than at the first, and patterns that have a
      sink at both.
    - sinks_SCALE: sinks, and maps.
    - norm_SCALE: sum over sinks of ||v_j^m||_2 (2601.19657, Eq. 15), and sum over the same sinks of the mean norm
      of the other canvas tokens of the map that are masked if and only if the sink is.
    - learned (with learned sinks only): sum over maps of their share, and maps.

    Args:
        recording: of `dlm_lens.record` with ReceivedAttention and ValueNorm.
        row: the prompt.
        eps: of Eq. 3.
    """
    import dlm_lens as dl

    received = dl.received_of(recording, "all").part(rows=slice(row, row + 1))
    first = 0 if received.padding is None else int(received.padding[0])
    sums = received.column_sums[:, 0].double()
    maps = (~sums.isnan()).any(-1)
    queries = received.counted[:, 0].double()[:, None, None]
    count = float(maps.sum())
    even = received.expected[:, 0].double().expand(sums.shape)
    found = {
        "first": [_total(sums[..., first] / queries, maps), count],
        "uniform": [_total(even[..., first] / queries, maps), count],
    }
    if recording.sinks:
        found["learned"] = [_total(sums[..., -recording.sinks :].sum(-1) / queries, maps), count]
    for scale in SCALES:
        sinks = dl.find_sinks(received, dl.AboveMean(eps), relative=scale == "relative")
        paths = dl.trajectories(sinks)
        kinds, over = paths.kinds.flatten().tolist(), paths.measures["moved_over_run"]
        main = sinks.scores[:, 0].nan_to_num(nan=-1.0).argmax(-1)
        found |= {
            f"first_main_{scale}": [_total(main == first, maps), count],
            f"static_{scale}": [float(kinds.count("static")), float(len(kinds))],
            f"moving_{scale}": [float(kinds.count("moving")), float(len(kinds))],
            f"moved_{scale}": [float(over.sum()), float(over.count())],
            f"sinks_{scale}": [float(sinks.is_sink.sum()), count],
            f"norm_{scale}": value_norm_sums(recording, row, sinks.is_sink[:, 0], ~sinks.scores[:, 0].isnan()),
        }
    return {name: [round(value, 4) for value in pair] for name, pair in found.items()}


def _total(values: Any, maps: Any) -> float:
    return float(values.double()[maps].sum())


def value_norm_sums(recording: Any, row: int, is_sink: Any, defined: Any) -> list[float]:
    """Sum of the sinks' norms, and sum of the mean norms of the others in the same state.

    Sinks of maps without such others are left out.

    Args:
        recording: with ValueNorm.
        row: the prompt.
        is_sink: [step, layer, head, key].
        defined: which keys have a score, [step, layer, head, key].
    """
    import torch

    norms = recording.value_norm[:, row].double()
    norms = norms.repeat_interleave(is_sink.shape[2] // norms.shape[2], 2)
    masked = recording.masked[:, row, None, None].expand(is_sink.shape)
    token = torch.arange(is_sink.shape[-1]) < is_sink.shape[-1] - recording.sinks
    other = ~is_sink & defined & norms.isfinite() & token
    norms = norms.nan_to_num()
    top = bottom = 0.0
    for state in (masked, ~masked):
        count = (other & state).sum(-1)
        mean = (norms * (other & state)).sum(-1) / count.clamp(min=1)
        here = is_sink & state & (count > 0)[..., None]
        top += float((norms * here).sum())
        bottom += float((mean * here.sum(-1)).sum())
    return [top, bottom]


def row_losses(model: Any, found: Any, samples: int) -> list[float]:
    """Loss of every held-out sequence in nats per token: the diffusion bound, or for an AR parent its own loss.

    A sequence has the same masks at every checkpoint. The bound of a DLM lies above the loss of an AR model that
    predicts as well, so that the two are not compared.

    Args:
        model: the network.
        found: the `Material`.
        samples: masks per sequence.
    """
    from dataclasses import replace

    from dlm_lens.adapters import family_of
    from dlm_lens.training import NextToken
    from dlm_lens.training.losses import evaluation_loss
    from dlm_lens.training.trainer import EVALUATION_SEED

    causal = family_of(model.config.model_type).causal
    objective: Any = NextToken() if causal else replace(found.objective, low_discrepancy=True, group=samples)
    objective, count = objective.for_model(model, samples), 1 if causal else samples
    return [
        round(
            evaluation_loss(
                model, [example], objective, length=found.length, samples=count, batch_size=count,
                seed=EVALUATION_SEED + number,
            ),
            5,
        )
        for number, example in enumerate(found.held)
    ]  # fmt: skip


def pairs(values: Mapping[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Numerators and denominators of a stored statistic, one per prompt."""
    top, bottom = zip(*values[name], strict=True)
    return list(top), list(bottom)
