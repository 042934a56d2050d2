"""The Sphinx extension of the site: generated pages, links out of `docs/`, docstrings, the structure.

`docs/*.md` are plain Markdown that reads well where the repository is shown. What only the site has is made here
when it is built, into `docs/_pages` (git-ignored): the reference, the command line, the samplers, the errors,
copies of the Markdown pages outside `docs/`. No network is used.
"""

from collections.abc import Callable
from typing import Any

from sphinx.application import Sphinx

from dlm_lens_site import (
    api_pages,
    command_line,
    docstrings,
    error_pages,
    gallery,
    references,
    repository_pages,
    sampler_pages,
    structure,
)
from dlm_lens_site.files import PAGES, write_pages


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the parts to Sphinx's events."""
    app.connect("config-inited", _generated(api_pages.api_pages, command_line.command_line_page))
    app.connect("config-inited", _generated(error_pages.error_pages, repository_pages.copies))
    app.connect("config-inited", _generated(sampler_pages.sampler_page))
    app.connect("source-read", gallery.add_the_pictures)
    app.connect("source-read", repository_pages.links_of_a_page)
    app.connect("source-read", structure.add_the_tables_of_contents)
    app.connect("autodoc-process-docstring", docstrings.hide_colons, priority=100)
    app.connect("autodoc-process-docstring", docstrings.as_restructured_text, priority=900)
    app.connect("doctree-read", references.link_public_names)
    app.connect("missing-reference", references.resolve, priority=100)
    app.connect("html-page-context", error_pages.add_the_search_box)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _generated(*makers: Callable[[], dict[str, str]]) -> Callable[[Sphinx, Any], None]:
    def write(_app: Sphinx, _config: Any) -> None:
        for make in makers:
            write_pages(make())

    return write


__all__ = ["PAGES", "setup"]
