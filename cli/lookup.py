"""`kvdock lookup`: how long a prefix the pool could serve. It asks without a session, so it takes no lease."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from kvdock.cli.operator import first, print_json, reached
from kvdock.cli.outcome import FAILED, WRONG, CommandError
from kvdock.cli.words import printable
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.schemas import Lookup

_KEY = re.compile(r"[0-9a-f]{64}")


class Found(msgspec.Struct):
    """What `--json` prints."""

    namespace: str
    model: str
    chunk_tokens: int
    asked_tokens: int
    hit_tokens: int


def show_lookup(
    server: str, *, namespace: str, keys: list[str], tokens_file: str, as_json: bool, console: Console
) -> None:
    """Raises CommandError for a wrong key, token file or namespace, and when no server answers; ApiError."""
    if bool(keys) == bool(tokens_file):
        raise CommandError("lookup needs either --keys or --tokens-file", WRONG)
    wanted = _keys(keys) if keys else None
    tokens = None if keys else read_tokens(tokens_file)
    with reached(server) as client:
        space = resolve(client, namespace)
        answer = client.lookup(Lookup(namespace=space.namespace, keys=wanted, tokens=tokens))
    chunk_tokens = space.manifest.chunk_tokens
    asked = len(tokens) if tokens is not None else len(wanted or ()) * chunk_tokens
    found = Found(space.namespace, space.manifest.model, chunk_tokens, asked, answer.hit_tokens)
    if as_json:
        print_json(console, found)
        return
    share = 100 * found.hit_tokens / asked if asked else 0
    console.print(
        f"{found.hit_tokens:,} of {asked:,} tokens are stored ({share:.0f} %), in chunks of {chunk_tokens}, "
        f"for {printable(found.model)} (namespace {space.namespace[:8]})", highlight=False, markup=False,
    )


def resolve(client: Client, prefix: str) -> NamespaceView:
    """The one namespace that starts with these hex digits; '' fits any. Raises CommandError unless exactly one fits."""
    spaces, _ = first(client.namespaces, lambda page: page.namespaces)
    if not spaces:
        raise CommandError("no engine is attached, and nothing is stored: the server has no namespace", FAILED)
    fitting = [space for space in spaces if space.namespace.startswith(prefix.lower())]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(f"{space.namespace[:12]} ({printable(space.manifest.model)})" for space in (fitting or spaces))
    if not fitting:
        raise CommandError(f"no namespace starts with {prefix!r}; the server has {known}", FAILED)
    raise CommandError(f"the server has several namespaces; choose one with --namespace: {known}", WRONG)


def read_tokens(name: str) -> list[int]:
    """Token ids from a file, or standard input for `-`: a JSON list, or separated by spaces, commas or newlines."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"tokens file {name}: {error}", WRONG) from error
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        tokens = [_token(item) for item in found]
    except ValueError as error:
        raise CommandError(f"tokens file {name}: wanted token ids in 0..4294967295, found {error}", WRONG) from error
    if not tokens:
        raise CommandError(f"tokens file {name}: wanted at least one token, found none", WRONG)
    return tokens


def _token(item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, int | str) or not re.fullmatch(r"\d{1,10}", str(item)):
        raise ValueError(repr(item)[:40])
    token = int(item)
    if token >= 1 << 32:
        raise ValueError(token)
    return token


def _keys(texts: list[str]) -> list[str]:
    keys = [key.lower() for text in texts for key in re.split(r"[\s,]+", text) if key]
    for key in keys:
        if not _KEY.fullmatch(key):
            raise CommandError(f"wanted a key of 64 hex digits, found {key[:80]!r} ({len(key)} characters)", WRONG)
    if not keys:
        raise CommandError("--keys: wanted at least one key, found none", WRONG)
    return keys
