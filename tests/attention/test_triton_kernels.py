"""The Triton kernels: in Triton's interpreter in a process of their own, compiled, and on a GPU where there is one.

TRITON_INTERPRET must be set before triton is imported, hence the process:
`python -m tests.attention.test_triton_kernels PART`.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.attention.test_received import pattern64, split

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install 'dlm-lens[triton]'"
)


@dataclass(frozen=True)
class Case:
    """One shape; lengths are chosen around the blocks of 32, 64 and 128."""

    queries: int
    keys: int
    heads: int = 2
    kv: int = 1
    width: int = 64
    batch: int = 1
    mask: str = "none"
    causal: bool = False
    classes: int = 1

    def visible(self, generator: torch.Generator) -> Tensor | None:
        shape = {
            "none": (), "padding": (self.batch, 1, 1, self.keys), "queries": (1, 1, self.queries, 1),
            "full": (self.batch, 1, self.queries, self.keys), "head": (1, self.heads, self.queries, self.keys),
        }[self.mask]  # fmt: skip
        if not shape:
            return None
        visible = torch.rand(shape, generator=generator) > 0.4
        if self.mask == "full":
            visible[:, :, 1] = False  # a query that sees nothing
        return visible


CASES = (
    Case(1, 1),
    Case(33, 33, classes=3),
    Case(128, 128, heads=4, kv=2),
    Case(65, 130, width=80, mask="padding", batch=2, classes=4),
    Case(130, 65, width=96, mask="full", classes=2),
    Case(70, 70, width=128, causal=True),
    Case(40, 100, width=72, causal=True, mask="padding", batch=2),
    Case(100, 40, causal=True, mask="full"),
    Case(50, 50, heads=3, kv=3, mask="head", classes=5),
    Case(64, 64, width=256, mask="queries"),
    Case(40, 70, width=160, batch=2, heads=4, kv=2),
    Case(20, 140, width=8),
)


INTERPRETED = (*((case, torch.float32) for case in CASES), *((case, torch.float16) for case in CASES[1::2]))
PARTS = 4
"""Processes in which the interpreter, which is slow, runs these."""


def by_query(pattern: Tensor, first: int, canvas: int) -> Tensor:
    """The statistics of every query of a pattern in float64, in the order of `QUERY_STATS`."""
    key = torch.arange(pattern.shape[-1])
    place = first + torch.arange(pattern.shape[-2])[:, None]
    regions = (key == place, key < place, key > place)
    given = [(pattern * (region & (key < canvas))).sum(-1) for region in regions]
    return torch.stack([torch.special.entr(pattern).sum(-1), *given])


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """The kernels against the pattern in float64 of the same rounded inputs."""
    from dlm_lens.attention.triton_kernels import triton_lse, triton_pattern_stats, triton_received_sums

    generator = torch.Generator().manual_seed(case.queries * 1000 + case.keys)
    q = torch.randn(case.batch, case.queries, case.heads, case.width, generator=generator).transpose(1, 2) * 2
    k = torch.randn(case.batch, case.keys, case.kv, case.width, generator=generator).transpose(1, 2)
    q, k, visible = q.to(dtype), k.to(dtype), case.visible(generator)
    weights = torch.rand(case.batch, case.classes, case.queries, generator=generator)
    weights[:, -1, ::3] = 0.0
    scale = case.width**-0.5
    pattern = pattern64(q, k, scale, visible, case.causal)
    given = (q.to(device), k.to(device), scale, None if visible is None else visible.to(device))
    got = triton_received_sums(*given, weights.to(device), case.causal)
    # Scores of size 10 in float32; a sum over up to 130 queries.
    close = {"atol": 3e-5, "rtol": 2e-5}
    torch.testing.assert_close(got.double().cpu(), split(pattern, weights), **close)
    lse = triton_lse(*given, case.causal)
    assert torch.equal((lse == -torch.inf).cpu(), pattern.sum(-1) == 0)
    scores = q.double() @ k.double().repeat_interleave(case.heads // case.kv, 1).mT * scale
    expected = scores.masked_fill(pattern == 0, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.double().cpu(), expected, **close)
    for first, canvas in ((max(0, case.keys - case.queries - 3), 33), (case.keys - case.queries, case.keys)):
        sums, stats = triton_pattern_stats(*given, weights.to(device), case.causal, first, canvas)
        torch.testing.assert_close(sums, got, **close)  # blocks of another size
        torch.testing.assert_close(stats.double().cpu(), by_query(pattern, first, canvas), **close)
        if device != "cpu" or first == case.keys - case.queries:  # the interpreter is slow
            assert torch.equal(triton_pattern_stats(*given, None, case.causal, first, canvas)[1], stats)
    known = triton_received_sums(*given, weights.to(device), case.causal, lse)
    torch.testing.assert_close(known, got, **close)
    if device != "cpu":  # the same bits, where programs run side by side: the interpreter runs them one by one
        assert torch.equal(triton_received_sums(*given, weights.to(device), case.causal), got)


def check_far_rows(device: str) -> None:
    """Rows and columns that lie 2^31 entries and more after the first; of 9 GB few pages are touched."""
    from dlm_lens.attention.triton_kernels import triton_received_sums

    generator, far = torch.Generator().manual_seed(0), 2**30
    q = torch.randn(1, 1, 5, 16, generator=generator).half().to(device)
    visible = (torch.rand(1, 1, 5, 5, generator=generator) > 0.4).to(device)
    weights = torch.ones(1, 1, 5, device=device)
    memory = torch.empty(4 * far + 16, dtype=torch.float16, device=device)
    rows = memory.as_strided((1, 1, 5, 16), (0, 0, far, 1)).copy_(q)
    columns = memory.view(torch.bool)[32:].as_strided((1, 1, 5, 5), (0, 0, 1, far)).copy_(visible)
    expected = triton_received_sums(q, q, 0.25, visible, weights, False)
    assert torch.equal(triton_received_sums(rows, rows, 0.25, columns, weights, False), expected)


@pytest.mark.long
@pytest.mark.in_turn
@needs_triton
@pytest.mark.parametrize("part", range(PARTS))
def test_in_the_interpreter(part: int) -> None:
    """All cases in float32, every other in float16, of which the kernels load and multiply the entries alone.

    The interpreter's product of bfloat16 returns garbage.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.test_triton_kernels", str(part)], capture_output=True, text=True,
        env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"{len(INTERPRETED[part::PARTS])} cases agree"


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


