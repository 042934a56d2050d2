"""Prompts in every form a user has them, as one left-padded batch of token ids."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from dlm_lens.adapters.registry import family_of
from dlm_lens.arguments import is_whole, level_of_caller
from dlm_lens.placement import canvas_device
from dlm_lens.printable import shown

MOST_CONTEXTS = 64
"""A canvas of more times the trained length is refused: time and memory of attention grow with its square."""

MOST_WORDS = 5
"""A warning of unknown words names so many."""


@dataclass(frozen=True)
class Prompts:
    """Token ids of a batch, and which of them are content rather than padding on the left."""

    ids: Int[Tensor, "batch position"]
    attention_mask: Bool[Tensor, "batch position"]


def read_prompts(model: Any, prompt: Any, attention_mask: Any = None) -> Prompts:
    """Turn text, chat messages or ids into a checked, left-padded batch on the model's device.

    A model that writes without a prompt (`empty_prompt` of its config: MDLM, BD3-LM, SEDD) takes empty texts and
    empty lists of ids.

    Args:
        model: a model of `dlm_lens.load`.
        prompt: a text or a list of texts; a list of chat messages ({"role", "content"}) or a list of such lists;
            ids as a tensor or array `[position]` or `[batch, position]`, a list, or lists of unequal length; or
            what a tokenizer returns (a mapping with "input_ids" and perhaps "attention_mask").
        attention_mask: 1 for content, 0 for padding on the left; with rows of unequal length 1 alone. It may cover
            the answer too, which is content, as MMaDA's does.

    Raises:
        ValueError: an empty prompt or one of an unknown kind, ids without an embedding row, padding on the right,
            no tokenizer for text.
    """
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise ValueError(
                f"the prompt is a mapping of {', '.join(map(repr, prompt)) or 'nothing'} without 'input_ids'; give "
                "what a tokenizer returns, or chat messages in a list"
            )
        _check_ids_alone(prompt)
        attention_mask = prompt.get("attention_mask") if attention_mask is None else attention_mask
        prompt = prompt["input_ids"]
    rows = model.get_input_embeddings().weight.shape[0]
    empty = getattr(model.config, "empty_prompt", None)
    ids = _to_ids(model, prompt, may_be_empty=empty is not None)
    if isinstance(ids, Tensor) and not ids.numel() and empty is not None:
        ids = [[]] * len(ids)
    if isinstance(ids, Tensor):
        mask = torch.ones_like(ids) if attention_mask is None else _read_mask(attention_mask)
    else:
        if attention_mask is not None and len({len(row) for row in ids}) > 1:
            if not _all_content(attention_mask, ids):
                raise ValueError(
                    "attention_mask beside prompts of unequal length: leave it out, padding is added here"
                )
            attention_mask = None
        ids = [row or empty or [] for row in ids]
        width = max(len(row) for row in ids)
        pad = padding_id(model)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], dtype=torch.long)
        check_id_range(ids)
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in ids], dtype=torch.long)
        mask = mask if attention_mask is None else _read_mask(attention_mask)
    mask = mask.reshape(1, -1) if mask.ndim == 1 else mask
    if mask.ndim == 2 and bool(mask[:, ids.shape[1] :].all()):
        mask = mask[:, : ids.shape[1]]
    _check(ids, mask, rows=rows, may_be_empty=empty == [])
    device = canvas_device(model)
    return Prompts(ids.to(device), mask.bool().to(device))


def _all_content(mask: Any, ids: Sequence[Sequence[int]]) -> bool:
    """Whether a mask has a 1 for each id of each row, as a tokenizer returns it where it pads nothing."""
    try:
        rows = [list(as_list(row)) for row in as_list(mask)]
    except TypeError:
        return False
    same = [len(row) for row in rows] == [len(row) for row in ids]
    return same and all(each == 1 for row in rows for each in row)


def _read_mask(given: Any) -> Tensor:
    """A mask of any form as a tensor of zeros and ones.

    Raises:
        ValueError: something else.
    """
    try:
        mask = torch.as_tensor(given)
        known = not mask.is_complex() and bool(((mask == 0) | (mask == 1)).all())
    except (TypeError, ValueError, RuntimeError):
        known = False
    if not known:
        raise ValueError(
            f"attention_mask is {shown(given)}; it must hold 1 for content and 0 for padding, row by row"
        )
    return mask


def check_id_range(rows: Sequence[Sequence[int]]) -> None:
    """Raise if an id does not fit into 64 bits, where a tensor would overflow.

    Raises:
        ValueError: naming it.
    """
    for row in rows:
        for token in row:
            if not -(2**63) <= token < 2**63:
                raise ValueError(
                    f"token id {shown(token)} has no row in any embedding; was it meant as a token id?"
                )


def check_text(text: str, name: str) -> None:
    """Raise unless a tokenizer can read the text.

    Raises:
        ValueError: half of a surrogate pair, which no encoding of text has.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds a lone surrogate, {text[error.start]!a} at character {error.start}, which is no text; "
            "decode the bytes that it came from with errors='replace'"
        ) from None


