"""Every public function on models of random tokens: it works, or refuses in one sentence before any work."""

import inspect
import re

import matplotlib.pyplot as plt
import pytest

from dlm_lens import evaluation, hooks, probes, recording, sampling, sinks, training, viz
from tests.model_calls import CALLS, Case

FAMILIES = ("diffusion_gemma", "uniform_qwen", "duo", "udlm", "sumi", "gidd", "gidd_dit")
ROOMS = {"hooks": hooks, "probes": probes, "recording": recording, "sampling": sampling, "sinks": sinks, "viz": viz,
         "evaluation": evaluation, "training": training}  # fmt: skip


NO_MASK = "has no mask token"
NO_SETTING = "has no setting"
GROWS = "the run's canvas grows from 16 to 24 positions"
NO_LIKELIHOOD = "is a model of uniform noise: its open positions hold random tokens instead of masks"
WIDTHS = "the heads of DiffusionGemmaLM's layers differ in width"
NOT_TRAINED = "is not trained here: it predicts its canvas alone, after an encoder"
NO_EDGES = "has an encoder, through which a prompt acts outside the edges of one stack"
NOT_WHOLE = "and DiffusionGemmaLM has its prompt in an encoder of its own"
KEYS = "the canvas of DiffusionGemmaLM reads the prompt's keys from its encoder"
NO_ENCODER = " has no encoder"
ENCODERLESS = dict.fromkeys(("hooks.at_encoder", "replay at_encoder", "hooks.capture encoder"), NO_ENCODER)
NO_BRIDGE = "takes the layouts of Llama, Qwen2, Qwen3 and GPT-2"
OTHERS_ONLY = "counts the token that a position holds beside the prediction"
CAPPED = "computes more than softmax(q k^T scale) v (a soft cap"
WITH_MASKS = "ForDiffusion is a model of uniform noise without one"
HAS_MASK = "is no model of uniform noise (it has a mask token, or is autoregressive)"
BOUND_ONLY = "has no mask token; train it with LikelihoodBoundLoss"
SEES_TARGETS = "is not causal, so that it sees the tokens that NextToken has it predict"
SEEDED = "the result depends on the seed"
LIKELIHOODS = dict.fromkeys(
    ("sampling.log_likelihood", "sampling.log_likelihood chain rule", "evaluation.evaluate choice", "cli eval"),
    NO_LIKELIHOOD,
)

DUO = {
    **ENCODERLESS, "bridge": NO_BRIDGE, "sampling.log_likelihood chain rule": WITH_MASKS,
    "probes.train_tuned_lens": "a tuned lens is trained without one",
    "probes.edge_attribution": "DiTLayer has a norm or a gate between the heads and the residual stream",
    "training.UniformDiffusionLoss": OTHERS_ONLY, "training.MaskedDiffusionLoss": BOUND_ONLY,
    "training.NextToken": SEES_TARGETS,
}  # fmt: skip

REFUSED: dict[str, dict[str, str]] = {
    "duo": DUO,
    "udlm": DUO,
    "sumi": {
        **ENCODERLESS, "sampling.log_likelihood chain rule": WITH_MASKS,
        "sampling.denoise remasking": "remasking 'random' is none of Sumi's",
        "training.UniformDiffusionLoss": OTHERS_ONLY, "training.MaskedDiffusionLoss": BOUND_ONLY,
        "training.NextToken": SEES_TARGETS,
    },
    "gidd": {
        **ENCODERLESS, "bridge": NO_BRIDGE, "sampling.log_likelihood chain rule": WITH_MASKS,
        "probes.input_norms": "has 1 learned sink tokens beside it",
        "probes.column_attribution": CAPPED,
        "probes.edge_attribution": "GiddLayer has a norm or a gate between the heads and the residual stream",
        "sampling.denoise remasking": "remasking 'random' is none of GIDD's",
        "training.UniformDiffusionLoss": OTHERS_ONLY, "training.MaskedDiffusionLoss": BOUND_ONLY,
        "training.NextToken": SEES_TARGETS,
    },
    "gidd_dit": {  # it has a mask token, and draws beside it
        **ENCODERLESS, "bridge": NO_BRIDGE, "sampling.denoise quirks": "corrects one text after the other",
        "probes.train_tuned_lens": "a tuned lens is trained without one",
        "probes.edge_attribution": "DiTLayer has a norm or a gate between the heads and the residual stream",
        "probes.remask": SEEDED,
        "training.UniformDiffusionLoss": HAS_MASK, "training.NextToken": SEES_TARGETS,
    },
    "diffusion_gemma": {
        **LIKELIHOODS,
        "hooks.ablate mean": WIDTHS, "replay ablate mean": WIDTHS,
        "recording.record PatternSimilarity": GROWS, "recording.rerun PatternSimilarity": GROWS,
        "probes.pattern_stability": GROWS,
        "probes.edge_attribution": NO_EDGES, "probes.input_norms": NOT_WHOLE,
        "probes.sink_anatomy position": KEYS,
        "bridge": NO_BRIDGE,
        "training.UniformDiffusionLoss": NOT_TRAINED, "training.NextToken": NOT_TRAINED,
        "training.evaluation_loss": NOT_TRAINED, "training.sink_statistics": NOT_TRAINED,
        "training.MaskedDiffusionTrainer": NOT_TRAINED, "training.masked_loss": NOT_TRAINED,
        "training.MaskedDiffusionLoss": NOT_TRAINED, "training.LikelihoodBoundLoss": NOT_TRAINED,
    },
    "uniform_qwen": {
        **LIKELIHOODS,
        **ENCODERLESS, "sampling.denoise quirks": "has no reference quirks",
        "training.MaskedDiffusionLoss": "has no mask token; train it with UniformDiffusionLoss",
        "training.NextToken": SEES_TARGETS,
        "training.LikelihoodBoundLoss": "has no bound on the likelihood with random tokens",
    },
}  # fmt: skip
"""What a family does not take, with words of the sentence."""

