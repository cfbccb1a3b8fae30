"""All settings of the server, typed and checked once; a name that is not here is refused.

They come from four sources, and the first that names a setting wins: flag, environment, file, default. Sizes are
written as `268435456`, `256MiB` or `256M` in all of them, some also as a share (kvdock/api/sizes.py). A refusal names
the setting, its value, what was wanted and the source.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec

from kvdock._core import MAX_SEGMENTS
from kvdock.api.errors import SettingsError
from kvdock.api.sizes import AUTO_DISK, AUTO_POOL, Whole, file_system_of, parse_size, shared_memory
from kvdock.api.toml import TomlError, parse_toml
from kvdock.protocol.access import (
    ADDRESS_VARIABLE,
    CONNECTOR_PREFIX,
    TOKEN_FILE_VARIABLE,
    TRUSTED_UID_VARIABLE,
    default_socket_path,
)
from kvdock.protocol.admin_schemas import Eviction, TierKeep
from kvdock.protocol.errors import without_password
from kvdock.protocol.readable import LogFormat, LogLevel, exact_bytes, is_unicode
from kvdock.protocol.refused import WHOLE_WANTED, not_whole, refused

GIB = 1 << 30
POOL_BYTES = 4 * GIB
MAX_SEGMENT_BYTES = GIB
"""Engines register memory with CUDA in pieces of at most 1 GiB. No slot may cross the border between two of them, so no
segment is larger."""
ENV_PREFIX = "KVDOCK_"
MAX_FILE_CHARACTERS = 1 << 20
CONFIG_VARIABLE = "KVDOCK_CONFIG"
"""Names the settings file; it is not a setting itself."""
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, TOKEN_FILE_VARIABLE, ADDRESS_VARIABLE, TRUSTED_UID_VARIABLE})
"""KVDOCK_ variables that are no settings of the server; those of vLLM's connector are none either."""

