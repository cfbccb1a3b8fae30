"""The status page with hostile text, at any width, with good contrast, in use all day, and its figures."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Literal
from urllib.parse import urlsplit

import page_helpers as say
import page_views as views
import pytest
from page_helpers import PATIENCE_MS, OpenPage, PageServer
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from kvdock.protocol import schemas
from kvdock.protocol.hits import PromptRun
from kvdock.protocol.outcomes import Outcome, view_of
from kvdock.protocol.reports import CopyRates, DayOfHits, HitDays, Leases, UseTotals

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page


# --------------------------------------------------------------------------- trust, reach, comfort

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def test_a_hostile_label_is_shown_as_text(page_server: PageServer, open_page: OpenPage) -> None:
    who = say.session("s1", HOSTILE, HOSTILE, [say.member(HOSTILE, [0])])
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[who])
    page_server.bodies["leases"] = Leases(leases=[say.grant(1, "lease", "s1", HOSTILE, 1, [0])])
    requests = say.live_requests(1)
    requests.requests[0].label = requests.requests[0].request = HOSTILE
    runs = [PromptRun(tokens=1, origin="loaded", source=HOSTILE)]
    requests.requests[0].outcome = view_of(Outcome(request="r", prompt_tokens=1, loaded_tokens=1), runs)
    page_server.bodies["requests"] = requests
    page_server.bodies["stats"] = say.history(say.series(HOSTILE, "bytes", HOSTILE, [1.0]))
    page_server.bodies["status"] = say.status(status="not ready", degraded=say.degraded(HOSTILE), counters={HOSTILE: 1})
    page = open_page(page_server.url)
    for panel in ("sessions", "grants", "requests", "history", "totals"):
        expect(page.locator(f"#{panel}")).to_contain_text("onerror=", ignore_case=True)
    assert page.locator("img").count() == 1 and page.locator("main script").count() == 0
    assert page.title() == "Not ready: kvdock"


def test_no_module_has_a_way_to_turn_text_into_markup() -> None:
    sinks = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc")
    modules = [*files("kvdock.web").iterdir(), *files("kvdock.web").joinpath("views").iterdir()]
    scripts = [module for module in modules if module.name.endswith(".js")]
    assert len(scripts) > 10
    assert [module.name for module in scripts if sinks.search(module.read_text())] == []


def test_the_page_asks_only_its_own_origin_and_logs_no_error(status_page_url: str, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    context.on("request", lambda request: asked.append(request.url))
    page.on("console", listen)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(status_page_url)
    panels = {"/v1/status", "/v1/stats", "/v1/verdict", "/v1/whoami", "/v1/sessions", "/v1/leases", "/v1/hits"}
    until = time.monotonic() + PATIENCE_MS / 1000
    while not {urlsplit(url).path for url in asked} >= panels and time.monotonic() < until:
        page.wait_for_timeout(100)
    page.wait_for_timeout(2_500)
    context.close()
    assert wrong == []
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(status_page_url).netloc}
    assert {urlsplit(url).path for url in asked} >= panels


FRAMES = "() => new Promise(done => { let left = 4; const next = () => left-- ? requestAnimationFrame(next) : done();" \
         " next(); })"
"""Waits for a few frames: charts are drawn at a new width in the next one."""


def test_no_width_scrolls_sideways_even_with_long_names(page_server: PageServer, open_page: OpenPage) -> None:
    long = "x" * 256
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[say.session("s1", long, long, [say.member(long, [0])])])
    page_server.bodies["leases"] = Leases(leases=[say.grant(1, "lease", "s1", long, 8, list(range(0, 8, 2)))])
    requests = say.live_requests(2)
    requests.requests[0].label = requests.requests[0].request = long
    runs = [
        PromptRun(tokens=1 << 28, origin="local"), PromptRun(tokens=1 << 28, origin="loaded", source="memory"),
        PromptRun(tokens=1 << 28, origin="loaded", source=long[:64]),
        PromptRun(tokens=1 << 28, origin="computed", why="declined_dear"),
    ]
    requests.requests[0].outcome = view_of(Outcome(request="r", prompt_tokens=1 << 30), runs)
    page_server.bodies["hits"] = HitDays(
        days=[DayOfHits(date="2026-11-25", tenant="a" * 64, model=long, hits=views.hits(1 << 40, saved_s=-9e6))]
    )
    page_server.bodies["requests"] = requests
    page_server.bodies["status"] = say.with_tiers(status="not ready", degraded=say.degraded(long))
    page = open_page(page_server.url)
    expect(page.get_by_role("slider").first).to_be_visible()
    first_word = "n.innerText.trim().split(/\\s/)[0]"
    whole = f"getComputedStyle(n).textOverflow === 'ellipsis' && n.closest('[title]')?.title.includes({first_word})"
    spill = "[...document.querySelectorAll('main *')].filter(n => !n.closest('thead, .unseen') && n.clientWidth > 1" \
            f" && n.scrollWidth > n.clientWidth + 1 && !({whole})).map(n => n.outerHTML.slice(0, 80))"
    for width in (320, 390, 600, 760, 761, 768, 900, 961, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 844})
        page.evaluate(FRAMES)
        assert (width, page.evaluate("document.documentElement.scrollWidth")) == (width, width)
        assert (width, page.evaluate(spill)) == (width, [])


def test_no_table_leaves_its_card_on_a_small_laptop(page_server: PageServer, open_page: OpenPage) -> None:
    """With all columns, and figures as long as they get."""
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[
        say.session(
            f"s{number}", f"engine-{number}-of-a-long-name", "an-organisation/a-model-with-a-long-name-70B",
            [say.member(f"m{rank}", [rank], "suspect" if rank < 32 else "dead") for rank in range(64)],
            totals=UseTotals(
                lookup_tokens=1 << 40, loaded_bytes=1000 << 40, stored_bytes=1000 << 40,
                hits=views.hits(999 << 30, saved_s=-8e7),
            ),
            copy=CopyRates(load_bytes_per_s=1000 << 30, ceiling_bytes_per_s=1000 << 30), leases=64, reservations=64,
            held_bytes=1000 << 30, age_s=86_400.0 * 364,
        )
        for number in range(5)
    ])
    page = open_page(page_server.url, viewport={"width": 1280, "height": 4000})
    table = page.get_by_role("table", name="Engines")
    for width in (1280, 1366):
        page.set_viewport_size({"width": width, "height": 4000})
        page.evaluate(FRAMES)
        expect(table).to_have_class(re.compile("tight"))
        for shown in page.locator(".panel table:visible").all():
            edges = shown.evaluate("node => [node.offsetWidth, node.parentElement.clientWidth]")
            assert edges[0] <= edges[1], (width, shown.get_attribute("aria-label"))
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.set_viewport_size({"width": 1920, "height": 4000})
        expect(table).not_to_have_class(re.compile("brief|cards"))


def test_tables_keep_their_roles_on_a_phone(status_page_url: str, open_page: OpenPage) -> None:
    page = open_page(status_page_url, viewport={"width": 390, "height": 844})
    page.locator("#requests > summary").click()
    table = page.get_by_role("table", name="Recent requests")
    expect(table.get_by_role("columnheader", name="Own cache")).to_have_count(1)
    expect(table.get_by_role("row").nth(1).get_by_role("cell")).to_have_count(7)
    page.set_viewport_size({"width": 1280, "height": 844})
    expect(table.get_by_role("row").nth(1).get_by_role("cell")).to_have_count(10)


CONTRAST = """() => {
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const ground = (node) => {
    if (!node) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(node).backgroundColor);
    return own[3] === 1 ? own : over(own, ground(node.parentElement));
  };
  const luminance = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const words = [...node.childNodes].filter((n) => n.nodeType === 3 && n.data.trim());
    if (!words.length || !node.checkVisibility() || node.tagName === 'NOSCRIPT') continue;
    const style = getComputedStyle(node), back = ground(node);
    const text = over(rgba(node instanceof SVGElement ? style.fill : style.color), back);
    const [hi, lo] = [luminance(text), luminance(back)].sort((a, b) => b - a);
    let opacity = 1;
    for (let n = node; n; n = n.parentElement) opacity *= +getComputedStyle(n).opacity;
    found.push([(hi + 0.05) / (lo + 0.05), opacity, words[0].data.trim()]);
  }
  return found;
}"""


SCHEMES: tuple[tuple[Literal["light", "dark"], str], ...] = (
    ("light", "rgb(244, 245, 247)"), ("dark", "rgb(14, 18, 23)"),
)
"""Each with the colour of the page's ground."""


