"""Hooks that make no sense in likelihoods, refused before any request is asked."""

from collections.abc import Sequence
from typing import Any

import torch

from dlm_lens.attention.hook_context import NoRunError
from dlm_lens.hooks import attach_hooks
from dlm_lens.placement import input_device

TRIED = 16
"""Positions of the canvas that hooks are tried on: enough for every key to have the viewers that a score needs."""


@torch.no_grad()
def refuse_likelihood_hooks(model: Any, hooks: Sequence[Any]) -> None:
    """Try every hook in a forward pass without steps, which is all that a likelihood has.

    Raises:
        ValueError: naming a hook that needs steps.
    """
    device = input_device(model)
    canvas = torch.zeros(1, TRIED, dtype=torch.long, device=device)
    for hook in hooks:
        try:
            with attach_hooks(model, hook):
                model.get_decoder()(input_ids=canvas, use_cache=False)
        except NoRunError:
            raise ValueError(
                f"{hook} needs the steps of a run, and a likelihood is a forward pass without any; evaluate tasks "
                "that generate with this hook, or give likelihoods one without steps"
            ) from None
        except Exception:
            # What else is wrong, such as a position that this short canvas lacks, is for the requests to tell.
            continue
