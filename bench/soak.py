"""Mixed load for a long time: whether memory grows, lookups slow down, or loads return wrong bytes.

    python -m bench.soak --minutes 30 --ends 12 --rotations 6 --json

Each worker process has a connector over its own paged memory. It looks up conversations of random length from a common
set, loads them, compares every byte with the one that follows from the tokens, extends and stores them. A worker ends
after a random number of turns, or is killed, and a new one replaces it. Every other worker calls over TCP, with an
access token that `--rotations` replace. `--ends` end the server: in turn it is killed, stopped and started again with
`--on-exit keep`, and taken over by the next process, as an upgrade does. Each time the next server goes on with the
pool. Figures: the time of a lookup in a worker, from the call to the answer; private memory and descriptors of the
server, as medians over the first and the last tenth; what is left at the end and should not be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bench.paged_engine import BLOCK, LONGEST_CHUNKS, PagedEngine, content_of, tokens_of
from bench.serving import MIB
from kvdock.api.access.access_file import add_token, rotate_token
from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings
from kvdock.protocol.errors import ServerUnavailable
from kvdock.protocol.reports import Status
from kvdock.shm.objects import SHM_DIR

BLOCKS = 2048
CONVERSATIONS = 400
POOL_BYTES = 192 * MIB
SAMPLE_S = 2.0
WAIT_S = 30.0
GRACE = timedelta(seconds=5)
"""How long a token that was replaced still works."""
ENDS = ("kills", "restarts", "takeovers")
OF_TURNS = ("turns", "tokens", "hit_tokens", "loaded_tokens", "wrong_blocks")
OF_RUN = ("left", "killed", "kept", *ENDS, "rotations")
KEPT_SHARE = 0.9
"""The next server has at least as many of the chunks that the one before had when it was asked last: meanwhile workers
went on, and after a kill those that were being written are left out."""


# ------------------------------------------------------------------ a worker


class Worker(PagedEngine):
    """An engine that takes turns of conversations."""

    def __init__(self, settings: ConnectorSettings, seed: int) -> None:
        super().__init__(settings, "soak", seed, blocks=BLOCKS, wait_s=WAIT_S)
        self._random = random.Random(seed)

    def turn(self, number: int) -> None:
        """One turn: looks up, loads, compares, computes the rest, stores."""
        conversation = int(self._random.paretovariate(0.6)) % CONVERSATIONS
        tokens = tokens_of(conversation, self._random.randint(1, LONGEST_CHUNKS))
        wanted = content_of(tokens)
        table = self._random.sample(range(BLOCKS), len(tokens) // BLOCK)
        request = f"r{number}"
        began = time.perf_counter()
        hit = self.look(request, tokens)
        lookup_ms = (time.perf_counter() - began) * 1e3
        valid = self.fetch(request, table, hit)
        wrong = self.wrong_blocks(table, wanted, valid)
        self.compute(table, wanted, begin=valid)
        self.save(request, table, tokens)
        self.finish(request)
        print(json.dumps([round(lookup_ms, 3), len(tokens), hit, valid, wrong]), flush=True)


def work(address: str, token_file: str, seed: int, turns: int) -> None:
    worker = Worker(ConnectorSettings(address, token_file), seed)
    for number in range(turns):
        worker.turn(number)
    worker.leave()


# ------------------------------------------------------------------ the run


@dataclass
class Sample:
    at_s: float
    private_mib: float
    descriptors: int


@dataclass
class Totals:
    """The results so far; a lookup is (seconds since the start, ms)."""

    lookups: list[tuple[float, float]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*OF_TURNS, *OF_RUN), 0))

    def add(self, at_s: float, line: str) -> None:
        lookup_ms, tokens, hit, valid, wrong = json.loads(line)
        self.lookups.append((at_s, lookup_ms))
        for name, value in zip(OF_TURNS, (1, tokens, hit, valid, wrong), strict=True):
            self.counts[name] += value


class Server:
    """`kvdock serve`, ended and started again at the same socket and port, with the same pool."""

    def __init__(self, folder: str) -> None:
        self._folder, self._port = folder, 0
        self.unix, self.token_file = f"unix:{folder}/s.sock", f"{folder}/token"
        self._access_file = f"{folder}/access.toml"
        self._keep_token(add_token(self._access_file, "engines", ["engine"]))
        self._start()
        self.pool_id = self._running().pool_id

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _start(self, *flags: str, on_exit: str = "keep") -> None:
        """Returns once the new process answers."""
        program = [
            sys.executable, "-m", "kvdock", "serve", "--socket-path", f"{self._folder}/s.sock",
            "--port", str(self._port), "--pool-bytes", str(POOL_BYTES), "--access-file", self._access_file,
            "--on-exit", on_exit, "--json", *flags,
        ]
        with Path(f"{self._folder}/server.log").open("a") as log:
            self.process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        if not ready:
            raise RuntimeError(f"the server did not start: {Path(self._folder, 'server.log').read_text()[-2000:]}")
        self._port = int(json.loads(ready)["http"].rpartition(":")[2])

    def status(self) -> Status | None:
        try:
            with Client(self.unix) as client:
                return client.status()
        except ServerUnavailable:
            return None

    def _running(self) -> Status:
        status = self.status()
        if status is None:
            raise RuntimeError("the server does not answer")
        return status

    def end(self, how: str) -> bool:
        """Ends it as `how` of ENDS says, and starts the next one. Returns whether that has all chunks of before."""
        before, old = self._running().chunks.ready, self.process
        if how == "takeovers":
            self._start("--takeover")
        else:
            old.send_signal(signal.SIGKILL if how == "kills" else signal.SIGTERM)
            old.wait(WAIT_S)
            self._start()
        if (status := old.wait(WAIT_S)) != (-signal.SIGKILL if how == "kills" else 0):
            raise RuntimeError(f"the server ended with {status} ({how})")
        now = self._running()
        return now.pool_id == self.pool_id and now.chunks.ready >= before * KEPT_SHARE

    def rotate(self) -> None:
        """Replaces the token of the workers, first in the server's file and then in theirs."""
        now = datetime.now(UTC)
        token, _ = rotate_token(self._access_file, "engines", now=now, old_until=now + GRACE)
        self._keep_token(token)

    def _keep_token(self, token: str) -> None:
        fresh = Path(f"{self.token_file}.new")
        fresh.touch(mode=0o600)
        fresh.write_text(token)
        fresh.rename(self.token_file)

    def sample(self, at_s: float) -> Sample:
        proc = Path(f"/proc/{self.process.pid}")
        lines = (proc / "smaps_rollup").read_text().splitlines()
        private_kib = next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
        return Sample(at_s, private_kib / 1024, len(list((proc / "fd").iterdir())))

    def remove(self) -> int:
        """Ends it with its pool; returns how many of the pool's objects in shared memory are left."""
        self.stop()
        self._start(on_exit="remove")
        self.stop()
        return sum(self.pool_id in path.name for path in SHM_DIR.iterdir())

    def stop(self) -> None:
        self.process.terminate()
        if status := self.process.wait(WAIT_S):
            raise RuntimeError(f"the server ended with {status}")


