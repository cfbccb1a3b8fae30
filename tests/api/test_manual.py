"""The manual as the server serves it: every page of docs/, with anchors for what the status page links to."""

from __future__ import annotations

import json
import re

import pytest
from api_helpers import NOBODYS, ServerProcess, raw
from paths import ROOT

from kvdock.api.http.pages import manual_page, page_names

PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def get(server: ServerProcess, name: str) -> tuple[int, dict[str, str], str]:
    status, headers, content = raw(server.http, "GET", f"/manual/{name}", headers=NOBODYS)
    return status, headers, content.decode()


def test_every_page_of_the_manual_is_served_to_everybody_and_fetches_nothing(server: ServerProcess) -> None:
    assert len(PAGES) > 15
    for name in PAGES:
        status, headers, page = get(server, name)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8"), name
        assert "<script" not in page and not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|png)', page), name


def test_links_between_pages_of_the_manual_lead_to_pages_and_anchors_that_are_there(server: ServerProcess) -> None:
    pages = {name: get(server, name)[2] for name in PAGES}
    for name, page in pages.items():
        folder = name.rpartition("/")[0]
        for href in re.findall(r'<a href="([^"#:]*\.md)?(?:#([^"]*))?"', page.partition("</p>")[2]):
            target = re.sub(r"[^/]+/\.\./", "", f"{folder}/{href[0]}".lstrip("/")) if href[0] else name
            assert target in pages, (name, href)
            assert not href[1] or f'id="{href[1]}"' in pages[target], (name, href)


def test_each_metric_of_the_runbook_has_an_anchor(server: ServerProcess) -> None:
    page = get(server, "runbook.md")[2]
    for name in ("kvdock_lookups_total", "kvdock_mismatches_total", "not-ready"):
        assert page.count(f'id="{name}"') == 1


@pytest.mark.parametrize("name", ["nothing.md", "../README.md", "runbook", "", "images/page.png", "..%2fREADME.md"])
def test_what_is_no_page_of_the_manual_is_not_found(server: ServerProcess, name: str) -> None:
    status, _, page = get(server, name)
    assert status == 404 and json.loads(page)["code"] == "not_found"


def test_markup_in_a_page_is_text_and_links_that_lead_out_are_too() -> None:
    text = "# A <b>b</b>\n\n<script>1</script> [out](../api/x.py) [in](y.md#z) ![p](images/p.png)\n"
    page = manual_page("x.md", text)
    assert "<script" not in page and "<b>" not in page
    assert "<a>out</a>" in page and '<a href="y.md#z">in</a>' in page
    assert '<h1 id="a-bbb">' in page


def test_the_names_of_pages_are_those_of_the_folder() -> None:
    assert sorted(page_names()) == PAGES
