"""Figure 4: a sink that moves from one step to the next, and how often that happens."""

from collections.abc import Iterator
from typing import Any, Literal

from dlm_lens.experiments.attention_sinks import watching
from dlm_lens.experiments.attention_sinks.models import is_causal
from dlm_lens.experiments.attention_sinks.watching import Watched, numbers, rule, watch
from dlm_lens.experiments.experiment import Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per prompt: patterns of each kind, moves and switches; of the first prompt the clearest move and its maps."""
    import dlm_lens as dl

    names = ("patterns", "static", "moving", "unsettled", "moves", "switches", "pairs")
    found: dict[str, Any] = {name: [] for name in names}
    diffusion = getattr(bench.model(item["model"]).config, "mask_token_id", None) is not None
    for number, watched in enumerate(watch(item, settings, bench)):
        paths = dl.trajectories(watched.received["all"], rule(settings))
        kinds = paths.kinds.flatten().tolist()
        found["patterns"].append(len(kinds))
        for kind in ("static", "moving", "unsettled"):
            found[kind].append(kinds.count(kind))
        found["moves"].append(int((paths.before >= 0).sum()))
        found["switches"].append(int(paths.switched.sum()))
        found["pairs"].append(int((paths.defined.sum(0) - 1).clamp(min=0).sum()))
        if item["start"] == 0 and number == 0 and diffusion:
            found["example"] = _example(bench.model(item["model"]), watched, paths)
    return found


def _example(model: Any, watched: Watched, paths: Any) -> dict[str, Any] | None:
    """The move whose weaker end is the strongest, and the pattern at the steps before and after it."""
    table = paths.table()
    moves = table[table["came_from"].notna() & table["position"].notna()]
    if moves.empty:
        return None
    previous = {
        index: table[(table["trajectory"] == line["trajectory"]) & (table["position"] == line["came_from"])][
            "peak"
        ].max()
        for index, line in moves.iterrows()
    }
    line = moves.loc[max(previous, key=lambda index: min(previous[index], moves.loc[index, "peak"]))]
    layer, head = int(line["layer"]), int(line["head"])
    before, after = int(line["first_step"]) - 1, int(line["first_step"])
    shift = int(watched.run.padding[watched.row])
    return {
        "layer": layer, "head": head, "steps": [before, after],
        "positions": [int(line["came_from"]), int(line["position"])],
        "tokens": [str(watched.run.tokenizer.decode([watched.run.tokens[watched.row, p + shift]]))
                   for p in (int(line["came_from"]), int(line["position"]))],
        "maps": [numbers(_pattern(model, watched, step, layer, head), 3) for step in (before, after)],
    }  # fmt: skip


def _pattern(model: Any, watched: Watched, step: int, layer: int, head: int) -> Any:
    """One head's pattern over the content of one row's canvas, without learned sink tokens."""
    import torch

    from dlm_lens.attention import SinkLayout
    from dlm_lens.hooks import attach_hooks

    keeper = _Keeper((layer,))
    ids = watched.run.canvases[step, watched.row][watched.run.attention_mask[watched.row]]
    with torch.no_grad(), attach_hooks(model, keeper):
        model(input_ids=ids[None].to(model.device))
    pattern = keeper.kept[0][0, head].float().cpu()
    canvas = SinkLayout.of(model).canvas(len(pattern))
    return pattern[canvas, canvas]


class _Keeper:
    """A hook that only looks: keeps the pattern that comes by."""

    site: Literal["pattern"] = "pattern"

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.kept: list[Any] = []

    def __call__(self, tensor: Any, hook: Any = None) -> Any:
        """The pattern, unchanged."""
        self.kept.append(tensor)
        return tensor


def render(results: Results) -> Rendering:
    """Kinds of patterns, rates of moves, and the example's maps."""
    from dlm_lens.experiments.attention_sinks.drawing import heat

    rows, panels, marks = [], {}, {}
    for model in results.models:
        count = len(results.listed("patterns", model=model))
        rate = ratio_over_prompts(results.listed("moves", model=model), results.listed("pairs", model=model))
        rows.append([
            model, *(str(share(results, model, kind)) for kind in ("static", "moving", "unsettled")),
            f"{100 * rate.value:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]", str(count),
        ])  # fmt: skip
        for record in results.where(model=model, start=0):
            example = record.value.get("example") or {}
            names = ("steps", "positions", "maps")
            for step, place, values in zip(*(example.get(name, ()) for name in names), strict=True):
                title = f"{model}, layer {example['layer']}, head {example['head']}, step {step}"
                panels[title] = values
                marks[title] = [(place, -0.5)]
    head = [
        "model",
        "static patterns",
        "moving",
        "unsettled",
        "moves per 100 pairs of steps of a pattern",
        "n prompts",
    ]
    table = Table("parts of all patterns (layer x head x prompt), the rest have none; 95% intervals over prompts",
                  head, rows)  # fmt: skip
    figures = {"maps": heat(panels, x="key", y="query", bar="attention", marks=marks)} if panels else {}
    return Rendering([table], figures, list(_findings(results)))


def share(results: Results, model: str, kind: str) -> Interval:
    """Part of the patterns that are of this kind."""
    return ratio_over_prompts(results.listed(kind, model=model), results.listed("patterns", model=model))


def _findings(results: Results) -> Iterator[Finding]:
    baseline = next((model for model in results.models if is_causal(results, model)), None)
    for model in results.models:
        if model == baseline:
            continue
        here = share(results, model, "moving")
        other = None if baseline is None else share(results, baseline, "moving")
        yield Finding(
            "DLMs have moving sinks, which AR models do not",
            f"{model}: {here} of the patterns" + ("" if other is None else f"; {baseline}: {other}"),
            "disagrees" if here.high < 0.01 or (other is not None and other.low >= here.low)
            else "agrees" if other is not None and here.low > other.high else "undecided",
            "moving as defined in docs/trajectories.md; in an AR run every step brings a new key",
        )  # fmt: skip


EXPERIMENT = Experiment(
    name="fig4-moving",
    shows="2510.15731, Figure 4",
    title="sinks that move between two steps",
    metric="share of (layer, head, prompt) patterns whose sink moves; moves per pair of steps",
    small=watching.SMALL,
    full=watching.FULL,
    items=watching.items,
    run=run,
    render=render,
    cost=watching.cost,
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
