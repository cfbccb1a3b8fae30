"""What `--help` shows: groups of options and commands, examples, the options that several commands share, and the
meaning of each setting.

The output is plain text, as wide as the terminal. A group is the `rich_help_panel` of an option or a command. typer
shows these only with rich, whose import takes longer than everything else in `--help`, so the groups are written here.

Invariant: MEANINGS and SETTING_GROUPS have the names of api.settings.Settings (tests/cli/test_cli.py and
tests/cli/test_help.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from kvdock.api.settings import Settings
from kvdock.cli.errors import WRONG, CommandError
from kvdock.protocol.readable import exact_bytes

if TYPE_CHECKING:
    from rich.console import Console

_TYPE = re.compile(r"(?<=\S) <\w+(\[\w+\])?>$")
"""The type of an argument, such as `<list[str]>`, which its name and help make superfluous."""
_DEFAULT = re.compile(r"\[default: \((.*)\)\]$")
COMMON = "Common options"
"""The group of the options that nearly every command has; it comes last."""


class Command(TyperCommand):
    """A command whose help shows its options in groups, and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(ctx, formatter)
        super().format_epilog(ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help shows the commands in groups, too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        width = formatter.width - 4 - max(map(len, self.commands))
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            groups.setdefault(panel, []).append((name.ljust(max(map(len, self.commands))),
                                                 command.get_short_help_str(width)))
        for panel, rows in groups.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(ctx, formatter)
        super().format_epilog(ctx, formatter)


def _write_options(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    common: list[tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = record_of(param, ctx)
        if record is None:
            continue
        panel = getattr(param, "rich_help_panel", None)
        if panel == COMMON or "--help" in param.opts:
            common.append(record)
        else:
            own = "Arguments" if param.param_type_name == "argument" else "Options"
            groups.setdefault(panel if isinstance(panel, str) else own, []).append(record)
    shown = {**groups, COMMON if any(groups.values()) else "Options": common}
    for panel, rows in shown.items():
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows)


def record_of(param: Any, ctx: Any) -> tuple[str, str] | None:
    """An option or argument as it is typed, and what it does; None: it is not shown."""
    record = param.get_help_record(ctx)
    return None if record is None else (_TYPE.sub("", record[0]), _DEFAULT.sub(r"[default: \1]", record[1]))


def _write_examples(ctx: Any, formatter: Any) -> None:
    examples = EXAMPLES.get(ctx.command_path.removeprefix("kvdock").strip(), ())
    if not examples:
        return
    width = max(len(line) for line, _ in examples)
    with formatter.section("Examples"):
        for line, about in examples:
            formatter.write(f"  {line.ljust(width)}  # {about}\n" if about else f"  {line}\n")


EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("kvdock serve --pool-bytes 8GiB", "start a server"),
        ("kvdock status", "is it up, does it help"),
        ("kvdock top", "the same, live"),
        ("kvdock COMMAND --help", "what a command does"),
    ),
    "serve": (
        ("kvdock serve --pool-bytes 64GiB --growth ahead", "beside engines with GPUs"),
        ("kvdock serve --config /etc/kvdock.toml", "settings from a file"),
        ("kvdock serve --takeover --on-exit keep", "replace a running server"),
    ),
    "vllm-args": (
        ("kvdock vllm-args", "this user's server"),
        ("kvdock vllm-args chunk_tokens=256", "with a setting"),
    ),
    "sglang-args": (
        ("kvdock sglang-args", "this user's server"),
        ("kvdock sglang-args --page-size 128 trust_s=60", "with a setting"),
    ),
    "status": (
        ("kvdock status", "this user's server"),
        ("kvdock status --server localhost:7410", "another one"),
        ("kvdock status --model my-model", "one model"),
        ("kvdock status --json | jq .loaded_share", "for scripts"),
    ),
    "top": (
        ("kvdock top", "live; q ends it"),
        ("kvdock top --once", "one picture"),
        ("kvdock top --json --interval 10 >> kvdock.log", "one object every 10 s"),
    ),
    "explain": (
        ("kvdock explain cmpl-7f3a", "why it missed"),
        ("kvdock explain cmpl-7f3a --json", "all figures"),
    ),
    "events": (
        ("kvdock events", "the latest events"),
        ("kvdock events --since -1h --limit 20", "the last 20 of an hour"),
        ("kvdock events --follow --kinds attached,left,dead", "engines come and go"),
    ),
    "cached": (
        ("kvdock cached", "what fills the pool"),
        ("kvdock cached --search support-bot --unfold 1", "that label, with branches"),
        ("kvdock cached --json --limit 256", "all figures"),
    ),
    "history": (
        ("kvdock history", "the last half day"),
        ("kvdock history --over days", "the last two weeks"),
        ("kvdock history --from -2d --to -1d --step 1h", "a day by the hour"),
    ),
    "saved": (
        ("kvdock saved", "the last week"),
        ("kvdock saved --days 1 --json", "the last day, all figures"),
    ),
    "size": (
        ("kvdock size", "from the lookups so far"),
        ("kvdock size --users 50 --tokens-each 8000", "before there is traffic"),
    ),
    "doctor": (
        ("kvdock doctor", "this machine and its server"),
        ("kvdock doctor --server gpu-7:7410", "and a server elsewhere"),
        ("kvdock doctor --config /etc/kvdock.toml", "before a server uses it"),
    ),
    "lookup": (
        ("kvdock lookup --tokens-file tokens.json", "a prompt's token ids"),
        ("echo 1 2 3 | kvdock lookup --tokens-file -", "from standard input"),
    ),
    "keep": (
        ("kvdock keep --tokens-file it.json --for 12h --name bot", "with a label"),
        ("kvdock keep --tokens-file it.json --end", "stop keeping it"),
    ),
    "evict": (
        ("kvdock evict --bytes 2GiB", "the least valuable chunks"),
        ("kvdock evict --free 8GiB", "until 8 GiB are free"),
        ("kvdock evict --tokens-file old.json --yes", "a prompt, unconfirmed"),
    ),
    "clear": (
        ("kvdock clear --namespace 5e1c", "the chunks of one model"),
        ("kvdock clear --tenant team-a", "all chunks of a tenant"),
        ("kvdock clear --all", "everything"),
    ),
    "quota": (
        ("kvdock quota", "what tenants use and may use"),
        ("kvdock quota team-a --bytes 8GiB --sessions 4", "change it"),
        ("kvdock quota team-a --default", "the file's, or the default"),
    ),
    "tiers": (
        ("kvdock tiers", "what each has of each namespace"),
        ("kvdock tiers clear --model org/old-model", "what it left"),
    ),
    "tiers clear": (
        ("kvdock tiers clear --tier objects --namespace 5e1c", "one namespace"),
        ("kvdock tiers clear --model org/old-model", "a model, in all tiers"),
    ),
    "drain": (
        ("kvdock drain", "engines compute from now on"),
        ("kvdock drain --wait && systemctl stop kvdock", "when they have finished"),
    ),
    "undrain": (("kvdock undrain", "engines load and store again"),),
    "acknowledge": (("kvdock acknowledge", "after `kvdock status` was read"),),
    "sessions": (("kvdock sessions", "engines and their processes"),),
    "leases": (("kvdock leases --limit 20", "the 20 oldest"),),
    "requests": (
        ("kvdock requests", "the last lookups and stores"),
        ("kvdock requests cmpl-7f3a", "one request"),
    ),
    "token": (
        ("kvdock token add me --access-file FILE", "for the status page"),
        ("kvdock token list --access-file FILE", "who may call"),
    ),
    "token add": (
        ("kvdock token add me --scope admin --access-file FILE", ""),
        ("kvdock token add team-a --scope engine --tenant a > token", ""),
        ("kvdock token add audit --expires 30d > token", ""),
    ),
    "token list": (("kvdock token list --access-file FILE", ""),),
    "token rotate": (
        ("kvdock token rotate team-a --grace 1h > token", "both work for an hour"),
        ("kvdock token rotate team-a > token", "the old one ends now"),
    ),
    "token revoke": (("kvdock token revoke team-a --access-file FILE", ""),),
    "bench": (("kvdock bench --mib 256 --threads 4", "takes some seconds"),),
    "demo": (("kvdock demo --port 0", "any free port"),),
    "config": (
        ("kvdock config --config /etc/kvdock.toml", "a server's settings with this file"),
        ("kvdock config get", "the running server's"),
        ("kvdock config set pool_bytes=16GiB", "change the running server"),
    ),
    "config get": (
        ("kvdock config get", "this user's server"),
        ("kvdock config get --json | jq .limits", "those that can be changed"),
    ),
    "config set": (
        ("kvdock config set pool_bytes=16GiB", "a larger pool"),
        ("kvdock config set session_cap=0.25 total_cap=0.9", "both or neither"),
        ("kvdock config set 'tenants={\"a\": {\"sessions\": 4}}'", "a quota"),
    ),
}


