"""Nothing that a caller chooses can forge, hide or flood what the log says."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from admin_helpers import call
from api_helpers import ServerProcess, attach, eventually, unique
from flood_helpers import until_closed

from kvdock.api.log import MESSAGES, PERIOD_S, SHOWN_CHARACTERS, TEMPLATES, LineFormatter, ServerLog, escaped, shown
from kvdock.client.client import Client

pytestmark = pytest.mark.security

HOSTILE = "a\n2026-01-01 INFO forged\x1b[2J\x07\x00\u202egnp.exe\u2028\x85\r\ud800"
ENDS = ("\n", "\x1b", "\x07", "\x00", "\u202e", "\u2028", "\x85", "\r", "\ud800")


def test_hidden_characters_are_escaped_and_others_stay() -> None:
    text = escaped(HOSTILE)
    assert not any(end in text for end in ENDS)
    assert text.startswith("a\\n2026-01-01 INFO forged\\x1b[2J\\x07\\x00\\u202egnp")
    assert escaped("Müller 漢字 → x") == "Müller 漢字 → x"


def test_what_a_caller_chose_is_cut() -> None:
    assert shown("x" * SHOWN_CHARACTERS) == f"'{'x' * SHOWN_CHARACTERS}'"
    assert shown("x" * 100_000) == f"'{'x' * SHOWN_CHARACTERS}'…"


class Log:
    def __init__(self) -> None:
        self.handler = ServerLog(LineFormatter("%(levelname)s %(message)s"))
        self.handler.setStream(io.StringIO())

    def say(self, template: str, *args: object, at_s: float = 0.0, name: str = "kvdock.api") -> None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, template, args, None)
        record.created = at_s
        self.handler.handle(record)

    @property
    def lines(self) -> list[str]:
        text: str = self.handler.stream.getvalue()
        return text.splitlines()


def test_any_message_is_one_line() -> None:
    log = Log()
    log.say("said %s", HOSTILE)
    assert len(log.lines) == 1 and log.lines[0].startswith("WARNING said a\\n2026")


def test_no_line_of_a_traceback_looks_like_a_message() -> None:
    log = Log()
    try:
        raise ValueError("x\nWARNING forged\x1b")
    except ValueError as error:
        record = logging.LogRecord("k", logging.ERROR, "", 0, "failed\n", (), (ValueError, error, error.__traceback__))
    log.handler.handle(record)
    assert log.lines[0] == "ERROR failed" and all(line.startswith("    ") for line in log.lines[1:])
    assert "    WARNING forged\\x1b" in log.lines


def test_one_callers_refusals_do_not_hide_anothers() -> None:
    log = Log()
    for _ in range(MESSAGES + 5):
        log.say("refused %s: %s", "nobody", "GET /v1/sessions", name="kvdock.audit")
    log.say("refused %s: %s", "token team-a", "POST /v1/cache/clear", name="kvdock.audit")
    assert len(log.lines) == MESSAGES + 1 and "team-a" in log.lines[-1]


def test_messages_of_one_template_are_counted_once_there_are_many() -> None:
    log = Log()
    for number in range(MESSAGES + 412):
        log.say("refused %d", number, at_s=1.0)
    log.say("another", at_s=1.0)
    assert [line for line in log.lines if "refused" in line] == [f"WARNING refused {n}" for n in range(MESSAGES)]
    assert log.lines[-1] == "WARNING another"
    log.say("refused %d", 7, at_s=1.0 + PERIOD_S)
    assert log.lines[-2:] == ["WARNING … 412 more like this: 'refused %d'", "WARNING refused 7"]


def test_no_call_of_an_operator_is_left_out() -> None:
    with ServerProcess() as server:
        for number in range(MESSAGES + 1):
            call(server.http, "PATCH", "/v1/config", {"session_grants": 1000 + number})
        eventually(lambda: f'"session_grants":{1000 + MESSAGES}' in server.log_text())


def test_what_was_not_written_is_counted_at_the_end() -> None:
    log = Log()
    for _ in range(MESSAGES + 2):
        log.say("again")
    log.handler.close()
    assert log.lines[-1] == "WARNING … 2 more like this: 'again'"


def test_templates_without_end_do_not_fill_the_memory() -> None:
    log = Log()
    for number in range(10 * TEMPLATES):
        log.say(f"template {number}")
    assert len(log.lines) == TEMPLATES + MESSAGES


def test_a_dead_members_label_is_one_line_of_the_servers_log() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        name = HOSTILE.replace("\ud800", "")
        attach(client, label=name, member=unique(name)).close()
        eventually(lambda: "is dead" in server.log_text())
        said = next(line for line in server.log_text().split("\n") if "is dead" in line)
        assert "\\n2026-01-01 INFO forged" in said and not any(end in server.log_text() for end in ENDS[1:-1])
        assert not any(line.startswith("2026") for line in server.log_text().split("\n"))


def test_hundreds_of_bad_requests_leave_a_few_lines() -> None:
    with ServerProcess() as server:
        for _ in range(10 * MESSAGES):
            until_closed(server.http, b"GARBAGE\r\n\r\n")
        assert server.stop() == 0
        lines = server.log_text().count("malformed_request (no route)")
        assert lines == MESSAGES, Path(server.log_path).read_text()
        assert f"{9 * MESSAGES} more like this" in server.log_text()
