"""Standard streams that are closed, full, or that nobody reads: a command ends in one sentence, and a server serves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from cli_helpers import KVDOCK, SMALL, TIMEOUT_S, clean_environ

from kvdock.api.server import ServiceManager

COMMANDS = ["status", "history --json", "sessions", "config get --json", "quota", "doctor"]


def run(redirection: str, command: str, server: ServerProcess | None = None) -> subprocess.CompletedProcess[str]:
    """`kvdock` in a shell that redirects its streams."""
    environ = clean_environ(KVDOCK_SOCKET_PATH=server.unix.removeprefix("unix:") if server else "/nowhere/kvdock.sock")
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *KVDOCK, *command.split()], env=environ, timeout=TIMEOUT_S,
        capture_output=True, text=True,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_output_is_one_sentence(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, command: str, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = run(">/dev/full", command, server)
    assert done.returncode == 1
    assert done.stderr == "kvdock: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_streams_are_closed_does_its_work(server: ServerProcess, command: str) -> None:
    done = run("<&- >&-", command, server)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_command_whose_reader_has_gone_ends_quietly_by_sigpipe(server: ServerProcess) -> None:
    """As cat does: `kvdock … | head -1` prints nothing else, and pipefail sees 141."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*KVDOCK, "config", "get", "--server", server.unix]
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(command, env=clean_environ(), stdout=closed, stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_sentence_that_cannot_be_written_changes_no_exit_status() -> None:
    assert [run("2>/dev/full", command).returncode for command in ("status", "status --x", "--version")] == [1, 2, 0]


def test_a_refusal_that_cannot_be_written_is_no_traceback() -> None:
    done = run(">/dev/full", "status --json")
    said = done.stderr.splitlines()
    assert done.returncode == 1 and len(said) == 2 and "no server answers" in said[0], done.stderr
    assert said[1] == "kvdock: standard output cannot be written: No space left on device"


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", ">/dev/full", "2>/dev/full"])
def test_a_server_gives_no_socket_the_number_of_a_stream_and_says_to_systemd_that_it_is_ready(
    tmp_path: Path, redirection: str
) -> None:
    messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    messages.bind(str(tmp_path / "notify"))
    messages.settimeout(TIMEOUT_S)
    command = [*KVDOCK, "serve", *SMALL, "--socket-path", str(tmp_path / "kvdock.sock")]
    environ = clean_environ(NOTIFY_SOCKET=str(tmp_path / "notify"))
    shell = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    with messages, subprocess.Popen(shell, env=environ) as process:
        try:
            assert messages.recv(4096).startswith(b"READY=1\n")
            streams = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
            assert not [stream for stream in streams if stream.startswith("socket:")], streams
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("text", ["9" * 5000, "²", "-1", "abc", "1e6"])
def test_a_watchdogs_time_that_is_none_is_left_out(text: str) -> None:
    ServiceManager({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": text}).alive()
