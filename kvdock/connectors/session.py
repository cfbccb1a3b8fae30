"""An engine process's session at the server: it attaches, holds its lock, sends heartbeats, answers the server's
questions, receives changes, and attaches again when the server was lost.

A lost server is a miss: `attachment` is None until the session is attached again, by itself, with
back-off and jitter. An Attachment is one server epoch as this process sees it. When only the line was
lost, the same attachment comes back; when the server's lock is free or the pool is another, it retires:
copies in flight keep its memory mapped, and its lock held, until they end.

Threads: one heartbeat thread; every method may be called from any thread.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvdock.client.client import Client
from kvdock.connectors.errors import RefusedError
from kvdock.connectors.outcomes import Untold
from kvdock.datapath.liveness import MemberLiveness
from kvdock.datapath.registration import Register, SegmentRegistrar
from kvdock.datapath.segments import AttachedSegments
from kvdock.datapath.threads import new_thread
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import (
    Abort,
    AttachSession,
    Changes,
    GrantRanks,
    Heartbeat,
    Manifest,
    Member,
    ReportMismatch,
    RunWeights,
    Segment,
    SessionAttached,
)
from kvdock.protocol.wire_types import MAX_ENTRIES, MAX_WEIGHTS
from kvdock.shm.errors import AttachError, SegmentNotRegistered
from kvdock.shm.objects import lock_path, pool_exists
from kvdock.shm.segment import SegmentInfo

# --------------------------------------------------------------------------------
# Which of the server's grants this member uses, and which it has promised never to touch.
#
# Invariant: "done" is a promise. A grant in `refused` is never begun; a grant that is active is never answered for.
# Checking and beginning happen under one lock, so no question can slip in between.

class GrantBook:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()  # plans handed out or copies in flight, by grant
        self._refused: set[str] = set()

    def begin(self, grant: str) -> bool:
        """False when this member has answered "done" for the grant: the load fails or the store is dropped."""
        with self._lock:
            if grant in self._refused:
                return False
            self._active[grant] += 1
            return True

    def end(self, grant: str) -> None:
        """After the copy was seen to end and its release or commit is on the way."""
        with self._lock:
            self._active[grant] -= 1
            if self._active[grant] <= 0:
                del self._active[grant]

    def ask(self, grant: str) -> bool:
        """A question of the server: True means done, and the grant is refused from now on."""
        with self._lock:
            if self._active[grant] > 0:
                return False
            self._refused.add(grant)
            return True

    def answers(
        self, questions: Sequence[GrantRanks], keeps_lease: Callable[[str], bool]
    ) -> tuple[list[GrantRanks], list[str]]:
        """A heartbeat's `done` and `keep`. `keeps_lease`: whether this member's lookup still needs a lease."""
        done, keep = [], []
        for question in questions:
            if not question.ranks and keeps_lease(question.grant):
                keep.append(question.grant)
            elif self.ask(question.grant):
                done.append(question)
        return done, keep


log = logging.getLogger("kvdock.connector")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 1.0
"""A server that is back is found within 1.5 s, jitter included."""
LOST_CODES = frozenset({"unknown_session", "unknown_member", "member_dead"})
NotYet = (ServerUnavailable, ApiError, AttachError, OSError)
"""What attaching may meet that passes by itself; RefusedError is what does not."""


@dataclass(frozen=True)
class Identity:
    """Who this process is: the instance it belongs to, its member id, its ranks."""

    instance: str
    member: str
    ranks: tuple[int, ...] = (0,)
    scheduler: bool = True
    label: str = ""
    is_bench: bool = False
    """It measures: the server's totals leave out what it does."""


@dataclass(frozen=True)
class ServerEpoch:
    """What one session at one pool is known by. A process that is attached to another one cannot follow plans made
    under this one."""

    pool_id: str
    session: str


@dataclass(frozen=True)
class SessionObserver:
    """Called from the heartbeat thread. `changed` None: changes are not asked for."""

    keeps_lease: Callable[[str], bool] = lambda _lease: False
    """Answers the server's question about an old lease of this member's lookups: True means keep it."""
    changed: Callable[[Attachment, Changes], None] | None = None
    """Gets with each heartbeat which chunks lookups began and ceased to find."""


