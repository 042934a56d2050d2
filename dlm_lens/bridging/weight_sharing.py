"""A second model over the same weights, for a host that changes the modules it is given."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dlm_lens.attention.model_access import ModelLock, lock_of

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# transformers' own hooks behind output_attentions; without the flag it installs them anew where they are needed.
_CAPTURING = "_output_capturing_hooks_installed"


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model with modules of its own and the parameters, buffers and tokenizer of `model`.

    What replaces a module or a parameter of the twin leaves `model` alone; training either trains both. Hooks that
    hang on `model` stay there and do not act in the twin.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers(), getattr(model, "tokenizer", None)]
    memo: dict[int, Any] = {id(value): value for value in shared if value is not None}
    lock = lock_of(model)
    if lock is not None:
        # Hooks on `model` do not hinder: they are forgotten below.
        memo[id(lock)] = ModelLock()
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        _forget_hooks(module)
    return twin


def _forget_hooks(module: nn.Module) -> None:
    for name in _HOOK_TABLES:
        getattr(module, name).clear()
    module._forward_hooks_with_kwargs.clear()
    module._forward_hooks_always_called.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    if getattr(module, _CAPTURING, False):
        setattr(module, _CAPTURING, False)