def warn_beyond_context(model: Any, positions: int) -> None:
    """Warn if the canvas is longer than the model was trained for.

    Raises:
        ValueError: it is more than `MOST_CONTEXTS` times as long, or the model has no embeddings of its positions.
    """
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is not None and positions > MOST_CONTEXTS * trained:
        raise ValueError(
            f"the canvas has {positions} positions, more than {MOST_CONTEXTS} times the {trained} that the model "
            "was trained on; shorten the prompt or the answer"
        )
    if trained is not None and positions > trained and embeds_positions(model, trained):
        raise ValueError(
            f"the canvas has {positions} positions, and the model has embeddings of {trained}; shorten the prompt "
            "or the answer"
        )
    if trained is not None and positions > trained:
        warnings.warn(
            f"the canvas has {positions} positions, but the model was trained on {trained} at most; "
            "shorten the prompt or the answer, or read the result with care",
            stacklevel=level_of_caller(),
        )


def embeds_positions(model: Any, trained: int) -> bool:
    """Whether the network looks positions up in a table of `trained` rows (GPT-2), or of two more (OPT)."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    words = model.get_input_embeddings()
    return any(table is not words and 0 <= table.num_embeddings - trained <= 2 for table in tables)


def warn_untrained_blocks(model: Any, block_length: int, most: int | None = None) -> None:
    """Warn if blocks have another length than in the model's training, where its config says so.

    Args:
        model: whose config may have a `trained_block_length`.
        block_length: of the run.
        most: positions of all blocks, where a single block may be shorter; None if no block may.
    """
    trained = getattr(model.config, "trained_block_length", None)
    if trained is not None and block_length != (trained if most is None else min(trained, most)):
        warnings.warn(
            f"block_length is {block_length}, but the model was trained with blocks of {trained}; leave "
            "block_length out, or read the result with care",
            stacklevel=level_of_caller(),
        )


def _to_ids(model: Any, prompt: Any, may_be_empty: bool) -> Tensor | list[list[int]]:
    if isinstance(prompt, Tensor):
        whole = not prompt.is_floating_point() and not prompt.is_complex() and prompt.dtype != torch.bool
        if not whole or prompt.ndim not in (1, 2):
            kind = f"{prompt.dtype} {list(prompt.shape)}"
            raise ValueError(f"prompt ids must be integers [position] or [batch, position], got {kind}")
        prompt = prompt.detach()
        return prompt.long().unsqueeze(0) if prompt.ndim == 1 else prompt.long()
    if isinstance(prompt, str):
        return _tokenize(model, [prompt], may_be_empty)
    if hasattr(getattr(prompt, "run", prompt), "canvases"):
        raise ValueError(
            "the prompt is a run; give its prompt, or take dlm_lens.replay(model, run, hooks) for the canvases"
        )
    prompt = as_list(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or len(prompt) == 0:
        raise ValueError(
            f"the prompt is empty or of an unknown kind: {shown(prompt)}; give text, chat messages or ids"
        )
    kinds = {_kind(entry) for entry in prompt}
    if kinds == {"text"}:
        return _tokenize(model, list(prompt), may_be_empty)
    if kinds == {"message"}:
        return _apply_template(model, [prompt])
    if kinds == {"chat"}:
        return _apply_template(model, list(prompt))
    if kinds == {"id"}:
        return [[int(i) for i in prompt]]
    if kinds == {"ids"}:
        return [[int(i) for i in row] for row in prompt]
    raise ValueError(
        f"the prompts are of several kinds or of an unknown one: {shown(prompt)}; give texts, or chats (lists of "
        "messages), or lists of whole-number ids, all of one kind"
    )


def as_list(value: Any) -> Any:
    """An array or a column of a table as a list; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Tensor) else value


def is_id(value: Any) -> bool:
    """Whether this can be a token's id: a whole number, also one in a tensor or array."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and value.dtype != torch.bool
    return is_whole(value)


def _kind(entry: Any) -> str | None:
    """The kind of a list's entry; None for objects that no prompt consists of."""
    if isinstance(entry, str):
        return "text"
    if isinstance(entry, Mapping):
        return "message"
    if is_id(entry):
        return "id"
    if isinstance(entry, Tensor):
        return "ids" if entry.ndim == 1 and all(map(is_id, entry[:1])) else None
    entry = as_list(entry)
    if not isinstance(entry, Sequence) or isinstance(entry, bytes):
        return None
    if len(entry) and all(isinstance(part, Mapping) for part in entry):
        return "chat"
    return "ids" if all(map(is_id, entry)) else None


def _tokenizer(model: Any) -> Any:
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer, so it takes token ids only; or set model.tokenizer")
    return model.tokenizer


