"""The mover's process: it starts with the server, is started again when it has ended, and has some time at the end.

Updates go to its stdin, and reports come from its stdout. The end of its stdin means that the server has ended.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from functools import partial

import msgspec

from kvdock.api.settings import Settings
from kvdock.api.tiers.mover_client import MoverClient
from kvdock.api.turns import next_slice
from kvdock.protocol.mover_schemas import BATCH_BYTES, FRAME_HEAD, MoverConfig, MoverReport, frame

log = logging.getLogger("kvdock.api")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 10.0
HEALTHY_S = 30.0
"""A mover that has run this long ran well: the next one is started at once. The pause doubles with each mover that ends
sooner."""
POOL_BATCHES = 64
"""A batch of loads has at most the pool's bytes divided by this."""
STOP_S = 3.0
"""How long the mover may take to stop."""
KILL_S = 2.0
"""How long the mover may take to end after it was killed. It does not end while a call of its storage hangs in the
kernel."""
_REPORTS = msgspec.msgpack.Decoder(MoverReport)
"""Made while nothing waits for the server: it takes milliseconds."""
PROGRAM = (sys.executable, "-m", "kvdock.tiers.mover")


class MoverProcess:
    def __init__(self, settings: Settings, client: MoverClient, address: str) -> None:
        self._client = client
        self._config = MoverConfig(
            address=address, instance_prefix=client.instance_prefix, disk_path=settings.disk_path,
            disk_bytes=settings.disk_bytes, disk_day_bytes=settings.disk_day_bytes, stores=settings.store_urls,
            asks=settings.tier_asks,
            log_format=settings.log_format, drain_s=settings.tier_drain_s,
            pool_bytes=settings.pool_bytes, queue_bytes=settings.tier_queue_bytes or settings.pool_bytes,
            batch_bytes=min(BATCH_BYTES, settings.pool_bytes // POOL_BATCHES), known_bytes=client.known_bytes,
        )
        self._process: Process | None = None

    async def run(self) -> None:
        """Runs a mover, and another one after each that ends, until cancelled."""
        retry_s, loop = 0.0, asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            self._client.mover_restarted()
            await self._client.routers_know_no_tier()
            process = await asyncio.create_subprocess_exec(*PROGRAM, stdin=PIPE, stdout=PIPE)
            self._process = process
            sending = asyncio.create_task(self._send(process))
            sending.add_done_callback(partial(_has_sent, process))
            try:
                await self._receive(process)
                status = await process.wait()
            finally:
                sending.cancel()
            self._client.restarts += 1
            retry_s = pause_s(retry_s, loop.time() - began_s)
            self._client.mover_restarted()
            await self._client.routers_know_no_tier()
            log.warning("the mover of lower tiers has ended with status %d: started again in %.1f s", status, retry_s)
            await asyncio.sleep(retry_s)

    async def _send(self, process: Process) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):  # the mover has ended, which _receive() notices
            process.stdin.write(frame(msgspec.structs.replace(self._config, log_level=self._client.log_level)))
            while True:
                await process.stdin.drain()
                process.stdin.write(frame(await self._client.next_update()))

    async def _receive(self, process: Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                (length,) = FRAME_HEAD.unpack(await process.stdout.readexactly(FRAME_HEAD.size))
                report = _REPORTS.decode(await process.stdout.readexactly(length))
                self._client.follow(report)
                await self._client.tell_routers(report.known)
                await next_slice()  # else all that has come already would be followed in one turn
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the mover has ended
        except Exception:  # whatever it was: the next mover reports anew
            log.exception("a report of the mover of lower tiers cannot be followed: the mover is started again")
            process.kill()

    def has_written(self) -> bool:
        """Whether no mover runs, or the mover has written all that waited when the server began to drain."""
        return self._process is None or self._process.returncode is not None or self._client.is_drained

    async def stop(self) -> None:
        """Makes the mover stop. What it has not written by then it writes no more."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            log.warning("the mover of lower tiers has not stopped in time: it is killed")
            process.kill()
            try:
                await asyncio.wait_for(process.wait(), KILL_S)
            except TimeoutError:
                log.error("the mover of lower tiers (process %d) hangs in its storage: it is left behind", process.pid)


def pause_s(before_s: float, ran_s: float) -> float:
    """How long to wait until the next mover is started, after one that ran for `ran_s`. `before_s`: the last pause."""
    return 0.0 if ran_s >= HEALTHY_S else min(max(FIRST_RETRY_S, 2 * before_s), LONGEST_RETRY_S)


def _has_sent(process: Process, sending: asyncio.Task[None]) -> None:
    """A mover that gets no updates is of no use: the next one gets all of them anew."""
    if not sending.cancelled() and (error := sending.exception()) is not None:
        log.error("the mover of lower tiers gets no updates: it is started again", exc_info=error)
        with suppress(ProcessLookupError):
            process.kill()
