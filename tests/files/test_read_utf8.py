"""`read_utf8` reads what Python's `open` reads, and names a file in another encoding."""

from pathlib import Path

import pytest

from dlm_lens.files.paths import read_utf8


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_end_as_in_an_opened_text_file(end: bytes, mark: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(mark + end.join(["é".encode(), b"", b"b\x0cc", b""]))
    assert read_utf8(path) == path.read_text(encoding="utf-8-sig") == "é\n\nb\fc\n"


def test_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"text\.txt is not UTF-8 \(byte 0\), the encoding of lists"):
        read_utf8(path, "lists")
