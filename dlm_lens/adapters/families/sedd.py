"""SEDD (2310.16834): MDLM's network, given the noise level, whose outputs are logarithms of ratios (scores)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm_lens.adapters.config_fields import check_fields
from dlm_lens.adapters.dit import BARE_TENSOR_NAMES, GPT2_TOKENS, HUB_NAMES, DiTConfig, DiTForMaskedLM
from dlm_lens.adapters.masked_diffusion import MDLM_SAMPLER
from dlm_lens.adapters.registry import Family, Shapes, WeightsOnly
from dlm_lens.printable import shown

SEDD_SAMPLER = {**MDLM_SAMPLER, "predictor": "analytic"}
"""Of louaaron/Score-Entropy-Discrete-Diffusion: the predictor of run_sample.py, the steps of config.yaml."""

MODEL_FIELDS = {
    "hidden_size": "hidden_size",
    "cond_dim": "cond_dim",
    "length": "max_position_embeddings",
    "n_blocks": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "dropout": "dropout",
}
"""Fields of `model` in the original config.json -> the names of `DiTConfig`."""

FIXED = (("graph", "type", "absorb"), ("noise", "type", "loglinear"), ("model", "scale_by_sigma", True))
"""Settings of the original config.json of which one value is implemented: that of the released models."""


class SEDDConfig(DiTConfig):
    """Config of SEDD: the original's nested fields, which it writes back, beside those of a DiT.

    Of the original config.json `model`, `graph`, `noise` and `tokens` are read; those of its training are kept.
    [MASK] is the last row of the embedding, after `tokens` others.

    Args:
        graph: the forward process; only {"type": "absorb"}, which replaces tokens by [MASK].
        noise: the schedule; only {"type": "loglinear"}, sigma(t) = -ln(1 - (1 - 1e-3) t).

    Raises:
        ValueError: another forward process, schedule or output, or a [MASK] that is not the last row.
    """

    model_type = "sedd"
    original_names: ClassVar[Mapping[str, str]] = {name: HUB_NAMES[name] for name in ("n_blocks", "n_heads")}
    time_conditioning: bool = True
    graph: dict[str, Any] | None = None
    noise: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the nested fields, and check what the network cannot have."""
        own = {"graph": self.graph, "noise": self.noise, "model": kwargs.pop("model", None)}
        for name, field, implemented in FIXED:
            given = {field: implemented} if own[name] is None else own[name]
            if not isinstance(given, dict):
                raise ValueError(f"SEDD config has {name}={shown(given)}; it must be an object with settings")
            if given.get(field, implemented) != implemented:
                raise ValueError(
                    f"SEDD config has {name}.{field}={shown(given[field])}; only {implemented!r}, as in the "
                    "released models, is implemented"
                )
            own[name] = {**given, field: implemented}
        self.graph, self.noise = own["graph"], own["noise"]
        given = own["model"] or {}
        values = {ours: given[theirs] for theirs, ours in MODEL_FIELDS.items() if given.get(theirs) is not None}
        check_fields(given | {"max_position_embeddings": given.get("length")}, "the field model")
        for name, value in values.items():
            setattr(self, name, value)
        tokens = kwargs.pop("tokens", None)
        if tokens is not None:
            check_fields({"vocab_size": tokens}, "the field tokens")
            self.vocab_size = tokens + 1
        super().__post_init__(**kwargs)
        if not (self.time_conditioning and self.adaln):
            raise ValueError("SEDD config has time_conditioning or adaln off; its network is given the noise level")
        if self.mask_token_id != self.vocab_size - 1:
            raise ValueError(
                f"SEDD config has mask_token_id={self.mask_token_id}; its [MASK] is the last of {self.vocab_size} "
                "rows: leave mask_token_id out"
            )

    def to_dict(self) -> dict[str, Any]:
        """The names of a DiT's fields and the original's, so that the authors' code reads what is saved."""
        values = super().to_dict()
        nested = {theirs: values.get(ours, getattr(self, ours)) for theirs, ours in MODEL_FIELDS.items()}
        nested |= {"type": "ddit", "scale_by_sigma": True}
        vocabulary = values.get("vocab_size", self.vocab_size)
        return values | {"graph": self.graph, "noise": self.noise, "model": nested, "tokens": vocabulary - 1}


def log_scores(
    logits: Float[Tensor, "*batch d_vocab"], ids: Int[Tensor, "*batch"], sigma: Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d_vocab"]:
    """What the original network returns: ln s(x)_y = logits_y - ln(exp(sigma) - 1) - ln N, and 0 at x itself.

    s(x)_y estimates p_sigma(x with y) / p_sigma(x), the ratio of the probabilities of two canvases that differ at
    this position (2310.16834, section 3); N is the number of tokens without [MASK]. At a [MASK] the ratio is
    p(x0 = y | unmasked tokens) / (exp(sigma) - 1) where the forward process replaces tokens by [MASK] (2406.03736),
    so that exp(logits) / N estimates p(x0) as far as its sum is 1, and softmax(logits) without [MASK] is the
    distribution that it is in proportion to. At a token such a process has no ratio; nothing reads one there.

    Args:
        logits: of the model.
        ids: what the canvas holds.
        sigma: the noise level, above 0; one number for each position, or one that is broadcast.
    """
    narrow = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1).log().to(logits.dtype)
    scores = logits - narrow[..., None] - math.log(logits.shape[-1] - 1)
    return scores.scatter(-1, ids[..., None], 0.0)


class SEDDForMaskedLM(DiTForMaskedLM):
    """SEDD, whose `logits` are the head's output; parity with the original: tests/adapters/test_sedd.py.

    The original subtracts ln(exp(sigma) - 1) + ln N from them, the same from all tokens (`log_scores`).
    """

    config_class = SEDDConfig


_HEAD, _TENSORS = "output_layer.linear.weight", ("vocab_embed.embedding", "sigma_map.mlp.0.weight")

SIZES = {
    "small": {"model": {"hidden_size": 768, "n_blocks": 12, "n_heads": 12}},
    "medium": {"model": {"hidden_size": 1024, "n_blocks": 24, "n_heads": 16}},
}
"""Of the released models, louaaron/sedd-small and louaaron/sedd-medium."""


def recognise(shapes: Shapes) -> bool:
    """Whether these are SEDD's tensors."""
    return all(len(shapes.get(name, ())) == 2 for name in (_HEAD, "blocks.0.attn_qkv.weight", *_TENSORS))


def complete(values: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The values of the original config.json, which describe the whole network, with sizes outside `model` too."""
    model = values.get("model") or {}
    return {**values, **{name: model[name] for name in ("hidden_size", "n_blocks", "n_heads") if name in model}}


FAMILY = Family(
    name="sedd",
    layouts={"sedd": (SEDDConfig, SEDDForMaskedLM)},
    samplers={"sedd": SEDD_SAMPLER},
    hub_names=("louaaron/sedd-small", "louaaron/sedd-medium"),
    **GPT2_TOKENS,
    **BARE_TENSOR_NAMES,
    weights_only=WeightsOnly("sedd", recognise, SIZES, complete),
)
