"""What only the Redis tier does: its URL, passwords, TLS, its records, and what the server's errors become."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from certificates import self_signed
from ports import held_port
from redis_server import RedisServer, served
from redis_subject import opened
from tier_helpers import ARENA, MIB, Parts, assert_loads, load, outcomes_of, patient, store, store_all

from kvdock.tiers.notes import begins
from kvdock.tiers.record import HEADER_BYTES
from kvdock.tiers.stores.redis import NAMESPACES, PIECE_BYTES, RUN_BYTES, RedisTier, _Value, open_tier
from kvdock.tiers.stores.redis_nodes import Address, read_settings
from kvdock.tiers.stores.resp import Wire
from kvdock.tiers.tier import Deadline, Loaded, Outcome, ReadOnly, TierError, TierUrlError

pytestmark = pytest.mark.tiers

PASSWORD = "open sesame; & ü"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with served(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with redis.Redis(unix_socket_path=str(server.address)) as one:
        one.flushall()
        yield one


@pytest.fixture
def tier(server: RedisServer, client: Any) -> Iterator[RedisTier]:
    with opened(f"unix://{server.address}") as one:
        yield one


# --------------------------------------------------------------------------- the URL


@pytest.mark.parametrize(("url", "says"), [
    ("http://host", "found a URL of scheme 'http', wanted one of redis, rediss, unix"),
    ("redis://host?conections=3", "found parameter 'conections', wanted one of cluster, connections, db, "),
    ("redis://host?connections=3&connections=4", "found parameter 'connections' twice"),
    ("redis://host?connections=0", "found connections='0', wanted a whole number from 1 to 64"),
    ("redis://host?connections=many", "found connections='many', wanted a whole number from 1 to 64"),
    ("redis://host?ttl_s=-1", "found ttl_s='-1'"),
    ("redis://host?cluster=true", "found cluster='true', wanted yes or no"),
    ("redis://host?ca_file=/etc/hosts", "found parameter 'ca_file'"),
    ("rediss://host?ca_file=/no/such/file", "wanted the path of a file that is there"),
    ("rediss://host?cert_file=/etc/hosts", "wanted both or neither"),
    ("redis://host:99999", "wanted a port"),
    ("redis://host/cache", "found the path /cache, wanted the number of a database"),
    ("redis://host/1?db=2", "wanted the number of a database, once"),
    ("redis://host/1?cluster=yes", "found a database or a Unix socket with cluster=yes"),
    ("unix:///s?cluster=yes", "found a database or a Unix socket with cluster=yes"),
    ("unix://s", "wanted unix:///PATH"),
    ("redis://host#x", "found #x"),
    ("redis://me@host", "found the user 'me', wanted password_file or password_env too"),
    ("redis://host?password_env=NOT_SET", "found no password in environment variable NOT_SET"),
    ("redis://host?password_env=A&password_file=/etc/hosts", "wanted one of them"),
])  # fmt: skip
def test_a_url_that_is_not_understood_is_refused(url: str, says: str) -> None:
    with pytest.raises(TierUrlError) as caught:
        read_settings(url, {})
    assert says in str(caught.value)


@pytest.mark.security
def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(TierUrlError, match="found a password in the URL") as caught:
        read_settings(f"redis://me:{PASSWORD}@host", {})
    assert "sesame" not in str(caught.value)


@pytest.mark.security
@pytest.mark.parametrize("url", [
    "redis://:sesame@[::1:6379", "redis://:sesame\uff0f@host", "redis://:#sesame@host", "redis://:?sesame@host",
    "redis://:sesame/@host", "redis://:/sesame@host",
])
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    """A password has to be refused also where one of its characters ends the part of the URL in which it stands."""
    with pytest.raises(TierUrlError) as caught:
        read_settings(url, {})
    assert "sesame" not in str(caught.value)


def test_without_redis_py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(TierError, match=r"pip install 'kvdock\[redis\]'"):
        open_tier("redis://localhost", patient(), {})


def test_what_a_url_says(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    settings = read_settings(f"rediss://a%40b@[::1]:7/3?ttl_s=60&password_file={tmp_path / 'password'}", {})
    assert (settings.address, settings.user, settings.password()) == (Address("::1", 7), "a@b", PASSWORD)
    assert (settings.db, settings.ttl_s, settings.tls, settings.cluster) == (3, 60, {}, False)
    assert read_settings("redis://", {}).address == Address("localhost", 6379)


# --------------------------------------------------------------------------- rights and TLS


def test_a_password_from_the_environment_opens_the_tier_and_a_wrong_one_does_not(tmp_path: Path, parts: Parts) -> None:
    with served(tmp_path, f'requirepass "{PASSWORD}"', 'user you on >"a b" ~kvdock/* +@all') as server:
        url = f"unix://{server.address}"
        with opened(f"{url}?password_env=IT", {"IT": PASSWORD}) as tier:
            one = parts.make(10_000)
            store_all(tier, [one])
            assert_loads(tier, [one])
        with pytest.raises(TierError, match="Authentication required"):
            open_tier(url, patient(), {})
        with pytest.raises(TierError, match="invalid username-password pair") as caught:
            open_tier(f"{url}?password_env=IT", patient(), {"IT": "wrong horse"})
        assert "horse" not in str(caught.value)


def test_a_password_that_is_replaced_is_read_again(tmp_path: Path, parts: Parts) -> None:
    file, one = tmp_path / "password", parts.make(10_000)
    file.write_text("first")
    with (
        served(tmp_path, "requirepass first") as server, opened(f"unix://{server.address}?password_file={file}") as tier
    ):
        store_all(tier, [one])
        with redis.Redis(unix_socket_path=str(server.address), password="first") as client:
            client.config_set("requirepass", "second")
            client.client_kill_filter(skipme=True)
        with pytest.raises(TierError, match="invalid username-password pair"):
            outcomes_of(tier, [one])
        file.write_text("second")
        assert_loads(tier, [one])


def test_after_a_failover_the_new_master_is_found_at_the_address_of_the_old_one(tmp_path: Path, parts: Parts) -> None:
    """As where a name or a proxy leads to the master: connections to the old one stay open."""
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        folder.mkdir()
    one, other = parts.make(10_000), parts.make(10_000)
    with served(folders[0]) as old, served(folders[1]) as new, opened(f"unix://{old.address}") as tier:
        store_all(tier, [one])
        with redis.Redis(unix_socket_path=str(old.address)) as client:
            client.replicaof("127.0.0.1", 1)
        with pytest.raises(ReadOnly, match="READONLY"):
            store(tier, [other])
        assert_loads(tier, [one])
        Path(str(new.address)).rename(str(old.address))
        with pytest.raises(ReadOnly, match="READONLY"):
            store(tier, [other])
        store_all(tier, [other])
        assert_loads(tier, [other])
        tier.change(parts.namespace, begins(1), patient())


def test_a_user_who_may_not_is_told(tmp_path: Path, parts: Parts) -> None:
    port = held_port()
    server = RedisServer(
        tmp_path, ("127.0.0.1", port), f"port {port}", "user you on >it ~kvdock/* -@all +get +ping"
    )  # fmt: skip
    try:
        with opened(f"redis://you@127.0.0.1:{port}?password_env=IT", {"IT": "it"}) as tier:
            one = parts.make(10_000)
            assert outcomes_of(tier, [one]) == [Outcome.MISSING]
            with pytest.raises(TierError, match="NOPERM"):
                store(tier, [one])
    finally:
        server.kill()


def test_a_user_who_may_only_read_finds_values_whose_time_it_cannot_lengthen(tmp_path: Path, parts: Parts) -> None:
    port, one = held_port(), parts.make(10_000)
    server = RedisServer(tmp_path, ("127.0.0.1", port), f"port {port}", "user you on >it ~kvdock/* -@all +@read +ping")
    url = f"127.0.0.1:{port}?ttl_s=5000"
    try:
        with opened(f"redis://{url}") as tier:
            store(tier, [one])
        with opened(f"redis://you@{url}&password_env=IT", {"IT": "it"}) as tier:
            assert tier.exists([one.name], patient()) == [True]
            assert_loads(tier, [one])
    finally:
        server.kill()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_tls_carries_values_and_trusts_only_its_own_certificate(
    tmp_path: Path, certificate: Path, parts: Parts
) -> None:
    port = held_port()
    server = RedisServer(
        tmp_path, ("127.0.0.1", port), "port 0", f"tls-port {port}", f"tls-cert-file {certificate}/cert.pem",
        f"tls-key-file {certificate}/key.pem", "tls-auth-clients no",
    )  # fmt: skip
    trusted = f"ca_file={certificate}/cert.pem"
    try:
        with opened(f"rediss://localhost:{port}?{trusted}") as tier:
            batch = [parts.make(length) for length in (1, 70_000, 4 * MIB + 3, 9 * MIB)]
            store_all(tier, batch)
            assert_loads(tier, batch)
            server.send(signal.SIGSTOP)
            assert outcomes_of_late(tier, batch, parts) == {Outcome.LATE}
            server.send(signal.SIGCONT)
            assert_loads(tier, batch)
        for url in (f"rediss://localhost:{port}", f"rediss://127.0.0.1:{port}?{trusted}"):
            with pytest.raises(TierError, match="certificate verify failed"):
                open_tier(url, patient(), {})
    finally:
        server.kill()


def outcomes_of_late(tier: RedisTier, batch: list[Any], parts: Parts) -> set[Outcome]:
    """A load, and a store of much more than any buffer takes, with a deadline that is soon over."""
    loaded = [answer.outcome for answer in tier.load([part.to_load() for part in batch], Deadline(0.3))]
    return {*loaded, *store(tier, [parts.make(16 * MIB)], Deadline(0.3))}


# --------------------------------------------------------------------------- records


def test_the_first_of_two_writers_stays_and_a_damaged_one_is_replaced(
    tier: RedisTier, client: Any, parts: Parts
) -> None:
    first = parts.make(50_000)
    second = parts.make(50_000, first.name)
    store_all(tier, [first])
    store_all(tier, [second])
    assert_loads(tier, [first])
    key = first.name.text()
    for damaged in (client.get(key)[:-1], b"", b"\0" + client.get(key)[1:]):
        client.set(key, damaged)
        store_all(tier, [second])
        assert_loads(tier, [second])
    client.delete(key)
    client.rpush(key, "a list")
    assert outcomes_of(tier, [first]) == [Outcome.DAMAGED]
    store_all(tier, [first])
    assert_loads(tier, [first])


def test_a_value_is_the_header_and_then_the_bytes(tier: RedisTier, client: Any, parts: Parts) -> None:
    one = parts.make(50_001)
    store_all(tier, [one])
    assert client.get(one.name.text()) == one.record.header() + one.data
    assert client.ttl(one.name.text()) == -1


def test_values_live_as_long_as_the_url_says(server: RedisServer, client: Any, parts: Parts) -> None:
    one = parts.make(100)
    with opened(f"unix://{server.address}?ttl_s=5000") as tier:
        store_all(tier, [one])
        assert 4000 < client.ttl(one.name.text()) <= 5000
        client.set(one.name.text(), b"damaged")
        store_all(tier, [one])
        assert 4000 < client.ttl(one.name.text()) <= 5000


def test_another_length_than_wanted_spoils_nothing_behind_it(tier: RedisTier, client: Any, parts: Parts) -> None:
    """The replies of one run: each is taken off the connection whole, whatever it is."""
    batch = parts.many(5, 100_000)
    store_all(tier, batch)
    client.set(batch[0].name.text(), b"x" * 300_000)
    client.delete(batch[1].name.text())
    client.set(batch[2].name.text(), b"")
    client.delete(batch[3].name.text())
    client.rpush(batch[3].name.text(), "a list")
    answers = [got.answer for got in load(tier, batch)]
    damaged = Loaded(Outcome.DAMAGED)
    assert answers == [
        damaged, Loaded(Outcome.MISSING), damaged, damaged, Loaded(Outcome.DONE, batch[4].record.checksum)
    ]  # fmt: skip


def test_values_that_come_in_pieces(tier: RedisTier, client: Any, parts: Parts) -> None:
    edges = [RUN_BYTES - HEADER_BYTES, RUN_BYTES - HEADER_BYTES + 1, 3 * PIECE_BYTES - HEADER_BYTES, 17 * MIB + 5]
    batch = [parts.make(size) for size in edges]
    store_all(tier, batch)
    assert_loads(tier, batch)
    last = batch[3].name.text()
    for value in (batch[3].data, b"\0" + client.get(last)[1:], b"x" * 100):
        client.set(last, value)
        assert outcomes_of(tier, batch) == [Outcome.DONE] * 3 + [Outcome.DAMAGED]
        ARENA.reset()
    client.delete(last)
    assert outcomes_of(tier, batch) == [Outcome.DONE] * 3 + [Outcome.MISSING]
    client.rpush(last, "a list")
    assert outcomes_of(tier, batch) == [Outcome.DONE] * 3 + [Outcome.DAMAGED]
    assert_loads(tier, batch[:3])


def test_a_value_that_changes_between_two_pieces_is_no_hit(
    tier: RedisTier, client: Any, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = parts.make(17 * MIB)
    store_all(tier, [one])
    send, sent = Wire.send, list[int]()

    def send_and_cut(wire: Wire, pieces: Any, deadline: Deadline) -> None:
        sent.append(1)
        if len(sent) == 3:
            client.set(one.name.text(), b"short")
        send(wire, pieces, deadline)

    monkeypatch.setattr(Wire, "send", send_and_cut)
    with pytest.raises(TierError, match="was replaced while it was read"):
        load(tier, [one])
    assert outcomes_of(tier, [one]) == [Outcome.DAMAGED]


def test_a_part_that_no_value_can_hold_is_refused(tier: RedisTier, parts: Parts) -> None:
    one = parts.make(100)
    large = one.to_store()
    large = large._replace(record=one.record.__class__(one.name, 512 * MIB - HEADER_BYTES + 1, 0))
    assert tier.store([large], patient()) == [Outcome.TOO_LARGE]
    assert tier.exists([one.name], patient()) == [False]


def test_what_a_large_batch_needs_is_at_most_its_connections(server: RedisServer, client: Any, parts: Parts) -> None:
    with opened(f"unix://{server.address}?connections=2") as tier:
        before = client.info("clients")["connected_clients"]
        batch = parts.many(12, 3 * MIB)
        for _ in range(3):
            ARENA.reset()
            store_all(tier, batch)
            assert_loads(tier, batch)
        assert client.info("clients")["connected_clients"] - before <= 2


# --------------------------------------------------------------------------- servers that fail


def test_full_memory_is_full(tier: RedisTier, client: Any, parts: Parts) -> None:
    one, other = parts.many(2, 10_000)
    store_all(tier, [one])
    client.config_set("maxmemory", 1)
    try:
        assert store(tier, [other]) == [Outcome.FULL]
        assert_loads(tier, [one])
        assert tier.delete([one.name], patient()) == [Outcome.DONE]
    finally:
        client.config_set("maxmemory", 0)


def test_a_replica_that_only_reads_refuses_stores(tmp_path: Path, parts: Parts) -> None:
    one = parts.make(1000)
    with served(tmp_path, "replicaof 127.0.0.1 1") as replica:
        url = f"unix://{replica.address}"
        with opened(url) as tier, redis.Redis(unix_socket_path=str(replica.address)) as client:
            assert outcomes_of(tier, [one]) == [Outcome.MISSING]
            with pytest.raises(TierError, match="READONLY"):
                store(tier, [one])
            with pytest.raises(TierError, match="READONLY"):
                tier.delete([one.name], patient())
            client.config_set("replica-serve-stale-data", "no")
            with pytest.raises(TierError, match="MASTERDOWN"):
                load(tier, [one])
            with pytest.raises(TierError, match="MASTERDOWN"):
                open_tier(url, patient(), {})


def test_a_server_that_was_restarted_between_two_verbs_costs_nothing(tmp_path: Path, parts: Parts) -> None:
    batch = parts.many(3, 1000)
    with served(tmp_path) as server, opened(f"unix://{server.address}") as tier:
        store_all(tier, batch)
        server.kill()
        server.start()
        assert outcomes_of(tier, batch) == [Outcome.MISSING] * 3
        store_all(tier, batch)
        assert_loads(tier, batch)


def test_no_verb_returns_while_its_threads_receive(
    server: RedisServer, client: Any, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its runs takes long; the verb waits for that, although its own thread has nothing more to do."""
    read, slow = _Value.read, parts.make(7 * MIB)

    def read_slowly(value: _Value, wire: Wire, deadline: Deadline) -> Any:
        if value.part.name == slow.name:
            time.sleep(0.5)
        return read(value, wire, deadline)

    batch = [parts.make(7 * MIB), slow, parts.make(7 * MIB)]
    with opened(f"unix://{server.address}?connections=2") as tier:
        store_all(tier, batch)
        monkeypatch.setattr(_Value, "read", read_slowly)
        for order in (batch, batch[::-1], [batch[1], batch[0], batch[2]]):
            ARENA.reset()
            assert_loads(tier, order)


