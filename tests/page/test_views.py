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
from kvdock.protocol.reports import CopyRates, Leases, Prefixes, Requests, Saved, UseTotals

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page


def rows(page: Page, panel: str) -> list[str]:
    return [say.plain(text) for text in page.locator(f"#{panel} tbody tr:visible").all_inner_texts()]


# --------------------------------------------------------------------------- health in words, the tab


def test_health_names_what_needs_attention_and_leads_there(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    said = [say.plain(text) for text in page.locator("#verdict li").all_inner_texts()]
    assert said == [
        "2 processes of vllm-prod-0, instance-s3 are suspect or dead. Show",
        "1 lease is older than 1 min, the oldest 1 min 11 s. Show",
        "Not used now: tier redis, tier objects. Show",
    ]
    links = page.locator("#verdict a").all()
    assert [link.get_attribute("href") for link in links] == ["#sessions", "#grants", "#tiers"]


def test_health_says_so_where_nothing_needs_attention(page_server: PageServer, open_page: OpenPage) -> None:
    page_server.bodies |= {"status": say.status(sessions=1, leases=0), "leases": Leases(leases=[])}
    page_server.bodies["sessions"] = {"sessions": [], "next": None}
    page = open_page(page_server.url)
    expect(page.locator("#verdict li")).to_have_count(1)
    assert say.plain(page.locator("#verdict li").inner_text()) == (
        "Nothing needs attention: 1 engine is attached, 9.24 GiB in 4,731 chunks can be hit."
    )


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


def test_the_main_figures_are_of_the_last_minutes_and_leave_out_what_is_not_known(
    page_server: PageServer, open_page: OpenPage
) -> None:
    rates = [say.series("lookup_tokens", "per_s", "tokens", [100.0, None, 300.0]),
             say.series("hit_tokens", "per_s", "tokens", [100.0, None, 0.0])]
    page_server.bodies["stats"] = say.history(*rates)
    page_server.bodies["status"] = say.status(saved=Saved(tokens=1_000_000, seconds=5_400.0))
    page = open_page(page_server.url)
    tiles = [say.plain(text) for text in page.locator("#tiles .tile").all_inner_texts()]
    assert tiles[0] == "Hit rate 25 % in the last 3.0 s; 78 % since start, of 61.2 M tokens looked up"
    assert tiles[1] == "Saved 1 h 30 min of computing: 1.00 M tokens were loaded instead"
    page_server.bodies["status"] = say.status(saved=Saved(tokens=2_000_000))
    expect(page.locator("#tiles .tile").nth(1)).to_contain_text("tokens were loaded instead of computed")
    page_server.bodies["status"] = say.status()
    expect(page.locator("#tiles .tile").nth(1)).to_contain_text("tokens found, in 18,402")


# --------------------------------------------------------------------------- over time


def test_the_hit_rate_is_that_of_the_last_minute_by_tokens_and_holds_its_last_value(
    page_server: PageServer, open_page: OpenPage
) -> None:
    """Ten tokens that are found weigh less than ninety that are not."""
    asked: list[float | None] = [10.0, 90.0, *[0.0] * 70]
    found: list[float | None] = [10.0, 0.0, *[0.0] * 70]
    page_server.bodies["stats"] = say.history(
        say.series("hit_ratio", "ratio", "hit rate", [1.0, 0.0, *[None] * 70]),
        say.series("lookup_tokens", "per_s", "tokens", asked), say.series("hit_tokens", "per_s", "tokens", found),
    )
    page = open_page(page_server.url)
    chart = page.get_by_role("slider", name="Hit rate, chart")
    chart.focus()
    page.keyboard.press("Home")
    assert "Hit_Ratio 100 %" in say.plain(chart.get_attribute("aria-valuetext"))
    page.keyboard.press("ArrowRight")
    assert "Hit_Ratio 10 %" in say.plain(chart.get_attribute("aria-valuetext"))
    page.keyboard.press("End")
    assert "no data" in say.plain(chart.get_attribute("aria-valuetext")), "nothing was looked up within the minute"
    held = chart.locator(".held").get_attribute("d") or ""
    assert held.count("M") == 1 and "H" in held


def test_the_range_switch_asks_for_hours_and_days(page_server: PageServer, open_page: OpenPage) -> None:
    asked: list[str] = []
    page = open_page(page_server.url)
    page.on("request", lambda request: asked.append(request.url.rpartition("/v1/")[2]))
    page_server.bodies["stats"] = msgspec.structs.replace(say.stats(100), interval_s=3600.0)
    page.get_by_role("radio", name="Days").check()
    expect(page.locator("#history .ticks.x").first).to_contain_text("−4 d")
    assert "stats?over=days" in asked
    with page.expect_request("**/v1/stats?over=hours"):
        page.get_by_role("radio", name="Hours").check()


def test_the_cursor_of_one_chart_is_that_of_all(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    charts = page.get_by_role("slider").all()
    charts[0].focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    heads = [say.plain(text) for text in page.locator("figure.chart .when").all_inner_texts()]
    assert len(heads) == len(charts) > 1 and set(heads) == {"3.0 s earlier"}


# --------------------------------------------------------------------------- what is cached


def test_what_is_cached_is_summed_up_by_model_namespace_and_tenant(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    qwen, llama = views.MODELS[:2]
    expect(page.locator("#cached tbody tr")).to_have_count(3)
    assert rows(page, "cached") == [
        "kvdock-bench-1024 1 namespace, benchmark 800 MiB 400 chunks 70 % of 4.00 M tokens 12 s 8 h 1",
        f"{qwen} 2 namespaces 600 MiB 300 chunks 70 % of 3.00 M tokens 3.0 s 4 h 2",
        f"{llama} 1 namespace 600 MiB 300 chunks 70 % of 3.00 M tokens 9.0 s 6 h 1",
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


def test_engines_show_hits_bytes_and_their_copies_beside_what_the_machine_can(
    page_server: PageServer, open_page: OpenPage
) -> None:
    who = say.live_sessions().sessions[1]
    totals = UseTotals(lookups=9, lookup_tokens=4_000_000, hit_tokens=3_000_000, loaded_tokens=2_000_000,
                       loaded_bytes=5 << 30, stored_bytes=1 << 30, saved_s=90.0)
    copy = CopyRates(load_bytes_per_s=12 << 30, ceiling_bytes_per_s=24 << 30)
    shown = msgspec.structs.replace(who, totals=totals, copy=copy)
    page_server.bodies["sessions"] = schemas.Sessions(sessions=[shown])
    page = open_page(page_server.url, viewport={"width": 1440, "height": 900})
    expect(page.locator("#sessions tbody tr")).to_have_count(1)
    assert "75 % of 4.00 M tokens 5.00 GiB 2.00 M tokens 1.00 GiB 1 min 30 s 12.0 GiB/s of 24.0 GiB/s" in (
        rows(page, "sessions")[0]
    )


# --------------------------------------------------------------------------- the curve


def test_the_curve_says_whether_more_memory_would_help(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    advice = page.locator("#curve .advice")
    expect(advice).to_have_text(
        "A pool of 32\u00a0GiB would raise the hit rate by 8 percentage points, an unlimited one by 12."
    )
    points = [say.plain(text) for text in page.locator("#curve li").all_inner_texts()]
    assert points[0] == "31 % 4 GiB ¼ ×" and points[2] == "63 % 16 GiB now" and points[6] == "75 % any size ∞ ×"
    page_server.bodies["curve"] = views.curve((0.6, 0.63, 0.63, 0.63, 0.63, 0.63, 0.63))
    page.reload()
    expect(advice).to_have_text(
        re.compile("More memory would not raise the hit rate. 8.GiB would find as much.")
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
        "The lookup found 4,096 of 8,192 tokens.", "it was evicted to make room for a store", "loaded 3,072",
        "computed 4,104", "Gone for 1 min 35 s", "Copied at 2.89 GiB/s", "taken 840 ms longer than loading", "fp8_e4m3",
        views.MODELS[0],
    ):
        assert said in say.plain(dialog.inner_text()), said
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent") == request, "the focus is where it was"


def test_a_request_that_the_server_has_forgotten_is_said_so(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url)
    page.locator("#requests button.link").first.click()
    expect(page.locator("#explain .failed")).to_have_text("The server cannot explain it: it answered 404.")
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#explain")).to_be_hidden()


def test_requests_are_filtered_by_kind_and_stay_while_they_are_paused(
    page_server: PageServer, open_page: OpenPage
) -> None:
    page = open_page(page_server.url)
    kinds = page.locator("#requests td[data-head=Kind]")
    expect(page.locator("#requests tbody tr")).to_have_count(10)
    assert set(kinds.all_inner_texts()) == {"Lookup"}, "stores would drown the requests"
    page.locator("#requests select").select_option("store")
    assert set(kinds.all_inner_texts()) == {"Store"}
    page.locator("#requests select").select_option("missed")
    shares = page.locator("#requests td[data-head='Hit rate']").all_inner_texts()
    assert shares and "100 %" not in {say.plain(share) for share in shares}
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
    expect(kinds).to_have_text(["Looked up"])
    page.get_by_label("Show").last.select_option("all")
    expect(events).to_have_count(8)


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
    wanted = {"status", "stats", "sessions", "leases", "config"}

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
    expect(link).to_have_attribute("href", "manual/runbook.md#kvdock_lookups_total")
    page.locator("#totals summary", has_text="1 counter is zero").click()
    expect(page.locator("#totals .inner li").first).to_contain_text("Mismatches")


# --------------------------------------------------------------------------- many


@pytest.mark.parametrize("count", [2, 40, 1000])
def test_the_pool_map_is_readable_however_many_segments_there_are(
    page_server: PageServer, open_page: OpenPage, count: int
) -> None:
    page_server.bodies["segments"] = say.segments(count)
    page = open_page(page_server.url)
    cells = page.locator("#pool .heat li:visible" if count > 12 else "#pool .segments li:visible")
    expect(cells).to_have_count({2: 2, 40: 40, 1000: 250}[count])
    if count > 12:
        assert say.plain(cells.last.get_attribute("title")).startswith(
            {40: "Segment 39: 4.00 GiB", 1000: "Segment 996 to 999: 16.0 GiB"}[count]
        )
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
    expect(page.locator("#verdict")).to_contain_text("A process of engine-150 is dead.")
