"""What does an inserted Top-K autoencoder cost, layer by layer and step by step? On toy and its AR twin.

The autoencoders are trained in the run, on activations of other prompts (2406.04093: k largest, decoder of unit
rows), and the right tokens are those of the shipped solutions, not of the run.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlm_lens.experiments.attention_sinks.problems import Problem, solved_problems
from dlm_lens.experiments.denoising_axis import networks
from dlm_lens.experiments.experiment import Cost, Experiment, Finding, Rendering, Table, run_script
from dlm_lens.experiments.intervals import Interval, ratio_over_prompts
from dlm_lens.experiments.results import Item, Results, Settings
from dlm_lens.experiments.verdicts import is_above, is_below

if TYPE_CHECKING:
    import torch

    from dlm_lens.features import SparseAutoencoder

INSERTIONS = ("sae", "untrained", "random_decoder", "mean", "zero")
PLACES = ("all", "open")
UNEXPLAINED = "squared error over deviation from the decoder bias"
NAMED = {
    "sae": "the autoencoder",
    "untrained": "untrained, the same k",
    "random_decoder": "random decoder",
    "mean": "the mean activation",
    "zero": "zero",
}


def problems_between(settings: Settings, first: int, stop: int) -> list[Problem]:
    """Problems with their solutions, by index in the task.

    Raises:
        FileNotFoundError: no such task.
        ValueError: the task has no solutions, or fewer problems.
    """
    found = solved_problems(settings["task"], "axis-features")
    if stop > len(found):
        raise ValueError(f"{settings['task']} has {len(found)} problems; prompts and train together are {stop}")
    return found[first:stop]


def trained(model: Any, layer: int, settings: Settings) -> "SparseAutoencoder":
    """A Top-K autoencoder of a layer, trained on activations of prompts that are not measured.

    Mean squared error over the variance of the activations; Adam; the decoder's rows keep length 1.
    """
    import torch

    from dlm_lens.features import SparseAutoencoder
    from dlm_lens.recording import ActivationBatch, activations

    first = settings["prompts"]
    prompts = [each.prompt for each in problems_between(settings, first, first + settings["train"])]
    stream = activations(model, prompts, layer, batch_size=16, **settings["sampler"])
    vectors = ActivationBatch.joined(list(stream)).activations
    mean = vectors.mean(0)
    made = torch.Generator().manual_seed(settings["seed"])
    decoder = torch.randn(settings["features"], vectors.shape[1], generator=made)
    decoder = torch.nn.functional.normalize(decoder, dim=-1)
    weights = [decoder.T.contiguous(), torch.zeros(settings["features"]), decoder.clone(), mean.clone()]
    parameters = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    for _ in range(settings["updates"]):
        batch = vectors[torch.randint(len(vectors), (512,), generator=made)]
        loss = (_rebuilt(batch, parameters, settings["k"]) - batch).pow(2).sum() / (batch - mean).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            parameters[2].div_(parameters[2].norm(dim=-1, keepdim=True))
    encoder, bias, decoder, shift = (one.detach() for one in parameters)
    return SparseAutoencoder(encoder, bias, decoder, shift, k=settings["k"], layer=layer)


def _rebuilt(x: "torch.Tensor", parameters: Any, k: int) -> "torch.Tensor":
    encoder, bias, decoder, shift = parameters
    inner = (x - shift) @ encoder + bias
    largest = inner.topk(k, dim=-1)
    return inner.new_zeros(inner.shape).scatter(-1, largest.indices, largest.values.relu()) @ decoder + shift


def run(item: Item, settings: Settings, bench: Any) -> dict[str, Any]:
    """Per layer and prompt: sums of the loss for every insertion, over all steps and over each half of them."""
    import torch

    import dlm_lens as dl
    from dlm_lens.attention import attention_blocks
    from dlm_lens.probes import insertion_loss

    model = bench.model(item["model"])
    start = item["start"]
    these = problems_between(settings, start, min(start + settings["batch"], settings["prompts"]))
    depth = len(attention_blocks(model))
    saes = bench.once("autoencoders", lambda: [trained(model, layer, settings) for layer in range(depth)])
    done = dl.denoise(model, [each.prompt for each in these], **settings["sampler"])
    reference = torch.full_like(done.tokens, -1)
    for row, each in enumerate(these):
        ids = model.tokenizer(each.solution, add_special_tokens=False)["input_ids"]
        ids = ids[: reference.shape[1] - done.prompt_length]
        reference[row, done.prompt_length : done.prompt_length + len(ids)] = torch.tensor(ids)
    loss = insertion_loss(model, done, saes, places=PLACES, reference=reference, seed=settings["seed"])
    kept = dl.hooks.capture(model, done, "resid")
    found: dict[str, Any] = {}
    for place, sae in enumerate(saes):
        states = [kept["resid", sae.layer, step] for step in range(done.steps)]
        found[f"layer {sae.layer}"] = [
            {**_counts(loss, place, row), "unexplained": _unexplained(sae, states, done, row)}
            for row in range(len(these))
        ]
    return found


def _unexplained(sae: "SparseAutoencoder", states: Any, done: Any, row: int) -> list[float]:
    """Squared error of the reconstruction and squared deviation from the decoder bias, over a prompt's content."""
    import torch

    # The canvas of an AR run grows.
    parts = [state[row, done.attention_mask[row, : state.shape[1]]] for state in states]
    x = torch.cat(parts).float()
    return [round(float(error.pow(2).sum()), 5) for error in (sae(x) - x, x - sae.decoder_bias)]


