"""`TunedLens`: one affine map per layer in front of the final norm, saved with a digest of its model's weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm_lens.attention import attention_blocks
from dlm_lens.recording.names import name_of
from dlm_lens.recording.requests import weights_digest

FORMAT = "dlm-lens tuned lens 1"


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
        """Write a safetensors file, with the model's digest among its metadata."""
        path = Path(path)
        about = {"model": self.model, "digest": self.digest, "layers": list(self.layers), "training": self.training}
        tensors = {"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}
        save_file(tensors, path, metadata={"format": FORMAT, "lens": json.dumps(about)})
        return path

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "TunedLens":
        """Read what `save` wrote, for this model.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no tuned lens, or another model's.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; TunedLens.save writes one")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"{path} is no tuned lens (its format is {metadata.get('format')!r})")
                about = json.loads(metadata["lens"])
                tensors = {name: file.get_tensor(name) for name in ("weight", "bias")}
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no tuned lens, or damaged ({error})") from None
        lens = cls(**tensors, **{**about, "layers": tuple(about["layers"])})
        lens.check(model)
        return lens
