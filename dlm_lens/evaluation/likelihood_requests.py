"""Likelihood requests of the harness: from text to ids, in batches, to log-likelihoods."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from dlm_lens.adapters import family_of
from dlm_lens.adapters.registry import excluded_id
from dlm_lens.attention import attached_hooks, checked, decoder_of
from dlm_lens.attention.hook_context import NoRunError
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.settings import LikelihoodSettings, request_seed
from dlm_lens.hooks import attach_hooks
from dlm_lens.placement import input_device
from dlm_lens.printable import shown
from dlm_lens.sampling import log_likelihood
from dlm_lens.sampling.algorithm_registry import algorithm_of
from dlm_lens.sampling.likelihood.answer_pairs import Pair
from dlm_lens.sampling.likelihood.causal_answers import score_answers
from dlm_lens.sampling.likelihood.estimates import check_method, likelihood_method, likelihood_methods
from dlm_lens.sampling.likelihood.scoring import Scorer, may_be_padded

logger = logging.getLogger(__name__)

CHUNK = 64
"""Requests computed together and then stored; a killed run loses at most these."""

Around = Callable[[Any], AbstractContextManager[Any]]
"""Takes the model and returns a context manager for its forward passes, such as a recording."""


def together(model: Any, hooks: Sequence[Any], around: Around | None) -> bool:
    """Whether requests of unequal length may share a forward pass without changing each other's result.

    Hooks of `attach_hooks` count as those of the evaluation.
    """
    return around is None and may_be_padded(model, (*hooks, *attached_hooks(model)))


def of_every_token(model: Any, settings: LikelihoodSettings) -> LikelihoodSettings:
    """The settings for the windows of a text, of which every token is scored.

    Dream's masks spare the last position of a text (`protect_ends`), which would leave out one token of every
    window; here they spare none.
    """
    algorithm = algorithm_of(model.config)
    if settings.method not in (None, "mc") or not hasattr(algorithm.corruption, "protect_ends"):
        return settings
    return replace(settings, options={**settings.options, "protect_ends": False})


def greedy_settings(settings: LikelihoodSettings) -> LikelihoodSettings:
    """The settings of the passes that say whether greedy decoding gives the continuation: the same blocks.

    The other options, samples and strata are of "mc" and "chain_rule".
    """
    blocks = {name: value for name, value in settings.options.items() if name == "block_length"}
    return LikelihoodSettings("greedy_completion", cfg_scale=settings.cfg_scale, options=blocks)


class Item(NamedTuple):
    """A likelihood request in token ids: its index, its seed, and whether to decode it greedily too."""

    place: int
    context: list[int]
    continuation: list[int]
    seed: int
    greedy: bool

    @property
    def length(self) -> int:
        """Positions of its canvas."""
        return len(self.context) + len(self.continuation)


def has_greedy(model: Any) -> bool:
    """Whether it is defined what greedy decoding gives in place of an answer; not in models of uniform noise."""
    return "greedy_completion" in likelihood_methods(model)


def check_settings(model: Any, settings: LikelihoodSettings, *, rolling: bool) -> None:
    """Refuse settings that `log_likelihood` refuses for this model, before any request is computed.

    Args:
        model: from `dlm_lens.load`.
        settings: the method and its settings.
        rolling: whether whole texts are scored, for which `is_greedy` has no meaning.

    Raises:
        ValueError: a method, guidance or greedy completion that the model does not have.
    """
    check_method(model, settings.method, settings.cfg_scale)
    if settings.is_greedy and not rolling and not has_greedy(model):
        raise ValueError(
            f"is_greedy is True, and {type(model).__name__} is a model of uniform noise, which has no greedy "
            "completion; give is_greedy=False"
        )


def check_items(model: Any, items: Sequence[Item], settings: LikelihoodSettings) -> None:
    """Refuse requests that `log_likelihood` refuses, before the first of them is computed, and name their text.

    Raises:
        ValueError: a continuation with the mask token, or of one token that Dream's masks spare.
    """
    causal = family_of(model.config.model_type).causal
    mask = None if causal else excluded_id(model.config)
    spared = _spares_last(model, settings)
    for item in items:
        problem = ""
        if mask is not None and mask in item.continuation:
            problem = f"holds the mask token {mask}, and a likelihood is that of what the masks stand for"
        elif spared and len(item.continuation) == 1:
            problem = (
                "has a single token, and protect_ends never masks the last position of a text: give "
                'likelihood={"append_eos": True}, {"method": "chain_rule"} or {"options": {"protect_ends": False}}'
            )
        if problem:
            text = model.tokenizer.decode(item.continuation)
            raise ValueError(f"the continuation {text!r:.60} {problem}")


def _spares_last(model: Any, settings: LikelihoodSettings) -> bool:
    """Whether the masks of this likelihood spare the last token of a text."""
    corruption = algorithm_of(model.config).corruption
    if settings.method not in (None, "mc") or not hasattr(corruption, "protect_ends"):
        return False
    values = {**vars(corruption), **settings.options}
    return bool(values["protect_ends"]) and values["scope"] == "answer"


class Answer(NamedTuple):
    """A request's result, in the harness's form."""

    place: int
    value: float
    is_greedy: bool


class Likelihoods:
    """Computes the likelihoods of requests, longest first.

    With `around`, with a hook that is not `padding_safe`, or with hooks where blocks are counted from the text,
    only requests of equal length share a forward pass, so that there is no padding.

    Args:
        model: from `dlm_lens.load`.
        settings: the method and its settings.
        batch_size: canvases per forward; None for as many as fit into bounded memory.
        hooks: interventions of every forward pass.
        around: returns the context manager of every chunk.
    """

    def __init__(
        self,
        model: Any,
        settings: LikelihoodSettings,
        *,
        batch_size: int | None = None,
        hooks: Sequence[Any] = (),
        around: Around | None = None,
    ) -> None:
        self.model, self.settings, self.batch_size = model, settings, batch_size
        self.hooks, self.around = checked(hooks), around

    def run(self, items: Sequence[Item]) -> Iterator[list[Answer]]:
        """The results, chunk by chunk, the longest requests first.

        Raises:
            ValueError: a request that has no likelihood (`check_items`), before anything is computed.
        """
        check_items(self.model, items, self.settings)
        for chunk in self._chunks(items):
            with ExitStack() as stack:
                if self.hooks:
                    stack.enter_context(attach_hooks(self.model, *self.hooks))
                if self.around is not None:
                    stack.enter_context(self.around(self.model))
                answers = self._answers(chunk)
            # Outside the context: if the caller stops here, the model must not keep its hooks.
            yield answers

    def _chunks(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        padded = together(self.model, self.hooks, self.around)
        causal = family_of(self.model.config.model_type).causal
        if causal and padded and not self.hooks:
            # Items of one context share its pass, so that they are in one chunk.
            ordered = sorted(items, key=lambda item: (-len(item.context), item.context, item.place))
        else:
            ordered = sorted(items, key=lambda item: (-item.length, -len(item.continuation), item.place))
        for _, group in groupby(ordered, key=lambda item: 0 if padded else item.length):
            same = list(group)
            yield from (same[start : start + CHUNK] for start in range(0, len(same), CHUNK))

    def _answers(self, items: Sequence[Item]) -> list[Answer]:
        causal = family_of(self.model.config.model_type).causal
        if causal and self.settings.method in (None, "chain_rule"):
            return teacher_forced(self.model, items, self.batch_size)
        values = self._values(items)
        checked = [item for item in items if item.greedy]
        greedy: dict[int, bool] = {}
        if self.settings.method == "greedy_completion":
            greedy = {item.place: value == 0 for item, value in zip(items, values, strict=True)}
        elif checked:
            options = greedy_settings(self.settings).options
            exact = self._likelihood(checked, "greedy_completion", **options).is_greedy.tolist()
            greedy = {item.place: same for item, same in zip(checked, exact, strict=True)}
        return [
            Answer(item.place, value, greedy.get(item.place, False))
            for item, value in zip(items, values, strict=True)
        ]

    def _values(self, items: Sequence[Item]) -> list[float]:
        settings, extra = self.settings, dict(self.settings.options)
        method = likelihood_method(self.model, settings.method)
        if method == "mc":
            extra |= {"samples": settings.samples, "strata": settings.strata, "seed": [item.seed for item in items]}
        return [float(value) for value in self._likelihood(items, method, **extra).value]

    def _likelihood(self, items: Sequence[Item], method: str, **extra: Any) -> Any:
        contexts, continuations = [item.context for item in items], [item.continuation for item in items]
        common: dict[str, Any] = {"cfg_scale": self.settings.cfg_scale, "batch_size": self.batch_size}
        return log_likelihood(self.model, contexts, continuations, method, **common, **extra)


@torch.no_grad()
def teacher_forced(model: Any, items: Sequence[Item], batch_size: int | None = None) -> list[Answer]:
    """The exact likelihood of an AR model, and whether its argmax is the continuation.

    A context that several items share is computed once.
    Greedy decoding writes the continuation exactly if every argmax, given the tokens before, is the next token.

    Raises:
        NonFiniteLogitsError: naming the request and the position.
    """
    scorer = Scorer(model, batch_size=batch_size, shift=True)
    pairs = ((item.place, Pair(torch.tensor(item.context), torch.tensor(item.continuation))) for item in items)
    return [
        Answer(place, -float(losses.sum()), bool(greedy.all()))
        for place, losses, greedy in score_answers(scorer, pairs)
    ]


@dataclass(frozen=True)
class ItemMaker:
    """Turns likelihood requests into items.

    Args:
        encoder: of the model.
        settings: of likelihoods.
        seed: of the evaluation.
        has_greedy: whether the model has greedy completions.
    """

    encoder: Encoder
    settings: LikelihoodSettings
    seed: int
    has_greedy: bool = True

    def item(self, place: int, arguments: tuple[str, str], greedy: bool) -> Item:
        """A context with its continuation; a context that is too long loses its beginning."""
        context, continuation = arguments
        before, after = self.encoder.pair(context, continuation)
        if self.settings.append_eos:
            after = [*after, int(self.encoder.eos)]
        return Item(place, self.encoder.fitted(before, len(after)), after, request_seed(self.seed, context), greedy)

    def windows(self, place: int, text: str) -> list[Item]:
        """A text as windows that each see the tokens before them; every token is scored once.

        With `append_eos` the text ends with the end-of-text token.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        ids = self.encoder.text(text)
        ids = ids[1:] if ids[:1] == [self.encoder.prefix] else ids
        ids = [*ids, int(self.encoder.eos)] if self.settings.append_eos else ids
        # The harness counts an AR model's inputs, which lack the last token; a canvas holds it.
        windows = get_rolling_token_windows(ids, self.encoder.prefix, self.encoder.max_length - 1, context_len=1)
        return [
            Item(place, before, after, request_seed(self.seed, text, number), False)
            for number, (before, after) in enumerate(map(make_disjoint_window, windows))
        ]

    def needs_greedy(self, requests: Sequence[Any], tasks: frozenset[str]) -> list[bool]:
        """Whether each request needs greedy decoding, because its task's metric reads the result.

        These are the requests of documents with a single request, and of the tasks in `tasks`, unless the setting
        `is_greedy` decides for all; none of a model without greedy completions.
        """
        if self.settings.is_greedy is not None:
            return [self.settings.is_greedy] * len(requests)
        documents = [(request.task_name, request.doc_id) for request in requests]
        count = Counter(documents)
        found = [one[0] is None or count[one] == 1 or one[0] in tasks for one in documents]
        if any(found) and not self.has_greedy:
            logger.warning(
                "a model of uniform noise has no greedy completion: whether it decodes the answer is not computed, "
                "and an accuracy that counts exact answers is 0 whatever the model"
            )
        return [one and self.has_greedy for one in found]


