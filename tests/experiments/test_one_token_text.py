"""Real English: read, parted, and made into tokens."""

import shutil
import stat
from pathlib import Path

import pytest
import torch

from dlm_lens.experiments.one_token import text_corpus as reading
from dlm_lens.experiments.one_token.text_corpus import (
    EOS,
    LENGTH,
    MASK,
    PAD,
    Encoded,
    Text,
    build_tokenizer,
    encode,
    encoded,
    read_text,
)
from dlm_lens.experiments.one_token.text_metrics import per_byte
from tests.experiments.one_token_stories import paragraph, write_story

STORY = tuple(map(paragraph, range(80)))


# The two parts


def test_every_tenth_stretch_is_held_out() -> None:
    # 20 documents of 50 bytes in 20 stretches: stretches 5 and 15 are documents 5 and 15.
    text = Text(tuple(f"{number:050d}" for number in range(20)), blocks=20, every=10)
    assert text.validation == (f"{5:050d}", f"{15:050d}")
    assert len(text.training) == 18
    # 40 documents in the same 20 stretches: two neighbours each.
    text = Text(tuple(f"{number:050d}" for number in range(40)), blocks=20, every=10)
    assert [int(one) for one in text.validation] == [10, 11, 30, 31]


def test_stretches_are_of_bytes_not_of_documents() -> None:
    # 900 bytes in one document, then ten of 10: in 10 stretches of 100 bytes all of those lie in the last.
    text = Text(("x" * 500, "y" * 400, *(f"{number:010d}" for number in range(10))), blocks=10, every=2)
    # Stretches 1, 3, 5, 7, 9 are held out; the documents begin at 0 (stretch 0), 500 (5) and 900 (9).
    assert text.training == ("x" * 500,)
    assert len(text.validation) == 11
    umlauts = Text(("ä" * 250, "y" * 400, *(f"{number:010d}" for number in range(10))), blocks=10, every=2)
    assert umlauts.held_out == text.held_out


def test_the_parts_share_no_document_and_lose_none() -> None:
    text = Text(STORY)
    assert not set(text.training) & set(text.validation)
    assert sorted((*text.training, *text.validation)) == sorted(STORY)
    size = sum(map(len, text.validation)) / sum(map(len, STORY))
    assert 0.05 < size < 0.15


def test_what_training_holds_word_for_word_is_not_held_out() -> None:
    documents = [f"{number:050d}" for number in range(20)]
    documents[15] = documents[3]
    text = Text(tuple(documents), blocks=20, every=10)
    assert text.validation == (documents[5],)
    assert len(text.training) == 18


def test_lines_that_occur_again() -> None:
    lines = [f"line {number:03d}" for number in range(40)]
    documents = ["\n".join(lines[2 * number : 2 * number + 2]) for number in range(20)]
    documents[5] = f"{lines[0]}\nnew line"  # as long as the others
    text = Text(tuple(documents), blocks=20, every=10)
    assert text.repeated() == 1 / 4  # of "line 000", "new line", and the two of document 15


def test_a_text_of_one_paragraph_cannot_be_parted() -> None:
    with pytest.raises(ValueError, match=r"1 documents has 1 for training and 0 for validation; give a longer"):
        Text(("Only this.",))


def test_the_digest_is_of_the_documents_and_their_borders() -> None:
    assert Text(STORY).digest == Text(STORY).digest
    others = [STORY[1:], (STORY[0] + STORY[1], *STORY[2:]), STORY[::-1]]
    assert len({Text(tuple(other)).digest for other in (STORY, *others)}) == 4
    assert Text(STORY).digest != Text(STORY, blocks=20).digest


# Reading


def test_a_file_and_a_folder_are_paragraphs_in_order(tmp_path: Path) -> None:
    read_text.cache_clear()
    whole = read_text(str(write_story(tmp_path / "story.txt")))
    assert whole.documents == STORY
    folder = tmp_path / "folder"
    folder.mkdir()
    # The later one is written first; what is no .txt is left out; line ends of other systems do not count.
    (folder / "2.txt").write_bytes("\r\n \r\n\r\n".join(p.replace("\n", "\r\n") for p in STORY[40:]).encode())
    (folder / "1.txt").write_text("\n\n\n" + "\n\n".join(STORY[:40]))
    (folder / "notes.md").write_text("Not this.")
    assert read_text(str(folder)).documents == STORY
    assert read_text(str(folder)).digest == whole.digest
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "story.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert read_text(str(marked)).documents == STORY  # the first one began with the byte order mark


def test_places_without_text_are_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.txt is not there; give a .txt file, a folder"):
        read_text(str(tmp_path / "nowhere.txt"))
    with pytest.raises(FileNotFoundError, match=r"holds no \.txt file"):
        read_text(str(tmp_path))
    (tmp_path / "latin.txt").write_bytes("Ein Bär.".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 .*convert it first"):
        read_text(str(tmp_path / "latin.txt"))


def test_without_the_package_its_name_licence_and_command_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError) as error:
        read_text("kjv")
    said = str(error.value)
    for part in ("Debian", "copyright has expired", "GPL-2+", "`apt-get install bible-kjv`", "--set text=PATH"):
        assert part in said
    assert "\n" not in said


