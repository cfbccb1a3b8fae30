"""Answers that people and probes read: lists, status, use, explanations, curves, and the shape of every error."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from kvdock.protocol.hits import ComputedWhy, HitTotals
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.wire_types import API_VERSION, Answer, Hex64, Key, Scope, Tenant

# --------------------------------------------------------------------------- what is used, and what that saves


class CopyRates(Answer, kw_only=True):
    """How fast a session's members copied in the last minutes in which they copied; None: they did not."""

    load_bytes_per_s: float | None = None
    """All members together, over the time in which they copied."""
    store_bytes_per_s: float | None = None
    ceiling_bytes_per_s: float | None = None
    """How fast plain copies of all members together would go, as they have measured it. None: they have not."""


class UseTotals(Answer, kw_only=True):
    """Since the session or namespace was first seen by this server."""

    lookups: int = 0
    """Repeats of a lookup within its epoch are not counted."""
    lookup_tokens: int = 0
    """Tokens that these lookups asked for, in whole chunks."""
    loaded_bytes: int = 0
    """Bytes of chunks that engines leased and read, counted once per fetch."""
    stored_bytes: int = 0
    hits: HitTotals = msgspec.field(default_factory=HitTotals)
    """Where the tokens of the prompts came from whose requests have ended. Empty for engines that do not report the end
    of requests: what they asked for is known, and not what they loaded."""


class Used(Answer, kw_only=True):
    """What a session has used."""

    is_bench: bool = False
    totals: UseTotals = msgspec.field(default_factory=UseTotals)
    copy: CopyRates = msgspec.field(default_factory=CopyRates)


class PrefixView(Answer, kw_only=True):
    """Chunks that begin with the same first chunk: a prefix and all that goes on from it. They share the part up to
    the chunk where their tree forks."""

    namespace: Key
    tenant: str
    model: str
    weights: str | None = ""
    """As in NamespaceView."""
    key: Key
    """The first chunk's."""
    tokens: int
    """Stored under it, each chunk counted once."""
    chunks: int
    bytes: int
    fork_key: Key
    """The key of the last chunk that all share. As `below`, it asks for the branches that go on from there."""
    shared_tokens: int
    """From the first chunk to the end of that one."""
    shared_bytes: int
    branches: int
    """How many different chunks go on from that one; 0: the prefix ends there."""
    branch_bytes: int
    """What all branches hold together."""
    labels: list[str]
    """The names of its chunks, as operators and clients gave them, the nearest to the first chunk first; at most 8."""
    is_kept: bool
    """A pin keeps one of its chunks, and so all chunks before that one."""
    age_s: float | None
    """Since the first chunk was stored; None: before this server's start."""
    unused_s: float | None
    """Since a request last named one of the chunks; None: longer than is known."""
    uses: int
    """Lookups that found the first chunk, since this server's start."""
    last_key: Key
    """The deepest chunk's that at least half of those lookups found as well. A pin of it keeps what precedes it too."""
    last_tokens: int
    """From the first chunk to the end of that one."""


class Prefixes(Answer, kw_only=True):
    """Those that lookups found most often come first. One that has gone since they were counted is left out. Pages
    reach the first 2,048."""

    prefixes: list[PrefixView]
    prefix_count: int
    """How many there were when the pool was counted: at least as many as are listed. Of a search: how many it found."""
    counted_s: float
    """How long ago the pool was counted."""
    next: str | None = None
    """Cursor of the next page; None after the last."""


class DayOfHits(Answer, kw_only=True):
    """The requests of one tenant and model that ended on one day, in the server's time zone."""

    date: str
    """As 2026-11-25."""
    tenant: Tenant
    model: str
    hits: HitTotals


class HitDays(Answer, kw_only=True):
    """By day, tenant and model, oldest first; of those that the caller may see. Kept with the pool over restarts."""

    days: list[DayOfHits]


# --------------------------------------------------------------------------- status and lists


class Health(Answer, kw_only=True):
    status: Literal["ok", "not ready"]
    reasons: list[str] = msgspec.field(default_factory=list)


class Caller(Answer, kw_only=True):
    """What the caller of the call may do."""

    scopes: list[Scope]
    """With those that they include."""
    tenant: Tenant | None
    """The tenant whose sessions and namespaces it may use; with the scope `admin` it sees those of all tenants. None:
    it has sent no access token, and may use none."""


