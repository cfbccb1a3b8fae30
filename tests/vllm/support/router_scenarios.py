"""What the server itself tells routers, read by vLLM's own classes, beside what an engine tells of the same blocks."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import zmq
from event_scenarios import PATIENCE_S, Router
from sched_engine import SchedEngine
from sched_scenarios import prompt
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


def told_by_the_server(
    address: str, endpoint: str, replay_endpoint: str, windows: list[int | None], sizes: list[int]
) -> dict[str, Any]:
    """An engine stores a prompt. `stored`: tokens that the server tells of; `same`: those of them of which the engine's
    own events said the same hash, parent and tokens; `again`: tokens of the snapshot."""
    tokens, full = prompt(1, 150), windows.index(None)
    context, decoder = zmq.Context(), msgspec.msgpack.Decoder(KVEventBatch)
    server, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    server.subscribe(b"")
    server.connect(endpoint)
    dealer.connect(replay_endpoint)
    engine = SchedEngine(
        address, windows=windows, sizes=sizes, events=True, weights_digest=os.urandom(8).hex()
    )
    router = Router(engine)
    engine.complete("cold", tokens)
    router.hears(lambda: len(router.prefix(full, "CPU")) == 128)
    heard: list[Any] = []
    until = time.monotonic() + PATIENCE_S
    while _tokens(heard) < 128 and time.monotonic() < until:
        if server.poll(50):
            heard += decoder.decode(server.recv_multipart()[-1]).events
    dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    snapshot: list[Any] = []
    while payload := dealer.recv_multipart()[-1]:
        snapshot += decoder.decode(payload).events
    assert isinstance(snapshot[0], AllBlocksCleared) and not any(isinstance(one, BlockRemoved) for one in heard)
    same = sum(
        len(event.token_ids) for event in heard
        if isinstance(event, BlockStored) and event.medium == "CPU" and all(
            router.ever.get((full, one)) == block for one, block in _blocks(event).items()
        )
    )
    figures = {"stored": _tokens(heard), "same": same, "again": _tokens(snapshot), "wrong": router.wrong}
    router.close()
    engine.close()
    context.destroy(linger=0)
    return figures


def _tokens(events: list[Any]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, BlockStored))


def _blocks(event: BlockStored) -> dict[Any, tuple[Any, list[int]]]:
    """By hash, as Router has them."""
    made, before, size = {}, event.parent_block_hash, event.block_size
    assert len(event.token_ids) == size * len(event.block_hashes)
    for at, one in enumerate(event.block_hashes):
        made[one] = before, list(event.token_ids[at * size : (at + 1) * size])
        before = one
    return made