def _tokenize(model: Any, texts: list[str], may_be_empty: bool) -> list[list[int]]:
    if may_be_empty and not any(texts):
        return [[] for _ in texts]
    tokenizer = _tokenizer(model)
    for row, text in enumerate(texts):
        if not (text.strip() or may_be_empty):
            raise ValueError(f"prompt {row} is empty; give at least one token (ids of the BOS token alone will do)")
        check_text(text, f"prompt {row}")
    options = family_of(model.config.model_type).text_options
    return _read_texts(tokenizer, texts, options)


def _apply_template(model: Any, chats: list[Any]) -> list[list[int]]:
    tokenizer = _tokenizer(model)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat messages given, but the model's tokenizer has no chat template; give plain text")
    texts, options = [], {"add_generation_prompt": True, **family_of(model.config.model_type).chat_options}
    for row, chat in enumerate(chats):
        _check_text_alone(chat, row)
        try:
            texts += tokenizer.apply_chat_template([list(chat)], tokenize=False, **options)
        except Exception as error:  # a template is a program of the checkpoint, which may raise anything
            raise ValueError(
                f"prompt {row} is no chat that the model's template takes ({' '.join(str(error).split())}); give "
                'messages such as {"role": "user", "content": "..."}'
            ) from error
        check_text(texts[-1], f"prompt {row}")
    # The template writes its own special tokens.
    return _read_texts(tokenizer, texts, {"add_special_tokens": False})


def _read_texts(tokenizer: Any, texts: list[str], options: Mapping[str, Any]) -> list[list[int]]:
    """The ids of texts; warns of words for which the tokenizer has its unknown token only, as the toy's has."""
    read = tokenizer(texts, **options)
    # A tokenizer of the user's own may have none. GPT-2's is also its end of text, which a text may hold.
    unknown_id, written = (getattr(tokenizer, name, None) for name in ("unk_token_id", "unk_token"))
    rows = () if unknown_id is None else getattr(read, "encodings", None) or ()
    unknown = {
        text[slice(*place)]
        for text, row in zip(texts, rows, strict=False)
        for token, place in zip(row.ids, row.offsets, strict=True)
        if token == unknown_id
    }
    # A token that is added to the text has no place in it.
    if words := sorted(unknown - {"", written}):
        more = f" and {len(words) - MOST_WORDS} more" if len(words) > MOST_WORDS else ""
        warnings.warn(
            f"the tokenizer has no token for {', '.join(map(shown, words[:MOST_WORDS]))}{more}, and the model sees "
            f"{written} there; write prompts in words of its vocabulary",
            stacklevel=level_of_caller(),
        )
    return [list(ids) for ids in read["input_ids"]]


NO_IMAGES = (
    "runs read text alone: leave it out, or make a forward pass of the model with it (DiffusionGemma: "
    "model(input_ids, canvas_start=..., pixel_values=...), under attach_hooks or record_forward)"
)


def _check_ids_alone(prompt: Mapping[str, Any]) -> None:
    """Refuse what a processor returns for images, sound and films, of which a run would see nothing.

    Raises:
        ValueError: naming the field.
    """
    kinds = ("pixel", "image", "video", "audio", "input_features", "mm_")
    other = [name for name, value in prompt.items() if value is not None and str(name).startswith(kinds)]
    if other:
        raise ValueError(f"the prompt holds {other[0]!r}; {NO_IMAGES}")


def _check_text_alone(chat: Any, row: int) -> None:
    """Refuse chats with images and other parts that are no text.

    Raises:
        ValueError: naming the part.
    """
    contents = [message.get("content") for message in chat if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    other = [part.get("type") for part in parts if isinstance(part, Mapping) and part.get("type") != "text"]
    if other:
        raise ValueError(f"prompt {row} holds a part of type {other[0]!r}; {NO_IMAGES}")


def padding_id(model: Any) -> int:
    """An id that is not the mask; padding is invisible, so any other id does."""
    config = model.config
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    mask = getattr(config, "mask_token_id", None)
    candidates = (getattr(model.tokenizer, "pad_token_id", None), config.pad_token_id, eos, 0, 1)
    return next(int(i) for i in candidates if i is not None and i != mask)


def _check(ids: Tensor, mask: Tensor, rows: int, may_be_empty: bool) -> None:
    if ids.numel() == 0 and not (may_be_empty and len(ids)):
        raise ValueError(f"the prompt is empty: ids of shape {list(ids.shape)}; give at least one token")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, the prompt ids {list(ids.shape)}")
    outside = (ids < 0) | (ids >= rows)
    if bool(outside.any()):
        row, position = outside.nonzero()[0].tolist()
        raise ValueError(
            f"token id {int(ids[row, position])} (row {row}, position {position}) has no row in the model's "
            f"embedding of {rows}; was it tokenized for another model?"
        )
    for row, keep in enumerate(mask.bool()):
        if not (bool(keep.any()) or may_be_empty):
            raise ValueError(f"prompt {row} is empty: its attention_mask has no 1")
        if bool((keep[:-1] & ~keep[1:]).any()):
            raise ValueError(
                f"row {row} is padded after its first token; the answer follows the prompt, so pad on the left"
            )
