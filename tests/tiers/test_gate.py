"""The filter that keeps strangers from the sockets of a library, with real connections between loopback addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvdock.tiers.stores.peers.gate import ADMITTED_S, MOST_ADMITTED, Gate, own_sockets

pytestmark = [pytest.mark.tiers, pytest.mark.security]

SOON_S = 0.3
"""The kernel drops what a stranger sends, so a stranger waits in vain."""


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Door:
    """A listening socket with a gate. `host`: where it listens, which decides on the version of IP."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
        self.port, self.time = self.listening.getsockname()[1], Time()
        self.gate = Gate([self.listening.dup()], self.time)

    def lets_in(self, source: str) -> bool:
        target = "::1" if ":" in source else "127.0.0.1"
        try:
            socket.create_connection((target, self.port), SOON_S, source_address=(source, 0)).close()
        except TimeoutError:
            return False
        self.listening.accept()[0].close()
        return True

    def close(self) -> None:
        self.gate.close()
        self.listening.close()


@pytest.fixture(params=["127.0.0.1", "::"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    found = Door(request.param)
    yield found
    found.close()


def test_nobody_connects_before_anybody_was_admitted(door: Door) -> None:
    assert not door.lets_in("127.0.0.1")


def test_those_that_were_admitted_connect_and_no_others(door: Door) -> None:
    for address in ("127.0.0.2", "127.0.0.3", "10.0.0.1", "fd00::1"):
        door.gate.admit(address)
    assert [door.lets_in(f"127.0.0.{last}") for last in (1, 2, 3, 4)] == [False, True, True, False]


def test_addresses_of_version_6_are_told_apart() -> None:
    door = Door("::")
    try:
        door.gate.admit("fd00::1")
        door.gate.admit("127.0.0.1")
        assert not door.lets_in("::1")
        door.gate.admit("::1")
        assert door.lets_in("::1") and door.lets_in("127.0.0.1") and not door.lets_in("127.0.0.2")
    finally:
        door.close()


def test_an_address_is_admitted_for_some_minutes_and_longer_if_it_calls_again(door: Door) -> None:
    door.gate.admit("127.0.0.2")
    door.gate.admit("127.0.0.3")
    door.time.now_s += ADMITTED_S - 1
    door.gate.admit("127.0.0.3")
    assert door.lets_in("127.0.0.2")
    door.time.now_s += 2
    door.gate.admit("127.0.0.4")
    assert [door.lets_in(f"127.0.0.{last}") for last in (2, 3, 4)] == [False, True, True]


def test_the_kernel_takes_a_filter_of_as_many_as_may_be_admitted() -> None:
    door = Door("::")
    try:
        for at in range(MOST_ADMITTED + 2):
            door.gate.admit(f"fd00::{at:x}")
        door.gate.admit("::1")
        assert door.lets_in("::1")
    finally:
        door.close()


def test_connections_from_before_the_filter_are_ended_and_others_go_on() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    other = socket.create_server(("127.0.0.1", 0))
    early = [socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.0.{last}", 0)) for last in (2, 3)]
    elsewhere = socket.create_connection(other.getsockname())
    accepted = [listening.accept()[0] for _ in early] + [other.accept()[0]]
    gate = Gate([listening.dup()], Time())
    gate.admit("127.0.0.3")
    gate.end_strangers()
    for one in (*early, elsewhere):
        one.settimeout(SOON_S)
    assert early[0].recv(1) == b"", "it was ended"
    for one in (early[1], elsewhere):
        with pytest.raises(TimeoutError):
            one.recv(1)
    gate.close()
    for one in (*early, elsewhere, *accepted, listening, other):
        one.close()


def test_what_is_no_address_is_refused(door: Door) -> None:
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 address"):
        door.gate.admit("node-7")


def test_it_finds_the_listening_sockets_of_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = list(own_sockets(is_listening=True))
        assert listening.getsockname() in [one.getsockname() for one in found]
        for one in found:
            one.close()
