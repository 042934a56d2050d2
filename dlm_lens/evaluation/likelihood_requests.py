"""Likelihood requests in ids: contexts with continuations, and the windows of long texts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.likelihoods import Item
from dlm_lens.evaluation.settings import LikelihoodSettings, request_seed


@dataclass(frozen=True)
class ItemMaker:
    """Turns likelihood requests into items.

    Args:
        encoder: of the model.
        settings: of likelihoods.
        seed: of the evaluation.
    """

    encoder: Encoder
    settings: LikelihoodSettings
    seed: int

    def item(self, place: int, arguments: tuple[str, str], greedy: bool) -> Item:
        """A context with its continuation; a context that is too long loses its beginning."""
        context, continuation = arguments
        before, after = self.encoder.pair(context, continuation)
        if self.settings.append_eos:
            after = [*after, int(self.encoder.eos)]
        return Item(place, self.encoder.fitted(before, len(after)), after, request_seed(self.seed, context), greedy)

    def windows(self, place: int, text: str) -> list[Item]:
        """A text as windows that each see the tokens before them; every token is scored once."""
        ids = self.encoder.text(text)
        ids = ids[1:] if ids[:1] == [self.encoder.prefix] else ids
        # The harness counts an AR model's inputs, which lack the last token; a canvas holds it.
        windows = get_rolling_token_windows(ids, self.encoder.prefix, self.encoder.max_length - 1, context_len=1)
        return [
            Item(place, before, after, request_seed(self.seed, text, number), False)
            for number, (before, after) in enumerate(map(make_disjoint_window, windows))
        ]

    def asked_greedily(self, requests: Sequence[Any], read: frozenset[str]) -> list[bool]:
        """Whether each request asks what greedy decoding writes: where a metric reads it.

        Those of documents with a single request, and those of the tasks in `read`, unless the settings say.
        """
        if self.settings.is_greedy is not None:
            return [self.settings.is_greedy] * len(requests)
        documents = [(request.task_name, request.doc_id) for request in requests]
        count = Counter(documents)
        return [one[0] is None or count[one] == 1 or one[0] in read for one in documents]
