import copy
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dlm_lens.testing import tiny
from dlm_lens.training import (
    Batching,
    BatchStream,
    DataSettings,
    Example,
    MaskedDiffusionLoss,
    NextToken,
    RowSource,
)
from dlm_lens.training.data import build_source, check_texts, data_record
from dlm_lens.training.dataset_files import read_dataset, read_evaluation
from dlm_lens.training.sources import PackedSource, take
from tests.training.job import job

TOKENIZER = tiny("sink_qwen").tokenizer
EOS = TOKENIZER.eos_token_id
TEXTS = [{"text": " ".join(f"w{(3 * i + j) % 50}" for j in range(3 + 5 * (i % 4)))} for i in range(11)]


class Stream:
    """A dataset that is read in order and has no length."""

    column_names = ("text",)

    def __iter__(self):
        return iter(TEXTS)


def built(source, number: int, cursor=None) -> list[torch.Tensor]:
    return [build().tokens for build, _ in islice(source.read(cursor, 0), number)]


def encoded(row: dict) -> list[int]:
    return [*TOKENIZER(row["text"], add_special_tokens=False)["input_ids"], EOS]


def test_a_stream_is_its_documents_one_behind_the_other() -> None:
    source = build_source(Stream(), DataSettings(length=8), TOKENIZER)
    everything = [token for row in TEXTS for token in encoded(row)]
    number = 2 * len(everything) // 8
    expected = (everything * 2)[: 8 * number]
    assert torch.cat(built(source, number)).tolist() == expected


@pytest.mark.parametrize("stream", [True, False])
def test_reading_goes_on_at_every_cursor(stream: bool) -> None:
    source = build_source(Stream() if stream else TEXTS, DataSettings(length=7), TOKENIZER)
    read = list(islice(source.read(None, 5), 40))
    for place in range(40):
        rest = list(islice(source.read(read[place][1], 5), 39 - place))
        for (here, _), (there, _) in zip(rest, read[place + 1 :], strict=True):
            assert torch.equal(here().tokens, there().tokens)


def test_reading_goes_on_without_encoding_what_lies_before() -> None:
    seen = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return encoded({"text": text})

    def documents(epoch: int, skipped: int):
        return (row["text"] for row in TEXTS[skipped:])

    source = PackedSource(documents, encode, 8)
    cursor = list(islice(source.read(None, 0), 9))[-1][1]
    seen.clear()
    next(iter(source.read(cursor, 0)))
    assert len(seen) <= 3


