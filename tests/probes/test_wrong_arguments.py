"""Wrong arguments of probes, of their results and of figures: one sentence with the value and what it must be."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import dlm_lens as dl
from dlm_lens import features, probes, viz
from dlm_lens.testing import tiny
from tests.recording.test_features import autoencoder

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 5, 9]]
OTHERS = [[1, 2, 30], [4, 5, 16], [7, 8, 19], [1, 5, 29]]


class Lines:
    """An object whose repr has several lines."""

    def __repr__(self) -> str:
        return "Lines(\n)"


@cache
def given(name: str) -> Any:
    """An argument, or a result whose methods are called; each is made once."""
    if name == "model":
        return tiny("llada")
    model = given("model")
    if name == "run":
        return dl.denoise(model, PROMPTS, steps=3, gen_length=6)
    run = given("run")
    made_of: dict[str, Callable[[], Any]] = {
        "sae": lambda: autoencoder(model),
        "received": lambda: dl.received_over_steps(model, run),
        "recording": lambda: dl.record(model, PROMPTS[:2], steps=2, gen_length=6),
        "paths": lambda: dl.trajectories(given("received"), dl.TopK(1)),
        "nodes": lambda: probes.activation_patching(model, run, OTHERS, steps=[0]),
        "columns": lambda: probes.column_attribution(model, run, steps=[0]),
        "edges": lambda: probes.edge_attribution(model, run, OTHERS, steps=[0], integration=0),
        "replay": lambda: probes.replay(model, run, [dl.hooks.mask_top_sinks(1)]),
        "channels": lambda: probes.channel_removal(model, run),
        "clock": lambda: probes.denoising_clock(model, run, bins=4, shuffles=1),
        "classes": lambda: probes.class_readability(model, run),
        "heads": lambda: probes.retrieval_heads(model, run),
        "depth": lambda: probes.serial_depth(model, 4),
        "loss": lambda: probes.insertion_loss(model, run, autoencoder(model), steps=[0]),
        "lens": lambda: dl.logit_lens(model, run, layers=[0]),
        "commitment": lambda: probes.commitment(model, run),
    }
    return made_of[name]()


def pair() -> tuple[Any, Any]:
    return given("model"), given("run")


LONG = torch.ones(2, 2, 2)
RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "nodes, top": (lambda: given("nodes").table("x"), r"top is 'x'; it must be a whole number of at least 0"),
    "nodes, negative": (lambda: given("nodes").table(-1), r"top is -1; it must be a whole number of at least 0"),
    "nodes, other": (lambda: given("nodes").agreement(3), r"other is 3; it must be the NodeEffects"),
    "columns": (lambda: given("columns").table(2.5), r"top is 2\.5; it must be a whole number"),
    "edges": (lambda: given("edges").table("x"), r"top is 'x'; it must be a whole number"),
    "circuit": (lambda: given("edges").circuit("x"), r"edges is 'x'; the graph has \d+, so give 1 to"),
    "replay": (lambda: given("replay").gained(top="a"), r"top is 'a'; it must be a whole number"),
    "channels": (lambda: given("channels").by_layer(-1), r"top is -1; it must be a whole number of at least 1"),
    "clock": (lambda: given("clock").subspace("open", 0, "x"), r"dimensions is 'x'; the curve of"),
    "clock, class": (
        lambda: given("clock").reading.label_sums(99),
        r"label_sums: kind 99 of 3: kinds go from 0 to 2",
    ),
    "part": (lambda: given("received").part(rows=99), r"rows is 99; it must be a slice of whole numbers"),
    "part, words": (lambda: given("received").part(heads=slice("a")), r"heads is slice\(.*; it must be a slice"),
    "part, backwards": (lambda: given("received").part(steps=slice(None, None, -1)), r"it must be a slice"),
    "steps of attention": (lambda: given("received").first_steps(2.5), r"count is 2\.5; it must be a whole number"),
    "steps of a run": (
        lambda: given("run").first_steps("x"),
        r"count is 'x'; it must be a whole number of at least 0",
    ),
    "steps, negative": (
        lambda: given("run").first_steps(-1),
        r"count is -1; it must be a whole number of at least 0",
    ),
    "summary": (lambda: given("paths").summary(by=[]), r"summary: by is \[\]; it must be one of 'pattern', 'head'"),
    "enrichment": (lambda: dl.sinks.position_enrichment(given("paths"), []), r"by is \[\]; it must be one of"),
    "frontiers": (lambda: dl.sinks.frontier_alignment(given("paths"), []), r"by is \[\]; it must be one of"),
    "place": (lambda: given("paths").place(-1), r"place: pattern is -1; it must be whole numbers from 0 to \d+"),
    "place, word": (lambda: given("paths").place("x"), r"place: pattern is 'x'; it must be whole numbers from 0"),
    "expected": (
        lambda: given("recording").expected(layer=Lines()),
        r"layer Lines\( \) was not recorded; there are 0, 1",
    ),
    "sae, no bias": (
        lambda: features.SparseAutoencoder(torch.eye(4), None, torch.eye(4), torch.zeros(4), k=1),  # type: ignore[arg-type]
        r"SparseAutoencoder\.encoder_bias is a NoneType; it must be a tensor, Float \[feature\] with feature=4",
    ),
    "classes": (lambda: given("classes").earlier(0, late=Lines()), r"late is Lines\( \); it must be True or False"),
    "layer": (
        lambda: given("classes").by_step(LONG),
        r"layer a Tensor float32 \[2, 2, 2\] was not read; there are",
    ),
    "heads": (lambda: given("heads").score(Lines(), 0), r"layer Lines\( \) was not measured; there are 0, 1"),
    "depth": (lambda: given("depth").opaque("x"), r"steps is 'x'; it must be a whole number of at least 1"),
    "loss": (lambda: given("loss").added(1, place=LONG), r"place a Tensor .* was not measured; there are 'all'"),
    "sae": (lambda: given("sae").encode([1]), r"x is \[1\]; give a tensor \[\.\.\., 32\]"),
    "sae, features": (lambda: given("sae").decode(torch.ones(2, 5)), r"features is a Tensor .*; give a tensor"),
    "sae, change": (
        lambda: given("sae").change(torch.ones(2, 32), torch.ones(2, 1), [99]),
        r"feature 99 of \d+: features go from 0",
    ),
}

CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "stability, keep": (
        lambda: probes.pattern_stability(*pair(), dl.AboveMean(0.1), keep="a"),
        r"keep is 'a'; it must be a number above 0 and at most 1",
    ),
    "stability, reference": (
        lambda: probes.pattern_stability(*pair(), dl.AboveMean(0.1), reference=99),
        r"reference is 99; the run has 3 steps, so give 0 to 2",
    ),
    "model": (lambda: probes.read_clock(True, given("run"), given("clock")), r"read_clock: True is no model; load"),
    "pruned": (lambda: probes.pruned("toy", 0.5).__enter__(), r"'toy' is no model; load one with dlm_lens\.load"),
    "pruned, norms": (
        lambda: probes.pruned(given("model"), 0.5, 3).__enter__(),
        r"norms is 3; it must be the InputNorms of input_norms",
    ),
    "site": (lambda: probes.activation_patching(*pair(), OTHERS, []), r"site is \[\]; it must be one of z, q"),
    "target": (
        lambda: probes.column_attribution(*pair(), target=probes.LogitDifference),
        r"target is <class .*>; give LogProbability\(\)",
    ),
    "seed": (
        lambda: probes.activation_patching(*pair(), OTHERS, seed=[]),
        r"seed is \[\]; it must be a whole number from 0",
    ),
    "seed of a null": (lambda: features.untrained(given("sae"), True), r"seed is True; it must be a whole number"),
    "autoencoder": (
        lambda: features.random_decoder("x"),
        r"sae is 'x'; it must be a SparseAutoencoder",
    ),
    "steps": (
        lambda: probes.activation_patching(*pair(), OTHERS, steps=Lines()),
        r"steps is Lines\( \); give a list",
    ),
    "reference": (lambda: probes.commitment(*pair(), reference="x"), r"reference is 'x', and the run's canvas"),
    "reference, fractions": (
        lambda: probes.commitment(*pair(), reference=torch.ones(4, 9)),
        r"reference is a Tensor float32 \[4, 9\], and the run's canvas \[4, 9\]; give token ids",
    ),
    "clock": (lambda: probes.shift_clock("x", 0.1), r"clock is 'x'; it must be a DenoisingClock"),
    "classes": (
        lambda: probes.denoising_clock(*pair(), positions=3),
        r"positions is 3; it must be a list of names",
    ),
    "weights": (
        lambda: probes.sink_weights(given("received").values, torch.ones(4, 9)),
        r"content \[4, 9\] \(torch\.float32\); give \[step, batch, layer, head, key\] and truth values",
    ),
    "inputs": (lambda: probes.serial_depth(given("model"), 4, inputs=3), r"inputs is 3; it must be a dict"),
    "writes": (lambda: probes.sink_writes(*pair(), "x"), r"sinks is 'x'; it must be"),
}

FIGURES: dict[str, tuple[Callable[[], Any], str]] = {
    "title": (lambda: viz.commitment_map(given("commitment"), title=3), r"title is 3; it must be a text"),
    "title, none": (lambda: viz.attribution_map(given("nodes"), title=[]), r"title is \[\]; it must be a text"),
    "row": (lambda: viz.lens_table(given("lens"), step=0, row="x"), r"row is 'x'; it must be a whole number"),
    "step": (lambda: viz.lens_table(given("lens"), step=10**30), r"step is 10+; it must be at most"),
    "head": (lambda: viz.sink_positions(given("received"), layer=0, head=LONG), r"head is a Tensor"),
    "blocks": (
        lambda: viz.sink_positions(given("received"), dl.AboveMean(0.1), layer=0, head=0, blocks="abc"),
        r"blocks is 'abc'; it must be a list of \(start, stop\)",
    ),
    "models": (
        lambda: viz.sink_positions_by_model("x", heads={}),
        r"models is 'x'; it must be a dict by the names of the models",
    ),
    "parts": (lambda: viz.score_distribution(given("received"), parts="x"), r"parts is 'x'; it must be a whole"),
    "marked": (lambda: viz.sinks_over_eps(given("received"), marked="x"), r"marked is 'x'; it must be a finite"),
    "places": (
        lambda: viz.attention_pattern(given("run"), given("model"), step=0, layer=0, head=0, positions=3),
        r"positions is 3; it must be a list of whole numbers",
    ),
    "lines": (lambda: list(viz.emerging_lines("x")), r"the run is a str; give the DenoisingRun"),
    "discount": (lambda: viz.sink_discount("x", given("run")), r"weights is 'x'; it must be the weights"),
    "insertions": (
        lambda: viz.insertion_by_step(given("loss"), insertions=3),
        r"insertions is 3; it must be a list",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), [*RESULTS.values(), *CALLS.values(), *FIGURES.values()])
def test_a_wrong_argument_is_named_with_what_it_must_be(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)
