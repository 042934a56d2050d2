"""A headless Chromium for the pages that the package writes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlm_lens as dl
from tests.browser.report_sinks import PROMPTS, STEPS

NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing(reason: str) -> None:
    """Skip visibly, or fail where the browser is promised."""
    if os.environ.get("REQUIRE_BROWSER") == "1":
        pytest.fail(f"REQUIRE_BROWSER=1, but {reason}", pytrace=False)
    pytest.skip(reason)


# Per module: playwright keeps an event loop running in this thread, which other tests must not find there.
@pytest.fixture(scope="module")
def chromium() -> Iterator:
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        missing("there is no Chromium; install Debian's chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed; pip install -e '.[dev]'")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield browser
        browser.close()


class Watched:
    """A page, and everything it did that a report must not do."""

    def __init__(self, page, path: Path) -> None:
        self.page, self.complaints, self.requests = page, [], []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)

    def __getattr__(self, name):
        return getattr(self.page, name)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def set(self, selector: str, value) -> None:
        """Move a slider or fill a field, as a user's input event does."""
        self.page.eval_on_selector(
            selector,
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }",
            str(value),
        )


@pytest.fixture
def opened(chromium):
    """Open a file in a fresh page; whatever the page complains about, or asks for, fails the test."""
    pages = []

    def opener(path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> Watched:
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        pages.append(Watched(page, path))
        return pages[-1]

    yield opener
    for page in pages:
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "blob:", "data:"))] == []
        assert len(page.requests) == 1  # the file itself
        page.close()


@pytest.fixture(scope="module")
def recordings():
    def recorded(name, **settings):
        return dl.record(dl.load(name), PROMPTS, **settings)

    return {
        "toy": recorded("toy", steps=STEPS, gen_length=16),
        "toy-sink": recorded("toy-sink", steps=STEPS, gen_length=16),
        "toy-ar": recorded("toy-ar"),
    }


@pytest.fixture(scope="module")
def files(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    made = {name: dl.viz.report(rec, folder / f"{name}.html", row=1) for name, rec in recordings.items()}
    made["both"] = dl.viz.report(
        recordings["toy"], folder / "both.html", compare=recordings["toy-ar"], labels=("masked", "AR"), row=1
    )
    return made
