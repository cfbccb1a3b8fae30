"""`kvdock clear`: removes stored chunks. Engines that are loading a chunk finish; its memory is freed afterwards."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from kvdock.cli.lookup import resolve
from kvdock.cli.operator import LONG_TIMEOUT_S, print_json, reached
from kvdock.cli.outcome import FAILED, WRONG, CommandError
from kvdock.cli.words import printable, size
from kvdock.protocol.admin_schemas import ClearCache


def clear_cache(
    server: str, *, namespace: str, everything: bool, yes: bool, as_json: bool, console: Console
) -> None:
    """Raises CommandError for wrong options, when the person says no, and when no server answers; ApiError."""
    if bool(namespace) == everything:
        raise CommandError("clear needs either --namespace or --all", WRONG)
    with reached(server) as client:
        space = None if everything else resolve(client, namespace)
        if not yes:
            status = client.status()
            what = "all namespaces" if space is None else f"{printable(space.manifest.model)} ({space.namespace[:8]})"
            stored = f"{status.chunks.ready:,} chunks, {size(status.pool.ready_bytes)} in all namespaces together"
            _confirm(f"Clear {what} at {client.address}? Stored are {stored}.")
        body = ClearCache(namespace=None if space is None else space.namespace)
        cleared = client.clear(body, timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console, cleared)
    else:
        console.print(f"{cleared.chunks:,} chunks were cleared", highlight=False)


def _confirm(question: str) -> None:
    """On stderr, so that --json on stdout stays JSON."""
    if not sys.stdin.isatty():
        raise CommandError("clear asks for confirmation, and standard input is no terminal: add --yes", WRONG)
    if not typer.confirm(question, err=True):
        raise CommandError("nothing was cleared", FAILED)
