"""The namespaces that the mover serves. The mover has a session in each, as an engine has, and maps the memory of the
chunks through this session."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvdock.client.client import Client
from kvdock.connectors.errors import RefusedError
from kvdock.connectors.session import Attachment, EngineSession, Identity, SessionObserver
from kvdock.datapath.segments import Registration
from kvdock.protocol.mover_schemas import ServedNamespace
from kvdock.protocol.schemas import MOVER_LABEL, MOVER_NAME, Changes, Manifest
from kvdock.shm.errors import SegmentNotRegistered
from kvdock.tiers.notes import Note
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Registers, Tier, TierError, pages_bytes

log = logging.getLogger("kvdock.tiers")

LINGER_S = 5.0
"""How long a namespace is still served after its last engine has left: the engine may come back, and chunks that it has
stored are still to be written."""
CHANGES_OF_SERVER = 1 << 32
"""A server numbers its changes from a multiple of this number on (csrc/table/lookup.cpp, changes)."""


@dataclass(frozen=True)
class NamespaceSession:
    """`digest`: the namespace, 32 bytes."""

    digest: bytes
    manifest: Manifest
    session: EngineSession

    @property
    def ranks(self) -> range:
        """All ranks of the namespace's engines: the mover stores and loads the parts of each of them."""
        return range(self.manifest.writers)

    @property
    def chunk_bytes(self) -> int:
        return sum(group.slot_bytes for group in self.manifest.groups) * self.manifest.writers

    def names(self, note: Note, key: bytes, groups: Sequence[int] | None = None) -> list[PartName]:
        """The names of a chunk's parts in a tier that has this note: of all groups, or of some."""
        wanted = range(len(self.manifest.groups)) if groups is None else groups
        return [note.name(self.digest, key, group, writer) for group in wanted for writer in self.ranks]

    def pages(self, attachment: Attachment, segment: int, offset: int, length: int) -> memoryview:
        """The whole pages of a slot, whose `length` bytes are at `offset` in the segment. Raises as address()."""
        whole = pages_bytes(length)
        address = self.address(attachment, segment, offset, whole)
        return memoryview((ctypes.c_ubyte * whole).from_address(address)).cast("B")

    def address(self, attachment: Attachment, segment: int, offset: int, length: int) -> int:
        """Where these bytes of the segment are in this process. Raises AttachError, ServerUnavailable, ApiError."""
        with suppress(SegmentNotRegistered):  # until the segment is registered, tiers copy through memory of their own
            self.session.ensure_segment(attachment, segment)
        attachment.segments.require_whole(segment)
        return attachment.segments.address(segment, offset, length)


