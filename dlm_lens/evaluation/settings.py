"""Settings of likelihoods and of generation, and the keys and seeds of requests."""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

from dlm_lens.arguments import RULES, Rule, check_values, flag, instance, near_name, one_of, whole
from dlm_lens.printable import shown
from dlm_lens.sampling.settings import LIKELIHOOD_METHODS, at_least_one, known_elsewhere, not_negative

_RULES: Mapping[str, Rule] = {
    **RULES,
    **dict.fromkeys(("stages", "canvas_length"), whole()),
    **dict.fromkeys(("is_greedy", "append_eos", "stop"), flag()),
    "method": one_of(*LIKELIHOOD_METHODS),
    "options": instance(Mapping, "a mapping of names to values, such as {'top_p': 0.9}"),
}
"""Setting -> its requirement; the values may come from a command line."""


def request_key(kind: str, arguments: Sequence[Any], repeat: int = 0) -> str:
    """A key of a request, the same in every run."""
    text = json.dumps([kind, list(arguments), repeat], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def request_seed(seed: int, context: str, repeat: int = 0) -> int:
    """The seed of a request, derived from the evaluation's seed and the context.

    Continuations of one context share their seed: answers of equal length get equal masks, which reduces the
    variance of their comparison.
    """
    digest = hashlib.sha256(json.dumps([seed, context, repeat]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def repeats(requests: Sequence[Hashable]) -> list[int]:
    """How often each request occurred earlier in the list: the harness requests k draws by k copies."""
    seen: Counter[Hashable] = Counter()
    found = []
    for request in requests:
        found.append(seen[request])
        seen[request] += 1
    return found


Settings = TypeVar("Settings")


@dataclass(frozen=True)
class LikelihoodSettings:
    """Settings of `loglikelihood` and `loglikelihood_rolling`; the estimate is `dlm_lens.log_likelihood`'s.

    Args:
        method: "mc", "chain_rule" or "greedy_completion"; None for "mc", and "chain_rule" of an AR model.
        samples: random masks per request, for "mc".
        strata: samples of one stratified draw; None as in `log_likelihood`.
        cfg_scale: classifier-free guidance.
        is_greedy: whether to compute if greedy decoding yields the continuation, which costs one forward pass per
            token. None computes it only where the harness's metrics read it: for documents with a single request
            (LAMBADA), not for multiple choice, unless its metric is exact_match; the others return False, and all
            of Duo, which has no greedy completion.
        append_eos: the continuation ends with the end-of-text token, as Dream's authors evaluate (their masks
            spare the last position of the text, which then is that token); a whole text ends with it too.
        options: further settings of the method (LLaDA: rounding; Dream, SMDM: eps, protect_ends, scope;
            "chain_rule": order; of a model that decodes blocks: block_length).

    Raises:
        ValueError: a value is out of its range.
    """

    method: Literal["mc", "chain_rule", "greedy_completion"] | None = None
    samples: int = 128
    strata: int | None = None
    cfg_scale: float = 0.0
    is_greedy: bool | None = None
    append_eos: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)
        at_least_one(self, "samples", "strata")
        not_negative(self, "cfg_scale", zero="no guidance")


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of `generate_until`, which override the task's; None for the task's setting, then the model's.

    Args:
        gen_length: tokens of the answer (max_gen_toks in tasks).
        steps: denoising steps; one per token by default.
        block_length: tokens of a block.
        temperature: 0 takes the most likely token.
        cfg_scale: classifier-free guidance.
        remasking: the family's rule for the choice of positions.
        canvas_length: tokens of prompt and answer together; gen_length is then the rest.
        stages: 2 generates, reads the text as a new prompt, and generates again (the GSM8K evaluation of
            2601.19657's code: a chain of thought, then the answer); the result is the second stage's whole text.
        stop: cut the text at the task's stop sequences; False: only at the end-of-text token.
        options: further settings of the family's sampler (Dream: top_p, top_k, alg_temp, eps; ...).

    Raises:
        ValueError: a value is out of its range, or gen_length beside canvas_length.
    """

    gen_length: int | None = None
    steps: int | None = None
    block_length: int | None = None
    temperature: float | None = None
    cfg_scale: float | None = None
    remasking: str | None = None
    canvas_length: int | None = None
    stages: int = 1
    stop: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)
        at_least_one(self, "gen_length", "steps", "block_length", "canvas_length")
        not_negative(self, "temperature", zero="greedy")
        not_negative(self, "cfg_scale", zero="no guidance")
        if self.stages not in (1, 2):
            raise ValueError(f"stages is {self.stages}; it must be 1 or 2")
        if self.gen_length is not None and self.canvas_length is not None:
            raise ValueError(
                f"gen_length is {self.gen_length} and canvas_length {self.canvas_length}; give one of them, the "
                "other follows from the prompt"
            )

    def sampler(self) -> dict[str, Any]:
        """The settings that are arguments of `denoise`."""
        names = ("steps", "block_length", "temperature", "cfg_scale", "remasking")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None} | dict(self.options)


def _check(settings: Any) -> None:
    """Raise unless every value is of its kind; None only where it is the default.

    Raises:
        ValueError: naming the setting and its value.
    """
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value is None and one.default is not None:
            _RULES[one.name].check(one.name, value)
    check_values({one.name: getattr(settings, one.name) for one in fields(settings)}, _RULES)


def read_settings(kind: type[Settings], value: Any) -> Settings:
    """Settings from an instance, a mapping of their names, or None.

    Raises:
        ValueError: something else, an unknown name, or a value that cannot be.
    """
    if isinstance(value, kind):
        return value
    if not (value is None or isinstance(value, Mapping)):
        raise ValueError(
            f"{shown(value)} is no {kind.__name__}; give an instance of it, or a mapping of its settings such as "
            f"{{{fields(cast('Any', kind))[0].name!r}: ...}}"
        )
    given: dict[str, Any] = dict(value or {})
    names = [one.name for one in fields(cast("Any", kind))]
    for name in given:
        if name not in names:
            hint = near_name(name, names, known_elsewhere(names))
            raise ValueError(f"{kind.__name__} has no setting {name!r}{hint}; it has {', '.join(names)}")
    return kind(**given)


def changed(settings: LikelihoodSettings | GenerationSettings) -> dict[str, Any]:
    """The settings that differ from the defaults, for records."""
    usual = asdict(type(settings)())
    return {name: value for name, value in asdict(settings).items() if value != usual[name]}
