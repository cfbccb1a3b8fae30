"""Real servers and real engines for tests: a server process, attached members, keys, raw HTTP.

Nothing here is simulated: the server is uvicorn in its own process over real shared memory, members
hold real locks, requests go over its sockets.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from forks import ServerFork

from kvdock.api.access.access_file import entry
from kvdock.api.pool.lock import SECRET_OFFSET
from kvdock.client.client import Client
from kvdock.client.transport import Address
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol import schemas as s
from kvdock.shm.objects import Kept, kept_path, lock_path, pool_objects

MIB = 1 << 20
OPERATOR = "operator-" + "0" * 32
"""The access token of every ServerProcess, for all that there is to do over TCP."""
NOBODYS = {"Authorization": ""}
"""Headers of a call over TCP without a token."""
START_TIMEOUT_S = 60.0
PATIENCE_S = 60.0
"""How long a test waits for an event that must come, on a busy machine."""
SOON_S = 20.0
"""An upper bound for a call that waits for nothing, on a busy machine. The calls in soon() would wait longer than this
if they waited at all: for a stopped server and a client's timeout of LATE_S, for example."""
LATE_S = 60.0


def small_pool(**overrides: object) -> dict[str, object]:
    """Settings of a server for tests: 16 MiB, quick death, and nobody suspect whose machine stands still a moment."""
    return {
        "port": 0,
        "pool_bytes": 16 * MIB,
        "segment_bytes": 16 * MIB,
        "prefault_threads": 1,
        "table_records": 1 << 14,
        "table_grants": 1 << 12,
        "grow_water": 0,
        "low_water": 0,
        "high_water": 0,
        "watch_s": 0.05,
        "missed_heartbeats": 100_000,
        "settle_s": 0.2,
        "drain_s": 0.2,
        "history_interval_s": 0.1,
        "session_cap": 1.0,
        "total_cap": 1.0,
        **overrides,
    }


class ServerProcess:
    """`with ServerProcess(**settings) as server`: stopped by SIGTERM at the end, if it still runs."""

    before: Callable[[], None] | None = None
    """Called in the server's process before it starts; a partial."""

    def __init__(self, **overrides: object) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvdock-test-")
        self.settings = small_pool(**{"socket_path": f"{self.folder.name}/kvdock.sock", **overrides})
        if "access_file" not in overrides:
            self.settings["access_file"] = str(access_file(Path(self.folder.name)))
        self.log_path = Path(self.folder.name) / "server.log"
        self.log_path.touch()
        self.process = ServerFork(self.settings, self.log_path, self.before)
        self.http = self.unix = ""
        self.pool_id = 0

    def wait_ready(self) -> Self:
        at = self.process.addresses()
        assert at, f"the server did not start:\n{self.log_text()}"
        self.http, self.unix, self.pool_id = at["http"], at["unix"], at["pool_id"]
        return self

    def log_text(self) -> str:
        return self.log_path.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(START_TIMEOUT_S)

    def close(self) -> None:
        self.stop()
        self.folder.cleanup()

    def shared_memory(self) -> list[str]:
        return pool_objects().get(self.pool_id, [])

    def pool_memory(self) -> list[str]:
        """Without what is kept beside the pool, which comes some time after the start."""
        return [name for name in self.shared_memory() if "-history-" not in name and "-curve-" not in name]

    def __enter__(self) -> Self:
        try:
            return self.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()


def access_file(folder: Path, *more: str) -> Path:
    """A new access file with the operator's token, and more entries."""
    path, replacement = folder / "access.toml", folder / "access.new"
    replacement.touch(mode=0o600)
    replacement.write_text("\n".join([entry("operator", OPERATOR, ["engine", "admin"], ""), *more]))
    return replacement.rename(path)


def manifest(**overrides: Any) -> s.Manifest:
    fields: dict[str, Any] = {
        "model": "test-model", "kv_dtype": "bfloat16", "layers": 2, "kv_heads": 2, "head_size": 64,
        "chunk_tokens": 16, "block_tokens": 4, "groups": (s.Group(part_bytes=16384),),
    }
    return s.Manifest(**{**fields, **overrides})


def attach_body(instance: str = "instance", *, label: str = "") -> s.AttachSession:
    """For what is tested below HTTP: nothing looks at the lock byte."""
    return s.AttachSession(instance=instance, manifest=manifest(), member=s.Member(id="m", lock_offset=1), label=label)


def keys(count: int, seed: str = "") -> list[str]:
    """A chain of keys: the same seed gives the same prefix."""
    return [hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=32).hexdigest() for index in range(count)]


_fresh = random.Random(time.time_ns())


def unique(prefix: str) -> str:
    return f"{prefix}-{_fresh.getrandbits(64):016x}"