@pytest.mark.parametrize("old", [False, True])
def test_every_text_has_contrast_of_at_least_4_5(page_server: PageServer, open_page: OpenPage, old: bool) -> None:
    page_server.bodies["status"] = say.status(
        status="not ready", degraded=say.degraded("prefault"), counters={"mismatches": 2}
    )
    page = open_page(page_server.url, reduced_motion="reduce")
    if old:
        page_server.stop()
        say.wait_phase(page, "gone")
    page.wait_for_function(f"() => ({CONTRAST})().length > 100")  # panels are drawn one after the other
    for scheme, ground in SCHEMES:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        expect(page.locator("body")).to_have_css("background-color", ground)
        found = page.evaluate(CONTRAST)
        assert [(scheme, round(ratio, 2), text) for ratio, _, text in found if ratio < 4.5] == []
        assert {opacity for _, opacity, _ in found} == {1}, "text is never faded: opacity would undo its contrast"


def test_reduced_motion_moves_nothing(status_page_url: str, open_page: OpenPage) -> None:
    moving = "[...document.querySelectorAll('body *')]" \
             ".filter(n => getComputedStyle(n).transitionDuration !== '0s').length"
    page = open_page(status_page_url, reduced_motion="reduce")
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moving) > 0


def test_nodes_do_not_grow_while_everything_changes(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    expect(page.locator("figure.chart")).to_have_count(4)
    count = "document.querySelectorAll('*:not(.ticks.x *)').length"  # the minute decides how many round times it has
    newest = page.locator("#requests tbody tr").first
    seen = []
    for turn in range(1, 5):
        page_server.bodies["requests"] = say.live_requests(14, newest=1_700_000_000.0 + 100 * turn)
        page_server.bodies["leases"] = Leases(
            leases=[say.grant(turn * 10 + i, "lease", "s1", f"turn-{turn}", 8, [i]) for i in range(4)]
        )
        expect(page.locator("#grants tbody")).to_contain_text(f"turn-{turn}")
        expect(newest).to_be_visible()
        seen.append(page.evaluate(count))
    assert len(set(seen)) == 1, seen
    assert all(ticks.locator("text").count() <= 6 for ticks in page.locator(".ticks.x").all())


def test_more_rows_than_the_page_draws_are_counted(page_server: PageServer, open_page: OpenPage) -> None:
    grants = [say.grant(i, "lease", "s1", f"r{i}", 1, [0]) for i in range(500)]
    page_server.bodies["leases"] = Leases(leases=grants)
    page = open_page(page_server.url)
    expect(page.locator("#grants tbody tr")).to_have_count(10)
    page.get_by_role("button", name="and 490 more").click()
    expect(page.locator("#grants tbody tr")).to_have_count(20)
    expect(page.locator("#grants")).to_contain_text("and 480 more")


# --------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("bytes(0)", "0 B"), ("bytes(1023)", "1,023 B"), ("bytes(1024)", "1.00 KiB"), ("bytes(1048575)", "1.00 MiB"),
        ("bytes(13 * 2 ** 30)", "13.0 GiB"), ("count(99999)", "99,999"), ("count(47893120)", "47.9 M"),
        ("share(0)", "0 %"), ("share(0.0004)", "<0.1 %"), ("share(0.9999)", "99.9 %"), ("share(1)", "100 %"),
        ("share(0.0999)", "10 %"), ("share(0.0994)", "9.9 %"),
        ("shareOf(0, 0)", "–"), ("age(0.42)", "0.4 s"), ("age(59.7)", "1 min"), ("age(250)", "4 min 10 s"),
        ("age(86399)", "23 h 59 min"), ("age(356400)", "4 d 3 h"), ("wholeAge(3.9)", "3 s"), ("took(90)", "90 µs"),
        ("took(1320)", "1.32 ms"), ("took(999999)", "1.00 s"), ("rankWords([5, 0, 1, 2])", "ranks 0–2, 5"),
        ("age(-0.02)", "0.0 s"), ("age(-0.05)", "\u22120.1 s"), ("age(-50)", "\u221250 s"),
        ("age(-93784)", "\u22121 d 2 h"), ("savedWords(5400)", "1 h 30 min of computing"),
        ("savedWords(-50)", "\u221250 s: loads took longer than computing"),
        ("rankWords([3])", "rank 3"), ("plural(1, 'chunk')", "1 chunk"), ("plural(2, 'chunk')", "2 chunks"),
    ],
)
def test_figures_read_as_people_write_them(figures: Page, call: str, text: str) -> None:
    assert say.plain(figures.evaluate(f"import('./static/format.js').then(m => m.{call})")) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("safe\u202egpj.exe\u2066\u200f", "safe\\u202egpj.exe\\u2066\\u200f"),
        ("\x1b[31mred\x07\r\n\t\x7f\x85", "\\u001b[31mred\\u0007\\u000d\\u000a\\u0009\\u007f\\u0085"),
        ("a\u200b\u2060\ufeff\u00ad\u034f\u061cb", "a\\u200b\\u2060\\ufeff\\u00ad\\u034f\\u061cb"),
        ("\u2028\u2029\u2003\u3000\u3164\u2800", "\\u2028\\u2029\\u2003\\u3000\\u3164\\u2800"),
        ("\u202f\uffa0\u1160\u180e\U0001d159\U00016fe4", "\\u202f\\uffa0\\u1160\\u180e\\u{1d159}\\u{16fe4}"),
        ("tag\U000e0041 variant\ufe0f private\ue000", "tag\\u{e0041} variant\\ufe0f private\\ue000"),
        ("plain, 12 %, 5\u00a0GiB, näïve, \u05e9\u05dc\u05d5\u05dd, 模型, \U0001f600, e\u0301",
         "plain, 12 %, 5\u00a0GiB, näïve, \u05e9\u05dc\u05d5\u05dd, 模型, \U0001f600, e\u0301"),
    ],
)
def test_what_cannot_be_seen_or_turns_text_around_is_written_out(figures: Page, text: str, shown: str) -> None:
    assert figures.evaluate("text => import('./static/format.js').then(m => m.visible(text))", text) == shown


