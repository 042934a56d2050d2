"""`install`: makes torch.cuda the pretended device. Call it before anything imports torch."""

import contextlib
import ctypes
import sys
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

NAME = "Pretended GPU"
CAPABILITY = (9, 0)
MEMORY = 2 << 30
"""Bytes that a device says it has: enough for every tiny model, so that device_map="auto" needs no CPU."""


@dataclass(frozen=True)
class Counts:
    """How often something happened since the library was loaded, or (of a difference) between two moments.

    Args:
        launches: operators that a device runs as kernels.
        waits: times that the program waits for the device: `.item()`, `bool(tensor)`, boolean indices, blocking
            copies between host and device.
        to_device: copies from the host.
        to_host: copies to the host.
        between: copies between devices, which do not wait.
    """

    launches: int
    waits: int
    to_device: int
    to_host: int
    between: int

    def __sub__(self, before: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


class PretendedGPU:
    """The loaded library.

    Args:
        library: from `build.library()`.
    """

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self.patterns_formed: list[str] = []
        """Why calls of fused attention on a device would have formed the pattern, call by call."""
        for name in ("pretend_allocated", "pretend_peak", "pretend_counter"):
            getattr(self.lib, name).restype = ctypes.c_long

    def counts(self) -> Counts:
        """The counters as they stand."""
        return Counts(*map(self.lib.pretend_counter, range(len(fields(Counts)))))

    @contextlib.contextmanager
    def waits(self, inside: str) -> Iterator[Counter[str]]:
        """Count the waits of a block by the line below the folder `inside` that causes them."""
        found: Counter[str] = Counter()

        @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        def observe(operator: bytes) -> None:
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(inside):
                frame = frame.f_back
            where = f"{frame.f_code.co_filename[len(inside) :]}:{frame.f_lineno}" if frame else "elsewhere"
            found[f"{where} {operator.decode()}"] += 1

        self.lib.pretend_observe_waits(observe)
        try:
            yield found
        finally:
            self.lib.pretend_observe_waits(None)


def install(library: Path) -> PretendedGPU:
    """Load the library and let torch.cuda speak of its devices.

    Raises:
        RuntimeError: torch is there already, and has asked whether there is CUDA.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; install the pretended device before")
    gpu = PretendedGPU(library)
    import torch
    import torch._dynamo  # what it asks torch.cuda while it is imported must be answered "none"

    _replace(torch.nn.functional, {"scaled_dot_product_attention": _watched(torch, gpu.patterns_formed)})
    _replace(torch._C, _internals(gpu.lib), only_missing=True)
    _replace(torch.cuda, _public(torch, gpu.lib))
    torch.version.cuda = "12.8"
    return gpu


def _replace(module: Any, functions: dict[str, Any], *, only_missing: bool = False) -> None:
    for name, function in functions.items():
        if not (only_missing and hasattr(module, name)):
            setattr(module, name, function)


def _watched(torch: Any, formed: list[str]) -> Callable[..., Any]:
    """The fused attention, which notes what no fused kernel of CUDA takes (PyTorch, sdp_utils.cpp)."""
    fused = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        width, half = query.shape[-1], query.dtype.itemsize == 2
        # Flash attention alone takes grouped keys; it knows neither masks nor float32, and pads the width itself.
        flash = half and attn_mask is None and width <= 256
        if query.is_cuda and not flash:
            if key.shape[1] != query.shape[1]:
                formed.append(f"{key.shape[1]} key heads for {query.shape[1]} heads in {query.dtype}")
            elif width % (8 if half else 4):
                formed.append(f"heads of width {width} in {query.dtype}")
        return fused(query, key, value, attn_mask, *args, **options)

    return attention


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What has no meaning here."""


def _exchange(lib: ctypes.CDLL) -> Callable[[int], int]:
    """Make a device the current one (none for a negative index); returns the one before."""

    def exchange(device: int) -> int:
        before: int = lib.pretend_current_device()
        if device >= 0:
            lib.pretend_set_device(device)
        return before

    return exchange


def _internals(lib: ctypes.CDLL) -> dict[str, Any]:
    """Functions that a CUDA build of torch._C has."""
    return {
        "_cuda_init": _nothing,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lib.pretend_device_count,
        "_cuda_getDevice": lib.pretend_current_device,
        "_cuda_setDevice": lib.pretend_set_device,
        "_cuda_exchangeDevice": _exchange(lib),
        "_cuda_maybeExchangeDevice": _exchange(lib),
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCurrentRawStream": lambda device=0: 0,
        "_cuda_synchronize": _nothing,
        "_cuda_emptyCache": _nothing,
        "_cuda_ipc_collect": _nothing,
        "_cuda_clearCublasWorkspaces": _nothing,
        "_cuda_resetPeakMemoryStats": lib.pretend_reset_peak,
        "_cuda_resetAccumulatedMemoryStats": _nothing,
        "_cuda_set_sync_debug_mode": _nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
    }


def _public(torch: Any, lib: ctypes.CDLL) -> dict[str, Any]:
    """Functions of torch.cuda."""
    exchange = _exchange(lib)
    Properties = namedtuple("Properties", "name major minor total_memory multi_processor_count")
    generators = tuple(torch.Generator(f"cuda:{index}") for index in range(lib.pretend_device_count()))

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        named = None if device is None else torch.device(device).index
        return int(lib.pretend_current_device() if named is None else named)

    return {
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_lazy_init": _nothing,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lib.pretend_device_count,
        "current_device": lib.pretend_current_device,
        "set_device": lambda device: lib.pretend_set_device(index(device)),
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: Properties(NAME, *CAPABILITY, MEMORY, 132),
        "mem_get_info": lambda device=None: (MEMORY - lib.pretend_allocated(index(device)), MEMORY),
        "memory_allocated": lambda device=None: lib.pretend_allocated(index(device)),
        "memory_reserved": lambda device=None: lib.pretend_allocated(index(device)),
        "max_memory_allocated": lambda device=None: lib.pretend_peak(index(device)),
        "max_memory_reserved": lambda device=None: lib.pretend_peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: lib.pretend_reset_peak(index(device)),
        "memory_stats": lambda device=None: {"allocated_bytes.all.current": lib.pretend_allocated(index(device))},
        "default_generators": generators,
        "manual_seed": lambda seed: generators[index()].manual_seed(int(seed)),
        "manual_seed_all": lambda seed: [each.manual_seed(int(seed)) for each in generators],
        "get_rng_state": lambda device="cuda": generators[index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[index(device)].set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in generators],
        "set_rng_state_all": lambda states: [
            each.set_state(state) for each, state in zip(generators, states, strict=True)
        ],
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
    }


class _Event:
    """An event of the only stream: it has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Stream:
    """The only stream: everything on it has always finished."""

    device_index = 0
    synchronize = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> _Event:
        return _Event()
