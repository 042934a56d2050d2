"""GIDD (2503.04482): MDLM's DiT, given the time itself, and noise that mixes [MASK] and random tokens."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from dlm_lens.adapters.dit import BARE_TENSOR_NAMES, MASK_TOKEN, DiTConfig, DiTForMaskedLM
from dlm_lens.adapters.registry import Family
from dlm_lens.printable import shown

GIDD_SAMPLER = {
    "steps": 128,
    "gen_length": 128,
    "temperature": 1.0,
    "min_p": 0.0,
    "eps": 1e-4,
    "correction_steps": 0,
    "correction_temperature": 0.1,
    "correction_time": 0.01,
    "correction_stops": True,
    "correction_patience": 32,
}
"""The defaults of dvruette/gidd's GiddPipeline; gen_length is ours (theirs is the whole context)."""

T_EPS = 1e-4


def strength_of(p_uniform: float) -> float:
    """B = 2 p / (1 - p), the strength of the random tokens (dvruette/gidd, HybridDiffusion with gamma 1)."""
    return 2 * p_uniform / (1 - p_uniform)


def hybrid_shares(
    t: Float[Tensor, "*time"], p_uniform: float
) -> tuple[Float[Tensor, "*time"], Float[Tensor, "*time"], Float[Tensor, "*time"]]:
    """The shares of the text's tokens, of [MASK] and of random other ids at time t, which sum to 1.

    They are (1 - t) / C, t / C and c / C with c = B sqrt(t (1 - t)) and C = 1 + c (2503.04482, section 3;
    dvruette/gidd, HybridDiffusion.get_alpha_betapi). At t = 1/2 the share of random tokens is `p_uniform`. The
    original has exp(-20) for a `p_uniform` of 0; here there are none then, and a token that was written stays.

    Args:
        t: from 0, the text, to 1, masks.
        p_uniform: of the config.
    """
    random = strength_of(p_uniform) * (t * (1 - t)).sqrt()
    total = 1 + random
    return (1 - t) / total, t / total, random / total


def hybrid_rates(
    t: Float[Tensor, "*time"], p_uniform: float
) -> tuple[Float[Tensor, "*time"], Float[Tensor, "*time"], Float[Tensor, "*time"]]:
    """The derivatives of `hybrid_shares` in time, for times between 0 and 1.

    They are -(C + (1 - t) c') / C^2, (C - t c') / C^2 and c' / C^2 with c' = B (1 - 2 t) / (2 sqrt(t (1 - t))).
    """
    strength, root = strength_of(p_uniform), (t * (1 - t)).sqrt()
    total, rate = 1 + strength * root, strength * (1 - 2 * t) / (2 * root)
    return -(total + (1 - t) * rate) / total**2, (total - t * rate) / total**2, rate / total**2


def time_of(masked: Float[Tensor, "*batch"], p_uniform: float) -> Float[Tensor, "*batch"]:
    """The time at which a share m of the tokens is masked, the inverse of m = t / C of `hybrid_shares`.

    With k = (m B)^2 it is t = (2 m + k + sqrt(k (4 m + k - 4 m^2))) / (2 (1 + k)).

    Args:
        masked: m.
        p_uniform: of the config.
    """
    square = (masked * strength_of(p_uniform)) ** 2
    root = (square * (4 * masked + square - 4 * masked**2)).clamp(min=0).sqrt()
    return (2 * masked + square + root) / (2 * (1 + square))


class GiddDiTConfig(DiTConfig):
    """Config of GIDD's DiT: the authors' fields, which it writes back, beside those of a DiT.

    Their `attention_dropout` is that of what attention and MLP add, `dropout` here. `t_eps` becomes the default of
    the sampler's setting of that name.

    Args:
        p_uniform: share of random tokens at t = 1/2, from 0 and below 1.
        t_eps: the times of training are from this to 1 - t_eps.

    Raises:
        ValueError: a value is out of its range, or a network that is not given the time.
    """

    model_type = "dit"
    original_class: ClassVar[str | None] = "DIT"
    original_names: ClassVar[Mapping[str, str]] = {
        "timestep_cond_dim": "cond_dim",
        "max_seq_len": "max_position_embeddings",
        "attention_dropout": "dropout",
    }
    vocab_size: int = 50259
    max_position_embeddings: int = 1024
    attention_dropout: float | int | None = 0.0
    dropout: float = 0.0
    time_conditioning: bool = True
    p_uniform: float = 0.0
    t_eps: float = T_EPS

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the dropout under the authors' name, and check the noise."""
        if self.attention_dropout:
            self.dropout, self.attention_dropout = self.attention_dropout, 0.0
        super().__post_init__(**kwargs)
        if not (isinstance(self.p_uniform, int | float) and 0 <= self.p_uniform < 1):
            raise ValueError(
                f"GIDD config has p_uniform={shown(self.p_uniform)}; it must be a number from 0 and below 1"
            )
        if not (isinstance(self.t_eps, int | float) and 0 < self.t_eps < 0.5):
            raise ValueError(f"GIDD config has t_eps={shown(self.t_eps)}; it must be a number between 0 and 0.5")
        if not (self.time_conditioning and self.adaln):
            raise ValueError("GIDD config has time_conditioning or adaln off; its network is given the time")
        if self.t_eps != T_EPS:
            self.sampler_defaults = {"eps": self.t_eps, **(self.sampler_defaults or {})}

    def level_of(self, masked: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """What the network is given where a share of the tokens is masked: the time, within those of training."""
        return time_of(masked, self.p_uniform).clamp(self.t_eps, 1 - self.t_eps)


class GiddDiTForMaskedLM(DiTForMaskedLM):
    """GIDD's DiT, whose argument `sigma` is the time t; parity: tests/adapters/test_gidd_dit.py."""

    config_class = GiddDiTConfig


FAMILY = Family(
    name="gidd_dit",
    layouts={"dit": (GiddDiTConfig, GiddDiTForMaskedLM)},
    samplers={"gidd_dit": GIDD_SAMPLER},
    hub_names=tuple(
        f"dvruette/gidd-{size}-p_unif-{share}" for size in ("small", "base") for share in ("0.0", "0.1", "0.2")
    ),
    special_ids={50259: {"mask": 50258, "pad": 50257, "bos": 50256, "eos": 50256}},
    mask_token=MASK_TOKEN,
    **BARE_TENSOR_NAMES,
    tiny={"p_uniform": 0.1},
)
