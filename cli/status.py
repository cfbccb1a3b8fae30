"""`kvdock status`: the server at a glance, as a table or as the JSON that it answered with."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdock.cli.lists import sessions_table
from kvdock.cli.operator import print_json, reached
from kvdock.cli.words import duration, printable, size
from kvdock.protocol.reports import MoverView, Status, TierView

SILENT_S = 5.0
"""A mover that tells of its tiers less often hangs, or is starting."""


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
    rows |= {f"tier {tier.name}": _tier(tier) for tier in status.tiers}
    if status.mover is not None:
        rows["lower tiers"] = _mover(status.mover)
    for counter, total in sorted(status.counters.items()):
        rows[counter.replace("_", " ")] = size(total) if counter.endswith("_bytes") else f"{total:,}"
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(printable(value), overflow="fold"))
    return table


def _tier(tier: TierView) -> str:
    said = "used" if tier.state == "open" else f"off: {tier.why}"
    if tier.error:
        said += f" ({tier.error})"
    if not tier.counters:  # it has never been open
        return said
    limit = f" of at most {size(tier.bytes_limit)}" if tier.bytes_limit else ""
    waits = f", {size(tier.queued_bytes)} wait to be written" if tier.queued_bytes else ""
    bad = f", {tier.counters['damaged']:,} damaged" if tier.counters.get("damaged") else ""
    stored, loaded = (size(tier.counters.get(name, 0)) for name in ("stored_bytes", "loaded_bytes"))
    return (
        f"{said}; {size(tier.bytes_used)}{limit} in {tier.objects:,} parts{waits}; "
        f"{stored} stored, {loaded} loaded{bad}"
    )


def _mover(mover: MoverView) -> str:
    waits = ", ".join(
        f"{count:,} {how} after {mover.wait_s[how] / count:.2f} s on average"
        for how, count in mover.waits.items() if count
    )
    said = [f"requests that wait now: {mover.waiting}", f"that have waited: {waits or 'none'}"]
    if mover.restarts:
        said.append(f"times that the mover ended and was started again: {mover.restarts}")
    if mover.silent_s > SILENT_S:
        said.append(f"the mover has said nothing for {duration(mover.silent_s)}")
    if mover.declined:
        said.append(f"computed instead, as no tier is quicker: {mover.declined:,}")
    if mover.lost_lookups:
        said.append(f"lookups that it was not told of: {mover.lost_lookups:,}")
    return "; ".join(said)
