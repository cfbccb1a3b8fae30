"""An engine process's session at the server: it attaches, holds its lock, sends heartbeats, answers the server's
questions, receives changes, and attaches again when the server was lost.

While the server is lost, `attachment` is None and every lookup is a miss. The session tries to attach again by itself,
with back-off and jitter. An Attachment is this process's view of one server epoch. If only the connection was lost, the
same attachment is used again. If the pool is gone or is another one, or the server refuses the member, the attachment
retires: copies in progress keep its memory mapped, and its lock held, until they end.

Threads: heartbeats have a thread of their own. Every method may be called from any thread.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvdock.client.client import Client
from kvdock.connectors.errors import RefusedError
from kvdock.connectors.outcomes import OutcomeBuffer
from kvdock.datapath.liveness import MemberLiveness
from kvdock.datapath.segments import AttachedSegments, Register, SegmentRegistrar
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
from kvdock.shm.errors import AttachError, ForeignObject, SegmentNotRegistered
from kvdock.shm.objects import SHM_DIR, lock_path, pool_exists
from kvdock.shm.segment import SegmentInfo

# --------------------------------------------------------------------------------
# The grants of the server that this member uses, and those that it has promised not to use any more.
#
# Invariant: "done" is a promise. No copy starts under a grant in `_refused`, and no question about an active grant is
# answered with "done". Both are checked under one lock, so no question can slip in between.

class GrantBook:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()  # by grant, how many loads, stores and the mover's copies use it
        self._refused: set[str] = set()

    def start(self, grant: str) -> bool:
        """Counts a copy that starts. False when this member has answered "done" for the grant: the load fails or the
        store is dropped."""
        with self._lock:
            if grant in self._refused:
                return False
            self._active[grant] += 1
            return True

    def stop(self, grant: str) -> None:
        """The copy has ended, and its release or commit has been sent or queued."""
        with self._lock:
            self._active[grant] -= 1
            if self._active[grant] <= 0:
                del self._active[grant]

    def refuse(self, grant: str) -> bool:
        """The server asks whether the grant is done. Returns True if no copy uses it; then no copy starts under it any
        more."""
        with self._lock:
            if self._active[grant] > 0:
                return False
            self._refused.add(grant)
            return True

    def answers(
        self, questions: Sequence[GrantRanks], keeps_lease: Callable[[str], bool]
    ) -> tuple[list[GrantRanks], list[str]]:
        """The next heartbeat's `done` and `keep`, which answer the server's questions. `keeps_lease`: whether this
        member's lookup still needs a lease."""
        done, keep = [], []
        for question in questions:
            if not question.ranks and keeps_lease(question.grant):
                keep.append(question.grant)
            elif self.refuse(question.grant):
                done.append(question)
        return done, keep


log = logging.getLogger("kvdock.connector")

FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 1.0
"""A server that is back is found within 1.5 s, jitter included."""
LOST_CODES = frozenset({"unknown_session", "unknown_member", "member_dead"})
NotYet = (ServerUnavailable, ApiError, AttachError, OSError)
"""Failures to attach after which another try may succeed; a RefusedError is not among them."""


@dataclass(frozen=True)
class Identity:
    """How this process presents itself to the server: its instance, its member id, its ranks."""

    instance: str
    member: str
    ranks: tuple[int, ...] = (0,)
    scheduler: bool = True
    label: str = ""
    is_bench: bool = False
    """A benchmark's session: the server's totals leave out its calls."""
    served_model_name: str = ""


@dataclass(frozen=True)
class ServerEpoch:
    """A session at a pool. A plan is valid only in processes that are attached to the same epoch."""

    pool_id: str
    session: str


@dataclass(frozen=True)
class SessionObserver:
    """Callbacks of the heartbeat thread. `changed` None: the session does not ask for changes."""

    keeps_lease: Callable[[str], bool] = lambda _lease: False
    """Answers the server's question about an old lease of this member's lookups: True means keep it."""
    changed: Callable[[Attachment, Changes], None] | None = None
    """Called with each heartbeat's changes: chunks that lookups find from now on, and chunks that they no longer
    find."""


