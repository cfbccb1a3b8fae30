"""`kvdock lookup`, `clear`, `sessions`, `leases`, `requests` and `bench` against a real server with real members."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from api_helpers import OPERATOR, Engine, ServerProcess, attach, eventually, keys, raw, unique
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ, kvdock, refusal
from pty_screen import control_terminal
from server_fixtures import attached_engine

from kvdock.client.client import Client
from kvdock.client.events import read_events
from kvdock.client.transport import Address
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.outcomes import Outcome

engine = attached_engine(label="asker", has_own_model=True)


def ready_chunks(client: Client) -> int:
    return client.status().chunks.ready


# --------------------------------------------------------------------------- lookup


def test_lookup_tells_the_hit_and_holds_nothing(
    server: ServerProcess, client: Client, engine: Engine, tmp_path: Path
) -> None:
    chain = keys(4, "asks")
    engine.store(chain[:3])
    space = engine.attached.namespace
    asked = kvdock("lookup", "--server", server.unix, "--namespace", space, "--json",
                   "--keys", ",".join(chain[:2]), "--keys", " ".join(chain[2:]).upper())
    assert json.loads(asked.stdout) == {
        "namespace": space, "model": engine.body.manifest.model, "chunk_tokens": 16, "asked_tokens": 64,
        "hit_tokens": 48,
    }
    by_tcp = ("lookup", "--server", server.http, "--namespace", space[:16], "--keys", ",".join(chain))
    assert "unauthenticated" in kvdock(*by_tcp).stderr
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(f"{OPERATOR}\n")
    said = kvdock(*by_tcp, KVDOCK_ACCESS_TOKEN_FILE=str(token_file)).stdout
    assert said.startswith("48 of 64 tokens are stored (75 %)")
    token_file.chmod(0o644)
    assert "chmod 600" in kvdock(*by_tcp, KVDOCK_ACCESS_TOKEN_FILE=str(token_file)).stderr
    assert client.leases().leases == []


@pytest.mark.parametrize("form", ["json", "lines", "stdin"])
def test_lookup_hashes_the_tokens_of_a_file(
    server: ServerProcess, engine: Engine, tmp_path: Path, form: str
) -> None:
    tokens = list(range(7, 7 + 40))
    space = engine.attached.namespace
    engine.store([key.hex() for key in chunk_keys(bytes.fromhex(space), tokens, 16)])
    text = json.dumps(tokens) if form == "json" else "\n".join(map(str, tokens))
    (tmp_path / "tokens").write_text(text)
    name, stdin = ("-", text) if form == "stdin" else (str(tmp_path / "tokens"), None)
    done = kvdock("lookup", "--server", server.unix, "--namespace", space, "--json", "--tokens-file", name, stdin=stdin)
    answer = json.loads(done.stdout)
    assert (answer["hit_tokens"], answer["asked_tokens"]) == (32, 40)


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "either --keys or --tokens-file"),
    (["--keys", "ab" * 32, "--tokens-file", "-"], "either --keys or --tokens-file"),
    (["--keys", "abc"], "a key of 64 hex digits, found 'abc' (3 characters)"),
    (["--keys", ","], "at least one key"),
    (["--tokens-file", "/nowhere/at/all"], "/nowhere/at/all"),
])
def test_a_lookup_asked_for_wrongly_is_refused_before_anybody_is_asked(arguments: list[str], said: str) -> None:
    assert said in refusal(kvdock("lookup", "--server", "unix:/nobody", *arguments), 2)


@pytest.mark.parametrize("text", ["1 2 x", "[1, true]", "[1.5]", "-1", str(1 << 32), "[", ""])
def test_what_is_no_token_is_refused(text: str) -> None:
    assert "tokens file -" in refusal(kvdock("lookup", "--tokens-file", "-", stdin=text), 2)


def test_a_namespace_must_be_known_and_meant(server: ServerProcess, client: Client, engine: Engine) -> None:
    other = attach(client, model=unique("model"))
    asked = ("lookup", "--server", server.unix, "--keys", keys(1)[0])
    assert "no namespace starts with 'xyz'" in refusal(kvdock(*asked, "--namespace", "xyz"), 1)
    said = refusal(kvdock(*asked), 2)
    assert engine.attached.namespace[:12] in said and other.attached.namespace[:12] in said
    other.leave()


def test_a_server_that_knows_no_namespace_says_so() -> None:
    with ServerProcess() as fresh:
        asked = ("lookup", "--server", fresh.unix, "--keys", keys(1)[0])
        assert "no engine is attached, and nothing is stored" in refusal(kvdock(*asked), 1)
        with Client(fresh.unix) as client:
            engine = attach(client)
            assert kvdock(*asked, "--json").returncode == 0, "the only namespace need not be named"
            engine.close()


# --------------------------------------------------------------------------- clear


def test_clear_takes_one_namespace_or_all(server: ServerProcess, client: Client, engine: Engine) -> None:
    other = attach(client, model=unique("model"))
    kvdock("clear", "--all", "--yes", "--server", server.unix)
    assert ready_chunks(client) == 0
    engine.store(keys(3, "mine"))
    other.store(keys(2, "theirs"))
    one = kvdock("clear", "--namespace", engine.attached.namespace[:16], "--yes", "--json", "--server", server.unix)
    assert json.loads(one.stdout) == {"chunks": 3, "namespaces": 1, "pending_tiers": []} and ready_chunks(client) == 2
    rest = kvdock("clear", "--all", "-y", "--server", server.unix)
    assert rest.stdout == "2 chunks were cleared\n" and ready_chunks(client) == 0
    other.leave()


@pytest.mark.parametrize(("arguments", "said"), [
    (["--yes"], "one of --namespace, --tenant and --all"),
    (["--all", "--namespace", "ab", "--yes"], "one of --namespace, --tenant and --all"),
    (["--all"], "add --yes"),
])
def test_clear_is_never_guessed(server: ServerProcess, arguments: list[str], said: str) -> None:
    assert said in refusal(kvdock("clear", "--server", server.unix, *arguments), 2)


@pytest.mark.parametrize(("typed", "exit_code", "left"), [("y", 0, 0), ("n", 1, 2), ("\x03", 130, 2)])
def test_clear_asks_a_person(
    server: ServerProcess, client: Client, engine: Engine, typed: str, exit_code: int, left: int
) -> None:
    kvdock("clear", "--all", "--yes", "--server", server.unix)
    engine.store(keys(2, unique("asked")))
    ours, theirs = pty.openpty()
    command = [*KVDOCK, "clear", "--all", "--server", server.unix]
    with subprocess.Popen(
        command, env=clean_environ(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=control_terminal,
    ) as process:
        os.close(theirs)
        said = b""
        try:
            while b"[y/N]" not in said:  # the question is out whole, and the answer is waited for
                said += os.read(ours, 1024)
            os.write(ours, typed.encode() + (b"" if typed == "\x03" else b"\n"))
            for _ in range(9 if typed == "\x03" else 0):  # Python does not see one that comes just before it reads
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TIMEOUT_S / 10)
                    break
                os.write(ours, b"\x03")  # a person types it again
            assert process.wait(TIMEOUT_S) == exit_code
        finally:
            process.kill()
    os.close(ours)
    assert b"Clear all namespaces" in said and ready_chunks(client) == left


# --------------------------------------------------------------------------- sessions and leases


def test_sessions_and_leases_list_who_holds_what(server: ServerProcess, client: Client, engine: Engine) -> None:
    chain = keys(2, unique("listed"))
    engine.store(chain)
    lease = engine.lookup(chain, request="a \x1b[31mrequest", epoch=3, readers=2).lease
    assert lease is not None
    engine.release(lease, 0)
    coming = engine.reserve(keys(1, unique("coming")), store="a-store").reservation
    sessions = kvdock("sessions", "--server", server.unix).stdout
    assert "asker" in sessions and engine.body.manifest.model in sessions
    assert engine.attached.namespace[:8] in sessions and "rank 0 live" in sessions
    leases = kvdock("leases", "--server", server.unix).stdout
    rows = [line for line in leases.splitlines() if line.startswith(("lease ", "reservation "))]
    assert len(rows) == 2 and "\x1b" not in leases
    assert "a �[31mrequest (epoch 3)" in rows[0] and "asker" in rows[0] and "1 of 2: rank 1" in rows[0]
    assert lease in rows[0] and "32.0 KiB" in rows[0]
    assert "a-store" in rows[1] and "1 of 1: rank 0" in rows[1] and str(coming) in rows[1]


def test_json_lists_are_the_servers_own(server: ServerProcess, engine: Engine) -> None:
    engine.store(keys(1, "json"))
    assert engine.lookup(keys(1, "json")).lease
    for command in ("sessions", "leases"):
        own = json.loads(raw(server.http, "GET", f"/v1/{command}")[2])
        shown = json.loads(kvdock(command, "--json", "--server", server.unix).stdout)
        assert set(shown) == set(own) == {command, "next"} and len(shown[command]) == len(own[command]) == 1
        assert set(shown[command][0]) == set(own[command][0])


def test_requests_lists_what_became_of_each_and_finds_them_by_id(server: ServerProcess, engine: Engine) -> None:
    chain, name = keys(2, unique("asked")), unique("cmpl")
    engine.store(chain)
    engine.lookup(chain, request=f"{name}-0")
    engine.lookup(keys(1, unique("miss")), request=f"{name}-1 \x1b[31m")
    engine.heartbeat(outcomes=[
        Outcome(request=f"{name}-0", prompt_tokens=1640, found_tokens=32, local_tokens=10, loaded_tokens=17,
                why="load_failed"),
        Outcome(request=f"{name}-2", prompt_tokens=44, why="of_tomorrow"),
    ])
    table = kvdock("requests", name, "--server", server.unix, COLUMNS="200")
    ended, untold, told = (line.split() for line in table.stdout.splitlines()[2:])
    assert ended[1:] == ["ended", f"{name}-2", "asker", "44", "44", "0", "0", "44",
                         *["a", "reason", "of", "the", "engine's", "own:", "of", "tomorrow"]]
    assert untold[1:] == ["lookup", f"{name}-1", "�[31m", "asker", "16"]
    assert told[1:] == ["lookup", f"{name}-0", "asker", "32", "1,640", "10", "17", "1,613",
                        *["their", "load", "did", "not", "complete"]]
    narrow = kvdock("requests", name, "--server", server.unix, COLUMNS="80").stdout.splitlines()
    assert narrow[-1] == "`kvdock explain ID` says why tokens were computed" and max(map(len, narrow)) <= 80
    assert not any("…" in line or "complete" in line for line in narrow)
    every = kvdock("requests", "--server", server.unix, "--all", COLUMNS="200").stdout
    assert f"{name}-0" in every and "store" in every
    assert kvdock("requests", f"{name}-9", "--server", server.unix).stdout == (
        "no recent request has such an id\n"
    )
    own = json.loads(raw(server.unix, "GET", f"/v1/requests?request={name}")[2])
    assert json.loads(kvdock("requests", name, "--json", "--server", server.unix).stdout) == own
    limited = kvdock("requests", name, "--limit", "2", "--server", server.unix, COLUMNS="200").stdout
    assert "more: --limit" in limited and f"{name}-0" not in limited


def test_lists_go_on_over_pages_and_say_when_there_is_more() -> None:
    with ServerProcess(table_grants=1 << 12, session_grants=2000) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1, "pages"))
        for number in range(1100):
            engine.lookup(keys(1, "pages"), request=f"r{number}")
        few = kvdock("leases", "--limit", "3", "--server", server.unix)
        assert few.stdout.count("lease ") == 3 and "--all" in few.stdout.splitlines()[-1]
        limited = json.loads(kvdock("leases", "--limit", "1050", "--json", "--server", server.unix).stdout)
        assert len(limited["leases"]) == 1050 and limited["next"] is not None
        every = json.loads(kvdock("leases", "--all", "--json", "--server", server.unix).stdout)
        assert [view["request"] for view in every["leases"]] == [f"r{number}" for number in range(1100)]
        assert every["next"] is None
        engine.close()


def test_empty_lists_say_so() -> None:
    with ServerProcess() as server:
        assert kvdock("sessions", "--server", server.unix).stdout == "no engine is attached\n"
        assert kvdock("requests", "--server", server.unix).stdout == "no engine has looked up or stored anything yet\n"
        assert kvdock("leases", "--server", server.unix).stdout == "no engine holds a lease or a reservation\n"


@pytest.mark.parametrize("command", [
    ["sessions"], ["leases", "--json"], ["requests", "r-1"], ["lookup", "--keys", "ab" * 32],
    ["clear", "--all", "--yes"], ["bench"],
])
def test_without_a_server_each_says_how_to_start_one(tmp_path: Path, command: list[str]) -> None:
    nobody = f"unix:{tmp_path}/nobody.sock"
    sentence = refusal(kvdock(*command, "--server", nobody), 1)
    assert f"no server answers at {nobody}" in sentence and "kvdock serve" in sentence


# --------------------------------------------------------------------------- bench


def test_bench_measures_and_leaves_nothing_stored() -> None:
    with ServerProcess(pool_bytes="64MiB", segment_bytes="64MiB") as server, Client(server.unix) as client:
        done = kvdock("bench", "--json", "--mib", "8", "--rounds", "20", "--server", server.unix)
        assert (done.returncode, done.stderr) == (0, "")
        figures = json.loads(done.stdout)
        assert set(figures) == {
            *(f"lookup_{count}_p{percent}_ms" for count in (2, 32, 512) for percent in (50, 99)),
            "store_gb_s", "load_gb_s", "memcpy_gb_s", "moved_bytes",
        }
        assert figures["moved_bytes"] == 8 << 20 and all(value > 0 for value in figures.values())
        for count in (2, 32, 512):
            assert figures[f"lookup_{count}_p50_ms"] <= figures[f"lookup_{count}_p99_ms"]
        counters = client.status().counters
        falsified = {
            "attached_members", "lookups", "lookup_tokens", "outcomes", "prompt_tokens", "loaded_bytes",
            "stored_bytes", "reservations",
        }
        assert {name: counters[name] for name in falsified} == dict.fromkeys(falsified, 0)
        kinds = {told.event["kind"] for told in read_events(Address.parse(server.unix))}
        assert {"attached", "left"} <= kinds, "it was here"
        assert not kinds & {"looked_up", "leased", "loaded", "reserved", "stored", "committed"}
        metrics = raw(server.http, "GET", "/metrics")[2].decode()
        assert "kvdock_load_seconds_count 0.0" in metrics and "kvdock_store_seconds_count 0.0" in metrics
        assert client.requests().requests == [] and client.curve().total.lookups == 0
        eventually(lambda: client.namespaces().namespaces == [])
        eventually(lambda: client.status().pool.free_bytes > 60 << 20)
        assert client.status().sessions == 0 and ready_chunks(client) == 0


def test_bench_says_when_the_pool_has_no_space_and_cleans_up() -> None:
    with ServerProcess(pool_bytes="2MiB", segment_bytes="2MiB") as server, Client(server.unix) as client:
        assert "the pool is too small: found " in refusal(kvdock("bench", "--rounds", "10", "--server", server.unix), 1)
        assert client.status().sessions == 0 and ready_chunks(client) == 0


def test_bench_in_words_compares_with_memcpy(server: ServerProcess) -> None:
    done = kvdock("bench", "--mib", "1", "--rounds", "10", "--server", server.unix)
    assert done.returncode == 0, done.stderr
    assert "lookup and lease of 512 keys" in done.stdout and "% of memcpy" in done.stdout
