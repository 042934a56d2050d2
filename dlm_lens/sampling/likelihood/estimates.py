"""`log_likelihood`: the log-likelihood of given answers, by the method of the model's family."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.adapters.registry import fills_masks
from dlm_lens.arguments import checked_arguments, near_name
from dlm_lens.attention import computed_span, exclusive
from dlm_lens.display import ShowsItself
from dlm_lens.printable import shown
from dlm_lens.sampling.algorithm_registry import Algorithm, algorithm_of
from dlm_lens.sampling.likelihood.answer_pairs import Pair, read_pairs
from dlm_lens.sampling.likelihood.causal_answers import score_answers
from dlm_lens.sampling.likelihood.corruption import Corruption, CountCorruption, chain_masks
from dlm_lens.sampling.likelihood.greedy_completion import greedy_completions
from dlm_lens.sampling.likelihood.noisy_texts import NoisyCorruption, NoisyScorer, noisy_losses
from dlm_lens.sampling.likelihood.scoring import Query, Scorer, cross_entropy
from dlm_lens.sampling.prompts import warn_beyond_context
from dlm_lens.sampling.settings import LIKELIHOOD_METHODS, check_model, row_seeds
from dlm_lens.sampling.two_copies import Blocks


@dataclass(frozen=True, eq=False)
class LogLikelihood(ShowsItself):
    """Log-likelihoods of answers given their prompts, in nats, item by item; float64 on the CPU.

    Args:
        value: the log-likelihood (with "mc" an estimate of its lower bound). With "greedy_completion", the
            logarithm of the probability that greedy decoding gives the answer: 0 or -inf.
        standard_error: of `value` over the stratified groups of samples; 0 where nothing is drawn, NaN with a
            single group.
        losses: of every item, "mc": the loss of each sample, whose mean is -value; "chain_rule": minus the
            log-probability of each token, whose sum is -value; "greedy_completion": nothing.
        tokens: number of tokens of each answer.
        method: "mc", "chain_rule" or "greedy_completion".
        settings: the sampler's name and every setting of the call.
        completions: with "greedy_completion", the token ids decoded in place of each answer.

    Raises:
        ValueError: the shapes contradict each other.
    """

    value: Float[Tensor, "item"]
    standard_error: Float[Tensor, "item"]
    losses: tuple[Float[Tensor, "term"], ...]
    tokens: Int[Tensor, "item"]
    method: str
    settings: Mapping[str, Any]
    completions: tuple[Int[Tensor, "answer"], ...] = ()

    def __post_init__(self) -> None:
        items = len(self.tokens)
        for name in ("value", "standard_error", "tokens"):
            if tuple(getattr(self, name).shape) != (items,):
                raise ValueError(
                    f"LogLikelihood.{name} has shape {tuple(getattr(self, name).shape)}, not ({items},)"
                )
        if len(self.losses) != items:
            raise ValueError(f"LogLikelihood.losses has {len(self.losses)} entries for {items} items")
        lengths = [int(length) for length in self.tokens]
        terms = {
            "mc": [self.settings.get("samples")] * items,
            "chain_rule": lengths,
            "greedy_completion": [0] * items,
        }
        if self.method not in terms:
            raise ValueError(f"LogLikelihood.method is {self.method!r}; it must be one of {', '.join(terms)}")
        if [len(losses) for losses in self.losses] != terms[self.method]:
            raise ValueError(f"LogLikelihood.losses must have {terms[self.method]} terms, one number per item")
        written = lengths if self.method == "greedy_completion" else []
        if [len(ids) for ids in self.completions] != written:
            raise ValueError(f"LogLikelihood.completions must have {written} tokens, one number per item")

    def __repr__(self) -> str:
        value = ", ".join(f"{v:.4f}" for v in self.value[:8].tolist()) + (", ..." if len(self.value) > 8 else "")
        return f"LogLikelihood(value=[{value}], method={self.method!r}, settings={dict(self.settings)})"

    def table(self) -> pd.DataFrame:
        """One line per item: value, standard error, and value per token in nats; tokens of the answer."""
        names = ("value", "standard_error", "tokens", "per_token")
        return pd.DataFrame({"item": range(len(self.tokens)), **{name: getattr(self, name) for name in names}})

    def __float__(self) -> float:
        """The value of a single item."""
        if len(self.value) != 1:
            raise ValueError(f"{len(self.value)} items have no single value; read .value")
        return float(self.value)

    @property
    def per_token(self) -> Float[Tensor, "item"]:
        """Value divided by the number of tokens; exp of minus this is the perplexity (its bound with "mc")."""
        return self.value / self.tokens

    @property
    def groups(self) -> Float[Tensor, "item group"]:
        """With "mc", the mean loss of every stratified group: the losses per batch of the authors' code."""
        if self.method != "mc":
            raise ValueError(f"groups of samples exist with method 'mc'; this is {self.method!r}")
        return torch.stack(self.losses).unflatten(-1, (-1, int(self.settings["strata"]))).mean(-1)

    @property
    def is_greedy(self) -> Bool[Tensor, "item"]:
        """With "greedy_completion", whether the model decodes exactly the answer."""
        if self.method != "greedy_completion":
            raise ValueError(f"is_greedy needs method 'greedy_completion'; this is {self.method!r}")
        return self.value == 0


