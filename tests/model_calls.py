"""A call of every public function that takes a model."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import dlm_lens as dl
from dlm_lens import evaluation, hooks, probes, recording, sampling, sinks, training, viz
from dlm_lens.cli.app import app
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.noisy_texts import NoisyCorruption
from dlm_lens.sinks.analysis.query_splits import SplitAttention
from dlm_lens.testing import tiny

PROMPTS = [[5, 9, 13, 2, 7, 21, 30, 31], [3, 8, 1, 4, 4, 11]]
TEXT = " ".join(f"w{(7 * i) % 60}" for i in range(200))


@dataclass
class Case:
    """A model, and what the calls need of it; each made once."""

    family: str
    folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Of a short run in which positions are decided, revised and opened again."""
        if self.family in ("duo", "udlm", "sumi", "gidd"):
            return {"gen_length": 16, "seed": 1, "steps": 4}
        if self.family == "gidd_dit":
            return {"gen_length": 16, "seed": 1, "steps": 4, "correction_steps": 2}
        steps = {"steps_per_block": 3} if self.family == "diffusion_gemma" else {"steps": 5}
        return {"gen_length": 16, "seed": 1, "entropy_bound": 12.0, "stability_threshold": None, **steps}

    @cached_property
    def model(self) -> Any:
        return tiny(self.family)

    @cached_property
    def run(self) -> dl.DenoisingRun:
        return dl.denoise(self.model, PROMPTS, **self.settings)

    @cached_property
    def recording(self) -> dl.Recording:
        reducers = [
            dl.ReceivedAttention(queries=("all", "masked", "unmasked")), dl.ValueNorm("both"), dl.RegionMass(),
            recording.ResidualNorm(), recording.KeyNorm(), SplitAttention(),
        ]  # fmt: skip
        found: dl.Recording = dl.record(self.model, PROMPTS, reducers, **self.settings)
        return found

    @cached_property
    def received(self) -> Any:
        return dl.received_of(self.recording)

    @cached_property
    def sinks(self) -> Any:
        return dl.find_sinks(self.recording, dl.TopK(2))

    @cached_property
    def paths(self) -> Any:
        return dl.trajectories(self.sinks)

    @cached_property
    def stored(self) -> Path:
        dl.record(
            self.model, PROMPTS, [dl.ReceivedAttention(), dl.ValueNorm()], to=self.folder / "rec", **self.settings
        )
        return self.folder / "rec"

    @cached_property
    def checkpoint(self) -> Path:
        self.model.save_pretrained(self.folder / "model")
        self.model.tokenizer.save_pretrained(self.folder / "model")
        return self.folder / "model"

    def cli(self, *words: Any) -> str:
        """A command of `dlm-lens`; its refusal is raised as a ValueError."""
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code:
            raise ValueError(" ".join(re.sub("[╭╮╰╯│─]", " ", done.output).split()))
        return done.output


def trace(c: Case) -> Any:
    lm = dl.DiffusionLM(c.model)
    with lm.generate(PROMPTS, **c.settings) as tracer:
        for step in tracer.steps:  # noqa: B007
            lm.layers[1].attn.pattern[..., 0] = 0
        run = tracer.result.save()
    return run


def forward(c: Case) -> Any:
    with dl.record_forward(c.model, [dl.ReceivedAttention(), dl.ValueNorm()]) as seen, torch.no_grad():
        c.model(input_ids=torch.tensor([[*PROMPTS[0], *range(12)]]))
    return seen.received


def trained(c: Case) -> Any:
    (c.folder / "text.txt").write_text(TEXT)
    lens = probes.train_tuned_lens(c.model, c.folder / "text.txt", steps=2, batch_size=2, length=24)
    return dl.logit_lens(c.model, c.run, tuned=lens)


EXAMPLES = [training.Example((torch.arange(24) * number) % 56 + 4) for number in (3, 5, 7, 11)]


def objective_of(model: Any) -> Any:
    """The objective that trains a model without masks."""
    bound = isinstance(algorithm_of(model.config).corruption, NoisyCorruption)
    return training.LikelihoodBoundLoss() if bound else training.UniformDiffusionLoss()


class Place:
    length, padding = 24, 61


def prompts(c: Case) -> Path:
    (c.folder / "prompts.jsonl").write_text('{"prompt": "w5 w6 w7 w8"}\n{"prompt": "w1 w2 w3 w4 w9"}\n')
    return c.folder / "prompts.jsonl"


def corrupted(c: Case) -> Any:
    return [[8, *PROMPTS[0][1:]], [8, *PROMPTS[1][1:]]]


