"""MMaDA: LLaDA's network with image tokens after the text tokens, and the layouts of prompts with an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm_lens.adapters.families.llada import FAMILY as LLADA
from dlm_lens.adapters.families.llada import LLaDAConfig, LLaDAModelLM
from dlm_lens.adapters.masked_diffusion import LLADA_SAMPLER
from dlm_lens.adapters.registry import Family

MMADA_SAMPLER = {**LLADA_SAMPLER, "float64_confidence": True, "unpadded_guidance": True}
"""The defaults of Gen-Verse/MMaDA's generate.py and mmu_generate."""


class MMaDAConfig(LLaDAConfig):
    """Config of MMaDA: LLaDA's, with a vocabulary of text, reserved and image tokens.

    `codebook_size`, `llm_vocab_size`, `num_vq_tokens` and the like are kept as they come.
    """

    model_type = "mmada"
    original_class: ClassVar[str | None] = "MMadaModelLM"


class MMaDAModelLM(LLaDAModelLM):
    """MMaDA-8B; parity with the original: tests/adapters/test_mmada.py."""

    config_class = MMaDAConfig


@dataclass(frozen=True)
class ImageLayout:
    """How MMaDA writes an image among text tokens.

    To answer questions about it: [mmu] [soi] image [eoi] text, followed by the answer. To draw it:
    [iPAD]* [t2i] [bos] text [eos] [soi] image [eoi]. Image code c is token c + text_tokens, the length of the text
    tokenizer, and not c + llm_vocab_size (Gen-Verse/MMaDA, generate.py).

    Args:
        text_tokens: length of the text tokenizer, added tokens included.
        codebook_size: number of image codes.
        mmu, soi, eoi: ids of the task token and of the start and end of an image.
        t2i, ipad: ids of the task token of drawing and of its padding on the left.
        bos, eos, mask: ids of the start and end of the text, and of the mask.
    """

    text_tokens: int
    codebook_size: int = 8192
    mmu: int = 126089
    soi: int = 126084
    eoi: int = 126085
    t2i: int = 126088
    ipad: int = 126093
    bos: int = 126080
    eos: int = 126081
    mask: int = 126336

    @classmethod
    def of(cls, model: Any) -> "ImageLayout":
        """The layout of a released checkpoint, from its tokenizer and config; reserved ids as released.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if getattr(model, "tokenizer", None) is None:
            raise ValueError(
                "image tokens start after those of the text tokenizer, and this model has none; "
                "give ImageLayout(text_tokens=...), or set model.tokenizer"
            )
        found = {
            "codebook_size": getattr(model.config, "codebook_size", None) or cls.codebook_size,
            "bos": getattr(model.tokenizer, "bos_token_id", None),
            "eos": getattr(model.tokenizer, "eos_token_id", None),
            "mask": getattr(model.config, "mask_token_id", None),
        }
        return cls(len(model.tokenizer), **{name: value for name, value in found.items() if value is not None})

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

    def generation(
        self, text: Int[Tensor, "batch text"] | Sequence[Any], image_tokens: int = 1024, length: int | None = None
    ) -> Int[Tensor, "batch position"]:
        """Prompts [iPAD]* [t2i] [bos] text [eos] [soi] image [eoi] of text ids, the image still masked.

        Image codes that are given may be written over the masks, `prompt[:, slice(*layout.image(prompt))]`.

        Args:
            text: ids of one text, or of one per row, of any lengths; a [bos] at its start is not doubled.
            image_tokens: codes of the image; 1024 for 512 pixels.
            length: positions before [soi]; those of the longest text by default. The padding is hidden, so
                that this changes nothing but the canvas.

        Raises:
            ValueError: a text longer than `length`, or no image token.
        """
        if image_tokens < 1:
            raise ValueError(f"image_tokens is {image_tokens}; it must be at least 1")
        given = text.tolist() if isinstance(text, Tensor) else list(text)
        rows = [[int(i) for i in row] for row in (given if given and not isinstance(given[0], int) else [given])]
        rows = [row[1:] if row[:1] == [self.bos] else row for row in rows]
        heads = [[self.t2i, self.bos, *row, self.eos] for row in rows]
        longest = max(len(head) for head in heads)
        length = longest if length is None else length
        if longest > length:
            raise ValueError(
                f"the longest text takes {longest} positions with its task, start and end tokens, but length is "
                f"{length}; shorten the text, or raise length"
            )
        image = [self.soi, *[self.mask] * image_tokens, self.eoi]
        return torch.tensor([[self.ipad] * (length - len(head)) + head + image for head in heads])

    def unconditional(self, prompt: Int[Tensor, "batch position"]) -> Int[Tensor, "batch position"]:
        """The prompts with an empty text in place of theirs, of the same length: guidance's other half.

        Raises:
            ValueError: a prompt without an image at its end, or too short for an empty text.
        """
        start, _ = self.image(prompt)
        empty = [self.t2i, self.bos, self.eos]
        if start - 1 < len(empty):
            raise ValueError(
                f"{start - 1} positions before [soi] ({self.soi}) have no room for an empty text [t2i] [bos] "
                "[eos]; build the prompt with ImageLayout.generation"
            )
        other = prompt.clone()
        other[:, : start - 1] = self.ipad
        other[:, start - 1 - len(empty) : start - 1] = torch.tensor(empty, device=prompt.device)
        return other

    def image(self, prompt: Int[Tensor, "batch position"]) -> tuple[int, int]:
        """The (start, stop) positions of the image in `generation` prompts, between [soi] and a last [eoi].

        Raises:
            ValueError: a row has no image there, or another place for it than the first.
        """
        last = prompt.shape[1] - 1
        starts = [int(found[-1]) + 1 if len(found := (row == self.soi).nonzero()) else 0 for row in prompt]
        for row, start in enumerate(starts):
            if not start or start >= last or int(prompt[row, last]) != self.eoi:
                raise ValueError(
                    f"prompt {row} does not end with [soi] image [eoi] ({self.soi}, image tokens, {self.eoi}); "
                    "build it with ImageLayout.generation"
                )
            if start != starts[0]:
                raise ValueError(
                    f"the image of prompt {row} begins at position {start}, that of prompt 0 at {starts[0]}; give "
                    "all texts to one ImageLayout.generation, which pads them"
                )
        return starts[0], last

    def padding(self, prompt: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """True for the [iPAD]s on the left."""
        return (prompt == self.ipad).long().cumprod(-1).bool()

    def _checked(self, ids: Int[Tensor, "*batch image"], first: int, what: str) -> Int[Tensor, "*batch image"]:
        outside = ids[(ids < first) | (ids >= first + self.codebook_size)]
        if len(outside):
            raise ValueError(
                f"{what} {int(outside[0])} lies outside {first} to {first + self.codebook_size - 1} "
                f"(a codebook of {self.codebook_size} after {self.text_tokens} text tokens)"
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
