"""Classes of tokens, by id and by text."""

import pytest
import torch

from dlm_lens.sinks.token_classes import TOKEN_CLASSES, TokenClasses, class_of
from tests.sinks.test_enrichment import VOCABULARY, Tokenizer, of_id


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (".", "punctuation"), (" ,", "punctuation"), ("...", "punctuation"), ("+", "punctuation"),
        ("$", "punctuation"),
        ("\n", "whitespace"), ("Ġ", "whitespace"), (" ", "whitespace"), ("▁", "whitespace"), ("", "other"),
        ("12", "digits"), (" 7", "digits"), ("Ġ3", "digits"), ("tom", "words"), ("Ġthe", "words"), ("x2", "words"),
        ("don't", "words"), ("你好", "words"), ("2.5", "other"), ("\x00", "other"), ("。", "punctuation"),
    ],
)  # fmt: skip
def test_classes_of_texts(text, name):
    assert class_of(text) == name


def test_ids_are_classed_in_order():
    classes = TokenClasses(Tokenizer())
    assert [classes(i) for i in (*VOCABULARY, -1)] == [of_id(i) for i in (*VOCABULARY, -1)]
    # The config's ids come before the text.
    told = TokenClasses(Tokenizer(), mask_token_id=8, eos_token_ids=(3, None))
    assert [told(i) for i in (0, 8, 1, 3, 2, 7)] == [
        "mask",
        "mask",
        "end of text",
        "end of text",
        "special",
        "punctuation",
    ]
    with pytest.raises(ValueError, match="there is no tokenizer to tell the class of token 7"):
        TokenClasses(None)(7)


def test_every_position_belongs_to_one_class():
    tokens = torch.tensor([[2, 6, 5, 3, 0, 0, 1, 4, -1]])
    masked = torch.tensor([[False] * 4 + [True] + [False] * 4])
    classes = TokenClasses(Tokenizer())
    members = torch.stack([classes.among(tokens, masked, (name,)) for name in TOKEN_CLASSES])
    assert (members.sum(0) == 1).all()
    named = [TOKEN_CLASSES[int(i)] for i in members.long().argmax(0)[0]]
    assert named == [
        "special",
        "words",
        "digits",
        "punctuation",
        "mask",
        "mask",
        "end of text",
        "whitespace",
        "learned sink",
    ]
    # A position that is still open is "mask", whatever token it holds (uniform noise).
    open_too = classes.among(tokens, masked | (tokens == 6), ("words", "mask"))
    assert open_too[0].tolist() == [False, True, False, False, True, True, False, False, False]
    assert not classes.among(tokens, masked | (tokens == 6), ("words",)).any()
