"""SIGHUP: the server reads its settings and access tokens again, and goes on."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from api_helpers import NOBODYS, access_file, eventually, raw
from cli_helpers import first_line, kvdock, kvdock_serve, refusal

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import PatchConfig

NEW = "newcomer-" + "n" * 40


@contextmanager
def served(folder: Path, text: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Client, Path]]:
    """A server with a settings file, and its log."""
    (folder / "kvdock.toml").write_text(text)
    log = folder / "log"
    with kvdock_serve(folder, "--config", str(folder / "kvdock.toml"), *flags, log=log) as process:
        assert first_line(process), log.read_text()
        with Client(f"unix:{folder}/kvdock.sock") as client:
            yield process, client, log


def reread(process: subprocess.Popen[str], folder: Path, text: str) -> None:
    (folder / "kvdock.toml").write_text(text)
    process.send_signal(signal.SIGHUP)


def test_limits_and_the_log_change_at_once_and_the_rest_waits(tmp_path: Path) -> None:
    with served(tmp_path, 'eviction = "adaptive"\n') as (process, client, log):
        reread(process, tmp_path, 'eviction = "lru"\nsession_grants = 7\nlog_format = "json"\nheartbeat_s = 3.0\n')
        eventually(lambda: "read again" in log.read_text())
        limits = client.config().limits
        assert (limits.eviction, limits.session_grants) == ("lru", 7)
        said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        assert said[-1]["level"] == "info" and said[-1]["logger"] == "kvdock.events"
        assert said[-1]["message"].endswith("these count from the next start: heartbeat_s")
        assert said[-1]["event"].items() >= {"kind": "reread", "needs_restart": ["heartbeat_s"]}.items()
        reread(process, tmp_path, 'eviction = "lru"\nlog_level = "warning"\n')
        eventually(lambda: client.config().limits.session_grants == 4096)
        before = log.read_text()
        reread(process, tmp_path, 'eviction = "adaptive"\nlog_level = "warning"\n')
        eventually(lambda: client.config().limits.eviction == "adaptive")
        assert log.read_text() == before, "only what may need somebody"


def test_what_a_call_has_changed_stays_unless_the_file_changes_it(tmp_path: Path) -> None:
    with served(tmp_path, 'eviction = "adaptive"\n') as (process, client, log):
        client.configure(PatchConfig(eviction="lru", session_grants=9))
        reread(process, tmp_path, 'eviction = "adaptive"\nlow_water = 0.001\n')
        eventually(lambda: "read again" in log.read_text())
        limits = client.config().limits
        assert (limits.eviction, limits.session_grants, limits.low_water) == ("lru", 9, 0.001)


def test_the_log_level_changes_by_call_and_by_signal_with_the_same_checks(tmp_path: Path) -> None:
    with served(tmp_path, 'log_level = "warning"\n') as (process, client, log):
        address = {"KVDOCK_ADDRESS": f"unix:{tmp_path}/kvdock.sock"}
        done = kvdock("config", "set", "log_level", "debug", **address)
        assert (done.returncode, done.stderr) == (0, "") and "log_level: warning → debug\n" in done.stdout
        eventually(lambda: " INFO kvdock.events: " in log.read_text())
        assert client.config().limits.log_level == "debug"
        said = refusal(kvdock("config", "set", "log_level=loud", **address), 2)
        assert "log_level: wanted debug or info or warning or error, found 'loud'" in said
        reread(process, tmp_path, 'log_level = "warning"\nsession_grants = 9\n')
        eventually(lambda: client.config().limits.session_grants == 9)
        assert client.config().limits.log_level == "debug", "the settings name no other value than before"
        reread(process, tmp_path, 'log_level = "error"\nsession_grants = 9\n')
        eventually(lambda: client.config().limits.log_level == "error")
        before = log.read_text()
        reread(process, tmp_path, 'log_level = "error"\nsession_grants = 8\n')
        eventually(lambda: client.config().limits.session_grants == 8)
        assert log.read_text() == before


def test_what_is_wrong_changes_nothing_and_is_named(tmp_path: Path) -> None:
    with served(tmp_path, 'eviction = "adaptive"\n') as (process, client, log):
        reread(process, tmp_path, 'eviction = "lru"\nno_such = 1\n')
        eventually(lambda: "nothing was changed" in log.read_text())
        assert "no_such" in log.read_text() and client.config().limits.eviction == "adaptive"
        reread(process, tmp_path, 'eviction = "lru"\nlow_water = 0.9\nhigh_water = 0.95\nsession_cap = 2\n')
        eventually(lambda: log.read_text().count("nothing was changed") == 2)
        assert client.config().limits.eviction == "adaptive"


def test_tokens_are_read_at_once(tmp_path: Path) -> None:
    tokens = access_file(tmp_path)
    flags = ("--access-file", str(tokens), "--watch-s", "60")  # so that nothing else reads them
    with served(tmp_path, "", *flags) as (process, _, log):
        access_file(tmp_path, entry("new", NEW, ["read"], ""))
        unix = f"unix:{tmp_path}/kvdock.sock"
        header = {**NOBODYS, "Authorization": f"Bearer {NEW}"}
        assert raw(unix, "GET", "/v1/status", headers=header)[0] == 401
        process.send_signal(signal.SIGHUP)
        eventually(lambda: raw(unix, "GET", "/v1/status", headers=header)[0] == 200)
        eventually(lambda: "read 2 access tokens" in log.read_text())
