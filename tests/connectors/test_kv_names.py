"""A connector says what routers know chunks by where the server asks for it, and nothing where it does not."""

from __future__ import annotations

from typing import Any

from api_helpers import ServerProcess, eventually
from connector_helpers import BLOCK, CHUNK, Rig
from engine_helpers import prompt
from kv_readers import streamed
from server_fixtures import fresh_server

from kvdock.protocol.keys import chunk_keys

server = fresh_server(observe="kv_events")


def told(server: ServerProcess) -> list[dict[str, Any]]:
    return [event for _, body in streamed(server) for event in body["events"] if event["type"] == "BlockStored"]


def test_an_engine_without_hashes_says_tokens_and_its_keys_stand_for_them(server: ServerProcess) -> None:
    rig, tokens = Rig(server.unix), prompt(1, 3 * CHUNK + 5)
    rig.store("s", tokens[: 2 * CHUNK], range(2 * CHUNK // BLOCK))
    rig.store("s", tokens, range(len(tokens) // BLOCK))
    keys = [key[-8:].hex() for key in chunk_keys(rig.attachment.namespace, tokens, CHUNK)]
    eventually(lambda: len(told(server)) == 3)
    for at, event in enumerate(told(server)):
        assert event["block_hashes"] == [keys[at]] and event["parent_block_hash"] == (keys[at - 1] if at else None)
        assert event["token_ids"] == tokens[at * CHUNK : (at + 1) * CHUNK] and event["block_size"] == CHUNK
    rig.connector.finished("s")
    assert rig.connector._tokens.of == {}
    rig.close()


def test_a_server_that_tells_no_routers_hears_no_tokens() -> None:
    with ServerProcess() as server:
        rig, tokens = Rig(server.unix), prompt(1, 2 * CHUNK)
        assert not rig.attachment.wants_blocks
        offer = rig.connector.scheduler.stores.begin_store("s", tokens, [list(range(2 * CHUNK // BLOCK))], 2 * CHUNK)
        assert offer is not None and offer.names == ()
        offer.attachment.release()
        rig.close()
