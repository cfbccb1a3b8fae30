"""kvdock's log lines among vLLM's, whose logger is made here as vLLM makes it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kvdock.connectors.vllm.setup import OURS, THEIRS, log_among_theirs


@pytest.fixture
def vllm_log() -> Iterator[io.StringIO]:
    """Where vLLM's lines go, at level INFO."""
    before = OURS.level, OURS.propagate, list(OURS.handlers)
    OURS.handlers, written = [], io.StringIO()
    OURS.setLevel(logging.NOTSET)
    handler = logging.StreamHandler(written)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(module)s] %(message)s"))
    THEIRS.addHandler(handler)
    THEIRS.setLevel(logging.INFO)
    yield written
    THEIRS.removeHandler(handler)
    THEIRS.setLevel(logging.NOTSET)
    OURS.propagate, OURS.handlers = before[1:]
    OURS.setLevel(before[0])


def test_lines_look_like_vllms_and_say_whose_they_are(vllm_log: io.StringIO) -> None:
    for _ in range(2):  # both sides of a connector may be in one process
        log_among_theirs()
    logging.getLogger("kvdock.connector").info("attached to %s", "unix:/s")
    logging.getLogger("kvdock.vllm").warning("kvdock server lost")
    logging.getLogger("kvdock.datapath").debug("not for INFO")
    assert vllm_log.getvalue().splitlines() == [
        "INFO [test_vllm_logs] kvdock: attached to unix:/s", "WARNING [test_vllm_logs] kvdock server lost",
    ]


def test_a_line_that_does_not_fit_its_arguments_ends_nobodys_thread(
    vllm_log: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    log_among_theirs()
    logging.getLogger("kvdock.connector").warning("%d chunks", "many")
    assert vllm_log.getvalue() == "" and "%d chunks" in capsys.readouterr().err


@pytest.mark.usefixtures("vllm_log")
def test_who_configured_kvdocks_logger_is_left_alone() -> None:
    OURS.setLevel(logging.ERROR)
    log_among_theirs()
    assert OURS.handlers == [] and OURS.level == logging.ERROR


def test_without_handlers_of_vllm_nothing_is_changed() -> None:
    assert not THEIRS.handlers
    before = list(OURS.handlers), OURS.level, OURS.propagate
    log_among_theirs()
    assert (OURS.handlers, OURS.level, OURS.propagate) == before