class PoolHold:
    """This process's hold on one pool: a byte of its lock file, and mappings of its segments. Both stay while a copy or
    the session uses them. `registrar`: registers the segments with the GPU's driver; None where copies do not need it.
    """

    def __init__(
        self, segments: AttachedSegments, liveness: MemberLiveness, registrar: SegmentRegistrar | None = None
    ) -> None:
        self.segments, self.liveness, self.registrar = segments, liveness, registrar
        self._lock = threading.Lock()
        self._users = 1

    @classmethod
    def take(
        cls, pool_id: int, source: random.Random, register: Register | None, progress: Callable[[], None],
        trusted_uid: int,
    ) -> PoolHold:
        """Takes a free byte of the pool's lock file. Nothing is mapped yet."""
        hold = cls(
            AttachedSegments(pool_id, trusted_uid),
            MemberLiveness(
                lock_path(pool_id), source=source, with_children=register is not None, trusted_uid=trusted_uid
            ),
        )
        try:
            if register is not None:
                hold.registrar = SegmentRegistrar(hold.segments, register, progress=progress)
        except BaseException:
            hold.release()
            raise
        return hold

    def acquire(self) -> bool:
        """Keeps memory and lock until release(). Returns False if they were given up already."""
        with self._lock:
            if self._users == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            if self.registrar is not None:
                self.registrar.close()
            self.segments.close()
            self.liveness.close()

    @property
    def pinned_through(self) -> int | None:
        """See Member; None: the segments need not be registered."""
        return None if self.registrar is None else self.registrar.pinned_through

    def map(self, segments: Sequence[Segment], *, populate: bool) -> None:
        """Maps the segments that are not mapped yet. `populate`: maps their pages at once, unless a registrar does so
        in its own thread."""
        try:
            for one in segments:
                info = SegmentInfo(one.id, one.name, one.bytes, one.data_offset)
                self.segments.attach(info, populate=populate and self.registrar is None)
        finally:
            if self.registrar is not None:
                self.registrar.wake()

    def unmap(self, segment: int) -> None:
        if self.registrar is not None:
            self.registrar.unregister(segment)
        self.segments.detach(segment)


class Attachment:
    """One server epoch, seen by the member `member`. `answer`: the server's answer when it attached. Keys are computed
    from `namespace`."""

    def __init__(self, answer: SessionAttached, member: str, weights: str, hold: PoolHold) -> None:
        self.session, self.pool_id, self.member, self.hold = answer.session, answer.pool_id, member, hold
        self.namespace, self.heartbeat_s = bytes.fromhex(answer.namespace), answer.heartbeat_s
        self.grants = GrantBook()
        self.changes_since = answer.changes_next
        self.resumed(answer, weights)

    def resumed(self, answer: SessionAttached, weights: str) -> None:
        """The server has answered that this member is attached, while the engine runs `weights`."""
        self.wants_blocks = answer.wants_blocks
        self.filed_in, self.weights = bytes.fromhex(answer.filed_in), weights
        """The namespace of the weights that were reported to the server last, and the name of these weights."""

    @property
    def epoch(self) -> ServerEpoch:
        return ServerEpoch(self.pool_id, self.session)

    @property
    def segments(self) -> AttachedSegments:
        return self.hold.segments

    def acquire(self) -> bool:
        """See PoolHold.acquire."""
        return self.hold.acquire()

    def release(self) -> None:
        self.hold.release()


class _Members:
    """Makes a member with a new id for each server epoch: a server that saw a member die keeps its id as dead.
    `progress`: called when a registrar has registered more. `trusted_uid`: see shm.objects.is_own."""

    def __init__(
        self, name: str, source: random.Random, register: Register | None, progress: Callable[[], None],
        trusted_uid: int,
    ) -> None:
        self._name, self._taken_with = name, (source, register, progress, trusted_uid)
        self._epochs = 0

    def next(self, pool_id: int) -> tuple[str, PoolHold]:
        self._epochs += 1
        return f"{self._name}-{self._epochs}", PoolHold.take(pool_id, *self._taken_with)


