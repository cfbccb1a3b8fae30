"""`kvdock keep`, `kvdock evict`, `kvdock config get` and `kvdock config set` against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, keys, raw, unique
from cli_helpers import KVDOCK, clean_environ, kvdock, refusal
from pty_screen import PtyProgram

from kvdock.cli.admin import LIVE
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.schemas import Lookup

CHUNK_BYTES = 16384


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    """An engine with a namespace of its own, the only one that has chunks."""
    client.clear(ClearCache())
    attached = attach(client, label="changer", model=unique("model"))
    yield attached
    attached.leave()


def stored(engine: Engine, chain: list[str]) -> int:
    """The number of chunks of the chain that a lookup finds."""
    body = Lookup(namespace=engine.attached.namespace, keys=chain)
    return engine.client.lookup(body).hit_tokens // 16


def prompt(engine: Engine, folder: Path, first: int, count: int = 70) -> tuple[str, list[str]]:
    """(a file of token ids, their keys); the tokens are stored."""
    tokens = list(range(first, first + count))
    path = folder / f"tokens-{first}"
    path.write_text(json.dumps(tokens))
    chain = [key.hex() for key in chunk_keys(bytes.fromhex(engine.attached.namespace), tokens, 16)]
    engine.store(chain)
    return str(path), chain


# --------------------------------------------------------------------------- clear


def test_clear_takes_one_tenant(server: ServerProcess, engine: Engine) -> None:
    engine.store(keys(3, "tenant"))
    at = ("--server", server.unix)
    said = refusal(kvdock("clear", "--tenant", "nobody", "--yes", "--json", *at), 1)
    assert "tenant nobody has no namespace, so nothing was cleared" in said
    assert json.loads(kvdock("clear", "--tenant", "", "--yes", "--json", *at).stdout)["chunks"] == 3
    again = json.loads(kvdock("clear", "--tenant", "", "--yes", "--json", *at).stdout)
    assert again == {"chunks": 0, "namespaces": 1, "pending_tiers": []}
    for wrong in ((), ("--tenant", "a", "--all"), ("--tenant", "", "--namespace", "5e")):
        assert "one of --namespace, --tenant and --all" in refusal(kvdock("clear", "--yes", *wrong, *at), 2)
    assert "found 'Team A'" in refusal(kvdock("clear", "--tenant", "Team A", "--yes", *at), 2)


# --------------------------------------------------------------------------- quota


def test_quotas_are_shown_and_changed_in_units(tmp_path: Path) -> None:
    with ServerProcess() as server:
        at = ("--server", server.unix)
        assert "no tenant uses anything" in kvdock("quota", *at).stdout
        assert "has the default quota" in refusal(kvdock("quota", "a", *at), 1)
        said = kvdock("quota", "a", "--bytes", "1.5GiB", "--sessions", "4", *at).stdout
        assert said == "quota of tenant a: 1536MiB, 4 sessions\n"
        shown = json.loads(kvdock("quota", "a", "--json", *at).stdout)["tenants"]["a"]["quota"]
        assert (shown["bytes"], shown["sessions"], shown["grants"]) == (3 << 29, 4, None)
        assert re.search(r"^a +1536MiB, 4 sessions", kvdock("quota", *at).stdout, re.MULTILINE)
        assert kvdock("quota", "a", "--bytes", "50%", *at).stdout == "quota of tenant a: 8MiB\n"
        assert kvdock("quota", "a", "--default", *at).stdout == "quota of tenant a: the default\n"
        for wrong in (("--bytes", "1GiB"), ("--default",), ("a", "--default", "--chunks", "1")):
            assert "needs a tenant" in refusal(kvdock("quota", *wrong, *at), 2)
        assert "found 'Team A'" in refusal(kvdock("quota", "Team A", "--chunks", "1", *at), 2)
        said = refusal(kvdock("quota", "a", "--bytes", "8 gigs", *at), 2)
        assert said == "kvdock: --bytes: a size like 512MiB, 64M or 4GiB was wanted, found '8 gigs'"


# --------------------------------------------------------------------------- keep


def test_keep_keeps_a_prompt_while_others_go(tmp_path: Path) -> None:
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        file, chain = prompt(engine, tmp_path, 7)
        asked = ("--tokens-file", file, "--server", server.unix)
        said = kvdock("keep", *asked, "--for", "15min").stdout
        assert re.match(r"4 of 4 chunks for test-model \([0-9a-f]{8}\) are kept from eviction until \d{4}-", said)
        for number in range(6):
            engine.store(keys(100, f"flood {number}"))
        assert stored(engine, chain) == 4
        kept = json.loads(kvdock("keep", *asked, "--json").stdout)
        assert kept == {"namespace": engine.attached.namespace, "model": "test-model", "asked_chunks": 4, "chunks": 4,
                        "duration_s": 3600.0}
        assert "4 of 4 chunks for test-model" in kvdock("keep", *asked, "--end").stdout
        for number in range(6, 12):
            engine.store(keys(100, f"flood {number}"))
        assert stored(engine, chain) < 4
        engine.close()


def test_keep_says_when_not_all_of_it_or_nothing_is_stored(
    server: ServerProcess, engine: Engine, tmp_path: Path
) -> None:
    space = ("--namespace", engine.attached.namespace, "--server", server.unix)
    chain = keys(3, unique("some"))
    engine.store(chain[:2])
    assert "2 of 3 chunks" in (said := kvdock("keep", *space, "--keys", ",".join(chain)).stdout)
    assert said.endswith("; the others are not stored\n")
    absent = ("--keys", keys(1, unique("absent"))[0])
    assert "no chunk of this prompt is stored" in refusal(kvdock("keep", *space, *absent, "--json"), 1)
    assert kvdock("keep", *space, *absent, "--end").returncode == 0


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "keep needs either --keys or --tokens-file"),
    (["--keys", "ab" * 32, "--for", "soon"], "--for: wanted a duration like 90s, 15min, 12h or 7d, found 'soon'"),
    (["--keys", "ab" * 32, "--for", "0s"], "found '0s'"),
    (["--keys", "ab" * 32, "--for", "400d"], "wanted at most 366 d"),
    (["--keys", "ab" * 32, "--for", "9" * 400 + "d"], "--for: wanted a duration like 90s"),
    (["--keys", "ab"], "a key of 64 hex digits"),
    (["--keys", "ab" * 32, "--name", "a\u202eb"],
     "--name: wanted at most 64 characters that can be seen, found 'a�b'"),
    (["--keys", "ab" * 32, "--name", "n" * 65], "--name: wanted at most 64 characters"),
    (["--keys", "ab" * 32, "--name", "a", "--end"], "--name does not go with --end"),
])
def test_a_keep_asked_for_wrongly_is_refused(arguments: list[str], said: str) -> None:
    assert said in refusal(kvdock("keep", "--server", "unix:/nobody", *arguments), 2)


# --------------------------------------------------------------------------- evict


def test_evict_takes_a_prompt_and_leaves_the_others(
    server: ServerProcess, engine: Engine, client: Client, tmp_path: Path
) -> None:
    (file, chain), (_, other) = (prompt(engine, tmp_path, first) for first in (100, 900))
    asked = ("--namespace", engine.attached.namespace, "--tokens-file", file, "--server", server.unix)
    assert "add --yes" in refusal(kvdock("evict", *asked), 2) and stored(engine, chain) == 4
    lease = engine.lookup(chain, request=unique("r")).lease
    assert kvdock("evict", *asked, "--yes").stdout == "4 chunks evicted, of 4\n"
    assert (stored(engine, chain), stored(engine, other)) == (0, 4)
    assert client.status().pool.quarantined_bytes == 4 * CHUNK_BYTES, "what is leased waits for its reader"
    assert engine.release(lease, 0) == []
    assert json.loads(kvdock("evict", *asked, "--yes", "--json").stdout) == {
        "chunks": 0, "tier_chunks": 0, "pending_tiers": [], "is_cleared": False,
    }


def test_evict_makes_so_much_room(server: ServerProcess, engine: Engine, client: Client) -> None:
    old, young = keys(8, unique("old")), keys(8, unique("young"))
    engine.store(old)
    engine.store(young)
    lease = engine.lookup(young, request=unique("r")).lease
    at = ("--server", server.unix, "--yes")
    free = client.status().pool.free_bytes
    assert kvdock("evict", "--bytes", "64KiB", *at).stdout.startswith("4 chunks of 64.0 KiB evicted; ")
    assert stored(engine, old) == 4 and client.status().pool.free_bytes == free + (64 << 10)
    done = json.loads(kvdock("evict", "--free", str(free + (96 << 10)), *at, "--json").stdout)
    assert done == {"chunks": 2, "bytes": 32 << 10, "free_bytes": free + (96 << 10)}
    said = kvdock("evict", "--free", "16MiB", *at).stdout
    assert "16.0 MiB were to be free, and no more may be evicted now: what is left is held by engines" in said
    assert (stored(engine, old), stored(engine, young)) == (0, 8)
    assert engine.release(lease, 0) == []
    said = kvdock("evict", "--free", "1MiB", *at).stdout
    assert re.fullmatch(r"nothing was evicted: 1\d\.\d MiB are free already\n", said) and stored(engine, young) == 8
    said = kvdock("evict", "--free", "16MiB", *at).stdout
    assert said.startswith("8 chunks of ") and "no more" not in said, "the pool is empty"


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "one of --tokens-file, --keys, --bytes and --free"),
    (["--bytes", "1MiB", "--free", "2MiB"], "one of --tokens-file, --keys, --bytes and --free"),
    (["--bytes", "much"], "a size like 512MiB, 64M or 4GiB was wanted, found 'much'"),
    (["--bytes", "1MiB", "--namespace", "ab"], "--namespace goes with"),
    (["--bytes", "1MiB", "--tokens-file", "-"], "one of --tokens-file"),
])
def test_an_evict_asked_for_wrongly_is_refused(arguments: list[str], said: str) -> None:
    assert said in refusal(kvdock("evict", "--server", "unix:/nobody", *arguments), 2)


def test_evict_by_size_asks_and_a_pool_is_not_that_large(server: ServerProcess, engine: Engine) -> None:
    engine.store(keys(1, unique("asked")))
    assert "add --yes" in refusal(kvdock("evict", "--bytes", "1MiB", "--server", server.unix), 2)
    for option in ("--free", "--bytes"):
        said = refusal(kvdock("evict", option, "1G", "--yes", "--json", "--server", server.unix), 1)
        assert said == "kvdock: found 1G, wanted at most what the pool may have: 16MiB"
    assert "evicted; 1" in kvdock("evict", "--bytes", "16MiB", "--yes", "--server", server.unix).stdout


@pytest.mark.parametrize(("typed", "exit_code", "left"), [("n", 1, 2), ("y", 0, 0)])
def test_evict_asks_a_person_and_says_what_will_be_lost(
    server: ServerProcess, engine: Engine, typed: str, exit_code: int, left: int
) -> None:
    chain = keys(2, unique("asked"))
    engine.store(chain)
    with PtyProgram([*KVDOCK, "evict", "--bytes", "32KiB", "--server", server.unix], clean_environ()) as program:
        eventually(lambda: "[y/N]" in program.text)
        said = " ".join(program.text.split())
        assert "Evict 32.0 KiB of the 32.0 KiB that are stored, the least valuable chunks first, at unix:" in said
        program.press(f"{typed}\n")
        assert program.ended() == exit_code and stored(engine, chain) == left


# --------------------------------------------------------------------------- config


def test_config_get_shows_the_running_server_and_what_can_be_changed(server: ServerProcess, client: Client) -> None:
    own = json.loads(raw(server.unix, "GET", "/v1/config")[2])
    for command in (["config", "get", "--server", server.unix], ["config", "--server", server.unix]):
        live, _, fixed = kvdock(*command).stdout.partition("Fixed until the server is restarted:")
        assert server.unix in live and "pool_bytes           16MiB" in live and "socket_path" in fixed
        assert all(f"\n{name} " in live and f"\n{name} " not in fixed for name in LIVE)
        shown = json.loads(kvdock(*command, "--json").stdout)
        assert shown["settings"] == own["settings"] and shown["limits"] == own["limits"]


def test_config_set_changes_all_or_nothing() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        at = ("--server", server.unix)
        said = kvdock("config", "set", "pool_bytes=32MiB", "session-cap=0.5", "eviction=lru", *at).stdout
        assert "pool_bytes: 16MiB → 32MiB\n" in said and "session_cap: 1.0 → 0.5\n" in said
        assert "eviction: adaptive → lru\n" in said and "KVDOCK_POOL_BYTES=32MiB" in said
        limits = client.config().limits
        assert (limits.pool_bytes, limits.session_cap, limits.eviction) == (32 * MIB, 0.5, "lru")
        live = kvdock("config", "get", *at).stdout
        assert re.search(r"\npool_bytes +32MiB +16MiB\n", live), "and what it was started with"
        refused = refusal(kvdock("config", "set", "session_cap=0.25", "low_water=0.5", *at), 1)
        assert "bad_argument" in refused and "found" in refused and "wanted" in refused
        assert "session_cap: wanted a number <= 1" in refusal(kvdock("config", "set", "session_cap=2", *at), 2)
        assert client.config().limits == limits
        done = json.loads(kvdock("config", *at, "--json", "set", "session_grants=99").stdout)
        assert done["limits"]["session_grants"] == client.config().limits.session_grants == 99
        quota = kvdock("config", "set", 'tenants={"a": {"bytes": 1048576, "sessions": 4}}', *at).stdout
        assert "quota of tenant a: 1MiB, 4 sessions" in quota
        assert "1MiB, 4 sessions" in kvdock("config", "get", *at).stdout


@pytest.mark.parametrize(("change", "said"), [
    ("pool_bytes", "wanted NAME=VALUE, such as pool_bytes=16GiB, found 'pool_bytes'"),
    ("port=1", "port is fixed until the server is restarted; wanted one of pool_bytes, "),
    ("pool_byts=1GiB", "unknown setting 'pool_byts' (meant pool_bytes?)"),
    ("pool_bytes=much", "pool_bytes: a size like 512MiB, 64M or 4GiB was wanted, found 'much'"),
    ("eviction=fifo", "eviction: wanted adaptive or lru, found 'fifo'"),
    ("session_cap=half", "session_cap: wanted a number, found session_cap=half"),
    ("session_cap=", "session_cap: wanted a value"),
    ("tenants=a", "tenants: wanted JSON"),
])
def test_what_cannot_be_changed_so_is_refused_before_anybody_is_asked(change: str, said: str) -> None:
    assert said in refusal(kvdock("config", "set", change, "--server", "unix:/nobody"), 2)


def test_the_server_of_the_environment_is_changed_without_naming_it(server: ServerProcess) -> None:
    address = {"KVDOCK_ADDRESS": server.unix.removeprefix("unix:")}
    said = kvdock("config", "set", "session_grants=4096", **address).stdout
    assert said.startswith("session_grants: 4096, as before\n")