class LeaseView(Answer, kw_only=True):
    grant: Hex64
    kind: Literal["lease", "reservation"]
    session: str
    request: str
    epoch: int
    readers: int
    remaining: list[int]
    chunks: int
    bytes: int
    age_s: float
    closed: bool


class Leases(Answer, kw_only=True):
    leases: list[LeaseView]
    next: str | None = None
    """Cursor of the next page; None after the last."""


class RequestView(Answer, kw_only=True, gc=False):
    """One recent call: what it asked for and what it got. Or a request that looked up nothing here, which its
    engine reported when it had ended."""

    at: float
    """Unix seconds, for display only."""
    kind: Literal["lookup", "store", "ended"]
    session: str
    label: str
    request: str
    tokens: int
    hit_tokens: int
    chunks: int
    bytes: int
    took_us: int
    outcome: OutcomeView | None = None
    """What became of the request, once its engine has reported it."""


class Requests(Answer, kw_only=True):
    requests: list[RequestView]
    next: str | None = None
    """Cursor of the next page; None after the last."""


Over = Literal["minutes", "hours", "days"]


class Series(Answer, kw_only=True):
    name: str
    title: str
    unit: Literal["bytes", "chunks", "tokens", "ratio", "per_s", "bytes_per_s"]
    chart: str
    """Series with the same value are drawn in one chart. The page decides by this alone, not by names of series."""
    values: list[float | None]


class Mark(Answer, kw_only=True):
    """A moment from which on the series may look otherwise."""

    age_s: float
    """How long ago it was, in seconds."""
    kind: Literal["started", "limits"]
    """'started': a server of the pool began. 'limits': an operator changed limits, or the settings file or the access
    file did when it was read again."""
    limits: list[str] = msgspec.field(default_factory=list)
    """The names of the limits that changed; `quotas`: those of tenants."""
    pool_bytes: int | None = None
    """The size that the pool may have from then on, if it is another one."""


class Stats(Answer, kw_only=True):
    """Bounded history: one value per series and interval, oldest first, ending `age_s` ago. Null: there was nothing to
    measure; where all series are null, no sample was taken, because no server ran or it was stopped."""

    interval_s: float
    age_s: float
    series: list[Series]
    marks: list[Mark] = msgspec.field(default_factory=list)
    """The last 256 at most, as far as the series reach back, oldest first. The next server of the pool keeps them."""


class PoolView(Answer, kw_only=True):
    limit_bytes: int
    allocated_bytes: int
    prefaulted_bytes: int
    free_bytes: int
    reserved_bytes: int
    ready_bytes: int
    quarantined_bytes: int
    held_bytes: int
    retained_bytes: int = 0
    """In chunks that hints of engines retain."""
    kv_bytes: int = 0
    """The KV in `ready_bytes` as engines have it: more where parts are packed."""
    raw_parts: int = 0
    """Parts of packed groups that could not be packed."""
    segments: int

    @property
    def packed_ratio(self) -> float:
        """Bytes of KV for each byte that they take in the pool."""
        return self.kv_bytes / self.ready_bytes if self.ready_bytes else 1.0


class ChunkCounts(Answer, kw_only=True):
    reserved: int
    ready: int
    quarantined: int


class TierView(Answer, kw_only=True):
    """A lower tier. Totals count from when it was opened."""

    name: str
    state: Literal["open", "full", "read_only", "off"]
    """'full' and 'read_only': it has refused what was to be stored last, and what it has is loaded. 'off': it fails or
    is slow, and is tried again later; until it works no request waits for it."""
    why: str = ""
    """Why it is not open, or, where it is, why it does not take all that is to be stored."""
    error: str = ""
    """The last error of the tier or its storage. Only for callers with the scope `read`: it may name hosts and
    paths."""
    objects: int = 0
    """How many parts of chunks the tier has."""
    bytes_used: int = 0
    bytes_limit: int = 0
    """0: the tier knows no limit."""
    wear_bytes: int = 0
    """Bytes written to its storage, including copies that the tier makes itself; 0: not known."""
    day_limit_bytes: int = 0
    """The most that may be written to its storage in a day (`disk_day_bytes`); 0: there is no limit."""
    day_left_bytes: int = 0
    """What may still be written now. It grows by `day_limit_bytes` in a day, and is at most that."""
    queued_bytes: int = 0
    """Bytes of chunks that wait to be written."""
    pending_orders: int = 0
    """Clears and deletions that it has not carried out yet. It is not used for their namespaces until then; of other
    nodes' pools, only those are not that have not been told."""
    pending_why: str = ""
    """Why the first of them is not carried out. Only for callers with the scope `read`."""
    load_bytes_per_s: float = 0.0
    """How fast loads are expected to go, as learned from earlier ones; 0 until the tier is open."""
    load_latency_s: float = 0.0
    fetches: int = 0
    """Loads of a request's chunks from it, each of one batch or several."""
    fetch_s: float = 0.0
    """How long the fetches took, in sum."""
    dollars: float = 0.0
    """What its requests have cost by the prices in its URL; 0: the URL has none."""
    counters: dict[str, int] = msgspec.field(default_factory=dict)


