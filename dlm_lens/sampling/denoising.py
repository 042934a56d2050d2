"""`denoise`: one call from a prompt to a finished canvas, for every family."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch

from dlm_lens.arguments import check_values, checked_arguments, one_of, rules_of
from dlm_lens.attention import Hook, HookLike, checked, exclusive, refuse_row_lists
from dlm_lens.sampling.algorithm_registry import Algorithm, algorithm_of, check_defaults
from dlm_lens.sampling.denoising_run import DenoisingRun
from dlm_lens.sampling.history import History
from dlm_lens.sampling.loop import OnCanvas, OnLogits, run_sampler
from dlm_lens.sampling.noise import RowNoise, SharedNoise
from dlm_lens.sampling.observers import HookRunner, Resumption, RunObserver, StepObserver
from dlm_lens.sampling.prompts import Prompts, read_prompts, warn_beyond_context, warn_untrained_blocks
from dlm_lens.sampling.run_checks import check_steps
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.settings import (
    OBSERVERS,
    RESUME,
    SpecialIds,
    check_model,
    listed_observers,
    only_known,
    row_seeds,
)


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
    hooks: Sequence[HookLike] = (),
    observers: RunObserver | Sequence[RunObserver] | None = None,
    resume: Resumption | None = None,
    **settings: Any,
) -> DenoisingRun:
    """Denoise prompts with the family's own sampler and keep every step.

    Prompts of unequal length are padded on the left. A row does not depend on its batch: it has a random generator
    of its own, so `seed=3` gives every row the same stream (identical prompts then give identical texts; pass a
    list of seeds to draw different ones). Mask tokens anywhere in the prompt are filled in too; `gen_length=0`
    fills in nothing else, in as many steps as the row with the most masks needs. Block diffusion, but for LLaDA2,
    WeDLM, SDLM and I-DLM, fills in only those in the block with which the answer begins; earlier ones stay. An AR
    model decodes one token per step.

    Args:
        model: from `dlm_lens.load`.
        prompt: text, chat messages, token ids, or a list of any of them.
        attention_mask: for ids: 1 content, 0 padding on the left; it may cover the answer too.
        steps: denoising steps, a multiple of the number of blocks; one per token if only gen_length is given.
        gen_length: tokens of the answer; DreamOn: how many more a gap may get than the prompt has masks there.
        block_length: length of the blocks decoded from left to right; it divides gen_length.
        temperature: 0 takes the most likely token, above 0 samples.
        cfg_scale: classifier-free guidance, u + (cfg_scale + 1) (c - u); 0 for none.
        remasking: the rule that chooses which positions are unmasked, by the name that the sampler has for it.
        seed: one number, or one per row; None for a fresh number, kept in the run's `settings["seeds"]`.
        logits: evaluate the head only where the sampler needs it, or everywhere.
        on_logits: called as (step, canvas, logits [batch, position, d_vocab]) before they are used; for an AR
            model the logits are [batch, d_vocab] of the next token. Returns a replacement or None.
        on_canvas: called as (step, canvas) with the canvas that a step starts from, and with step = T for the
            finished one. Returns a replacement or None; positions that it masks again are filled in again. For a
            model without a mask token it changes tokens, and what is open stays open (the random first canvas is
            planted so, at step 0).
        progress: show a progress bar.
        reference_quirks: reproduce the authors' code to the number: one random stream for the batch (needs a single
            seed), [MASK] allowed as a proposal, equal confidences ranked by `torch.topk`, thresholds rounded to the
            dtype of the logits where theirs compare such confidences. What else it reproduces of a family is on the
            family's page in docs/families.
        hooks: interventions (`dlm_lens.hooks`), run at their sites in every forward pass with the step as context.
            Those that hide columns of attention need no pattern. An AR model then decodes without a cache, so that
            they act on every row of the prefix. A call on the model in a callback, such as another `denoise` in
            `on_canvas`, is without them, and recorders leave it out.
        observers: one or more `RunObserver`s, whose methods are called at every step (`dlm_lens.Recorder` is one).
        resume: the finished steps of an unfinished run with the same prompts and settings; the run continues after
            them.
        **settings: further settings of the family's sampler, which `print(dlm_lens.sampler_settings(model))` lists
            with their meanings; what is None is as the checkpoint has it.

    Returns:
        A `DenoisingRun`. Its `confidence` [step, batch, position] is the number by which the sampler ranks, -inf
        where a position is not eligible: what it is says `dlm_lens.sampler_settings(model).confidence`.

    Raises:
        ValueError: a prompt or a setting that cannot work, before anything is computed.
        NonFiniteLogitsError: naming the step; its `partial` holds the steps before.
    """
    given: dict[str, Any] = {"steps": steps, "gen_length": gen_length, "block_length": block_length}
    given |= {"temperature": temperature, "cfg_scale": cfg_scale, "remasking": remasking, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    check_model(model)
    hooks = checked(hooks)
    prompts = read_prompts(model, prompt, attention_mask)
    seeds = row_seeds(seed, len(prompts.ids))
    algorithm = algorithm_of(model.config)
    observers = listed_observers(observers)
    _check_use(algorithm, reference_quirks, on_canvas)
    if algorithm.sampler.autoregressive:
        logits = "needed"
    whole = bool(hooks) or any(observer.whole_prefix for observer in observers)
    given = _seeing_all(algorithm, given, whole_prefix=whole, watched=bool(hooks or observers))
    run = prepared_run(model, prompts, algorithm, given, seeds, reference_quirks)
    history, forward = run["history"], run["network"].forward
    history.settings |= {"hooks": tuple(map(repr, hooks))} if hooks else {}
    _check_steps(run, [*hooks, *(hook for observer in observers for hook in observer.step_hooks)])
    with ExitStack() as stack:
        for observer in observers:
            stack.callback(observer.close)
            observer.use_network(forward)
        if hooks:
            observers += (stack.enter_context(HookRunner(model, hooks, forward, history.settings)),)
        return run_sampler(
            **run,
            logits="masked" if reference_quirks and logits == "needed" else logits,
            on_logits=on_logits,
            on_canvas=on_canvas,
            progress=progress,
            observers=observers,
            resume=resume,
        )


@torch.no_grad()
def check_recorded_run(
    model: Any,
    ids: Sequence[Sequence[int]],
    hooks: Sequence[HookLike],
    *,
    reference_quirks: bool = False,
    **settings: Any,
) -> None:
    """Refuse what `denoise` with a recorder would refuse before its first pass; nothing is computed.

    Args:
        model: from `dlm_lens.load`.
        ids: token ids of every prompt.
        hooks: interventions.
        reference_quirks: as for `denoise`.
        **settings: of `denoise`; those that concern no canvas are not looked at.

    Raises:
        ValueError: a prompt, a setting or a hook that cannot work.
    """
    away = ("on_canvas", "on_logits", "logits", "progress")
    given = {name: value for name, value in settings.items() if value is not None and name not in away}
    algorithm = algorithm_of(model.config)
    given = _seeing_all(algorithm, given, whole_prefix=True, watched=True)
    # The run itself warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prompts = read_prompts(model, ids)
        run = prepared_run(model, prompts, algorithm, given, (0,) * len(ids), reference_quirks)
    sampler, canvas, history = run["sampler"], run["canvas"], run["history"]
    plan = sampler.plans(history.prompt_length, canvas.shape[1])[0]
    runner = HookRunner(model, hooks, run["network"].forward)
    refuse_row_lists(
        [hook for hook in runner.hooks if hook.row_count != len(canvas)],
        f"the run has {len(canvas)}; give a list for each row",
    )
    first = StepObserver(model)
    first.start(sampler, history.attention_mask)
    first.step(plan, canvas, sampler.open_positions(canvas, plan.index))
    assert first.now is not None
    for hook in runner.hooks:
        hook.check_run(first.now.for_rows(len(canvas) * sampler.halves))
    _check_steps(run, runner.hooks)


def _check_steps(run: Mapping[str, Any], hooks: Sequence[Hook]) -> None:
    """Refuse hooks that lack what they need at a step, where no token can end the run before it."""
    sampler, history = run["sampler"], run["history"]
    ends = sampler.autoregressive or sampler.ends_rows(history.settings)
    if ends or sampler.adaptive or sampler.rows_wait(history.settings):
        return
    total = len(sampler.plans(history.prompt_length, run["canvas"].shape[1])) if hooks else 0
    check_steps(hooks, range(total), total)


def _seeing_all(
    algorithm: Algorithm, given: Mapping[str, Any], *, whole_prefix: bool, watched: bool
) -> dict[str, Any]:
    """The settings of a run, without a cache where hooks or observers have to see what it keeps.

    Args:
        algorithm: of the run.
        given: the settings.
        whole_prefix: whether something sees the whole prefix in AR decoding.
        watched: whether there are hooks or observers.

    Raises:
        ValueError: a cache is on (use_cache=True).
    """
    if algorithm.sampler.autoregressive:
        return _without_cache(given) if whole_prefix else dict(given)
    grows = algorithm.sampler.grows and hasattr(algorithm.settings, "use_cache")
    return _without_cache(given) if grows and watched else dict(given)


def _check_use(algorithm: Algorithm, reference_quirks: bool, on_canvas: OnCanvas | None) -> None:
    """Raise if the algorithm does not take these arguments of `denoise`.

    Raises:
        ValueError: naming them.
    """
    if algorithm.sampler.autoregressive and (reference_quirks or on_canvas is not None):
        raise ValueError("an AR model has no reference quirks and no canvas to edit; leave these arguments out")
    if reference_quirks and not algorithm.sampler.has_quirks:
        raise ValueError(f"the {algorithm.name} sampler has no reference quirks; leave reference_quirks out")


def _without_cache(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("use_cache"):
        raise ValueError(
            "use_cache=True with hooks or a recorder: they have to see the whole prefix; leave use_cache out"
        )
    return {**given, "use_cache": False}


def prepared_run(
    model: Any,
    prompts: Prompts,
    algorithm: Algorithm,
    given: Mapping[str, Any],
    seeds: tuple[int, ...],
    reference_quirks: bool,
) -> dict[str, Any]:
    """The parts of a run, by the names of `run_sampler`'s arguments."""
    ids, width = SpecialIds.of(model.config), prompts.ids.shape[1]
    in_prompt = (prompts.ids == ids.mask) & prompts.attention_mask if ids.mask is not None else None
    holes = 0 if in_prompt is None else int(in_prompt.sum(-1).amax())
    check_defaults(algorithm, model.config)
    check_values({**model.sampler_defaults, **given}, rules_of(algorithm.settings))
    values = algorithm.resolved(model.sampler_defaults, given, holes)
    settings = only_known(algorithm.settings, values, algorithm.name)
    if reference_quirks and len(set(seeds)) > 1:
        raise ValueError("reference_quirks has one random stream for the batch; give a single seed")
    if algorithm.sampler.grows and not algorithm.sampler.any_block_length:
        most = None if algorithm.sampler.from_text or algorithm.sampler.whole_blocks else settings.gen_length
        warn_untrained_blocks(model, settings.block_length or settings.gen_length, most)
    noise = SharedNoise(seeds[0]) if reference_quirks else RowNoise(seeds)
    sampler = algorithm.sampler(settings, noise, ids, reference_quirks=reference_quirks)
    length = sampler.answer_length(prompts.attention_mask, settings.gen_length)
    warn_beyond_context(model, width + length)
    content = prompts.attention_mask
    content = torch.cat([content, content.new_ones(len(content), length)], 1)
    sampler.attention = sampler.attention_of(values, content, width)
    canvas = sampler.begin(model, prompts.ids, content | reference_quirks)
    record = {"sampler": algorithm.name, **values, "seeds": seeds}
    record |= {"reference_quirks": reference_quirks} if sampler.has_quirks else {}
    return {
        "network": sampler.network(model, FirstCanvas(canvas, content, sampler.open_positions(canvas, 0), width)),
        "sampler": sampler,
        "canvas": canvas,
        "history": History(model, content, width, record),
        "noise": noise,
    }
