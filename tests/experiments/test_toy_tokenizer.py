"""The word-level tokenizer: loses nothing of the language, reads unspaced text, survives saving."""

import json
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from experiments.toy.language import stream, words
from experiments.toy.tokenizer import SPECIAL_TOKENS, build_tokenizer, save_tokenizer

EXAMPLE = "tom has 5 apples . tom buys 4 more . how many apples ? :"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_example_sentence_is_in_the_language(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer(EXAMPLE).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.convert_ids_to_tokens(ids[1:]) == EXAMPLE.split()


def test_generated_text_makes_a_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in islice(stream("test", 11), 300):
        ids = tokenizer(example.text).input_ids
        # The corpus is encoded by split(): it must be what the tokenizer does.
        assert tokenizer.convert_ids_to_tokens(ids[1:]) == example.text.split()
        assert tokenizer.decode(ids, skip_special_tokens=True) == example.text


@pytest.mark.parametrize(
    "text",
    [
        "Tom has 5 apples. Tom buys 4 more. How many apples?:",
        "  TOM has 5 apples .Tom buys 4 more .\nhow many apples ?:",
    ],
)
def test_case_and_spaces_do_not_matter(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer(text).input_ids == tokenizer(EXAMPLE).input_ids


def test_ids_are_unique_and_complete(tokenizer: PreTrainedTokenizerFast) -> None:
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(SPECIAL_TOKENS) + len(words())))
    named = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id]
    assert len(set(named)) == 4


def test_mask_tokens_in_text_are_read_and_unknown_words_marked(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("5 + [MASK] = 9 . zebra 31").input_ids
    assert ids[3] == tokenizer.mask_token_id
    assert ids[-2:] == [tokenizer.unk_token_id] * 2


def test_batches_are_padded_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer([EXAMPLE, "sort 1 0 2 3 :"], padding=True)
    missing = len(EXAMPLE.split()) - 6
    assert batch.input_ids[1][: missing + 1] == [tokenizer.pad_token_id] * missing + [tokenizer.bos_token_id]
    assert batch.attention_mask[1] == [0] * missing + [1] * 7


def test_saved_tokenizer_is_the_same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    for read in (AutoTokenizer, PreTrainedTokenizerFast):
        loaded = read.from_pretrained(tmp_path)
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert loaded(EXAMPLE).input_ids == tokenizer(EXAMPLE).input_ids
        assert loaded.mask_token_id == tokenizer.mask_token_id
        assert loaded.padding_side == "left"
