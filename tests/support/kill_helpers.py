"""Processes to be killed at a point, and the page that says at which (kill_launch.py forks them)."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import kill_build
from api_helpers import small_pool

POINT_BYTES = 56
REACHED_AT = POINT_BYTES + 4
PATIENCE_S = 30.0


class PausePage:
    """What csrc/base/pause.cpp reads: the point, how often to pass it, and whether somebody stands there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 4096)

    def arm(self, point: str, skip: int = 0) -> None:
        name = point.encode()
        assert len(name) < POINT_BYTES
        self._page[POINT_BYTES:REACHED_AT + 4] = struct.pack("<II", skip, 0)
        self._page[:POINT_BYTES] = name.ljust(POINT_BYTES, b"\0")

    def disarm(self) -> None:
        self._page[:POINT_BYTES] = bytes(POINT_BYTES)

    @property
    def reached(self) -> bool:
        return bool(self._page[REACHED_AT])

    def close(self) -> None:
        self._page.close()


class Child:
    """One forked process."""

    def __init__(self, pid: int, link: Connection, page: PausePage) -> None:
        self.pid, self.link, self.page = pid, link, page
        self._pidfd = os.pidfd_open(pid)
        self._asked = False

    def begin(self, *what: object) -> None:
        self.link.send(what)
        self._asked = True

    def answer(self, timeout_s: float = PATIENCE_S) -> Any:
        assert self.link.poll(timeout_s), f"process {self.pid} does not answer"
        self._asked = False
        return self.link.recv()

    def do(self, *what: object) -> Any:
        if self._asked:
            self.answer()  # of what was begun
        self.begin(*what)
        return self.answer()

    @property
    def ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def end(self, number: int = signal.SIGKILL) -> None:
        """Until the kernel has taken it down."""
        if not self.ended:
            signal.pidfd_send_signal(self._pidfd, number)
        assert select.select([self._pidfd], [], [], PATIENCE_S)[0], f"process {self.pid} does not end"

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        self.end()
        self.link.close()
        os.close(self._pidfd)
        self.page.close()


class Nursery:
    """Where children come from; any thread may ask. Closing it kills those that are left."""

    def __init__(self, core: Path) -> None:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-kill-")))
        self._lock = threading.Lock()
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "kill_launch.py"), str(core)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def fork(self, role: str, *, point: str = "", skip: int = 0, **job: object) -> Child:
        """A child linked to this process; it may already stand at `point`."""
        with self._lock:
            self._count += 1
            number = self._count
            page = PausePage(self.folder / f"{number}.page")
            if point:
                page.arm(point, skip)
            with Listener(str(self.folder / f"{number}.link"), "AF_UNIX") as listener:
                line = json.dumps({"role": role, "page": str(page.path), "link": listener.address,
                                   "log": str(self.folder / f"{number}.log"), **job})
                assert self._process.stdin is not None and self._process.stdout is not None
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
                pid = int(self._process.stdout.readline())
                return Child(pid, listener.accept(), page)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(PATIENCE_S)
        self._stack.close()


@contextmanager
def nursery() -> Iterator[Nursery]:
    one = Nursery(kill_build.build_paused())
    try:
        yield one
    finally:
        one.close()


def settings_at(folder: Path) -> dict[str, object]:
    """Two segments of 15 chunks each."""
    return small_pool(
        socket_path=str(folder / "s.sock"), pool_bytes=4 << 20, segment_bytes=2 << 20, heartbeat_s=0.1,
        settle_s=0.1, watch_s=0.01,
    )


def until(claim: Any, what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of `claim()`."""
    end = time.monotonic() + timeout_s
    while not (found := claim()):
        assert time.monotonic() < end, f"it never came true: {what}"
        time.sleep(0.01)  # another process gets there meanwhile
    return found
