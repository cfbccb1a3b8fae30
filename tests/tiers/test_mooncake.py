"""What only the tier on Mooncake Store does: whose memory its bytes go through, what others can reach of it, and what
happens to copies in progress when a peer hangs."""

from __future__ import annotations

import ctypes
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from mooncake_servers import MooncakeServers
from tier_helpers import ARENA, MIB, POISON, Part, Parts, assert_loads, eventually, load, patient, store, store_all

from kvdock.tiers.notes import begins, name_of_note
from kvdock.tiers.record import HEADER_BYTES
from kvdock.tiers.stores.mooncake.library import Library, MooncakeSettings
from kvdock.tiers.stores.mooncake.tier import MooncakeTier, open_tier
from kvdock.tiers.tier import Deadline, Outcome, StillRunning, TierError, TierUrlError

pytestmark = pytest.mark.tiers

TRIES = 4
"""A busy machine may end what the test wants to get at before it gets there."""


class Kept(Library):
    """Notes where copies go. Stays open for the next test: closing it takes up to a second."""

    addresses: list[int]
    pool: ClassVar[list[Kept]] = []

    def read(self, name: str, address: int, length: int, offset: int) -> int:
        self.addresses.append(address)
        return super().read(name, address, length, offset)

    def write(self, name: str, address: int, length: int, offset: int) -> int:
        self.addresses.append(address)
        return super().write(name, address, length, offset)

    def close(self) -> None:
        self.pool.append(self)


class Tiers:
    """Opens tiers, which are closed at the end of the test."""

    def __init__(self, servers: MooncakeServers) -> None:
        self._servers = servers
        self.opened: list[MooncakeTier] = []

    def open(self, parameters: str = "") -> MooncakeTier:
        """With a client that may have served tests before."""
        return self.over(self.library(), parameters)

    def library(self) -> Kept:
        library = Kept.pool.pop() if Kept.pool else Kept.open(MooncakeSettings.parse(self._servers.url()), patient())
        library.addresses = []
        return library

    def over(self, library: Library, parameters: str) -> MooncakeTier:
        tier = MooncakeTier(MooncakeSettings.parse(self._servers.url(parameters)), library, patience_s=3)
        self.opened.append(tier)
        return tier

    def fresh(self, parameters: str, patience_s: float | None = None) -> MooncakeTier:
        """With a client of its own, which alone follows what the library takes from the environment."""
        tier = MooncakeTier.open(MooncakeSettings.parse(self._servers.url(parameters)), patient(), patience_s)
        self.opened.append(tier)
        return tier

    def close(self, tier: MooncakeTier) -> None:
        self.opened.remove(tier)
        tier.close(patient())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServers]:
    servers = MooncakeServers(tmp_path_factory.mktemp("mooncake"))
    yield servers
    while Kept.pool:
        Library.close(Kept.pool.pop())
    servers.end()


@pytest.fixture
def servers(running: MooncakeServers) -> MooncakeServers:
    ARENA.reset()
    running.reset()
    return running


@pytest.fixture
def tiers(servers: MooncakeServers) -> Iterator[Tiers]:
    tiers = Tiers(servers)
    yield tiers
    servers.peer.resume()
    for tier in list(tiers.opened):
        tiers.close(tier)


def test_a_part_that_was_evicted_while_it_was_read_is_missing_and_not_damaged(
    tiers: Tiers, servers: MooncakeServers, parts: Parts
) -> None:
    class Evicting(Library):
        def read(self, name: str, address: int, length: int, offset: int) -> int:
            servers.client.remove(name, True)
            ctypes.memset(address, POISON, length)  # what another object has put in its place
            return length

    part, settings = parts.make(MIB), MooncakeSettings.parse(servers.url())
    store_all(tiers.open(), [part])
    tier = MooncakeTier(settings, Evicting.open(settings, patient()), patience_s=30)
    tiers.opened.append(tier)
    assert load(tier, [part])[0].answer.outcome is Outcome.MISSING


