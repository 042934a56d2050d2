"""`SparseAutoencoder`: encoder and decoder between an activation and its sparse features, and its nulls."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dlm_lens.arguments import ONE_SEED, check_index, checked_arguments, instance, is_whole, listed_indices
from dlm_lens.attention import adding_module, attention_blocks, hooked_attentions, writing_module
from dlm_lens.printable import shown
from dlm_lens.shapes import check_shapes

Activation = Literal["topk", "groupmax", "relu", "jumprelu", "gated"]
"""Which pre-activations become features; see `SparseAutoencoder`."""

Normalisation = Literal["none", "constant_norm_rescale", "layer_norm"]
"""What happens to the activation before the encoder, and is undone after the decoder."""

FeatureSite = Literal["resid", "attn_out", "mlp_out"]
"""The activations whose features are read: the stream after a block, what attention or MLP add to it."""

POINTS: dict[str, str] = {"resid": "hook_resid_post", "attn_out": "hook_attn_out", "mlp_out": "hook_mlp_out"}
"""Site -> TransformerLens's name of the point inside a block."""

ENTRIES_AT_ONCE = 2**24
"""Entries of [vector, feature] at a time: 64 MiB in float32."""


@dataclass(frozen=True, eq=False, repr=False)
class SparseAutoencoder:
    """A sparse autoencoder (SAE): features f = encode(x) of an activation x, and its reconstruction decode(f).

    With x' = x (or x normalised) minus `decoder_bias` if `subtracts_bias`, and a = x' W_enc + b_enc (times the
    norms of the decoder's rows if `rescaled`):

    - "topk": f = relu(a) at the k largest entries of a, 0 elsewhere (2406.04093, section 2.3)
    - "groupmax": f = relu(a) at the largest entry of each of k equal groups, 0 elsewhere (EleutherAI's sparsify)
    - "relu": f = relu(a); "jumprelu": f = relu(a) where a > threshold (2407.14435)
    - "gated": f = relu(x' W_enc exp(r) + b_enc) where x' W_enc + gate_bias > 0 (2404.16014)

    decode(f) = f W_dec + b_dec, f divided by the norms first if `rescaled`. Numbers are computed in the dtype of
    the weights, in blocks of vectors.

    Args:
        encoder_weight: W_enc.
        encoder_bias: b_enc; of "gated" the bias of the magnitudes.
        decoder_weight: W_dec, the direction of every feature.
        decoder_bias: b_dec.
        activation: see above.
        k: features of a vector; of "topk" and "groupmax" alone.
        threshold: of "jumprelu" alone.
        gate_bias: of "gated" alone.
        gate_scale: r, of "gated" alone.
        subtracts_bias: the decoder's bias is subtracted before the encoder.
        rescaled: pre-activations are measured in the norms of the decoder's rows; not of "gated".
        normalisation: "constant_norm_rescale" scales x to the norm sqrt(d_model), "layer_norm" to mean 0 and
            standard deviation 1 (with d_model - 1); the reconstruction is scaled back.
        site: the activation that it was trained on.
        layer: of that activation; None if the checkpoint does not say.
        model: name of the model that it was trained on; "" if the checkpoint does not say.
        of_module: "attn_out" and "mlp_out" are the outputs of attention and MLP themselves; layers that have a norm
            or a gate after them (Gemma 2, OLMo 2) add something else to the stream, and are refused.

    Raises:
        ValueError: shapes that contradict each other, or fields that do not belong to the activation.
    """

    encoder_weight: Float[Tensor, "d_model feature"]
    encoder_bias: Float[Tensor, "feature"]
    decoder_weight: Float[Tensor, "feature d_model"]
    decoder_bias: Float[Tensor, "d_model"]
    activation: Activation = "topk"
    k: int | None = None
    threshold: Float[Tensor, "feature"] | None = None
    gate_bias: Float[Tensor, "feature"] | None = None
    gate_scale: Float[Tensor, "feature"] | None = None
    subtracts_bias: bool = True
    rescaled: bool = False
    normalisation: Normalisation = "none"
    site: FeatureSite = "resid"
    layer: int | None = None
    model: str = ""
    of_module: bool = False

    def __post_init__(self) -> None:
        check_shapes(self)
        for name, kinds in (("activation", Activation), ("normalisation", Normalisation), ("site", FeatureSite)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"SparseAutoencoder: {name} is {shown(getattr(self, name))}; it must be one of "
                    f"{', '.join(get_args(kinds))}"
                )
        chosen = self.activation in ("topk", "groupmax")
        most = self.features
        if chosen and not (is_whole(self.k) and 1 <= int(self.k or 0) <= most):
            raise ValueError(
                f"SparseAutoencoder: k is {shown(self.k)}; it must be a whole number from 1 to {most}, the number "
                "of features"
            )
        if self.activation == "groupmax" and most % int(self.k or 1):
            raise ValueError(f"SparseAutoencoder: {most} features are not {self.k} groups of one size")
        belongs = {"threshold": "jumprelu", "gate_bias": "gated", "gate_scale": "gated"}
        for name, owner in belongs.items():
            if (getattr(self, name) is None) == (self.activation == owner):
                verb = "needs" if self.activation == owner else "has no"
                raise ValueError(f"SparseAutoencoder: activation {shown(self.activation)} {verb} {name}")
        if self.rescaled and self.activation == "gated":
            raise ValueError("SparseAutoencoder: activation 'gated' is not rescaled; leave rescaled= out")
        if not all(bool(tensor.isfinite().all()) for tensor in self.tensors.values()):
            raise ValueError("SparseAutoencoder: a weight is not finite")

    def __repr__(self) -> str:
        where = "layer unknown" if self.layer is None else f"blocks.{self.layer}.{POINTS[self.site]}"
        kind = self.activation + (f" {self.k}" if self.k else "")
        return (
            f"SparseAutoencoder({kind} of {self.features} features, d_model {self.d_model}, {where}, {self.digest})"
        )

    @property
    def d_model(self) -> int:
        """Width of the activation."""
        return len(self.decoder_bias)

    @property
    def features(self) -> int:
        """Number of features."""
        return len(self.encoder_bias)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @cached_property
    def digest(self) -> str:
        """The first 12 digits of the SHA-256 of weights and settings, by which a recording knows it again."""
        found = hashlib.sha256(
            f"{self.activation} {self.k} {self.subtracts_bias} {self.rescaled} {self.normalisation}".encode()
        )
        for name, tensor in self.tensors.items():
            found.update(f"{name} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()[:12]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> "SparseAutoencoder":
        """The same with its weights on another device or in another dtype; itself where nothing changes."""
        moved: dict[str, Any] = {
            name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()
        }
        if all(moved[name] is tensor for name, tensor in self.tensors.items()):
            return self
        return replace(self, **moved)

    def check(self, model: Any, *, layer: bool = True) -> None:
        """Raise unless the autoencoder fits a model.

        Args:
            model: from `dlm_lens.load`.
            layer: whether it has to name a layer of the model.

        Raises:
            ValueError: another width, a layer that is unknown or does not exist, or what `check_layer` refuses.
        """
        depth = len(hooked_attentions(model))
        width = int(model.config.hidden_size)
        if width != self.d_model:
            raise ValueError(f"{self} was trained on vectors of {self.d_model} entries; the model's have {width}")
        if layer and self.layer is None:
            raise ValueError(f"{self} does not say of which layer it is; give load_sae(..., layer=)")
        if layer and not 0 <= int(self.layer or 0) < depth:
            raise ValueError(f"{self} is of layer {self.layer}; the model has the layers 0 to {depth - 1}")
        if self.of_module and self.layer is not None and 0 <= self.layer < depth:
            self.check_layer(attention_blocks(model)[self.layer])

    def check_layer(self, block: nn.Module) -> None:
        """Raise where the autoencoder is of a module's output (`of_module`) that the layer norms before it adds it.

        Raises:
            ValueError: naming the module and the norm or gate after it.
        """
        if not self.of_module or self.site == "resid":
            return
        own, added = writing_module(block, self.site), adding_module(block, self.site)
        if own is not added:
            names = {id(module): name for name, module in block.named_children()}
            raise ValueError(
                f"{self} is of the output of {names.get(id(own), type(own).__name__)}, and {type(block).__name__} "
                f"adds {names[id(added)]} of it to the stream, its {self.site}; no hook point has what it was "
                f"trained on, so take one of the model's {self.site}"
            )

    def encode(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch feature"]:
        """The features of activations, with every entry: take many vectors `at_once` by `at_once`.

        Raises:
            ValueError: vectors of another width, or no tensor.
        """
        self._check_width("x", x, self.d_model)
        return self._activate(self._normalised(x)[0])

    def decode(
        self, features: Float[Tensor, "*batch feature"], x: Float[Tensor, "*batch d_model"] | None = None
    ) -> Float[Tensor, "*batch d_model"]:
        """The activations with these features.

        Args:
            features: of `encode`, or edited.
            x: the activations that were encoded, whose norm (and mean) the result gets; with `normalisation` alone.

        Raises:
            ValueError: `normalisation` without x, another number of features, or no tensor.
        """
        self._check_width("features", features, self.features)
        if self.rescaled:
            features = features / self._divisors
        found = features @ self.decoder_weight + self.decoder_bias
        if self.normalisation == "none":
            return found
        if x is None:
            raise ValueError(f"{self} normalises its input; give decode(features, x) the activations too")
        _, scale, mean = self._normalised(x)
        return found * scale + mean

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The reconstruction, in the dtype of x."""
        flat = x.reshape(-1, x.shape[-1])
        parts = [self.decode(self.encode(part), part) for part in flat.split(self.at_once)]
        return torch.cat(parts).to(x.dtype).reshape(x.shape) if parts else x

    def change(
        self,
        x: Float[Tensor, "*batch d_model"],
        amounts: Float[Tensor, "*#batch chosen"],
        features: Sequence[int],
    ) -> Float[Tensor, "*batch d_model"]:
        """What more of some features adds to an activation: decode(f + amounts) - decode(f).

        The bias cancels, so that this is linear in the amounts; with `normalisation` it is scaled as x was.

        Args:
            x: the activation.
            amounts: of each chosen feature.
            features: their indices.

        Raises:
            ValueError: a feature that does not exist, vectors of another width, or amounts of other features.
        """
        chosen = list(listed_indices("feature", features))
        for feature in chosen:
            check_index("feature", feature, self.features)
        self._check_width("x", x, self.d_model)
        self._check_width("amounts", amounts, len(chosen))
        amounts = amounts / self._divisors[chosen] if self.rescaled else amounts
        return ((amounts @ self.decoder_weight[chosen]) * self._normalised(x)[1]).expand(x.shape)

    def _check_width(self, name: str, given: Any, width: int) -> None:
        """Raise unless an argument is a tensor whose last axis has this size."""
        if not isinstance(given, Tensor) or not given.ndim or given.shape[-1] != width:
            raise ValueError(f"{self}: {name} is {shown(given)}; give a tensor [..., {width}]")

    @property
    def at_once(self) -> int:
        """Vectors that are encoded together."""
        return max(1, ENTRIES_AT_ONCE // self.features)

    @cached_property
    def _norms(self) -> Float[Tensor, "feature"]:
        return self.decoder_weight.norm(dim=-1)

    @cached_property
    def _divisors(self) -> Float[Tensor, "feature"]:
        """The norms; 1 of a row of zeros, which adds nothing whatever it is divided by."""
        return self._norms.masked_fill(self._norms == 0, 1.0)

    def _normalised(self, x: Tensor) -> tuple[Tensor, Any, Any]:
        """The encoder's input before the bias, and the scale and mean that a reconstruction gets back."""
        x = x.to(self.encoder_weight.dtype)
        if self.normalisation == "none":
            return x, 1.0, 0.0
        if self.normalisation == "constant_norm_rescale":
            scale = x.norm(dim=-1, keepdim=True) / self.d_model**0.5
            return x / scale.masked_fill(scale == 0, 1.0), scale, 0.0  # a vector of zeros stays one
        mean, scale = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return (x - mean) / (scale + 1e-5), scale, mean

    def _activate(self, x: Tensor) -> Tensor:
        x = x - self.decoder_bias if self.subtracts_bias else x
        if self.activation == "gated":
            assert self.gate_bias is not None
            assert self.gate_scale is not None
            inner = x @ self.encoder_weight
            magnitude = (inner * self.gate_scale.exp() + self.encoder_bias).relu()
            return magnitude * (inner + self.gate_bias > 0)
        inner = torch.addmm(self.encoder_bias, x.reshape(-1, self.d_model), self.encoder_weight)
        inner = inner.reshape(*x.shape[:-1], self.features)
        inner = inner * self._norms if self.rescaled else inner
        if self.activation == "topk":
            largest = inner.topk(int(self.k or 0), dim=-1)
            return torch.zeros_like(inner).scatter_(-1, largest.indices, largest.values.relu())
        if self.activation == "groupmax":
            groups = inner.unflatten(-1, (int(self.k or 1), -1)).relu()
            best = groups.max(-1, keepdim=True)
            return torch.zeros_like(groups).scatter_(-1, best.indices, best.values).flatten(-2)
        if self.threshold is not None:
            return inner.relu() * (inner > self.threshold)
        return inner.relu()


AUTOENCODER = instance(SparseAutoencoder, "a SparseAutoencoder of load_sae")


@checked_arguments(sae=AUTOENCODER, seed=ONE_SEED)
def untrained(sae: SparseAutoencoder, seed: int = 0) -> SparseAutoencoder:
    """An autoencoder of the same form with random weights, as training begins (2406.04093, appendix A.1).

    The decoder's rows are random directions of length 1, the encoder is its transpose, and the encoder's bias is 0.
    The decoder's bias, which holds the mean of the activations, is that of the trained one: the null differs in its
    features alone. A threshold stays.
    """
    decoder = _directions(sae, seed)
    zero = torch.zeros_like(sae.encoder_bias)
    gate: dict[str, Any] = {} if sae.gate_bias is None else {"gate_bias": zero, "gate_scale": zero}
    return replace(sae, encoder_weight=decoder.T.contiguous(), encoder_bias=zero, decoder_weight=decoder, **gate)


@checked_arguments(sae=AUTOENCODER, seed=ONE_SEED)
def random_decoder(sae: SparseAutoencoder, seed: int = 0) -> SparseAutoencoder:
    """The trained encoder with a decoder of random directions, each as long as the one that it replaces."""
    directions = _directions(sae, seed) * sae.decoder_weight.norm(dim=-1, keepdim=True)
    return replace(sae, decoder_weight=directions)


def _directions(sae: SparseAutoencoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(sae.decoder_weight.shape, generator=generator, dtype=torch.float32)
    return (drawn / drawn.norm(dim=-1, keepdim=True)).to(sae.decoder_weight)
