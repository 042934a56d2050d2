"""Seeds of requests: functions of what is asked, never of the order or the batch."""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any


def request_key(kind: str, arguments: Sequence[Any], repeat: int = 0) -> str:
    """A name for a request that is the same in every run."""
    text = json.dumps([kind, list(arguments), repeat], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def request_seed(seed: int, context: str, repeat: int = 0) -> int:
    """The seed of a request, from the run's and from its context.

    Continuations of one context share it: answers of equal length then get equal masks, which sharpens their
    comparison.
    """
    digest = hashlib.sha256(json.dumps([seed, context, repeat]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def repeats(requests: Sequence[Hashable]) -> list[int]:
    """How often each request stood in the list before: the harness asks for k draws by k copies."""
    seen: Counter[Hashable] = Counter()
    found = []
    for request in requests:
        found.append(seen[request])
        seen[request] += 1
    return found
