"""KV cache events over ZeroMQ, in vLLM's wire format: a PUB socket, and a ROUTER socket that sends what was missed.

    published   (topic, number as 8 bytes big-endian, MessagePack of KvBatch)
    asked       ("", number): again from that number on
    answered    ("", topic, number, MessagePack) for each batch, then ("", "", -1, "")

A number that is not kept is answered with a snapshot (kvdock/api/feeds/kv.py). A thread of its own owns the
sockets, so that no reader holds up the event loop. ZeroMQ does not identify callers, so only events of the server's own
user are sent.

Needs the extra `zmq`; kvdock/api/feeds/feeds.py alone imports this module.
"""

from __future__ import annotations

import logging
import os
import threading

import msgspec
import zmq

from kvdock.api.background import Background
from kvdock.api.feeds.kv import Batch, KvLog
from kvdock.protocol.kv_events import KvBatch, positional
from kvdock.protocol.wire_types import OWN_TENANT

SEND_MS = 1000
"""A reader that takes nothing of an answer for this long gets no more of it, and has to ask again."""
END_SEQ = (-1).to_bytes(8, "big", signed=True)
NUMBER_BYTES = 8

log = logging.getLogger("kvdock.api")


class KvZmq:
    """Binds `endpoint` and, unless it is empty, `replay_endpoint`: zmq.ZMQError. `topic`: `{model}` in it becomes the
    model's name. `is_positional`: events are arrays, as vLLM before 0.24 had them, and not maps."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, *, is_positional: bool) -> None:
        self._topic, self._is_positional = topic, is_positional
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            self._publisher.bind(endpoint)
            self._replay.set(zmq.SNDTIMEO, SEND_MS)
            self._replay.set(zmq.ROUTER_MANDATORY, 1)  # waits for slow readers; else it would leave out what they miss
            if replay_endpoint:
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._news = os.eventfd(0, os.EFD_NONBLOCK)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses at which the sockets listen, with the ports that the system chose where none was named."""
        return self._publisher.get_string(zmq.LAST_ENDPOINT), self._replay.get_string(zmq.LAST_ENDPOINT)

    def start(self, source: KvLog, background: Background) -> None:
        source.listeners.append(self._wake)
        self._thread = background.thread("publishing KV events", lambda: self._run(source), self._ending)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread is None:
            self._context.destroy(linger=0)
            return
        self._wake()
        self._thread.join(2 * SEND_MS / 1000)

    def _wake(self) -> None:
        os.eventfd_write(self._news, 1)

    # ---------------------------------------------------------------- its own thread

    def _run(self, source: KvLog) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._news, zmq.POLLIN)
        following = source.next_of(OWN_TENANT)
        while not self._ending.is_set():
            found = dict(poller.poll())
            if self._news in found:
                os.eventfd_read(self._news)
                batches, is_snapshot = source.since(OWN_TENANT, following)
                for batch in list(batches)[-1:] if is_snapshot else batches:  # readers see the gap, and ask
                    self._publisher.send_multipart(self._framed(batch))
                    following = batch.seq + 1
            if self._replay in found:
                try:
                    self._answer(source)
                except zmq.ZMQError as error:  # the reader is gone, or takes nothing: it can ask again
                    log.info("a reader of KV events got no whole answer: %s", error)
        self._context.destroy(linger=0)

    def _framed(self, batch: Batch) -> tuple[bytes, bytes, bytes]:
        events = batch.events()
        wire = [positional(event) for event in events] if self._is_positional else events
        topic = self._topic.replace("{model}", batch.model).encode()
        return topic, batch.seq.to_bytes(NUMBER_BYTES, "big"), self._encode(KvBatch(batch.at, list(wire)))

    def _answer(self, source: KvLog) -> None:
        reader, *asked = self._replay.recv_multipart()
        if len(asked) != 2 or asked[0] or len(asked[1]) != NUMBER_BYTES:
            log.info("a reader of KV events asked for something else than a number")
            return
        batches = list(source.since(OWN_TENANT, int.from_bytes(asked[1], "big"))[0])
        # Over ZeroMQ each batch has a number of its own, and the last one that of the newest event.
        for number, batch in enumerate(batches, batches[-1].seq - len(batches) + 1 if batches else 0):
            batch = msgspec.structs.replace(batch, seq=number)
            self._replay.send_multipart((reader, b"", *self._framed(batch)))
        self._replay.send_multipart((reader, b"", b"", END_SEQ, b""))
