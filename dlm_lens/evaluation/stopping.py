"""Where a generated text ends: at an end token, or at a stop sequence."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Cut(NamedTuple):
    """A text, and whether something ended it."""

    text: str
    ended: bool


def end_ids(config: Any) -> frozenset[int]:
    """Ids that end an answer: end of text and end of turn."""
    eos = config.eos_token_id
    found = [*(eos if isinstance(eos, list | tuple) else [eos]), getattr(config, "eot_token_id", None)]
    return frozenset(int(one) for one in found if one is not None)


def cut(tokenizer: Any, ids: Sequence[int], ends: frozenset[int], until: Sequence[str]) -> Cut:
    """The text of `ids` up to the first end token, then up to the first stop sequence.

    Stop sequences are looked for in the raw text, since they may be special tokens, which the result leaves out.
    """
    stop = next((place for place, one in enumerate(ids) if one in ends), None)
    text = str(tokenizer.decode(list(ids[:stop]), skip_special_tokens=False))
    places = [place for one in until if one and (place := text.find(one)) >= 0]
    text = text[: min(places)] if places else text
    for one in set(ids[:stop]).intersection(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        text = text.replace(str(tokenizer.convert_ids_to_tokens(one)), "")
    return Cut(text, stop is not None or bool(places))