def _counts(loss: Any, place: int, row: int) -> dict[str, Any]:
    """Sums of one prompt: [all steps, first half, second half]."""
    half = len(loss.steps) // 2

    def sums(values: Any) -> list[float]:
        whole = values[:, row].double()
        return [round(float(part.sum()), 5) for part in (whole, whole[:half], whole[half:])]

    found = {"n": sums(loss.positions), "plain": sums(loss.plain)}
    for insertion in INSERTIONS:
        for where in PLACES:
            at = (place, loss.insertions.index(insertion), loss.places.index(where))
            found[f"{insertion}, {where}"] = sums(loss.loss[at])
    return found


def layers_of(results: Results, model: str) -> list[int]:
    """The layers that were measured."""
    first = results.where(model=model)[0].value
    return sorted(int(name.removeprefix("layer ")) for name in first)


def over_prompts(
    results: Results,
    model: str,
    layer: int,
    terms: Callable[[dict[str, Any]], tuple[float, float]],
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Ratio of the sums of two numbers per prompt; `bounds` as for `ratio_over_prompts`."""
    pairs = [terms(one) for one in results.listed(f"layer {layer}", model=model)]
    return ratio_over_prompts([top for top, _ in pairs], [bottom for _, bottom in pairs], bounds=bounds)


def added(results: Results, model: str, layer: int, insertion: str, where: str = "all") -> Interval:
    """Mean loss with the insertion minus without, in nats."""
    name = f"{insertion}, {where}"
    return over_prompts(results, model, layer, lambda one: (one[name][0] - one["plain"][0], one["n"][0]))


def recovered(results: Results, model: str, layer: int, insertion: str) -> Interval:
    """The share of zero ablation's added loss that the insertion does not have."""
    name = f"{insertion}, all"
    return over_prompts(
        results, model, layer,
        lambda one: (one["zero, all"][0] - one[name][0], one["zero, all"][0] - one["plain"][0]),
    )  # fmt: skip


def better(results: Results, model: str, layer: int) -> Interval:
    """Mean loss with the untrained autoencoder minus with the trained one, in nats."""
    return over_prompts(
        results, model, layer, lambda one: (one["untrained, all"][0] - one["sae, all"][0], one["n"][0])
    )


def early_excess(results: Results, model: str, layer: int) -> Interval:
    """Mean added loss in the first half of the steps minus that in the second, mean over prompts."""

    def terms(one: dict[str, Any]) -> tuple[float, float]:
        if not one["n"][1] or not one["n"][2]:
            return 0.0, 0.0
        first, second = ((one["sae, all"][i] - one["plain"][i]) / one["n"][i] for i in (1, 2))
        return first - second, 1.0

    return over_prompts(results, model, layer, terms)


def render(results: Results) -> Rendering:
    """Added losses by layer and insertion, and a forest plot of the recovered shares."""
    from dlm_lens.experiments.attention_sinks.charts import forest_plot

    rows, bars = [], {}
    for model in results.models:
        for layer in layers_of(results, model):
            unexplained = over_prompts(
                results, model, layer, lambda one: (one["unexplained"][0], one["unexplained"][1]), (0, math.inf)
            )
            count = len(results.listed(f"layer {layer}", model=model))
            plain = over_prompts(results, model, layer, lambda one: (one["plain"][0], one["n"][0]), (0, math.inf))
            cells = [added(results, model, layer, name) for name in INSERTIONS]
            # An AR step has no open position in its input.
            opened = "-" if results.is_causal(model) else str(added(results, model, layer, "sae", "open"))
            rows.append([model, str(layer), *map(str, (unexplained, plain, *cells)), opened, str(count)])
            for name in ("sae", "untrained", "random_decoder"):
                bars[f"{model}, layer {layer}: {NAMED[name]}"] = recovered(results, model, layer, name)
    head = ["model", "layer", UNEXPLAINED, "loss of the model"]
    head += [f"added: {NAMED[name]}" for name in INSERTIONS]
    head += ["added: the autoencoder at open positions", "n prompts"]
    table = Table("Cross-entropy of the right tokens in nats; 95% intervals over prompts", head, rows)
    figure = forest_plot(bars, x="share of zero ablation's added loss that the insertion does not have")
    return Rendering([table], {"recovered": figure}, list(_findings(results)), [
        "The activation after a layer is replaced at all positions of every canvas of a run, one layer at a time. "
        "The right tokens are those of the shipped solution; positions after its end do not count.",
        "One autoencoder per layer and model, trained with one seed on activations of other prompts. The nulls: "
        "random weights with the same k and decoder bias, and the trained encoder with random directions.",
        f"{UNEXPLAINED.capitalize()}: the squared error of the reconstruction over the squared deviation of the "
        "activations from the autoencoder's decoder bias, which began as the mean of the activations that it was "
        "trained on and was learned. No vector is closer to the measured activations than their own mean, so the "
        "share of their variance that is not explained is the same or larger.",
    ])  # fmt: skip


def _findings(results: Results) -> Iterator[Finding]:
    for model in results.models:
        layers = layers_of(results, model)
        first = layers[0]
        causal = results.is_causal(model)
        claim = "inserting an autoencoder into an early layer lowers the loss of a DLM (2602.05859, abstract)"
        if causal:
            claim = "in an AR model inserting one into an early layer raises the loss (2602.05859, abstract)"
        cost = added(results, model, first, "sae")
        yield Finding.of(
            claim,
            f"{model}, layer {first}: {cost} nats more",
            (is_above if causal else is_below)(cost, 0.0),
            why=f"agreement: the added loss is {'above' if causal else 'below'} 0",
            null=f"untrained: {added(results, model, first, 'untrained')}; random decoder: "
            f"{added(results, model, first, 'random_decoder')}",
        )
        for layer in layers:
            yield Finding.of(
                "trained Top-K autoencoders are faithful (2602.05859, abstract)",
                f"{model}, layer {layer}: {recovered(results, model, layer, 'sae')} of zero ablation's loss "
                f"recovered; {better(results, model, layer)} nats less than untrained",
                is_above(better(results, model, layer), 0.0),
                why="agreement: less loss than an untrained autoencoder of the same k",
                null=f"untrained: {recovered(results, model, layer, 'untrained')} recovered",
            )
        if causal:
            continue
        deepest = layers[len(layers) // 2]
        excess = early_excess(results, model, deepest)
        yield Finding.of(
            "the insertion costs more while most of the canvas is open (no statement of the paper's)",
            f"{model}, layer {deepest}: {excess} nats more in the first half of the steps",
            is_above(excess, 0.0),
            why="agreement: more added loss in the first half of the steps than in the second",
            null="0: the same in both halves",
        )


def cost(item: Item, settings: Settings) -> list[Cost]:
    """A pass per step, autoencoder, insertion and place, and the runs that the autoencoders are trained on."""
    sampler = settings["sampler"]
    steps = int(sampler.get("steps", sampler.get("gen_length", 32)))
    positions = 32 + int(sampler.get("gen_length", 32))
    # The number of layers is the model's: four of the embedded ones.
    passes = steps * (4 * (len(INSERTIONS) * len(PLACES) + 1) + 2)
    training = 4 * steps * settings["train"] // 16 if item["start"] == 0 else 0
    rows = min(settings["batch"], settings["prompts"] - item["start"])
    return [Cost(passes, rows, positions, item["model"])] + (
        [Cost(training, 16, positions, item["model"])] if training else []
    )


SMALL: dict[str, Any] = {
    "models": ["toy", "toy-ar"], "task": "toy_arithmetic", "prompts": 16, "batch": 16, "train": 64,
    "sampler": {"gen_length": 24, "steps": 12}, "features": 256, "k": 8, "updates": 400, "seed": 0,
}  # fmt: skip

EXPERIMENT = Experiment(
    name="axis-features",
    shows="2602.05859",
    title="the cost of an inserted Top-K autoencoder, by layer and step",
    metric="cross-entropy in nats that the insertion adds, and the share of zero ablation's loss recovered",
    small=SMALL,
    full={**SMALL, "models": ["toy", "toy-blocks", "toy-ar"], "prompts": 36, "updates": 2000},
    items=networks.items,
    run=run,
    render=render,
    cost=cost,
    own={"toy-ar": {"sampler": {"gen_length": 24}}},
)

if __name__ == "__main__":
    run_script(EXPERIMENT)
