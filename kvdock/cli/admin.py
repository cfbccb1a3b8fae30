"""`kvdock clear`, `evict` and `keep`: what is stored, by hand. Engines that hold a chunk go on; its memory is freed
when they are done."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
import typer
from rich.console import Console

from kvdock.api.settings import parse_bytes
from kvdock.cli.errors import FAILED, WRONG, CommandError
from kvdock.cli.operator import LONG_TIMEOUT_S, delete, parts_of, print_json, reached
from kvdock.cli.prompts import Prompt, resolve
from kvdock.cli.render import counted, duration, printable, say, size
from kvdock.protocol.admin_schemas import MAX_PIN_S, ClearCache, EvictChunks, NamespaceView, PinChunks
from kvdock.protocol.schemas import Lookup
from kvdock.protocol.wire_types import MAX_KEYS


class Kept(msgspec.Struct):
    """What `keep --json` prints."""

    namespace: str
    model: str
    asked_chunks: int
    chunks: int
    """Stored, and kept from now on; with `--end`, kept no longer."""
    duration_s: float
    """0: no longer kept."""


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
            what = "all namespaces" if space is None else _named(space)
            stored = f"{status.chunks.ready:,} chunks, {size(status.pool.ready_bytes)} in all namespaces together"
            _confirm("clear", f"Clear {what} at {client.address}? Stored are {stored}.", "nothing was cleared")
        body = ClearCache(namespace=None if space is None else space.namespace)
        cleared = client.clear(body, timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console, cleared)
    else:
        say(console, f"{cleared.chunks:,} chunks were cleared")
        _say_pending(console, cleared.pending_tiers)


def evict(
    server: str, prompt: Prompt, *, bytes_text: str, free_text: str, yes: bool, as_json: bool, console: Console
) -> None:
    """A prompt's chunks, or what is worth least. Raises CommandError for wrong options, when the person says no, and
    when no server answers; ApiError."""
    if sum((prompt.given, bool(bytes_text), bool(free_text))) != 1:
        raise CommandError("evict needs one of --tokens-file, --keys, --bytes and --free", WRONG)
    if prompt.given:
        _evict_prompt(server, prompt, yes=yes, as_json=as_json, console=console)
        return
    if prompt.namespace:
        raise CommandError("--namespace goes with --tokens-file or --keys; `kvdock clear` removes a namespace", WRONG)
    amount = parse_bytes(bytes_text or free_text)
    with reached(server) as client:
        status = client.status()
        pool, ready = status.pool, status.pool.ready_bytes
        free = pool.free_bytes + max(0, pool.limit_bytes - pool.allocated_bytes)  # as the server counts
        wanted = free + amount if bytes_text else amount
        missing = max(0, wanted - free)
        if not yes and missing:
            lost = f"{size(min(missing, ready))} of the {size(ready)} that are stored, those worth least first"
            _confirm("evict", f"Evict {lost}, at {client.address}? What engines hold stays, and what is kept.",
                     "nothing was evicted")
        evicted = client.evict(EvictChunks(free_bytes=wanted), timeout_s=LONG_TIMEOUT_S)
    if as_json:
        print_json(console, evicted)
        return
    say(console, f"{counted(evicted.chunks, 'chunk')} of {size(evicted.bytes)} evicted; "
                 f"{size(evicted.free_bytes)} are free")
    if evicted.free_bytes < wanted:
        say(console, "nothing more may be evicted: the rest is held by engines, kept, or being written")


def _evict_prompt(server: str, prompt: Prompt, *, yes: bool, as_json: bool, console: Console) -> None:
    wanted = prompt.read("evict")
    with reached(server) as client:
        space = resolve(client, prompt.namespace)
        keys = wanted.keys_in(space)
        stored = client.lookup(Lookup(namespace=space.namespace, keys=keys[:MAX_KEYS])).hit_tokens
        if not yes:
            lost = f"a prompt of {counted(len(keys), 'chunk')}, of which {stored:,} tokens can be found"
            _confirm("evict", f"Evict {lost}, from {_named(space)} at {client.address}? Longer prompts that begin so "
                     "are not found any more either, kept ones included.", "nothing was evicted")
        gone = delete(client, space.namespace, keys)
    if as_json:
        print_json(console, gone)
        return
    say(console, f"{counted(gone.chunks, 'chunk')} evicted, of {len(keys):,}")
    if gone.tier_chunks:
        say(console, f"{counted(gone.tier_chunks, 'chunk')} deleted from lower tiers")
    if gone.is_cleared:
        say(console, "more keys were deleted than tiers can name, so the whole namespace was cleared")
    _say_pending(console, gone.pending_tiers)


def keep(
    server: str, prompt: Prompt, *, duration_s: float, as_json: bool, console: Console
) -> None:
    """`duration_s` 0: no longer. Raises CommandError for wrong options, when nothing of the prompt is stored, and when
    no server answers; ApiError."""
    wanted = prompt.read("keep")
    if duration_s > MAX_PIN_S:
        raise CommandError(f"--for: wanted at most {duration(MAX_PIN_S)}, found {duration(duration_s)}", WRONG)
    with reached(server) as client:
        space = resolve(client, prompt.namespace)
        keys = wanted.keys_in(space)
        chunks = sum(
            client.pin(PinChunks(namespace=space.namespace, keys=part, duration_s=duration_s)).chunks
            for part in parts_of(keys)
        )
    if not chunks and duration_s:
        raise CommandError(f"nothing of this prompt is stored for {_named(space)}: nothing is kept", FAILED)
    if as_json:
        print_json(console, Kept(space.namespace, space.manifest.model, len(keys), chunks, duration_s))
        return
    what = f"{chunks:,} of {counted(len(keys), 'chunk')} for {_named(space)}"
    if not duration_s:
        say(console, f"{what} no longer kept")
        return
    until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + duration_s))
    rest = "" if chunks == len(keys) else "; the others are not stored"
    say(console, f"{what} kept from eviction until {until}{rest}")


def _say_pending(console: Console, tiers: Sequence[str]) -> None:
    if tiers:
        say(console, f"still to be done in the lower tiers {', '.join(tiers)}; they are not used for it until then")


def _named(space: NamespaceView) -> str:
    return f"{printable(space.manifest.model)} ({space.namespace[:8]})"


def _confirm(command: str, question: str, refusal: str) -> None:
    """On stderr, so that --json on stdout stays JSON."""
    if not sys.stdin.isatty():
        raise CommandError(f"{command} asks for confirmation, and standard input is no terminal: add --yes", WRONG)
    if not typer.confirm(question, err=True):
        raise CommandError(refusal, FAILED)
