"""A random life of two engines at one server: requests, aborts, small pools, and a server that is killed and stopped.

All comes from one seed, but what threads and processes do in between is their own affair: a seed repeats the
requests, not the timing. Every step checks every block; every output is kept for a comparison at the end.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
from api_helpers import ServerProcess, attach
from connector_helpers import engine_over, kvdock_of, sweep
from engine_helpers import make_engine, prompt, run_one, sampling

from kvdock.client.client import Client
from kvdock.engine.blocks import held
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.protocol.keys import chunk_keys

CHUNK = 32
BLOCKS = {"tiny": 18, "tiny-mla": 18, "tiny-hybrid2": 34}
"""So few that requests preempt each other."""


def settings_of(model: str, *, num_blocks: int | None = None) -> EngineConfig:
    blocks = num_blocks if num_blocks is not None else BLOCKS[model]
    return dataclasses.replace(preset(model), num_blocks=blocks, idle_wait_s=0.005)


def check_blocks(engine: Engine) -> None:
    """The laws of the block manager once more, counted from the requests and not from its own books."""
    engine.check_integrity()
    scheduler, pool = engine.scheduler, engine.scheduler.blocks.pool
    groups: dict[int, int] = {}
    for request in (*scheduler.running, *scheduler.loading.values()):
        for group, column in enumerate(request.table):
            for block in held([column]):
                assert groups.setdefault(block, group) == group, f"block {block} is in two groups"
                assert pool.references[block] > 0, f"block {block} is used and has no holder"
    evictable = [block for block in pool.free if pool.names[block] is not None]
    assert pool.evictable == len(set(evictable)) == len(evictable) <= len(pool.free)


@dataclasses.dataclass
class Asked:
    tokens: list[int]
    max_tokens: int
    output: list[int] = dataclasses.field(default_factory=list)
    aborted: bool = False


class Soak:
    def __init__(self, seed: int, model: str, folder: Path) -> None:
        self.random, self.model = Random(f"{seed}/{model}"), model
        self.seen: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.prefixes = [prompt(self.random.randrange(1 << 30), 160) for _ in range(4)]
        self.socket = str(folder / "kvdock.sock")
        self.servers = [self._server("never").wait_ready()]
        self.starting_at: int | None = None
        self.engines = [
            engine_over(self.socket_address, settings_of(model), chunk_tokens=CHUNK, label=f"soak-{n}", timeout_s=0.5)
            for n in range(2)
        ]

    @property
    def socket_address(self) -> str:
        return self.servers[0].unix

    def _server(self, adopt: str) -> ServerProcess:
        return ServerProcess(socket_path=self.socket, adopt=adopt, settle_s=0.3, ask_s=0.3)

    # ------------------------------------------------------------------ what happens

    def run(self, steps: int) -> None:
        for step in range(steps):
            self._happen(step, steps)
            for engine in self.engines:
                self._step(engine)
        self._restarted()
        until = time.monotonic() + 60.0
        while any(engine.has_unfinished for engine in self.engines):
            assert time.monotonic() < until, "requests were never finished"
            for engine in self.engines:
                self._step(engine)

    def _happen(self, step: int, steps: int) -> None:
        for engine in self.engines:
            if len(engine.requests) < 8 and self.random.random() < 0.12:
                self._arrive(engine)
            if engine.requests and self.random.random() < 0.01:
                self._abort(engine)
        if self.starting_at == step:
            self._restarted()
        elif self.starting_at is None and step + 60 < steps:
            chance = self.random.random()
            if chance < 0.003:
                self._kill(step)
            elif chance < 0.005:
                self._stall()
            elif chance < 0.01:
                self._abandon_a_lease()

    def _arrive(self, engine: Engine) -> None:
        prefix = self.random.choice(self.prefixes)[: self.random.randrange(161)]
        tokens = prefix + prompt(self.random.randrange(1 << 30), self.random.randrange(1, 50))
        name, wanted = f"r{len(self.asked)}", self.random.randrange(1, 30)
        engine.add_request(tokens, sampling(wanted, keep_logits=False), name)
        self.asked[name] = Asked(tokens, wanted)

    def _abort(self, engine: Engine) -> None:
        name = self.random.choice(sorted(engine.requests))
        if engine.requests[name].state.value == "finished":
            return
        self.seen["aborted"] += 1
        self.seen["aborted while loading"] += name in engine.scheduler.loading
        self.asked[name].aborted = True
        self._ended(name, engine.abort(name).output_tokens)
        check_blocks(engine)

    def _step(self, engine: Engine) -> None:
        for output in engine.step():
            if output.completion is not None:
                metrics = output.completion.metrics
                self.seen["preempted"] += metrics.preemptions
                self.seen["loaded tokens"] += metrics.loaded_tokens
                self._ended(output.request_id, output.completion.output_tokens)
        check_blocks(engine)

    def _ended(self, name: str, output: list[int]) -> None:
        self.asked[name].output = output
        self.seen["ended"] += 1

    # ------------------------------------------------------------------ the server's troubles

    def _kill(self, step: int) -> None:
        """Killed now; the next one is started at once and known to be up some steps later."""
        self.seen["restarts"] += 1
        old = self.servers[-1]
        old.stop(signal.SIGKILL)
        adopt = self.random.choice(["auto", "never"])
        self.servers.append(self._server(adopt))
        self.starting_at = step + self.random.randrange(5, 60)

    def _restarted(self) -> None:
        if self.starting_at is not None:
            self.servers[-1].wait_ready()
            self.starting_at = None

    def _stall(self) -> None:
        """The server stands still for longer than a call may take."""
        self.seen["stalls"] += 1
        process = self.servers[-1].process
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + self.random.uniform(0.1, 0.8)
        while time.monotonic() < until:
            for engine in self.engines:
                self._step(engine)
        process.send_signal(signal.SIGCONT)

    def _abandon_a_lease(self) -> None:
        """A member takes a lease and dies: the server must get it back by itself."""
        manifest = kvdock_of(self.engines[0]).session.manifest
        with Client(self.socket_address, timeout_s=5.0) as client:
            member = attach(client, **msgspec.structs.asdict(manifest))
            namespace = bytes.fromhex(member.attached.namespace)
            keys = [key.hex() for key in chunk_keys(namespace, self.random.choice(self.prefixes), CHUNK)]
            self.seen["abandoned leases"] += member.lookup(keys, "abandoned", 1).lease is not None
            member.close()

    # ------------------------------------------------------------------ the end

    def settle(self) -> None:
        """Nothing may be left: no block held, no lease, no reservation, no bytes that were not what was stored."""
        for engine in self.engines:
            assert engine.drain(20.0), "loads or stores never ended"
            check_blocks(engine)
            assert len(engine.scheduler.blocks.pool.free) == engine.config.num_blocks, "a block is held by nobody"
        with Client(self.socket_address, timeout_s=5.0) as client:
            # A reserve whose answer was lost ends only by its deadline, 30 s, and then a question.
            until = time.monotonic() + 45.0
            while (left := self._left(client)) != (0, 0, 0, 0) and time.monotonic() < until:
                for engine in self.engines:
                    engine.connector.poll(0.05)
            assert left == (0, 0, 0, 0), f"(leases, reservations, reserved, quarantined): found {left}, wanted none"
            assert client.status().counters["mismatches"] == 0

    def _left(self, client: Client) -> tuple[int, int, int, int]:
        status = client.status()
        return status.leases, status.reservations, status.chunks.reserved, status.chunks.quarantined

    def compare(self) -> None:
        """Every output is what an engine alone, with room, computes in chunks of the same size."""
        alone = make_engine(settings_of(self.model, num_blocks=128))
        for name, asked in self.asked.items():
            found = run_one(alone, asked.tokens, sampling(asked.max_tokens, keep_logits=False)).output_tokens
            wanted = found[: len(asked.output)] if asked.aborted else found
            assert asked.output == wanted, f"{name}: {len(asked.tokens)} tokens of prompt"

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for server in self.servers:
            server.stop(signal.SIGKILL if server is not self.servers[-1] else signal.SIGTERM)
            sweep(server)
            server.close()


def soak(seed: int, model: str, steps: int) -> Counter[str]:
    """Runs one; what was seen on the way. AssertionError says what did not hold."""
    with tempfile.TemporaryDirectory(prefix="kvdock-soak-") as folder:
        life = Soak(seed, model, Path(folder))
        try:
            life.run(steps)
            life.settle()
            life.compare()
        finally:
            life.close()
    return life.seen


def seed_and_steps(steps: int) -> tuple[int, int]:
    """From KVDOCK_SOAK_SEED and KVDOCK_SOAK_STEPS, or a fresh seed and `steps`: 1,200 take about half a minute."""
    seed = int(os.environ.get("KVDOCK_SOAK_SEED") or time.time_ns() % (1 << 32))
    return seed, int(os.environ.get("KVDOCK_SOAK_STEPS") or steps)
