"""`TunedLens`: one affine map per layer in front of the final norm, saved with a digest of its model's weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from dlm_lens.attention import attention_blocks
from dlm_lens.files.atomic_writes import remove_stale
from dlm_lens.files.sealed_json import Document, fitted, parsed
from dlm_lens.files.tensor_files import metadata_of, read_with_metadata, write_tensors
from dlm_lens.recording.names import name_of
from dlm_lens.recording.requests import weights_digest

FORMAT = "dlm-lens tuned lens 2"


class LensFacts(Document):
    """What the metadata of a lens say of it."""

    model: str
    digest: str
    layers: list[int]
    training: dict[str, Any]


@dataclass(frozen=True, eq=False)
class TunedLens:
    """h_l + A_l h_l + b_l, which reads layer l in the basis of the last one (2303.08112, section 3).

    Args:
        weight: A_l; zero for a lens that is the plain logit lens.
        bias: b_l.
        layers: index of each layer; those that are not there are read as they are.
        model: name of the model that it was trained for.
        digest: of that model's weights.
        training: what it was trained on and with.

    Raises:
        ValueError: the shapes contradict each other.
    """

    weight: Float[Tensor, "layer d_model d_model"] = field(repr=False)
    bias: Float[Tensor, "layer d_model"] = field(repr=False)
    layers: tuple[int, ...]
    model: str
    digest: str
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.layers), *self.weight.shape[-1:])
        if tuple(self.bias.shape) != shape or tuple(self.weight.shape) != (*shape, shape[1]):
            raise ValueError(
                f"TunedLens: weight {list(self.weight.shape)}, bias {list(self.bias.shape)} and "
                f"{len(self.layers)} layers contradict each other"
            )

    def __repr__(self) -> str:
        return f"TunedLens(layers {self.layers}, of {self.model})"

    def translate(self, layer: int, stream: Float[Tensor, "state d_model"]) -> Float[Tensor, "state d_model"]:
        """The stream of a layer in the last one's basis, in float32."""
        if layer not in self.layers:
            return stream
        place, wide = self.layers.index(layer), stream.float()
        weight, bias = self.weight[place].to(wide), self.bias[place].to(wide)
        return wide + wide @ weight.mT + bias

    def check(self, model: Any) -> None:
        """Raise if the lens is not this model's.

        Raises:
            ValueError: the model has other weights.
        """
        digest = weights_digest(model)
        if digest != self.digest or len(attention_blocks(model)) <= max(self.layers, default=0):
            raise ValueError(
                f"this tuned lens was trained for {self.model} (weights {self.digest}), not for {name_of(model)} "
                f"(weights {digest}); train one with train_tuned_lens"
            )

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, with the model's digest and a checksum among its metadata.

        Raises:
            OSError: the disk is full, or takes no files; a file that was there stays as it is.
        """
        path = Path(path)
        about = {"model": self.model, "digest": self.digest, "layers": list(self.layers), "training": self.training}
        remove_stale(path.parent)
        write_tensors(
            path, {"weight": self.weight, "bias": self.bias}, {"format": FORMAT, "lens": json.dumps(about)}
        )
        return path

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "TunedLens":
        """Read what `save` wrote, for this model.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no tuned lens, damaged, or another model's.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; TunedLens.save writes one")
        remedy = "train one with train_tuned_lens"
        told = metadata_of(path, remedy, "tuned lens").get("format")
        if told != FORMAT:
            raise ValueError(f"{path} is no tuned lens of this version (its format is {told!r:.80}); {remedy}")
        tensors, metadata = read_with_metadata(path, remedy)
        about = fitted(LensFacts, parsed(metadata.get("lens", ""), path, remedy), path, remedy)
        if set(tensors) != {"weight", "bias"}:
            raise ValueError(f"{path} is damaged (it holds {sorted(tensors)}); {remedy}")
        layers = tuple(about.layers)
        lens = cls(tensors["weight"], tensors["bias"], layers, about.model, about.digest, about.training)
        lens.check(model)
        return lens
