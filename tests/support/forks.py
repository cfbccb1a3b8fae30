"""Processes for tests, forked from one that has imported everything, as imports take most of a start."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")

_forkserver = get_context("forkserver")
_preloaded = [
    "kvdock.api.server",
    # What a server's event loop imports when it runs.
    "uvicorn.lifespan.on", "uvicorn.loops.uvloop", "anyio._backends._asyncio", "fastapi.telemetry._runtime",
]
_forkserver.set_forkserver_preload(_preloaded)


def preload(module: str) -> None:
    """That module too is imported once, for all that the same process forks. Before the first server starts."""
    _preloaded.append(module)
    _forkserver.set_forkserver_preload(_preloaded)


def start() -> None:
    """The process that others are forked from runs after this; otherwise the first of them starts it."""
    ensure_running()


@contextmanager
def forked(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    """Runs target(*args, link) in a process and yields the link's other end; the process is killed at the end."""
    ours, theirs = _forkserver.Pipe()
    process = _forkserver.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    with ours:
        try:
            yield ours
        finally:
            process.kill()
            process.join()
            process.close()


def _run(program: Callable[[], None], environ: Mapping[str, str], folder: str) -> None:
    for fd, name in enumerate(STREAMS):
        opened = os.open(f"{folder}/{name}", os.O_RDWR)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdin, tempfile.tempdir = os.fdopen(0), None
    os.environ.clear()
    os.environ.update(environ)
    program()


def run(
    program: Callable[[], None], *argv: str, environ: Mapping[str, str] = os.environ, stdin: str = "", timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of a program that has imported all that was preloaded. `argv`: what the answer names."""
    with tempfile.TemporaryDirectory(prefix="kvdock-run-") as folder:
        for name in STREAMS:
            (Path(folder) / name).write_text(stdin if name == "stdin" else "")
        process = _forkserver.Process(target=_run, args=(program, dict(environ), folder))
        process.start()
        process.join(timeout_s)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join()
        process.close()
        out, err = ((Path(folder) / name).read_text() for name in STREAMS[1:])
    if status is None:
        raise subprocess.TimeoutExpired(argv, timeout_s, out, err)
    return subprocess.CompletedProcess(argv, status, out, err)


def _kvdock(argv: Sequence[str]) -> None:
    from kvdock.__main__ import main

    sys.argv = list(argv)
    main()


def run_kvdock(
    *args: str, environ: Mapping[str, str], stdin: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of `python -m kvdock` with these arguments, in half a second less."""
    argv = ("kvdock", *args)
    return run(partial(_kvdock, argv), *argv, environ=environ, stdin=stdin, timeout_s=timeout_s)


def _serve(
    settings: Mapping[str, object], log: str, ready: Connection, before: Callable[[], None] | None = None
) -> None:
    from kvdock.api.log import LineFormatter, ServerLog
    from kvdock.api.server import Server
    from kvdock.api.settings import Settings

    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    logging.basicConfig(level=logging.INFO, handlers=[ServerLog(LineFormatter(logging.BASIC_FORMAT))])
    if before is not None:
        before()
    try:
        Server(Settings.load(settings), on_ready=lambda at: ready.send(at._asdict())).run()
    finally:
        logging.shutdown()  # a process that was forked does not do it by itself


class ServerFork:
    """A server at work, with what subprocess.Popen offers. `before`: called in its process before it starts."""

    def __init__(
        self, settings: Mapping[str, object], log: Path, before: Callable[[], None] | None = None
    ) -> None:
        self._ready, theirs = _forkserver.Pipe(duplex=False)
        self._process = _forkserver.Process(target=_serve, args=(settings, str(log), theirs, before))
        self._process.start()
        theirs.close()
        pid = self._process.pid
        assert pid is not None
        self.pid = pid
        self._status: int | None = None

    def addresses(self) -> dict[str, Any] | None:
        """Where it serves, or None if it ended before it did."""
        with self._ready:
            try:
                found: dict[str, Any] = self._ready.recv()
            except EOFError:
                return None
        return found

    def poll(self) -> int | None:
        """The exit status, and no descriptor of the process is left open; None while it runs."""
        if self._status is None and (status := self._process.exitcode) is not None:
            self._status = status
            self._process.close()
            self._ready.close()
        return self._status

    def wait(self, timeout_s: float | None = None) -> int:
        if self._status is None:
            self._process.join(timeout_s)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a server", timeout_s or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