@dataclass
class Engine:
    """One attached member, which holds its lock while this object is open."""

    client: Client
    attached: s.SessionAttached
    member: str
    liveness: MemberLiveness
    body: s.AttachSession
    _stores: int = field(default=0)

    @property
    def session(self) -> str:
        return self.attached.session

    @property
    def listed(self) -> str:
        """The session's id as lists and the log have it."""
        return s.listed_id(self.session)

    def lookup(self, keys: list[str], request: str = "r", epoch: int = 0, **more: Any) -> s.LookupAnswer:
        return self.client.lookup(
            s.Lookup(session=self.session, member=self.member, request=request, epoch=epoch, keys=keys, **more)
        )

    def reserve(self, keys: list[str], store: str | None = None, **more: Any) -> s.ReserveAnswer:
        self._stores += 1
        store = store or f"store-{self._stores}"
        return self.client.reserve(
            s.Reserve(session=self.session, member=self.member, store=store, keys=keys, **more)
        )

    def commit(self, granted: s.ReserveAnswer, rank: int = 0, checksum: int = 7) -> s.CommitAnswer:
        """All parts of one rank."""
        assert granted.reservation is not None
        parts = [
            s.PartDone(chunk.index, part.group, f"{checksum:016x}")
            for chunk in granted.chunks
            for part in chunk.parts
            if part.writer == rank
        ]
        return self.client.commit(granted.reservation, s.Commit(session=self.session, rank=rank, parts=parts))

    def store(self, keys: list[str], ranks: int = 1, **more: Any) -> s.ReserveAnswer:
        """Reserve and commit; every chunk is READY afterwards."""
        granted = self.reserve(keys, **more)
        for rank in range(ranks):
            answer = self.commit(granted, rank)
        assert answer.remaining == [] and answer.ready == len(granted.chunks)
        return granted

    def release(self, lease: str | None, *ranks: int) -> list[int]:
        assert lease is not None
        return self.client.release(lease, s.ReleaseLease(session=self.session, ranks=list(ranks))).remaining

    def heartbeat(self, **more: Any) -> s.HeartbeatAnswer:
        return self.client.heartbeat(self.session, s.Heartbeat(member=self.member, **more))

    def leave(self) -> None:
        self.client.leave(self.session, self.member)
        self.close()

    def close(self) -> None:
        """Dies without leaving: the lock becomes free, and no call is made."""
        self.liveness.close()


def attach(
    client: Client, *, instance: str | None = None, ranks: list[int] | None = None, scheduler: bool = True,
    member: str | None = None, label: str = "", served_model_name: str = "", is_bench: bool = False,
    **manifest_overrides: Any,
) -> Engine:
    liveness = MemberLiveness(client.segments().lock_file, source=_fresh)
    body = s.AttachSession(
        instance=instance or unique("engine"),
        manifest=manifest(**manifest_overrides),
        member=s.Member(
            id=member or unique("member"), ranks=[0] if ranks is None else ranks, scheduler=scheduler,
            lock_offset=liveness.offset,
        ),
        label=label,
        served_model_name=served_model_name,
        is_bench=is_bench,
    )
    try:
        attached = client.attach(body)
    except BaseException:
        liveness.close()
        raise
    return Engine(client, attached, body.member.id, liveness, body)


class _UnixHTTPConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def http_connection(address: str) -> http.client.HTTPConnection:
    """Somebody else's HTTP, over either kind of socket."""
    at = Address.parse(address)
    return _UnixHTTPConnection(at.socket_path) if at.socket_path else http.client.HTTPConnection(
        at.host, at.port, timeout=PATIENCE_S
    )


def raw(
    address: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers by lower-case name, body) of one request on its own connection. Over TCP it is the operator's,
    unless `headers` say whose, as NOBODYS do."""
    connection = http_connection(address)
    sent = {} if headers is None else dict(headers)
    if address.startswith("http:") and "Authorization" not in sent:
        sent["Authorization"] = f"Bearer {OPERATOR}"
    if not sent.get("Authorization"):
        sent.pop("Authorization", None)
    try:
        connection.request(method, path, body, sent)
        response: http.client.HTTPResponse = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def post(address: str, path: str, body: object) -> tuple[int, dict[str, Any]]:
    """POST of any JSON, well-formed or not in the schema's eyes."""
    status, _, content = raw(
        address, "POST", path, msgspec.json.encode(body), {"Content-Type": "application/json"}
    )
    answer: dict[str, Any] = json.loads(content)
    return status, answer


@contextmanager
def soon() -> Iterator[None]:
    """Fails if the block has waited for something that takes LATE_S."""
    began_s = time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    assert took_s < SOON_S, f"it took {took_s:.1f} s, so it waited"


def comes_true(claim: Callable[[], bool], timeout_s: float = PATIENCE_S, pause_s: float = 0.2) -> bool:
    """Whether it becomes true in that time. `pause_s`: between two looks."""
    until = time.monotonic() + timeout_s
    while not claim():
        if time.monotonic() > until:
            return False
        time.sleep(pause_s)
    return True


def kept_of(pool_id: int, what: Kept) -> Path:
    """The object in which the server keeps it beside the pool; its lock file has the secret part of the name."""
    return kept_path(pool_id, what, lock_path(pool_id).read_bytes()[SECRET_OFFSET:])


def eventually(claim: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Waits for another process to get there; fails when it does not."""
    assert comes_true(claim, timeout_s, pause_s=0.01), "it never came true"
