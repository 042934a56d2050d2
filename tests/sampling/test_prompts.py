import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import dlm_lens
from dlm_lens.evaluation.encoding import Encoder
from dlm_lens.testing import tiny


def first(model: PreTrainedModel, prompt: Any, attention_mask: Any = None) -> dlm_lens.DenoisingRun:
    return dlm_lens.denoise(model, prompt, attention_mask, gen_length=2)


@pytest.mark.parametrize(
    "prompt",
    ["w4 w5", ["w4 w5"], ("w4 w5",), np.array(["w4 w5"]), [4, 5], [[4, 5]], torch.tensor([4, 5]),
     torch.tensor([[4, 5]]), np.array([4, 5]), np.array([[4, 5]]), [np.array([4, 5])], [torch.tensor([4, 5])],
     list(np.array([4, 5])), list(torch.tensor([4, 5])),
     {"input_ids": torch.tensor([[4, 5]]), "attention_mask": torch.ones(1, 2)}],
    ids=["text", "texts", "tuple", "array of texts", "ids", "rows", "vector", "matrix", "array", "array of rows",
         "arrays", "vectors", "numbers of an array", "numbers of a tensor", "encoding"],
)  # fmt: skip
def test_a_prompt_in_any_form_is_the_same_run(tiny_llada: PreTrainedModel, prompt: Any) -> None:
    assert first(tiny_llada, prompt).canvases.equal(first(tiny_llada, [[4, 5]]).canvases)


def test_unequal_prompts_are_padded_on_the_left(tiny_llada: PreTrainedModel) -> None:
    run = first(tiny_llada, ["w4 w5 w6", "w7"])
    assert run.canvases[0].tolist() == [[4, 5, 6, 63, 63], [61, 61, 7, 63, 63]]
    assert run.attention_mask.tolist() == [[True] * 5, [False, False, True, True, True]]
    assert run.prompt_length == 3
    explicit = first(tiny_llada, torch.tensor([[4, 5, 6], [9, 9, 7]]), torch.tensor([[1, 1, 1], [0, 0, 1]]))
    assert explicit.tokens[:, 3:].equal(run.tokens[:, 3:])


def test_what_a_tokenizer_returns_for_unequal_texts(tiny_llada: PreTrainedModel) -> None:
    texts = ["w4 w5 w6", "w7"]
    expected = first(tiny_llada, texts)
    for encoded in (tiny_llada.tokenizer(texts), tiny_llada.tokenizer(texts, padding=True, padding_side="left")):
        assert first(tiny_llada, encoded).canvases.equal(expected.canvases)
        assert first(tiny_llada, encoded).attention_mask.equal(expected.attention_mask)
    for mask in ([[1, 1, 1], [0]], [[1, 1, 1], [1, 1]], 1):
        with pytest.raises(ValueError, match="beside prompts of unequal length"):
            first(tiny_llada, [[4, 5, 6], [7]], mask)


def test_padding_is_never_the_mask() -> None:
    model = tiny("llada", pad_token_id=63)
    model.tokenizer.pad_token = "[MASK]"
    run = dlm_lens.denoise(model, [[1, 2, 3], [4]], gen_length=2)
    assert (run.canvases[0, 1, :2] != 63).all()
    assert run.masked[0].sum(-1).tolist() == [2, 2]


def test_chat_messages_go_through_the_template(tiny_llada: PreTrainedModel) -> None:
    chat = [{"role": "user", "content": "w4 w5"}]
    with pytest.raises(ValueError, match="no chat template"):
        first(tiny_llada, chat)
    tiny_llada.tokenizer.chat_template = (
        "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
    )
    expected = first(tiny_llada, [[1, 4, 5, 2]]).canvases
    assert first(tiny_llada, chat).canvases.equal(expected)
    both = first(tiny_llada, [chat, chat])
    assert both.canvases[:, 1].equal(expected[:, 0])


def test_the_family_gives_the_template_its_options(tiny_llada: PreTrainedModel) -> None:
    """dllm calls Qwen3's template with enable_thinking=False, which writes an empty block of thoughts."""
    template = (
        "w1 {{ messages[0]['content'] }} w2"
        "{% if enable_thinking is defined and enable_thinking is false %} w8 w9{% endif %}"
    )
    model = tiny("a2d_qwen3")
    for one, expected in ((model, [1, 4, 2, 8, 9]), (tiny_llada, [1, 4, 2])):
        one.tokenizer.chat_template = template
        assert first(one, [{"role": "user", "content": "w4"}]).canvases[0, 0, : len(expected)].tolist() == expected
        text = Encoder(one).chat([{"role": "user", "content": "w4"}])
        assert one.tokenizer(text)["input_ids"] == expected


