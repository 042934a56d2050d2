"""`denoise`: one call from a prompt to a finished canvas, for every family."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from dlm_lens.adapters import family_of
from dlm_lens.arguments import check_values, checked_arguments, one_of
from dlm_lens.attention import Hook, checked, exclusive
from dlm_lens.sampling.denoising_run import DenoisingRun, History
from dlm_lens.sampling.loop import OnCanvas, OnLogits, run_sampler
from dlm_lens.sampling.network import CanvasLogits, network_inputs
from dlm_lens.sampling.noise import RowNoise, SharedNoise
from dlm_lens.sampling.observers import HookRunner, NetworkObserver, Resumption, RunObserver
from dlm_lens.sampling.prompts import Prompts, read_prompts, warn_beyond_context
from dlm_lens.sampling.samplers.base import SpecialIds
from dlm_lens.sampling.samplers.causal import CausalSettings, decode
from dlm_lens.sampling.samplers.dream import DreamSampler, DreamSettings
from dlm_lens.sampling.samplers.llada import LLaDASampler, LLaDASettings
from dlm_lens.sampling.samplers.smdm import SMDMSampler, SMDMSettings
from dlm_lens.sampling.settings import (
    OBSERVERS,
    RESUME,
    answer_settings,
    block_settings,
    check_model,
    only_known,
    row_seeds,
)

ALGORITHMS: dict[str, tuple[type[Any], type[Any], Any]] = {
    "llada": (LLaDASettings, LLaDASampler, block_settings),
    "dream": (DreamSettings, DreamSampler, answer_settings),
    "smdm": (SMDMSettings, SMDMSampler, answer_settings),
}
"""Sampling algorithms: settings, sampler, and how the settings follow from defaults and arguments."""


@checked_arguments(logits=one_of("needed", "all"), observers=OBSERVERS, resume=RESUME)
@torch.no_grad()
@exclusive
def denoise(
    model: Any,
    prompt: Any,
    attention_mask: Any = None,
    *,
    steps: int | None = None,
    gen_length: int | None = None,
    block_length: int | None = None,
    temperature: float | None = None,
    cfg_scale: float | None = None,
    remasking: str | None = None,
    seed: int | list[int] | None = 0,
    logits: Literal["needed", "all"] = "needed",
    on_logits: OnLogits | None = None,
    on_canvas: OnCanvas | None = None,
    progress: bool = False,
    reference_quirks: bool = False,
    hooks: Sequence[Hook] = (),
    observers: RunObserver | Sequence[RunObserver] | None = None,
    resume: Resumption | None = None,
    **settings: Any,
) -> DenoisingRun:
    """Denoise prompts with the family's own sampler and keep what happened at every step.

    Prompts of unequal length are padded on the left, and each row is what it is alone: it has a random
    generator of its own, so `seed=3` gives every row the stream that it would have alone (identical prompts
    then give identical texts; pass a list of seeds to draw different ones). Mask tokens anywhere in the
    prompt are filled in too; `gen_length=0` fills in nothing else.

    Args:
        model: from `dlm_lens.load`.
        prompt: text, chat messages, token ids, or a list of any of them.
        attention_mask: for ids: 1 content, 0 padding on the left; it may go on over the answer.
        steps: denoising steps, a multiple of the number of blocks; one per token if only gen_length is given.
        gen_length: tokens of the answer.
        block_length: length of the blocks decoded from left to right; it divides gen_length.
        temperature: 0 takes the most likely token, above 0 samples.
        cfg_scale: classifier-free guidance, u + (cfg_scale + 1) (c - u); 0 for none.
        remasking: what decides which proposals are written: LLaDA "low_confidence" or "random"; Dream "origin",
            "maskgit_plus", "topk_margin" or "entropy"; SMDM "origin" or "greedy" (also as its code spells it).
        seed: one number, or one per row; None for a fresh number, which `settings["seeds"]` then tells.
        logits: evaluate the head only where the sampler needs it, or everywhere.
        on_logits: called as (step, canvas, logits [batch, position, d_vocab]) before they are used; for an AR
            model the logits are [batch, d_vocab] of the next token. Returns a replacement or None.
        on_canvas: called as (step, canvas) with the canvas that a step starts from, and with step = T for the
            finished one. Returns a replacement or None; whatever it masks again is filled again.
        progress: show a progress bar.
        reference_quirks: reproduce the authors' code to the number: one random stream for the batch (needs a
            single seed), [MASK] allowed as a proposal; LLaDA: block budgets fixed when a block starts (masks in
            the prompt compete for them and as many stay), EOS confidence kept at temperature > 0; MMaDA: those of
            the blocks, and padding seen as content under guidance; Dream: one budget averaged over the rows;
            SMDM: one budget and one ranking for the batch, noise drawn at temperature 0.
        hooks: interventions (`dlm_lens.hooks`), run at their sites in every forward pass and told of the step.
            Those that hide columns of attention need no pattern. An AR model then decodes without a cache, so that
            they act on every row of the prefix.
        observers: one or more objects that see every step (`dlm_lens.Recorder` is one).
        resume: the finished steps of an unfinished run with the same prompts and settings, to go on behind them.
        **settings: further settings of the family's sampler (LLaDA: logits_eos_inf, confidence_eos_eot_inf;
            MMaDA: eot_token, which ends a row behind the block that ends with it; Dream: top_p, top_k, alg_temp,
            eps; SMDM: eps; AR: use_cache).

    Raises:
        ValueError: a prompt or a setting that cannot work, before anything is computed.
        NonFiniteLogitsError: naming the step; its `partial` holds the steps before.
    """
    given = {
        "steps": steps,
        "gen_length": gen_length,
        "block_length": block_length,
        "temperature": temperature,
        "cfg_scale": cfg_scale,
        "remasking": remasking,
        **settings,
    }
    given = {name: value for name, value in given.items() if value is not None}
    check_model(model)
    check_values(model.sampler_defaults)
    hooks = checked(hooks)
    prompts = read_prompts(model, prompt, attention_mask)
    seeds = row_seeds(seed, len(prompts.ids))
    sampler = family_of(model.config.model_type).sampler_of(model.config)
    options: dict[str, Any] = {"on_logits": on_logits, "progress": progress, "resume": resume}
    observers = tuple(observers) if isinstance(observers, Sequence) else () if observers is None else (observers,)
    if sampler == "causal":
        if reference_quirks or on_canvas is not None:
            raise ValueError("an AR model has no reference quirks and no canvas to edit; leave these arguments out")
        watched = bool(hooks) or any(getattr(each, "whole_prefix", False) for each in observers)
        run, forward = _prepare_causal(model, prompts, given, seeds, watched)
    else:
        run = _prepare(model, prompts, sampler, given, seeds, reference_quirks)
        forward = run["network"].forward
        where = "masked" if reference_quirks and logits == "needed" else logits
        options |= {"logits": where, "on_canvas": on_canvas}
    run["history"].settings |= {"hooks": tuple(map(repr, hooks))} if hooks else {}
    with ExitStack() as stack:
        for each in observers:
            stack.callback(getattr(each, "close", lambda: None))
            if isinstance(each, NetworkObserver):
                each.use_network(forward)
        if hooks:
            observers += (stack.enter_context(HookRunner(model, hooks, forward, run["history"].settings)),)
        return (decode if sampler == "causal" else run_sampler)(**run, **options, observers=observers)


def _prepare(
    model: Any,
    prompts: Prompts,
    algorithm: str,
    given: Mapping[str, Any],
    seeds: tuple[int, ...],
    reference_quirks: bool,
) -> dict[str, Any]:
    """The parts of a run."""
    mask_id = model.config.mask_token_id
    holes = (prompts.ids == mask_id) & prompts.attention_mask
    settings_class, sampler_class, resolve = ALGORITHMS[algorithm]
    values = resolve(model.sampler_defaults, given, masks=int(holes.sum(-1).amax()))
    settings = only_known(settings_class, values, algorithm)
    if reference_quirks and len(set(seeds)) > 1:
        raise ValueError("reference_quirks has one random stream for the batch; give a single seed")
    warn_beyond_context(model, prompts.ids.shape[1] + settings.gen_length)
    answer = prompts.ids.new_full((len(prompts.ids), settings.gen_length), mask_id)
    canvas = torch.cat([prompts.ids, answer], 1)
    content = torch.cat([prompts.attention_mask, torch.ones_like(answer, dtype=torch.bool)], 1)
    ids = SpecialIds(mask_id, _first(model.config.eos_token_id), getattr(model.config, "eot_token_id", None))
    noise = SharedNoise(seeds[0]) if reference_quirks else RowNoise(seeds)

    def is_masked(canvas: Tensor) -> Tensor:
        return (canvas == mask_id) & (content | reference_quirks)

    sampler = sampler_class(settings, noise, ids, reference_quirks=reference_quirks)
    record = {"sampler": algorithm, **values, "seeds": seeds, "reference_quirks": reference_quirks}
    seen = torch.ones_like(content) if sampler.unpadded else content
    fixed = canvas != mask_id
    if sampler.hides_prompt:
        fixed = torch.arange(canvas.shape[1], device=canvas.device).expand_as(canvas) < prompts.ids.shape[1]
    return {
        "network": CanvasLogits(model, seen, cfg_scale=sampler.cfg_scale, fixed=fixed, mask_token_id=mask_id),
        "sampler": sampler,
        "canvas": canvas,
        "history": History(model, content, prompts.ids.shape[1], record),
        "is_masked": is_masked,
        "noise": noise,
    }


def _prepare_causal(
    model: Any, prompts: Prompts, given: dict[str, Any], seeds: tuple[int, ...], watched: bool
) -> tuple[dict[str, Any], Callable[[Tensor], Any]]:
    """The parts of an AR run, and a forward pass of its network."""
    values = {**model.sampler_defaults, **given}
    steps = values.pop("steps", None)
    if steps is not None and steps != values["gen_length"]:
        raise ValueError(
            f"an AR model takes one step per token, so steps ({steps}) must equal gen_length "
            f"({values['gen_length']}) or be left out"
        )
    if watched:
        if given.get("use_cache"):
            raise ValueError(
                "use_cache=True with hooks or a recorder: they have to see the whole prefix; leave use_cache out"
            )
        values["use_cache"] = False
    settings: CausalSettings = only_known(CausalSettings, values, "causal")
    shape = (len(prompts.ids), settings.gen_length)
    warn_beyond_context(model, prompts.ids.shape[1] + settings.gen_length)
    answer = torch.ones(shape, dtype=torch.bool, device=prompts.ids.device)
    padding = torch.cat([prompts.attention_mask, answer], 1)
    record = {"sampler": "causal", **values, "seeds": seeds}

    def forward(canvas: Tensor) -> Any:
        stop = int(canvas.shape[1])
        return model.get_decoder()(input_ids=canvas, **network_inputs(padding[:, :stop]))

    return {
        "model": model,
        "prompt": prompts.ids,
        "padding": padding,
        "settings": settings,
        "noise": RowNoise(seeds),
        "history": History(model, padding, prompts.ids.shape[1], record),
        "placeholder": _first(model.config.pad_token_id, model.config.eos_token_id, 0) or 0,
    }, forward


def _first(*ids: Any) -> int | None:
    for value in ids:
        if isinstance(value, list | tuple) and value:
            return int(value[0])
        if isinstance(value, int):
            return value
    return None
