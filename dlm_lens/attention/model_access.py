"""Exclusive use of a model: one thread at a time, and no compiled code while hooks are on it.

Hooks, readers and traces are on the model's modules, so that a forward pass of another thread would run them too.
Compiled code (`torch.compile`, `module.compile()`) was traced without them and would leave them out.
"""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from dlm_lens.arguments import level_of_caller
from dlm_lens.placement import plain_defaults
from dlm_lens.printable import shown

logger = logging.getLogger(__name__)

SECONDS_UNTIL_WARNING = 10.0
"""A thread that waits longer than this for a model logs once which thread it waits for."""

P = ParamSpec("P")
R = TypeVar("R")

_changed = threading.Condition()
_waiting: dict[threading.Thread, "ModelLock"] = {}


class ModelLock:
    """The lock of one model, shared by its attention modules; the thread that holds it may take it again.

    A copy (`copy.deepcopy`, pickle) has a lock of its own.

    Attributes:
        owner: the thread that holds it.
        depth: how often that thread holds it.
        listeners: how many `listening` blocks are open.
        calls: how many `in_use` blocks are open.
    """

    def __init__(self) -> None:
        self.owner: threading.Thread | None = None
        self.depth = self.listeners = self.calls = 0

    def __reduce__(self) -> tuple[Any, ...]:
        if self.listeners:
            raise RuntimeError(
                "a model with hooks, a recording or a trace on it cannot be copied: the copy would keep them; copy "
                "it before or after"
            )
        return ModelLock, ()

    def acquire(self) -> None:
        """Wait until no other thread holds the lock, and take it.

        Raises:
            RuntimeError: the wait would never end: two threads wait for each other's model, or the thread that
                holds this one has ended.
        """
        me, warned = threading.current_thread(), False
        with _changed:
            while self.owner is not None and self.owner is not me:
                self._check_wait(me)
                _waiting[me] = self
                try:
                    waited_in_vain = not _changed.wait(SECONDS_UNTIL_WARNING)
                finally:
                    del _waiting[me]
                if waited_in_vain and not warned and self.owner is not None:
                    logger.warning("%s waits for %s, which uses the same model", me.name, self.owner.name)
                    warned = True
            self.owner = me
            self.depth += 1

    def release(self) -> None:
        """Give the lock back; called once for each `acquire`."""
        with _changed:
            self.depth -= 1
            if self.depth == 0:
                self.owner = None
                _changed.notify_all()

    def check_thread(self) -> None:
        """Refuse a forward pass beside another thread's hooks.

        Raises:
            RuntimeError: another thread's hooks, readers or trace are on the model.
        """
        owner = self.owner
        if not self.listeners or owner is None or owner is threading.current_thread():
            return
        # Gradient checkpointing repeats a forward pass in a thread of autograd's own.
        if torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"a forward pass in {threading.current_thread().name} beside hooks, a recording or a trace of "
                f"{owner.name} on the same model; give each thread a model of its own, or run one after the other"
            )

    def _check_wait(self, me: threading.Thread) -> None:
        lock: ModelLock | None = self
        while lock is not None and lock.owner is not None:
            if lock.owner is me:
                raise RuntimeError(
                    f"{me.name} and another thread each wait for a model that the other one uses; use the models "
                    "in the same order, or give each thread models of its own"
                )
            if not lock.owner.is_alive():
                raise RuntimeError(
                    f"the thread {lock.owner.name} has ended while its hooks are still on the model; close what it "
                    "opened (`with attach_hooks(...)`, `with record_forward(...)`), or load the model again"
                )
            lock = _waiting.get(lock.owner)


def lock_of(model: Any) -> ModelLock | None:
    """The lock of a model with hook points, or of a part of one; None without hook points."""
    modules = model.modules() if callable(getattr(model, "modules", None)) else ()
    return next((found for module in modules if isinstance(found := vars(module).get("lock"), ModelLock)), None)


def has_listeners(model: Any) -> bool:
    """Whether hooks, readers or a trace are on a model with hook points, which have to see every pass."""
    lock = lock_of(model)
    return lock is not None and lock.listeners > 0


@contextmanager
def held(lock: ModelLock | None) -> Iterator[None]:
    """A block in which the thread holds the lock of a model; None for a model without hook points.

    Raises:
        RuntimeError: as `ModelLock.acquire`.
    """
    if lock is None:
        yield
        return
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def in_use(model: Any, *, training: bool = False) -> Iterator[None]:
    """A block in which other threads wait for `model`; the same thread may enter it again.

    The outermost block warns of a model in training mode whose dropout makes every pass random.

    Args:
        model: with hook points, or a part of one.
        training: whether the block trains the model, which is in training mode on purpose; blocks inside it, of
            callbacks, warn.

    Raises:
        RuntimeError: as `ModelLock.acquire`.
    """
    lock = lock_of(model)
    with held(lock):
        if lock is None or training:
            yield
            return
        if not lock.calls and _is_training(model):
            _warn_of_dropout(model)
        lock.calls += 1
        try:
            yield
        finally:
            lock.calls -= 1


