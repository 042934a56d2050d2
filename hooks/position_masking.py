"""`mask_positions` and `mask_tokens`: hide keys from every query, by their positions or by their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from dlm_lens.attention import ColumnHook, ColumnMask, ColumnStats, PointContext, RunStep, SinkToken, Stage, run_of
from dlm_lens.hooks.base import call_of, check_stage
from dlm_lens.hooks.positions import check_sinks_known
from dlm_lens.sampling.token_text import TokenTexts
from dlm_lens.sinks.analysis.enrichment import class_of

OF_TEXT = ("punctuation", "whitespace", "digits", "words", "special")
"""Classes for which the tokens' text is needed."""

CLASSES = ("mask", "prompt", "eos", *OF_TEXT)
"""The classes of `mask_tokens`."""


@dataclass(frozen=True, repr=False)
class MaskPositions(ColumnHook):
    """Hide keys from all queries; build it with `mask_positions`.

    Raises:
        ValueError: no position, or an unknown stage.
    """

    positions: tuple[int | SinkToken, ...]
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False

    def __post_init__(self) -> None:
        check_stage(self.stage, self.renormalise)
        if not self.positions:
            raise ValueError("mask_positions needs at least one position")
        given_positions: tuple[Any, ...] = self.positions
        for position in given_positions:
            if isinstance(position, list | tuple | range):
                given = ", ".join(map(repr, position)) if len(position) <= 8 else "*positions"
                raise ValueError(
                    f"mask_positions({position!r:.60}) takes positions one by one: mask_positions({given})"
                )
            if isinstance(position, bool) or not isinstance(position, int | SinkToken):
                raise ValueError(f"mask_positions({position!r}): a position is a whole number or sink(i)")

    def __repr__(self) -> str:
        return call_of(self, "mask_positions", ("positions",))

    stateless = True

    @property
    def padding_safe(self) -> bool:
        """Whether all positions are sink tokens or counted from the end, which left padding does not shift."""
        return all(isinstance(position, SinkToken) or position < 0 for position in self.positions)

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask:
        """The columns at the positions, in every row and head."""
        check_sinks_known(self.positions, hook, self)
        device = None if hook.run is None else hook.run.tokens.device
        hidden = torch.zeros(1, 1, keys, dtype=torch.bool, device=device)
        for position in self.positions:
            place = hook.sinks.locate(position, keys)
            hidden[..., place : place + 1] = True
        return ColumnMask(hidden, self.stage, self.keep_self, self.renormalise, most=len(self.positions))


def mask_positions(
    *positions: int | SinkToken,
    stage: Stage = "before_softmax",
    renormalise: bool = False,
    keep_self: bool = False,
) -> MaskPositions:
    """Hide the keys at `positions` (canvas positions, negative from the end, or `sink(0)`) from every query.

    Before the softmax the other keys take over the attention; after it, the rows lose it and sum to less than
    1, unless `renormalise`. A row that would end empty keeps its own position; with `keep_self` every row does.

    Raises:
        ValueError: no position, or an unknown stage.
    """
    return MaskPositions(positions, stage, renormalise, keep_self)


@dataclass(frozen=True, repr=False)
class MaskTokens(ColumnHook):
    """Hide keys by their tokens; build it with `mask_tokens`.

    Raises:
        ValueError: no class, or an unknown one.
    """

    classes: tuple[str | int, ...]
    stage: Stage = "before_softmax"
    renormalise: bool = False
    keep_self: bool = False

    def __post_init__(self) -> None:
        check_stage(self.stage, self.renormalise)
        if not self.classes:
            raise ValueError(f"mask_tokens needs a class ({', '.join(CLASSES)}) or a token id")
        for one in self.classes:
            valid = one in CLASSES if isinstance(one, str) else isinstance(one, int) and not isinstance(one, bool)
            if not valid:
                raise ValueError(f"mask_tokens({one!r}): it must be a token id, or one of {', '.join(CLASSES)}")

    def __repr__(self) -> str:
        return call_of(self, "mask_tokens", ("classes",))

    padding_safe = True

    @property
    def stateless(self) -> bool:
        """Unless it hides the prompt, which a forward pass alone does not show."""
        return "prompt" not in self.classes

    def hidden(self, keys: int, columns: Callable[[], ColumnStats], hook: PointContext) -> ColumnMask:
        """The positions, in all heads; learned sink tokens are not on the canvas and stay visible."""
        run = run_of(hook, self)
        hidden = torch.zeros(len(run.tokens), 1, keys, dtype=torch.bool, device=run.tokens.device)
        chosen = run.once(("chosen", self), lambda: self._chosen(run))
        hidden[:, 0, hook.sinks.canvas(keys)] = chosen
        most = run.once(("most", self), lambda: int(chosen.sum(-1).max()))
        return ColumnMask(hidden, self.stage, self.keep_self, self.renormalise, most=most)

    def _chosen(self, run: RunStep) -> Bool[Tensor, "row position"]:
        chosen = torch.zeros_like(run.masked)
        for one in self.classes:
            if one == "mask":
                chosen = chosen | run.masked
            elif one == "prompt":
                chosen = chosen | run.prompt
            else:
                of_class = torch.zeros_like(run.masked)
                for token in self._ids(one, run):
                    of_class = of_class | (run.tokens == token)
                chosen = chosen | (of_class & ~run.masked)
        return chosen & run.valid

    def _ids(self, one: str | int, run: RunStep) -> list[int]:
        """The ids of a class, among the ids on the canvas."""
        if isinstance(one, int):
            return [one]
        if one == "eos":
            return sorted(_end_ids(run.config))
        return [token for token in run.tokens.unique().tolist() if self._class_of(token, run) == one]

    def _class_of(self, token: int, run: RunStep) -> str:
        if run.tokenizer is None:
            raise ValueError(f"{self} needs a tokenizer to tell the tokens' text; give token ids instead")
        classes: dict[int, str] = run.memory.setdefault("classes of tokens", {})
        if token not in classes:
            tokenizer: Any = run.tokenizer
            special = token in getattr(tokenizer, "all_special_ids", ()) or token in _end_ids(run.config)
            classes[token] = "special" if special else class_of(TokenTexts(tokenizer).exact(token))
        return classes[token]


def _end_ids(config: Any) -> set[int]:
    """Ids that end a text or a turn."""
    eos = getattr(config, "eos_token_id", None)
    ids = [*(eos if isinstance(eos, list | tuple) else [eos]), getattr(config, "eot_token_id", None)]
    return {int(one) for one in ids if one is not None}


def mask_tokens(
    *classes: str | int, stage: Stage = "before_softmax", renormalise: bool = False, keep_self: bool = False
) -> MaskTokens:
    """Hide keys from every query by their tokens at the step: classes of tokens, or token ids.

    "mask": positions that are still masked. "prompt": the prompt. "eos": ids that end a text or a turn.
    "punctuation" (and symbols), "whitespace", "digits", "words": by the token's text, the classes of
    `token_enrichment`. "special": the tokenizer's special tokens. All classes but "mask" and "prompt" exclude
    masked positions.

    Raises:
        ValueError: no class, or an unknown one.
    """
    return MaskTokens(classes, stage, renormalise, keep_self)
