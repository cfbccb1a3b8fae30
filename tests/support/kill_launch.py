"""Servers and engines that can be stopped at a named point: forked from one process that has everything imported.

This program is that process. It loads the extension with pause points (kill_build.py) in place of the usual one,
reads jobs as lines of JSON, and forks a child for each; the child links itself to the test and does as it is told.
The steps that are Python get their points here, around the functions that make them: nothing in the product knows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client as Link, Connection
from pathlib import Path
from typing import Any, NoReturn

Pause = Callable[[str], None]


def load_core(path: str) -> Pause:
    """kvdock._core is from now on the extension at `path`."""
    spec = importlib.util.spec_from_file_location("kvdock._core", path)
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules["kvdock._core"] = core
    spec.loader.exec_module(core)
    import kvdock

    vars(kvdock)["_core"] = core
    found: Pause = getattr(core, "pause_at", lambda point: None)
    return found


def around(owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Pause | None = None,
           point: str = "") -> None:
    """owner.name with a point before (which sees the arguments) or after it."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = real(*args, **kwargs)
        if after is not None:
            after(point)
        return result

    setattr(owner, name, wrapped)


def hook_server(pause: Pause) -> None:
    """The points of server steps that are Python."""
    from kvdock.api.pool import lock, segments
    from kvdock.shm import objects as shm

    def allocating(fd: int, size: int, name: str) -> None:
        if name.endswith("-table"):
            pause("open.table_named")
        elif not name.endswith(".lock"):
            pause("grow.named")

    around(shm, "allocate", before=allocating)
    around(segments.SegmentPool, "grow", after=pause, point="grow.allocated")
    around(segments.SegmentPool, "retire", after=pause, point="retire.unlinked")
    around(segments.SegmentPool, "adopt", after=pause, point="adopt.segments_mapped")
    real = lock.PoolLock

    class Paused(real):  # type: ignore[valid-type,misc]  # a class chosen at run time
        @classmethod
        def create(cls, *args: Any, **kwargs: Any) -> Any:
            made = real.create(*args, **kwargs)
            pause("open.lock_named")
            return made

        @classmethod
        def adopt(cls, *args: Any, **kwargs: Any) -> Any:
            taken = real.adopt(*args, **kwargs)
            pause("adopt.lock_taken")
            return taken

    from kvdock.api.pool import adopt, pool

    vars(adopt)["PoolLock"] = vars(pool)["PoolLock"] = Paused


def hook_engine(pause: Pause) -> None:
    """A point before each call to the server is sent and after its answer is there."""
    from kvdock.client import transport

    begin, real = transport.Connection.begin, transport.Connection.exchange

    def verb_of(request: bytes) -> str:
        target = request.split(b" ", 2)[1].decode()
        names = {"/v1/lookups": "lookup", "/v1/reservations": "reserve", "/v1/mismatches": "mismatch",
                 "/v1/sessions": "attach", "/v1/releases": "release"}
        return names.get(target) or target.rpartition("/")[2]

    def sends(self: Any, request: bytes) -> int:
        pause(f"ask.{verb_of(request)}")
        return begin(self, request)

    def exchange(self: Any, request: bytes, timeout_s: float, sent: int = 0) -> Any:
        if not sent:
            pause(f"ask.{verb_of(request)}")
        answer = real(self, request, timeout_s, sent)
        pause(f"told.{verb_of(request)}")
        return answer

    transport.Connection.begin = sends  # type: ignore[method-assign]  # that is a hook
    transport.Connection.exchange = exchange  # type: ignore[method-assign]  # that is a hook


# ------------------------------------------------------------------ children


def serve(link: Connection, pause: Pause, settings: dict[str, object]) -> None:
    """Serves; answers "check" with "" or with what the table says is wrong."""
    hook_server(pause)
    from kvdock._core import TableError
    from kvdock.api import server
    from kvdock.api.errors import StartupError
    from kvdock.api.settings import Settings

    tables: list[Any] = []
    real = vars(server)["open_pool"]

    def open_pool(*args: Any, **named: Any) -> Any:
        pool = real(*args, **named)
        tables.append(pool.table)
        return pool

    vars(server)["open_pool"] = open_pool

    def listen() -> None:
        while True:
            try:
                link.recv()
            except EOFError:
                return
            try:
                tables[-1].check_integrity()
                link.send("")
            except TableError as error:
                link.send(f"{error.code}: {error}")

    def ready(at: server.Addresses) -> None:
        link.send(at._asdict())
        threading.Thread(target=listen, daemon=True).start()

    try:
        server.Server(Settings.load(settings), on_ready=ready).run()
    except StartupError as error:
        link.send({"error": str(error)})


def work(link: Connection, pause: Pause, address: str, seed: int, packs: bool) -> None:
    """An engine: does what the link says, one thing after another."""
    hook_engine(pause)
    from kill_engine import KillEngine

    engine = KillEngine(address, seed, packs)
    link.send("attached")
    while True:
        verb, *args = link.recv()
        if verb == "leave":
            engine.leave()
            link.send(None)
            return
        link.send(getattr(engine, verb)(*args))


def child(job: dict[str, Any], pause: Pause) -> NoReturn:
    os.environ["KVDOCK_PAUSE_PAGE"] = job["page"]
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        link = Link(job["link"], family="AF_UNIX")
        if job["role"] == "server":
            serve(link, pause, job["settings"])
        else:
            work(link, pause, job["address"], job["seed"], job["packs"])
        status = 0
    except EOFError:
        status = 0  # the test has gone
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def main(core: str) -> None:
    pause = load_core(core)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)]
    import kill_engine  # noqa: F401  (what children need is imported once, here)
    import little_scratch  # noqa: F401  (the same)

    import kvdock.api.build
    import kvdock.api.server  # noqa: F401  (the same)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(job, pause)
        print(pid, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
