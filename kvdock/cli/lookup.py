"""`kvdock lookup`: how long a prefix the pool could serve. It asks without a session, so it takes no lease."""

from __future__ import annotations

import msgspec
from rich.console import Console

from kvdock.cli.operator import print_json, reached
from kvdock.cli.prompts import Prompt, resolve
from kvdock.cli.screen import say
from kvdock.cli.words import printable
from kvdock.protocol.schemas import Lookup


class Found(msgspec.Struct):
    """What `--json` prints."""

    namespace: str
    model: str
    chunk_tokens: int
    asked_tokens: int
    hit_tokens: int


def show_lookup(server: str, prompt: Prompt, *, as_json: bool, console: Console) -> None:
    """Raises CommandError for a wrong key, token file or namespace, and when no server answers; ApiError."""
    wanted = prompt.read("lookup")
    with reached(server) as client:
        space = resolve(client, prompt.namespace)
        answer = client.lookup(Lookup(namespace=space.namespace, keys=wanted.keys, tokens=wanted.tokens))
    chunk_tokens, asked = space.manifest.chunk_tokens, wanted.length(space)
    found = Found(space.namespace, space.manifest.model, chunk_tokens, asked, answer.hit_tokens)
    if as_json:
        print_json(console, found)
        return
    share = 100 * found.hit_tokens / asked if asked else 0
    say(console, f"{found.hit_tokens:,} of {asked:,} tokens are stored ({share:.0f} %), in chunks of {chunk_tokens}, "
                 f"for {printable(found.model)} (namespace {space.namespace[:8]})")
