"""MMaDA: LLaDA's network with image tokens behind the text's, and the layout of its understanding prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from dlm_lens.adapters.llada import FAMILY as LLADA
from dlm_lens.adapters.llada import LLaDAConfig, LLaDAModelLM
from dlm_lens.adapters.masked_diffusion import LLADA_SAMPLER
from dlm_lens.adapters.registry import Family

MMADA_SAMPLER = {**LLADA_SAMPLER, "float64_confidence": True, "unpadded_guidance": True}
"""The defaults of Gen-Verse/MMaDA's generate.py and mmu_generate."""


class MMaDAConfig(LLaDAConfig):
    """Config of MMaDA: LLaDA's, with a vocabulary of text, reserved and image tokens.

    `codebook_size`, `llm_vocab_size`, `num_vq_tokens` and the like are kept as they come.
    """

    model_type = "mmada"


class MMaDAModelLM(LLaDAModelLM):
    """MMaDA-8B; parity with the original: tests/adapters/test_mmada.py."""

    config_class = MMaDAConfig


@dataclass(frozen=True)
class ImageLayout:
    """How MMaDA writes an image among text tokens: [mmu] [soi] image [eoi] text, the answer behind it.

    Image code c is token c + text_tokens, the length of the text tokenizer, and not c + llm_vocab_size
    (Gen-Verse/MMaDA, generate.py).

    Args:
        text_tokens: length of the text tokenizer, added tokens included.
        codebook_size: number of image codes.
        mmu, soi, eoi: ids of the task token and of the start and end of an image.
    """

    text_tokens: int
    codebook_size: int = 8192
    mmu: int = 126089
    soi: int = 126084
    eoi: int = 126085

    @classmethod
    def of(cls, model: Any) -> "ImageLayout":
        """The layout of a released checkpoint, from its tokenizer and config.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if getattr(model, "tokenizer", None) is None:
            raise ValueError(
                "image tokens start behind the text tokenizer's, and this model has none; "
                "give ImageLayout(text_tokens=...), or set model.tokenizer"
            )
        return cls(len(model.tokenizer), getattr(model.config, "codebook_size", None) or cls.codebook_size)

    def tokens(self, codes: Int[Tensor, "*batch image"] | Sequence[Any]) -> Int[Tensor, "*batch image"]:
        """Token ids of image codes.

        Raises:
            ValueError: a code outside the codebook.
        """
        return self._checked(torch.as_tensor(codes), 0, "image code") + self.text_tokens

    def codes(self, tokens: Int[Tensor, "*batch image"] | Sequence[Any]) -> Int[Tensor, "*batch image"]:
        """Image codes of token ids.

        Raises:
            ValueError: a token that is no image token.
        """
        return self._checked(torch.as_tensor(tokens), self.text_tokens, "image token") - self.text_tokens

    def understanding(
        self,
        codes: Int[Tensor, "batch image"] | Sequence[Any],
        text: Int[Tensor, "batch text"] | Sequence[Any],
    ) -> Int[Tensor, "batch position"]:
        """Prompts [mmu] [soi] image [eoi] text of image codes and text ids, one per row.

        Raises:
            ValueError: a code outside the codebook, or other numbers of images than texts.
        """
        image, words = torch.atleast_2d(self.tokens(codes)), torch.atleast_2d(torch.as_tensor(text))
        if len(image) != len(words):
            raise ValueError(f"{len(image)} images and {len(words)} texts; give one text per image")
        words = words.to(image.device)
        mmu, soi, eoi = (image.new_full((len(image), 1), i) for i in (self.mmu, self.soi, self.eoi))
        return torch.cat([mmu, soi, image, eoi, words], 1)

    def _checked(self, ids: Int[Tensor, "*batch image"], first: int, what: str) -> Int[Tensor, "*batch image"]:
        outside = ids[(ids < first) | (ids >= first + self.codebook_size)]
        if len(outside):
            raise ValueError(
                f"{what} {int(outside[0])} lies outside {first} to {first + self.codebook_size - 1} "
                f"(a codebook of {self.codebook_size} behind {self.text_tokens} text tokens)"
            )
        return ids.long()


FAMILY = Family(
    name="mmada",
    layouts={"mmada": (MMaDAConfig, MMaDAModelLM)},
    samplers={"llada": MMADA_SAMPLER},
    hub_names=("Gen-Verse/MMaDA-8B-Base", "Gen-Verse/MMaDA-8B-MixCoT"),
    special_ids={134656: {"mask": 126336, "eos": 126081, "eot": 126348}},
    renames=LLADA.renames,
)
