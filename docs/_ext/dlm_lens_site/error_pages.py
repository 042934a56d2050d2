"""The pages of errors: every sentence of the library with when it is raised, by what the reader was doing."""

import hashlib
import json
from collections import defaultdict
from typing import Any

from sphinx.application import Sphinx

from dlm_lens_site.error_causes import GROUPS, Group
from dlm_lens_site.error_sentences import ErrorSentence, all_sentences


def group_of(module: str) -> Group:
    """The group of a module: that with the longest matching prefix.

    Raises:
        LookupError: no group has the module.
    """
    name = module.removeprefix("dlm_lens.")
    fitting = [
        (len(prefix), group)
        for group in GROUPS
        for prefix in group.modules
        if name == prefix or name.startswith(prefix + ".") or prefix == ""
    ]
    if not fitting:
        raise LookupError(
            f"{module} raises errors and is in no group of docs/_ext/dlm_lens_site/error_causes.py; add it"
        )
    return max(fitting, key=lambda pair: pair[0])[1]


def anchor_of(sentence: ErrorSentence) -> str:
    """The place of a sentence on its page, the same as long as its words are."""
    return "e-" + hashlib.sha256(f"{sentence.module} {sentence.text}".encode()).hexdigest()[:8]


def error_pages() -> dict[str, str]:
    """One page per group, and the index that the search box of the site reads."""
    found, _ = all_sentences()
    grouped: dict[str, list[ErrorSentence]] = defaultdict(list)
    for sentence in found:
        grouped[group_of(sentence.module).page].append(sentence)
    pages = {
        f"errors/{group.page}.md": _page(group, grouped[group.page]) for group in GROUPS if grouped[group.page]
    }
    return {**pages, "search/errors.js": _index(found)}


def add_the_search_box(app: Sphinx, page: str, _template: str, _context: Any, _doctree: Any) -> None:
    """Load the search by sentence on the page `troubleshooting` only."""
    if page == "troubleshooting":
        app.add_js_file("errors.js")
        app.add_js_file("find-error.js")


def _page(group: Group, sentences: list[ErrorSentence]) -> str:
    lines = [f"# {group.title}", "", group.cause, "", f"**What to do.** {group.remedy}", ""]
    once = {(one.module, one.text): one for one in sentences}
    for one in once.values():
        when = f" Raised for: {_markdown(one.when)}" if one.when else ""
        lines += [
            f"({anchor_of(one)})=",
            f"- **{_markdown(one.text)}**<br>{one.kind} of `{one.module}.{one.function}`.{when}",
            "",
        ]
    return "\n".join(lines)


def _index(sentences: list[ErrorSentence]) -> str:
    entries = [
        [one.text, f"_pages/errors/{group_of(one.module).page}.html#{anchor_of(one)}", group_of(one.module).title]
        for one in sentences
    ]
    return f"window.dlmLensErrors = {json.dumps(entries, ensure_ascii=False)};\n"


def _markdown(text: str) -> str:
    """Text that Markdown shows as it is; the docstring's code stays code."""
    parts = text.split("`")
    for number in range(0, len(parts), 2):
        for sign in "\\*_[]<>{}#|~$":
            parts[number] = parts[number].replace(sign, "\\" + sign)
    return "`".join(parts).replace("\n", " ") if len(parts) % 2 else text.replace("<", "\\<")
