"""The sampling algorithms of `denoise`. An algorithm is one file of `samplers/` that defines `ALGORITHM`."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from dlm_lens.adapters import family_of
from dlm_lens.arguments import check_values, rules_of
from dlm_lens.declarations import defined_in
from dlm_lens.sampling.settings import check_known

if TYPE_CHECKING:
    from dlm_lens.sampling.samplers.base import Sampler

Resolve = Callable[[Mapping[str, Any], Mapping[str, Any], int], dict[str, Any]]
"""Settings of a run from (defaults of the checkpoint, arguments of the caller, masks in the prompt)."""

PLAIN = "the probability of the proposed token in the plain softmax"
FILTERED = "the probability of the proposed token, after temperature and filters"
RANKED = f'{PLAIN}; with remasking "random" a uniform number'
MINUS_ENTROPY = "minus the entropy of the prediction, in nats"
BESIDE_MASK = "the share of the token's draw beside that of [MASK]"
OF_THE_TEXT = "the probability that the token is the text's and not noise"


@dataclass(frozen=True)
class Algorithm:
    """A sampling algorithm, as its file in `samplers/` defines it.

    Args:
        name: what `Family.samplers`, a checkpoint's config.json (field `sampler`) and `DenoisingRun.settings` call
            it.
        settings: the frozen dataclass of its settings, which raises ValueError for values that cannot be.
        sampler: the subclass of `Sampler`, called as `sampler(settings, noise, ids, reference_quirks=)`.
        resolve: fills in the settings that the caller left out.
        confidence: what `DenoisingRun.confidence` is in its runs, where a position is eligible: a phrase that is
            printed.
        corruption: how its authors mask texts for a Monte Carlo likelihood (`likelihood/corruption.py`), with their
            settings; None if they published none.
        loss: of the masked tokens in that likelihood, a `Loss` of `likelihood/scoring.py`; None for the cross
            entropy.
    """

    name: str
    settings: type[Any]
    sampler: type[Any]
    resolve: Resolve
    confidence: str
    corruption: Any = None
    loss: Any = None

    def resolved(
        self, defaults: Mapping[str, Any], given: Mapping[str, Any], masks: int = 0, *, whole: bool = True
    ) -> dict[str, Any]:
        """The settings of a run, as `resolve` fills them in.

        Args:
            defaults: of the checkpoint.
            given: by the caller.
            masks: in the prompt.
            whole: the settings are all that the sampler needs, and not a family's, of which config.json gives some.

        Raises:
            ValueError: neither the caller nor the family gives one that is needed.
        """
        own = fields(self.settings)
        try:
            found = self.resolve(defaults, given, masks)
            needed = [one.name for one in own if whole and one.default is one.default_factory is MISSING]
            lacking = [name for name in needed if name not in found]
        except KeyError as error:
            lacking = [
                one.name for one in own if one.name == error.args[0] and one.name not in {**defaults, **given}
            ]
            if not lacking:
                raise
        if lacking:
            raise ValueError(
                f"the sampler {self.name} of this family has no default {lacking[0]}: give it, or add it to "
                "`samplers` of the family"
            )
        return found


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """Every algorithm by its name, in alphabetical order of the files."""
    found = defined_in("dlm_lens.sampling.samplers", "ALGORITHM", Algorithm)
    return {algorithm.name: algorithm for algorithm in found}


def algorithm_of(config: Any) -> Algorithm:
    """The algorithm by which a model with this config samples: its config's `sampler`, or its family's first.

    Raises:
        ValueError: the family does not have the sampler.
    """
    return algorithms()[family_of(config.model_type).sampler_of(config)]


def moves_tokens(config: Any) -> bool:
    """Whether steps of the sampler of a model with this config move tokens; not where no family loads the model."""
    try:
        return algorithm_of(config).sampler.moves_tokens
    except ValueError:
        return False


def check_defaults(algorithm: Algorithm, config: Any) -> None:
    """Raise unless the `sampler_defaults` of a config are settings of its sampler, with values of the right kind.

    Whether the values fit each other is checked when a run has its own beside them.

    Raises:
        ValueError: naming the first that is not, and the settings that there are.
    """
    defaults = getattr(config, "sampler_defaults", None) or {}
    try:
        check_known(algorithm.settings, defaults, algorithm.name)
        check_values(defaults, rules_of(algorithm.settings))
    except ValueError as error:
        raise ValueError(f"sampler_defaults of the config: {error}") from None


def sampler_class(settings: Mapping[str, Any]) -> "type[Sampler]":
    """The class of the sampler of a run with these settings: `Sampler` if the algorithm is not known here."""
    from dlm_lens.sampling.samplers.base import Sampler  # here, because that module imports this one

    algorithm = algorithms().get(str(settings.get("sampler")))
    return Sampler if algorithm is None else algorithm.sampler


def setting_of(settings: Mapping[str, Any], name: str) -> Any:
    """A setting of a finished run: its own, or its sampler's default; None if its sampler has no such setting.

    A sampler that leaves no choice has the value on its class alone (`DllmVarSettings.temperature`).
    """
    algorithm = algorithms().get(str(settings.get("sampler")))
    default = None if algorithm is None else getattr(algorithm.settings, name, None)
    return settings.get(name, None if callable(default) else default)