REFUSED_BY_ALL = {
    "sampling.denoise cfg_scale": NO_SETTING, "sampling.denoise remasking": NO_SETTING,
    "sampling.denoise cache": NO_SETTING, "probes.compare cache": NO_SETTING,
    "sampling.generate_image_tokens": "draws no images", "probes.remask": NO_MASK,
    "probes.proposed_commitment": "holds random tokens at open positions",
    "training.convert": "an AR checkpoint of qwen2 or llama can be converted",
}  # fmt: skip

QUICK = (
    "hooks.mask_positions",
    "hooks.at_encoder",
    "recording.record_forward",
    "probes.remask",
    "training.NextToken",
)
"""The others take a minute of one core together."""

OF_RESULTS = (
    "viz.emerging_lines", "viz.emerging_text", "viz.incoming_attention", "viz.received_tokens", "viz.region_mass",
    "viz.report", "viz.row_blocks", "viz.score_distribution", "viz.sink_positions", "viz.sink_positions_by_model",
    "viz.sink_strength", "viz.sinks_over_eps", "viz.value_norm_layers", "viz.value_norm_scatter",
    "sinks.compare_detectors", "sinks.eps_sweep", "sinks.frontier_alignment", "sinks.position_enrichment",
    "sinks.sink_consistency", "sinks.sink_profile", "sinks.sink_rate", "sinks.token_enrichment",
    "probes.value_norms", "cli sinks", "cli norms", "cli report", "cli plot",
)  # fmt: skip
"""Calls that read a run or a recording and run no model."""


def calls_of(family: str) -> list[str]:
    """All calls; those of `OF_RESULTS` by DiffusionGemma, whose canvas grows, and by two of the others in turn.

    The others leave runs and recordings of one kind, whose canvas has one length.
    """
    others = FAMILIES.index(family) - 1
    left = {name for index, name in enumerate(OF_RESULTS) if others >= 0 and (index - others) % 3}
    return [name for name in CALLS if name not in left]


LEFT_OUT = {
    # In the hooks above and tests/hooks; the others need a sparse autoencoder, a clock or a commitment.
    "hooks": {
        "sink", "attach_hooks", "parse_hooks", "ablate_features", "reconstruct", "scale_features", "steer_along",
        "steer_feature", "until_committed",
    },
    "recording": {"record", "write_activations"},  # every reducer by itself; `activations`
    "sampling": {"collecting_columns"},
    "probes": {  # every hook by itself; those that need what another probe here returns
        "replay", "circuit_overlap", "clock_steering", "faithfulness", "insertion_loss", "pruned", "read_clock",
        "shift_clock", "sink_weights",
    },
    "evaluation": {"find_preset", "list_presets", "shipped_tasks"},  # take no model
    "training": {"plan", "read_settings", "shipped_configs", "weighted_cross_entropy", "probe_batch"},
    "sinks": {"received_from_pattern"},
    # Of a training's log, and of results of probes.
    "viz": {
        "sink_emergence", "clock_scores", "early_recall", "feature_rates", "insertion_by_step", "sink_discount",
    },
}  # fmt: skip
"""Public functions that take no model, run or recording of one, or that other names here stand for."""


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_every_public_function_of_a_model_is_called() -> None:
    for room, module in ROOMS.items():
        functions = {name: getattr(module, name) for name in dir(module) if name.islower()}
        names = {
            name
            for name, function in functions.items()
            if inspect.isfunction(function) and "model" in inspect.signature(function).parameters
        }
        called = {name.split(".")[1].split()[0] for name in CALLS if name.startswith(f"{room}.")}
        assert names - called <= LEFT_OUT.get(room, set()), f"{room}: add a call to CALLS, or a reason to LEFT_OUT"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(family, name, marks=() if name in QUICK else pytest.mark.long)
        for family in FAMILIES
        for name in calls_of(family)
    ],
    indirect=["case"],
)
def test_a_call_works_or_says_in_a_sentence_why_not(case: Case, name: str) -> None:
    why = {**REFUSED_BY_ALL, **REFUSED[case.family]}.get(name)
    try:
        if why is None:
            CALLS[name](case)
        else:
            _ = case.run, case.recording
            passes: list[int] = []
            handle = case.model.get_decoder().register_forward_pre_hook(lambda *_: passes.append(1))
            with pytest.raises(ValueError, match=re.escape(why)) as raised:
                CALLS[name](case)
            handle.remove()
            assert "\n" not in str(raised.value)
            # A reducer learns of the run at its first step; reruns condition every step before; two seeds are run;
            # what a layer computes is in the inputs of its attention.
            most = dict.fromkeys((GROWS, NO_EDGES, NOT_WHOLE, CAPPED), 2 + case.run.steps)
            assert len(passes) <= (most | {SEEDED: 2 * case.run.steps}).get(why, 0)
    finally:
        plt.close("all")
