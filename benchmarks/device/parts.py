"""The parts of `python -m benchmarks.device`, in the order in which they are run."""

from typing import Any

from benchmarks.device.part import LIBRARY, Command, Part

KERNELS = tuple(
    Part(
        f"kernels-{dtype}",
        f"Triton kernels in {dtype}: right against float64, fast against tiles and sdpa",
        (
            Command(
                "benchmarks.device.kernels",
                (f"--dtype={dtype}",),
                (f"--dtype={dtype}", "--small"),
                ("triton",),
                "Triton's interpreter multiplies bfloat16 wrongly" if dtype == "bfloat16" else "",
            ),
        ),
    )
    for dtype in ("float32", "float16", "bfloat16")
)

PYTEST = ("-q", "-m", "gpu", "-p", "no:cacheprovider")
SHARES = 4
"""As tests/gpu/test_calls.py divides the families."""
CHECKS = tuple(
    Part(
        f"checks-{share + 1}",
        f"every public call equals the CPU's and runs in half precision, share {share + 1} of {SHARES} of families",
        (
            Command(
                "pytest", ("tests/gpu", *PYTEST, "-k", f"share{share}"),
                ("tests/gpu", *PYTEST, "-k", f"a_forward and share{share}"),
                ("pytest", *LIBRARY),
                "`make long` runs the calls of all families there",
            ),
        ),
    )
    for share in range(SHARES)
)  # fmt: skip


def ours(module: str, small: tuple[str, ...] | None = ("--small",), *full: str, **options: Any) -> Command:
    """`python -m benchmarks.device.MODULE`."""
    return Command(f"benchmarks.device.{module}", full, small, **options)


PROCESSES = "it starts processes of its own, which the pretended device is not in"
BENCHMARKS = (
    Part(
        "llada-8b",
        "LLaDA-8B's shape in bfloat16: load, denoise, record, mask, hosts, likelihood; time and memory over plain",
        (ours("llada"),),
    ),
    Part("places", "device_map over a GPU and the CPU, the disk, two GPUs", (ours("places"),)),
    Part(
        "training",
        "a training step of Qwen2.5-0.5B's shape: masked loss, checks on the CPU, FSDP2",
        (
            Command(
                "pytest", ("tests/gpu", *PYTEST, "-k", "training"), ("tests/gpu", *PYTEST, "-k", "training"),
                ("pytest", *LIBRARY), PROCESSES,
            ),
            ours("fsdp", not_pretended=PROCESSES),
            Command(
                "benchmarks.training", ("--layers=24", "--length=2048", "--batch=8", "--rounds=1"), None,
            ),
        ),
    ),
    Part("diffusion-gemma", "DiffusionGemma's width: denoise, record, mask", (ours("diffusion_gemma"),)),
    Part(
        "attention",
        "received attention and hook points at LLaDA-8B's heads: time per layer, share of a step, memory",
        (
            Command(
                "benchmarks.received", ("--heads=32", "--kv=32", "--width=128"),
                ("--heads=2", "--kv=2", "--width=16", "--layers=1", "--length=64"),
            ),
            Command("benchmarks.received", ("--heads=32", "--kv=32", "--width=128", "--memory"), None),
            Command(
                "benchmarks.forward", ("--hidden=4096", "--heads=32", "--layers=8", "--length=1024"),
                ("--hidden=64", "--heads=2", "--layers=2", "--length=32"),
            ),
            Command(
                "benchmarks.sink_token", ("--hidden=2048", "--heads=16", "--layers=8", "--length=1024"),
                ("--hidden=64", "--heads=2", "--layers=2", "--length=32"),
            ),
        ),
    ),
    Part(
        "hosts",
        "cost of a TransformerLens bridge and of nnsight's traces",
        (
            Command(
                "benchmarks.bridging", ("--length=512",), ("--hidden=32", "--heads=2", "--layers=1", "--length=16"),
                ("transformer_lens", *LIBRARY),
            ),
            Command(
                "benchmarks.tracing", ("--length=256",), ("--length=24", "--steps=2", "--rounds=1"),
                ("nnsight", *LIBRARY),
            ),
        ),
    ),
    Part(
        "requests",
        "likelihood and generation of many requests, block diffusion with its cache",
        (
            Command("benchmarks.likelihood", (), ("--samples=16", "--requests=2", "--rounds=1")),
            Command("benchmarks.evaluation", (), None, ("lm_eval", *LIBRARY)),
            Command(
                "benchmarks.blocks", ("--size=0.6B", "--rounds=2"),
                ("--new-tokens=8", "--prompt-tokens=4", "--block=4", "--steps-per-block=2", "--rounds=1"),
            ),
        ),
    ),
)  # fmt: skip

PARTS: tuple[Part, ...] = (*CHECKS, *KERNELS, *BENCHMARKS)