@pytest.mark.parametrize("direct", ["yes", "no"])
def test_bytes_go_straight_from_and_to_the_pages_or_through_memory_of_the_tier(
    tiers: Tiers, parts: Parts, direct: str
) -> None:
    library = tiers.library()
    tier = tiers.over(library, f"direct={direct}")
    for part in (parts.make(100_000), parts.make(9 * MIB + 1)):  # one of several pieces
        source, target = part.to_store(), part.to_load()
        assert tier.store([source], patient()) == [Outcome.DONE]
        assert tier.load([target], patient())[0][:2] == (Outcome.DONE, part.record.checksum)
        assert target.pages[: target.length] == part.data
        assert ARENA.guards_are_whole()
        for pages in (source.pages, target.pages):
            assert (address_of(pages) in library.addresses) is (direct == "yes")


def test_nobody_reaches_the_pool_through_the_clients_port(
    tiers: Tiers, servers: MooncakeServers, parts: Parts
) -> None:
    """The library's clients listen on all addresses, and let every host read and write registered memory, without a
    password. So over TCP no memory of the pool is registered."""
    part = parts.make(MIB)
    source = part.to_store()
    where, first = address_of(source.pages), part.data[:64]
    tier = tiers.open()
    tier.register(where, len(source.pages))
    store_all(tier, [part])
    for port in listening():
        assert raw_read(port, where) == b""
        raw_write(port, where)
    assert source.pages[: len(part.data)] == part.data
    tier.unregister(where)
    servers.client.register_buffer(where, len(source.pages))  # registered memory is reached with the same request
    eventually(lambda: first in [raw_read(port, where) for port in listening()])
    servers.client.unregister_buffer(where)


def test_two_processes_of_the_pool_find_each_others_parts(tiers: Tiers, parts: Parts) -> None:
    one, other = tiers.open(), tiers.open()
    mine, yours = parts.many(3, 200_000), parts.many(3, 200_000)
    store_all(one, mine)
    store_all(other, yours)
    assert_loads(other, mine)
    assert_loads(one, yours)
    other.delete([mine[0].name], patient())
    assert one.exists([part.name for part in mine], patient()) == [False, True, True]


def test_what_a_process_contributes_serves_others_until_it_closes(tiers: Tiers, parts: Parts) -> None:
    with_memory, without = tiers.fresh("contribute=64MiB&replicas=2"), tiers.open()
    batch = parts.many(4, MIB)
    store_all(with_memory, batch)  # a replica each with the peer and here
    assert_loads(without, batch)
    tiers.close(with_memory)
    assert_loads(without, batch)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_peer_that_hangs_in_the_midst_of_a_copy_leaves_the_pages_alone(
    tiers: Tiers, servers: MooncakeServers, parts: Parts, verb: str
) -> None:
    """The copy ends soon after the deadline, because it makes no progress, and nothing comes later."""
    tier = tiers.fresh("stall_s=1", patience_s=30)
    part, outcome = hung(tier, servers, parts, verb)
    assert outcome in (Outcome.LATE, Outcome.FAILED)
    other = tiers.open()
    store_all(other, [part])  # what was begun for it is not in the way
    assert_loads(other, [part])


def test_what_was_written_up_to_its_header_is_no_hit_and_can_be_stored(
    tiers: Tiers, servers: MooncakeServers, parts: Parts
) -> None:
    """The peer hangs when the bytes follow."""

    class Hanging(Library):
        def write(self, name: str, address: int, length: int, offset: int) -> int:
            if offset:
                servers.peer.stop()
            return super().write(name, address, length, offset)

    settings, part = MooncakeSettings.parse(servers.url("stall_s=1")), parts.make(MIB)
    tier = MooncakeTier(settings, Hanging.open(settings, patient()), patience_s=30)
    tiers.opened.append(tier)
    assert store(tier, [part]) == [Outcome.FAILED]
    servers.peer.resume()
    other = tiers.open()
    assert load(other, [part])[0].answer.outcome is Outcome.MISSING
    store_all(other, [part])
    assert_loads(other, [part])


def test_a_copy_that_does_not_end_is_still_running(
    tiers: Tiers, servers: MooncakeServers, parts: Parts
) -> None:
    tier = tiers.fresh("stall_s=15", patience_s=0.2)
    with pytest.raises(StillRunning):
        hung(tier, servers, parts, "load")