class TierNamespace(Answer, kw_only=True):
    """What a lower tier has of one namespace."""

    namespace: str
    model: str
    """"": not known."""
    tenant: str
    """The user as which the server ran that used the namespace last; "": not known."""
    objects: int
    """Records: one for each chunk and KV group, on a disk for each rank too."""
    bytes: int
    unused_s: float | None
    """Seconds since a server has last served it, by the hour; null: not known."""
    is_served: bool
    """Whether this server serves it now."""


class TierContents(Answer, kw_only=True):
    tier: str
    namespaces: list[TierNamespace] = msgspec.field(default_factory=list)
    removed: int = 0
    """How many records this call has removed."""
    error: str = ""
    """Why it is not known what the tier has; "": it is known."""
    pending_orders: int = 0
    """Clears and deletions that the tier has not carried out yet, and is asked for again and again."""
    pending_why: str = ""


WAIT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MoverView(Answer, kw_only=True):
    """The server's own figures about its mover. Totals count from the server's start."""

    silent_s: float
    """Seconds since the mover last reported on its tiers, which it does twice a second."""
    restarts: int
    lost_lookups: int
    """Lookups that were not sent to it, because too many waited."""
    declined: int
    """Requests that did not wait, because computing was expected to be quicker than every tier."""
    waiting: int
    """Requests that wait for tiers now."""
    waits: dict[str, int]
    """Requests that have waited, by how the wait ended. 'fulfilled': all that was promised came. 'shortened': less
    came. 'expired': the time was over. 'withdrawn': the request went on, or ended."""
    wait_s: dict[str, float]
    """How long they waited, in sum, by how the wait ended."""
    wait_counts: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """A histogram of these waits with the bounds WAIT_BOUNDS_S: the first count is below all bounds, the last above."""


class Degraded(Answer, kw_only=True):
    """Something that the server cannot give or do now."""

    reason: str
    """A sentence; docs/operate/not_ready.md explains it."""
    most: str = ""
    """Who has most of what is full. Empty: nobody has more than others, the caller may not know it, or the server has
    not looked yet."""
    since: float
    """Unix seconds, for display only."""


class Status(Answer, kw_only=True):
    status: Literal["ok", "degraded", "not ready"]
    """'ok': nothing is degraded. 'degraded': slots can be given out. 'not ready': none can."""
    degraded: list[Degraded] = msgspec.field(default_factory=list)
    """What the server cannot give or do now; what keeps slots from being given out comes first."""
    version: str
    api_version: int = API_VERSION
    pool_id: Hex64
    incarnation: int
    uptime_s: float
    now: float
    """Unix seconds at the server, for display only."""
    pool: PoolView
    chunks: ChunkCounts
    sessions: int
    """Sessions of engines: those of the server's own mover are not counted."""
    leases: int
    reservations: int
    counters: dict[str, int]
    """Totals since start; kvdock/api/record/counters.py explains each. What benchmarks do is left out."""
    hits: HitTotals = msgspec.field(default_factory=HitTotals)
    """Sums over all requests that have ended since the server's start."""
    oldest_s: float | None = None
    """How long the chunk that was unused longest, of those that no engine holds, has been unused. None: there is no
    such chunk."""
    full_in_s: float | None = None
    """When the pool is full, at the rate at which it has filled in the last minutes. None: it does not fill, it is
    full, or the server has just started."""
    host: str = ""
    """The machine's name; only for callers with the scope `read`."""
    tiers: list[TierView] = msgspec.field(default_factory=list)
    """Lower tiers, in the order in which they are asked."""
    mover: MoverView | None = None
    """None: the server has no lower tiers."""

    @property
    def reasons(self) -> list[str]:
        """Those of `degraded`."""
        return [one.reason for one in self.degraded]