MOST, FEWEST_GROUPS = 16, 4


def strata_of(samples: int, strata: int | None) -> int:
    """How many samples share one stratified draw.

    Raises:
        ValueError: the samples do not divide into groups of that size.
    """
    if strata is None:
        most = max(1, min(MOST, samples // FEWEST_GROUPS))
        return next(size for size in range(most, 0, -1) if samples % size == 0)
    if samples % strata:
        raise ValueError(
            f"{samples} samples do not divide into groups of {strata} (strata, and batch_size with "
            "reference_quirks); choose samples as a multiple of it"
        )
    return strata


class _Samples(NamedTuple):
    """An item's samples: the index of each sample's mask among the different ones, and the rate that drew it."""

    different: Bool[Tensor, "mask position"]
    which: Int[Tensor, "sample"]
    rate: Float[Tensor, "sample"]
    sigma: Float[Tensor, "mask"] | None = None


def monte_carlo(
    scorer: Scorer, pairs: Sequence[Pair], items: Iterable[int], corruption: Corruption, record: Mapping[str, Any]
) -> LogLikelihood:
    """Mean over the samples of the losses of the masked tokens, divided by the masking rate.

    A mask that an item draws several times (all of them, if its answer is one token) is evaluated once, unless the
    network is given the noise level.
    """
    conditioned = takes_noise_level(scorer.model)
    shared = torch.Generator().manual_seed(record["seeds"][0]) if record["reference_quirks"] else None
    drawn: dict[int, _Samples] = {}

    def queries() -> Iterator[Query]:
        """Every different mask of every item, drawn when its turn comes."""
        for item in items:
            generator = shared or torch.Generator().manual_seed(record["seeds"][item])
            found = drawn[item] = _draw(pairs[item], corruption, record, generator, conditioned=conditioned)
            sums[item] = torch.zeros(len(found.different), dtype=torch.float64)
            for number, mask in enumerate(found.different):
                if mask.any():
                    sigma = None if found.sigma is None else float(found.sigma[number])
                    yield Query(item, pairs[item], mask, mask, number, sigma)

    sums: dict[int, Float[Tensor, "mask"]] = {}
    for query, loss in scorer.losses(queries()):
        sums[query.item][query.term] = loss.sum()
    losses = tuple(_per_sample(drawn[item], sums[item]) for item in range(len(pairs)))
    return _estimate(losses, pairs, record)


def _estimate(
    losses: tuple[Float[Tensor, "sample"], ...], pairs: Sequence[Pair], record: Mapping[str, Any]
) -> LogLikelihood:
    """The Monte Carlo estimates of items with these losses."""
    groups = torch.stack(losses).unflatten(-1, (-1, record["strata"])).mean(-1)
    spread = groups.std(-1) if groups.shape[1] > 1 else torch.full((len(pairs),), torch.nan, dtype=torch.float64)
    return LogLikelihood(
        -groups.mean(-1),
        spread / groups.shape[1] ** 0.5,
        losses,
        torch.tensor([len(pair.answer) for pair in pairs]),
        "mc",
        record,
    )


def _draw(
    pair: Pair, corruption: Corruption, record: Mapping[str, Any], generator: torch.Generator, *, conditioned: bool
) -> _Samples:
    size = record["strata"]
    groups = [corruption.draw(pair, size, generator) for _ in range(record["samples"] // size)]
    levels = [group.sigma for group in groups if group.sigma is not None]
    if conditioned and levels:
        masks = torch.cat([group.masked for group in groups])
        return _Samples(masks, torch.arange(len(masks)), torch.cat([g.rate for g in groups]), torch.cat(levels))
    different, which = torch.cat([group.masked for group in groups]).unique(dim=0, return_inverse=True)
    return _Samples(different, which, torch.cat([group.rate for group in groups]))


def _per_sample(samples: _Samples, sums: Float[Tensor, "mask"]) -> Float[Tensor, "sample"]:
    some = samples.different.any(-1)
    # A rate of 0 masks nothing: the loss is 0.
    return torch.where(some[samples.which], sums[samples.which] / samples.rate.double(), 0.0)


@checked_arguments()
@torch.no_grad()
@exclusive
def log_likelihood(
    model: Any,
    prompt: Any,
    answer: Any,
    method: str | None = None,
    *,
    samples: int | None = None,
    cfg_scale: float = 0.0,
    seed: int | list[int] = 0,
    strata: int | None = None,
    batch_size: int | None = None,
    progress: bool = False,
    reference_quirks: bool = False,
    **settings: Any,
) -> LogLikelihood:
    """Log-likelihood of given answers, ln p(answer | prompt) in nats.

    "mc" estimates the lower bound E[sum over masked positions of ln p(token | canvas) / masking rate] from
    random masks, drawn as in the authors' code except for a bias of LLaDA's (ML-GSAI/LLaDA,
    get_log_likelihood.py; HKUNLP/Dream, eval/eval.py; ML-GSAI/SMDM, evaluate_diff.py). "chain_rule" sums
    ln p(token i | prompt, answer before i, everything else masked); of an AR model it is exact, in one forward.
    "greedy_completion" decodes the answer's positions one by one, the most confident first, and compares the result
    with the answer.

    Of Duo, UDLM and Sumi, models of uniform noise, "mc" alone is defined: random tokens instead of masks, and the
    NELBO of 2506.10892, whose losses are those of every token of the answer.

    Of a model that decodes blocks every block is scored given the prompt and the clean blocks before it
    (2503.09573): canvases are [x_t, x_0], and the bound of "mc" is the sum of the blocks' bounds. Prompt and clean
    blocks attend as in a run of the model's sampler, which may be another attention than that of its training.

    Items are independent: each has a random generator of its own, so that a value depends neither on the
    other items nor on the batches. The same seed gives answers of equal length the same masks.

    Args:
        model: from `dlm_lens.load`.
        prompt: as for `denoise`: text, chat messages, token ids, or a list of any of them. Of a DLM an empty text
            or list of ids is no prompt: the likelihood of the unconditional text.
        answer: text, token ids, or a list of either; one per prompt, or several for one prompt.
        method: "mc", "chain_rule" or "greedy_completion"; None for "mc", of AR models and SDLM "chain_rule".
        samples: random masks per item, for "mc"; None for 128. Beside a model's own method that draws none they
            are ignored.
        cfg_scale: classifier-free guidance, u + (cfg_scale + 1) (c - u); u sees a masked prompt.
        seed: one number, or one per item.
        strata: samples of one stratified draw (the authors' batch size); a divisor of `samples`. None for the
            largest one up to 16 that leaves four draws, from which the standard error comes.
        batch_size: canvases per forward; None for as many as fit into bounded memory. The values do not
            depend on it.
        progress: show a progress bar.
        reference_quirks: the authors' evaluation loops: one random stream over all items in their order (needs
            a single seed), `batch_size` is `strata` too, LLaDA's numbers of masks rounded half to even (a bias),
            [MASK] allowed in a greedy completion.
        **settings: "mc" of LLaDA: rounding ("half_up" or, as its authors, "half_to_even"); of Dream, SMDM, DiffuGPT
            and BD3-LM: eps, protect_ends, scope ("answer" or "both"); of MDLM, SEDD, Duo, UDLM: eps, scope,
            stratified; of GIDD: eps, scope; "chain_rule": order ("left_to_right" or "right_to_left"); of a model
            that decodes blocks: block_length, where it is not the model's own.

    Returns:
        A `LogLikelihood`: `value` and `standard_error` [item] in nats, `tokens` [item] and, per item, `losses`
        [sample] for "mc", [token] for "chain_rule" (`float` of a single item is its value).

    Raises:
        ValueError: items or settings that cannot work, before anything is computed.
        NonFiniteLogitsError: naming the item and the position.
    """
    check_model(model)
    algorithm = algorithm_of(model.config)
    causal = algorithm.sampler.autoregressive
    if "mc_num" in settings:
        raise ValueError(f"mc_num={shown(settings['mc_num'])} is the authors' word; here it is samples=")
    given, method = method, check_method(model, method, cfg_scale)
    _check_sizes(given, batch_size, samples=samples, strata=strata)
    samples = 128 if samples is None else samples
    pairs = read_pairs(model, prompt, answer)
    seeds = row_seeds(seed, len(pairs))
    if reference_quirks and len(set(seeds)) > 1:
        raise ValueError("reference_quirks has one random stream for all items; give a single seed")
    warn_beyond_context(model, max(len(pair.tokens) for pair in pairs))
    blocks = _blocks(model, settings)
    loss = algorithm.loss if method == "mc" and algorithm.loss is not None else cross_entropy
    scorer = Scorer(model, cfg_scale, batch_size, shift=True if causal else None, blocks=blocks, loss=loss)
    order = _longest_first(pairs, answers=method == "greedy_completion")
    bar = tqdm(order, desc="likelihood", unit="item", disable=not progress)
    record = {"sampler": algorithm.name, "cfg_scale": cfg_scale, "reference_quirks": reference_quirks}
    if blocks is not None:
        record["block_length"] = blocks.length
    if method == "greedy_completion":
        _check_names(settings, (), method, algorithm)
        return _greedy(scorer, pairs, bar, causal, record)
    if method == "chain_rule":
        _check_names(settings, () if causal or algorithm.sampler.windowed else ("order",), method, algorithm)
        return _chain_rule(scorer, pairs, bar, causal, settings.get("order", "left_to_right"), record)
    corruption = _corruption(algorithm, settings, pairs, cfg_scale, reference_quirks)
    if reference_quirks:
        strata = strata or batch_size
        bar = tqdm(range(len(pairs)), desc="likelihood", unit="item", disable=not progress)
    record |= {"samples": samples, "strata": strata_of(samples, strata), "seeds": seeds, **asdict(corruption)}
    if isinstance(corruption, NoisyCorruption):
        scorer = NoisyScorer(model, batch_size=batch_size, integrand=corruption.integrand(model.config))
        return _estimate(noisy_losses(scorer, pairs, bar, corruption, record), pairs, record)
    return monte_carlo(scorer, pairs, bar, corruption, record)


def likelihood_method(model: Any, method: str | None = None) -> str:
    """The given method, or the model's own: "mc" where its authors draw masks, else "chain_rule"."""
    return method or ("mc" if algorithm_of(model.config).corruption is not None else "chain_rule")


def likelihood_methods(model: Any) -> tuple[str, ...]:
    """The methods of `log_likelihood` that are defined for a model; none for one without any likelihood."""
    algorithm = algorithm_of(model.config)
    if not (algorithm.sampler.autoregressive or fills_masks(model.config)):
        return ("mc",) if isinstance(algorithm.corruption, NoisyCorruption) else ()
    return tuple(name for name in LIKELIHOOD_METHODS if name != "mc" or algorithm.corruption is not None)


def check_method(model: Any, method: str | None, cfg_scale: float) -> str:
    """The method of a likelihood, checked with its guidance; None for the model's own.

    Raises:
        ValueError: no such method, or a model for which the method or guidance is not defined.
    """
    algorithm, method = algorithm_of(model.config), likelihood_method(model, method)
    if method not in LIKELIHOOD_METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(LIKELIHOOD_METHODS)}")
    causal, methods = algorithm.sampler.autoregressive, likelihood_methods(model)
    if not (causal or fills_masks(model.config)):
        _check_uniform(model, method, methods, cfg_scale)
    elif method not in methods:
        if causal:
            raise ValueError("an AR model has no masks to draw, its likelihood is exact; use method='chain_rule'")
        raise ValueError(f"the sampler {algorithm.name!r} has no mc likelihood; use method='chain_rule'")
    if causal and cfg_scale:
        raise ValueError(f"cfg_scale is {cfg_scale}, but an AR model has no mask token to guide with; leave it out")
    if cfg_scale and method == "mc" and isinstance(algorithm.corruption, NoisyCorruption):
        raise ValueError(
            f"cfg_scale is {cfg_scale}, and the mc likelihood of {algorithm.name} has no guidance; leave it out"
        )
    if cfg_scale and getattr(model.config, "clean_context", False):
        raise ValueError(
            f"cfg_scale is {cfg_scale}, and a prompt of {type(model).__name__} is text without noise, so that "
            "guidance cannot mask it; leave it out"
        )
    if cfg_scale < 0:
        raise ValueError(f"cfg_scale is {cfg_scale}; it must be 0 (no guidance) or positive")
    return method


def _check_uniform(model: Any, method: str, methods: Sequence[str], cfg_scale: float) -> None:
    """Raise for a model of uniform noise, which has no mask token, unless the likelihood needs none."""
    kind = type(model).__name__
    if methods:
        if method not in methods or cfg_scale:
            given = f"cfg_scale={cfg_scale}" if cfg_scale else f"method={method!r}"
            raise ValueError(
                f"{given} hides tokens with [MASK], and {kind} is a model of uniform noise without one; use "
                "method='mc'"
            )
        return
    # Neither loss nor likelihood of a canvas after an encoder is defined here.
    instead = (
        "compare losses on held-out text instead (dlm_lens.training.UniformDiffusionLoss)"
        if computed_span(model, 2) is None
        else "compare what it writes (dlm_lens.denoise), or its confidence (dlm_lens.probes.commitment)"
    )
    raise ValueError(
        f"{kind} is a model of uniform noise: its open positions hold random tokens instead of masks, and every "
        f"likelihood here masks; {instead}"
    )


def _blocks(model: Any, settings: dict[str, Any]) -> Blocks | None:
    """The blocks of a model that decodes them, of the length in `settings`, which is taken out of these.

    Raises:
        ValueError: a network that is given the noise level, or no length.
    """
    blocks = Blocks.of(model.config)
    if blocks is not None and takes_noise_level(model):
        raise ValueError(
            "the network is given the noise level (time_conditioning), taken from the masks of all that it "
            "sees, the clean text and the other blocks among it: no likelihood of blocks is defined here; compare "
            "what it writes (dlm_lens.denoise)"
        )
    if blocks is None or "block_length" not in settings:
        return blocks
    length = settings.pop("block_length")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"block_length is {shown(length)}; it must be a whole number of at least 1")
    return replace(blocks, length=length)


def _longest_first(pairs: Sequence[Pair], answers: bool) -> list[int]:
    """Items by falling length, so that a batch has similar lengths and the largest comes first.

    With `answers` the length of the answer comes before that of the text.
    """
    return sorted(
        range(len(pairs)), key=lambda item: (-len(pairs[item].answer) * answers, -len(pairs[item].tokens))
    )


def _check_sizes(method: str | None, batch_size: int | None, **of_masks: int | None) -> None:
    for name, value in {"batch_size": batch_size, **of_masks}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1, or None")
        if value is not None and name in of_masks and method not in (None, "mc"):
            raise ValueError(f"{name} is {value}, and {method} draws no masks; leave it out")


def _check_names(settings: Mapping[str, Any], names: Sequence[str], method: str, algorithm: Algorithm) -> None:
    for name in (one for one in settings if one not in names):
        hint = near_name(name, names, {"hooks": "with dlm_lens.hooks.attach_hooks(model, ...), around the call,"})
        has = f"has no setting {name!r}{hint}; it has {', '.join(names) or 'none'}"
        raise ValueError(f"the {method} likelihood of {algorithm.name} {has}")


def _corruption(
    algorithm: Algorithm,
    settings: Mapping[str, Any],
    pairs: Sequence[Pair],
    cfg_scale: float,
    reference_quirks: bool,
) -> Any:
    published = algorithm.corruption
    _check_names(settings, [field.name for field in fields(published)], "mc", algorithm)
    quirks = {"rounding": "half_to_even"} if reference_quirks and isinstance(published, CountCorruption) else {}
    corruption = replace(published, **{**quirks, **settings})
    values = asdict(corruption)
    if cfg_scale and values.get("scope") == "both":
        raise ValueError("guidance masks the prompt, which scope='both' scores; use scope='answer' or cfg_scale=0")
    if values.get("protect_ends") and values["scope"] == "answer" and not reference_quirks:
        for item, pair in enumerate(pairs):
            if len(pair.answer) == 1:
                raise ValueError(
                    f"answer {item} has a single token, and protect_ends never masks the last position: nothing "
                    "would be scored; use method='chain_rule' or protect_ends=False"
                )
    return corruption


def _chain_rule(
    scorer: Scorer, pairs: Sequence[Pair], items: Any, causal: bool, order: str, record: Mapping[str, Any]
) -> LogLikelihood:
    def queries(item: int) -> list[Query]:
        masks = zip(*chain_masks(pairs[item], order), strict=True)
        return [Query(item, pairs[item], *both, term) for term, both in enumerate(masks)]

    losses: tuple[Float[Tensor, "answer"], ...]
    if causal:
        scored = {one.item: one.losses for one in score_answers(scorer, ((item, pairs[item]) for item in items))}
        losses = tuple(scored[item] for item in range(len(pairs)))
    else:
        terms: dict[tuple[int, int], Float[Tensor, "1"]] = {}
        for query, loss in scorer.losses(query for item in items for query in queries(item)):
            terms[query.item, query.term] = loss
        losses = tuple(
            torch.cat([terms[item, term] for term in range(len(pair.answer))]) for item, pair in enumerate(pairs)
        )
    value = -torch.stack([loss.sum() for loss in losses])
    return LogLikelihood(
        value,
        torch.zeros_like(value),
        losses,
        torch.tensor([len(pair.answer) for pair in pairs]),
        "chain_rule",
        {**record, "order": order},
    )


def _greedy(
    scorer: Scorer, pairs: Sequence[Pair], items: Any, causal: bool, record: Mapping[str, Any]
) -> LogLikelihood:
    allow = bool(record["reference_quirks"])
    written = dict(greedy_completions(scorer, pairs, items, causal=causal, allow_mask=allow))
    same = torch.tensor([written[item].equal(pair.answer) for item, pair in enumerate(pairs)])
    value = torch.zeros(len(pairs), dtype=torch.float64).masked_fill(~same, -torch.inf)
    return LogLikelihood(
        value,
        torch.zeros_like(value),
        (value.new_empty(0),) * len(pairs),
        torch.tensor([len(pair.answer) for pair in pairs]),
        "greedy_completion",
        record,
        tuple(written[item] for item in range(len(pairs))),
    )
