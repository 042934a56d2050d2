"""Token text: what a token holds, and how every medium shows it."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dlm_lens.printable import echo, one_line, printable
from dlm_lens.sampling.token_text import StoredTokenizer, TokenTexts, shown
from dlm_lens.sinks.token_classes import TokenClasses

HOSTILE = {
    "\x1b[31mred": "\\u001b[31mred",
    "\x1b]0;title\x07": "\\u001b]0;title\\u0007",
    "\x00": "\\u0000",
    "\x9b2J": "\\u009b2J",  # CSI in one character
    "\u202eevil": "\\u202eevil",
    "\u2066a\u2069": "\\u2066a\\u2069",
    "\u200b": "\\u200b",
    "\ufeff": "\\ufeff",
    "\ud800": "\\ud800",
    "\U000e0041": "\\U000e0041",
    "a\tb\nc\rd": "a\\tb\\nc\\rd",
    " the": "␣the",
    "  ": "␣␣",
    "\xa0": "\\u00a0",
    "": "∅",
    "<img src=x onerror=y>": "<img␣src=x␣onerror=y>",
    "$x^2$": "$x^2$",
    "你": "你",
    "\U0001f468\u200d\U0001f469": "\U0001f468\u200d\U0001f469",
    "\u200da": "\\u200da",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_token_is_visible_and_inert(text):
    assert shown(text) == HOSTILE[text]
    assert not [c for c in shown(text) if not c.isprintable() and c not in "\u200d"]


def test_long_tokens_are_cut_and_only_where_a_length_is_given():
    assert shown("x" * 10**6) == "x" * 39 + "…"
    assert shown("\x00" * 100, 12) == "\\u0000\\u000…"
    assert shown("x" * 40) == "x" * 40
    assert shown(" " * 41) == "␣" * 39 + "…"
    assert shown("x" * 1000, None) == "x" * 1000


def test_sentences_keep_spaces_and_lines():
    text = "a  b\n\tc \x1b[2J\x07\x00 \u202e d"
    assert printable(text) == "a  b\n\tc \\u001b[2J\\u0007\\u0000 \\u202e d"


def test_a_message_within_a_message_has_a_bounded_length():
    text = one_line(ValueError("no\n \x1b[2J " + "word " * 100))
    assert text.startswith(r"no \x1b[2J word word")
    assert text.endswith("...")
    assert len(text) == 400
    assert one_line(ValueError("word " * 50)) == "word " * 49 + "word"
    assert one_line(KeyError()) == "KeyError"


def test_what_is_echoed_is_printable(capsys):
    echo("\x1b]0;x\x07\x00 weight.\x9b1m")
    echo("bad \x1b[2J", err=True)
    out, err = capsys.readouterr()
    assert (out, err) == ("\\u001b]0;x\\u0007\\u0000 weight.\\u009b1m\n", "bad \\u001b[2J\n")


@pytest.fixture(scope="module")
def bytewise():
    """A byte-level BPE tokenizer as GPT-2's, LLaDA's and Dream's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "[MASK]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat\n\tsat on the mat ."] * 50, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", mask_token="[MASK]", clean_up_tokenization_spaces=True
    )


def test_pieces_of_a_bytewise_vocabulary(bytewise):
    text = "the cat\n\t你 ☃ the\x07 ."
    ids = bytewise(text, add_special_tokens=False)["input_ids"]
    exact = TokenTexts(bytewise)
    # Every token alone is its bytes: together they are the text, whatever characters were split.
    data = b""
    for token in ids:
        piece = exact.exact(token)
        data += bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else piece.encode()
    assert data.decode() == text
    assert {"<0xE4>", "<0xBD>", "<0xA0>"} <= {exact(token) for token in ids}
    words = [exact(token) for token in ids]
    assert "␣the" in words
    assert "\\u0007" in words
    assert any(word.startswith("\\n") for word in words)
    assert all(word.isprintable() for word in words)
    assert exact(bytewise.convert_tokens_to_ids("[MASK]")) == "[MASK]"
    assert exact(10**6) == "<1000000>"
    assert exact(-1) == "sink(0)"
    # `decode` of one id would not tell: a lone byte is U+FFFD, and cleaning up takes the space of " .".
    assert "�" in bytewise.decode([ids[words.index("<0xE4>")]])


def test_a_stored_tokenizer_decodes_as_the_tokenizer(bytewise):
    text = "the cat 你 sat\n"
    end = bytewise.convert_tokens_to_ids("<|end|>")
    ids = [*bytewise(text)["input_ids"], end]
    exact = TokenTexts(bytewise).exact
    words = {token: exact(token) for token in ids}
    stored = StoredTokenizer.of(bytewise, words)
    again = StoredTokenizer.read(words, json.loads(json.dumps(stored.facts())))
    assert stored.decode(ids, skip_special_tokens=True) == again.decode(ids, skip_special_tokens=True) == text
    assert stored.decode(ids) == text + "<|end|>"
    assert [again.exact(token) for token in ids] == [exact(token) for token in ids]
    assert again.exact(10**6) == "<1000000>"
    unknown = next(token for token in range(300) if token not in words)
    fallback = StoredTokenizer(words, **again.facts(), fallback=bytewise)
    assert TokenTexts(fallback).exact(unknown) == exact(unknown)


def test_a_metaspace_vocabulary_keeps_its_spaces_and_bytes():
    vocabulary = {"<unk>": 0, "▁the": 1, "cat": 2, "<0x0A>": 3, "▁": 4, "<0xE4>": 5, "<0x41>": 6, "<0x09>": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    texts = TokenTexts(own)
    # A byte of ASCII is a character, as in other vocabularies; the byte of a part of one is not.
    assert [texts(token) for token in range(1, 8)] == ["␣the", "cat", "\\n", "␣", "<0xE4>", "A", "\\t"]
    assert [texts.exact(token) for token in (3, 5, 6, 7)] == ["\n", "<0xE4>", "A", "\t"]
    kinds = ["words", "words", "whitespace", "whitespace", "other", "words", "whitespace"]
    assert list(map(TokenClasses(own), range(1, 8))) == kinds
    stored = StoredTokenizer.of(own, {token: texts.exact(token) for token in range(8)})
    assert stored.strip
    assert stored.decode([1, 2, 3, 1]) == own.decode([1, 2, 3, 1]) == "thecat\n the"
    assert stored.decode([6, 7, 2, 3]) == own.decode([6, 7, 2, 3]) == "A\tcat\n"
