"""`kvdock clear`: takes stored chunks out of use. What engines are reading stays theirs until they say done."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from kvdock.cli.lookup import resolve
from kvdock.cli.operator import clear, print_json, reached
from kvdock.cli.outcome import FAILED, WRONG, Refused
from kvdock.cli.words import printable, size


def clear_cache(
    server: str, *, namespace: str, everything: bool, yes: bool, as_json: bool, console: Console
) -> None:
    """Raises Refused when it is not clear what is meant, when the person says no, when nobody answers; ApiError."""
    if bool(namespace) == everything:
        raise Refused("clear wants --namespace or --all, one of them", WRONG)
    with reached(server) as client:
        space = None if everything else resolve(client, namespace)
        if not yes:
            status = client.status()
            what = "all namespaces" if space is None else f"{printable(space.manifest.model)} ({space.namespace[:8]})"
            stored = f"{status.chunks.ready:,} chunks, {size(status.pool.ready_bytes)} in all namespaces together"
            _confirm(f"Clear {what} at {client.address}? Stored are {stored}.")
        cleared = clear(client, None if space is None else space.namespace)
    if as_json:
        print_json(console, cleared)
    else:
        console.print(f"{cleared.chunks:,} chunks are out of use", highlight=False)


def _confirm(question: str) -> None:
    """On stderr, so that --json on stdout stays JSON."""
    if not sys.stdin.isatty():
        raise Refused("clear asks before it clears, and here is nobody to ask: add --yes", WRONG)
    if not typer.confirm(question, err=True):
        raise Refused("nothing was cleared", FAILED)
