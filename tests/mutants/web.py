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
        "const named = isForReaders(panel) ? [\"whoami\", ...needs, ...uses] : [...needs, ...uses];",
        "const named = needs;",
        ("tests/page/test_page.py", "-k", "failing"), "test_a_failing_path_is_named_in_every_panel_that_shows_it",
    ),
    Mutant(
        "P21a", "the cache is cleared whatever a person answers", "kvdock/web/views/admin.js",
        'verb: "Clear" }))) return "";', 'verb: "Clear" }))) void 0;',
        ("tests/page/test_admin_page.py", "-k", "clearing"),
        "test_clearing_says_what_is_lost_and_does_nothing_until_it_is_confirmed",
    ),
    Mutant(
        "P21b", "shares are drawn by intervals, not by tokens of the last minute", "kvdock/web/rolling.js",
        "series.name in parts\n", "false\n",
        ("tests/page/test_views.py", "-k", "by_tokens"),
        "test_shares_are_those_of_the_last_minute_by_tokens_and_hold_their_last_value",
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
        "P21g", "characters that turn text around are shown as they are", "kvdock/web/format.js",
        "UNSEEN.test(all) ? ", "false ? ",
        ("tests/page/test_reach.py", "-k", "cannot_be_seen"),
        "test_what_cannot_be_seen_or_turns_text_around_is_written_out",
    ),
    Mutant(
        "P21h", "what loads cost is shown as nothing", "kvdock/web/format.js",
        "isLoss(seconds) ? MINUS + positive(-seconds) : ", "isLoss(seconds) ? positive(0) : ",
        ("tests/page/test_views.py", "-k", "has_its_sign"),
        "test_saved_has_its_sign_and_is_marked_where_loads_took_longer",
    ),
    Mutant(
        "P21i", "what was asked for counts as a share", "kvdock/web/hits.js",
        "return asked > 0 && !(hits?.requests > 0) ? ", "return false ? ",
        ("tests/page/test_views.py", "-k", "engines_show"),
        "test_engines_show_what_they_loaded_and_their_copies_beside_what_the_machine_can",
    ),
    Mutant(
        "P21j", "the end of a prompt that fills no chunk counts as missed", "kvdock/web/hits.js",
        ".some(([why]) => !EXPECTED.has(why))", ".length > 0",
        ("tests/page/test_views.py", "-k", "filtered_by_kind"),
        "test_requests_are_filtered_by_kind_and_stay_while_they_are_paused",
    ),
    Mutant(
        "P21k", "the mover counts as an engine", "kvdock/web/views/sessions.js",
        "filter((session) => !isMover(status, session))", "filter(() => true)",
        ("tests/page/test_views.py", "-k", "mover"), "test_the_mover_is_no_engine",
    ),
    Mutant(
        "P21l", "the page asks for lists that it may not see", "kvdock/web/app.js",
        'if (!may("read")) return;', "",
        ("tests/page/test_hostile_pages.py", "-k", "no_refused"), "test_opening_the_page_causes_no_refused_call",
    ),
    Mutant(
        "P21m", "a table that is too wide leaves its card", "kvdock/web/table.js",
        "this.table.offsetWidth <= this.#widthPx + 1", "true",
        ("tests/page/test_reach.py", "-k", "leaves_its_card"), "test_no_table_leaves_its_card_on_a_small_laptop",
    ),
    Mutant(
        "P21f", "events begin anew after the server was away", "kvdock/web/stream.js",
        'if (fields.has("id")) this.#lastId = fields.get("id");', "",
        ("tests/page/test_live.py", "-k", "events"), "test_events_of_a_real_server_are_each_shown_once",
    ),
)
