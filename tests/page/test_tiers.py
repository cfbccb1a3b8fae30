"""The status page's section on lower tiers."""

from __future__ import annotations

import msgspec
import page_helpers as say
import pytest
from page_helpers import OpenPage, PageServer
from playwright.sync_api import expect

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page


def test_a_server_without_tiers_shows_no_section(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["status"] = say.status()
    page = open_page(page_server.url)
    expect(page.locator("#tiers")).to_be_hidden()
    page_server.bodies["status"] = say.with_tiers()
    expect(page.locator("#tiers")).to_be_visible()


def test_each_tier_has_a_row_that_says_what_it_has_and_why_it_is_off(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url, reduced_motion="reduce")
    rows = [say.plain(text) for text in page.locator("#tiers tbody tr").all_inner_texts()]
    assert rows == [
        "disk used 61 % 122 GiB of 200 GiB 96.0 MiB 410 GiB 1.27 TiB 2 431 GiB",
        "redis off its calls fail or are late 18.0 GiB 0 B 18.0 GiB 0 B 0 0 B",
        "objects off it cannot be opened – – – – – –",
    ]
    expect(page.locator("#tiers .track:visible")).to_have_count(1)
    bar, full = page.locator("#tiers .track").first.bounding_box(), page.locator("#tiers .track span").first
    inside = full.bounding_box()
    assert bar is not None and inside is not None
    assert inside["width"] / bar["width"] == pytest.approx(122 / 200, abs=0.02)
    assert page.locator("#tiers .alarm").all_inner_texts() == ["2"]


def test_waits_are_told_by_how_they_ended(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    said = say.plain(page.locator("#tiers .after").inner_text())
    assert said == (
        "3 requests wait for lower tiers now. Earlier waits: 812 until all chunks came, 6 until the time was over."
    )
    expect(page.locator("#tiers .failed").filter(visible=True)).to_have_count(0)


def test_requests_that_a_store_charges_for_are_told_with_their_price(
    page_server: PageServer, open_page: OpenPage
) -> None:
    disk, redis, objects = say.with_tiers().tiers
    asked = {"stored_bytes": 1 << 30, "request_get": 12_000, "request_put": 345}
    paid = msgspec.structs.replace(objects, counters=asked, dollars=0.0061)
    page_server.bodies["status"] = say.with_tiers(tiers=[disk, redis, paid])
    page = open_page(page_server.url)
    said = say.plain(page.locator("#tiers .after").inner_text())
    assert said.endswith("until the time was over. 12,345 requests to objects, for $0.01.")


def test_a_mover_that_is_silent_or_was_lost_is_named(page_server: PageServer, open_page: OpenPage) -> None:
    status = say.with_tiers()
    assert status.mover is not None
    silent = msgspec.structs.replace(status.mover, silent_s=42.0, restarts=2, lost_lookups=1, waiting=1, waits={})
    page_server.bodies["status"] = say.with_tiers(mover=silent, tiers=[])
    page = open_page(page_server.url)
    expect(page.locator("#tiers .hint")).to_have_text("The mover has not reported on its tiers yet.")
    assert say.plain(page.locator("#tiers .after").inner_text()) == "1 request waits for lower tiers now."
    assert say.plain(page.locator("#tiers .failed").first.inner_text()) == (
        "The mover has not reported for 42 s, so these figures are old. The mover ended and was restarted "
        "2 times. 1 lookup was not sent to the mover, because too many waited."
    )
