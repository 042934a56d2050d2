"""`ReferenceLogits`: logits that another implementation computed, such as the authors' own, compared with ours."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.attention import decoder_of
from dlm_lens.files.tensor_files import read_tensors
from dlm_lens.findings import Finding
from dlm_lens.placement import in_float64, input_device
from dlm_lens.printable import counted

SINGLE, HALF = 1e-3, 0.1
"""What rounding may change in float32, and in half precision, in standard deviations of the logits.

SmolLM2-135M's logits differ by 1e-6 and 0.02 between two attention functions. In the golden LLaDA a rotation
of half the frequencies makes 0.7, keys of the opposite sign in one layer 1.2.
"""
REMEDY = "write it with safetensors.torch.save_file, from input_ids and logits"


def rounding_limit(dtype: torch.dtype) -> float:
    """The largest `relative_gap` that rounding explains in a model of this dtype."""
    return SINGLE if dtype in (torch.float32, torch.float64) else HALF


def relative_gap(ours: Float[Tensor, "*entries"], theirs: Float[Tensor, "*entries"]) -> float:
    """The difference sqrt(mean (ours - theirs)^2) / std(theirs), over the entries that are finite in `theirs`.

    Infinite or no number where one of them is not finite in `ours`. [MASK] has the logit -inf in some networks.
    """
    finite = theirs.isfinite()
    expected = in_float64(theirs[finite])
    return float((in_float64(ours[finite]) - expected).square().mean().sqrt() / expected.std())


@dataclass(frozen=True, eq=False)
class ReferenceLogits:
    """Inputs of a network and the logits that another implementation returned for them.

    Args:
        input_ids: masks among them, where the network reads masks.
        logits: as the other implementation's forward pass returned them, not shifted.
        options: further inputs of the forward pass, such as an attention mask or a noise level.
        name: of the file.
    """

    input_ids: Int[Tensor, "batch position"]
    logits: Float[Tensor, "batch position d_vocab"]
    options: dict[str, Tensor]
    name: str

    @classmethod
    def read(cls, path: Path, model: Any) -> "ReferenceLogits":
        """Read a safetensors file with `input_ids`, `logits` and any other input of the model's forward pass.

        Raises:
            ValueError: there is no such file, or it is damaged; a tensor is missing, of another shape, or no input
                of the model; ids beyond its vocabulary.
        """
        tensors = read_tensors(path, REMEDY)
        missing = [name for name in ("input_ids", "logits") if name not in tensors]
        if missing:
            raise ValueError(f"{path} has no {' and no '.join(missing)}, but {sorted(tensors)}; {REMEDY}")
        ids, logits = tensors.pop("input_ids"), tensors.pop("logits")
        if ids.is_floating_point() or ids.ndim != 2 or logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise ValueError(
                f"{path} has input_ids {list(ids.shape)} ({ids.dtype}) and logits {list(logits.shape)}; they must "
                "be whole numbers [batch, position] and numbers [batch, position, d_vocab]"
            )
        rows = int(model.get_input_embeddings().weight.shape[0])
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise ValueError(
                f"{path} has ids from {int(ids.min())} to {int(ids.max())}; the model embeds {rows} ids"
            )
        known = [name for each in (model, decoder_of(model)) for name in inspect.signature(each.forward).parameters]
        unknown = sorted(tensors.keys() - set(known))
        if unknown:
            raise ValueError(
                f"{path} has {', '.join(map(repr, unknown))}, which {type(model).__name__}'s forward pass does not "
                "take; leave them out"
            )
        return cls(ids.long(), logits.float(), tensors, path.name)

    @torch.no_grad()
    def compare(self, model: Any) -> Finding:
        """Whether the model's logits are these, up to rounding (`relative_gap`); padding does not count.

        Raises:
            ValueError: they have another number of columns.
        """
        device = input_device(model)
        options = {name: value.to(device) for name, value in self.options.items()}
        ours = model(input_ids=self.input_ids.to(device), **options).logits.float().cpu()
        if ours.shape != self.logits.shape:
            raise ValueError(
                f"{self.name} has logits of {self.logits.shape[-1]} tokens, and the model's have {ours.shape[-1]}"
            )
        mask = self.options.get("attention_mask")
        content = torch.ones_like(self.input_ids) if mask is None or mask.ndim != 2 else mask
        ours, theirs = ours[content.bool()], self.logits[content.bool()]
        gap, limit = relative_gap(ours, theirs), rounding_limit(model.dtype)
        same = float((ours.argmax(-1) == theirs.argmax(-1)).double().mean())
        words = (
            f"{self.name}: logits differ by {gap:.2g} of their standard deviation (at most {limit:g}); the "
            f"likeliest token is the same at {same:.1%} of {counted(len(ours), 'position')}"
        )
        return Finding("reference", words, gap <= limit)