# --------------------------------------------------------------------------- one request explained

class Parting(Answer, kw_only=True, gc=False):
    """Between which tokens of a prompt it goes on otherwise than the prompts that were stored and that share the most
    of it. The server knows whole chunks alone."""

    after_tokens: int
    """They are equal so far, as positions in `Break` count."""
    before_tokens: int
    """The first token that differs comes before this one."""


class Break(Answer, kw_only=True, gc=False):
    """Where the prefix that a lookup found ends, and why."""

    at_tokens: int
    """Tokens from the first on that the server gave."""
    tokens: int
    """How many tokens follow that were not given for the same reason."""
    why: ComputedWhy
    in_words: str
    others: int = 0
    """In how many other ways stored prompts go on where this one parts from them. Where nothing was found, they are
    counted as far as the server remembers; 0: not known."""
    parts: Parting | None = None
    """Where the prompt and those others part. None: no stored prompt is known that goes on otherwise."""
    same_tokens: int = 0
    """Where nothing was found: at least this many of the prompt's first tokens are those of a prompt that was stored in
    the namespace before, by `beginnings` of the lookup."""
    gone_s: float | None = None
    """How long ago the next chunk was removed. None: as far as is known, it was never stored."""
    unused_s: float | None = None
    """How long no request had named it when it was removed. None: not known."""


class OtherNamespace(Answer, kw_only=True):
    """A namespace that has more of the prompt than the request's own, whose chunks this request cannot use."""

    namespace: Key
    tokens: int
    """It has at least this many of the prompt's first tokens: no more than the first 4,096 are compared."""
    parts: Parting | None = None
    """Where the prompts that were stored there go on otherwise. None: not known."""
    differs: dict[str, list[Any]]
    """Fields of the manifest, `weights` and `tenant`: what the request's namespace says, and what this one says.
    Secrets are `hidden`."""


class TierLoad(Answer, kw_only=True):
    """What loading a request's missing chunks from a lower tier would have taken."""

    tier: str
    load_ms: float | None
    """At the speed at which it loads now. None: it is off."""


ExplainCode = Literal[
    "asked", "waited", "not_given", "diverges", "parts_early", "changes_early", "same_beginning",
    "longer_than_stored",
    "starts_anew", "goes_on", "nothing_stored", "ages", "in_tiers", "given_back", "stored", "not_ended",
    "ended", "local", "loaded", "computed", "engine_reason", "reloaded", "load_time", "saved", "cost_time",
    "weights", "other_namespace", "other_prompt", "other_engines",
]
AdviceCode = Literal[
    "enlarge_pool", "raise_quota", "check_memory", "keep_from_tiers", "wait_for_tiers", "wait_for_stores",
    "raise_session_cap", "register_segments", "check_server", "wait_for_verification", "check_engine_log",
    "lower_min_load_tokens", "check_copies", "see_engine_docs", "smaller_chunks", "move_what_varies",
    "steady_beginning", "same_identity",
]
ADVICE: Final[dict[AdviceCode, str]] = {
    "enlarge_pool": "A larger pool keeps chunks longer: `kvdock size` shows what each size would find.",
    "raise_quota": "The tenant's quota is full: `kvdock config` shows and raises it.",
    "check_memory": "Memory or a copy was damaged: docs/operate/alerts.md says what to check.",
    "keep_from_tiers": "With tier_keep=always the pool keeps what lower tiers load.",
    "wait_for_tiers": "A request waits for tier_wait_s of its engine at most, and with load_if_cheaper no longer than "
    "computing would take; a faster tier brings more: see `kvdock status`.",
    "wait_for_stores": "A larger compute_once of the engine waits longer for what other engines store.",
    "raise_session_cap": "One engine holds as much as session_cap lets it: `kvdock config` shows and raises it.",
    "register_segments": "A rank has not page-locked all segments: look into the engine's log.",
    "check_server": "The server answered late: `kvdock doctor` looks for the cause.",
    "wait_for_verification": "A longer verify_wait_s of the engine waits until what was found is hashed.",
    "check_engine_log": "The engine's log says why the load failed.",
    "lower_min_load_tokens": "A smaller min_load_tokens of the engine loads shorter hits.",
    "check_copies": "`kvdock status` shows how fast the engine copies, beside what its machine can do.",
    "see_engine_docs": "docs/operate/vllm_requests.md and docs/operate/sglang.md say for which requests nothing is "
    "looked up.",
    "smaller_chunks": "Smaller chunks leave a shorter rest: chunk_tokens under vLLM, --page-size under SGLang.",
    "move_what_varies": "Put what differs from prompt to prompt, such as a date or an id, at the prompt's end.",
    "steady_beginning": "Compare what the chat template and the system prompt put there in both requests: a date, a "
                        "list of tools or a session's id makes all that follows differ.",
    "same_identity": "Start the engines with the same model name, dtype, chunk size and other fields named.",
}