def test_texts_end_at_the_end_token(tiny_llada: PreTrainedModel) -> None:
    def spell(step: int, canvas: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.zeros_like(logits)
        forced[:, torch.arange(2, 6), torch.tensor([10, 62, 11, 12])] = 50
        return forced

    run = dlm_lens.denoise(tiny_llada, ["w4 <eos>", "w7"], gen_length=4, on_logits=spell)
    assert run.tokens[0].tolist() == [4, 62, 10, 62, 11, 12]
    # An end inside the prompt is content: only the answer is cut.
    assert run.texts == ["w4 w10", "w7 w10"]
    assert run.answers == ["w10", "w10"]


def test_without_a_tokenizer_ids_work_and_text_does_not(tiny_llada: PreTrainedModel) -> None:
    tiny_llada.tokenizer = None
    run = first(tiny_llada, [[4, 5], [6]])
    assert run.attention_mask[1].tolist() == [False, True, True, True]
    with pytest.raises(ValueError, match="no tokenizer, so it takes token ids only"):
        first(tiny_llada, "w4")
    with pytest.raises(ValueError, match=r"no tokenizer; read \.tokens"):
        _ = run.texts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 0 is empty"),
        (["w4", "  "], "prompt 1 is empty"),
        ([], "the prompt is empty or of an unknown kind"),
        ([[]], "the prompt is empty"),
        ([[1], []], "prompt 1 is empty"),
        (torch.zeros(1, 0, dtype=torch.long), "the prompt is empty"),
        (torch.zeros(1, 3), r"must be integers .* got torch.float32 \[1, 3\]"),
        ([[1, 64]], r"token id 64 \(row 0, position 1\) has no row in the model's embedding of 64"),
        ([[-1]], "token id -1"),
        (3.5, "of an unknown kind: 3.5"),
        (b"w4", "of an unknown kind: b'w4'"),
        ([b"w4"], "of several kinds or of an unknown one"),
        (["w4", [4]], "of several kinds or of an unknown one"),
        ([[4], "w4"], "of several kinds or of an unknown one"),
        ([["w4"]], "of several kinds or of an unknown one"),
        ([True, False], "of several kinds or of an unknown one"),
        ([1.0, 2.0], "of several kinds or of an unknown one"),
        ([torch.tensor([0.5])], "of several kinds or of an unknown one"),
        ({"role": "user", "content": "w4"}, "a mapping of 'role', 'content' without 'input_ids'"),
        ({}, "a mapping of nothing without 'input_ids'"),
    ],
)
def test_prompts_that_cannot_work(tiny_llada: PreTrainedModel, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        first(tiny_llada, prompt)


def test_a_run_is_no_prompt(tiny_llada: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"the prompt is a run; give its prompt, or take dlm_lens\.replay"):
        first(tiny_llada, first(tiny_llada, [4]))


def test_attention_masks_that_cannot_work(tiny_llada: PreTrainedModel) -> None:
    ids = torch.tensor([[1, 2, 3]])
    for mask in ([[1, 1, 0]], [[1, 0, 1]]):
        with pytest.raises(ValueError, match=r"row 0 is padded after its first token; .* pad on the left"):
            first(tiny_llada, ids, torch.tensor(mask))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 2\], the prompt ids \[1, 3\]"):
        first(tiny_llada, ids, torch.tensor([[1, 1]]))
    with pytest.raises(ValueError, match="prompt 0 is empty: its attention_mask has no 1"):
        first(tiny_llada, ids, torch.tensor([[0, 0, 0]]))
    with pytest.raises(ValueError, match="beside prompts of unequal length"):
        first(tiny_llada, [[1], [2, 3]], torch.ones(2, 2))


@pytest.mark.long
@pytest.mark.parametrize("call", ["denoise", "record", "log_likelihood"])
def test_a_prompt_of_a_megabyte_is_refused_at_once(call: str) -> None:
    """A word of a megabyte is one token; a text of a megabyte is 4,000 times what toy was trained on."""
    model = dlm_lens.load("toy")
    more: tuple[Any, ...] = ("5 .",) if call == "log_likelihood" else ()
    begun = time.process_time()
    for text in ("tom has 5 apples . " * 55_000, "a " * 500_000, [7] * 300_000):
        with pytest.raises(ValueError, match=r"the canvas has \d+ positions, more than 64 times the 64 that"):
            getattr(dlm_lens, call)(model, text, *more)
    # Tokenising a megabyte takes about two seconds; one forward pass over it would take hours.
    assert time.process_time() - begun < 60


def test_a_word_of_a_megabyte_is_one_token() -> None:
    model = dlm_lens.load("toy")
    run = dlm_lens.denoise(model, "x" * 1_000_000, gen_length=4, steps=2)
    assert run.tokens.shape[1] < 8


@pytest.mark.parametrize(
    "prompt", ["w1 \ud800 w2", ["w1", "\udfff"], [[{"role": "user", "content": "w1 \ud83d"}]], "\udc80"]
)
def test_a_lone_surrogate_is_no_text(prompt: Any) -> None:
    model = tiny("llada")
    model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    with pytest.raises(ValueError, match=r"prompt \d holds a lone surrogate, '\\ud[0-9a-f]{3}' at character \d"):
        dlm_lens.denoise(model, prompt, gen_length=2)
    with pytest.raises(ValueError, match="the answer holds a lone surrogate"):
        dlm_lens.log_likelihood(model, "w1", "w2 \udc80")


def test_words_that_the_tokenizer_does_not_know_are_named() -> None:
    toy = dlm_lens.load("toy")
    with pytest.warns(UserWarning, match="no token for 'Zebra', 'leopards', and the model sees <unk> there"):
        run = first(toy, ["sort leopards 3 :", "Zebra 3 : leopards"])
    assert (run.canvases[0] == toy.tokenizer.unk_token_id).sum(-1).tolist() == [1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(toy, ["sort 4 3 :", "sort <unk> 3 :"])
        toy.tokenizer.unk_token = toy.tokenizer.bos_token  # one token, as in GPT-2, which the tokenizer adds
        assert first(toy, "sort 4 3 :").canvases[0, 0, 0] == toy.tokenizer.unk_token_id