HOOKS: dict[str, Callable[[Case], Any]] = {
    "mask_sinks": lambda c: hooks.mask_sinks(dl.AboveMean(1.0)),
    "mask_top_sinks": lambda c: hooks.mask_top_sinks(1),
    "mask_sinks clean": lambda c: hooks.mask_sinks(dl.TopK(1), source="clean", per="model"),
    "mask_sinks previous": lambda c: hooks.mask_sinks(dl.TopK(1), source="previous", per="model"),
    "mask_sinks measured": lambda c: hooks.mask_sinks(dl.TopK(1), source=c.recording),
    "freeze_sinks": lambda c: hooks.freeze_sinks(dl.TopK(1), step=1),
    "mask_positions": lambda c: hooks.mask_positions(0, 3),
    "mask_tokens": lambda c: hooks.mask_tokens("open"),
    "mask_tokens prompt": lambda c: hooks.mask_tokens("prompt", 9),
    "keep_only": lambda c: hooks.keep_only(2, window=4, ahead=3),
    "mask_random": lambda c: hooks.mask_random(like=hooks.mask_top_sinks(1), match="mass"),
    "scale_attention": lambda c: hooks.scale_attention("prompt", 0.5),
    "zero_value": lambda c: hooks.zero_value(0),
    "ablate": lambda c: hooks.ablate("resid", "open"),
    "ablate mean": lambda c: hooks.ablate("z", value=hooks.mean_activations(c.model, PROMPTS, "z", **c.settings)),
    "steer": lambda c: hooks.steer(torch.ones(32), positions="decided"),
    "splice": lambda c: hooks.splice(torch.tanh, schedule=(0.2, 1.0)),
    "ablate mean resid": lambda c: hooks.ablate(
        "resid", value=hooks.mean_activations(c.model, PROMPTS, "resid", **c.settings)),
    "patch_from": lambda c: hooks.patch_from(hooks.capture(c.model, PROMPTS, "resid", **c.settings), 0),
    "at_steps": lambda c: hooks.at_steps(hooks.mask_top_sinks(1), [0, 1]),
    "at_layers": lambda c: hooks.at_layers(hooks.mask_top_sinks(1), [-1]),
    "at_heads": lambda c: hooks.at_heads(hooks.mask_top_sinks(1), [1]),
    "at_progress": lambda c: hooks.at_progress(hooks.mask_top_sinks(1), (0.2, 0.8)),
    "at_encoder": lambda c: hooks.at_encoder(hooks.mask_positions(1)),
    "parse_hooks": lambda c: hooks.parse_hooks("at_steps(mask_tokens('open'), 0)")[0],
}  # fmt: skip

REDUCERS: dict[str, Callable[[Case], Any]] = {
    name: (lambda c, name=name, given=given: getattr(recording, name)(*given))
    for name, given in {
        "ReceivedAttention": (), "StaleAttention": (), "TopKeys": (3,), "WeightedValue": (), "AttentionEntropy": (),
        "AttentionPattern": (), "RegionMass": (), "ResidualNorm": (), "MassiveActivations": (), "UpdateNorm": (),
        "ValueNorm": (), "KeyNorm": (),
    }.items()
} | {
    "MixingBound": lambda c: probes.MixingBound(),
    "PatternSimilarity": lambda c: probes.PatternSimilarity(),
    "SinkMass": lambda c: probes.SinkMass(c.sinks),
}  # fmt: skip

FIGURES: dict[str, Callable[[Case], Any]] = {
    "viz.attention_heads": lambda c: viz.attention_heads(c.run, c.model, step=1, layer=1),
    "viz.attention_maps": lambda c: viz.attention_maps(c.model, c.run, steps=[0, 1], layer=1, head=0),
    "viz.attention_pattern": lambda c: viz.attention_pattern(c.run, c.model, step=1, layer=1, head=0),
    "viz.emerging_lines": lambda c: viz.emerging_lines(c.run),
    "viz.emerging_text": lambda c: viz.emerging_text(c.run),
    "viz.explore": lambda c: explored(c.model, c.run),
    "viz.incoming_attention": lambda c: viz.incoming_attention(c.received, layer=1, head=0),
    "viz.lens_table": lambda c: viz.lens_table(dl.logit_lens(c.model, c.run), step=1),
    "viz.received_tokens": lambda c: viz.received_tokens(c.received, layer=1, head=0),
    "viz.region_mass": lambda c: viz.region_mass(c.recording),
    "viz.report": lambda c: viz.report(c.recording, c.folder / "report.html"),
    "viz.row_blocks": lambda c: viz.row_blocks(c.run, 0),
    "viz.score_distribution": lambda c: viz.score_distribution(c.received),
    "viz.sink_positions": lambda c: viz.sink_positions(c.sinks),
    "viz.sink_positions_by_model": lambda c: viz.sink_positions_by_model(
        {"one": c.received}, dl.TopK(1), heads={"one": (1, 0)}
    ),
    "viz.sink_strength": lambda c: viz.sink_strength(c.received, dl.TopK(1)),
    "viz.sinks_over_eps": lambda c: viz.sinks_over_eps(c.received),
    "viz.value_norm_layers": lambda c: viz.value_norm_layers(dl.value_norms(c.recording, c.sinks, samples=50)),
    "viz.value_norm_scatter": lambda c: viz.value_norm_scatter(dl.value_norms(c.recording, c.sinks, samples=50)),
    "viz.value_weighted_pattern": lambda c: viz.value_weighted_pattern(c.run, c.model, step=1, layer=1, head=0),
}


