"""Fixtures of the status page's tests: a browser, pages that are closed after the test, and servers to show.

Tests that only look use `status_page_url`: a module that overrides it runs them against another server.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import page_helpers as say
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ARGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP evil.test 127.0.0.1",
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
    contexts = []

    def open_one(url: str, *, drawn: bool = True, access_token: str = "", **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 4000}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(say.PATIENCE_MS)
        page.goto(url)
        if access_token:
            page.fill("#token", access_token)
            page.press("#token", "Enter")
        if drawn:
            for panel in ("history", "sessions", "grants", "requests"):
                if page.locator(f"#{panel}").get_attribute("open") is not None:  # on a narrow screen some are folded
                    drawn_parts = page.locator(f"#{panel} :is(tbody tr, .ticks text, .hint)")
                    expect(drawn_parts.filter(visible=True).first).to_be_visible()
        return page

    yield open_one
    for context in contexts:
        context.close()


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
    """A page to import single modules in."""
    with say.PageServer() as page_server:
        page = browser.new_page()
        page.goto(page_server.url)
        yield page
        page.close()
