"""The mover, which stands still at a step, forked by the server in the mover's place (forked_mover.py).

The file ARMED names a step. The first thread that comes to that step removes the file and stops the process (SIGSTOP),
which is killed there, or goes on. With " alone" behind the step's name, this thread alone waits, until the file HELD
is gone. The steps are put around the functions that make them: nothing in the product knows of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it has no stubs here
from api_helpers import ServerProcess, eventually
from forked_mover import ForkedMover, fork
from kill_launch import around

from kvdock.tiers.mover.__main__ import main

UP = ("up.asked", "up.reserved", "up.loading", "up.hashed", "up.half", "up.committed")
"""Before and after slots are reserved, while they are filled, before the first and the second rank's commit, and after
it."""
DOWN = ("down.asked", "down.held", "down.writing", "down.written")
"""Before and after chunks are leased, while they are written, and before the lease is released."""


COPYING, LEAST_COPY = "up.copying", 1 << 20
"""A step that lies within a copy from Mooncake, and the least bytes of a copy that it stops."""
HUNG, LATE_STORE_S = "KVDOCK_TEST_HUNG", "KVDOCK_TEST_LATE_STORE_S"
"""Variables of the mover's environment: see put_hangs()."""
BEGUN = ".begun"
"""The file beside one that says "half" has this suffix, and is there once half has come."""


ALONE, HELD = " alone", ".held"
"""HELD: the suffix of the file beside ARMED."""


def stand(armed: Path, step: str) -> None:
    try:
        wanted = armed.read_text()
        if wanted.removesuffix(ALONE) != step:
            return
        armed.unlink()
    except FileNotFoundError:
        return
    if wanted == step:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    while wanted != step and armed.with_suffix(HELD).exists():
        time.sleep(0.01)  # the test takes it away


