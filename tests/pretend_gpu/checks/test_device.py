"""The pretended device itself: what it refuses and counts as a real one does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_lens.placement import float64_device, in_float64
from tests.pretend_gpu.plugin import GPU

NO_FLOAT64 = os.environ.get("PRETEND_GPU_NO_FLOAT64") == "1"
ON_BOTH = "same device|either on cpu or on the same device"


def on(index: int) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(f"cuda:{index}")


REFUSED: dict[str, Callable[[], Any]] = {
    "a sum over two devices": lambda: on(0) + on(1),
    "a product with the CPU": lambda: on(0) @ torch.ones(4, 3),
    "a mask of another device": lambda: on(0).masked_fill(torch.ones(3, 4, dtype=torch.bool), 0.0),
    "an index of another device": lambda: on(0)[torch.tensor([0], device="cuda:1")],
    "an embedding's ids on the CPU": lambda: torch.nn.functional.embedding(torch.tensor([0]), on(0)),
    "a stack": lambda: torch.stack([on(0), on(1)]),
    "writing into the CPU's": lambda: torch.ones(3, 4).add_(on(0)),
}

TAKEN: dict[str, Callable[[], Any]] = {
    "a number that is a tensor of the CPU": lambda: on(0) + torch.tensor(1.0),
    "indices of the CPU": lambda: on(0)[torch.tensor([0])],
    "a copy between devices": lambda: on(0).to("cuda:1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_several_devices_do_not_mix(name: str) -> None:
    with pytest.raises(RuntimeError, match=ON_BOTH):
        REFUSED[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes(name: str) -> None:
    assert TAKEN[name]().is_cuda


WAITS: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {
    "arithmetic": (0, lambda x: (x * 2 + x).softmax(-1).argmax(-1)),
    "a number": (1, lambda x: x.sum().item()),
    "a truth value": (1, lambda x: bool((x > 0).any())),
    "to the host": (1, lambda x: x.cpu()),
    "from the host": (1, lambda x: torch.ones(2).to(x.device)),
    "to another device": (0, lambda x: x.to("cuda:1")),
    "a boolean index": (1, lambda x: x[x > 3]),
    "a slice that is filled": (0, lambda x: x[0:1].fill_(1.0)),
    "an entry that is set": (1, lambda x: x[0].__setitem__(0, 1.0)),
    "positions of a mask": (1, lambda x: (x > 3).nonzero()),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted_and_named(name: str) -> None:
    expected, call = WAITS[name]
    x = on(0)
    before = GPU.counts()
    with GPU.waits(str(Path(__file__).parent)) as lines:
        call(x)
    assert (GPU.counts() - before).waits == expected == sum(lines.values())
    assert all(line.startswith("/test_device.py:") for line in lines)


def test_numbers_are_the_cpus_and_random_numbers_follow_the_seed() -> None:
    assert (on(0) @ on(0).T).cpu().equal(on(0).cpu() @ on(0).cpu().T)
    drawn = [torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)]
    assert drawn[0].equal(drawn[1])
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(4, device="cuda", generator=torch.Generator())


@pytest.mark.skipif(NO_FLOAT64, reason="the devices of this process refuse float64")
def test_float64_stays_where_it_is() -> None:
    assert in_float64(on(1)).device == torch.device("cuda:1")


@pytest.mark.skipif(not NO_FLOAT64, reason="PRETEND_GPU_NO_FLOAT64 is not set")
def test_float64_is_refused_where_it_is_not_there() -> None:
    for call in (
        on(0).double,
        lambda: on(0).softmax(-1, dtype=torch.float64),
        lambda: torch.ones(2).double().cuda(),
    ):
        with pytest.raises(TypeError, match="no float64"):
            call()
    with pytest.raises(TypeError, match="no float64"):  # the device would convert
        on(0).to("cpu", torch.float64)
    assert in_float64(on(1)).equal(on(1).cpu().double())
    assert float64_device(torch.device("cuda:1")) == torch.device("cpu")


def test_memory_that_was_not_written_is_not_a_number() -> None:
    assert torch.empty(8, device="cuda").isnan().all()
