"""The connectors' client: the same answers to lookups, with the parts in arrays."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_helpers import ServerProcess, attach, keys, unique
from peer_helpers import listener, reply

from kvdock.client.client import Client
from kvdock.connectors.engine_client import EngineClient
from kvdock.connectors.plans import Chunks
from kvdock.protocol.errors import ApiError, ServerUnavailable, problem_of
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


def test_a_lookup_that_was_begun_has_the_same_answer(server: ServerProcess) -> None:
    with EngineClient(server.unix) as client:
        engine, wanted = attach(client), keys(3, unique("begun"))
        engine.store(wanted[:2])
        body = Lookup(
            session=engine.session, member=engine.member, request=unique("r"), epoch=1,
            keys=b"".join(map(bytes.fromhex, wanted)),
        )
        begun = client.begin_lookup(body)
        assert begun is not None
        found = begun.answer()
        assert found.hit_tokens == 32 and found.lease is not None and [*found.chunks] == [*client.lookup(body).chunks]
        dropped = client.begin_lookup(msgspec.structs.replace(body, request=unique("r")))
        assert dropped is not None
        dropped.drop()
        assert client.lookup(body).lease == found.lease, "on another connection"
        assert client.begin_lookup(msgspec.structs.replace(body, request="\ud800")) is None, "no text"
        refused = client.begin_lookup(msgspec.structs.replace(body, session="0-1"))
        assert refused is not None
        with pytest.raises(ApiError, match="unknown_session"):
            refused.answer()
        engine.leave()


def test_a_begun_lookup_whose_access_token_was_refused_is_sent_with_the_new_one(tmp_path: Path) -> None:
    token, tokens = tmp_path / "token", list[bool]()
    answer: dict[str, Any] = {"hit_tokens": 0, "lease": None, "first_chunk": 0, "chunks": []}

    def serve(connection: socket.socket, number: int) -> None:
        while asked := connection.recv(65536):
            tokens.append(b"kvdock_token_of_now" in asked)
            if tokens[-1] or len(tokens) == 1:
                connection.sendall(reply(msgspec.msgpack.encode(answer)))
            else:
                refusal = msgspec.json.encode(problem_of("unauthenticated", "another token is wanted"))
                connection.sendall(reply(refusal, "401 Unauthorized"))

    token.write_text("kvdock_token_of_before")
    token.chmod(0o600)
    with listener(tmp_path, serve) as address, EngineClient(address, access_token_file=str(token)) as client:
        body = Lookup(session="s", member="m", keys=b"")
        client.lookup(body)
        token.write_text("kvdock_token_of_now")
        begun = client.begin_lookup(body)
        assert begun is not None and begun.answer().hit_tokens == 0
    assert tokens == [False, False, False, True]


def test_an_answer_with_other_parts_is_none(tmp_path: Path) -> None:
    answer = {"hit_tokens": 16, "lease": None, "first_chunk": 0, "chunks": [[[0, 0, 0, -1, 16, 7]]]}

    def serve(connection: socket.socket, number: int) -> None:
        connection.recv(65536)
        connection.sendall(reply(msgspec.msgpack.encode(answer)))

    wrong = pytest.raises(ServerUnavailable, match="a lookup's answer has something else: parts: found")
    with listener(tmp_path, serve) as address, EngineClient(address) as client, wrong:
        client.lookup(Lookup(session="s", member="m", keys=b""))
