"""`sink_mechanism`: mask the sinks and see which positions lose confidence and are written later."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.attention import Hook, exclusive
from dlm_lens.hooks import mask_random, mask_sinks
from dlm_lens.probes.mechanism_result import SinkMechanism
from dlm_lens.probes.recalling import record_run
from dlm_lens.probes.replaying import replay
from dlm_lens.probes.sink_mass import SinkMass
from dlm_lens.recording import ReceivedAttention
from dlm_lens.sampling import Comparison, Denoised, denoise
from dlm_lens.sinks import Detector, find_sinks


@exclusive
def sink_mechanism(
    model: Any,
    prompts: Any,
    detector: Detector,
    *,
    per: str = "head",
    controls: Sequence[int] = (0, 1, 2),
    seed: int | list[int] = 0,
    **settings: Any,
) -> SinkMechanism:
    """Test the mechanism that 2510.15731, section 5.2, proposes for the robustness of DLMs to masked sinks.

    "When a sink is masked, the model likely becomes less confident about those tokens that are highly affected by
    the sink, and therefore [does] not consider them for unmasking." Two questions: on the canvases of a run without
    hooks, does masking its sinks lower the confidence of positions that attended to them more than of others? And
    in a run of its own with sinks masked, are those positions written later? Each beside a control that masks as
    many random columns (`mask_random`), from the same sampling seed.

    Args:
        model: a DLM from `dlm_lens.load`.
        prompts: as for `dlm_lens.denoise`; intervals draw prompts, so give several.
        detector: what a sink is; an attention detector.
        per: "head", or "layer" for the head-mean pattern.
        controls: seeds of the random columns; the controls are averaged.
        seed: of the sampling.
        **settings: of `dlm_lens.denoise`: steps, gen_length, block_length, temperature, ...

    Raises:
        ValueError: an AR model, whose order of writing is fixed, no control, another `per`, or no sink.
    """
    if family_of(model.config.model_type).causal:
        raise ValueError("an AR model writes from left to right whatever is masked; sink_mechanism takes a DLM")
    if per not in ("head", "layer") or not len(controls):
        raise ValueError(
            f"sink_mechanism(per={per!r}, controls={controls!r}): per is 'head' or 'layer', one control at least"
        )
    plain = denoise(model, prompts, seed=seed, **settings)
    rec = record_run(model, plain, [ReceivedAttention()])
    sinks = find_sinks(rec, detector, level=per)  # type: ignore[arg-type]
    if not bool(sinks.is_sink.any()):
        raise ValueError(f"there is no sink by {sinks.rule}; lower the threshold")
    mass = record_run(model, plain, [SinkMass(sinks)]).sink_mass
    known = mask_sinks(source=sinks, per=per)  # type: ignore[arg-type]
    own = mask_sinks(detector, per=per)  # type: ignore[arg-type]

    def replayed(hook: Hook) -> Tensor:
        return replay(model, plain, [hook], attention=False).confidence_change

    def compared(hook: Hook) -> Comparison:
        return Comparison(plain, denoise(model, prompts, seed=seed, hooks=[hook], **settings), (repr(hook),))

    with_sinks = compared(own)
    others = [compared(mask_random(like=own, seed=s)) for s in controls]
    return SinkMechanism(
        run=plain,
        dependence=mass.mean((2, 3)),
        asked=_asked(plain),
        confidence=replayed(known),
        confidence_control=torch.stack([replayed(mask_random(like=known, seed=s)) for s in controls]).mean(0),
        later=with_sinks.step_change,
        later_control=torch.stack([other.step_change for other in others]).mean(0),
        tokens_changed=torch.stack([with_sinks.tokens_changed.float(), _mean_changed(others)]),
        rule=sinks.rule,
        controls=tuple(controls),
    )


def _asked(run: Denoised) -> Tensor:
    return run.masked[:-1] & run.attention_mask


def _mean_changed(runs: Sequence[Comparison]) -> Tensor:
    return torch.stack([run.tokens_changed.float() for run in runs]).mean(0)
