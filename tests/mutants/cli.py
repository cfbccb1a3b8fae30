"""Breaks of cli/: exit statuses, which scripts rely on."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P16a", "a refusal, or a server that is gone, ends with 0", "cli/main.py",
        "        _fail(error, str(error), FAILED)\n", "        _fail(error, str(error), DONE)\n",
        ("tests/cli/test_cli.py",), "test_an_address_in_use_is_one_sentence",
    ),
    Mutant(
        "P16b", "a problem that the doctor finds ends with 0", "cli/doctor.py",
        "return FAILED if problems else DONE", "return DONE",
        ("tests/cli/test_doctor.py",), "test_the_words_say_ok_note_or_problem_and_what_to_do",
    ),
    Mutant(
        "P16c", "saying no to clear ends with 0", "cli/change.py",
        "raise CommandError(refusal, FAILED)", "raise CommandError(refusal, 0)",
        ("tests/cli/test_asks.py", "-k", "clear"), "test_clear_asks_a_person",
    ),
)
