"""Reads a server's KV events, as routers do: over ZeroMQ and as server-sent events; and what a router then believes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import zmq
from api_helpers import OPERATOR, ServerProcess, raw
from ports import held_port

TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""In vLLM's order."""
Frames = tuple[str, int, list[dict[str, Any]]]
"""(topic, number, events by field)."""


def endpoints() -> dict[str, str]:
    """Settings of a server that publishes on free loopback ports."""
    return {
        "observe": "log,stream,metrics,curve,kv_events",
        "kv_events_endpoint": f"tcp://127.0.0.1:{held_port()}",
        "kv_events_replay_endpoint": f"tcp://127.0.0.1:{held_port()}",
    }


def decoded(topic: bytes, number: bytes, payload: bytes) -> Frames:
    ts, events, *_ = msgspec.msgpack.decode(payload)
    assert ts > 0
    return topic.decode(), int.from_bytes(number, "big"), [_by_field(event) for event in events]


def _by_field(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    tag, *values = event
    return {"type": tag, **dict(zip(FIELDS[tag], values, strict=True))}


class Publisher(Protocol):
    """A server, or an engine."""

    @property
    def settings(self) -> Mapping[str, Any]: ...


class ZmqReader:
    """A subscriber, and who asks again."""

    def __init__(self, server: Publisher, topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.subscribe(topic)
        self._monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)  # before the handshake can be over
        self._sub.connect(str(server.settings["kv_events_endpoint"]))
        self._dealer.connect(str(server.settings["kv_events_replay_endpoint"]))
        for socket in (self._sub, self._dealer):
            socket.set(zmq.RCVTIMEO, 20_000)
        assert self.is_connected(20_000)

    def is_connected(self, wait_ms: int = 0) -> bool:
        """Whether it has (again) been connected, since it was last asked."""
        is_new = bool(self._monitor.poll(wait_ms))
        if is_new:
            self._monitor.recv_multipart()
            time.sleep(0.1)  # the subscription follows
        return is_new

    def next(self) -> Frames:
        topic, number, payload = self._sub.recv_multipart()
        return decoded(topic, number, payload)

    def heard(self) -> list[Frames]:
        """All that has come by now."""
        found = []
        while self._sub.poll(0):
            found.append(self.next())
        return found

    def ask(self, first: int) -> list[Frames]:
        self._dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[Frames] = []
        while True:
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return found
            found.append(decoded(topic, number, payload))

    def close(self) -> None:
        self._sub.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)


def streamed(
    server: ServerProcess, last_id: str = "", token: str = OPERATOR
) -> list[tuple[str, dict[str, Any]]]:
    """(id, body) of each event of the stream, now."""
    headers = {"Authorization": f"Bearer {token}", **({"Last-Event-ID": last_id} if last_id else {})}
    status, found, body = raw(server.http, "GET", "/v1/kv-events", headers=headers)
    assert (status, found["content-type"]) == (200, "text/event-stream; charset=utf-8"), body
    pieces = []
    for piece in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in piece.splitlines() if line and line[0] != ":")
        if "data" in fields:
            pieces.append((fields.get("id", ""), json.loads(fields["data"])))
    return pieces


class Belief:
    """What a router believes: the hashes that are there."""

    def __init__(self) -> None:
        self.there: set[Any] = set()

    def hear(self, events: list[dict[str, Any]]) -> set[Any]:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    assert not self.there & set(event["block_hashes"]), "stored twice"
                    self.there |= set(event["block_hashes"])
                case "BlockRemoved":
                    assert self.there >= set(event["block_hashes"]), "removed, and was not there"
                    self.there -= set(event["block_hashes"])
                case "AllBlocksCleared":
                    self.there.clear()
        return self.there
