"""What each setting means, once: `kvdock serve --help` and docs/settings.md say these words.

Invariant: the names are those of api.settings.Settings, in the same order (tests/cli/test_cli.py).
"""

from __future__ import annotations

import msgspec

from kvdock.api.settings import Settings

MEANINGS: dict[str, str] = {
    "host": "Address of the TCP port, for browsers and curl.",
    "port": "TCP port; 0 lets the system choose.",
    "socket_path": "Unix socket for engines; only the server's own user may connect.",
    "allowed_hosts": "Host names the TCP port answers for, comma-separated; `*` for all. "
    "Empty means loopback names when `host` is a loopback address, else all.",
    "body_limit_bytes": "Longest request body.",
    "pool_bytes": "The pool never grows beyond it.",
    "segment_bytes": "The pool grows by this much at a time; at most 1GiB.",
    "prefault_threads": "Threads that touch new memory so that engines find it in place.",
    "low_water": "Below this free share of the pool it grows or, when full, evicts.",
    "high_water": "Eviction by `low_water` stops at this free share.",
    "growth": "When the pool gets its memory: `demand`, as stores need it, or `ahead`, all of it behind the start: for "
    "engines that copy with a GPU, which must pin memory before they can use it.",
    "table_records": "How many chunks of up to four parts the table has room for.",
    "table_grants": "How many leases and reservations may be open at once.",
    "session_cap": "Share of the pool that one session may hold pinned.",
    "total_cap": "Share of the pool that all sessions together may hold pinned.",
    "session_grants": "How many leases and reservations one session may have open at once.",
    "heartbeat_s": "How often engines report.",
    "missed_heartbeats": "A member that misses so many in a row is suspect: it gets nothing new until the next one.",
    "settle_s": "From a member's death until the memory it held is used again.",
    "ask_s": "The server asks about a lease that is older.",
    "watch_s": "How often locks of members, deadlines and free space are looked at.",
    "adopt": "Whether the pool that a server at this socket left is taken over: `auto` (a damaged one is removed), "
    "`never` (it is removed), or `require` (no start without one).",
    "drain_s": "After SIGTERM calls, leases and reservations get so long to end; nothing new is given out.",
    "on_exit": "What SIGTERM does with the pool: `remove`, or `keep` it for the next server at this socket. "
    "Ctrl-C removes it.",
    "history_interval_s": "Interval of the history that the status page draws.",
    "history_values": "Values kept per series of that history.",
    "recent_requests": "Lookups and stores kept for the status page.",
}

COMPUTED_DEFAULTS: dict[str, str] = {
    "socket_path": "$XDG_RUNTIME_DIR/kvdock.sock, else /tmp/kvdock-UID.sock",
    "prefault_threads": "half of the cores, at most 8",
}

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def default_text(name: str) -> str:
    """A setting's default as one would type it: `4GiB`, `0.05`; words where the machine decides."""
    default = next(field.default for field in msgspec.structs.fields(Settings) if field.name == name)
    if default is msgspec.NODEFAULT:
        return COMPUTED_DEFAULTS[name]
    return exact_bytes(default) if name.endswith("_bytes") else str(default)


def exact_bytes(size_bytes: int) -> str:
    """The largest unit that divides it: 4294967296 → 4GiB, 1000 → 1000."""
    for unit, factor in _UNITS:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