class Sentence(Answer, kw_only=True):
    """One fact about a request."""

    code: ExplainCode
    text: str
    advice: AdviceCode | Literal[""] = ""
    """What may help; empty: nothing has to be done. ADVICE has it as a sentence."""


class LookupStory(Answer, kw_only=True):
    """One lookup of the request, as it was answered for the first time in its epoch. Positions count from the first
    token that it names; see `asked_from` of the outcome."""

    at: float
    """Unix seconds, for display only."""
    engine: str
    """Its label, or its session."""
    tokens: int
    hit_tokens: int
    last_hit_tokens: int
    """What the last answer in its epoch had: a request that waits asks again."""
    chunks: int
    bytes: int
    """What all of these answers have leased."""
    took_us: int
    loaded_us: int | None
    """Time from the answer until all ranks had read the chunks that it leased; None: they have not, or there was no
    lease."""
    broke: Break | None
    """None: all was found."""


class LoadStory(Answer, kw_only=True):
    """How long the request's last load took, as the engine has measured it."""

    tokens: int
    bytes: int
    """The bytes of all ranks."""
    took_ms: float
    """Time from when the engine began the load until it knew that the load had ended."""
    queue_ms: float | None
    """The part of that time without copying: waiting for earlier copies, and for the engine's next step."""
    copy_ms: float | None
    """The time of the copies on the slowest rank; None: not known."""
    bytes_per_s: float | None
    """All ranks' bytes over the time of the copies."""


class Explanation(Answer, kw_only=True):
    """What the server knows about a request: as text in `sentences`, as figures in the other fields. `advice`: by code,
    the advice of these sentences as text."""

    request: str
    namespace: Key
    model: str
    weights: str | None = ""
    """The weights that its engine ran then, as in NamespaceView."""
    sentences: list[Sentence]
    advice: dict[AdviceCode, str] = msgspec.field(default_factory=dict)
    lookups: list[LookupStory] = msgspec.field(default_factory=list)
    """Oldest first."""
    outcome: OutcomeView | None = None
    """What its engine reported after the request had ended."""
    load: LoadStory | None = None
    """None: it loaded nothing, or its engine has not reported how long that took."""
    saved_s: float | None = None
    """What computing the loaded tokens would have taken at the engine's measured speed, less what loading them took.
    Below 0: loading took longer. None: not known."""
    tier_tokens: int = 0
    """How many of its missing tokens lower tiers have."""
    tier_loads: list[TierLoad] = msgspec.field(default_factory=list)
    """For these tokens, each tier that may have them: the server knows that one of them does. In the order in which
    they are asked."""
    goes_on: list[PrefixView] = msgspec.field(default_factory=list)
    """What other prompts have where this one parts from them: the continuations that are used most."""
    elsewhere: list[OtherNamespace] = msgspec.field(default_factory=list)
    """The namespaces that have more of the prompt than was found, the one with most first."""


# --------------------------------------------------------------------------- pools of other sizes


class CurvePoint(Answer, kw_only=True):
    """The share of tokens that lookups would find in a pool of that size, under the same eviction policy."""

    factor: float | None
    """Times the pool's size; None: without bound."""
    pool_bytes: int | None
    hit_share: float | None
    """None: the simulated pool is too small to say. No pool has less than a smaller one, or more than the one without
    bound."""
    error: float = 0.0
    """How far the share may be off, up or down, in 19 of 20 cases, because only some chunks are sampled. 0: all are."""