def test_only_one_module_makes_text() -> None:
    makes = re.compile(r"textContent\s*=[^=]|innerText\s*=[^=]|createTextNode|\.text\s*=[^=]|setAttribute\(\"title")
    modules = [*files("kvdock.web").iterdir(), *files("kvdock.web").joinpath("views").iterdir()]
    assert [module.name for module in modules if module.name.endswith(".js") and makes.search(module.read_text())] == [
        "dom.js"
    ]


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        ("valueAxis(9.3 * 2 ** 30, 'bytes')", ["0 B", "2.5 GiB", "5 GiB", "7.5 GiB", "10 GiB"]),
        ("valueAxis(0, 'chunks')", ["0", "1", "2", "3", "4"]),
        ("valueAxis(0.3, 'ratio')", ["0 %", "25 %", "50 %", "75 %", "100 %"]),
        ("valueAxis(270, 'per_s')", ["0/s", "100/s", "200/s", "300/s"]),
        ("valueAxis(1500, 'no such unit')", ["0", "500", "1,000", "1,500"]),
    ],
)
def test_axes_have_even_round_steps_that_cover_the_data(figures: Page, call: str, texts: list[str]) -> None:
    ticks = figures.evaluate(f"import('./static/scale.js').then(m => m.{call}.ticks.map(t => t.text))")
    assert [say.plain(tick) for tick in ticks] == texts


