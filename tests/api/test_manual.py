"""The manual as the server serves it: every page of docs/, with anchors for what the status page links to."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

import pytest
from api_helpers import NOBODYS, ServerProcess, raw
from paths import ROOT

from kvdock.api.http.pages import manual_page, page_names

DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
EXAMPLES = sorted(str(path.relative_to(DOCS)) for path in (DOCS / "examples").iterdir())


def get(server: ServerProcess, name: str) -> tuple[int, dict[str, str], str]:
    status, headers, content = raw(server.http, "GET", f"/manual/{name}", headers=NOBODYS)
    return status, headers, content.decode()


def test_every_page_of_the_manual_is_served_to_everybody_and_fetches_nothing(server: ServerProcess) -> None:
    assert len(PAGES) > 40
    for name in PAGES:
        status, headers, page = get(server, name)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8"), name
        assert "<script" not in page and not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|png)', page), name
        assert "<img" not in page and "<p>::: " not in page, name


def test_links_of_the_manual_lead_to_what_is_served_and_to_anchors_that_are_there(server: ServerProcess) -> None:
    pages = {name: get(server, name)[2] for name in PAGES}
    seen = set()
    for name, page in pages.items():
        for href in re.findall(r'<a href="([^"]*)"', page.partition("</p>")[2]):
            path, _, anchor = href.partition("#")
            if ":" in path:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            seen.add(target)
            assert target in pages or target in EXAMPLES, (name, href)
            assert not anchor or f'id="{anchor}"' in pages[target], (name, href)
    assert seen >= {*EXAMPLES, "operate/metrics.md"}


def test_the_manual_begins_with_a_list_of_all_its_pages(server: ServerProcess) -> None:
    status, _, page = get(server, "")
    assert status == 200 and page == get(server, "index.md")[2]
    assert set(re.findall(r'<a href="([^":#]+\.md)"', page.partition("All pages")[2])) == set(PAGES)
    assert '<a href="operate/errors.md">Errors</a>' in page


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_served_as_it_is(server: ServerProcess, name: str) -> None:
    status, headers, text = get(server, name)
    assert (status, headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert text == (DOCS / name).read_text()


def test_each_metric_of_the_manual_has_an_anchor(server: ServerProcess) -> None:
    page = get(server, "operate/metrics_totals.md")[2]
    for name in ("kvdock_lookups_total", "kvdock_mismatches_total", "lookups-and-loads"):
        assert page.count(f'id="{name}"') == 1


@pytest.mark.parametrize(
    "name", ["nothing.md", "../README.md", "operate/runbook", "site.css", "images/page.png", "..%2fREADME.md"]
)
def test_what_is_no_page_of_the_manual_is_not_found(server: ServerProcess, name: str) -> None:
    status, _, page = get(server, name)
    assert status == 404 and json.loads(page)["code"] == "not_found"


def test_markup_in_a_page_is_text_and_links_that_lead_out_are_too(tmp_path: Path) -> None:
    served = {"x.md": tmp_path / "x.md", "y.md": tmp_path / "y.md"}
    text = "# A <b>b</b>\n\n<script>1</script> [out](../api/x.py) [in](y.md#z) ![p](images/p.png)\n"
    served["x.md"].write_text(text)
    page = manual_page("x.md", served)
    assert "<script" not in page and "<b>" not in page and "<img" not in page
    assert "<a>out</a>" in page and '<a href="y.md#z">in</a> [picture: p]<' in page
    assert '<h1 id="a-bbb">' in page


def test_the_names_of_pages_are_those_of_the_folder() -> None:
    assert sorted(page_names()) == sorted([*PAGES, *EXAMPLES])