@pytest.mark.parametrize("stream", [True, False])
def test_an_evaluation_set_is_every_token_once(stream: bool) -> None:
    source = build_source(Stream() if stream else TEXTS, DataSettings(length=8), TOKENIZER)
    everything = sorted(token for row in TEXTS for token in encoded(row))
    assert len(everything) % 8
    examples = take(source, 1000, repeat=False)
    assert [len(example.tokens) for example in examples] == [8] * (len(everything) // 8) + [len(everything) % 8]
    assert sorted(torch.cat([example.tokens for example in examples]).tolist()) == everything
    assert [len(example.tokens) for example in take(source, 2, repeat=False)] == [8, 8]
    rows = RowSource(list(range(10)), lambda row: Example(torch.tensor([row, row])), 2)
    assert sorted(int(example.tokens[0]) for example in take(rows, 64, repeat=False)) == list(range(10))
    assert len(take(rows, 64)) == 64


def test_rows_come_once_per_epoch_in_an_order_of_the_seed() -> None:
    source = RowSource(list(range(10)), lambda row: Example(torch.tensor([row, row])), 2)
    rows = [int(tokens[0]) for tokens in built(source, 30)]
    for epoch in range(3):
        assert sorted(rows[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert rows[:10] != rows[10:20]
    other = [int(build().tokens[0]) for build, _ in islice(source.read(None, 1), 10)]
    assert other != rows[:10]


def test_isolated_documents_know_their_borders_and_begin_with_what_is_never_masked() -> None:
    settings = DataSettings(length=20, packing="isolated", bos=True)
    source = build_source(Stream(), settings, TOKENIZER)
    example = next(iter(source.read(None, 0)))[0]()
    begins = [0] + [i for i in range(1, 20) if example.documents[i] != example.documents[i - 1]]
    assert len(begins) >= 2
    # The tokenizer has no beginning of text, so its end serves; a document is begin, text, end.
    assert example.unmasked.nonzero().flatten().tolist() == begins
    assert example.tokens[begins].tolist() == [EOS] * len(begins)
    assert all(int(example.tokens[i - 1]) == EOS for i in begins[1:])


def test_an_ar_baseline_has_the_rows_of_a_shifted_dlm_where_documents_begin_alike(tmp_path: Path) -> None:
    shifted = job(tmp_path, objective=MaskedDiffusionLoss(logit_shift=True))
    own, alike = (
        job(tmp_path, family="causal", objective=NextToken(), data=DataSettings(length=12, bos=bos))
        for bos in (None, True)
    )
    rows = [[each.tokens.tolist() for each in take(run.source, 9, 0)] for run in (shifted, own, alike)]
    assert rows[2] == rows[0] != rows[1]


def test_fine_tuning_rows_are_prompt_answer_and_ends() -> None:
    settings = DataSettings(length=12, prompt_column="q", answer_column="a", streaming=False)
    source = build_source([{"q": "w1 w2 w3", "a": "w4 w5"}], settings, TOKENIZER)
    (tokens,) = built(source, 1)
    assert tokens.tolist() == [1, 2, 3, 4, 5] + [EOS] * 7
    example = next(iter(source.read(None, 0)))[0]()
    assert example.prompt_length == 3


def flat(stream: BatchStream, batches: int) -> list[torch.Tensor]:
    held = list(islice(iter(stream), batches))
    return [row for batch in held for row in batch["input_ids"]]


def test_any_division_of_a_batch_sees_the_same_samples_and_noise() -> None:
    source = build_source(TEXTS, DataSettings(length=9), TOKENIZER)
    objective = MaskedDiffusionLoss(mask_token_id=63, logit_shift=False, random_length_share=0.3)
    whole = flat(BatchStream(source, objective, Batching(8, 8), 0), 3)
    small = flat(BatchStream(source, objective, Batching(8, 2), 0), 12)
    assert all(torch.equal(a, b) for a, b in zip(whole, small, strict=True))
    ranks = [flat(BatchStream(source, objective, Batching(8, 2, 2, rank), 0), 6) for rank in range(2)]
    dealt = [row for i in range(6) for rank in range(2) for row in ranks[rank][2 * i : 2 * i + 2]]
    assert all(torch.equal(a, b) for a, b in zip(whole, dealt, strict=True))


def test_a_stream_of_batches_goes_on_at_a_step() -> None:
    source = build_source(Stream(), DataSettings(length=9), TOKENIZER)
    objective = MaskedDiffusionLoss(mask_token_id=63, logit_shift=False)
    batches = list(islice(iter(BatchStream(source, objective, Batching(4, 2), 0)), 8))
    assert [("cursor" in batch) for batch in batches] == [False, True] * 4
    later = BatchStream(source, objective, Batching(4, 2), 0, step=3, cursor=batches[5]["cursor"])
    for here, there in zip(islice(iter(later), 2), batches[6:], strict=True):
        assert torch.equal(here["input_ids"], there["input_ids"])
        assert torch.equal(here["targets"], there["targets"])


@pytest.mark.parametrize("step", [0, 3])
def test_a_worker_reads_a_shuffled_stream_in_the_same_order(step: int, tmp_path: Path) -> None:
    """The datasets library shuffles with other random numbers in a worker."""
    for part in range(2):
        rows = [json.dumps({"text": f"w{i} w{(7 * i) % 50}"}) for i in range(part, 40, 2)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(rows))
    settings = DataSettings(path=str(tmp_path / "*.jsonl"), length=6, shuffle_buffer=9)
    source = build_source(read_dataset(settings), settings, TOKENIZER, seed=1)
    objective = MaskedDiffusionLoss(mask_token_id=63, logit_shift=False)
    cursor = None if not step else list(islice(source.read(None, 0), 4 * step))[-1][1]
    stream = BatchStream(source, objective, Batching(4, 2), 0, step=step, cursor=cursor)
    here, there = (
        [batch["input_ids"] for batch in islice(DataLoader(stream, batch_size=None, num_workers=workers), 14)]
        for workers in (0, 1)
    )
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "settings",
    [
        DataSettings(length=6),
        pytest.param(DataSettings(length=6, column="input_ids"), marks=pytest.mark.long),
        pytest.param(DataSettings(length=6, prompt_column="text", answer_column="answer"), marks=pytest.mark.long),
    ],
)
def test_a_worker_that_is_no_copy_of_its_parent_reads_the_same(settings: DataSettings) -> None:
    """Where processes are spawned, as on macOS and Windows, a worker gets the stream pickled."""
    rows = [{"text": f"w{i} w{i + 1}", "answer": f"w{i + 2}", "input_ids": [i, i + 1, i + 2]} for i in range(30)]
    objective = MaskedDiffusionLoss(mask_token_id=63, logit_shift=False)
    stream = BatchStream(build_source(rows, settings, TOKENIZER, seed=1), objective, Batching(4, 2), 0)
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    here, there = (list(islice(one, 14)) for one in (stream, loader))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert one.get("cursor") == other.get("cursor")


def test_files_are_read_as_datasets(tmp_path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "w1 w2"}\n{"text": "w3"}\n')
    streamed = read_dataset(DataSettings(path=str(file)))
    assert [row["text"] for row in streamed] == ["w1 w2", "w3"]
    assert not hasattr(streamed, "__len__")
    assert len(read_dataset(DataSettings(path=str(file), streaming=False))) == 2
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_dataset(DataSettings(path=str(tmp_path / "missing.jsonl")))
    with pytest.raises(ValueError, match="an unknown ending"):
        read_dataset(DataSettings(path=str(tmp_path)))


@pytest.mark.parametrize("streaming", [True, False])
def test_words_for_missing_values_are_texts_in_a_csv(streaming: bool, tmp_path: Path) -> None:
    """pandas reads them as missing; so does a column of numbers read an empty field."""
    words = ["NA", "null", "nan", "None", "n/a", "tom has 5"]
    file = tmp_path / "texts.csv"
    file.write_text("text,weight\n" + "".join(f"{word},{place or ''}\n" for place, word in enumerate(words)))
    rows = list(read_dataset(DataSettings(path=str(file), streaming=streaming)))
    assert [row["text"] for row in rows] == words
    assert [row["weight"] for row in rows] == [None, 1, 2, 3, 4, 5]


def test_a_part_of_a_split_needs_the_whole_data(tmp_path: Path) -> None:
    """A stream reads whole splits; the sentence of the datasets library said that the file was to be mended."""
    file = tmp_path / "text.jsonl"
    file.write_text("".join(f'{{"text": "w{i}"}}\n' for i in range(3)))
    with pytest.raises(ValueError, match=r"the split is 'train\[:-1\]' .* set data\.streaming to false"):
        read_dataset(DataSettings(path=str(file)), "train[:-1]")
    assert len(read_dataset(DataSettings(path=str(file), streaming=False, split="train[:-1]"))) == 2
    assert len(list(read_dataset(DataSettings(path=str(file), split="train+train")))) == 6


def test_evaluation_data_have_a_file_or_a_part_of_the_training_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("w1\nw2\nw3\n")
    (tmp_path / "other.txt").write_text("w4\nw5\n")
    data = DataSettings(path=str(tmp_path / "text.txt"), split="train[:-1]", streaming=False)
    assert read_evaluation(data) is None
    own = replace(data, eval_path=str(tmp_path / "other.txt"))
    assert read_evaluation(own)["text"] == ["w4", "w5"]
    assert read_evaluation(replace(own, eval_split="train[1:]"))["text"] == ["w5"]
    assert read_evaluation(replace(data, eval_split="train[-1:]"))["text"] == ["w3"]
    with pytest.raises(FileNotFoundError, match=r"^data\.eval_path .*missing\.txt is not a file"):
        read_evaluation(replace(data, eval_path=str(tmp_path / "missing.txt")))
    with pytest.raises(ValueError, match=r"^data\.eval_path is empty; name a dataset of the hub, or"):
        read_evaluation(replace(data, eval_path=""))


@pytest.mark.parametrize("name", ["text[1].jsonl", "text [a-z].jsonl", "[!].txt"])
@pytest.mark.parametrize("streaming", [True, False])
def test_brackets_in_the_name_of_a_file_are_no_pattern(name: str, streaming: bool, tmp_path) -> None:
    text = "w1 w2\nw3\n" if name.endswith(".txt") else '{"text": "w1 w2"}\n{"text": "w3"}\n'
    (tmp_path / name).write_text(text)
    (tmp_path / f"other_{name}").write_text(text)
    settings = DataSettings(path=str(tmp_path / name), streaming=streaming)
    found = read_dataset(settings)
    assert [row["text"] for row in found] == ["w1 w2", "w3"]
    known = data_record(found, settings)
    assert known.get("bytes", {settings.path: len(text)}) == {settings.path: len(text)}
    assert known


def test_a_script_beside_a_dataset_is_not_run_and_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "texts.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the dataset texts cannot be read from a .* found texts\.py\)"):
        read_dataset(DataSettings(path="texts"))
    assert not (tmp_path / "ran").exists()


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/text'\non the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"the dataset some/text cannot be read .* or give a local file"):
        read_dataset(DataSettings(path="some/text"))


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset has no column 'body'; its columns are 'text'"):
        build_source(TEXTS, DataSettings(column="body"), TOKENIZER)
    with pytest.raises(ValueError, match="holds text and the model has no tokenizer"):
        build_source(TEXTS, DataSettings(), None)
    with pytest.raises(ValueError, match="training dataset is empty"):
        RowSource([], Example, 4)
    with pytest.raises(ValueError, match="the stream of texts is empty"):
        built(PackedSource(lambda epoch, skipped: iter([]), list, 4), 1)
    with pytest.raises(ValueError, match="a multiple of 6"):
        Batching(8, 3, 2)
    settings = DataSettings(length=3, prompt_column="q", answer_column="a")
    with pytest.raises(ValueError, match="row 0 of the data: a prompt of 3 tokens leaves no room"):
        built(build_source([{"q": "w1 w2 w3", "a": "w4"}], settings, TOKENIZER), 1)
    with pytest.raises(ValueError, match=r"set data\.streaming to false"):
        build_source(Stream(), DataSettings(prompt_column="text", answer_column="text"), TOKENIZER)


@pytest.mark.parametrize("tune", [True, False])
def test_a_tokenizer_without_an_end_is_refused(tune: bool) -> None:
    endless = copy.deepcopy(TOKENIZER)
    endless.eos_token = None
    settings = DataSettings(length=8, **({"prompt_column": "text", "answer_column": "text"} if tune else {}))
    with pytest.raises(ValueError, match=r"the tokenizer has no end-of-text token, .*; set its eos_token$"):
        build_source(TEXTS, settings, endless)


def test_a_row_without_its_text_is_named() -> None:
    settings = DataSettings(length=8, prompt_column="q", answer_column="a")
    for bad, value in (({"q": None, "a": "w1"}, None), ({"a": "w1"}, None), ({"q": 3, "a": "w1"}, 3)):
        pairs = build_source([{"q": "w1", "a": "w2"}, bad], settings, TOKENIZER)
        with pytest.raises(
            ValueError, match=f"row 1 of the data: the column 'q' holds '{value}', which is not a text"
        ):
            check_texts(pairs, 63)
    texts = [*TEXTS[:2], {"text": None}, *TEXTS[2:]]
    with pytest.raises(
        ValueError, match="row 2 of the data: the column 'text' holds 'None', which is not a text; "
    ):
        check_texts(build_source(texts, DataSettings(length=8), TOKENIZER), 63)

    class Late(Stream):
        def __iter__(self):
            return iter(texts)

    with pytest.raises(
        ValueError, match="row 2 of the data: the column 'text' holds 'None', which is not a text; "
    ):
        built(build_source(Late(), DataSettings(length=8), TOKENIZER), 9)
    ids = build_source([{"input_ids": [1, 2]}, {"input_ids": "w1"}], DataSettings(column="input_ids"), None)
    with pytest.raises(ValueError, match=r"row 1 of the data: the column 'input_ids' holds 'w1', .* a list of ids"):
        check_texts(ids, 63)


@pytest.mark.parametrize("stream", [False, True])
def test_lines_of_a_text_file_are_documents(stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank lines were documents of an end alone, ~ a folder of that name, and a byte order mark a token."""
    (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbfw1 w2\r\n\r\n  \r\nw3\r\n\r\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = DataSettings(path="~/lines.txt", length=5, streaming=stream)
    dataset = read_dataset(settings)
    source = build_source(dataset, settings, TOKENIZER)
    tokens = built(source, 1)[0].tolist()
    assert sorted([tokens[:3], tokens[3:]] if tokens[2] == EOS else [tokens[:2], tokens[2:]]) == [
        [1, 2, EOS], [3, EOS],
    ]  # fmt: skip
    record = data_record(dataset, settings)
    assert record["bytes"] == {str(tmp_path / "lines.txt"): 22} if stream else record["rows"] == 2
    (tmp_path / "blank.txt").write_text("\n  \n\n")
    with pytest.raises(ValueError, match=r"blank.txt holds blank lines alone; give at least one line of text"):
        read_dataset(DataSettings(path="~/blank.txt", streaming=stream))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9\n", "latin.txt cannot be read .*invalid continuation byte.*texts are UTF-8"),
        ("empty.txt", b"", "empty.txt is empty; give at least one document"),
        (
            "broken.jsonl",
            b'{"text": "a"}\n{"text": \n' * 3,
            "broken.jsonl cannot be read .*in row 1.*mend the file",
        ),
        ("half.jsonl", b'{"text": "a \\ud800 b"}\n', "half.jsonl cannot be read .*surrogate pair"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    stream: bool, name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    settings = DataSettings(path=str(tmp_path / name), length=8, streaming=stream)
    with pytest.raises(ValueError, match=message) as caught:
        build_source(read_dataset(settings), settings, TOKENIZER)
    assert "\n" not in str(caught.value)


def test_a_stream_that_breaks_off_later_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"w1 w2 w3\n" * 20)
    (tmp_path / "b.txt").write_bytes(b"\xff\n")
    settings = DataSettings(path=str(tmp_path / "*.txt"), length=8, streaming=True)
    source = build_source(read_dataset(settings), settings, TOKENIZER)
    assert len(built(source, 10)) == 10
    with pytest.raises(ValueError, match=r"\*\.txt cannot be read .*invalid start byte"):
        built(source, 11)


def test_a_pattern_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a file, or matches none"):
        read_dataset(DataSettings(path=str(tmp_path / "*.txt")))


@pytest.mark.parametrize("ids", [[5, 6, 1.5], ["a"], [[5], [6, 7]], [True], 5])
def test_a_column_of_ids_holds_whole_numbers(ids: Any) -> None:
    """1.5 was truncated to the id 1 and learned."""
    source = build_source([{"input_ids": ids}], DataSettings(length=8, column="input_ids"), None)
    with pytest.raises(ValueError, match="which is not a list of whole numbers; leave such rows out"):
        check_texts(source, None)


@pytest.mark.parametrize("bos", [None, False])
def test_ids_are_taken_as_they_are(bos: bool | None) -> None:
    """A beginning of text was neither added to ids nor refused."""
    settings = DataSettings(length=4, column="input_ids", bos=bos)
    source = build_source([{"input_ids": [EOS, 5, 6, EOS]}], settings, TOKENIZER, shift=True)
    assert [tokens.tolist() for tokens in built(source, 2)] == [[EOS, 5, 6, EOS]] * 2
    with pytest.raises(ValueError, match=r"^data\.bos is true and data\.column is 'input_ids', whose ids"):
        replace(settings, bos=True)
    # Fine-tuning reads two columns of texts.
    pairs = DataSettings(length=4, column="input_ids", prompt_column="q", answer_column="a", bos=True)
    (tokens,) = built(build_source([{"q": "w1", "a": "w2"}], pairs, TOKENIZER), 1)
    assert tokens.tolist() == [EOS, 1, 2, EOS]


@pytest.mark.parametrize("bad", [64, -1])
def test_an_id_that_the_model_does_not_embed_is_named(bad: int) -> None:
    """It was an IndexError in the first pass."""
    settings, objective = DataSettings(length=8, column="input_ids"), MaskedDiffusionLoss()
    source = build_source([{"input_ids": [5, 6, bad]}], settings, None)
    message = rf"holds the token id {bad}, and the model embeds 0 to 63; take the ids"
    with pytest.raises(ValueError, match=message):
        check_texts(source, None, 64)
    stream = BatchStream(source, objective, Batching(2, 2), 0, embedded=64)
    with pytest.raises(ValueError, match=message):
        next(iter(stream))
    check_texts(source, None, 65 if bad > 0 else None)


def test_shifted_ids_without_a_tokenizer_need_a_word_on_their_beginning() -> None:
    rows = [{"input_ids": [1, 2, 3, 4]}] * 2
    settings = DataSettings(length=4, column="input_ids")
    with pytest.raises(ValueError, match=r"without a tokenizer .* set data\.bos to false to mask every id"):
        build_source(rows, settings, None, shift=True)
    (only,) = take(build_source(rows, replace(settings, bos=False), None, shift=True), 1)
    assert only.unmasked is None