@pytest.fixture(scope="module")
def figures_in_berlin(browser: Browser) -> Iterator[Page]:
    with say.modules_alone(browser, timezone_id="Europe/Berlin") as page:
        yield page


MARKS = """([endS, spanS]) =>
  import('./static/scale.js').then(m => m.timeTicks(endS, spanS).map(t => t.text).reverse())"""


@pytest.mark.parametrize(
    ("now", "span_s", "texts"),
    [
        ("2026-11-25T14:03:20", 60, ["14:02:30", "14:02:45", "14:03:00", "14:03:15"]),
        ("2026-11-25T14:03:20", 300, ["13:59", "14:00", "14:01", "14:02", "14:03"]),
        ("2026-11-25T02:40:00", 43_200, ["15:00", "18:00", "21:00", "25 Nov"]),
        ("2026-11-25T14:03:20", 14 * 86_400, ["13 Nov", "16 Nov", "19 Nov", "22 Nov", "25 Nov"]),
        ("2026-03-30T12:00:00", 4 * 86_400, ["27 Mar", "28 Mar", "29 Mar", "30 Mar"]),
    ],
)
def test_the_axis_of_time_has_round_times_of_the_reader_s_clock(
    figures_in_berlin: Page, now: str, span_s: int, texts: list[str]
) -> None:
    """The last case passes the night in which Berlin's clocks go forward."""
    end_s = figures_in_berlin.evaluate("text => new Date(text).getTime() / 1000", now)
    assert [say.plain(text) for text in figures_in_berlin.evaluate(MARKS, [end_s, span_s])] == texts