class _RunWeights:
    """The name of the weights that the engine runs; "": those with which it started. Only a scheduler's session reports
    it to the server."""

    def __init__(self, client: Client, *, is_scheduler: bool) -> None:
        self._client, self._is_scheduler = client, is_scheduler
        self._reporting = threading.Lock()  # one call at a time
        self.name = ""

    def report(self, attachment: Attachment) -> None:
        """Reports the name unless the server has it already. Raises ServerUnavailable, ApiError."""
        with self._reporting:
            name = self.name
            if attachment.weights == name or not self._is_scheduler:
                return
            answer = self._client.weights(RunWeights(
                session=attachment.session, member=attachment.member, weights=name
            ))
            attachment.filed_in, attachment.weights = bytes.fromhex(answer.filed_in), name


class EngineSession:
    """A process's session at the server. Nothing is sent before start(). `source`: the random numbers for jitter and
    lock bytes.

    `register`: registers segments with the GPU's driver, in the background; None when copies do not need it.
    """

    def __init__(
        self, client: Client, manifest: Manifest, identity: Identity, *, source: random.Random | None = None,
        register: Register | None = None,
    ) -> None:
        self.client, self.manifest, self.identity = client, manifest, identity
        self.outcomes = OutcomeBuffer()  # heartbeats send them
        self._observer = SessionObserver()
        self._source = source if source is not None else random.Random()
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._suspended: Attachment | None = None  # its server is lost, but may only be out of reach
        self._weights = _RunWeights(client, is_scheduler=identity.scheduler)
        self._logged = ""
        """The cause of the last failure that was logged; "": none since the last success."""
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._members = _Members(identity.member, self._source, register, self._wake.set, client.trusted_uid)
        self._thread = new_thread("kvdock-heartbeat", self._run)

    @property
    def attachment(self) -> Attachment | None:
        """None while the server is lost."""
        return self._attachment

    def attachment_to(self, epoch: ServerEpoch) -> Attachment | None:
        """Acquires and returns the attachment if it belongs to `epoch`, else None. The caller releases it."""
        attachment = self._attachment
        if attachment is None or attachment.epoch != epoch or not attachment.acquire():
            return None
        return attachment

    def start(self, observer: SessionObserver | None = None) -> None:
        """Attaches if a server answers. Raises RefusedError if the server does not accept this engine. `observer` is
        called only from now on."""
        if observer is not None:
            self._observer = observer
        try:
            self._attach()
        except NotYet as error:
            self._log_once(logging.WARNING, "no kvdock server can be used yet, so every lookup is a miss", error)
        except RefusedError:
            raise
        except Exception as error:  # whatever it is, the heartbeat thread tries again
            self._log_once(logging.ERROR, "cannot attach yet, so every lookup is a miss", error)
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def runs(self, weights: str) -> None:
        """The scheduler's session: from now on the engine runs the weights of that name, at most MAX_WEIGHTS
        characters; "": those with which it started. Returns at once: the name is reported to the server in the
        background, and again when the server was lost. Until then lookups and stores use the namespace of the weights
        before, where keys of other weights are misses. Raises ValueError for a longer name."""
        if len(weights) > MAX_WEIGHTS:
            raise ValueError(f"a name of weights has {len(weights)} characters, wanted at most {MAX_WEIGHTS}")
        self._weights.name = weights
        self._wake.set()

    def report_weights(self, attachment: Attachment) -> None:
        """Reports to the server which weights the engine runs, if it does not know. Raises ServerUnavailable,
        ApiError."""
        self._weights.report(attachment)

    def lost(self, attachment: Attachment, error: Exception) -> None:
        """A call under `attachment` failed: suspends the attachment if the failure means that the server is lost.

        A late failure of a call under an earlier epoch does not concern the present one."""
        if isinstance(error, ApiError) and error.code not in LOST_CODES:
            return
        with self._lock:
            if self._attachment is not attachment:
                return
            self._attachment, self._suspended = None, attachment
        log.warning("the kvdock server is lost, so every lookup is a miss: %s", error)
        self._wake.set()

    def ensure_segment(self, attachment: Attachment, segment: int) -> None:
        """Maps the segment if it is not mapped yet, because the pool has grown since the last heartbeat. Raises
        AttachError, ServerUnavailable, ApiError.

        Raises SegmentNotRegistered when copies need segments that are registered with the driver, and this one is not
        yet."""
        hold = attachment.hold
        if all(known.id != segment for known in hold.segments.segments):
            hold.map(self.client.segments().segments, populate=False)
        if hold.registrar is not None and not hold.registrar.is_registered(segment):
            raise SegmentNotRegistered(
                f"segment {segment}", found=f"pinned through {hold.pinned_through}", wanted="a registered one"
            )

    def report(self, attachment: Attachment, lease: str, damaged: Sequence[int]) -> None:
        """Reports the chunks of a lease that do not match their checksums. Raises ServerUnavailable, ApiError."""
        for start in range(0, len(damaged), MAX_ENTRIES):
            chunks = list(damaged[start : start + MAX_ENTRIES])
            try:
                answer = self.client.mismatch(ReportMismatch(session=attachment.session, lease=lease, chunks=chunks))
            except ApiError as error:
                if error.code != "reports_refused":
                    raise
                log.error("the server does not judge this engine's reports of damaged chunks any more: %s", error)
                return
            if answer.whole:
                log.error(
                    "%d of %d chunks that did not match their checksums here are whole in the pool: this engine's own "
                    "memory, or its device or the way to it, is bad", answer.whole, len(chunks),
                )

    def abort(self, attachment: Attachment, reservation: str, ranks: Sequence[int] | None = None) -> None:
        """Reports to the server that `ranks` will not store; None: no rank has got the reservation. The chunks that are
        not published yet are never published."""
        is_handed_out = ranks is not None
        if self._attachment is not attachment and not (is_handed_out and self._suspended is attachment):
            return  # that server is lost; if it comes back, it asks about the reservation
        body = Abort(session=attachment.session, member=attachment.member)
        if ranks is not None:
            body = Abort(session=attachment.session, ranks=list(ranks))
        try:
            self.client.abort(reservation, body)
        except (ServerUnavailable, ApiError) as error:
            log.info("abort of reservation %s not delivered: %s", reservation, error)
            self.lost(attachment, error)

    def close(self) -> None:
        """Detaches from the server, which frees everything that this process holds. Call it when no copy is in
        progress."""
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
            self.outcomes.send_rest(Heartbeat(member=member), partial(self.client.heartbeat, session))
            self.client.leave(session, member)
        except (ServerUnavailable, ApiError) as error:
            log.info("left, and could not report it to the server: %s", error)

    # ------------------------------------------------------------------ attaching

    def _attach(self) -> None:
        pool = self.client.segments()
        if self._resume(pool.pool_id):
            return
        member, hold = self._members.next(int(pool.pool_id, 16))
        answer: SessionAttached | None = None
        try:
            body = self._attach_body(member, hold)
            answer = self.client.attach(body)
            attachment = Attachment(answer, member, body.weights, hold)
            hold.map(answer.segments, populate=False)
        except BaseException as error:
            if answer is not None:  # else the ranks stay taken until the server considers the member dead
                self._leave(answer.session, member)
            hold.release()
            if isinstance(error, ApiError) and error.code != "not_ready":
                raise RefusedError(f"the server refuses this engine: {error}") from error
            raise
        with self._lock:
            self._attachment = attachment
        self._logged = ""
        log.info("attached to %s as %s: pool %s, namespace %s", self.client.address, member, answer.pool_id,
                 answer.namespace[:12])

    def _resume(self, pool_id: str) -> bool:
        """Attaches the suspended member again. False: there is none for this pool, or the server refuses it."""
        last = self._suspended
        if last is not None and last.pool_id == pool_id:
            try:
                body = self._attach_body(last.member, last.hold)
                answer = self.client.attach(body)
            except ApiError as error:
                log.warning("cannot come back as %s: %s", last.member, error)
            else:
                last.resumed(answer, body.weights)
                with self._lock:
                    self._attachment, self._suspended = last, None
                self._logged = ""
                log.info("attached again to %s as %s: pool %s", self.client.address, last.member, pool_id)
                return True
        self._retire_suspended()
        return False

    def _retire_suspended(self) -> None:
        with self._lock:
            last, self._suspended = self._suspended, None
        if last is not None:
            last.release()

    def _attach_body(self, member: str, hold: PoolHold) -> AttachSession:
        own = self.identity
        return AttachSession(
            instance=own.instance,
            manifest=self.manifest,
            label=own.label,
            served_model_name=own.served_model_name,
            is_bench=own.is_bench,
            weights=self._weights.name if own.scheduler else "",
            member=Member(
                id=member, ranks=list(own.ranks), scheduler=own.scheduler, lock_offset=hold.liveness.offset,
                pinned_through=hold.pinned_through,
            ),
        )

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
            except Exception as error:  # if this thread ended, there would be no more hits
                self._log_once(logging.ERROR, f"unexpected {type(error).__name__}, trying again", error)
                wait_s = LONGEST_RETRY_S
            self._wake.wait(wait_s)
            self._wake.clear()

    def _try_to_attach(self) -> bool:
        try:
            self._attach()
        except NotYet as error:
            # If no server answers, that was logged already: at the start, or when the server was lost.
            level = logging.DEBUG if isinstance(error, ServerUnavailable) else logging.WARNING
            self._log_once(level, "still no server", error)
            self._retire_if_pool_is_gone()
        except RefusedError as error:
            self._log_once(logging.ERROR, "the server refuses this engine", error.__cause__ or error)
        else:
            return True
        return False

    def _log_once(self, level: int, what: str, why: BaseException) -> None:
        """Logs why this process is not served. The same cause is logged once, however often attaching fails."""
        cause = why.code if isinstance(why, ApiError) else str(why)
        advice = remedy(why)
        log.log(
            level if cause != self._logged else logging.DEBUG, "%s: %s%s", what, why, advice and f"; {advice}"
        )
        self._logged = cause

    def _retire_if_pool_is_gone(self) -> None:
        """A pool without a lock file never comes back. If a dead server has left the lock file, the next server adopts
        the pool and this member's grants, so until then the member keeps its memory and its lock."""
        last = self._suspended
        if last is not None and not pool_exists(int(last.pool_id, 16)):
            self._retire_suspended()

    def _beat(self, attachment: Attachment) -> float:
        """One heartbeat, and another one at once when there are questions to answer, more changes to receive or more
        outcomes to report. Returns the seconds to wait until the next one."""
        done: list[GrantRanks] = []
        keep: list[str] = []
        try:
            retry_s = self._try_to_report_weights(attachment)
            while True:
                through = attachment.hold.pinned_through
                since = attachment.changes_since if self._observer.changed is not None else None
                beat = Heartbeat(
                    member=attachment.member, done=done, keep=keep, pinned_through=through, changes_since=since
                )
                answer = self.outcomes.send_with(beat, partial(self.client.heartbeat, attachment.session))
                is_reported = answer.changes is None or self._report_changes(attachment, answer.changes)
                for segment in answer.retired:  # no grant names it any more, so no copy uses it
                    attachment.hold.unmap(segment)
                if answer.segments != len(attachment.segments.segments):
                    self._follow(attachment)
                done, keep = attachment.grants.answers(answer.questions, self._observer.keeps_lease)
                is_behind = answer.changes is not None and len(answer.changes.changes) == MAX_ENTRIES
                if not done and not keep and not is_behind and not self.outcomes.has_more:
                    if is_reported and retry_s is None:
                        self._logged = ""
                    return answer.heartbeat_s if retry_s is None else min(retry_s, answer.heartbeat_s)
        except (ServerUnavailable, ApiError) as error:
            if isinstance(error, ApiError) and error.code not in LOST_CODES:
                self._log_once(logging.WARNING, "the server refuses heartbeats", error)
            self.lost(attachment, error)
            return attachment.heartbeat_s if self._attachment is not None else 0.0

    def _try_to_report_weights(self, attachment: Attachment) -> float | None:
        """Returns the seconds until the next try; None: the server knows the weights. Raises errors that mean that the
        server is lost."""
        try:
            self.report_weights(attachment)
        except ApiError as error:
            if error.code in LOST_CODES:
                raise
            self._log_once(logging.WARNING, "the server does not take the weights that the engine runs", error)
            return LONGEST_RETRY_S
        return None

    def _report_changes(self, attachment: Attachment, changes: Changes) -> bool:
        """Returns False if the observer failed. The server's questions are answered all the same."""
        attachment.changes_since = changes.next
        try:
            if self._observer.changed is not None:
                self._observer.changed(attachment, changes)
        except Exception as error:  # the observer is not part of this module
            self._log_once(logging.ERROR, f"changes of the cache were lost by {type(error).__name__}", error)
            return False
        return True

    def _follow(self, attachment: Attachment) -> None:
        """Maps the segments that the pool has grown by, and unmaps those that it removed without a report to this
        member. A segment that cannot be mapped now is tried again with the next heartbeat, or by the copy that needs
        it."""
        segments = self.client.segments().segments
        listed = {one.id for one in segments}
        for known in attachment.segments.segments:
            if known.id < max(listed, default=0) and known.id not in listed:  # ids only rise, so this one was removed
                attachment.hold.unmap(known.id)
        try:
            attachment.hold.map(segments, populate=True)
        except (AttachError, OSError) as error:
            log.warning("cannot map the pool's new segments yet: %s", error)


