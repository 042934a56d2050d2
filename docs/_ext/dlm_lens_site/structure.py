"""Which page is where on the site: the tables of contents, kept out of the Markdown pages."""

from sphinx.application import Sphinx

from dlm_lens_site.files import DOCS

SOURCES = (".ipynb", ".md")
"""Of the pages in `docs/notebooks`."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Basics": ("concepts", "toy", "hosts", "sinks"),
    "Tutorials": (
        "notebooks/index",
        "notebooks/ten_minutes",
        "notebooks/moving_sinks",
        "notebooks/knock_outs",
        "notebooks/tracing",
        "notebooks/transformerlens",
        "notebooks/smollm2",
        "notebooks/block_diffusion",
        "laptop",
        "notebooks/diffusion_gemma",
        "notebooks/sink_token_training",
        "notebooks/own_detector_and_hook",
    ),
    "How-to guides": (
        "models",
        "checkpoints",
        "denoising",
        "hooks",
        "comparing",
        "recording",
        "report",
        "explorer",
        "pictures",
        "tracing",
        "transformerlens",
        "caches",
        "likelihood",
        "evaluation",
        "training",
    ),
    "Explanation": (
        "questions",
        "trajectories",
        "probes",
        "commitment",
        "clock",
        "attribution",
        "anatomy",
        "features",
        "early_attention",
        "pruning",
        "sink_tokens",
        "families",
        "diffusion_gemma",
    ),
    "Questions to solve": ("tasks/index",),
    "Reference": ("_pages/api/index", "_pages/command-line", "_pages/samplers", "gallery", "troubleshooting"),
    "Papers and results": (
        "papers",
        "results",
        "results_smollm2",
        "results_one_token",
        "results_axis",
        "_pages/benchmarks",
    ),
    "Extending": ("add-a-hook", "add-a-detector", "add-a-reducer", "add-a-figure", "add-a-family"),
    "Project": (
        "_pages/changelog",
        "verification",
        "architecture",
        "_pages/contributing",
        "releasing",
        "upstream",
    ),
}


def sections() -> dict[str, tuple[str, ...]]:
    """`SECTIONS` with every page that exists: unlisted notebooks are tutorials, other unlisted pages explain.

    Pages of `docs/tasks` are questions to solve, in the order of their numbers.
    """
    listed = {page for pages in SECTIONS.values() for page in pages}
    notebooks = {f"notebooks/{path.stem}" for path in (DOCS / "notebooks").iterdir() if path.suffix in SOURCES}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    tasks = {f"tasks/{path.stem}" for path in (DOCS / "tasks").glob("*.md")}
    more = {
        "Tutorials": sorted(notebooks - listed),
        "Explanation": sorted(pages - listed),
        "Questions to solve": sorted(tasks - listed),
    }
    exist = notebooks | pages | tasks
    return {
        caption: tuple(page for page in (*names, *more.get(caption, ())) if page in exist or page.startswith("_"))
        for caption, names in SECTIONS.items()
    }


def add_the_tables_of_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    """Append the tables of contents to the home page, the families' to `families`, errors to `troubleshooting`."""
    if name == "index":
        source[0] += "".join(_table(caption, pages) for caption, pages in sections().items())
    elif name == "families":
        names = sorted(path.stem for path in (DOCS / "families").glob("*.md"))
        source[0] += _table(None, tuple(f"families/{name}" for name in names))
    elif name == "troubleshooting":
        pages = sorted(f"_pages/errors/{path.stem}" for path in (DOCS / "_pages" / "errors").glob("*.md"))
        source[0] += "\n\n## Every error sentence\n\n" + "".join(f"- [](/{page}.md)\n" for page in pages)
        source[0] += _table(None, tuple(pages))


def _table(caption: str | None, pages: tuple[str, ...]) -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n:maxdepth: 1\n" + head + "\n" + "\n".join(pages) + "\n```\n"