class PoolMemory:
    """Registers the pool's segments, as sessions map them, with the tiers that want to know memory beforehand
    (Registers). Sessions take it as their `register`, so each mapping is registered until it is unmapped. Thread-safe.

    A segment that cannot be registered is used all the same, at the cost of one more copy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tiers: list[tuple[str, Registers]] = []
        self._mapped: dict[int, int] = {}
        """The size in bytes of each mapped segment, by its address."""

    def use(self, tier: Tier) -> None:
        """Call it before the tier's first load or store. Segments that are mapped already are registered now, others
        when they are mapped."""
        if not isinstance(tier, Registers):
            return
        with self._lock:
            self._tiers.append((tier.name, tier))
            for address, size_bytes in self._mapped.items():
                _register(tier.name, tier, address, size_bytes)

    def __call__(self, address: int, size_bytes: int) -> Registration:
        """A segment was mapped."""
        with self._lock:
            self._mapped[address] = size_bytes
            for name, tier in self._tiers:
                _register(name, tier, address, size_bytes)
        return _MappedSegment(partial(self._unmap, address))

    def _unmap(self, address: int) -> None:
        with self._lock:
            del self._mapped[address]
            for _, tier in self._tiers:
                tier.unregister(address)


class _MappedSegment:
    def __init__(self, unmap: Callable[[], None]) -> None:
        self._unmap = unmap

    def close(self) -> None:
        """To be called before the segment is unmapped, when no call of a tier uses it."""
        self._unmap()


def _register(name: str, tier: Registers, address: int, size_bytes: int) -> None:
    try:
        tier.register(address, size_bytes)
    except TierError as error:
        log.warning("%s: a segment of the pool is not registered, so its chunks are copied once more: %s", name, error)


class NamespaceSessions:
    """`changed`: called from a heartbeat's thread with the changes of a namespace. `memory`: registers segments of the
    pool; None: no tier wants that."""

    def __init__(
        self, client: Client, instance: str, changed: Callable[[NamespaceSession, Changes], None],
        clock: Callable[[], float], memory: PoolMemory | None = None,
    ) -> None:
        self._client, self._instance, self._changed, self._clock = client, instance, changed, clock
        self._memory = memory
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, NamespaceSession] = {}
        self._rewinding: set[bytes] = set()
        """Namespaces whose changes are asked for from the first on, after the next heartbeat."""
        self._abandoned: set[bytes] = set()
        self._unserved_s: dict[bytes, float] = {}
        """By namespace, the time since which no engine has a session in it."""

    def of(self, digest: bytes) -> NamespaceSession | None:
        with self._lock:
            return self._by_digest.get(digest)

    def writers(self, digest: bytes) -> int:
        """How many writers a namespace has; 0: it is not served."""
        space = self.of(digest)
        return space.manifest.writers if space is not None else 0

    def all(self) -> list[NamespaceSession]:
        with self._lock:
            return list(self._by_digest.values())

    def follow(self, served: Sequence[ServedNamespace]) -> None:
        """Attaches to namespaces that are new. Those that are not served any more stay for LINGER_S."""
        wanted = {bytes.fromhex(one.namespace): one for one in served}
        self._abandoned -= wanted.keys()
        for digest, one in wanted.items():
            if self.of(digest) is None:
                self._open(digest, one.manifest, one.weights)
        with self._lock:
            self._unserved_s = {
                digest: self._unserved_s.get(digest, self._clock()) for digest in self._by_digest.keys() - wanted.keys()
            }

    def repeat_changes(self) -> None:
        """From the next heartbeats on, `changed` is called again for everything that the pool has."""
        self._rewinding.update(space.digest for space in self.all())

    def _on_changes(self, space: NamespaceSession, attachment: Attachment, changes: Changes) -> None:
        """In the thread of the session's heartbeats. Changes that come before the namespace is in `_by_digest` are
        ignored: it is in `_rewinding`, so they come again."""
        if self.of(space.digest) is not space:
            return
        self._changed(space, changes)
        if space.digest in self._rewinding:
            self._rewinding.discard(space.digest)
            attachment.changes_since -= attachment.changes_since % CHANGES_OF_SERVER

    def leave_unserved(self, is_busy: Callable[[NamespaceSession], bool]) -> None:
        """Leaves the namespaces that have not been served for LINGER_S and in which nothing is in progress."""
        with self._lock:
            late = [digest for digest, since_s in self._unserved_s.items() if self._clock() - since_s > LINGER_S]
            left = [self._by_digest.pop(digest) for digest in late if not is_busy(self._by_digest[digest])]
            for space in left:
                del self._unserved_s[space.digest]
                self._abandoned.discard(space.digest)
        for space in left:
            space.session.close()

    def close(self) -> None:
        for space in self.all():
            space.session.close()

    def abandon(self, digests: Sequence[bytes]) -> None:
        """No engine runs the weights of these namespaces any more: no more of their chunks are written."""
        with self._lock:
            self._abandoned |= self._by_digest.keys() & set(digests)

    def is_abandoned(self, space: NamespaceSession) -> bool:
        return space.digest in self._abandoned

    def _open(self, digest: bytes, manifest: Manifest, weights: str) -> None:
        identity = Identity(
            instance=f"{self._instance}-{digest.hex()[:12]}", member=MOVER_NAME, ranks=tuple(range(manifest.writers)),
            label=MOVER_LABEL,
        )
        session = EngineSession(self._client, manifest, identity, register=self._memory)
        session.runs(weights)
        space = NamespaceSession(digest, manifest, session)
        try:
            self._rewinding.add(digest)  # so that chunks stored before are reported as well
            session.start(SessionObserver(changed=partial(self._on_changes, space)))
        except RefusedError as error:
            log.warning("lower tiers are not used for namespace %s: %s", digest.hex()[:12], error)
            session.close()
            return
        attachment = session.attachment
        if attachment is not None and attachment.filed_in != digest:
            log.error("the server puts namespace %s into %s: lower tiers are not used for it", digest.hex()[:12],
                      attachment.filed_in.hex()[:12])
            session.close()
            return
        with self._lock:
            self._by_digest[digest] = space
