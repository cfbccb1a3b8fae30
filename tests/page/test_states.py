"""Every state of the status page at every width, light and dark: no finding of axe-core, no word broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import page_helpers as say
import page_views as views
import pytest
from axe_playwright_python.sync_playwright import Axe
from page_helpers import OpenPage, PageServer
from playwright.sync_api import Page, expect

from kvdock.protocol import schemas
from kvdock.protocol.admin_schemas import Namespaces
from kvdock.protocol.reports import ChunkCounts, Leases, Mark, Prefixes

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page

WIDTHS = (390, 768, 1024, 1280, 1366, 1440)
FEW = (390, 768, 1024, 1280)
"""One of each arrangement of the page; the others run with --sweeps."""
HOSTILE = '"><img src=x onerror=alert(1)>\u202egpj.exe' + "W" * 200


def _live(server: PageServer) -> None:
    """A server with traffic, which was started and got other limits while the charts go on."""
    marks = [
        Mark(age_s=200.0, kind="started"),
        Mark(age_s=50.0, kind="limits", limits=["pool_bytes", "quotas"], pool_bytes=16 << 30),
    ]
    stats = say.stats()
    for series in stats.series:
        series.values[90:110] = [None] * 20
    server.bodies["stats"] = msgspec.structs.replace(stats, marks=marks)


def _nobody(server: PageServer) -> None:
    """What callers without a token see."""
    server.bodies = {name: server.bodies[name] for name in ("status", "stats", "verdict")} | {"whoami": say.NOBODY}


def _empty(server: PageServer) -> None:
    server.bodies |= say.empty_bodies()


def _hostile(server: PageServer) -> None:
    who = say.session("s1", HOSTILE, HOSTILE, [say.member(HOSTILE, [0], "dead")])
    requests = say.live_requests(6)
    for one in requests.requests:
        one.label = HOSTILE
        one.request = one.request + HOSTILE
    server.bodies |= {
        "sessions": schemas.Sessions(sessions=[who]), "requests": requests,
        "leases": Leases(leases=[say.grant(1, "lease", "s1", HOSTILE, 1, [0])]),
        "namespaces": Namespaces(namespaces=[views.namespace(1, HOSTILE, tenant=HOSTILE)]),
        "prefixes": Prefixes(prefixes=[views.prefix(1, model=HOSTILE)], prefix_count=1, counted_s=0.1),
        "status": say.with_tiers(status="not ready", degraded=say.degraded(HOSTILE), host=HOSTILE),
    }


def _many(server: PageServer) -> None:
    each = [say.session(f"s{i}", f"engine-{i}", views.MODELS[i % 3], [say.member(f"m{i}", [0])]) for i in range(200)]
    pool = msgspec.structs.replace(say.live_pool(), segments=1000)
    chunks = ChunkCounts(reserved=24, ready=1_000_000, quarantined=9)
    server.pages["sessions"] = 64
    server.bodies |= {
        "sessions": schemas.Sessions(sessions=each), "segments": say.segments(1000),
        "status": say.status(sessions=200, pool=pool, chunks=chunks),
        "namespaces": Namespaces(
            namespaces=[views.namespace(i % 250 + 1, f"model-{i}") for i in range(300)], next="300"
        ),
        "prefixes": views.prefixes(100),
    }


STATES: dict[str, Callable[[PageServer], None]] = {
    "live": _live, "nobody": _nobody, "empty": _empty, "hostile": _hostile, "many": _many,
}


def violations(page: Page) -> list[str]:
    found: list[dict[str, Any]] = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
        for one in found for node in one["nodes"]
    ]


BROKEN_WORDS = """() => [...document.querySelectorAll(
    'main :is(td, th, dt, dd, b, summary, button, li > span, .filter > span)')]
  .filter((node) => node.checkVisibility() && !node.children.length && node.clientHeight)
  .filter((node) => /^[\\w\\u00a0,.%-]{1,24}$/.test(node.textContent) || node.matches('.filter:not(.limits *) > span'))
  .filter((node) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1;
  }).map((node) => node.outerHTML)"""
"""Single words, figures, names of common length and labels beside a control that stand on more than one line."""


@pytest.mark.sweep("scheme")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing_and_no_word_is_broken(
    page_server: PageServer, open_page: OpenPage, state: str, scheme: str, sweeps: bool
) -> None:
    STATES[state](page_server)
    is_known = state != "nobody"
    page = open_page(page_server.url, drawn=is_known, color_scheme=scheme, reduced_motion="reduce")
    expect(page.locator("#admin" if is_known else "#locked")).to_be_visible()
    page.evaluate("for (const node of document.querySelectorAll('details.panel:not([hidden])')) node.open = true")
    if is_known:
        expect(page.locator("#admin form").first).to_be_visible()
    say.wait_phase(page, "live")
    looks_well(page, *(WIDTHS if sweeps else FEW), 1440 if scheme == "light" else 390)


def looks_well(page: Page, *widths: int) -> None:
    """No word is broken at any of these widths, and axe finds nothing at the last."""
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => document.documentElement.scrollWidth === width", arg=width)  # charts follow
        assert (width, page.evaluate(BROKEN_WORDS)) == (width, [])
    assert violations(page) == []


def test_axe_finds_nothing_while_the_server_is_silent_or_gone(page_server: PageServer, open_page: OpenPage) -> None:
    """What differs from the live page is above the panels."""
    _live(page_server)
    page = open_page(page_server.url, color_scheme="dark", reduced_motion="reduce")
    page_server.hang()
    say.wait_phase(page, "stale")
    looks_well(page, 390, 1440)
    page_server.stop()
    say.wait_phase(page, "gone")
    looks_well(page, 1440, 390)


@pytest.mark.parametrize(
    "width", [pytest.param(width, marks=[] if width in (390, 1280) else [pytest.mark.sweep]) for width in WIDTHS]
)
def test_the_page_is_as_long_as_a_person_may_want(page_server: PageServer, open_page: OpenPage, width: int) -> None:
    _many(page_server)
    page = open_page(page_server.url, viewport={"width": width, "height": 900})
    expect(page.locator("#admin")).to_be_visible()
    page.wait_for_timeout(500)
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height < {390: 2_000, 768: 3_600, 1440: 4_800}.get(width, 5_000)


@pytest.mark.parametrize("dialog", ["explain", "confirm"])
def test_axe_finds_nothing_in_a_dialog(page_server: PageServer, open_page: OpenPage, dialog: str) -> None:
    page = open_page(page_server.url, viewport={"width": 390, "height": 844})
    if dialog == "explain":
        page.locator("#requests > summary").click()
        name = page.locator("#requests button.link").first
        page_server.bodies[f"requests/{name.inner_text()}/explain"] = views.explanation(name.inner_text())
        name.click()
        expect(page.locator("#explain").get_by_role("heading", name="Where")).to_be_visible()
    else:
        page.locator("#admin > summary").click()
        page.get_by_role("button", name="Clear…").click()
        expect(page.locator("#confirm h2")).to_have_text("Clear the whole cache?")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
