"""The connectors' client: the same answers to lookups, with the parts in arrays."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from api_helpers import ServerProcess, attach, keys, unique
from peer_helpers import listener, reply

from kvdock.client.client import Client
from kvdock.connectors.engine_client import EngineClient
from kvdock.connectors.plans import Chunks
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import Lookup


def test_its_answers_to_lookups_are_those_of_the_other_client(server: ServerProcess) -> None:
    with Client(server.unix) as client, EngineClient(server.unix) as other:
        engine, wanted = attach(client), keys(5, unique("arrays"))
        engine.store(wanted[:3])
        for some, skip in ((wanted, 0), (wanted[:2], 16), (wanted[3:], 0)):
            body = Lookup(
                session=engine.session, member=engine.member, request=unique("r"), epoch=1,
                keys=b"".join(map(bytes.fromhex, some)), skip_prefix_tokens=skip,
            )
            plain, found = client.lookup(body), other.lookup(body)
            assert isinstance(found.chunks, Chunks) and [*found.chunks] == plain.chunks
            assert found.lease == plain.lease and (found.lease is None) is (some[0] == wanted[3])
            assert msgspec.structs.replace(found, chunks=[]) == msgspec.structs.replace(plain, chunks=[])
        with pytest.raises(ApiError, match="unknown_session"):
            other.lookup(msgspec.structs.replace(body, session="0-1"))
        engine.leave()


def test_an_answer_with_other_parts_is_none(tmp_path: Path) -> None:
    answer = {"hit_tokens": 16, "lease": None, "first_chunk": 0, "chunks": [[[0, 0, 0, -1, 16, 7]]]}

    def serve(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(reply(msgspec.msgpack.encode(answer)))

    wrong = pytest.raises(ServerUnavailable, match="a lookup's answer has something else: parts: found")
    with listener(tmp_path, serve) as address, EngineClient(address) as client, wrong:
        client.lookup(Lookup(session="s", member="m", keys=b""))
