"""vLLM's own offload around a real Scheduler, with its real tiering manager, and kvdock as its secondary tier."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sched_engine import SchedEngine
from sched_scenarios import figures, prompt
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.request import RequestStatus

from kvdock.client.client import Client

OFFLOAD = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"


class OffloadEngine(SchedEngine):
    """`chunks`: about so many are in the primary tier. `tier`: settings of kvdock's."""

    def __init__(self, address: str, *, chunks: int = 64, tier: dict[str, Any] | None = None, **how: Any) -> None:
        self._address, self._told = address, {"chunks": chunks, **(tier or {})}
        super().__init__(address, **how)
        self.asks_for_layers = False
        self.manager = self.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self.stored: list[tuple[Any, Any]] = []
        finish = self.tier._worker.finish_store

        def noted(storing: Any, **more: Any) -> int:
            ready = int(finish(storing, **more))
            self.stored += [(storing.attachment, part) for part in storing.committed]
            return ready

        self.tier._worker.finish_store = noted

    def transfer(self, settings: dict[str, Any]) -> dict[str, Any]:
        told = dict(self._told)
        return {
            "kv_connector": "OffloadingConnector", "kv_connector_module_path": OFFLOAD, "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offload",
                "cpu_bytes_to_use": told.pop("chunks") << 12, "blocks_per_chunk": 1,
                "secondary_tiers": [{
                    "type": "KvdockTier", "module_path": "kvdock.connectors.vllm.secondary_tier",
                    "address": self._address, "weights_digest": "fingerprints", "timeout_s": 20.0, **told,
                }],
            },
        }

    def orders(self, out: Any) -> Any:
        return SimpleNamespace(loads=())

    def step(self) -> Any:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker  # of two engines in one process
        return super().step()

    def _remembered(self) -> int:
        """How much is still known of requests that have ended, and of jobs."""
        self.drain()
        return len(self.tier._requests) + len(self.manager._jobs) + len(self.tier._lookups._held)

    def drain(self, most_s: float = 20.0) -> None:
        """Until all that was offloaded is stored."""
        end = time.monotonic() + most_s
        while self.scheduler.has_requests() or self.manager.has_pending_work() or self.tier._lookups._held:
            self.step()
            assert time.monotonic() < end, "jobs that do not end"

    def damage(self) -> int:
        """Flips a bit of each stored chunk."""
        for attachment, part in self.stored:
            address = attachment.segments.address(part.segment, part.offset, part.length)
            ctypes.c_uint8.from_address(address + 5).value ^= 1
        return len(self.stored)

    def forget(self) -> None:
        """What is there afterwards comes from kvdock."""
        self.drain()
        assert self.scheduler.reset_prefix_cache(reset_connector=True)
        self.poison()


def leases(address: str) -> int:
    with Client(address) as client:
        return sum(session.leases for session in client.sessions().sessions)


def told(engine: OffloadEngine, **more: Any) -> dict[str, Any]:
    found = figures(engine, **more)
    return {name: found[name] for name in ("bad_reads", "wrong_tokens", "unfinished", "held", "remembered", *more)}


def shares(
    address: str, windows: Sequence[int | None] = (None,), overlap: bool = False, sizes: Sequence[int] = (),
    **settings: Any,
) -> dict[str, Any]:
    """One engine stores, another one loads; then the first again, with nothing in vLLM's own caches."""
    how = {"windows": windows, "sizes": sizes, "blocks": 64 * len(windows), "overlap": overlap,
           "chunks": 256, "tier": settings}
    first, second = OffloadEngine(address, **how), OffloadEngine(address, **how)
    loaded = []
    for engine, name in ((first, "cold"), (second, "other"), (first, "own")):
        if name == "own":
            first.forget()
        before = engine.loaded_tokens
        engine.complete(name, prompt(1, 150))
        loaded.append(engine.loaded_tokens - before)
        engine.drain()
    kept = leases(address)
    for engine in (first, second):
        engine.close()
    return {**told(first, loaded=loaded, leases=kept), "second": told(second)}


def tenants(address: str, token_files: Sequence[str]) -> dict[str, Any]:
    """An engine of each token stores what the others store, too, and loads nothing of theirs."""
    loaded = []
    for token_file in token_files:
        engine = OffloadEngine(address, tier={"access_token_file": token_file})
        engine.complete("r", prompt(8, 150))
        engine.drain()
        loaded.append(engine.loaded_tokens)
        engine.close()
    return told(engine, loaded=loaded)


def goes_another_way(address: str, windows: Sequence[int | None]) -> dict[str, Any]:
    """A prompt shares the first 100 tokens of what is stored, whose windows are wanted at their end, and has 150 more.
    What is loaded of it out of vLLM's primary tier, and what out of kvdock."""
    engine = OffloadEngine(
        address, windows=windows, blocks=192, chunks=256, tier={"weights_digest": os.urandom(8).hex()}
    )
    loaded = []
    engine.complete("short", prompt(1, 100))
    engine.complete("stored", prompt(1, 150))
    for name, rest in (("from vLLM", 2), ("from kvdock", 3)):
        engine.drain()
        assert engine.scheduler.reset_prefix_cache(reset_connector=rest == 3)
        engine.poison()
        before = engine.loaded_tokens
        engine.complete(name, prompt(1, 100) + prompt(rest, 150))
        loaded.append(engine.loaded_tokens - before)
    engine.drain()
    engine.close()
    return told(engine, loaded=loaded)


