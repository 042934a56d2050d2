"""`read_utf8`: a text file, or one sentence that names the file."""

from pathlib import Path


def read_utf8(path: Path, needed_by: str = "text files") -> str:
    r"""The text of a file, without a byte order mark; lines end with \n, also where the file has \r\n or \r.

    Args:
        path: of the file.
        needed_by: what is in this encoding, for the message.

    Raises:
        ValueError: it is not UTF-8; the sentence has the first byte that is not.
        OSError: it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}), the encoding of {needed_by}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as Python opens text files
