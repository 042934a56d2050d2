"""D2F's sampler, of LLaDA and Dream trained by discrete diffusion forcing: multi-block decoding of the answer."""

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_lens.attention import Context
from dlm_lens.sampling.algorithm_registry import FILTERED, Algorithm
from dlm_lens.sampling.block_network import BlockLogits
from dlm_lens.sampling.likelihood.corruption import CountCorruption
from dlm_lens.sampling.noise import Noise
from dlm_lens.sampling.samplers.base import FirstCanvas
from dlm_lens.sampling.samplers.multi_block import MultiBlockSampler, MultiBlockSettings, resolve
from dlm_lens.sampling.settings import SpecialIds


@dataclass(frozen=True, kw_only=True)
class D2FSettings(MultiBlockSettings):
    """Settings of D2F (2508.09192; SJTU-DENG-Lab/Discrete-Diffusion-Forcing, eval_dream.py and eval_llada.py).

    They are those of `MultiBlockSettings`. The authors have no limit of `running_blocks`, and other names:
    `block_add_threshold` (`add_block_threshold`), `decoded_token_threshold` (`semi_complete_threshold`) and
    `skip_threshold` (`threshold`).

    Args:
        gen_length: tokens of the answer (`max_new_tokens`); the last block may be shorter.
        block_length: tokens of a block (`block_size`), counted from the first position of the answer.

    Raises:
        ValueError: a value is out of its range.
    """

    running_blocks: int | None = None
    semi_complete_threshold: float = 0.95
    threshold: float = 0.9


class D2FSampler(MultiBlockSampler):
    """Multi-block decoding where the prompt is one block that sees itself, and blocks begin with the answer.

    The probabilities are those of all tokens. With `reference_quirks` (one row, without masks in the prompt) [MASK]
    may be proposed, and no block joins once an end of the text is written.
    """

    from_text: ClassVar[bool] = False
    context: ClassVar[Context] = "whole"
    whole_blocks: ClassVar[bool] = False

    def __init__(
        self, settings: D2FSettings, noise: Noise, ids: SpecialIds, *, reference_quirks: bool = False
    ) -> None:
        super().__init__(settings, noise, ids, reference_quirks=reference_quirks)
        never = [] if reference_quirks else [ids.mask]
        self.propose = self.proposal(settings, noise, never)
        self.propose.of_others = False

    def network(self, model: Any, first: FirstCanvas) -> BlockLogits:
        """The network of block diffusion.

        Raises:
            ValueError: `reference_quirks` with masks in the prompt, which the authors' code keeps as tokens, or an
                answer of other than whole blocks, which it cuts.
        """
        length = first.tokens.shape[1] - first.prompt_length
        if self.stores and bool((first.masked & first.content)[:, : first.prompt_length].any()):
            raise ValueError(
                "the authors' code keeps a [MASK] in a prompt as a token, and here it is filled in: leave "
                "reference_quirks or the masks in the prompt out"
            )
        if self.stores and length % self.block_length:
            raise ValueError(
                f"gen_length is {length}, and the authors' code decodes whole blocks of {self.block_length} alone; "
                f"give {length // self.block_length * self.block_length or self.block_length}, or leave "
                "reference_quirks out"
            )
        return super().network(model, first)


ALGORITHM = Algorithm("d2f", D2FSettings, D2FSampler, resolve, FILTERED, corruption=CountCorruption())
