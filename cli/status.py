"""`kvdock status`: the server at a glance, as a table or as the JSON that it answered."""

from __future__ import annotations

import os

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.api.client import Client
from kvdock.api.schemas import SessionView, Status
from kvdock.api.settings import Settings

TIMEOUT_S = 3.0


def default_address() -> str:
    """Where `kvdock serve` listens when started with the same environment."""
    return f"unix:{Settings.from_environ(os.environ).socket_path}"


def show_status(address: str, *, as_json: bool, console: Console) -> None:
    """Raises ValueError for an address that is none, ServerUnavailable and ApiError as the client does."""
    with Client(address, timeout_s=TIMEOUT_S) as client:
        status = client.status()
        if as_json:
            console.out(msgspec.json.encode(status).decode(), highlight=False)
            return
        sessions = client.sessions().sessions
    console.print(_overview(status, address))
    if sessions:
        console.print(_sessions(sessions))


def _overview(status: Status, address: str) -> Table:
    pool, chunks = status.pool, status.chunks
    rows = {
        "server": f"{status.version} at {address}, up {duration(status.uptime_s)}",
        "state": ", ".join([status.status, *status.reasons]),
        "pool": f"{size(pool.allocated_bytes)} of at most {size(pool.limit_bytes)}, {size(pool.free_bytes)} free",
        "ready": f"{size(pool.ready_bytes)} in {chunks.ready} chunks",
        "being written": f"{size(pool.reserved_bytes)} in {chunks.reserved} chunks",
        "quarantined": f"{size(pool.quarantined_bytes)} in {chunks.quarantined} chunks",
        "held": f"{size(pool.held_bytes)} by {status.leases} leases and {status.reservations} reservations",
        **{name.replace("_", " "): figure(name, value) for name, value in sorted(status.counters.items())},
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return table


def _sessions(sessions: list[SessionView]) -> Table:
    table = Table("engine", "model", "members", "holds", "age", box=None, pad_edge=False, title="sessions",
                  title_justify="left")
    for view in sessions:
        members = ", ".join(f"{_ranks(member.ranks)} {member.state}" for member in view.members)
        cells = (view.label or view.instance, view.model, members, size(view.held_bytes), duration(view.age_s))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _ranks(ranks: list[int]) -> str:
    return f"rank {','.join(map(str, ranks))}" if ranks else "scheduler"


def printable(text: str) -> str:
    """Engines choose their labels: nothing in them may drive the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)


def figure(name: str, value: int) -> str:
    return size(value) if name.endswith("_bytes") else f"{value:,}"


def size(size_bytes: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """The two largest units: 3725 → 1 h 2 min."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{minutes} min" if minutes else ""]
    given = [part for part in [*parts, f"{whole % 60} s"] if part]
    return " ".join(given[:2])