def test_a_peer_that_hangs_before_a_copy_never_gets_at_the_pages(
    tiers: Tiers, servers: MooncakeServers, parts: Parts
) -> None:
    """The header feels it: the verb comes back at its deadline, without StillRunning, long before the copy of the
    header is broken off."""
    part = parts.make(MIB)
    tier = tiers.fresh("stall_s=15", patience_s=0)
    store_all(tier, [part])
    servers.peer.stop()
    for _ in range(2):
        assert load(tier, [part], Deadline(0.2))[0].answer.outcome is Outcome.LATE
        assert store(tier, [parts.make(MIB)], Deadline(0.2)) == [Outcome.LATE]
    servers.peer.resume()
    assert_loads(tier, [part])


@pytest.mark.parametrize("verb", ["notes", "change"])
def test_a_note_that_a_peer_does_not_give_is_not_begun_anew(
    tiers: Tiers, servers: MooncakeServers, verb: str
) -> None:
    """That would make all that was stored under it unreachable."""
    namespace, tier = secrets.token_bytes(32), tiers.fresh("stall_s=1")
    begun = tier.change(namespace, begins(0), patient())
    servers.peer.stop()
    with pytest.raises(TierError, match="cannot be read"):
        if verb == "notes":
            tier.notes([namespace], patient())
        else:
            tier.change(namespace, begins(1), patient())
    servers.peer.resume()
    assert tier.notes([namespace], patient()) == [begun]


def test_an_object_that_is_too_short_for_a_note_is_replaced_by_one(tiers: Tiers, servers: MooncakeServers) -> None:
    namespace, tier = secrets.token_bytes(32), tiers.open()
    servers.put(name_of_note(namespace), b"short")
    assert tier.notes([namespace], patient()) == [None]
    begun = tier.change(namespace, begins(0), patient())
    assert tier.notes([namespace], patient()) == [begun]


def test_a_write_that_never_ended_is_no_hit_and_can_be_stored(
    tiers: Tiers, servers: MooncakeServers, parts: Parts
) -> None:
    """Its writer is another process, and begins, writes nothing and dies or ends it."""
    first, second = parts.many(2, 100_000)
    tier = tiers.open()
    for part in (first, second):
        key = part.name.text()
        assert servers.client.batch_put_session_start([key], [HEADER_BYTES + part.record.length]) == [0]
    assert servers.client.batch_put_session_end([first.name.text()]) == [0]
    assert load(tier, [first])[0].answer.outcome is Outcome.DAMAGED
    assert load(tier, [second])[0].answer.outcome is Outcome.MISSING
    assert tier.exists([second.name], patient()) == [False]
    store_all(tier, [first])
    assert store(tier, [second]) == [Outcome.FAILED]  # the other may be writing still
    servers.client.batch_put_session_revoke([second.name.text()])
    store_all(tier, [second])
    assert_loads(tier, [first, second])


def test_a_write_whose_end_the_master_did_not_hear_is_begun_anew(tiers: Tiers, parts: Parts) -> None:
    """The library keeps it as begun."""
    part = parts.make(100_000)
    library = tiers.library()
    assert library.begin_writes([part.name.text()], [HEADER_BYTES + part.record.length]) == [0]
    tier = tiers.over(library, "")
    store_all(tier, [part])
    assert_loads(tier, [part])


# --------------------------------------------------------------------------- opening


def test_opening_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)  # as if it were not there
    with pytest.raises(TierError, match=re.escape("wanted: pip install 'kvdock[mooncake]', and libibverbs1")):
        open_tier("mooncake://127.0.0.1:50051", patient())


def test_opening_without_a_master_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(TierError, match=f"the master at 127.0.0.1:{port} is not reached"):
        MooncakeTier.open(MooncakeSettings.parse(f"mooncake://127.0.0.1:{port}"), patient())


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="there may be RDMA")
def test_opening_with_rdma_where_there_is_none_says_so(tiers: Tiers) -> None:
    """The library itself would go over TCP."""
    with pytest.raises(TierError, match="found the RDMA devices none, wanted mlx5_0"):
        tiers.fresh("protocol=rdma&device=mlx5_0")


