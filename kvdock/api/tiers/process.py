"""The mover's process: started with the server, started again when it has ended, and given some time at the end.

News goes to its stdin and its words come from its stdout. That its stdin ends tells it that the server has.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from kvdock.api.settings import Settings
from kvdock.api.tiers.desk import TierDesk
from kvdock.protocol.mover_schemas import BATCH_BYTES, FRAME_HEAD, MoverConfig, MoverWords, frame

log = logging.getLogger("kvdock.api")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 10.0
HEALTHY_S = 30.0
"""A mover that has lived so long was no failed start."""
POOL_BATCHES = 64
"""A batch takes no larger share of a small pool."""
END_S = 3.0
"""How long it may take to end beyond the time that it has to write."""
KILL_S = 2.0
"""How long it may take to end when it is killed. It does not end while a call of its storage hangs in the kernel."""
PROGRAM = (sys.executable, "-m", "kvdock.tiers.mover")


class MoverProcess:
    def __init__(self, settings: Settings, desk: TierDesk, address: str, program: Sequence[str] = PROGRAM) -> None:
        self._desk, self._program, self._drain_s = desk, program, settings.tier_drain_s
        self._config = MoverConfig(
            address=address, instance_prefix=desk.instance_prefix, disk_path=settings.disk_path,
            disk_bytes=settings.disk_bytes, redis_url=settings.redis_url, objects_url=settings.objects_url,
            mooncake_url=settings.mooncake_url, asks=settings.tier_asks,
            log_level=settings.log_level, log_format=settings.log_format, drain_s=settings.tier_drain_s,
            queue_bytes=settings.tier_queue_bytes or settings.pool_bytes,
            batch_bytes=min(BATCH_BYTES, settings.pool_bytes // POOL_BATCHES),
        )
        self._process: Process | None = None

    async def run(self) -> None:
        """Until cancelled."""
        retry_s, loop = FIRST_RETRY_S, asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            self._desk.restarted()
            process = await asyncio.create_subprocess_exec(*self._program, stdin=PIPE, stdout=PIPE)
            self._process = process
            telling = asyncio.create_task(self._tell(process))
            try:
                await self._hear(process)
                status = await process.wait()
            finally:
                telling.cancel()
            self._desk.mover_restarts += 1
            retry_s = FIRST_RETRY_S if loop.time() - began_s > HEALTHY_S else min(2 * retry_s, LONGEST_RETRY_S)
            self._desk.restarted()
            log.warning("the mover of lower tiers has ended with status %d: started again in %.1f s", status, retry_s)
            await asyncio.sleep(retry_s)

    async def _tell(self, process: Process) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):  # it has ended: the other task sees it
            process.stdin.write(frame(self._config))
            while True:
                await process.stdin.drain()
                process.stdin.write(frame(await self._desk.news()))

    async def _hear(self, process: Process) -> None:
        assert process.stdout is not None
        decoder = msgspec.msgpack.Decoder(MoverWords)
        try:
            while True:
                (length,) = FRAME_HEAD.unpack(await process.stdout.readexactly(FRAME_HEAD.size))
                self._desk.heard(decoder.decode(await process.stdout.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # it has ended
        except (msgspec.MsgspecError, ValueError):
            log.exception("the mover of lower tiers said what cannot be read: it is started again")
            process.kill()

    async def end(self) -> None:
        """Tells it to end, and waits as long as it may write."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), self._drain_s + END_S)
        except TimeoutError:
            log.warning("the mover of lower tiers has not ended in time: it is killed")
            process.kill()
            try:
                await asyncio.wait_for(process.wait(), KILL_S)
            except TimeoutError:
                log.error("the mover of lower tiers (process %d) hangs in its storage: it is left behind", process.pid)
