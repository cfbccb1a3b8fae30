"""What other nodes ask about this node's pool. The mover answers, because it has the pool's memory registered.

Used from the event loop alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from kvdock.api.convert import key_bytes
from kvdock.api.tiers.clears import Clears
from kvdock.protocol.errors import ApiError
from kvdock.protocol.mover_schemas import PeerAnswer, PeerQuestion
from kvdock.protocol.peer_schemas import PeerNotes, PeerNotesAnswer, PeerRead, PeerReadAnswer
from kvdock.protocol.wire_types import KEY_BYTES

PEERS = "peers"
"""The name of the tier by which this node reads the pools of others, too."""
ANSWER_S = 2.0
MOST_ASKED = 256
MOST_TOLD = 1 << 16
"""How many deleted keys are remembered."""
MOST_WAITING = 64
"""How many questions may wait for a chunk. Further questions are answered at once, with what is in the pool."""


class Peers:
    """`wake`: called when there is something to send to the mover."""

    def __init__(self, clears: Clears, wake: Callable[[], None]) -> None:
        self._clears, self._wake = clears, wake
        self._numbers = itertools.count(1)
        self._unsent: list[PeerQuestion] = []
        self._asked: dict[int, asyncio.Future[PeerReadAnswer]] = {}
        self._waiting: set[int] = set()
        """The numbers of those that may wait for a chunk."""
        self._told: OrderedDict[tuple[bytes, bytes], bool] = OrderedDict()
        """Chunks that others have deleted, by namespace and key: whether they have come from other nodes since."""

    def notes(self, body: PeerNotes) -> PeerNotesAnswer:
        """Raises ApiError: bad_argument, for keys that are none; not_ready: this server does not use peers."""
        self._require_tier()
        wanted = [(note, key_bytes(note.deleted)) for note in body.notes]
        return PeerNotesAnswer(generations=[
            self._clears.follow(
                note.namespace, note.generation, self._to_delete(note.namespace, keys, is_again=body.again),
                "another node",
            )
            for note, keys in wanted
        ])

    def _to_delete(self, namespace: str, keys: bytes, *, is_again: bool) -> bytes:
        """The keys that are deleted here. What engines have stored since they were deleted before stays."""
        digest, found = bytes.fromhex(namespace), []
        for at in range(0, len(keys), KEY_BYTES):
            key = keys[at : at + KEY_BYTES]
            if not is_again:
                self._told[digest, key] = False
                self._told.move_to_end((digest, key))
            elif not self._told.pop((digest, key), True):
                continue
            found.append(key)
        while len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)
        return b"".join(found)

    def come(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """The mover loads these chunks from other nodes, which may not know yet that they were deleted."""
        self._told.update((one, True) for key in keys if (one := (namespace, key)) in self._told)

    async def read(self, body: PeerRead) -> PeerReadAnswer:
        """Raises ApiError: as notes(), and not_ready if the mover does not answer."""
        self._require_tier()
        body = msgspec.structs.replace(body, keys=key_bytes(body.keys))
        if len(self._asked) >= MOST_ASKED:
            raise ApiError("not_ready", "too many calls of peers wait", found=len(self._asked), wanted=MOST_ASKED)
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answered
        may_wait = not body.wait_s or len(self._waiting) < MOST_WAITING
        if not may_wait:
            body = msgspec.structs.replace(body, wait_s=0.0)
        elif body.wait_s:
            self._waiting.add(number)
        self._unsent.append(PeerQuestion(number, body))
        self._wake()
        try:
            answer: PeerReadAnswer = await asyncio.wait_for(answered, ANSWER_S)
            if not may_wait:
                answer.coming = 0
            return answer
        except TimeoutError:
            raise ApiError("not_ready", f"the mover has not answered within {ANSWER_S:.0f} s") from None
        finally:
            del self._asked[number]
            self._waiting.discard(number)

    def take(self) -> list[PeerQuestion]:
        """The questions that were not sent yet, and whose callers still wait."""
        unsent, self._unsent = self._unsent, []
        return [one for one in unsent if one.number in self._asked]

    def answered(self, answer: PeerAnswer) -> None:
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():
            asked.set_result(answer.answer)

    def _require_tier(self) -> None:
        if PEERS not in self._clears.contents.tiers:
            raise ApiError("not_found", "this server does not share its pool", found="no peers_url", wanted="peers_url")
