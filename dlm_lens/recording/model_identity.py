"""What identifies a model beside its name: versions of the packages, its config, a digest of its weights."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from dlm_lens.attention import attached_hooks
from dlm_lens.placement import dequantised, float32_products, input_device, named_weights
from dlm_lens.sampling.algorithm_registry import algorithm_of

SPAN = 2**16
"""32-bit words that go into one sum of the digest."""

ELSEWHERE = ("architectures", "dtype", "use_cache", "sampler", "sampler_defaults")
"""Fields of a config that other entries of a header name, or that change no run."""

ENTRIES = 2**20
"""Entries of a weight that are converted to 32-bit words at a time, which bounds the memory."""


@cache
def versions() -> dict[str, str]:
    """Package -> version, for the packages that compute the arrays; of torch with its build, as in 2.13.0+cu130."""
    import dlm_lens

    # Wheels of the package index leave the build out of their metadata.
    return {
        "dlm_lens": dlm_lens.__version__,
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


def request_of_model(model: Any, settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What decides a run beside the weights and the settings that were given, for the header of its files.

    Args:
        model: of the run.
        settings: that were given to `denoise`.

    Returns:
        `config`, the fields of the model's config; `defaults`, its sampler, the settings that were not given, and
        `float32_products`.
    """
    config, sampler = model.config, algorithm_of(model.config).name
    own = {name: repr(value) for name, value in model.sampler_defaults.items() if settings.get(name) is None}
    own["float32 products"] = float32_products(input_device(model))
    return {
        "config": {name: text for name, text in config_fields(config).items() if name not in ELSEWHERE},
        "defaults": {"sampler": repr(sampler), **own},
    }


def check_named(model: Any, settings: Mapping[str, Any], who: str) -> None:
    """Refuse what the header of a file cannot name: a run could be continued without it, or never.

    Args:
        model: of the run.
        settings: that were given to `denoise`.
        who: the function that writes the files.

    Raises:
        ValueError: a function in the settings, or hooks of `attach_hooks`.
    """
    for name in ("on_logits", "on_canvas"):
        if settings.get(name) is not None:
            raise ValueError(
                f"{name} with to=: functions cannot be compared when a run is continued; leave one out"
            )
    if attached := attached_hooks(model):
        raise ValueError(
            f"{', '.join(map(repr, attached))} of attach_hooks with to=: the files would not name it, and could be "
            f"continued without it; give {who}(hooks=[...]) instead"
        )


def in_both(name: str, old: Any, new: Any) -> tuple[Any, Any]:
    """An entry of two headers as it is compared: of those of `request_of_model` the names that both have.

    They depend on versions, and headers of earlier ones lack them.
    """
    if name not in ("config", "defaults"):
        return old, new
    names = (old or {}).keys() & (new or {}).keys()
    return {key: old[key] for key in names}, {key: new[key] for key in names}


def config_fields(config: Any) -> dict[str, str]:
    """The fields of a config as text, without the path that it was loaded from and the version that wrote it."""
    private = ("_name_or_path", "transformers_version")
    return {name: repr(value) for name, value in config.to_dict().items() if name not in private}


def weights_digest(model: Any) -> str:
    """A digest of every entry of every weight, and of every buffer of a checkpoint, the same in every layout.

    The entries of a floating-point weight are taken in float32 (of a float64 weight in float64, of an integer one
    in int64) and read as 32-bit words w_i. Every `SPAN` words are summed modulo 2^64 with fixed random 64-bit
    multipliers m_i, sum_i m_i w_i (multilinear hashing: Lemire and Kaser 2014, "Strongly universal string hashing
    is fast", Theorem 3.1), and the sums go into SHA-256 with the weight's name and shape. Integer sums do not
    depend on their order, so they are computed where the weight is. The sums of two weights are equal with a
    probability of at most 2^-33 over the multipliers. A weight on "meta" counts by its name and shape alone.
    """
    found = hashlib.sha256()
    for name, weight in chain(named_weights(model, by_name=True), _stored_buffers(model)):
        found.update(f"{name} {tuple(weight.shape)}".encode())
        for part in _parts(dequantised(weight.detach())):
            found.update(_sums(part).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def _stored_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that a checkpoint holds, by name: LLaDA2's bias of the router, DiffusionGemma's layer scalars."""
    found = {
        f"{path}.{name}": buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return sorted(found.items(), key=lambda item: item[0])


def _parts(weight: Tensor) -> Iterator[Shaped[Tensor, "n"]]:
    """Consecutive entries of a weight, without flattening it as a whole: that may copy gigabytes."""
    if weight.device.type == "meta" or not weight.numel():
        return
    if weight.ndim < 2:
        yield from weight.reshape(-1).split(ENTRIES)
        return
    for rows in weight.split(max(1, ENTRIES // weight[0].numel())):
        # One row may be larger than the bound.
        yield from rows.reshape(-1).split(ENTRIES)


def _sums(entries: Shaped[Tensor, "n"]) -> Int[Tensor, "span"]:
    """The sums of the digest over some entries, padded with zeros to whole spans."""
    if entries.is_complex():
        entries = torch.view_as_real(entries).reshape(-1)
    if entries.dtype != torch.float64:
        entries = entries.float() if entries.is_floating_point() else entries.to(torch.int64)
    words = entries.contiguous().view(torch.int32)
    words = torch.nn.functional.pad(words, (0, -len(words) % SPAN)).view(-1, SPAN)
    return words.to(torch.int64).mul_(torch.from_numpy(_multipliers()).to(words.device)).sum(-1)


@cache
def _multipliers() -> Int[np.ndarray, "span"]:
    """`SPAN` random numbers; the raw numbers of a bit generator are the same in every version of numpy."""
    return np.random.PCG64(0).random_raw(SPAN).view(np.int64)
