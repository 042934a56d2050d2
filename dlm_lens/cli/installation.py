"""The checks of `dlm-lens doctor`: packages, GPUs, and the embedded model in each host."""

import importlib
from collections.abc import Iterator
from functools import partial

import torch
from packaging.requirements import Requirement

import dlm_lens
from dlm_lens.attention.kernel_selection import SWITCH, turned_on, usable
from dlm_lens.attention.received import received_sums
from dlm_lens.findings import Finding, checked
from dlm_lens.requirements import declared, installed

PROMPT, STEPS = "tom has 5 apples . tom buys 4 more . how many apples ? :", 4


def findings() -> Iterator[Finding]:
    """Run the checks one by one; nothing is downloaded or written."""
    for requirement in declared():
        yield _package(requirement)
    if not (gpus := _gpus()):
        yield Finding("CUDA", "none: everything runs on the CPU", None)
    for device in gpus:
        yield checked(str(device), partial(_computes, device))
    for name, check in (("toy:denoise", _denoises), ("toy:nnsight", _traces), ("toy:bridge", _bridges)):
        yield checked(name, check)


def _package(requirement: Requirement) -> Finding:
    found, good = installed(requirement)
    if found is None:
        return Finding(requirement.name, f"missing: pip install '{requirement}'", False)
    return Finding(
        requirement.name, found if good else f"{found}, but dlm_lens needs {requirement.specifier}", good
    )


def _denoises() -> str:
    run = dlm_lens.denoise(dlm_lens.load("toy"), PROMPT, steps=STEPS, gen_length=STEPS, block_length=STEPS)
    return f"toy wrote {run.answers[0]!r} in {run.steps} steps"


def _gpus() -> list[torch.device]:
    """The GPUs that torch computes on: CUDA's, or Intel's ("xpu"), or Apple's ("mps"), which has no number."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return [] if kind is None else [kind]
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


@torch.no_grad()
def _computes(device: torch.device) -> str:
    """Run the embedded model and the attention kernels on a GPU, and compare both with the CPU.

    Raises:
        RuntimeError: the numbers differ.
    """
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)
    plain, model = dlm_lens.load("toy"), dlm_lens.load("toy", device_map=str(device))
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    gap = float((model(input_ids=ids.to(device)).logits.cpu() - plain(input_ids=ids).logits).abs().max())
    # TF32 products, which a user can turn on, have 10 bits.
    if not gap < 0.1:
        raise RuntimeError(f"{name}: the logits of toy differ from the CPU's by {gap:.2g}")
    run = dlm_lens.denoise(model, PROMPT, steps=STEPS, gen_length=STEPS, block_length=STEPS)
    return f"{name}: toy wrote {run.answers[0]!r}, its logits are the CPU's to {gap:.1g}; {_kernels(device)}"


def _kernels(device: torch.device) -> str:
    """Compare the attention kernels with the CPU on half-precision heads of width 128, as in most models.

    Raises:
        RuntimeError: the statistics differ.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 64, 128, generator=generator).half() for _ in range(2))
    expected = received_sums(q, k, scale=0.1)
    gap = float((received_sums(q.to(device), k.to(device), scale=0.1).cpu() - expected).abs().max())
    if not gap < 0.05:
        raise RuntimeError(f"attention statistics on {device} differ from the CPU's by {gap:.2g}; set {SWITCH}=off")
    if not turned_on():
        return f"attention kernels off ({SWITCH}=off)"
    kernels = device.type == "cuda" and usable(q.to(device), k.to(device))
    return "attention kernels run" if kernels else "attention kernels do not run, tiles in PyTorch are used"


def _traces() -> str:
    importlib.import_module("dlm_lens.tracing").DiffusionLM("toy")
    return "patterns can be read and edited, and sum to 1"


def _bridges() -> str:
    model = dlm_lens.load("toy")
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        gap = float((dlm_lens.bridge(model)(ids) - model(ids).logits).abs().max())
    if gap > 1e-3:
        raise RuntimeError(f"the bridge's logits differ from the model's by {gap:.2g}")
    return f"logits differ from the model's by {gap:.1g}"
