"""`View`: components of circuitsvis as an HTML page that needs no network and treats tokens as text."""

import html
import json
import math
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from torch import Tensor

from dlm_lens.files.atomic_writes import write_file
from dlm_lens.files.paths import check_file, user_path
from dlm_lens.printable import printable
from dlm_lens.sampling.token_text import TokenTexts

Component = Literal["AttentionHeads", "AttentionPattern", "ColoredTokens"]

AS_HTML: tuple[Component, ...] = ("ColoredTokens",)
"""Components of circuitsvis that insert a token's text as HTML, so that `<img onerror=...>` in it would run."""

POLICY = "default-src 'none'; script-src 'sha256-{}'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy of a saved page: nothing is loaded from elsewhere."""

STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:1100px;margin:1.5em auto;padding:0 1em;line-height:1.4}"
    "h1{font-size:1.2em}h2{font-size:1em;margin:1.2em 0 0}"
)


@dataclass(frozen=True)
class Piece:
    """One circuitsvis component with its props.

    Args:
        component: its name.
        props: JSON values; `tokens` are untrusted texts.
        heading: the text above it.
    """

    component: Component
    props: Mapping[str, Any]
    heading: str = ""


@dataclass(frozen=True)
class View:
    """Pieces of circuitsvis that a notebook shows and `save` writes as one HTML file.

    Args:
        title: heading of the page.
        sentences: scale, level, and what was left out.
        pieces: the components.
    """

    title: str
    sentences: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def __repr__(self) -> str:
        return f"View({self.title}; {len(self.pieces)} pieces; save(path) writes it)"

    def _repr_html_(self) -> str:
        """HTML for a notebook, with the script of the installed circuitsvis (1.3 MB per view)."""
        body, script = self._parts()
        return f'{body}<script type="module">{script}</script>'

    def _parts(self) -> tuple[str, str]:
        """The markup, and the script that fills it: a module, so that views on one page share no names."""
        names = [f"dlm-lens-{uuid4().hex}" for _ in self.pieces]
        about = "".join(f"<p>{_text(sentence)}</p>" for sentence in self.sentences)
        places = "".join(
            (f"<h2>{_text(piece.heading)}</h2>" if piece.heading else "")
            + f'<div id="{name}" style="margin: 10px 0; position: relative"></div>'
            for piece, name in zip(self.pieces, names, strict=True)
        )
        calls = "\n".join(
            f'CircuitsVis.render("{name}", CircuitsVis.{piece.component}, {_props(piece)});'
            for piece, name in zip(self.pieces, names, strict=True)
        )
        return f"<h1>{_text(self.title)}</h1>{about}{places}", f"{_bundle()}\n{calls}"

    def save(self, path: str | Path) -> Path:
        """Write one HTML file that needs no network, and return its path.

        Raises:
            FileNotFoundError: the directory does not exist.
            IsADirectoryError: it is a directory.
            ValueError: the name does not end in .html or .htm.
        """
        path = user_path(path)
        check_file(path, (".html", ".htm"))
        body, script = self._parts()
        # The policy allows this script alone, by its hash, so that no markup from a token could run one.
        digest = b64encode(sha256(script.encode()).digest()).decode()
        page = (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(digest)}">'
            f"<title>{_text(self.title)}</title><style>{STYLE}</style></head>"
            f'<body>{body}<script type="module">{script}</script></body></html>\n'
        )
        return write_file(path, page)


def _text(given: str) -> str:
    """A text in the markup: control characters and lone surrogates, which no file or message can hold, as codes."""
    return html.escape(printable(given))


def _props(piece: Piece) -> str:
    """The props as JSON for a script element: in ASCII, with <, > and & escaped."""
    props = dict(piece.props)
    if piece.component in AS_HTML:
        props["tokens"] = [html.escape(token) for token in props["tokens"]]
    text = json.dumps(props, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _bundle() -> str:
    """The browser bundle of the installed circuitsvis, escaped so that it cannot end its script element.

    Raises:
        ImportError: circuitsvis is not installed, or its bundle has another path.
    """
    try:
        file = files("circuitsvis") / "dist" / "cdn" / "iife.js"
        text = file.read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ImportError(
            f"circuitsvis's bundle dist/cdn/iife.js was not found ({error}); pip install circuitsvis"
        ) from error
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def rounded(values: Tensor, least: int = 0) -> Any:
    """Nested lists of numbers, rounded to four digits of the largest one, and to `least` decimals or more."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    place = math.floor(math.log10(largest)) if largest > 0 else 0
    return _rounded(values, max(least, 3 - place if largest > 1 else 4 - min(0, place + 1)))


def _rounded(values: Tensor, decimals: int) -> Any:
    if values.ndim > 1:
        return [_rounded(part, decimals) for part in values]
    return [round(value, decimals) for value in values.double().tolist()]


def web_labels(ids: list[int], tokenizer: Any) -> list[str]:
    """Token ids as texts for a browser (`token_text.shown`): ids without a tokenizer, sink(i) for learned sinks."""
    texts = TokenTexts(tokenizer)
    labels = {token: texts.label(token) for token in set(ids)}
    return [labels[token] for token in ids]