TRIED = 16
"""Positions of the trial canvas: enough for keys to have as many viewers as a score needs."""

OF_LENGTH = (ValueError, IndexError, RuntimeError)
"""Errors of a hook whose positions, or whose tensor with an axis of positions, a canvas of another length has."""


@torch.no_grad()
def check_likelihood_hooks(model: Any, hooks: Sequence[Any]) -> None:
    """Refuse hooks that need the steps of a run, which a likelihood does not have, by a trial forward pass.

    A hook that the trial canvas is too short for is not refused, with a warning: the requests may be longer.

    Raises:
        ValueError: naming a hook that needs steps, or a layer, head or part that the model does not have.
    """
    device = input_device(model)
    canvas = torch.zeros(1, TRIED, dtype=torch.long, device=device)
    for hook in hooks:
        with attach_hooks(model, hook):
            try:
                decoder_of(model)(input_ids=canvas, use_cache=False)
            except NoRunError:
                raise ValueError(
                    f"{hook} needs the steps of a run, and a likelihood is a forward pass without any; evaluate "
                    "tasks that generate with this hook, or give likelihoods one without steps"
                ) from None
            except OF_LENGTH as error:
                logger.warning(
                    "whether %s needs the steps of a run, which likelihoods do not have, is not known beforehand: "
                    "on %d positions it raises %s: %s",
                    shown(hook),
                    TRIED,
                    type(error).__name__,
                    error,
                )