def test_settings_of_a_url() -> None:
    url = (
        "mooncake://[::1]:50051?protocol=rdma&device=mlx5_0,mlx5_1&local_host=10.0.0.5&contribute=8GiB&replicas=2"
        "&threads=8&stall_s=3&master_s=2&direct=no"
    )
    assert MooncakeSettings.parse(url) == MooncakeSettings(
        "::1", 50051, "rdma", "mlx5_0,mlx5_1", "10.0.0.5", 8 << 30, 2, 8, 3, 2, direct=False
    )
    assert MooncakeSettings.parse("mooncake://127.0.0.1:50051") == MooncakeSettings("127.0.0.1", 50051)
    assert MooncakeSettings("127.0.0.1", 50051).address() == "127.0.0.1"


@pytest.mark.parametrize(("url", "says"), [
    ("redis://h:1", "found a URL of scheme 'redis', wanted one of mooncake"),
    ("mooncake://h", "wanted mooncake://HOST:PORT"),
    ("mooncake://:7", "wanted mooncake://HOST:PORT"),
    ("mooncake://h:x", "wanted mooncake://HOST:PORT"),
    ("mooncake://h:1/folder", "wanted mooncake://HOST:PORT"),
    ("mooncake://me@h:1", "wanted mooncake://HOST:PORT"),
    ("mooncake://h:1?colour=red", "found parameter 'colour', wanted one of contribute, device, direct"),
    ("mooncake://h:1?contribute=8GB", "found contribute='8GB', wanted a size in bytes, or like 512MiB"),
    ("mooncake://h:1?protocol=udp", "found protocol='udp', wanted tcp or rdma"),
    ("mooncake://h:1?device=mlx5_0", "found device='mlx5_0' without protocol=rdma"),
    ("mooncake://h:1?stall_s=0", "found stall_s='0', wanted a whole number from 1 to 20"),
])
def test_a_url_that_is_not_understood_is_refused(url: str, says: str) -> None:
    with pytest.raises(TierUrlError, match=re.escape(says)):
        MooncakeSettings.parse(url)


# --------------------------------------------------------------------------- what the tests above are made of


def hung(tier: MooncakeTier, servers: MooncakeServers, parts: Parts, verb: str) -> tuple[Part, Outcome]:
    """A part, and what a verb answers for it whose peer is stopped as soon as bytes move. A busy machine may stop the
    peer only after the copy: then another part is tried."""
    for _ in range(TRIES):
        part = parts.make(32 * MIB)
        if (outcome := stopped_midway(tier, servers, part, verb)) is not Outcome.DONE:
            break
        tier.delete([part.name], patient())
    return part, outcome


def stopped_midway(tier: MooncakeTier, servers: MooncakeServers, part: Part, verb: str) -> Outcome:
    """Whatever the verb answers, the pages have their poison long after it, or did not change any more."""
    source, target = part.to_store(), part.to_load()
    if verb == "load":
        store_all(tier, [part])
    deadline = Deadline()

    def stop() -> None:
        if verb == "load":
            while target.pages[MIB] == POISON and target.pages[MIB + 1] == POISON:
                time.sleep(0)  # the copy goes on beside it
        else:
            time.sleep(0.004)  # nothing can be seen from outside of a store that has begun
        servers.peer.stop()
        deadline.cancel()

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        if verb == "load":
            outcome = tier.load([target], deadline)[0].outcome
        else:
            (outcome,) = tier.store([source], deadline)
    finally:
        stopper.join()
    target.pages[:] = bytes([POISON]) * len(target.pages)
    servers.peer.resume()
    time.sleep(0.3)
    assert target.pages == bytes([POISON]) * len(target.pages)
    return outcome


def address_of(pages: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def listening() -> set[int]:
    """Ports on which this process listens."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        mine.add(target.removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and line[9] in mine}


def raw_read(port: int, address: int) -> bytes:
    """What the port answers to a request of the transport for 64 bytes of that address; b"": nothing."""
    return _raw(port, struct.pack("<QQB7x", 64, address, 0))


def raw_write(port: int, address: int) -> None:
    _raw(port, struct.pack("<QQB7x", 64, address, 1) + bytes(64))


def _raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as connection:
        connection.sendall(request)
        try:
            return connection.recv(64)
        except OSError:
            return b""
