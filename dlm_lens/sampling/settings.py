"""Settings of a run: the caller's, then the checkpoint's, then the family's; the checks that samplers share.

`SpecialIds` are the token ids that samplers and results treat specially: [MASK], the ends of a text and of a turn.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dlm_lens.arguments import Rule, is_seed, listed_indices, near_name
from dlm_lens.printable import shown

LIKELIHOOD_METHODS = ("mc", "chain_rule", "greedy_completion")
"""What `log_likelihood(method=)` takes; here, since a command line names them before torch is imported."""

ELSEWHERE = {
    "accept_threshold": ("threshold",),
    "alg": ("remasking",),
    "anchor_eosbos": ("delimiter",),
    "block_add_threshold": ("add_block_threshold",),
    "block_size": ("block_length",),
    "buffer_size": ("running_blocks",),
    "confidence_threshold": ("threshold",),
    "decoded_token_threshold": ("semi_complete_threshold",),
    "denoising_steps": ("steps_per_block",),
    "diffusion_steps": ("steps",),
    "early_stopping": ("correction_stops",),
    "early_stopping_patience": ("correction_patience",),
    "edit_threshold": ("editing_threshold",),
    "eb_gamma": ("entropy_bound",),
    "eb_threshold": ("entropy_bound",),
    "eos_id": ("stop_tokens",),
    "gen_block_size": ("stride",),
    "guidance_scale": ("cfg_scale",),
    "logits_temp": ("temperature",),
    "max_gen_length": ("gen_length",),
    "max_new_tokens": ("gen_length",),
    "max_post_edit_steps": ("max_post_steps",),
    "max_tokens": ("gen_length",),
    "n_future_tokens": ("window_length",),
    "noise_schedule": ("schedule",),
    "min_gen_len": ("start_length",),
    "num_denoising_steps": ("steps",),
    "num_diffusion_steps": ("steps",),
    "num_inference_steps": ("steps",),
    "num_steps": ("steps", "steps_per_block"),
    "number_transfer_tokens": ("tokens_per_step",),
    "p_nucleus": ("top_p",),
    "pad_delete_to_right": ("delete_to_right",),
    "pad_eos_to_right": ("delete_to_right",),
    "remasking_strategy": ("remasking",),
    "sampling_method": ("remasking",),
    "skip_threshold": ("threshold",),
    "small_block_size": ("sub_block_length",),
    "stopping_criteria_idx": ("stop_tokens",),
    "t0": ("correction_time",),
    "t_eps": ("eps",),
    "threshold": ("entropy_threshold",),
    "timesteps": ("steps",),
    "topp_temp": ("top_p",),
    "wedlm_pos_penalty_factor": ("position_penalty",),
    "wedlm_window_size": ("window_length",),
}
"""The name of a setting in the authors' samplers and in transformers -> its names here.

Of several it is the last that a sampler has: BD3-LM's `num_steps` are those of a block, MDLM's and Duo's are all.
"""


ARGUMENTS = {
    "fwd_hooks": "an argument of dlm_lens.bridge(model).denoise",
    "heads": "at_heads(hook, heads)",
    "layers": "at_layers(hook, layers)",
    "sampler": "an argument of dlm_lens.load",
}
"""What users give a run as if it were a setting -> what it is here."""


def log_snr_bounds(settings: Any) -> None:
    """Check `min_log_snr` and `max_log_snr` of settings, or of a config.

    Raises:
        ValueError: the first is not the less.
    """
    least, most = settings.min_log_snr, settings.max_log_snr
    if not least < most:
        raise ValueError(f"min_log_snr is {least} and max_log_snr {most}; the first must be the less")


def check_blocks(settings: Any) -> None:
    """Check that the answer of settings is whole blocks, with as many steps each; without `block_length` one block.

    Raises:
        ValueError: it is not.
    """
    length, block, blocks = settings.gen_length, settings.block_length, settings.blocks
    if length % (block or 1):
        raise ValueError(
            f"gen_length {length} does not divide into blocks of block_length {block}; choose a block_length that "
            "divides it"
        )
    if settings.steps % blocks:
        raise ValueError(
            f"{settings.steps} steps do not divide into {blocks} blocks (gen_length {length} / block_length "
            f"{block}); choose steps as a multiple of {blocks}"
        )


def known_elsewhere(names: Collection[str]) -> dict[str, str]:
    """Names that others give to these settings -> the names here."""
    return {old: new for old, several in ELSEWHERE.items() for new in several if new in names}


def answer_settings(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of a sampler without blocks; `masks` is the number of masks in the prompt.

    With `gen_length` but no `steps`, as many steps as tokens. `gen_length=0` fills the prompt's masks alone.

    Raises:
        ValueError: there is no position to fill in.
    """
    values = {**defaults, **given}
    length = values["gen_length"]
    if length < 0 or (length == 0 and masks == 0):
        without = "" if masks else " and the prompt holds no mask token"
        other = "0 for the prompt's mask tokens alone" if masks else "put mask tokens where text is to be filled in"
        raise ValueError(
            f"gen_length is {length}{without}: nothing to write; give gen_length of at least 1, or {other}"
        )
    if "steps" not in given and ("gen_length" in given or length == 0):
        values["steps"] = length or masks
    return values


