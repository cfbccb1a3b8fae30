"""Types of kvdock's native core. Every call that can take more than a few microseconds releases the GIL.

tests/house/test_stub.py compares names and parameters with the module's.
"""

from collections.abc import Sequence
from typing import Final, Literal

from typing_extensions import Buffer

# ------------------------------------------------------------------ limits (csrc/base/limits.h)
KEY_BYTES: Final[int]
MAX_KEYS: Final[int]
MAX_STORE_KEYS: Final[int]
MAX_GROUPS: Final[int]
MAX_RANKS: Final[int]
MAX_SEGMENTS: Final[int]
MAX_SESSIONS: Final[int]
MAX_NAMESPACES: Final[int]
SEGMENT_IDS: Final[int]
CHECKSUM_PRIME: Final[int]
CHECKSUM_STRIPE_BYTES: Final[int]
MOST_PRIORITY: Final[int]
CONVERSATION_ENDED: Final[int]

# ------------------------------------------------------------------ table (csrc/table/, csrc/bind/table.cpp)

class TableError(Exception):
    """A refused call: `code` is stable (docs/errors.md), `found` and `wanted` name the values; None: there is none."""
    code: str
    found: object
    wanted: object

class Lookup:
    hit_tokens: int
    first_chunk: int
    lease: int  # a grant's id; 0 when nothing was locked
    limited: Literal['', 'held_bytes', 'pinning']  # what shortened the hit
    unpinned_tokens: int  # by how much 'pinning' shortened it
    being_stored: int  # tokens of the prefix that other live sessions store now; 0: none does
    committed: int  # how many of these are stored, whatever shortened the hit
    chunks: list[list[tuple[int, int, int, int, int, int]]]
    """Per chunk from first_chunk on: (group, writer, segment, offset, length, checksum)."""
    chunks_json: bytes
    """`chunks` as the wire's JSON: a list of lists of [group, writer, segment, offset, length, "16 hex digits"]."""
    chunks_msgpack: bytes  # the same in MessagePack, with the checksum as an unsigned integer
    chunk_count: int
    def bytes_from(self, chunk: int) -> int: ...  # of the parts of `chunks[chunk:]`

class Reservation:
    grant: int  # 0 when nothing was granted
    chunks: list[tuple[int, list[tuple[int, int, int, int, int]]]]
    """(index into keys, [(group, writer, segment, offset, length)])."""
    chunks_json: bytes
    """`chunks` as the wire's JSON: a list of {"index": …, "parts": [[group, writer, segment, offset, length]]}."""
    chunks_msgpack: bytes
    chunk_count: int
    part_bytes: int  # of all parts granted
    present: list[int]
    busy: list[int]
    limited: Literal['', 'held_bytes', 'no_space', 'pinning', 'quota']

class GrantView:
    grant: int
    kind: Literal['lease', 'reservation']
    session: int
    request: bytes
    epoch: int
    readers: int
    remaining: list[int]
    chunks: int
    bytes: int
    opened_ms: int
    place: int  # rises from the oldest grant to the youngest; ids do not, as their cells are used again
    closed: bool
class MemberView:
    member: int
    session: int
    nonce: bytes
    ranks: list[int]
    scheduler: bool
    state: Literal['live', 'suspect', 'dead', 'gone']
    heartbeat_ms: int
    lock_offset: int
    pinned_through: int | None
class SessionView:
    session: int
    nonce: bytes
    namespace: int
    leases: int
    reservations: int
    held_bytes: int
    opened_ms: int
class TenantView:
    """What a tenant uses: of records that are not free, and of grants that have a holder."""
    tenant: bytes
    bytes: int  # in slots
    chunks: int
    namespaces: int
    sessions: int
    grants: int
    quota_bytes: int | None  # None: no limit
    quota_chunks: int | None
class NamespaceView:
    namespace: int
    digest: bytes
    base: bytes
    tenant: bytes
    chunks: int  # records that are not FREE
    left_ms: int | None  # when its last session left: after `grace_ms` it is evicted first; None: it was not left