class SpaceCurve(Answer, kw_only=True):
    """Tokens that lookups asked for, and the share that was found, or would be found in pools of other sizes."""

    lookups: int
    """Repeats of a request within its epoch are not counted."""
    tokens: int
    sampled_chunks: int
    """How many of the chunks asked for were sampled: the simulated pools see only these."""
    hit_share: float | None
    """The share that was found in the pool itself; None: nothing was asked for."""
    points: list[CurvePoint]
    """From the smallest pool to the one without bound. Empty where too few chunks were sampled."""


class TenantCurve(SpaceCurve, kw_only=True):
    tenant: Tenant


class NamespaceCurve(SpaceCurve, kw_only=True):
    namespace: str
    """The namespace of the weights that engines start with; it stands for all weights of the manifest."""
    tenant: Tenant
    model: str
    chunk_tokens: int
    chunk_bytes: int


class Curve(Answer, kw_only=True):
    """Predicted hit shares by pool size, for the namespaces that the caller may see. The curve starts again when the
    server starts, and when the pool's size or eviction policy changes."""

    eviction: str
    pool_bytes: int
    covers_s: float
    """Seconds since the curve started."""
    half_life_s: float
    """All counts and shares here weigh lookups by age: one that is this old counts half."""
    sampled_share: float
    """The share of all chunks that is sampled now. It falls as the number of chunks grows."""
    total: SpaceCurve
    tenants: list[TenantCurve]
    namespaces: list[NamespaceCurve]
    """The namespaces that were used last, the latest first: at most 256 are counted separately."""


# --------------------------------------------------------------------------- errors


class Problem(Answer, kw_only=True):
    """RFC 9457 problem details: the one shape of every error."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str = ""
    found: Any = None
    wanted: Any = None


# --------------------------------------------------------------------------- the verdict

# What an operator should know first: whether the server helps, by how much, and what to do about what goes wrong.
#
# The page, `kvdock status`, `kvdock doctor` and, by `kvdock_finding` of the metrics, the alerts read this.
# docs/operate/runbook.md explains each finding.

Effect = Literal["helping", "costing", "not_helping", "idle", "not_reported", "not_ready"]
"""helping: engines load tokens, and as far as is known that saved time. costing: loads took longer than computing would
have. not_helping: requests have ended, and none has loaded anything. idle: no engine has asked for anything.
not_reported: engines look up, and none has reported the end of a request. not_ready: no slot can be given out."""

FindingCode = Literal[
    "not_ready", "loads_cost_time", "tier_off", "engine_died", "engine_silent", "chunks_damaged", "engine_misreads",
    "pool_left_out", "server_failed", "thrashing", "shares_nothing", "share_fell", "tier_not_written", "tier_too_slow",
    "full_of_one_tenant", "grants_old", "mover_silent",
]

TroubleKind = Literal["died", "damaged", "misread", "left_out", "failed"]
"""What findings about the past are made of: an engine that died, damaged chunks, an engine that reported whole chunks
as damaged, a pool that was left out at the start, and background work of the server that failed."""

REMEDIES: Final[dict[FindingCode, str]] = {
    "not_ready": "kvdock status",
    "loads_cost_time": "kvdock top",
    "tier_off": "kvdock doctor",
    "engine_died": "kvdock events --kinds dead,suspect",
    "engine_silent": "kvdock sessions",
    "chunks_damaged": "kvdock events --kinds mismatched",
    "engine_misreads": "kvdock events --kinds mismatch_refuted",
    "pool_left_out": "kvdock acknowledge",
    "server_failed": "kvdock acknowledge",
    "thrashing": "kvdock size",
    "shares_nothing": "kvdock cached",
    "share_fell": "kvdock saved",
    "tier_not_written": "kvdock status",
    "tier_too_slow": "kvdock status",
    "full_of_one_tenant": "kvdock quota",
    "grants_old": "kvdock leases",
    "mover_silent": "kvdock doctor",
}
"""The command that shows more, or that mends it."""


class Finding(Answer, kw_only=True):
    code: FindingCode
    severity: Literal["bad", "warn"]
    text: str
    remedy: str
    """A command."""
    cost_share: float = 0.0
    """The share of all prompt tokens that this is estimated to have cost: computed in place of loaded. 0: not known."""
    at: float | None = None
    """Unix seconds, for display only: when it last happened. None: it lasts."""


class Verdict(Answer, kw_only=True):
    """`findings`: the worst first, then those that cost most."""

    effect: Effect
    headline: str
    """One sentence: up or not, helping or not, and by how much."""
    findings: list[Finding] = msgspec.field(default_factory=list)
