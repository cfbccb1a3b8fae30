"""Breaks of kvdock/web/: the page must say when what it shows is old, ask before it changes anything, and count
rightly."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P15a", "figures that are 30 s old count as live", "kvdock/web/api.js",
        "STALE_MS = 3000;", "STALE_MS = 30000;",
        ("tests/page/test_page.py", "-k", "hanging or refused or failing"),
        "test_a_hanging_server_makes_figures_look_old_then_recovers",
    ),
    Mutant(
        "P15b", "no note where a path fails that a panel can do without", "kvdock/web/app.js",
        "[...needs, ...uses].map(", "[...needs].map(",
        ("tests/page/test_page.py", "-k", "failing"), "test_a_failing_path_is_named_in_every_panel_that_shows_it",
    ),
    Mutant(
        "P21a", "the cache is cleared whatever a person answers", "kvdock/web/views/admin.js",
        'verb: "Clear" }))) return "";', 'verb: "Clear" }))) void 0;',
        ("tests/page/test_admin_page.py", "-k", "clearing"),
        "test_clearing_says_what_is_lost_and_does_nothing_until_it_is_confirmed",
    ),
    Mutant(
        "P21b", "the hit rate is drawn by intervals, not by tokens of the last minute", "kvdock/web/rolling.js",
        "series.name === SHARE ? ", "false ? ",
        ("tests/page/test_views.py", "-k", "by_tokens"),
        "test_the_hit_rate_is_that_of_the_last_minute_by_tokens_and_holds_its_last_value",
    ),
    Mutant(
        "P21c", "the tab does not say that the server is gone", "kvdock/web/views/health.js",
        'gone: "Unreachable: ", ', "",
        ("tests/page/test_views.py", "-k", "tab_says"), "test_the_tab_says_that_the_server_is_gone_and_that_it_is_back",
    ),
    Mutant(
        "P21d", "folded panels are asked for as well", "kvdock/web/app.js",
        "of panels.filter((panel) => panel.fold.isOpen)", "of panels",
        ("tests/page/test_views.py", "-k", "folded"), "test_a_folded_panel_costs_the_server_nothing",
    ),
    Mutant(
        "P21e", "only the first page of engines is asked for", "kvdock/web/app.js",
        'every(3), "sessions")', "every(3))",
        ("tests/page/test_views.py", "-k", "two_hundred"),
        "test_two_hundred_engines_are_all_counted_with_those_in_trouble_first",
    ),
    Mutant(
        "P21f", "events begin anew after the server was away", "kvdock/web/stream.js",
        'if (fields.has("id")) this.#lastId = fields.get("id");', "",
        ("tests/page/test_live.py", "-k", "events"), "test_events_of_a_real_server_are_each_shown_once",
    ),
)
