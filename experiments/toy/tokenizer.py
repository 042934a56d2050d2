"""The word-level tokenizer of the embedded checkpoints, built with Hugging Face `tokenizers`."""

import json
from pathlib import Path

from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from experiments.toy.language import words

PAD, BOS, EOS, MASK, UNK = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "[MASK]", "<unk>")
SEQUENCE_LENGTH = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Map every word, sign and number of the language to one id, after lower-casing; special tokens first.

    Punctuation is split off wherever it stands ("apples." reads as "apples ."), `<bos>` is put in front, and
    unequal prompts are padded on the left, as the samplers need it. Decoding joins the tokens with spaces.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *words()))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    backend.normalizer = normalizers.Lowercase()
    # Whitespace() would keep runs such as "?:" together; isolated punctuation makes every sign its own token.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        mask_token=MASK,
        unk_token=UNK,
        padding_side="left",
        model_max_length=SEQUENCE_LENGTH,
        clean_up_tokenization_spaces=False,
        # Models here take no segment ids.
        model_input_names=["input_ids", "attention_mask"],
    )


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, loadable by `AutoTokenizer.from_pretrained`."""
    build_tokenizer().save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    # transformers 5 writes its internal class name; the public alias is known to earlier versions as well.
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
    path = directory / "tokenizer.json"  # without spaces, since the wheel has it four times
    path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":"), ensure_ascii=False) + "\n")
