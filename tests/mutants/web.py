"""Breaks of web/: the page must say when what it shows is old."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P15a", "figures that are 30 s old count as live", "web/api.js",
        "STALE_MS = 3000;", "STALE_MS = 30000;",
        ("tests/page/test_page.py", "-k", "hanging or refused or failing"),
        "test_a_hanging_server_makes_figures_look_old_then_recovers",
    ),
    Mutant(
        "P15b", "no note where a path fails that a panel can do without", "web/app.js",
        "[...needs, ...uses].map(", "[...needs].map(",
        ("tests/page/test_page.py", "-k", "failing"), "test_a_failing_path_is_named_in_every_panel_that_shows_it",
    ),
)
