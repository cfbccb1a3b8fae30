"""The mover of a server under test, forked from the server's process, which has imported all that it needs: the real
mover in a process of its own, without the half a second that its imports take."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import traceback
from asyncio.streams import FlowControlMixin
from collections.abc import Callable
from typing import NoReturn


class ForkedMover:
    """What asyncio.subprocess.Process offers, as far as the server asks for it."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._end)

    def _end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            os.kill(self.pid, signal.SIGKILL)


async def fork(main: Callable[[], int]) -> ForkedMover:
    """A child that runs main(), with a pipe to its stdin and one from its stdout."""
    loop = asyncio.get_running_loop()
    (its_stdin, to), (from_it, its_stdout) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(main, its_stdin, its_stdout)
    os.close(its_stdin)
    os.close(its_stdout)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await loop.connect_read_pipe(lambda: protocol, os.fdopen(from_it, "rb", 0))
    transport, flow = await loop.connect_write_pipe(FlowControlMixin, os.fdopen(to, "wb", 0))
    return ForkedMover(pid, asyncio.StreamWriter(transport, flow, None, loop), reader)


def _live(main: Callable[[], int], its_stdin: int, its_stdout: int) -> NoReturn:
    """As a new program: with no descriptor, signal handler or event loop of the server's."""
    try:
        gc.freeze()  # the server's objects would close descriptors that are this process's by then
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asyncio._set_running_loop(None)
        os.dup2(its_stdin, 0)
        os.dup2(its_stdout, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = os.fdopen(0)
        logging.getLogger().handlers.clear()
        os._exit(main())
    except BaseException:  # the server's code, which called this, must not go on here
        traceback.print_exc()
        os._exit(1)
