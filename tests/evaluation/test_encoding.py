"""Texts to ids and back: contexts, chats, ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import dlm_lens as dl
from dlm_lens.evaluation import HarnessLM
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.evaluation.generation_requests import cut, end_ids
from dlm_lens.hooks import mask_positions
from dlm_lens.testing import tiny
from tests.evaluation.conftest import ask

TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def toy() -> Any:
    return dl.load("toy")


def test_spaces_between_go_to_the_continuation(toy: Any) -> None:
    encoder = Encoder(toy)
    bos = toy.config.bos_token_id
    assert encoder.pair("tom has ", "5 apples") == encoder.pair("tom has", " 5 apples")
    before, after = encoder.pair("tom has", " 5 apples")
    assert before[0] == bos
    assert toy.tokenizer.decode(before[1:] + after) == "tom has 5 apples"
    assert toy.tokenizer.decode(after) == "5 apples"


def test_texts_of_an_encoder_are_read_without_its_special_tokens() -> None:
    """As `denoise` and `log_likelihood` read them (`ModelFamily.text_options`)."""
    model = tiny("modernbert")
    size = model.config.vocab_size
    words = [*(f"w{i}" for i in range(size - 5)), "[CLS]", "[SEP]", "<pad>", "<eos>", "[MASK]"]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", size - 5), ("[SEP]", size - 4)]
    )
    model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="w0", pad_token="<pad>", eos_token="<eos>", mask_token="[MASK]"
    )
    lm = HarnessLM(model, likelihood={"method": "chain_rule"})
    assert lm.encoder.pair("w5 w9 w14", " w3 w8") == ([5, 9, 14], [3, 8])
    assert lm.encoder.text("w5 w9") == [5, 9]
    ((value, _),) = lm.loglikelihood(ask("loglikelihood", ("w5 w9 w14", " w3 w8")))
    assert value == float(dl.log_likelihood(model, "w5 w9 w14", "w3 w8", "chain_rule").value)


def test_no_context_is_the_prefix_token(toy: Any) -> None:
    assert Encoder(toy).pair("", "tom has")[0] == [toy.config.bos_token_id]
    model = tiny("llada")  # without a beginning-of-text token
    assert Encoder(model).pair("", "w1 w2") == ([model.config.eos_token_id], [1, 2])


def test_a_continuation_without_tokens_is_refused(toy: Any) -> None:
    with pytest.raises(ValueError, match="has no token of its own"):
        Encoder(toy).pair("tom has", "")
    requests = ask("loglikelihood", ("tom has", " 5"), ("leo has", " 6"), ("anna has", ""))
    with pytest.raises(ValueError, match=r"'' has no token of its own .*; it is of document 2 of task$"):
        HarnessLM(toy).loglikelihood(requests)


def test_a_beginning_token_is_never_doubled(toy: Any) -> None:
    bos = toy.config.bos_token_id
    plain = Encoder(toy).text("tom has")
    assert plain[0] == bos
    assert Encoder(toy, add_bos=True).text("tom has") == plain
    assert Encoder(toy).text("<bos> tom has") == plain
    assert plain.count(bos) == 1
    model = tiny("llada", bos_token_id=5)
    assert Encoder(model, add_bos=True).text("w1 w2") == [5, 1, 2]
    assert Encoder(model).text("w1 w2") == [1, 2]
    with pytest.raises(ValueError, match="no beginning-of-text token"):
        Encoder(tiny("llada"), add_bos=True)


def test_a_chat_keeps_the_tokens_of_its_template(toy: Any) -> None:
    toy.tokenizer.chat_template = TEMPLATE
    lm = HarnessLM(toy)
    text = lm.apply_chat_template([{"role": "sort", "content": "5 3"}])
    assert text == "<bos> sort 5 3 . assistant "
    ids = lm.encoder.text(text)
    assert ids.count(toy.config.bos_token_id) == 1
    before, after = lm.encoder.pair(text, "3 5")
    assert before == ids
    assert toy.tokenizer.decode(after) == "3 5"
    # A template without a beginning token gets none from the tokenizer either.
    toy.tokenizer.chat_template = TEMPLATE.replace("<bos> ", "")
    other = lm.apply_chat_template([{"role": "sort", "content": "5 3"}])
    assert toy.config.bos_token_id not in lm.encoder.text(other)
    assert lm.encoder.text("sort 5 3")[0] == toy.config.bos_token_id


class Letters:
    """A tokenizer of single characters, to which every space matters and which doubles its first token if asked."""

    bos_token, bos_token_id, chat_template = "^", ord("^"), "{{ messages[0]['content'] }}"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.bos_token_id] * add_special_tokens + [ord(one) for one in text]}

    def apply_chat_template(self, messages: Any, **given: Any) -> str:
        return f"{messages[0]['content']}: " if given["add_generation_prompt"] else messages[0]["content"]


class TestEverySpace:
    def encoder(self, **config: Any) -> Encoder:
        given = {"bos_token_id": ord("^"), "eos_token_id": [7, 8], "max_position_embeddings": 16, **config}
        return Encoder(SimpleNamespace(tokenizer=Letters(), config=SimpleNamespace(model_type="llada", **given)))

    def read(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def test_a_texts_own_first_token_is_not_doubled(self) -> None:
        assert self.read(self.encoder().text("^ab")) == "^ab"
        assert self.read(self.encoder().text("ab")) == "^ab"

    def test_spaces_move_but_those_of_a_chat(self) -> None:
        encoder = self.encoder()
        assert [self.read(part) for part in encoder.pair("ab  ", "c")] == ["^ab", "  c"]
        assert [self.read(part) for part in encoder.pair("", "c")] == ["^", "c"]
        text = encoder.chat([{"role": "user", "content": "ab"}])
        assert text == "ab: "
        assert [self.read(part) for part in encoder.pair(text, "c")] == ["ab: ", "c"]

    def test_of_several_end_tokens_the_first_one_is_meant(self) -> None:
        assert self.encoder().eos == 7
        assert self.encoder(eos_token_id=9).eos == 9

    def test_a_cut_is_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        encoder = self.encoder()
        assert encoder.fitted([*range(12)], 4) == [*range(12)]
        assert caplog.text == ""
        assert [encoder.fitted([*range(20)], 4), encoder.fitted([*range(20)], 5)] == [
            [*range(8, 20)],
            [*range(9, 20)],
        ]
        assert caplog.text.count("cut from the left") == 1


def test_no_template_is_a_sentence(toy: Any) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        HarnessLM(toy).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_model_without_a_tokenizer_is_refused() -> None:
    model = tiny("llada")
    model.tokenizer = None
    with pytest.raises(ValueError, match="no tokenizer"):
        HarnessLM(model)


def test_arguments_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="loaded already, so device_map cannot be used"):
        HarnessLM(tiny("llada"), device="cpu")
    hook = mask_positions(0)
    assert HarnessLM(tiny("llada"), hooks=hook).hooks == HarnessLM(tiny("llada"), hooks="mask_positions(0)").hooks
    with pytest.raises(ValueError, match="max_length is 0"):
        HarnessLM(tiny("llada"), max_length=0)


def test_an_answer_that_leaves_no_room_is_refused() -> None:
    lm = HarnessLM(tiny("llada"), max_length=8)
    with pytest.raises(ValueError, match="8 tokens leave no room"):
        lm.generate_until(ask("generate_until", ("w1", {"until": [], "max_gen_toks": 8})))


class TestCut:
    def test_at_the_first_end_token(self, toy: Any) -> None:
        ids = toy.tokenizer("answer 9 .", add_special_tokens=False)["input_ids"]
        eos = toy.config.eos_token_id
        assert cut(toy.tokenizer, [*ids, eos, *ids], end_ids(toy.config), []) == ("answer 9 .", True)
        assert cut(toy.tokenizer, ids, end_ids(toy.config), []) == ("answer 9 .", False)

    def test_at_the_earliest_stop_whatever_their_order(self, toy: Any) -> None:
        ids = toy.tokenizer("tom has 9 .", add_special_tokens=False)["input_ids"]
        for until in (["has", "9"], ["9", "has"], ["", "9", "has"]):
            assert cut(toy.tokenizer, ids, end_ids(toy.config), until) == ("tom ", True)

    def test_stops_may_be_special_tokens_which_the_text_leaves_out(self, toy: Any) -> None:
        nine = toy.tokenizer("9", add_special_tokens=False)["input_ids"]
        pad = toy.config.pad_token_id
        assert cut(toy.tokenizer, [*nine, pad, *nine], end_ids(toy.config), ["<pad>"]) == ("9 ", True)
        assert cut(toy.tokenizer, [*nine, pad, *nine], end_ids(toy.config), []).text.split() == ["9", "9"]

    def test_an_end_of_turn_ends_too(self) -> None:
        model = tiny("llada", eot_token_id=7)
        assert cut(model.tokenizer, [1, 7, 2], end_ids(model.config), []) == ("w1", True)
