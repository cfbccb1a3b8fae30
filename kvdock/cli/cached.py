"""`kvdock cached`: what the pool holds, by model and tenant, and by prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.cli.operator import first, print_json, reached
from kvdock.cli.screen import say
from kvdock.cli.words import brief, counted, duration, percent, printable, size, space
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.usage import Prefixes, PrefixView


class Cached(msgspec.Struct, kw_only=True):
    """What `--json` prints."""

    namespaces: list[NamespaceView]
    """Those that hold most come first."""
    prefixes: Prefixes


def show_cached(server: str, *, limit: int, as_json: bool, console: Console) -> None:
    """Raises CommandError when no server answers; ApiError."""
    with reached(server) as client:
        namespaces, _ = first(client.namespaces, lambda page: page.namespaces)
        prefixes = client.prefixes(limit)
    namespaces = sorted(namespaces, key=lambda view: view.bytes, reverse=True)
    if as_json:
        print_json(console, Cached(namespaces=namespaces, prefixes=prefixes))
        return
    if not any(view.chunks for view in namespaces):
        say(console, "nothing is cached")
        return
    say(console, _namespaces_table(namespaces), "", _prefixes_table(prefixes.prefixes))
    if (more := prefixes.prefix_count - len(prefixes.prefixes)) > 0:
        say(console, f"… and {counted(more, 'prefix', 'prefixes')} more: --limit N")


def _namespaces_table(views: Iterable[NamespaceView]) -> Table:
    return _table(("model", "tenant", "namespace", "cached", "chunks", "hit rate", "last used", "oldest", "engines"), [
        (
            view.manifest.model, view.tenant or "-", space(view.namespace, view.weights), size(view.bytes),
            f"{view.chunks:,}",
            percent(view.totals.hit_tokens / view.totals.lookup_tokens if view.totals.lookup_tokens else None),
            _ago(view.unused_s), _ago(view.oldest_s), f"{view.sessions:,}" + _beside(view),
        )
        for view in views
    ], left=3)


def _prefixes_table(views: Iterable[PrefixView]) -> Table:
    return _table(("prefix", "model", "namespace", "used", "tokens", "cached", "stored", "last used"), [
        (
            view.key[:12], view.model, space(view.namespace, view.weights), counted(view.uses, "time"),
            brief(view.tokens), size(view.bytes), _ago(view.age_s), _ago(view.unused_s),
        )
        for view in views
    ], left=3)


def _beside(view: NamespaceView) -> str:
    """What is said of its engines."""
    if view.left_s is not None:
        return f" (left {duration(view.left_s)} ago)"
    return " (bench)" if view.is_bench else ""


def _ago(seconds: float | None) -> str:
    return "-" if seconds is None else f"{duration(seconds)} ago"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> Table:
    """The first `left` columns are words."""
    columns = [Column(head, justify="left" if at < left else "right") for at, head in enumerate(heads)]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