@dataclass
class Attachment:
    """One server epoch. `namespace` salts the keys; `segments` are mapped here; `wants_blocks` is the answer's.
    `filed_in`: the namespace of the weights that the server was told of last, which are `weights`."""

    session: str
    member: str
    namespace: bytes
    pool_id: str
    segments: AttachedSegments
    liveness: MemberLiveness
    heartbeat_s: float
    registrar: SegmentRegistrar | None = None
    grants: GrantBook = field(default_factory=GrantBook)
    changes_since: int = 0
    wants_blocks: bool = False
    filed_in: bytes = b""
    weights: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: int = 1

    @property
    def epoch(self) -> ServerEpoch:
        return ServerEpoch(self.pool_id, self.session)

    def acquire(self) -> bool:
        """Memory and lock of this epoch stay until release(). False when they have gone already."""
        with self._lock:
            if self._users == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            if self.registrar is not None:
                self.registrar.close()
            self.segments.close()
            self.liveness.close()


class EngineSession:
    """`identity`, `manifest` and the random source are passed in; nothing is contacted before start().

    `register`: registers segments with the GPU's driver, in the background; None when copies do not need it.
    """

    def __init__(
        self, client: Client, manifest: Manifest, identity: Identity, *, source: random.Random | None = None,
        register: Register | None = None,
    ) -> None:
        self.client, self.manifest, self.identity = client, manifest, identity
        self.outcomes = Untold()  # heartbeats tell them
        self._observer = SessionObserver()
        self._register = register
        self._source = source if source is not None else random.Random()
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._suspended: Attachment | None = None  # its server may only be out of reach
        self._epochs = 0
        self._weights = ""
        self._told = threading.Lock()  # one call about weights at a time
        self._said = ""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = new_thread("kvdock-heartbeat", self._run)

    @property
    def attachment(self) -> Attachment | None:
        """None while the server is lost."""
        return self._attachment

    def attachment_to(self, epoch: ServerEpoch) -> Attachment | None:
        """The attachment, acquired, when it is to `epoch`; the caller releases it."""
        attachment = self._attachment
        if attachment is None or attachment.epoch != epoch or not attachment.acquire():
            return None
        return attachment

    def start(self, observer: SessionObserver | None = None) -> None:
        """Attaches if the server is there. RefusedError when it is there and does not accept this engine.

        `observer` is not called before."""
        if observer is not None:
            self._observer = observer
        try:
            self._attach()
        except NotYet as error:
            self._say(logging.WARNING, "no kvdock server yet, serving misses", error)
        except RefusedError:
            raise
        except Exception as error:  # whatever it is, the heartbeat thread tries again
            self._say(logging.ERROR, "cannot attach yet, serving misses", error)
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def runs(self, weights: str) -> None:
        """The scheduler's session: from now on the engine runs the weights of that name, at most MAX_WEIGHTS
        characters; "": those that it started with. Returns at once: the server is told in the background, and once
        more when it was lost. Until it knows, what is looked up and stored is filed under the weights before, where
        keys of other weights are only missed. ValueError for a longer name."""
        if len(weights) > MAX_WEIGHTS:
            raise ValueError(f"a name of weights has {len(weights)} characters, wanted at most {MAX_WEIGHTS}")
        self._weights = weights
        self._wake.set()

    def tell_weights(self, attachment: Attachment) -> None:
        """Tells the server which weights the engine runs, if it does not know. Raises ServerUnavailable, ApiError."""
        with self._told:
            weights = self._weights
            if attachment.weights == weights or not self.identity.scheduler:
                return
            answer = self.client.weights(RunWeights(
                session=attachment.session, member=attachment.member, weights=weights
            ))
            attachment.filed_in, attachment.weights = bytes.fromhex(answer.filed_in), weights

    def lost(self, attachment: Attachment, error: Exception) -> None:
        """A call under `attachment` failed: suspend it if that is what the failure means.

        What an earlier epoch's calls meet late says nothing about the present one."""
        if isinstance(error, ApiError) and error.code not in LOST_CODES:
            return
        with self._lock:
            if self._attachment is not attachment:
                return
            self._attachment, self._suspended = None, attachment
        log.warning("kvdock server lost, serving misses: %s", error)
        self._wake.set()

    def ensure_segment(self, attachment: Attachment, segment: int) -> None:
        """Maps a segment the pool grew since we last looked. AttachError, ServerUnavailable, ApiError.

        SegmentNotRegistered when copies need it registered with the driver, and it is not yet."""
        if all(known.id != segment for known in attachment.segments.segments):
            self._map(attachment, self.client.segments().segments, populate=False)
        if attachment.registrar is not None and not attachment.registrar.is_registered(segment):
            raise SegmentNotRegistered(
                f"segment {segment}", found=f"pinned through {attachment.registrar.pinned_through}",
                wanted="a registered one",
            )

    def report(self, attachment: Attachment, lease: str, damaged: Sequence[int]) -> None:
        """Says which chunks of a lease do not match their checksums. Raises ServerUnavailable, ApiError."""
        for start in range(0, len(damaged), MAX_ENTRIES):
            chunks = list(damaged[start : start + MAX_ENTRIES])
            self.client.mismatch(ReportMismatch(session=attachment.session, lease=lease, chunks=chunks))

    def abort(self, attachment: Attachment, reservation: str, ranks: Sequence[int] | None = None) -> None:
        """Says that `ranks` will not store; None: that no rank was given the reservation. Nothing of it is published.
        """
        is_handed_out = ranks is not None
        if self._attachment is not attachment and not (is_handed_out and self._suspended is attachment):
            return  # nobody listens; if that server returns, it asks
        body = Abort(session=attachment.session, member=attachment.member)
        if ranks is not None:
            body = Abort(session=attachment.session, ranks=list(ranks))
        try:
            self.client.abort(reservation, body)
        except (ServerUnavailable, ApiError) as error:
            log.info("abort of reservation %s not delivered: %s", reservation, error)
            self.lost(attachment, error)

    def close(self) -> None:
        """Leaves the server, which gives back everything this process holds. Call it when no copy is in flight."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            last, self._attachment = self._attachment, None
        self._retire_suspended()
        if last is not None:
            self._leave(last.session, last.member)
            last.release()

    def _leave(self, session: str, member: str) -> None:
        try:
            self.outcomes.tell_last(Heartbeat(member=member), partial(self.client.heartbeat, session))
            self.client.leave(session, member)
        except (ServerUnavailable, ApiError) as error:
            log.info("left without a word: %s", error)

    # ------------------------------------------------------------------ attaching

    def _attach(self) -> None:
        pool = self.client.segments()
        if self._resume(pool.pool_id):
            return
        # A new member id an epoch: to a server that saw the old one die, the old one stays dead.
        self._epochs += 1
        member = f"{self.identity.member}-{self._epochs}"
        liveness = MemberLiveness(
            lock_path(int(pool.pool_id, 16)), source=self._source, with_children=self._register is not None
        )
        segments = AttachedSegments(int(pool.pool_id, 16))
        registrar = None
        answer: SessionAttached | None = None
        try:
            if self._register is not None:
                registrar = SegmentRegistrar(segments, self._register, progress=self._wake.set)
            body = self._attach_body(member, liveness, registrar)
            answer = self.client.attach(body)
            attachment = Attachment(
                answer.session, member, bytes.fromhex(answer.namespace), answer.pool_id, segments, liveness,
                answer.heartbeat_s, registrar, changes_since=answer.changes_next, wants_blocks=answer.wants_blocks,
                filed_in=bytes.fromhex(answer.filed_in), weights=body.weights,
            )
            self._map(attachment, answer.segments, populate=False)
        except BaseException as error:
            if answer is not None:  # without a word it would be taken for dead, and its ranks for taken until then
                self._leave(answer.session, member)
            if registrar is not None:
                registrar.close()
            segments.close()
            liveness.close()
            if isinstance(error, ApiError) and error.code != "not_ready":
                raise RefusedError(f"the server refuses this engine: {error}") from error
            raise
        with self._lock:
            self._attachment = attachment
        self._said = ""
        log.info("attached to %s as %s: pool %s, namespace %s", self.client.address, member, answer.pool_id,
                 answer.namespace[:12])

    def _resume(self, pool_id: str) -> bool:
        """Presents the suspended member again; False when its server epoch is over."""
        last = self._suspended
        if last is not None and last.pool_id == pool_id:
            try:
                body = self._attach_body(last.member, last.liveness, last.registrar)
                answer = self.client.attach(body)
            except ApiError as error:
                log.warning("cannot come back as %s: %s", last.member, error)
            else:
                last.wants_blocks = answer.wants_blocks
                last.filed_in, last.weights = bytes.fromhex(answer.filed_in), body.weights
                with self._lock:
                    self._attachment, self._suspended = last, None
                self._said = ""
                log.info("attached again to %s as %s: pool %s", self.client.address, last.member, pool_id)
                return True
        self._retire_suspended()
        return False

    def _retire_suspended(self) -> None:
        with self._lock:
            last, self._suspended = self._suspended, None
        if last is not None:
            last.release()

    def _attach_body(self, member: str, liveness: MemberLiveness, registrar: SegmentRegistrar | None) -> AttachSession:
        who = self.identity
        return AttachSession(
            instance=who.instance,
            manifest=self.manifest,
            label=who.label,
            is_bench=who.is_bench,
            weights=self._weights if who.scheduler else "",
            member=Member(
                id=member, ranks=list(who.ranks), scheduler=who.scheduler, lock_offset=liveness.offset,
                pinned_through=_pinned_through(registrar),
            ),
        )

    def _map(self, attachment: Attachment, segments: list[Segment], *, populate: bool) -> None:
        """In the order of their ids. A registrar maps the pages itself, outside of this thread."""
        registrar = attachment.registrar
        try:
            for one in segments:
                info = SegmentInfo(one.id, one.name, one.bytes, one.data_offset)
                attachment.segments.attach(info, populate=populate and registrar is None)
        finally:
            if registrar is not None:
                registrar.wake()

    # ------------------------------------------------------------------ the heartbeat thread

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._stop.is_set():
            wait_s = 0.0
            try:
                attachment = self._attachment
                if attachment is not None:
                    retry_s = FIRST_RETRY_S
                    wait_s = self._beat(attachment)
                elif not self._try_to_attach():
                    wait_s = retry_s * self._source.uniform(0.5, 1.5)
                    retry_s = min(2 * retry_s, LONGEST_RETRY_S)
            except Exception as error:  # without this thread, there would be no more hits
                self._say(logging.ERROR, f"unexpected {type(error).__name__}, trying again", error)
                wait_s = LONGEST_RETRY_S
            self._wake.wait(wait_s)
            self._wake.clear()

    def _try_to_attach(self) -> bool:
        try:
            self._attach()
        except NotYet as error:
            # That nobody answers was said when the server was lost.
            loud = logging.DEBUG if isinstance(error, ServerUnavailable) else logging.WARNING
            self._say(loud, "still no server", error)
            self._let_go_of_the_dead()
        except RefusedError as error:
            self._say(logging.ERROR, "the server refuses this engine", error.__cause__ or error)
        else:
            return True
        return False

    def _say(self, level: int, what: str, why: BaseException) -> None:
        """Why this process is not served: once, however often it tries."""
        cause = why.code if isinstance(why, ApiError) else str(why)
        log.log(level if cause != self._said else logging.DEBUG, "%s: %s", what, why)
        self._said = cause

    def _let_go_of_the_dead(self) -> None:
        """A pool whose lock file is gone comes never back. One that a dead server left is the next server's, and
        this member with all that it holds: until then it keeps its memory and its lock."""
        last = self._suspended
        if last is not None and not pool_exists(int(last.pool_id, 16)):
            self._retire_suspended()

    def _beat(self, attachment: Attachment) -> float:
        """One heartbeat, and a second at once when there are questions to answer or more to hear. Returns seconds to
        wait."""
        done: list[GrantRanks] = []
        keep: list[str] = []
        try:
            retry_s = self._try_to_tell_weights(attachment)
            while True:
                through = _pinned_through(attachment.registrar)
                since = attachment.changes_since if self._observer.changed is not None else None
                beat = Heartbeat(
                    member=attachment.member, done=done, keep=keep, pinned_through=through, changes_since=since
                )
                answer = self.outcomes.carried(beat, partial(self.client.heartbeat, attachment.session))
                has_told = answer.changes is None or self._tell(attachment, answer.changes)
                for segment in answer.retired:  # nobody holds any of it: no copy of ours can be in it
                    _unmap(attachment, segment)
                if answer.segments != len(attachment.segments.segments):
                    self._follow(attachment)
                done, keep = attachment.grants.answers(answer.questions, self._observer.keeps_lease)
                is_behind = answer.changes is not None and len(answer.changes.changes) == MAX_ENTRIES
                if not done and not keep and not is_behind:
                    if has_told and retry_s is None:
                        self._said = ""
                    return answer.heartbeat_s if retry_s is None else min(retry_s, answer.heartbeat_s)
        except (ServerUnavailable, ApiError) as error:
            if isinstance(error, ApiError) and error.code not in LOST_CODES:
                self._say(logging.WARNING, "the server refuses heartbeats", error)
            self.lost(attachment, error)
            return attachment.heartbeat_s if self._attachment is not None else 0.0

    def _try_to_tell_weights(self, attachment: Attachment) -> float | None:
        """Seconds until it is to be tried again; None: the server knows them. Raises what means that it is lost."""
        try:
            self.tell_weights(attachment)
        except ApiError as error:
            if error.code in LOST_CODES:
                raise
            self._say(logging.WARNING, "the server does not take the weights that the engine runs", error)
            return LONGEST_RETRY_S
        return None

    def _tell(self, attachment: Attachment, changes: Changes) -> bool:
        """False: whoever asked for the changes failed. The server's questions are answered all the same."""
        attachment.changes_since = changes.next
        try:
            if self._observer.changed is not None:
                self._observer.changed(attachment, changes)
        except Exception as error:  # it is not this module's
            self._say(logging.ERROR, f"changes of the cache were lost by {type(error).__name__}", error)
            return False
        return True

    def _follow(self, attachment: Attachment) -> None:
        """Maps what the pool grew, and unmaps what it removed and forgot to say. A segment that cannot be mapped now is
        tried again with the next heartbeat, or by the copy that needs it."""
        segments = self.client.segments().segments
        listed = {one.id for one in segments}
        for known in attachment.segments.segments:
            if known.id < max(listed, default=0) and known.id not in listed:  # ids rise: it is gone, not yet to come
                _unmap(attachment, known.id)
        try:
            self._map(attachment, segments, populate=True)
        except (AttachError, OSError) as error:
            log.warning("cannot map the pool's new segments yet: %s", error)


def _pinned_through(registrar: SegmentRegistrar | None) -> int | None:
    """What a member says of itself; None: it needs no pinning."""
    return None if registrar is None else registrar.pinned_through


def _unmap(attachment: Attachment, segment: int) -> None:
    if attachment.registrar is not None:
        attachment.registrar.unregister(segment)
    attachment.segments.detach(segment)


# --------------------------------------------------------------------------------
# A call in the background to a server that may be gone, and whose answer nobody needs.

def notify(session: EngineSession, attachment: Attachment, call: Callable[..., object], *arguments: object) -> None:
    """Nothing happens when the server that `attachment` is to is not there: should it return, it asks."""
    if session.attachment is not attachment:
        return
    try:
        call(*arguments)
    except (ServerUnavailable, ApiError) as error:
        session.lost(attachment, error)
