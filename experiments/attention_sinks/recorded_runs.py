"""Denoising runs with their received attention: what the figures of the paper are computed from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float

from dlm_lens.experiments.attention_sinks import twin_networks
from dlm_lens.experiments.attention_sinks.problems import chat, problems_of, starts
from dlm_lens.experiments.attention_sinks.twin_networks import model_of, networks_of
from dlm_lens.experiments.experiment import Bench, Cost, Experiment, Rendering, Table
from dlm_lens.experiments.intervals import Interval, over_networks
from dlm_lens.experiments.results import Item, Results, Settings

if TYPE_CHECKING:
    from torch import Tensor

SMALL: dict[str, Any] = {
    "models": ["toy", "toy-sink", "toy-ar"], "task": "toy_arithmetic", "prompts": 4, "batch": 4, "sampler": {},
    "eps": 3.0, "chat": False, "keep": None, **twin_networks.SETTINGS,
}  # fmt: skip
"""Settings that all figures share, with the embedded models."""

FULL: dict[str, Any] = {
    **SMALL,
    "models": ["GSAI-ML/LLaDA-8B-Instruct", "Dream-org/Dream-v0-Instruct-7B", "Gen-Verse/MMaDA-8B-MixCoT",
               "meta-llama/Llama-3.1-8B-Instruct"],
    "prompts": 32, "batch": 4, "sampler": {"gen_length": 128}, "chat": True,
}  # fmt: skip
"""Settings with the paper's models. The paper gives neither the prompts of its figures nor their number."""

OWN: dict[str, dict[str, Any]] = {
    "smollm2": {"task": "english_prompts", "chat": True, "sampler": {"gen_length": 16}, "batch": 8}
}
"""A model that reads English answers English prompts, in its chat template."""


class PromptRun(NamedTuple):
    """The run of one prompt.

    Args:
        run: the DenoisingRun of the item's prompts.
        row: the prompt's row in it.
        received: received attention of this row alone, by class of queries, at the steps before its text ended:
            nulls that draw steps at random must not draw later ones.
        recording: of all the item's prompts.
    """

    run: Any
    row: int
    received: dict[str, Any]
    recording: Any = None


def items(settings: Settings, networks: Callable[[str, Settings], range] = networks_of) -> Iterator[Item]:
    """Each model and each of its networks in turn; each item has up to `batch` prompts."""
    for model in settings["models"]:
        for network in networks(model, settings):
            for start in starts(settings):
                # Results stored before twins existed have no network.
                yield {"model": model, **({"network": network} if "networks" in settings else {}), "start": start}


def record_prompts(
    item: Item,
    settings: Settings,
    bench: Any,
    queries: Sequence[str] = ("all",),
    reducers: Sequence[Any] = (),
    layers: Sequence[int] | None = None,
) -> list[PromptRun]:
    """Denoise the item's prompts and record the attention that every key receives, per class of queries.

    Further `reducers` are recorded beside it; `layers` chooses layers, None for all. The setting `keep` names a
    directory for the recordings. A figure with equal settings reads them again.
    """
    import dlm_lens as dl

    model = model_of(item, settings, bench)
    texts = chat(model, problems_of(settings, item["start"]), settings)
    classes = [dl.ReceivedAttention(queries=kind) for kind in queries]  # type: ignore[arg-type]
    to = None
    if settings["keep"]:
        name = item["model"].replace("/", "--")
        kinds = "-".join([*queries, *(reducer.name for reducer in reducers)])
        to = Path(settings["keep"]) / f"{name}-{item.get('network', 0)}-{item['start']}-{kinds}"
    recording = dl.record(model, texts, [*classes, *reducers], to=to, layers=layers, **settings["sampler"])
    found = {kind: dl.received_of(recording, kind) for kind in queries}  # type: ignore[arg-type]

    def own(row: int, steps: int) -> dict[str, Any]:
        return {kind: one.part(rows=slice(row, row + 1), steps=slice(steps)) for kind, one in found.items()}

    run = recording.run
    return [PromptRun(run, row, own(row, steps), recording) for row, steps in enumerate(run.row_steps.tolist())]