# ------------------------------------------------------------------ curve (csrc/curve/, csrc/bind/curve.cpp)
POOL_FACTORS: Final[list[float]]
class CurveSums:
    """Sums over lookups. `+=` adds those of another namespace."""
    lookups: int
    samples: int  # sampled chunks
    asked: int  # tokens
    missed: int  # tokens, by the real pool
    found_at: list[float]  # shares of `asked`, by POOL_FACTORS; empty if nothing was asked for
    found_ever: float | None  # without bound
    def __init__(self) -> None: ...
    def __iadd__(self, other: CurveSums) -> CurveSums: ...

class Curve:
    """Simulated pools of other sizes (csrc/curve/curve.h). Keeps the GIL; not thread-safe. Raises TableError."""
    share: float  # of all chunks that are sampled now
    entries: int  # chunks in all simulated pools
    remembered: int  # chunks that are remembered as asked for
    distances: tuple[list[int], list[int], int]  # reuse distances of samples in bytes: upper bounds, counts, sum
    capacities: list[float | None]  # sampled chunks of its present mean size that each pool holds; None: it is empty
    all: CurveSums
    def __init__(
        self, policy: str, pool_bytes: int, *, salt: int, most_share: float, most_entries: int, most_work: float,
        kept: bytes = b"",
    ) -> None: ...  # `kept`: what keep() of one with the same policy, pool_bytes and salt has returned; else empty
    def keep(self) -> bytes: ...
    def set_space(self, space: int, chunk_tokens: int, chunk_bytes: int) -> None: ...
    def looked_up(self, space: int, keys: bytes, found: int) -> None: ...  # `found`: chunks
    def stored(self, space: int, keys: bytes) -> None: ...
    def age(self, kept: float) -> None: ...  # multiplies the present counts by that share
    def of_space(self, space: int) -> CurveSums: ...
    def check(self) -> None: ...