def test_another_program_of_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text.cache_clear()
    program = tmp_path / "bible"
    program.write_text("#!/bin/sh\necho 'Ge1:1 Something else.'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ValueError, match=r"bible printed 1 verses instead of 31102"):
        read_text("kjv")


def test_chapters_are_documents_without_numbers() -> None:
    verses = ["Ge1:1 In a garden.", "Ge1:2 It rained.", "Ge2:1 It stopped.", "1Sm2:1 Later: 3 days."]
    assert reading._chapters(verses) == ["In a garden.\nIt rained.", "It stopped.", "Later: 3 days."]


@pytest.mark.skipif(shutil.which("bible") is None, reason="Debian's bible-kjv is not installed")
def test_the_packaged_text() -> None:
    read_text.cache_clear()
    text = read_text("kjv")
    # 1,189 chapters of 31,102 verses, as every printed edition.
    assert len(text.documents) == 1189
    assert sum(document.count("\n") + 1 for document in text.documents) == 31_102
    assert text.documents[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth was")
    assert 4_000_000 < sum(map(len, text.documents)) < 4_300_000
    assert not set(text.training) & set(text.validation)


# Tokens


def test_the_same_text_gives_the_same_tokenizer() -> None:
    made = {build_tokenizer(STORY, 400).backend_tokenizer.to_str() for _ in range(4)}
    assert len(made) == 1
    assert build_tokenizer(STORY[1:], 400).backend_tokenizer.to_str() not in made


def test_any_text_comes_back_and_no_beginning_is_added() -> None:
    tokenizer = build_tokenizer(STORY, 300)
    for text in (STORY[0], "Größe 3 € – naïve\n\n  two  blanks", "<eos> is a word here"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("the")["input_ids"][0] != tokenizer.eos_token_id
    assert len(tokenizer) == 300
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.mask_token) == (PAD, EOS, MASK)
    # Behind all others: see `convert`.
    assert tokenizer.mask_token_id == 299
    with pytest.raises(ValueError, match="256 bytes"):
        build_tokenizer(STORY, 258)


def test_the_tokenizer_is_learned_from_the_training_part_alone() -> None:
    words = list(STORY)
    first = Text(STORY).held_out.index(True)
    # As long as what stood there, so that the stretches stay.
    words[first] = ("zyzzyva " * 99)[: len(words[first])]
    text = Text(tuple(words))
    assert words[first] in text.validation
    tokens = encode(text).tokenizer.get_vocab()
    assert "Nobody" in tokens
    assert not any("zz" in token for token in tokens)


def test_rows_are_the_documents_with_an_end_behind_each() -> None:
    text = Text(STORY)
    held = encode(text)
    for rows, part in ((held.training, text.training), (held.validation, text.validation)):
        assert rows.shape[1] == LENGTH == 64
        shown = held.tokenizer.decode(rows.flatten().tolist())
        whole = "".join(document + EOS for document in part)
        assert whole.startswith(shown)
        # Less than a row is left out.
        assert len(held.tokenizer(whole[len(shown) :])["input_ids"]) <= LENGTH
        assert not bool((rows == held.tokenizer.mask_token_id).any())


def test_bytes_by_hand() -> None:
    tokenizer = build_tokenizer(STORY, 300)
    held = Encoded(tokenizer, torch.empty(0, LENGTH), torch.empty(0, LENGTH))
    ids = tokenizer("Bär, 3 €")["input_ids"]
    # B, two of ä, r, comma, blank, 3, blank, three of €: 11 bytes, however they are cut; an end is one more.
    assert held.bytes_of(torch.tensor(ids)) == 11
    assert held.bytes_of(torch.tensor([*ids, tokenizer.eos_token_id])) == 12
    # 10 tokens of 2 nats are 20 nats; over 40 bytes half a nat each.
    assert per_byte(2.0, 10, 40) == 0.5


def test_bytes_of_rows_are_those_of_their_text() -> None:
    held = encode(Text(STORY))
    shown = held.tokenizer.decode(held.validation.flatten().tolist()).replace(EOS, "\n")
    assert held.bytes_of(held.validation) == len(shown.encode())


def test_held_out_rows_are_spread_over_the_text() -> None:
    rows = torch.arange(10)[:, None].expand(10, LENGTH)
    held = Encoded(None, rows, rows)
    assert held.held_out(4)[:, 0].tolist() == [0, 2, 5, 7]
    assert held.held_out(99)[:, 0].tolist() == list(range(10))


def test_a_part_shorter_than_a_row_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("\n\n".join(f"Day {number}." for number in range(40)))
    encoded.cache_clear()
    with pytest.raises(ValueError, match=r"a part of the text has \d+ tokens, and a row has 64; give a"):
        encoded(str(short))
