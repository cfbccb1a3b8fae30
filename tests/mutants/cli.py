"""Breaks of kvdock/cli/: exit statuses and JSON, which scripts rely on, and what people are shown."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P16a", "a refusal, or a server that is gone, ends with 0", "kvdock/cli/main.py",
        "        _fail(error, str(error), FAILED)\n", "        _fail(error, str(error), DONE)\n",
        ("tests/cli/test_cli.py",), "test_an_address_in_use_is_one_sentence",
    ),
    Mutant(
        "P16b", "a problem that the doctor finds ends with 0", "kvdock/cli/doctor.py",
        "return FAILED if problems else DONE", "return DONE",
        ("tests/cli/test_doctor.py",), "test_the_words_say_ok_note_or_problem_and_what_to_do",
    ),
    Mutant(
        "P16c", "saying no to clear ends with 0", "kvdock/cli/admin.py",
        "raise CommandError(refusal, FAILED)", "raise CommandError(refusal, 0)",
        ("tests/cli/test_asks.py", "-k", "clear"), "test_clear_asks_a_person",
    ),
    Mutant(
        "P16d", "a failure prints no JSON to whoever asked for it", "kvdock/cli/main.py",
        "    if wants_json(sys.argv[1:]):\n", "    if False:\n",
        ("tests/cli/test_help.py", "-k", "refusal_of_the_server"),
        "test_a_refusal_of_the_server_keeps_what_the_server_said",
    ),
    Mutant(
        "P16e", "a live view leaves the terminal without its line editing", "kvdock/cli/top.py",
        "termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)", "pass",
        ("tests/cli/test_top.py", "-k", "ends_cleanly"), "test_it_ends_cleanly_and_the_terminal_is_as_it_was",
    ),
    Mutant(
        "P16f", "a lost server looks as if it still answered", "kvdock/cli/top.py",
        "                trouble = str(error)\n", "                pass\n",
        ("tests/cli/test_top.py", "-k", "lost_server"), "test_a_lost_server_is_said_and_comes_back",
    ),
    Mutant(
        "P16g", "the rate of the last minute is that of all that is remembered", "kvdock/cli/status.py",
        "spans = [minute, samples]", "spans = [samples, samples]",
        ("tests/cli/test_status.py", "-k", "last_minute"),
        "test_rates_are_of_the_last_minute_and_of_all_that_is_remembered",
    ),
    Mutant(
        "P16h", "evict by size frees so much more than is free already", "kvdock/cli/admin.py",
        "wanted = free + amount if bytes_text else amount", "wanted = free + amount",
        ("tests/cli/test_change.py", "-k", "makes_so_much_room"), "test_evict_makes_so_much_room",
    ),
    Mutant(
        "P16i", "a setting that is fixed is sent to the server", "kvdock/cli/admin.py",
        "        _require_live(name)\n", "",
        ("tests/cli/test_change.py", "-k", "cannot_be_changed"),
        "test_what_cannot_be_changed_so_is_refused_before_anybody_is_asked",
    ),
)
