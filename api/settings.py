"""All settings of the server, typed and checked once; a name that is not here is refused.

Sizes accept `268435456` and `256MiB`, in code, on the command line and in the environment alike.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from kvdock.api.errors import SettingsError

GIB = 1 << 30
MAX_SEGMENT_BYTES = GIB
"""A slot never crosses a 1 GiB pin piece, so a segment is never larger than one."""
ENV_PREFIX = "KVDOCK_"

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": GIB, "tib": 1 << 40, "kb": 10**3, "mb": 10**6,
          "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """'4GiB' → 4294967296. Raises SettingsError naming the text."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise SettingsError(f"a size like 512MiB or 4GiB was wanted, found {text!r}")
    number, unit = match[1], _UNITS[match[2].lower()]
    return int(float(number) * unit) if "." in number else int(number) * unit


def default_socket_path(environ: Mapping[str, str]) -> str:
    """Where server and engines of one user meet when nobody says otherwise."""
    run_dir = environ.get("XDG_RUNTIME_DIR", "")
    if run_dir and Path(run_dir).is_dir():
        return str(Path(run_dir) / "kvdock.sock")
    return f"/tmp/kvdock-{os.getuid()}.sock"


def default_prefault_threads() -> int:
    return max(1, min(8, (os.cpu_count() or 2) // 2))


Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Build it with `load`, which checks; every field has a working default."""

    # where it listens
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 7410
    """0: the system chooses."""
    socket_path: str = msgspec.field(default_factory=lambda: default_socket_path(os.environ))
    allowed_hosts: str = ""
    """Host names the TCP port answers for, comma-separated; '*': all. Empty: loopback names when `host`
    is a loopback address (a web page cannot reach the pool by DNS rebinding), else all."""
    body_limit_bytes: Annotated[int, msgspec.Meta(ge=1 << 10)] = 8 << 20

    # the pool
    pool_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 4 * GIB
    """The pool never grows beyond it."""
    segment_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=MAX_SEGMENT_BYTES)] = GIB
    """The pool grows by this much at a time."""
    prefault_threads: Threads = msgspec.field(default_factory=default_prefault_threads)
    low_water: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    """Below this free share of the pool it grows, or, when full, evicts."""
    high_water: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.10
    """Watermark eviction stops at this free share."""
    table_records: Annotated[int, msgspec.Meta(ge=64, le=1 << 26)] = 1 << 17
    table_grants: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 1 << 13
    session_cap: Share = 0.25
    """Share of the pool one session may hold pinned."""
    total_cap: Share = 0.75
    session_grants: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1 << 12
    """Leases and reservations one session may have open."""

    # life and death
    heartbeat_s: Seconds = 2.0
    settle_s: Annotated[float, msgspec.Meta(ge=0)] = 3.0
    """From a member's death until what it held is reused."""
    ask_s: Seconds = 60.0
    """A lease older than this is asked about."""
    watch_s: Seconds = 0.5
    """Interval of the look at members' locks, deadlines and watermarks."""

    # what people read
    history_interval_s: Seconds = 1.0
    history_values: Positive = 300
    recent_requests: Positive = 256

    @property
    def suspect_ms(self) -> int:
        """Three missed heartbeats."""
        return round(3 * self.heartbeat_s * 1000)

    @staticmethod
    def load(values: Mapping[str, object]) -> Settings:
        """Checked settings from a mapping of names to values or texts.

        Raises SettingsError naming each unknown setting, or the setting, its value and what was wanted.
        """
        _refuse_unknown(values)
        plain = {
            name: parse_bytes(value) if name.endswith("_bytes") and isinstance(value, str) else value
            for name, value in values.items()
        }
        try:
            settings = msgspec.convert(plain, Settings, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{error}; found {_offender(plain, str(error))}") from error
        return _checked(settings, given=set(values))

    @staticmethod
    def from_environ(environ: Mapping[str, str], **overrides: object) -> Settings:
        """Settings from KVDOCK_POOL_BYTES and the like; `overrides` that are not None win."""
        values: dict[str, object] = {
            name.removeprefix(ENV_PREFIX).lower(): text for name, text in environ.items() if name.startswith(ENV_PREFIX)
        }
        values.update({name: value for name, value in overrides.items() if value is not None})
        return Settings.load(values)


def _refuse_unknown(values: Mapping[str, object]) -> None:
    known = Settings.__struct_fields__
    unknown = sorted(set(values) - set(known))
    if not unknown:
        return
    hints = [f"{name} (meant {near[0]}?)" if (near := difflib.get_close_matches(name, known, 1)) else name
             for name in unknown]
    raise SettingsError(f"unknown settings: {', '.join(hints)}; known are {', '.join(known)}")


def _offender(values: Mapping[str, object], message: str) -> str:
    """`name=value` of the setting that msgspec's message points at (`… - at `$.port``)."""
    match = re.search(r"\$\.(\w+)", message)
    return f"{match[1]}={values[match[1]]!r}" if match and match[1] in values else "other values"


def _checked(settings: Settings, given: set[str]) -> Settings:
    """Rules over several fields. A segment size nobody chose shrinks to the pool's."""
    if settings.segment_bytes > settings.pool_bytes:
        if "segment_bytes" in given:
            raise SettingsError(
                f"segment_bytes={settings.segment_bytes} wanted at most pool_bytes={settings.pool_bytes}"
            )
        settings = msgspec.structs.replace(settings, segment_bytes=settings.pool_bytes)
    if settings.high_water < settings.low_water:
        raise SettingsError(f"high_water={settings.high_water} wanted at least low_water={settings.low_water}")
    if len(os.fsencode(settings.socket_path)) > 107:
        raise SettingsError(f"socket_path={settings.socket_path!r} wanted at most 107 bytes")
    return settings