def put_steps(armed: Path) -> None:
    from kvdock.client.client import Client
    from kvdock.tiers.disk.tier import DiskTier, StoreBatch
    from kvdock.tiers.mover.fetches import Fetches
    from kvdock.tiers.mover.write_behind import WriteBehind
    from kvdock.tiers.stores.mooncake.library import Library
    from kvdock.tiers.stores.objects_loads import Sink
    from kvdock.tiers.stores.resp import Wire

    at = partial(stand, armed)

    def second(client: Client, reservation: str, body: Any) -> None:
        if body.rank == 1:
            at("up.half")

    around(Client, "reserve", before=lambda *_: at("up.asked"), after=at, point="up.reserved")
    for of_a_load in ((DiskTier, "_end_load"), (Wire, "value_into"), (Sink, "add"), (Library, "read")):
        around(*of_a_load, after=at, point="up.loading")
    def copies(library: Library, name: str, address: int, length: int, offset: int) -> None:
        """While the copy is made: once an eighth of it has come."""
        if length < LEAST_COPY or not (armed.exists() and armed.read_text() == COPYING):
            return
        place = (ctypes.c_char * 64).from_address(address + length // 8)
        place.raw = bytes(64)  # what the slot had before may be the same

        def watch() -> None:
            while place.raw == bytes(64):
                time.sleep(0)  # the copy goes on beside it
            at(COPYING)

        threading.Thread(target=watch, daemon=True).start()

    around(Library, "read", before=copies)
    around(Fetches, "_commit", before=lambda *_: at("up.hashed"), after=at, point="up.committed")
    around(Fetches, "_read", after=at, point="up.read")
    around(Client, "commit", before=second)
    around(Client, "hold", before=lambda *_: at("down.asked"), after=at, point="down.held")
    around(StoreBatch, "_end_first", after=at, point="down.writing")
    around(WriteBehind, "_store", after=at, point="down.written")


def put_hangs(hung: Path) -> None:
    """Calls of the disk tier do not return while the file `hung` names their kind: "read", "write", "sync" (the index),
    "stat", or "half": a read that hangs when half of it has come. Its writes fail while the file names an error, as
    "ENOSPC". LATE_STORE_S: how long a store may take."""
    from kvdock.tiers.disk.files import File
    from kvdock.tiers.disk.folder import FolderLock
    from kvdock.tiers.disk.index import Index
    from kvdock.tiers.disk.io import Io
    from kvdock.tiers.mover import write_behind
    from kvdock.tiers.tier import PAGE_BYTES

    def hangs(kind: str) -> bool:
        try:
            return kind in hung.read_text().split()
        except FileNotFoundError:
            return False

    def wait(kind: str, *_: object) -> None:
        while hangs(kind):
            time.sleep(0.01)  # the test takes it away

    read = Io.read

    def read_half(io: Io, file: File, buffers: Sequence[memoryview], offset: int) -> bool:
        if hangs("half"):
            *others, last = buffers
            read(io, file, [*others, last[: len(last) // 2 // PAGE_BYTES * PAGE_BYTES]], offset)
            hung.with_suffix(BEGUN).touch()
            wait("half")
        return read(io, file, buffers, offset)

    write = os.pwritev

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        for name in ("ENOSPC", "EROFS", "EIO"):
            if hangs(name):
                number = getattr(errno, name)
                raise OSError(number, os.strerror(number))
        return write(fd, buffers, offset)

    vars(os)["pwritev"] = failing
    vars_of: Any = Io
    vars_of.read = read_half
    for owner, name, kind in ((Io, "read", "read"), (Io, "write", "write"), (Index, "_many", "sync"),
                              (FolderLock, "require", "stat")):
        around(owner, name, before=partial(wait, kind))
    if LATE_STORE_S in os.environ:
        vars(write_behind)["BATCH_S"] = float(os.environ[LATE_STORE_S])


def movers_of(server_pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(server_pid).children() if not has_ended(child)]


def has_ended(process: psutil.Process) -> bool:
    """Also while its status was not asked for yet, which takes seconds for a mover whose server has ended."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def kill_with_mover(server: ServerProcess) -> None:
    """As a machine that goes down."""
    movers = movers_of(server.process.pid)
    server.process.kill()
    for mover in movers:
        mover.send_signal(signal.SIGKILL)
    server.process.wait(30.0)
    eventually(lambda: all(map(has_ended, movers)), 30.0)


def use(program: tuple[str, ...], environment: dict[str, str]) -> None:
    """In a server's process: this is its mover from now on, started again at once whenever it has ended."""
    from kvdock.api.tiers import process

    os.environ.update(environment)
    vars(process)["PROGRAM"] = program
    vars(process)["HEALTHY_S"] = 0.0


def use_forked(main: Callable[[], int], environment: dict[str, str]) -> None:
    """In a server's process: a fork of it that runs main() is its mover from now on, as use() has it."""
    use((), environment)

    async def start(*program: str, **pipes: object) -> ForkedMover:
        return await fork(main)

    vars(asyncio)["create_subprocess_exec"] = start


def run_stepped(armed: Path) -> int:
    put_steps(armed)
    if HUNG in os.environ:
        put_hangs(Path(os.environ[HUNG]))
    from kvdock.tiers.mover import run

    vars(run)["REPORT_S"] = 0.02  # tests wait for what the mover reports
    return main()


class ForkingServer(ServerProcess):
    """A server whose mover is a fork of it."""

    before = partial(use_forked, main, {})


class SteppedServer(ServerProcess):
    """A server whose mover can be made to stand at a step. `environment`: of both."""

    def __init__(self, armed: Path, environment: dict[str, str] | None = None, **settings: object) -> None:
        self.armed = armed
        self.before = partial(use_forked, partial(run_stepped, armed), environment or {})
        super().__init__(**settings)

    def mover(self) -> psutil.Process:
        """The one that lives."""
        until_s = time.monotonic() + 30.0
        while not (found := movers_of(self.process.pid)):
            assert time.monotonic() < until_s, self.log_text()[-3000:]
            time.sleep(0.01)  # the server starts another one
        return found[0]

    @contextmanager
    def holding(self, step: str) -> Iterator[None]:
        """Within the block, the first thread of the mover that comes to the step waits there."""
        held = self.armed.with_suffix(HELD)
        held.touch()
        self.armed.write_text(step + ALONE)
        try:
            yield
        finally:
            held.unlink()

    def stands(self, step: str, timeout_s: float = 30.0) -> psutil.Process:
        """The mover, once it has come to the step that was armed."""
        mover = self.mover()
        until_s = time.monotonic() + timeout_s
        while self.armed.exists() or mover.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < until_s, f"the mover does not come to {step}: {self.log_text()[-3000:]}"
            time.sleep(0.005)  # another process gets there meanwhile
        return mover