# --------------------------------------------------------------------------------
# A call in the background whose answer is not needed, to a server that may be gone.

def notify(session: EngineSession, attachment: Attachment, call: Callable[..., object], *arguments: object) -> None:
    """Calls the server unless that of `attachment` is lost: when it comes back, it asks about grants by itself."""
    if session.attachment is not attachment:
        return
    try:
        call(*arguments)
    except (ServerUnavailable, ApiError) as error:
        session.lost(attachment, error)


# --------------------------------------------------------------------------- remedies

# What a person can do about an engine that does not reach its server.

ONE_USER = "run engine and server as one user"
WITH_TOKEN = f"{ONE_USER}, or let access_token_file name an access token (kvdock token)"
START = "start one with `kvdock serve`, or name its address in KVDOCK_ADDRESS"
SAME_SHM = (
    f"the server answers, and its {SHM_DIR} is not the one of this process: in containers, give both the host's, as "
    "with --ipc=host"
)


def remedy(error: BaseException) -> str:
    """A sentence without a full stop; "": none is known."""
    if isinstance(error, ApiError):
        return WITH_TOKEN if error.code in ("unauthenticated", "forbidden") else ""
    if isinstance(error, ServerUnavailable):
        return _of_connection(error.__cause__)
    if isinstance(error, ForeignObject):
        return ONE_USER
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith(f"{SHM_DIR}/"):
        return SAME_SHM
    return ""


def _of_connection(cause: BaseException | None) -> str:
    if isinstance(cause, PermissionError):
        return "" if os.geteuid() == 0 else ONE_USER  # what root can do, require_trusted_server has said
    return START if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)) else ""
