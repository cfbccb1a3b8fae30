"""`kvdock explain` and `kvdock events` against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from api_helpers import ServerProcess, attach, keys
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ, kvdock, refusal
from server_fixtures import fresh_server

from kvdock.client.client import Client

server = fresh_server()


def test_a_miss_is_explained_in_sentences_and_as_json(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client, label="engine A\x1b[2J")
        engine.lookup(keys(2), "r-1")
        done = kvdock("explain", "r-1", "--server", server.unix)
        assert done.returncode == 0, done.stderr
        first, why, *_ = done.stdout.splitlines()
        assert "asked for 32 tokens, in whole chunks, and the server had none of them" in first and "\x1b" not in first
        never = "as far as the server remembers, they were never stored"
        assert why == f"The 32 tokens were not given: {never}."
        told = json.loads(kvdock("explain", "r-1", "--server", server.unix, "--json").stdout)
        assert told["lookups"][0]["broke"]["why"] == "never_stored"
        engine.close()
    unknown = refusal(kvdock("explain", "r-2", "--server", server.unix), 1)
    assert "no request that the server remembers has this id" in unknown


def test_events_are_lines_of_words_and_as_json_objects(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client, label="engine A")
        engine.store(keys(2), store="s1")
        done = kvdock("events", "--server", server.unix, "--kinds", "attached,stored")
        attached, stored = done.stdout.splitlines()
        assert f"attached       session {engine.listed} ('engine A'): member" in attached
        assert "stored " in stored and "store=s1" in stored and "chunks=2" in stored
        lines = kvdock("events", "--server", server.unix, "--json").stdout.splitlines()
        assert "attached" in [json.loads(line)["kind"] for line in lines]
        engine.close()
    assert "no such kinds of events" in refusal(kvdock("events", "--kinds", "gone", "--server", server.unix), 1)
    refusal(kvdock("events", "--server", "unix:/nowhere.sock"), 1)


def test_who_follows_gets_what_is_kept_then_what_comes_then_the_next_servers(tmp_path: Path) -> None:
    settings = {"socket_path": str(tmp_path / "kvdock.sock")}
    command = [*KVDOCK, "events", "--follow", "--json", "--kinds", "ready,attached,draining", "--server",
               f"unix:{tmp_path}/kvdock.sock"]
    with (
        ServerProcess(**settings) as first,
        subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE, text=True) as process,
    ):
        out = process.stdout
        assert out is not None

        def kinds() -> Iterator[str]:
            for line in out:
                yield json.loads(line)["kind"]

        told = kinds()
        assert next(told) == "ready"
        with Client(first.unix) as client:
            attach(client).close()
        assert next(told) == "attached"
        assert first.stop() == 0
        assert next(told) == "draining"
        with ServerProcess(**settings):
            assert [next(told), next(told)] == ["gap", "ready"]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