STORE_SETTINGS = {"peers": "peers_url", "mooncake": "mooncake_url", "redis": "redis_url", "objects": "objects_url"}
"""Stores that have a setting of their own, the quickest first. All others are in `tier_urls`."""
_STORE = re.compile(r"([a-z][a-z0-9_-]*)=(\S+)")
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?(/[^\s?#;@]*)?", re.IGNORECASE)
"""A URL with nothing in it that may be secret."""
_ZMQ = re.compile(r"tcp://(\*|[^\s:/]+|\[[0-9a-fA-F:]+\]):\d{1,5}|ipc://\S{1,100}")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_prefault_threads() -> int:
    return max(1, min(8, (os.cpu_count() or 2) // 2))


Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
LEAST_S, MOST_S = 0.001, 1_000_000
Seconds = Annotated[float, msgspec.Meta(ge=LEAST_S, le=MOST_S)]
MANY_BYTES = 1 << 60
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
OnExit = Literal["remove", "keep"]
Adopt = Literal["auto", "never", "require"]
Growth = Literal["demand", "ahead"]
Observer = Literal["log", "stream", "metrics", "curve", "traces", "kv_events"]
"""Feeds of the journal (kvdock/api/feeds/), and the curve of other pools' hit shares (kvdock/api/record/curve.py)."""
KvForm = Literal["map", "array"]
KvReaders = Literal["loopback", "anybody"]
DEFAULT_OBSERVERS: tuple[Observer, ...] = ("log", "stream", "metrics", "curve")
OTLP_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""The variable of the OpenTelemetry specification, for all exporters."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Build it with `load`, which checks; every field has a working default. kvdock/cli/help.py says what each
    means."""

    # where it listens
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 7410
    socket_path: str = msgspec.field(default_factory=lambda: default_socket_path(os.environ))
    allowed_hosts: str = ""
    """Empty, on a loopback address: loopback names only, so that no web page reaches the pool by DNS rebinding."""
    access_file: str = ""
    body_limit_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=GIB)] = 8 << 20
    tcp_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64

    # the pool
    pool_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = POOL_BYTES
    segment_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=MAX_SEGMENT_BYTES)] = GIB
    prefault_threads: Threads = msgspec.field(default_factory=default_prefault_threads)
    grow_water: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    low_water: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.005
    high_water: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01
    growth: Growth = "demand"
    eviction: Eviction = "adaptive"
    table_records: Annotated[int, msgspec.Meta(ge=64, le=1 << 26)] = 1 << 17
    table_grants: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 1 << 13
    session_cap: Share = 0.5
    total_cap: Share = 0.75
    session_grants: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1 << 12

    # what each tenant may use; 0: no limit
    tenant_bytes: Annotated[int, msgspec.Meta(ge=0, lt=MANY_BYTES)] = 0
    tenant_chunks: Annotated[int, msgspec.Meta(ge=0, lt=MANY_BYTES)] = 0
    tenant_namespaces: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    tenant_sessions: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    tenant_members: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    tenant_grants: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0

    # lower tiers; none of them: no mover is started
    disk_path: str = ""
    disk_bytes: Annotated[int, msgspec.Meta(ge=0, lt=MANY_BYTES)] = 0
    disk_day_bytes: Annotated[int, msgspec.Meta(ge=0, lt=MANY_BYTES)] = 0
    redis_url: str = ""
    objects_url: str = ""
    mooncake_url: str = ""
    peers_url: str = ""
    tier_urls: str = ""
    tier_asks: Annotated[int, msgspec.Meta(ge=0, le=15)] = 0
    tier_queue_bytes: Annotated[int, msgspec.Meta(ge=0, lt=MANY_BYTES)] = 0
    tier_keep: TierKeep = "shared"
    tier_drain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 5.0

    # life and death
    heartbeat_s: Seconds = 2.0
    missed_heartbeats: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 3
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_S)] = 3.0
    ask_s: Seconds = 60.0
    weights_grace_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_S)] = 10.0
    weights_kept: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 64
    watch_s: Seconds = 0.5

    # the beginning and the end
    adopt: Adopt = "auto"
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 5.0
    on_exit: OnExit = "remove"

    # what people read
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    observe: str = ",".join(DEFAULT_OBSERVERS)
    traces_endpoint: str = msgspec.field(default_factory=lambda: os.environ.get(OTLP_VARIABLE, ""))
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    kv_events_readers: KvReaders = "loopback"
    kv_events_topic: str = ""
    kv_events_form: KvForm = "map"
    history_interval_s: Seconds = 1.0
    history_values: Count = 300
    recent_requests: Count = 16_384

    @property
    def has_tiers(self) -> bool:
        return bool(self.tier_names)

    @property
    def tier_names(self) -> list[str]:
        """The names of the tiers, in the order in which the mover asks them."""
        return ["disk", *self.store_urls] if self.disk_path else list(self.store_urls)

    @property
    def store_urls(self) -> dict[str, str]:
        """The URLs of stores by their names, in the order in which the mover asks them."""
        urls = {name: str(getattr(self, setting)) for name, setting in STORE_SETTINGS.items()}
        urls |= {name: url for part in self.tier_urls.split() for name, _, url in [part.partition("=")]}
        return {name: url for name, url in urls.items() if url}

    @property
    def observers(self) -> list[str]:
        return [name for part in self.observe.split(",") if (name := part.strip())]

    @property
    def suspect_ms(self) -> int:
        """From a member's last heartbeat until it is suspect."""
        return round(self.missed_heartbeats * self.heartbeat_s * 1000)

    @staticmethod
    def load(values: Mapping[str, object]) -> Settings:
        """Checked settings from a mapping of names to values or texts.

        Raises SettingsError naming each unknown setting, or the setting, its value and what was wanted.
        """
        return _load(values, {})


def choices_of(name: str) -> tuple[str, ...]:
    """The values that a setting may have; empty for numbers, sizes and free text."""
    return _CHOICES.get(name, ())


_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(Settings).items() if get_origin(hint) is Literal}
Source = Literal["default", "file", "environment", "flag"]


class Origin(NamedTuple):
    """Where a setting's value comes from."""

    source: Source
    where: str = ""
    """`/etc/kvdock.toml, line 3`, `KVDOCK_PORT` or `--port`; empty for a default."""


class Effective(NamedTuple):
    settings: Settings
    origins: dict[str, Origin]
    """The origin of each setting, in the order of the settings."""


def effective(
    environ: Mapping[str, str], *, config: str | None = None, flags: Mapping[str, object] | None = None,
    on_unknown: Callable[[str], None] | None = None, only: str = "",
) -> Effective:
    """All settings and where each comes from. `config`: a TOML file, else the one that KVDOCK_CONFIG names.

    A flag that is None was not given. `on_unknown`: variables that are no settings are left out, and it is called with
    a sentence that names them; None: they are refused. `only`: the one setting that is wanted; the others are left at
    their defaults, so that a wrong value of theirs stops nobody who does not need it. Raises SettingsError.
    """
    values: dict[str, object] = {}
    origins: dict[str, Origin] = {}
    path = environ.get(CONFIG_VARIABLE, "") if config is None else config
    if path:
        found, lines = _read_file(Path(path))
        values.update(found)
        origins.update({name: Origin("file", f"{path}, line {lines[name]}") for name in found})
    for variable, text in environ.items():
        if _is_ours(variable):
            name = variable.removeprefix(ENV_PREFIX).lower()
            values[name], origins[name] = text, Origin("environment", variable)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name], origins[name] = value, Origin("flag", f"--{name.replace('_', '-')}")
    where = {name: origin.where for name, origin in origins.items()}
    unknown = [name for name in _unknown(values) if origins[name].source == "environment"]
    if on_unknown and unknown:
        on_unknown(f"ignored, as no setting of kvdock has this name: {', '.join(_hints(unknown, where))}")
        values = {name: value for name, value in values.items() if name not in unknown}
    if only:
        values = {name: value for name, value in values.items() if name == only}
    settings = _load(values, where)
    return Effective(settings, {name: origins.get(name, Origin("default")) for name in Settings.__struct_fields__})


def _is_ours(variable: str) -> bool:
    others = variable in OTHER_VARIABLES or variable.startswith(CONNECTOR_PREFIX)
    return variable.startswith(ENV_PREFIX) and not others


def _read_file(path: Path) -> tuple[dict[str, object], dict[str, int]]:
    """A flat TOML file: settings, and the line of each. Raises SettingsError naming the file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_CHARACTERS + 1)
        if len(text) > MAX_FILE_CHARACTERS:
            raise SettingsError(f"settings file {path}: found more than {MAX_FILE_CHARACTERS} characters, wanted fewer")
        found = parse_toml(text)
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"settings file {path}: {error}") from error
    except TomlError as error:
        raise SettingsError(f"settings file {path} is no TOML: {error}") from error
    lines = {name: _line_of(name, text) for name in found}
    for name, value in found.items():
        if isinstance(value, dict | list):
            raise SettingsError(
                f"settings file {path}, line {lines[name]}: {name!r} wanted a plain value, found a table or list; "
                "settings are written one a line, outside of any table"
            )
    return found, lines


def _line_of(name: str, text: str) -> int:
    """The line on which a top-level name is set; 1 if it is written in a form that is not recognised."""
    at = re.compile(rf"""\s*\[*\s*["']?{re.escape(name)}["']?\s*[]=.]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if at.match(line)), 1)


def _load(values: Mapping[str, object], where: Mapping[str, str]) -> Settings:
    """`where`: the source of each value, for refusals."""
    _refuse_unknown(values, where)
    plain = {name: _plain(name, value, where) for name, value in values.items()}
    for name, text in list(plain.items()):
        if name.endswith("_bytes") and isinstance(text, str):
            plain[name] = _size(name, text, plain, where)
    if fault := not_whole(plain, Settings):
        raise SettingsError(f"wanted {WHOLE_WANTED}; found {_named(fault, values[fault], where)}")
    try:
        settings = msgspec.convert(plain, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(_refusal(plain, error, where)) from error
    return _checked(settings, given=set(values))


def _plain(name: str, value: object, where: Mapping[str, str]) -> object:
    """The value. Booleans are refused: they would pass for 1 or 0. So is text that no path and no answer can have."""
    if isinstance(value, bool):
        raise SettingsError(f"{_named(name, value, where)}: wanted a number or text")
    if isinstance(value, str) and ("\0" in value or not is_unicode(value)):
        raise SettingsError(f"{_named(name, value, where)}: wanted text in UTF-8 without the character NUL")
    return value


SHARES_OF_POOL = frozenset({"tenant_bytes", "tier_queue_bytes"})


def _size(name: str, text: str, values: Mapping[str, object], where: Mapping[str, str]) -> int:
    """Bytes. `values`: all settings that were given; a share may be one of another setting."""
    try:
        if name == "pool_bytes":
            return parse_size(text, shared_memory, AUTO_POOL)
        if name == "disk_bytes" and (folder := values.get("disk_path")):
            return parse_size(text, lambda: file_system_of(str(folder)), AUTO_DISK)
        if name in SHARES_OF_POOL:
            pool = values.get("pool_bytes", POOL_BYTES)
            pool_bytes = _size("pool_bytes", pool, values, where) if isinstance(pool, str) else pool
            return parse_size(text, lambda: Whole("pool_bytes", int(str(pool_bytes))))
        return parse_size(text, None)
    except SettingsError as error:
        raise SettingsError(f"{_named(name, text, where)}: {error}") from error


def _unknown(values: Mapping[str, object]) -> list[str]:
    return sorted(set(values) - set(Settings.__struct_fields__))


def _hints(unknown: Iterable[str], where: Mapping[str, str]) -> list[str]:
    """Each unknown name with the one that was probably meant, and its source."""
    hints = []
    for name in unknown:
        longer = [known for known in Settings.__struct_fields__ if known.startswith(f"{name}_")]
        near = difflib.get_close_matches(name, Settings.__struct_fields__, 1) or longer
        source = f" ({where[name]})" if name in where else ""
        hints.append(f"{name} (meant {near[0]}?){source}" if near else f"{name}{source}")
    return hints


def _refuse_unknown(values: Mapping[str, object], where: Mapping[str, str]) -> None:
    if unknown := _unknown(values):
        raise SettingsError(f"unknown settings: {', '.join(_hints(unknown, where))}; `kvdock serve --help` lists all")


def _refusal(values: Mapping[str, object], error: msgspec.ValidationError, where: Mapping[str, str]) -> str:
    """What was wanted, and the setting's value with its source."""
    name, wanted = refused(error, _CHOICES)
    return f"wanted {wanted}; found {_named(name, values[name], where) if name in values else 'other values'}"


def _named(name: str, value: object, where: Mapping[str, str]) -> str:
    shown = exact_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else repr(value)
    return f"{name}={shown}" + (f" ({where[name]})" if name in where else "")


def _checked(settings: Settings, given: set[str]) -> Settings:
    """Rules for several fields together. The default segment size shrinks to the size of a smaller pool."""
    if settings.segment_bytes > settings.pool_bytes:
        if "segment_bytes" in given:
            raise SettingsError(
                f"segment_bytes={exact_bytes(settings.segment_bytes)} wanted at most "
                f"pool_bytes={exact_bytes(settings.pool_bytes)}"
            )
        settings = msgspec.structs.replace(settings, segment_bytes=settings.pool_bytes)
    most_bytes = (MAX_SEGMENTS - 1) * settings.segment_bytes  # the first segment may be smaller
    if settings.pool_bytes > most_bytes:
        raise SettingsError(
            f"pool_bytes={exact_bytes(settings.pool_bytes)} wanted at most {exact_bytes(most_bytes)}, as "
            f"segment_bytes={exact_bytes(settings.segment_bytes)} and a pool has at most {MAX_SEGMENTS} segments"
        )
    if settings.high_water < settings.low_water:
        raise SettingsError(f"high_water={settings.high_water} wanted at least low_water={settings.low_water}")
    if settings.disk_path and not settings.disk_bytes:
        raise SettingsError(f"disk_path={settings.disk_path!r} wanted disk_bytes as well: how much it may have")
    if settings.disk_bytes and not settings.disk_path:
        found = exact_bytes(settings.disk_bytes)
        raise SettingsError(f"disk_bytes={found} wanted disk_path as well: where it may be written")
    if settings.disk_day_bytes and not settings.disk_path:
        found = exact_bytes(settings.disk_day_bytes)
        raise SettingsError(f"disk_day_bytes={found} wanted disk_path as well: it limits what is written there")
    if unknown := [name for name in settings.observers if name not in get_args(Observer)]:
        raise SettingsError(
            f"observe={settings.observe!r} wanted some of {', '.join(get_args(Observer))}, separated by commas; found "
            f"{', '.join(unknown)}"
        )
    _check_stores(settings)
    _check_passwords(settings)
    settings = _check_traces(settings, given)
    _check_kv_events(settings)
    if not settings.access_file and not is_loopback(settings.host):
        raise SettingsError(
            f"host={settings.host!r} wanted a loopback address, or an access_file for callers from elsewhere"
        )
    if not settings.allowed_hosts and not is_loopback(settings.host):
        raise SettingsError(
            f"host={settings.host!r} wanted allowed_hosts as well: the names and addresses by which callers know this "
            "server, so that pages of other names cannot reach it from a browser; *: all names"
        )
    return _with_whole_paths(settings)


def _with_whole_paths(settings: Settings) -> Settings:
    """Engines and commands, which run in other folders, get these paths from the server."""
    if not settings.socket_path:
        raise SettingsError("socket_path='' wanted the path of a socket")
    socket_path = str(Path(settings.socket_path).absolute())
    if len(os.fsencode(socket_path)) > 107:
        raise SettingsError(f"socket_path={socket_path!r} wanted at most 107 bytes")
    disk_path = settings.disk_path and str(Path(settings.disk_path).absolute())
    for path in (socket_path, disk_path):  # the present folder may have another name
        if not is_unicode(path):
            raise SettingsError(f"found the path {path!r}, wanted one in UTF-8")
    return msgspec.structs.replace(settings, socket_path=socket_path, disk_path=disk_path)


def _check_stores(settings: Settings) -> None:
    names = set()
    for part in settings.tier_urls.split():
        match = _STORE.fullmatch(part)
        if match is None:
            raise SettingsError(f"tier_urls wanted name=url, separated by spaces; found {without_password(part)!r}")
        name = match[1]
        if name == "disk" or name in STORE_SETTINGS:
            own = STORE_SETTINGS.get(name, "disk_path")
            raise SettingsError(f"tier_urls wanted other tiers, found {name!r}: set {own}")
        if name in names:
            raise SettingsError(f"tier_urls wanted each name once, found {name!r} twice")
        names.add(name)


def _check_traces(settings: Settings, given: set[str]) -> Settings:
    """Leaves out the address that the environment has for others, if no traces are wanted."""
    endpoint, is_on = settings.traces_endpoint, "traces" in settings.observers
    if endpoint and not is_on:
        if "traces_endpoint" in given:
            raise SettingsError(f"traces_endpoint wanted traces in observe={settings.observe!r} as well")
        return msgspec.structs.replace(settings, traces_endpoint="")
    if is_on and not _ADDRESS.fullmatch(endpoint):
        raise SettingsError(
            f"traces_endpoint wanted an address like http://host:4318, in it or in {OTLP_VARIABLE}, without user name "
            f"and password or parameters, for observe={settings.observe!r}; found {'another' if endpoint else 'none'}: "
            "secrets go into OTEL_EXPORTER_OTLP_HEADERS"
        )
    return settings


def _check_passwords(settings: Settings) -> None:
    """All users of the machine can read command lines, and GET /v1/config shows the settings."""
    for name, url in settings.store_urls.items():
        try:
            found = urlsplit(url).password
        except ValueError:
            raise SettingsError(
                f"the URL of the tier {name}: found one that cannot be read, wanted SCHEME://HOST:PORT"
            ) from None
        if found is not None:
            raise SettingsError(
                f"the URL of the tier {name}: found a password, wanted it in a file or an environment variable, "
                "because all users of the machine can read command lines"
            )


def _is_beyond_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return endpoint.startswith("tcp://") and not is_loopback(host)


def _check_kv_events(settings: Settings) -> None:
    endpoints = {name: getattr(settings, name) for name in ("kv_events_endpoint", "kv_events_replay_endpoint")}
    for name, endpoint in endpoints.items():
        if endpoint and not _ZMQ.fullmatch(endpoint):
            raise SettingsError(f"{name}={without_password(endpoint)!r} wanted tcp://host:port or ipc://path")
        if _is_beyond_loopback(endpoint) and settings.kv_events_readers == "loopback":
            raise SettingsError(
                f"{name}={endpoint!r} wanted an address on loopback, or kv_events_readers=anybody: whoever reaches the "
                "address reads the tokens of all prompts"
            )
        if endpoint and "kv_events" not in settings.observers:
            raise SettingsError(f"{name}={endpoint!r} wanted kv_events in observe={settings.observe!r} as well")
    if settings.kv_events_replay_endpoint and not settings.kv_events_endpoint:
        raise SettingsError(
            f"kv_events_replay_endpoint={settings.kv_events_replay_endpoint!r} wanted kv_events_endpoint as well: what "
            "was missed there is sent again"
        )