def damaged(address: str) -> dict[str, Any]:
    """A bit of all that was stored is flipped. It is asked for twice."""
    engine = OffloadEngine(address, tier={"weights_digest": os.urandom(8).hex()})
    engine.complete("cold", prompt(3, 150))
    engine.drain()
    count, loaded = engine.damage(), []
    with Client(address) as client:
        for name in ("first", "second"):
            engine.forget()
            before, was = engine.loaded_tokens, client.status().counters["mismatches"]
            engine.complete(name, prompt(3, 150))
            loaded.append(engine.loaded_tokens - before)
            engine.drain()
            loaded.append(client.status().counters["mismatches"] - was)
    engine.close()
    return told(engine, damaged=count, loaded=loaded)


def in_trouble(address: str, seed: int, windows: Sequence[int | None], overlap: bool) -> dict[str, Any]:
    """Random prompts with common beginnings, too little memory everywhere, aborts, resets and damage."""
    source, digest, seen = random.Random(seed), os.urandom(8).hex(), Counter[str]()
    engines = [
        OffloadEngine(
            address, windows=windows, blocks=40 * len(windows), chunks=24 * len(windows), overlap=overlap,
            tier={"weights_digest": digest},
        ) for _ in range(2)
    ]
    for number in range(24):
        engine = source.choice(engines)
        tokens = prompt(source.randrange(4), source.randrange(20, 260)) + prompt(100 + number, 9)
        engine.add(f"r{number}", tokens, source.randrange(1, 6))
        for _ in range(source.randrange(12)):
            source.choice(engines).step()
        running = [name for name, one in engine.requests.items() if not one.is_finished()]
        if running and source.random() < 0.15:
            engine.scheduler.finish_requests(source.choice(running), RequestStatus.FINISHED_ABORTED)
            seen["aborted"] += 1
        if source.random() < 0.2:
            engine.run()
            engine.drain()
            if source.random() < 0.5:
                seen["damaged"] += engine.damage()
                engine.stored.clear()
            engine.forget()
            seen["forgotten"] += 1
    for engine in engines:
        engine.run()
        engine.drain()
    kept, loaded = leases(address), sum(engine.loaded_tokens for engine in engines)
    for engine in engines:
        engine.close()
    return {**told(engines[0], loaded=loaded, leases=kept, **seen), "second": told(engines[1])}


def weights_change(address: str) -> dict[str, Any]:
    """Before a change, after it, and when it is over."""
    engine = OffloadEngine(address, tier={"weights_digest": os.urandom(8).hex()})
    loaded = []
    for name, event in (("cold", ""), ("warm", ""), ("begun", "begin"), ("other", "end"), ("others", "")):
        if event:
            engine.tier._weights.kvdock_weights(event, "")
        engine.forget()
        before = engine.loaded_tokens
        engine.complete(name, prompt(4, 150))
        loaded.append(engine.loaded_tokens - before)
    engine.close()
    return told(engine, loaded=loaded)


def server_halts(address: str, pid: int) -> dict[str, Any]:
    """The server stops answering, and goes on later."""
    engine = OffloadEngine(address, tier={"weights_digest": os.urandom(8).hex(), "timeout_s": 0.3})
    loaded = []
    for name in ("cold", "halted", "back"):
        if name == "halted":
            os.kill(pid, signal.SIGSTOP)
        engine.forget()
        before = engine.loaded_tokens
        engine.complete(name, prompt(5, 150))
        loaded.append(engine.loaded_tokens - before)
        if name == "halted":
            engine.drain()
            os.kill(pid, signal.SIGCONT)
            end = time.monotonic() + 20
            while engine.tier._session.attachment is None and time.monotonic() < end:
                time.sleep(0.01)
    engine.close()
    return told(engine, loaded=loaded)


def leaves_nothing(address: str) -> dict[str, Any]:
    """vLLM closes its manager."""
    before = set(threading.enumerate())
    engine = OffloadEngine(address)
    engine.complete("r", prompt(6, 150))
    view = engine.manager.primary_tier.get_kv_memoryview()
    engine.close()
    del engine
    gc.collect()
    try:
        released = not view.nbytes
    except ValueError:
        released = True
    return {"released": released, "threads": [one.name for one in threading.enumerate() if one not in before]}


def explained(address: str) -> dict[str, Any]:
    """What the server tells people of a request that has loaded, and of its engine."""
    engine = OffloadEngine(address, tier={"weights_digest": os.urandom(8).hex()})
    engine.complete("cold", prompt(7, 150))
    engine.forget()
    name = f"warm {os.urandom(4).hex()}"
    engine.complete(name, prompt(7, 150))
    engine.drain()
    engine.tier._session._wake.set()
    with Client(address) as client:
        end = time.monotonic() + 10
        while (told := client.explain(name)).outcome is None and time.monotonic() < end:
            time.sleep(0.01)
        (session,) = [one for one in client.sessions().sessions if "offload" in one.label]
    engine.close()
    assert told.outcome is not None
    return {
        "sentences": [one.code for one in told.sentences], "model": session.model,
        "outcome": {name: getattr(told.outcome, name) for name in ("prompt_tokens", "loaded_tokens", "found_tokens")},
    }
