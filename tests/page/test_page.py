"""The status page in a real browser, with a server that is ready, empty, slow, gone or restarted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import page_helpers as say
import page_views as views
import pytest
from api_helpers import eventually
from page_helpers import PATIENCE_MS, OpenPage, PageServer
from playwright.sync_api import Browser, Page, expect

from kvdock.protocol.hits import COMPUTED, PromptRun
from kvdock.protocol.outcomes import Outcome, view_of
from kvdock.protocol.reports import Requests

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page


# --------------------------------------------------------------------------- a server with traffic


@pytest.fixture(scope="class")
def page(browser: Browser) -> Iterator[Page]:
    with say.PageServer() as page_server, say.opening(browser) as open_one:
        yield open_one(page_server.url, reduced_motion="reduce")


class TestAServerWithTraffic:
    """One page, which these tests only look at."""

    def test_health_says_ready_version_and_pool(self, page: Page) -> None:
        assert page.title() == "kvdock"
        expect(page.locator("#pill")).to_have_text("Ready")
        facts = say.plain(page.locator("#facts").inner_text())
        assert facts == "version 0.1.0 up 1 d 2 h"
        expect(page.locator("#pool")).to_contain_text("Pool 3fa90c51d27be604, incarnation 3.")

    def test_pool_rows_show_bytes_share_and_chunks_of_each_state(self, page: Page) -> None:
        assert say.row(page, "Pool by state", "Ready") == "Ready published, can be hit 9.24 GiB 58 % 4,731"
        assert "18.0 MiB 0.1 % 9" in say.row(page, "Pool by state", "Quarantined")
        assert "4.00 GiB 25 %" in say.row(page, "Pool by state", "Not allocated")
        assert "706 MiB (4.3 %) held" in say.plain(page.locator("#pool").inner_text())

    def test_pool_bar_is_as_wide_as_its_states(self, page: Page) -> None:
        bar = page.locator(".bar").bounding_box()
        ready = page.locator(".bar .ready").bounding_box()
        assert bar is not None and ready is not None
        assert ready["width"] / bar["width"] == pytest.approx(4731 * 2 / (16 * 1024), abs=0.01)

    def test_segment_map_shows_how_far_prefault_is(self, page: Page) -> None:
        maps = page.locator("#pool .segments [role=img]")
        expect(maps).to_have_count(3)
        assert say.plain(maps.nth(2).get_attribute("aria-label")) == "Segment 2: 4.00 GiB, 25 % used, prefault 50 %"
        cells = [maps.nth(2).locator(f".{kind}").get_attribute("d") or "" for kind in ("used", "ready", "later")]
        assert [path.count("z") for path in cells] == [16, 16, 32]

    def test_sessions_show_members_in_trouble_first(self, page: Page) -> None:
        first = page.locator("#sessions tbody tr").nth(0)
        assert say.plain(first.locator("summary").inner_text()) == "9 processes: 1 suspect heartbeat 7.2 s ago"
        chips = first.locator("li.chip")
        expect(chips).to_have_count(0)
        first.locator("summary").click()
        expect(chips).to_have_count(9)
        assert say.plain(chips.nth(0).inner_text()) == "rank 5 suspect 7.2 s"
        assert say.plain(chips.nth(1).inner_text()) == "scheduler live 0.3 s"
        assert "1 process: 1 dead" in say.row(page, "Engines", "instance-s3")
        assert "2 processes: live" in say.row(page, "Engines", "vllm-prod-1")

    def test_grants_are_oldest_first_and_name_who_has_not_finished(self, page: Page) -> None:
        rows = [say.plain(text) for text in page.locator("#grants tbody tr").all_inner_texts()]
        assert rows[0] == "Lease req-17 instance-s3 1 of 1 closed, waiting for rank 0 20 40.0 MiB 1 min 11 s"
        assert rows[1] == "Lease chatcmpl-8e1f04 epoch 1 vllm-prod-0 4 of 8 ranks 0–2, 5 53 106 MiB 1.4 s"


def test_the_host_is_named_where_the_server_tells_it(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["status"] = say.status(host="gpu-node-3")
    page = open_page(page_server.url)
    assert say.plain(page.locator("#facts").inner_text()) == "host gpu-node-3 version 0.1.0 up 1 d 2 h"
    assert page.title() == "kvdock on gpu-node-3"


def test_reasons_are_listed_when_the_server_is_not_ready(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["status"] = say.status(status="not ready", degraded=say.degraded("prefault: 3 of 12 GiB"))
    page = open_page(page_server.url)
    expect(page.locator("#pill")).to_have_text("Not ready")
    expect(page.locator("#degraded li")).to_have_text([re.compile(r"^prefault: 3 of 12 GiB; since \d\d:\d\d:\d\d$")])


def test_what_is_degraded_is_listed_with_who_has_most_while_slots_are_given_out(
    page_server: PageServer, open_page: OpenPage
) -> None:
    (full,) = say.degraded("every namespace is in use")
    full.most = "most are of tenant a: 600 namespaces"
    page_server.bodies["status"] = say.status(status="degraded", degraded=[full])
    page = open_page(page_server.url)
    expect(page.locator("#pill")).to_have_text("Degraded")
    expect(page.locator("#degraded p")).to_have_text("The server gives out slots, but:")
    expect(page.locator("#degraded li")).to_have_text(
        [re.compile(r"^every namespace is in use; since [\d:]+; most are of tenant a: 600 namespaces$")]
    )
    assert page.title() == "Degraded: kvdock"
    page_server.bodies["status"] = say.status()
    expect(page.locator("#degraded")).to_be_hidden()


def cells(page: Page, row: int) -> dict[str, str]:
    """The row's cells by their column's name."""
    found = page.locator("#requests tbody tr").nth(row).locator("td")
    return {cell.get_attribute("data-head") or "": say.plain(cell.inner_text()) for cell in found.all()}


def test_requests_are_newest_first(page_server: PageServer, open_page: OpenPage) -> None:
    old, new = say.live_requests(2).requests
    new.at, new.tokens, new.took_us = old.at + 5, 4096, 2310
    page_server.bodies["requests"] = Requests(requests=[old, new])
    page = open_page(page_server.url)
    assert (cells(page, 0)["Asked for"], cells(page, 0)["Took"]) == ("4,096", "2.31 ms")


def test_requests_show_where_their_prompts_tokens_came_from_once_the_engine_has_told(
    page_server: PageServer, open_page: OpenPage
) -> None:
    told, untold, ended = say.live_requests(3).requests
    told.outcome, untold.outcome = view_of(Outcome(request="r", prompt_tokens=8200), views.RUNS), None
    ended.kind, ended.tokens, ended.hit_tokens = "ended", 96, 0
    short = [PromptRun(tokens=96, origin="computed", why="short")]
    ended.outcome = view_of(Outcome(request="r", prompt_tokens=96), short)
    page_server.bodies["requests"] = Requests(requests=[told, untold, ended])
    page = open_page(page_server.url)
    expect(page.locator("#requests tbody tr")).to_have_count(3)
    shown = ("Kind", "Asked for", "Prompt", "Own cache", "Loaded", "Computed", "Took")
    assert [cells(page, 0)[head] for head in shown[:-1]] == [
        "Lookup", "512", "8,200", "1,024", "3,072 memory 2,048, tier disk 1,024", "4,104 evicted for a store",
    ]
    assert [cells(page, 1)[head] for head in shown[2:6]] == ["", "", "", ""]
    assert [cells(page, 2)[head] for head in shown] == ["Ended", "–", "96", "0", "0", "96 shorter than a chunk", "–"]
    loaded = page.locator("#requests tbody tr").nth(0).locator("td[data-head=Loaded]")
    assert say.plain(loaded.get_attribute("title")) == (
        "8,200 prompt tokens · own cache 1,024 (12 %) · loaded 3,072 (37 %): memory 2,048, tier disk 1,024 · computed "
        "4,104 (50 %): evicted for a store: 3,584 tokens; never stored: 512 tokens; after the last whole chunk: 8 "
        "tokens"
    )


def test_the_page_has_words_for_every_reason_of_the_server(figures: Page) -> None:
    words = figures.evaluate(
        "names => import('./static/hits.js').then(m => names.map(name => m.reasonWords(name)))", list(COMPUTED)
    )
    assert not set(words) & (set(COMPUTED) - {"deleted"}), "no reason is shown by its name"
    assert len(set(words)) == len(COMPUTED)


LOOKS_UNTIL = """text => {
  window.looks = () => performance.getEntriesByType("resource").filter(n => n.name.endsWith("/v1/status"));
  const before = looks().length, tiles = document.querySelector("#tiles");
  window.found = new Promise(done => new MutationObserver(() => {
    if (tiles.textContent.includes(text)) done(looks().length - before);
  }).observe(tiles, { subtree: true, childList: true, characterData: true }));
}"""
"""Counts how often the page asks for the status until it shows the text."""
SHORTEST_GAP_MS = "() => Math.min(...looks().slice(1).map((look, at) => look.startTime - looks()[at].startTime))"


def test_new_figures_replace_old_ones_within_two_seconds(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.evaluate(LOOKS_UNTIL, "4,711")
    page_server.bodies["status"] = say.status(sessions=4711)
    sessions = page.locator("#tiles .tile").filter(has_text="Engines").locator(".figure")
    expect(sessions).to_have_text("4,711")
    assert page.evaluate("found") <= 2
    eventually(lambda: page.evaluate("looks().length") >= 6)
    assert page.evaluate(SHORTEST_GAP_MS) < 1_500, "a look each second, but where the machine stands still"


# --------------------------------------------------------------------------- charts


def test_a_series_never_heard_of_is_drawn_from_its_description(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["stats"] = say.history(say.series("zebras", "per_s", "wild_life", [1.0, None, 3.5]))
    page = open_page(page_server.url)
    chart = page.locator("figure.chart")
    expect(chart).to_have_count(1)
    expect(chart.get_by_role("heading")).to_have_text("Wild life")
    assert say.plain(chart.locator(".legend").inner_text()) == "Zebras 3.50/s"
    assert (chart.locator(".lines .line").get_attribute("d") or "").count("M") == 2, "a null is a gap"


def test_series_of_one_chart_share_axes_only_in_one_unit(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["stats"] = say.history(
        say.series("a", "bytes", "x", [1.0]), say.series("b", "bytes", "x", [2.0]), say.series("c", "ratio", "x", [0.5])
    )
    page = open_page(page_server.url)
    expect(page.locator("figure.chart")).to_have_count(2)
    assert [chart.locator(".lines .line").count() for chart in page.locator("figure.chart").all()] == [2, 1]


def test_keyboard_reaches_every_chart_and_reads_values(status_page_url: str, open_page: OpenPage) -> None:
    page = open_page(status_page_url)
    charts = page.get_by_role("slider")
    expect(charts.first).to_be_visible()
    names: list[str] = []
    while len(names) < charts.count():
        page.keyboard.press("Tab")
        focus = page.evaluate("[document.activeElement.role, document.activeElement.getAttribute('aria-label')]")
        assert page.evaluate("document.activeElement !== document.body"), "a chart was left out"
        names += [focus[1]] if focus[0] == "slider" else []
    assert names == [chart.get_attribute("aria-label") for chart in charts.all()] and all(names)
    chart = charts.last
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert re.match(r"\d\d:\d\d:\d\d: \S", chart.get_attribute("aria-valuetext") or "")
    page.keyboard.press("Home")
    assert chart.get_attribute("aria-valuenow") == "0"
    page.keyboard.press("End")
    assert chart.get_attribute("aria-valuenow") == chart.get_attribute("aria-valuemax")


def test_pointer_reads_the_value_under_it(page_server: PageServer, open_page: OpenPage) -> None:
    values: list[float | None] = [float(i) for i in range(61)]
    page_server.bodies["stats"] = say.history(say.series("n", "chunks", "n", values))
    page = open_page(page_server.url)
    legend, line = page.locator(".legend b"), page.locator(".lines .line")
    expect(legend).to_have_text("60")
    page.locator(".plot").scroll_into_view_if_needed()
    box = line.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(legend).to_have_text("30")
    page.mouse.move(0, 0)
    expect(legend).to_have_text("60")


# --------------------------------------------------------------------------- nothing there, nobody there


def test_an_empty_server_says_what_to_do_next(open_page: OpenPage) -> None:
    with PageServer(bodies=say.empty_bodies()) as page_server:
        page = open_page(page_server.url)
        words = say.plain(page.locator("#sessions").inner_text())
        assert words == "Engines No engine is attached yet. Try: kvdock bench"
        for panel in ("pool", "history", "grants", "requests"):
            expect(page.locator(f"#{panel} .hint")).to_be_visible()
        expect(page.locator("table.list:visible")).to_have_count(0)


RECORD_PHASES = """() => {
  window.phases = [];
  new MutationObserver(() => phases.push([
    document.body.dataset.phase, document.querySelector("#age").textContent,
    getComputedStyle(document.querySelector("main")).filter,
  ])).observe(document.body, { attributeFilter: ["data-phase"] });
}"""
"""From then on: each new phase, with the age of the figures and the filter through which they are shown."""


def test_a_hanging_server_makes_figures_look_old_then_recovers(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.evaluate(RECORD_PHASES)
    page_server.hang()
    say.wait_phase(page, "gone")
    (stale, age, shown), (gone, *_) = page.evaluate("phases")
    assert (stale, gone, shown) == ("stale", "gone", "grayscale(1)")
    seconds = re.fullmatch(r".*figures are (\d+)\ss old.*", age)
    assert seconds is not None and int(seconds[1]) >= 3, age
    expect(page.get_by_role("alert")).to_contain_text("no answer within 5 s")
    page_server.resume()
    say.wait_phase(page, "live")


def test_a_lost_server_is_announced_and_found_again(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page_server.stop()
    say.wait_phase(page, "gone")
    expect(page.get_by_role("alert")).to_have_text(
        re.compile(r"unreachable since \d\d:\d\d:\d\d: the connection failed\.")
    )
    expect(page.locator("#banner-next")).to_contain_text("keeps trying")
    expect(page.locator("#pill")).to_have_text("Unreachable")
    page_server.start()
    say.wait_phase(page, "live")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#restarted")).to_be_hidden()


RESTARTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"incarnation": 4}, "took over its pool (incarnation 4)"),
    ({"pool_id": "00000000deadbeef"}, "with a new pool (00000000deadbeef)"),
)


def test_a_restart_is_announced_until_it_is_dismissed(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    for change, words in RESTARTS:
        page_server.stop()
        say.wait_phase(page, "gone")
        page_server.bodies["status"] = say.status(**change)
        retry = page.get_by_role("button", name="Try now")
        expect(retry).to_be_visible()
        page_server.start()
        retry.dispatch_event("click")  # the page may have found the server by itself, and then the button is hidden
        say.wait_phase(page, "live")
        expect(page.locator("#restarted")).to_contain_text(words)
        page.get_by_role("button", name="Dismiss").click()
        expect(page.locator("#restarted")).to_be_hidden()


def test_one_failing_path_marks_its_own_panel_only(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.evaluate(RECORD_PHASES)
    page_server.refuse.add("leases")
    note = page.locator("#grants .failed")
    expect(note).to_have_text("Not up to date: v1/leases: it answered 500: on purpose.", timeout=PATIENCE_MS)
    expect(page.locator(".failed:visible")).to_have_count(1)
    say.wait_phase(page, "live")
    assert "gone" not in [phase for phase, *_ in page.evaluate("phases")]
    page_server.refuse.clear()
    expect(note).to_be_hidden(timeout=PATIENCE_MS)


def test_a_failing_path_is_named_in_every_panel_that_shows_it(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    for refused, path, panels in (
        ("segments", "v1/segments?limit=1000", ("pool",)), ("sessions", "v1/sessions", ("grants", "sessions")),
    ):
        page_server.refuse.add(refused)
        for panel in panels:
            note = page.locator(f"#{panel} .failed")
            expect(note).to_have_text(f"Not up to date: {path}: it answered 500: on purpose.", timeout=PATIENCE_MS)
        expect(page.locator(".failed:visible")).to_have_count(len(panels))
        page_server.refuse.clear()
        expect(page.locator(".failed:visible")).to_have_count(0, timeout=PATIENCE_MS)


def test_a_page_opened_while_the_api_fails_says_how_to_start_it(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.refuse.add("status")
    page = open_page(page_server.url, drawn=False)
    expect(page.locator("#first")).to_contain_text("Try: kvdock serve")
    expect(page.get_by_role("alert")).to_contain_text("it answered 500: on purpose")
    page_server.refuse.clear()
    expect(page.locator("#main")).to_be_visible()


FETCHED_AT_ONCE = """show => {
  const fetched = [], real = window.fetch;
  window.fetch = (path, ...options) => { fetched.push(path); return real(path, ...options); };
  show();
  window.fetch = real;
  return fetched;
}"""
"""What the page fetches before show() returns."""


def test_a_hidden_tab_asks_nothing(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    show = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });" \
           " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(show, True)
    asked: list[str] = ["what was under way"]
    page_server.on_path = asked.append
    until = time.monotonic() + PATIENCE_MS / 1000
    while asked and time.monotonic() < until:
        asked.clear()
        page.wait_for_timeout(300)
    asked.clear()
    page.wait_for_timeout(2_500)
    assert asked == []
    assert page.evaluate(f"() => ({FETCHED_AT_ONCE})(() => ({show})(false))") == ["v1/status"]
    eventually(lambda: bool(asked))
