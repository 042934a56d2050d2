"""Devices of a model's modules, and its weights on several devices or offloaded to the CPU or the disk.

accelerate (`device_map=`) moves a module's inputs to the device where the module computes, and leaves the outputs
there. An offloaded weight is a tensor on "meta", whose numbers are loaded when the module runs. `execution_device`
is the device on which a module computes, `resident` a weight with its numbers.

Apple's GPUs ("mps") have no float64, nor have some of Intel's ("xpu"). What dlm_lens computes in float64 is then on
the CPU: `in_float64`, `canvas_device`.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily


def is_device(value: Any) -> bool:
    """Whether this names a device on which torch makes a tensor here."""
    if not isinstance(value, str | torch.device):
        return False
    try:
        torch.empty(0, device=value)
    except (AssertionError, RuntimeError):  # torch was built without CUDA; no such device
        return False
    return True


def input_device(model: Any) -> torch.device:
    """The device of the model's token ids: that of its embedding."""
    return execution_device(model.get_input_embeddings())


def on_input_device(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a pass, with their tensors on the device of the model's token ids."""
    device = input_device(model)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def canvas_device(model: Any) -> torch.device:
    """The device of a run's canvas and of its sampler: that of the token ids, or the CPU if it has no float64.

    Samplers compare probabilities and scores in float64. There they do so on the CPU, so that the tokens are those
    of a sampler on the CPU.
    """
    return float64_device(input_device(model))


def in_float64(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor in float64: on its own device, or on the CPU if that has no float64.

    The CPU and not float32, which would round what is compared or summed: a sampler, a detector or a control would
    then choose others than on the CPU. What is combined with the result belongs on the result's device.

    Args:
        tensor: of any dtype.
        copy: return a new tensor also where it is in float64 already.
    """
    # In two steps: a device without float64 cannot convert what it copies to the CPU.
    return tensor.to(float64_device(tensor.device)).to(torch.float64, copy=copy)


def float64_device(device: torch.device) -> torch.device:
    """Where float64 numbers of a device's tensors are: there, or on the CPU if the device has no float64."""
    return device if _has_float64(device) else torch.device("cpu")


@cache
def allow_float64_experts() -> None:
    """Let mixtures of experts of transformers compute in float64, in this process.

    torch has no products of groups of tokens in float64: one expert is computed after the other, as with "eager".
    """
    from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

    def by_dtype(experts: Any, states: Tensor, *routes: Tensor) -> Any:
        if states.dtype != torch.float64:
            return grouped_mm_experts_forward(experts, states, *routes)
        forwards: Iterator[Any] = (vars(kind).get("forward") for kind in type(experts).__mro__)
        # What transformers' decorator of experts wraps is the class's own forward.
        return next(each.__wrapped__ for each in forwards if hasattr(each, "__wrapped__"))(experts, states, *routes)

    ExpertsInterface.register("grouped_mm", by_dtype)


def lacks_numbers(model: Any) -> bool:
    """Whether the weights are on "meta" and are not offloaded, so that a pass has shapes alone."""
    embedding = model.get_input_embeddings()
    return bool(embedding.weight.is_meta) and not any(_align_hooks(embedding))


@contextmanager
def plain_defaults() -> Iterator[None]:
    """A block in which new tensors are on the CPU unless a device is given, and are no inference tensors.

    What a run stores is on the CPU wherever the model is, also after `torch.set_default_device("cuda")`. Autograd
    takes no inference tensors, so that probes by gradients could not read a run that was made in inference mode.
    """
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # as in inference mode, also where it is left
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block whose random numbers depend on `seed`, on the CPU and on torch's default device, and none after it.

    `torch.manual_seed` would seed every GPU, and nothing would put their generators back.
    """
    default = torch.get_default_device()
    others = [default] if default.type not in ("cpu", "meta") else []
    with torch.random.fork_rng(devices=others, device_type=default.type if others else "cuda"):
        torch.default_generator.manual_seed(seed)
        for device in others:
            state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(state, device)
        yield


def emulates_bfloat16() -> bool:
    """Whether this x86 CPU has no bfloat16 instructions: its products then take longer than those of float32."""
    # torch before 2.12 does not say.
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return known.get("architecture") == "x86_64" and not (known["avx512_bf16"] or known["amx_bf16"])


def float32_products(device: torch.device) -> str:
    """In what torch multiplies float32 matrices on a device: "float32", or "tf32" or "bf16" where it was told to.

    `torch.set_float32_matmul_precision` and `torch.backends` tell it.
    """
    if device.type == "mps":  # where torch has no other product of them
        return "float32"
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    found = str(backend.matmul.fp32_precision)
    return "float32" if found in ("none", "ieee") else found


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A block whose products have their operands' dtype.

    Under autocast torch rounds float32 operands of a product to bfloat16: sums that are said to be in float32 would
    be off by 2^-8, and counts above 256 would not be whole.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def execution_device(module: nn.Module) -> torch.device:
    """The device on which a module computes; the weights of an offloaded module are elsewhere.

    Raises:
        ValueError: its weights are on "meta", and nothing would load them.
    """
    for part in module.modules():
        for hook in _align_hooks(part):
            if hook.execution_device is not None:
                return named_device(hook.execution_device)
    tensors = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        if tensor.device.type != "meta":
            return tensor.device
    if tensors:
        raise ValueError(_no_numbers(type(module).__name__))
    return torch.device("cpu")


def resident(module: nn.Module, name: str = "weight") -> Tensor:
    """A parameter of a module with its numbers, on the module's device; an offloaded one is read, and not kept.

    One that torchao or quanto quantised is in floating point.

    Raises:
        ValueError: it has no numbers anywhere.
    """
    weight = module.get_parameter(name)
    if weight.device.type != "meta":
        return dequantised(weight)
    value = _offloaded(module, name)
    if value is None:
        raise ValueError(_no_numbers(f"{type(module).__name__}.{name}"))
    return value.to(execution_device(module), weight.dtype)


def dequantised(weight: Tensor) -> Tensor:
    """A quantised weight of torchao or quanto in floating point; any other weight unchanged.

    Their tensors have a floating dtype, but support only some of a tensor's operations.
    """
    return weight.dequantize() if type(weight.data).dequantize is not Tensor.dequantize else weight


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight's entries are not stored as floating-point numbers."""
    return dequantised(weight) is not weight or not weight.is_floating_point()


def named_weights(model: nn.Module, *, by_name: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every parameter with its numbers, as `named_parameters`; an offloaded one is read from the CPU or the disk.

    One that has no numbers anywhere stays on "meta". `by_name` sorts them; one at a time is in memory either way.
    """
    found = model.named_parameters()
    for name, weight in sorted(found, key=lambda item: item[0]) if by_name else found:
        if weight.device.type != "meta":
            yield name, weight
            continue
        path, _, own = name.rpartition(".")
        value = _offloaded(model.get_submodule(path), own)
        yield name, weight if value is None else value.to(weight.dtype)


def devices(model: nn.Module) -> set[torch.device]:
    """The devices that the model computes on."""
    parts = (part for part in model.modules() if next(part.parameters(recurse=False), None) is not None)
    return {execution_device(part) for part in parts}


@cache
def _has_float64(device: torch.device) -> bool:
    """Whether a device fills a tensor of float64; "mps" raises a TypeError, "xpu" a RuntimeError."""
    try:
        with unset_fake_temporarily():  # a fake tensor has every dtype
            torch.zeros((), dtype=torch.float64, device=device)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return False
    return True


def _offloaded(module: nn.Module, name: str) -> Tensor | None:
    for hook in _align_hooks(module):
        if hook.offload and hook.weights_map is not None:
            value: Tensor = hook.weights_map[name]
            return value
    return None


def _no_numbers(what: str) -> str:
    return (
        f"{what} has no numbers (it is on the device 'meta') and no accelerate hook that loads them; load the "
        "model with dlm_lens.load(..., device_map=...)"
    )


def _align_hooks(module: nn.Module) -> Iterator[Any]:
    """The accelerate hooks of a module that place its weights."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if hasattr(each, "execution_device") and hasattr(each, "weights_map"):
            yield each


def named_device(given: int | str | torch.device) -> torch.device:
    """The device of a device map's entry; a number counts the accelerators of this machine, CUDA's if it has none.

    Raises:
        RuntimeError: no device has this name.
        TypeError: something else.
    """
    if not isinstance(given, int):
        return torch.device(given)
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cuda" if accelerator is None else accelerator.type, given)