@pytest.mark.gpu
@needs_triton
def test_far_rows_on_a_gpu() -> None:
    check_far_rows("cuda")


@pytest.mark.gpu
@needs_triton
def test_the_dispatcher_takes_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_lens.attention import QUERY_STATS, AttentionInputs, pattern_stats, triton_kernels
    from dlm_lens.attention.received import attention_lse, received_sums
    from dlm_lens.attention.tile_sums import tiled_received_sums

    q, k = (torch.randn(2, 4, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights = torch.ones(1, 1, 300, device="cuda")
    tiles = tiled_received_sums(q, k, 0.1, None, weights, False)
    called = []
    launch = triton_kernels._launch
    monkeypatch.setattr(triton_kernels, "_launch", lambda *a, **o: called.append(1) or launch(*a, **o))
    torch.testing.assert_close(received_sums(q, k, scale=0.1), tiles, atol=1e-4, rtol=1e-4)
    attention_lse(q, k, scale=0.1)
    assert len(called) == 3
    inputs = AttentionInputs(0, q, k, k, 0.1)
    stats = pattern_stats(inputs, weights, QUERY_STATS)
    assert len(called) == 5
    monkeypatch.setenv("DLM_LENS_KERNELS", "off")
    expected = pattern_stats(inputs, weights, QUERY_STATS)
    monkeypatch.delenv("DLM_LENS_KERNELS")
    torch.testing.assert_close(stats.sums, expected.sums, atol=1e-4, rtol=1e-4)
    for name, values in expected.per_query.items():
        torch.testing.assert_close(stats.per_query[name], values, atol=1e-5, rtol=1e-4)
    assert len(called) == 5
    received_sums(q.requires_grad_(), k, scale=0.1).sum().backward()
    assert len(called) == 5


# What triton.compile calls an argument, by its name in the kernel.
_POINTERS = {"q": "*bf16", "k": "*bf16", "visible": "*u8"}
_POINTERS |= dict.fromkeys(["lse", "stats", "weights", "received"], "*fp32")


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("kernel", ["_query_kernel", "_query_kernel with statistics", "_received_kernel"])
@pytest.mark.parametrize("capability", [80, 90])
def test_they_compile_for_bfloat16_without_a_gpu(kernel: str, capability: int) -> None:
    """The tensor cores are used, and shared memory stays below what GPUs of the generation have."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dlm_lens.attention import triton_kernels

    kernel, _, statistics = kernel.partition(" with ")
    function = getattr(triton_kernels, kernel)
    sizes = triton_kernels.blocks(128, torch.bfloat16, triton_kernels.NO_MASK, bool(statistics))
    own, other = ("QUERIES", "KEYS") if kernel == "_query_kernel" else ("KEYS", "QUERIES")
    constants = {"WIDTH": 128, own: sizes["own"], other: sizes["other"], "MASK": 0, "CAUSAL": False}
    constants |= {"CLASSES": 3, "CLASS_BLOCK": 4, "q_column": 1, "k_column": 1, "v_key": 0, "w_query": 1}
    constants["STATS"] = bool(statistics)
    names = function.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = dict.fromkeys(names, "i32") | _POINTERS | {"factor": "fp32"} | dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in constants and (name in _POINTERS or name[:2] in ("q_", "k_"))
    }
    source = ASTSource(
        function,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    options = {"num_warps": sizes["num_warps"], "num_stages": sizes["num_stages"]}
    built = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert ("wgmma" if capability == 90 else "mma.sync") in built.asm["ptx"]
    assert built.metadata.shared <= 99 * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = INTERPRETED[int(sys.argv[1]) :: PARTS]
    for one, kind in chosen:
        check(one, kind, "cpu")
    if int(sys.argv[1]) == 0:
        check_far_rows("cpu")
    sys.stdout.write(f"{len(chosen)} cases agree\n")