def random_settings(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of a sampler that has no masks: with `gen_length` but no `steps`, as many steps as tokens."""
    values = {**defaults, **given}
    return values | ({"steps": values["gen_length"]} if "gen_length" in given and "steps" not in given else {})


def block_settings(defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int) -> dict[str, Any]:
    """Settings of a block-wise sampler: those of `answer_settings`, and blocks.

    The default `block_length` holds where it divides the answer and the steps, otherwise the answer is one block.

    Raises:
        ValueError: there is no position to fill in.
    """
    values = answer_settings(defaults, given, masks)
    length = values["gen_length"]
    if length == 0:
        return values | {"block_length": 1}
    if "block_length" not in given:
        block = min(values["block_length"], length)
        fits = block > 0 and length % block == 0 and values["steps"] % (length // block) == 0
        values["block_length"] = block if fits else length
    return values


def with_token_ids(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """The settings with these, where they are given, as tuples of Python's numbers; one id is a list of it."""
    given = {name: values[name] for name in names if values.get(name) is not None}
    return values | {name: listed_indices(name.removesuffix("s"), ids) for name, ids in given.items()}


def check_known(kind: type[Any], values: Mapping[str, Any], family: str) -> None:
    """Raise unless the settings class `kind` has fields of these names.

    Raises:
        ValueError: a setting that this family's sampler does not have.
    """
    names = [field.name for field in fields(kind)]
    for name in values:
        if name not in names:
            hint = near_name(name, names, known_elsewhere(names) | ARGUMENTS)
            if name == "cache":
                own = "; use_cache is the setting of this one" if "use_cache" in names else ""
                hint = f" (approximate caches are for the samplers of LLaDA and Dream{own})"
            raise ValueError(f"the {family} sampler has no setting {name!r}{hint}; it has {', '.join(names)}")


def only_known(kind: type[Any], values: Mapping[str, Any], family: str) -> Any:
    """Build the settings class `kind` from `values`.

    Raises:
        ValueError: a setting that this family's sampler does not have.
    """
    check_known(kind, values, family)
    return kind(**values)


def of_run(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Build the settings class `kind` from the settings of a finished run, which hold others beside them."""
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


def row_seeds(seed: Any, rows: int) -> tuple[int, ...]:
    """One seed per row; a single number serves every row, so that a row is what it is alone.

    None draws a number from torch's global generator; the run's record holds it.

    Raises:
        ValueError: something else than whole numbers, or not as many as rows.
    """
    if seed is None:
        import torch  # here, because the checks of this file must not import it

        seed = int(torch.randint(2**31, ()))
    if is_seed(seed):
        return (int(seed),) * rows
    if not isinstance(seed, list | tuple) or not all(map(is_seed, seed)):
        raise ValueError(
            f"seed is {shown(seed)}; give a whole number, or a list with one per prompt, from -2^63 to 2^64 - 1"
        )
    if len(seed) != rows:
        raise ValueError(f"{len(seed)} seeds for {rows} prompts; give one number, or one per prompt")
    return tuple(int(one) for one in seed)


def _observes(value: Any) -> bool:
    from dlm_lens.sampling.observers import RunObserver  # needs torch, which the other checks do not

    observers = value if isinstance(value, Sequence) else (value,)
    return all(isinstance(observer, RunObserver) for observer in observers)


def listed_observers(observers: Any) -> tuple[Any, ...]:
    """The observers of a call, which may be several, one, or None for none.

    Raises:
        ValueError: something else.
    """
    if observers is None:
        return ()
    OBSERVERS.check("observers", observers)
    return tuple(observers) if isinstance(observers, Sequence) else (observers,)


OBSERVERS = Rule("a RunObserver, such as dlm_lens.Recorder(model, ...), or a list of them", _observes)


def _resumes(value: Any) -> bool:
    from dlm_lens.sampling.observers import Resumption  # needs torch, which the other checks do not

    return isinstance(value, Resumption)


RESUME = Rule("a Resumption of an unfinished run", _resumes)


def check_model(model: Any) -> None:
    """Raise unless this is a model that `dlm_lens.load` or `dlm_lens.testing.tiny` made.

    Raises:
        ValueError: naming its class.
    """
    if not hasattr(model, "sampler_defaults") or not hasattr(getattr(model, "config", None), "model_type"):
        saved = (
            " (a causal model of transformers: save it with save_pretrained, and load the directory; an encoder "
            "has none: record_forward and attach_hooks take passes of your own)"
        )
        raise ValueError(
            f"{type(model).__name__} has no sampler; load the model with dlm_lens.load"
            f"{saved if hasattr(model, 'save_pretrained') else ''}"
        )


def first_id(*ids: Any) -> int | None:
    """The first id among ids, lists of ids and None."""
    for value in ids:
        if isinstance(value, list | tuple) and value:
            return int(value[0])
        if isinstance(value, int):
            return value
    return None


def at_least_one(settings: Any, *names: str) -> None:
    """Raise unless these fields are at least 1 (or None).

    Raises:
        ValueError: naming the field and its value.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def not_negative(settings: Any, *names: str, zero: str) -> None:
    """Raise if one of these fields is negative; `zero` is the meaning of 0, for the message.

    Raises:
        ValueError: naming the field and its value.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; it must be 0 ({zero}) or positive")


def positive_share(settings: Any, name: str) -> None:
    """Raise unless this field is a share or the probability of a nucleus: above 0 and at most 1 (or None).

    Raises:
        ValueError: naming the field and its value.
    """
    value = getattr(settings, name)
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; it must be above 0 and at most 1")


def known_remasking(remasking: str, accepted: Sequence[str], listed: Sequence[str], owner: str) -> None:
    """Raise unless the algorithm is one of the sampler's; the message lists those in `listed`.

    Raises:
        ValueError: naming it and those that there are.
    """
    if remasking not in accepted:
        hint = near_name(remasking, listed, {})
        raise ValueError(f"remasking {remasking!r} is none of {owner}'s{hint}: {', '.join(listed)}")


def inner_eps(eps: float) -> None:
    """Raise unless the last timestep lies strictly between 0 and 1.

    Raises:
        ValueError: naming it.
    """
    if not 0 < eps < 1:
        raise ValueError(f"eps is {eps}; it must lie between 0 and 1")


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that are treated specially.

    Args:
        mask: of [MASK]; None for an AR model.
        eos: of the end of the text, the first if there are several.
        eot: of the end of a turn.
        ends: every id that ends a text.
    """

    mask: int | None
    eos: int | None = None
    eot: int | None = None
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Any) -> "SpecialIds":
        """The ids of a model's config."""
        mask, eos, eot = (getattr(config, f"{name}_token_id", None) for name in ("mask", "eos", "eot"))
        ends = eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]
        return cls(mask, first_id(eos), eot, tuple(int(end) for end in ends))

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end a text or a turn."""
        return self.ends if self.eot is None else (*self.ends, int(self.eot))
