"""What is offered again after a store that found no room, or whose server was gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess
from connector_helpers import CHUNK, PER_CHUNK, Rig, tokens_of

from kvdock.connectors.stores import StoreOffer, Stores

MIB = 1 << 20
TOKENS = tokens_of(5, chunks=12)
BLOCKS = list(range(12 * PER_CHUNK))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB) as small, Rig(small.unix) as made:
        yield made


@pytest.fixture
def stores(rig: Rig) -> Stores:
    return rig.connector.scheduler.stores


def offer(stores: Stores, chunks: int) -> StoreOffer:
    made = stores.begin_store("r", TOKENS, [BLOCKS], chunks * CHUNK)
    assert made is not None
    made.attachment.release()
    return made


def chunks_of(made: StoreOffer) -> tuple[int, int]:
    return made.batches[0].first, made.batches[-1].first + len(made.batches[-1].keys)


def test_what_lies_between_two_offers_that_found_no_room_is_offered_again(stores: Stores) -> None:
    first, second = offer(stores, 4), offer(stores, 6)
    stores._requests["r"].store.reserved = 2
    stores._fell_short(first, 2)
    third = offer(stores, 8)
    assert chunks_of(second) == (4, 6) and chunks_of(third) == (2, 8)
    assert stores.reserve(second, second.batches[0]) is None, "nobody could find it behind the gap"
    assert stores.reserve(third, third.batches[0]) is not None
    assert chunks_of(offer(stores, 10))[0] <= 8


def test_a_store_that_met_no_server_leaves_no_gap(rig: Rig, stores: Stores) -> None:
    attachment = rig.attachment
    one = offer(stores, 4)
    rig.connector.session._attachment = None  # suspended for a moment
    assert stores.reserve(one, one.batches[0]) is None
    rig.connector.session._attachment = attachment
    again = offer(stores, 6)
    assert chunks_of(again) == (0, 6) and stores.reserve(again, again.batches[0]) is not None


def test_news_of_a_request_before_its_preemption_do_not_touch_the_one_that_came_back(
    rig: Rig, stores: Stores
) -> None:
    before = offer(stores, 8)
    rig.connector.scheduler.finished("r")
    offer(stores, 4)
    stores._fell_short(before, 1)
    assert stores._requests["r"].store.offered == 4
    assert stores.begin_last_store("r", [BLOCKS], len(TOKENS)) is None, "nothing of it fell short"


def test_what_failed_to_load_is_not_stored_when_its_request_ends(rig: Rig, stores: Stores) -> None:
    stores._fell_short(offer(stores, 8), 6)
    rig.connector.scheduler.lookups.load_failed("r", 2 * CHUNK)
    assert stores.begin_last_store("r", [BLOCKS], len(TOKENS)) is None


def test_no_more_is_stored_when_a_request_ends_than_was_computed(stores: Stores) -> None:
    stores._fell_short(offer(stores, 8), 2)
    last = stores.begin_last_store("r", [BLOCKS], 4 * CHUNK - 1)
    assert last is not None and chunks_of(last) == (2, 3)
    last.attachment.release()
