"""`check_fit`: whether settings, model and data of a training belong together, before any work is done."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import EarlyStoppingCallback

from dlm_lens.adapters.dit import takes_noise_level
from dlm_lens.attention import (
    SinkLayout,
    attends_observed_first,
    decoder_of,
    layer_windows,
    mask_window_of,
)
from dlm_lens.attention.sliding_windows import smallest_window
from dlm_lens.printable import shown
from dlm_lens.sampling.prompts import embeds_positions
from dlm_lens.training.objective import NextToken
from dlm_lens.training.optimizers import check_trained
from dlm_lens.training.settings import TrainingSettings

logger = logging.getLogger(__name__)

READABLE = ("read", "__iter__", "__getitem__")
"""One of these has a dataset, the first a `Source`."""


def check_fit(model: Any, settings: TrainingSettings, objective: Any, *, evaluates: bool) -> None:
    """Refuse settings that do not fit the model.

    Args:
        model: of the training.
        settings: of the run.
        objective: as returned by its `for_model`.
        evaluates: whether there are evaluation data.

    Raises:
        ValueError: evaluation losses without data, a model of which nothing is trained, an average of weights that
            are not float32, sink statistics of block diffusion, or isolated documents that would not be what they
            are alone.
    """
    check_evaluated(settings, evaluates=evaluates)
    check_trained(model)
    check_averaged(model, settings.optimisation.ema_decay)
    blocks = bool(getattr(objective, "block_length", 0))
    if settings.probe_steps and blocks:
        raise ValueError(
            f"probe_steps is {settings.probe_steps}: the probe shows whole canvases, which a model that "
            "decodes blocks never sees; set probe_steps=0 and record runs of its checkpoints (dlm_lens.record)"
        )
    if settings.data.packing != "isolated" or settings.data.prompt_column is not None:
        return
    if isinstance(objective, NextToken):
        raise ValueError(
            "data.packing is isolated, whose mask takes the place of the causal one of NextToken; set data.packing "
            "to joined"
        )
    if settings.data.bos and getattr(model.config, "clean_context", False):
        raise ValueError(
            f"data.packing is isolated and data.bos is true, and a beginning of text of {type(model).__name__} "
            "must not see the noise: there is no mask for both; set data.packing to joined, or data.bos to false"
        )
    check_isolated(model, settings.data.length, in_blocks=blocks)


def check_evaluated(settings: TrainingSettings, *, evaluates: bool) -> None:
    """Refuse `eval_steps` without evaluation data.

    Raises:
        ValueError: naming the remedy.
    """
    if settings.eval_steps and not evaluates:
        raise ValueError(
            f"eval_steps is {settings.eval_steps} and there are no evaluation data, so that no evaluation loss "
            "would be computed; give eval_dataset (in a config data.eval_path or data.eval_split), or set "
            "eval_steps to 0"
        )


def check_early_stopping(callbacks: Iterable[Any], settings: TrainingSettings) -> None:
    """Refuse transformers' EarlyStoppingCallback where there are no evaluation losses for it.

    Raises:
        ValueError: naming the remedy.
    """
    if not settings.eval_steps and any(isinstance(each, EarlyStoppingCallback) for each in callbacks):
        raise ValueError(
            "there is an EarlyStoppingCallback and eval_steps is 0, so that it would have no evaluation loss; set "
            "eval_steps and give eval_dataset, or leave the callback out"
        )


def check_averaged(model: Any, decay: float | None) -> None:
    """Refuse an average of weights in a precision in which it would not move.

    Raises:
        ValueError: naming a trained weight that is not float32.
    """
    if decay is None:
        return
    trained = ((name, weight.dtype) for name, weight in model.named_parameters() if weight.requires_grad)
    name, dtype = next(((name, dtype) for name, dtype in trained if dtype != torch.float32), ("", None))
    if dtype is not None:
        raise ValueError(
            f"optimisation.ema_decay is {decay}, and the weight {name} is {dtype}, in which an average loses "
            "its small steps; load the model with dtype=torch.float32"
        )


def check_rows(dataset: Any, name: str) -> None:
    """Refuse what is no dataset, before anything is read.

    Args:
        dataset: of the datasets library, a list of mappings, or a `Source`.
        name: of the argument.

    Raises:
        ValueError: no dataset, several by their names, one that can be read once, no rows, or rows that are no
            mappings.
    """
    if isinstance(dataset, Mapping | str) or not any(map(partial(hasattr, dataset), READABLE)):
        held = f"holds {', '.join(map(repr, dataset))}" if isinstance(dataset, Mapping) else f"is {shown(dataset)}"
        raise ValueError(f"{name} {held}; give one dataset, such as a list of mappings")
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"{name} is a {type(dataset).__name__}, which can be read once alone; give a list, or a dataset of the "
            "datasets library (IterableDataset.from_generator)"
        )
    if not hasattr(dataset, "__len__"):
        return
    if not len(dataset):
        raise ValueError(f"{name} is empty; give at least one row")
    if isinstance(dataset, list | tuple) and not isinstance(dataset[0], Mapping):
        raise ValueError(
            f"{name} holds {str(dataset[0])[:40]!r} as a row; give mappings from columns to values, such as "
            "{'text': 'a document'}"
        )


def check_positions(model: Any, length: int) -> None:
    """Refuse rows that are longer than the table of a network's positions, and warn where its training was shorter.

    Args:
        model: of the training.
        length: positions of a row.

    Raises:
        ValueError: the network has no embedding of the last positions.
    """
    trained = getattr(model.config, "max_position_embeddings", None)
    if trained is None or length <= trained:
        return
    if embeds_positions(model, trained):
        raise ValueError(
            f"data.length is {length}, and {type(model).__name__} has embeddings of {trained} positions; set "
            f"data.length to {trained} or less"
        )
    logger.warning(
        "data.length is %d, and %s was made for %d positions at most (max_position_embeddings)",
        length, type(model).__name__, trained,
    )  # fmt: skip


def check_isolated(model: Any, length: int, *, in_blocks: bool) -> None:
    """Refuse a network in which isolated documents would not be what they are alone.

    The mask of isolated documents takes the place of the network's own: full attention alone is left as it is.

    Args:
        model: with hook points.
        length: positions of a row, the most that a document has.
        in_blocks: whether the objective is block diffusion, whose mask has the documents in it.

    Raises:
        ValueError: sinks at the end of a row, one noise level for a row, layers that are no attention, sliding
            windows of less than `length`, or attention in blocks or in an order of its own.
    """
    name, sinks, joined = type(model).__name__, SinkLayout.of(model), "set data.packing to joined"
    if sinks.count and _follow_the_row(model, sinks):
        raise ValueError(
            "data.packing is isolated, and the sinks at the end of a row have one position for all of its "
            "documents, so that none is what it would be alone; set model.position to front, or "
            "data.packing to joined"
        )
    if takes_noise_level(model):
        raise ValueError(
            f"data.packing is isolated, and {name} is given one noise level for a row, so that no document is what "
            f"it would be alone; {joined}"
        )
    if not in_blocks and (own := _own_attention(model, length)) is not None:
        raise ValueError(
            f"data.packing is isolated, whose mask takes the place of the network's own, and {name} has {own}; "
            f"{joined}"
        )


def _follow_the_row(model: Any, sinks: SinkLayout) -> bool:
    """Whether the position of the sinks depends on those of a row; GIDD's learned key is not rotated."""
    positions = getattr(decoder_of(model), "network_positions", SinkLayout.position_ids)
    canvases = (torch.tensor([[0, 0]]), torch.tensor([[0, 1]]))
    first, other = (positions(sinks, canvas)[:, sinks.sinks(2 + sinks.count)] for canvas in canvases)
    return not torch.equal(first, other)


def _own_attention(model: Any, length: int) -> str | None:
    """What hides more from a network's queries than a mask of documents does; None where nothing does."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention", "moe"}):
        return f"{', '.join(others)} layers"
    try:
        windows = [window for window in layer_windows(model) if window is not None]
    except ValueError:  # windows for which there are no statistics: without causality, or beside learned sinks
        windows = [smallest_window(config) or 1]
    if windows and min(windows) < length:
        return f"sliding windows of {min(windows)} positions, fewer than the {length} of a row"
    blocks = getattr(config, "block_causal_length", None)
    if blocks is not None and blocks < length:
        return f"attention in blocks of {blocks}, fewer than the {length} positions of a row"
    if mask_window_of(config) is not None or attends_observed_first(config):
        return "attention in an order of its own"
    return None
