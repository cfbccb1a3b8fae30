"""The namespaces that the mover serves: in each it has a session, as an engine has, and by it the chunks' memory."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvdock.client.client import Client
from kvdock.connectors.errors import RefusedError
from kvdock.connectors.session import Attachment, EngineSession, Identity, SessionObserver
from kvdock.protocol.mover_schemas import ServedNamespace
from kvdock.protocol.schemas import Changes, Manifest
from kvdock.protocol.tier_schemas import MOVER_LABEL
from kvdock.tiers.notes import Note
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import pages_bytes

log = logging.getLogger("kvdock.tiers")

LINGER_S = 5.0
CHANGES_OF_SERVER = 1 << 32
"""The numbers of a server's changes begin with a multiple of it (csrc/table/lookup.cpp, changes)."""


@dataclass(frozen=True)
class Place:
    digest: bytes
    manifest: Manifest
    session: EngineSession

    @property
    def ranks(self) -> range:
        """The writers, all of which the mover is."""
        return range(self.manifest.writers)

    @property
    def chunk_bytes(self) -> int:
        return sum(group.part_bytes for group in self.manifest.groups) * self.manifest.writers

    def names(self, note: Note, key: bytes, groups: Sequence[int] | None = None) -> list[PartName]:
        """The names of a chunk's parts at a tier whose note this is: of all, or those of some groups."""
        wanted = range(len(self.manifest.groups)) if groups is None else groups
        return [note.name(self.digest, key, group, writer) for group in wanted for writer in self.ranks]

    def pages(self, attachment: Attachment, segment: int, offset: int, length: int) -> memoryview:
        """A slot's whole pages. Raises what attaching a segment raises."""
        self.session.ensure_segment(attachment, segment)
        attachment.segments.require_whole(segment)
        whole = pages_bytes(length)
        address = attachment.segments.address(segment, offset, whole)
        return memoryview((ctypes.c_ubyte * whole).from_address(address)).cast("B")


class Places:
    """`changed`: called from a heartbeat's thread with the changes of a place."""

    def __init__(
        self, client: Client, instance: str, changed: Callable[[Place, Changes], None], clock: Callable[[], float]
    ) -> None:
        self._client, self._instance, self._changed, self._clock = client, instance, changed, clock
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, Place] = {}
        self._rewinding: set[bytes] = set()
        """Namespaces whose changes are heard from the first on, after the next heartbeat."""
        self._left: set[bytes] = set()
        self._unserved_s: dict[bytes, float] = {}
        """Since when, by namespace."""

    def of(self, digest: bytes) -> Place | None:
        with self._lock:
            return self._by_digest.get(digest)

    def all(self) -> list[Place]:
        with self._lock:
            return list(self._by_digest.values())

    def follow(self, served: Sequence[ServedNamespace]) -> None:
        """Attaches to new ones. Those that are served no more stay for LINGER_S: an engine that has ended may come
        back, and what it has stored is still to be written."""
        wanted = {bytes.fromhex(one.namespace): one for one in served}
        self._left -= wanted.keys()
        for digest, one in wanted.items():
            if self.of(digest) is None:
                self._open(digest, one.manifest, one.weights)
        with self._lock:
            self._unserved_s = {
                digest: self._unserved_s.get(digest, self._clock()) for digest in self._by_digest.keys() - wanted.keys()
            }

    def hear_all(self) -> None:
        """Everything that the pool has is told once more."""
        self._rewinding.update(place.digest for place in self.all())

    def _heard(self, place: Place, attachment: Attachment, changes: Changes) -> None:
        """In the thread of the session's heartbeats, which may come before the place is known to who writes: all of it
        is heard again then."""
        if self.of(place.digest) is not place:
            return
        self._changed(place, changes)
        if place.digest in self._rewinding:
            self._rewinding.discard(place.digest)
            attachment.changes_since -= attachment.changes_since % CHANGES_OF_SERVER

    def leave(self, is_busy: Callable[[Place], bool]) -> None:
        """Leaves those that are served no more and for which nothing is under way."""
        with self._lock:
            late = [digest for digest, since_s in self._unserved_s.items() if self._clock() - since_s > LINGER_S]
            gone = [self._by_digest.pop(digest) for digest in late if not is_busy(self._by_digest[digest])]
            for place in gone:
                del self._unserved_s[place.digest]
                self._left.discard(place.digest)
        for place in gone:
            place.session.close()

    def close(self) -> None:
        for place in self.all():
            place.session.close()

    def left(self, digests: Sequence[bytes]) -> None:
        """Nobody runs their weights any more: nothing more of them is written."""
        with self._lock:
            self._left |= self._by_digest.keys() & set(digests)

    def is_left(self, place: Place) -> bool:
        return place.digest in self._left

    def _open(self, digest: bytes, manifest: Manifest, weights: str) -> None:
        identity = Identity(
            instance=f"{self._instance}-{digest.hex()[:12]}", member="mover", ranks=tuple(range(manifest.writers)),
            label=MOVER_LABEL,
        )
        session = EngineSession(self._client, manifest, identity)
        session.runs(weights)
        place = Place(digest, manifest, session)
        try:
            self._rewinding.add(digest)  # what is there already is heard as well
            session.start(SessionObserver(changed=partial(self._heard, place)))
        except RefusedError as error:
            log.warning("lower tiers are not used for namespace %s: %s", digest.hex()[:12], error)
            session.close()
            return
        attachment = session.attachment
        if attachment is not None and attachment.filed_in != digest:
            log.error("namespace %s: the server calls it %s", digest.hex()[:12], attachment.filed_in.hex()[:12])
            session.close()
            return
        with self._lock:
            self._by_digest[digest] = place
