"""What `dlm-lens doctor` looks at: packages, devices, the embedded model through every host."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement

import dlm_lens

PROMPT, STEPS = "tom has 5 apples . tom buys 4 more . how many apples ? :", 4


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `good` None where it is neither good nor bad."""

    subject: str
    found: str
    good: bool | None = True


def findings() -> Iterator[Finding]:
    """Look at everything in turn; nothing is downloaded, nothing written."""
    for requirement in map(Requirement, requires("dlm-lens") or ()):
        if requirement.marker is None:
            yield _package(requirement)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("CUDA", ", ".join(devices) or "none: everything runs on the CPU", None)
    for name, check in (("toy:denoise", _denoises), ("toy:nnsight", _traces), ("toy:bridge", _bridges)):
        yield _checked(name, check)


def _package(requirement: Requirement) -> Finding:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Finding(requirement.name, f"missing: pip install '{requirement}'", False)
    good = requirement.specifier.contains(found, prereleases=True)
    return Finding(
        requirement.name, found if good else f"{found}, but dlm_lens needs {requirement.specifier}", good
    )


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, check())
    except Exception as error:  # whatever is wrong is what the doctor is asked for
        return Finding(name, f"{type(error).__name__}: {error}", False)


def _denoises() -> str:
    run = dlm_lens.denoise(dlm_lens.load("toy"), PROMPT, steps=STEPS, gen_length=STEPS, block_length=STEPS)
    return f"toy wrote {run.answers[0]!r} in {run.steps} steps"


def _traces() -> str:
    importlib.import_module("dlm_lens.tracing").DiffusionLM("toy")
    return "patterns are there, sum to 1 and can be edited"


def _bridges() -> str:
    model = dlm_lens.load("toy")
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        gap = float((dlm_lens.bridge(model)(ids) - model(ids).logits).abs().max())
    if gap > 1e-3:
        raise RuntimeError(f"the bridge's logits differ from the model's by {gap:.2g}")
    return f"logits differ from the model's by {gap:.1g}"