class Table:
    """Chunks, grants and members of one pool: docs/lifetime_protocol.md, in one flat region.

    All times are the server clock in milliseconds, passed in. Keys are 32 bytes each, concatenated.
    Ids of requests, stores, sessions and members are 16-byte digests made by the caller.
    Raises TableError; nothing is half done when it does.
    """
    def __init__(
        self, region: Mapping, *, pool_id: int, incarnation: int, limit_bytes: int, max_records: int, max_grants: int,
        ask_ms: int = 60_000, settle_ms: int = 3_000, suspect_ms: int = 6_000, session_cap: float = 0.5,
        total_cap: float = 0.75, lock_inode: int = 0, grace_ms: int = 10_000,
    ) -> None: ...
    @staticmethod
    def adopt(
        region: Mapping, *, pool_id: int, lock_inode: int, segments: Sequence[tuple[int, int, int]], limit_bytes: int,
        ask_ms: int = 60_000, settle_ms: int = 3_000, suspect_ms: int = 6_000, session_cap: float = 0.5,
        total_cap: float = 0.75, grace_ms: int = 10_000,
    ) -> tuple[Table, dict[str, int]]:
        """Takes over the region of an earlier server of the pool, with its capacities.

        segments: (id, data_offset, data_bytes) of the live and retiring ones, as found in memory.
        Returns the table and a dict with clock_ms, and with counts of chunks, dropped, aborted, replaced,
        cleared, leases, reservations, sessions, members. TableError wrong_version or not_adoptable: nothing was
        changed."""
    @staticmethod
    def stored_segments(region: Mapping, *, pool_id: int, lock_inode: int) -> list[tuple[int, str, int, int]]:
        """(id, 'live' | 'retiring' | 'gone', data_offset, data_bytes) of each. Raises what adopt raises."""
    incarnation: int
    first_incarnation: int  # that of the pool's first server; it stays when another server adopts the pool
    @staticmethod
    def region_bytes(max_records: int, max_grants: int) -> int:
        """Bytes that a region needs for that many records (of up to 4 parts) and live grants."""

    # -- pool
    def add_segment(self, segment: int, data_offset: int, data_bytes: int) -> None: ...
    def free_bytes(self) -> int: ...
    def segment_used_bytes(self, segment: int) -> int: ...  # in slots that have an owner; add_segment named it
    def available_bytes(self) -> int:
        """The smallest of these: all free bytes; and, for each slot size that a store had to evict for since the last
        evict(), the bytes that slots of that size could take now."""
    def evict(self, target_bytes: int, max_chunks: int) -> int:
        """Evicts unpinned chunks, first the leaf that is worth least to the eviction policy, until available_bytes is
        `target_bytes`, or about `max_chunks` were evicted; returns their number."""
    def set_eviction(self, policy: str) -> None:
        """'adaptive' (the default) or 'lru'; bad_argument for another. The new policy has learnt nothing yet. Looks at
        every chunk."""
    def eviction(self) -> str: ...

    # -- identity
    def add_namespace(
        self, digest: bytes, *, chunk_tokens: int, block_tokens: int, writers: int,
        groups: Sequence[tuple[str, int, int]], tenant: bytes = ..., base: bytes | None = None,
    ) -> int:
        """groups: (kind 'full'|'window', window_tokens, part_bytes). tenant: the owner, 16 bytes; zeros, the default:
        the server's own user. base: the digest of the same manifest and tenant without weights; None: `digest`.
        Idempotent by digest; bad_argument if it is another tenant's or has another base. Drops idle namespaces if it
        has to: table_full if there are none. A namespace's number is used again once it was dropped."""
    def namespaces(self) -> list[NamespaceView]: ...
    def empty_left(self, kept: int, max_chunks: int, tenant: bytes | None = None) -> int:
        """Evicts at most `max_chunks` of namespaces that sessions have left, the oldest first, whenever that was, but
        not of the `kept` latest. `tenant`: only of its namespaces, `kept` or not. Returns how many were evicted."""
    def has_namespace(self, digest: bytes) -> bool: ...
    def drop_idle_namespaces(self) -> list[int]:
        """Forgets the namespaces that have neither a session nor a chunk; returns the others."""
    def open_session(self, nonce: bytes, namespace: int, now_ms: int) -> int:
        """Idempotent by nonce: a session that is open stays in its namespace; id_reused unless that has the same base.
        """
    def session_of(self, nonce: bytes) -> int: ...  # its id; 0: none is open
    def move_session(self, session: int, namespace: int, now_ms: int) -> None:
        """The session's later lookups and stores are in that namespace, which has the same base: bad_argument for
        another. Its earlier grants stay. If it was the last session in its namespace, that one counts as left."""
    def add_member(
        self, session: int, nonce: bytes, ranks: Sequence[int], scheduler: bool, now_ms: int, lock_offset: int = 0
    ) -> int:
        """Idempotent by (session, nonce): a repeat counts as a heartbeat; id_reused if ranks or lock differ."""

    # -- tenants
    def set_quota(self, tenant: bytes, *, bytes: int | None, chunks: int | None) -> None:
        """How much the tenant's chunks may use; None: no limit. It replaces an earlier quota at once, and is forgotten
        with this object. A reservation over it evicts the tenant's own chunks, pinned ones last, and then is cut short
        with 'quota'. Above a quota that was lowered nothing is granted until the tenant uses less."""
    def set_default_quota(self, *, bytes: int | None, chunks: int | None) -> None:
        """The quota of all tenants that have none of their own, except the server's own user."""
    def evict_over_quota(self, max_chunks: int) -> int:
        """Evicts chunks of tenants that use more than their quota, at most `max_chunks`; returns their number."""
    def tenant(self, tenant: bytes) -> TenantView: ...
    def tenants(self) -> list[TenantView]: ...  # those that have a namespace or a quota of their own

    # -- liveness
    def heartbeat(self, member: int, now_ms: int) -> list[tuple[int, list[int]]]:
        """Marks the member live; returns questions about grants (grant, ranks; []: for the member that asked)."""
    def report_pinned(self, member: int, through: int) -> None: ...  # it page-locked the segments with ids below
    def keep(self, member: int, grant: int, now_ms: int) -> None: ...
    def done(self, member: int, grant: int, ranks: Sequence[int]) -> None:
        """D1: these ranks have ended their work. ranks []: the member that asked for the grant has."""
    def member_dead(self, member: int, now_ms: int) -> None: ...  # its lock was found free; tick() makes it GONE
    def leave(self, member: int) -> None: ...  # D2 for all that it holds; the last to leave closes the session
    def tick(self, now_ms: int) -> None:
        """Applies the passing of time: deadlines, missed heartbeats, dead members, ends of keeps and of hints."""

    # -- grants
    def lookup(
        self, session: int, member: int, request: bytes, epoch: int, keys: bytes, *,
        readers: int, skip_tokens: int, now_ms: int, computes: bool = False,
        is_apart: bool = False,
    ) -> Lookup:
        """computes: the request promises to store what nobody alive stores or has stored. is_apart: of a benchmark,
        which `reuse` leaves out."""
    def withdraw(self, session: int, request: bytes) -> None: ...  # drops the request's promises
    def hold(self, session: int, member: int, request: bytes, keys: bytes, now_ms: int) -> Lookup: ...  # of single keys
    def peek(self, namespace: int, keys: bytes) -> int: ...  # the hit in tokens; without lease or use
    def changes(self, namespace: int, since: int, at_most: int) -> tuple[list[tuple[bytes, bool]], int, bool]:
        """([(key, whether lookups find it)], oldest first; the next `since`; False: more than 65,536 changes ago)."""
    # Both: [(namespace, key, whether lookups find it, its parent's key or zeros)]. ready() starts at a place and
    # returns the next one; -1: it has reached the last.
    def all_changes(self, since: int, at_most: int) -> tuple[list[tuple[int, bytes, bool, bytes]], int, bool]: ...
    def ready(self, start: int, budget: int) -> tuple[list[tuple[int, bytes, bool, bytes]], int]: ...
    def chunks_in(self, namespace: int) -> int: ...  # records that are not FREE
    def children(self, namespace: int, key: bytes) -> int: ...  # chunks, stored or being stored, that follow this one
    def fates(self, namespace: int, keys: bytes) -> list[tuple[int, str, int, int]]:
        """Runs of chunks: (chunks, "ready" | "being_stored" | "unknown" | why they are gone, when, last use)."""
    def release(self, session: int, grant: int, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks that remain. A repeat is harmless; foreign_grant for another session's grant."""
    def cancel(self, session: int, member: int, grant: int) -> None:
        """D3: the member that asked for a lease or reservation, and never handed out its plan, cancels it."""
    def reserve(
        self, session: int, member: int, store: bytes, parent: bytes, keys: bytes, *,
        groups: int, temporary: bool, deadline_ms: int, now_ms: int,
    ) -> Reservation:
        """parent: 32 bytes, of ones if it is not known, or b'' (root). groups: bit mask, 0 = all. deadline_ms: from
        now."""
    def commit(
        self, session: int, grant: int, rank: int, parts: Sequence[tuple[int, int, int]], now_ms: int
    ) -> tuple[int, list[int]]:
        """parts: (index into the store's keys, group, checksum). Returns (chunks ready, ranks remaining)."""
    def abort(self, session: int, grant: int, ranks: Sequence[int]) -> list[int]: ...  # unpublished chunks are removed
    def mismatch(self, session: int, grant: int, chunks: Sequence[int]) -> tuple[int, bytes]:
        """Takes chunks of a lease, whose checksums did not match, out of use. `chunks`: counted from token 0. Returns
        the namespace of the lease, and the keys of the chunks that were taken out."""
    def delete(self, namespace: int, keys: bytes) -> int:
        """Takes chunks out of use, also those that are being written; returns how many were READY."""
    def drop_unread(self, namespace: int, keys: bytes) -> int: ...  # temporary chunks that no lookup leased
    def clear(self, namespace: int, start: int, budget: int) -> tuple[int, int]:
        """Takes READY chunks of a namespace (-1: of all) out of use, looking at `budget` records from cursor
        `start` (0 first). Returns (chunks taken, next cursor or -1 when done): call it until then."""
    def raise_generation(self, namespace: int, least: int = 0) -> int:
        """Clears the namespace at once: lookups find none of its chunks, and its open reservations publish nothing.
        Raises its generation by one, or to `least` where that is more; does nothing if `least` is neither 0 nor above
        it. Returns the generation. clear_old() frees the memory."""
    def generation(self, namespace: int) -> int: ...
    def clear_old(self, start: int, budget: int) -> tuple[int, int]:
        """As clear(), for chunks that raise_generation() has cleared."""
    def pin(self, namespace: int, keys: bytes, until_ms: int) -> int:
        """Keeps READY chunks of these keys from eviction until `until_ms` (0: no longer); returns how many it found."""
    def retain(self, namespace: int, keys: bytes, priority: int, until_ms: int) -> tuple[int, int]:
        """A chain's chunks, from its first on, are evicted after others until `until_ms`; priority 1..MOST_PRIORITY.
        Returns how many of the stored ones are retained, and how many exceeded the limit. bad_argument."""
    def lower(
        self, namespace: int, keys: bytes, priority: int, until_ms: int = 0, following: bytes = b""
    ) -> tuple[int, bool]:
        """Chunks at the end of `keys` that no other chain shares are evicted before others, until a request names them
        or until `until_ms`; CONVERSATION_ENDED <= priority <= 0. `following`: the key after the last, whose chunk is
        not shared. Returns how many chunks, and whether it ended at a chunk that is shared. bad_argument."""
    def next_out(self, bytes: int) -> dict[int, bytes]: ...  # by namespace, keys of about the chunks evicted next
    def can_evict(self) -> bool: ...  # whether a chunk is unpinned, not kept, and the last of its chain
    def set_limits(self, *, limit_bytes: int, session_cap: float, total_cap: float) -> None:
        """Caps for later grants; present ones stay. bad_argument if the segments hold more."""
    def retire_segment(self, segment: int, max_chunks: int) -> int:
        """Gives out none of its slots any more and evicts up to `max_chunks` chunks; returns its bytes still in use."""
    def remove_segment(self, segment: int) -> None: ...  # bad_argument unless it was retired and is empty

    # -- views
    def sessions(self, named: Sequence[int] | None = None) -> list[SessionView]:
        """The open ones of the named sessions; by default all open ones."""
    def members(self, sessions: Sequence[int] | None = None) -> list[MemberView]: ...  # by default of all sessions
    def grants(self, session: int = 0, *, from_place: int = 0, limit: int = ...) -> list[GrantView]:
        """Grants that have a holder, oldest first, from that place on, at most `limit`. session 0: of all sessions."""
    def grant(self, grant: int) -> GrantView | None: ...  # None if it was never given, or all holders are discharged
    def open_grants(self, session: int, request: bytes) -> tuple[int, bool]:
        """How many grants of the session have a holder left; whether one was asked for as `request`."""
    def stats(self) -> dict[str, int]: ...
    def reuse(self) -> dict[str, tuple[list[int], list[int], int]]:
        """hit_age and eviction_age in seconds, and eviction_uses (csrc/table/reuse.h), each as upper bounds, counts
        (one more than bounds), and the sum of the values."""
    def state_of(self, namespace: int, key: bytes) -> str: ...  # 'absent', 'reserved' or 'ready'
    def check_integrity(self) -> None:
        """Computes all that is derived again and compares; raises TableError('corrupt', …)."""

class Census:
    """Counts a table's chunks while it changes (csrc/table/census.h). Times are the server clock's; 0: not known."""
    def __init__(
        self, table: Table, *, below: tuple[int, bytes] | None = None, named: Sequence[tuple[int, bytes]] = (),
        search: Sequence[int] | None = None, sought: int = 0, keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        """`below`: a namespace and a key: counts what goes on from that chunk, in place of all. `named`: namespaces and
        keys of chunks to find the prefixes of. `search`: lists the prefixes of these namespaces, and of others only
        those that hold one of the first `sought` chunks of `named`, or a chunk with a key from keys[0] to keys[1]."""
    def step(self, budget: int) -> bool: ...  # looks at about that many chunks; True: all are counted
    def spaces(self) -> list[tuple[int, int, int, int, int]]: ...  # namespace, chunks, bytes, oldest and newest use
    # [(namespace, first key, chunks, bytes, stored, last used, uses, last key, its depth, key at the fork, its depth,
    # bytes up to there, branches, whether a chunk is kept)], most used first, from the place `start` on; how many there
    # are; where the next page starts, or 0
    def prefixes(self, namespaces: Sequence[int], most: int, start: int = 0) -> tuple[
        list[tuple[int, bytes, int, int, int, int, int, bytes, int, bytes, int, int, int, bool]], int, int
    ]: ...
    def named(self) -> list[tuple[int, bytes, int]]: ...  # [(index in `named`, first key of its prefix, its depth)]

# ----------------------------------------------- bytes (mapping, liveness, checksum, copy; csrc/bind/bytes.cpp)

class LayoutError(ValueError):
    """Strides that copies do not support; `found` and `wanted` name the values."""
    found: object
    wanted: object
class CopyError(ValueError):
    """Block ids, lengths, skips or addresses outside a layout; nothing was copied."""
    found: object
    wanted: object

class Mapping:
    """A shared mapping of an open file or shared-memory object; MADV_DONTFORK; keeps no descriptor."""
    address: int
    bytes: int
    def __init__(self, fd: int, bytes: int, *, writable: bool = True) -> None: ...
    def populate(self, offset: int, bytes: int) -> None:
        """MADV_POPULATE_WRITE without the GIL. OSError when memory runs out; never SIGBUS."""
    def reaches_end(self) -> bool:
        """False when the object has become shorter than the mapping: access would raise SIGBUS."""
    def advise_huge(self) -> bool: ...
    def close(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
class MemberLock:
    """An open-file-description lock on one byte, kept by a mapping: it ends with the address space."""
    offset: int
    def __init__(self, path: str, offset: int, *, with_children: bool = False) -> None:
        """BlockingIOError when another open file holds the byte. `with_children`: forked children keep it, too."""
    def close(self) -> None: ...

def lock_holder_alive(fd: int, offset: int) -> bool:
    """F_OFD_GETLK: True while another open file holds the byte. fd: the server's own descriptor of the lock file."""

SEGMENT_VERSION: Final[int]
SEGMENT_HEADER_BYTES: Final[int]
SLOT_ALIGN: Final[int]

def segment_header_write(mapping: Mapping, pool_id: int, segment: int, data_offset: int) -> None:
    """Writes the header, version last (release)."""
def segment_header_read(mapping: Mapping) -> tuple[str, dict[str, int]]:
    """('ok' | 'not_ready' | 'wrong_version' | 'corrupt', fields found)."""
def set_checksum_keys(nh: bytes, level2: bytes) -> None:
    """nh: 8192 bytes (k, then k'); level2: 32 bytes a stripe. Longer tables replace shorter ones."""
def checksum(data: Buffer) -> int:
    """The checksum of contiguous bytes of any length. CopyError when the keys are too short for it."""
def decoding_within(data: Buffer, limit: int, *, packed: bool) -> bool:
    """Whether it costs at most `limit` to decode the body, which is MessagePack if `packed`, else JSON: 1 for each
    value, 4 for each list and map, 2 for a number of eight bytes in MessagePack. Punctuation in JSON's strings counts.
    """
def cpu_paths() -> list[str]:
    """Names of the copy loops this processor can run, fastest first; 'scalar' runs anywhere."""
def use_cpu_path(name: str) -> None:
    """For tests and measurements: all later copies use that loop; '' goes back to the fastest."""

class PagedLayout:
    """Paged KV as strides. planes: (base address, block stride, run bytes, run count, run stride)."""
    block_bytes: int  # of one block over all planes
    num_blocks: int
    block_tokens: int
    def __init__(
        self, planes: Sequence[tuple[int, int, int, int, int]], *, num_blocks: int, block_tokens: int
    ) -> None: ...

def gather(layout: PagedLayout, slots: Buffer, block_ids: Buffer, starts: Buffer, *, threads: int) -> list[int]:
    """Paged → slots. slots: uint64 addresses [n]; block_ids: int64, flat; starts: int64 [n+1].
    Returns each part's checksum. Refuses ids outside 0..num_blocks-1 before any byte moves."""
def scatter(
    layout: PagedLayout, slots: Buffer, block_ids: Buffer, starts: Buffer, skips: Buffer, *, threads: int
) -> list[int]:
    """Slots → paged; the first skips[i] blocks of part i are hashed but never written."""
def memcpy_pieces(to: Buffer, from_: Buffer, bytes: int, *, threads: int) -> None:
    """The benchmark's reference: libc memcpy of pieces of equal size. to, from_: uint64 addresses [n], unchecked."""

# ------------------------------------------------------------------ CUDA (csrc/cuda/)

class CudaError(RuntimeError):
    """The driver refused, or there is none: `found` and `wanted` name the values."""
    found: object
    wanted: object

class CudaDevice:
    index: int
    name: str
    uuid: str  # 32 hex digits
    compute: int  # 90 for sm_90
    driver: int  # the CUDA version that the driver supports: 13000 for 13.0
    multiprocessors: int
    memory_bytes: int

def cuda_unavailable() -> str:
    """"" when a GPU can be used, else one sentence with the reason."""
def cuda_relax_thread() -> None:
    """Puts the calling thread in the driver's relaxed capture mode, for good: the driver then allows the thread's own
    calls, too, while another thread captures a CUDA graph. Does nothing where this process does not use the driver.
    CudaError when the driver refuses."""
def cuda_devices() -> list[CudaDevice]: ...  # raises CudaError when there is no driver or GPU
def cuda_kernels() -> list[str]:
    """The targets of the copy kernels, such as sm_90; empty when nvcc was missing at build time."""

class CudaSlotMemory:
    """Lets slots lie in [address, address + bytes): registers host memory with the driver (touch its pages
    first), or checks that the memory is the device's. Ranges never overlap.

    Raises CudaError. Closing it while a copy uses the memory is undefined.
    """
    def __init__(self, *, device: int, address: int, bytes: int, host: bool) -> None: ...
    def close(self) -> None: ...
class CudaBuffer:
    """Memory for slots, page-locked on the host or on the device, freed with the object."""
    address: int
    bytes: int
    def __init__(self, *, device: int, bytes: int, host: bool) -> None: ...
class CudaStopwatch:
    """A stream of its own; times the work between start and stop on it."""
    stream: int
    def __init__(self, *, device: int) -> None: ...
    def start(self) -> None: ...
    def stop_ms(self) -> float: ...  # waits for the stream
    def copy(self, to: int, from_: int, bytes: int, *, to_device: bool) -> None:
        """One plain asynchronous copy between host and device on the stream."""
    def fill(self, address: int, value: int, bytes: int) -> None: ...
class CudaCopy:
    def done(self) -> bool: ...
    def took_s(self) -> float | None: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def order(self, stream: int, band: int | None = None) -> None: ...
    def checksums(self) -> list[int]: ...  # waits; one for each part. Raises CudaError when the copy failed
    def wait_verified(self, timeout_s: float | None = None) -> bool: ...
    def verified_checksums(self) -> list[int]:
        """Like checksums(), once the copy is verified: of the bytes copied by then, and of the others in the slots."""

class CudaCopier:
    """Copies by block id between slots and the paged blocks of layouts (device addresses), which share staging,
    streams and order. Copies name a layout by the number that add_layout() gave it.

    `after`: a stream (CUstream as an integer, 0: the legacy default stream) whose work so far comes first;
    None: nothing comes first. Raises CudaError (device, memory; blocks that are not in the device's memory),
    CopyError (a slot outside CudaSlotMemory, a part longer than its layout's `part_blocks`, …).
    """

    closed: bool
    staging_bytes: int
    def __init__(
        self, *, device: int, piece_bytes: int, buffers: int, load_ctas: int, store_ctas: int, direct_ctas: int,
        direct_load_bytes: int, direct_store_bytes: int, hash_threads: int,
    ) -> None: ...
    def add_layout(self, layout: PagedLayout, *, part_blocks: int) -> int:
        """`part_blocks`: of the longest part that copies will name. Waits for the GPU."""
    def gather(
        self, layout: int, slots: Buffer, block_ids: Buffer, starts: Buffer, *, after: int | None = None
    ) -> CudaCopy: ...
    def scatter(
        self, layout: int, slots: Buffer, block_ids: Buffer, starts: Buffer, skips: Buffer, *,
        after: int | None = None, bands: Sequence[int] = (), verified_after: int = 0,
    ) -> CudaCopy:
        """`bands`: ascending plane indices at which each band ends; the last equals the number of planes; empty: one
        band. The copy is verified once `verified_after` bands have been copied and the CPU has hashed the others in
        the slots; 0: when it has ended."""
    def fileno(self) -> int: ...  # an eventfd that counts the copies that have ended
    def close(self) -> None: ...  # waits for the submitted copies; later calls raise CopyError