def _is_training(model: nn.Module) -> bool:
    parts: list[nn.Module | None] = [model]
    for part in parts:
        if part is not None:
            if part.training:
                return True
            parts += part._modules.values()
    return False


def _warn_of_dropout(model: Any) -> None:
    """Warn if a module in training mode drops something out at random."""
    for name, module in model.named_modules():
        for rate, value in _dropout_rates(module).items() if module.training else ():
            # A bridge keeps the modules of its model inside its own.
            where = f"{name}.{rate}".replace("._original_component", "").removeprefix(".")
            warnings.warn(
                f"the model is in training mode with dropout ({where} is {value:g}), so that every pass is random: "
                "call model.eval() first",
                stacklevel=level_of_caller(),
            )
            return


def _dropout_rates(module: nn.Module) -> dict[str, float]:
    """The rates above 0 at which a module drops out in training, by the names of its attributes."""
    own = vars(module)
    found = {name: value for name, value in own.items() if "drop" in name.lower()}
    if "drop" in type(module).__name__.lower():
        found["p"] = own.get("p")
    if "hook_z" in module._modules:  # attention, which may read the rate from its config in every pass
        found["config.attention_dropout"] = getattr(own.get("config"), "attention_dropout", None)
    return {name: value for name, value in found.items() if type(value) in (int, float) and 0 < value <= 1}


def exclusive(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for functions whose first argument is the model: the whole call runs inside `in_use(model)`.

    A `DiffusionLM` stands for the model that it wraps. torch's default device and inference mode do not reach
    inside. What is no module at all raises a ValueError.
    """

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function while other threads wait for its model."""
        given: list[Any] = list(args)
        if given:
            given[0] = model = network_of(given[0])
        elif "model" in kwargs:
            kwargs["model"] = model = network_of(kwargs["model"])
        else:
            return function(*given, **kwargs)  # which says that the model is missing
        if not hasattr(model, "named_modules"):  # a scan has a stand-in that is no module
            raise ValueError(f"{function.__name__}: {shown(model)} is no model; load one with dlm_lens.load")
        with in_use(model), plain_defaults():
            return function(*given, **kwargs)

    return alone


def network_of(model: Any) -> Any:
    """The module that a wrapper of nnsight holds; anything else itself."""
    inner = None if isinstance(model, nn.Module) else getattr(model, "_module", None)
    return inner if isinstance(inner, nn.Module) else model


class _Eager:
    """Number of open `eagerly` blocks in all threads: torch has one stance per process."""

    count = 0
    stance: Any = None
    lock = threading.Lock()


@contextmanager
def eagerly() -> Iterator[None]:
    """Run no code of torch.compile inside the block, in any thread."""
    with _Eager.lock:
        if _Eager.count == 0:
            _Eager.stance = torch.compiler.set_stance("force_eager")
        _Eager.count += 1
    try:
        yield
    finally:
        with _Eager.lock:
            _Eager.count -= 1
            if _Eager.count == 0:
                _Eager.stance.__exit__(None, None, None)


def guard_hooks() -> None:
    """Make code that torch.compile generates from now on check for PyTorch hooks that are added or removed later.

    torch leaves these guards out by default; a hook that a user registers by hand on a compiled model would then
    never run.
    """
    import torch._dynamo.config as config

    config.skip_nnmodule_hook_guards = False


def unwrapped(module: Any) -> Any:
    """The module inside the wrapper that `torch.compile(module)` returned; any other module itself."""
    inner = vars(module).get("_modules", {}).get("_orig_mod") if isinstance(module, nn.Module) else None
    return module if inner is None else inner


def without_wrappers(model: Any) -> Any:
    """The model without the wrappers of `torch.compile` and of PEFT, for a host that addresses modules by name.

    Adapter layers of PEFT (LoRA) stay inside the model.

    Raises:
        ValueError: one of its modules, or a module's forward, was replaced by what `torch.compile` returned; or the
            PEFT model learns a prompt, which its wrapper adds to every forward pass.
    """
    model = _without_peft(unwrapped(model))
    for name, module in model.named_modules():
        if unwrapped(module) is not module or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            what = name or type(module).__name__
            raise ValueError(
                f"{what if unwrapped(module) is not module else what + '.forward'} is what torch.compile returned, "
                "which this host cannot follow; load the model again and compile modules in place, as in "
                "model.model.compile()"
            )
    return model


def _without_peft(model: Any) -> Any:
    if not (hasattr(model, "get_base_model") and hasattr(model, "peft_config")):
        return model
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"the PEFT adapter {name!r} of type {config.peft_type} adds a prompt in every forward pass, which "
                "this host cannot follow; pass model.get_base_model(), which leaves the prompt out"
            )
    return model.get_base_model()