def head_pattern(
    model: Any, run: Any, *, step: int, row: int, layer: int, head: int
) -> "Float[Tensor, 'query key']":
    """One head's attention pattern at a step of a run; canvas queries without padding; keys, then learned sinks.

    It is the pattern that the run's own pass computed (`recording.rerun`). Queries that the pass leaves out are
    NaN, such as those of later blocks in block diffusion. Of an AR run the positions that are decoded at the step;
    the rest of its canvas holds no text yet.
    """
    import torch

    from dlm_lens.recording import AttentionPattern, rerun

    # All rows together, as in the run: of a network that reads its own last predictions (self-conditioning) the
    # differences of rounding between batches of other sizes would grow from step to step.
    found = rerun(model, run, [AttentionPattern()], steps=[step], layers=[layer])
    content = run.attention_mask[row].bool()
    if run.autoregressive:
        content = content & ~run.masked[step, row]
    keys = torch.cat([content, content.new_ones(found.sinks)])
    whole: Float[Tensor, "query key"] = found.pattern[0, row, 0, head].float()
    return whole[content][:, keys]


def cost(item: Item, settings: Settings) -> list[Cost]:
    """One forward pass per step."""
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    answer = int(settings["sampler"].get("gen_length", 32))
    prompt = 32 if not settings["chat"] else 128
    return [Cost(int(settings["sampler"].get("steps", answer)), rows, prompt + answer, item["model"])]


def experiment(
    *,
    name: str,
    shows: str,
    title: str,
    metric: str,
    run: Callable[[Item, Settings, Bench], Mapping[str, Any]],
    render: Callable[[Results], Rendering],
    small: Settings | None = None,
    full: Settings | None = None,
    items: Callable[[Settings], Iterator[Item]] = items,
    cost: Callable[[Item, Settings], Sequence[Cost]] = cost,
    paper: Sequence[Table] = (),
) -> Experiment:
    """An `Experiment` on recorded runs; `small` and `full` replace or add to the shared settings."""
    return Experiment(
        name=name,
        shows=shows,
        title=title,
        metric=metric,
        small={**SMALL, **(small or {})},
        full={**FULL, **(full or {})},
        items=items,
        run=run,
        render=render,
        cost=cost,
        paper=paper,
        own=OWN,
    )


def sink_rule(settings: Settings) -> Any:
    """Eq. 3 with the setting `eps`, on received attention relative to uniform."""
    from dlm_lens.sinks import AboveMean

    return AboveMean(settings["eps"])


def per_network(results: Results, name: str, **wanted: Any) -> list[list[Any]]:
    """The values of all prompts, one list per network of the records whose items match."""
    numbers = sorted({record.item.get("network", 0) for record in results.where(**wanted)})
    if numbers == [0]:
        return [results.listed(name, **wanted)]
    return [results.listed(name, network=number, **wanted) for number in numbers]


def ratio(
    results: Results, model: str, top: str, bottom: str, *, bounds: tuple[float, float] | None, **wanted: Any
) -> Interval:
    """Ratio of the sums of two values over prompts, mean over networks; interval over networks and prompts."""
    tops, bottoms = (per_network(results, name, model=model, **wanted) for name in (top, bottom))
    return over_networks(list(zip(tops, bottoms, strict=True)) or [([], [])], bounds=bounds)


def average(
    results: Results, model: str, name: str, *, bounds: tuple[float, float] | None, **wanted: Any
) -> Interval:
    """Mean of one value per prompt over prompts and networks; None and NaN are left out."""
    found = []
    for values in per_network(results, name, model=model, **wanted):
        known = [value is not None and value == value for value in values]
        tops = [float(value) if there else 0.0 for value, there in zip(values, known, strict=True)]
        found.append((tops, [float(there) for there in known]))
    return over_networks(found or [([], [])], bounds=bounds)


def per_prompt(
    results: Results,
    model: str,
    names: Sequence[str],
    terms: Callable[..., tuple[float, float]],
    *,
    bounds: tuple[float, float] | None,
    **wanted: Any,
) -> Interval:
    """As `ratio`, of a numerator and a denominator that `terms` computes from several values of each prompt."""
    columns = [per_network(results, name, model=model, **wanted) for name in names]
    pairs = [[terms(*values) for values in zip(*network, strict=True)] for network in zip(*columns, strict=True)]
    found = [([top for top, _ in pair], [bottom for _, bottom in pair]) for pair in pairs]
    return over_networks(found or [([], [])], bounds=bounds)


def rounded(values: Any, digits: int = 4) -> Any:
    """Tensors, arrays and numbers as rounded JSON values; NaN and infinities become None."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    if isinstance(values, float):
        return round(values, digits) if abs(values) < float("inf") else None
    return values