Server = Annotated[str, typer.Option(
    "--server", metavar="ADDRESS", show_default=False, rich_help_panel=COMMON,
    help="localhost:7410, http://host:port or unix:/path; by default this user's socket. If KVDOCK_ACCESS_TOKEN_FILE "
    "names a file, the access token in it is sent.",
)]
AsJson = Annotated[bool, typer.Option(
    "--json", rich_help_panel=COMMON,
    help="Print one JSON object on standard output; if the command fails, an RFC 9457 problem.",
)]
ListLimit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N.")]
ListAll = Annotated[bool, typer.Option("--all", help="Show all.")]
Namespace = Annotated[str, typer.Option(
    "--namespace", metavar="HEX", help="The namespace, or its first hex digits.", show_default=False,
)]
Keys = Annotated[list[str] | None, typer.Option(
    "--keys", metavar="HEX", help="Chunk keys of 64 hex digits, in order; separated by commas, or one --keys for each.",
    show_default=False,
)]
TokensFile = Annotated[str, typer.Option(
    "--tokens-file", metavar="FILE", help="File of token ids, a JSON list or plain numbers; - reads standard input.",
    show_default=False,
)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

FREE_COLUMNS = 200
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*(s|min|m|h|d)?", re.ASCII)
"""So few digits that no sum is infinite."""
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(option: str, text: str) -> float:
    """'90', '90s', '15min', '12h' or '7d' in seconds. Raises CommandError naming the option and the text."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise CommandError(f"{option}: wanted a duration like 90s, 15min, 12h or 7d, found {text!r}", WRONG)
    return float(match[1]) * _SECONDS[match[2] or ""]


class Moment(NamedTuple):
    """A time that an option names."""

    text: str
    """As it was typed."""
    seconds: float
    """Unix seconds; or how long before now, if `is_ago`."""
    is_ago: bool

    def at(self, now_s: float) -> float:
        """In Unix seconds."""
        return now_s - self.seconds if self.is_ago else self.seconds


def parse_moment(option: str, text: str) -> Moment | None:
    """'-2h' is two hours ago; '2026-11-25T02:00' is an ISO time, in this machine's time zone unless it names one. ''
    is None. Raises CommandError naming the option and the text."""
    if not text:
        return None
    asked = text.strip()
    match = _DURATION.fullmatch(asked[1:]) if asked.startswith("-") else None
    if match is not None:
        return Moment(text, float(match[1]) * _SECONDS[match[2] or ""], True)
    try:
        return Moment(text, datetime.fromisoformat(asked).timestamp(), False)
    except (ValueError, OverflowError):
        wanted = "a time like 2026-11-25T02:00, or -2h for two hours ago"
        raise CommandError(f"{option}: wanted {wanted}, found {text!r}", WRONG) from None


def parse_end(option: str, text: str, now: datetime) -> datetime:
    """'30d' is in thirty days; '2026-12-31' or '2026-12-31T08:00Z' is a date or an ISO time, in this machine's time
    zone unless it names one. Raises CommandError naming the option and the text."""
    asked = text.strip()
    wanted = "a later time than now, as 30d, 2026-12-31 or 2026-12-31T08:00Z"
    try:
        match = _DURATION.fullmatch(asked)
        if match is not None:
            end = now + timedelta(seconds=float(match[1]) * _SECONDS[match[2] or ""])
        else:
            end = datetime.fromisoformat(asked).astimezone(UTC)
    except (ValueError, OverflowError):
        raise CommandError(f"{option}: wanted {wanted}, found {text!r}", WRONG) from None
    if end <= now:
        raise CommandError(f"{option}: wanted {wanted}, found {text!r}", WRONG)
    return end


def console() -> Console:
    """A console whose lines are not wrapped if the output is not a terminal, so that scripts find whole ids."""
    import os
    import sys

    from rich.console import Console

    is_free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=FREE_COLUMNS) if is_free else Console()


# ------------------------------------------------------------------ settings


MEANINGS: dict[str, str] = {
    "host": "Address of the TCP port, for browsers and curl.",
    "port": "TCP port; 0: any free port.",
    "socket_path": "Unix socket for engines; only the server's own user and root may connect.",
    "allowed_hosts": "Host names for which the TCP port answers, separated by commas; `*` for all. Empty: loopback "
    "names; a `host` that is no loopback address needs some.",
    "access_file": "TOML file of access tokens and their scopes; required if `host` is not a loopback address. "
    "Without a token the TCP port answers only calls of the scope `health`, such as probes.",
    "body_limit_bytes": "Largest request body.",
    "tcp_connections": "Connections that the TCP port serves at once; engines' connections over the Unix socket do "
    "not count.",
    "pool_bytes": "Maximum size of the pool, as `64GiB`, `64G`, or as a share such as `50%`; `auto` is `80%`. Shares "
    "are of the size of `/dev/shm`, or of the control group's memory limit if that is less.",
    "segment_bytes": "The pool grows by segments of this size, at most 1GiB; the first has at most 256MiB.",
    "prefault_threads": "Threads that touch new memory in advance, to save engines the page faults.",
    "grow_water": "When less than this share of the pool is free, the pool grows, up to its maximum size.",
    "low_water": "When the pool has its maximum size, chunks are evicted in the background while less than this share "
    "of it is free. Stores evict what they need themselves, so a small share is enough.",
    "high_water": "Eviction in the background continues until this share of the pool is free.",
    "growth": "When the pool allocates memory: `demand`, as stores need it; `ahead`, the whole pool in the background "
    "after the start. Use `ahead` with GPUs: their engines page-lock memory before they use it.",
    "eviction": "Which chunks are evicted first: with `adaptive`, those that are least likely to be used again soon, "
    "as learned from earlier uses and the time between them, and without lower tiers a store gets no memory while its "
    "chunks would be the first to go; with `lru`, those that were unused for longest. A chunk is always evicted before "
    "the chunks that precede it in its prefix.",
    "table_records": "Chunks that the chunk table can hold, if each has at most four parts.",
    "table_grants": "Leases and reservations that may be open at once.",
    "session_cap": "Share of the pool that one session may hold by leases and reservations.",
    "total_cap": "Share of the pool that all sessions together may hold by leases and reservations.",
    "session_grants": "Leases and reservations that one session may have open at once.",
    "tenant_bytes": "Bytes that one tenant may store, or a share of `pool_bytes`, unless it has a quota of its own; "
    "beyond that, its own least valuable chunks are evicted. 0: no limit. This and the other `tenant_` settings do "
    "not limit the server's own user.",
    "tenant_chunks": "Chunks that one tenant may store, in the same way. 0: no limit.",
    "tenant_namespaces": "Namespaces with sessions or chunks that one tenant may have. 0: half of all.",
    "tenant_sessions": "Sessions that one tenant may have. 0: half of all.",
    "tenant_members": "Processes of engines that one tenant may have attached, in all its sessions. 0: half of all.",
    "tenant_grants": "Leases and reservations that one tenant may have open at once, in all its sessions. 0: half of "
    "all.",
    "disk_path": "Folder of the lower tier on disk; empty: none.",
    "disk_bytes": "Bytes that the tier on disk may use there, or a share of the folder's file system, as `30%`; "
    "`auto` is `50%`.",
    "disk_day_bytes": "Bytes that may be written to the tier on disk in a day, its own copies included; 0: no limit.",
    "redis_url": "Redis or Valkey as a lower tier, as `redis://host:port`; empty: none.",
    "objects_url": "Object store as a lower tier, as `s3://bucket/prefix`; empty: none.",
    "mooncake_url": "Mooncake Store as a lower tier, as `mooncake://host:port`; empty: none.",
    "peers_url": "Other nodes whose pools are read, and that may read this one, as `peers://host:port,host:port`; "
    "empty: none.",
    "tier_urls": "Further stores as lower tiers, as `name=url`, separated by spaces; other packages add them "
    "(docs/understand/add_a_store.md).",
    "tier_asks": "A chunk is written to lower tiers once prompts have asked for it this often; 0: once or twice, "
    "whichever pays.",
    "tier_queue_bytes": "Bytes that may wait to be written to one tier, or a share of `pool_bytes`; beyond that, "
    "the chunks that have waited longest are not written. 0: `pool_bytes`.",
    "tier_keep": "Which of the chunks that lower tiers loaded for a request stay in the pool after it: `shared`, "
    "those that a second request has hit; `always`, all of them.",
    "tier_drain_s": "How long the server goes on writing chunks to lower tiers when it ends.",
    "heartbeat_s": "Interval of engines' heartbeats.",
    "missed_heartbeats": "After this many missed heartbeats a process gets no new leases or reservations until its "
    "next one.",
    "settle_s": "Time between the death of a process and the reuse of memory that it held.",
    "ask_s": "When a lease is older than this, the server asks the engine whether it still needs it.",
    "weights_grace_s": "How long chunks of weights that no engine runs any more are treated like others; then they "
    "are evicted first.",
    "weights_kept": "How many sets of weights that no engine runs any more may have chunks; the chunks of those that "
    "were left earlier are removed. 0: none.",
    "watch_s": "How often the server checks for dead processes, expired deadlines and free space.",
    "adopt": "What to do with a pool that an earlier server left at this socket: `auto` takes it over, or removes it "
    "if it is damaged or a server has crashed with it, and does not start if it has another format; `never` removes "
    "it; `require` takes it over, or the server does not start.",
    "drain_s": "After SIGTERM the server waits this long for open calls, leases and reservations, and grants nothing "
    "new.",
    "on_exit": "What SIGTERM does with the pool: `remove` it, or `keep` it for the next server at this socket. Ctrl-C "
    "always removes it.",
    "log_level": "The least severe messages that are logged: `debug`, `info`, `warning` or `error`.",
    "log_format": "`console`: one line of text for each message; `json`: one JSON object, with the fields of the "
    "event.",
    "observe": "The outputs to produce, separated by commas: `log`, events in the log; `stream`, `GET /v1/events`; "
    "`metrics`, histograms of how long loads and stores take; `curve`, hit rates of pools of other sizes; `traces`, "
    "spans of lookups, loads and stores; `kv_events`, `GET /v1/kv-events` for routers. Empty: none.",
    "traces_endpoint": "OpenTelemetry collector to which traces are sent over OTLP/HTTP, as `http://host:4318`.",
    "kv_events_endpoint": "Address at which KV events are published over ZeroMQ, as `tcp://127.0.0.1:5557` or "
    "`ipc://path`; empty: none.",
    "kv_events_replay_endpoint": "Address at which readers over ZeroMQ ask for missed events; empty: none.",
    "kv_events_readers": "Who may read KV events over ZeroMQ, which knows no tokens: `loopback`, processes of this "
    "machine; `anybody`, whoever reaches the address reads the tokens of all prompts.",
    "kv_events_topic": "Topic of KV events over ZeroMQ; `{model}` in it is replaced by the served name of the model.",
    "kv_events_form": "Form of KV events over ZeroMQ: `map`, as in vLLM since 0.24; `array`, as in vLLM before.",
    "history_interval_s": "Interval of the recent history that the status page draws.",
    "history_values": "Values kept in each series of that history.",
    "recent_requests": "Lookups, stores and ended requests that are kept for `kvdock requests` and the status page.",
}

COMPUTED_DEFAULTS: dict[str, str] = {
    "socket_path": "$XDG_RUNTIME_DIR/kvdock.sock, else /run/user/UID/kvdock.sock, else /tmp/kvdock-UID/kvdock.sock",
    "prefault_threads": "half of the cores, at most 8",
    "traces_endpoint": "$OTEL_EXPORTER_OTLP_ENDPOINT, else empty",
}

SETTING_GROUPS: dict[str, tuple[str, ...]] = {
    "Pool": ("pool_bytes", "segment_bytes", "growth", "eviction", "prefault_threads", "grow_water", "low_water",
             "high_water", "table_records", "table_grants"),
    "Addresses and access": ("host", "port", "socket_path", "access_file", "allowed_hosts",
                                      "body_limit_bytes", "tcp_connections"),
    "Limits of sessions and tenants": ("session_cap", "total_cap", "session_grants", "tenant_bytes", "tenant_chunks",
                                       "tenant_namespaces", "tenant_sessions", "tenant_members", "tenant_grants"),
    "Lower tiers": ("disk_path", "disk_bytes", "disk_day_bytes", "redis_url", "objects_url", "mooncake_url",
                    "peers_url", "tier_urls", "tier_asks", "tier_queue_bytes", "tier_keep", "tier_drain_s"),
    "Start and end": ("adopt", "drain_s", "on_exit"),
    "Engines' liveness": ("heartbeat_s", "missed_heartbeats", "settle_s", "ask_s", "weights_grace_s", "weights_kept",
                          "watch_s"),
    "Logs, events and traces": ("log_level", "log_format", "observe", "traces_endpoint", "kv_events_endpoint",
                      "kv_events_replay_endpoint", "kv_events_readers", "kv_events_topic", "kv_events_form"),
    "History": ("history_interval_s", "history_values", "recent_requests"),
}
"""The settings in the groups of `--help`."""
OTHER_GROUP = "Other settings"

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Settings)}


def default_text(name: str) -> str:
    """A setting's default as it would be typed, `4GiB` or `0.05`; a description if it depends on the machine."""
    default = _DEFAULTS[name]
    if default is msgspec.NODEFAULT:
        return COMPUTED_DEFAULTS[name]
    return exact_bytes(default) if name.endswith("_bytes") else str(default)


def group_of(name: str) -> str:
    return next((group for group, names in SETTING_GROUPS.items() if name in names), OTHER_GROUP)


def in_groups(names: Iterable[str]) -> list[str]:
    """The settings' names, in the order in which `--help` shows them."""
    shown = [name for group in SETTING_GROUPS.values() for name in group]
    return sorted(names, key=lambda name: shown.index(name) if name in shown else len(shown))
