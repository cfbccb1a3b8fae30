"""Fixtures of the status page's tests: a browser, pages that are closed after the test, and servers to show.

Tests that only look use `status_page_url`: a module that overrides it runs them against another server.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import page_helpers as say
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ARGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP evil.test 127.0.0.1",
    "--no-zygote",  # a tenth of what it takes to open a page
]

expect.set_options(timeout=say.PATIENCE_MS)


def browser_path() -> str | None:
    """The shell is Chromium without the windows that nobody sees: half the work."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        pytest.skip("no chromium on PATH: the status page was not looked at")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[say.OpenPage]:
    """open_page(url, **context options) → a page that has drawn its first figures (or has not, with drawn=False). A
    server that shows a page only totals is given the access token. All of the page is in sight, unless told."""
    with say.opening(browser) as open_one:
        yield open_one


@pytest.fixture
def page_server() -> Iterator[say.PageServer]:
    with say.PageServer() as running:
        yield running


@pytest.fixture
def status_page_url(page_server: say.PageServer) -> str:
    """The page of a server with traffic; a module may override it with any server that answers the six GETs."""
    return page_server.url


@pytest.fixture(scope="module")
def figures(browser: Browser) -> Iterator[Page]:
    with say.modules_alone(browser) as page:
        yield page