def test_a_connection_that_was_left_in_mid_reply_is_not_used_again(
    tier: RedisTier, server: RedisServer, parts: Parts
) -> None:
    late, batch = parts.make(8 * MIB), parts.many(4, 300_000)
    store_all(tier, [late, *batch])
    for _ in range(4):
        server.send(signal.SIGSTOP)
        assert tier.load([late.to_load()], Deadline(0.05)) == [Loaded(Outcome.LATE)]
        server.send(signal.SIGCONT)
        assert_loads(tier, batch)


class Impostor:
    """Listens on a port and answers each connection with the bytes it is given, whatever was asked."""

    def __init__(self, *answers: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._answers = answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            one, _ = self._socket.accept()
            with one:
                for _ in range(2):  # CLIENT SETINFO, twice
                    one.recv(4096)
                    one.sendall(b"+OK\r\n")
                one.recv(4096)
                one.sendall(answer)
                time.sleep(0.05)  # the answer is read before the connection ends

    def close(self) -> None:
        self._socket.close()


@pytest.mark.security
@pytest.mark.parametrize("answer", [
    b"", b"$", b"$12\r\nabc", b"+PO", b":x\r\n", b"*-7x\r\n", b"?what\r\n", b"$99999999999\r\n", b"*2\r\n:1\r\n",
    b"x" * 5000, b"$3\r\nabcde", b"*1\r\n" * 40, b"$-1x\r\n", b"-ERR no\r\n",
])  # fmt: skip
def test_what_is_no_reply_of_redis_is_a_tier_error(answer: bytes) -> None:
    impostor = Impostor(answer)
    try:
        with pytest.raises(TierError):
            open_tier(f"redis://127.0.0.1:{impostor.port}", Deadline(20), {})
    finally:
        impostor.close()


def test_a_server_that_is_not_there_is_a_tier_error(tmp_path: Path) -> None:
    began = time.monotonic()
    for url in (f"unix://{tmp_path}/nothing", f"redis://127.0.0.1:{held_port()}", "redis://no-such-host.invalid"):
        with pytest.raises(TierError):
            open_tier(url, Deadline(5), {})
    assert time.monotonic() - began < 40


def test_a_namespace_whose_list_the_server_has_evicted_is_listed_again(
    server: RedisServer, client: Any, parts: Parts
) -> None:
    with opened(f"unix://{server.address}") as before:
        before.change(parts.namespace, begins(1), patient())
        assert before.namespaces(patient()) == [parts.namespace]
    client.delete(NAMESPACES)
    with opened(f"unix://{server.address}") as tier:
        tier.notes([parts.namespace], patient())
        assert tier.namespaces(patient()) == [parts.namespace]


def test_what_others_have_put_into_the_list_of_namespaces_is_left_out(
    server: RedisServer, client: Any, parts: Parts
) -> None:
    with opened(f"unix://{server.address}") as tier:
        tier.change(parts.namespace, begins(1), patient())
        client.sadd(NAMESPACES, b"\xff", "mine", "zz" * 32, parts.namespace.hex().upper())
        assert tier.namespaces(patient()) == [parts.namespace]