@contextmanager
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="kvdock-soak-") as folder:
        running = Server(folder)
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.stop()


class Workers:
    """Worker processes; one that ends is replaced. Their output is read without waiting."""

    def __init__(self, server: Server, count: int, source: random.Random, totals: Totals) -> None:
        self._server, self._random, self._totals = server, source, totals
        self._members = [self._start(number) for number in range(count)]
        self._partial = [b""] * count

    def _start(self, number: int) -> tuple[subprocess.Popen[bytes], float]:
        """Starts a worker; also returns the time when it will be killed (infinity: never)."""
        where = (self._server.http, self._server.token_file) if number % 2 else (self._server.unix, "")
        program = [sys.executable, "-m", "bench.soak", "--worker", *where, str(self._random.getrandbits(40))]
        process = subprocess.Popen([*program, str(self._random.randint(50, 400))], stdout=subprocess.PIPE)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        killed_in_s = self._random.uniform(0.5, 5.0) if self._random.random() < 0.5 else float("inf")
        return process, time.monotonic() + killed_in_s

    def turn(self, at_s: float) -> None:
        for index, (process, kill_at) in enumerate(self._members):
            assert process.stdout is not None
            # A line may arrive in two parts; the second never does when the worker was killed.
            *lines, self._partial[index] = (self._partial[index] + (process.stdout.read() or b"")).split(b"\n")
            for line in lines:
                self._totals.add(at_s, line.decode())
            if process.poll() is not None:
                if process.returncode not in (0, -9):
                    raise RuntimeError(f"a worker ended with {process.returncode}")
                self._totals.counts["killed" if process.returncode else "left"] += 1
                self._members[index], self._partial[index] = self._start(index), b""
            elif time.monotonic() > kill_at:
                process.kill()

    def stop(self) -> None:
        for process, _ in self._members:
            process.kill()
            process.wait()


