"""`kvdock tiers`: what lower tiers have, and the removal of it for space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.cli.help import AsJson, Server, Yes, console

if TYPE_CHECKING:
    from rich.table import Table

    from kvdock.client.client import Client
    from kvdock.protocol.reports import TierContents, TierNamespace

MOST_AT_ONCE = 128
"""The most namespaces that one call names."""


class TiersOptions(NamedTuple):
    """The options that stand before `clear`."""

    server: str = ""
    as_json: bool = False


def tiers(context: typer.Context, server: Server = "", as_json: AsJson = False) -> None:
    """List what lower tiers have of each namespace, or remove it.

    A line for each namespace and tier: the model, the user whose server used it last, chunks, bytes, and how long ago a
    server last served it, by the hour. Object stores, folders and a disk can list. Clears and deletions that a tier has
    not carried out yet are counted, with the reason.
    """
    if context.invoked_subcommand is not None:
        context.obj = TiersOptions(server, as_json)
        return
    from kvdock.cli.client import LONG_TIMEOUT_S, print_json, reached
    from kvdock.cli.render import say
    from kvdock.cli.status import pending_in_words

    with reached(server) as client:
        found = client.tiers(timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console(), found)
        return
    if not found.tiers:
        say(console(), "the server has no lower tiers")
    for one in found.tiers:
        if one.error:
            say(console(), f"{one.tier}: {one.error}")
        elif not one.namespaces:
            say(console(), f"{one.tier}: it has nothing")
        if one.pending_orders:
            say(console(), f"{one.tier}: {pending_in_words(one)}")
    if any(one.namespaces for one in found.tiers):
        say(console(), _table(found.tiers))


def _table(contents: list[TierContents]) -> Table:
    from rich.table import Column, Table

    from kvdock.cli.render import duration, printable, size

    right = (Column(name, justify="right") for name in ("RECORDS", "BYTES", "LAST USED"))
    table = Table("TIER", "NAMESPACE", "MODEL", "USER", *right, box=None, header_style="")
    for tier, one in _all(contents):
        used = "now" if one.is_served else "?" if one.unused_s is None else f"{duration(one.unused_s)} ago"
        table.add_row(
            tier, one.namespace[:12], printable(one.model) or "?", printable(one.tenant) or "?", f"{one.objects:,}",
            size(one.bytes), used,
        )
    return table


def _all(contents: list[TierContents]) -> Iterator[tuple[str, TierNamespace]]:
    for one in contents:
        for space in sorted(one.namespaces, key=lambda space: -space.bytes):
            yield one.tier, space


def tiers_clear(
    context: typer.Context,
    tier: Annotated[str, typer.Option("--tier", metavar="TIER", help="One tier; otherwise all.")] = "",
    namespace: Annotated[str, typer.Option(
        "--namespace", metavar="DIGEST", help="The namespaces whose digests begin so.", show_default=False,
    )] = "",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="The namespaces of a model.")] = "",
    tenant: Annotated[str, typer.Option(
        "--tenant", metavar="USER", help="The namespaces that this user's server used last.",
    )] = "",
    yes: Yes = False,
    server: Server = "",
    as_json: AsJson = False,
) -> None:
    """Remove what lower tiers have, for space.

    What the pool has stays, and chunks that prompts go on asking for are written again; `kvdock clear` takes chunks out
    of use everywhere.
    """
    if not (tier or namespace or model or tenant):
        raise CommandError("tiers clear needs one of --tier, --namespace, --model and --tenant", WRONG)
    from kvdock.cli.admin import confirm
    from kvdock.cli.client import LONG_TIMEOUT_S, print_json, reached
    from kvdock.cli.render import counted, printable, say, size
    from kvdock.protocol.admin_schemas import TierEmptied

    before = context.obj or TiersOptions()
    with reached(server or before.server) as client:
        listed = client.tiers(timeout_s=LONG_TIMEOUT_S).tiers
        require_listed(listed, tier)
        wanted = [
            (name, space) for name, space in _all(listed)
            if tier in ("", name) and space.namespace.startswith(namespace.lower())
            and model in ("", space.model) and tenant in ("", space.tenant)
        ]
        what = f"{counted(len(wanted), 'namespace')}, {size(sum(space.bytes for _, space in wanted))}"
        if wanted and not yes:
            lines = "".join(
                f"\n  {name} {one.namespace[:12]} {printable(one.model)}, {size(one.bytes)}" for name, one in wanted
            )
            confirm("tiers clear", f"Remove {what}:{lines}\nat {client.address}?", "nothing was removed")
        removed = sum(
            empty(client, name, [space.namespace for other, space in wanted if other == name])
            for name in dict.fromkeys(name for name, _ in wanted)
        )
    if as_json:
        print_json(console(), TierEmptied(objects=removed, left_objects=0))
    else:
        say(console(), f"{counted(removed, 'record')} removed: {what}" if wanted else "there is nothing of the kind")


def require_listed(listed: list[TierContents], tier: str) -> None:
    """Raises CommandError unless the tier, or with "" each tier, has said what it has."""
    names = [one.tier for one in listed]
    if tier and tier not in names:
        wanted = f"one of {', '.join(names)}" if names else "a server with lower tiers"
        raise CommandError(f"found --tier {tier}, wanted {wanted}", WRONG)
    for one in listed:
        if one.error and tier in ("", one.tier):
            raise CommandError(f"{one.tier}: {one.error}", FAILED)


def empty(client: Client, tier: str, namespaces: list[str]) -> int:
    """Removes all that the tier has of these namespaces; returns how many records. Raises CommandError, ApiError."""
    from kvdock.cli.client import LONG_TIMEOUT_S
    from kvdock.protocol.admin_schemas import EmptyTier

    removed = 0
    for at in range(0, len(namespaces), MOST_AT_ONCE):
        body = EmptyTier(tier=tier, namespaces=namespaces[at : at + MOST_AT_ONCE])
        while True:
            done = client.empty_tier(body, timeout_s=LONG_TIMEOUT_S)
            removed += done.objects
            if done.error:
                raise CommandError(f"{tier}: {done.error}", FAILED)
            if not (done.left_objects and done.objects):
                break
    return removed
