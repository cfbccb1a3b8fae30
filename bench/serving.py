"""Servers to measure, each a process of its own: kvdock, and the bare ASGI floor under the same uvicorn settings."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import Receive, Scope, Send

from bench.floods.long_turns import long_turns
from bench.floods.turns import measure_turns
from kvdock.api import server
from kvdock.api.http.connection import connection_class
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.log import ServerLog
from kvdock.api.record.counters import Counters
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.server import bind_unix
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol import schemas as s
from kvdock.protocol.forms import PACKED
from kvdock.protocol.wire_types import KEY_BYTES

MIB = 1 << 20
PART_BYTES = 4096
CHUNK_TOKENS = 16
START_TIMEOUT_S = 60.0


def serve(values: dict[str, object]) -> None:
    logging.basicConfig(handlers=[ServerLog()])  # cuts the many lines that a flood would log
    server.Server(Settings.load(values), on_ready=lambda at: print(json.dumps(at._asdict()), flush=True)).run()


def serve_measured(values: dict[str, object]) -> None:
    """`turns_file`: gets the longest turn of the event loop. `explained_file`: gets what long turns were made of, if
    there is one."""
    path, explained = Path(str(values.pop("turns_file"))), values.pop("explained_file", None)
    tasks = list[asyncio.Task[None]]()

    def ready(at: server.Addresses) -> None:
        explain = stack.enter_context(long_turns(Path(str(explained)))) if explained else None
        tasks.append(measure_turns(path, explain))
        print(json.dumps(at._asdict()), flush=True)

    logging.basicConfig(handlers=[ServerLog()])
    with ExitStack() as stack:
        server.Server(Settings.load(values), on_ready=ready).run()


def serve_floor(values: dict[str, object]) -> None:
    """An app that reads the body and answers the same few bytes to every call."""
    content = PACKED.encode(s.ReleaseAnswer(remaining=[]))
    headers = [(b"content-type", b"application/msgpack"), (b"content-length", str(len(content)).encode())]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    limits = ConnectionLimits(tcp_connections=1, unix_connections=1 << 10)
    meter = Meter(Counters(), Timings(time.time), time.perf_counter_ns, {}, lambda event: None)
    config = server.uvicorn_config(app, connection_class(limits, meter))
    config.lifespan = "off"
    with bind_unix(str(values["socket_path"])) as sock:
        floor = uvicorn.Server(config)

        async def run() -> None:
            serving = asyncio.create_task(floor.serve([sock]))
            while not floor.started:
                await asyncio.sleep(0.01)
            print(json.dumps({"unix": f"unix:{values['socket_path']}"}), flush=True)
            await serving

        asyncio.run(run())


class ServerProcess:
    """`with ServerProcess("serve", pool_bytes=…) as server`: stopped at the end, its shared memory gone."""

    def __init__(self, kind: str, **settings: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvdock-bench-")
        values = {"socket_path": f"{self._folder.name}/s.sock", "port": 0, **settings}
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.serving", kind, json.dumps(values)], stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.ready_s = time.perf_counter() - began
        if not line:
            self._folder.cleanup()
            raise RuntimeError(f"the {kind} process did not start")
        addresses = json.loads(line)
        self.unix: str = addresses["unix"]
        self.http: str = addresses.get("http", "")

    @property
    def pid(self) -> int:
        return self._process.pid

    def private_mib(self) -> float:
        """Anonymous memory of the server, in MiB: the pool and the table, which are shared memory, do not count."""
        for line in Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("smaps_rollup without Anonymous")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


def chain(count: int, seed: str) -> bytes:
    """`count` different keys, concatenated."""
    return b"".join(hashlib.blake2b(f"{seed}/{at}".encode(), digest_size=32).digest() for at in range(count))


def manifest(part_bytes: int, writers: int = 1) -> s.Manifest:
    return s.Manifest(
        model="bench", kv_dtype="bfloat16", layers=1, kv_heads=1, head_size=64, chunk_tokens=CHUNK_TOKENS,
        block_tokens=CHUNK_TOKENS, groups=(s.Group(part_bytes=part_bytes),), writers=writers, tensor_parallel=writers,
    )


class Engine:
    """One attached member of an instance of its own, with all its ranks. All engines with the same `part_bytes` and
    `writers` share a namespace."""

    def __init__(self, client: Client, name: str, part_bytes: int = PART_BYTES, writers: int = 1) -> None:
        self.client, self.writers = client, writers
        self._liveness = MemberLiveness(client.segments().lock_file, source=random.Random())
        self.member = f"member-{name}"
        self._attach = s.AttachSession(
            instance=f"{name}-{random.getrandbits(64):016x}",
            manifest=manifest(part_bytes, writers),
            member=s.Member(
                id=self.member, ranks=list(range(writers)), scheduler=True, lock_offset=self._liveness.offset
            ),
        )
        attached = client.attach(self._attach)
        self.session, self.namespace = attached.session, attached.namespace
        self._stores = 0

    def comes_also_by(self, client: Client) -> None:
        """Attaches over the client's socket, too: calls over either one may name the session."""
        client.attach(self._attach)

    def store(self, keys: bytes, checksum: int | None = None) -> None:
        """Reserves and commits chunks without writing to their slots. `checksum`: that of the slots' bytes, if a reader
        checks."""
        self._stores += 1
        body = s.Reserve(session=self.session, member=self.member, store=str(self._stores), keys=keys)
        granted = self.client.reserve(body)
        count = len(keys) // KEY_BYTES
        if granted.reservation is None or len(granted.chunks) != count:
            raise RuntimeError(f"reserved {len(granted.chunks)} chunks of {count}: {granted.limited_by}")
        parts = [
            s.PartDone(chunk.index, 0, chunk.index + 1 if checksum is None else checksum) for chunk in granted.chunks
        ]
        for rank in range(self.writers):
            self.client.commit(granted.reservation, s.Commit(session=self.session, rank=rank, parts=parts))

    def look_up(self, keys: bytes) -> int:
        """How many of these keys are found, without a lease afterwards."""
        found = self.client.lookup(s.Lookup(
            session=self.session, member=self.member, request=f"{random.getrandbits(64):x}", keys=keys
        ))
        if found.lease is not None:
            self.client.release_later(found.lease, self.session, [0])
        return len(found.chunks)

    def beat(self) -> None:
        self.client.heartbeat(self.session, s.Heartbeat(member=self.member))

    def close(self) -> None:
        self.client.leave(self.session, self.member)
        self._liveness.close()


if __name__ == "__main__":
    {"serve": serve, "measured": serve_measured, "floor": serve_floor}[sys.argv[1]](json.loads(sys.argv[2]))