def run(minutes: float, workers: int, ends: int, rotations: int, seed: int) -> dict[str, object]:
    source, totals = random.Random(seed), Totals()
    length_s = minutes * 60
    what = [ENDS[number % len(ENDS)] for number in range(ends)] + ["rotations"] * rotations
    due = sorted((source.uniform(0.05, 0.95) * length_s, one) for one in what)
    with server() as running:
        team = Workers(running, workers, source, totals)
        began = time.monotonic()
        try:
            while (at_s := time.monotonic() - began) < length_s:
                team.turn(at_s)
                if due and at_s > due[0][0]:
                    _, now = due.pop(0)
                    totals.counts[now] += 1
                    if now == "rotations":
                        running.rotate()
                    else:
                        totals.counts["kept"] += running.end(now)
                if not totals.samples or at_s > totals.samples[-1].at_s + SAMPLE_S:
                    totals.samples.append(running.sample(at_s))
                time.sleep(0.05)  # the workers run by themselves
        finally:
            team.stop()
        left = {**settle(running), "objects_left": running.remove()}
    return {**figures(totals, length_s), **left, "ends": ends, "workers": workers, "seed": seed}


def settle(running: Server) -> dict[str, int]:
    """The amounts that are still held once the server knows that all workers are dead; anything above 0 is a leak."""
    until = time.monotonic() + WAIT_S
    while (status := running.status()) is None or status.leases + status.reservations + status.sessions:
        if time.monotonic() > until:
            break
        time.sleep(0.2)  # deaths are seen and settled meanwhile
    assert status is not None
    return {"leases_left": status.leases, "reservations_left": status.reservations, "sessions_left": status.sessions}


def figures(totals: Totals, length_s: float) -> dict[str, object]:
    def p99(lo: float, hi: float) -> float:
        took = sorted(ms for at_s, ms in totals.lookups if lo <= at_s < hi)
        return round(took[int(len(took) * 0.99)], 3) if took else 0.0

    def over(samples: list[Sample]) -> tuple[float, float]:
        return statistics.median(s.private_mib for s in samples), statistics.median(s.descriptors for s in samples)

    tenth = max(1, len(totals.samples) // 10)
    (first_mib, first_fds), (last_mib, last_fds) = over(totals.samples[:tenth]), over(totals.samples[-tenth:])
    return {
        "minutes": round(length_s / 60, 2), **totals.counts,
        "lookup_p99_ms_start": p99(0, length_s / 10), "lookup_p99_ms_end": p99(length_s * 0.9, length_s),
        "server_private_mib_start": round(first_mib, 1), "server_private_mib_end": round(last_mib, 1),
        "server_descriptors_start": first_fds, "server_descriptors_end": last_fds,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ends", type=int, default=0, help="how often the server ends meanwhile")
    parser.add_argument("--rotations", type=int, default=0, help="how often the workers' token is replaced meanwhile")
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--worker", nargs=4, metavar=("ADDRESS", "TOKEN_FILE", "SEED", "TURNS"), help="for the program itself"
    )
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        address, token_file, seed, turns = chosen.worker
        work(address, token_file, int(seed), int(turns))
        return 0
    found = run(chosen.minutes, chosen.workers, chosen.ends, chosen.rotations, chosen.seed)
    print(json.dumps(found) if chosen.json else "\n".join(f"{key:26} {value}" for key, value in found.items()))
    bad = ("wrong_blocks", "leases_left", "reservations_left", "sessions_left", "objects_left")
    return 1 if any(found[name] for name in bad) or found["kept"] != found["ends"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
