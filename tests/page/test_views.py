"""Each view of the status page: what is cached, the curve, explanations, live events, counters, health in words."""

from __future__ import annotations

import re

import msgspec
import page_helpers as say
import page_views as views
import pytest
from api_helpers import eventually
from page_helpers import OpenPage, PageServer
from playwright.sync_api import Page, expect

from kvdock.protocol import events as e, schemas
from kvdock.protocol.admin_schemas import Namespaces
from kvdock.protocol.reports import (
    CopyRates,
    Effect,
    HitDays,
    Leases,
    Mark,
    Prefixes,
    Requests,
    Series,
    Stats,
    UseTotals,
    Verdict,
)

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page


def rows(page: Page, panel: str) -> list[str]:
    return [say.plain(text) for text in page.locator(f"#{panel} tbody tr:visible").all_inner_texts()]


# --------------------------------------------------------------------------- health in words, the tab


def verdict_rows(page: Page) -> list[tuple[str, str]]:
    """(tone, text) of each sentence at the top."""
    lines = page.locator("#verdict li").all()
    return [(line.get_attribute("data-tone") or "", say.plain(line.inner_text())) for line in lines]


def test_the_server_s_verdict_comes_first(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    expect(page.locator("#verdict li")).to_have_count(3)
    assert verdict_rows(page) == [
        ("good", views.HEADLINE),
        ("bad", "The tier redis is not used: its calls fail or are late. Cost: about 12 % of prompt tokens. "
                "kvdock doctor Show"),
        ("warn", "An engine's process ended without leaving at 2026-11-25 03:12:00. "
                 "kvdock events --kinds dead,suspect Show Acknowledge…"),
    ]
    links = page.locator("#verdict a:visible").all()
    assert [link.get_attribute("href") for link in links] == ["#tiers", "#sessions"]


TONES: dict[Effect, str] = {
    "helping": "good", "costing": "bad", "idle": "info", "not_helping": "info", "not_reported": "info",
    "not_ready": "warn",
}


def test_the_headline_has_the_tone_of_what_the_server_does(page_server: PageServer, open_page: OpenPage) -> None:
    not_ready = views.finding("not_ready", "bad", "No slot can be given out: prefault.")
    page = open_page(page_server.url)
    for effect, tone in TONES.items():
        headline = f"kvdock is up: {effect}."
        page_server.bodies["verdict"] = Verdict(effect=effect, headline=headline, findings=[not_ready])
        page.reload()
        expect(page.locator("#verdict li")).to_contain_text([headline])
        assert verdict_rows(page) == [(tone, headline)], "why it is not ready stands above"


def test_what_has_happened_is_acknowledged_after_a_question(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.answers["/v1/acknowledge"] = {"troubles": 1}
    page = open_page(page_server.url)
    acknowledge = page.get_by_role("button", name="Acknowledge…")
    expect(acknowledge).to_have_count(1)
    acknowledge.click()
    question = page.get_by_role("dialog", name="Acknowledge what has happened?")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    page.wait_for_timeout(300)  # for a call that must not come
    assert page_server.sent == []
    acknowledge.click()
    question.get_by_role("button", name="Acknowledge", exact=True).click()
    expect(page.locator("#verdict")).to_contain_text("Acknowledged.")
    assert page_server.sent == [("POST", "/v1/acknowledge", {})]


def test_the_tab_says_that_the_server_is_gone_and_that_it_is_back(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    icon = page.locator("#icon")
    expect(icon).to_have_attribute("href", "static/favicon.svg")
    page_server.stop()
    say.wait_phase(page, "gone")
    expect(icon).to_have_attribute("href", "static/favicon-gone.svg")
    assert page.title() == "Unreachable: kvdock"
    page_server.start()
    say.wait_phase(page, "live")
    expect(icon).to_have_attribute("href", "static/favicon.svg")
    assert page.title() == "kvdock"


def rates(prompt: list[float | None], loaded: list[float | None], computed: list[float | None]) -> list[Series]:
    """Tokens per second, by interval; the engines' own caches had what is left of the prompts."""
    shares = ("loaded_share", "local_share")
    blank: list[float | None] = [None] * len(prompt)
    return [
        *(say.series(name, "ratio", "Prompt tokens", blank) for name in shares),
        say.series("prompt_tokens", "per_s", "Tokens", prompt), say.series("loaded_tokens", "per_s", "Tokens", loaded),
        say.series("computed_tokens", "per_s", "Tokens", computed),
    ]


def tiles(page: Page) -> list[str]:
    return [say.plain(text) for text in page.locator("#tiles .tile").all_inner_texts()]


def test_the_main_figures_are_shares_of_prompt_tokens_lately_and_since_start(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page_server.bodies["stats"] = say.history(*rates([100.0, None, 300.0], [80.0, None, 20.0], [10.0, None, 270.0]))
    page_server.bodies["status"] = say.status(hits=views.hits(61_204_512))
    page = open_page(page_server.url)
    assert tiles(page)[0] == (
        "Loaded from kvdock 25 % own cache 5.0 %, computed 70 %, in the last 3.0 s; 30 % since start, of 61.2 M prompt "
        "tokens"
    )
    assert tiles(page)[1] == "Saved 1 h 30 min of computing: 18.4 M tokens were loaded instead"
    page_server.bodies["stats"] = say.history(*rates([0.8] * 3, [0.2] * 3, [0.6] * 3))  # the rest is 1e-16, not 0
    expect(page.locator("#tiles .tile").first).to_contain_text("own cache 0\u00a0%, computed 75\u00a0%")
    page_server.bodies["stats"] = say.history(*rates([0.0] * 3, [0.0] * 3, [0.0] * 3))
    expect(page.locator("#tiles .tile").first).to_contain_text(
        "own cache 10\u00a0%, computed 60\u00a0%, since start, of 61.2\u00a0M\u00a0prompt tokens"
    )


def test_saved_has_its_sign_and_is_marked_where_loads_took_longer(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page_server.bodies["status"] = say.status(hits=views.hits(1_000_000, saved_s=-50.2))
    page = open_page(page_server.url)
    saved = page.locator("#tiles .tile").nth(1)
    assert tiles(page)[1] == "Saved −50 s loads took longer than computing: of 300 k tokens"
    expect(saved.locator(".figure")).to_have_class("figure alarm")
    assert saved.locator(".figure").evaluate("node => getComputedStyle(node).color") == "rgb(168, 32, 26)"
    page_server.bodies["status"] = say.status(hits=views.hits(1_000_000, saved_s=None))
    expect(saved).to_contain_text("300 ktokens were loaded instead of computed")
    expect(saved.locator(".figure")).to_have_class("figure")
    page_server.bodies["status"] = say.status(hits=views.NO_HITS)
    expect(saved).to_contain_text("nothing was loaded yet")


def test_without_ended_requests_what_was_asked_for_is_no_hit(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["status"] = say.status(hits=views.NO_HITS)
    page = open_page(page_server.url)
    assert tiles(page)[0] == "Loaded from kvdock – asked for 61.2 M tokens; what was loaded is not reported"
    page_server.bodies["status"] = say.status(hits=views.NO_HITS, counters={})
    expect(page.locator("#tiles .tile").first).to_contain_text("no request has ended yet")


# --------------------------------------------------------------------------- over time


def test_shares_are_those_of_the_last_minute_by_tokens_and_hold_their_last_value(
    page_server: PageServer, open_page: OpenPage
) -> None:
    """Ten tokens that are loaded weigh less than ninety that are not."""
    page_server.bodies["stats"] = say.history(
        *rates([10.0, 90.0, *[0.0] * 70], [10.0, 0.0, *[0.0] * 70], [0.0, 45.0, *[0.0] * 70])
    )
    page = open_page(page_server.url)
    chart = page.get_by_role("slider", name="Prompt tokens, chart")
    chart.focus()
    page.keyboard.press("Home")
    assert "Loaded_Share 100 %, Local_Share 0 %" in say.plain(chart.get_attribute("aria-valuetext"))
    page.keyboard.press("ArrowRight")
    assert "Loaded_Share 10 %, Local_Share 45 %" in say.plain(chart.get_attribute("aria-valuetext"))
    page.keyboard.press("End")
    assert "no data" in say.plain(chart.get_attribute("aria-valuetext")), "no request has ended within the minute"
    held = chart.locator(".held").first.get_attribute("d") or ""
    assert held.count("M") == 1 and "H" in held


def test_charts_have_the_reader_s_clock_on_their_axis(page_server: PageServer, open_page: OpenPage) -> None:
    """The newest point is as old as the server says, by the reader's clock."""
    page_server.bodies["stats"] = msgspec.structs.replace(say.stats(61), age_s=5.0)
    page = open_page(page_server.url, now="2026-11-25T03:12:40Z", timezone_id="Europe/Berlin")
    ticks = page.locator("#history figure.chart").first.locator(".ticks.x text")
    expect(ticks.first).to_be_visible()
    assert sorted(ticks.all_text_contents()) == ["04:11:45", "04:12:00", "04:12:15", "04:12:30"]
    chart = page.get_by_role("slider").first
    chart.focus()
    page.keyboard.press("Home")
    assert (chart.get_attribute("aria-valuetext") or "").startswith("04:11:35: ")


def test_a_range_is_chosen_by_keyboard_and_kept_for_the_tab(page_server: PageServer, open_page: OpenPage) -> None:
    """The axis is as long as the range, however much of it the server has."""
    asked: list[str] = []
    page = open_page(page_server.url, now="2026-11-25T09:00:00Z", timezone_id="Europe/Berlin")
    page.on("request", lambda request: asked.append(request.url.rpartition("/v1/")[2]))
    page_server.bodies["stats"] = msgspec.structs.replace(say.stats(100), interval_s=1800.0)
    page.get_by_role("radio", name="Live").focus()
    with page.expect_request("**/v1/stats?over=days"):
        for _ in range(6):
            page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="7 days")).to_be_checked()
    ticks = page.locator("#history .ticks.x").first
    expect(ticks).to_contain_text("19\u00a0Nov")
    chart = page.get_by_role("slider").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert say.plain(chart.get_attribute("aria-valuetext")).startswith("25 Nov, 09:29: ")
    page.get_by_role("radio", name="24 h").check()
    expect(ticks).to_contain_text("06:00")
    assert chart.get_attribute("aria-valuemax") == "47"
    asked.clear()
    page.reload()
    expect(page.get_by_role("radio", name="24 h")).to_be_checked()
    expect(ticks).to_contain_text("06:00")
    assert {path for path in asked if path.startswith("stats")} == {"stats?over=days"}
    page_server.bodies["stats"] = msgspec.structs.replace(say.stats(700), interval_s=60.0)
    with page.expect_request("**/v1/stats?over=hours"):
        page.get_by_role("radio", name="15 min").check()
    expect(chart).to_have_attribute("aria-valuemax", "14")


def test_the_figures_of_a_range_stay_until_those_of_another_have_come(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    line = page.locator("#history .lines .line").first
    before = line.get_attribute("d")
    assert before
    page.route("**/v1/stats?over=hours", lambda route: None)  # unanswered
    page.get_by_role("radio", name="15 min").check()
    page.wait_for_timeout(1_500)
    assert line.get_attribute("d") == before


def marked_stats() -> Stats:
    """An hour by the minute: ten minutes without samples, a start after them, and a larger pool later. Half of the
    first part has no requests."""
    shares: list[float | None] = [0.5] * 10 + [None] * 10 + [None] * 10 + [0.25] * 30
    free: list[float | None] = [4.0] * 20 + [None] * 10 + [8.0] * 30
    pool = say.series("free_bytes", "bytes", "Pool", free)
    marks = [
        Mark(age_s=90 * 60.0, kind="started"), Mark(age_s=30 * 60.0, kind="started"),
        Mark(age_s=10 * 60.0, kind="limits", limits=["pool_bytes", "quotas"], pool_bytes=8 << 20),
    ]
    shared = say.series("share", "ratio", "Prompt tokens", shares)
    return Stats(interval_s=60.0, age_s=0.0, series=[shared, pool], marks=marks)


def test_starts_and_changes_of_limits_are_marked_and_told(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["stats"] = marked_stats()
    page = open_page(page_server.url, now="2026-11-25T09:00:00Z", timezone_id="Europe/Berlin")
    page.get_by_role("radio", name="1 h", exact=True).check()
    told = page.get_by_role("list", name="Marks in the charts, the latest first").get_by_role("listitem")
    expect(told).to_have_count(3)
    assert [say.plain(text) for text in told.all_inner_texts()] == [
        "25 Nov, 09:50: limits changed: pool size 8.00 MiB, quotas of tenants",
        "25 Nov, 09:30: the server was started",
        "25 Nov, 09:20: no samples for 10 min: no server ran, or it was stopped",
    ]
    figure = page.locator("#history figure.chart").first
    kinds = figure.locator(".axis-marks g")
    assert [one.get_attribute("data-kind") for one in kinds.all()] == ["started", "limits"]
    places = figure.evaluate(
        "node => [...node.querySelectorAll('.axis-marks line')].map(n => +n.getAttribute('x1'))"
    )
    left, right = figure.evaluate(
        "node => { const line = node.querySelector('.ticks line');"
        " return [+line.getAttribute('x1'), +line.getAttribute('x2')] }"
    )
    assert [(place - left) / (right - left) for place in places] == pytest.approx([29 / 59, 49 / 59], abs=0.01)
    chart = page.get_by_role("slider").first
    chart.focus()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    text = say.plain(chart.get_attribute("aria-valuetext"))
    assert text.startswith("25 Nov, 09:50, limits changed: pool size 8.00 MiB, quotas of tenants: ")


def test_a_time_without_samples_is_a_gap_and_nothing_is_drawn_across_it(
    page_server: PageServer, open_page: OpenPage
) -> None:
    """Where there was merely nothing to measure, the last share goes on as a thin line."""
    page_server.bodies["stats"] = marked_stats()
    page = open_page(page_server.url)
    page.get_by_role("radio", name="1 h", exact=True).check()
    chart = page.get_by_role("slider").first
    expect(chart).to_have_attribute("aria-valuemax", "59")
    for plot in page.locator("#history .plot").all():
        gap = plot.locator("rect.gap")
        expect(gap).to_have_count(1)
        left = float(gap.get_attribute("x") or 0)
        right = left + float(gap.get_attribute("width") or 0)
        for path in plot.locator(".held, .line, .area").all():
            drawn = path.get_attribute("d") or ""
            for piece in filter(None, drawn.split("M")):
                at = [float(x) for x in re.findall(r"(?:^|[LH])(-?[\d.]+)", piece)]
                assert max(at) <= left + 0.2 or min(at) >= right - 0.2, (drawn, left, right)
    held = page.locator("#history .held").first.get_attribute("d") or ""
    assert held.count("M") == 1, "from the last share to the gap"
    chart.focus()
    for _ in range(35):
        page.keyboard.press("ArrowLeft")
    assert say.plain(chart.get_attribute("aria-valuetext")).endswith("Share no sample")
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    assert say.plain(chart.get_attribute("aria-valuetext")).endswith("Share no data")


def test_the_shares_of_a_minute_do_not_cross_a_time_without_samples(
    page_server: PageServer, open_page: OpenPage
) -> None:
    values: list[float | None] = [10.0] * 20 + [None] * 20 + [10.0] * 20
    page_server.bodies["stats"] = say.history(*rates(values, values, [None if one is None else 0.0 for one in values]))
    page = open_page(page_server.url)
    expect(page.locator("#history rect.gap").first).to_be_visible()
    line = page.locator("#history .lines .line").first.get_attribute("d") or ""
    assert line.count("M") == 2


def test_the_first_tab_stop_leads_past_the_head_of_the_page(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the figures")
    expect(skip).to_be_focused()
    box = skip.bounding_box()
    assert box is not None and box["y"] >= 0, "it is shown while it has the focus"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


def test_the_cursor_of_one_chart_is_that_of_all(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    charts = page.get_by_role("slider").all()
    charts[0].focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    heads = page.locator("figure.chart .when").all_inner_texts()
    assert len(heads) == len(charts) > 1 and len(set(heads)) == 1
    assert re.fullmatch(r"\d\d:\d\d:\d\d", heads[0])


# --------------------------------------------------------------------------- what is cached


def test_what_is_cached_is_summed_up_by_model_namespace_and_tenant(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    qwen, llama = views.MODELS[:2]
    expect(page.locator("#cached tbody tr")).to_have_count(3)
    assert rows(page, "cached") == [
        "kvdock-bench-1024 1 namespace, benchmark 800 MiB 400 chunks 30 % of 4.00 M tokens 12 s 8 h 1",
        f"{qwen} 2 namespaces 600 MiB 300 chunks 30 % of 3.00 M tokens 3.0 s 4 h 2",
        f"{llama} 1 namespace 600 MiB 300 chunks 30 % of 3.00 M tokens 9.0 s 6 h 1",
    ]
    page.get_by_role("radio", name="Namespace").check()
    expect(page.locator("#cached tbody tr")).to_have_count(4)
    assert f"020202020202 {qwen}, tenant research 400 MiB" in " | ".join(rows(page, "cached"))
    page.get_by_role("radio", name="Tenant").check()
    assert [row.split(" 2", 1)[0] for row in rows(page, "cached")][-1].startswith("research")
    assert rows(page, "cached")[0].startswith("the server's own user 3 namespaces")


def test_prefixes_show_age_and_use_and_can_be_removed(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.get_by_role("radio", name="Prefix").check()
    expect(page.locator("#cached tbody tr:visible")).to_have_count(10)
    first = f"010101010101 {views.MODELS[0]} 2,048 16.0 MiB 8 chunks 1,000 12 s 1 h Keep… Remove…"
    assert rows(page, "cached")[0] == first
    page_server.answers["/v1/chunks/delete"] = {"chunks": 1}
    page.get_by_role("button", name="Remove the prefix 020202020202").click()
    question = page.get_by_role("dialog", name="Remove the prefix 020202020202?")
    expect(question).to_contain_text("None of its 4,096\u00a0tokens will be found any more")
    page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    page.wait_for_timeout(300)  # for a call that must not come
    assert page_server.sent == []
    page.get_by_role("button", name="Remove the prefix 020202020202").click()
    question.get_by_role("button", name="Remove", exact=True).click()
    expect(question).to_be_hidden()
    eventually(lambda: len(page_server.sent) == 1)
    assert page_server.sent == [("POST", "/v1/chunks/delete", {"namespace": "01" * 32, "keys": ["02" * 32]})]
    expect(page.locator("#cached tbody tr:visible").nth(1)).to_contain_text("Removed.")


def test_what_most_uses_of_a_prefix_find_can_be_kept_after_a_question(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page_server.bodies["prefixes"] = Prefixes(
        prefixes=[views.prefix(2), views.prefix(3, uses=0)], prefix_count=2, counted_s=0.1
    )
    page = open_page(page_server.url)
    page.get_by_role("radio", name="Prefix").check()
    page_server.answers["/v1/pins"] = {"chunks": 1}
    keep = page.get_by_role("button", name="Keep the prefix 020202020202")
    question = page.get_by_role("dialog", name="Keep the prefix 020202020202?")
    keep.click()
    expect(question).to_contain_text("Its first 1,024\u00a0tokens, which at least half of its uses found")
    expect(question).to_contain_text(f"use its key under \"Administration\": {'02' * 16}{'fe' * 16}.")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    page.wait_for_timeout(300)  # for a call that must not come
    assert page_server.sent == []
    keep.click()
    question.get_by_label("For").select_option("43200")
    question.get_by_role("button", name="Keep", exact=True).click()
    row = page.locator("#cached tbody tr:visible")
    expect(row.first).to_contain_text("Kept for 12 hours.")
    body = {"namespace": "01" * 32, "keys": ["02" * 16 + "fe" * 16], "duration_s": 43200}
    assert page_server.sent == [("POST", "/v1/pins", body)]
    page_server.answers["/v1/pins"] = {"chunks": 0}
    page.get_by_role("button", name="Keep the prefix 030303030303").click()
    unused = page.get_by_role("dialog", name="Keep the prefix 030303030303?")
    expect(unused).to_contain_text("The longest prefix that begins with it, 1,536\u00a0tokens")
    unused.get_by_role("button", name="Keep", exact=True).click()
    expect(row.nth(1)).to_contain_text("No chunk of that key can be hit in this namespace.")


def test_an_older_server_s_namespaces_are_shown_without_what_it_does_not_tell(
    page_server: PageServer, open_page: OpenPage
) -> None:
    fields = ("namespace", "tenant", "manifest", "chunk_bytes", "sessions")
    plain = {field: value for field, value in msgspec.to_builtins(views.namespace(1, "m")).items() if field in fields}
    page_server.bodies["namespaces"] = {"namespaces": [plain]}
    del page_server.bodies["prefixes"]
    page = open_page(page_server.url)
    expect(page.locator("#cached tbody tr")).to_have_count(1)
    assert rows(page, "cached") == ["m 1 namespace 1"]
    expect(page.get_by_role("radio", name="Prefix")).to_be_hidden()


def test_engines_show_what_they_loaded_and_their_copies_beside_what_the_machine_can(
    page_server: PageServer, open_page: OpenPage
) -> None:
    _, who, other = say.live_sessions().sessions
    totals = UseTotals(lookups=9, lookup_tokens=3_500_000, loaded_bytes=5 << 30, stored_bytes=1 << 30,
                       hits=views.hits(4_000_000, saved_s=90.0))
    copy = CopyRates(load_bytes_per_s=12 << 30, ceiling_bytes_per_s=24 << 30)
    shown = msgspec.structs.replace(who, totals=totals, copy=copy)
    asks = msgspec.structs.replace(other, totals=UseTotals(lookups=2, lookup_tokens=250_000))
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[shown, asks])
    page = open_page(page_server.url, viewport={"width": 1440, "height": 900})
    expect(page.locator("#sessions tbody tr")).to_have_count(2)
    silent, told = rows(page, "sessions")
    assert "30 % of 4.00 M tokens 5.00 GiB 1.00 GiB 1 min 30 s 12.0 GiB/s of 24.0 GiB/s" in told
    assert "asked for 250 k loads not reported 0 B 0 B –" in silent and "%" not in silent
    title = page.locator("#sessions td[data-head=Loaded]").first.get_attribute("title")
    assert say.plain(title) == "Asked for 250 k tokens; what was loaded is not reported"


def test_an_engine_whose_loads_took_longer_than_computing_is_marked(
    page_server: PageServer, open_page: OpenPage
) -> None:
    who = say.live_sessions().sessions[1]
    costly = msgspec.structs.replace(who, totals=UseTotals(hits=views.hits(1_000, saved_s=-3_720.0)))
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[costly])
    page = open_page(page_server.url)
    saved = page.locator("#sessions td[data-head=Saved]")
    expect(saved.locator(".alarm")).to_have_text("−1\u00a0h\u00a02\u00a0min")
    assert say.plain(saved.get_attribute("title")) == "−1 h 2 min: loads took longer than computing"


def test_the_mover_is_no_engine(page_server: PageServer, open_page: OpenPage) -> None:
    """It has a session in each namespace, which only says who holds a lease."""
    mover = say.session("s9", schemas.MOVER_LABEL, views.MODELS[0], [say.member("mover", [0], "dead")],
                        namespace="01" * 32)
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[*say.live_sessions().sessions, mover])
    page_server.bodies["leases"] = Leases(leases=[say.grant(1, "lease", "s9", "load-1", 1, [0])])
    named = views.namespace(1, views.MODELS[0], sessions=1)
    page_server.bodies["namespaces"] = Namespaces(namespaces=[named])
    page = open_page(page_server.url)
    expect(page.locator("#sessions tbody tr")).to_have_count(3)
    expect(page.locator("#sessions")).not_to_contain_text(schemas.MOVER_LABEL)
    expect(page.locator("#verdict")).not_to_contain_text(schemas.MOVER_LABEL)
    expect(page.locator("#grants")).to_contain_text(schemas.MOVER_LABEL)
    expect(page.locator("#cached td[data-head=Engines]")).to_have_text("1")
    assert tiles(page)[3] == "Engines 3 attached; 2 processes in trouble"


# --------------------------------------------------------------------------- by day


def test_days_show_where_prompts_tokens_came_from_the_latest_first(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    expect(page.locator("#days tbody tr")).to_have_count(3)
    qwen, llama = views.MODELS[:2]
    assert rows(page, "days") == [
        f"2026-11-25 the server's own user {qwen} 1.00 M 100 k 10 % 300 k 30 %, memory 250 k, tier disk 50,000 "
        "600 k 60 %, never stored −50 s",
        f"2026-11-24 the server's own user {qwen} 2.00 M 200 k 10 % 600 k 30 %, memory 500 k, tier disk 100 k "
        "1.20 M 60 %, never stored 1 h 30 min",
        f"2026-11-24 research {llama} 500 k 50,000 10 % 150 k 30 %, memory 125 k, tier disk 25,000 "
        "300 k 60 %, never stored 1 h 30 min",
    ]
    expect(page.locator("#days .alarm")).to_have_text(["−50\u00a0s"])
    page.locator("#days > summary").click()
    expect(page.locator("#days .digest")).to_have_text(
        "2026-11-25: 30\u00a0% of 1.00\u00a0M prompt tokens were loaded"
    )


def test_without_ended_requests_there_is_no_day(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies["hits"] = HitDays(days=[])
    page = open_page(page_server.url)
    expect(page.locator("#days .hint")).to_contain_text("No request has ended yet.")
    expect(page.locator("#days table")).to_be_hidden()


# --------------------------------------------------------------------------- the curve


def test_the_curve_says_whether_more_memory_would_help(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    advice = page.locator("#curve .advice")
    expect(advice).to_have_text(
        "A pool of 64\u00a0GiB would find 11 percentage points more of what is asked for, an unlimited one 12."
    )
    points = [say.plain(text) for text in page.locator("#curve li").all_inner_texts()]
    assert points[0] == "31 % 4 GiB ¼ ×" and points[2] == "63 % 16 GiB now" and points[6] == "75 % any size ∞ ×"
    expect(page.locator("#curve .after")).to_contain_text("It may be off by 1.2 percentage points.")
    page_server.bodies["curve"] = views.curve((0.0, 0.0, 0.01, 0.03, 0.12, 0.66, 0.67))
    page.reload()
    expect(advice).to_have_text(
        "A pool of 128\u00a0GiB would find 65 percentage points more of what is asked for, an unlimited one 66."
    )
    page_server.bodies["curve"] = views.curve((0.6, 0.63, 0.63, 0.63, 0.63, 0.63, 0.63))
    page.reload()
    expect(advice).to_have_text(
        re.compile("More memory would not find more. 8.GiB would find as much.")
    )
    page.locator("#curve select").select_option("tenant research")
    expect(page.locator("#curve .hint")).to_be_visible()


def test_a_server_without_the_curve_shows_no_panel_for_it(page_server: PageServer, open_page: OpenPage) -> None:
    del page_server.bodies["curve"]
    page = open_page(page_server.url)
    expect(page.locator("#curve")).to_be_hidden()
    expect(page.locator("#cached")).to_be_visible()


# --------------------------------------------------------------------------- requests


def test_a_click_on_a_request_explains_it(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    name = page.locator("#requests button.link").first
    request = name.inner_text()
    page_server.bodies[f"requests/{request}/explain"] = views.explanation(request)
    name.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Request {request}")
    expect(dialog.get_by_role("heading", name="Where")).to_be_visible()
    for said in (
        "The lookup was answered with 4,096 of 8,192 tokens.", "they were evicted to make room for a store",
        "A larger pool keeps chunks longer", "Answered with 4,096 tokens (50 %)", "Not given 2,048 tokens",
        "Gone for 1 min 35 s", "Copied at 2.89 GiB/s", "0.8 s of computing.", "fp8_e4m3", views.MODELS[0],
    ):
        assert said in say.plain(dialog.inner_text()), said
    expect(dialog.locator("code")).to_have_text(["kvdock size"])
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent") == request, "the focus is where it was"


def test_the_bar_of_a_request_shows_the_runs_of_its_prompt_in_their_order(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    name = page.locator("#requests button.link").first
    page_server.bodies[f"requests/{name.inner_text()}/explain"] = views.explanation(name.inner_text())
    name.click()
    bar = page.get_by_role("dialog").get_by_role("img")
    expect(bar).to_be_visible()
    assert say.plain(bar.get_attribute("aria-label")) == (
        "The prompt from its start: 1,024 the engine had; 2,048 loaded from memory; 1,024 loaded from tier disk; "
        "2,048 computed: evicted for a store; 512 computed: never stored; 1,536 computed: evicted for a store; "
        "8 computed: after the last whole chunk"
    )
    pieces = bar.locator("span").all()
    assert [piece.get_attribute("class") for piece in pieces] == [
        "state local p0", "state loaded p0", "state loaded p1", "state computed p0", "state computed p1",
        "state computed p0", "state computed p2",
    ]
    local, memory = [piece.evaluate("node => node.offsetWidth") for piece in pieces[:2]]
    assert memory == pytest.approx(2 * local, rel=0.03)
    legend = [say.plain(text) for text in page.locator("#explain .legend li").all_inner_texts()]
    assert legend == [
        "the engine had 1,024", "loaded from memory 2,048", "loaded from tier disk 1,024",
        "computed: evicted for a store 3,584", "computed: never stored 512", "computed: after the last whole chunk 8",
    ]


def test_a_request_that_the_server_has_forgotten_is_said_so(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.locator("#requests button.link").first.click()
    expect(page.locator("#explain .failed")).to_have_text("The server cannot explain it: it answered 404.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#explain")).to_be_hidden()


def test_requests_are_filtered_by_kind_and_stay_while_they_are_paused(
    page_server: PageServer, open_page: OpenPage
) -> None:
    whole = page_server.bodies["requests"].requests[0]
    whole.outcome = say.outcome(whole.tokens, whole.tokens, "late")  # its last tokens fill no chunk
    page = open_page(page_server.url)
    kinds = page.locator("#requests td[data-head=Kind]")
    expect(page.locator("#requests tbody tr")).to_have_count(10)
    assert set(kinds.all_inner_texts()) == {"Lookup"}, "stores would drown the requests"
    page.locator("#requests select").select_option("store")
    assert set(kinds.all_inner_texts()) == {"Store"}
    page.locator("#requests select").select_option("missed")
    computed = [say.plain(text) for text in page.locator("#requests td[data-head=Computed]").all_inner_texts()]
    assert len(computed) == 3 and all(text.endswith(("the load failed", "the answer was late")) for text in computed)
    page.locator("#requests select").select_option("all")
    page.get_by_role("button", name="Pause").click()
    before = rows(page, "requests")
    newer = say.live_requests(14, newest=1_700_000_100.0).requests + say.live_requests().requests
    page_server.bodies["requests"] = Requests(requests=newer)
    expect(page.locator("#requests [role=status]")).to_have_text("paused; 14 newer")
    assert rows(page, "requests") == before
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#requests [role=status]")).to_have_text("")
    assert rows(page, "requests") != before


# --------------------------------------------------------------------------- events


def test_events_come_as_they_happen_newest_first_and_by_kind(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    events = page.locator("#events li")
    expect(events).to_have_count(5)
    kinds = page.locator("#events li b")
    shown = kinds.all_inner_texts()
    assert shown == ["Dead", "Limits changed", "Suspect", "Grown", "Attached"], "not what comes every second"
    assert say.plain(events.nth(1).inner_text()).endswith("changed pool 8.00 GiB → 16.0 GiB · source call")
    assert "silent 7.2 s" in say.plain(events.nth(2).inner_text())
    page_server.bodies["events"].append(views.event(8, e.Shrunk(segment=1, allocated_bytes=8 << 30)))
    expect(kinds.first).to_have_text("Shrunk")
    page.get_by_label("Show").last.select_option("requests")
    expect(kinds).to_have_text(["Request ended", "Looked up"])
    assert "loaded memory 2,048, disk 1,024 · computed room 4,104" in say.plain(events.first.inner_text())
    assert "saved −0.4 s" in say.plain(events.first.inner_text())
    page.get_by_label("Show").last.select_option("all")
    expect(events).to_have_count(9)


def test_events_that_are_not_followed_wait_and_are_counted(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    events = page.locator("#events li")
    expect(events).to_have_count(5)
    page.get_by_role("button", name="Follow").click()
    page_server.bodies["events"].append(views.event(9, e.Shrunk(segment=1, allocated_bytes=8 << 30)))
    expect(page.locator("#events [role=status]")).to_have_text("paused; 1 newer")
    expect(events).to_have_count(5)
    page.get_by_role("button", name="Follow").click()
    expect(events).to_have_count(6)


def test_events_go_on_after_the_server_was_away_and_say_so_meanwhile(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    events = page.locator("#events li")
    expect(events).to_have_count(5)
    page_server.stop()
    expect(page.locator("#events .failed").first).to_contain_text("No events: the connection failed.")
    page_server.start()
    expect(page.locator("#events .failed").first).to_be_hidden()


def test_a_folded_panel_costs_the_server_nothing(page_server: PageServer, open_page: OpenPage) -> None:
    asked: set[str] = set()
    page_server.on_path = asked.add
    page = open_page(page_server.url, viewport={"width": 390, "height": 844})
    wanted = {"status", "stats", "verdict", "whoami", "sessions", "leases", "config"}

    def calls() -> set[str]:
        return {path.removeprefix("/v1/") for path in list(asked) if path.startswith("/v1/")}

    eventually(lambda: calls() >= wanted)
    page.wait_for_timeout(2_500)  # for a call that must not come
    assert calls() == wanted
    page.locator("#requests > summary").click()
    expect(page.locator("#requests tbody tr").first).to_be_visible()
    assert "/v1/requests" in asked


# --------------------------------------------------------------------------- counters


def test_a_counter_explains_itself_in_the_server_s_words_and_zeros_are_folded(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    names = [say.plain(text) for text in page.locator("#totals summary:visible").all_inner_texts()]
    assert "1 counter is zero" in names[-1] and not any("Mismatches" in name for name in names)
    page.locator("#totals .counter summary", has_text="Lookups").click()
    shown = page.locator("#totals details[open] p:visible")
    expect(shown).to_have_text("Lookups, repeats within an epoch not counted.")
    link = page.locator("#totals .counter[open] a:visible")
    expect(link).to_have_attribute("href", "manual/operate/metrics_totals.md#kvdock_lookups_total")
    page.locator("#totals summary", has_text="1 counter is zero").click()
    expect(page.locator("#totals .inner li").first).to_contain_text("Mismatches")


# --------------------------------------------------------------------------- many


def test_the_pool_map_is_readable_however_many_segments_there_are(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    for count, shown, last in (
        (2, 2, ""), (40, 40, "Segment 39: 4.00 GiB"), (1000, 250, "Segment 996 to 999: 16.0 GiB"),
    ):
        page_server.bodies["segments"] = say.segments(count)
        cells = page.locator("#pool .heat li:visible" if last else "#pool .segments li:visible")
        expect(cells).to_have_count(shown)
        if last:
            assert say.plain(cells.last.get_attribute("title")).startswith(last)
            expect(page.locator("#pool")).to_contain_text(f"{count:,}\u00a0segments: 0 full, 0 empty.")
        assert page.locator("#pool").evaluate("node => node.clientHeight") < 900


def test_two_hundred_engines_are_all_counted_with_those_in_trouble_first(
    page_server: PageServer, open_page: OpenPage
) -> None:
    each = [say.session(f"s{i}", f"engine-{i}", "model", [say.member(f"m{i}", [0])]) for i in range(200)]
    each[150].members[0].state = "dead"
    page_server.bodies["status"] = say.status(sessions=200)
    page_server.pages["sessions"] = 64
    page_server.bodies["sessions"] = schemas.Sessions(sessions=each)
    page = open_page(page_server.url)
    expect(page.locator("#sessions tbody tr")).to_have_count(12)
    expect(page.locator("#sessions .more")).to_have_text("and 188 more")
    expect(page.locator("#sessions tbody tr").first).to_contain_text("engine-150")
