"""What each setting means: `kvdock serve --help` and docs/settings.md show these texts.

Invariant: the names are those of api.settings.Settings, in the same order (tests/cli/test_cli.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from kvdock.api.settings import Settings

MEANINGS: dict[str, str] = {
    "host": "Address of the TCP port, for browsers and curl.",
    "port": "TCP port; 0: any free port.",
    "socket_path": "Unix socket for engines; only the server's own user may connect.",
    "allowed_hosts": "Host names that the TCP port answers for, separated by commas; `*` for all. Empty: loopback "
    "names if `host` is a loopback address, else all.",
    "access_file": "TOML file of access tokens and what each may do; needed if `host` is no loopback address. Without "
    "a token the TCP port answers only probes and totals.",
    "body_limit_bytes": "Longest request body.",
    "tcp_connections": "How many connections the TCP port serves at once; those of engines over the Unix socket are "
    "apart from them.",
    "pool_bytes": "Maximum size of the pool.",
    "segment_bytes": "The pool grows by segments of this size, at most 1GiB; the first has at most 256MiB.",
    "prefault_threads": "Threads that touch new memory in advance, so that engines have no page faults.",
    "grow_water": "When less than this share of the pool is free, the pool grows, up to its maximum size.",
    "low_water": "At its maximum size, chunks are evicted ahead when less than this share of the pool is free. Stores "
    "evict what they need themselves, so little is enough.",
    "high_water": "Once started, eviction continues until this share of the pool is free.",
    "growth": "When the pool allocates memory: `demand`, as stores need it; `ahead`, the whole pool in the background "
    "right after the start. Use `ahead` with GPUs, whose engines must page-lock memory before they use it.",
    "eviction": "Which chunks go first when room is needed: `adaptive`, what is least likely to be used again, as "
    "learnt from uses so far; `lru`, what was not used for longest. Always the end of a prefix before what it begins "
    "with.",
    "table_records": "How many chunks of up to four parts the chunk table holds.",
    "table_grants": "How many leases and reservations may be open at once.",
    "session_cap": "Share of the pool that one session may hold by leases and reservations.",
    "total_cap": "Share of the pool that all sessions together may hold by leases and reservations.",
    "session_grants": "How many leases and reservations one session may have open at once.",
    "tenant_bytes": "How much one tenant may store, if no quota of its own says otherwise; beyond it, its own coldest "
    "chunks are evicted. 0: no limit. The server's own user is not limited by this and the next four.",
    "tenant_chunks": "How many chunks one tenant may store, in the same way.",
    "tenant_namespaces": "How many namespaces with sessions or chunks one tenant may have. 0: no limit.",
    "tenant_sessions": "How many sessions one tenant may have. 0: no limit.",
    "tenant_grants": "How many leases and reservations one tenant may have open at once, in all its sessions. 0: no "
    "limit.",
    "disk_path": "Folder of the lower tier on disk; empty: there is none.",
    "disk_bytes": "How much the tier on disk may take there.",
    "redis_url": "Redis or Valkey as a lower tier, as `redis://host:port`; empty: none.",
    "objects_url": "Object store as a lower tier, as `s3://bucket/prefix`; empty: none.",
    "mooncake_url": "Mooncake Store as a lower tier, as `mooncake://host:port`; empty: none.",
    "tier_urls": "Further stores as lower tiers, as `name=url`, separated by spaces; other packages add them "
    "(docs/tiers.md).",
    "tier_asks": "A chunk is written to lower tiers once prompts asked for it this often; 0: once or twice, as pays.",
    "tier_queue_bytes": "How much may wait to be written to one tier; then the oldest is left out; 0: `pool_bytes`.",
    "tier_keep": "Which chunks that lower tiers loaded for a request stay in the pool after it: `shared`, those that a "
    "second request has hit; `always`, all, until they are evicted.",
    "tier_drain_s": "How long chunks are still written to lower tiers when the server ends.",
    "heartbeat_s": "Interval of engines' heartbeats.",
    "missed_heartbeats": "After this many missed heartbeats a process gets no new leases until it reports again.",
    "settle_s": "Time between the death of a process and the reuse of memory that it held.",
    "ask_s": "After this time the server asks the engine whether it still needs a lease.",
    "weights_grace_s": (
        "How long chunks of weights that no engine runs any more are kept like others; then they are evicted first."
    ),
    "watch_s": "How often the server checks for dead processes, expired deadlines and free space.",
    "adopt": "What to do with a pool that another server left at this socket: `auto` takes it over, or removes it if "
    "damaged; `never` removes it; `require` takes it over or does not start.",
    "drain_s": "After SIGTERM the server waits this long for open calls, leases and reservations; it gives out "
    "nothing new.",
    "on_exit": "What SIGTERM does with the pool: `remove` it, or `keep` it for the next server at this socket. Ctrl-C "
    "always removes it.",
    "log_level": "The least grave messages that the log has: `debug`, `info`, `warning` or `error`.",
    "log_format": "`console`, a line of text a message; `json`, an object a line, with the event's fields.",
    "observe": "What is observed, separated by commas: `log`, sentences of the log; `stream`, `GET /v1/events`; "
    "`metrics`, how long loads and stores take; `curve`, what pools of other sizes would find; `traces`, spans of "
    "lookups, loads and stores; `kv_events`, `GET /v1/kv-events` for routers. Empty: nothing.",
    "traces_endpoint": "OpenTelemetry collector that gets traces over OTLP/HTTP, as `http://host:4318`.",
    "kv_events_endpoint": "Where KV events are published over ZeroMQ, as `tcp://127.0.0.1:5557` or `ipc://path`; "
    "empty: nowhere.",
    "kv_events_replay_endpoint": "Where ZeroMQ's readers ask for what they missed; empty: nowhere.",
    "kv_events_topic": "Topic of KV events over ZeroMQ; `{model}` in it becomes the model's name.",
    "kv_events_form": "What each KV event is over ZeroMQ: `map`, as vLLM's since 0.24; `array`, as vLLM's before it.",
    "history_interval_s": "Interval of the history that the status page draws.",
    "history_values": "Values kept per series of that history.",
    "recent_requests": "Lookups, stores and ended requests kept for `kvdock requests` and the status page.",
}

COMPUTED_DEFAULTS: dict[str, str] = {
    "socket_path": "$XDG_RUNTIME_DIR/kvdock.sock, else /run/user/UID/kvdock.sock, else /tmp/kvdock-UID/kvdock.sock",
    "prefault_threads": "half of the cores, at most 8",
    "traces_endpoint": "$OTEL_EXPORTER_OTLP_ENDPOINT, else empty",
}

GROUPS: dict[str, tuple[str, ...]] = {
    "Pool": ("pool_bytes", "segment_bytes", "growth", "eviction", "prefault_threads", "grow_water", "low_water",
             "high_water", "table_records", "table_grants"),
    "Where it listens, and to whom": ("host", "port", "socket_path", "access_file", "allowed_hosts",
                                      "body_limit_bytes", "tcp_connections"),
    "Limits of sessions and tenants": ("session_cap", "total_cap", "session_grants", "tenant_bytes", "tenant_chunks",
                                       "tenant_namespaces", "tenant_sessions", "tenant_grants"),
    "Lower tiers": ("disk_path", "disk_bytes", "redis_url", "objects_url", "mooncake_url", "tier_urls",
                    "tier_asks", "tier_queue_bytes", "tier_keep", "tier_drain_s"),
    "How it begins and ends": ("adopt", "drain_s", "on_exit"),
    "Engines' liveness": ("heartbeat_s", "missed_heartbeats", "settle_s", "ask_s", "weights_grace_s", "watch_s"),
    "What it tells": ("log_level", "log_format", "observe", "traces_endpoint", "kv_events_endpoint",
                      "kv_events_replay_endpoint", "kv_events_topic", "kv_events_form"),
    "What it remembers for people": ("history_interval_s", "history_values", "recent_requests"),
}
"""The settings as `--help` groups them."""
OTHER_GROUP = "Other settings"

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def default_text(name: str) -> str:
    """A setting's default as one would type it, `4GiB` or `0.05`; a description if it depends on the machine."""
    default = next(field.default for field in msgspec.structs.fields(Settings) if field.name == name)
    if default is msgspec.NODEFAULT:
        return COMPUTED_DEFAULTS[name]
    return exact_bytes(default) if name.endswith("_bytes") else str(default)


def group_of(name: str) -> str:
    return next((group for group, names in GROUPS.items() if name in names), OTHER_GROUP)


def in_groups(names: Iterable[str]) -> list[str]:
    """The settings' names, in the order in which `--help` shows them."""
    shown = [name for group in GROUPS.values() for name in group]
    return sorted(names, key=lambda name: shown.index(name) if name in shown else len(shown))


def choices_of(name: str) -> tuple[str, ...]:
    """The words that a setting may have; empty for numbers, sizes and free text."""
    hint = get_type_hints(Settings).get(name)
    return get_args(hint) if get_origin(hint) is Literal else ()


def exact_bytes(size_bytes: int) -> str:
    """In the largest unit that divides it: 4294967296 → 4GiB, 1000 → 1000."""
    for unit, factor in _UNITS:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
