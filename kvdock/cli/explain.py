"""`kvdock explain`, `kvdock lookup` and `kvdock events`: why a request missed, what a prompt would find, and what
happens in the server. A lookup here has no session, so it takes no lease."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec
import typer
from rich.console import Console

from kvdock.api.feeds.log import SENTENCES
from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.operator import default_address, print_json, reached
from kvdock.cli.prompts import Prompt, resolve
from kvdock.cli.render import printable, say
from kvdock.client.events import StreamedEvent, read_events
from kvdock.client.transport import Address
from kvdock.protocol.access import TOKEN_FILE_VARIABLE, read_token
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.events import KINDS, Event
from kvdock.protocol.schemas import Lookup

RETRY_S = 1.0
"""So often a server that is lost is looked for."""


def show_explanation(server: str, *, request: str, session: str, as_json: bool, console: Console) -> None:
    """`session`: whose request; empty: the latest. Raises CommandError, ApiError."""
    with reached(server) as client:
        found = client.explain(request, session=session)
    if as_json:
        print_json(console, found)
        return
    for sentence in found.sentences:
        say(console, printable(sentence))


def show_events(server: str, *, kinds: str, follow: bool, as_json: bool) -> None:
    """One line an event. Raises CommandError, ApiError, ServerUnavailable."""
    try:
        address = Address.parse(server or default_address())
    except ValueError as error:
        raise CommandError(str(error), WRONG) from error
    for told in _told(address, read_token(os.environ.get(TOKEN_FILE_VARIABLE, "")), kinds, follow=follow):
        typer.echo(msgspec.json.encode(told.event).decode() if as_json else line_of(told.event))


def _told(address: Address, token: str, kinds: str, *, follow: bool) -> Iterator[StreamedEvent]:
    """First what is kept. If it follows, then what comes. Once the server is lost it says so, on standard error, and
    goes on when that server or the next one answers."""
    last_id, is_lost = "", False
    for told in read_events(address, token, kinds=kinds):
        last_id = told.id
        yield told
    while follow:
        try:
            for told in _behind(address, token, kinds, last_id, may_be_new=is_lost):
                last_id, is_lost = told.id, False
                yield told
            why = f"{address.text}: it has ended"
        except (ServerUnavailable, ApiError) as error:
            if isinstance(error, ApiError) and error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            why = str(error)
        if not is_lost:
            typer.echo(f"kvdock: the server is lost ({printable(why)}), trying again each {RETRY_S:g} s", err=True)
        is_lost = True
        time.sleep(RETRY_S)  # also behind a stream that has ended: while a server drains, each one ends at once


def _behind(address: Address, token: str, kinds: str, last_id: str, *, may_be_new: bool) -> Iterator[StreamedEvent]:
    """What comes behind `last_id`. Without one nothing was told so far, so all that a new server keeps is news."""
    if may_be_new and not last_id:
        for told in read_events(address, token, kinds=kinds):
            last_id = told.id
            yield told
    yield from read_events(address, token, kinds=kinds, follow=True, last_id=last_id)


def line_of(event: dict[str, Any]) -> str:
    """The log's sentence, where it has one; else the event's fields."""
    when = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    return f"{when} {event['kind']:<14} {printable(_words(event))}"


def _words(event: dict[str, Any]) -> str:
    kind = KINDS.get(event["kind"])
    if kind in SENTENCES:
        made, sentence = msgspec.convert(event, kind), SENTENCES[kind]
        return sentence.template_of(made) % sentence.values(made)
    shown = {name: value for name, value in event.items() if name not in ("kind", *Event.__struct_fields__)}
    return " ".join(f"{name}={value}" for name, value in shown.items() if value not in (None, ""))


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
