"""`kvdock status`: the server at a glance, as a table or as the JSON that it answered with."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.cli.lists import sessions_table
from kvdock.cli.operator import print_json, reached
from kvdock.cli.words import duration, printable, size
from kvdock.protocol.reports import Status


def show_status(server: str, *, as_json: bool, console: Console) -> None:
    """Raises CommandError when no server answers; ApiError."""
    with reached(server) as client:
        status = client.status()
        if as_json:
            print_json(console, status)
            return
        page = client.sessions()
        address = client.address
    console.print(_overview(status, address))
    if page.sessions:
        console.print(sessions_table(page.sessions))
    if page.next is not None:
        console.print(f"{status.sessions - len(page.sessions)} more: kvdock sessions --all")


def _overview(status: Status, address: str) -> Table:
    pool, chunks = status.pool, status.chunks
    rows = {
        "server": f"{status.version} at {address}, up {duration(status.uptime_s)}",
        "state": ", ".join([status.status, *status.reasons]),
        "pool": f"{size(pool.allocated_bytes)} of at most {size(pool.limit_bytes)}, {size(pool.free_bytes)} free",
        "ready": f"{size(pool.ready_bytes)} in {chunks.ready:,} chunks",
        "being written": f"{size(pool.reserved_bytes)} in {chunks.reserved:,} chunks",
        "quarantined": f"{size(pool.quarantined_bytes)} in {chunks.quarantined:,} chunks",
        "held": f"{size(pool.held_bytes)} by {status.leases} leases and {status.reservations} reservations",
    }
    for tier in status.tiers:
        limit = f" of at most {size(tier.bytes_limit)}" if tier.bytes_limit else ""
        waits = f", {size(tier.queued_bytes)} wait to be written" if tier.queued_bytes else ""
        rows[f"tier {tier.name}"] = f"{tier.state}, {size(tier.bytes_used)}{limit} in {tier.objects:,} parts{waits}"
    for counter, total in sorted(status.counters.items()):
        rows[counter.replace("_", " ")] = size(total) if counter.endswith("_bytes") else f"{total:,}"
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(printable(value), overflow="fold"))
    return table