def explored(model: Any, run: dl.DenoisingRun) -> Any:
    """What a reader of a run does first: choose a position, look at it, hide it."""
    explorer = viz.explore(model, run)
    explorer.select(step=1, position=1)
    explorer.lens()
    explorer.hide(1)
    assert explorer.twin is not None
    return explorer.comparison


CALLS: dict[str, Callable[[Case], Any]] = {
    **{
        f"hooks.{name}": (lambda c, m=make: dl.denoise(c.model, PROMPTS, hooks=[m(c)], **c.settings))
        for name, make in HOOKS.items()
    },
    **{f"replay {name}": (lambda c, m=make: dl.replay(c.model, c.run, [m(c)]).kl) for name, make in HOOKS.items()},
    **{
        f"recording.record {name}": (lambda c, m=make: dl.record(c.model, PROMPTS, [m(c)], **c.settings))
        for name, make in REDUCERS.items()
    },
    **{
        f"recording.rerun {name}": (lambda c, m=REDUCERS[name]: recording.rerun(c.model, c.run, [m(c)]))
        for name in ("AttentionPattern", "PatternSimilarity", "SinkMass", "WeightedValue")
    },
    **FIGURES,
    "hooks.capture": lambda c: hooks.capture(c.model, c.run, ["q", "k", "v", "z", "resid", "scores", "pattern"]),
    "hooks.capture encoder": lambda c: hooks.capture(c.model, c.run, "resid", encoder=True),
    "hooks.capture attn_out": lambda c: hooks.capture(c.model, c.run, "attn_out"),
    "hooks.mean_activations": lambda c: hooks.mean_activations(c.model, PROMPTS, "resid", **c.settings),
    "sampling.denoise quirks": lambda c: dl.denoise(c.model, PROMPTS, reference_quirks=True, **c.settings),
    "sampling.denoise cfg_scale": lambda c: dl.denoise(c.model, PROMPTS, cfg_scale=1.0, **c.settings),
    "sampling.denoise remasking": lambda c: dl.denoise(c.model, PROMPTS, remasking="random", **c.settings),
    "sampling.denoise cache": lambda c: dl.denoise(c.model, PROMPTS, cache="prefix", **c.settings),
    "sampling.denoise on_canvas": lambda c: dl.denoise(c.model, PROMPTS, on_canvas=lambda t, x: x, **c.settings),
    "sampling.denoise on_logits": lambda c: dl.denoise(c.model, PROMPTS, on_logits=lambda t, x, y: y, **c.settings),
    "sampling.compare": lambda c: dl.compare(c.model, PROMPTS, hooks=[hooks.mask_positions(0)], **c.settings),
    "probes.compare cache": lambda c: probes.compare(c.model, PROMPTS, cache="prefix", **c.settings),
    "sampling.log_likelihood": lambda c: dl.log_likelihood(c.model, PROMPTS, [[7, 8], [4, 6]]),
    "sampling.log_likelihood chain rule": lambda c: dl.log_likelihood(
        c.model, PROMPTS, [[7], [4]], method="chain_rule"
    ),
    "sampling.sampler_settings": lambda c: str(sampling.sampler_settings(c.model)),
    "sampling.generate_image_tokens": lambda c: sampling.generate_image_tokens(c.model, "w1"),
    "recording.record_forward": forward,
    "recording.record_batches": lambda c: recording.record_batches(
        c.model, [PROMPTS[:1], PROMPTS[1:]], [dl.ReceivedAttention()], **c.settings
    ),
    "recording.load": lambda c: dl.Recording.load(c.stored),
    "load": lambda c: dl.load(c.checkpoint),
    "bridge": lambda c: dl.bridge(c.model).denoise(PROMPTS, **c.settings),
    "DiffusionLM": trace,
    "add_hook_points": lambda c: dl.add_hook_points(c.model),
    "probes.sink_anatomy": lambda c: probes.sink_anatomy(c.model, c.run, dl.TopK(1), position=False),
    "probes.sink_anatomy position": lambda c: probes.sink_anatomy(c.model, c.run, dl.TopK(1)),
    "probes.retrieval_heads": lambda c: probes.retrieval_heads(c.model, c.run),
    "probes.channel_removal": lambda c: probes.channel_removal(c.model, c.run, controls=1),
    "probes.input_norms": lambda c: probes.input_norms(c.model, c.run),
    "probes.denoising_clock": lambda c: probes.denoising_clock(c.model, c.run),
    "probes.early_attention": lambda c: probes.early_attention(
        dl.record(c.model, PROMPTS, [dl.ReceivedAttention("block", min_viewers=1)], **c.settings)
    ),
    "probes.proposed_commitment": lambda c: probes.proposed_commitment(c.run),
    "probes.untrained_twin": lambda c: probes.untrained_twin(c.model),
    "recording.activations": lambda c: list(recording.activations(c.model, PROMPTS, 1, **c.settings)),
    "viz.commitment_map": lambda c: viz.commitment_map(probes.commitment(c.model, c.run)),
    "viz.sink_causes": lambda c: viz.sink_causes(probes.sink_anatomy(c.model, c.run, dl.TopK(1), position=False)),
    "probes.column_attribution": lambda c: probes.column_attribution(c.model, c.run, steps=[1]),
    "probes.activation_patching": lambda c: probes.activation_patching(c.model, c.run, corrupted(c), steps=[1]),
    "probes.attribution_patching": lambda c: probes.attribution_patching(c.model, c.run, corrupted(c), steps=[1]),
    "probes.token_effects": lambda c: probes.token_effects(c.model, c.run, 1, [2], candidates=1),
    "probes.missed_effects": lambda c: probes.missed_effects(
        c.model,
        c.run,
        corrupted(c),
        probes.attribution_patching(c.model, c.run, corrupted(c), steps=[1]),
        top=1,
        subsets=8,
    ),
    "probes.edge_attribution": lambda c: probes.edge_attribution(c.model, c.run, corrupted(c), steps=[1]),
    "probes.commitment": lambda c: probes.commitment(c.model, c.run),
    "probes.linear_probe": lambda c: probes.linear_probe(c.model, c.run, [0, 1]).table(),
    "probes.class_readability": lambda c: probes.class_readability(c.model, c.run).table(),
    "probes.decision_order": lambda c: probes.decision_order(c.run),
    "probes.logit_lens": lambda c: dl.logit_lens(c.model, c.run).table(),
    "probes.pattern_stability": lambda c: probes.pattern_stability(c.model, c.run, dl.TopK(1)),
    "probes.region_flow": lambda c: probes.region_flow(c.recording),
    "probes.remask": lambda c: probes.remask(c.model, PROMPTS, **c.settings),
    "probes.replay queries": lambda c: dl.replay(c.model, c.run, [hooks.mask_top_sinks(1)], queries="open"),
    "probes.serial_depth": lambda c: probes.serial_depth(c.model),
    "probes.sink_mechanism": lambda c: probes.sink_mechanism(c.model, PROMPTS, dl.TopK(1), **c.settings),
    "probes.sink_updates": lambda c: probes.sink_updates(c.model, c.run, c.sinks),
    "probes.sink_writes": lambda c: probes.sink_writes(c.model, c.run, c.sinks),
    "probes.token_smearing": lambda c: probes.token_smearing(c.model, c.run),
    "probes.train_tuned_lens": trained,
    "probes.value_norms": lambda c: dl.value_norms(c.recording, c.sinks, samples=50),
    "sinks.as_detector": lambda c: sinks.as_detector("top-k:2"),
    "sinks.compare_detectors": lambda c: sinks.compare_detectors(c.received, [dl.TopK(1), dl.AboveMean(1.0)]),
    "sinks.compare_query_classes": lambda c: sinks.compare_query_classes(
        dl.received_of(c.recording, "open"), dl.received_of(c.recording, "decided"), dl.TopK(1)
    ),
    "sinks.eps_sweep": lambda c: sinks.eps_sweep(c.received, [0.5, 1.0]),
    "sinks.find_sinks": lambda c: c.sinks.table(),
    "sinks.frontier_alignment": lambda c: sinks.frontier_alignment(c.paths),
    "sinks.key_statistic_of": lambda c: sinks.key_statistic_of(c.recording, "key norm"),
    "sinks.key_statistic_over_steps": lambda c: sinks.key_statistic_over_steps(c.model, c.run, "key norm"),
    "sinks.position_enrichment": lambda c: sinks.position_enrichment(c.paths),
    "sinks.position_or_token": lambda c: sinks.position_or_token(c.model, c.run),
    "sinks.received_of": lambda c: sinks.received_of(c.recording, "decided"),
    "sinks.received_of_split": lambda c: sinks.received_of_split(c.recording),
    "sinks.received_over_steps": lambda c: sinks.received_over_steps(c.model, c.run, queries="decided"),
    "sinks.sink_consistency": lambda c: sinks.sink_consistency(c.paths),
    "sinks.sink_profile": lambda c: sinks.sink_profile(c.received, dl.TopK(1)),
    "sinks.sink_rate": lambda c: sinks.sink_rate(c.sinks),
    "sinks.token_enrichment": lambda c: sinks.token_enrichment(c.paths),
    "sinks.trajectories": lambda c: c.paths.table() if hasattr(c.paths, "table") else c.paths,
    "training.LikelihoodBoundLoss": lambda c: training.LikelihoodBoundLoss().for_model(c.model, 2),
    "training.UniformDiffusionLoss": lambda c: training.UniformDiffusionLoss().for_model(c.model, 2),
    "training.MaskedDiffusionLoss": lambda c: training.MaskedDiffusionLoss().for_model(c.model, 2),
    "training.NextToken": lambda c: training.NextToken().for_model(c.model, 2),
    "training.evaluation_loss": lambda c: training.evaluation_loss(
        c.model, EXAMPLES, objective_of(c.model).for_model(c.model, 2), length=24
    ),
    "training.sink_statistics": lambda c: training.sink_statistics(
        c.model, training.probe_batch(EXAMPLES, objective_of(c.model).for_model(c.model, 2), Place)
    ),
    "training.MaskedDiffusionTrainer": lambda c: training.MaskedDiffusionTrainer(
        c.model,
        training.TrainingSettings(
            output=str(c.folder / "trained"),
            objective=objective_of(c.model),
            steps=1,
            batch_size=8,
            data=training.DataSettings(column="input_ids", length=24),
        ),
        train_dataset=[{"input_ids": example.tokens.tolist()} for example in EXAMPLES],
    ),
    "training.convert": lambda c: training.convert(str(c.checkpoint), mask_token_id=3),
    "training.build_model": lambda c: training.build_model(
        training.TrainingSettings(steps=1, model=training.ModelSettings(start=str(c.checkpoint)))
    ),
    "training.masked_loss": lambda c: training.masked_loss(
        c.model, torch.tensor([list(range(24))]), torch.tensor([20, 22]), torch.tensor([5, 6]), torch.ones(2)
    ),
    "evaluation.check_checkpoint": lambda c: list(evaluation.check_checkpoint(c.model, [TEXT], gen_length=8)),
    "evaluation.evaluate choice": lambda c: evaluation.evaluate(
        c.model, "toy_choice", limit=2, likelihood={"samples": 4}
    ),
    "evaluation.evaluate generate": lambda c: evaluation.evaluate(
        c.model, "toy_arithmetic", limit=2, generation={"gen_length": 16, "steps": 6}
    ),
    "cli record": lambda c: c.cli(
        "record",
        c.checkpoint,
        "--prompts",
        prompts(c),
        "--out",
        c.folder / "cli",
        "--steps",
        6,
        "--gen-length",
        16,
        "--reducers",
        "received,value-norm",
    ),
    "cli sinks": lambda c: c.cli("sinks", c.stored),
    "cli norms": lambda c: c.cli("norms", c.stored, "--detector", "top-k:1"),
    "cli lens": lambda c: c.cli("lens", c.stored, "--model", c.checkpoint, "--detector", "top-k:1"),
    "cli report": lambda c: c.cli("report", c.stored, "--out", c.folder / "r.html"),
    "cli plot": lambda c: c.cli("plot", "sink-positions", c.stored, "--out", c.folder / "p.png"),
    "cli plan": lambda c: c.cli("plan", c.checkpoint, "--gen-length", 16),
    "cli eval": lambda c: c.cli(
        "eval", c.checkpoint, "--tasks", "toy_choice", "--limit", 1, "--likelihood", "samples=4"
    ),
    "cli demo": lambda c: c.cli(
        "demo",
        c.checkpoint,
        "--prompt",
        "w1 w2 w3",
        "--out",
        c.folder / "demo",
        "--steps",
        6,
        "--gen-length",
        16,
    ),
}
