"""What operators ask about the contents of tiers, which the mover answers.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from kvdock.protocol.mover_schemas import ContentsAnswer, ContentsQuestion
from kvdock.protocol.reports import TierContents

ANSWER_S = 25.0
"""How long a call waits for a tier."""


class Contents:
    """`wake`: called when there is something to send to the mover."""

    def __init__(self, tiers: Sequence[str], wake: Callable[[], None]) -> None:
        self.tiers, self._wake = list(tiers), wake
        self._numbers = itertools.count(1)
        self._unsent: list[ContentsQuestion] = []
        self._asked: dict[int, asyncio.Future[TierContents]] = {}

    async def of(self, tiers: Sequence[str], remove: Sequence[str] = ()) -> list[TierContents]:
        """What these tiers have, after all of the namespaces in `remove` was removed from them."""
        return await asyncio.gather(*(self._of(tier, remove) for tier in tiers))

    async def _of(self, tier: str, remove: Sequence[str]) -> TierContents:
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answered
        self._unsent.append(ContentsQuestion(number, tier, list(remove)))
        self._wake()
        try:
            return await asyncio.wait_for(answered, ANSWER_S)
        except TimeoutError:
            return TierContents(tier=tier, error=f"it has not listed within {ANSWER_S:.0f} s what it has")
        finally:
            del self._asked[number]

    def take(self) -> list[ContentsQuestion]:
        """The questions that were not sent yet."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def answered(self, answer: ContentsAnswer) -> None:
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer.contents)
