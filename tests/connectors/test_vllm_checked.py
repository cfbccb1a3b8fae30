"""What is promised only after it was hashed: damage is a miss, and so is what could not be hashed at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess
from connector_helpers import PER_CHUNK, Rig, Spectator, tokens_of

from kvdock.client.client import Client
from kvdock.connectors.scheduler import Fetch
from kvdock.connectors.vllm.checked import CheckedScheduler

TOKENS = tokens_of(1, 2)
HIT = len(TOKENS)


@pytest.fixture
def rig(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With TOKENS stored, in a namespace of the test's own."""
    with Rig(server.unix, salt=request.node.name) as one:
        one.store("stored", TOKENS, range(2 * PER_CHUNK))
        yield one


def fetch_of(half: CheckedScheduler, request: str, tokens: list[int] = TOKENS) -> Fetch:
    found = half.lookup(request, tokens, 0)
    assert isinstance(found, Fetch)
    return found


def leases(client: Client, rig: Rig) -> int:
    return sum(lease.session == rig.attachment.session for lease in client.leases().leases)


def cannot_hash(length: int) -> None:
    raise MemoryError(f"no keys for {length} bytes")


def test_what_is_whole_is_promised(rig: Rig) -> None:
    for always in (False, True):
        half = CheckedScheduler(rig.connector.session, always=always)
        request = f"always-{always}"
        half.fetch(fetch_of(half, request))
        assert half.lookup(request, TOKENS, 0) == HIT and half.is_whole(request) == always
        half.check(request)
        assert half.lookup(request, TOKENS, 0) == HIT and half.is_whole(request)


@pytest.mark.parametrize("always", [False, True])
def test_what_is_damaged_is_a_miss_and_goes(rig: Rig, client: Client, always: bool) -> None:
    half = CheckedScheduler(rig.connector.session, always=always)
    with Spectator(client, rig.connector.session.manifest) as spectator:
        spectator.flip(spectator.slots(TOKENS)[1], 5)
        half.fetch(fetch_of(half, "r"))
        half.check("r")
        assert half.lookup("r", TOKENS, 0) == 0 and half.is_whole("r") and leases(client, rig) == 0
        assert len(spectator.slots(TOKENS)) == 1


@pytest.mark.parametrize("always", [False, True])
def test_what_cannot_be_hashed_is_a_miss_whatever_was_raised(
    rig: Rig, client: Client, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = CheckedScheduler(rig.connector.session, always=always)
    fetch = fetch_of(half, "r")
    with monkeypatch.context() as broken:
        broken.setattr("kvdock.connectors.vllm.checked.ensure_keys", cannot_hash)
        if not always:
            half.fetch(fetch)
            assert half.lookup("r", TOKENS, 0) == HIT and not half.is_whole("r") and leases(client, rig) == 1
        with pytest.raises(MemoryError, match="no keys for"):  # which its caller logs
            half.fetch(fetch) if always else half.check("r")
    assert half.lookup("r", TOKENS, 0) == 0 and half.is_whole("r") and leases(client, rig) == 0


@pytest.mark.parametrize("always", [False, True])
def test_a_request_that_was_given_a_miss_may_ask_for_more_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    half = CheckedScheduler(rig.connector.session, always=always)
    fetch = fetch_of(half, "r", TOKENS[: HIT // 2])
    with monkeypatch.context() as broken:
        broken.setattr("kvdock.connectors.vllm.checked.ensure_keys", cannot_hash)
        if not always:
            half.fetch(fetch)
        with pytest.raises(MemoryError):
            half.fetch(fetch) if always else half.check("r")
    assert half.lookup("r", TOKENS[: HIT // 2], 0) == 0
    half.fetch(fetch_of(half, "r"))
    assert half.lookup("r", TOKENS, 0) == HIT, "its cancelled lease was asked for again"
