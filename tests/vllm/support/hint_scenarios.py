"""What hints of vLLM's requests do at a server with little room: each scenario's figures are chunks that are found."""

from __future__ import annotations

import os
import time
from typing import Any

from sched_engine import SchedEngine
from sched_scenarios import prompt
from vllm.v1.request import Request, RequestStatus

from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.protocol.keys import HashedChain, KeyChain
from kvdock.protocol.schemas import Lookup

CHUNK = 32
SHARED, OWN = 4 * CHUNK, 6 * CHUNK + 5
LONG = 31 * CHUNK + 5
PATIENCE_S = 10.0
ACTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "retain": ("kv.retain", {"priority": 10, "duration": 600}),
    "briefly": ("kv.retain", {"priority": 10, "duration": 0.05}),
    "range": ("kv.retain", {"directives": [{"priority": 10, "end": 6 * CHUNK, "duration": 600}]}),
    "priority": ("vllm.set_priority", {"target": "request_cached", "value": 10, "ttl_seconds": 600}),
    "low": ("vllm.set_priority", {"target": "request_cached", "value": -10, "ttl_seconds": 600}),
    "evict": ("kv.evict", {"include_current_request": True}),
    "unknown": ("kv.prefetch", {"priority": 10}),
    "malformed": ("kv.retain", {"priority": "much"}),
}


def hint_of(kind: str) -> dict[str, Any]:
    """What makes a request that has it: parameters of SchedEngine.add."""
    if kind == "params":
        return {"kv_transfer_params": {"kvdock": {"session_end": True}}}
    if kind == "none":
        return {}
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # newer versions have it

    action_type, payload = ACTIONS[kind]
    action = KvHintAction(action_id="a", action_type=action_type, action_version="1.0", payload=payload)
    return {"kv_hints": KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[action])}


class Hinted:
    def __init__(self, address: str, **settings: Any) -> None:
        self.engine = SchedEngine(
            address, blocks=200, chunk_tokens=CHUNK, weights_digest=os.urandom(8).hex(), **settings
        )
        self.scheduler = self.engine.scheduler.connector._scheduler
        self.ignored: list[int] = []
        count = self.scheduler._hints._ignored

        def counted(number: int) -> None:
            self.ignored.append(number)
            count(number)

        self.scheduler._hints._ignored = counted

    def compute(self, name: str, tokens: list[int], **hint: Any) -> Request:
        """Until all of it is stored."""
        request = self.engine.complete(name, tokens, 2, **hint)
        assert self.reaches(lambda: self.found(request) == len(tokens) // CHUNK), f"{name}: {self.found(request)}"
        return request

    def found(self, request: Request) -> int:
        """Chunks, without using them."""
        session = self.scheduler._session
        namespace = session.attachment.namespace
        hits = []
        for chain in (KeyChain(namespace, CHUNK), HashedChain(namespace, CHUNK, request.block_hashes, 16)):
            chain.follow(request.all_token_ids)
            body = Lookup(namespace=namespace.hex(), keys=b"".join(chain.keys))
            hits.append(session.client.lookup(body).hit_tokens // CHUNK)
        return max(hits)

    def retained(self) -> int:
        return int(self.scheduler._session.client.status().pool.retained_bytes) // 4096

    def fill(self, chunks: int) -> None:
        """With other requests' chunks, each once."""
        seed = 1000
        while chunks > 0:
            count, seed = min(chunks, LONG // CHUNK), seed + 1
            self.compute(f"fill {chunks}", prompt(seed, count * CHUNK + 1))
            chunks -= count

    def reaches(self, claim: Any) -> bool:
        until = time.monotonic() + PATIENCE_S
        while not claim() and time.monotonic() < until:
            self.engine.step()
            time.sleep(0.005)
        return bool(claim())

    def figures(self, **requests: Request) -> dict[str, Any]:
        wrong = len(self.engine.bad_reads) + self.engine.wrong_tokens
        counts = {name: self.found(request) for name, request in requests.items()}
        return {**counts, "wrong": wrong, "ignored": sum(self.ignored)}


def pressed(address: str, hint: str, chunks: int) -> dict[str, Any]:
    """`older`, `wanted` with the hint, and `other`, which begins as `wanted` does; then `chunks` chunks of others."""
    made = Hinted(address)
    shared = prompt(1, SHARED)
    older = made.compute("older", prompt(2, 10 * CHUNK + 5))
    wanted = made.compute("wanted", shared + prompt(3, OWN))
    other = made.compute("other", shared + prompt(4, OWN))
    # The hint comes with a request that finds all that it computes stored already, as a conversation's last turn may.
    made.engine.forget_prefixes()
    made.compute("wanted again", shared + prompt(3, OWN), **hint_of(hint))
    if hint in ("retain", "priority", "range"):
        made.reaches(lambda: made.retained() > 0)
    retained = made.retained()
    if hint == "briefly":
        assert made.reaches(lambda: made.retained() == 0)
    made.fill(chunks)
    found = made.figures(older=older, wanted=wanted, other=other)
    made.engine.close()
    return {**found, "retained": retained}


def stored_late(address: str) -> dict[str, Any]:
    """The hint of a request whose chunks nobody has yet: they are being stored when it ends."""
    made = Hinted(address)
    wanted = made.compute("wanted", prompt(5, 8 * CHUNK + 5), **hint_of("retain"))
    is_retained = made.reaches(lambda: made.retained() == 8)
    found = made.figures(wanted=wanted)
    made.engine.close()
    return {**found, "is_retained": is_retained}


def aborted(address: str) -> dict[str, Any]:
    made = Hinted(address)
    request = made.engine.add("aborted", prompt(6, 8 * CHUNK + 5), 50, **hint_of("retain"))
    made.reaches(lambda: made.found(request) == 8)
    made.engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    made.compute("next", prompt(7, 2 * CHUNK + 5))  # its answer comes after the hints that were told before
    found = made.figures(aborted=request)
    retained = made.retained()
    made.engine.close()
    return {**found, "retained": retained}


def without_a_server(address: str) -> dict[str, Any]:
    """Hints of an engine that never attached."""
    made = SchedEngine(address, blocks=200, chunk_tokens=CHUNK, weights_digest=os.urandom(8).hex())
    request = made.complete("alone", prompt(8, 8 * CHUNK), 2, **hint_of("params"))
    made.close()
    return {"is_finished": request.is_finished(), "wrong": len(made.bad_reads) + made.wrong_tokens}


def comes_back(address: str) -> dict[str, Any]:
    """The hint of a request whose chunks lower tiers alone have: it neither waits for them nor stores them itself."""
    made = Hinted(address, tier_wait_s=0)
    client = made.scheduler._session.client
    wanted = made.compute("wanted", prompt(9, 8 * CHUNK + 5))
    assert made.reaches(lambda: sum(tier.objects for tier in client.status().tiers) >= 8)
    client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))  # a clear reaches the tiers
    made.engine.forget_prefixes()
    gone = made.found(wanted)
    own = {"store": False, "prefetch_after_s": 0}
    made.engine.add("again", prompt(9, 8 * CHUNK + 5), 2, kv_transfer_params={"kvdock": own})
    made.engine.run()
    made.reaches(lambda: made.found(wanted) == 8)
    found = made.figures(back=wanted)
    loaded = client.status().counters["prefetched_chunks"]
    made.engine.close()
    return {**found, "gone": gone, "loaded": loaded}
