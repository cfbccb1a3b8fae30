"""One call at a time from the many that people and strangers may send, with engines' calls in between.

Without turns, sixty requests that arrive together are answered together, and an engine waits for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """`await turns.next()` returns to one caller in each turn of the event loop, in the order of asking."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._pass_on, loop)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # its call may have been cancelled
                first.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._taken = False
